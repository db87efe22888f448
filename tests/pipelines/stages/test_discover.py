"""``guide discover score`` and ``accept``: what is planted in a model is found, and becomes a plan that trains."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from guidance.errors import InputError, UnknownName
from guidance.plan import Plan
from guidance.probes.discovery import SINKS, candidates, chosen
from guidance.probes.relevance import Relevance
from guidance.sites import Site
from pipelines.explorer.accepting import command_for
from pipelines.stages import discover_accept, discover_score
from pipelines.storage.store import Store
from tests import finetunings, trainings
from tests.pipelines.stages.test_probes import matching, saved, written
from tests.trainings import one_thread  # noqa: F401

PLANTED = """
[[guide]]
pattern = "next"
mechanism = "fix"
layers = [0]
heads = [1]

[[guide]]
pattern = "matching_token"
mechanism = "mask"
layers = [2]
heads = [3]
"""


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str, str, str]:
    """A store with a model of two planted heads, its data, and its discovery."""
    folder = tmp_path_factory.mktemp("discover")
    store = Store(folder / "artifacts")
    data = finetunings.build(store, folder, {"train": finetunings.reviews(30), "valid": finetunings.reviews(12)})
    plan = written(folder, "plan.toml", PLANTED)
    model = finetunings.train(store, data, plan=plan, layers=4, heads=4, steps=2).artifact
    with pytest.MonkeyPatch.context() as patch:
        as_learned(patch)
        found = discover_score.run(model.reference, data.reference, discover_score.Config(), store=store).artifact
    return store, model.reference, data.reference, found.reference


def as_learned(patch: pytest.MonkeyPatch) -> None:
    """Let what the plan of a model does to heads count as learned by them."""
    patch.setattr("guidance.probes.discovery.guided_heads", lambda handle: frozenset())


def test_planted_heads_are_found_and_proposed(scored: tuple[Store, str, str, str]) -> None:
    store, _, _, reference = scored
    found = store.load(reference)
    by_name = {each["pattern"]: each for each in found.counts["candidates"]}
    assert by_name["next"]["heads"][0] == [0, 1] and by_name["next"]["lift"] > 3
    assert by_name["window"]["covered_by"] == "next"
    assert "next" in found.counts["proposed"] and "first" not in found.counts["proposed"]
    assert found.counts["task"] == "classification"
    rows = pq.read_table(found.path / "heads.parquet").to_pylist()
    assert len(rows) == 16 and {"score", "importance", "entropy", "next"} <= set(rows[0])
    planted = next(row for row in rows if (row["layer"], row["head"]) == (0, 1))
    assert planted["next"] == max(row["next"] for row in rows) > 0.5
    assert 0 <= planted["entropy"] < min(row["entropy"] for row in rows if row is not planted)
    plan = Plan.load(found.path / "plan.toml")
    assert [guide.pattern for guide in plan.guides] == found.counts["proposed"]


def test_no_more_patterns_are_proposed_than_a_layer_has_heads(
    scored: tuple[Store, str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_learned(monkeypatch)
    store, _, data, _ = scored
    plan = written(
        tmp_path, "plan.toml", PLANTED.replace("heads = [3]", "heads = [0]").replace("heads = [1]", "heads = [0]")
    )
    model = finetunings.train(store, store.load(data), plan=plan, layers=4, heads=1, steps=2).reference
    config = discover_score.Config(deviations=0.1)
    found = discover_score.run(model, data, config, store=store).artifact
    free = [c for c in found.counts["candidates"] if not c["covered_by"] and c["pattern"] not in SINKS]
    assert len(free) > len(found.counts["proposed"]) == 1
    command = discover_score.STAGE.command
    assert command is not None and command.show is not None
    assert {row[-1] for row in command.show(found, config).rows if row[0] in {c["pattern"] for c in free[1:]}} == {
        "not proposed: a layer has no further head"
    }
    accepted = discover_accept.run(found.reference, discover_accept.Config(), store=store).artifact
    assert len(Plan.load(accepted.path / "plan.toml").guides) == 1


def test_a_plan_may_be_called_by_the_name_of_its_findings(
    scored: tuple[Store, str, str, str], guide: Callable[..., Any]
) -> None:
    store, model, data, reference = scored
    here = ("--store", store.root)
    done = guide("discover", "accept", reference, "--patterns", "next", "--name", "found", *here)
    assert done.code == 0 and " --plan found@1 " in done.err, done.err
    shown = guide("plan", "show", "found", "--model", model, *here)
    assert shown.code == 0 and "next" in shown.out and "fix" in shown.out, shown.err
    assert (
        guide("plan", "diff", "found", store.load("found").path / "plan.toml", "--fail-if-different", *here).code == 0
    )
    for command in (("plan", "show", data), ("finetune", data, "--init", model, "--plan", data)):
        done = guide(*command, *here)
        assert done.code == 2 and "is an artifact of kind corpus, which is no plan" in done.err, done.err
    done = guide("plan", "show", "nowhere", *here)
    assert done.code == 2 and "there is no plan 'nowhere'" in done.err


def test_what_two_patterns_explain_together_is_no_third_one() -> None:
    class Halves(Relevance):
        def of(self, name: str, half: object = None) -> dict[Site, torch.Tensor]:
            shares = {"next": (0, 4), "previous": (1, 4), "window": (0, 3), "period": (2, 4)}
            values = torch.full((20,), 0.1)
            head, most = shares[name]
            values[head] = most / 5
            if name == "window":
                values[1] = 0.6
            return {Site("encoder", "self", 0, 20, "layer"): values}

        def by_chance(self, name: str) -> float:
            return 0.2 if name == "window" else 0.1

    found = {each.pattern: each for each in candidates(Halves(["window", "next", "previous", "period"]), deviations=2)}
    assert found["window"].heads == ((0, 0), (0, 1)) and found["window"].covered_by == "next and previous"
    assert [each.pattern for each in chosen(list(found.values()))] == ["next", "previous", "period"]
    seen = candidates(Halves(["window", "next", "period"]), deviations=2, guided=[(0, 0)])
    assert [(each.pattern, each.guided, each.covered_by) for each in seen] == [
        ("next", 1, ""),
        ("period", 0, ""),
        ("window", 1, ""),
    ]
    assert [each.pattern for each in chosen(seen)] == ["period", "window"], "head 1 looks there of itself"


def test_what_the_plan_of_a_model_does_is_not_proposed(scored: tuple[Store, str, str, str]) -> None:
    store, model, data, learned = scored
    config = discover_score.Config(limit=12)
    found = discover_score.run(model, data, config, store=store).artifact
    by_name = {each["pattern"]: each for each in found.counts["candidates"]}
    assert by_name["next"]["heads"] == [[0, 1]] and by_name["next"]["guided"] == 1
    assert "next" not in found.counts["proposed"] and "next" in store.load(learned).counts["proposed"]
    command = discover_score.STAGE.command
    assert command is not None and command.show is not None
    notes = {row[0]: row[-1] for row in command.show(found, config).rows}
    assert notes["next"] == notes["window"] == "not proposed: the plan of the model makes these heads look there"


def test_findings_become_a_plan_that_trains(scored: tuple[Store, str, str, str], tmp_path: Path) -> None:
    store, model, data, reference = scored
    made = discover_accept.run(reference, discover_accept.Config(patterns=["next"], into="found"), store=store).artifact
    told = json.loads((made.path / "findings.json").read_text())
    assert told["accepted"][0]["pattern"] == "next" and told["accepted"][0]["heads"] == [[0, 1]]
    assert told["accepted"][0]["evidence"]["lift"] > 3
    assert told["of"]["model"]["recipe"].startswith(model.partition("/")[2])
    (guide,) = Plan.load(made.path / "plan.toml").guides
    assert (guide.mechanism, guide.layers, guide.heads) == ("fix", (0,), (1,))
    again = finetunings.train(store, store.load(data), plan=made.reference, layers=4, heads=4, steps=1).artifact
    assert again.read("plan.toml") == made.read("plan.toml")
    by_file = finetunings.train(store, store.load(data), plan=str(made.path / "plan.toml"), layers=4, heads=4, steps=1)
    assert by_file.artifact.recipe == again.recipe
    own = discover_accept.Config(heads=["1-0=distance == 2", "3-2=distance == 2", "0-0=previous"], mechanism="bias")
    plan = Plan.load(discover_accept.run(reference, own, store=store).artifact.path / "plan.toml")
    assert [(g.layers, g.heads, g.mechanism) for g in plan.guides] == [
        ((1,), (0,), "bias"),
        ((3,), (2,), "bias"),
        ((0,), (0,), "bias"),
    ]
    assert plan.guides[0].pattern == {"where": "distance == 2"}
    added = discover_accept.run(reference, discover_accept.Config(patterns=["next"], pal=True), store=store).artifact
    assert Plan.load(added.path / "plan.toml").pal is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": ["next"]}, "not LAYER-HEAD=PATTERN"),
        ({"patterns": ["nxt"]}, "unknown pattern 'nxt'"),
        ({"patterns": ["period"], "into": "found"}, "no head stands out on period"),
        ({"heads": ["0-0=distance ="]}, "not expected|something is missing"),
        ({"heads": ["99-0=next"]}, "layer 99 does not exist: the model has layers 0 to 3"),
        ({"heads": ["0-4=next"]}, "head 4 does not exist: the model has heads 0 to 3"),
        ({"heads": ["1-2=next", "1-2=previous"]}, "head 1-2 has two patterns, next and previous"),
        ({"patterns": ["next", "previous", "self", "first", "window"]}, "head 4 does not exist"),
        ({"heads": ["0-0=next"], "patterns": ["previous"]}, "--patterns beside --heads"),
        ({"heads": ["0-0=next"], "most": 1}, "--most beside --heads"),
        ({"heads": ["0-0=next"], "into": "least-important"}, "--into least-important beside --heads"),
    ],
)
def test_what_cannot_be_accepted_is_refused(
    scored: tuple[Store, str, str, str], settings: dict[str, object], message: str
) -> None:
    store, _, _, reference = scored
    with pytest.raises(InputError, match=message):
        discover_accept.run(reference, discover_accept.Config(**settings), store=store)  # type: ignore[arg-type]


def test_a_head_takes_the_first_of_its_patterns(scored: tuple[Store, str, str, str], guide: Callable[..., Any]) -> None:
    store, model, _, reference = scored
    known = {each["pattern"]: each["heads"] for each in store.load(reference).counts["candidates"]}
    assert known["window"] == known["next"] == [[0, 1]], "otherwise this tests nothing"
    both = discover_accept.Config(patterns=["next", "window"], into="found")
    made = discover_accept.run(reference, both, store=store).artifact
    assert [guide.pattern for guide in Plan.load(made.path / "plan.toml").guides] == ["next"]
    (warning,) = made.manifest["warnings"]
    assert warning.startswith("window is left out")
    done = guide("plan", "check", made.path / "plan.toml", "--model", store.load(model).path)
    assert done.code == 0, done.err


def test_a_folder_and_a_text_file_are_enough(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    folder = saved(tmp_path / "model", matching(3, 4))
    text = written(tmp_path, "text.txt", "anna saw anna . the dog saw the man .\n" * 12)
    config = discover_score.Config(patterns=["matching_token and not self", "next"], sequence_length=24)
    found = discover_score.run(folder, text, config, store=store).artifact
    assert found.counts["task"] is None and any("importance" in each for each in found.manifest["warnings"])
    assert found.counts["sequences"] > 1
    accept = discover_accept.Config(heads=["0-0=next"])
    made = discover_accept.run(found.reference, accept, store=store).artifact
    sequences = store.load_input(found, "sequences").reference
    assert command_for(made, store) == (f"guide pretrain {sequences} --plan {made.reference} --init {folder}"), (
        "running text has no labels to fine-tune on"
    )
    accept = discover_accept.Config(patterns=["dependency"])
    made = discover_accept.run(found.reference, accept, store=store).artifact
    assert " --masks MASKS --init " in command_for(made, store), "no masks were given"
    with pytest.raises(UnknownName):
        discover_score.run(folder, text, discover_score.Config(patterns=["nothing_like_it"]), store=store)


def test_the_command_keeps_how_the_model_was_trained(scored: tuple[Store, str, str, str]) -> None:
    store, _, data, _ = scored
    settings: dict[str, Any] = {"select": "accuracy", "patience": 3, "bucket": True, "schedule": "constant", "steps": 2}
    model = finetunings.train(store, store.load(data), layers=4, heads=4, **settings).reference
    found = discover_score.run(model, data, discover_score.Config(limit=12), store=store).reference
    made = discover_accept.run(found, discover_accept.Config(heads=["0-0=next"]), store=store).artifact
    command = command_for(made, store)
    assert (
        command.endswith(" --schedule constant --select accuracy --patience 3 --bucket")
        and "--negatives" not in command
    )


def test_a_pattern_of_syntax_needs_a_parser_to_train(scored: tuple[Store, str, str, str]) -> None:
    store, _, data, reference = scored
    made = discover_accept.run(reference, discover_accept.Config(patterns=["dependency"]), store=store).artifact
    command = command_for(made, store)
    assert command.startswith(f"guide finetune {data} --plan ") and " --parser PARSER " in command


def test_a_decoder_is_trained_further_as_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    trained = trainings.train(store, trainings.sequences(store), layers=1, heads=2, steps=1, objective="clm")
    folder = tmp_path / "folder"
    shutil.copytree(trained.artifact.path, folder, ignore=shutil.ignore_patterns("artifact.json"))
    text = written(tmp_path, "text.txt", "the dog saw the man .\n" * 12)
    found = discover_score.run(str(folder), text, discover_score.Config(sequence_length=16), store=store).artifact
    made = discover_accept.run(found.reference, discover_accept.Config(heads=["0-0=previous"]), store=store).artifact
    assert command_for(made, store).endswith(f"--init {folder} --objective clm")


def test_few_heads_have_no_candidates(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    data = trainings.sequences(store)
    model = trainings.train(store, data, layers=1, heads=2, steps=1).reference
    found = discover_score.run(model, data.reference, discover_score.Config(), store=store).artifact
    assert found.counts["candidates"] == [] or found.counts["proposed"] == []
    assert not (found.path / "plan.toml").exists() and found.counts["task"] == "masked-lm"
    with pytest.raises(InputError, match="nothing to accept") as raised:
        discover_accept.run(found.reference, discover_accept.Config(), store=store)
    assert raised.value.hint is not None and "--deviations 2 is less strict" in raised.value.hint
    strict = discover_score.run(model, data.reference, discover_score.Config(deviations=1), store=store).reference
    with pytest.raises(InputError, match="nothing to accept") as raised:
        discover_accept.run(strict, discover_accept.Config(), store=store)
    assert raised.value.hint == "--patterns NAME injects one anyway"


@pytest.mark.parametrize("into", ["each-layer", "least-important"])
def test_the_command_that_is_shown_trains_a_model_of_the_same_shape(
    scored: tuple[Store, str, str, str], guide: Callable[..., Any], into: str
) -> None:
    store, model, _, reference = scored
    told = guide("discover", "accept", reference, "--patterns", "previous", "--into", into, "--store", store.root)
    (line,) = [line for line in told.err.splitlines() if line.startswith("next: ")]
    assert ("--scores" in line) == (into == "least-important")
    done = guide(*shlex.split(line)[2:])
    assert done.code == 0, done.err
    one, other = (store.load(each).manifest["config"] for each in (model, done.out.strip()))
    same = ("architecture", "layers", "heads", "hidden", "ffn", "tokenizer", "learning_rate", "epochs", "seed")
    assert [other[name] for name in same] == [one[name] for name in same]
    assert other["epochs"] is not None or other["steps"] == one["steps"]


def test_a_pretrained_model_is_trained_again_in_its_own_shape(tmp_path: Path, guide: Callable[..., Any]) -> None:
    store = Store(tmp_path / "artifacts")
    data = trainings.sequences(store)
    model = trainings.train(store, data, layers=3, heads=2, steps=1).reference
    found = discover_score.run(model, data.reference, discover_score.Config(), store=store).artifact
    made = discover_accept.run(found.reference, discover_accept.Config(heads=["2-1=next"]), store=store).artifact
    done = guide(*shlex.split(command_for(made, store))[1:], "--store", store.root)
    assert done.code == 0, done.err
    assert store.load(done.out.strip()).manifest["config"]["layers"] == 3
