"""A dry run checks a command, says what it would make, and writes nothing."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from pipelines.engine.declaration import Stage
from pipelines.stages import STAGES, corpus
from pipelines.storage.dry import DryArtifact, DryStore, NotYet
from tests.cli.test_help import COMMANDS
from tests.trainings import one_thread as one_thread

Guide = Callable[..., Any]

STAGES_BY_COMMAND: dict[str, Stage[Any, Any]] = {
    stage.command.name: stage for stage in map(resolve_name, STAGES) if stage.command
}
ALSO = {"evaluate": ["dry:model", "dry:sequences"], "search": ["dry:corpus"], "discover accept": ["dry:discovery"]}
"""Dry arguments of commands that no declaration of a stage describes."""

SETTINGS = {"build-deps": ["--parser", "conllu:text.txt"]}
SHAPE = ["--layers", 2, "--hidden", 16, "--heads", 4, "--batch-size", 4]
SMALL = [*SHAPE, "--steps", 4]


WITHOUT = (
    "attention, convert, cooccur export, cooccur show, discover export, discover serve, doctor, export, "
    "fill, generate, glue, import, lineage, ls, masks export, masks show, models, patterns list, "
    "patterns show, plan check, plan diff, plan new, plan show, predict, rename, rm, show, translate, "
    "verify"
)
"""Commands that make no artifact by a stage, and have no dry run."""


def tree(folder: Path) -> dict[str, str]:
    """The digest of every file below a folder, and all folders."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
    }


@pytest.fixture
def dry(guide: Guide, tmp_path: Path) -> Guide:
    """Runs a command line with --dry-run, and makes sure that it changed no file; returns what it printed to stdout."""

    def call(*arguments: object) -> str:
        before = tree(tmp_path)
        answer = guide(*arguments, "--dry-run")
        assert answer.code == 0, answer.err
        assert tree(tmp_path) == before, arguments
        assert answer.err.count("dry run: ") == 1
        return str(answer.out).removesuffix("\n")

    return call


def with_dry_inputs(stage: Stage[Any, Any]) -> list[str]:
    """The arguments of a stage: ``dry:KIND`` for artifacts, ``text.txt`` for files."""
    arguments = []
    for take in (take for take in stage.takes.values() if not (take.optional and take.option)):
        arguments.append(f"dry:{take.kinds[0]}" if take.kinds else "text.txt")
    return arguments


def test_every_command_that_makes_an_artifact_has_a_dry_run():
    flags = {name: {p.name for p in each.params} for name, each in COMMANDS.items() if not hasattr(each, "commands")}
    assert ", ".join(sorted(name for name in flags if "dry_run" not in flags[name])) == WITHOUT
    assert {name for name in flags if {"force", "wait"} <= flags[name]} - {"quickstart"} == {*STAGES_BY_COMMAND, *ALSO}


@pytest.mark.parametrize("name", [*STAGES_BY_COMMAND, *ALSO])
def test_each_command_takes_dry_inputs_says_what_it_would_make_and_writes_nothing(name, dry, tmp_path):
    (tmp_path / "text.txt").write_text("1\tGo\tgo\tVERB\t_\t_\t0\troot\t_\t_\n\n")
    if name in ALSO:
        arguments, kind = ALSO[name], {"discover accept": "findings", "evaluate": "evaluation"}.get(name, name)
    else:
        arguments, kind = with_dry_inputs(STAGES_BY_COMMAND[name]), STAGES_BY_COMMAND[name].kind
    arguments = [*name.split(), *arguments, *SETTINGS.get(name, ())]
    assert dry(*arguments) == f"dry:{kind}"
    facts = json.loads(dry(*arguments, "--json"))
    is_known = not any("dry:" in argument for argument in arguments)
    assert facts["kind"] == kind
    assert not facts["exists"] and facts["artifact"] is None and facts["estimate_s"] is None
    assert (facts["key"] is not None) == is_known
    assert not (tmp_path / "artifacts").exists()


def test_a_dry_run_prints_what_the_real_run_prints_once_there_is_an_artifact(dry, guide, tmp_path):
    (tmp_path / "text.txt").write_text(
        "".join(f"The number {n} is followed by the number {n + 1} .\n" for n in range(200))
    )
    (tmp_path / "labels.csv").write_text(
        "text,label\n" + "".join(f"fine number {n},good\ndull number {n},bad\n" for n in range(30))
    )

    def both(*arguments: object) -> str:
        """The reference that a real run prints, between two dry runs."""
        kind = json.loads(dry(*arguments, "--json"))["kind"]
        assert dry(*arguments) == f"dry:{kind}"
        made = guide(*arguments)
        assert made.code == 0, made.err
        reference = made.out.strip()
        assert dry(*arguments) == dry(*arguments, "--force") == reference
        facts = json.loads(dry(*arguments, "--json"))
        assert facts["exists"] and facts["artifact"] == facts["key"] == reference
        return str(reference)

    corpus = both("build-corpus", "text.txt", "--documents", "line")
    tokenizer = both("build-tokenizer", corpus, "--vocab-size", 300, "--name", "bpe")
    assert dry("build-idf", corpus, "--shard", "1/2") == "dry:idf"
    sequences = both("build-sequences", corpus, tokenizer, "--max-length", 16)
    masks = both("build-masks", sequences, "--idf", both("build-idf", corpus, "--jobs", 1))
    plain = both("pretrain", sequences, *SMALL)
    both("pretrain", sequences, *SMALL, "--masks", masks, "--plan", "preset:roles-unparsed")
    both("evaluate", plain, sequences, "--split", "valid")
    both("probe", "sinks", plain, sequences)
    found = both("discover", "score", plain, sequences, "--patterns", "previous", "--deviations", 0.1)
    both("discover", "accept", found, "--patterns", "previous", "--to", "plan.toml")
    dataset = both("build-dataset", "labels.csv", "--test-fraction", 0.2)
    tuned = both("finetune", dataset, "--init", plain, "--steps", 2)
    both("evaluate", tuned, dataset)
    both("search", dataset, "--init", plain, "--steps", 2, "--grid", "learning-rate=1e-3,1e-4")


WRONG = {
    "a setting out of range": ["pretrain", "dry:sequences", "--steps", 0],
    "settings that exclude each other": [
        "build-dataset",
        "labels.csv",
        "--valid",
        "labels.csv",
        "--valid-fraction",
        0.1,
    ],
    "a file that is not there": ["build-corpus", "nowhere.txt"],
    "an artifact that is not there": ["build-tokenizer", "nowhere"],
    "a version that is not there": ["build-tokenizer", "text@7"],
    "an artifact of another kind": ["pretrain", "text"],
    "a plan that is not there": ["pretrain", "{sequences}", "--plan", "preset:rolez"],
    "a plan that the model has no layer for": ["pretrain", "{sequences}", "--plan", "deep.toml", *SMALL],
    "a plan that needs masks": ["pretrain", "{sequences}", "--plan", "preset:roles"],
    "a split without sequences": ["probe", "sinks", "{model}", "{sequences}", "--split", "test"],
    "a name of another kind": ["build-idf", "text", "--name", "text"],
    "a name that is none": ["build-idf", "text", "--name", "No Name"],
    "a share that is to be named": ["build-idf", "text", "--shard", "1/2", "--name", "rare"],
    "a run that cannot be continued": ["pretrain", "{sequences}", "--resume", "model/12345678"],
    "a store that is a file": ["build-corpus", "text.txt", "--store", "text.txt"],
    "a metric that is none": ["evaluate", "{model}", "{sequences}", "--fail-under", "accuracy"],
    "a head that the model does not have": ["discover", "accept", "{discovery}", "--heads", "2-5=next"],
    "a pattern that no head shows": ["discover", "accept", "{discovery}", "--patterns", "next", "--into", "found"],
    "a grid of nothing": ["search", "{dataset}", "--grid", "colour=red,green"],
}


@pytest.fixture
def made(guide, tmp_path):
    """Runs a command line where artifacts exist: a corpus named ``text``, and those that ``{sequences}``, ``{model}``,
    ``{discovery}`` and ``{dataset}`` stand for."""
    (tmp_path / "text.txt").write_text("".join(f"The number {n} is followed by {n + 1} .\n" for n in range(200)))
    (tmp_path / "labels.csv").write_text("text,label\n" + "fine number,good\ndull number,bad\n" * 10)
    (tmp_path / "deep.toml").write_text(
        '[[guide]]\npattern = "previous"\nmechanism = "fix"\nlayers = [7]\nheads = [0]\n'
    )
    corpus = guide("build-corpus", "text.txt", "--documents", "line", "--name", "text").out.strip()
    tokenizer = guide("build-tokenizer", corpus, "--vocab-size", 300).out.strip()
    sequences = guide("build-sequences", corpus, tokenizer, "--max-length", 16).out.strip()
    known = {"sequences": sequences, "model": guide("pretrain", sequences, *SMALL).out.strip()}
    score = ("discover", "score", known["model"], sequences, "--patterns", "previous", "--no-importance")
    known["discovery"] = guide(*score).out.strip()
    known["dataset"] = guide("build-dataset", "labels.csv").out.strip()
    return lambda *arguments: guide(*(str(argument).format(**known) for argument in arguments))


def test_what_is_wrong_is_told_as_by_the_real_run(made, tmp_path):
    for problem, arguments in WRONG.items():
        before = tree(tmp_path)
        rehearsed = made(*arguments, "--dry-run")
        assert rehearsed.code == 2 and rehearsed.out == "", problem
        assert tree(tmp_path) == before, problem
        real = made(*arguments)
        assert (real.code, real.err) == (2, rehearsed.err), problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrain", "dry:corpus"], "'dry:corpus' is an artifact of kind corpus; expected: sequences"),
        (["pretrain", "dry:sequences", "--masks", "dry:idf"], "of kind idf; expected: masks"),
        (["pretrain", "dry:sequences", "--init", "dry:idf"], "of kind idf; expected: model"),
        (["pretrain", "dry:sequences", "--plan", "preset:mcmisp-bert"], "needs the table cooccurrence"),
        (["pretrain", "dry:sequences", "--init", "dry:model", "--plan", "none.toml"], "there is no plan 'none.toml'"),
        (["pretrain", "dry:sequences", "--masks", "dry:masks", "--masks", "dry:masks"], "2 masks for 1 sequences"),
        (["finetune", "dry:model"], "of kind model; expected: a dataset"),
        (["finetune", "dry:corpus", "--plan", "preset:rolez"], "unknown preset 'rolez'"),
        (["finetune", "dry:corpus", "--init", "dry:tokenizer", "--task", "classification"], "expected: model"),
        (["build-sequences", "dry:corpus", "dry:corpus"], "of kind corpus; expected: tokenizer"),
        (["build-masks", "dry:sequences", "--idf", "dry:deps"], "of kind deps; expected: idf"),
        (["evaluate", "dry:model", "dry:tokenizer"], "of kind tokenizer; expected: sequences"),
        (["discover", "accept", "dry:discovery", "--patterns", "nxt"], "nxt"),
        (["discover", "accept", "dry:discovery", "--heads", "2-5=nxt"], "nxt"),
        (["probe", "sinks", "dry:corpus", "dry:sequences"], "of kind corpus; expected: model"),
        (["build-corpus", "dry:corpus"], "dry:corpus"),
        (["build-tokenizer", "dry:"], "'dry:'"),
        (["build-idf", "dry:corpus", "--name", "No Name"], "No Name"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_is_wrong_beside_dry_inputs_is_told(guide, tmp_path, arguments, message):
    answer = guide(*arguments, "--dry-run")
    assert answer.code == 2, answer
    assert message in answer.err.splitlines()[0]
    assert tree(tmp_path) == {}


def test_only_a_dry_run_takes_a_dry_input(guide, tmp_path):
    for arguments in (["build-tokenizer", "dry:corpus"], ["pretrain", "dry:sequences"], ["show", "dry:model"]):
        answer = guide(*arguments)
        assert answer.code == 2
        assert "is what a dry run says of an artifact that does not exist yet" in answer.err
    assert tree(tmp_path) == {}


def test_a_model_of_real_and_dry_inputs_is_checked_as_far_as_it_can_be(made):
    for arguments, message in (
        (["pretrain", "{sequences}", "--masks", "dry:masks", "--cooccur", "text"], "expected: cooccur"),
        (["build-sequences", "text", "dry:model", "--target-tokenizer", "dry:tokenizer"], "--packing pairs"),
        (["finetune", "text", "--init", "dry:model"], "is running text, not examples of a task"),
        (["finetune", "{dataset}", "--init", "dry:model", "--select", "bleu"], "--select bleu"),
    ):
        answer = made(*arguments, "--dry-run")
        assert answer.code == 2 and message in answer.err, (arguments, answer.err)
    assert made("build-sequences", "text", "dry:model", "--dry-run").out == "dry:sequences\n"
    assert made("finetune", "{dataset}", "--init", "{model}", "--dry-run", "--json").code == 0


def test_a_dry_comparison_checks_what_is_compared(made, guide):
    assert made("compare", "{model}", "dry:model", "--dry-run").out == "dry:report\n"
    assert json.loads(made("compare", "dry:search", "dry:search", "--dry-run", "--json").out)["kind"] == "report"
    for arguments, message in (
        (["{model}", "dry:evaluation"], "'dry:evaluation' is of kind evaluation; expected: model"),
        (["{sequences}"], "expected: model or evaluation or search"),
        (["{model}", "nowhere"], "no artifact 'nowhere'"),
    ):
        answer = made("compare", *arguments, "--dry-run")
        assert answer.code == 2 and message in answer.err


def test_the_dry_run_of_a_command_of_its_own_is_as_before(guide):
    assert guide("build-corpus", "text.txt", "--dry-run").code == 2
    Path("text.txt").write_text("The dog ran. It barked.\n" * 20)
    guide("build-corpus", "text.txt")
    Path("artifacts/.tmp/left").mkdir()
    assert guide("gc", "--dry-run").out.splitlines()[0].endswith("left")
    assert Path("artifacts/.tmp/left").exists()


def test_the_steps_that_a_training_has_left_are_counted_and_timed_where_a_step_is_cheap(made, monkeypatch):
    train = ["pretrain", "{sequences}", *SHAPE, "--seed", 3]

    def told(*more: object) -> tuple[int | None, float | None]:
        answer = made(*train, *more, "--dry-run", "--json")
        facts = json.loads(answer.out)
        steps, seconds = facts["steps"], facts["estimate_s"]
        assert f"{steps} step" in answer.err and ("(h:mm:ss)" in answer.err) == (seconds is not None)
        return steps, seconds

    steps, seconds = told("--steps", 4)
    assert steps == 4 and seconds is not None and 0 < seconds < 60
    steps, seconds = told("--epochs", 2)
    assert steps is not None and steps > 4
    assert made(*train, "--steps", 4, "--max-time", 1e-9).code != 0
    assert told("--steps", 4)[0] == 3
    assert told("--steps", 4, "--force")[0] == 4
    monkeypatch.setattr("pipelines.training.rehearsal.CHEAP", 0)
    assert told("--steps", 4) == (3, None)
    dry = json.loads(made("pretrain", "dry:sequences", "--steps", 90, "--dry-run", "--json").out)
    assert (dry["steps"], dry["estimate_s"]) == (90, None)
    assert "steps" not in json.loads(made("pretrain", "dry:sequences", "--epochs", 2, "--dry-run", "--json").out)


def test_what_a_pipe_holds_is_read_to_know_the_artifact(store, tmp_path):
    text, config = b"The dog ran. It barked.\n" * 20, corpus.Config(format="text", executor="dask")
    dry = corpus.run(["-"], config, store=DryStore(store.root), stdin=io.BytesIO(text))
    assert tree(tmp_path) == {} and dry is not None and dry.reference == "dry:corpus"
    real = corpus.run(["-"], corpus.Config(format="text"), store=store, stdin=io.BytesIO(text))
    again = corpus.run(["-"], config, store=DryStore(store.root), stdin=io.BytesIO(text))
    assert real is not None and again is not None and again.reused
    assert dry.artifact.recipe == real.artifact.recipe == again.artifact.recipe


def test_a_dry_artifact_tells_its_kind_and_nothing_else():
    artifact = DryArtifact("corpus")
    assert (artifact.kind, artifact.reference) == ("corpus", "dry:corpus")
    for ask in (
        lambda: artifact.path,
        lambda: artifact.counts,
        lambda: artifact.content,
        lambda: artifact.recipe,
        lambda: artifact.describe(),
        lambda: artifact.read("blocks.parquet"),
    ):
        with pytest.raises(NotYet, match="dry:corpus"):
            ask()
    assert not hasattr(artifact, "nonsense")


def test_the_dry_run_of_quickstart_ends_where_its_text_is_not_yet_a_corpus(dry, tmp_path):
    (tmp_path / "text.txt").write_text("The dog ran. It barked.\n" * 20)
    assert dry("quickstart", "--corpus", "text.txt") == "dry:report"
