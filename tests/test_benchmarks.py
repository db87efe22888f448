"""Every script in ``benchmarks/`` runs with a tiny setting, so that ``make bench`` does not stop half-way."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import shared

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__"}
PARSER = "models/spacy-en_ud_ewt_sm"

TINY = {
    "attack_cost": "TEXT --lengths 16 --tokens 32 --rounds 1 --out OUT",
    "cooccurrence": "TEXT --rounds 1 --window 2 --top 50 --vocab-size 300 --glove GLOVE",
    "finetuning": "roles --only CNN --data TREC --store STORE --out OUT",
    "masks_speed": "TEXT --rounds 1",
    "parsing": "PARSER TEXT/0.txt --characters 2000 --rounds 1 --jobs 1",
    "pretraining": "fair --only plain,·rate·0.001,·warm-up·0 --steps 2 --store STORE --out OUT",
    "sentences": "TEXT --speed TEXT/0.txt --rounds 1",
    "statistics_scale": "TEXT --sizes 0.01 --stages idf --runs 1",
    "step_cost": "--device cpu --rounds 1 --only plain --lengths 16 --dropouts 0.0",
    "text_speed": "TEXT --rounds 1",
    "trial": "--first 1 --steps 2 --store STORE --out OUT",
}
"""The arguments of each benchmark; ``·`` is a space within one of them."""


def test_every_benchmark_has_a_tiny_setting() -> None:
    assert SCRIPTS - set(TINY) == set()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of texts, where `pretraining` looks for its novels, and questions for `finetuning`."""
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


@pytest.mark.one_in(4)
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


def test_make_bench_runs_scripts_that_exist() -> None:
    dry = subprocess.run(["make", "--dry-run", "bench"], cwd=ROOT, capture_output=True, text=True, check=True)
    started = {word.removeprefix("benchmarks.") for word in dry.stdout.split() if word.startswith("benchmarks.")}
    assert started and started <= set(TINY), json.dumps(sorted(started))
