"""Very long lines, words and files: memory and time, measured in a forked child, stay within bounds."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from guidance.errors import GuideError
from pipelines.stages import corpus, sequences, tokenizer
from pipelines.storage.store import Store
from tests.tiny import in_child


def megabytes(kind: str) -> float:
    """Memory of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) / 1024


def build(path: Path, settings: dict[str, Any], whole: bool) -> dict[str, Any]:
    """Counts and warnings of a corpus of this file, and with ``whole`` also of its sequences; or the error."""
    store = Store(path.parent / "store")
    try:
        text = corpus.run([str(path)], corpus.Config(**settings), store=store).artifact
        answer = {"counts": text.counts, "warnings": text.manifest["warnings"]}
        if whole:
            made = tokenizer.run(text.reference, tokenizer.Config(vocab_size=400), store=store)
            packed = sequences.run(text.reference, made.reference, sequences.Config(), store=store)
            answer["sequences"] = packed.artifact.counts
    except GuideError as error:
        answer = {"error": error.message}
    return answer


def measure(path: Path, *, whole: bool = False, **settings: object) -> dict[str, Any]:
    """What `build` answers, the memory that it takes beyond that of this process, and its seconds."""

    def child() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the largest size so far
        before, started = megabytes("VmRSS"), sum(os.times()[:4])
        answer = build(path, settings, whole)
        answer["megabytes"] = megabytes("VmHWM") - before
        answer["seconds"] = sum(os.times()[:4]) - started  # of processor time, since other programs may use the machine
        (path.parent / "answer.json").write_text(json.dumps(answer))

    assert in_child(child) == 0
    answer: dict[str, Any] = json.loads((path.parent / "answer.json").read_text())
    assert answer["megabytes"] < 800
    assert answer["seconds"] < 60
    return answer


def test_one_line_of_50_mb(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"Some words stand here. " * (50_000_000 // 23))
    answer = measure(path, sentences="line")
    assert answer["megabytes"] < 300
    assert answer["counts"]["words"] == 50_000_000 // 23 * 4
    assert answer["counts"]["blocks"] >= 500


@pytest.mark.every
def test_a_long_line_goes_through_all_stages(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"Some words stand here. " * (4_000_000 // 23))
    answer = measure(path, whole=True)
    assert answer["counts"]["sentences"] == 4_000_000 // 23
    assert answer["counts"]["splits"]["valid"]["blocks"] > 0


@pytest.mark.every
def test_a_word_of_a_million_letters(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 1_000_000 + b" b. c\n")
    answer = measure(path, whole=True)
    assert answer["counts"]["characters"] >= 1_000_000
    assert answer["sequences"]["splits"]["train"]["tokens"] > 10


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["file", "line"])
def test_200_000_lines_of_one_letter(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(b"%c\n" % (97 + n % 26) for n in range(200_000)))
    answer = measure(path, documents=layout)
    assert answer["counts"]["documents"] == (1 if layout == "file" else 26)
    assert layout == "file" or answer["counts"]["dropped"] == {"duplicate": 199_974}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("letters", ["(", "'s", "\u0301"])
def test_runs_that_make_a_parser_quadratic(letters: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("A. " + letters * (100_000 // len(letters)) + " B.", encoding="utf-8")
    answer = measure(path)
    assert answer["seconds"] < 20


def test_a_gzip_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    piece = gzip.compress(b"\n" * (64 << 20), 9)
    path.write_bytes(piece * 17)
    answer = measure(path)
    assert "bomb" in answer["error"]
    assert answer["megabytes"] < 200


def test_one_record_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b"ab " * (40 << 20), 1))
    assert "line 1: over 104,857,600 characters" in measure(path)["error"]


@pytest.mark.every
def test_a_parquet_bomb_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * (1 << 20)]))
    pq.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1000
    answer = measure(path, sentences="line")
    assert "bomb" in answer["error"]
    assert answer["megabytes"] < 200
