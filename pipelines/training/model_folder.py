"""The files of a trained model: weights, tokenizer, plan, the best weights, snapshots and metrics."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import safetensors.torch

from guidance.checkpoint import CONFIG_FILE, TARGET_FOLDER, config_file, model_files, weight_files
from pipelines.engine.stage import Run
from pipelines.storage.artifacts import Builder
from pipelines.text.tokenizer_files import for_model
from pipelines.training.checkpoints import WEIGHTS, Checkpoints, best_name
from pipelines.training.learner import ModelFolder
from pipelines.training.loop import Outcome
from pipelines.training.metrics_log import METRICS_LOG
from pipelines.training.model_checks import longest_input
from pipelines.training.models import has_segments
from pipelines.training.preparation import Prepared

METRICS_PART = 10_000
"""How many rows of metrics are held in memory at once."""


def write_model(run: Run, prepared: Prepared, outcome: Outcome) -> None:
    """Write the model folders of a finished run, its metrics, and the counts of the manifest."""
    data, out = run.inputs["sequences"], run.out
    folders = prepared.learner.folders()
    files = {folder.path: model_files(folder.model, folder.plan) for folder in folders}
    parameters = sum(p.numel() for p in prepared.learner.model.parameters())
    tokenizer = {
        name.removeprefix("tokenizer/"): data.read(name)
        for name in data.files
        if name.startswith(("tokenizer/", f"{TARGET_FOLDER}/"))
    }
    tokenizer = dict(run.config.row.tokenizer_of(tokenizer))
    tokenizers = {folder.path: _tokenizer_of(folder.model.config, tokenizer) for folder in folders}
    for folder in folders:
        for name, content in {**files[folder.path], **tokenizers[folder.path]}.items():
            out.write(folder.path + name, content)
    checkpoints = Checkpoints(run.partial)
    wanted = {f"snapshots/step-{step}/": step for step in checkpoints.steps("snapshot")}
    wanted |= {f"{best_name(number)}/": step for number, (step, _) in enumerate(outcome.best, 1)}
    for place, step in wanted.items():
        artifact = checkpoints.with_weights(step)
        if artifact is None:
            run.warn(f"{place} is left out: its weights, of step {step}, were damaged on the disk; the rest is whole")
            continue
        tensors = safetensors.torch.load(artifact.read(WEIGHTS))
        prepared.learner.at(step)
        for folder in folders:
            for name, content in weight_files(_tensors_of(folder, tensors), folder.plan).items():
                out.write(place + folder.path + name, content)
            files[folder.path] |= _config(folder, files[folder.path])
            for name, content in {**tokenizers[folder.path], **files[folder.path]}.items():
                if not name.endswith(".safetensors"):
                    out.write(place + folder.path + name, content)
    _write_metrics(out, outcome.log)
    last, metric = outcome.last, run.config.best.select.rpartition("/")[2]
    best_value = outcome.best[0][1] if outcome.best else None
    out.counts |= {
        "steps": int(last["step"]),
        "parameters": parameters,
        "final": {key: last[key] for key in last if key.startswith(("loss/", "valid/", "eval/"))},
        "best_step": outcome.best[0][0] if outcome.best else None,
        "best_valid_loss": None if metric else best_value,
        **({"best": {"metric": metric, "value": best_value}} if metric else {}),
        **({"best_steps": [step for step, _ in outcome.best]} if len(outcome.best) > 1 else {}),
        "matches": {label: int(found) for label, found in outcome.tallies.items()},
        "processes": outcome.facts["world"],
        "device": outcome.facts["device"],
        "precision": outcome.facts["precision"],
        "memory_bytes": outcome.memory,
    }


def _config(folder: ModelFolder, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The configuration as it is now: guides that fade had another strength at another step.  Adapters have none."""
    return {CONFIG_FILE: config_file(folder.model, folder.plan)} if CONFIG_FILE in files else {}


def _write_metrics(out: Builder, log: Path) -> None:
    """Write the metrics of every step as they were logged, and as a table; in parts, since there may be millions of rows."""
    keys: dict[str, None] = {}
    with out.open(METRICS_LOG) as copy:
        for lines in _parts(log):
            copy.write(b"".join(lines))
            keys |= dict.fromkeys(key for line in lines for key in json.loads(line))
    schema = pa.schema([(key, pa.int64() if key == "step" else pa.float64()) for key in keys])
    with out.parquet("metrics.parquet", schema) as writer:
        for lines in _parts(log):
            writer.write_table(pa.Table.from_pylist([json.loads(line) for line in lines], schema))


def _parts(log: Path) -> Iterator[list[bytes]]:
    with open(log, "rb") as file:
        while lines := list(itertools.islice(file, METRICS_PART)):
            yield lines


def _tokenizer_of(config: Any, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The tokenizer files beside a model with this configuration."""
    return for_model(
        files,
        segments=has_segments(config),
        longest=longest_input(config),
        pad_id=getattr(config, "pad_token_id", None),
    )


def _tensors_of(folder: ModelFolder, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of one model of a learner, under the names that they have in that model."""
    size = len(folder.prefix)
    return {name[size:]: tensor for name, tensor in tensors.items() if name.startswith(folder.prefix)}
