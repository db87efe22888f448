"""The examples run as scripts from any folder and do what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from examples import sentences

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
COMMANDS = re.findall(r"^python examples/(.*)$", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.M)
TRAININGS = [command for command in COMMANDS if not command.startswith("heads.py")]


def as_script(command: str, folder: Path) -> str:
    """What an example prints in a new process."""
    name, *arguments = command.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / name), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str, Path], str]:
    """What an example prints in this process, which has imported everything already."""

    def run(command: str, folder: Path) -> str:
        name, *arguments = command.split()
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(EXAMPLES)  # as Python does for a script
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_readme_of_the_examples_lists_and_runs_them_all() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert {command.split()[0] for command in COMMANDS} == scripts
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{path.name}]({path.name})" in table for path in EXAMPLES.glob("*.py"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", TRAININGS)
def test_an_example_trains_saves_and_loads_the_same_model(
    command: str, tmp_path: Path, here: Callable[[str, Path], str]
) -> None:
    """The first command of each script runs as a script."""
    plan = [] if len(command.split()) > 1 else ["preset:ag"]
    is_first = command == next(other for other in TRAININGS if other.split()[0] == command.split()[0])
    out = (as_script if is_first else here)(" ".join([command, *plan, "out"]), tmp_path)
    assert out.splitlines()[-1] == "saved and opened again: the same to the last bit"
    losses = [float(loss) for loss in re.findall(r"(?:task|'loss/task':) '?([0-9.]+)", out)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "plan.toml", "tokenizer.json"} <= files
    assert ("guidance.safetensors" in files) == ("asa" in command)


def test_an_example_takes_a_plan_from_a_file(tmp_path: Path, here: Callable[[str, Path], str]) -> None:
    (tmp_path / "mine.toml").write_text(
        '[[guide]]\nmechanism = "gate"\n\n[[guide]]\npattern = "window"\nmechanism = "mask"\nheads = [0]\nsize = 3\n'
    )
    assert "the same to the last bit" in here("own_loop.py mine.toml", tmp_path)


def test_some_heads_of_two_models_are_drawn(tmp_path: Path, here: Callable[[str, Path], str]) -> None:
    words = sentences.new_tokenizer()
    for name in ("one", "two"):
        BertModel(
            BertConfig(
                vocab_size=len(words), hidden_size=40, num_hidden_layers=5, num_attention_heads=10, intermediate_size=8
            )
        ).save_pretrained(tmp_path / name)
        words.save_pretrained(tmp_path / name)
    here("heads.py one two heads.png", tmp_path)
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_the_five_lines_of_the_loop_are_marked() -> None:
    marked = re.findall(r"# (\d)\b", (EXAMPLES / "own_loop.py").read_text(encoding="utf-8"))
    assert marked == ["1", "2", "3", "4", "5"]
