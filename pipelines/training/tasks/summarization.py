"""The task ``summarization``: which sentences of a document make its summary (BERTSum)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError, counted
from guidance.tasks.scores import Agreement
from guidance.tasks.summaries import normalised_gain, select
from pipelines.lazy import np, pa
from pipelines.training.objective import Card
from pipelines.training.task import Batch, Prediction, YesNoTask, scores_of_yes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pipelines.engine.stage import Run
    from pipelines.metrics.comparison import Compared, Table
    from pipelines.metrics.significance import Statistic

ROUGE = ("rouge1", "rouge2", "rougeLsum")
OF_DATA = ("_lead", "_oracle", "_oracle_seen")
"""Ends of the names of metrics that are the same whichever model was measured, so that there is nothing to compare."""


class Summarization(YesNoTask):
    """Says of each sentence of a document whether it belongs to the summary, from the state of its ``[CLS]``.

    Source: Liu & Lapata 2019: the loss is the sum over all sentences of a batch.
    """

    name = "summarization"
    learns = "the sentences that make a summary"
    needs = "summarization learns from documents with reference summaries."
    card = Card("extractive summariser", "token-classification", "AutoModelForTokenClassification")
    examples = ("guide finetune papers --init my-model --max-length 512 --plan preset:patterns",)
    columns = ("text", "segment")
    shape = "summaries"
    selectable = ("oracle_f1",)
    output = "in_summary"
    sums_losses = True

    @classmethod
    def one_answer(cls, answers: set[str]) -> str:
        return f"{'every' if '1' in answers else 'no'} sentence of the training documents belongs to its summary"

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        from guidance.objectives.replaced_token import two_classes

        rows, tokens = [], []
        for row, segment in enumerate(batch.columns["segment"]):
            begins = np.flatnonzero(np.diff(segment, prepend=-1)).tolist()
            rows += [row] * len(begins)
            tokens += begins
        return two_classes(logits[rows, tokens, 0])

    def targets(self, batch: Batch) -> list[int]:
        return [int(answer) for label in batch.labels for answer in (label or "").split()]

    def judged(self, batch: Batch) -> float:
        """An attack is judged by every sentence."""
        return self.count(batch)

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        scores = iter(scores_of_yes(outputs))
        predictions = []
        for label, number in zip(batch.labels, batch.numbers, strict=True):
            own = [next(scores) for _ in (label or "").split()]
            predictions.append(Prediction(number, label, " ".join(str(int(score > 0.5)) for score in own), own))
        return predictions

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """How well as many of the best sentences as the oracle takes are those that the oracle takes."""
        gold: list[bool] = []
        chosen: list[bool] = []
        for prediction in predictions:
            own = [answer == "1" for answer in (prediction.gold or "").split()]
            best = sorted(range(len(own)), key=lambda n, p=prediction: -p.scores[n])[: sum(own)]  # type: ignore[misc]
            gold += own
            chosen += [number in best for number in range(len(own))]
        return {"oracle_f1": Agreement.on(True, gold, chosen).f1} if gold else {}

    @classmethod
    def evaluate(cls, run: Run[Any], folder: Path, model: Any, handle: Any) -> None:
        """ROUGE of the sentences with the highest scores, with and without trigram blocking, beside what bounds it.

        The bounds are the first sentences of the document (``lead``), and the oracle on the whole document and on the sentences
        that the model sees.
        """
        from importlib.metadata import version

        from pipelines.text.document_sequences import oracle, references, texts_of
        from pipelines.training.learners import task_scores
        from pipelines.training.metrics_files import write_metrics

        task, corpus = cls(), run.inputs["corpus"]
        if corpus.counts.get("unlabelled"):
            raise InputError(
                f"{corpus.reference} has no summaries to compare with", hint="`guide predict` summarises files"
            )
        predictions, tokens = task_scores.predict(run, model, handle, task)
        size = int(run.inputs["sequences"].counts["summary_sentences"])
        numbers = task_scores.sentences_of(run)[: len(predictions)]
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
            name: [[texts[p.number][n] for n in own] for p, own in zip(predictions, of_all, strict=True)]
            for name, of_all in chosen.items()
        }
        scores = {name: rouge(of_all, [gold[p.number] for p in predictions]) for name, of_all in summaries.items()}
        metrics = {f"{metric}_{name}" if name else metric: scores[name][metric] for name in scores for metric in ROUGE}
        columns: list[list[Any]] = [
            numbers,
            chosen[""],
            chosen["blocked"],
            ["\n".join(summary) for summary in summaries[""]],
            ["\n\n".join(gold[p.number]) for p in predictions],
        ]
        more = list(zip(summary_fields(), columns, strict=True))
        sources = task_scores.write_predictions(run, predictions, tokens, more)
        gains = {
            metric: normalised_gain(scores[""][metric], scores["lead"][metric], scores["oracle"][metric])
            for metric in ROUGE
        }
        empty = sum(not sentences for sentences in chosen["oracle"])
        if empty:
            words = "shares no word with its summary", "share no word with their summary"
            run.warn(counted(empty, *words, of=f"{len(predictions):,} documents"))
        about = {
            "": f"rouge-score {version('rouge-score')}, F1, stemmed; of several references the best one counts",
            "blocked": "sentences that share three words with one that was taken are skipped",
            "lead": f"the first {size} sentences of the document",
            "oracle": "greedy oracle on the whole document",
            "oracle_seen": "greedy oracle on the sentences that the model sees",
        }
        told = {f"{metric}_{name}" if name else metric: about[name] for name in scores for metric in ROUGE}
        write_metrics(
            run,
            cls.name,
            metrics | task.metrics(predictions),
            told | {"oracle_f1": "of the chosen sentences against those of the oracle"},
            {
                "examples": len(predictions),
                "empty_oracles": empty,
                "summary_sentences": size,
                **task_scores.seen_in_training(run, predictions),
            },
            gain_over_lead=gains,
            **task_scores.sparsity(run, model, handle, task),
            slices=task_scores.slices(task, predictions, {"source": sources}),
        )

    @classmethod
    def answers(cls, run: Any, model: Any, handle: Any) -> Iterator[dict[str, Any]]:
        """For each document of a split its summary, with trigram blocking, in the order of the document; and the scores.

        ``sentences`` are the numbers of the sentences of the summary, and ``scores`` theirs.
        """
        from pipelines.text.document_sequences import texts_of
        from pipelines.training.learners.task_scores import documents, predict, sentences_of

        predictions, _ = predict(run, model, handle, cls())
        size = int(run.inputs["sequences"].counts["summary_sentences"])
        ids, _ = documents(run.inputs["corpus"])
        numbers = {p.number: seen for p, seen in zip(predictions, sentences_of(run), strict=False)}
        by_number = {prediction.number: prediction for prediction in predictions}
        for text in texts_of(run.inputs["corpus"]):
            if (prediction := by_number.get(text.number)) is None:
                continue
            seen, scores = numbers[text.number], prediction.scores
            chosen = sorted(select(scores, [text.sentences[number] for number in seen], size, True))
            yield {
                "id": ids[text.number],
                "summary": [text.sentences[seen[n]] for n in chosen],
                "sentences": [seen[n] for n in chosen],
                "scores": [scores[n] for n in chosen],
            }

    @classmethod
    def compare(cls, one: Table, other: Table) -> list[Compared]:
        """ROUGE of the summaries."""
        from pipelines.metrics.comparison import compare_statistics

        (first, size), (second, _) = map(_rouge_of_each, (one, other))
        return compare_statistics({name: (first[name], second[name]) for name in ROUGE}, size)

    @classmethod
    def compare_sets(cls, one: Table, other: Table) -> list[Compared]:
        from pipelines.metrics.comparison import compare_unpaired

        return compare_unpaired(_rouge_of_each(one), _rouge_of_each(other))


def _rouge_of_each(table: Table) -> tuple[dict[str, Statistic], int]:
    """ROUGE as functions of chosen summaries, and how many there are."""
    from pipelines.metrics.comparison import mean_of

    pairs = zip(table["summary"], table["reference"], strict=True)
    scores = [rouge([summary.split("\n")], [reference.split("\n\n")]) for summary, reference in pairs]
    return {name: mean_of([each[name] for each in scores]) for name in ROUGE}, len(scores)


def rouge(summaries: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> dict[str, float]:
    """The mean F1 over documents of ROUGE-1, ROUGE-2 and ROUGE-L with sentences, stemmed, from 0 to 1.

    Args:
        summaries: for each document its sentences; an empty summary scores 0.
        gold: for each document its reference summaries, with one sentence on a line; the one with the highest F1 counts.

    Source: the package rouge-score, a port of ROUGE-1.5.5 without its resampling.
    """
    from pipelines.engine.stage import require

    require("rouge_score", "rouge-score")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [
        scorer.score_multi(list(texts), "\n".join(summary)) for summary, texts in zip(summaries, gold, strict=True)
    ]
    return {metric: math.fsum(score[metric].fmeasure for score in scores) / max(1, len(scores)) for metric in ROUGE}


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
