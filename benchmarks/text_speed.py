"""Time of ``build-sequences``, relative to ``tokenizers.encode_batch`` with ids, word ids and offsets on the same text.

    python benchmarks/text_speed.py [FILE_OR_FOLDER] [--rounds 5]

The default text is ``builtin:python-docs``.  Both take turns in every round; the ratio is that of the smallest times.
`encode_batch` starts from texts in memory; `build-sequences` reads the corpus, packs, writes, fsyncs and publishes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipelines.stages import corpus, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store


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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        started = time.perf_counter()
        text = corpus.run([arguments.text], corpus.Config(), store=store)
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
