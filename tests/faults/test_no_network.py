"""The stages work without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import contextlib, io
from cli.main import run

def guide(command):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run(command.split())
    assert code == 0, command
    return out.getvalue().strip()

corpus = guide("build-corpus text.txt")
tokenizer = guide(f"build-tokenizer {corpus} --vocab-size 300")
sequences = guide(f"build-sequences {corpus} {tokenizer} --max-length 16")
print(guide(f"pretrain {sequences} --plan preset:ag --size tiny --steps 2 --batch-size 2"))
"""


@pytest.mark.every
def test_text_becomes_a_model_without_a_network(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare -rn to run without a network")
    (tmp_path / "text.txt").write_text("\n\n".join(f"Sentence {n} is here. It has words." for n in range(300)))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "artifacts" / done.stdout.strip() / "model.safetensors").exists()
