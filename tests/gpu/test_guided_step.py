"""The attention path on a GPU; needs only torch, transformers and pytest."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from guidance.installation import install
from guidance.plan import Guide, Plan
from tests.guidance.models import inputs_of
from tests.guidance.plans import PLANS, RANDOM, installed, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PLAN = Plan(
    tuple(Guide(p, "attention_loss", heads=(h,), weight=12.0) for h, p in enumerate(("next", "previous", "first")))
)


def model() -> RobertaForMaskedLM:
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return RobertaForMaskedLM(config)


def batch(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids, mask = torch.randint(5, 100, (3, 17)), torch.ones(3, 17, dtype=torch.long)
    ids[1, 9:], mask[1, 9:] = 1, 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def losses_and_gradients(made: RobertaForMaskedLM, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    made = copy.deepcopy(made).to(device).train()
    handle, given = install(made, PLAN), batch(device)
    guidance = handle.guide(**given)
    output = made(**given, labels=given["input_ids"], guidance=guidance)
    total = output.loss + guidance.loss()
    total.backward()
    return total.detach().cpu(), [p.grad.cpu() for p in made.parameters() if p.grad is not None]


def test_gpu_and_cpu_agree_on_loss_and_gradients() -> None:
    made = model()
    on_cpu, on_gpu = losses_and_gradients(made, "cpu"), losses_and_gradients(made, "cuda")
    torch.testing.assert_close(on_gpu[0], on_cpu[0], rtol=1e-4, atol=1e-5)
    for gpu, cpu in zip(on_gpu[1], on_cpu[1], strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-3, atol=1e-4)


def test_losses_are_float32_under_bf16_autocast() -> None:
    made, given = model().cuda(), batch("cuda")
    guidance = install(made, PLAN).guide(**given)
    with torch.autocast("cuda", torch.bfloat16):
        made(**given, guidance=guidance)
    for loss in guidance.per_example().values():
        assert loss.dtype == torch.float32
        assert torch.isfinite(loss).all()


def test_a_fully_padded_example_has_no_loss_and_finite_gradients() -> None:
    made, given = model().cuda(), batch("cuda")
    given["attention_mask"][2] = 0
    guidance = install(made, PLAN).guide(**given)
    made(**given, guidance=guidance)
    guidance.loss().backward()
    assert all(loss[2] == 0 for loss in guidance.per_example().values())
    assert all(torch.isfinite(p.grad).all() for p in made.parameters() if p.grad is not None)


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2", "t5"])
@pytest.mark.parametrize("name", [name for name in PLANS if name not in RANDOM])
def test_every_mechanism_gives_the_same_on_gpu_and_cpu(family: str, name: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        made, handle = installed(family, name)
        made.to(device)
        given = {key: value.to(device) for key, value in inputs_of(family).items()}
        done = run(made, handle, given)
        done.total.backward()
        found.append((done.total.detach().cpu(), [p.grad.cpu() for p in made.parameters() if p.grad is not None]))
    (cpu_loss, cpu_gradients), (gpu_loss, gpu_gradients) = found
    torch.testing.assert_close(gpu_loss, cpu_loss, rtol=1e-3, atol=1e-4)
    # rounding differs between devices, and can move a unit across its threshold
    if "adversary" not in name and name != "all ten":
        for gpu, cpu in zip(gpu_gradients, cpu_gradients, strict=True):
            torch.testing.assert_close(gpu, cpu, rtol=1e-2, atol=1e-3)
