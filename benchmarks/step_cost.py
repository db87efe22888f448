"""What a guided training step costs over a plain one, side by side.

    python -m benchmarks.step_cost [--device cuda] [--rounds 12] [--json FILE]

One small RoBERTa (4 layers x 256, 4 heads) per row of the table, the same batch, forward and backward and update in
turn: `plain` with scaled_dot_product_attention, `guided` with half of the heads pulled to next and previous, `explicit`
with all heads computed explicitly and the loss taken on `output_attentions` with written-out targets.  Times are medians over rounds in
which the three alternate; ratios are medians of the ratios within a round.  Memory is the peak of one step above what
was allocated before it (CUDA), or the bytes that autograd keeps for the backward pass (CPU).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from guidance.installation import install
from guidance.plan import Guide, Plan

HALF = Plan(
    (
        Guide("next", "attention_loss", heads=(0,), weight=12.0),
        Guide("previous", "attention_loss", heads=(1,), weight=12.0),
    )
)


def build(length: int, dropout: float, attention: str) -> RobertaForMaskedLM:
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=4000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=length + 2,
        attention_probs_dropout_prob=dropout,
        hidden_dropout_prob=dropout,
    )
    return RobertaForMaskedLM._from_config(config, attn_implementation=attention)


def stepper(kind: str, length: int, batch: int, dropout: float, device: str) -> Callable[[], None]:
    """A function that makes one training step."""
    model = build(length, dropout, "eager" if kind == "explicit" else "sdpa").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(5, 4000, (batch, length), device=device)
    handle = install(model, HALF) if kind == "guided" else None
    model.train()
    whole = torch.eye(length, device=device)
    targets = [torch.cat((whole[1:], whole[:1] * 0 + 1 / length)), torch.cat((whole[:1] * 0 + 1 / length, whole[:-1]))]

    def loss() -> torch.Tensor:
        guidance = handle.guide(ids) if handle else None
        extra: dict[str, Any] = {"guidance": guidance} if guidance else {}
        if kind == "explicit":
            extra["output_attentions"] = True
        output = model(input_ids=ids, labels=ids, **extra)
        if guidance:
            return output.loss + guidance.loss()
        if kind == "explicit":
            square = torch.nn.functional.mse_loss
            distances = [
                square(attention[:, head], target.expand_as(attention[:, head]))
                for attention in output.attentions
                for head, target in enumerate(targets)
            ]
            return output.loss + 12 * torch.stack(distances).sum()
        return output.loss

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    step.loss = loss  # type: ignore[attr-defined]
    return step


def kept_bytes(step: Callable[[], None], device: str) -> int:
    """Peak memory of a step (CUDA), or what autograd keeps between forward and backward (CPU)."""
    step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = step.loss()  # type: ignore[attr-defined]
    del held
    return sum(kept.values())


def timed(step: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device, rows = arguments.device, []
    print(f"device {device}, torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(
        f"{'length':>6} {'dropout':>7} {'plain s':>8} {'guided':>7} {'explicit':>8}   memory: plain MiB, guided, explicit"
    )
    for length, batch in ((128, 32), (512, 8)):
        for dropout in (0.1, 0.0):
            steps = {k: stepper(k, length, batch, dropout, device) for k in ("plain", "guided", "explicit")}
            memory = {kind: kept_bytes(step, device) for kind, step in steps.items()}
            rounds = [{kind: timed(step, device) for kind, step in steps.items()} for _ in range(arguments.rounds)]
            row = {
                "length": length,
                "batch": batch,
                "dropout": dropout,
                "plain_s": statistics.median(r["plain"] for r in rounds),
                "guided_ratio": statistics.median(r["guided"] / r["plain"] for r in rounds),
                "explicit_ratio": statistics.median(r["explicit"] / r["plain"] for r in rounds),
                "plain_mib": memory["plain"] / 2**20,
                "guided_memory_ratio": memory["guided"] / memory["plain"],
                "explicit_memory_ratio": memory["explicit"] / memory["plain"],
            }
            rows.append(row)
            print(
                f"{length:6d} {dropout:7.1f} {row['plain_s']:8.3f} {row['guided_ratio']:7.2f} {row['explicit_ratio']:8.2f}"
                f"   {row['plain_mib']:17.0f} {row['guided_memory_ratio']:7.2f} {row['explicit_memory_ratio']:9.2f}"
            )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"device": device, "torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
