"""A guided model: a plan resolved against a model, which guide acts on which heads with which weight."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.errors import GuidanceHadNoEffect, InputError
from guidance.guide import Guide
from guidance.mechanisms.attacks import AttackMechanism
from guidance.mechanisms.random_mask import PROPORTIONS
from guidance.models.added_heads import added_sites
from guidance.models.families import find_sites
from guidance.patterns.features import TABLES, Cooccurrence, Vocabulary
from guidance.plan import Plan
from guidance.site_plans import SitePlan, plan_sites
from guidance.sites import EXTRA, Site, stack_meant, stack_of_inputs

_TABLE_TYPES: Mapping[str, tuple[type, ...]] = {"cooccurrence": (Cooccurrence,), "importance": (Tensor, Mapping)}


Attend = Callable[[Any, tuple[int, ...]], Tensor]

PLAN_KEY = "guide_plan"
"""The key under which the configuration of a guided model holds the text of its plan."""

PROGRESS_KEY = "guide_progress"
"""The key under which the configuration of a model whose plan fades holds the step that its training is at, and the last."""


class GuidedModel:
    """A plan resolved against a model.

    Attributes:
        plan: the plan, as given.
        guides: the guides of the plan that belong to this model, by their number in the plan.
        sites: the attention modules of the model, and the extra heads of the plan, with their sites.
        added: the attention modules beside which the plan adds heads, with the sites of these.
        site_plans: what the plan says about each site; empty if every guide is off.
        num_guided: by number of a guide, the number of heads on which it acts, in all layers.
        attacks: the guides that attack in a second pass, by number, with each of their sites.
        tables: what patterns and rules look up beside tokens: ``cooccurrence``, ``importance``, ``masking_proportion``.
        backends: the function that computes the heads of each path; see `guidance.attention.backends`.
        fading: the guides that a schedule takes away in the course of training, by number.
        progress: the step that training is at, and the last one, for guides that fade; None if that is not known.
        shaping: the plan shapes outputs of this model, which computes something else without it.
        is_installed: the model follows the plan.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        *,
        vocabulary: Vocabulary | None = None,
        decoder_vocabulary: Vocabulary | None = None,
        part: str = "model",
        tables: Mapping[str, Any] | None = None,
    ):
        self.model, self.plan = model, plan
        self.guides = {number: guide for number, guide in enumerate(plan.guides) if guide.part == part}
        self.vocabulary, self.tables = vocabulary, dict(tables or {})
        self.decoder_vocabulary = decoder_vocabulary or vocabulary
        self.sites = find_sites(
            model, required=bool(plan.guides) or plan.pal is not None or getattr(model, "has_heads", True)
        )
        self.added = added_sites(plan.pal, self.sites) if plan.pal is not None and part == "model" else {}
        self._matches: dict[int, Tensor] = {}
        self._check_tables()
        every = [site for table in (self.sites, self.added) for sites in table.values() for site in sites]
        self.site_plans = plan_sites(plan, every, part, self.tables.get("importance"))
        self.num_guided = Counter[int]()
        for site_plan in self.site_plans.values():
            for assignment in site_plan.assignments:
                self.num_guided[assignment.number] += len(assignment.heads)
        self.attacks = [
            (a.number, site) for site, site_plan in self.site_plans.items() for a in site_plan.making("attack")
        ]
        self.backends: Mapping[str, Attend] = {}
        self.progress: tuple[int, int] | None = None
        self.generating = list[bool]()  # an entry for each call of generate that runs now
        self.fading = {
            number: guide for number, guide in self.guides.items() if guide.is_partial and number in self.num_guided
        }
        self.shaping, self.is_installed = bool(self.shaped_modules()), False
        self._remaining: dict[frozenset[int], Mapping[Site, SitePlan]] = {frozenset(): self.site_plans}

    def _check_tables(self) -> None:
        """Raises InputError if a table has another type, or belongs to another model."""
        for name, types in _TABLE_TYPES.items():
            if name in self.tables and not isinstance(self.tables[name], types):
                kind = type(self.tables[name]).__name__
                raise InputError(f"the table {name} is a {kind}", hint=f"{name}: {TABLES[name]}")
        for number, guide in self.guides.items():
            if PROPORTIONS in self.tables and guide.enabled and PROPORTIONS in guide.tables:
                shape, layers = tuple(torch.as_tensor(self.tables[PROPORTIONS]).shape), self.layers_of(number)
                if len(shape) != 2 or not shape[0] or shape[1] != layers:
                    raise InputError(
                        f"the table {PROPORTIONS} is {shape}, not (steps, {layers}) as this model's layers",
                        hint="it comes from a run of a model with as many layers",
                    )

    @property
    def num_layers(self) -> int:
        """Layers of the stack that has most."""
        return max((site.layer for sites in self.sites.values() for site in sites), default=-1) + 1

    def layers_of(self, number: int) -> int:
        """Layers of the stack to which a guide belongs."""
        guide = self.plan.guides[number]
        kind = (self.stack_of(guide), guide.attention)
        return sum((site.stack, site.attention) == kind for sites in self.sites.values() for site in sites)

    def learns(self, site: Site, number: int | None = None) -> bool:
        """Whether the module of a site, or what a guide has added to it, is in training mode and has trainable parameters."""
        module = next(module for module, sites in self.sites.items() if site in sites)
        owner = module if number is None else getattr(module, EXTRA)[self.plan.key_of(number)]
        return module.training and any(p.requires_grad for p in owner.parameters())

    def parameters_of(self, module: nn.Module, key: str, site: Site | None = None) -> nn.Module | None:
        """What a guide has added to an attention module under its key; None if nothing.

        Args:
            site: the call, where each call of a shared module has parameters of its own.
        """
        added: Mapping[str, nn.Module] = getattr(module, EXTRA, {})
        own = added[key] if key in added else None  # noqa: SIM401  a ModuleDict has no get
        if site is None or not isinstance(own, nn.ModuleList):
            return own
        sites: tuple[Site, ...] = module.guide_sites  # type: ignore[assignment]
        return own[sites.index(site)]

    def shaped_modules(self) -> list[nn.Module]:
        """The attention modules whose outputs the plan shapes."""
        plans = self.site_plans
        return [
            module
            for module, sites in self.sites.items()
            if any(site in plans and plans[site].shapes_output for site in sites) or module in self.added
        ]

    def shapes(self, stack: str, attention: str | None = None) -> bool:
        """Whether the plan shapes the outputs of heads of this stack, or of one kind of attention there."""
        return any(
            site.stack == stack and attention in (None, site.attention) and plan.shapes_output
            for site, plan in self.site_plans.items()
        )

    @property
    def reads_prefix(self) -> bool:
        """Whether a guide that shapes outputs reads earlier tokens of a decoder, so that a cache has to keep its tokens."""
        return any(
            (site.stack, site.attention) == ("decoder", "self") and plan.shapes_output and plan.reads_prefix
            for site, plan in self.site_plans.items()
        )

    @property
    def stack_of_inputs(self) -> str:
        """The stack that reads ``input_ids``; see `guidance.sites.stack_of_inputs`."""
        return stack_of_inputs(site for sites in self.sites.values() for site in sites)

    @property
    def is_decoder(self) -> bool:
        """Whether it has a decoder and no encoder, so that tokens may not look at later ones."""
        return self.stack_of_inputs == "decoder"

    def stack_of(self, guide: Guide) -> str:
        """The stack on which a guide acts; see `guidance.sites.stack_meant`."""
        return stack_meant(guide.stack, (site for sites in self.sites.values() for site in sites))

    # weights

    def alphas(self, step: int, total_steps: int) -> dict[str, float]:
        """By label, the weight of each loss on heads after ``step`` of ``total_steps`` optimizer steps."""
        measured = sorted({a.number for plan in self.site_plans.values() for a in plan.measured()})
        return {self.plan.labels[number]: self._alpha(number, step, total_steps) for number in measured}

    def attack_alpha(self, step: int, total_steps: int) -> float:
        """The weight of the divergence after ``step`` of ``total_steps`` optimizer steps."""
        return self._alpha(min(number for number, _ in self.attacks), step, total_steps)

    def _alpha(self, number: int, step: int, total_steps: int) -> float:
        guide = self.plan.guides[number]
        return guide.weight_for(self.layers_of(number)) * guide.factor(step, total_steps)

    # guides that fade

    def advance(self, step: int, total_steps: int) -> None:
        """Say how far training is.  Guides that fade follow it, at inference too.

        A training loop of one's own calls it before each step and before each evaluation; ours do.  The configuration of the
        model carries it, so that a saved model computes what it did when it was saved.

        Args:
            step, total_steps: finished optimizer steps, and all of them.

        Raises:
            InputError: these are no numbers of steps.
        """
        try:
            step, total_steps = operator.index(step), operator.index(total_steps)
        except TypeError as error:
            raise InputError(f"advance({step!r}, {total_steps!r}): numbers of steps are whole") from error
        if min(step, total_steps) < 0:
            raise InputError(f"advance({step}, {total_steps}): numbers of steps start at 0")
        if any(guide.fades for guide in self.fading.values()):
            self.progress = (step, total_steps)
            setattr(self.model.config, PROGRESS_KEY, list(self.progress))

    def strengths(self) -> dict[int, Tensor]:
        """How much each guide that acts in part does now, by its number: 1 at full strength, 0 when it has faded.

        Raises:
            InputError: the handle has not been told how far training is; see `advance`.
        """
        fades = next((number for number, guide in self.fading.items() if guide.fades), None)
        if fades is not None and self.progress is None:
            label = self.plan.labels[fades]
            raise InputError(
                f"the guide {label!r} fades in the course of training, and nothing says how far that is",
                hint="handle.advance(step, total_steps) does; a model that is saved after it carries it",
            )
        # tensors, because compiled graphs are made anew for other numbers
        progress = self.progress or (0, 1)
        return {number: torch.tensor(guide.factor(*progress)) for number, guide in self.fading.items()}

    def remaining(self, strengths: Mapping[int, Tensor]) -> Mapping[Site, SitePlan]:
        """What the plan says about each site when guides whose strength is 0 are left out.

        Those with parameters stay: data parallelism waits for a gradient of each, if only for zeros.
        """
        over = frozenset(
            n
            for n, strength in strengths.items()
            if not strength and all(self.parameters_of(module, self.plan.key_of(n)) is None for module in self.sites)
        )
        if over not in self._remaining:
            self._remaining[over] = {site: plan.without(over) for site, plan in self.site_plans.items()}
        return self._remaining[over]

    @property
    def over(self) -> frozenset[int]:
        """The guides that have faded for good."""
        return frozenset(n for n, s in self.strengths().items() if not s) if self.progress else frozenset()

    @property
    def sentence(self) -> str:
        """Which output stands for a whole example when attacks are judged in pre-training.

        See `guidance.mechanisms.attacks.AttackMechanism`; all attacks of a plan have the same.
        """
        mechanism = self.plan.guides[self.attacks[0][0]].bound_mechanism
        assert isinstance(mechanism, AttackMechanism)
        return mechanism.sentence

    # what patterns have matched

    def count_matches(self, number: int, matches: Tensor) -> None:
        """Add to the number of keys that a guide's pattern has named; the device is not synchronised."""
        matches = matches.detach().ceil().long()
        self._matches[number] = self._matches[number] + matches if number in self._matches else matches

    def matches(self) -> dict[str, int]:
        """The number of keys that each guide's pattern has named so far, by label."""
        return {self.plan.labels[number]: int(count) for number, count in self._matches.items()}

    def check_matches(self, earlier: Mapping[str, int] | None = None) -> None:
        """Raise GuidanceHadNoEffect if the pattern of a guide has matched nothing in the whole run.

        Args:
            earlier: matches of other processes, or before an interruption, by label.
        """
        check_matches({label: count + (earlier or {}).get(label, 0) for label, count in self.matches().items()})

    # what is missing

    def needs(self, *, training: bool = True) -> dict[str, str]:
        """The features that each batch has to bring, by name, each with the label of a guide that reads it.

        What a tokenizer tells of the ids is not among them; without ``training``, neither is what only losses read.
        """
        vocabularies = {"": self.vocabulary, "decoder_": self.decoder_vocabulary}
        known = {prefix + name for prefix, own in vocabularies.items() if own for name in own.columns_V}
        return {name: label for name, label in self.reads(training=training).items() if name not in known}

    def reads(self, *, training: bool = True) -> dict[str, str]:
        """The features that the plan reads, by name, each with a guide's label; without ``training``, losses are left out.

        Those of a decoder's tokens have ``decoder_`` before their name, as `Handle.guide` takes them; cross-attention reads
        tokens of the encoder.
        """
        reads: dict[str, str] = {}
        for number in self.num_guided:
            guide = self.plan.guides[number]
            if not training and (guide.is_loss or number in self.over):
                continue
            reads_targets = (guide.stack, guide.attention) == ("decoder", "self") and not self.is_decoder
            prefix = "decoder_" if reads_targets else ""
            pattern = guide.bound_pattern.needs if guide.bound_pattern else ()
            for name in (*pattern, *guide.bound_mechanism.needs):
                reads.setdefault(prefix + name, self.plan.labels[number])
        return reads


def installed_in(model: nn.Module) -> list[GuidedModel]:
    """The handles of the plans that are installed in a model, in the order of their installation."""
    handles: list[GuidedModel] = model.__dict__.get("guide_handles", [])
    return handles


def leading(model: nn.Module) -> GuidedModel | None:
    """The handle of the plan that shapes a model's outputs; of several plans that do not, that of the last one installed."""
    handles = installed_in(model)
    return next((handle for handle in handles if handle.shaping), handles[-1] if handles else None)


def check_matches(matches: Mapping[str, float]) -> None:
    """Raise GuidanceHadNoEffect if the pattern of a guide has matched nothing in the whole run.

    Args:
        matches: the number of keys that each guide's pattern has named, by label.
    """
    for label, count in matches.items():
        if not count:
            raise GuidanceHadNoEffect(
                f"the pattern of guide {label!r} matched no token in the whole run",
                hint="look at the text and the tokenizer, or leave the guide out of the plan",
            )
