"""Comparing runs with a baseline: figures computed by hand, plain loops as an oracle, and laws."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guidance.errors import InputError, NumericalError, UnknownName
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged, ArtifactMismatch, ArtifactMissing, digest
from pipelines.storage.store import Store
from pipelines.views import comparison, curves
from pipelines.views.comparison import Comparison, Group, Row, compare, run
from pipelines.views.comparison_tables import WIDTH, as_csv, as_json, as_markdown, as_text
from pipelines.views.curves import Curve, Origin, read_curve
from pipelines.views.figures import FIGURES, Summary, seeds_needed, steps_to
from tests import runs

PLAIN = [8.0, 6, 5, 4, 4, 3, 3, 3]  # means of two: 8, 7, 5.5, 4.5, 4, 3.5, 3, 3
GUIDED = [8.0, 4, 3, 3, 2, 2, 2, 2]  # means of two: 8, 6, 3.5, 3, 2.5, 2, 2, 2


def curve(
    losses: Sequence[float], label: str = "run", *, seconds: float = 1.0, seed: int = 0, **options: object
) -> Curve:
    times, tokens = [seconds] * len(losses), [30.0] * len(losses)
    return Curve(label, "mlm", losses, times, tokens, origin=Origin(label, {"seed": seed}), **options)  # type: ignore[arg-type]


def singles(*curves: Curve) -> list[Group]:
    """Each curve as its own group."""
    return [Group(one.label, (one,)) for one in curves]


def row(comparison: Comparison, number: int) -> dict[str, float | None]:
    return comparison.rows[number].runs[0]


# by hand


def test_the_figures_of_two_runs_match_those_computed_by_hand() -> None:
    valid = {"plain": ((4, 5.0), (8, 3.5)), "guided": ((4, 2.0), (8, 2.5))}
    plain = curve(PLAIN, "plain", valid=valid["plain"])
    guided = curve(GUIDED, "guided", seconds=1.5, valid=valid["guided"])
    found = compare(singles(plain, guided))
    assert (found.steps, found.window) == (8, 2)
    assert row(found, 0) == dict.fromkeys(FIGURES) | {
        "average": 4.5,
        "loss_25": 7.0,
        "loss_50": 4.5,
        "loss_75": 3.5,
        "final": 3.0,
        "valid": 3.5,
        "best_valid": 3.5,
        "tokens_per_second": 30.0,
        "seconds": 8.0,
        "steps_to_7": 2,
        "steps_to_4.5": 4,
        "steps_to_3": 7,
    }
    assert row(found, 1) == dict.fromkeys(FIGURES) | {
        "average": 3.25,
        "loss_25": 6.0,
        "loss_50": 3.0,
        "loss_75": 2.0,
        "final": 2.0,
        "valid": 2.5,
        "best_valid": 2.0,
        "tokens_per_second": 20.0,
        "seconds": 12.0,
        "steps_to_7": 2,
        "steps_to_4.5": 3,
        "steps_to_3": 4,
    }
    assert found.rows[1].difference["average"].mean == -1.25
    assert found.rows[1].p["average"] is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1.5, (1.5, 8.0, 2.5, 3.0)),  # the baseline ends first; five steps of the run are done by then
        (0.5, (0.5, 4.0, 2.0, 4.5)),  # the run ends first; four steps of the baseline are done by then
        (1.0, (1.0, 8.0, 2.0, 3.0)),
    ],
)
def test_equal_seconds_are_those_of_steps_that_were_timed_alone(
    seconds: float, expected: tuple[float, float, float, float]
) -> None:
    runs = singles(curve(PLAIN, "plain", seconds=70.0), curve(GUIDED, "guided", seconds=90.0))
    comparison = compare(runs, costs={"plain": 1.0, "guided": seconds})
    found = row(comparison, 1)
    names = ("step_seconds", "equal_seconds", "loss_at_equal_seconds", "baseline_at_equal_seconds")
    assert tuple(found[name] for name in names) == expected
    assert any(line.startswith("loss at equal seconds") for line in as_text(comparison))


def test_without_timed_steps_there_are_no_equal_seconds() -> None:
    comparison = compare(singles(curve(PLAIN), curve(GUIDED, seconds=0.5)))
    assert row(comparison, 1)["loss_at_equal_seconds"] is None
    assert not any("equal seconds" in line for line in as_text(comparison))


def test_losses_that_are_asked_for_are_looked_up_in_both_runs() -> None:
    comparison = compare(singles(curve(GUIDED, "good"), curve(PLAIN, "bad")), at=(5.0, 2.0))
    assert [row(comparison, n)["steps_to_5"] for n in (0, 1)] == [3, 4]
    assert [row(comparison, n)["steps_to_2"] for n in (0, 1)] == [6, None]
    assert any(line.split() == ["bad", "4", ">8"] for line in as_text(comparison))
    assert as_json(comparison)["at"] == (5.0, 2.0)
    assert as_json(comparison)["definitions"]["steps_to_2"] == "first step at which the smoothed loss is down at 2"


def test_floors_stand_below_the_runs_and_a_run_above_the_lowest_of_them_is_named() -> None:
    floors = {"unigram": 3.4, "previous": 2.0}
    comparison = compare(
        singles(curve(PLAIN, "plain", valid=((8, 3.5),)), curve(GUIDED, "guided", valid=((8, 2.5),))), floors=floors
    )
    lines = [line.split() for line in as_text(comparison)]
    assert ["floor:", "word", "frequencies", *["–"] * 5, "3.400"] in lines
    assert ["floor:", "the", "previous", "token", *["–"] * 5, "2.000"] in lines
    (note,) = (note for note in comparison.notes if "word frequencies alone" in note)
    assert note.endswith(": plain (they give 3.40 nats)")
    assert as_json(comparison)["floors"] == floors


def test_a_run_is_held_against_the_floor_of_the_tokens_that_it_predicts_itself() -> None:
    """Both have 3.5 nats; the masks of one hide rarer words than those of the shown floor, and those of the other commoner ones."""
    runs = [
        dataclasses.replace(curve(losses, name, valid=((8, 3.5),)), floor=floor)
        for losses, name, floor in ((PLAIN, "rarer", 3.6), (GUIDED, "commoner", 3.2))
    ]
    (note,) = (
        note for note in compare(singles(*runs), floors={"unigram": 3.4}).notes if "word frequencies alone" in note
    )
    assert note.endswith(": commoner (they give 3.20 nats)")


def test_the_number_of_seeds_that_an_effect_needs() -> None:
    """With a deviation of 1, Cohen's tables say 34 pairs for an effect of a half and 10 for one of 1."""
    difference = Summary((-1.0, 0.0, 1.0), 0.0, 1.0)
    assert [seeds_needed(difference, effect) for effect in (0.5, 1.0, 1000.0)] == [34, 10, 2]
    assert seeds_needed(Summary((1.0,), 1.0), 0.5) is None
    plain = [curve([5.0] * 4, f"p{seed}", seed=seed) for seed in range(3)]
    guided = [curve([5.0 - gain] * 4, f"g{seed}", seed=seed) for seed, gain in enumerate((0.0, 1.0, 2.0))]
    comparison = compare([Group("p", tuple(plain)), Group("g", tuple(guided))], power=1.0)
    assert any(line.split() == ["g", "10", "10", "–"] for line in as_text(comparison))
    assert not any("at least two pairs" in note for note in comparison.notes)
    tiny = compare([Group("p", tuple(plain)), Group("g", tuple(guided))], power=0.001)
    assert any(line.split() == ["g", ">1,000", ">1,000", "–"] for line in as_text(tiny))
    single = compare(singles(curve(PLAIN, "plain"), curve(GUIDED, "guided")), power=1.0)
    assert any("at least two pairs" in note for note in single.notes)
    assert as_json(comparison)["groups"][1]["seeds_needed"] == {"average": 10, "final": 10, "valid": None}


def test_longer_runs_are_compared_up_to_the_end_of_the_shortest() -> None:
    valid = ((4, 9.0), (8, 8.0), (12, 7.0))
    longer = curve([*GUIDED, 0.0, 0.0, 0.0, 0.0], "longer", valid=valid)
    found = compare(singles(curve(PLAIN, "plain", valid=((8, 3.0),)), longer))
    assert row(found, 1)["final"] == 2.0 and row(found, 1)["seconds"] == 8.0 and row(found, 1)["valid"] == 8.0
    assert "compared up to step 8, where plain ends" in found.notes


def test_validation_losses_are_taken_at_the_last_step_that_all_runs_have() -> None:
    often = curve(PLAIN, "often", valid=((2, 6.0), (4, 5.0), (6, 4.0)))
    found = compare(singles(often, curve(GUIDED, "seldom", valid=((4, 3.0), (8, 1.0)))))
    assert [row(found, i)["valid"] for i in (0, 1)] == [5.0, 3.0]
    assert "validation losses are those of step 4, the last step at which all runs have one" in found.notes
    other = compare(singles(often, curve(GUIDED, "never together", valid=((3, 3.0), (7, 1.0)))))
    assert [row(other, i)["valid"] for i in (0, 1)] == [4.0, 1.0]
    (note,) = (note for note in other.notes if "no step in common" in note)
    assert note.endswith("used: step 6 of often, step 7 of never together")


def test_a_run_without_validation_in_the_steps_that_are_compared_is_named() -> None:
    late = curve([*GUIDED, 0.0, 0.0], "late", valid=((10, 3.0),))
    found = compare(singles(curve(PLAIN, "plain", valid=((8, 3.0),)), late))
    assert row(found, 1)["valid"] is None
    assert "no validation losses in the steps that are compared: late" in found.notes
    neither = compare(singles(curve(PLAIN, "plain"), curve(GUIDED, "guided")))
    assert not [note for note in neither.notes if "validation" in note]


def test_seeds_give_mean_spread_and_a_paired_test() -> None:
    """Final losses of the pairs differ by -1, -2 and -3, so t = -2 / (1 / √3); with two degrees of freedom its p has a
    closed form."""
    plain = [curve([7.0, final] * 4, f"p{seed}", seed=seed) for seed, final in enumerate((5, 5, 8))]
    guided = [curve([7.0, final] * 4, f"g{seed}", seed=seed) for seed, final in enumerate((4, 3, 5))]
    found = compare([Group("p", tuple(plain)), Group("g", tuple(reversed(guided)))], window=1)
    baseline, other = found.rows
    assert (baseline.summary["final"].mean, baseline.summary["final"].sd) == (6.0, pytest.approx(math.sqrt(3)))
    assert (other.summary["final"].mean, other.summary["final"].sd) == (4.0, 1.0)
    assert (other.difference["final"].mean, other.difference["final"].sd, other.num_pairs) == (-2.0, 1.0, 3)
    t = 2 * math.sqrt(3)
    assert other.p["final"] == pytest.approx(1 - t / math.sqrt(t * t + 2))
    assert baseline.p["final"] is None


def test_each_seed_is_compared_with_the_baseline_of_the_same_seed() -> None:
    plain = [curve([9.0, 9, 5, 4], seed=0), curve([9.0, 9, 9, 8], seed=1)]
    guided = [curve([9.0, 4, 4, 4], seed=0), curve([8.0, 8, 8, 8], seed=1)]
    found = compare([Group("p", tuple(plain)), Group("g", tuple(guided))], at=(4.0,)).rows[1]
    assert found.difference["final"].values == (0.0, 0.0)
    assert found.summary["steps_to_4"].values == (2, None)


def test_if_some_seeds_never_reach_the_loss_there_is_no_mean() -> None:
    plain = [curve(PLAIN, seed=seed) for seed in (0, 1)]
    mixed = [curve(GUIDED, seed=0), curve([9.0] * 8, seed=1)]
    comparison = compare([Group("p", tuple(plain)), Group("g", tuple(mixed))], at=(3.0,))
    assert comparison.rows[1].summary["steps_to_3"].mean is None
    assert any(line.split()[:5] == ["g", "2", "1", "of", "2"] for line in as_text(comparison))


def test_a_seed_without_a_partner_counts_in_the_mean_but_in_no_pair() -> None:
    plain = [curve(PLAIN, "p0", seed=0), curve(PLAIN, "p1", seed=1)]
    guided = [curve(GUIDED, "g1", seed=1), curve([1.0] * 8, "g7", seed=7)]
    comparison = compare([Group("p", tuple(plain)), Group("g", tuple(guided))])
    found = comparison.rows[1]
    assert found.summary["final"].mean == 1.5 and found.num_pairs == 1
    assert found.difference["final"].values == (-1.0,) and found.p["final"] is None
    assert any("in no pair" in note and "g7" in note and "g1" not in note for note in comparison.notes)


def test_there_is_no_p_value_if_all_pairs_differ_equally() -> None:
    plain = [curve([0.3 + seed / 10] * 4, seed=seed) for seed in range(3)]
    guided = [curve([0.2 + seed / 10] * 4, seed=seed) for seed in range(3)]
    found = compare([Group("p", tuple(plain)), Group("g", tuple(guided))]).rows[1]
    assert found.difference["final"].mean == pytest.approx(-0.1)
    assert found.p["final"] is None


@pytest.mark.parametrize(
    ("name", "plain", "guided", "best", "steps"),
    [
        ("eval/mnli/accuracy", (0.5, 0.7, 0.6), (0.6, 0.9, 0.8), 0.9, 2),
        ("eval/mnli/loss", (1.0, 0.7, 0.8), (0.9, 0.5, 0.6), 0.5, 4),
        ("eval/regression/mse", (1.0, 0.7, 0.8), (0.9, 0.5, 0.6), 0.5, 4),
        ("eval/segmentation/window_diff", (1.0, 0.7, 0.8), (0.9, 0.5, 0.6), 0.5, 4),
    ],
)
def test_scores_have_a_last_and_a_best_value_and_steps_to_reach_the_baseline(
    name: str, plain: tuple[float, ...], guided: tuple[float, ...], best: float, steps: int
) -> None:
    curves = [
        curve(losses, label, scores={name: tuple(zip((2, 4, 8), values, strict=True))})
        for label, losses, values in (("plain", PLAIN, plain), ("guided", GUIDED, guided))
    ]
    found = compare(singles(*curves), score=name.removeprefix("eval/"))
    assert row(found, 1)["score"] == guided[-1]
    assert row(found, 1)["best_score"] == best
    assert row(found, 1)["steps_to_equal_score"] == steps
    assert any(line.startswith(name) and ("lower" in line) == (best == 0.5) for line in as_text(found))
    with pytest.raises(UnknownName, match="did you mean"):
        compare(singles(*curves), score=name[:-1])


def test_a_single_run_of_one_step_has_figures() -> None:
    found = compare(singles(curve([4.0])))
    assert row(found, 0)["average"] == row(found, 0)["loss_25"] == row(found, 0)["final"] == 4.0
    assert row(found, 0)["steps_to_4"] == 1
    assert not any("difference" in line for line in as_text(found))


# laws

losses = st.lists(st.floats(1e-3, 20), min_size=1, max_size=40)


@settings(max_examples=30, deadline=None)
@given(losses, st.integers(1, 60))
def test_smoothing_is_the_mean_of_the_last_steps(values: list[float], window: int) -> None:
    slow = [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
    assert curve(values).smoothed(window).tolist() == pytest.approx(slow)


@settings(max_examples=30, deadline=None)
@given(losses, st.integers(1, 60), st.floats(0.01, 3))
def test_a_run_compared_with_itself_reaches_the_loss_and_does_not_differ(
    values: list[float], window: int, time: float
) -> None:
    one = curve(values, seconds=time)
    comparison = compare(singles(one, one), window=window, costs={"run": time})
    found = comparison.rows[1]
    (figures,) = found.runs
    assert all(figures[steps_to(loss)] for loss in comparison.at)
    assert figures["loss_at_equal_seconds"] == figures["baseline_at_equal_seconds"] == figures["final"]
    assert found.difference["average"].mean == found.difference["final"].mean == 0
    assert set(found.p.values()) == {None}


@settings(max_examples=30, deadline=None)
@given(st.lists(losses, min_size=2, max_size=5))
def test_the_result_does_not_depend_on_the_order_of_seeds(values: list[list[float]]) -> None:
    def rows(order: Sequence[int]) -> Row:
        groups = [
            Group(name, tuple(curve([x + shift for x in values[seed]], seed=seed) for seed in order))
            for name, shift in (("p", 0.0), ("g", 1.0))
        ]
        return compare(groups).rows[1]

    forth, back = rows(range(len(values))), rows(range(len(values))[::-1])
    assert forth.summary["final"].mean == pytest.approx(back.summary["final"].mean)
    assert forth.difference["average"].mean == pytest.approx(1)


# reading runs


@pytest.fixture
def pair(store: Store) -> tuple[Artifact, Artifact]:
    more = {"valid/mlm": {4: 5.0, 8: 3.5}, "eval/mnli/accuracy": {8: 0.5}}
    return (
        runs.finished(store, runs.metrics(PLAIN, more=more)),
        runs.finished(store, runs.metrics(GUIDED, seconds=1.5, more=more), plan="guided"),
    )


def test_runs_are_compared_by_the_loss_of_their_task_without_guides(
    store: Store, pair: tuple[Artifact, Artifact]
) -> None:
    found = run([artifact.reference for artifact in pair], store)
    assert found.loss == "mlm"
    assert row(found, 0)["average"] == 4.5 and row(found, 1)["steps_to_3"] == 4
    assert row(found, 1)["valid"] == 3.5
    assert found.rows[1].differs == ["plan"]
    one = Curve.of(pair[0], "one")
    assert one.valid == ((4, 5.0), (8, 3.5)) and one.scores == {"eval/mnli/accuracy": ((8, 0.5),)}


def test_only_the_metrics_file_is_verified(store: Store, pair: tuple[Artifact, Artifact]) -> None:
    (pair[0].path / "config.json").write_bytes(b"[]")
    run([pair[0].reference], store)
    path = pair[0].path / "metrics.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactDamaged, match=r"metrics\.parquet"):
        run([pair[0].reference], store)


def test_a_long_log_is_read_in_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column may first occur in any part."""
    rows = runs.metrics(PLAIN, more={"valid/mlm": {7: 5.0}})
    for part in (1, 3, 8):
        monkeypatch.setattr(curves, "PART", part)
        found = read_curve(runs.going(store, rows), store)
        assert list(found.losses) == PLAIN and found.valid == ((7, 5.0),) and list(found.tokens) == [30.0] * 8


def test_an_unfinished_run_is_read_up_to_its_last_complete_line(store: Store, pair: tuple[Artifact, Artifact]) -> None:
    reference = runs.going(store, runs.metrics(GUIDED[:6]), plan="guided", torn='{"step": 7, "loss/')
    for shown in (reference, reference.removeprefix("model/"), reference[: len("model/") + 6]):
        found = run([pair[0].reference, shown], store)
        assert found.steps == 6 and row(found, 1)["final"] == 2.0
        assert found.rows[1].differs == ["plan"]
        assert f"{shown} is unfinished, at step 6 of 8" in found.notes
        assert f"compared up to step 6, where {shown} ends" in found.notes


def test_a_run_that_finishes_while_it_is_being_looked_up_is_found(
    store: Store, pair: tuple[Artifact, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.root / ".partial" / "model" / pair[0].id
    hidden = pair[0].path.rename(pair[0].path.with_name("hidden"))

    def find_unfinished(*_: object) -> object:
        if hidden.exists():
            hidden.rename(pair[0].path)
        return folder

    monkeypatch.setattr(Store, "find_unfinished", find_unfinished)
    assert read_curve(pair[0].reference, store).label == pair[0].reference


def test_seeds_are_grouped_and_a_run_given_twice_counts_once(store: Store) -> None:
    plain = [runs.finished(store, runs.metrics([x + s for x in PLAIN]), seed=s).reference for s in (0, 1, 2)]
    guided = [runs.finished(store, runs.metrics(GUIDED), seed=s, plan="guided").reference for s in (2, 1)]
    live = runs.going(store, runs.metrics(GUIDED), seed=0, plan="guided")
    found = run([plain[0], *guided, *plain[1:], live, plain[2]], store, group=True)
    assert [len(r.group.curves) for r in found.rows] == [3, 3]
    assert found.rows[0].group.label == f"{plain[0]} +2"
    assert found.rows[1].differs == ["plan"] and found.rows[1].num_pairs == 3
    assert found.rows[1].difference["final"].mean == pytest.approx(-2)
    assert any("counts once" in note for note in found.notes)
    again = runs.finished(store, runs.metrics(PLAIN), seed=1).reference
    with pytest.raises(InputError, match="same seed, 1"):
        run([*plain, again], store, group=True)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["plain-0"], "plain-0"),
        (["plain-0", "plain-1", "plain-12"], "plain-*"),
        (["plain-10", "plain-20"], "plain-*"),
        (["s10", "s11"], "s*"),
        (["tiny-1-none", "tiny-2-none"], "tiny-*-none"),
        (["mine", "yours"], "mine +1"),
        (["model/12ab", "model/13cd"], "model/12ab +1"),
    ],
)
def test_a_group_of_runs_gets_one_label(labels: list[str], expected: str) -> None:
    assert comparison.common_labels([labels]) == [expected]


def test_no_two_groups_of_runs_have_the_same_label() -> None:
    groups = [["a-1", "a-2"], ["a-3", "a-4"], ["b-1-x", "b-2-x"], ["b-1-y", "b-2-y"]]
    assert comparison.common_labels(groups) == ["a-1 +1", "a-3 +1", "b-*-x", "b-*-y"]


def _sequences(store: Store, valid: bytes, train: bytes = b"same") -> str:
    recipe = digest([valid.decode(), train.decode()])
    with store.build("sequences", recipe, {"stage": "build-sequences", "config": {}, "inputs": {}}) as out:
        out.write("train.parquet", train)
        out.write("valid.parquet", valid)
    return Artifact(store.folder("sequences", recipe)).content


def test_other_validation_data_give_a_note_and_other_training_data_an_error(store: Store) -> None:
    contents = [_sequences(store, b"one"), _sequences(store, b"two"), _sequences(store, b"one", b"other")]
    one, two, other = (runs.finished(store, runs.metrics(PLAIN), sequences=c).reference for c in contents)
    assert f"{two} and {one} have different validation data" in run([one, two], store).notes
    with pytest.raises(InputError, match="different sequences"):
        run([one, other], store)
    a, b, c = contents
    both, swapped, validated = (
        runs.finished(store, runs.metrics(PLAIN), sequences=given).reference for given in ([a, c], [c, a], [b, c])
    )
    assert f"{validated} and {both} have different validation data" in run([both, validated], store).notes
    for one_of_them in (one, swapped):
        with pytest.raises(InputError, match=rf"different sequences \(.* with {c[:12]}"):
            run([both, one_of_them], store)


def test_runs_of_different_objectives_compare_only_by_a_named_loss(store: Store) -> None:
    plain = runs.finished(store, runs.metrics(PLAIN)).reference
    rows = [r | {"loss/generator": 1.0} for r in runs.metrics(PLAIN, loss="discriminator")]
    electra = runs.finished(store, rows, config={"objective": "electra"}).reference
    with pytest.raises(InputError, match=r"on the loss mlm, .* on discriminator"):
        run([plain, electra], store)
    with pytest.raises(UnknownName, match="unknown loss of"):
        run([plain, electra], store, loss="generator")
    assert row(run([electra], store, loss="generator"), 0)["final"] == 1.0
    both = runs.finished(
        store, [r | {"loss/nsp": 0.5} for r in runs.metrics(PLAIN)], config={"objective": "mlm+nsp"}
    ).reference
    with pytest.raises(InputError, match="has the objective mlm"):
        run([plain, both], store)
    found = run([plain, both], store, loss="mlm")
    assert any(note.startswith("the objectives differ") for note in found.notes)


def test_settings_that_make_losses_incomparable_give_a_note(store: Store) -> None:
    plain = runs.finished(store, runs.metrics(PLAIN)).reference
    other = runs.finished(store, runs.metrics(PLAIN), config={"valid_sequences": 0, "device": "cuda"}).reference
    found = run([plain, other, plain], store)
    assert f"validation losses are not comparable: valid_sequences is 512 for {plain}, 0 for {other}" in found.notes
    assert f"{plain} is the same run as {plain}" in found.notes
    assert found.rows[1].differs == ["valid_sequences"]  # the device is not part of the recipe


def test_a_continued_run_does_not_differ_in_the_shape_that_its_model_has_already(store: Store) -> None:
    shape = {"architecture": "llama", "size": "small"}
    new = runs.finished(store, runs.metrics(PLAIN), config=shape).reference
    continued = {"architecture": "auto", "size": "mini"}
    more = runs.finished(store, runs.metrics(PLAIN), config=continued, init="new").reference
    assert run([new, more], store).rows[1].differs == ["init"]


@pytest.mark.parametrize(
    ("key", "values"), [("device", ("cpu", "cuda")), ("precision", ("bf16", "fp32")), ("processes", (1, 2))]
)
def test_runs_whose_speeds_cannot_be_compared_give_a_note(store: Store, key: str, values: tuple[Any, Any]) -> None:
    counts = {"device": "cpu", "precision": "fp32", "processes": 1}
    references = [runs.finished(store, runs.metrics(PLAIN), counts=counts | {key: v}).reference for v in values]
    notes = [note for note in run(references, store).notes if note.startswith("speeds")]
    assert notes == [f"speeds are not comparable: {key} differs ({values[0]}, {values[1]})"]


@pytest.mark.parametrize(
    ("losses", "columns", "error", "words"),
    [
        (None, {}, InputError, "no metrics.parquet"),
        ([], {}, InputError, "no training loss"),
        ([2.0, math.nan], {}, NumericalError, "loss/mlm is nan at step 2"),
        ([2.0, math.inf], {}, NumericalError, "loss/mlm is inf at step 2"),
        ([2.0, None], {}, InputError, "loss/mlm is missing at step 2"),
        ([2.0, 1.0], {"step": [1, 3]}, InputError, "steps 1 to 2"),
        ([2.0, 1.0], {"seconds": ["a", "b"]}, InputError, "seconds holds string"),
        ([2.0, 1.0], {"seconds": [None, 1.0]}, InputError, "seconds is missing at step 1"),
        ([2.0, 1.0], {"valid/mlm": [None, math.nan]}, NumericalError, "valid/mlm is nan at step 2"),
    ],
)
def test_a_run_that_cannot_be_read_is_refused_and_named(
    store: Store, losses: list[float] | None, columns: dict[str, list[object]], error: type[Exception], words: str
) -> None:
    rows = None if losses is None else runs.metrics(losses)
    reference = runs.finished(store, rows, columns=columns).reference
    with pytest.raises(error, match=words) as caught:
        run([reference], store)
    assert reference in str(caught.value)


def test_a_reference_to_anything_but_a_run_is_refused(store: Store) -> None:
    with pytest.raises(ArtifactMissing):
        run(["model/0123456789abcdef"], store)
    _sequences(store, b"x")
    (sequences,) = [artifact.reference for artifact in store.artifacts()]
    with pytest.raises(ArtifactMismatch, match="expected: model"):
        run([sequences], store)
    with pytest.raises(InputError, match="has not finished a step yet"):
        run([runs.going(store, [])], store)
    with pytest.raises(ArtifactDamaged, match="not the log of a training run"):
        run([runs.going(store, [], torn="nonsense\n")], store)


# writing


@pytest.fixture
def several(store: Store) -> Comparison:
    references = [
        runs.finished(
            store,
            runs.metrics([x + seed / 7 for x in losses], more={"valid/mlm": {4: 5.0, 8: 3.0 + seed}}),
            seed=seed,
            plan=plan,
        ).reference
        for plan, losses in (("plain", PLAIN), ("guided", GUIDED))
        for seed in (0, 1, 2)
    ]
    return run(references, store, group=True)


def test_text_is_aligned_and_fits_the_width(several: Comparison) -> None:
    lines = as_text(several)
    assert max(map(len, lines)) <= WIDTH
    tables = "\n".join(lines).split("\n\n")
    assert len(tables) == 4
    for table in tables:
        titles, *rows = table.splitlines()[-(len(several.rows) + 1 - table.startswith("difference")) :]
        assert titles.startswith("run ") and {len(line) for line in rows} == {len(titles)}
    assert "  4.643 ± 0.143  " in "\n".join(lines)


def test_markdown_has_the_same_cells_as_the_text(several: Comparison) -> None:
    tables = [line for line in as_markdown(several) if line.startswith("|")]
    assert len({line.count("|") for line in tables[:4]}) == 1
    assert "4.643 ± 0.143" in tables[2]


def test_json_and_csv_have_the_same_figures(several: Comparison) -> None:
    found = as_json(several)
    rows = list(csv.DictReader(io.StringIO(as_csv(several))))
    assert len(rows) == 6 and {r["loss_name"] for r in rows} == {"mlm"}
    listed = [one for group in found["groups"] for one in group["runs"]]
    for written, one in zip(rows, listed, strict=True):
        for name in FIGURES:
            assert written[name] == ("" if one[name] is None else str(one[name]))
    assert found["groups"][1]["figures"]["average"]["mean"] == several.rows[1].summary["average"].mean


@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_picture_is_a_valid_image_and_reproducible(several: Comparison, form: str) -> None:
    from xml.etree import ElementTree

    from pipelines.views.learning_curves import run_curves

    data = run_curves(several, form=form)
    if form == "png":
        assert data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82")
        width, height = struct.unpack(">II", data[16:24])
        assert 2 * height > width > height > 400
    else:
        assert ElementTree.fromstring(data).tag.endswith("svg")
    assert run_curves(several, form=form) == data


def test_only_steps_that_were_timed_are_drawn_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.views import learning_curves

    figures: list[Any] = []
    monkeypatch.setattr(learning_curves, "png", lambda figure: (figures.append(figure), b"")[1])
    runs = singles(curve(PLAIN, "plain"), curve(GUIDED, "guided", seconds=50.0))
    learning_curves.run_curves(compare(runs))
    learning_curves.run_curves(compare(runs, costs={"plain": 2.0, "guided": 3.0}))
    alone, timed = figures
    assert len(alone.axes) == 1 and len(timed.axes) == 2
    ends = [max(line.get_xdata()) for line in timed.axes[1].lines if len(line.get_xdata()) > 1]
    assert ends == [2.0 * len(PLAIN), 3.0 * len(GUIDED)], "steps by what a step takes, not what was logged"


def test_floors_far_below_a_picture_are_told_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.views import learning_curves

    figures: list[Any] = []
    monkeypatch.setattr(learning_curves, "png", lambda figure: (figures.append(figure), b"")[1])
    floors = {"unigram": 6.7, "previous": 5.2, "neighbours": 3.98}
    learning_curves.run_curves(compare(singles(curve([6.9, 6.5, 6.1])), floors=floors))
    told = [text.get_text() for text in figures[0].axes[0].texts]
    assert told == ["below this picture: both neighbours 3.98", "word frequencies", "the previous token"]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 120), st.integers(1, 60), st.floats(-1, 1))
def test_a_straight_line_is_drawn_as_it_is_to_both_ends(steps: int, window: int, slope: float) -> None:
    losses = [8 + slope * step for step in range(steps)]
    assert curve(losses).trend(window, range(steps)).tolist() == pytest.approx(losses, abs=1e-9)


def test_a_smooth_loss_is_drawn_without_a_bend_where_the_window_is_full() -> None:
    window, steps = 50, np.arange(200)
    losses = curve((7 + 1.5 * np.exp(-steps / 18)).tolist())
    bends, before = (np.abs(np.diff(line, 2)) for line in (losses.trend(window, steps), losses.smoothed(window)))
    assert before[window - 2] > 10 * before[window], "the mean of the last steps bends at its window"
    assert (np.diff(bends[: 2 * window]) < 1e-4).all() and bends[window - 2] < before[window - 2] / 5
    assert losses.trend(window, [0])[0] == pytest.approx(8.5, abs=0.25) and losses.smoothed(window)[9] > 8


def test_attention_has_a_colour_bar_labels_at_both_sides_and_readable_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines import drawing

    figures: list[Any] = []
    monkeypatch.setattr(drawing, "png", lambda figure: (figures.append(figure), b"")[1])
    for tokens in (["<s>", "$x", "犬", "</s>"], [f"token{n}" for n in range(24)]):
        maps = {f"head {n}": np.full((len(tokens), len(tokens)), 0.1) for n in range(3)}
        drawing.attention_grid({"step 0": maps, "step 9": maps}, tokens, title="attention")
        figure = figures.pop()
        *grid, bar = figure.axes
        assert bar.get_ylabel() == "attention probability" and len(grid) == 6
        assert [label.get_text() for label in grid[0].get_yticklabels()] == tokens
        assert [label.get_text() for label in grid[5].get_xticklabels()] == tokens
        assert {label.get_text() for label in (*grid[0].get_xticklabels(), *grid[5].get_yticklabels())} == {""}
        assert min(label.get_fontsize() for label in (*grid[0].get_yticklabels(), *grid[5].get_xticklabels())) >= 6
        assert figure.get_suptitle() == "attention" and "keys" in figure.get_supxlabel()


def test_a_run_of_one_step_without_validation_can_be_drawn() -> None:
    from pipelines.views.learning_curves import run_curves

    assert run_curves(compare(singles(curve([4.0], "$1 run")))).startswith(b"\x89PNG")


def test_translation_runs_compare_by_the_loss_without_label_smoothing(store: Store) -> None:
    smoothed = runs.metrics([9.0, 8.0, 7.0], loss="translation")
    rows = [row | {"loss/nll": row["loss/translation"] - 2, "valid/nll": 5.0} for row in smoothed]
    one, two = (
        runs.finished(store, rows, seed=seed, config={"objective": "translation", "label_smoothing": amount}).reference
        for seed, amount in ((0, 0.0), (1, 0.1))
    )
    found = run([one, two], store)
    assert row(found, 0)["final"] < 7 and row(found, 0)["valid"] == 5.0
    assert not any("losses are not comparable" in note for note in found.notes)
    assert any("not comparable: label_smoothing is 0.0" in n for n in run([one, two], store, loss="translation").notes)


def test_a_picture_of_runs_names_them_and_what_they_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.views.learning_curves import run_curves

    figures = figures_saved(monkeypatch)
    run_curves(compare(singles(curve([4.0], "plain"), curve([4.0], "guided"))))
    assert [figure.get_suptitle() for figure in figures] == ["guided compared with plain"]


def test_cells_and_colour_bar_of_a_picture_of_heads_are_hundredths_and_its_title_names_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipelines.probing.heads import heads_picture

    figures = figures_saved(monkeypatch)
    row = {"attention": "self", "layer": 0}
    rows = [{**row, "head": 0, "share": 0.25}, {**row, "head": 1, "share": 0.5}]
    folder = SimpleNamespace(paths=[Path("/models/my-bert/config.json")])
    run = SimpleNamespace(inputs={"model": folder}, config=SimpleNamespace(random=3))
    heads_picture(run, rows, "share", title="Attention on nouns", label="% of attention")
    (figure,) = figures
    assert figure.get_suptitle() == "Attention on nouns\nmy-bert, random weights"
    axes, bar = figure.axes
    assert [text.get_text() for text in axes.texts] == ["25", "50"]
    assert (bar.get_ylabel(), bar.get_ylim()) == ("% of attention", (0, 50))


@pytest.mark.parametrize(
    ("figures", "cells", "limits"),
    [
        ([17.73, 4.0], ["17.7", "4.0"], (0, 17.73)),
        ([1234.5, 0.5], ["1234", "0"], (0, 1234.5)),
        ([0.0412, 0.0], ["0.0412", "0.0000"], (0, 0.0412)),
        ([-3.5, -1.25], ["-3.50", "-1.25"], (-3.5, 0)),
    ],
)
def test_a_picture_of_heads_shows_figures_that_are_no_shares_as_they_are(
    monkeypatch: pytest.MonkeyPatch, figures: list[float], cells: list[str], limits: tuple[float, float]
) -> None:
    from pipelines.probing.heads import heads_picture

    saved = figures_saved(monkeypatch)
    rows = [{"attention": "self", "layer": 0, "head": n, "distance": figure} for n, figure in enumerate(figures)]
    run: Any = SimpleNamespace(inputs={"model": SimpleNamespace(paths=[Path("my-bert/config.json")])}, config=None)
    heads_picture(run, rows, "distance", title="Distance", label="tokens", hundredths=False)
    axes, bar = saved[0].axes
    assert [text.get_text() for text in axes.texts] == cells
    assert bar.get_ylim() == limits


def figures_saved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved from now on."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig

    def savefig(figure: Any, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def test_a_loss_has_the_unit_of_its_task() -> None:
    for loss, unit in (("mlm", "nats"), ("classification", "nats"), ("regression", "squared error")):
        curves = [dataclasses.replace(curve(PLAIN, label), loss=loss) for label in ("plain", "guided")]
        assert any(f"training loss {loss} ({unit}, " in line for line in as_text(compare(singles(*curves))))


def test_runs_of_other_seeds_are_said_to_mask_other_words() -> None:
    plain, other = curve(PLAIN, "plain", floor=5.64), curve(GUIDED, "other", seed=5, floor=5.43)
    told = "plain and other have other seeds, so their validations mask other words: word frequencies give 5.64 and 5.43 nats there"
    assert told in compare(singles(plain, other)).notes
    assert not any("mask other words" in note for note in compare(singles(plain, curve(GUIDED, "guided"))).notes)
