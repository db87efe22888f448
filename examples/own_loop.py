"""A plan in your own training loop: five lines, marked 1 to 5.

    python examples/own_loop.py                      # attention guidance
    python examples/own_loop.py preset:asa out/      # adversarial self-attention, saved to a folder

A small BERT learns to predict masked words in a few sentences; nothing is downloaded.
"""

# ruff: noqa: T201
from __future__ import annotations

import sys
import tempfile

import torch
from sentences import blanked, new_model, new_tokenizer

import guidance

STEPS = 40


def main(plan: str = "preset:ag", folder: str = "") -> None:
    """Train with a plan, save, load, and check that the loaded model computes the same."""
    torch.manual_seed(0)
    tokenizer = new_tokenizer()
    model = new_model(tokenizer)
    handle = guidance.install(model, guidance.Plan.load(plan), tokenizer)  # 1: before creating the optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model.train()
    for step in range(STEPS):
        batch = blanked(tokenizer, seed=step)
        guided = handle.guide(batch["input_ids"], batch["attention_mask"], step=step)  # 2
        output = model(**batch, guidance=guided, output_hidden_states=bool(handle.attacks))  # 3
        loss = output.loss + guided.loss(step, STEPS)  # 4
        if handle.attacks:  # plans with an adversary need a second pass
            again = guided.attack()
            attacked = model(**batch, guidance=again, output_hidden_states=True)
            predicted = batch["labels"] != -100
            loss = loss + again.adversarial_loss(
                output, attacked, "pretraining", predicted, step=step, total_steps=STEPS
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            parts = {label: round(part.mean().item(), 4) for label, part in guided.per_example().items()}
            print(f"step {step + 1}: task {output.loss.item():.3f}, guides {parts}")

    with tempfile.TemporaryDirectory() as temporary:
        guidance.save(handle, folder or temporary, tokenizer=tokenizer)  # 5
        opened, _ = guidance.load(folder or temporary)
        batch = blanked(tokenizer, seed=0)
        same = torch.equal(opened(**batch).logits, model.eval()(**batch).logits)
    print(f"saved and opened again: {'the same' if same else 'NOT the same'} to the last bit")


if __name__ == "__main__":
    main(*sys.argv[1:])
