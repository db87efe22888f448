"""Does a decoder follow what is marked in its prompt?  Steering in lists of keys and values, as one resumable command.

    python -m benchmarks.steering [--seeds 5] [--store artifacts] [--out docs/results]

A Llama-shaped model of 3 layers x 64 with 4 heads learns lists of four to eight keys with their values, which are repeated three times in
other orders: ``ba 17 de 32 gi 11 . gi 11 ba 17 de 32 ...``.  A prompt is such a list and one of its keys, as a question:

    as trained     a list of four to eight pairs
    long           a list of sixteen pairs
    contradiction  a list of six pairs, in which the key of the question stands twice, with two values

The pair of the expected answer is marked.  ``preset:pasta`` multiplies the attention on all else by 0.01: in all heads, in those that
``guide probe steering`` chooses by other prompts, or in as many others, drawn at random.  A sham marks a pair with another key.  Each
seed has its own model and prompts.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import TESTED, Row, cell, cells_of_tests, table
from guidance.plan import Plan
from guidance.prompts import Prompt
from pipelines.probing.steering import Answering, Question
from pipelines.stages import corpus, pretrain, probe_steering, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.training.steering import on_heads

KEYS = [consonant + vowel for consonant in "bdgk" for vowel in "aeiou"]
VALUES = [str(number) for number in range(10, 30)]
REPEATS = 3
"""How often a list is repeated in training."""
SETTINGS: Mapping[str, Any] = {
    "objective": "clm",
    "layers": 3,
    "hidden": 64,
    "heads": 4,
    "ffn": 128,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "batch_size": 16,
    "optimizer": "muon",
    "learning_rate": 5e-3,
    "schedule": "constant",
    "beta2": 0.98,
    "warmup_steps": 50,
    "save_every": 500,
}
TASKS: Mapping[str, tuple[int, int]] = {"as trained": (4, 8), "long": (16, 16), "contradiction": (6, 6)}
"""The fewest and the most pairs of a list."""
CHOOSING, ASKED = 100, 400
"""Prompts of each task that choose the heads, and those that are measured."""
TOP = 0.5
"""Heads are chosen that are among this share, the best ones, on every task."""

NONE, ALL, CHOSEN, OTHERS = "none", "all heads", "heads of the probe", "as many other heads"
SHAM_ALL, SHAM_CHOSEN = "sham in all heads", "sham in the heads of the probe"


def pairs_of(draw: random.Random, task: str) -> list[tuple[str, str]]:
    """Keys, all different, and values, all different."""
    number = draw.randint(*TASKS[task])
    return list(zip(draw.sample(KEYS, number), draw.sample(VALUES, number), strict=True))


def documents(draw: random.Random, number: int) -> Iterator[str]:
    for _ in range(number):
        pairs = pairs_of(draw, "as trained")
        repeated = [pair for _ in range(REPEATS) for pair in draw.sample(pairs, len(pairs))]
        yield " ".join([*map(" ".join, pairs), ".", *map(" ".join, repeated)])


def prompts(draw: random.Random, task: str, number: int) -> Iterator[dict[str, str]]:
    """Prompts with the pair of their answer marked; ``sham`` is the prompt with another pair marked, ``shown`` the value of that."""
    for _ in range(number):
        pairs, others = pairs_of(draw, task), 1
        key, answer = pairs[0]
        if task == "contradiction":
            pairs[1], others = (key, pairs[1][1]), 2
        sham, order = draw.randrange(others, len(pairs)), draw.sample(range(len(pairs)), len(pairs))
        texts = {
            name: " ".join(("<<{} {}>>" if n == marked else "{} {}").format(*pairs[n]) for n in order)
            for name, marked in (("prompt", 0), ("sham", sham))
        }
        yield {name: f"{text} . {key}" for name, text in texts.items()} | {"answer": answer, "shown": pairs[sham][1]}


def lines(path: Path, rows: Iterable[Mapping[str, str]]) -> str:
    """Write a file of JSON lines; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def train(seed: int, steps: int, number: int, store: Store, folder: Path) -> Artifact:
    """The model of a seed."""
    texts = ({"text": text} for text in documents(random.Random(f"documents {seed}"), number))
    text = corpus.run([lines(folder / "documents.jsonl", texts)], corpus.Config(sentences="line"), store=store)
    words = tokenizer.run(text.reference, tokenizer.Config(kind="word"), store=store)
    data = sequences.run(text.reference, words.reference, sequences.Config(max_length=128), store=store).reference
    made = pretrain.run(data, pretrain.Config(**{**SETTINGS, "seed": seed, "steps": steps}), store=store)
    assert made is not None
    return made.artifact


def figures_of(seed: int, steps: int, number: int, store: Store) -> dict[str, Any]:
    """Of one model the heads, and shares of answers by what was steered, then by task."""
    folder = store.root / f"steering/{seed}-{number}"
    made = train(seed, steps, number, store, folder)
    files = [
        lines(folder / f"{task}.jsonl", prompts(random.Random(f"choose {task} {seed}"), task, CHOOSING))
        for task in TASKS
    ]
    probed = probe_steering.run(made.reference, files, probe_steering.Config(top=TOP), store=store).artifact
    chosen = [(layer, head) for layer, head in probed.counts["chosen"]]
    every = [(layer, head) for layer in range(SETTINGS["layers"]) for head in range(SETTINGS["heads"])]
    rest = [head for head in every if head not in chosen]
    others = random.Random(f"others {seed}").sample(rest, min(len(chosen), len(rest)))
    asked = {task: list(prompts(random.Random(f"ask {task} {seed}"), task, ASKED)) for task in TASKS}
    pasta = Plan.load("preset:pasta")

    def answering(prompt: str, answer: str) -> Answering:
        """The model before these prompts, of which these answers are expected."""
        questions = [
            [Question(Prompt.parse(row[prompt]), row[answer], task) for row in own] for task, own in asked.items()
        ]
        return Answering(made.path, pasta, questions, delimiter=" ", batch_size=50)

    def shares(model: Answering, heads: Sequence[tuple[int, int]]) -> dict[str, float]:
        return dict(zip(TASKS, (own.figures()["right"] for own in model.answers(on_heads(pasta, heads))), strict=True))

    right, sham, shown = answering("prompt", "answer"), answering("sham", "answer"), answering("sham", "shown")
    return {
        "label": "steering",
        "seed": seed,
        "settings": settings_of(steps, number),
        "loss": made.counts["final"]["valid/clm"],
        "chosen": chosen,
        "others": others,
        "right": {
            NONE: shares(right, []),
            ALL: shares(right, every),
            CHOSEN: shares(right, chosen),
            OTHERS: shares(right, others),
            SHAM_ALL: shares(sham, every),
            SHAM_CHOSEN: shares(sham, chosen),
        },
        "shown": {NONE: shares(shown, []), SHAM_ALL: shares(shown, every), SHAM_CHOSEN: shares(shown, chosen)},
    }


def settings_of(steps: int, number: int) -> str:
    """A digest of all settings of a run."""
    tasks = {task: list(sizes) for task, sizes in TASKS.items()}
    return digest([dict(SETTINGS), KEYS, VALUES, tasks, REPEATS, CHOOSING, ASKED, TOP, steps, number])[:16]


def page(rows: Sequence[Row]) -> str:
    """The tables: shares of answers, and how they differ from those of the same model without steering."""

    def shares(kind: str) -> str:
        lines = (
            [label, *(cell([row[kind][label][task] for row in rows]) for task in TASKS)] for label in rows[0][kind]
        )
        return table(["steered", *TASKS], lines)

    parts = [
        f"Shares of right answers; {ASKED} prompts of each task, {len(rows)} models, mean and deviation:",
        shares("right"),
        "Shares of answers with the value of the pair that the sham marks:",
        shares("shown"),
    ]
    if len(rows) > 1:
        gains = {
            f"{task}: {label}": [row["right"][label][task] - row["right"][NONE][task] for row in rows]
            for task in TASKS
            for label in (ALL, CHOSEN)
        }
        tests = ([label, *cells] for label, cells in cells_of_tests(gains).items())
        parts += ["Right answers, over those of the same model without steering:", table(["steered", *TESTED], tests)]
    heads = (", ".join(f"{layer}-{head}" for layer, head in row["chosen"]) or "none" for row in rows)
    return "\n\n".join([*parts, f"Heads of the probe, by model: {'; '.join(heads)}."])


def main() -> None:
    parser = pages.command(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="number of models, whose seeds count from 1")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=30_000)
    arguments = parser.parse_args()
    path, store, about = arguments.out / "steering.json", Store(arguments.store), (arguments.steps, arguments.documents)
    known = pages.known(path)
    for seed in range(1, arguments.seeds + 1):
        names = {"label": "steering", "seed": seed}
        pages.add_row(path, known, names, settings_of(*about), functools.partial(figures_of, seed, *about, store))
    text = page(known["rows"])
    title = "# Does a decoder follow what is marked in its prompt?"
    path.with_suffix(".md").write_text(f"{title}\n\n`python -m benchmarks.steering`\n\n{text}\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
