"""Every script in ``benchmarks/`` runs with a tiny setting, so that ``make bench`` does not stop half-way."""

from __future__ import annotations

import json
import random
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import goals, pages, steering
from benchmarks.finetuning import __main__ as finetuning_page
from benchmarks.finetuning import runs as finetuning
from benchmarks.finetuning.data import first_of
from benchmarks.finetuning.tables import TABLES
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import claims, parts
from benchmarks.gpu.page import page as gpu_page
from benchmarks.trial import __main__ as trial_command
from benchmarks.trial import decoders, lasting
from benchmarks.trial import runs as trial
from benchmarks.trial.page import report
from benchmarks.trial.training import read
from benchmarks.trial.uses import Use
from pipelines.report.blocks import as_markdown
from pipelines.stages import dataset
from pipelines.storage.store import Store
from tests.shared import shared

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "pages"}
SCRIPTS |= {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
PARSER = "models/spacy-en_ud_ewt_sm"

TINY = {
    "attack_cost": "TEXT --lengths 16 --tokens 32 --rounds 1 --out OUT",
    "cooccurrence": "TEXT --rounds 1 --window 2 --top 50 --vocab-size 300 --glove GLOVE",
    "finetuning": "published --only plain --data TREC --store STORE --out OUT",
    "generation_cost": "--layers 1 --width 64 --length 8 --steps 1 --rounds 1",
    "gpu": "--device cpu --only backends --out OUT",
    "goals": "--results RESULTS",
    "masks_speed": "TEXT --rounds 1",
    "packing": "TEXT --rounds 1 --steps 2 --batch-size 4 --length 32 --out OUT",
    "parsing": "PARSER TEXT/0.txt --characters 2000 --rounds 1 --jobs 1",
    "sentences": "TEXT --speed TEXT/0.txt --rounds 1",
    "statistics_scale": "TEXT --sizes 0.01 --stages idf --runs 1",
    "step_cost": "--device cpu --rounds 1 --only plain --lengths 16 --dropouts 0.0",
    "steering": "--seeds 1 --steps 2 --documents 60 --store STORE --out OUT",
    "text_speed": "TEXT --rounds 1",
    "trial": "--first 1 --steps 2 --store STORE --out OUT",
}
"""The arguments of each benchmark; ``·`` is a space within one of them."""


def test_every_benchmark_has_a_tiny_setting() -> None:
    assert SCRIPTS - set(TINY) == set()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of texts, where `trial` looks for its novels, and questions for `finetuning`."""
    folder = tmp_path / "shared" / "data" / "lm-litbank-books" / "books"
    folder.mkdir(parents=True)
    words = ["the", "dog", "sees", "a", "cat", ",", "and", "then", "it", "sleeps"]
    for number in range(30):
        turned = [" ".join(words[k:] + words[:k]).capitalize() + " ." for k in range(number % 7, number % 7 + 5)]
        (folder / f"{number}.txt").write_text(f"Story {number}. " + " ".join(turned) * 2, encoding="utf-8")
    questions = tmp_path / "shared" / "data" / "cls-trec"
    questions.mkdir(parents=True)
    for split in ("train", "test"):
        asked = [f"{k % 2} {('who', 'where')[k % 2]} is {words[k % 10]} {k}\n" for k in range(40)]
        (questions / f"TREC.{split}.all").write_text("".join(asked), encoding="utf-8")
    return folder


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", sorted(SCRIPTS & set(TINY)))
def test_benchmark_runs(
    name: str,
    text: Path,
    glove: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"TEXT": text, "STORE": tmp_path / "store", "OUT": tmp_path / "out", "GLOVE": glove}
    if "PARSER" in TINY[name]:
        places["PARSER"] = shared(PARSER)
    if name == "goals":
        places["RESULTS"] = shutil.copytree(ROOT / "docs" / "results", tmp_path / "results")
    new, small = {"layers": 1, "hidden": 16, "heads": 2}, TABLES["published"]  # in place of the published model
    small = replace(small, start=None, settings={**small.settings, **new}, data={"TREC": small.data["TREC"]}, seeds=1)
    monkeypatch.setitem(TABLES, "published", replace(small, rates=(1e-4,)))
    arguments = TINY[name]
    for word, path in places.items():
        arguments = arguments.replace(word, str(path))
    monkeypatch.setenv("GUIDE_SHARED", str(tmp_path / "shared"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, *(word.replace("·", " ") for word in arguments.split())])
    # in this process, where torch is loaded already; whatever a benchmark refuses is a SystemExit, which fails the test
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    out = capsys.readouterr().out
    assert out
    if name == "cooccurrence":
        assert "GloVe's cooccur" in out and "all found the same" in out
        assert sorted(path.name for path in glove.iterdir()) == ["Makefile", "src"]


def test_the_page_of_the_trial_is_that_of_its_figures() -> None:
    path = ROOT / "docs/results/trial.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    made = report(read(path), list(trial_command.PHASES), known["floors"], known["costs"])
    assert as_markdown(made, "trial") == path.with_suffix(".md").read_text(encoding="utf-8")


def test_the_page_about_speed_is_that_of_its_figures() -> None:
    results = ROOT / "docs/results"
    assert goals.page(results) == (results / "speed.md").read_text(encoding="utf-8")


def test_the_page_about_speed_says_which_goals_are_reached(tmp_path: Path) -> None:
    for name, factor in (("step_cost_2048_before", 2.0), ("step_cost_2048_now", 1.1)):
        rows = {goal.row: {"ratio": factor, "memory_ratio": factor} for goal in goals.GOALS}
        pages.save(tmp_path / f"{name}.json", {"torch": "2", "results": [{"rows": rows}]})
    pages.save(tmp_path / "packing.json", {"rows": {"no plan": {"packed": {"ratio": 1.24}}}})
    cost = {"512": {"plain": {"seconds": 1.0, "mib": 1.0}, "ag": {"seconds": 1.0, "mib": 2.0}}}
    pages.save(tmp_path / "gpu.json", measured_on_a_gpu("a GPU", cost=cost))
    rows = [line.split(" | ")[:5] for line in goals.page(tmp_path).splitlines()]
    assert ["| squared losses (`preset:ag`): step", "≤ 1.15", "2.000", "1.100", "yes"] in rows
    assert ["| squared losses (`preset:ag`): memory", "≤ 1.05", "2.000", "1.100", "**no**"] in rows
    assert ["| packing, no plan: tokens a second", "≥ 1.25", "1.00", "1.24", "**no**"] in rows
    assert ["| on a GPU, ag, 512 tokens: memory", "≤ 1.02 of plain", "–", "2.000", "**no**"] in rows
    assert ["| on a GPU, ag, 8,192 tokens: step", "≤ 1.05 of plain", "–", "–", "not measured"] in rows


def test_the_page_about_steering_is_that_of_its_figures() -> None:
    rows = json.loads((ROOT / "docs/results/steering.json").read_text(encoding="utf-8"))["rows"]
    assert steering.page(rows) in (ROOT / "docs/results/steering.md").read_text(encoding="utf-8")


def test_prompts_for_steering_are_lists_with_their_answer_marked() -> None:
    for task, (fewest, most) in steering.TASKS.items():
        for row in steering.prompts(random.Random(0), task, 50):
            pairs, _, key = row["prompt"].partition(" . ")
            bare = pairs.replace("<<", "").replace(">>", "").split()
            assert fewest <= len(bare) // 2 <= most and f"<<{key} {row['answer']}>>" in pairs
            assert len(set(bare[1::2])) == len(bare) // 2 and bare[::2].count(key) == 1 + (task == "contradiction")
            marked = re.findall("<<(.*?) (.*?)>>", row["sham"])
            assert len(marked) == 1 and marked[0][0] != key and marked[0][1] == row["shown"]
            assert re.sub("<<|>>", "", row["sham"]) == re.sub("<<|>>", "", row["prompt"])


def test_the_pages_of_comparisons_by_fine_tuning_are_those_of_their_figures() -> None:
    for name, table in TABLES.items():
        path = ROOT / f"docs/results/finetuning-{name}.json"
        if path.exists():
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            page = path.with_suffix(".md").read_text(encoding="utf-8")
            assert finetuning_page.as_markdown(table, rows) in page, path.name


def test_the_beginning_of_a_file_is_as_many_units_long_as_asked_for() -> None:
    assert first_of(b"a\nb\nc\n", 2, "lines") == b"a\nb\n"
    assert first_of(b"a O\nb O\n\nc O\n \nd O\n", 2, "sentences") == b"a O\nb O\n\nc O\n\n"
    assert json.loads(first_of(b'{"0": {"a": 1}, "1": {"a": 2}, "2": {"a": 3}}', 2, "pairs")) == {
        "0": {"a": 1},
        "1": {"a": 2},
    }


def test_models_of_a_table_are_measured_on_other_datasets_too(store: Store, tmp_path: Path) -> None:
    lines = [f"{k % 2} {('who', 'where')[k % 2]} is {k}\n" for k in range(40)]
    places = [tmp_path / f"{name}.txt" for name in ("train", "test", "turned")]
    for path, own in zip(
        places, (lines, lines[:7], [f"{1 - int(line[0])}{line[1:]}" for line in lines[:7]]), strict=True
    ):
        path.write_text("".join(own), encoding="utf-8")
    train, test, turned = map(str, places)
    settings = dataset.Config(format="label-text", valid_fraction=0.1)
    data = finetuning.Data(
        lambda s: dataset.run({"train": [train], "test": [test]}, settings, store=s).reference,
        "accuracy",
        also={
            "turned": lambda s: dataset.run({"test": [turned]}, dataset.Config(format="label-text"), store=s).reference
        },
        maybe_seen=True,
    )
    new = {"layers": 1, "hidden": 16, "heads": 2, "epochs": 1, "batch_size": 8}
    table = finetuning.Table(
        "T", {"plain": {}, "masks": {"plan": "preset:random-mask"}}, {"A": data}, (0.1,), new, seeds=2
    )
    rows = [finetuning.figures_of(table, label, "A", [], store) for label in table.rows]
    for row in rows:
        assert len(row["runs"]) == 2
        assert row["also"] == {"turned": pytest.approx([1 - score for score in row["runs"]])}
    page = finetuning_page.as_markdown(table, rows)
    lines = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith(("| A", "| turned"))]
    labels = [["| A\\*"], ["| turned\\*, models of A"]]
    assert lines == [[*name, label] for name in labels for label in ("plain", "masks")]
    assert page.endswith("may have been trained on these texts.")
    page = finetuning_page.as_markdown(table, [row | {"lead": 0.25} for row in rows])
    assert "A: the first sentences of each document have 0.250." in page


def test_a_row_of_a_benchmark_is_measured_once_and_not_taken_for_one_of_other_settings(tmp_path: Path) -> None:
    path, measured = tmp_path / "new" / "table.json", []

    def add(names: dict[str, Any], settings: str) -> None:
        def measure() -> dict[str, Any]:
            measured.append(names)
            return {**names, "settings": settings, "loss": 1.0}

        pages.add_row(path, pages.known(path), names, settings, measure)

    for seed in (0, 1, 0):
        add({"label": "plain", "seed": seed}, "a")
    assert [each["seed"] for each in measured] == [0, 1]
    assert [row["seed"] for row in pages.known(path)["rows"]] == [0, 1] and pages.known(path)["torch"]
    with pytest.raises(SystemExit, match="plain, 1 was trained with other settings"):
        add({"label": "plain", "seed": 1}, "b")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_measurement_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    gpu.main()
    assert capsys.readouterr().out.startswith("no GPU") and not list(tmp_path.iterdir())


def measured_on_a_gpu(device: str, **found: Any) -> dict[str, Any]:
    """The figures of some parts."""
    full = {"memory_gib": 80.0, "torch": "2", "transformers": "5", "rounds": 1, "tokens_per_batch": 8192}
    full |= {"device": device, "model": parts.BASE._asdict(), "parts": found}
    return full | {"dates": dict.fromkeys(found, "2026-01-01")}


def test_a_failure_on_a_gpu_is_a_row_of_the_page_and_of_the_exit_message() -> None:
    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    row = {"seconds": 0.5, "tokens_per_second": 16.0, "mib": 4.0, "kernels": ["x"], "kernel": "cuDNN"}
    good, bad = ({"outputs": x, "losses": x, "gradients": x, "within": x < 1} for x in (1e-6, 2.0))
    asa = parts.attempt(gpu.SMALL, "asa", too_large)  # type: ignore[arg-type]
    late = parts.attempt(gpu.SMALL._replace(end=0.0), "asa", too_large)  # type: ignore[arg-type]
    found = measured_on_a_gpu(
        "a GPU",
        agreement={"mask": {"bert": {"fp32": good, "bf16": bad}}},
        cost={"2048": {"plain": row, "asa": asa, "ag": late}},
    )
    text = gpu_page(found)
    assert "| `preset:asa`, two passes | out of memory |" in text
    assert "| `preset:ag` | no time left |" in text
    assert "| no guide | 500.0 | 1.00 | 16 | 4 | 1.00 | cuDNN |" in text
    assert "| mask | 1e-06, 1e-06, 1e-06 | 2e+00, 2e+00, 2e+00 | **no** |" in text
    assert "| agreement: within the limits | all | 1 of 2 | **fails** |" in text
    failed = [line.split(":")[0] for line in claims.failures(found["parts"])]
    assert failed == ["agreement, mask, bert, bf16", "cost, 2048, asa", "cost, 2048, ag"]


@pytest.mark.parametrize(
    ("device", "seconds", "mib", "rate", "failing"),
    [
        ("NVIDIA H100 80GB", 1.03, 1.02, 304_000, []),
        ("NVIDIA H100 80GB", 1.04, 1.02, 304_000, ["ag, 512 tokens: step"]),
        ("NVIDIA H200", 1.0, 1.03, 304_000, ["ag, 512 tokens: memory", "throughput, no guide"]),
        ("another", 1.0, 1.0, 1, []),
    ],
)
def test_claims_about_a_gpu_are_held_against_what_was_measured(
    device: str, seconds: float, mib: float, rate: float, failing: list[str]
) -> None:
    rows = {"plain": {"seconds": 1.0, "mib": 1.0}, "ag": {"seconds": seconds, "mib": mib}}
    quick = {"plain": {"tokens_per_second": 1.0}, "plain, compiled": {"tokens_per_second": rate}, "ag": {"error": "x"}}
    found = claims.claims(measured_on_a_gpu(device, cost={"512": rows | {"kl": rows["plain"]}}, throughput=quick))
    assert [one.name for one in found if one.holds is False] == failing
    unknown = [one.name for one in found if one.holds is None]
    assert unknown[0] == "agreement: within the limits" and all("512" not in name for name in unknown)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", parts.PARTS)
def test_a_part_of_the_measurement_on_a_gpu_runs_alone(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # so that this process may be forked
    try:
        for only in (part, "cost")[: 1 + (part == "backends")]:
            monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--only", only, "--out", str(tmp_path)])
            gpu.main()
    finally:
        torch.set_num_threads(before)
    out, found = capsys.readouterr().out, json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["parts"]) == list(found["dates"]) == [part, "cost"][: 1 + (part == "backends")]
    assert "not measured  ag, 8,192 tokens: step" in out and "FAILS" not in out
    assert (tmp_path / "gpu.md").read_text() == gpu_page(found)


@pytest.mark.every
def test_what_runs_on_a_gpu_needs_none_of_the_other_packages() -> None:
    others = {
        "typer",
        "pydantic",
        "rich",
        "numba",
        "scipy",
        "sklearn",
        "spacy",
        "stanza",
        "matplotlib",
        "cli",
        "pipelines",
    }
    program = f"import sys; sys.modules |= dict.fromkeys({others}); import benchmarks.gpu.__main__, pytest; "
    program += "sys.exit(pytest.main(['--confcutdir=tests/gpu', '--collect-only', '-q', 'tests/gpu']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def glove(tmp_path: Path) -> Path:
    """A stand-in for GloVe's checkout: its Makefile's target and variables, and a program with its formats."""
    checkout = tmp_path / "GloVe"
    (checkout / "src").mkdir(parents=True)
    (checkout / "Makefile").write_text("cooccur: src/cooccur.c\n\tcp src/cooccur.c $(BUILDDIR)/cooccur\n")
    program = checkout / "src" / "cooccur.c"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    return checkout


STAND_IN = """#!{python}
import struct, sys
from collections import Counter
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rank = {{line.split()[0]: n for n, line in enumerate(open(options["-vocab-file"]), 1)}}
counts = Counter()
for line in sys.stdin:
    words = [rank[word] for word in line.split()]
    for place, word in enumerate(words):
        for other in words[max(0, place - int(options["-window-size"])):place]:
            counts[word, other] += 1
            counts[other, word] += 1
for (i, j), count in sorted(counts.items()):
    sys.stdout.buffer.write(struct.pack("iid", i, j, count))
"""


def recorded(phase: str, run: trial.Run | Use, loss: float) -> dict[str, Any]:
    """The row of a run, as if it had been made."""
    row = {"phase": phase, "label": run.label, "seed": run.seed, "key": run.key}
    if isinstance(run, Use):
        scores = {"BLiMP": [0.5], "induction": [0.01 * place for place in range(10)]}
        return row | {"scores": scores.get(run.task, [0.5, 0.75])}
    row |= {"steps": run.steps, "loss": loss, "average": loss + 1, "seconds": 1.0}
    return row | {"valid": [[run.steps, loss]], "curve": [[1, 9.0], [run.steps // 2, loss + 1], [run.steps, loss]]}


def test_later_phases_of_the_trial_follow_what_earlier_ones_chose(tmp_path: Path) -> None:
    """Everything is good at mixing values, best in the four lowest layers, beside fixed heads."""
    results = trial.Results([])
    made: dict[str, list[Any]] = {}
    phases = {**lasting.PHASES, **decoders.PHASES}
    for phase in phases:
        for group in phases[phase](results):
            for place, run in enumerate(group):
                good = sum(word in run.label for word in ("value", "first 4", "; fix"))
                loss = 5.0 - good + 0.01 * place + (run.seed % 3) ** 2 / 2 * (run.label == "none")
                results.rows = [*results.rows, recorded(phase, run, loss)]
                made.setdefault(phase, []).append(run)
    assert {phase: len(runs) for phase, runs in made.items()} == {
        "plain": 10,
        "where": 9,
        "wide": 4,
        "together": 5,
        "final": 15,
        "own": 20,
        "own-of-winner": 2,
        "final-own": 6,
        "muon": 5,
        "final-roberta": 9,
        "final-oromo": 9,
        "final-hausa": 9,
        "patterns": 13,
        "use": 36,
        "use-hausa": 9,
        "use-patterns": 16,
        "larger": 3,
        "longer": 2,
        "causal-plain": 10,
        "causal-final": 18,
        "causal-use": 36,
    }
    winner = made["final"][2]
    assert winner.label == "mix of the value, first 4 layers; fix, all layers"
    assert [guide.mechanism for guide in winner.plan.guides] == ["mix", "mix", "fix", "fix"]
    assert {guide.layers for guide in winner.plan.guides} == {("first 4",), ("all",)}
    sham = made["final"][3].plan.guides
    assert [guide.pattern["where"] for guide in sham] == [f"distance == {d}" for d in (-7, 7, 7, -7)]
    assert winner.settings == {**made["plain"][0].settings, "evaluate_every": 600}
    assert len({run.key for runs in made.values() for run in runs if isinstance(run, trial.Run)}) == 140

    text = as_markdown(report(results, list(phases), {"books": {"unigram": 6.7, "neighbours": 3.0}}, {}), "trial")
    assert "seed 4), is below that of word frequencies, both neighbours." in text
    lines = [line.split(" | ") for line in text.splitlines()]
    (_, lead, _, *rest), _ = [cells for cells in lines if cells[0] == "| none" and len(cells) == 6]
    assert float(lead) == pytest.approx(3.0 - 0.02 + np.mean([0.5, 2.0, 0.0]), abs=1e-3) and rest[:2] == [
        "0.024",
        "0.024",
    ]
    (rises,) = {
        line.partition(" | ")[2]
        for line in text.splitlines()
        if line.startswith("| none (n = 3)") and "| 9.0 |" in line
    }
    assert rises == "0.0 | 1.0 | 2.0 | 3.0 | 4.0 | 5.0 | 6.0 | 7.0 | 8.0 | 9.0 |"


def test_methods_are_tuned_apart_from_the_figures_and_at_the_rate_of_plain_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = replace(TABLES["published"], start=None)
    table = replace(table, data={"SST": replace(table.data["SST"], build=lambda store: "corpus/0")})
    calls = []

    def searched(reference: str, settings: dict[str, Any], store: Store, **more: Any) -> SimpleNamespace:
        calls.append({"seed": 0} | settings | more)
        name, _, values = more["grid"][0].partition("=") if "grid" in more else ("", "", "")
        best = values.split(",")[-1]  # the last one is best
        return SimpleNamespace(counts={"chosen": [f"{name}={[best] if name == 'plan' else best}"]})

    monkeypatch.setattr(finetuning, "searched", searched)
    store = Store(tmp_path)
    assert finetuning.chosen_setting(table, "plain", "SST", [], store) == {"learning_rate": 2e-4}
    chosen = finetuning.chosen_setting(table, "ASA", "SST", [], store)
    assert chosen["learning_rate"] == 2e-4 and "tau = 1.0" in Path(chosen["plan"]).read_text(encoding="utf-8")
    measured = [{"label": "plain", "data": "SST", "chosen": {"learning_rate": 5e-5}}]
    freelb = {"learning_rate": 5e-5, "adversarial_rate": 0.3}
    assert finetuning.chosen_setting(table, "FreeLB-3", "SST", measured, store) == freelb
    assert {call["seed"] for call in calls} == {100}
    assert [call.get("learning_rate") for call in calls] == [None, None, 2e-4, 5e-5]


def test_make_bench_runs_scripts_that_exist() -> None:
    dry = subprocess.run(["make", "--dry-run", "bench"], cwd=ROOT, capture_output=True, text=True, check=True)
    started = {word.removeprefix("benchmarks.") for word in dry.stdout.split() if word.startswith("benchmarks.")}
    assert started and started <= set(TINY), json.dumps(sorted(started))
