"""The corpus on shards: the same bytes for any shards and any number of processes, and a run that was killed goes on."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from guidance.errors import InputError
from pipelines.stages import corpus
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.text import corpus_writer, drafts
from pipelines.text.blocks import Notes, bounded_lines, paragraphs
from pipelines.text.pieces import Piece, cut_file

ROOT = Path(__file__).resolve().parents[3]
WORDS = ["Sun", "moon.", "stars,", "über", "Żółw", "e\u0301t\u00e9", "नमस्ते।", "3.14", "a", "Yes!", "\ufeffmark", "\x01"]


def prose(seed: int, size: int, end: str = "\n") -> str:
    """Paragraphs of wrapped lines, some of them blank lines with spaces, of several hundred characters each."""
    draw = random.Random(seed)
    lines = []
    while sum(map(len, lines)) < size:
        lines += [" ".join(draw.choices(WORDS, k=draw.randrange(3, 9))) for _ in range(draw.randrange(1, 7))]
        lines += draw.choice([[""], ["", ""], [" \t"], ["\u3000", ""]])
    return end.join(lines)


def build(store: Store, *sources: str | Path, stdin: Any = None, **settings: Any) -> Artifact:
    result = corpus.run([str(s) for s in sources], corpus.Config(**settings), store=store, stdin=stdin, force=True)
    assert result is not None
    return result.artifact


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of all formats, large and small, with duplicates in several of them."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text(prose(0, 20_000), encoding="utf-8")
    (folder / "b.txt").write_text("Small. Text.", encoding="utf-8")
    (folder / "c.txt").write_text(prose(0, 20_000), encoding="utf-8")
    (folder / "d.txt").write_bytes(prose(1, 9_000, "\r\n").encode())
    (folder / "e.txt").write_text("".join(f"Sentence {n} stands here alone.\n" for n in range(900)), encoding="utf-8")
    (folder / "g.TXT.GZ").write_bytes(gzip.compress(prose(3, 9_000).encode(), mtime=0))
    (folder / "f.txt.gz").write_bytes(gzip.compress(prose(2, 9_000).encode(), mtime=0))
    records = [{"text": f"Record {n % 70}. And more.", "id": f"id {n}"} for n in range(100)]
    (folder / "g.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "h.txt").write_text("Small. Text.")
    rows = pa.table({"text": [f"Row {n % 70}.\n\nAnd more." for n in range(100)]})
    pq.write_table(rows, folder / "i.parquet", row_group_size=9)
    (folder / "j.csv").write_text("text\nOne.\nTwo.\n")
    (folder / "k.txt").write_text("word " * 60_000 + "\n\n" + prose(3, 4_000), encoding="utf-8")
    return folder


@pytest.mark.one_in(3)
@pytest.mark.parametrize("documents", ["file", "paragraph", "line"])
def test_the_bytes_do_not_depend_on_the_shards(documents: str, folder: Path, store: Store) -> None:
    whole = build(store, folder, documents=documents)
    assert whole.counts["dropped"]["duplicate"] > 60
    expected = whole.content, whole.manifest["warnings"], whole.counts
    for size in (500, 3_000, 40_000):
        made = build(store, folder, documents=documents, shard_size=size)
        assert (made.content, made.manifest["warnings"], made.counts) == expected


def test_the_bytes_do_not_depend_on_the_number_of_processes(folder: Path, store: Store) -> None:
    expected = build(store, folder).content
    assert build(store, folder, shard_size=5_000, jobs=2).content == expected


def test_shares_of_the_work_are_joined(folder: Path, store: Store) -> None:
    expected = build(store, folder).content
    other = Store(store.root.with_name("other"))
    for share in ("1/2", "2/2"):
        settings = corpus.Config(shard=share, shard_size=5_000)
        assert corpus.run([str(folder)], settings, store=other) is None
    partial = {path: path.stat().st_mtime_ns for path in other.unfinished()[0].glob("*.partial")}
    assert len(partial) > 10
    result = corpus.run([str(folder)], corpus.Config(shard_size=5_000), store=other)
    assert result is not None and result.artifact.content == expected
    assert not other.unfinished()


def stopped(folder: Path, store: Store, size: int, failpoint: str) -> int:
    """The exit code of a run in another process that is stopped half-way."""
    command = [sys.executable, "-m", "cli", "build-corpus", str(folder), "--store", str(store.root)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GUIDE_FAILPOINT": failpoint}
    return subprocess.run(
        [*command, "--shard-size", str(size)], env=environment, capture_output=True, cwd=ROOT
    ).returncode


def test_a_killed_run_goes_on_where_it_was(folder: Path, store: Store) -> None:
    expected = build(store, folder).content
    other = Store(store.root.with_name("other"))
    assert stopped(folder, other, 4_000, "fsync:9:kill") == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in other.unfinished()[0].glob("*.partial")}
    assert len(before) == 8
    made: list[str] = []
    original = corpus.draft

    def traced(shard: Any, settings: Any, path: Path) -> None:
        made.append(shard.name)
        original(shard, settings, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "draft", traced)
        result = corpus.run([str(folder)], corpus.Config(shard_size=4_000), store=other)
    assert result is not None and result.artifact.content == expected
    assert made and not {name.split(".")[0] for name in before} & set(made)


def test_an_interrupted_run_keeps_its_shards(folder: Path, store: Store) -> None:
    assert stopped(folder, store, 2_000, "fsync:12:int") == 130
    assert len(list(store.unfinished()[0].glob("*.partial"))) >= 11


def test_standard_input_is_divided_like_a_file(store: Store) -> None:
    text = prose(5, 30_000).encode()
    whole = build(store, "-", stdin=io.BytesIO(text))
    parts = build(store, "-", stdin=io.BytesIO(text), shard_size=2_000)
    assert whole.content == parts.content


def test_progress_counts_bytes(folder: Path, store: Store) -> None:
    from contextlib import contextmanager

    from pipelines.progress import Progress, Task

    seen: list[tuple[str, float | None, list[float]]] = []

    class Counting(Progress):
        @contextmanager
        def task(self, title: str, *, total: float | None = None, unit: str = "", done: float = 0) -> Any:
            amounts: list[float] = []
            seen.append((unit, total, amounts))
            task = Task()
            task.advance = lambda amount=1, note="": amounts.append(amount)  # type: ignore[method-assign]
            yield task

    path = folder / "a.txt"
    corpus.run([str(path)], corpus.Config(shard_size=4_000), store=store, progress=Counting())
    unit, total, amounts = seen[0]
    assert (unit, total, sum(amounts)) == ("B", path.stat().st_size, path.stat().st_size)
    assert len(amounts) >= 4


def test_an_error_far_into_a_file_names_its_line_and_byte(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"Some words.\r\n\r\n" * 1000 + b"b\xff")
    for size in (100, 10_000_000):
        with pytest.raises(InputError, match=r"'a\.txt', line 2001, byte 15001 of the file: not utf-8"):
            build(store, path, shard_size=size)
        assert store.unfinished() == []
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "A."}\n' * 1000 + '{"text": 1}\n')
    with pytest.raises(InputError, match=r"'a\.jsonl', line 1001"):
        build(store, path, shard_size=100)


def test_the_same_id_in_two_shards_is_an_error(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"T {n}.", "id": n % 900}) + "\n" for n in range(1000)))
    with pytest.raises(InputError, match=r"'a\.jsonl', line 901: duplicate id '0', first used at 'a\.jsonl', line 1"):
        build(store, path, shard_size=2_000)


def test_parts_begin_where_asked_and_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    data = "".join(
        f"Line {n}.{end}" for n, end in zip(range(1, 2001), ["\n", "\r\n", "\n\n", "\r\r\n"] * 500, strict=True)
    )
    path.write_bytes(data.encode())
    piece = Piece(1, str(path), "a.txt", "text", len(data))
    for cut in ("line", "page", "blank line"):
        parts, is_mixed = cut_file(piece, 1_000, cut)  # type: ignore[arg-type]
        assert is_mixed and len(parts) > 5
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (0, None)
        assert sum(part.size for part in parts) == len(data)
        for part in parts:
            before = data[: part.start].replace("\r\n", "\n").replace("\r", "\n")
            assert part.line == before.count("\n") + 1
            assert cut != "page" or (part.line - 1) % 100 == 0
            assert cut != "blank line" or part.start == 0 or before.endswith("\n\n")


@pytest.mark.parametrize("keep_lines", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_paragraphs_do_not_depend_on_how_a_text_arrives(seed: int, keep_lines: bool) -> None:
    draw = random.Random(seed)
    text = (
        prose(seed, 30_000)
        + draw.choice(["", "\n", "\n \n"])
        + "word. " * draw.choice([1, 20_000, 100_000])
        + "\n\nEnd"
    )
    bounds = sorted(draw.choices(range(len(text)), k=30))
    chunks = [text[start:stop] for start, stop in zip([0, *bounds], [*bounds, len(text)], strict=True)]
    page = draw.choice([0, 3]) if keep_lines else 0
    whole, parts = (
        list(paragraphs(bounded_lines(given), source="a", notes=Notes(), keep_lines=keep_lines, page=page))
        for given in ([text], chunks)
    )
    assert parts == whole


def test_a_small_text_needs_neither_spacy_nor_torch(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Two sentences. Here they are.")
    program = (
        "import sys\nfrom cli.main import run\n"
        f"assert run(['build-corpus', {str(tmp_path / 'a.txt')!r}, '--store', {str(store.root)!r}]) == 0\n"
        "print([name for name in ('spacy', 'torch', 'transformers', 'stanza') if name in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.5


def test_a_draft_is_read_once_for_the_digests_of_whole_documents(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row groups end inside documents and between them; no document may cost another pass over a large file."""
    path = tmp_path / "rows.csv"
    texts = [f"Text {number} says this. And that." for number in range(40)]
    path.write_text("text\n" + "".join(f"{text}\n" for text in [*texts, texts[7]]))
    expected = corpus.run([str(path)], corpus.Config(), store=store)
    monkeypatch.setattr(drafts, "BATCH_BLOCKS", 3)

    def refused(*_: object) -> None:
        raise AssertionError("the draft is read again")

    monkeypatch.setattr(drafts.Draft, "texts", refused)
    found = corpus.run([str(path)], corpus.Config(), store=store, force=True)
    assert expected is not None and found is not None
    assert found.artifact.counts == expected.artifact.counts
    assert found.artifact.counts["documents"] == 40


def test_row_groups_of_documents_do_not_depend_on_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"This is line {number}.\n" for number in range(500)))
    for module in (drafts, corpus_writer):
        monkeypatch.setattr(module, "BATCH_BLOCKS", 70)
    made = []
    for size in (1000, 1700, 1_000_000):
        store = Store(tmp_path / str(size))
        made.append(corpus.run([str(path)], corpus.Config(documents="line", shard_size=size), store=store).artifact)
    assert len({artifact.content for artifact in made}) == 1
    metadata = pq.read_metadata(made[0].path / "documents.parquet")
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert groups == [70] * 7 + [10]
