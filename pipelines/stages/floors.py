"""Stage ``floors``: how well n-grams predict tokens of sequences, which a trained model must beat.

Reads sequences@1.  Writes floors@1: ``floors.json``.  No command runs it alone: `guide evaluate` does, once for all models
that are measured on the same tokens.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.declaration import Stage
from pipelines.engine.stage import Run
from pipelines.inputs import Sequences

OWN_NGRAMS = (
    "the training text itself is measured, and its own n-grams would predict it too well, so there are no floors; sequences with a "
    "validation split have them"
)
"""Why there are no floors on the training split."""


class Config(stage.Config):
    """Which tokens are predicted."""

    split: Literal["train", "valid", "test"] = Field("valid", description="Split of the sequences.")
    layout: Literal["sequences", "pairs", "causal"] = Field(
        "sequences",
        description="Masked tokens of sequences as they are, or of the pairs of texts of next-sentence prediction; or every token "
        "after the first one of its document, from those before it.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the masking.")
    mask_probability: float = Field(0.15, gt=0, lt=1, description="Share of tokens that are masked and predicted.")
    limit: int = Field(0, ge=0, description="Maximum number of sequences; 0 for all.")


def build(run: Run[Config]) -> None:
    """Compute the floors of some sequences.  Raises InputError if there is no training text to count, or no masked token to
    predict."""
    from guidance.objectives.causal_lm import documents_of, words_of
    from pipelines.statistics.floors import Counted, floors_of, masked_rows, predicted
    from pipelines.training.batches import Examples
    from pipelines.training.models import masker_of, read_tokenizer

    data, config = run.inputs["sequences"], run.config
    is_causal = config.layout == "causal"
    tokenizer = read_tokenizer(data, masked=not is_causal, padded=not is_causal)
    size = len(tokenizer)
    train = Examples.read(data, "train", size)
    with run.progress.task("floors"):
        if is_causal:
            words, separator = words_of(tokenizer), tokenizer.sep_token_id
            rows = Examples.read(data, config.split, size)
            number = min(len(rows), config.limit or len(rows))
            read = (document for i in range(number) for document in documents_of(rows[i], separator, words))
            floors = Counted.before(train, words, separator, size).floors_of(predicted(read, size))
        else:
            masker = masker_of(tokenizer, config.mask_probability)
            floors = floors_of(train, masked_rows(data, tokenizer, masker, config), masker, seed=config.seed)
    if floors is None:
        raise InputError(f"{data.reference}: no training text to count, or no token in {config.split!r} to predict")
    run.out.write_json("floors.json", {"schema": 1, **vars(floors)})
    run.out.counts |= vars(floors)


STAGE = Stage("floors", "floors", 2, Config, build, takes={"sequences": Sequences()})

run = STAGE.run
