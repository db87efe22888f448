"""How ``guide evaluate`` measures ``summarization`` and ``segmentation``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from guidance.errors import InputError
from guidance.installation import Handle
from guidance.tasks.segments import window_size
from guidance.tasks.summaries import normalised_gain, select
from pipelines.engine.stage import Run, require
from pipelines.storage.files import open_parquet
from pipelines.text.document_sequences import oracle, references, texts_of
from pipelines.training.learners.binary import Boundaries, Sentences, documents_of
from pipelines.training.learners.task_scores import (
    documents,
    predict,
    seen_in_training,
    slices,
    sparsity,
    write_predictions,
)
from pipelines.training.metrics_files import write_metrics
from pipelines.training.objective import Task

ROUGE = ("rouge1", "rouge2", "rougeLsum")


def evaluate_summarization(run: Run, model: Any, handle: Handle, task: Task) -> None:
    """ROUGE of the sentences with the highest scores, with and without trigram blocking, beside what bounds it.

    The bounds are the first sentences of the document (``lead``), and the oracle on the whole document and on the sentences
    that the model sees.
    """
    head, data, corpus = Sentences(), run.inputs["sequences"], run.inputs["corpus"]
    if corpus.counts.get("unlabelled"):
        raise InputError(
            f"{corpus.reference} has no summaries to compare with", hint="`guide predict` summarises files"
        )
    predictions, tokens = predict(run, model, handle, task, head)
    size = int(data.counts["summary_sentences"])
    numbers = _sentences(run)[: len(predictions)]
    wanted = {prediction.number for prediction in predictions}
    texts = {text.number: text.sentences for text in texts_of(corpus) if text.number in wanted}
    gold = references(corpus)
    chosen: dict[str, list[list[int]]] = {name: [] for name in ("", "blocked", "lead", "oracle", "oracle_seen")}
    for prediction, seen in zip(predictions, numbers, strict=True):
        sentences, reference = texts[prediction.number], gold[prediction.number][0]
        visible = [sentences[number] for number in seen]
        for name, blocks in (("", False), ("blocked", True)):
            chosen[name].append([seen[n] for n in select(prediction.scores, visible, size, blocks)])
        chosen["lead"].append(list(range(min(size, len(sentences)))))
        chosen["oracle"].append(oracle(sentences, reference, size))
        chosen["oracle_seen"].append([seen[n] for n in oracle(visible, reference, size)])
    summaries = {
        name: [[texts[p.number][n] for n in own] for p, own in zip(predictions, found, strict=True)]
        for name, found in chosen.items()
    }
    scores = {name: rouge(found, [gold[p.number] for p in predictions]) for name, found in summaries.items()}
    metrics = {f"{metric}_{name}" if name else metric: scores[name][metric] for name in scores for metric in ROUGE}
    columns: list[list[Any]] = [
        numbers,
        chosen[""],
        chosen["blocked"],
        ["\n".join(summary) for summary in summaries[""]],
        ["\n\n".join(gold[p.number]) for p in predictions],
    ]
    more = list(zip(summary_fields(), columns, strict=True))
    sources = write_predictions(run, predictions, tokens, more)
    gains = {
        metric: normalised_gain(scores[""][metric], scores["lead"][metric], scores["oracle"][metric])
        for metric in ROUGE
    }
    empty = sum(not found for found in chosen["oracle"])
    if empty:
        run.warn(f"{empty:,} of {len(predictions):,} documents share no word with their summary")
    write_metrics(
        run,
        task.name,
        metrics | head.metrics(predictions),
        {
            "rouge1": f"rouge-score {version('rouge-score')}, F1, stemmed; of several references the best one counts",
            "rouge1_blocked": "sentences that share three words with one that was taken are skipped",
            "rouge1_lead": f"the first {size} sentences of the document",
            "rouge1_oracle": "greedy oracle on the whole document",
            "rouge1_oracle_seen": "greedy oracle on the sentences that the model sees",
            "oracle_f1": "of the chosen sentences against those of the oracle",
        },
        {
            "examples": len(predictions),
            "empty_oracles": empty,
            "summary_sentences": size,
            **seen_in_training(run, predictions),
        },
        gain_over_lead=gains,
        **sparsity(run, model, handle, task, head),
        slices=slices(head, predictions, {"source": sources}),
    )


def summaries(run: Any, model: Any, handle: Handle, task: Task) -> Iterator[dict[str, Any]]:
    """For each document of a split its summary, with trigram blocking, in the order of the document; and the scores.

    ``sentences`` are the numbers of the sentences of the summary, and ``scores`` theirs.
    """
    predictions, _ = predict(run, model, handle, task, Sentences())
    size = int(run.inputs["sequences"].counts["summary_sentences"])
    ids, _ = documents(run.inputs["corpus"])
    numbers = {p.number: seen for p, seen in zip(predictions, _sentences(run), strict=False)}
    by_number = {prediction.number: prediction for prediction in predictions}
    for text in texts_of(run.inputs["corpus"]):
        if (found := by_number.get(text.number)) is None:
            continue
        seen = numbers[text.number]
        chosen = sorted(select(found.scores, [text.sentences[number] for number in seen], size, True))
        yield {
            "id": ids[text.number],
            "summary": [text.sentences[seen[n]] for n in chosen],
            "sentences": [seen[n] for n in chosen],
            "scores": [found.scores[n] for n in chosen],
        }


def sections(run: Any, model: Any, handle: Handle, task: Task) -> Iterator[dict[str, Any]]:
    """For each document of a split its sections, as lists of sentences, and for each sentence but the last the score of a
    boundary behind it."""
    predictions, _ = predict(run, model, handle, task, Boundaries())
    ids, _ = documents(run.inputs["corpus"])
    behind: dict[int, list[float]] = {}
    for prediction in predictions:
        behind.setdefault(prediction.number, []).append(prediction.scores[0])
    for text in texts_of(run.inputs["corpus"]):
        scores = behind.get(text.number, [])
        if len(scores) < len(text.sentences) - 1:
            continue  # beyond --limit
        starts = [0, *(number for number, score in enumerate(scores, 1) if score > 0.5), len(text.sentences)]
        found = [text.sentences[start:end] for start, end in itertools.pairwise(starts)]
        yield {"id": ids[text.number], "sections": found, "scores": scores}


def rouge(summaries: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> dict[str, float]:
    """The mean F1 over documents of ROUGE-1, ROUGE-2 and ROUGE-L with sentences, stemmed, from 0 to 1.

    Args:
        summaries: for each document its sentences; an empty summary scores 0.
        gold: for each document its reference summaries, with one sentence on a line; the one with the highest F1 counts.

    Source: the package rouge-score, a port of ROUGE-1.5.5 without its resampling.
    """
    require("rouge_score", "rouge-score")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    found = [
        scorer.score_multi(list(texts), "\n".join(summary)) for summary, texts in zip(summaries, gold, strict=True)
    ]
    return {metric: math.fsum(score[metric].fmeasure for score in found) / max(1, len(found)) for metric in ROUGE}


def summary_fields() -> list[pa.Field]:
    """Further columns of ``predictions.parquet`` of summaries."""
    units = {
        "sentences": (pa.list_(pa.int32()), "numbers of the scored sentences"),
        "chosen": (pa.list_(pa.int32()), "their numbers, best first"),
        "chosen_blocked": (pa.list_(pa.int32()), "with trigram blocking"),
        "summary": (pa.string(), "one sentence a line"),
        "reference": (pa.string(), "one sentence a line"),
    }
    return [pa.field(name, kind, False, {"unit": unit}) for name, (kind, unit) in units.items()]


def boundary_fields() -> list[pa.Field]:
    """Further columns of ``predictions.parquet`` of sections."""
    unit = "running number in the document of the one before the boundary"
    return [pa.field("sentence", pa.int32(), False, {"unit": unit})]


def evaluate_segmentation(run: Run, model: Any, handle: Handle, task: Task) -> None:
    """Precision, recall and F1 of the boundaries, Pk and WindowDiff."""
    head, data = Boundaries(), run.inputs["sequences"]
    predictions, tokens = predict(run, model, handle, task, head)
    sentence = [number for (number,) in _sentences(run)[: len(predictions)]]
    sources = write_predictions(run, predictions, tokens, list(zip(boundary_fields(), [sentence], strict=True)))
    counts = {"examples": len(predictions), **head.report(predictions), **seen_in_training(run, predictions)}
    windows = [window_size(ends) for ends, _ in documents_of(predictions)]
    about: Mapping[str, str] = {
        "f1": "boundaries of all documents together, at a score over 0.5",
        "pk": "mean over documents; k = half the mean section of the reference, rounded, at least 2; N - k windows",
        "k": f"{min(windows)} to {max(windows)}",
    }
    if data.counts.get("sharing_test_documents") and run.config.split == "test":
        counts["sharing_test_documents"] = data.counts["sharing_test_documents"]
        run.warn(
            f"contaminated: {counts['sharing_test_documents']:,} test documents share a sentence with a training document"
        )
    write_metrics(
        run,
        task.name,
        head.metrics(predictions),
        about,
        counts,
        **sparsity(run, model, handle, task, head),
        slices=slices(head, predictions, {"source": sources}),
    )


def _sentences(run: Any) -> list[list[int]]:
    """The column ``sentences`` of the sequences that are evaluated."""
    with run.inputs["sequences"].open(f"{run.config.split}.parquet") as raw:
        found: list[list[int]] = open_parquet(raw).read(columns=["sentences"])["sentences"].to_pylist()
    return found
