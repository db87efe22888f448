"""Tokens a second of pre-training on documents of various lengths: padded, in batches of similar lengths, and packed.

    python -m benchmarks.packing [TEXT] [--plan preset:ag] [--rounds 3] [--device cpu] [--out FILE.json]

The default text is the 1,128 news articles in Oromo of the shared data, with a byte-level BPE of 4,000.  No sequence holds parts of
two documents.  All runs are `guide pretrain` with the same settings, examples and masked tokens, but that batches of similar lengths
are others:

    padded      --packing none: every sequence of a batch is padded to the longest
    bucket      the same with --bucket, which makes batches of similar lengths
    packed      --packing documents: the documents of a batch in one row, each read as if it stood alone

They take turns in every round, in a random order.  The time of a step is the smallest of all rounds, since other programs only ever
make a step slower; the first step, which warms up, does not count.  Padding counts as no token.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks import shared_data
from benchmarks.pages import machine, save
from pipelines.stages import corpus, pretrain, sequences, tokenizer
from pipelines.storage.store import Store

SETTINGS: dict[str, Any] = {
    "layers": 4,
    "hidden": 256,
    "heads": 8,
    "ffn": 1024,
    "attention_dropout": 0.0,
    "valid_sequences": 8,
}
WAYS: dict[str, dict[str, Any]] = {"padded": {}, "bucket": {"bucket": True}, "packed": {"packing": "documents"}}


def steps_of(data: str, store: Store, **settings: Any) -> list[tuple[float, float]]:
    """The tokens and the seconds of each step of a run but the first."""
    made = pretrain.run(data, pretrain.Config(**SETTINGS, **settings), store=store, force=True)
    assert made is not None
    with made.artifact.open("metrics.parquet") as file:
        columns = pq.read_table(file, columns=["tokens", "seconds"]).to_pydict()
    return list(zip(columns["tokens"], columns["seconds"], strict=True))[1:]


def measure(data: str, store: Store, rounds: int, **settings: Any) -> dict[str, dict[str, float]]:
    """By way: tokens a second, and the ratio to that of padding."""
    found: dict[str, list[list[tuple[float, float]]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in random.Random(number).sample(sorted(WAYS), len(WAYS)):
            found[way].append(steps_of(data, store, **WAYS[way], **settings))
    rates = {}
    for way, runs in found.items():
        tokens = sum(tokens for tokens, _ in runs[0])
        rates[way] = tokens / sum(min(seconds for _, seconds in step) for step in zip(*runs, strict=True))
    return {way: {"tokens_per_second": rate, "ratio": rate / rates["padded"]} for way, rate in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", help="a file or folder")
    parser.add_argument("--plan", action="append", help="a plan to measure beside none (repeatable)")
    parser.add_argument("--architecture", default="modernbert")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    logging.getLogger("guide").setLevel(logging.ERROR)
    settings = {name: getattr(arguments, name) for name in ("architecture", "batch_size", "steps", "device")}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        source = arguments.text or str(shared_data("cls-masakhanews/orm/train.tsv.gz"))
        text = corpus.run([source], corpus.Config(quoting=not arguments.text), store=store).reference
        bpe = tokenizer.run(text, tokenizer.Config(vocab_size=4000), store=store).reference
        apart = sequences.Config(max_length=arguments.length, packing="document")
        data = sequences.run(text, bpe, apart, store=store).artifact
        with data.open("train.parquet") as file:
            lengths = [len(ids) for ids in pq.read_table(file, columns=["id"])["id"].to_pylist()]
        mean = sum(lengths) / len(lengths)
        print(f"{len(lengths):,} sequences of at most {arguments.length} tokens, {mean:.0f} on average", flush=True)
        rows = {}
        for plan in ([], *([name] for name in arguments.plan or ())):
            name = ", ".join(plan) or "no plan"
            rows[name] = measure(data.reference, store, arguments.rounds, plan=plan, **settings)
            for way, row in rows[name].items():
                print(
                    f"{name:>24} {way:8} {row['tokens_per_second']:9,.0f} tokens/s {row['ratio']:6.2f}",
                    flush=True,
                )
    if arguments.out:
        about = {"length": arguments.length, "rounds": arguments.rounds, **SETTINGS, **settings}
        save(arguments.out, {**about, **machine(), "sequences": len(lengths), "mean_length": mean, "rows": rows})


if __name__ == "__main__":
    main()
