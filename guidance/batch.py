"""The guidance of one batch: what travels through a model as ``guidance=``, and gives the losses afterwards.

It holds the features of the batch and keeps what the attention function finds.  Everything is assigned and never appended,
because gradient checkpointing runs the forward pass twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from guidance.batch_patterns import BatchPatterns
from guidance.errors import GuidanceHadNoEffect, InputError, PlanError, UnknownName
from guidance.guide import Guide
from guidance.mechanisms.attacks import AttackMechanism, Form, divergence
from guidance.mechanisms.base import Attack
from guidance.mechanisms.logit_loss import mispredictions
from guidance.packing import Documents
from guidance.prefix import States
from guidance.site_plans import SitePlan
from guidance.sites import Site

_REENTRANT = "gradient checkpointing needs use_reentrant=False; without gradients, ask under no_grad too"


@dataclass(repr=False)
class BatchGuidance(BatchPatterns):
    """A guided model on one batch.  Pass it to the model as ``guidance=``, then ask it for the losses.

    Attributes:
        guided, tokens, past, has_own_mask: see `BatchPatterns`.
        step: optimizer steps so far, for masks that follow a schedule.
        seeds_B: int64, from which the attack on each example is drawn; None but in the second pass.
        measuring: losses on heads are wanted; at inference they are not.
        losses: per (guide, site), the loss of each example, (B,); filled by the forward pass.
        attacks: per (guide, site), what the attack did; filled by the forward pass.
        recorded: None, or per site the probabilities of all its heads, (B, H, Q, K); filled by the forward pass.
        strengths: by number, how much each guide that fades still does; see `GuidedModel.strengths`.
        site_plans: what is to be done at each site, without guides whose strength is 0.
        watcher: if set, gets each site's entry of ``recorded`` as soon as it is complete, and nothing is kept.
        earlier: by site and place, what `mix` needs of earlier tokens; see `guidance.prefix`.
        kept: the same for calls after this one, filled by the forward pass; None if there is no cache.
        documents: where they are in the row that the model reads in place of the padded batch; None if it reads that.  See `packed`.
    """

    step: int = 0
    seeds_B: Tensor | None = None
    measuring: bool = True
    losses: dict[tuple[int, Site], Tensor] = field(default_factory=dict)
    attacks: dict[tuple[int, Site], Attack] = field(default_factory=dict)
    recorded: dict[Site, Tensor] | None = None
    watcher: Callable[[Site, Tensor], object] | None = None
    earlier: Mapping[tuple[Site, str], States] = field(default_factory=dict)
    kept: dict[tuple[Site, str], States] | None = None
    strengths: Mapping[int, Tensor] = field(default_factory=dict)
    documents: Documents | None = None
    site_plans: Mapping[Site, SitePlan] = field(init=False)
    _calls: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.site_plans = self.guided.remaining(self.strengths)

    def but(self, **changes: Any) -> BatchGuidance:
        """The same guidance with other values of some attributes; both fill the same ``losses`` and ``attacks``."""
        return BatchGuidance(**{name: value for name, value in vars(self).items() if name != "site_plans"} | changes)

    @property
    def attacking(self) -> bool:
        """This is the second pass, in which attacks are made and losses on heads are not measured."""
        return self.seeds_B is not None

    # packing

    def packed(self, documents: Documents | None = None) -> dict[str, Any]:
        """The arguments of the model with which it reads the batch as one row without padding, (1, N).

        Its outputs are those of the row; patterns, losses and probabilities stay those of the batch, (B, T).

        Args:
            documents: the lengths of the texts of the batch, if they are known already.

        Raises:
            InputError: the batch has no ids, or is not padded on the right.
            UnsupportedModel: the model takes no positions.

        Example:
            >>> guidance = handle.guide(batch["input_ids"], batch["attention_mask"])
            >>> logits_1NV = model(**guidance.packed(), guidance=guidance).logits
        """
        tokens = self._stack("encoder")
        self.documents = documents or Documents.of_mask(tokens.valid_BT)
        return self.documents.inputs(self.guided.model, tokens.ids_BT)

    # losses

    def per_example(self) -> dict[str, Tensor]:
        """By label, each loss on heads for each example, (B,), summed over layers.

        Weight, schedule and `Guide.reference_length` are not applied, nor the division by `denominators`.

        Raises:
            GuidanceHadNoEffect: the forward pass did not reach every site of the plan, or its gradients are cut off.
        """
        by_label: dict[str, Tensor] = {}
        for site, site_plan in self.guided.site_plans.items():
            learns = self.guided.learns(site)
            for assignment in site_plan.measured():
                number = assignment.number
                if (number, site) not in self.losses:
                    raise GuidanceHadNoEffect(
                        f"guide {number + 1} did not reach {site.name}",
                        hint="call the model with guidance=..., once, before asking for the losses",
                    )
                label, loss = self.guided.plan.labels[number], self.losses[number, site]
                if learns and torch.is_grad_enabled() and not loss.requires_grad:
                    raise GuidanceHadNoEffect(
                        f"guide {number + 1}: its loss at {site.name} has no gradient", hint=_REENTRANT
                    )
                by_label[label] = by_label[label] + loss if label in by_label else loss
        return by_label

    def weights_B(self, label: str) -> Tensor:
        """How much each example counts for a guide, (B,).

        An example of padding alone counts 0, others 1; with a `Guide.reference_length`, their length divided by it.
        """
        _, guide, stack = self._guide(label)
        lengths_B = self._stack(stack).lengths_B.float()
        return lengths_B / guide.reference_length if guide.reference_length else (lengths_B > 0).float()

    def denominators(self) -> dict[str, Tensor]:
        """By label, what the sum over the examples of a batch is divided by.

        It is the number of examples that are not only padding, or of mis-predictions for ``logit_loss``, and is known before
        the forward pass.
        """
        denominators: dict[str, Tensor] = {}
        for label in self.guided.alphas(0, 1):
            number, guide, stack = self._guide(label)
            # only a loss on mis-predictions counts what its pattern says
            pattern = self.pattern(number, stack) if guide.makes("row_losses") else None
            denominators[label] = guide.bound_mechanism.denominator(self._stack(stack), pattern)
        return denominators

    def mispredictions(self, label: str) -> tuple[Tensor, Tensor]:
        """How many mis-predictions the pattern of a ``logit_loss`` says anything about, and how many there are."""
        number, _, stack = self._guide(label)
        return mispredictions(self._stack(stack), self.pattern(number, stack))

    def loss(self, step: int = 0, total_steps: int = 1) -> Tensor:
        """The scalar to add to the task's loss: the weighted sum of all losses on heads, averaged over the batch.

        Args:
            step, total_steps: finished optimizer steps, and all of them, for schedules.
        """
        alphas, each = self.guided.alphas(step, total_steps), self.per_example()
        terms = [
            alphas[label] * (self.weights_B(label) * each[label]).sum() / count.clamp(min=1)
            for label, count in self.denominators().items()
        ]
        return torch.stack(terms).sum() if terms else torch.zeros((), device=self._valid.device)

    def _guide(self, label: str) -> tuple[int, Guide, str]:
        """The guide of a label, after its number in the plan, and the stack on which it acts."""
        if label not in self.guided.plan.labels:
            raise UnknownName("guide", label, self.guided.plan.labels)
        number = self.guided.plan.labels.index(label)
        guide = self.guided.plan.guides[number]
        return number, guide, self.guided.stack_of(guide)

    @property
    def _valid(self) -> Tensor:
        return next(iter(self.tokens.values())).valid_BT

    # the second pass

    def attack(self, seeds_B: Tensor | None = None) -> BatchGuidance:
        """The guidance of a second forward pass over the same batch, in which adversaries and random masks attack.

        Args:
            seeds_B: int64, one for each example.  What is random in the attack on an example depends on its seed alone, not
                on the rest of the batch.  Drawn if not given.

        Raises:
            PlanError: no guide of the plan attacks.
        """
        if not self.guided.attacks:
            raise PlanError("no guide of this plan attacks", hint='mechanism = "adversary"')
        if seeds_B is None:
            seeds_B = torch.randint(1 << 62, (len(self._valid),))
        seeds_B = seeds_B.to(self._valid.device)
        return BatchGuidance(
            self.guided, self.tokens, self.step, seeds_B, strengths=self.strengths, documents=self.documents
        )

    def adversarial_loss(
        self,
        clean: Any,
        attacked: Any,
        form: Form | Literal["pretraining"] = "classification",
        selected: Tensor | None = None,
        *,
        step: int = 0,
        total_steps: int = 1,
    ) -> Tensor:
        """What the second pass adds to the task's loss: the divergence of its outputs, and the adversary's penalty.

        The guide's weight and schedule are those of the divergence; the penalty has its own weight.

        Args:
            clean, attacked: logits, see `guidance.mechanisms.attacks.divergence`, or what the model returned.
            form: see `divergence`; or ``pretraining``, which adds to the divergence of tokens that of whole examples, as
                the option ``sentence`` of the plan says.  With ``hidden``, its default, give what the model returned for
                ``output_hidden_states=True``.
            selected: see `divergence`; the masked positions in pre-training.

        Raises:
            InputError: the shapes do not fit, or hidden states are asked for and are not there.

        Source: Wu et al. 2023, equations 9 and 10.
        """
        of_tokens, of_attacked = (o if isinstance(o, Tensor) else o.logits for o in (clean, attacked))
        moved = divergence(of_tokens, of_attacked, "token" if form == "pretraining" else form, selected)
        if form == "pretraining":
            moved = moved + divergence(self._sentence_output(clean), self._sentence_output(attacked))
        return self.guided.attack_alpha(step, total_steps) * moved + self.penalty()

    def _sentence_output(self, output: Any) -> Tensor:
        """The outputs at the first token of each example that is not only padding, (B, D).  They stand for whole examples in
        pre-training; see `GuidedModel.sentence`."""
        if self.guided.sentence == "head":
            states = output if isinstance(output, Tensor) else output.logits
        elif hidden := getattr(output, "hidden_states", None):
            states = hidden[-1]
        else:
            raise InputError(
                "the plan compares hidden states (sentence = 'hidden'), and the outputs have none",
                hint='give what the model returned for output_hidden_states=True, or write sentence = "head" in the plan',
            )
        some_B = self._valid.any(-1).nonzero()[:, 0]
        first_B = self._valid[some_B].int().argmax(-1)
        if self.documents is not None and self.documents.is_packed(states):
            return states[0, self.documents.at(some_B * self._valid.shape[1] + first_B)]
        return states[some_B, first_B]

    def penalty(self) -> Tensor:
        """The adversary's penalty: its weight times the number of units left on, summed over layers, averaged over the examples.

        Its gradient is reversed, so hiding a unit costs the adversary that weight, and the model gets no gradient from it.

        Raises:
            GuidanceHadNoEffect: the second pass has not been made.
        """
        num_examples = self._valid.any(-1).sum()
        return self.penalties_B().sum() / num_examples.clamp(min=1)

    def penalties_B(self) -> Tensor:
        """The penalty of each example, (B,), with its weight."""
        total = torch.zeros(len(self._valid), device=self._valid.device)
        for (number, site), attack in self._made_attacks():
            mechanism = self.guided.plan.guides[number].bound_mechanism
            assert isinstance(mechanism, AttackMechanism)
            penalty_B = mechanism.penalty_B(attack)
            if penalty_B is None:
                continue
            if torch.is_grad_enabled() and not penalty_B.requires_grad and self.guided.learns(site, number):
                raise GuidanceHadNoEffect(
                    f"guide {number + 1}: its penalty at {site.name} has no gradient", hint=_REENTRANT
                )
            total = total + penalty_B
        return total

    def attack_masks(self) -> dict[Site, Tensor]:
        """For each attacked site, the units that the attack left on: bool (B, H, Q, K), True in heads without an attack.

        A row that would be left without a key is not attacked, and so True throughout.
        """
        masks: dict[Site, Tensor] = {}
        for (number, site), attack in self._made_attacks():
            batch, _, queries, keys = attack.scores.shape
            everything = attack.keep.new_ones(batch, site.num_heads, queries, keys)
            (mine,) = (a for a in self.guided.site_plans[site].making("attack") if a.number == number)
            masks.setdefault(site, everything)[:, list(mine.heads)] = attack.keep
        return masks

    def masked_shares_B(self) -> dict[Site, Tensor]:
        """For each attacked site and example, the share of units between valid tokens that is switched off, (B,).

        Rows that the attack would leave without a key count, though they are not attacked.  Examples of padding alone have 0.  The
        device is not synchronised.
        """
        shares: dict[Site, list[Tensor]] = {}
        for (_, site), attack in self._made_attacks():
            off_B = attack.units_B - attack.kept_B.detach()
            shares.setdefault(site, []).append(off_B.double() / attack.units_B.clamp(min=1))
        return {site: torch.stack(each).mean(0) for site, each in shares.items()}

    def _made_attacks(self) -> list[tuple[tuple[int, Site], Attack]]:
        for number, site in self.guided.attacks:
            if (number, site) not in self.attacks:
                raise GuidanceHadNoEffect(
                    f"guide {number + 1} did not attack {site.name}",
                    hint="call the model with guidance=guidance.attack(), once, before asking",
                )
        return list(self.attacks.items())

    # for the attention function

    def works_at(self, module: nn.Module) -> bool:
        """Whether anything is to be done in this attention module."""
        sites: tuple[Site, ...] = getattr(module, "guide_sites", ())
        return any(each is not None for each in (self.recorded, self.documents)) or any(map(self.site_plan, sites))

    def passes_by(self, module: nn.Module) -> bool:
        """Whether nothing is to be done in the coming call of a module.  If so, the call counts as made."""
        if getattr(module, "guide_sites", ()) and self.site_plan(self.coming_site(module)) is not None:
            return False
        self.site(module)
        return True

    def site_plan(self, site: Site) -> SitePlan | None:
        """What is to be done at a site in this pass; None for nothing."""
        plan = self.site_plans.get(site)
        if self.recorded is not None:
            return plan or SitePlan((), site.num_heads)
        return plan if plan and plan.acts(attacking=self.attacking, measuring=self.measuring) else None

    def site(self, module: nn.Module) -> Site | None:
        """The site of this call of a module.  Layers that share a module are told apart by their order."""
        sites: tuple[Site, ...] = getattr(module, "guide_sites", ())
        if len(sites) < 2:
            return sites[0] if sites else None
        call = self._calls.get(sites[0].name, 0)
        self._calls[sites[0].name] = call + 1
        return sites[call % len(sites)]

    def coming_site(self, module: nn.Module) -> Site:
        """The site of the next call of a module."""
        sites: tuple[Site, ...] = module.guide_sites  # type: ignore[assignment]
        return sites[self._calls.get(sites[0].name, 0) % len(sites)] if len(sites) > 1 else sites[0]


# `fully_shard` copies dataclasses among the arguments of its parts, and what is written into a copy never comes back
del BatchGuidance.__dataclass_fields__, BatchPatterns.__dataclass_fields__
