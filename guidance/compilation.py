"""From a plan to work: which guides act on which heads of which site, and which path each head takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from guidance.errors import PlanError
from guidance.mechanisms.fixed import Gaussian
from guidance.patterns.catalogue import PATTERNS
from guidance.plan import Guide, Plan
from guidance.sites import Selector, Site, select, select_heads

Shares = tuple[tuple[int, tuple[int, ...]], ...]
"""Guides, by their number in the plan, and the heads of a site that each acts on."""

PAL = "pal:"
"""Before a selector of heads: those that the plan adds."""


@dataclass(frozen=True)
class Paths:
    """How the heads of a site are computed; heads whose attention is written down are in none of these."""

    explicit: tuple[int, ...]
    masked: tuple[int, ...]
    plain: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """What is to be done at one site: for each place where mechanisms act (see `guidance.mechanisms.Place`), who acts.

    Attributes:
        scaled_heads: those whose scores are divided by the root of the model's width.
        reads_prefix: somebody asks for all tokens up to the query, cached or not.
    """

    probabilities: Shares = ()
    scores: Shares = ()
    mask: Shares = ()
    bias: Shares = ()
    replacement: Shares = ()
    attack: Shares = ()
    output: Shares = ()
    scaled_heads: tuple[int, ...] = ()
    reads_prefix: bool = False

    def shares(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Every guide at this site with its heads."""
        for place in PLACES:
            yield from getattr(self, place)

    def acts(self, *, attacking: bool) -> bool:
        """Anything is to be done in the first pass, or in the second."""
        here = self.attack if attacking else (*self.probabilities, *self.scores)
        return bool(here) or self.shapes_output

    @property
    def shapes_output(self) -> bool:
        """The site computes something else at inference too."""
        return bool(self.mask or self.bias or self.replacement or self.output)

    def paths(self, num_heads: int, *, attacking: bool, keeping: bool) -> Paths:
        """The path of each head.

        Args:
            attacking: in the second pass adversaries are at work, and losses are not.
            keeping: somebody wants the probabilities of all heads.
        """
        replaced = _heads_of(self.replacement)
        rest = [head for head in range(num_heads) if head not in replaced]
        read = _heads_of(self.attack if attacking else self.probabilities) | _heads_of(self.bias)
        explicit = rest if keeping else [head for head in rest if head in read]
        masked = [head for head in rest if head in _heads_of(self.mask) and head not in explicit]
        plain = [head for head in rest if head not in explicit and head not in masked]
        return Paths(tuple(explicit), tuple(masked), tuple(plain))

    def wishes(self, heads: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """For each of some heads, the guides that mask it."""
        return tuple(tuple(number for number, mine in self.mask if head in mine) for head in heads)

    def query_scale(self, num_heads: int) -> tuple[float, ...]:
        """A factor for the queries of each head, where a mask divides by the root of the model's width."""
        if not self.scaled_heads:
            return ()
        return tuple(num_heads**-0.5 if head in self.scaled_heads else 1.0 for head in range(num_heads))


PLACES = tuple(item.name for item in fields(Work) if item.type == "Shares")
NOTHING = Work()
"""No guide is at work at a site."""


def _heads_of(shares: Shares) -> set[int]:
    return {head for _, heads in shares for head in heads}


def compile_plan(plan: Plan, sites: Sequence[Site], part: str, scores: Any = None) -> dict[Site, Work]:
    """Which guide works on which heads of which site; guides that are off or of another part are left out, and so are
    masks that allow everything.

    Args:
        scores: of heads, for the rules least and most important.

    Raises:
        PlanError: a guide names a layer or head that is not there, selects none, or contradicts another one.
    """
    found: dict[Site, dict[int, tuple[int, ...]]] = {}
    for number, guide in enumerate(plan.guides):
        if guide.part != part:
            continue
        try:
            heads, weight = _resolve(guide, sites, scores)
        except PlanError as error:
            raise PlanError(f"guide {number + 1} ({guide.label}): {error.message}", hint=error.hint) from error
        if not any(heads.values()) and not guide.optional:
            raise PlanError(f"guide {number + 1} ({guide.label}) selects no head", hint="optional = true allows that")
        if not guide.enabled or (guide.acts.is_loss and weight == 0):
            continue
        if guide.acts.place == "mask" and guide.pattern == "all" and guide.how.scale == "d_k":
            continue
        for site, chosen in heads.items():
            if chosen:
                found.setdefault(site, {})[number] = chosen
    _check_attacks(plan, found)
    return {site: _work(plan, site, guides) for site, guides in found.items()}


def _resolve(guide: Guide, sites: Sequence[Site], scores: Any) -> tuple[dict[Site, tuple[int, ...]], float]:
    """The heads that a guide selects, by site, and its weight."""
    mine = {s.layer: s for s in sites if (s.stack, s.attention) == (guide.stack, guide.attention)}
    if not mine:
        if guide.optional:
            return {}, 1.0
        raise PlanError(f"the model has no {guide.stack} {guide.attention}-attention")
    layers = select(guide.layers, len(mine), "layer")
    weight = guide.weight_for(len(mine))
    if guide.attention == "cross" and (reason := _wants_one_sequence(guide)):
        raise PlanError(
            f"{reason} relates tokens of one sequence; cross-attention has two",
            hint=f"patterns that work there: {', '.join(name for name, p in PATTERNS.items() if p.same_keys)}",
        )
    if (guide.stack, guide.attention) == ("decoder", "self") and guide.wish and guide.wish.looks_ahead:
        raise PlanError(
            f"in a decoder the pattern {str(guide.wish)!r} would tell a query about later tokens",
            hint="the encoder's heads, or cross-attention, may have it",
        )
    added = [selector for selector in guide.heads if str(selector).startswith(PAL)]
    if not added:
        num_heads = next(iter(mine.values())).num_heads
        chosen = select_heads(guide.heads, layers, num_heads, scores, num_layers=len(mine))
        return {mine[layer]: heads for layer, heads in chosen.items()}, weight
    if len(added) < len(guide.heads):
        raise PlanError("it mixes heads of the model with added ones", hint="write two rows")
    if guide.acts.place in ("attack", "output", "scores"):
        raise PlanError(f"{guide.mechanism} acts on heads of the model only")
    pals = {s.layer: s for s in sites if s.attention == "pal"}
    if not pals and not guide.optional:
        raise PlanError("it is about added heads, and the plan adds none", hint="a table [pal] adds them")
    rules = [_number(str(selector).removeprefix(PAL)) for selector in added]
    return {pals[la]: select(rules, pals[la].num_heads, "added head") for la in layers if la in pals}, weight


def _wants_one_sequence(guide: Guide) -> str:
    """What about a guide relates a query's place or token with a key's; empty where nothing does."""
    if guide.wish is not None and not guide.wish.same_keys:
        return f"the pattern {guide.wish.name!r}"
    if isinstance(guide.how, Gaussian):
        return guide.mechanism
    return 'boundary = "self"' if getattr(guide.how, "boundary", "") == "self" else ""


def _number(rule: str) -> Selector:
    return int(rule) if rule.isdigit() else rule


def _work(plan: Plan, site: Site, guides: Mapping[int, tuple[int, ...]]) -> Work:
    for head in sorted({head for heads in guides.values() for head in heads}):
        _check_head(plan, site, head, [number for number, heads in guides.items() if head in heads])
    places: dict[str, list[tuple[int, tuple[int, ...]]]] = {place: [] for place in PLACES}
    scaled: set[int] = set()
    for number, heads in guides.items():
        guide = plan.guides[number]
        places[guide.acts.place].append((number, heads))
        if getattr(guide.how, "scale", "d_k") == "d_model":
            scaled.update(heads)
    shares = {place: tuple(found) for place, found in places.items()}
    reads = any(
        g.acts.place != "output" and getattr(g.how, "uses_values", True) for g in map(plan.guides.__getitem__, guides)
    )
    return Work(**shares, scaled_heads=tuple(sorted(scaled)), reads_prefix=reads)


def _check_head(plan: Plan, site: Site, head: int, numbers: list[int]) -> None:
    """Raises PlanError when guides contradict each other on one head."""
    where = f"layer {site.layer}, head {head}"
    for number in numbers:
        guide = plan.guides[number]
        others = [n for n in numbers if n != number]
        rivals = [n for n in others if plan.guides[n].acts.place == guide.acts.place]
        if guide.acts.place == "replacement" and others:
            raise PlanError(
                f"guide {number + 1} ({guide.label}) takes the place of the attention of {where}, on which guide"
                f" {others[0] + 1} ({plan.guides[others[0]].label}) acts too",
                hint="select other heads in one of them",
            )
        if guide.acts.place in ("attack", "output") and rivals:
            same = guide.mechanism == plan.guides[rivals[0]].mechanism
            does = f"are both {guide.mechanism} of" if same else f"both {guide.acts.place}"
            raise PlanError(f"guides {number + 1} and {rivals[0] + 1} {does} {where}", hint="one for each head")


def _check_attacks(plan: Plan, found: Mapping[Site, Mapping[int, tuple[int, ...]]]) -> None:
    """All attacks share one second pass, and so one divergence."""
    numbers = sorted({n for guides in found.values() for n in guides if plan.guides[n].acts.place == "attack"})
    kinds = {(g.weight, g.schedule, g.hold_steps, g.how.sentence) for g in (plan.guides[n] for n in numbers)}
    if len(kinds) > 1:
        raise PlanError(
            f"guides {', '.join(str(n + 1) for n in numbers)} attack in one second pass, whose divergence has one weight",
            hint="give them the same weight, schedule and sentence",
        )
