"""Runs recipes, the scripts in ``recipes/``, with the commands of this process in the place of ``guide``."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
ASK = """#!/bin/sh
{ printf '%s\\n' $# && [ $# = 0 ] || printf '%s\\n' "$@"; } >"$ASK/question"
read -r code <"$ASK/answer"
cat "$ASK/out"
exit "$code"
"""


@dataclass
class Ran:
    """How a recipe went.

    Attributes:
        code: its exit code.
        err: what it wrote to stderr itself.
        commands: its commands, as lists of arguments.
        errors: what commands that failed wrote to stderr.
    """

    code: int
    err: str
    commands: list[list[str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def cook(script: Path, guide: Callable[..., Any], folder: Path, settings: Mapping[str, str], shell: str = "sh") -> Ran:
    """Run a recipe in a folder.

    Args:
        guide: stands for ``guide``: takes the arguments of a command, and returns its ``code``, and what it writes, ``out`` and ``err``.
        settings: variables of the environment.
    """
    ask = folder / "ask"
    ask.mkdir(exist_ok=True)
    for name in ("question", "answer"):
        if not (ask / name).exists():
            os.mkfifo(ask / name)
    (ask / "guide").write_text(ASK)
    (ask / "guide").chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "ASK": str(ask), "GUIDE": str(ask / "guide"), **settings}
    question, answer = (
        os.open(ask / name, os.O_RDWR) for name in ("question", "answer")
    )  # opened to read and write, they never block
    try:
        with subprocess.Popen(
            [shell, script], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            ran = Ran(0, "")
            ended = os.pidfd_open(process.pid)
            while question in select.select([question, ended], [], [])[0]:
                arguments = _read(question)
                done = guide(*arguments)
                ran.commands.append(arguments)
                if done.code:
                    ran.errors.append(done.err)
                (ask / "out").write_text(done.out)
                os.write(answer, b"%d\n" % done.code)
            os.close(ended)
            ran.err = process.stderr.read()
            ran.code = process.wait()
            return ran
    finally:
        os.close(question)
        os.close(answer)


def _read(question: int) -> list[str]:
    """The arguments of a command: their number, and one on each line."""
    text = b""
    while not text or text.count(b"\n") <= int(text.split(b"\n", 1)[0]):
        text += os.read(question, 65536)
    return text.decode().splitlines()[1:]
