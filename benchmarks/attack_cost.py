"""Time and memory of a fine-tuning step under each adversary, over plain training (paper D, figure 4).

    python -m benchmarks.attack_cost [TEXTS] [--lengths 128,256,512] [--rounds 5] [--device cpu] [--out docs/results]

A classifier of 4 layers x 256 with 8 heads, on examples that fill the whole length; a batch has 2,048 tokens.  In every round all methods
take their turn in a random order, each with `guide finetune` for eight steps, of which the first two do not count.  Times are
medians over rounds of the median step; ratios are medians of the ratios within a round.  Memory is the most that autograd keeps for the
backward pass at any moment of a step, weights included (CPU), or the peak of what is allocated (CUDA).

    plain       no adversary
    ASA         preset:asa, all heads attacked by a learned mask in a second pass
    Bernoulli   random masks of a tenth of the pairs in a second pass
    FreeLB-3    three passes with perturbed word embeddings
    SMART       one perturbation of the word embeddings, and a divergence
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from benchmarks import shared
from benchmarks.pages import machine, save, table
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.stages import dataset, finetune
from pipelines.storage.store import Store

STEPS, SKIPPED = 8, 2
SHAPE: dict[str, Any] = {"architecture": "bert", "layers": 4, "hidden": 256, "heads": 8, "ffn": 1024}
BERNOULLI = Plan((Guide(mechanism="random_mask", options={"kind": "bernoulli", "proportion": 0.1}),))
METHODS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "ASA": {"plan": "preset:asa"},
    "Bernoulli": {"plan": "bernoulli.toml"},
    "FreeLB-3": {"adversarial": "freelb"},
    "SMART": {"adversarial": "smart"},
}


def examples(texts: Path, folder: Path, length: int, tokens: int) -> str:
    """A file of examples with at least as many words as tokens are wanted, and labels that mean nothing."""
    words: list[str] = []
    for path in sorted(texts.glob("*.txt*"))[:4]:
        data = path.read_bytes()
        words += (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").split()
    if not words:
        raise SystemExit(f"{texts}: no text")
    number = STEPS * tokens // length
    words *= 1 + number * length // len(words)
    path = folder / f"{length}.jsonl"
    rows = [
        {"text": " ".join(words[n * length : (n + 1) * length]), "label": "yes" if n % 2 else "no"}
        for n in range(number)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


class Kept:
    """Counts the bytes that autograd keeps for the backward pass, each storage once, and their peak."""

    def __init__(self) -> None:
        self.peak = self._now = 0
        self._uses: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> _Held:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if not self._uses.get(place):
            self._now += size
            self.peak = max(self.peak, self._now)
        self._uses[place] = self._uses.get(place, 0) + 1
        return _Held(self, tensor.detach(), place, size)

    def release(self, place: int, size: int) -> None:
        self._uses[place] -= 1
        if not self._uses[place]:
            self._now -= size


@dataclass
class _Held:
    """A tensor that autograd keeps; it is released when autograd forgets it."""

    kept: Kept
    tensor: torch.Tensor
    place: int
    size: int

    def __del__(self) -> None:
        self.kept.release(self.place, self.size)


def train(data: str, length: int, tokens: int, method: str, seed: int, steps: int, device: str, store: Store) -> Any:
    """The model of a run."""
    given = {**SHAPE, **METHODS[method], "max_length": length, "batch_size": tokens // length, "seed": seed}
    if given.get("plan") == "bernoulli.toml":
        given["plan"] = str(store.root / "bernoulli.toml")
    made = finetune.run(data, finetune.Config(**given, steps=steps, device=device, save_every=steps), store=store)
    assert made is not None
    return made.artifact


def seconds_of(*arguments: Any) -> float:
    """Seconds of a step; the arguments are those of `train`, but for the number of steps."""
    *before, device, store = arguments
    with train(*before, STEPS, device, store).open("metrics.parquet") as file:
        seconds = pq.read_table(file, columns=["seconds"])["seconds"].to_pylist()[SKIPPED:]
    return float(statistics.median(seconds))


def bytes_of(*arguments: Any) -> int:
    """The most memory that one step takes; see `seconds_of`."""
    *before, device, store = arguments
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        train(*before, 1, device, store)
        return torch.cuda.max_memory_allocated()
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: held.tensor):
        train(*before, 1, device, store)
    return kept.peak


def rows_of(seconds: Mapping[str, Sequence[float]], memory: Mapping[str, int], length: int) -> list[dict[str, Any]]:
    """The figures of each method at one length."""
    return [
        {
            "length": length,
            "method": method,
            "seconds": statistics.median(own),
            "over_plain": statistics.median(one / plain for one, plain in zip(own, seconds["plain"], strict=True)),
            "mebibytes": memory[method] / 2**20,
            "memory_over_plain": memory[method] / memory["plain"],
        }
        for method, own in seconds.items()
    ]


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    forms = {
        "length": "",
        "method": "",
        "seconds": ".3f",
        "over_plain": ".2f",
        "mebibytes": ".0f",
        "memory_over_plain": ".2f",
    }
    titles = ["length", "method", "seconds per step", "over plain", "MiB", "over plain"]
    return table(titles, ([f"{row[name]:{form}}" for name, form in forms.items()] for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="?", type=Path, default=shared("data/lm-litbank-books/books"))
    parser.add_argument("--lengths", default="128,256,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048, help="in a batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    logging.getLogger("guide").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(Path(scratch) / "artifacts")
        store.root.mkdir()
        (store.root / "bernoulli.toml").write_text(BERNOULLI.dumps(), encoding="utf-8")
        for length in map(int, arguments.lengths.split(",")):
            file = examples(arguments.texts, Path(scratch), length, arguments.tokens)
            data = dataset.run({"train": [file]}, dataset.Config(valid_fraction=0.0), store=store).reference
            own = (data, length, arguments.tokens)
            where = (arguments.device, store)
            seconds_of(*own, "plain", arguments.rounds, *where)  # warms up
            seconds: dict[str, list[float]] = {method: [] for method in METHODS}
            for number in range(arguments.rounds):
                for method in random.Random(number).sample(sorted(METHODS), len(METHODS)):
                    seconds[method].append(seconds_of(*own, method, number, *where))
            memory = {method: bytes_of(*own, method, 0, *where) for method in METHODS}
            rows += rows_of(seconds, memory, length)
            print(as_markdown(rows[-len(METHODS) :]), flush=True)
    about = {"rounds": arguments.rounds, "shape": SHAPE, "tokens": arguments.tokens, "device": arguments.device}
    path = arguments.out / "attack_cost.json"
    save(path, {**about, **machine(), "rows": rows})
    title = "# Time and memory of a fine-tuning step under adversaries (paper D, figure 4)"
    command = f"`python -m benchmarks.attack_cost --rounds {arguments.rounds} --tokens {arguments.tokens}`, {arguments.device}"
    text = f"{title}\n\n{command}, {torch.get_num_threads()} thread, 4 layers x 256, {arguments.tokens:,} tokens in a batch.\n\n"
    path.with_suffix(".md").write_text(text + as_markdown(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
