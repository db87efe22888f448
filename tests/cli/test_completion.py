"""Shell completion offers what a parameter takes, quickly, and never fails."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli import completion
from pipelines.storage.store import Store
from tests.cli.test_help import COMMANDS, HEAVY
from tests.runs import going, metrics
from tests.tiny import OTHER, TINY, make

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def complete(guide, monkeypatch, capsys):
    """What bash would offer for the last word of a command line, in a store with ``wiki``, ``kid`` and a run ``half``."""
    store = Store(Path("artifacts"))
    make(store, name="wiki").artifact.close()
    make(store, stage=OTHER, name="kid").artifact.close()
    store.begin("model", going(store, metrics([1.0])).removeprefix("model/"), "half")

    def call(line: str) -> set[str]:
        words = re.findall(r"[:@=]|[^ :@=]+", line) + [""] * line.endswith(" ")  # as bash divides it
        monkeypatch.setenv("_GUIDE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        answer = guide()
        assert (answer.code, answer.err) == (0, ""), answer.err
        return set(answer.out.split())

    return call


def test_artifacts_are_offered_by_name_and_id(complete):
    offered = complete("guide show ")
    assert {"wiki", "wiki@1", "kid", "half"} <= offered
    assert sum(word.startswith(("tiny/", "other/", "model/")) for word in offered) == 3
    assert complete("guide show w") == {"wiki", "wiki@1"}
    assert "half" not in complete("guide export ")


def test_an_argument_for_one_kind_is_offered_that_kind(complete):
    make(
        Store(Path("artifacts")), stage=type(OTHER)("build-corpus", "corpus", 1, OTHER.config, OTHER.build), name="text"
    )
    offered = complete("guide build-tokenizer ")
    assert {"text", "text@1"} <= offered and not {"wiki", "kid"} & offered
    assert {"half"} <= complete("guide compare ")
    assert complete("guide rename ") == {"wiki", "kid", "text"}
    assert complete("guide ls --kind ") == {"corpus", "model", "other", "tiny"}


def test_presets_and_patterns_are_offered(complete):
    from guidance.patterns import PATTERNS
    from guidance.plan import presets

    assert complete("guide patterns show ") == set(PATTERNS)
    assert complete("guide pretrain x --plan ") == {f"preset:{name}" for name in presets()}
    assert complete("guide plan show ") == {f"preset:{name}" for name in presets()}
    assert complete("guide plan new --preset ro") == {"roles", "roles-unparsed"}


DIVIDED = {
    "guide show wiki@": {"1"},
    "guide compare wiki@1 half": {"half"},
    "guide pretrain x --plan preset:neighbours-": {"neighbours-causal", "neighbours-fixed"},
    "guide pretrain x --plan=preset:neighbours-": {"neighbours-causal", "neighbours-fixed"},
    "guide pretrain x --grid learning-rate=1 --plan preset:neighbours-": {"neighbours-causal", "neighbours-fixed"},
    "guide plan diff preset:ag preset:neighbours-": {"neighbours-causal", "neighbours-fixed"},
}


def test_words_that_bash_divides_are_completed_from_where_it_goes_on(complete):
    assert {line: complete(line) for line in DIVIDED} == DIVIDED


COMPLETED = {
    "guide compare ": ["half", "plain", "reviews-search", "score"],
    "guide finetune ": ["data"],
    "guide search x --along ": ["plain"],
    "guide glue ": ["score"],
    "guide discover accept ": ["seen"],
    "guide discover serve ": ["plain"],
}


def test_artifacts_of_the_right_kind_are_offered(complete):
    stages = {
        "search": "reviews-search",
        "evaluation": "score",
        "model": "plain",
        "discovery": "seen",
        "corpus": "data",
    }
    for kind, name in stages.items():
        make(Store(Path("artifacts")), stage=dataclasses.replace(TINY, kind=kind), name=name).artifact.close()
    offered = {line: {word for word in complete(line) if "@" not in word and "/" not in word} for line in COMPLETED}
    assert offered == {line: set(found) for line, found in COMPLETED.items()}


def test_the_store_of_the_line_the_environment_or_the_file_counts(complete, monkeypatch):
    make(Store(Path("second")), name="elsewhere").artifact.close()
    for line in ("guide --store second show e", "guide show --store second e"):
        assert complete(line) == {"elsewhere", "elsewhere@1"}
    Path("guide.toml").write_text('store = "second"\n')
    assert "elsewhere" in complete("guide show ")
    monkeypatch.setenv("GUIDE_STORE", "artifacts")
    assert "wiki" in complete("guide show ")


def test_completion_never_fails(complete, monkeypatch):
    Path("guide.toml").write_text("broken")
    assert "wiki" in complete("guide show ")
    monkeypatch.setenv("GUIDE_STORE", "no\udce9where")
    assert complete("guide show ") == set()


def test_everything_offered_belongs_to_a_parameter():
    parameters = {p.name for command in COMMANDS.values() for p in command.params}
    assert set(completion.SETTINGS) <= parameters


REFERENCES = ("corpus", "tokenizer", "sequences", "model", "data", "dataset", "masks", "reference", "references")


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_that_take_artifacts_are_completed(command):
    for parameter in COMMANDS[command].params:
        if parameter.param_type_name == "argument" and parameter.name in REFERENCES:
            assert parameter._custom_shell_complete is not None, parameter.name


def test_completion_imports_nothing_heavy(tmp_path):
    script = "from cli.main import run; run([]); import sys; print(*sys.modules, sep='\\n', file=sys.stderr)"
    for line in ("guide patterns show ", "guide pretrain x --plan ", "guide show "):
        words = {
            "_GUIDE_COMPLETE": "complete_bash",
            "COMP_WORDS": line.replace(" ", "\n"),
            "COMP_CWORD": str(line.count(" ")),
        }
        result = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | words | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert set(result.stderr.split()) & HEAVY == set(), line
