"""Models as files: an ordinary Hugging Face folder, plus the plan and the parameters that the plan added.

    config.json, model.safetensors    the model, which every Hugging Face tool opens
    plan.toml                         the plan
    guidance.safetensors              the parameters that the plan added, if any
    target-tokenizer/                 the decoder's tokenizer, if it differs from the encoder's

What ``save_pretrained`` and Trainers write of a guided model has neither file: ``config.json`` holds the text of the plan under
`PLAN_KEY`, and the added parameters are among the weights.  `load` opens both.

If the plan matters at inference, the folder warns other tools: transformers reports the tensor `MARKER` as unexpected.
"""

from guidance.checkpoint.layout import (
    CONFIG_FILE,
    EXTRA_FILE,
    INDEX_FILE,
    MARKER,
    PLAN_FILE,
    PLAN_KEY,
    PROGRESS_KEY,
    TARGET_FOLDER,
    WEIGHTS_FILE,
    is_extra,
)
from guidance.checkpoint.loading import load, load_model, restore, take_over
from guidance.checkpoint.opening import find_plan, new_model, read_config, read_plan, read_progress
from guidance.checkpoint.writing import (
    config_file,
    model_files,
    save,
    tokenizer_files,
    weight_files,
    weights,
    write_folder,
)

__all__ = [
    "CONFIG_FILE",
    "EXTRA_FILE",
    "INDEX_FILE",
    "MARKER",
    "PLAN_FILE",
    "PLAN_KEY",
    "PROGRESS_KEY",
    "TARGET_FOLDER",
    "WEIGHTS_FILE",
    "config_file",
    "find_plan",
    "is_extra",
    "load",
    "load_model",
    "model_files",
    "new_model",
    "read_config",
    "read_plan",
    "read_progress",
    "restore",
    "save",
    "take_over",
    "tokenizer_files",
    "weight_files",
    "weights",
    "write_folder",
]
