"""Word vectors for new models: from a file in the format of GloVe or word2vec, or from another model."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from guidance.checkpoint import load_model
from guidance.errors import InputError
from pipelines.progress import log
from pipelines.text.readers import is_gzip
from pipelines.training.model_checks import check_same_tokenizer, longest_input


def vector_width(path: Path) -> int:
    """How many numbers each word has.

    Raises:
        InputError: the file cannot be read, or has no vectors.
    """
    for _, _, numbers in _lines(path):
        return len(numbers)
    raise InputError(f"{path}: no word vectors")


def fill_vectors(model: Any, path: Path, vocabulary: Mapping[str, int]) -> None:
    """Copy the vectors of a file into the word embeddings of a model.

    Words of the vocabulary that the file lacks are drawn uniformly from [0, 1), as in the published code of Wang et al.
    2020; padding stays 0.

    Args:
        vocabulary: ids by word.

    Raises:
        InputError: a line is no vector or has another width, or the file has no word of the vocabulary.
    """
    weight: torch.Tensor = model.get_input_embeddings().weight
    width, vectors = weight.shape[1], dict[int, torch.Tensor]()
    for number, word, numbers in _lines(path):
        if len(numbers) != width:
            raise InputError(
                f"{path}, line {number}: {len(numbers)} numbers, and the model is {width} wide",
                hint=f"--hidden {len(numbers)}",
            )
        token = vocabulary.get(word)
        if token is None or token in vectors:
            continue
        try:
            vector = torch.tensor([float(value) for value in numbers])
        except ValueError as error:
            raise InputError(f"{path}, line {number}: not a vector ({error})") from error
        if not all(map(math.isfinite, vector.tolist())):
            raise InputError(f"{path}, line {number}: a number is not finite")
        vectors[token] = vector
    if not vectors:
        raise InputError(f"{path}: has no word of the vocabulary", hint="are the words in the same case?")
    padding = model.config.pad_token_id
    with torch.no_grad():
        weight.uniform_(0, 1)
        for token, vector in vectors.items():
            weight[token] = vector
        if padding is not None:
            weight[padding] = 0
    log.info("%s: vectors of %s of %s words", path.name, f"{len(vectors):,}", f"{len(vocabulary):,}")


def extend_positions(model: Any, length: int) -> None:
    """Make room for sequences of ``length`` tokens: further positions begin as copies of the last one.

    Rotary positions have no table; there the limit alone is raised.

    Raises:
        InputError: the model has no table of positions that could grow.

    Source: the published code of Liu & Lapata 2019, which Li et al. 2022 use, for 800 tokens.
    """
    most = longest_input(model.config)
    if most is None or most >= length:
        return
    if model.config.model_type in _ROTARY:
        model.config.max_position_embeddings = length
        return
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if model.config.model_type not in _WITH_POSITIONS or not isinstance(table, torch.nn.Embedding):
        raise InputError(
            f"a {model.config.model_type} model has {most} positions, which cannot be extended",
            hint=f"--max-length {most}",
        )
    old = table.weight.data
    weight = torch.cat([old, old[-1:].expand(length - most, -1)])
    embeddings = model.base_model.embeddings
    embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(
        weight, freeze=False, padding_idx=table.padding_idx
    )
    model.config.max_position_embeddings = len(weight)
    places = torch.arange(len(weight), device=weight.device)[None]
    for name, values in (("position_ids", places), ("token_type_ids", torch.zeros_like(places))):
        if name in dict(embeddings.named_buffers()):
            persistent = name not in embeddings._non_persistent_buffers_set
            embeddings.register_buffer(name, values, persistent=persistent)


_ROTARY = ("modernbert",)
"""Families whose positions are angles."""

_WITH_POSITIONS = ("bert", "electra", "roberta", "xlm-roberta", "camembert")
"""Families whose positions are rows of one table."""


def copy_embeddings(model: Any, folder: Path, tokenizer: Any) -> None:
    """Copy the word embeddings of another model (paper E: those of BERT in a new model).

    Raises:
        InputError: it has another tokenizer or width.
    """
    from transformers import AutoModel

    check_same_tokenizer(folder, tokenizer)
    other: Any = load_model(folder, AutoModel)
    theirs, ours = (each.get_input_embeddings().weight for each in (other, model))
    if theirs.shape[1] != ours.shape[1]:
        raise InputError(
            f"{folder}: its word embeddings are {theirs.shape[1]} wide, those of the new model {ours.shape[1]}",
            hint=f"--hidden {theirs.shape[1]}",
        )
    rows = min(len(theirs), len(ours))
    with torch.no_grad():
        ours[:rows] = theirs[:rows]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _lines(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Line numbers, words and the numbers behind them; the header of word2vec's format is left out.

    Raises:
        InputError: the file cannot be read as text.
    """
    opened, width = gzip.open if is_gzip(path.name) else open, 0
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                word, _, rest = line.rstrip().partition(" ")
                numbers = rest.split()
                is_header = number == 1 and len(numbers) == 1 and word.isdecimal()
                if is_header or not line.strip():
                    continue
                if not numbers:
                    raise InputError(f"{path}, line {number}: a word without numbers")
                width = width or len(numbers)
                if len(numbers) > width and not _is_number(numbers[-width - 1]):  # words with spaces, as in GloVe 840B
                    word, *numbers = line.rstrip().rsplit(maxsplit=width)
                yield number, word, numbers
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as word vectors ({error})") from error
