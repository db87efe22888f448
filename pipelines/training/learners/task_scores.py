"""How ``guide evaluate`` measures the tasks of ``guide finetune``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from guidance.installation import Handle
from pipelines.engine.stage import Run
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.tables import DOCUMENTS
from pipelines.training.batches import Examples
from pipelines.training.learners.examples import Grouped, Head, ModelInputs, Prediction, batches_of, without_gradients
from pipelines.training.models import check_lengths, read_tokenizer
from pipelines.training.objective import Task
from pipelines.training.plan_inputs import features


def evaluate(run: Run, folder: Path, model: Any, handle: Handle, task: Task, head: type[Any]) -> None:
    """Predict the examples of a split; write ``predictions.parquet`` and ``metrics.json``.

    Args:
        head: the class of the task's `Head`; its ``of_model`` makes one from the configuration of a model.
    """
    of_model: Head = head.of_model(model.config)
    predictions = predict(run, model, handle, task, of_model)
    ids = _ids(run.inputs["corpus"])
    schema = prediction_schema()
    columns = {
        "id": [ids[p.number] for p in predictions],
        "gold": [p.gold for p in predictions],
        "prediction": [p.prediction for p in predictions],
        "scores": [list(p.scores) for p in predictions],
    }
    with run.out.parquet("predictions.parquet", schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    metrics = of_model.metrics(predictions)
    counts = {"examples": len(predictions), "unlabelled": sum(p.gold is None for p in predictions)}
    if counts["unlabelled"]:
        run.warn(f"{counts['unlabelled']:,} of {len(predictions):,} examples have no label; the metrics leave them out")
    about = {"schema": 1, "task": task.name, "split": run.config.split}
    run.out.write_json("metrics.json", {**about, "metrics": metrics, "signatures": {}, "counts": counts})
    run.out.counts |= {**counts, "task": task.name, "metrics": metrics, "signatures": {}}


def predict(run: Run, model: Any, handle: Handle, task: Task, head: Head) -> list[Prediction]:
    """What a model says of the examples of the split, in their order."""
    config, data = run.config, run.inputs["sequences"]
    tokenizer = read_tokenizer(data, masked=False)
    needed = features(handle.plan, training=False)
    rows = Examples.read(
        data, config.split, len(tokenizer), features=needed, masks=run.inputs.get("masks"), own=task.columns
    )
    check_lengths(model.config, {config.split: rows}, data.reference)
    examples = Grouped(rows, together=head.together)
    inputs = ModelInputs(model, tokenizer.pad_token_id)
    number = min(len(examples), config.limit or len(examples))
    found: list[Prediction] = []
    with run.progress.task("evaluate", total=number, unit="examples") as bar:
        for batch in batches_of(examples, config.batch_size, config.limit):
            logits = without_gradients(model, handle, inputs, batch)
            found += head.predictions(head.outputs(logits, batch), batch)
            bar.advance(len(batch.sizes))
    return found


def prediction_schema() -> Any:
    """Columns of ``predictions.parquet``."""
    fields = [
        pa.field("id", pa.string(), False, metadata={"unit": "id of the example in the dataset"}),
        pa.field("gold", pa.string(), metadata={"unit": "label of the dataset; null if it has none"}),
        pa.field("prediction", pa.string(), False, metadata={"unit": "label that the model gives"}),
        pa.field(
            "scores", pa.list_(pa.float64()), False, metadata={"unit": "of each class or choice in the model's order"}
        ),
    ]
    return pa.schema(fields)


def _ids(corpus: Artifact) -> list[str]:
    """The id of each document."""
    with corpus.open(DOCUMENTS) as raw:
        ids: list[str] = open_parquet(raw).read(columns=["id"])["id"].to_pylist()
    return ids
