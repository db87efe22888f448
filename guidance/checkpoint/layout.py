"""File names of a model folder, and the marks of a model that needs its plan."""

from __future__ import annotations

from guidance.guided_model import PLAN_KEY as PLAN_KEY
from guidance.guided_model import PROGRESS_KEY as PROGRESS_KEY
from guidance.models.methods import MARKER as MARKER

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
PLAN_FILE = "plan.toml"
EXTRA_FILE = "guidance.safetensors"
TARGET_FOLDER = "target-tokenizer"
"""The folder of the decoder's tokenizer, in a model with two vocabularies."""

ADAPTER_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""What PEFT writes: weights that are added to those of another model."""

PROGRESS_FILE = "guide_progress.json"
"""Beside an adapter, which has no configuration of the model, what ``PROGRESS_KEY`` is there."""

PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")
"""Weights in other formats, which are never opened."""
