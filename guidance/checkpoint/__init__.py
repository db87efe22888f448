"""Models as files: an ordinary Hugging Face folder, plus the plan and the parameters that the plan added.

    config.json, model.safetensors    the model, which every Hugging Face tool opens
    plan.toml                         the plan
    guidance.safetensors              the parameters that the plan added, if any
    target-tokenizer/                 the decoder's tokenizer, if it differs from the encoder's

What ``save_pretrained`` and Trainers write of a guided model has neither file: ``config.json`` holds the text of the plan under
`PLAN_KEY`, and the added parameters are among the weights.  `load` opens both.

If the plan matters at inference, the folder warns other tools: transformers reports the tensor `MARKER` as unexpected.
"""

from guidance.checkpoint.layout import CONFIG_FILE as CONFIG_FILE
from guidance.checkpoint.layout import EXTRA_FILE as EXTRA_FILE
from guidance.checkpoint.layout import MARKER as MARKER
from guidance.checkpoint.layout import PLAN_FILE as PLAN_FILE
from guidance.checkpoint.layout import TARGET_FOLDER as TARGET_FOLDER
from guidance.checkpoint.loading import load as load
from guidance.checkpoint.loading import load_model as load_model
from guidance.checkpoint.loading import restore as restore
from guidance.checkpoint.loading import take_over as take_over
from guidance.checkpoint.opening import config_of as config_of
from guidance.checkpoint.opening import find_plan as find_plan
from guidance.checkpoint.opening import new_model as new_model
from guidance.checkpoint.opening import read_config as read_config
from guidance.checkpoint.opening import read_progress as read_progress
from guidance.checkpoint.writing import config_file as config_file
from guidance.checkpoint.writing import model_files as model_files
from guidance.checkpoint.writing import save as save
from guidance.checkpoint.writing import tensors_of as tensors_of
from guidance.checkpoint.writing import tokenizer_files as tokenizer_files
from guidance.checkpoint.writing import weight_files as weight_files
from guidance.checkpoint.writing import weights as weights
from guidance.checkpoint.writing import write_folder as write_folder
