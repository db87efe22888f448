"""Every command has help, which is fast and ends with examples."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer.main

from cli.app import FAMILIES, GROUPS
from cli.main import load_app


def _commands(group, before=""):
    """All commands below a group, families included, with their full names."""
    for word, command in group.commands.items():
        yield before + word, command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{word} ")


COMMANDS = dict(_commands(typer.main.get_command(load_app())))
HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "spacy",
    "stanza",
    "pyarrow",
    "numpy",
    "matplotlib",
    "accelerate",
    "rich",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_ends_with_examples(guide, name):
    answer = guide(*name.split(), "--help")
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.rstrip().splitlines()
    examples = lines[lines.index("Examples:") + 1 :]
    assert examples
    assert all(line.startswith("  $ ") for line in examples)
    assert any(f"guide {name}" in line for line in examples)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_described(name):
    command = COMMANDS[name]
    assert command.help
    assert command.group in GROUPS
    assert [p.name for p in command.params if not p.help] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_descriptions_of_options_are_sentences_and_no_questions(name):
    for text in [parameter.help.split("  [")[0] for parameter in COMMANDS[name].params]:
        first = text.split()[0]
        assert first[0].isupper() or not first.isalpha(), text
        assert first not in ("What", "Which", "Where", "How", "When", "Whether"), text
        assert text.endswith((".", "?")), text


@pytest.mark.parametrize("name", COMMANDS)
def test_shared_options_are_accepted_after_every_command(name):
    flags = {flag for parameter in COMMANDS[name].params for flag in parameter.opts}
    assert {"--store", "--config", "--json", "--quiet", "-q", "--verbose", "-v", "--debug", "--no-color"} <= flags


@pytest.mark.parametrize("columns", ["1", "20", "100000"])
def test_help_works_at_any_terminal_width(guide, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for arguments in (["--help"], ["build-corpus", "--help"], ["ls"]):
        assert guide(*arguments).code == 0


@pytest.mark.parametrize("arguments", [[], *([name] for name in FAMILIES)])
def test_summaries_of_commands_are_whole_and_fit_80_columns(guide, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    lines = guide(*arguments, "--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.rstrip().endswith(("…", "...")) and "Usage" not in line]


def test_help_imports_nothing_heavy():
    loaded = _loaded("from cli.main import run; run(['--help'])")
    assert "cli.app" in loaded
    assert loaded & HEAVY == set()


def test_help_imports_no_libraries_but_pydantic_and_typer():
    ours = _loaded("from cli.main import run; run(['--help'])")
    theirs = _loaded("import pydantic.fields, pydantic.functional_validators, pydantic.types, typer.main")
    libraries = {name.partition(".")[0] for name in ours - theirs} - set(sys.stdlib_module_names)
    assert libraries == {"cli", "pipelines", "guidance", "pydantic", "typer"}


def _loaded(statement: str) -> set[str]:
    """The modules that a fresh interpreter has imported after a statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n', file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(result.stderr.split())


def test_the_version_is_one_line(guide):
    answer = guide("--version")
    assert answer.code == 0
    assert answer.out.startswith("guide ")


def test_no_command_is_a_usage_error_with_a_hint(guide):
    answer = guide()
    assert answer.code == 2
    assert "guide --help" in answer.err


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_word_of_a_family_alone_lists_its_commands_and_is_a_usage_error(guide, name):
    answer = guide(name)
    assert answer.code == 2
    assert answer.out == ""
    assert "Commands:" in answer.err
    assert f"`guide {name} --help`" in answer.err


def test_a_mistyped_second_word_gets_a_suggestion(guide):
    answer = guide("plan", "chekc")
    assert answer.code == 2
    assert "Did you mean 'check'" in answer.err


def test_a_mistyped_command_gets_a_suggestion(guide):
    answer = guide("build-corpsu")
    assert answer.code == 2
    assert "Did you mean 'build-corpus'" in answer.err


@pytest.mark.parametrize("example", [e for e in COMMANDS["pretrain"].examples if "--plan preset:" in e])
def test_the_plans_of_examples_fit_the_sizes_beside_them(guide, example):
    from pipelines.training.models import SIZES
    from pipelines.training.objectives import OBJECTIVES

    words = example.split()
    given = {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--")}
    layers, _, heads, _ = SIZES["base" if "--init" in given else given.get("--size", "mini")]
    layers, heads = int(given.get("--layers", layers)), int(given.get("--heads", heads))
    family = OBJECTIVES[given.get("--objective", "mlm")].families[0]
    answer = guide("plan", "check", given["--plan"], "--model", f"{family}:{layers}x{heads}")
    assert answer.code == 0, answer.err


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("pretrain", ["sequences...", "--plan", "--steps", "--name", "--architecture", "--size"]),
        ("finetune", ["data", "--init", "--plan", "--epochs", "--name", "--task"]),
    ],
)
def test_the_help_of_training_begins_with_what_everybody_needs(guide, name, first):
    lines = guide(name, "--help").out.partition("\nArguments:")[2].splitlines()
    flags = [line.split()[0] for line in lines if line.startswith("  ") and line[2:3].strip()]
    assert flags[: len(first)] == first
    shown = flags[: flags.index("$")]
    assert len(shown) == len(set(shown))
