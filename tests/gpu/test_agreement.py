"""Every mechanism on a GPU, in float32 and bfloat16; the same on a CPU.  Needs only torch, transformers and pytest."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.agreement import LENGTHS, PRECISIONS, deviations, limits
from tests.guidance.plans import PLANS

no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.one_in(16)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_cuda)])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2", "t5"])
@pytest.mark.parametrize("plan", PLANS)
def test_outputs_losses_and_gradients_are_those_of_a_cpu_in_float32(
    family: str, plan: str, precision: str, device: str
) -> None:
    allowed = limits(plan, precision)
    for lengths in LENGTHS:
        found = deviations(family, plan, device, precision, lengths)
        assert {part: value for part, value in found.items() if value > allowed[part]} == {}
