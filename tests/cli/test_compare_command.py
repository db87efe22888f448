"""``guide compare`` on the command line, with runs written by hand and with two tiny real ones."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guidance.errors import Interrupted
from pipelines.progress import Progress
from pipelines.storage.store import Store
from tests import runs, trainings
from tests.pipelines.views.test_evaluations import _few_rounds, evaluation, labelled  # noqa: F401
from tests.trainings import one_thread  # noqa: F401

Guide = Callable[..., Any]

PLAIN = [8.0, 6, 5, 4, 4, 3, 3, 3]
GUIDED = [8.0, 4, 3, 3, 2, 2, 2, 2]


@pytest.fixture
def named(tmp_path: Path) -> Store:
    """A store with the runs plain and guided."""
    store = Store(tmp_path / "artifacts")
    for name, losses in (("plain", PLAIN), ("guided", GUIDED)):
        more = {"valid/mlm": {8: losses[-1] + 1}, "eval/mnli/accuracy": {4: 0.5, 8: 0.75}}
        store.add_name(name, runs.finished(store, runs.metrics(losses, more=more), plan=name))
    return store


def test_the_table_is_on_stdout_and_notes_are_on_stderr(guide: Guide, named: Store) -> None:
    answer = guide("compare", "plain", "guided", "--score", "mnli/accuracy", "--no-floors")
    assert answer.code == 0
    lines = [line.split() for line in answer.out.splitlines()]
    assert ["guided", "3.250", "6.000", "3.000", "2.000", "2.000", "3.000"] in lines
    assert ["guided", "2", "3", "4"] in lines
    assert ["guided", "-1.250", "–", "-1.000", "–", "-1.000", "–", "0.000", "–"] in lines
    assert ["guided", "0.75", "0.75", "8"] in lines
    assert answer.err == "note: guided differs from the baseline in plan\n"
    assert guide("compare", "plain", "guided", "-q").err == ""


def test_columns_of_evaluations_are_headed_by_the_names_of_their_models(guide: Guide, named: Store) -> None:
    models = [named.load(name) for name in ("plain", "guided", "plain")]
    tables = [labelled(answers, ["a", "b"]) for answers in (["a", "a"], ["a", "b"], ["b", "a"])]
    made = [
        evaluation(named.root.parent, "classification", table, model.recipe)
        for table, model in zip(tables, models, strict=True)
    ]
    said = guide("compare", *(each.reference for each in made[:2]))
    first, row, *_ = (line.split() for line in said.out.splitlines())
    assert first[:4] == ["metric", "plain@1", "guided@1", "difference"]
    assert row[:4] == ["accuracy", "0.5000", "1.0000", "+0.5000"]
    said = guide("compare", *(each.reference for each in made))
    titles = [line.split()[1:3] for line in said.out.splitlines() if line.startswith("metric")]
    assert titles == [[made[0].reference, made[1].reference], [made[0].reference, made[2].reference]]
    found = json.loads(guide("compare", *(each.reference for each in made[:2]), "--json").out)["comparisons"]
    assert (found[0]["baseline"], found[0]["other"]) == tuple(each.reference for each in made[:2])


def test_a_single_run_is_shown_without_differences(guide: Guide, named: Store) -> None:
    answer = guide("compare", "plain", "--no-floors")
    assert (answer.code, answer.err) == (0, "")
    assert "difference" not in answer.out


def test_json_csv_and_pictures_are_written(guide: Guide, named: Store) -> None:
    answer = guide("compare", "plain", "guided", "--json", "--csv", "runs.csv", "--plot", "curves.svg")
    found = json.loads(answer.out)
    assert found["groups"][1]["figures"]["steps_to_3"] == {"mean": 4, "sd": None}
    assert found["groups"][1]["difference"]["final"] == {"mean": -1.0, "sd": None, "p": None}
    assert (found["plot"], found["csv"]) == ("curves.svg", "runs.csv")
    with Path("runs.csv").open(newline="") as file:
        assert [row["average"] for row in csv.DictReader(file)] == ["4.5", "3.25"]
    assert Path("curves.svg").read_text().startswith("<?xml")
    assert "written: curves.svg" in answer.err


def test_markdown_has_the_table(guide: Guide, named: Store) -> None:
    answer = guide("compare", "plain", "guided", "--markdown")
    assert "| guided | 3.250 | 6.000 | 3.000 | 2.000 | 2.000 | 3.000 |" in answer.out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing"], 2, "no artifact 'nothing'"),
        (["plain", "--loss", "mml"], 2, "did you mean 'mlm'"),
        (["plain", "--score", "mnli/f1"], 2, "unknown score 'mnli/f1'"),
        (["plain", "--window", "0"], 2, "--window"),
        (["plain", "--at", "6,x"], 2, "not numbers with commas"),
        (["plain", "--at", "nan"], 2, "not numbers with commas"),
        (["plain", "guided", "--timed"], 2, "its steps cannot be timed"),
        (["plain", "--plot", "curves.jpg"], 2, "must end in .png or .svg"),
        (["plain", "--csv", "away/runs.csv"], 2, "there is no folder"),
        (["plain", "--json", "--markdown"], 2, "leave one of them out"),
        (["plain", "broken"], 4, "loss/mlm is nan at step 2"),
        (["plain", "foreign"], 2, "no metrics.parquet"),
    ],
)
def test_a_mistake_is_refused_in_a_few_lines(
    guide: Guide, named: Store, arguments: list[str], code: int, words: str
) -> None:
    named.add_name("broken", runs.finished(named, runs.metrics([1.0, float("nan")])))
    named.add_name("foreign", runs.finished(named, None))
    answer = guide("compare", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert words in answer.err and len(answer.err.splitlines()) < 4


class _StopsAtStepFour(Progress):
    """Interrupts a run as it reports its fourth step."""

    def task(self, title: str, *, total: float | None = None, unit: str = "", done: float = 0) -> Any:
        class Task:
            count = 0

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def advance(self, amount: float = 1, note: str = "") -> None:
                self.count += 1
                if self.count == 4:
                    raise Interrupted("stopped", signal_number=2)

        return Task()


def test_two_real_runs_and_an_unfinished_one(guide: Guide, tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    data = trainings.sequences(store)
    plain = trainings.train(store, data, name="plain").artifact
    guided = trainings.train(store, data, plan="preset:ag", name="guided").artifact
    with pytest.raises(Interrupted):
        trainings.train(store, data, seed=1, progress=_StopsAtStepFour())
    (unfinished,) = store.unfinished()
    found = json.loads(guide("compare", "plain", "guided", f"model/{unfinished.name}", "--json").out)
    assert found["steps"] == 4 and found["loss"] == "mlm"
    for group, artifact in zip(found["groups"], (plain, guided), strict=False):
        rows = [json.loads(line) for line in artifact.read("metrics.jsonl").splitlines()][:4]
        assert group["runs"][0]["average"] == pytest.approx(sum(row["loss/mlm"] for row in rows) / 4)
        assert group["runs"][0]["valid"] == rows[2]["valid/mlm"]
        assert group["runs"][0]["final"] == pytest.approx(rows[3]["loss/mlm"])
    assert [group["differs"] for group in found["groups"]] == [[], ["plan"], ["seed"]]
    assert found["groups"][2]["runs"][0]["finished"] is False
    grouped = json.loads(guide("compare", "plain", f"model/{unfinished.name}", "guided", "--group", "--json").out)
    assert [(group["n"], group["pairs"]) for group in grouped["groups"]] == [(2, 2), (1, 1)]
