"""A plan for every mechanism, some mixtures, and a function that runs any of them on a tiny model of any family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.batch import BatchGuidance
from guidance.guide import Guide
from guidance.installation import Handle, install
from guidance.models.added_heads import Pal
from guidance.patterns.features import Cooccurrence
from guidance.plan import Plan
from tests.guidance.models import FAMILIES, SEQ2SEQ, tiny_model

EVERY = (*FAMILIES, *SEQ2SEQ)


def guide(mechanism: str, pattern: str | Mapping[str, Any] = "", *heads: int | str, **more: Any) -> Guide:
    """A row of a plan."""
    return Guide(pattern, mechanism, heads=heads or ("all",), **more)


PLANS: Mapping[str, Plan] = {
    "attention_loss": Plan(
        (
            guide("attention_loss", "next", 0, weight=3.0),
            guide("attention_loss", "first", 2, weight=5.0),
            guide("attention_loss", "period", 1, 2, empty_rows="skip", token_rows="indicator"),
        )
    ),
    "attention_loss, kl": Plan(
        (
            guide("attention_loss", "next", 0, weight=3.0, distance="kl"),
            guide("attention_loss", "first", 2, weight=5.0, distance="kl", stop_at=0.9),
            guide("attention_loss", "previous", 3, distance="kl", boundary="uniform"),
            guide("mask", "window", 0, 3),
        )
    ),
    "attention_loss, mass": Plan((guide("attention_loss", "period", 1, 2, distance="kl", mass=True),)),
    "attention_loss, away": Plan(
        (
            guide("attention_loss", "window", 0, distance="kl", mass=True, away=True),
            guide("attention_loss", "first", 1, 2, distance="kl", mass=True, away=True, stop_at=0.9),
            guide("mask", "window", 2),
        )
    ),
    "bias, fading": Plan((guide("bias", "first", 1, 3, schedule="cosine"),)),
    "fix, fading": Plan((guide("fix", "next", 0, schedule="linear"), guide("gaussian", "", 2, schedule="linear"))),
    "off, fading": Plan((guide("off", schedule="linear"),)),
    "logit_loss": Plan((guide("logit_loss", "conflict", "first 2", layers=("last 1",)),)),
    "mask": Plan((guide("mask", "window", 0), guide("mask", "matching_token", 0, 2))),
    "mask, scaled": Plan((guide("mask", "previous", 1, scale="d_model"),)),
    "bias, learn": Plan(
        (guide("bias", "first", 1, 3, learn=True), guide("bias", "next", 0, learn=True, schedule="linear"))
    ),
    "bias": Plan((guide("bias", "first", 1, 3), guide("bias", {"sum": ["next", "self"]}, 1))),
    "fix": Plan(tuple(guide("fix", p, h) for h, p in enumerate(("next", "previous", "first", "window")))),
    "fix, boundaries": Plan((guide("fix", "next", 0, boundary="self"), guide("fix", "delimiter", 2))),
    "gaussian": Plan((guide("gaussian", "", 1, 2),)),
    "off": Plan((guide("off", "", 0),)),
    "all off": Plan((guide("off"),)),
    "gate": Plan((guide("gate", "", 0, 2), guide("mask", "window", 0))),
    "gate, query": Plan(
        (
            guide("gate", "", 0, 2, input="query", elementwise=True),
            guide("gate", "", 1, input="query", schedule="linear"),
            guide("mask", "window", 0),
        )
    ),
    "mix": Plan(
        (
            guide("mix", "next"),
            guide("mix", "previous", of=["stream", "input"]),
            guide("mix", "first", of=["input"], schedule="linear"),
            guide("mask", "window", 0),
        )
    ),
    "mix, heads": Plan(
        (
            guide("mix", "next", 0, 2, of=["query", "key"]),
            guide("mix", "matching_token", 1, 3, of=["value", "output"]),
            guide("mix", {"sum": ["next", "self"]}, 0, of=["value"]),
            guide("fix", "previous", 1),
        )
    ),
    "mix, everywhere": Plan(
        (
            guide("mix", "next", of=["stream", "input", "query", "key", "value", "output"]),
            guide("mix", "previous", of=["stream", "value"], layers=("last 1",)),
        )
    ),
    "adversary": Plan((guide("adversary"),)),
    "adversary, per head": Plan((guide("adversary", "", 0, 1, per_head=True, noise="gumbel", normalise=True),)),
    "random_mask": Plan((guide("random_mask", proportion=0.3),)),
    "random_mask, magnitude": Plan((guide("random_mask", "", 0, 3, kind="magnitude", proportion=0.3),)),
    "pal": Plan(
        (
            guide("mask", "window", "pal:0"),
            guide("attention_loss", "next", "pal:1"),
            guide("fix", "previous", "pal:2"),
            guide("mask", "first", 1),
        ),
        Pal(width=8),
    ),
    "pal, attention": Plan(
        (
            guide("mask", "window", "pal:0"),
            guide("attention_loss", "next", "pal:1"),
            guide("fix", "previous", "pal:2"),
        ),
        Pal(width=8, placement="attention"),
    ),
    "all mechanisms": Plan(
        (
            guide("attention_loss", "next", 0, 1),
            guide("logit_loss", "conflict", 0),
            guide("mask", "window", 0),
            guide("bias", "first", 0),
            guide("fix", "previous", 2),
            guide("gaussian", "", 3, layers=(0,)),
            guide("off", "", 3, layers=(1,)),
            guide("gate", "", 0, 1),
            guide("adversary", "", 0),
            guide("random_mask", "", 1, kind="magnitude", proportion=0.5),
            guide("mix", "previous", of=["stream"]),
        ),
    ),
}
"""By mechanism, with its options after a comma, and some mixtures."""

PARAMETERS = (
    "gate",
    "gate, query",
    "mix",
    "mix, heads",
    "mix, everywhere",
    "bias, learn",
    "adversary",
    "adversary, per head",
    "pal",
    "pal, attention",
    "all mechanisms",
)
"""Plans that add parameters."""

RANDOM = ("adversary, per head", "random_mask")
"""Plans that draw random numbers."""


class Words:
    """The part of a tokenizer that patterns need: id 3 is [CLS], 4 is [SEP], 5 a full stop, 6 [MASK]."""

    cls_token_id, sep_token_id, bos_token_id, eos_token_id, mask_token_id = 3, 4, None, None, 6

    def __len__(self) -> int:
        return 40

    def get_vocab(self) -> dict[str, int]:
        return {".": 5, **{f"w{n}": n for n in range(6, 40)}}


def tables() -> dict[str, Any]:
    """A co-occurrence table with all ids except the first six."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.cat([torch.full((6,), -1), torch.arange(34)])
    return {"cooccurrence": Cooccurrence(rows, torch.rand(34, 34, generator=generator))}


def columns(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The features that the plans need besides ids and padding: tokens with even ids count as mispredicted."""
    return {"mispredicted": inputs["input_ids"] % 2 == 0}


def installed(family: str, plan: Plan | str, **config: Any) -> tuple[PreTrainedModel, Handle]:
    """A tiny model on which a plan is installed; see `install_plan`."""
    model = tiny_model(family, **config)
    return model, install_plan(model, plan)


def install_plan(model: PreTrainedModel, plan: Plan | str) -> Handle:
    """Install a plan, and set the parameters that it adds to large random numbers."""
    handle = install(model, PLANS[plan] if isinstance(plan, str) else plan, Words(), tables=tables())
    handle.advance(1, 4)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".guided." in name:
            nn.init.normal_(parameter, std=0.5, generator=generator)
    return handle


@dataclass(frozen=True)
class Run:
    """The results of a clean pass, and of the attacked one if the plan attacks.

    Attributes:
        logits, attacked: logits of both passes at valid tokens, of the decoder if there is one; ``attacked`` may be None.
        losses: by label, (B,).
        penalty: the adversaries' penalty, a scalar, or None.
        total: the whole training objective, a scalar.
    """

    logits: Tensor
    attacked: Tensor | None
    losses: dict[str, Tensor]
    penalty: Tensor | None
    total: Tensor
    guidance: BatchGuidance
    attack: BatchGuidance | None


def run(model: PreTrainedModel, handle: Handle, inputs: Mapping[str, Tensor], **more: Any) -> Run:
    """Run a pass, and a second one if the plan attacks."""
    guided = {name: value for name, value in inputs.items() if name not in ("labels", "inputs_embeds")}
    given = {name: value for name, value in inputs.items() if name != "labels"} | more
    if "inputs_embeds" in given:
        given.pop("input_ids")
    valid_BT = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
    guidance = handle.guide(**guided, **columns(inputs))
    logits = model(**given, guidance=guidance).logits
    total = logits[valid_BT].float().square().mean() if valid_BT.any() else logits.sum() * 0.0
    total = total + guidance.loss()
    if not handle.attacks:
        return Run(logits[valid_BT], None, guidance.per_example(), None, total, guidance, None)
    attack = guidance.attack()
    attacked = model(**given, guidance=attack).logits
    total = total + attack.adversarial_loss(logits, attacked, "token", valid_BT)
    return Run(
        *(logits[valid_BT], attacked[valid_BT], guidance.per_example(), attack.penalty(), total),
        *(guidance, attack),
    )


def example(inputs: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """One example of a batch, without its padding."""
    lengths = {
        name.replace("attention_mask", "input_ids"): int(mask[number].sum())
        for name, mask in inputs.items()
        if name.endswith("attention_mask")
    }
    lengths |= {"labels": lengths.get("decoder_input_ids", lengths["input_ids"])}
    return {
        name: value[number : number + 1, : lengths[name.replace("attention_mask", "input_ids")]]
        for name, value in inputs.items()
    }


CASES = [(family, name) for family in EVERY for name in PLANS]
"""Every family with every plan."""
