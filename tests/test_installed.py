"""What depends on the folder of our packages (`pipelines.ROOT`) works in a checkout and in an installed wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import pipelines
from pipelines.engine import stage
from pipelines.tools import convert, doctor

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = ("cli", "guidance", "pipelines")
SCRIPT = """
import json, subprocess, sys
from pathlib import Path

sys.path[:0] = sys.argv[3:]
import pipelines
from pipelines.engine.stage import _git_revision
from pipelines.tools import convert, doctor

run, children = subprocess.run, []

def record(command, **options):
    children.append(options["env"]["PYTHONPATH"])
    return run(command, **options)

answer = {"root": str(pipelines.ROOT), "git": _git_revision()}
answer["imports"] = [vars(finding) for finding in doctor.shadows()]
if len(sys.argv) == 4:
    subprocess.run = record
    answer["converted"] = convert._convert_in_subprocess([Path(sys.argv[1])], Path(sys.argv[2]))
    answer["path of child"] = children
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages as a wheel installs them, inside the git repository of another project."""
    project = tmp_path_factory.mktemp("project")
    folder = project / "venv" / "lib" / "site-packages"
    folder.mkdir(parents=True)
    if importlib.util.find_spec("hatchling") and importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", str(project), str(CHECKOUT)], check=True)
        (wheel,) = project.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
    else:
        for name in PACKAGES:
            shutil.copytree(CHECKOUT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if shutil.which("git"):
        git(project, "init", "--quiet")
        git(project, "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "--quiet", "--allow-empty", "-m", "Begin")
    return folder


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True).stdout.strip()


def ask(folder: Path, *path: Path) -> dict[str, Any]:
    """Run `SCRIPT` in a new process, in ``folder``, with ``path`` at the front of its import path."""
    torch.save({"weight": torch.zeros(2)}, folder / "weights.bin")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", SCRIPT, str(folder / "weights.bin"), str(folder / "weights.safetensors")]
    done = subprocess.run([*command, *map(str, path)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_checkout_finds_its_own_packages_and_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert pipelines.ROOT == CHECKOUT
    assert {found.name: found.detail for found in doctor.shadows()} == {n: str(CHECKOUT / n) for n in PACKAGES}
    if (CHECKOUT / ".git").exists() and shutil.which("git"):
        stage._git_revision.cache_clear()
        assert str(stage._git_revision()).removesuffix("-dirty") == git(CHECKOUT, "rev-parse", "HEAD")[:12]
    children: list[str] = []

    def record(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        children.append(env["PYTHONPATH"])
        return subprocess.CompletedProcess(command, 0, '{"tensors": 1, "numbers": 2}', "")

    monkeypatch.setattr(subprocess, "run", record)
    convert._convert_in_subprocess([tmp_path / "weights.bin"], tmp_path / "weights.safetensors")
    assert [path.split(os.pathsep)[0] for path in children] == [str(CHECKOUT)]


def test_a_wheel_inside_another_repository_has_no_commit_and_finds_its_own_packages(
    tmp_path: Path, site_packages: Path
) -> None:
    answer = ask(tmp_path, site_packages)
    assert answer["root"] == str(site_packages)
    assert (site_packages / "guidance" / "py.typed").is_file()
    assert {found["name"]: found["detail"] for found in answer["imports"]} == {
        name: str(site_packages / name) for name in PACKAGES
    }
    assert answer["git"] is None
    assert answer["converted"] == {"tensors": 1, "numbers": 2} and (tmp_path / "weights.safetensors").exists()
    assert answer["path of child"] == [str(site_packages)]


def test_a_wheel_notices_a_package_that_shadows_its_own(tmp_path: Path, site_packages: Path) -> None:
    shutil.copytree(CHECKOUT / "guidance", tmp_path / "foreign" / "guidance")
    answer = ask(tmp_path, tmp_path / "foreign", site_packages)
    assert {found["name"]: found["state"] for found in answer["imports"]} == {
        "guidance": "bad",
        "pipelines": "ok",
        "cli": "ok",
    }
