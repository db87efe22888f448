"""The executor: the same bytes wherever shards are processed, and a fault costs only the unfinished shards."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from guidance.errors import InputError, MachineError, UnknownName
from pipelines.engine import executor
from pipelines.engine.shards import evenly, shards_of
from pipelines.stages import corpus
from pipelines.storage import removal
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged, ArtifactInUse
from pipelines.storage.store import Store
from tests import works

ROOT = Path(__file__).resolve().parents[3]
TEXT = [
    f"Document {n} begins. " + "\n\n".join(f"Block {k} of {n} is here." for k in range(1 + n % 4)) for n in range(12)
]
SIZE = 60


@pytest.fixture
def text(store: Store, tmp_path: Path) -> Artifact:
    """A corpus of 30 blocks."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number, content in enumerate(TEXT):
        (folder / f"{number:02}.txt").write_text(content)
    return corpus.run([str(folder)], corpus.Config(valid=0.0), store=store).artifact


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    return folder


def blocks_of(text: Artifact) -> list[str]:
    return pq.read_table(text.path / "blocks.parquet", columns=["text"])["text"].to_pylist()


def texts_in(result: Any) -> list[str]:
    return pq.read_table(result.artifact.path / "text.parquet")["text"].to_pylist()


def partial_files(store: Store) -> list[Path]:
    return sorted(path for folder in store.unfinished() for path in folder.glob("*.partial"))


def start(text: Artifact, store: Store, *settings: str, **environment: str) -> subprocess.Popen[str]:
    """Start the stage in its own process group, as a shell does."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.works", str(text.path), str(store.root), *settings],
        cwd=ROOT,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_continues(text: Artifact, store: Store, traces: Path, kept: int) -> None:
    """Run an interrupted stage again; it must process only the shards that were not ``kept``."""
    for path in traces.iterdir():
        path.unlink()
    result = works.run_stage(text, store, work="traced", shard_size=SIZE, traces=str(traces))
    assert result is not None
    assert texts_in(result) == blocks_of(text)
    assert len(list(traces.iterdir())) == len(shards_of(text, SIZE)) - kept


# shards


@pytest.mark.parametrize("size", [1, 30, 100, 1000, 10**9])
def test_shards_cover_the_corpus_in_order(size: int, text: Artifact) -> None:
    shards = shards_of(text, size)
    assert [block for shard in shards for block in shard.read(["text"])["text"].to_pylist()] == blocks_of(text)
    assert len({shard.name for shard in shards}) == len(shards)
    assert [shard.name for shard in shards] == sorted(shard.name for shard in shards)
    assert len(shards) == {1: 30, 10**9: 1}.get(size, len(shards))


@pytest.mark.parametrize("size", [1, 30, 100, 1000, 10**9])
@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_every_document_is_whole_in_one_shard(size: int, rows: int, text: Artifact, tmp_path: Path) -> None:
    whole = pq.read_table(text.path / "blocks.parquet")
    pq.write_table(whole, tmp_path / "blocks.parquet", row_group_size=rows)
    os.replace(tmp_path / "blocks.parquet", text.path / "blocks.parquet")  # several row groups, as in a large corpus
    found = [
        (document, block)
        for shard in shards_of(text, size)
        for table in shard.documents(["document", "text"])
        for document, block in zip(table["document"].to_pylist(), table["text"].to_pylist(), strict=True)
    ]
    assert found == list(zip(whole["document"].to_pylist(), whole["text"].to_pylist(), strict=True))
    for shard in shards_of(text, size):
        documents = [n for table in shard.documents(["document"]) for n in table["document"].to_pylist()]
        begins = shard.read(["document", "block"])
        own = [d for d, b in zip(begins["document"].to_pylist(), begins["block"].to_pylist(), strict=True) if b == 0]
        assert sorted(set(documents)) == own


def test_a_shard_may_span_several_row_groups(text: Artifact, tmp_path: Path) -> None:
    whole = pq.read_table(text.path / "blocks.parquet")
    pq.write_table(whole, tmp_path / "blocks.parquet", row_group_size=2)
    os.replace(tmp_path / "blocks.parquet", text.path / "blocks.parquet")
    shards = shards_of(text, 1000)
    assert 2 < len(shards) < 10
    assert max(len(shard.pieces) for shard in shards) > 2


def test_a_damaged_page_of_the_corpus_is_an_error(text: Artifact) -> None:
    path = text.path / "blocks.parquet"
    data = bytearray(path.read_bytes())
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(5)
    data[chunk.dictionary_page_offset + chunk.total_compressed_size // 4] ^= 255
    path.write_bytes(data)
    with pytest.raises(ArtifactDamaged, match=r"blocks\.parquet"):
        shards_of(text, SIZE)[0].read(["text"])


def test_a_corpus_that_a_worker_cannot_see_is_named(text: Artifact) -> None:
    shard = shards_of(text, SIZE)[0]
    os.rename(text.path, text.path.with_name("elsewhere"))
    with pytest.raises(MachineError, match="cannot find") as caught:
        shard.read(["text"])
    assert "all workers share" in str(caught.value.hint)


# the same bytes


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"shard_size": 1},
        {"jobs": 2, "shard_size": SIZE},
        {"jobs": 4, "shard_size": 150},
        {"jobs": 50, "shard_size": 500},
        {"executor": "dask", "jobs": 2, "shard_size": SIZE},
    ],
    ids=str,
)
def test_the_result_has_the_same_bytes_everywhere(settings: dict[str, Any], text: Artifact, store: Store) -> None:
    expected = works.run_stage(text, store)
    assert expected is not None
    assert texts_in(expected) == blocks_of(text)
    again = works.run_stage(text, store, force=True, **settings)
    assert again is not None
    assert not again.reused
    assert again.artifact.content == expected.artifact.content
    assert store.unfinished() == []


def test_rows_are_regrouped_into_tables_of_one_size() -> None:
    import pyarrow as pa

    numbers = list(range(23))
    for cuts in ([], [1], [5, 5, 6], [10, 20], list(range(23))):
        bounds = [0, *cuts, 23]
        parts = [
            pa.table({"n": numbers[a:b]}, schema=pa.schema([("n", pa.int64())])) for a, b in itertools.pairwise(bounds)
        ]
        tables = list(evenly(parts, 5))
        assert [t["n"].to_pylist() for t in tables] == [numbers[a : a + 5] for a in range(0, 23, 5)]
        assert all(t["n"].num_chunks == 1 for t in tables)
    assert list(evenly([], 5)) == []


# --shard i/n


def test_shard_runs_do_their_part_and_the_run_without_shard_merges(text: Artifact, store: Store, traces: Path) -> None:
    settings = {"work": "traced", "shard_size": SIZE, "traces": str(traces)}
    assert works.run_stage(text, store, shard="1/3", **settings) is None
    assert works.run_stage(text, store, shard="3/3", **settings) is None
    number = len(shards_of(text, SIZE))
    assert len(partial_files(store)) == len(range(0, number, 3)) + len(range(2, number, 3))
    result = works.run_stage(text, store, **settings)
    assert result is not None
    assert texts_in(result) == blocks_of(text)
    assert len(list(traces.iterdir())) == number  # no shard twice
    late = works.run_stage(text, store, shard="2/3", **settings)
    assert late is not None
    assert late.reused
    assert store.unfinished() == []


def test_shard_runs_run_at_once_and_the_merge_waits_for_them(text: Artifact, store: Store, traces: Path) -> None:
    settings = ["work=traced", f"shard_size={SIZE}", f"traces={traces}"]
    running = [start(text, store, *settings, f"shard={n}/3") for n in (1, 2, 3)]
    running.append(start(text, store, *settings, "shard=2/3"))  # the same one twice
    assert [process.wait(60) for process in running] == [0, 0, 0, 0]
    result = works.run_stage(text, store, work="traced", shard_size=SIZE, traces=str(traces))
    assert result is not None
    assert texts_in(result) == blocks_of(text)


def test_a_shard_run_and_a_merge_exclude_each_other(text: Artifact, store: Store, traces: Path) -> None:
    settings = {"work": "slow", "shard_size": SIZE, "traces": str(traces)}
    running = start(text, store, *(f"{key}={value}" for key, value in settings.items()), "shard=1/2")
    wait_until(lambda: list(traces.glob("slow.*")))
    (folder,) = store.unfinished()
    with pytest.raises(ArtifactInUse, match="1/2"):
        works.run_stage(text, store, wait=False, **settings)
    with pytest.raises(ArtifactInUse):
        removal.remove_unfinished(store, folder)
    os.killpg(running.pid, signal.SIGTERM)
    assert running.wait(20) == 143
    removal.collect(store)
    assert len(partial_files(store)) == 2
    removal.remove_unfinished(store, folder)
    assert store.unfinished() == []


@pytest.mark.parametrize("shard", ["0/3", "4/3", "3", "1/0", "a/b", "1/2/3", "-1/3"])
def test_a_malformed_shard_is_refused(shard: str) -> None:
    with pytest.raises(ValueError, match="3/8"):
        executor.Config(shard=shard)


def test_a_shard_run_takes_no_name_and_no_force(text: Artifact, store: Store) -> None:
    for option in ({"name": "x"}, {"force": True}):
        with pytest.raises(InputError, match="publishes no artifact"):
            works.run_stage(text, store, shard="1/2", **option)


def test_with_fewer_shards_than_runs_some_runs_do_nothing(text: Artifact, store: Store) -> None:
    assert works.run_stage(text, store, shard="9/9") is None
    assert partial_files(store) == []


def test_partial_files_of_another_shard_size_cause_a_warning(
    text: Artifact, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    works.run_stage(text, store, shard="1/2", shard_size=SIZE)
    works.run_stage(text, store)
    assert "another --shard-size" in caplog.text


# partial files


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    changed = {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "zeros": bytes(len(data)),
        "one bit": data[:9] + bytes([data[9] ^ 1]) + data[10:],
    }[kind]
    path.write_bytes(changed)


@pytest.mark.parametrize("kind", ["truncated", "empty", "zeros", "one bit"])
def test_a_damaged_partial_file_is_made_again(kind: str, text: Artifact, store: Store, traces: Path) -> None:
    settings = {"work": "traced", "shard_size": SIZE, "traces": str(traces)}
    for shard in ("1/2", "2/2"):
        works.run_stage(text, store, shard=shard, **settings)
    before = len(list(traces.iterdir()))
    damage(partial_files(store)[3], kind)
    result = works.run_stage(text, store, **settings)
    assert result is not None
    assert texts_in(result) == blocks_of(text)
    assert len(list(traces.iterdir())) == before + 1


def test_a_damaged_merged_file_is_made_again(text: Artifact, store: Store, tmp_path: Path) -> None:
    from pipelines.engine.shards import FAN_IN, map_shards, merge_tree
    from pipelines.progress import Progress

    config = works.Config(shard_size=1)
    paths = map_shards(works.copy, shards_of(text, 1), {}, tmp_path / "partial", config, Progress())
    assert len(paths) == 30 > FAN_IN
    merged = merge_tree(works.join, paths, {}, config)
    before = merged.read_bytes()
    for path in (tmp_path / "partial").glob("merged-*"):
        damage(path, "zeros")
    again = merge_tree(works.join, paths, {}, config)
    assert again.read_bytes() == before
    assert pq.read_table(again)["text"].to_pylist() == blocks_of(text)


def test_unfinished_work_is_listed_and_kept_by_gc(text: Artifact, store: Store, guide: Any) -> None:
    works.run_stage(text, store, shard="1/2", shard_size=SIZE)
    listed = json.loads(guide("ls", "--json").out)["unfinished"]
    assert [entry["kind"] for entry in listed] == ["copy"]
    assert guide("gc", "--unnamed").code == 0
    assert len(partial_files(store)) > 0


# workers that die, fail or log


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", ["local", "dask"])
def test_a_killed_worker_costs_its_shard_not_the_run(where: str, text: Artifact, store: Store, traces: Path) -> None:
    result = works.run_stage(
        text, store, work="dying_once", executor=where, jobs=2, shard_size=SIZE, traces=str(traces)
    )
    assert result is not None
    assert (traces / "died").exists()
    assert texts_in(result) == blocks_of(text)
    expected = works.run_stage(text, store, force=True)
    assert expected is not None
    assert result.artifact.content == expected.artifact.content
    assert store.unfinished() == []


@pytest.mark.every
@pytest.mark.parametrize("where", ["dask", "local"])
def test_workers_that_keep_dying_end_the_run(where: str, text: Artifact, store: Store) -> None:
    with pytest.raises(MachineError, match="died") as caught:
        works.run_stage(text, store, work="dying", executor=where, jobs=2, shard_size=200)
    assert "--shard-size" in str(caught.value.hint)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", ["local", "dask"])
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_in_a_shard_reaches_the_caller_unchanged(
    where: str, jobs: int, text: Artifact, store: Store, traces: Path
) -> None:
    with pytest.raises(UnknownName, match="gren") as caught:
        works.run_stage(text, store, work="refusing", executor=where, jobs=jobs, shard_size=SIZE, traces=str(traces))
    assert caught.value.hint == "known: green, red"
    names = [path.name.rpartition(".")[0] for path in traces.iterdir()]
    assert len(names) == len(set(names))  # no shard is retried: it cannot succeed
    assert partial_files(store) == []


@pytest.mark.every
@pytest.mark.parametrize("settings", [["jobs=2"], ["executor=dask", "jobs=2"]], ids=str)
def test_workers_print_and_log_nothing(settings: list[str], text: Artifact, store: Store) -> None:
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # taken by another program
            other.bind(("", 8787))
            other.listen()
        process = start(text, store, "work=chatty", f"shard_size={SIZE}", *settings)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("settings", [["executor=dask", "jobs=2"], ["jobs=2"]], ids=str)
def test_a_full_disk_in_a_worker_is_a_machine_error(settings: list[str], text: Artifact, store: Store) -> None:
    process = start(text, store, f"shard_size={SIZE}", *settings, GUIDE_FAILPOINT="write:1:ENOSPC")
    assert (process.wait(120), process.communicate()[1]) == (3, "")
    (folder,) = store.unfinished()
    # an interrupted worker leaves a hidden file, which does not count as a partial file
    assert sorted(p for p in folder.iterdir() if not p.name.startswith(".")) == partial_files(store)
    result = works.run_stage(text, store, shard_size=SIZE)
    assert result is not None
    assert texts_in(result) == blocks_of(text)


# stopping


@pytest.mark.one_in(2)
@pytest.mark.parametrize("settings", [["jobs=2"], ["executor=dask", "jobs=2"]], ids=str)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_a_stopped_run_leaves_no_process_and_can_be_continued(
    settings: list[str], number: signal.Signals, text: Artifact, store: Store, traces: Path
) -> None:
    process = start(text, store, "work=slow", f"shard_size={SIZE}", f"traces={traces}", *settings)
    wait_until(lambda: len(list(traces.glob("slow.*"))) >= 2)
    workers = [int(path.suffix[1:]) for path in traces.glob("slow.*")]
    os.killpg(process.pid, number)  # to the whole group, as a terminal does
    assert process.wait(20) == (130 if number == signal.SIGINT else 143)
    assert process.communicate()[1] == ""
    wait_until(lambda: not any(map(is_alive, workers)), 5)
    kept = len(partial_files(store))
    assert kept >= 2
    check_continues(text, store, traces, kept)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("settings", [["jobs=2"], ["executor=dask", "jobs=2"]], ids=str)
def test_workers_end_when_their_parent_is_killed(
    settings: list[str], text: Artifact, store: Store, traces: Path
) -> None:
    process = start(text, store, "work=slow", f"shard_size={SIZE}", f"traces={traces}", *settings)
    wait_until(lambda: len(list(traces.glob("slow.*"))) >= 2)
    workers = [int(path.suffix[1:]) for path in traces.glob("slow.*")]
    process.kill()
    wait_until(lambda: not any(map(is_alive, workers)), 10)
    process.communicate()
    (folder,) = store.unfinished()
    removal.remove_unfinished(store, folder)  # no lock is left on it
