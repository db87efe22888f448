"""Candidates worked by hand: chosen on one half, confirmed on the other; and the plans that follow from them."""

from __future__ import annotations

import pytest
import torch

from guidance.errors import UnknownName
from guidance.probes.discovery import Candidate, candidates, chosen, plan_for
from guidance.probes.relevance import Relevance
from guidance.probes.summary import summarise
from guidance.sites import Site, select_heads

SITE = Site("encoder", "self", 0, 12, "one")
OTHER = Site("encoder", "self", 1, 12, "two")


def relevance(values: dict[str, list[dict[tuple[int, int], float]]], even: float = 0.1) -> Relevance:
    """Relevance whose examples have 0.1 on every head but those that are named, one dictionary for each example."""
    found = Relevance(list(values))
    number = len(next(iter(values.values())))
    for example in range(number):
        found.begin([example], torch.full((1, len(values)), even))
        for site in (SITE, OTHER):
            masses = torch.full((1, site.num_heads, len(values)), 0.1)
            for place, examples in enumerate(values.values()):
                for (layer, head), value in examples[example].items():
                    if layer == site.layer:
                        masses[0, head, place] = value
            found.add(site, masses)
    return found


def test_a_head_must_stand_out_on_both_halves() -> None:
    found = candidates(
        relevance(
            {
                "next": [{(0, 3): 0.9}, {(0, 3): 0.8}, {(0, 3): 0.7}, {(0, 3): 0.8}],
                "previous": [{(1, 2): 0.9}, {(1, 5): 0.9}, {(1, 2): 0.9}, {(1, 5): 0.9}],
                "window": [{}, {}, {}, {}],
            }
        )
    )
    (only,) = found
    assert (only.pattern, only.heads, only.important) == ("next", ((0, 3),), None)
    assert only.relevance == pytest.approx(0.8) and only.lift == pytest.approx(8.0)
    # one of 24 heads is sqrt(23) deviations above the mean
    assert only.deviations == pytest.approx(23**0.5)


def test_heads_that_look_less_than_by_chance_are_no_candidates() -> None:
    examples = [{(0, 3): 0.5}, {(0, 3): 0.5}]
    assert candidates(relevance({"same_segment": examples}, even=0.6)) == []
    assert candidates(relevance({"next": [{(0, 3): 0.5}]})) == [], "there is no second half"


def test_candidates_that_a_better_one_covers_are_marked_and_not_chosen() -> None:
    strong = [{(0, 3): 0.9, (1, 1): 0.85}] * 2
    weak = [{(0, 3): 0.6, (1, 1): 0.55, (0, 5): 0.2}] * 2
    rest = [{(0, 7): 0.9}] * 2
    importance = {SITE: torch.arange(12.0), OTHER: -torch.arange(12.0)}
    found = candidates(relevance({"window": weak, "next": strong, "first": rest}), importance)
    by_name = {candidate.pattern: candidate for candidate in found}
    assert by_name["next"].heads == ((0, 3), (1, 1)) and by_name["next"].covered_by == ""
    assert by_name["window"].covered_by == "next"
    # the most important heads of layer 0 are 9 to 11, of layer 1 they are 0 to 2
    assert by_name["next"].important == 1 and by_name["first"].important == 0
    assert [candidate.pattern for candidate in chosen(found)] == ["next"]
    assert chosen(found, 0) == []


def test_plans_say_where_patterns_go() -> None:
    patterns = [("next", [(0, 3), (1, 1), (1, 4)]), ({"where": "distance == 2"}, [(0, 5)])]
    each = plan_for(patterns)
    assert [(g.pattern, g.mechanism, g.layers, g.heads) for g in each.guides] == [
        ("next", "fix", ("all",), (0,)),
        ({"where": "distance == 2"}, "mask", ("all",), (1,)),
    ]
    found = plan_for(patterns, into="found", mechanism="bias")
    assert [(g.mechanism, g.layers, g.heads) for g in found.guides] == [
        ("bias", (0,), (3,)),
        ("bias", (1,), (1, 4)),
        ("bias", (0,), (5,)),
    ]
    added = plan_for(patterns, pal=True)
    assert added.pal is not None and added.pal.heads == 2 and added.pal.width == 128
    assert [g.heads for g in added.guides] == [("pal:0",), ("pal:1",)]
    with pytest.raises(UnknownName):
        plan_for([("nothing_like_it", [])])


def test_the_least_important_heads_take_one_pattern_each() -> None:
    plan = plan_for([("next", []), ("matching_token", [])], into="least-important")
    scores = {(layer, head): float((head + layer) % 4) for layer in range(2) for head in range(4)}
    taken = [select_heads(guide.heads, [0, 1], 4, scores) for guide in plan.guides]
    assert taken == [{0: (0,), 1: (3,)}, {0: (1,), 1: (0,)}]


def test_a_summary_is_what_its_names_say() -> None:
    attention = torch.tensor([[[[0.5, 0.5, 0.0], [0.2, 0.8, 0.0], [0.4, 0.3, 0.3]]]])
    valid = torch.tensor([[True, True, False]])
    found = summarise(attention, torch.zeros(1, 0, 3, 3), valid, reach=1)
    assert found.masses_BHP.shape == (1, 1, 0)
    torch.testing.assert_close(found.highest_BHQ, torch.tensor([[[0.5, 0.8, 0.0]]]))
    entropy = torch.distributions.Categorical(probs=attention[0, 0, :2, :2]).entropy()
    torch.testing.assert_close(found.entropy_BHQ[0, 0, :2], entropy)
    torch.testing.assert_close(found.offsets_BHO, torch.tensor([[[0.1, 0.65, 0.25]]]))


def test_no_candidate_is_lost_between_patterns_that_cover_each_other() -> None:
    same = [{(0, 3): 0.9}] * 2
    found = candidates(relevance({"next": same, "window": same}))
    assert [(c.pattern, c.covered_by) for c in found] == [("next", ""), ("window", "next")]
    assert isinstance(found[0], Candidate)
