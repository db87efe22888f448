"""Pickled weights become safetensors in a separate process, and code in a pickle is never run."""

from __future__ import annotations

import json
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel

from guidance.checkpoint import load_model, model_files
from guidance.errors import InputError
from guidance.plan import Plan
from pipelines.tools.convert import convert, write_safetensors
from tests.guidance.models import batch, tiny_model


class Evil:
    """Unpickling this makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def pickled(folder: Path, model: PreTrainedModel, files: int = 1) -> Path:
    """A model folder in the format that transformers wrote before safetensors."""
    folder.mkdir()
    (folder / "config.json").write_bytes(model_files(model, Plan())["config.json"])
    for name in ("vocab.txt", "spm.model", "chat_template.jinja"):
        (folder / name).write_text("a\nb\n")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    tensors = model.state_dict()
    if files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    names = {name: f"pytorch_model-{number % files}.bin" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        torch.save({name: tensors[name] for name in names if names[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("family", "files"), [("bert", 1), ("roberta", 3)])
def test_a_converted_model_computes_the_same(family: str, files: int, tmp_path: Path) -> None:
    model = tiny_model(family)
    new = tmp_path / "new"
    done = convert(pickled(tmp_path / "old", model, files), new)
    copied = {"config.json", "vocab.txt", "spm.model", "chat_template.jinja"}
    assert {path.name for path in new.iterdir()} == {*copied, "model.safetensors"}
    opened = load_model(new, AutoModelForMaskedLM)
    assert torch.equal(opened.eval()(**batch()).logits, model(**batch()).logits)
    numbers = sum(tensor.numel() for tensor in model.state_dict().values())
    assert done == {"tensors": len(model.state_dict()), "numbers": numbers}
    assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE((tmp_path / "old").stat().st_mode)


def test_the_refusal_of_a_pickle_names_the_command_that_converts_it(tmp_path: Path, guide: Callable[..., Any]) -> None:
    folder = pickled(tmp_path / "old", tiny_model("bert"))
    with pytest.raises(InputError, match=r"only pytorch_model\.bin, which could run code") as found:
        load_model(folder, AutoModelForMaskedLM)
    assert found.value.hint == f"guide convert {folder} old-safetensors"
    answer = guide(*found.value.hint.split()[1:], "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["path"] == "old-safetensors" and json.loads(answer.out)["tensors"] > 10
    load_model(tmp_path / "old-safetensors", AutoModelForMaskedLM)
    again = guide("convert", folder, "old-safetensors")
    assert again.code == 2 and "exists already" in again.err
    assert guide("build-corpus", folder / "vocab.txt", "--name", "mine").code == 0
    assert "next: guide build-sequences mine@1 fourth\n" in guide("convert", folder, "fourth").err


@pytest.mark.parametrize("form", ["plain", "among tensors", "zip"])
def test_code_in_a_pickle_is_refused_and_never_run(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The zip, which torch writes, is read in a process of its own, whatever the environment asks of torch."""
    folder, trace = pickled(tmp_path / "old", tiny_model("bert")), tmp_path / "owned"
    path = folder / "pytorch_model.bin"
    if form == "plain":
        path.write_bytes(pickle.dumps(Evil(trace), protocol=2))
    elif form == "among tensors":
        path.write_bytes(pickle.dumps({"x": 1, "y": Evil(trace)}, protocol=2))
    else:
        torch.save({"x": torch.zeros(2), "y": Evil(trace)}, path)
    assert "contains more than weights" in write_safetensors(tmp_path / "out", [path])["refused"]
    if form == "zip":
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        with pytest.raises(InputError, match="contains more than weights"):
            convert(folder, tmp_path / "new")
    assert not trace.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "contains a list, not a mapping of names to tensors"),
        ({"x": 3}, "'x' is a int, not a plain tensor"),
        ({3: torch.zeros(2)}, "not a plain tensor"),
        ({"x": {"y": torch.zeros(2)}}, "'x' is a dict"),
        ({"x": torch.zeros(2, 2).to_sparse()}, "not a plain tensor"),
        ({}, "contains no tensors"),
    ],
)
def test_a_pickle_of_anything_but_named_tensors_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    answer = write_safetensors(tmp_path / "out", [tmp_path / "pytorch_model.bin"])
    assert message in answer["refused"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", [b"", b"garbage", b"PK\x03\x04" + bytes(100)])
def test_damaged_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    assert "or is damaged" in write_safetensors(tmp_path / "out", [tmp_path / "pytorch_model.bin"])["refused"]


def test_folders_that_cannot_be_converted_are_refused(tmp_path: Path) -> None:
    folder = pickled(tmp_path / "old", tiny_model("bert"))

    def refused(message: str, out: str = "new") -> None:
        with pytest.raises(InputError, match=message):
            convert(folder, tmp_path / out)

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    refused("exists already", "full")
    (folder / "config.json").write_text('{"model_type": "bert", "auto_map": {"AutoModel": "modeling_evil.Evil"}}')
    refused("its own code")
    (folder / "config.json").unlink()
    refused("not a model folder")
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "../elsewhere.bin"}}')
    refused("not a file in this folder")
    (folder / "pytorch_model.bin.index.json").write_text("[]")
    refused("not a weight index")
    (folder / "pytorch_model.bin.index.json").unlink()
    refused("no pytorch_model.bin")
    (folder / "model.safetensors").touch()
    refused("has safetensors already")


def test_code_in_the_working_folder_is_not_imported(tmp_path: Path, guide: Callable[..., Any]) -> None:
    (tmp_path / "torch.py").write_text(f"import os; os.mkdir({str(tmp_path / 'owned')!r})")
    answer = guide("convert", pickled(tmp_path / "old", tiny_model("bert")), "new")
    assert (answer.code, answer.out) == (0, "new\n")
    assert not (tmp_path / "owned").exists()
