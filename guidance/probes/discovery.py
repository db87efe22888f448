"""From what heads do to a plan: which patterns stand out, and into which heads they go.

Source: Li et al. 2022, sections 3.1 to 3.3; choosing on one half of the data and confirming on the other is ours, since
the best of many heads looks better than it is on the data that chose it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from guidance.guide import Guide
from guidance.guided_model import GuidedModel
from guidance.models.added_heads import Pal
from guidance.patterns.combinations import read_pattern
from guidance.plan import Plan
from guidance.probes.relevance import DEVIATIONS, Relevance, outstanding
from guidance.sites import Site

Head = tuple[int, int]
"""Layer and head of the model's own self-attention."""

Into = Literal["each-layer", "found", "least-important"]
MechanismChoice = Literal["auto", "mask", "fix", "bias", "attention_loss"]

SINKS = ("first", "sink", "delimiter", "separator", "self")
"""Patterns where heads rest that do nothing else (Clark et al. 2019, section 3.2); no plan is proposed for them."""

IMPORTANT = 3
"""The most important heads of a layer whose patterns the paper looks at."""


@dataclass(frozen=True)
class Candidate:
    """A pattern on which heads stand out.

    Attributes:
        heads: those that stand out on the first half of the examples, and again on the second, the most relevant first.
        relevance: the highest on the second half.
        deviations: how many standard deviations that is above the mean of all heads there.
        lift: that relevance divided by that of a head that looks at all tokens alike.
        important: how many of the heads are among the `IMPORTANT` most important of their layer; None without importance.
        covered_by: the better candidates that have the same heads; empty if there are none.
        guided: how many of the heads look where the plan of the model says; see `guided_heads`.
    """

    pattern: str
    heads: tuple[Head, ...]
    relevance: float
    deviations: float
    lift: float
    important: int | None = None
    covered_by: str = ""
    guided: int = 0


def candidates(
    relevance: Relevance,
    importance: Mapping[Site, Tensor] | None = None,
    *,
    deviations: float = DEVIATIONS,
    guided: Collection[Head] = (),
) -> list[Candidate]:
    """The patterns on which heads stand out, those first that are farthest above chance.

    A pattern is kept if some head is more than ``deviations`` above the mean of all heads on the first half of the examples, and
    again on the second, and looks there more than a head that looks at all tokens alike.  With one example there is no second
    half, and nothing is kept.

    Args:
        importance: of the heads of each site, (H,).
        guided: the heads of the model's own plan; see `guided_heads`.
    """
    important = {
        (site.layer, int(head))
        for site, values in (importance or {}).items()
        if site.attention == "self"
        for head in values.argsort(descending=True, stable=True)[:IMPORTANT]
    }
    kept = []
    for name in relevance.names:
        (heads, first), (_, second) = (_flat(relevance.of(name, half)) for half in ("first", "second"))
        if not heads or bool(second.isnan().any()) or bool(first.isnan().any()):
            continue
        even = relevance.by_chance(name)
        stands = outstanding(first, deviations) & outstanding(second, deviations) & (second > even)
        if not bool(stands.any()):
            continue
        order = sorted(stands.nonzero()[:, 0].tolist(), key=lambda index: -float(second[index]))
        best, spread = float(second[order[0]]), float(second.std(correction=0))
        own = tuple(heads[index] for index in order)
        above, lift = (best - float(second.mean())) / spread, best / even if even else float("inf")
        of_importance = len(important & set(own)) if importance else None
        kept.append(Candidate(name, own, best, above, lift, of_importance, guided=len(set(guided) & set(own))))
    return _with_covered(sorted(kept, key=lambda candidate: -candidate.lift))


def _flat(values: Mapping[Site, Tensor]) -> tuple[list[Head], Tensor]:
    sites = [site for site in values if site.attention == "self"]
    heads = [(site.layer, head) for site in sites for head in range(site.num_heads)]
    return heads, torch.cat([values[site].double() for site in sites]) if sites else torch.zeros(0)


def _with_covered(sorted_by_lift: Sequence[Candidate]) -> list[Candidate]:
    """Mark a candidate that has no head of its own beside better ones: the first of them that has all its heads, or all those that
    have them together."""
    marked: list[Candidate] = []
    for candidate in sorted_by_lift:
        own = set(candidate.heads)
        others = [c for c in marked if not c.covered_by and c.pattern not in SINKS and own & set(c.heads)]
        better = next(([c] for c in others if own <= set(c.heads)), others)
        is_covered = own <= {head for c in better for head in c.heads}
        marked.append(replace(candidate, covered_by=" and ".join(c.pattern for c in better) if is_covered else ""))
    return marked


def chosen(kept: Sequence[Candidate], most: int = 4) -> list[Candidate]:
    """The candidates that a plan is proposed for: at most ``most``, no `SINKS`, none that a better one covers, and none that only
    heads show which the plan of the model makes look there."""
    return [c for c in kept if c.pattern not in SINKS and not c.covered_by and c.guided < len(c.heads)][:most]


def guided_heads(handle: GuidedModel) -> frozenset[Head]:
    """The heads of a model whose attention its plan decides or changes at inference: what they look at was put there, not found."""
    return frozenset(
        (site.layer, head)
        for site, plan in handle.remaining(handle.strengths()).items()
        for assignment in plan.assignments
        if site.attention == "self" and assignment.mechanism.changes_attention()
        for head in assignment.heads
    )


def plan_for(
    patterns: Sequence[tuple[Any, Sequence[Head]]],
    *,
    into: Into = "each-layer",
    mechanism: MechanismChoice = "auto",
    pal: bool = False,
) -> Plan:
    """A plan that injects patterns.

    Args:
        patterns: each as a plan writes it, with the heads that it was found in.
        into: ``each-layer``: pattern j goes into head j of every layer, as in the paper; ``found``: into the heads that it was
            found in; ``least-important``: into the least important heads of every layer, which needs a table of scores.
        mechanism: ``auto`` fixes heads on patterns of places, such as ``next``, and masks heads for all others.
        pal: add a head beside every layer for each pattern, instead of taking those of the model.
    """
    guides = []
    for number, (spec, heads) in enumerate(patterns):
        how = mechanism if mechanism != "auto" else ("fix" if read_pattern(spec).positional else "mask")
        if pal:
            guides.append(Guide(spec, how, heads=(f"pal:{number}",)))
        elif into == "each-layer":
            guides.append(Guide(spec, how, heads=(number,)))
        elif into == "least-important":
            # one after the other: the first pattern takes the least important head of each layer
            taken = (f"not least important {number} per layer",) if number else ()
            guides.append(Guide(spec, how, heads=(f"least important {number + 1} per layer", *taken)))
        else:
            guides += [
                Guide(spec, how, layers=(layer,), heads=tuple(sorted(head for own, head in heads if own == layer)))
                for layer in sorted({layer for layer, _ in heads})
            ]
    return Plan(tuple(guides), pal=Pal(heads=max(1, len(patterns)), width=64 * max(1, len(patterns))) if pal else None)
