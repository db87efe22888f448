"""File names of a model folder, and the marks of a model that needs its plan."""

from __future__ import annotations

from guidance.sites import EXTRA

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
PLAN_FILE = "plan.toml"
EXTRA_FILE = "guidance.safetensors"
TARGET_FOLDER = "target-tokenizer"
"""The folder of the decoder's tokenizer, in a model with two vocabularies."""

PLAN_KEY = "guide_plan"
"""The key of ``config.json`` that names the plan, if the model needs it at inference."""

MARKER = "open_with.guidance_load.because_this_model_needs_its_plan"
"""The name of a tensor of one zero among the weights of such a model."""

PICKLED_FILES = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
    "flax_model.msgpack",
)
"""Weights in other formats, which are never opened."""


def is_extra(name: str) -> bool:
    """True for a tensor that a plan added to a model."""
    return EXTRA in name.split(".")
