"""One thread: the models are tiny, and results must not depend on the machine."""

from __future__ import annotations

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
