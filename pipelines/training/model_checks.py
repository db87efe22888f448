"""Whether a model can read given sequences: their tokenizer, their length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guidance.errors import InputError, counted
from pipelines.lazy import np
from pipelines.storage.manifest import digest

OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")
"""Model types whose position numbers start after their padding id."""


def longest_input(found: Any) -> int | None:
    """The greatest number of tokens that a model with this configuration reads; None if there is no limit."""
    most = getattr(found, "max_position_embeddings", None)
    if most is not None and found.model_type in OFFSET_POSITIONS:
        most -= found.pad_token_id + 1
    return most


def check_lengths(found: Any, splits: Mapping[str, Any], reference: str) -> None:
    """Raises InputError when a sequence, or a side of a pair, is longer than the model allows; each of the ``splits`` has its
    ``lengths``."""
    most = longest_input(found)
    if most is None:
        return
    lengths = np.concatenate([split.lengths for split in splits.values()])
    if (longer := int((lengths > most).sum())) > 0:
        are = counted(longer, f"sequence of {reference} is", f"sequences of {reference} are")
        raise InputError(
            f"the model allows {most} tokens; {are} longer, the longest has {lengths.max()}",
            hint=f"guide build-sequences … --max-length {most}; of a dataset: --sequence-length {most}",
        )


def check_model(model: Any, folder: Path, tokenizer: Any) -> None:
    """Raises InputError when a model does not read the token ids of these sequences."""
    config = model.config
    if config.model_type in OFFSET_POSITIONS and config.pad_token_id != tokenizer.pad_token_id:
        raise InputError(
            f"{folder}: its padding id is {config.pad_token_id}, that of the sequences is {tokenizer.pad_token_id}"
        )
    if config.vocab_size < len(tokenizer):
        raise InputError(f"{folder}: has {config.vocab_size} tokens, the sequences use {len(tokenizer)}")
    check_same_tokenizer(folder, tokenizer)


def check_same_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Raises InputError when a model folder has a tokenizer other than that of the sequences."""
    own = folder / "tokenizer.json"
    theirs, ours = own.exists() and _vocabulary(own), json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if theirs and theirs != ours:
        raise InputError(
            f"{folder}: its tokenizer ({digest(theirs)[:12]}) is not that of the sequences ({digest(ours)[:12]})",
            hint=f"guide build-sequences CORPUS {folder}",
        )


def _vocabulary(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path}: not a regular file")
    try:
        return json.loads(path.read_bytes())["model"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise InputError(f"{path}: damaged, or no tokenizer") from error
