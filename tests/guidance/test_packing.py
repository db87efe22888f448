"""Packing: documents in one row are read as if each stood alone, with every plan and in every family of encoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from guidance.errors import InputError, UnsupportedModel
from guidance.installation import install
from guidance.packing import Documents
from guidance.plan import Plan
from tests.guidance.models import FAMILIES, batch, tiny_model
from tests.guidance.plans import PLANS, columns, installed

SEEDS_B = torch.tensor([11, 22, 33])


def logits(model: Any, guidance: Any, inputs: dict[str, Tensor], packs: bool) -> Tensor:
    """Those of all tokens that are not padding, (N, V)."""
    if packs:
        return model(**guidance.packed(), guidance=guidance).logits[0]  # type: ignore[no-any-return]
    return model(**inputs, guidance=guidance).logits[inputs["attention_mask"].bool()]  # type: ignore[no-any-return]


def both(family: str, plan: Plan | str, **config: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, losses and gradients of a padded batch, and of the same documents packed; in double precision."""
    found = []
    for packs in (False, True):
        model, handle = installed(family, plan, **config)
        model.double()
        inputs = batch((7, 4, 5))
        guidance = handle.guide(**inputs, **columns(inputs))
        result = {"logits": logits(model, guidance, inputs, packs), **guidance.per_example()}
        total = result["logits"].square().mean() + guidance.loss()
        if handle.attacks:
            attack = guidance.attack(SEEDS_B)
            result |= {"attacked": logits(model, attack, inputs, packs), "penalty": attack.penalty()}
            total = total + result["attacked"].square().mean() + result["penalty"]
        total.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({**result, **gradients})
    return found[0], found[1]


def assert_equal(padded: dict[str, Tensor], packed: dict[str, Tensor], error: float = 1e-9) -> None:
    assert padded.keys() == packed.keys()
    for name, value in padded.items():
        torch.testing.assert_close(packed[name], value, rtol=error, atol=error, msg=lambda m, n=name: f"{n}: {m}")


CASES = [(family, plan) for family in FAMILIES for plan in ("", *PLANS)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("family", "plan"), CASES)
def test_a_packed_row_gives_what_its_documents_give_alone(family: str, plan: str) -> None:
    # DeBERTa's own attention, of a layer without guides, computes its scale in single precision
    assert_equal(*both(family, plan or Plan(())), 1e-5 if family == "deberta-v2" else 1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_lets_packed_documents_see_each_other_and_a_packed_batch_does_not(family: str) -> None:
    model, other = tiny_model(family, conv_kernel_size=0), batch((4, 5), seed=2)
    inputs = batch((4, 5))
    other["input_ids"][1] = inputs["input_ids"][1]  # the second document is the same, the first is not
    documents, second = Documents.of((4, 5)), slice(4, None)

    def trusting(given: dict[str, Tensor]) -> Tensor:
        read = documents.inputs(model, given["input_ids"]) | {"attention_mask": None}
        return model(**read).logits[0, second]  # type: ignore[no-any-return]

    with torch.no_grad():
        assert (trusting(inputs) - trusting(other)).abs().max() > 1e-3
        handle = install(model, Plan(()))
        mine, theirs = (logits(model, handle.guide(**given), given, True)[second] for given in (inputs, other))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2"])
def test_gradient_checkpointing_replays_a_packed_row(family: str) -> None:
    found = []
    for checkpointing in (False, True):
        model, handle = installed(family, "attention_loss")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        inputs = batch((7, 4, 5))
        guidance = handle.guide(**inputs, **columns(inputs))
        (logits(model, guidance, inputs, True).square().mean() + guidance.loss()).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_equal(*found, error=1e-5)


def test_what_cannot_be_packed_is_refused() -> None:
    _, handle = installed("bert", Plan(()))
    inputs = batch((2, 4))
    with pytest.raises(InputError, match="padded on the right"):
        handle.guide(inputs["input_ids"].flip(-1), inputs["attention_mask"].flip(-1)).packed()
    with pytest.raises(InputError, match="the longest text has 4 tokens, and the batch is padded to 6"):
        handle.guide(**batch((2, 4), width=6)).packed()
    with pytest.raises(InputError, match="every document is empty"):
        Documents.of((0, 0))
    with pytest.raises(InputError, match=r"a batch \(1, 3\)"):
        handle.guide(**inputs).packed(Documents.of((3,)))
    _, handle = installed("t5", Plan(()))
    with pytest.raises(UnsupportedModel, match="takes no position_ids"):
        handle.guide(**inputs).packed()


def test_tokens_keep_their_places_and_an_empty_document_takes_none() -> None:
    documents = Documents.of((2, 0, 3))
    assert documents.shape == (3, 3)
    assert documents.places_N.tolist() == [0, 1, 6, 7, 8]
    assert documents.at(torch.tensor([1, 8])).tolist() == [1, 4]
    row_1N = torch.tensor([[1, 2, 3, 4, 5]])
    assert documents.apart(row_1N).tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    assert documents.together(documents.apart(row_1N)).tolist() == row_1N.tolist()
    model = tiny_model("roberta")
    assert documents.inputs(model, documents.apart(row_1N))["position_ids"].tolist() == [[2, 3, 2, 3, 4]]
