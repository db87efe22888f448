"""Data parallelism: two processes with half of the batch each get the gradients of one, and every parameter is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn

import guidance
from guidance.errors import InputError
from tests.guidance.models import SEQ2SEQ, batch, pair_batch
from tests.guidance.plans import PLANS, installed, run
from tests.tiny import processes

CASES = [
    *(
        ("roberta", name)
        for name in (
            "attention_loss",
            "gate",
            "gate, query",
            "bias, learn",
            "fix",
            "all off",
            "adversary",
            "random_mask",
            "pal",
        )
    ),
    ("deberta-v2", "fix"),
    ("albert", "adversary"),
    ("bart", "adversary"),
    ("bart", "pal"),
    ("t5", "fix"),
]
STEPS = 2
"""The second step fails if the first left a parameter without a gradient."""


def _inputs(family: str, part: slice) -> dict[str, Tensor]:
    """Half of a batch.  Both halves have as many tokens, so the mean of their losses is the loss of the whole."""
    lengths, targets = (7, 4, 5, 6), (3, 5, 6, 2)
    inputs = pair_batch(lengths, targets) if family in SEQ2SEQ else batch(lengths)
    return {key: value[part] for key, value in inputs.items()}


def _gradients(family: str, name: str, part: slice, *, parallel: bool = False) -> dict[str, Tensor | None]:
    model, handle = installed(family, name)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=False) if parallel else model
    for _ in range(STEPS):
        model.zero_grad()
        run(wrapped, handle, _inputs(family, part)).total.backward()  # type: ignore[arg-type]
    return {key: parameter.grad for key, parameter in model.named_parameters()}


def _worker(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    for number, (family, name) in enumerate(CASES):
        if name == "random_mask":
            torch.manual_seed(rank)
        gradients = _gradients(family, name, slice(2 * rank, 2 * rank + 2), parallel=True)
        torch.save(gradients, f"{folder}/{number}-{rank}.pt")
    _save(rank, Path(folder))
    (Path(folder) / f"fsdp-{rank}").write_text(_refusal_of_fsdp())
    torch.distributed.destroy_process_group()


def _save(rank: int, folder: Path) -> None:
    """Save a model that runs in DDP as users do; the plan shapes it, and its calls come without guidance."""
    model, _ = installed("roberta", "gate")
    wrapped = nn.parallel.DistributedDataParallel(model)
    logits = wrapped(**_inputs("roberta", slice(2 * rank, 2 * rank + 2))).logits
    torch.save(logits.detach(), folder / f"logits-{rank}.pt")
    if rank == 0:
        wrapped.module.save_pretrained(folder / "saved")


def _refusal_of_fsdp() -> str:
    """What a guided model says whose layers the first FSDP has flattened."""
    model, handle = installed("bert", "attention_loss")
    layers = model.bert.encoder.layer
    for number, layer in enumerate(layers):
        layers[number] = torch.distributed.fsdp.FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    try:
        model(**batch(), guidance=handle.guide(**batch()))
    except InputError as error:
        return error.message
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the gradients of both processes for each case."""
    path = tmp_path_factory.mktemp("parallel")
    torch.set_num_threads(1)  # so that this process may be forked
    assert processes(2, lambda rank: _worker(rank, path)) == [0, 0]
    return path


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_two_processes_get_the_gradients_of_one(family: str, name: str, folder: Path) -> None:
    number = CASES.index((family, name))
    one, two = (torch.load(folder / f"{number}-{rank}.pt") for rank in range(2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert any(gradient is not None and gradient.any() for gradient in one.values())
    if name != "random_mask":  # each process draws its own
        torch.testing.assert_close(one, _gradients(family, name, slice(0, 4)), rtol=1e-4, atol=1e-5)


def test_a_model_in_ddp_is_guided_and_saved_with_its_plan(folder: Path) -> None:
    model, handle = guidance.load(folder / "saved")
    assert handle.plan == PLANS["gate"]
    for rank in range(2):
        expected = torch.load(folder / f"logits-{rank}.pt")
        found = model(**_inputs("roberta", slice(2 * rank, 2 * rank + 2))).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_first_fsdp_is_refused_by_name(folder: Path) -> None:
    refusals = {(folder / f"fsdp-{rank}").read_text() for rank in range(2)}
    assert refusals == {"guides are not carried through FullyShardedDataParallel"}


@pytest.mark.parametrize(("family", "name"), [case for case in CASES if case[1] in ("fix", "all off")])
def test_parameters_that_fixed_heads_leave_unused_are_frozen(family: str, name: str) -> None:
    model, _ = installed(family, name)
    frozen = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    assert any("query" in key or ".q." in key or "q_proj" in key for key in frozen)
