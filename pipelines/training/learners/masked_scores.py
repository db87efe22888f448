"""How ``guide evaluate`` measures models that predict masked words: masked language models, also with next sentences, and
discriminators of replaced tokens.

Which tokens are masked depends on the seed and the number of the sequence alone, and is what validation masks in a training
with the same seed.  So the loss of a model on the first sequences of the validation split is that of its last validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guidance.errors import InputError
from guidance.installation import Handle
from guidance.objectives.masked_lm import IGNORED
from guidance.objectives.next_sentence import FOREIGN
from guidance.objectives.selection import logits_at
from guidance.tasks.scores import Agreement
from pipelines.engine.stage import Run
from pipelines.training.batches import Examples, pad_features
from pipelines.training.learner import Setup
from pipelines.training.learners.masked_lm import MaskedLM
from pipelines.training.learners.next_sentence import NextSentence, read_documents
from pipelines.training.learners.replaced_token import ReplacedToken
from pipelines.training.learners.word_scores import (
    PredictionColumns,
    exp_of,
    nll_of,
    passes,
    ratio,
    words_of_rows,
    write_scores,
)
from pipelines.training.model_checks import check_lengths, check_model
from pipelines.training.models import mask_probability_of, read_tokenizer
from pipelines.training.opening import open_trained
from pipelines.training.plan_checks import GENERATOR_FOLDER
from pipelines.training.plan_inputs import features

OF_WORDS = ("sequence", "masked", "correct", "nll")
OF_PAIRS = (*OF_WORDS, "follows", "follows_score")
OF_TOKENS = ("sequence", "tokens", "replaced", "found", "right", "nll")
"""The columns of the predictions of each evaluation."""


def probability(run_config: Any, model: Any) -> float:
    """The share of tokens to mask: the one asked for, that of the model's training, or 0.15.

    Args:
        model: the input of the run.
    """
    return float(run_config.mask_probability or mask_probability_of(model))


# the three evaluations


def evaluate_words(run: Run, folder: Path, model: Any, handle: Handle) -> None:
    """Measure a masked language model; writes ``metrics.json`` and ``predictions.parquet``.

    Raises:
        InputError: model and sequences do not fit each other, or no token is masked.
        NumericalError: the loss is not finite.
    """
    setup = _setup(run, folder, model, handle)
    learner, columns = MaskedLM(setup, model), PredictionColumns(*OF_WORDS)
    for numbers, batch, inputs, output in passes(run, learner):
        columns.add(sequence=numbers, **words_of_rows(output.logits, inputs, batch.length, len(numbers)))
    _finish(run, "masked-lm", columns, {}, {}, pseudo=(setup, model, handle))


def evaluate_pairs(run: Run, folder: Path, model: Any, handle: Handle) -> None:
    """Measure a masked language model that also predicts next sentences; see `evaluate_words`."""
    setup = _setup(run, folder, model, handle)
    documents, _ = read_documents((setup.sequences,), run.config.split, setup.tokenizer, setup.max_length)
    paired = Setup(**{**vars(setup), "valid": documents})
    check_lengths(model.config, {run.config.split: documents}, setup.sequences.reference)
    learner = NextSentence(paired, model, [])
    columns = PredictionColumns(*OF_PAIRS)
    loss = right = 0.0
    for numbers, batch, inputs, output in passes(run, learner):
        logits_B2, labels_B = output.seq_relationship_logits.float(), inputs.relations_B  # type: ignore[attr-defined]
        has_pair = labels_B != IGNORED
        loss += torch.nn.functional.cross_entropy(logits_B2[has_pair], labels_B[has_pair], reduction="sum").item()
        right += int((logits_B2.argmax(-1) == labels_B)[has_pair].sum())
        columns.add(
            sequence=learner.validation[numbers],
            **words_of_rows(output.logits, inputs, batch.length, len(numbers)),
            follows=[None if label == IGNORED else label != FOREIGN for label in labels_B.tolist()],
            follows_score=[
                score if known else None
                for score, known in zip(logits_B2.softmax(-1)[:, 0].tolist(), has_pair.tolist(), strict=True)
            ],
        )
    pairs = sum(value is not None for value in columns.values["follows"])
    more = {"nsp_loss": ratio(loss, pairs), "nsp_accuracy": ratio(right, pairs)}
    signatures = {"nsp_loss": "nats per pair of texts", "nsp_accuracy": "share of the pairs of texts"}
    _finish(run, "masked-lm-nsp", columns, more, signatures, counts={"pairs": pairs}, pseudo=(setup, model, handle))


def evaluate_discriminator(run: Run, folder: Path, model: Any, handle: Handle) -> None:
    """Measure how a discriminator finds what its generator replaced; see `evaluate_words`.

    The generator is the one beside the model.  Without one, replacements are drawn from the unigram distribution of the
    training split.
    """
    network, handles = None, {}
    if (folder / GENERATOR_FOLDER).is_dir():
        network, handles[GENERATOR_FOLDER] = open_trained(folder / GENERATOR_FOLDER, device=run.config.device)
    setup = _setup(run, folder, model, handle, handles, reads_train=network is None)
    if network is None and not len(setup.train):
        raise InputError(
            f"{folder}: has no generator beside it, and {setup.sequences.reference} has no training split to draw words from",
            hint="evaluate on sequences with a training split",
        )
    learner, columns = (
        ReplacedToken(setup, model, network),
        PredictionColumns(*OF_TOKENS),
    )
    filling = np.zeros(4)
    for numbers, batch, inputs, output in passes(run, learner, filling):
        judged, size = inputs.places_N.cpu().numpy() // batch.length, len(numbers)
        replaced_N, found_N = (chosen.bool().cpu().numpy() for chosen in (inputs.labels_N, output.logits.argmax(-1)))
        columns.add(
            sequence=numbers,
            tokens=np.bincount(judged, minlength=size),
            replaced=np.bincount(judged, replaced_N, size),
            found=np.bincount(judged, found_N, size),
            right=np.bincount(judged, replaced_N & found_N, size),
            nll=np.bincount(judged, nll_of(output.logits, inputs.labels_N), size),
        )
    tokens, replaced, found, right = (columns.sum(name) for name in ("tokens", "replaced", "found", "right"))
    agreed = Agreement(right, found, replaced)
    metrics = {
        "loss": ratio(columns.sum("nll"), tokens),
        "precision": agreed.precision if found else None,
        "recall": agreed.recall if replaced else None,
        "f1": agreed.f1 if right else None,
        "accuracy": ratio(tokens - found - replaced + 2 * right, tokens),
        "replaced": ratio(replaced, tokens),
    }
    drawn_by = "a unigram generator" if network is None else "its generator"
    signatures = {
        "loss": "nats per token, all tokens judged",
        "precision": "share of the tokens found that were replaced",
        "recall": "share of the replaced tokens that were found",
        "f1": "harmonic mean of precision and recall",
        "accuracy": "share of all tokens",
        "replaced": f"share of all tokens; {_masking(run)}, words drawn by {drawn_by}",
    }
    masked = filling[3]
    if network is not None:
        metrics |= {"generator_loss": ratio(filling[0], masked), "generator_accuracy": ratio(filling[1], masked)}
        signatures |= {
            "generator_loss": "nats per masked token",
            "generator_accuracy": "share of the masked tokens that the generator would predict",
        }
    write_scores(run, "replaced-tokens", columns, metrics, signatures, {"tokens": int(tokens), "masked": int(masked)})


# what they share


@dataclass(frozen=True)
class _Settings:
    """What learners of masked words read of a configuration, for a model that is only measured."""

    seed: int
    mask_probability: float
    valid_sequences: int
    discriminator_weight: float = 1.0


def _setup(
    run: Run,
    folder: Path,
    model: Any,
    handle: Any,
    handles: Mapping[str, Any] | None = None,
    *,
    reads_train: bool = False,
) -> Setup:
    """What a learner needs to read the split that is evaluated, as its validation split."""
    data, config = run.inputs["sequences"], run.config
    tokenizer = read_tokenizer(data)
    check_model(model, folder, tokenizer)
    masks, needed = run.inputs.get("masks"), features(handle.plan, training=False)
    rows = Examples.read(data, config.split, len(tokenizer), features=needed, masks=masks)
    train = Examples.read(data, "train" if reads_train else "", len(tokenizer))
    check_lengths(model.config, {config.split: rows}, data.reference)
    settings = _Settings(config.mask_seed, probability(config, run.inputs["model"]), config.limit)
    own_handles = {"": handle, **(handles or {})}
    return Setup(settings, handle.plan, data, tokenizer, train, rows, handles=own_handles)


def _masking(run: Run) -> str:
    return f"{100 * probability(run.config, run.inputs['model']):g} % masked, seed {run.config.mask_seed}"


def _finish(
    run: Run,
    task: str,
    columns: PredictionColumns,
    more: Mapping[str, float | None],
    signatures: Mapping[str, str],
    *,
    counts: Mapping[str, int] | None = None,
    pseudo: tuple[Setup, Any, Any],
) -> None:
    """Write the metrics of predicted words.

    Args:
        more: further metrics, which ``signatures`` describe.
        pseudo: the arguments of `_pseudo` after the run.
    """
    masked = columns.sum("masked")
    if not masked:
        raise InputError(
            f"{run.inputs['sequences'].reference}: no token of {run.config.split!r} is masked",
            hint="--mask-probability, --limit 0, or sequences with more text",
        )
    loss = columns.sum("nll") / masked
    metrics = {"loss": loss, "perplexity": exp_of(loss), "accuracy": columns.sum("correct") / masked, **more}
    told = {
        "loss": f"nats per masked token; {_masking(run)}",
        "perplexity": "e to the power of the loss",
        "accuracy": "share of the masked tokens",
        **signatures,
    }
    if run.config.pseudo_perplexity:
        found, number, rows = _pseudo(run, *pseudo)
        metrics["pseudo_perplexity"] = None if not number else exp_of(found / number)
        told["pseudo_perplexity"] = (
            f"every token masked alone, {number:,} tokens of {rows:,} sequences (Salazar et al. 2020)"
        )
    floors = run.inputs["floors"].counts["nats"] if "floors" in run.inputs else {}
    write_scores(run, task, columns, metrics, told, {"masked": int(masked), **(counts or {})}, floors=floors)


def _pseudo(run: Run, setup: Setup, model: Any, handle: Any) -> tuple[float, int, int]:
    """The sum of the negative log-likelihoods of tokens that are masked alone, how many tokens, and of how many sequences."""
    tokenizer, rows, device = setup.tokenizer, setup.valid, next(model.parameters()).device
    kept = min(len(rows), run.config.pseudo_perplexity)
    total, number = 0.0, 0
    with run.progress.task("pseudo-perplexity", total=kept, unit="sequences") as bar, torch.no_grad():
        for index in range(kept):
            ids = rows[index]
            places = np.flatnonzero(~np.isin(ids, tokenizer.all_special_ids))
            for start in range(0, len(places), run.config.batch_size):
                some = places[start : start + run.config.batch_size]
                seen = np.tile(ids, (len(some), 1))
                seen[np.arange(len(some)), some] = tokenizer.mask_token_id
                inputs = {"input_ids": torch.from_numpy(seen).to(device)}
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
                rows_of = {name: [rows.column(name, index)] * len(some) for name in rows.columns}
                columns = pad_features(rows_of, len(ids), device)
                columns["original"] = torch.from_numpy(np.tile(ids, (len(some), 1))).to(device)
                at = torch.from_numpy(np.arange(len(some)) * len(ids) + some).to(device)
                output = logits_at(model, at, **inputs, **handle.at_inference(**inputs, **columns))
                total += float(nll_of(output.logits, torch.from_numpy(ids[some]).to(device)).sum())
                number += len(some)
            bar.advance(1)
    return total, number, kept
