"""Stage ``probe-induction``: which heads look at what followed the first occurrence of a token?

Reads a model.  Writes probe@1: ``heads.parquet`` (one row for each head), ``probe.json`` and ``heads.png``.

Source: Olsson et al. 2022; `guidance.probes.induction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.declaration import Table
from pipelines.engine.stage import Device, Run, knob
from pipelines.inputs import Model
from pipelines.probing.heads import (
    SHOWN_HEADS,
    TABLE,
    best,
    head_columns,
    head_name,
    heads_of,
    share,
    shares,
    write_heads,
)
from pipelines.probing.probe import Findings, probe, random_weights
from pipelines.storage.artifacts import Artifact
from pipelines.training.learner import folder_of

if TYPE_CHECKING:
    from torch import Tensor

    from guidance.sites import Site
    from pipelines.probing.watched import WatchedModel

UNITS: Mapping[str, str] = {
    "induction": "mean attention of a token of the second copy on the token after its first occurrence",
    "duplicate": "mean attention of a token of the second copy on its first occurrence",
    "previous": "mean attention of a token of the second copy on the token before it",
}


class Config(stage.Config):
    """Which random tokens are read."""

    sequences: int = Field(100, ge=1, description="Number of sequences.")
    length: int = Field(50, ge=3, description="Tokens of a sequence before it is repeated.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the tokens.")
    random: int | None = random_weights()
    batch_size: int = knob(8, "Sequences per batch.", ge=1)
    device: Device = "auto"


def measure(run: Run[Config]) -> Findings:
    """The scores of every head in the second copy.

    Raises:
        InputError: the sequences are longer than the model reads, a copy has more tokens than the model knows, or its plan reads
            words.
    """
    import torch

    from guidance.probes.induction import induction_scores
    from guidance.probes.relevance import even_attention
    from pipelines.probing.sequences import Means
    from pipelines.probing.watched import WatchedModel

    config, folder = run.config, folder_of(run.inputs["model"])
    model = WatchedModel.of(run, length=2 * config.length)
    if model.needed and config.random is None:
        raise InputError(
            f"{folder}: its plan reads the feature {model.needed[0]}, and random tokens are no words",
            hint="--random 0 probes its shape without the plan",
        )
    ids_BT, start = _sequences(model, config)
    means = Means()
    with run.progress.task("probe", total=config.sequences, unit="sequences") as bar:
        for some_BT in ids_BT.to(model.model.device).split(config.batch_size):
            figures: dict[Site, Tensor] = {}

            def watch(site: Site, attention_BHTT: Tensor, figures: dict[Site, Tensor] = figures) -> None:
                figures[site] = induction_scores(attention_BHTT, start, config.length)

            model.handle.watch(watch, input_ids=some_BT, attention_mask=torch.ones_like(some_BT))
            means.add(figures)
            bar.advance(len(some_BT))
    table = write_heads(
        run,
        {name: means.column(number) for number, name in enumerate(UNITS)},
        UNITS,
        "induction",
        title=f"Attention on what followed the first occurrence\n{config.sequences:,} sequences of random tokens",
        label="% of attention",
    )
    even = even_attention(torch.ones_like(ids_BT[:1], dtype=torch.bool), is_causal=model.is_causal)
    by_chance = induction_scores(even, start, config.length)[0, 0].tolist()
    summary = {
        "best": {name: best(table, name) for name in UNITS},
        "mean": {name: sum(row[name] for row in table) / len(table) for name in UNITS},
        "by_chance": dict(zip(UNITS, by_chance, strict=True)),
    }
    return Findings({"sequences": config.sequences, "heads": len(table)}, summary)


def _sequences(model: WatchedModel, config: Config) -> tuple[Tensor, int]:
    """The sequences with the special tokens of the model around them, (B, T), and the place where their tokens begin."""
    import torch

    from guidance.probes.induction import repeated_tokens

    begin, end = [] if model.special["cls"] is None else [model.special["cls"]], list[int]()
    if not model.is_causal:
        encoding = model.tokenizer.encode("a")
        places = [place for place, part in enumerate(encoding.sequence_ids) if part is not None]
        first, last = (places[0], places[-1] + 1) if places else (len(begin), len(begin))  # no such letter
        begin, end = encoding.ids[:first], encoding.ids[last:]
    around = len(begin) + len(end)
    if model.longest is not None and 2 * config.length + around > model.longest:
        raise InputError(
            f"{config.length:,} tokens and their copy are {2 * config.length + around:,} tokens with special ones; the model reads "
            f"{model.longest:,}",
            hint=f"--length {(model.longest - around) // 2}",
        )
    ids_BT = repeated_tokens(_ordinary(model), config.sequences, config.length, config.seed)
    before_BT, after_BT = (torch.tensor(ids, dtype=torch.long).expand(len(ids_BT), -1) for ids in (begin, end))
    return torch.cat([before_BT, ids_BT, after_BT], dim=1), len(begin)


def _ordinary(model: WatchedModel) -> Tensor:
    """The ids of all tokens that are not special, (N,), in their order."""
    import torch

    size = model.model.get_input_embeddings().weight.shape[0]
    special = {id_ for id_, token in model.tokenizer.get_added_tokens_decoder().items() if token.special}
    known = {*model.tokenizer.get_vocab().values()} - special - {*model.special.values()}
    return torch.tensor(sorted(id_ for id_ in known if id_ < size), dtype=torch.long)


def _table(artifact: Artifact, config: Config) -> Table:
    counts = artifact.counts
    ranked = sorted(heads_of(artifact), key=lambda row: -row["induction"])
    rows = [(head_name(row), *shares(row, tuple(UNITS))) for row in ranked[:SHOWN_HEADS]]
    rows += [
        (title, *shares(counts[name], tuple(UNITS))) for title, name in (("mean", "mean"), ("by chance", "by_chance"))
    ]
    highest = (f"{name} {share(row[name])} (head {head_name(row)})" for name, row in counts["best"].items())
    notes = ["the highest scores: " + ", ".join(highest)]
    if len(ranked) > SHOWN_HEADS:
        notes.append(f"the first {SHOWN_HEADS} of {len(ranked):,} heads by induction; {TABLE} has all")
    return Table(("head", *UNITS), rows, notes)


STAGE = probe(
    "induction",
    1,
    Config,
    measure,
    takes={"model": Model()},
    table=_table,
    writes={"heads.parquet of induction": head_columns(UNITS)},
    help="""Measure how much each head looks at what followed the first occurrence of a token (induction heads).

    The model reads random tokens that are repeated once.  The scores are the mean attention of a token of the second copy: to the
    token after its first occurrence (induction), to its first occurrence (duplicate), and to the token before it (previous).  In a
    causal model a high induction score is the mark of a head that predicts by copying.  An encoder also sees what follows the
    token itself, so there the score says where the head looks, and nothing about predictions.
    """,
    examples=(
        "guide probe induction ./my-llama",
        "guide probe induction guided --length 25 --sequences 200",
        "guide probe induction guided --random 0   # the same shape with random weights",
    ),
)

run = STAGE.run
