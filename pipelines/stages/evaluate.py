"""Stage ``evaluate``: how good a trained model is at its task.

Reads model@1, sequences@1 and the corpus that these are of.  Writes evaluation@1: ``metrics.json`` and
``predictions.parquet`` (one row for each example, in the order of the sequences).  The task follows from the model:

translation
    negative log-likelihood of the targets in nats per token, and BLEU and chrF of beam search against the second texts of
    the examples as they stand in the corpus; sacrebleu's signatures say how these two were counted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from pydantic import Field

from guidance.errors import InputError, NumericalError
from pipelines.engine import stage
from pipelines.engine.stage import Options, Result, Run, Stage, check_working_folder, knob, run_stage
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.store import Store
from pipelines.training.plan_inputs import check_needs, features, load_inputs, model_input, read_tables

if TYPE_CHECKING:
    import numpy as np

    from guidance.installation import Handle

__all__ = ["STAGE", "Config", "run"]


class Config(stage.Config):
    """What is evaluated, and how translations are searched."""

    split: Literal["train", "valid", "test"] = Field("test", description="Which part of the sequences.")
    weights: Literal["last", "best"] = Field(
        "last", description="The model of the last step, or that of the lowest validation loss."
    )
    beams: int = Field(5, ge=1, le=1000, description="Beams of the search; 1 is greedy.")
    length_penalty: float = Field(
        1.0,
        ge=-10,
        le=10,
        description="Power of the length by which log-likelihoods are divided; 0 favours short ones.",
    )
    max_length: int = Field(0, ge=0, description="Longest translation, in tokens; 0 for what the model has room for.")
    bleu_tokenizer: Literal["13a", "intl", "char", "zh", "none"] = Field(
        "13a", description="How BLEU cuts text into words; its signature says so."
    )
    limit: int = Field(0, ge=0, description="Examples at most; 0 for all of them.")
    masks: str = knob("", "What `guide build-masks` made of the sequences, for plans that read words, idf or trees.")
    scores: str = knob("", "Scores of heads, JSON, CSV or Parquet, for plans that choose heads by them.")
    batch_size: int = knob(32, "Examples at once.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "Where to compute; auto takes a GPU where there is one.")


def run(model: str, sequences: str, config: Config, *, store: Store, **options: Unpack[Options]) -> Result:
    """Evaluate a model on a split of some sequences.

    Args:
        model: a reference, or a model folder.
        sequences: reference of sequences, whose corpus is still there.

    Raises:
        InputError: there is no way to evaluate this model yet; the split is empty; model and sequences do not fit.
        NumericalError: a likelihood is not finite.
    """
    check_working_folder()
    from pipelines.stages.masks import origin

    with contextlib.ExitStack() as stack:
        data = stack.enter_context(store.load(sequences, kind="sequences"))
        inputs: dict[str, Any] = {
            "model": model_input(model, store),
            "sequences": data,
            "corpus": stack.enter_context(origin(data, "corpus", store)),
            **load_inputs(config, [data], store),
        }
        if not data.files.get(f"{config.split}.parquet", {}).get("rows"):
            there = [name.removesuffix(".parquet") for name in data.files if name.endswith(".parquet")]
            hint = f"--split {' or '.join(there)}"
            raise InputError(f"{data.reference} has no sequences in {config.split!r}", hint=hint)
        return run_stage(STAGE, config, inputs, store=store, **options)


def build(run: Run) -> None:
    """The stage itself; see `run`."""
    from transformers.utils import logging as transformers_logging

    from guidance.checkpoint import CONFIG_FILE, load, read_plan
    from pipelines.training.cluster import Cluster

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    given = run.inputs["model"]
    folder = given.path if isinstance(given, Artifact) else given.paths[0].parent
    if run.config.weights == "best":
        if not (isinstance(given, Artifact) and f"best/{CONFIG_FILE}" in given.files):
            raise InputError(f"{folder}: has no best model: there was no validation", hint="--weights last")
        folder = folder / "best"
    task = _task(folder)
    check_needs(read_plan(folder), str(folder), run.inputs, training=False)
    model, handle = load(folder, tables=read_tables(run.inputs))
    model.to(Cluster(run.config.device, "fp32").device)  # type: ignore[arg-type]
    task(run, folder, model, handle)


def _translation(run: Run, folder: Path, model: Any, handle: Handle) -> None:
    import numpy as np
    import pyarrow as pa
    import torch

    from guidance.objectives.translation import translate
    from pipelines.training.batches import Examples
    from pipelines.training.models import read_tokenizer
    from pipelines.training.objectives.translation import (
        Pairs,
        check_lengths,
        check_vocabularies,
        likelihood,
        tensors,
        tokenizer_of_targets,
    )

    config, data = run.config, run.inputs["sequences"]
    tokenizer = read_tokenizer(data, masked=False)
    target_tokenizer = tokenizer_of_targets(data, tokenizer)
    check_vocabularies(folder, model.config, tokenizer, target_tokenizer)
    masks, needed = run.inputs.get("masks"), features(handle.plan, training=False)
    sources = Examples.read(data, config.split, len(tokenizer), features=needed, masks=masks)
    pairs = Pairs.read([data], config.split, sources, len(target_tokenizer))
    check_lengths(model.config, {config.split: pairs}, data.reference)
    number = min(len(pairs), config.limit) if config.limit else len(pairs)
    texts = _texts(run.inputs["corpus"], _documents(data, config.split)[:number])
    room = model.config.max_position_embeddings
    decoder = target_tokenizer.backend_tokenizer
    hypotheses = [""] * number
    total, tokens = 0.0, 0.0
    # similar lengths together, the longest first, so that too large a batch fails at once
    order = np.argsort(-pairs.lengths[:number], kind="stable").tolist()
    with run.progress.task("evaluate", total=number, unit="examples") as bar, torch.no_grad():
        for start in range(0, number, config.batch_size):
            chosen = order[start : start + config.batch_size]
            batch = pairs.batch(chosen)
            inputs = tensors(batch, model)
            total += likelihood(model, handle, inputs).item()
            tokens += batch.num_targets
            found = translate(
                model,
                handle,
                inputs.model,
                inputs.columns,
                beams=config.beams,
                max_length=min(config.max_length or room, room),
                length_penalty=config.length_penalty,
            )
            for place, ids in zip(chosen, found, strict=True):
                hypotheses[place] = decoder.decode(ids, skip_special_tokens=True).strip()
            bar.advance(len(chosen))
    nll = total / tokens
    if not math.isfinite(nll):
        raise NumericalError(f"the likelihood of the targets is not finite ({nll})")
    columns = {
        "source": [text for text, _ in texts],
        "reference": [pair for _, pair in texts],
        "hypothesis": hypotheses,
    }
    schema = prediction_schema()
    with run.out.parquet("predictions.parquet", schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    scores, signatures = translation_scores(hypotheses, columns["reference"], config.bleu_tokenizer)
    _write_metrics(run, "translation", {"nll": nll, **scores}, signatures, {"examples": number, "tokens": int(tokens)})


TASKS: Mapping[str, Callable[..., None]] = {"translation": _translation}
"""What can be evaluated, by the name of the task: functions of the run, and of the folder, the model and its
handle."""


def _task(folder: Path) -> Callable[..., None]:
    """The task of a model folder.

    Raises:
        InputError: no task that can be evaluated.
    """
    from guidance.checkpoint import CONFIG_FILE, read_config

    try:
        config = read_config((folder / CONFIG_FILE).read_bytes(), str(folder / CONFIG_FILE))
    except OSError as error:
        raise InputError(f"{folder}: not a model folder (no readable {CONFIG_FILE})") from error
    if config.is_encoder_decoder:
        return TASKS["translation"]
    raise InputError(
        f"{folder}: a {config.model_type} model, whose task cannot be evaluated", hint=f"known: {', '.join(TASKS)}"
    )


def prediction_schema() -> Any:
    """Columns of ``predictions.parquet``."""
    import pyarrow as pa

    units = {
        "source": "first text of the example",
        "reference": "second text of the example",
        "hypothesis": "what the model makes of the source",
    }
    return pa.schema([pa.field(name, pa.string(), False, metadata={"unit": unit}) for name, unit in units.items()])


def translation_scores(
    hypotheses: list[str], references: list[str], tokenizer: str = "13a"
) -> tuple[dict[str, float], dict[str, str]]:
    """BLEU and chrF of a corpus, from 0 to 100, and sacrebleu's signatures of both.

    Source: Papineni et al. 2002; Popović 2015; Post 2018 (sacrebleu).
    """
    from sacrebleu.metrics import BLEU, CHRF

    metrics = {"bleu": BLEU(tokenize=tokenizer), "chrf": CHRF()}
    scores = {name: float(metric.corpus_score(hypotheses, [references]).score) for name, metric in metrics.items()}
    return scores, {name: str(metric.get_signature()) for name, metric in metrics.items()}


def _write_metrics(
    run: Run, task: str, metrics: dict[str, float], signatures: dict[str, str], counts: dict[str, int]
) -> None:
    about = {"schema": 1, "task": task, "split": run.config.split}
    run.out.write_json("metrics.json", {**about, "metrics": metrics, "signatures": signatures, "counts": counts})
    run.out.counts |= {**counts, "task": task, "metrics": metrics, "signatures": signatures}


def _documents(data: Artifact, split: str) -> np.ndarray:
    """The document of each sequence of a split, of which every sequence has one."""
    import numpy as np

    with data.open(f"{split}.parquet") as file:
        column = open_parquet(file).read(["document"]).column("document").combine_chunks()
    return np.maximum.reduceat(column.flatten().to_numpy(), column.offsets.to_numpy()[:-1])


def _texts(corpus: Artifact, documents: np.ndarray) -> list[tuple[str, str]]:
    """The first and the second text of some documents, in their order."""
    from pipelines.text.corpus_files import read_blocks

    wanted = {int(document): ["", ""] for document in documents}
    for batch in read_blocks(corpus, ["document", "block", "text"]):
        for document, block, text in zip(
            *(batch.column(n).to_pylist() for n in ("document", "block", "text")), strict=True
        ):
            if document in wanted and block < 2:
                wanted[document][block] = text
    return [(wanted[int(document)][0], wanted[int(document)][1]) for document in documents]


STAGE = Stage("evaluate", "evaluation", 1, Config, build)
