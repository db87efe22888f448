"""Every command line that a page shows is accepted: its words, flags and values parse."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cli.main import load_app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
APP: Any = typer.main.get_command(load_app())


def commands_in(line: str) -> Iterator[list[str]]:
    """The arguments of each ``guide`` in a line of shell; the word 1 stands for a variable, and for what another command prints."""
    line = re.sub(r'"(\$\(.*?\))"', r"\1", line)  # a substitution in quotes is one word, as without them here
    lexer = shlex.shlex(re.sub(r"\$\{?\w+\}?", "1", line), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    open_commands: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word == "(" and open_commands[-1][-1:] and open_commands[-1][-1].endswith("$"):
            open_commands[-1][-1] = open_commands[-1][-1].replace("$", "1")
            open_commands.append([])
        elif word == ")" and len(open_commands) > 1:
            yield from _of_guide(open_commands.pop())
        elif set(word) <= set("<>"):
            next(words)  # the file
        elif set(word) <= set("();|&"):
            yield from _of_guide(open_commands[-1])
            open_commands[-1] = []
        elif not word.startswith("/") or not open_commands[-1]:  # the rest of a path whose start is a substitution
            open_commands[-1].append(word)
    for command in open_commands:
        yield from _of_guide(command)


def _of_guide(words: list[str]) -> Iterator[list[str]]:
    if "guide" in words:
        yield words[words.index("guide") + 1 :] + ["1"] * ("xargs" in words)


def shown(page: Path) -> Iterator[str]:
    """The lines of a page's code that call ``guide``; lines of output, and usage with its brackets, are not commands."""
    for block in re.findall(r"```(?:text|bash|sh)\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if re.search(r"(^|[ (])guide [a-z]", line) and not re.search(r"\[OPTIONS\]|…", line):
                yield line.strip().removeprefix("$ ")


def accepts(words: list[str]) -> None:
    """Parse the words of one command as the command line does, without running it."""
    command, context = APP, APP.context_class(APP, info_name="guide")
    while hasattr(command, "commands"):
        name, words = words[0], words[1:]
        command = command.commands[name]
    command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_line_of_a_page_is_accepted(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in shown(page):
        for words in commands_in(line):
            try:
                accepts(list(words))
            except Exception as error:
                pytest.fail(f"{line}: {error}")


def test_commands_are_found_in_shell() -> None:
    line = 'T=$(guide build-tokenizer "$(guide build-corpus *.txt)" --name t) && head -2 x | guide fill m "a (b)" > y  # note'
    assert list(commands_in(line)) == [
        ["build-corpus", "*.txt"],
        ["build-tokenizer", "1", "--name", "t"],
        ["fill", "m", "a (b)"],
    ]


@pytest.mark.parametrize(
    "words", [["pretrain", "x", "--stepz", "3"], ["pretrain", "x", "--steps", "many"], ["no-such"]]
)
def test_a_command_that_is_not_accepted_is_noticed(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"stepz|valid integer|no-such"):
        accepts(words)
