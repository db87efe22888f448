"""Stage ``build-sequences``: packs whole sentences of a corpus into sequences of token ids.

Each token keeps its position in the text.  Writes ``train.parquet``, ``valid.parquet`` and ``test.parquet`` (for splits
with text), one row per sequence, and the tokenizer's files under ``tokenizer/``, so that later stages need only the
sequences.  With ``--packing pairs`` a row is an example with two texts; see `pipelines.text.pair_sequences`.  With
``--packing examples`` it is an example of a task with its label; see `pipelines.text.example_sequences`.

Source: Liu et al. 2019 (RoBERTa), section 4.2, FULL-SENTENCES: sequences may cross documents, with one separator between.
"""

from __future__ import annotations

from dataclasses import replace
from pkgutil import resolve_name
from typing import Literal

from pydantic import Field

from guidance.errors import InputError, counted
from pipelines.engine import stage
from pipelines.engine.declaration import Command, Opening, Stage, Table
from pipelines.engine.stage import Run
from pipelines.inputs import Corpus, Tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store

SHORTEST, LONGEST = 8, 1 << 20
"""Tokens that the longest sequence may have."""


def check_length(max_length: int) -> None:
    """Raises InputError when sequences cannot have this length."""
    if not SHORTEST <= max_length <= LONGEST:
        raise InputError(
            f"a longest sequence of {max_length:,} tokens: expected {SHORTEST} to {LONGEST:,}",
            hint="--max-length or --sequence-length says it; by default it is that of the model",
        )


class Config(stage.Config):
    """How text becomes sequences."""

    max_length: int = Field(
        128, ge=SHORTEST, le=LONGEST, description="Longest sequence, in tokens, including special ones."
    )
    packing: Literal["full-sentences", "document", "pairs", "examples"] = Field(
        "full-sentences",
        description="full-sentences: a sequence may continue in the next document; document: it ends with its document, "
        "as `pretrain --packing documents` needs; pairs, for translation: it is the first text of an example, and the second text is "
        "its target; examples: it is an example of a dataset with its label, one or two texts.",
    )


def _prepare(opening: Opening[Config]) -> None:
    if "target_tokenizer" in opening.inputs and opening.config.packing != "pairs":
        raise InputError("--target-tokenizer needs --packing pairs", hint="add --packing pairs")
    if opening.inputs["corpus"].counts.get("shape") == "tags":
        # long examples of tagged words are divided; all others are as in version 2
        opening.stage = replace(STAGE, version=3)


def build(run: Run[Config]) -> None:
    """Pack a corpus into sequences.  Raises InputError if the tokenizer is damaged, or has no tokens to begin and end a
    sequence."""
    packing: str = run.config.packing
    if packing == "examples" and run.inputs["corpus"].counts.get("shape") in ("summaries", "segments"):
        packing = "documents"
    resolve_name(_BUILDERS[packing])(run)


_BUILDERS = {
    "full-sentences": "pipelines.text.packing:build",
    "document": "pipelines.text.packing:build",
    "pairs": "pipelines.text.pair_sequences:build",
    "examples": "pipelines.text.example_sequences:build",
    "documents": "pipelines.text.document_sequences:build",
}


def _sizes(made: Artifact, config: Config) -> Table:
    """How many sequences and tokens each split has."""
    splits = (
        f"{s} {counted(n['sequences'], 'sequence')}, {counted(n['tokens'], 'token')}"
        for s, n in made.counts["splits"].items()
    )
    each = made.counts.get("tokens_per_word")
    return Table(notes=["; ".join(splits) + (f"; {each:g} tokens to a word" if each else "")])


def _next(made: Artifact, _: Store) -> str:
    """A training of a new model.  The rate is the best of four for 8 layers of 128 units; see docs/results/trial.md."""
    return "guide pretrain {} " + (
        "--objective translation" if made.manifest["config"]["packing"] == "pairs" else "--learning-rate 1e-3"
    )


STAGE = Stage(
    "build-sequences",
    "sequences",
    2,
    Config,
    build,
    takes={
        "corpus": Corpus(),
        "tokenizer": Tokenizer(),
        "target_tokenizer": Tokenizer(
            "Tokenizer for the second text of each pair; by default the same.", optional=True, option=True
        ),
    },
    prepare=_prepare,
    command=Command(
        "build-sequences",
        "Pack the sentences of a corpus into sequences of token ids, or write pairs of texts as source and target.",
        examples=(
            "guide build-sequences wiki bpe",
            "guide build-sequences wiki@2 bpe --max-length 128 --name wiki-128",
            "guide build-sequences wiki ./bert-base --max-length 128 --name wiki-128-of-bert   # the tokenizer of a model",
            "guide build-sequences multi30k german --target-tokenizer english --packing pairs --name multi30k-pairs",
            "guide build-sequences reviews ./bert-base --packing examples",
        ),
        next=_next,
        show=_sizes,
    ),
)

run = STAGE.run
