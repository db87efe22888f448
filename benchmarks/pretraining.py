"""The pre-training comparisons of the papers, small enough for two cores; one command per table.

    python -m benchmarks.pretraining TABLE [--seeds 1] [--only TEXT] [--steps N] [--store artifacts] [--out docs/results]

The texts come from public repositories and are expected in ``GUIDE_SHARED``/data (by default ../shared/data):
``lm-litbank-books`` (LitBank's ``original/*.txt``), ``cls-masakhanews`` (MasakhaNEWS, Oromo), ``lm-masakhane-text``
(VOA, Swahili) and ``mt-multi30k``.

Runs whose figures are in the JSON of the table are not repeated, and interrupted ones are continued, so a table may be
made in several sessions.  Losses are those of the task alone, in nats; the final loss is a mean over 50 steps.  The
baseline is the best setting without a plan; every other run is compared with its run of the same seed.  *Steps to* says when
each run, the baseline too, first had the losses that the baseline has after a half and all of its steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from benchmarks.finetuning.data import published
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.stages import cooccurrence, corpus, dataset, evaluate, floors, pretrain, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.views.comparison_tables import FLOORS, p_value
from pipelines.views.curves import Curve
from pipelines.views.figures import Summary, paired_t_test
from pipelines.views.learning_curves import draw_floors

WINDOW = 50
POINTS = 60
"""Number of points to keep of each curve."""

SHARED = Path(os.environ.get("GUIDE_SHARED", Path(__file__).resolve().parents[2] / "shared"))

Prepare = Callable[[Store], tuple[str, dict[str, Any]]]
"""Builds the sequences of a table; returns their reference and the settings that they require."""


@dataclass(frozen=True)
class Setting:
    """One row of a table: the plan and the settings in which its runs differ from the others."""

    label: str
    plan: Plan | str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    """The spread within each group of settings is reported."""
    follows: str = ""
    """For a scheduled mask: the label of the run from which it takes the fractions of masked units."""


@dataclass(frozen=True)
class Table:
    """A comparison; the best setting without a plan is the baseline."""

    title: str
    prepare: Prepare
    common: Mapping[str, Any]
    rows: Sequence[Setting]
    translates: bool = False
    measures_start: bool = True
    """Whether the model that runs start from predicts masked words, so that its losses are measured too."""


# plans


def ag(*patterns: str, decoder: Sequence[str] = ()) -> Plan:
    """Attention guidance, one head per pattern.

    The weight is that of the paper, 100 (10 for 12 or more layers) at 512 tokens, and falls linearly to zero.
    """
    return Plan(
        tuple(
            Guide(
                pattern,
                "attention_loss",
                heads=(head,),
                stack=stack,
                weight=((1, 100.0), (12, 10.0)),
                reference_length=512,
                schedule="linear",
                name=f"{stack} {pattern}",
            )
            for stack, names in (("encoder", patterns), ("decoder", decoder))
            for head, pattern in enumerate(names)
        )
    )


def conflicts(**options: Any) -> Plan:
    """McMisP for two heads of the last three layers."""
    guide = Guide("conflict", "logit_loss", layers=("last 3",), heads=("first 2",), options=options)
    return Plan((guide,))


def random_masks(**options: Any) -> Plan:
    """Random masks, in a second pass."""
    return Plan((Guide(mechanism="random_mask", options=options),))


def untrained() -> Plan:
    """The adversary of the preset as it was drawn: masks with structure and without knowledge."""
    preset = Plan.load("preset:asa-pretraining")
    return Plan(tuple(replace(guide, options={**guide.options, "train": False}) for guide in preset.guides))


# data


def packed(store: Store, part: str, length: int = 64, **reading: Any) -> tuple[str, str, str]:
    """References of a corpus, a byte-level BPE of 4,000 tokens, and packed sequences."""
    text = corpus.run([str(SHARED / "data" / part)], corpus.Config(**reading), store=store).reference
    bpe = tokenizer.run(text, tokenizer.Config(vocab_size=4000), store=store).reference
    return text, bpe, sequences.run(text, bpe, sequences.Config(max_length=length), store=store).reference


def books(store: Store) -> tuple[str, dict[str, Any]]:
    """26 English novels."""
    return packed(store, "lm-litbank-books/books")[2], {}


def counted_books(store: Store) -> tuple[str, dict[str, Any]]:
    """The novels, and the co-occurrence of their tokens within sentences."""
    text, bpe, reference = packed(store, "lm-litbank-books/books")
    counts = cooccurrence.run(text, bpe, cooccurrence.Config(), store=store)
    assert counts is not None
    return reference, {"cooccur": counts.artifact.reference}


def generated_books(store: Store) -> tuple[str, dict[str, Any]]:
    """The novels with co-occurrence, and an ELECTRA whose generator predicts: generator and discriminator start from one
    masked language model, in whose two lowest layers two heads were pulled to the neighbours."""
    reference, more = counted_books(store)
    keys = {"distance": "kl", "weight": 3.0, "reference_length": 512, "schedule": "linear"}
    guides = (
        Guide(pattern, "attention_loss", layers=("first 2",), heads=(head,), **keys)
        for head, pattern in enumerate(("next", "previous"))
    )
    config = {**SMALL, "architecture": "electra", "steps": 2000, "plan": _plan_file(Plan(tuple(guides)), store)}
    learned = pretrain.run(reference, pretrain.Config(**config), store=store)
    assert learned is not None
    both = store.root / "starters" / learned.artifact.id
    for folder in (both, both / "generator"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(learned.artifact.path / name, folder)
    return reference, {**more, "init": str(both)}


def swahili(store: Store) -> tuple[str, dict[str, Any]]:
    """News in Swahili, with one sentence per line."""
    return packed(store, "lm-masakhane-text/swahili_voa.txt.gz", sentences="line")[2], {}


def oromo(store: Store) -> tuple[str, dict[str, Any]]:
    """News in Oromo: 1,128 articles."""
    return packed(store, "cls-masakhanews/orm/train.tsv.gz", quoting=True)[2], {}


def learned_books(store: Store) -> tuple[str, dict[str, Any]]:
    """The novels, and a plain ModernBERT that has learned more from them than pairs of tokens tell, so that its heads have
    something to attack.  Its settings are those with which plain training is best in `benchmarks.trial`."""
    reference = books(store)[0]
    tuned = {"architecture": "modernbert", "beta2": 0.98, "warmup_steps": 50, "steps": 1200}
    first = pretrain.run(reference, pretrain.Config(**{**SMALL, **tuned}), store=store)
    assert first is not None
    return reference, {"init": first.artifact.reference}


def of_published(part: str, **reading: Any) -> Prepare:
    """A text as all-MiniLM-L6-v2 reads it, a published English model without a head for masked words, and that model."""

    def prepare(store: Store) -> tuple[str, dict[str, Any]]:
        init = published(store)
        text = corpus.run([str(SHARED / "data" / part)], corpus.Config(**reading), store=store).reference
        return sequences.run(text, init, sequences.Config(max_length=64), store=store).reference, {"init": init}

    return prepare


def captions(store: Store) -> tuple[str, dict[str, Any]]:
    """Pairs of German and English captions, with a joint vocabulary of 8,000."""
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
    "steps": 600,
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
    "steps": 600,
    "batch_tokens": 2048,
    "learning_rate": 1e-3,
    "schedule": "inverse-sqrt",
    "warmup_steps": 200,
    "beta2": 0.98,
    "evaluate_every": 300,
    "save_every": 100,
}
RATES = (1e-3, 3e-4, 3e-3)
WARMUPS = (0, 100)


def grid(name: str, plan: Plan | None, rates: Sequence[float], warmups: Sequence[int], dropout: float) -> list[Setting]:
    """One setting for each combination of learning rate and warm-up."""
    return [
        Setting(
            f"{name}, rate {rate:g}, warm-up {warmup}, dropout {dropout:g}",
            plan,
            {"learning_rate": rate, "warmup_steps": warmup, "dropout": dropout},
            f"{name}, dropout {dropout:g}",
        )
        for rate in rates
        for warmup in warmups
    ]


GUIDED = ag("next", "previous")
MIXED = Plan(tuple(Guide(pattern, "mix", options={"of": ("stream",)}) for pattern in ("previous", "next")))
CONTINUED = {
    "steps": 500,
    "batch_size": 32,
    "warmup_steps": 50,
    "schedule": "linear",
    "evaluate_every": 250,
    "save_every": 100,
}
LASTING = [
    Setting(f"{name}, rate {rate:g}", plan, {"learning_rate": rate})
    for rate in (1e-4, 5e-4)
    for name, plan in (("plain", None), ("guided", GUIDED), ("neighbours mixed into the stream", MIXED))
]

TABLES = {
    "fair": Table(
        "Untuned guidance against tuned plain training (paper A, figure 3)",
        books,
        SMALL,
        grid("plain", None, RATES, WARMUPS, 0.1) + grid("guided", GUIDED, RATES[:1], WARMUPS[:1], 0.1),
    ),
    "robust": Table(
        "Spread over rates, warm-up and dropout (paper A, section 6)",
        books,
        SMALL,
        [
            setting
            for dropout in (0.1, 0.0)
            for name, plan in (("plain", None), ("guided", GUIDED))
            for setting in grid(name, plan, RATES, WARMUPS, dropout)
        ],
    ),
    "deep": Table(
        "16 layers (paper A, table 3)",
        books,
        {**SMALL, "layers": 16, "steps": 800},
        [Setting("plain"), Setting("guided", GUIDED)],
    ),
    "electra": Table(
        "ELECTRA with a unigram generator (paper A, table 6)",
        books,
        {**SMALL, "objective": "electra", "generator": "unigram"},
        [Setting("plain"), Setting("guided", GUIDED)],
    ),
    "electra-long": Table(
        "ELECTRA with a unigram generator, its loss weighed by 1, in 1,500 steps (paper A, table 6)",
        books,
        {**SMALL, "objective": "electra", "generator": "unigram", "discriminator_weight": 1.0, "steps": 1500},
        [Setting("plain"), Setting("guided", GUIDED)],
    ),
    "mcmisp": Table(
        "Conflicts with mis-predictions in ELECTRA (paper C, table 5, smaller): training losses",
        counted_books,
        {**SMALL, "objective": "electra", "generator": "transformer"},
        [
            Setting("ELECTRA"),
            Setting("McMisP", conflicts()),
            Setting("Ground", conflicts(truth=True)),
            Setting("Constant", conflicts(constant=0.9)),
        ],
    ),
    "mcmisp-late": Table(
        "Conflicts with mis-predictions in ELECTRA whose generator predicts (paper C, table 5, smaller): training losses",
        generated_books,
        {**SMALL, "objective": "electra", "generator": "transformer", "learning_rate": 5e-4},
        [
            Setting("ELECTRA"),
            Setting("McMisP", conflicts()),
            Setting("Ground", conflicts(truth=True)),
            Setting("Constant", conflicts(constant=0.9)),
        ],
    ),
    "mcmisp-bert": Table(
        "Conflicts with mis-predictions in BERT (paper C, table 5, smaller): training losses",
        counted_books,
        {**SMALL, "generator": "transformer"},
        [Setting("BERT, with a generator beside it"), Setting("McMisP", conflicts())],
    ),
    "translation": Table(
        "Translation of captions, German to English (paper A, table 7)",
        captions,
        {**PAIRS, "objective": "translation"},
        [
            Setting("plain"),
            Setting("guided encoder", ag("next", "previous")),
            Setting("guided both", ag("next", "previous", decoder=("previous",))),
            Setting("Gaussian", "preset:gaussian"),
        ],
        translates=True,
    ),
    "asa": Table(
        "Continued pre-training with an adversary (paper D, section 4.5): losses",
        learned_books,
        {**SMALL, "architecture": "modernbert", "steps": 300, "learning_rate": 3e-4},
        [
            Setting("plain"),
            Setting("ASA", "preset:asa-pretraining"),
            Setting("untrained adversary", untrained()),
            Setting("scheduled", random_masks(kind="scheduled"), follows="ASA"),
            Setting("Bernoulli 0.1", random_masks(kind="bernoulli", proportion=0.1)),
            Setting("magnitude 0.1", random_masks(kind="magnitude", proportion=0.1)),
        ],
    ),
    "continued": Table(
        "Continued pre-training of a published model on novels, with a new head on the tied embedding",
        of_published("lm-litbank-books/books"),
        CONTINUED,
        LASTING,
        measures_start=False,
    ),
    "continued-oromo": Table(
        "Continued pre-training of a published English model on news in Oromo",
        of_published("cls-masakhanews/orm/train.tsv.gz", quoting=True),
        CONTINUED,
        LASTING,
        measures_start=False,
    ),
    "oromo": Table("Oromo (paper A, tables 2 and 3)", oromo, SMALL, [Setting("plain"), Setting("guided", GUIDED)]),
    "swahili": Table("Swahili", swahili, SMALL, [Setting("plain"), Setting("guided", GUIDED)]),
}


# runs


def settings_of(table: Table, setting: Setting, seed: int, steps: int | None) -> str:
    """A digest of all settings of a run."""
    plan = setting.plan.dumps() if isinstance(setting.plan, Plan) else setting.plan
    return digest([dict(table.common), dict(setting.changes), plan, seed, steps])[:16]


def train(
    table: Table, setting: Setting, seed: int, steps: int | None, store: Store, reference: str, more: Mapping[str, Any]
) -> Artifact:
    """Train a model, unless the store has it.

    Args:
        reference, more: the sequences, and the settings that they require.
    """
    changes = {**table.common, **more, **setting.changes, "seed": seed} | ({"steps": steps} if steps else {})
    if "objective" not in changes:
        changes.setdefault("architecture", "roberta")  # what the figures were measured with
    if setting.plan is None:
        changes.pop("cooccur", None)
    else:
        changes["plan"] = setting.plan if isinstance(setting.plan, str) else _plan_file(setting.plan, store)
    if setting.follows:
        (leader,) = (row for row in table.rows if row.label == setting.follows)
        changes["masking"] = train(table, leader, seed, steps, store, reference, more).reference
    result = pretrain.run(reference, pretrain.Config(**changes), store=store)
    assert result is not None
    return result.artifact


def figures_of(table: Table, setting: Setting, seed: int, steps: int | None, store: Store) -> dict[str, Any]:
    """The figures of one run."""
    reference, more = table.prepare(store)
    made = train(table, setting, seed, steps, store, reference, more)
    curve = Curve.of(made, setting.label)
    shown = np.unique(np.linspace(0, len(curve.losses) - 1, POINTS).astype(int))
    figures = {
        "label": setting.label,
        "seed": seed,
        "steps": len(curve.losses),
        "settings": settings_of(table, setting, seed, steps),
        "loss_is_of": curve.loss,
        "loss": float(curve.smoothed(WINDOW)[-1]),
        "average": float(np.mean(curve.losses)),
        "valid": curve.valid[-1][1] if curve.valid else None,
        "seconds": float(curve.elapsed()[-1]),
        "curve": [[int(step) + 1, float(curve.smoothed(WINDOW)[step])] for step in shown],
        "final": made.counts["final"],
        "means": means_of(made),
    }
    if table.translates:
        scores = evaluate.run(made.reference, reference, evaluate.Config(), store=store).artifact
        figures["scores"] = json.loads(scores.read("metrics.json"))
    if "init" in more and table.measures_start:
        measured = evaluate.run(more["init"], reference, evaluate.Config(split="valid"), store=store).artifact
        figures["starter"] = json.loads(measured.read("metrics.json"))["metrics"]
    return figures


def means_of(made: Artifact) -> dict[str, float]:
    """What guides added and attacks hid, and the shares of tokens: the mean of each such column of ``metrics.parquet``."""
    with made.open("metrics.parquet") as file:
        metrics = pq.read_table(file)
    shown = [name for name in metrics.column_names if name.startswith(("loss/guidance/", "masked/", "share/"))]
    return {name: pc.mean(metrics[name]).as_py() for name in shown}


def _plan_file(plan: Plan, store: Store) -> str:
    path = store.root / "plans" / f"{digest(plan.dumps())[:16]}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plan.dumps(), encoding="utf-8")
    return str(path)


# the table

Row = Mapping[str, Any]


def baseline(table: Table, by_label: Mapping[str, Sequence[Row]]) -> str:
    """The label of the setting without a plan that has the lowest final loss for the first seed."""
    plain = [setting.label for setting in table.rows if setting.plan is None and by_label[setting.label]]
    return min(plain, key=lambda label: by_label[label][0]["loss"])


def steps_to(row: Row, loss: float) -> float | None:
    """The step at which a run first has this loss, interpolated between the kept points of its curve; None if never."""
    steps, losses = np.array(row["curve"]).T
    reached_at = np.flatnonzero((steps >= WINDOW) & (losses <= loss))
    if not len(reached_at):
        return None
    last = reached_at[0]
    return float(np.interp(loss, losses[[last, last - 1]], steps[[last, last - 1]])) if last else float(steps[0])


def passed_losses(row: Row) -> list[float]:
    """The losses that a run has after a half and all of its steps, rounded up to hundredths."""
    steps, losses = np.array(row["curve"]).T
    half = float(np.interp(row["steps"] / 2, steps, losses))
    return sorted({math.ceil(100 * loss) / 100 for loss in (half, losses[-1])}, reverse=True)


def as_markdown(table: Table, rows: Sequence[Row]) -> str:
    """The table with one line per setting: mean, standard deviation, and a paired test against the baseline."""
    by_label = {setting.label: [row for row in rows if row["label"] == setting.label] for setting in table.rows}
    label_of_base = baseline(table, by_label)
    bases = {row["seed"]: row for row in by_label[label_of_base]}
    names = ["run", "n", "loss", "average", "validation", *(["test NLL", "BLEU", "chrF"] if table.translates else [])]
    levels = passed_losses(by_label[label_of_base][0])
    names += ["p", *(f"steps to {level:.2f}" for level in levels)]
    lines = [f"| {' | '.join(names)} |", "|---" + "|--:" * (len(names) - 1) + "|"]
    for label, runs in by_label.items():
        if not runs:
            continue
        p = paired_t_test(Summary.of(row["loss"] - bases[row["seed"]]["loss"] for row in runs if row["seed"] in bases))
        cells = [cell([row[name] for row in runs], "{:.3f}") for name in ("loss", "average", "valid")]
        if table.translates:
            cells += [
                cell([row["scores"]["metrics"][name] for row in runs], "{:.2f}") for name in ("nll", "bleu", "chrf")
            ]
        cells.append(p_value(p))
        cells += [cell([steps_to(row, level) for row in runs], "{:.0f}") for level in levels]
        name = f"**{label}** (baseline)" if label == label_of_base else label
        lines.append(f"| {' | '.join([name, str(len(runs)), *cells])} |")
    return "\n".join([*lines, *_spread(table, by_label)])


def _spread(table: Table, by_label: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """A table of the spread of final losses within each group, for the first seed."""
    groups: dict[str, list[float]] = {}
    for setting in table.rows:
        if setting.group and by_label[setting.label]:
            groups.setdefault(setting.group, []).append(by_label[setting.label][0]["loss"])
    if any(len(losses) > 1 for losses in groups.values()):
        yield from ("", "| settings | n | lowest loss | highest | mean | deviation |", "|---|--:|--:|--:|--:|--:|")
        for group, losses in groups.items():
            found = Summary.of(losses)
            deviation = "–" if found.sd is None else f"{found.sd:.3f}"
            yield f"| {group} | {len(losses)} | {min(losses):.3f} | {max(losses):.3f} | {found.mean:.3f} | {deviation} |"


def cell(values: Sequence[float | None], form: str) -> str:
    """Mean and deviation, or how many of the values are known."""
    found = Summary.of(values)
    if not values:
        return "–"
    if found.mean is None:
        return f"{found.known} of {len(values)}" if found.known else "never"
    return form.format(found.mean) + (f" ± {form.format(found.sd)}" if found.sd is not None else "")


def floors_of(table: Table, store: Store) -> dict[str, float]:
    """The n-gram floors of a table of masked language models; empty for others."""
    if table.common.get("objective", "mlm") != "mlm":
        return {}
    # the model to start from changes nothing about the sequences
    prepare = {learned_books: books}.get(table.prepare, table.prepare)
    return floors_of_sequences(prepare(store)[0], store)


def floors_of_sequences(reference: str, store: Store) -> dict[str, float]:
    """The n-gram floors of as many sequences as a training validates on, in nats."""
    limit = pretrain.Config.model_fields["valid_sequences"].default
    return dict(floors.run(reference, floors.Config(limit=limit), store=store).artifact.counts["nats"])


def said_of_floors(nats: Mapping[str, float]) -> str:
    """A sentence for people."""
    reached = "; ".join(f"{FLOORS[name]} {value:.2f}" for name, value in nats.items())
    return f"What counts of neighbouring tokens reach in validation, in nats: {reached}."


def draw(table: Table, rows: Sequence[Mapping[str, Any]], path: Path, nats: Mapping[str, float]) -> None:
    """Draw the curves of the first seed; if there are many, with one colour per group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {setting.label: setting.group for setting in table.rows}
    colours = {group: f"C{number}" for number, group in enumerate(dict.fromkeys(groups.values()))}
    is_full, named = len({row["label"] for row in rows}) > 8, set[str]()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    plain = {setting.label for setting in table.rows if setting.plan is None}
    seed = min(row["seed"] for row in rows)
    for number, row in enumerate(row for row in rows if row["seed"] == seed):
        style = ("-", "--", ":", "-.")[number % 4]
        width = 1.3 if row["label"] in plain else 2.4
        points, group = tuple(zip(*row["curve"][1:], strict=True)), groups[row["label"]]
        if is_full and group:
            axes.plot(*points, color=colours[group], linewidth=width / 2, label=None if group in named else group)
            named.add(group)
        else:
            axes.plot(*points, style, linewidth=width, label=row["label"])
    draw_floors(axes, nats, min(loss for row in rows for _, loss in row["curve"]))
    title = textwrap.fill(table.title, 80)
    axes.set(xlabel="optimizer steps", ylabel=f"training loss, mean of {WINDOW} steps (nats)", title=title)
    axes.legend(fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="only settings whose label contains TEXT")
    parser.add_argument("--steps", type=int, help="steps of each run, instead of those of the table")
    parser.add_argument("--store", type=Path, default=Path("artifacts"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    table, path = TABLES[arguments.table], arguments.out / f"{arguments.table}.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = known.get("rows", [])
    for seed in range(arguments.seeds):
        for setting in table.rows:
            if arguments.only not in setting.label:
                continue
            old = next((row for row in rows if (row["label"], row["seed"]) == (setting.label, seed)), None)
            if old is not None:
                if old["settings"] != settings_of(table, setting, seed, arguments.steps):
                    raise SystemExit(
                        f"{path}: {setting.label}, seed {seed}, was trained with other settings; remove its entry"
                    )
                continue
            row = figures_of(table, setting, seed, arguments.steps, Store(arguments.store))
            rows.append(row)
            print(f"{row['label']:45s} seed {seed}: loss {row['loss']:.3f}, {row['seconds']:.0f} s", flush=True)
            about = {"title": table.title, "torch": torch.__version__, "threads": torch.get_num_threads()}
            known = about | {"machine": platform.machine(), "common": dict(table.common), "rows": rows}
            path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if "floors" not in known:
        known = {**known, "floors": floors_of(table, Store(arguments.store))}
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    draw(table, rows, path.with_suffix(".png"), known["floors"])
    if not any(row["label"] == setting.label for row in rows for setting in table.rows if setting.plan is None):
        raise SystemExit("no run without a plan exists yet, so there is no baseline")
    text = as_markdown(table, rows)
    if known["floors"]:
        text += "\n\n" + said_of_floors(known["floors"])
    path.with_suffix(".md").write_text(
        f"# {table.title}\n\n`python -m benchmarks.pretraining {arguments.table}`\n\n{text}\n\n"
        f"![Training loss over steps]({arguments.table}.png)\n",
        encoding="utf-8",
    )
    print(text)


if __name__ == "__main__":
    main()
