"""Counting token pairs: ours against scipy.sparse, numpy and, given its source, the C program of the GloVe authors.

    python -m benchmarks.cooccurrence [FILE_OR_FOLDER] [--window 15] [--top 5000] [--rounds 3] [--copies 20]
    python -m benchmarks.cooccurrence --glove CHECKOUT   # a checkout of stanfordnlp/GloVe, built with its own Makefile

The default text is ``builtin:python-docs``.  All programs count the same units, blocks of text, in one thread and a
process each.  They take turns in every round; the smallest time of each is reported.  The C program reads words from a
text file (here, ids) and drops those outside its vocabulary without leaving gaps, so such tokens are removed for all
programs.  Its time includes start-up.  The time of "ours, files" runs from encoded ids to counts in Parquet; the start
of Python and the loading of compiled code are reported separately.  All programs must find the same counts.

With ``--copies N``, ``build-cooccur`` as a whole also runs on N copies of the text, with one process and with two.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.engine.shards import parquet_file, row_groups, shards_of
from pipelines.stages import cooccurrence, corpus, tokenizer
from pipelines.statistics import pair_files
from pipelines.storage.store import Store
from pipelines.text.encoding import tokenizer_folder

KERNEL, FILES, SCIPY, NUMPY, GLOVE = "ours", "ours, files", "scipy.sparse", "numpy", "GloVe's cooccur"


# the programs: generators that yield when ready, yield when done counting, and then yield the counts


def ours(folder: Path, window: int) -> Iterator[Any]:
    from pipelines.statistics.pair_counting import count_pairs

    rows, offsets, size = read_text(folder)
    list(count_pairs(rows[:50], np.array([0, 50]), size, window=window))
    yield
    parts = list(count_pairs(rows, offsets, size, window=window))
    yield
    yield tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def ours_files(folder: Path, window: int) -> Iterator[Any]:
    import pyarrow.parquet as pq

    ids = json.loads((folder / "ids.json").read_text())
    kept = [str(path) for path in sorted(folder.glob("kept-*"))]
    settings = {"ids": ids, "window": window, "presence": False}
    pair_files.count(pair_files.PartialFiles(tuple(kept[:1])), settings, folder / f"warm-{os.getpid()}")
    yield
    pair_files.count(pair_files.PartialFiles(tuple(kept)), settings, folder / f"counts-{os.getpid()}")
    yield
    found = pq.read_table(folder / f"counts-{os.getpid()}")
    yield tuple(found[name].to_numpy() for name in ("i", "j", "count"))


def scipy_sparse(folder: Path, window: int) -> Iterator[Any]:
    from scipy.sparse import coo_array

    rows, offsets, size = read_text(folder)
    unit = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    yield
    counts: Any = None
    for distance in range(1, window + 1):
        together = unit[distance:] == unit[:-distance]
        one, other = rows[:-distance][together], rows[distance:][together]
        pairs = (np.minimum(one, other), np.maximum(one, other))
        found = coo_array((np.ones(len(one), np.int64), pairs), shape=(size, size)).tocsr()
        counts = found if counts is None else counts + found
    table = counts.tocoo()
    yield
    yield table.row, table.col, np.where(table.row == table.col, 2, 1) * table.data


def plain_numpy(folder: Path, window: int) -> Iterator[Any]:
    rows, offsets, size = read_text(folder)
    unit = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    yield
    counts = np.zeros(size * size, np.int64)
    for distance in range(1, window + 1):
        together = unit[distance:] == unit[:-distance]
        one, other = rows[:-distance][together].astype(np.int64), rows[distance:][together]
        counts += np.bincount(np.minimum(one, other) * size + np.maximum(one, other), minlength=size * size)
    index = counts.nonzero()[0]
    i, j = index // size, index % size
    yield
    yield i, j, np.where(i == j, 2, 1) * counts[index]


SIDES: dict[str, Callable[[Path, int], Iterator[Any]]] = {
    KERNEL: ours,
    FILES: ours_files,
    SCIPY: scipy_sparse,
    NUMPY: plain_numpy,
}


def read_text(folder: Path) -> tuple[Any, Any, int]:
    """Table rows of all tokens, offsets of the units, and the number of rows."""
    rows, lengths = np.load(folder / "rows.npy"), np.load(folder / "lengths.npy")
    return rows, np.concatenate([[0], lengths]).cumsum(), len(json.loads((folder / "ids.json").read_text()))


def run_side(name: str, folder: Path, window: int) -> None:
    """Run one program in this process; prints seconds to start and to count, CPU seconds, peak memory, counts."""
    started = time.perf_counter()
    side = SIDES[name](folder, window)
    next(side)
    ready, on_core = time.perf_counter(), time.process_time()
    next(side)
    figures = [ready - started, time.perf_counter() - ready, time.process_time() - on_core, peak_memory()]
    i, j, count = next(side)
    print(json.dumps([*figures, len(i), digest(i, j, count)]))


def peak_memory() -> float:
    """Peak memory of this process in MB; ``getrusage`` would report that of its parent if it is larger."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1000


def digest(i: Any, j: Any, count: Any) -> int:
    """A hash of the counts that does not depend on their order."""
    pair = i.astype(np.uint64) * np.uint64(1 << 32) + j.astype(np.uint64)
    return int(((pair * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)) * count.astype(np.uint64)).sum())


def build_glove(checkout: Path, folder: Path) -> str:
    """Compile the C program as its Makefile says, into ``folder``; the checkout stays as it is."""
    if not (checkout / "src" / "cooccur.c").exists():
        raise SystemExit(f"{checkout}: no checkout of GloVe, it has no src/cooccur.c")
    subprocess.run(["make", "-C", str(checkout), f"BUILDDIR={folder.absolute()}", "cooccur"], check=True)
    return str(folder.absolute() / "cooccur")


def run_glove(program: str, folder: Path, window: int) -> None:
    """Run the C program, from text to its output file; prints the same as `run_side`."""
    options = ["-verbose", "0", "-symmetric", "1", "-distance-weighting", "0", "-memory", "4.0"]
    command = [program, *options, "-window-size", str(window), "-vocab-file", str(folder / "vocab.txt")]
    command += ["-overflow-file", str(folder / "overflow")]
    started = time.perf_counter()
    with open(folder / "words.txt", "rb") as words, open(folder / "glove.bin", "wb") as out:
        process = subprocess.Popen(command, stdin=words, stdout=out, stderr=subprocess.DEVNULL, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{program} failed with exit code {os.waitstatus_to_exitcode(status)}")
    kind = np.dtype([("i", np.int32), ("j", np.int32), ("count", np.float64)])
    found = np.fromfile(folder / "glove.bin", kind)
    found = found[found["i"] <= found["j"]]
    answer = [len(found), digest(found["i"] - 1, found["j"] - 1, found["count"])]
    print(json.dumps([0.0, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000, *answer]))


# the text


def write_text(text: Any, made: Any, top: int, folder: Path) -> float:
    """Write the inputs of all programs; returns the seconds spent on encoding."""
    import pyarrow as pa

    from pipelines.statistics.pair_counting import most_frequent

    settings = {"tokenizer": tokenizer_folder(made), "cross": True, "block": None}
    started = time.perf_counter()
    for number, shard in enumerate(shards_of(text, 4_000_000)):
        pair_files.encode(shard, settings, folder / f"all-{number:04}")
    seconds = time.perf_counter() - started
    tables = [table for path in sorted(folder.glob("all-*")) for table in row_groups(path)]
    ids, lengths = (np.concatenate([t[n].combine_chunks().flatten() for t in tables]) for n in ("token", "length"))
    special = range(5)
    chosen = most_frequent(np.bincount(ids), top, special)
    row_of = np.full(int(ids.max()) + 1, len(chosen), np.uint16)
    row_of[chosen] = np.arange(len(chosen))
    unit = np.repeat(np.arange(len(lengths)), lengths)
    known = row_of[ids] < len(chosen)
    ids, lengths = ids[known], np.bincount(unit[known], minlength=len(lengths))
    lengths = lengths[lengths > 0]
    np.save(folder / "rows.npy", row_of[ids])
    np.save(folder / "lengths.npy", lengths)
    (folder / "ids.json").write_text(json.dumps(chosen.tolist()))
    counts = np.bincount(ids)
    (folder / "vocab.txt").write_text("".join(f"t{id_} {counts[id_]}\n" for id_ in chosen))
    bounds = np.concatenate([[0], lengths]).cumsum()
    with open(folder / "words.txt", "w") as file:
        for first, last in itertools.pairwise(bounds):
            file.write(" ".join(f"t{id_}" for id_ in ids[first:last].tolist()) + "\n")
    schema = pair_files.encoded_schema()
    pieces = np.array_split(np.arange(len(lengths)), max(1, len(ids) // 200_000))
    with parquet_file(folder / "kept-0", schema) as file:
        for piece in pieces:
            first, last = bounds[piece[0]], bounds[piece[-1] + 1]
            row = [ids[first:last], lengths[piece], *np.unique(ids[first:last], return_counts=True)]
            arrays = [pa.array([column], field.type) for column, field in zip(row, schema, strict=True)]
            file.write_table(pa.table(arrays, schema=schema))
    return seconds


def compare(folder: Path, arguments: argparse.Namespace) -> None:
    """Run all programs and print a table."""
    names, program = list(SIDES), ""
    if arguments.glove:
        names.append(GLOVE)
        program = build_glove(Path(arguments.glove), folder)
    rows, offsets, _ = read_text(folder)
    lengths = np.diff(offsets)
    pairs = sum(int(np.maximum(lengths - distance, 0).sum()) for distance in range(1, arguments.window + 1))
    print(f"{len(rows):,} tokens of the vocabulary in {len(lengths):,} units, {pairs:,} pairs of positions")
    found: dict[str, list[list[Any]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            command = [sys.executable, "-m", "benchmarks.cooccurrence", "--side", name]
            command += ["--window", str(arguments.window), *(["--glove", program] if name == GLOVE else [])]
            environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
            done = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr}")
            found[name].append(json.loads(done.stdout))
    titles = ("ready, s", "count, s", "on core, s", "M pairs/s", "memory, MB")
    print(f"{'side':16}" + "".join(f"{title:>12}" for title in titles) + "  seconds of all rounds")
    for name, runs in found.items():
        ready, seconds, on_core, memory = (min(run[column] for run in runs) for column in range(4))
        speed = pairs / seconds / 1e6
        rounds = " ".join(f"{run[1]:.2f}" for run in runs)
        print(f"{name:16}{ready:12.2f}{seconds:12.3f}{on_core:12.3f}{speed:12.1f}{memory:12.0f}  {rounds}")
    answers = {tuple(run[4:]) for runs in found.values() for run in runs}
    if len(answers) != 1:
        raise SystemExit(f"the programs disagree: {answers}")
    print(f"all found the same {next(iter(answers))[0]:,} counts")


# the whole stage


def stage(store: str, text: str, made: str, jobs: int, arguments: argparse.Namespace) -> None:
    """Run ``build-cooccur`` in this process; prints seconds, and the peak memory of the largest process."""
    started = time.perf_counter()
    config = cooccurrence.Config(jobs=jobs, window=str(arguments.window), cross_sentences=True, top=arguments.top)
    result = cooccurrence.run(text, made, config, store=Store(Path(store)), force=True)
    seconds = time.perf_counter() - started
    assert result is not None
    memory = max(peak_memory(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000)
    counts = result.artifact.files["counts.parquet"]["sha256"]
    print(json.dumps([seconds, memory, result.artifact.counts["tokens"], counts]))


def copies(source: Path, number: int, folder: Path) -> Path:
    """Write several copies of the files of a text; each copy is a separate document."""
    folder.mkdir()
    for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
        if path.is_file():
            for copy in range(number):
                (folder / f"{path.stem}-{copy:03}.txt").write_bytes(f"Copy {copy}.\n\n".encode() + path.read_bytes())
    return folder


def compare_jobs(store: Store, made: str, arguments: argparse.Namespace, folder: Path) -> None:
    source = Path(arguments.text)
    if not source.exists():
        print("--copies needs a file or a folder of text")
        return
    print(f"building a corpus of {arguments.copies} copies of the text")
    text = corpus.run([str(copies(source, arguments.copies, folder / "copies"))], corpus.Config(), store=store)
    found: dict[int, list[Any]] = {}
    for jobs in [1, 2] * arguments.stage_rounds:
        command = [sys.executable, "-m", "benchmarks.cooccurrence", "--stage", str(store.root), text.reference, made]
        command += [str(jobs), "--window", str(arguments.window), "--top", str(arguments.top)]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found.setdefault(jobs, []).append(json.loads(done.stdout))
    for jobs, runs in found.items():
        seconds, memory, tokens = min(run[0] for run in runs), max(run[1] for run in runs), runs[0][2]
        print(
            f"{jobs} processes: {seconds:7.1f} s, {tokens / seconds:,.0f} tokens/s, {memory:.0f} MB in the largest one"
        )
    if len({run[3] for runs in found.values() for run in runs}) != 1:
        raise SystemExit("one process and two processes disagree")
    print(f"speed-up {min(run[0] for run in found[1]) / min(run[0] for run in found[2]):.2f}, the same bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="builtin:python-docs")
    parser.add_argument("--window", type=int, default=15)
    parser.add_argument("--top", type=int, default=5000)
    parser.add_argument("--vocab-size", type=int, default=16_000)
    parser.add_argument("--glove", metavar="CHECKOUT", help="the source of GloVe's C programs, to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=0)
    parser.add_argument("--stage-rounds", type=int, default=1)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--stage", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side == GLOVE:
        return run_glove(arguments.glove, Path(arguments.text), arguments.window)
    if arguments.side:
        return run_side(arguments.side, Path(arguments.text), arguments.window)
    if arguments.stage:
        *names, jobs = arguments.stage
        return stage(*names, int(jobs), arguments)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        store = Store(folder / "store")
        text = stack.enter_context(corpus.run([arguments.text], corpus.Config(), store=store).artifact)
        config = tokenizer.Config(kind="byte-bpe", vocab_size=arguments.vocab_size)
        made = stack.enter_context(tokenizer.run(text.reference, config, store=store).artifact)
        (folder / "text").mkdir()
        seconds = write_text(text, made, arguments.top, folder / "text")
        print(f"{text.counts['words']:,} words, encoded in {seconds:.1f} s")
        compare(folder / "text", arguments)
        if arguments.copies:
            compare_jobs(store, made.reference, arguments, folder)


if __name__ == "__main__":
    main()
