"""``guide glue``: the score of each task, MNLI once, and the average."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from guidance.errors import InputError
from pipelines.stages import dataset, evaluate
from pipelines.storage.store import Store
from pipelines.views.glue import CONVENTIONS, EIGHT, Score, average
from tests.finetunings import train
from tests.trainings import one_thread  # noqa: F401

RTE = "index\tsentence1\tsentence2\tlabel\n" + "".join(
    f"{i}\tA{i % 3} sees it\tB{i % 2} does\t{('entailment', 'not_entailment')[i % 2]}\n" for i in range(12)
)
MNLI = "index\tsentence1\tsentence2\tgold_label\n" + "".join(
    f"{i}\tA{i} sees it\tB{i % 3}\t{('neutral', 'entailment', 'contradiction')[i % 3]}\n" for i in range(12)
)


def measured(store: Store, folder: Path, name: str, files: dict[str, list[tuple[str, str]]]) -> Any:
    """The evaluation of a tiny model on a task."""
    given: dict[str, list[str]] = {}
    for split, parts in files.items():
        for part, content in parts:
            path = folder / f"{part}.tsv"
            path.write_text(content)
            given.setdefault(split, []).append(str(path))
    data = dataset.run(given, dataset.Config(format=f"glue-{name}", valid_fraction=0.0), store=store).artifact
    model = train(store, data, epochs=1, layers=1).reference
    return evaluate.run(model, data.reference, evaluate.Config(), store=store).artifact


def test_tasks_are_found_and_mnli_counts_once(guide: Any, tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    rte = measured(store, tmp_path, "rte", {"train": [("r", RTE)], "test": [("dev", RTE)]})
    tests = [("dev_matched", MNLI), ("dev_mismatched", MNLI.replace("A1 ", "C ").replace("neutral", "entailment"))]
    mnli = measured(store, tmp_path, "mnli", {"train": [("m", MNLI)], "test": tests})
    parts = [mnli.counts["slices"]["source"][f"{name}.tsv"]["accuracy"] for name in ("dev_matched", "dev_mismatched")]
    assert parts[0] != parts[1]
    done = guide("glue", rte.reference, mnli.reference, "--store", store.root, "--json")
    found = json.loads(done.out)
    values = {each["task"]: each["value"] for each in found["evaluations"]}
    assert values == {"rte": rte.counts["metrics"]["accuracy"], "mnli": pytest.approx(sum(parts) / 2)}
    assert found["average"] == pytest.approx(sum(values.values()) / 2)
    assert found["missing"] == [task for task in EIGHT if task not in values]
    table = guide("glue", rte.reference, mnli.reference, "--store", store.root)
    assert "average" in table.out and "cola, sst2" in table.err


def test_another_dataset_is_refused(tmp_path: Path) -> None:
    from pipelines.views.glue import score
    from tests.finetunings import build, reviews

    store = Store(tmp_path / "artifacts")
    data = build(store, tmp_path, {"train": reviews(12), "test": reviews(4)})
    made = evaluate.run(
        train(store, data, epochs=1, layers=1).reference, data.reference, evaluate.Config(), store=store
    )
    with pytest.raises(InputError, match="one: its dataset was not read as a task of GLUE"):
        score(made.artifact, "one", store)


def test_several_evaluations_of_one_task_count_as_one() -> None:
    scores = [Score("rte", ("accuracy",), value, 10) for value in (0.5, 0.7)] + [Score("cola", ("matthews",), 0.2, 5)]
    assert average(scores) == (pytest.approx(0.4), 2)


def test_conventions_only_name_tasks_of_glue() -> None:
    assert all(set(tasks) <= set(EIGHT) for tasks in CONVENTIONS.values())
