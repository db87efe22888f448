"""Words per second of ``build-deps`` over bare ``nlp.pipe`` on the same sentences, and of two processes over one.

    python benchmarks/parsing.py MODEL [FILE ...] [--characters 2000000] [--rounds 3]

Without a text it takes ``builtin:python-docs``.  The sides take turns in each round, each with the model in memory, but for
the two processes, which load it; the best of each side makes the ratios.  The bare side starts from sentences in memory
and throws its documents away; ours reads the corpus, parses, writes, fsyncs and publishes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipelines import corpus, dependencies
from pipelines.artifacts import Artifact
from pipelines.store import Store


def make_text(files: list[Path], characters: int, store: Store, folder: Path) -> Artifact:
    """A corpus of so many characters, as one file per source."""
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
    """Seconds and words of what a user would write by hand."""
    started = time.perf_counter()
    words = sum(len(doc) for doc in nlp.pipe(sentences))  # type: ignore[attr-defined]
    return time.perf_counter() - started, words


def ours(store: Store, text: str, model: str, jobs: int) -> tuple[float, int]:
    """Seconds and words of the whole stage."""
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
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        artifact = make_text(arguments.files, arguments.characters, store, Path(folder))
        sentences = sentences_of(artifact)
        nlp = spacy.load(arguments.model)
        print(f"{len(sentences):,} sentences, {artifact.counts['characters']:,} characters")
        print("words per second: nlp.pipe, build-deps, build-deps --jobs 2")
        best = [0.0, 0.0, 0.0]
        for number in range(arguments.rounds + 1):
            if number == 0:  # warm-up: models are loaded, files are in the cache
                sides = [bare(nlp, sentences[:500]), ours(store, artifact.reference, arguments.model, 1)]
                continue
            sides = [
                bare(nlp, sentences),
                ours(store, artifact.reference, arguments.model, 1),
                ours(store, artifact.reference, arguments.model, 2),
            ]
            speeds = [words / seconds for seconds, words in sides]
            best = [max(pair) for pair in zip(best, speeds, strict=True)]
            print("".join(f"{speed:10,.0f}" for speed in speeds))
        print(f"build-deps over nlp.pipe:        {best[1] / best[0]:.2f}   (aim: 0.95)")
        print(f"two processes over one:          {best[2] / best[1]:.2f}   (aim: 1.7)")


if __name__ == "__main__":
    main()
