"""From a plan to the sites of a model: which guides act on which heads, and which path each head takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from guidance.errors import PlanError
from guidance.guide import Guide
from guidance.mechanisms.attacks import AttackMechanism
from guidance.mechanisms.base import CONTRIBUTIONS, Mechanism
from guidance.patterns import PATTERNS
from guidance.plan import Plan
from guidance.sites import ADDED_HEADS, Site, select, select_heads, stack_meant, stack_of_inputs


@dataclass(frozen=True)
class HeadAssignment:
    """A guide, and the heads of one site on which it acts.

    Attributes:
        number: of the guide in its plan, from 0.
        key: the name under which the site holds the parameters of the guide.  Graphs cannot make it from the number.
    """

    number: int
    key: str
    mechanism: Mechanism
    heads: tuple[int, ...]


@dataclass(frozen=True)
class HeadPaths:
    """How the heads of a site are computed; heads whose attention is replaced are in none of these.

    Attributes:
        explicit: with scores and probabilities at hand.
        masked: by a fast kernel, with a mask of their own.
        plain: by a fast kernel, with the mask of the model.
    """

    explicit: tuple[int, ...]
    masked: tuple[int, ...]
    plain: tuple[int, ...]


@dataclass(frozen=True)
class SitePlan:
    """What a plan says about one site.

    Attributes:
        assignments: the guides that act there, in the order of the plan.
        num_heads: of the site.
        fading: the numbers of the guides that fade, so that their heads need a path of their own, too.
    """

    assignments: tuple[HeadAssignment, ...] = ()
    num_heads: int = 0
    fading: frozenset[int] = frozenset()
    _by_contribution: dict[str, tuple[HeadAssignment, ...]] = field(init=False, repr=False, compare=False)
    _paths: dict[tuple[bool, bool, bool], HeadPaths] = field(init=False, repr=False, compare=False)
    query_factors: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """A factor for the queries of each head; empty if all are 1."""

    def __post_init__(self) -> None:
        # worked out once, since every call of every layer asks, and compiled graphs must not write
        making = {name: tuple(a for a in self.assignments if name in a.mechanism.contributes) for name in CONTRIBUTIONS}
        object.__setattr__(self, "_by_contribution", making)
        passes = itertools.product((False, True), repeat=3)
        object.__setattr__(self, "_paths", {each: self._paths_in(*each) for each in passes})
        object.__setattr__(self, "query_factors", self._query_factors())

    def making(self, contribution: str) -> tuple[HeadAssignment, ...]:
        """The assignments whose mechanism makes a contribution; see `guidance.mechanisms.base.CONTRIBUTIONS`."""
        return self._by_contribution[contribution]

    @property
    def shapes_output(self) -> bool:
        """The site computes something else at inference too."""
        return any(not a.mechanism.is_loss() for a in self.assignments)

    @property
    def reads_prefix(self) -> bool:
        """A guide reads all tokens up to the query, so a cache of earlier keys is not enough."""
        return any(a.mechanism.reads_keys for a in self.assignments)

    def measured(self) -> tuple[HeadAssignment, ...]:
        """The assignments that have a loss on the heads of the first pass: on probabilities, then on scores."""
        return (*self.making("target"), *self.making("row_losses"))

    def acts(self, *, attacking: bool, measuring: bool) -> bool:
        """Whether anything is to be done in this pass."""
        mine = self.making("attack") if attacking else self.measured() if measuring else ()
        return bool(mine) or self.shapes_output

    def paths(self, *, attacking: bool, measuring: bool, recording: bool) -> HeadPaths:
        """The path of each head.

        Args:
            attacking: this is the second pass, in which attacks are made and losses are not measured.
            measuring: losses are wanted.
            recording: the probabilities of all heads are wanted.
        """
        return self._paths[attacking, measuring, recording]

    def _paths_in(self, attacking: bool, measuring: bool, recording: bool) -> HeadPaths:
        phases = {"always", "attacking"} if attacking else {"always", "measuring"} if measuring else {"always"}
        by_path: dict[str, set[int]] = {"any": set(), "masked": set(), "explicit": set(), "replaced": set()}
        for assignment in self.assignments:
            for contribution in assignment.mechanism.contributions():
                is_partial = contribution.path == "replaced" and assignment.number in self.fading
                if contribution.phase in phases and not is_partial:
                    by_path[contribution.path].update(assignment.heads)
        computed = [head for head in range(self.num_heads) if head not in by_path["replaced"]]
        explicit = [head for head in computed if recording or head in by_path["explicit"]]
        masked = [head for head in computed if head in by_path["masked"] and head not in explicit]
        plain = [head for head in computed if head not in explicit and head not in masked]
        return HeadPaths(tuple(explicit), tuple(masked), tuple(plain))

    def without(self, numbers: Collection[int]) -> SitePlan:
        """The same without some guides."""
        return replace(self, assignments=tuple(a for a in self.assignments if a.number not in numbers))

    def paths_taken(self) -> set[str]:
        """The paths that its heads take in training and at inference."""
        each = [paths for (_, _, recording), paths in self._paths.items() if not recording]
        return {name for paths in each for name in ("explicit", "masked", "plain") if getattr(paths, name)}

    def masks_of(self, heads: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """For each of some heads, the numbers of the guides that mask it."""
        return tuple(tuple(a.number for a in self.making("keys") if head in a.heads) for head in heads)

    def _query_factors(self) -> tuple[float, ...]:
        # rows of one mechanism that ask for the same factor get it once, as two masks do whose conjunction is one mask
        wanted: list[dict[tuple[type, float], None]] = [{} for _ in range(self.num_heads)]
        for assignment in self.assignments:
            factor = assignment.mechanism.query_factor(self.num_heads)
            for head in assignment.heads:
                wanted[head][type(assignment.mechanism), factor] = None
        factors = tuple(math.prod(factor for _, factor in of_head) for of_head in wanted)
        return factors if any(factor != 1.0 for factor in factors) else ()


def plan_sites(plan: Plan, sites: Sequence[Site], part: str = "model", scores: Any = None) -> dict[Site, SitePlan]:
    """What a plan says about each site.  Guides that are off, of another part, or without any effect are left out.

    The scores of heads are for the rules ``least important`` and ``most important``.
    """
    by_site: dict[Site, dict[int, tuple[int, ...]]] = {}
    for number, guide in enumerate(plan.guides):
        if guide.part != part:
            continue
        try:
            heads, weight = _resolve(guide, sites, scores)
        except PlanError as error:
            raise PlanError(f"guide {number + 1} ({guide.label}): {error.message}", hint=error.hint) from error
        if not any(heads.values()) and not guide.optional:
            raise PlanError(f"guide {number + 1} ({guide.label}) selects no head", hint="optional = true allows that")
        if not guide.enabled or (guide.is_loss and weight == 0) or guide.bound_mechanism.is_idle(guide.bound_pattern):
            continue
        for site, chosen in heads.items():
            if chosen:
                by_site.setdefault(site, {})[number] = chosen
    for guides in by_site.values():
        _spare_replaced_heads(plan, guides)
    _check_attacks(plan, by_site)
    return {site: _site_plan(plan, site, guides) for site, guides in by_site.items()}


def _spare_replaced_heads(plan: Plan, guides: dict[int, tuple[int, ...]]) -> None:
    """Leave heads whose attention is replaced out of attacks on all heads: they have no scores to attack."""
    replaced = {head for number, heads in guides.items() if plan.guides[number].makes("replace") for head in heads}
    for number, heads in list(guides.items()):
        if plan.guides[number].makes("attack") and plan.guides[number].heads == ("all",):
            guides[number] = tuple(head for head in heads if head not in replaced)
            if not guides[number]:
                del guides[number]


def _resolve(guide: Guide, sites: Sequence[Site], scores: Any) -> tuple[dict[Site, tuple[int, ...]], float]:
    """The heads that a guide selects, by site, and its weight."""
    is_alone = stack_of_inputs(sites) == "decoder"
    stack = stack_meant(guide.stack, sites)
    mine = {s.layer: s for s in sites if (s.stack, s.attention) == (stack, guide.attention)}
    if not mine:
        if guide.optional:
            return {}, 1.0
        kinds = sorted({f"{s.stack} {s.attention}" for s in sites})
        raise PlanError(f"the model has no {stack} {guide.attention}-attention", hint=f"it has {', '.join(kinds)}")
    layers = select(guide.layers, len(mine), "layer")
    weight = guide.weight_for(len(mine))
    if guide.attention == "cross" and (reason := _compares_positions(guide)):
        raise PlanError(
            f"{reason} relates tokens of one sequence; cross-attention has two",
            hint=f"patterns that work there: {', '.join(name for name, p in PATTERNS.items() if p.same_keys)}",
        )
    pattern = guide.bound_pattern
    if is_alone and pattern and pattern.is_only_ahead():
        if guide.optional:
            return {}, weight
        raise PlanError(
            f"the pattern {str(pattern)!r} names later tokens only, and no query of a causal model sees them",
            hint="leave the row out for this model, or write optional = true",
        )
    if (stack, guide.attention) == ("decoder", "self") and pattern and pattern.looks_ahead:
        raise PlanError(
            f"in a decoder the pattern {str(pattern)!r} would tell a query about later tokens",
            hint="the encoder's heads, or cross-attention, may have it",
        )
    added = [selector for selector in guide.heads if str(selector).startswith(ADDED_HEADS)]
    if not added:
        num_heads = next(iter(mine.values())).num_heads
        chosen = select_heads(guide.heads, layers, num_heads, scores, num_layers=len(mine))
        return {mine[layer]: heads for layer, heads in chosen.items()}, weight
    if len(added) < len(guide.heads):
        raise PlanError("it mixes heads of the model with added ones", hint="write two rows")
    if any(c.own_heads for c in guide.bound_mechanism.contributions()):
        raise PlanError(f"{guide.mechanism} acts on heads of the model only")
    pals = {s.layer: s for s in sites if s.attention == "pal"}
    if not pals and not guide.optional:
        raise PlanError("it is about added heads, and the plan adds none", hint="a table [pal] adds them")
    rules = [str(selector).removeprefix(ADDED_HEADS) for selector in added]
    return {pals[la]: select(rules, pals[la].num_heads, "added head") for la in layers if la in pals}, weight


def _compares_positions(guide: Guide) -> str:
    """What in a guide compares a query with a key; empty if nothing does."""
    if guide.bound_pattern is not None and not guide.bound_pattern.same_keys:
        return f"the pattern {guide.bound_pattern.name!r}"
    return guide.bound_mechanism.one_sequence_because


def _site_plan(plan: Plan, site: Site, guides: Mapping[int, tuple[int, ...]]) -> SitePlan:
    for head in sorted({head for heads in guides.values() for head in heads}):
        _check_head(plan, site, head, [number for number, heads in guides.items() if head in heads])
    return SitePlan(
        tuple(
            HeadAssignment(number, plan.key_of(number), plan.guides[number].bound_mechanism, heads)
            for number, heads in guides.items()
        ),
        site.num_heads,
        frozenset(number for number in guides if plan.guides[number].is_partial),
    )


def _check_head(plan: Plan, site: Site, head: int, numbers: list[int]) -> None:
    """Raises PlanError if guides contradict each other on one head."""
    where = f"layer {site.layer}, head {head}"
    made = {number: plan.guides[number].bound_mechanism.contributions() for number in numbers}
    for number, contributions in made.items():
        guide = plan.guides[number]
        for contribution in contributions:
            others = [n for n in numbers if n != number and plan.guides[n].bound_mechanism.needs_scores]
            if contribution.alone and others:
                other = others[0]
                raise PlanError(
                    f"guide {number + 1} ({guide.label}) {contribution.does} {where}, on which guide"
                    f" {other + 1} ({plan.guides[other].label}) acts too",
                    hint="select other heads in one of them",
                )
            rival = (
                next((n for n in made if n != number and contribution in made[n]), None) if contribution.once else None
            )
            if rival is not None:
                is_same = guide.mechanism == plan.guides[rival].mechanism
                do = f"are both {guide.mechanism} of" if is_same else f"both {contribution.plural}"
                raise PlanError(f"guides {number + 1} and {rival + 1} {do} {where}", hint="one for each head")


def _check_attacks(plan: Plan, by_site: Mapping[Site, Mapping[int, tuple[int, ...]]]) -> None:
    """Raises PlanError if attacks differ in their divergence: all share one second pass, which has one divergence."""
    attacks = {
        number: mechanism
        for number in sorted({number for guides in by_site.values() for number in guides})
        if isinstance(mechanism := plan.guides[number].bound_mechanism, AttackMechanism)
    }
    guides = {number: plan.guides[number] for number in attacks}
    kinds = {(g.weight, g.schedule, g.hold_steps, g.until, attacks[number].sentence) for number, g in guides.items()}
    if len(kinds) > 1:
        raise PlanError(
            f"guides {', '.join(str(number + 1) for number in attacks)} share one adversarial pass, whose divergence has"
            " one weight",
            hint="give them the same weight, schedule, hold_steps, until and sentence",
        )
