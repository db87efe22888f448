"""Convert pickled weights to safetensors.  This is the only place that opens a pickle, in a separate process.

A pickle can contain code.  ``torch.load(weights_only=True)`` reads tensors and containers and refuses everything else;
there is no way to override that.  The separate process returns nothing but the safetensors file that it writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guidance.errors import InputError, MachineError
from pipelines import ROOT
from pipelines.engine.stage import check_working_folder
from pipelines.storage.files import new_folder, write_file

WEIGHTS, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
COPIED = (
    *("config.json", "generation_config.json", "README.md", "LICENSE", "LICENSE.txt"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
    *("source.spm", "target.spm", "spm.model", "bpe.codes", "chat_template.jinja"),
)
"""Files to copy: configuration, tokenizer with its chat template, model card and licence, but never code."""


def convert(folder: Path, out: Path) -> dict[str, int]:
    """Copy a model folder, with its weights as safetensors; returns how many ``tensors`` and ``numbers`` these are.  Raises
    InputError if ``folder`` has no pickled PyTorch weights, or they contain more than tensors, or ``out`` exists, and
    MachineError if ``out`` cannot be written."""
    check_working_folder()
    from guidance.checkpoint import config_of

    weights = _weight_files(folder)
    config_of(folder)  # raises InputError for what is no model folder
    with new_folder(out) as temporary:
        written = _convert_in_subprocess(weights, temporary / "model.safetensors")
        for name in COPIED:
            if (folder / name).is_file():
                write_file(temporary / name, (folder / name).read_bytes())
    return written


def _weight_files(folder: Path) -> list[Path]:
    """The pickled weight files of a model folder.  Raises InputError if there are none, or the index names a file outside
    the folder."""
    if any(folder.glob("*.safetensors")):
        raise InputError(f"{folder}: has safetensors already", hint="there is nothing to convert")
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise InputError(f"{folder}: no {WEIGHTS}", hint="to convert TensorFlow or Flax weights, use transformers 4")
    try:
        names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{folder / INDEX}: not a weight index") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise InputError(f"{folder / INDEX}: names {name!r}, which is not a file in this folder")
    return [folder / name for name in names]


def _convert_in_subprocess(weights: list[Path], out: Path) -> dict[str, int]:
    """Run `write_safetensors` in a child process; the last line of its stdout is the result as JSON."""
    # TORCH_* variables could make torch read more than weights
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_")}
    command = [sys.executable, "-P", "-m", "pipelines.tools.convert", str(out), *map(str, weights)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MachineError(f"the process that reads {weights[0].name} failed: {last}") from error
    if "refused" in answer:
        raise InputError(
            answer["refused"], hint="ask the author of the file for safetensors; guide does not open this one"
        )
    return answer


def _read(path: Path) -> Mapping[str, Any]:
    """The tensors of one pickled file, by name.  Raises InputError if it contains anything else, or cannot be read."""
    import torch

    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file can raise anything
        reason = " ".join(str(error).split())
        # cut off torch's advice on how to open the file anyway
        reason = reason.split("WeightsUnpickler error:")[-1].split(". Please")[0].strip() or type(error).__name__
        raise InputError(f"{path}: contains more than weights, or is damaged ({reason[:200]})") from error
    if not isinstance(tensors, Mapping):
        raise InputError(f"{path}: contains a {type(tensors).__name__}, not a mapping of names to tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise InputError(f"{path}: {str(name)[:80]!r} is a {type(tensor).__name__}, not a plain tensor")
    return tensors


def write_safetensors(out: Path, weights: list[Path]) -> dict[str, Any]:
    """Write the tensors of all files to one safetensors file; returns their counts, or ``refused`` with the reason."""
    import safetensors.torch

    try:
        tensors: dict[str, Any] = {}
        for path in weights:
            tensors |= _read(path)
        if not tensors:
            raise InputError(f"{weights[0]}: contains no tensors")
        # tied weights share memory in a pickle; safetensors needs separate copies
        separate = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(separate, out, metadata={"format": "pt"})
    except InputError as error:
        return {"refused": error.message}
    with out.open("rb") as file:
        os.fsync(file.fileno())
    return {"tensors": len(separate), "numbers": sum(tensor.numel() for tensor in separate.values())}


if __name__ == "__main__":
    answer = write_safetensors(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
    sys.stdout.write(json.dumps(answer) + "\n")
