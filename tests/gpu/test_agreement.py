"""Every mechanism on a GPU, in float32 and bfloat16; the same on a CPU.  Needs only torch, transformers and pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

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


@pytest.mark.parametrize(
    "families", ["bert", *(pytest.param(name, marks=pytest.mark.every) for name in ("modernbert", "deberta-v2", "t5"))]
)
def test_all_that_a_step_needs_is_on_the_device_of_the_model(families: str) -> None:
    """On a device that a machine without a GPU has too; see `tests.gpu.second_device`."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this version of torch has no devices written in Python")
    command = [sys.executable, "-m", "tests.gpu.second_device", families, ";".join(PLANS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr[-4000:]
