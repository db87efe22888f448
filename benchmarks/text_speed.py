"""Rate of ``build-corpus``, and time of ``build-sequences`` relative to ``tokenizers.encode_batch`` on the same text.

    python -m benchmarks.text_speed [FILE_OR_FOLDER] [--rounds 5] [--beside CHECKOUT]

The default text is ``builtin:python-docs``.  What is compared takes turns in every round; ratios are those of the smallest
times.  `build-corpus` runs as a command with one process, also that of another checkout if one is given: MB are a million bytes
of uncompressed text a second of processor time, which other programs on the machine disturb less than elapsed time; the
time to begin is that of a file of two sentences.  `encode_batch` gives ids, word ids and offsets from texts in memory;
`build-sequences` reads the corpus, packs, writes, fsyncs and publishes.
"""

from __future__ import annotations

import argparse
import gzip
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pipelines.stages import corpus, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store

ROOT = Path(__file__).resolve().parent.parent


def bare(artifact: Artifact, tokenizer_path: Path) -> float:
    """Seconds of the loop that a user would write."""
    from tokenizers import Tokenizer

    bare_tokenizer = Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
    texts = [text for batch in corpus.read_blocks(artifact, ["text"]) for text in batch.column(0).to_pylist()]
    started = time.perf_counter()
    for first in range(0, len(texts), 4096):
        for encoding in bare_tokenizer.encode_batch(texts[first : first + 4096], add_special_tokens=False):
            _ = encoding.ids, encoding.word_ids, encoding.offsets
    return time.perf_counter() - started


def ours(store: Store, text: str, tokens: str) -> float:
    """Seconds of the stage as a whole."""
    started = time.perf_counter()
    sequences.run(text, tokens, sequences.Config(), store=store, force=True)
    return time.perf_counter() - started


def command_times(checkout: Path, source: str) -> tuple[float, float]:
    """The processor seconds and the elapsed seconds of ``guide build-corpus`` in a process of its own."""
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, "-m", "cli", "build-corpus", source, "--store", store, "--quiet"]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
        elapsed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed


def text_bytes(source: str) -> int:
    """Bytes of the uncompressed text files."""
    path = Path(source)
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return sum(len(gzip.decompress(f.read_bytes())) if f.suffix == ".gz" else f.stat().st_size for f in files)


def measure_corpus(source: str, checkouts: Sequence[Path], rounds: int) -> None:
    """Print the rate of ``build-corpus`` and its time to begin, for every checkout."""
    with tempfile.TemporaryDirectory() as folder:
        two = Path(folder, "two.txt")
        two.write_text("Two sentences. Here they are.")
        rows = [[(command_times(c, source), command_times(c, str(two))) for c in checkouts] for _ in range(rounds)]
    size = text_bytes(source) / 1e6
    best = []
    for number, checkout in enumerate(checkouts):
        whole, begin = ([row[number][which] for row in rows] for which in (0, 1))
        processor, elapsed = min(whole)[0], min(seconds for _, seconds in whole)
        start, start_elapsed = min(begin)[0], min(seconds for _, seconds in begin)
        best.append((processor, start))
        print(
            f"{checkout}: {size:.1f} MB in {processor:.2f} s of processor time ({elapsed:.2f} s elapsed), "
            f"{size / processor:.1f} MB/s, without the time to begin {size / (processor - start):.1f} MB/s; "
            f"begins in {start:.2f} s ({start_elapsed:.2f} s elapsed)"
        )
    for other, checkout in zip(best[1:], checkouts[1:], strict=True):
        ratios = [theirs / ours for ours, theirs in zip(best[0], other, strict=True)]
        print(f"{ratios[0]:.1f} times as fast as {checkout}, beginning {ratios[1]:.1f} times as fast")


def help_time() -> float | None:
    """Smallest wall time of ``guide --help`` in seconds; None if the command is not installed."""
    command = shutil.which("guide", path=str(Path(sys.executable).parent))
    if command is None:
        return None
    times = []
    for _ in range(7):
        started = time.perf_counter()
        subprocess.run([command, "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="builtin:python-docs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path, action="append", default=[], help="another checkout (repeatable)")
    arguments = parser.parse_args()
    if Path(arguments.text).exists():
        measure_corpus(os.path.abspath(arguments.text), [ROOT, *map(Path.absolute, arguments.beside)], arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        started = time.perf_counter()
        text = corpus.run([arguments.text], corpus.Config(), store=store)
        assert text is not None, "only --shard gives None"
        counts = text.artifact.counts
        seconds = time.perf_counter() - started
        print(f"corpus: {counts['words']:,} words, {counts['characters']:,} characters, built in {seconds:.1f} s")
        tokens = tokenizer.run(text.reference, tokenizer.Config(), store=store)
        rows = []
        for number in range(arguments.rounds + 1):
            pair = bare(text.artifact, tokens.artifact.path), ours(store, text.reference, tokens.reference)
            note = "  (warm-up)" if number == 0 else ""
            print(f"encode_batch {pair[0]:6.3f} s   build-sequences {pair[1]:6.3f} s   {pair[1] / pair[0]:.2f}{note}")
            rows += [pair] if number else []
        best = [min(column) for column in zip(*rows, strict=True)]
        print(f"best         {best[0]:6.3f} s                   {best[1]:6.3f} s   {best[1] / best[0]:.2f}")
    seconds_of_help = help_time()
    if seconds_of_help is not None:
        print(f"guide --help {seconds_of_help:6.3f} s")


if __name__ == "__main__":
    main()
