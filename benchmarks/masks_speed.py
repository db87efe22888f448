"""Tokens per second of ``build-masks`` on one core, and the size of its columns compared with n x n masks.

    OMP_NUM_THREADS=1 python -m benchmarks.masks_speed [FILE_OR_FOLDER] [--parser conllu:FILE] [--length 128] [--rounds 3]

The default text is ``builtin:python-docs``.  Give a parser, or the treebank that is the text, to include the cost of
parse trees.  The time covers the whole stage, from opening its inputs to publishing; the best round is reported.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from pipelines.engine.stage import Result
from pipelines.progress import Progress
from pipelines.stages import corpus, dependencies, idf, masks, sequences, tokenizer
from pipelines.storage.store import Store
from pipelines.views import role_masks


def complete(result: Result | None) -> Result:
    """The result of a stage that ran without ``--shard``, which is never None."""
    assert result is not None
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="builtin:python-docs")
    parser.add_argument("--parser")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--dense", action="store_true", help="also write the n x n masks and measure them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        text = corpus.run([arguments.text], corpus.Config(), store=store).reference
        pieces = tokenizer.run(text, tokenizer.Config(), store=store).reference
        data = sequences.run(text, pieces, sequences.Config(max_length=arguments.length), store=store)
        given = {"idf": complete(idf.run(text, None, idf.Config(), store=store)).reference}
        if arguments.parser:
            trees = dependencies.Config(parser=arguments.parser)
            given["deps"] = complete(dependencies.run(text, trees, store=store)).reference
        config = masks.Config(**given, jobs=arguments.jobs)
        tokens = sum(counts["tokens"] for counts in data.artifact.counts["splits"].values())
        best = float("inf")
        for number in range(arguments.rounds):
            started = time.perf_counter()
            found = complete(masks.run(data.reference, config, store=store, force=number > 0))
            seconds = time.perf_counter() - started
            best = min(best, seconds)
            print(f"build-masks {seconds:6.2f} s   {tokens / seconds:10,.0f} tokens/s")
        print(
            f"best        {best:6.2f} s   {tokens / best:10,.0f} tokens/s of {tokens:,}, {arguments.jobs} process(es)"
        )
        columns = found.artifact.counts["columns"]
        stored = sum(entry["bytes"] for entry in found.artifact.files.values())
        print(f"columns {', '.join(columns)}: {stored / tokens:.2f} bytes per token")
        roles = role_masks.choose(found.artifact)
        count, pairs = len(roles.known), 0
        with role_masks.Opened(found.artifact, store) as opened:
            for split in data.artifact.counts["splits"]:
                for _, lengths in opened.batches(split, 1 << 20):
                    pairs += sum(length * length for length in lengths)
            print(
                f"n x n masks of {count} roles: {count * pairs / tokens:,.0f} bytes per token as booleans, "
                f"{count * pairs / tokens / 8:,.0f} as bits"
            )
            if arguments.dense:
                target = Path(folder) / "dense"
                role_masks.export(opened, roles, target, Progress())
                size = sum(path.stat().st_size for path in target.iterdir())
                print(f"n x n masks of {count} roles: {size / tokens:,.1f} bytes per token as Parquet (zstd)")


if __name__ == "__main__":
    main()
