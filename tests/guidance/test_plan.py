"""Plans as text: they survive the round trip, and an error names the row and the key."""

from __future__ import annotations

import contextlib
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guidance.errors import PlanError, UnknownName
from guidance.guide import SCHEDULES, Guide
from guidance.installation import install
from guidance.patterns import PATTERNS
from guidance.plan import SIZE_LIMIT, Plan, presets
from guidance.site_plans import plan_sites
from guidance.sites import Site, select
from tests.guidance.models import tiny_model

ROW = '[[guide]]\npattern = "next"\nmechanism = "attention_loss"\n'

selectors = st.lists(
    st.one_of(st.integers(0, 99), st.sampled_from(["all", "2-4", "first 2", "last 1", "fraction 0.5", "not 0-1"])),
    min_size=1,
    max_size=4,
).map(tuple)
factors = st.floats(0, 1e300, allow_nan=False)
text = st.text(st.characters(codec="utf-8"), max_size=12)
held = st.tuples(st.sampled_from(sorted({*SCHEDULES} - {"constant"})), st.integers(1, 10**6))
guides = st.builds(
    lambda schedule, **keys: Guide(schedule=schedule[0], hold_steps=schedule[1], **keys),
    schedule=st.just(("constant", 0)) | held,
    pattern=st.sampled_from(sorted(PATTERNS)),
    mechanism=st.just("attention_loss"),
    part=st.sampled_from(["model", "generator", "discriminator"]),
    stack=st.sampled_from(["encoder", "decoder"]),
    attention=st.sampled_from(["self", "cross"]),
    layers=selectors,
    heads=selectors,
    weight=st.one_of(
        factors,
        st.dictionaries(st.integers(0, 99), factors, min_size=1, max_size=3).map(lambda d: tuple(sorted(d.items()))),
    ),
    reference_length=st.one_of(st.none(), st.integers(1, 4096)),
    optional=st.booleans(),
    enabled=st.booleans(),
    name=text,
    options=st.fixed_dictionaries(
        {},
        optional={
            "reduction": st.sampled_from(["group_mean", "head_mean"]),
            "boundary": st.sampled_from(["uniform", "zero"]),
            "token_rows": st.sampled_from(["normalised", "indicator"]),
            "empty_rows": st.sampled_from(["uniform", "zero", "skip"]),
        },
    ),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(guides, max_size=3).map(tuple))
def test_a_plan_survives_the_round_trip_through_text(rows: tuple[Guide, ...]) -> None:
    plan = Plan(rows)
    assert Plan.parse(plan.dumps()) == plan
    assert Plan.parse(plan.dumps()).dumps() == plan.dumps()


@given(st.text(max_size=60) | st.text(st.sampled_from('[]{}="guide\n.1-pattern#'), max_size=60))
@settings(max_examples=80, deadline=None)
def test_any_other_text_raises_a_plan_error_or_is_empty(written: str) -> None:
    with contextlib.suppress(PlanError):
        assert Plan.parse(written) == Plan()


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_parse_and_survive_the_round_trip(name: str) -> None:
    plan = Plan.load(f"preset:{name}")
    assert plan.guides
    assert Plan.parse(plan.dumps()) == plan


def test_the_preset_ag_is_the_best_setting_of_the_paper() -> None:
    plan = Plan.load("preset:ag")
    assert [g.pattern for g in plan.guides] == ["next", "previous", "first"]
    assert [select(g.heads, 12, "head") for g in plan.guides] == [(0,), (1,), (2, 3, 4, 5)]
    assert [select(g.heads, 16, "head") for g in plan.guides][2] == (2, 3, 4, 5, 6, 7)
    for row in plan.guides:
        assert (row.weight_for(8), row.weight_for(11), row.weight_for(12), row.weight_for(16)) == (100, 100, 10, 10)
        assert (row.schedule, row.reference_length, row.hold_steps) == ("linear", 512, 0)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('patern = "next"', "unknown key 'patern'; did you mean 'pattern'"),
        ("haeds = [0]", "unknown key 'haeds'; did you mean 'heads'"),
        ('reductoin = "frobenius"', "unknown key 'reductoin'; did you mean 'reduction'"),
        ('reduction = "sum"', "reduction = 'sum'"),
        ("reduction = [1]", r"reduction = \[1\]"),
        ('schedule = "linaer"', "unknown schedule 'linaer'; did you mean 'linear'"),
        ('part = "modle"', "unknown part 'modle'; did you mean 'model'"),
        ('stack = "encode"', "unknown stack 'encode'; did you mean 'encoder'"),
        ('attention = "slef"', "unknown attention 'slef'; did you mean 'self'"),
        ("weight = -1", "weight -1.0 is not"),
        ("weight = nan", "weight nan is not"),
        ("weight = inf", "weight inf is not"),
        ('weight = "10"', "weight = '10' is not a"),
        ("weight = true", "weight = True is not a"),
        ("weight = {}", "the table of weights is empty"),
        ("weight = { 1 = true }", "weight is neither a number"),
        ("weight = { many = 2.0 }", "weight is neither a number"),
        (f"weight = 1{'0' * 400}", "weight is a number of more than 15 digits"),
        (f"weight = {{ 1 = 1{'0' * 400} }}", "weight is a number of more than 15 digits"),
        ("hold_steps = -1", "hold_steps starts at 0"),
        ("hold_steps = 1.5", "hold_steps = 1.5 is not a int"),
        ("reference_length = 0", "reference_length at 1"),
        ('heads = "first 99999999999999999999"', "heads has a number of more than 15 digits"),
        ('layers = ["all", "not 0-99999999999999999999"]', "layers has a number of more than 15 digits"),
        ("heads = []", "empty list of heads or layers"),
        ("layers = []", "empty list of heads or layers"),
        ("heads = [1.5]", r"heads = \[1.5\] is not a list of numbers and rules"),
        ("layers = [true]", r"layers = \[True\] is not"),
        ("optional = 1", "optional = 1 is not a bool"),
    ],
)
def test_errors_name_the_row_and_the_key(written: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"my.toml, guide 2: .*{message}"):
        Plan.parse(f"{ROW}\n{ROW}{written}\n", source="my.toml")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("guide = 3", "unknown table"),
        ("[guide]", "unknown table"),
        ("[[guides]]", "unknown table guides"),
        ("guide = [1]", "guide 1: a guide is a table"),
        ("[[guide]]", "guide 1: it has no mechanism"),
        ('[[guide]]\npattern = "next"', "guide 1: it has no mechanism"),
        ('[[guide]]\nmechansim = "mask"', "unknown key 'mechansim'; did you mean 'mechanism'"),
        ('[[guide]]\npatern = "next"\nmechanism = "mask"', "unknown key 'patern'; did you mean 'pattern'"),
        (
            '[[guide]]\npattern = "next"\nmechanism = "mask"\nlayers = ["frist 2"]',
            "guide 1: 'frist 2' is not a selector",
        ),
        ('[[guide]]\npattern = "next"\nmechanism = "mask"\nheads = "lest important 2"', "is not a selector"),
        ('[[guide]]\npattern = "next"\nmechanism = "mask"\nlayers = "least important 2"', "selects heads, not layers"),
        ('[[guide]]\npattern = "next"\nmechanism = "mask"\nheads = ["pal:frist 2"]', "is not a selector"),
        (
            '[[guide]]\npattern = "nxt"\nmechanism = "attention_loss"',
            "guide 1: unknown pattern 'nxt'; did you mean 'next'",
        ),
        (
            '[[guide]]\npattern = "key.id == query.id"\nmechanism = "mask"',
            "guide 1: no pattern has the name 'key.id == query.id'",
        ),
        (
            '[[guide]]\npattern = "next"\nmechanism = "atention_loss"',
            "guide 1: unknown mechanism 'atention_loss'; did you",
        ),
        ("[[guide", "not a plan"),
        ("x = " + "[" * 5000, "not a plan"),
        (f"[[guide]]\nheads = 1{'0' * 5000}", "plan: it has a number of more than 15 digits"),
    ],
)
def test_text_that_is_not_a_plan_is_refused(written: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(written)
    assert re.search(message, f"{caught.value}\n{caught.value.hint}")


def test_plans_are_read_from_files_and_unreadable_files_are_named(tmp_path: Path) -> None:
    good = tmp_path / "plan.toml"
    good.write_text(ROW)
    assert Plan.load(good) == Plan((Guide("next", "attention_loss"),))
    good.write_bytes(b"\xef\xbb\xbf" + ROW.encode())  # as editors on Windows write it
    assert Plan.load(good) == Plan((Guide("next", "attention_loss"),))
    (bad := tmp_path / "bad.toml").write_bytes(b"name = '\xff'")
    (large := tmp_path / "large.toml").write_bytes(b"#" * (SIZE_LIMIT + 1))
    for path in (tmp_path / "absent.toml", tmp_path, bad, large):
        with pytest.raises(PlanError, match=path.name) as caught:
            Plan.load(path)
        assert "Errno" not in caught.value.message and "codec" not in caught.value.message
    for name, hint in {"neighbour.toml": "did you mean preset:neighbours?", "ag": "did you mean preset:ag?"}.items():
        with pytest.raises(PlanError, match=f"there is no plan '{name}'") as caught:
            Plan.load(name)
        assert caught.value.hint == hint
    with pytest.raises(UnknownName, match="unknown preset 'agg'; did you mean 'ag'"):
        Plan.load("preset:agg")


def test_labels_are_unique_for_any_names() -> None:
    def row(name: str) -> Guide:
        return Guide("next", "attention_loss", name=name)

    assert Plan((row(""), row("mine"), row(""))).labels == ("next", "mine", "next#2")
    assert Plan((row("next#2"), row(""), row(""))).labels == ("next#2", "next", "next#3")
    assert len(set(Plan((row("next#2"), row(""), row(""), row("next#3"), row("next"))).labels)) == 5


def test_a_fraction_may_have_any_number_of_digits() -> None:
    thirds = ("fraction 0.33333333333333333333", "least important .33333333333333333333")
    assert Guide("next", "mask", heads=list(thirds)).heads == thirds


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([0], (0,)),
        ([3, 1, 3], (1, 3)),
        (["all"], (0, 1, 2, 3, 4, 5)),
        (["2-4"], (2, 3, 4)),
        (["5"], (5,)),
        (["first 2"], (0, 1)),
        (["last 2"], (4, 5)),
        (["last 6"], (0, 1, 2, 3, 4, 5)),
        (["fraction 0.5"], (0, 1, 2)),
        (["fraction 1"], (0, 1, 2, 3, 4, 5)),
        (["fraction .34"], (0, 1)),
        (["all", "not 1", "not 3-4"], (0, 2, 5)),
        (["not 1", "all"], (0, 1, 2, 3, 4, 5)),
        (["first 2", "not 0-999999"], ()),
        (["all", "not last 3"], (0, 1, 2)),
    ],
)
def test_rules_select_the_expected_numbers(rules: list[Any], expected: tuple[int, ...]) -> None:
    assert select(rules, 6, "head") == expected


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (6, "head 6 does not exist: the model has heads 0 to 5"),
        (-1, "head -1 does not exist"),
        ("4-6", "head 6 does not exist"),
        ("first 7", "head 6 does not exist"),
        ("last 7", "'last 7' asks for more heads than there are: the model has heads 0 to 5"),
        ("0-999999", "head 6 does not exist"),
        ("0-99999999999999", "is not a selector"),
        ("every", "'every' is not a selector"),
        ("fraction 2", "is not a selector"),
        ("not every", "'every' is not a selector"),
        ("9" * 5000, "is not a selector"),
    ],
)
def test_invalid_rules_and_numbers_that_do_not_exist_are_refused(rule: int | str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        select([rule], 6, "head")


def test_schedules_match_values_computed_by_hand() -> None:
    def at(schedule: str, step: int, total: int = 100, hold: int = 0) -> float:
        return Guide("next", "attention_loss", schedule=schedule, hold_steps=hold).factor(step, total)

    assert [at("constant", t) for t in (0, 50, 100)] == [1, 1, 1]
    assert [at("linear", t) for t in (0, 25, 100, 101)] == [1, 0.75, 0, 0]
    assert [at("linear", t, hold=20) for t in (0, 19, 20, 60, 100)] == [1, 1, 1, 0.5, 0]
    assert [at("cosine", t) for t in (0, 50, 100)] == pytest.approx([1, 0.5, 0])
    assert at("cosine", 25) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    # a run shorter than hold_steps never decays
    assert [at("linear", t, total=10, hold=20) for t in (0, 9)] == [1, 1]
    assert at("linear", 0, total=0) == 0


def test_a_table_of_weights_uses_the_largest_depth_not_above_the_models() -> None:
    row = Guide("next", "attention_loss", weight=((4, 2.0), (12, 1.0)))
    assert [row.weight_for(n) for n in (4, 11, 12, 24)] == [2, 2, 1, 1]


def test_half_a_head_counts_as_one() -> None:
    assert select(["fraction 0.5"], 5, "head") == (0, 1, 2)
    assert select(["fraction 0.25"], 6, "head") == (0, 1)
    assert select(["fraction 0.5"], 3, "head") == (0, 1)


def test_a_weight_given_only_for_deeper_models_is_refused() -> None:
    guide = Guide("next", "attention_loss", weight=((12, 10.0),))
    assert guide.weight_for(16) == 10.0
    with pytest.raises(PlanError, match="no weight for 8 layers"):
        guide.weight_for(8)


def test_a_reference_length_with_the_frobenius_reduction_is_refused() -> None:
    with pytest.raises(PlanError, match="frobenius"):
        Guide("next", "attention_loss", reference_length=512, options={"reduction": "frobenius"})


def test_a_disabled_row_is_not_installed_and_survives_the_round_trip() -> None:
    plan = Plan((Guide("next", "attention_loss", heads=(0,), enabled=False),))
    assert Plan.parse(plan.dumps()) == plan
    assert not install(tiny_model("roberta"), plan).site_plans


def test_one_selector_need_not_be_a_list() -> None:
    for selector, written in ((0, (0,)), ("first 2", ("first 2",)), ([0, "last 1"], (0, "last 1"))):
        guide = Guide("next", "mask", heads=selector, layers=selector)
        assert guide == Guide("next", "mask", heads=written, layers=written) and hash(guide.heads) == hash(written)
    with pytest.raises(PlanError, match="not a list of numbers and rules"):
        Guide("next", "mask", heads=(0.5,))  # type: ignore[arg-type]


def test_options_can_be_keywords_and_mean_the_same() -> None:
    as_table = Guide("window", "mask", heads=(0,), options={"size": 5, "scale": "d_model"})
    as_keywords = Guide("window", "mask", heads=0, size=5, scale="d_model")
    assert as_keywords == as_table and repr(as_keywords) == repr(as_table)
    assert Plan((as_keywords,)).dumps() == Plan((as_table,)).dumps()
    assert Guide("window", "mask", options={"size": 5}, scale="d_model", heads=[0]) == as_table
    relations = Guide("major_relation", "mask", relations=("nsubj", "obj"))
    assert Plan.parse(Plan((relations,)).dumps()) == Plan((relations,))
    assert replace(as_keywords, enabled=False).options == as_table.options


def test_a_keyword_that_nothing_takes_is_refused_with_the_nearest_one() -> None:
    for wrong, near in (("sise", "size"), ("haeds", "heads"), ("reductoin", "reduction")):
        with pytest.raises(UnknownName, match=f"unknown key '{wrong}'; did you mean '{near}'"):
            Guide("window", "attention_loss", **{wrong: 5})
    with pytest.raises(PlanError, match="the option 'size' is given twice"):
        Guide("window", "mask", options={"size": 5}, size=3)
    with pytest.raises(PlanError, match=r"options = \('size', 5\) is not a table"):
        Guide("window", "mask", options=("size", 5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weight", "10", "weight = '10' is not a float or int or dict"),
        ("weight", True, "weight = True is not a"),
        ("weight", (1, 2), "is not a float"),
        ("weight", {"many": 1.0}, "weight is neither a number"),
        ("hold_steps", 1.5, "hold_steps = 1.5 is not a int"),
        ("heads", None, "heads = None is not a"),
        ("optional", 1, "optional = 1 is not a bool"),
        ("pattern", ("next",), "is not a str or dict"),
        ("name", 3, "name = 3 is not a str"),
    ],
)
def test_values_in_python_are_checked_like_those_of_a_file(key: str, value: Any, message: str) -> None:
    keys: dict[str, Any] = {"pattern": "next", "mechanism": "attention_loss", key: value}
    with pytest.raises(PlanError, match=message):
        Guide(**keys)


def test_a_weight_by_depth_can_be_a_dict() -> None:
    by_depth = Guide("next", "attention_loss", weight={12: 10.0, 1: 100})
    assert by_depth.weight == ((1, 100.0), (12, 10.0))
    assert by_depth == Guide("next", "attention_loss", weight=((1, 100.0), (12, 10.0)))
    assert isinstance(Guide("next", "attention_loss", weight=3).weight, float)


def test_messages_say_what_to_write_instead() -> None:
    with pytest.raises(PlanError, match="size = 4 is not an odd number") as raised:
        Guide("window", "mask", size=4)
    assert "3 or 5" in str(raised.value.hint)
    with pytest.raises(PlanError, match="not a plan, which is TOML") as raised:
        Plan.parse("next: attention_loss")
    assert "[[guide]]" in str(raised.value.hint) and "guide plan new" in str(raised.value.hint)


def test_what_is_no_plan_is_refused_with_the_way_to_make_one() -> None:
    model, guide = tiny_model("bert"), Guide("next", "mask")
    for wrong in ("preset:ag", (guide,), None):
        with pytest.raises(PlanError, match="is no plan") as raised:
            install(model, wrong)  # type: ignore[arg-type]
        assert "Plan.load" in str(raised.value.hint)
    for wrong in (guide, "next", ("next",)):
        with pytest.raises(PlanError, match="is no list of guides"):
            Plan(wrong)  # type: ignore[arg-type]
    assert Plan([guide]) == Plan((guide,))  # type: ignore[arg-type]


def test_a_plan_of_800_rows_is_resolved_in_seconds() -> None:
    guide = Guide("next", "mask")
    plan = Plan((guide,) * 800)
    sites = [Site("encoder", "self", layer, 4, f"layer.{layer}") for layer in range(2)]
    before = time.process_time()
    assert len(set(plan.labels)) == 800
    assert [len(site.assignments) for site in plan_sites(plan, sites).values()] == [800, 800]
    assert time.process_time() - before < 2
