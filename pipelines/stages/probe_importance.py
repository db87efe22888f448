"""Stage ``probe-importance``: how much does the loss of a fine-tuned model depend on each head?

Reads a model of a task, and a dataset or its sequences.  Writes probe@1: ``heads.parquet`` (one row for each head),
``probe.json`` and ``heads.png``.  Plans choose heads by ``heads.parquet`` (``--scores``).

Source: Li et al. 2022, section 3.1, by the code of T3-Vis; `guidance.probes.importance`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

from pydantic import Field

from guidance.errors import InputError
from pipelines import task_inputs
from pipelines.engine import stage
from pipelines.engine.stage import Options, Result, Run, Stage, check_working_folder, knob, run_stage
from pipelines.stages.evaluate import evaluation_of
from pipelines.storage.store import Store
from pipelines.training.learner import folder_of
from pipelines.training.plan_inputs import check_needs, features, load_inputs, model_input, read_tables
from pipelines.training.tasks import TASKS

UNITS: Mapping[str, str] = {
    "score": "importance from 0 to 1, over all heads or those of a layer",
    "importance": "sum over the weights of the head of (gradient times weight) squared",
}


class Config(stage.Config):
    """Whose loss counts, and how importance is summed."""

    split: Literal["train", "valid", "test"] = Field("valid", description="which split of the dataset")
    limit: int = Field(0, ge=0, description="at most so many examples; 0 for all")
    form: Literal["elementwise", "joint"] = Field(
        "elementwise", description="squares of gradient times weight, or the square of their sum over a head"
    )
    accumulate: Literal["gradients", "scores"] = Field(
        "gradients", description="add up gradients over all batches before squaring, or the importance of each batch"
    )
    by_layer: bool = Field(False, description="scores from 0 to 1 within each layer, not over all heads")
    batch_size: int = Field(8, ge=1, description="examples per batch, whose mean loss gives the gradient")
    masks: str = knob("", "what `guide build-masks` made of the sequences, for plans that read words, idf or trees")
    scores: str = knob("", "a JSON, CSV or Parquet file with scores of heads, for plans that choose heads by score")
    parser: str = knob("", "for a dataset: the parser, for plans that read syntax")
    sequence_length: int = knob(
        0, "for a dataset: longest sequence, in tokens; by default as in training, or 128", ge=0
    )
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "where to compute; auto takes a GPU if there is one")


def run(model: str, data: str, config: Config, *, store: Store, **options: Unpack[Options]) -> Result:
    """Probe a model.

    Args:
        model: a reference, or a model folder, with a head for a task.
        data: reference of a dataset of its task, or of sequences of one.

    Raises:
        InputError: the model is of another task, or of none; or the split is empty or has no labels.
    """
    check_working_folder()
    with contextlib.ExitStack() as stack:
        inputs: dict[str, Any] = {"model": model_input(model, store)}
        folder = folder_of(inputs["model"])
        dataset, sequences = task_inputs.open_data(data, store, stack)
        if sequences is None:
            sequences, config = task_inputs.read_by(model, folder, dataset, config, store, options.get("progress"))
            stack.enter_context(sequences)
        inputs["sequences"] = sequences
        inputs |= load_inputs(config, [sequences], store)
        task_inputs.check_split(sequences, config.split)
        return run_stage(STAGE, config, inputs, store=store, **options)


def build(run: Run) -> None:
    """The stage itself; see `run`."""
    import torch

    import guidance
    from guidance.checkpoint import find_plan
    from guidance.plan import Plan
    from guidance.probes.importance import Importance, normalised
    from guidance.sites import Site
    from pipelines.probing.heads import best, heads_picture, write_heads
    from pipelines.training.batches import Examples
    from pipelines.training.learners.examples import Grouped, ModelInputs, batches_of
    from pipelines.training.models import check_lengths, check_model, read_tokenizer
    from pipelines.training.opening import Unguided, open_trained

    config, data = run.config, run.inputs["sequences"]
    folder = folder_of(run.inputs["model"])
    evaluation = evaluation_of(folder, data)
    task = TASKS.get(evaluation.task)
    if task is None:
        raise InputError(f"{folder}: has no head for a task", hint="guide finetune DATASET --init MODEL")
    plan = find_plan(folder) or Plan()
    check_needs(plan, str(folder), run.inputs, training=False)
    model, handle = open_trained(folder, read_tables(run.inputs), config.device, evaluation.auto_class)
    if isinstance(handle, Unguided):
        handle = guidance.install(model, Plan())
    tokenizer = read_tokenizer(data, masked=False)
    check_model(model, Path(folder), tokenizer)
    head = task.head().of_model(model.config)
    rows = Examples.read(
        data,
        config.split,
        len(tokenizer),
        features=features(plan, training=False),
        masks=run.inputs.get("masks"),
        own=task.columns,
    )
    check_lengths(model.config, {config.split: rows}, data.reference)
    examples, inputs = Grouped(rows, together=head.together), ModelInputs(model, tokenizer.pad_token_id)
    number = min(len(examples), config.limit or len(examples))
    model.requires_grad_(True).eval()
    counted, found = Importance(model, handle.sites, config.form), dict[Site, torch.Tensor]()
    labelled = 0
    with run.progress.task("probe", total=number, unit="examples") as bar:
        for batch in batches_of(examples, config.batch_size, config.limit):
            bar.advance(len(batch.sizes))
            if not head.count(batch):
                continue
            labelled += len(batch.sizes)
            given = inputs.of(batch)
            extra = handle.at_inference(**inputs.seen(given, batch))
            outputs = head.outputs(model(**given, **extra).logits, batch)
            loss = head.loss(outputs, head.targets(batch).to(outputs.device), batch)
            (loss / head.count(batch)).backward()
            if config.accumulate == "scores":
                found = {site: found.get(site, 0) + scores for site, scores in counted.scores().items()}
                model.zero_grad()
    if not labelled:
        raise InputError(f"{data.reference}: no example of {config.split!r} has a label that the model knows")
    if config.accumulate == "gradients":
        found = counted.scores()
    figures = {"score": normalised(found, by_layer=config.by_layer), "importance": found}
    table = write_heads(run, figures, UNITS)
    ranked = sorted(table, key=lambda row: -float(row["importance"]))
    counts = {"examples": number, "heads": len(table)}
    summary = {"best": best(table, "importance"), "ranking": [[row["layer"], row["head"]] for row in ranked]}
    about = {"schema": 1, "probe": "importance", "task": task.name, "counts": counts}
    run.out.write_json("probe.json", {**about, **summary})
    title = f"Importance of heads (%)\n{task.name}, {number:,} examples"
    run.out.write("heads.png", heads_picture(table, "score", title=title, label="importance"))
    run.out.counts |= {"probe": "importance", "task": task.name, **counts, "best": summary["best"]}


STAGE = Stage("probe-importance", "probe", 1, Config, build)
