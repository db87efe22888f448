"""Time and memory of statistics on a small and on a large corpus, with one process, two, and Dask.

    python -m benchmarks.statistics_scale [FILE_OR_FOLDER] [--sizes 10,1000] [--stages idf,idf-tokens,cooccur]
                                          [--runs 1,2,dask,shares] [--parser spacy:MODEL] [--store FOLDER]

The corpora repeat the documents of a text, by default ``builtin:python-docs``; each copy has a new id and a different
first sentence, so none is a duplicate.  Memory is the maximum over time of the resident memory of the command and all
its descendants.  Prints one line per run; all runs must give the same content.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.stages import corpus
from pipelines.storage.store import Store

ROOT = Path(__file__).resolve().parent.parent

STAGES = {
    "idf": ["build-idf", "CORPUS"],
    "idf-sentences": ["build-idf", "CORPUS", "--unit", "sentence"],
    "idf-tokens": ["build-idf", "CORPUS", "TOKENIZER"],
    "cooccur": ["build-cooccur", "CORPUS", "TOKENIZER"],
    "deps": ["build-deps", "CORPUS", "--device", "cpu", "--parser", "PARSER"],
    "masks": ["build-masks", "SEQUENCES", "--idf", "IDF"],
}

RUNS = {
    "1": [["--jobs", "1"]],
    "2": [["--jobs", "2"]],
    "4": [["--jobs", "4"]],
    "dask": [["--executor", "dask", "--jobs", "2"]],
    "shares": [["--shard", "1/2"], ["--shard", "2/2"], []],
}
"""The options of each kind of run.  Runs with --shard, meant for separate machines, run one after the other here."""


def documents_of(source: str, folder: Path) -> list[list[str]]:
    """The blocks of each document of a text."""
    made = corpus.run([source], corpus.Config(valid=0.0), store=Store(folder)).artifact
    found: dict[int, list[str]] = {}
    for batch in corpus.read_blocks(made, ["document", "text"]):
        for document, text in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
            found.setdefault(document, []).append(text)
    return list(found.values())


def repeated(documents: list[list[str]], megabytes: float) -> Iterator[str]:
    """Lines of JSON with about ``megabytes`` million bytes of text."""
    size = 0
    for number, blocks in enumerate(itertools.cycle(documents)):
        text = "\n\n".join([f"Copy number {number} begins here.", *blocks])
        size += len(text.encode())
        yield json.dumps({"id": str(number), "text": text}, ensure_ascii=False) + "\n"
        if size >= megabytes * 1e6:
            return


def memory_below(root: int) -> int:
    """Resident memory of a process and all its descendants, in bytes."""
    parents, resident = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                resident[int(entry.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
            except (OSError, IndexError):
                continue
    family, new = {root}, {root}
    while new:
        new = {child for child, parent in parents.items() if parent in family} - family
        family |= new
    return sum(resident.get(pid, 0) for pid in family)


def guide(store: Path, *words: str) -> tuple[dict[str, Any], float, int]:
    """Run a command: its JSON output, seconds, and peak memory."""
    command = [sys.executable, "-m", "cli", *words, "--store", str(store), "--json", "--quiet"]
    started, most = time.perf_counter(), 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            most = max(most, memory_below(process.pid))
            time.sleep(0.25)  # looking at all processes slows them down
        seconds = time.perf_counter() - started
        assert process.stdout is not None
        out = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return json.loads(out) if out.strip() else {}, seconds, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="builtin:python-docs")
    parser.add_argument("--sizes", default="10,1000", help="megabytes of text")
    parser.add_argument("--stages", default="idf,idf-tokens,cooccur", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--runs", default="1,2,dask,shares", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--parser", default="spacy:en_core_web_sm", help="for the stage deps")
    parser.add_argument("--store", type=Path, help="folder of corpora and results; by default a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = arguments.store or Path(folder) / "store"
        documents = documents_of(arguments.text, Path(folder) / "source")
        print("stage           text      run     seconds     MB/s   memory of all processes   same result")
        for size in map(float, arguments.sizes.split(",")):
            lines = Path(folder) / "text.jsonl"
            with open(lines, "w", encoding="utf-8") as file:
                file.writelines(repeated(documents, size))
            words = ["build-corpus", str(lines), "--format", "jsonl", "--valid", "0"]
            text, seconds, most = guide(store, *words)
            print(
                f"{'build-corpus':14} {size:6g} MB {'1':>6} {seconds:10.2f} {size / seconds:8.1f} {most / 1e6:12.0f} MB"
            )
            lines.unlink()
            pieces, _, _ = guide(store, "build-tokenizer", text["artifact"], "--vocab-size", "8000")
            names = {"CORPUS": text["artifact"], "TOKENIZER": pieces["artifact"], "PARSER": arguments.parser}
            if "masks" in arguments.stages:
                packed, _, _ = guide(store, "build-sequences", text["artifact"], pieces["artifact"])
                rare, _, _ = guide(store, "build-idf", text["artifact"])
                names |= {"SEQUENCES": packed["artifact"], "IDF": rare["artifact"]}
            for stage in arguments.stages.split(","):
                contents = []
                for run in arguments.runs.split(","):
                    base = [names.get(word, word) for word in STAGES[stage]]
                    if contents:
                        guide(store, "rm", contents[0]["artifact"], "--force")
                    done = [guide(store, *base, *options) for options in RUNS[run]]
                    contents.append(done[-1][0])
                    seconds, most = sum(part[1] for part in done), max(part[2] for part in done)
                    is_same = contents[-1]["content"] == contents[0]["content"]
                    print(
                        f"{stage:14} {size:6g} MB {run:>6} {seconds:10.2f} {size / seconds:8.1f} {most / 1e6:12.0f} MB"
                        f"{'yes' if is_same else 'NO':>23}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
