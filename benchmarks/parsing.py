"""Words per second of ``build-deps``, relative to bare ``nlp.pipe`` on the same sentences, and with two processes.

    python -m benchmarks.parsing MODEL [FILE ...] [--characters 2000000] [--rounds 5] [--jobs 2]

The default text is ``builtin:python-docs``.  The variants take turns in every round.  The model is already in memory,
except for the processes of `--jobs`, which load it.  Each ratio is computed within a round, since the speed of a
machine drifts, and the median is reported.  `nlp.pipe` starts from sentences in memory and discards the parses;
`build-deps` reads the corpus, parses, writes, fsyncs and publishes.  `--jobs 1` leaves the last variant out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
from pipelines.stages import corpus, dependencies
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store


def make_text(files: list[Path], characters: int, store: Store, folder: Path) -> Artifact:
    """A corpus of the first ``characters`` characters of the files."""
    if not files:
        whole = corpus.run(["builtin:python-docs"], corpus.Config(), store=store).artifact
        text = "\n\n".join(t for batch in corpus.read_blocks(whole, ["text"]) for t in batch.column(0).to_pylist())
    else:
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    (folder / "text.txt").write_text(text[:characters], encoding="utf-8")
    return corpus.run([str(folder / "text.txt")], corpus.Config(), store=store).artifact


def sentences_of(artifact: Artifact) -> list[str]:
    return [
        text[span["start"] : span["end"]]
        for batch in corpus.read_blocks(artifact, ["text", "sentences"])
        for text, spans in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        for span in spans
    ]


def bare(nlp: object, sentences: list[str]) -> tuple[float, int]:
    """Seconds and words of the loop that a user would write."""
    started = time.perf_counter()
    words = sum(len(doc) for doc in nlp.pipe(sentences))  # type: ignore[attr-defined]
    return time.perf_counter() - started, words


def ours(store: Store, text: str, model: str, jobs: int) -> tuple[float, int]:
    """Seconds and words of the stage as a whole."""
    started = time.perf_counter()
    config = dependencies.Config(parser=f"spacy:{model}", device="cpu", jobs=jobs, shard_size=100_000)
    result = dependencies.run(text, config, store=store, force=True)
    assert result is not None
    return time.perf_counter() - started, result.artifact.counts["words"]


def main() -> None:
    import spacy

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--characters", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        artifact = make_text(arguments.files, arguments.characters, store, Path(folder))
        sentences = sentences_of(artifact)
        nlp = spacy.load(arguments.model)
        stage = functools.partial(ours, store, artifact.reference, arguments.model)
        print(f"{len(sentences):,} sentences, {artifact.counts['characters']:,} characters")
        bare(nlp, sentences[:500]), stage(1)  # warm up: load models, fill the file cache
        sides = {"nlp.pipe": lambda: bare(nlp, sentences), "build-deps": lambda: stage(1)}
        if arguments.jobs > 1:
            sides[f"--jobs {arguments.jobs}"] = lambda: stage(arguments.jobs)
        print("words per second:", ", ".join(sides))
        rounds = []
        for _ in range(arguments.rounds):
            speeds = [words / seconds for seconds, words in (side() for side in sides.values())]
            rounds.append([after / before for before, after in itertools.pairwise(speeds)])
            print("".join(f"{speed:10,.0f}" for speed in speeds), "".join(f"{r:7.2f}" for r in rounds[-1]), flush=True)
        for (before, after), ratios in zip(itertools.pairwise(sides), zip(*rounds, strict=True), strict=True):
            print(f"{after} over {before}: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
