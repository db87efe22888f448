"""How ``guide evaluate`` measures the tasks of ``guide finetune``, and what ``guide predict`` says with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from guidance.errors import InputError, counted
from guidance.installation import Handle
from pipelines.drawing import MOST_CLASSES, confusion_picture
from pipelines.engine.stage import Run
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.tables import DOCUMENTS
from pipelines.text.corpus_files import text_digests
from pipelines.text.records import short_list
from pipelines.training.batches import Examples
from pipelines.training.learner import name_of_model
from pipelines.training.learners.examples import Grouped, ModelInputs, batches_of, without_gradients
from pipelines.training.metrics_files import write_metrics
from pipelines.training.model_checks import check_lengths, check_model
from pipelines.training.models import read_tokenizer
from pipelines.training.plan_inputs import features
from pipelines.training.task import SPARSITY_ROWS, Prediction, Task

MOST_PARTS = 50
"""Slices are left out if there would be more, as there are with a file for each example."""


def evaluate(run: Run, model: Any, handle: Handle, task: Task) -> None:
    """Predict the examples of a split; write ``predictions.parquet`` and ``metrics.json``."""
    unknown = unknown_labels(run, task)
    predictions, tokens = predict(run, model, handle, task)
    sources = write_predictions(run, predictions, tokens)
    counts = {"examples": len(predictions), "unlabelled": sum(p.gold is None for p in predictions)}
    counts |= unknown | seen_in_training(run, predictions)
    if counts["unlabelled"]:
        have = counted(counts["unlabelled"], "has", "have", of=f"{len(predictions):,} examples")
        run.warn(f"{have} no label; the metrics leave out such examples")
    report = task.report(predictions)
    report |= sparsity(run, model, handle, task)
    report["slices"] = slices(task, predictions, {"tokens": _thirds(tokens), "source": sources})
    if "confusion" in report and len(report["confusion"]["labels"]) <= MOST_CLASSES:
        title = f"{name_of_model(run.inputs['model'])}\n{task.name}, {run.config.split}, {len(predictions):,} examples"
        run.out.write("confusion.png", confusion_picture(**report["confusion"], title=title))
    metrics = task.metrics(predictions)
    undefined = {name: "all true labels are the same" for name, value in metrics.items() if value is None}
    if undefined:
        run.warn(f"{' and '.join(undefined)} undefined: all true labels are the same")
    about = {name: told for name, told in task.signatures().items() if name in metrics} | undefined
    write_metrics(run, task.name, metrics, about, counts, **report)


def unknown_labels(run: Run, task: Task) -> dict[str, int]:
    """``unknown_labels``: how many examples have labels that the model cannot give; empty if there are none.

    Raises:
        InputError: the model can give none of the labels.
    """
    data = run.inputs["sequences"]
    with data.open(f"{run.config.split}.parquet") as raw:
        rows = open_parquet(raw).read(columns=["example", "label"]).to_pylist()
    gold = list({row["example"]: row["label"] for row in rows}.values())[: run.config.limit or None]
    answers = [task.labels_of(label) for label in gold if label is not None]
    labels = {label: known for own in answers for label, known in own.items()}
    unknown = sorted(label for label, known in labels.items() if not known)
    if not unknown:
        return {}
    if len(unknown) == len(labels):
        raise InputError(
            f"{data.reference}: the model knows none of its labels, {short_list(unknown)}; it knows "
            + short_list(task.fields()["id2label"].values()),
            hint="--label-column of `guide build-dataset` chooses the column of the labels",
        )
    number = sum(not all(own.values()) for own in answers)
    have = counted(number, "has", "have", of=f"{len(gold):,} examples")
    run.warn(f"{have} labels that the model does not know: {short_list(unknown)}")
    return {"unknown_labels": number}


def seen_in_training(run: Run, predictions: Sequence[Prediction]) -> dict[str, int]:
    """``seen_in_training``: how many examples have the text of one that the model was trained on; empty if nothing tells."""
    if (trained_on := run.inputs.get("trained_on")) is None:
        return {}
    known = set(text_digests(trained_on, split="train").values())
    tested = text_digests(run.inputs["corpus"])
    numbers = {prediction.number for prediction in predictions}
    if seen := sum(tested[number] in known for number in numbers):
        have = counted(seen, "has", "have", of=f"{len(numbers):,} examples")
        run.warn(f"{have} the text of an example that the model was trained on")
    return {"seen_in_training": seen}


def answers(run: Any, model: Any, handle: Handle, task: Task) -> Iterator[dict[str, Any]]:
    """What a model says of each example of a split, with its id."""
    predictions, _ = predict(run, model, handle, task)
    ids, _ = documents(run.inputs["corpus"])
    for prediction in predictions:
        yield {"id": ids[prediction.number], **task.answer(prediction)}


def write_predictions(
    run: Run, predictions: Sequence[Prediction], tokens: Sequence[int], more: Sequence[tuple[pa.Field, list[Any]]] = ()
) -> list[str]:
    """Write ``predictions.parquet``; returns the source of each example.

    Args:
        more: further columns, each with its field.
    """
    ids, sources = documents(run.inputs["corpus"])
    its_sources = [sources[p.number] for p in predictions]
    columns = {
        "id": [ids[p.number] for p in predictions],
        "gold": [p.gold for p in predictions],
        "prediction": [p.prediction for p in predictions],
        "scores": [list(p.scores) for p in predictions],
        "tokens": tokens,
        "source": its_sources,
        **{field.name: values for field, values in more},
    }
    schema = pa.schema([*prediction_schema(), *(field for field, _ in more)])
    with run.out.parquet("predictions.parquet", schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    return its_sources


def slices(
    task: Task, predictions: Sequence[Prediction], groups: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, dict[str, float | None]]]:
    """The metrics of parts of the examples, and how many each part has; a grouping of one part is left out.

    Args:
        groups: for each way to divide the examples, the part that each example belongs to.
    """
    scores: dict[str, dict[str, dict[str, float | None]]] = {}
    for name, parts in groups.items():
        distinct = list(dict.fromkeys(parts))
        if not 1 < len(distinct) <= MOST_PARTS:
            continue
        chosen = {part: [p for p, own in zip(predictions, parts, strict=True) if own == part] for part in distinct}
        scores[name] = {part: {"examples": len(some), **task.metrics(some)} for part, some in sorted(chosen.items())}
    return scores


def _thirds(sizes: Sequence[int]) -> list[str]:
    """For each size, whether it is among the shortest, middle or longest third, with the range of that third."""
    if not sizes:
        return []
    low, high = (int(bound) for bound in np.quantile(sizes, [1 / 3, 2 / 3], method="lower"))
    names = (f"1: at most {low}", f"2: {low + 1} to {high}", f"3: over {high}")
    return [names[(size > low) + (size > high)] for size in sizes]


def predict(run: Any, model: Any, handle: Handle, task: Task) -> tuple[list[Prediction], list[int]]:
    """What a model says of the examples of the split, in their order, and how many tokens each of them has.

    Args:
        run: its ``config`` has ``split``, ``batch_size`` and ``limit``; its ``inputs`` the sequences, and masks if the plan
            needs some; and its ``progress`` draws.
    """
    config, data = run.config, run.inputs["sequences"]
    rows, inputs = _read(run, model, handle, task)
    check_lengths(model.config, {config.split: rows}, data.reference)
    examples = Grouped(rows, together=task.together)
    number = task.judged_together(rows, min(len(examples), config.limit or len(examples)))
    predictions: list[Prediction] = []
    with run.progress.task("evaluate", total=number, unit="examples") as bar:
        for batch in batches_of(examples, config.batch_size, number):
            logits = without_gradients(model, handle, inputs, batch)
            predictions += task.predictions(task.outputs(logits, batch), batch)
            bar.advance(len(batch.sizes))
    return task.completed(predictions, run.inputs["corpus"]), examples.lengths[:number].tolist()


def _read(run: Any, model: Any, handle: Handle, task: Task) -> tuple[Examples, ModelInputs]:
    """The rows of the split, and what makes inputs of the model of them.

    Raises:
        InputError: the model does not fit the tokenizer of the sequences.
    """
    tokenizer = read_tokenizer(run.inputs["sequences"], masked=False, padded=False)
    check_model(model, Path(model.name_or_path), tokenizer)
    needed, masks = features(handle.plan, training=False), run.inputs.get("masks")
    rows = Examples.read(
        run.inputs["sequences"], run.config.split, len(tokenizer), features=needed, masks=masks, own=task.columns
    )
    return rows, ModelInputs(model, tokenizer.pad_token_id)


def sentences_of(run: Any) -> list[list[int]]:
    """The column ``sentences`` of the sequences that are evaluated."""
    with run.inputs["sequences"].open(f"{run.config.split}.parquet") as raw:
        sentences: list[list[int]] = open_parquet(raw).read(columns=["sentences"])["sentences"].to_pylist()
    return sentences


def sparsity(run: Run, model: Any, handle: Handle, task: Task) -> dict[str, float]:
    """``sparsity``: the share of query-key pairs that the masked and fixed heads of a plan cannot use, over all heads.

    Counted on the first examples of the split: 1 - pairs with attention / (valid tokens squared times heads).  Heads
    without a mask count with all their pairs.  Empty for a plan that masks and fixes none.

    Source: Li et al. 2022; the published code counts padding too.
    """
    if not any(plan.making("keys") or plan.making("replace") for plan in handle.site_plans.values()):
        return {}
    rows, inputs = _read(run, model, handle, task)
    examples = Grouped(rows, together=task.together)
    used, all_pairs = 0.0, 0.0
    for batch in batches_of(examples, 8, min(SPARSITY_ROWS, run.config.limit or SPARSITY_ROWS)):
        given = inputs.of(batch)
        more = {name: values for name, values in given.items() if name == "token_type_ids"}
        attention = handle.probabilities(**inputs.seen(given, batch), **more)
        pairs_B = given["attention_mask"].sum(-1).double().square()
        for attention_BHQK in attention.values():
            valid_BT = given["attention_mask"].bool()
            pairs_BHQK = (attention_BHQK > 0) & valid_BT[:, None, :, None] & valid_BT[:, None, None]
            used += float(pairs_BHQK.sum())
            all_pairs += float(pairs_B.sum()) * attention_BHQK.shape[1]
    return {"sparsity": 1 - used / all_pairs}


def prediction_schema() -> Any:
    """Columns of ``predictions.parquet``."""
    fields = [
        pa.field("id", pa.string(), False, metadata={"unit": "id of the example in the dataset"}),
        pa.field("gold", pa.string(), metadata={"unit": "label of the dataset; null if it has none"}),
        pa.field("prediction", pa.string(), False, metadata={"unit": "label that the model gives"}),
        pa.field(
            "scores", pa.list_(pa.float64()), False, metadata={"unit": "of each class or choice in the model's order"}
        ),
        pa.field("tokens", pa.int32(), False, metadata={"unit": "count in its sequences, special ones included"}),
        pa.field("source", pa.string(), False, metadata={"unit": "name of the file"}),
    ]
    return pa.schema(fields)


def documents(corpus: Artifact) -> tuple[list[str], list[str]]:
    """The id and the source of each document."""
    with corpus.open(DOCUMENTS) as raw:
        table = open_parquet(raw).read(columns=["id", "source"])
    return table["id"].to_pylist(), table["source"].to_pylist()
