"""Stage ``probe-loss``: where is a language model good?

Reads a model and sequences, and masks if they are given.  Writes probe@1: ``slices.parquet`` (one row for each slice: the loss of the
model beside n-gram floors), ``probe.json`` and ``loss.png``.

The slices are by how often the token occurs in the training text, its place in the sequence, whether it begins a word, its part of
speech, if the masks have it, and in masked language models whether its neighbours are masked.  Source of the floors:
`guidance.statistics.ngrams`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine.declaration import Table
from pipelines.engine.stage import Run
from pipelines.lazy import np
from pipelines.probing.heads import number, share
from pipelines.probing.probe import Findings, SequencesConfig, probe
from pipelines.stages.floors import OWN_NGRAMS
from pipelines.stages.reading import ON_SEQUENCES
from pipelines.storage.artifacts import Artifact
from pipelines.storage.tables import Columns
from pipelines.training.learner import name_of_model

if TYPE_CHECKING:
    from pipelines.probing.sequences import SequenceBatch, WatchedSequences
    from pipelines.training.learners.guided import Inputs

TABLE = "slices.parquet"

FREQUENCIES = (0, 1, 10, 100, 1000, 10_000)
"""The least counts of the bands of frequency."""

FLOORS = ("unigram", "previous", "neighbours", "ngrams")


class Config(SequencesConfig):
    """Which words are predicted; causal models predict all."""

    limit: int = Field(2000, ge=0, description="Maximum number of sequences; 0 for all.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the masking, as in training.")
    mask_probability: float = Field(0.15, gt=0, lt=1, description="Share of tokens that are masked and predicted.")


SLICES: Columns = {
    "slice": ("string", "what the tokens are divided by; all for all of them"),
    "value": ("string", "which of them"),
    "tokens": ("int64", "predicted tokens"),
    "loss": ("float64", "nats per predicted token"),
    "accuracy": ("float64", "share of these tokens that the model finds most likely"),
    **dict.fromkeys(FLOORS, ("float64", "loss of the n-gram floor")),
}
"""Columns of ``slices.parquet``."""


def measure(run: Run[Config]) -> Findings:
    """The loss of every slice.  Raises InputError if the model predicts no words, or the sequences have none to predict."""
    from guidance.objectives.causal_lm import documents_of, next_words, starts_of, words_of
    from guidance.objectives.masked_lm import IGNORED
    from pipelines.probing.sequences import WatchedSequences
    from pipelines.statistics.floors import Counted, predicted
    from pipelines.training.batches import Examples
    from pipelines.training.learners.causal_lm import CausalBatch
    from pipelines.training.learners.guided import VALID_EPOCH
    from pipelines.training.learners.masked_batches import MaskedBatch
    from pipelines.training.models import masker_of, read_tokenizer
    from pipelines.training.objectives.next_token import CausalLanguageModelling

    config, data = run.config, run.inputs["sequences"]
    watched = WatchedSequences(run.inputs, config)
    if watched.model.get_output_embeddings() is None:
        raise InputError("the model predicts no words", hint="a language model of `guide pretrain`")
    is_causal = CausalLanguageModelling.measures(watched.model.config, None)
    tokenizer = read_tokenizer(data, masked=not is_causal, padded=not is_causal)
    size, train = len(tokenizer), Examples.read(data, "train", len(tokenizer))
    rows = [watched.rows[n] for n in range(watched.number)]
    if is_causal:
        if "mask_probability" in config.model_fields_set:
            raise InputError("--mask-probability is for masked language models, and this one is causal")
        words, separator = words_of(tokenizer), tokenizer.sep_token_id
        asked = [(row, np.append(IGNORED, next_words(row, starts_of(row, separator), words)[:-1])) for row in rows]
        alone = [document for row in rows for document in documents_of(row, separator, words)]
        counted, places = Counted.before(train, words, separator, size), predicted(alone, size)

        def read(batch: SequenceBatch) -> tuple[Inputs, dict[str, Any]]:
            ids = [rows[n] for n in batch.numbers]
            inputs = CausalBatch.of(ids, separator, words).tensors_for(watched.model, tokenizer.pad_token_id)
            return inputs, {**inputs.model, "use_cache": False}
    else:
        masker = masker_of(tokenizer, config.mask_probability)
        asked = [masker(row, seed=config.seed, epoch=VALID_EPOCH, example=n) for n, row in enumerate(rows)]
        counted, places = Counted.of(train, masker, seed=config.seed), predicted(asked, size)

        def read(batch: SequenceBatch) -> tuple[Inputs, dict[str, Any]]:
            seen, labels = map(list, zip(*(asked[n] for n in batch.numbers), strict=True))
            inputs = MaskedBatch(seen, labels).tensors(tokenizer.pad_token_id, watched.device)
            return inputs, {**batch.inputs, **inputs.model}

    losses, correct = _losses(run, watched, read)
    if not len(losses):
        raise InputError(f"{data.reference}: no token of {config.split!r} was predicted", hint="--limit 0")
    floors: dict[str, np.ndarray] = {}
    if config.split == "train":
        run.warn(f"{data.reference}: {OWN_NGRAMS}")
    elif len(counted.places):
        estimates = counted.estimates(places)
        floors = {name: -np.log(estimate) for name, estimate in estimates.items()}
    else:
        run.warn(f"{data.reference} has no training text, so there are no floors")
    slices = _slices(watched, asked, np.bincount(train.ids, minlength=size), is_causal=is_causal)
    table = _rows(slices, losses, correct, floors)
    run.out.write_rows(TABLE, SLICES, table, may_be_null=FLOORS)
    run.out.write("loss.png", _picture(table, name_of_model(run.inputs["model"]), is_causal=is_causal))
    return Findings({"sequences": watched.number, "tokens": len(losses)}, {"slices": table})


def _losses(
    run: Run[Config], watched: WatchedSequences, read: Callable[[SequenceBatch], tuple[Inputs, dict[str, Any]]]
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each predicted token, and whether it is the most likely one.

    Args:
        read: gives for a batch the places that are predicted, and the arguments with which the model is called.
    """
    import torch

    from guidance.objectives.selection import logits_at
    from pipelines.probing.sequences import batches_of

    losses, correct = [np.zeros(0)], [np.zeros(0, bool)]
    with torch.no_grad():
        for batch in batches_of(run, watched, run.config.batch_size):
            inputs, given = read(batch)
            if not len(inputs.places_N):
                continue
            extra = watched.handle.at_inference(**{**watched.guide_inputs(batch), **inputs.seen})
            logits_NV = logits_at(watched.model, inputs.places_N, **given, **extra).logits.float()
            losses_N = torch.nn.functional.cross_entropy(logits_NV, inputs.labels_N, reduction="none")
            losses.append(losses_N.double().cpu().numpy())
            correct.append((logits_NV.argmax(-1) == inputs.labels_N).cpu().numpy())
    return np.concatenate(losses), np.concatenate(correct)


Masked = Sequence[tuple["np.ndarray", "np.ndarray"]]
"""For each sequence the ids that the model sees, and the labels: the token itself where it is predicted, else `IGNORED`."""


def _slices(
    watched: WatchedSequences, masked: Masked, frequency: np.ndarray, *, is_causal: bool
) -> dict[str, list[str]]:
    """Of each predicted token, in order, the part of each slice that it belongs to."""
    from guidance.objectives.masked_lm import IGNORED
    from guidance.patterns.features import UPOS

    tokenizer, rows = watched.tokenizer, watched.rows
    begins = _begins(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    parts: dict[str, list[str]] = {"frequency": [], "place": []}
    parts |= {} if is_causal else {"neighbours": []}
    parts |= {"word": []} if begins is not None else {}
    parts |= {"part of speech": []} if "pos" in rows.columns else {}
    for n, (seen, wanted) in enumerate(masked):
        size = len(seen)
        for token in np.flatnonzero(wanted != IGNORED).tolist():
            parts["frequency"].append(_band(int(frequency[wanted[token]])))
            parts["place"].append(f"quarter {1 + 4 * token // size}")
            if not is_causal:
                mask = tokenizer.mask_token_id
                hidden = sum(0 <= token + step < size and seen[token + step] == mask for step in (-1, 1))
                parts["neighbours"].append(("both visible", "one masked", "both masked")[hidden])
            if begins is not None:
                parts["word"].append("begins a word" if begins[wanted[token]] else "continues a word")
            if "pos" in rows.columns:
                code = int(rows.column("pos", n)[token])
                parts["part of speech"].append(UPOS[code] if code >= 0 else "none")
    return parts


def _begins(labels: Sequence[str]) -> list[bool] | None:
    """Whether each token of a vocabulary begins a word; None if its tokens do not say it."""
    if any(label.startswith("##") for label in labels):
        return [not label.startswith("##") for label in labels]
    if any(label.startswith(("Ġ", "▁")) for label in labels):
        return [label.startswith(("Ġ", "▁")) for label in labels]
    return None


def _band(count: int) -> str:
    """The band of a frequency."""
    band = max(n for n, least in enumerate(FREQUENCIES) if count >= least)
    if band == 0:
        return "never"
    if band == len(FREQUENCIES) - 1:
        return f"{FREQUENCIES[band]:,} times and more"
    return f"{FREQUENCIES[band]:,} to {FREQUENCIES[band + 1] - 1:,} times"


def _rows(
    slices: Mapping[str, Sequence[str]], losses: np.ndarray, correct: np.ndarray, floors: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    """The rows of the table: all tokens, and each part of each slice."""
    rows = []
    for name, parts in {"all": ["all"] * len(losses), **slices}.items():
        known = np.array(parts)
        for part in sorted(set(parts), key=_order):
            own = known == part
            row = {"slice": name, "value": part, "tokens": int(own.sum()), "loss": float(losses[own].mean())}
            row |= {"accuracy": float(correct[own].mean())}
            rows.append(
                row | {floor: float(floors[floor][own].mean()) if floor in floors else None for floor in FLOORS}
            )
    return rows


_ORDER = ("never", "both visible", "one masked", "both masked")


def _order(part: str) -> tuple[float, str]:
    """Bands by their number, what `_ORDER` names as it stands there, all else by name."""
    if part in _ORDER:
        return _ORDER.index(part) - len(_ORDER), part
    digits = part.partition(" ")[0].replace(",", "")
    return (float(digits), part) if digits.isdigit() else (float("inf"), part)


def _picture(rows: Sequence[Mapping[str, Any]], model: str, *, is_causal: bool) -> bytes:
    """The loss of each part of each slice as a bar, with two n-gram floors as marks."""
    from pipelines.drawing import figure_of, png

    figure, ((axes,),) = figure_of(7.0, 1.2 + 0.3 * len(rows))
    heights = list(range(len(rows)))[::-1]
    axes.barh(heights, [row["loss"] for row in rows], color="#0072B2", height=0.7, label="the model")
    marks = (("unigram", "|", "#999999", "word frequencies"), ("ngrams", "D", "#D55E00", "up to five tokens"))
    for floor, mark, colour, label in marks:
        if rows and rows[0][floor] is not None:
            axes.scatter([row[floor] for row in rows], heights, marker=mark, color=colour, label=label, zorder=3)
    axes.set_yticks(
        heights, [row["value"] if row["slice"] == "all" else f"{row['slice']}: {row['value']}" for row in rows]
    )
    axes.set_xlabel("nats per token" if is_causal else "nats per masked token")
    axes.set_title(f"Loss of {model}, against counts of tokens", fontsize=11, parse_math=False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return png(figure)


def _table(artifact: Artifact, config: Config) -> Table:
    names = ("loss", *FLOORS)
    rows = []
    for row in artifact.counts["slices"]:
        nats = (number(row[name]) for name in names)
        rows.append((row["slice"], row["value"], f"{row['tokens']:,}", *nats, share(row["accuracy"])))
    return Table(("", "", "tokens", *names, "right"), rows)


STAGE = probe(
    "loss",
    2,
    Config,
    measure,
    takes=ON_SEQUENCES,
    table=_table,
    writes={TABLE: SLICES},
    help="""Say where a language model is good: its loss by frequency, place, neighbours and part of speech.

    Each line also has the n-gram floors of the same tokens, counted in the training text of the sequences.
    """,
    examples=("guide probe loss guided wiki-128", "guide probe loss guided wiki-128 --masks wiki-masks --limit 0"),
)

run = STAGE.run
