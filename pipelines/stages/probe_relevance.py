"""Stage ``probe-relevance``: how much of its attention does each head spend on each pattern?

Reads a model, sequences, and masks if they are given.  Writes probe@1: ``heads.parquet`` (one row for each head, one column for
each pattern), ``probe.json`` (for each pattern the heads that stand out) and ``heads-PATTERN.png`` for a few patterns.

Source: Li et al. 2022, equation 1 and section 3.1; `guidance.probes.relevance`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from pydantic import Field

from guidance.errors import InputError
from pipelines import task_inputs
from pipelines.engine import stage
from pipelines.engine.stage import Options, Result, Run, Stage, check_working_folder, knob, run_stage
from pipelines.storage.store import Store
from pipelines.training.plan_inputs import check_needs, features, load_inputs, model_input, read_tables

if TYPE_CHECKING:
    from guidance.sites import Site

UNIT = "mean attention of a token on the keys of the pattern, over all examples"
MOST_PICTURES = 6

_TRIVIAL = ("all", "none")
"""Patterns on which every head spends all or nothing."""


class Config(stage.Config):
    """What is read, and which patterns are measured."""

    split: Literal["train", "valid", "test"] = Field("valid", description="which split of the sequences")
    limit: int = Field(1000, ge=0, description="at most so many sequences; 0 for all")
    patterns: list[str] = Field(
        [], description="a pattern (repeatable); by default all that the sequences and the masks have the features for"
    )
    masks: str = knob("", "what `guide build-masks` made of the sequences, for patterns that read words, idf or trees")
    scores: str = knob("", "a JSON, CSV or Parquet file with scores of heads, for plans that choose heads by score")
    parser: str = knob("", "for a dataset: the parser, for plans that read syntax")
    sequence_length: int = knob(
        0, "for a dataset: longest sequence, in tokens; by default as in training, or 128", ge=0
    )
    batch_size: int = knob(8, "sequences per batch", ge=1)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "where to compute; auto takes a GPU if there is one")


def run(model: str, data: str, config: Config, *, store: Store, **options: Unpack[Options]) -> Result:
    """Probe a model.

    Args:
        model: a reference, or a model folder.
        data: reference of sequences that were made with its tokenizer, or of a dataset.

    Raises:
        InputError: there is no such pattern; or it needs a feature that is not there; or the split is empty.
    """
    from guidance.patterns.catalogue import find_pattern
    from pipelines.training.learner import folder_of

    check_working_folder()
    for name in config.patterns:
        find_pattern(name)
    with contextlib.ExitStack() as stack:
        inputs: dict[str, Any] = {"model": model_input(model, store)}
        given = stack.enter_context(store.load(data))
        if given.kind == "corpus" and task_inputs.is_dataset(given):
            folder, progress = folder_of(inputs["model"]), options.get("progress")
            sequences, config = task_inputs.read_by(model, folder, given, config, store, progress)
        else:
            sequences = store.load(data, kind="sequences")
        inputs["sequences"] = stack.enter_context(sequences)
        inputs |= load_inputs(config, [sequences], store)
        task_inputs.check_split(sequences, config.split)
        return run_stage(STAGE, config, inputs, store=store, **options)


def build(run: Run) -> None:
    """The stage itself; see `run`."""
    import numpy as np
    import torch

    import guidance
    from guidance.checkpoint import find_plan
    from guidance.plan import Plan
    from guidance.probes.relevance import Relevance, keys_of, mass, outstanding
    from guidance.statistics.roles import COLUMNS
    from pipelines.probing.heads import best, heads_picture, name_of, write_heads
    from pipelines.training.batches import Examples, pad
    from pipelines.training.learner import folder_of
    from pipelines.training.models import check_lengths, check_model, read_tokenizer
    from pipelines.training.opening import Unguided, open_trained

    config, data, masks = run.config, run.inputs["sequences"], run.inputs.get("masks")
    folder = folder_of(run.inputs["model"])
    plan = find_plan(folder) or Plan()
    check_needs(plan, str(folder), run.inputs, training=False)
    known = tuple(masks.counts["columns"]) if masks else ("segment",)
    names, left_out = _measured(config.patterns, known)
    model, handle = open_trained(folder, read_tables(run.inputs), config.device)
    if isinstance(handle, Unguided):
        handle = guidance.install(model, Plan())
    tokenizer = read_tokenizer(data, masked=False)
    check_model(model, Path(folder), tokenizer)
    needed = tuple(dict.fromkeys((*features(plan, training=False), *known)))
    rows = Examples.read(data, config.split, len(tokenizer), features=needed, masks=masks)
    check_lengths(model.config, {config.split: rows}, data.reference)
    number = min(len(rows), config.limit or len(rows))
    relevance, device = Relevance(), next(model.parameters()).device
    with run.progress.task("probe", total=number, unit="sequences") as bar:
        for start in range(0, number, config.batch_size):
            chosen = range(start, min(start + config.batch_size, number))
            ids, length = [rows[n] for n in chosen], max(len(rows[n]) for n in chosen)
            ids_BT = pad(ids, tokenizer.pad_token_id, length, device)
            valid_BT = pad([np.ones(len(row), np.int64) for row in ids], 0, length, device)
            columns = {f: pad([rows.column(f, n) for n in chosen], COLUMNS[f].fill, length, device) for f in needed}
            own: dict[str, Any] = {"tokenizer": tokenizer, **columns}
            wanted = {name: keys_of(name, ids_BT, valid_BT, **own) for name in names}

            def watch(
                site: Site,
                attention_BHTT: torch.Tensor,
                wanted: Mapping[str, torch.Tensor] = wanted,
                valid_BT: torch.Tensor = valid_BT,
            ) -> None:
                for name, pattern_BTT in wanted.items():
                    relevance.add(name, site, mass(attention_BHTT, pattern_BTT, valid_BT.bool()))

            handle.watch(watch, ids_BT, valid_BT, **{f: columns[f] for f in features(plan, training=False)})
            bar.advance(len(ids))
    figures = {name: relevance.of(name) for name in names}
    table = write_heads(run, figures, dict.fromkeys(names, UNIT))
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        values = torch.tensor([row[name] for row in table])
        stands_out = [row for row, out in zip(table, outstanding(values).tolist(), strict=True) if out]
        found[name] = {
            "best": best(table, name),
            "mean": float(values.double().mean()),
            "deviation": float(values.double().std(correction=0)),
            "outstanding": [name_of(row) for row in stands_out],
        }
    summary = {"patterns": found, "left_out": left_out}
    counts = {"sequences": number, "heads": len(table)}
    run.out.write_json("probe.json", {"schema": 1, "probe": "relevance", "counts": counts, **summary})
    drawn = sorted(names, key=lambda name: (-len(found[name]["outstanding"]), -float(found[name]["best"][name])))
    for name in drawn[:MOST_PICTURES]:
        title = f"Attention on {name} (%)\n{number:,} sequences"
        run.out.write(f"heads-{name}.png", heads_picture(table, name, title=title, label="share of attention"))
    run.out.counts |= {"probe": "relevance", **counts, **summary}


def _measured(asked: Sequence[str], known: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The patterns to measure, and why others are left out.

    Args:
        known: the features that there are, besides those of the vocabulary.

    Raises:
        InputError: a pattern that was asked for cannot be measured.
    """
    from guidance.patterns.catalogue import PATTERNS
    from guidance.patterns.features import Vocabulary

    found, left_out = [], {}
    for name in asked or [name for name in PATTERNS if name not in _TRIVIAL]:
        pattern = PATTERNS[name]
        missing = [need for need in pattern.needs if need not in (*known, *Vocabulary.FEATURES)]
        if pattern.tables:
            left_out[name] = f"it needs the table {pattern.tables[0]}"
        elif missing:
            left_out[name] = f"it needs the feature {missing[0]}"
        else:
            found.append(name)
    if asked and left_out:
        name, reason = next(iter(left_out.items()))
        raise InputError(
            f"the pattern {name} cannot be measured: {reason}", hint="guide build-masks SEQUENCES; give it with --masks"
        )
    return found, left_out


STAGE = Stage("probe-relevance", "probe", 1, Config, build)
