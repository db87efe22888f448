"""How far a device and a precision are from the same guided training step on a CPU in float32."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tests.guidance.models import SEQ2SEQ, batch, pair_batch
from tests.guidance.plans import installed, run

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

LIMITS = {
    "fp32": {"outputs": 1e-4, "losses": 1e-4, "gradients": 1e-3},
    "bf16": {"outputs": 0.1, "losses": 0.03, "gradients": 0.2},
}
"""The largest allowed deviations.  In bf16, which has eight bits, the CPU itself is within half of them."""

ATTACK_LIMITS = {
    "fp32": {"outputs": 1e-2, "losses": 1e-2, "gradients": 0.1},
    "bf16": {"outputs": 0.3, "losses": 0.1, "gradients": math.inf},
}
"""Those of attacks with a threshold: rounding moves some units across it, and each is a key that is seen or hidden."""

LENGTHS = ((33, 9, 26), (9, 0, 5))
"""The lengths of the examples of each batch; one example has only padding."""


def step(family: str, plan: str, device: str, precision: str, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Outputs, losses and gradients of one training step on a small model, each as one vector on the CPU."""
    model, handle = installed(family, plan, hidden_size=64, intermediate_size=64, initializer_range=0.2)
    with torch.no_grad():  # such large weights as in other tests would multiply rounding errors from layer to layer
        for name, parameter in model.named_parameters():
            parameter.mul_(0.3 if ".guided." in name else 1.0)
    model.to(device)
    inputs = pair_batch(lengths, lengths[::-1]) if family in SEQ2SEQ else batch(lengths)
    torch.manual_seed(4)
    with torch.autocast(device, PRECISIONS[precision], enabled=precision != "fp32"):
        done = run(model, handle, {key: value.to(device) for key, value in inputs.items()})
    done.total.backward()
    assert all(loss.dtype == torch.float32 for loss in done.losses.values())
    parts = {
        "outputs": [done.logits] if done.attacked is None else [done.logits, done.attacked],
        "losses": [done.total, *done.losses.values()],
        "gradients": [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
    }
    found = {part: torch.cat([one.detach().float().cpu().flatten() for one in each]) for part, each in parts.items()}
    assert all(vector.isfinite().all() for vector in found.values())
    return found


def deviations(family: str, plan: str, device: str, precision: str, lengths: tuple[int, ...]) -> dict[str, float]:
    """The distance of each part of `step` from that of a CPU in float32, relative to the length of the latter."""
    expected = _expected(family, plan, lengths)
    found = step(family, plan, device, precision, lengths)
    return {part: float((found[part] - vector).norm() / vector.norm()) for part, vector in expected.items()}


@functools.lru_cache(len(LENGTHS))
def _expected(family: str, plan: str, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Kept until the other precisions have been compared with it."""
    return step(family, plan, "cpu", "fp32", lengths)


def limits(plan: str, precision: str) -> dict[str, float]:
    """The largest allowed deviations of a plan."""
    attacks = plan.startswith("adversary") or plan in ("random_mask, magnitude", "all mechanisms")
    return (ATTACK_LIMITS if attacks else LIMITS)[precision]
