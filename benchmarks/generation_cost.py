"""What a step of decoding with a cache costs under a plan: ratios of processor time to the plain model.

    python -m benchmarks.generation_cost

A Llama of random weights reads a prompt, and then one token at a time.  Each round times the plain model and every plan, in random
order.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import guidance
from guidance import Guide, Plan

HALF = ("fraction 0.5",)

PLANS: dict[str, tuple[Guide, ...]] = {
    "plain": (),
    "mask": (Guide("window", "mask", heads=HALF),),
    "bias": (Guide("previous", "bias", heads=HALF),),
    "fix": (Guide("previous", "fix", heads=HALF),),
    "gaussian": (Guide(mechanism="gaussian", heads=HALF),),
    "off": (Guide(mechanism="off", heads=HALF),),
    "gate": (Guide(mechanism="gate", options={"input": "query"}),),
    "mix stream": (Guide("previous", "mix"),),
    "mix value": (Guide("previous", "mix", options={"of": ["value"]}),),
    "marked": (Guide("marked", "bias", heads=HALF),),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=1024, help="tokens before the step")
    parser.add_argument("--steps", type=int, default=4, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default=",".join(PLANS), help="names of plans with commas between them, plain among them"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.width // 64),
        max_position_embeddings=options.length + options.steps + 1,
    )
    ids = torch.randint(5, 8000, (1, options.length + 1))
    model = LlamaForCausalLM(config).eval()
    names = options.only.split(",")
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for name in random.sample(names, len(names)):
            seconds[name].append(_step_time(model, PLANS[name], ids, options.steps))
    figures = {
        name: {
            "seconds": median(seconds[name]),
            "ratio": median(own / plain for own, plain in zip(seconds[name], seconds["plain"], strict=True)),
        }
        for name in names
    }
    for name, figure in figures.items():
        print(f"{name:12} {1000 * figure['seconds']:8.1f} ms  {figure['ratio']:.3f}")
    if options.out:
        options.out.write_text(json.dumps({"settings": vars(options) | {"out": ""}, "figures": figures}, indent=1))


def _step_time(model: Any, rows: tuple[Guide, ...], ids: torch.Tensor, steps: int) -> float:
    """The mean processor time of a step, in seconds; a first step, which is not timed, comes before the others."""
    handle = guidance.install(model, Plan(rows))
    marked = {"marked": ids[:, :-1] % 7 == 0} if any(row.pattern == "marked" for row in rows) else {}
    with torch.no_grad():
        cached = model(ids[:, :-1], **marked).past_key_values
        for step in range(steps + 1):
            if step == 1:
                start = time.process_time()
            model(ids[:, -1:], past_key_values=cached)
        spent = time.process_time() - start
    handle.remove()
    return spent / steps


if __name__ == "__main__":
    main()
