"""Options under the names that other tools give them lead to ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cli.main import load_app
from cli.usual_names import USUAL, intended


@pytest.mark.parametrize(
    ("command", "option", "ours"),
    [
        ("pretrain", "--lr", "--learning-rate"),
        ("pretrain", "--rate", "--learning-rate"),
        ("pretrain", "--learning_rate", "--learning-rate"),
        ("pretrain", "--per_device_train_batch_size", "--batch-size"),
        ("pretrain", "--num-layers", "--layers"),
        ("pretrain", "--num-train-epochs", "--epochs"),
        ("pretrain", "--max-steps", "--steps"),
        ("pretrain", "--hidden-size", "--hidden"),
        ("pretrain", "--output-dir", "--store"),
        ("pretrain", "--learnin-rate", "--learning-rate"),
        ("build-dataset", "--test-size", "--test-fraction"),
        ("report", "--to", "--out"),
        ("quickstart", "--lr", "--learning-rate"),
        ("quickstart", "--text", "--corpus"),
        ("build-sequences", "--max-seq-length", "--max-length"),
        ("build-masks", "--num-workers", "--jobs"),
    ],
)
def test_usual_name_of_an_option_leads_to_ours(guide: Callable[..., Any], command: str, option: str, ours: str) -> None:
    for answer in (guide(command, "x", option, "3"), guide(command, "x", f"{option}=3")):
        assert answer.code == 2
        assert answer.err.splitlines()[0] == f"guide: no such option: {option}; did you mean {ours}?"


@pytest.mark.parametrize(
    ("command", "option", "usage"),
    [
        ("build-sequences", "--tokenizer", "guide build-sequences {corpus} {tokenizer}"),
        ("finetune", "--dataset", "guide finetune {data}"),
        ("probe coref", "--model", "guide probe coref {model} {files}"),
    ],
)
def test_an_option_that_is_an_argument_is_said_to_be_one(
    guide: Callable[..., Any], command: str, option: str, usage: str
) -> None:
    answer = guide(*command.split(), option, "x")
    assert answer.code == 2
    assert answer.err.splitlines()[0] == f"guide: no such option: {option}; it is an argument: {usage}"


@pytest.mark.parametrize(("command", "has_text"), [("attention", True), ("show", False)])
def test_an_argument_too_many_is_named(guide: Callable[..., Any], command: str, has_text: bool) -> None:
    answer = guide(command, "model", "the keys (all of them)\nare lost")
    assert answer.code == 2
    assert answer.err.splitlines() == [
        r"guide: unexpected argument 'the keys (all of them)\x0aare lost'",
        *(["  a text goes after --text, or into standard input"] if has_text else []),
        f"  `guide {command} --help` shows how to use it",
    ]


def test_option_like_no_other_gets_no_suggestion(guide: Callable[..., Any]) -> None:
    answer = guide("pretrain", "x", "--xyzzy", "3")
    assert answer.code == 2
    assert answer.err.splitlines() == [
        "guide: no such option: --xyzzy",
        "  `guide pretrain --help` shows how to use it",
    ]


def test_usual_names_in_the_settings_file_and_the_environment_lead_to_ours(
    guide: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guide.toml").write_text("[pretrain]\nnum_layers = 3\n")
    answer = guide("pretrain", "x")
    assert answer.code == 2
    assert answer.err.startswith(
        "guide: 'guide.toml': unknown setting of pretrain 'num_layers'; did you mean 'layers'?\n"
    )
    (tmp_path / "guide.toml").unlink()
    monkeypatch.setenv("GUIDE_LR", "0.1")
    monkeypatch.setenv("GUIDE_SEED", "1")
    assert "warning: GUIDE_LR is not read; did you mean GUIDE_LEARNING_RATE?\n" in guide("ls").err
    assert "GUIDE_SEED" not in guide("ls").err


def commands(group: Any) -> Iterator[Any]:
    for command in group.commands.values():
        yield from commands(command) if hasattr(command, "commands") else (command,)


def test_every_option_that_usual_names_lead_to_exists() -> None:
    root = typer.main.get_command(load_app())
    known = [{option for param in command.params for option in param.opts} for command in commands(root)]
    assert set(USUAL) - set.union(*known) == set()
    for ours, usual in USUAL.items():
        for name in usual.split():
            assert any(intended(f"--{name}", options) for options in known if ours in options)


def test_no_usual_name_is_listed_twice_for_an_option() -> None:
    for ours, usual in USUAL.items():
        assert len(set(usual.split())) == len(usual.split()), ours
