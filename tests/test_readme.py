"""Every command of the README runs, in the order in which a reader meets them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cli import main
from tests.shared import shared

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
INLINE = re.findall(r"`(guide quickstart --corpus [^`]*)`", README)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of one's own."""
    import pydoc_data.topics

    folder = tmp_path_factory.mktemp("reader")
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)[:30])
    (folder / "novel.txt").write_text(text, encoding="utf-8")
    lines = [line for line in text.splitlines() if 20 < len(line) < 80][:200]
    (folder / "train.de").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "train.en").write_text("".join(f"{line[::-1]}\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """One line of the README, made short by settings from the environment; by a shell where it takes one."""

    def call(command: str, **settings: str) -> Any:
        if re.search(r"[|$<>&;]", command):
            return in_shell(command, place, **settings)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(place)
        program, *words = shlex.split(command, comments=True)
        assert program == "guide"
        capsys.readouterr()
        code = main.run(words)
        return subprocess.CompletedProcess(command, code, *capsys.readouterr())

    return call


def in_shell(command: str, place: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **settings}
    return subprocess.run(
        ["bash", "-c", command], cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_make_targets_of_the_readme_exist() -> None:
    targets = [c.removeprefix("make ") for c in COMMANDS if c.startswith("make ")]
    assert targets == ["quickstart", "test"]
    for target in targets:
        dry = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert dry.returncode == 0, dry.stderr
        assert ("guide quickstart" if target == "quickstart" else "pytest") in dry.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith("make ")])
def test_command_of_the_readme_runs_and_prints_its_result(command: str, run: Callable[..., Any]) -> None:
    if "novel-deps" in command or "novel-roles" in command:
        command = command.replace("en_core_web_sm", str(shared("models/spacy-en_ud_ewt_sm")))
    done = run(command, GUIDE_STEPS="3", GUIDE_BATCH_SIZE="4")
    assert done.returncode == 0, done.stderr
    if "build-" in command or "pretrain" in command:
        assert re.fullmatch(r"[a-z]+/[0-9a-f]{16}\n", done.stdout), done.stdout
    elif re.match("guide (ls|lineage)", command):
        assert "model" in done.stdout
    elif ">" not in command:
        assert done.stdout


def test_quickstart_on_own_text_draws_two_pictures_and_prints_a_table(run: Callable[..., Any], place: Path) -> None:
    (command,) = set(INLINE)
    done = run(command, GUIDE_STEPS="4", GUIDE_LAYERS="2")
    assert done.returncode == 0, done.stderr
    folder = place / "artifacts" / done.stdout.strip()
    for picture in ("learning.png", "attention.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
        assert picture in done.stderr
    assert "steps to equal loss" in done.stderr


def test_second_run_finds_its_artifact(run: Callable[..., Any]) -> None:
    command = "guide build-corpus novel.txt --name novel --source 'my shelf' --license CC0-1.0"
    first, second = run(command), run(command)
    assert first.stdout == second.stdout
    assert "up to date" in second.stderr


def test_every_command_is_in_the_table() -> None:
    sys.path.insert(0, str(ROOT))
    from cli.main import load_app

    def names(group: Any, before: str = "") -> Iterator[str]:
        for word, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from names(command, f"{before}{word} ")
            else:
                yield before + word

    rows = [line.split("|")[1] for line in README.split("## Commands")[1].splitlines() if line.startswith("| `")]
    told = [name.removeprefix("guide ") for row in rows for name in re.findall(r"`([^`]+)`", row)]
    # a second command of a family is named without it, where that is told already
    known = list(names(typer.main.get_command(load_app())))
    assert sorted(told) == sorted(known)


def test_the_settings_file_of_the_readme_is_read(tmp_path: Path) -> None:
    from cli.config import settings_for
    from cli.main import load_app

    (block,) = [block for block in re.findall(r"```toml\n(.*?)```", README, re.S) if "[pretrain]" in block]
    (tmp_path / "guide.toml").write_text(block, encoding="utf-8")
    group = typer.main.get_command(load_app())
    assert settings_for(tmp_path / "guide.toml", group, ["pretrain"]) == {"size": "tiny", "batch_size": 64}


def test_the_lines_for_your_own_code_train_save_and_come_back(tmp_path: Path) -> None:
    import torch

    import guidance
    from tests.guidance.models import batch, tiny_model

    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "guidance.install" in block]
    model = tiny_model("bert")
    places = {"model": model, "tokenizer": None, "batch": {**batch(), "labels": batch()["input_ids"]}}
    places |= {"step": 3, "total_steps": 10, "folder": tmp_path / "saved"}
    exec(compile(code, "README.md", "exec"), places)
    assert places["loss"].item() > places["output"].loss.item()
    places["loss"].backward()
    again, handle = guidance.load(tmp_path / "saved")
    assert handle.plan == guidance.Plan.load("preset:ag")
    assert torch.equal(again(**batch()).logits, model(**batch()).logits)
