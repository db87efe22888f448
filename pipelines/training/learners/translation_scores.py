"""How ``guide evaluate`` measures translation.

Negative log-likelihood of the targets in nats per token; and BLEU and chrF of beam search, against the second texts of the
examples in the corpus.  The signatures of sacrebleu say how BLEU and chrF were computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from guidance.errors import NumericalError
from guidance.installation import Handle
from guidance.objectives.translation import translate
from pipelines.engine.stage import Run
from pipelines.metrics import comparison
from pipelines.metrics.comparison import Compared, Table
from pipelines.metrics.significance import Difference
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.text.corpus_files import read_blocks
from pipelines.training.batches import Examples
from pipelines.training.learners.translation import (
    Pairs,
    check_vocabularies,
    likelihood,
    tensors,
    tokenizer_of_targets,
)
from pipelines.training.metrics_files import write_metrics
from pipelines.training.model_checks import check_lengths
from pipelines.training.models import read_tokenizer
from pipelines.training.plan_inputs import features


def evaluate(run: Run, folder: Path, model: Any, handle: Handle) -> None:
    """Translate the examples of a split; write ``predictions.parquet`` and ``metrics.json``.

    Raises:
        InputError: model and sequences do not fit each other.
        NumericalError: the likelihood is not finite.
    """
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
    most = model.config.max_position_embeddings
    decoder = target_tokenizer.backend_tokenizer
    hypotheses = [""] * number
    total, tokens = 0.0, 0.0
    # similar lengths together; the longest first, so that a batch that is too large fails at once
    order = np.argsort(-pairs.lengths[:number], kind="stable").tolist()
    with run.progress.task("evaluate", total=number, unit="examples") as bar, torch.no_grad():
        for start in range(0, number, config.batch_size):
            chosen = order[start : start + config.batch_size]
            batch = pairs.batch(chosen)
            inputs = tensors(batch, model)
            total += likelihood(model, handle, inputs).item()
            tokens += batch.num_targets
            translations = translate(
                model,
                handle,
                inputs.model,
                inputs.columns,
                beams=config.beams,
                max_length=min(config.max_length or most, most),
                length_penalty=config.length_penalty,
            )
            for example, ids in zip(chosen, translations, strict=True):
                hypotheses[example] = decoder.decode(ids, skip_special_tokens=True).strip()
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
    write_metrics(run, "translation", {"nll": nll, **scores}, signatures, {"examples": number, "tokens": int(tokens)})


def prediction_schema() -> Any:
    """Columns of ``predictions.parquet``."""
    units = {
        "source": "first text of the example",
        "reference": "second text of the example",
        "hypothesis": "what the model makes of the source",
    }
    return pa.schema([pa.field(name, pa.string(), False, metadata={"unit": unit}) for name, unit in units.items()])


def translation_scores(
    hypotheses: list[str], references: list[str], tokenizer: str = "13a"
) -> tuple[dict[str, float], dict[str, str]]:
    """BLEU and chrF of a corpus, from 0 to 100, and the signatures of sacrebleu for both.

    Source: Papineni et al. 2002; Popović 2015; Post 2018 (sacrebleu).
    """
    metrics = _metrics(tokenizer)
    scores = {name: float(metric.corpus_score(hypotheses, [references]).score) for name, metric in metrics.items()}
    return scores, {name: str(metric.get_signature()) for name, metric in metrics.items()}


def _metrics(tokenizer: str) -> dict[str, Any]:
    return {"bleu": BLEU(tokenize=tokenizer), "chrf": CHRF()}


def _documents(data: Artifact, split: str) -> np.ndarray:
    """The document of each sequence of a split; every sequence has exactly one."""
    with data.open(f"{split}.parquet") as file:
        column = open_parquet(file).read(["document"]).column("document").combine_chunks()
    return np.maximum.reduceat(column.flatten().to_numpy(), column.offsets.to_numpy()[:-1])


def _texts(corpus: Artifact, documents: np.ndarray) -> list[tuple[str, str]]:
    """The first and the second text of each of these documents, in their order."""
    wanted = {int(document): ["", ""] for document in documents}
    for batch in read_blocks(corpus, ["document", "block", "text"]):
        for document, block, text in zip(
            *(batch.column(n).to_pylist() for n in ("document", "block", "text")), strict=True
        ):
            if document in wanted and block < 2:
                wanted[document][block] = text
    return [(wanted[int(document)][0], wanted[int(document)][1]) for document in documents]


def compare(one: Table, other: Table, tokenizer: str = "13a") -> list[Compared]:
    """BLEU and chrF of two models beside each other, by sacrebleu's approximate randomisation."""
    metrics = _metrics(tokenizer)
    systems: list[tuple[str, Sequence[str]]] = [("baseline", one["hypothesis"]), ("other", other["hypothesis"])]
    test = PairedTest(systems, metrics, [one["reference"]], test_type="ar", n_samples=comparison.ROUNDS)
    scores: dict[str, Any] = test()[1]
    compared, n, nan = [], len(one["reference"]), float("nan")
    for name in metrics:
        first, second = next(found for key, found in scores.items() if key.lower().startswith(name))  # chrF2
        effect, p = float(second.score - first.score), float(second.p_value)
        difference = Difference("approximate randomisation", effect, nan, nan, p, n)
        compared.append(Compared(name, float(first.score), float(second.score), difference))
    return compared
