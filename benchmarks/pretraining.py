"""The papers' comparisons of pre-training, small enough for two cores: one command a table.

    python -m benchmarks.pretraining TABLE [--seeds 1] [--steps N] [--store artifacts] [--out docs/results]

A run whose figures are in the table's JSON is not made again, and one that was stopped goes on, so that a table may be made
in several sittings.  Losses are those of the task alone, in nats, the last one a mean over 50 steps.  *Equal loss* is the
first step, and the time of training, at which a run is down at the last loss of the first row with the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guidance.plan import Guide, Plan
from pipelines import cooccurrence, corpus, dataset, evaluate, pretrain, sequences, tokenizer
from pipelines.comparison import Summary, paired_t_test
from pipelines.curves import Curve
from pipelines.manifest import digest
from pipelines.store import Store

WINDOW = 50
POINTS = 60
"""How many points of a curve are kept."""

SHARED = Path(os.environ.get("GUIDE_SHARED", Path(__file__).resolve().parents[2] / "shared"))

Prepare = Callable[[Store], tuple[str, dict[str, Any]]]
"""Makes the sequences of a table; gives their reference and the settings that come with them."""


@dataclass(frozen=True)
class Setting:
    """One row of a table: in what its runs differ from the others."""

    label: str
    plan: Plan | str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """What is compared; the first row is the one the others are held against."""

    title: str
    prepare: Prepare
    common: Mapping[str, Any]
    rows: Sequence[Setting]
    translates: bool = False


# plans


def ag(*patterns: str, stacks: Sequence[str] = ("encoder",)) -> Plan:
    """Attention guidance of one head for each pattern: the paper's weight of 100 at 512 tokens, linear to zero."""
    return Plan(
        tuple(
            Guide(
                pattern,
                "attention_loss",
                heads=(head,),
                stack=stack,
                weight=100.0,
                reference_length=512,
                schedule="linear",
                name=f"{stack} {pattern}",
            )
            for stack in stacks
            for head, pattern in enumerate(patterns)
        )
    )


def conflicts(**options: Any) -> Plan:
    """McMisP on the discriminator: two heads of the last three layers."""
    guide = Guide("conflict", "logit_loss", layers=("last 3",), heads=("first 2",), options=options)
    return Plan((guide,))


# data


def packed(store: Store, *parts: str, length: int = 64) -> tuple[str, str, str]:
    """Text, a byte-level BPE of 4,000 and packed sequences."""
    text = corpus.run([str(SHARED / "data" / part) for part in parts], corpus.Config(), store=store).reference
    bpe = tokenizer.run(text, tokenizer.Config(vocab_size=4000), store=store).reference
    return text, bpe, sequences.run(text, bpe, sequences.Config(max_length=length), store=store).reference


def books(store: Store) -> tuple[str, dict[str, Any]]:
    """26 English novels."""
    return packed(store, "lm-litbank-books/books")[2], {}


def counted_books(store: Store) -> tuple[str, dict[str, Any]]:
    """The same, and which of their tokens stand together in a sentence."""
    text, bpe, reference = packed(store, "lm-litbank-books/books")
    counts = cooccurrence.run(text, bpe, cooccurrence.Config(), store=store)
    assert counts is not None
    return reference, {"cooccur": counts.artifact.reference}


def swahili(store: Store) -> tuple[str, dict[str, Any]]:
    """News in Swahili."""
    return packed(store, "lm-masakhane-text/swahili_voa.txt.gz")[2], {}


def captions(store: Store) -> tuple[str, dict[str, Any]]:
    """Pairs of German and English captions, with one vocabulary of 8,000."""
    folder = SHARED / "data/mt-multi30k"
    names = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    sides = [{split: [str(folder / f"{name}.{side}.gz")] for split, name in names.items()} for side in ("de", "en")]
    pairs = dataset.run(sides[0], dataset.Config(sentences="line"), pairs=sides[1], store=store).reference
    bpe = tokenizer.run(pairs, tokenizer.Config(vocab_size=8000), store=store).reference
    config = sequences.Config(max_length=70, packing="pairs")
    return sequences.run(pairs, bpe, config, store=store).reference, {}


# tables

SMALL = {
    "layers": 8,
    "hidden": 128,
    "heads": 4,
    "ffn": 512,
    "attention_dropout": 0.0,
    "steps": 900,
    "batch_size": 32,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "evaluate_every": 300,
    "save_every": 100,
}
PAIRS = {
    "layers": 2,
    "hidden": 256,
    "heads": 8,
    "ffn": 512,
    "steps": 900,
    "batch_tokens": 4096,
    "learning_rate": 1e-3,
    "schedule": "inverse-sqrt",
    "warmup_steps": 300,
    "beta2": 0.98,
    "evaluate_every": 300,
    "save_every": 100,
}
RATES = (1e-3, 3e-4, 3e-3)


def grid(dropouts: Sequence[float]) -> list[Setting]:
    """Plain runs over rates and warm-up, then guided ones over the same."""
    return [
        Setting(
            f"{name}, rate {rate:g}, warm-up {warmup}, dropout {dropout:g}",
            plan,
            {"learning_rate": rate, "warmup_steps": warmup, "dropout": dropout},
        )
        for name, plan in (("plain", None), ("guided", ag("next", "previous")))
        for dropout in dropouts
        for rate in RATES
        for warmup in (0, 100)
    ]


TABLES = {
    "fair": Table("Guidance against tuned plain training (paper A, figure 3)", books, SMALL, grid((0.1,))),
    "robust": Table("Spread over rates, warm-up and dropout (paper A, section 6)", books, SMALL, grid((0.1, 0.0))),
    "deep": Table(
        "16 layers (paper A, table 3)",
        books,
        {**SMALL, "layers": 16},
        [Setting("plain"), Setting("guided", ag("next", "previous"))],
    ),
    "electra": Table(
        "ELECTRA with a unigram generator (paper A, table 6)",
        books,
        {**SMALL, "objective": "electra", "generator": "unigram"},
        [Setting("plain"), Setting("guided", ag("next", "previous"))],
    ),
    "mcmisp": Table(
        "Conflicts with mis-predictions in ELECTRA (paper C, tables 2 and 5)",
        counted_books,
        {**SMALL, "objective": "electra", "generator": "transformer", "generator_size": 0.5},
        [
            Setting("ELECTRA"),
            Setting("McMisP", conflicts()),
            Setting("Ground", conflicts(truth=True)),
            Setting("Constant", conflicts(constant=0.9)),
        ],
    ),
    "translation": Table(
        "Translation of captions, German to English (paper A, table 7)",
        captions,
        {**PAIRS, "objective": "translation"},
        [
            Setting("plain"),
            Setting("guided encoder", ag("next", "previous")),
            Setting("guided both", ag("previous", "first", stacks=("encoder", "decoder"))),
            Setting("Gaussian", "preset:gaussian"),
        ],
        translates=True,
    ),
    "low-resource": Table(
        "Swahili (paper A, tables 2 and 3)",
        swahili,
        SMALL,
        [Setting("plain"), Setting("guided", ag("next", "previous"))],
    ),
}


# runs


def train(table: Table, setting: Setting, seed: int, steps: int | None, store: Store) -> dict[str, Any]:
    """The figures of one run."""
    reference, more = table.prepare(store)
    changes = {**table.common, **more, **setting.changes, "seed": seed} | ({"steps": steps} if steps else {})
    if setting.plan is None:
        changes.pop("cooccur", None)
    elif isinstance(setting.plan, str):
        changes["plan"] = setting.plan
    else:
        path = store.root / "plans" / f"{digest(setting.plan.dumps())[:16]}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(setting.plan.dumps(), encoding="utf-8")
        changes["plan"] = str(path)
    result = pretrain.run(reference, pretrain.Config(**changes), store=store)
    assert result is not None
    curve = Curve.of(result.artifact, setting.label)
    shown = np.unique(np.linspace(0, len(curve.losses) - 1, POINTS).astype(int))
    figures = {
        "label": setting.label,
        "seed": seed,
        "steps": len(curve.losses),
        "loss": float(curve.smoothed(WINDOW)[-1]),
        "average": float(np.mean(curve.losses)),
        "valid": curve.valid[-1][1] if curve.valid else None,
        "seconds": float(curve.elapsed()[-1]),
        "curve": [[int(step) + 1, float(curve.smoothed(WINDOW)[step])] for step in shown],
        "final": result.artifact.counts["final"],
    }
    if table.translates:
        scores = evaluate.run(result.artifact.reference, reference, evaluate.Config(), store=store).artifact
        figures["scores"] = json.loads(scores.read("metrics.json"))
    return figures


def add_equal_loss(row: dict[str, Any], base: Mapping[str, Any]) -> None:
    """Steps and seconds to the last loss of the first row, between the points that are kept of the curve."""
    reached = next((step for step, loss in row["curve"] if step >= WINDOW and loss <= base["loss"]), None)
    row["equal_step"] = reached
    row["equal_seconds"] = None if reached is None else row["seconds"] * reached / row["steps"]


def as_markdown(table: Table, rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, one line a setting: mean, deviation, and the paired test against the first one."""
    lines = ["| run | n | loss | average | validation | p | steps to equal loss | seconds to equal loss | seconds |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    by_label = {setting.label: [row for row in rows if row["label"] == setting.label] for setting in table.rows}
    first = {row["seed"]: row for row in next(iter(by_label.values()))}
    for label, mine in by_label.items():
        if not mine:
            continue
        pairs = Summary.of(row["loss"] - first[row["seed"]]["loss"] for row in mine if row["seed"] in first)
        p = paired_t_test(pairs)
        cells = [_cell([row[name] for row in mine], "{:.3f}") for name in ("loss", "average", "valid")]
        reached = [_cell([row[name] for row in mine], "{:.0f}") for name in ("equal_step", "equal_seconds", "seconds")]
        lines.append(
            f"| {label} | {len(mine)} | {' | '.join(cells)} | {'–' if p is None else f'{p:.3f}'} | {' | '.join(reached)} |"
        )
    return "\n".join(lines)


def _cell(values: Sequence[float | None], form: str) -> str:
    found = Summary.of(values)
    if found.mean is None:
        return f"{found.known} of {len(values)}" if found.known else "never"
    return form.format(found.mean) + (f" ± {form.format(found.sd)}" if found.sd is not None else "")


def draw(table: Table, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The curves of the first seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    seed = min(row["seed"] for row in rows)
    for number, row in enumerate(row for row in rows if row["seed"] == seed):
        style = ("-", "--", ":", "-.")[number % 4]
        axes.plot(*zip(*row["curve"][1:], strict=True), style, linewidth=1.6, label=row["label"])
    axes.set(xlabel="optimizer steps", ylabel=f"training loss, mean of {WINDOW} steps (nats)", title=table.title)
    axes.legend(fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="instead of the table's own")
    parser.add_argument("--store", type=Path, default=Path("artifacts"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    table, path = TABLES[arguments.table], arguments.out / f"{arguments.table}.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    rows = known["rows"]
    for seed in range(arguments.seeds):
        for setting in table.rows:
            if any((row["label"], row["seed"]) == (setting.label, seed) for row in rows):
                continue
            row = train(table, setting, seed, arguments.steps, Store(arguments.store))
            rows.append(row)
            base = next(r for r in rows if r["label"] == table.rows[0].label and r["seed"] == seed)
            add_equal_loss(row, base)
            print(f"{row['label']:45s} seed {seed}: loss {row['loss']:.3f}, {row['seconds']:.0f} s", flush=True)
            about = {"title": table.title, "torch": torch.__version__, "threads": torch.get_num_threads()}
            about |= {"machine": platform.machine(), "common": dict(table.common)}
            path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    draw(table, rows, path.with_suffix(".png"))
    print(as_markdown(table, rows))


if __name__ == "__main__":
    main()
