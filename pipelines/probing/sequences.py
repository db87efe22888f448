"""A trained model on sequences, with its heads in view: what probes of sequences read, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import BatchEncoding

import guidance
from guidance.checkpoint import find_plan
from guidance.errors import InputError
from guidance.patterns.features import FEATURES, Tokens, Vocabulary
from guidance.patterns.pattern import Pattern
from guidance.plan import Plan
from guidance.probes.relevance import Relevance, highest_entropy, keys_of, uniform
from guidance.probes.summary import summarise
from guidance.sites import Site
from pipelines.engine.stage import Run
from pipelines.probing.probe import SequencesConfig
from pipelines.text.encoding import replace_special
from pipelines.training.batches import Examples, ids_and_mask, pad, pad_features
from pipelines.training.learner import folder_of
from pipelines.training.live_text import check_bare_text, with_random_weights
from pipelines.training.model_checks import check_lengths, check_model, longest_input
from pipelines.training.models import has_segments, read_tokenizer
from pipelines.training.opening import open_watched, two_stacks
from pipelines.training.plan_inputs import check_needs, features, read_tables
from pipelines.training.text_words import TextWords

Seen = TypeVar("Seen")

REACH = 16
"""The largest distance at which attention is summed up."""


@dataclass(frozen=True)
class SequenceBatch:
    """Some sequences, padded to the longest of them.

    Attributes:
        numbers: of the sequences in their split.
        inputs: what the model reads, (B, T) each: ``input_ids``, ``attention_mask``, and ``token_type_ids`` where it has segments.
        columns: the features that masks and sequences bring, such as ``segment`` or ``word``, by name, (B, T) each.
    """

    numbers: range
    inputs: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]

    @cached_property
    def valid_BT(self) -> Tensor:
        """Which tokens are no padding, bool."""
        return self.inputs["attention_mask"].bool()


class WatchedSequences:
    """A trained model on the sequences of a split, with its heads in view.

    Attributes:
        is_causal: whether tokens see no later ones.
        known: the features that the sequences have, besides those of the vocabulary.
    """

    def __init__(self, inputs: Mapping[str, Any], config: SequencesConfig, random_seed: int | None = None) -> None:
        """Opens a model and sequences, with masks and scores if they are needed.

        Args:
            random_seed: of random weights, with which the model is probed without its plan; None for its own.

        Raises:
            InputError: the sequences are of another tokenizer, or longer than the model reads.
            PlanError: its plan needs a feature that is not there.
        """
        data, masks = inputs["sequences"], inputs.get("masks")
        folder = self._folder = folder_of(inputs["model"])
        self.plan = (find_plan(folder) if random_seed is None else None) or Plan()
        check_needs(self.plan, str(folder), inputs, training=False)
        self.model, self.handle = open_watched(folder, read_tables(inputs), config.device)
        if self.model.config.is_encoder_decoder:
            raise two_stacks(folder)
        if random_seed is not None:
            self.model = with_random_weights(self.model, random_seed)
            self.handle = guidance.install(self.model, Plan())
        self.tokenizer = read_tokenizer(data, masked=False, padded=False)
        check_model(self.model, folder, self.tokenizer)
        self.is_causal = self.handle.is_decoder
        self.known: tuple[str, ...] = tuple(masks.counts["columns"]) if masks else ("segment",)
        self._plans = features(self.plan, training=False)
        needed = tuple(dict.fromkeys((*self._plans, *self.known)))
        # models with segment embeddings learned pairs of texts with them
        self._segments = "shape" in data.counts and has_segments(self.model.config)
        own = ("text",) if "shape" in data.counts else ()
        self.rows = Examples.read(data, config.split, len(self.tokenizer), features=needed, masks=masks, own=own)
        check_lengths(self.model.config, {config.split: self.rows}, data.reference)
        self.number = min(len(self.rows), config.limit or len(self.rows))
        # by sequence; several sequences in a row may be of one example
        numbers = self.rows.numbers if own else np.arange(len(self.rows))
        self._examples = np.cumsum(np.diff(numbers, prepend=numbers[:1]) != 0)
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer)
        self.device = next(self.model.parameters()).device

    def batches(self, size: int | Callable[[], int]) -> Iterator[SequenceBatch]:
        """The sequences in their order, so many per batch, or as many as a function says before each batch."""
        start = 0
        while start < self.number:
            numbers = range(start, min(start + (size if isinstance(size, int) else size()), self.number))
            yield self.batch(numbers)
            start = numbers.stop

    def examples(self, batch: SequenceBatch) -> list[int]:
        """The running number of the example of each sequence of a batch."""
        found: list[int] = self._examples[batch.numbers.start : batch.numbers.stop].tolist()
        return found

    def batch(self, numbers: range) -> SequenceBatch:
        """Some sequences, padded to the longest."""
        inputs = ids_and_mask([self.rows[n] for n in numbers], self.tokenizer.pad_token_id, self.device)
        length = inputs["input_ids"].shape[1]
        rows = {name: [self.rows.column(name, n) for n in numbers] for name in self.rows.columns}
        columns = pad_features(rows, length, self.device)
        if self._segments:
            inputs["token_type_ids"] = pad(rows["text"], 0, length, self.device)
        return SequenceBatch(numbers, inputs, columns)

    def read(self, text: str) -> SequenceBatch:
        """A text as one sequence, as `guide build-sequences` makes it, with the words and sentences that rules find in it.

        Raises:
            InputError: the text is empty, or longer than the model reads.
            PlanError: the plan needs a feature that a bare text does not have.
        """
        if not text.strip():
            raise InputError("the text is empty")
        check_bare_text(self.plan, self._folder, "examples of the data have")
        named = self.tokenizer
        encoding = named.backend_tokenizer.encode(text, add_special_tokens=False)
        ids, most = np.array(encoding.ids, np.int64), longest_input(self.model.config)
        if not len(ids):
            raise InputError("the tokenizer finds no token in the text")
        if most is not None and len(ids) + 2 > most:
            raise InputError(f"the text has {len(ids):,} tokens, and the model reads {most - 2:,}", hint="shorten it")
        replace_special(ids, named.all_special_ids, named.unk_token_id)
        row = np.concatenate([[named.cls_token_id], ids, [named.sep_token_id]])
        inputs = ids_and_mask([row], named.pad_token_id, self.device)
        if self._segments:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        found = TextWords().features(BatchEncoding(encoding=[encoding]), text)
        columns = {}
        for name in found.keys() & self.rows.columns:
            values, fill = found[name][0].numpy(), FEATURES[name].fill
            # a special token belongs to the sentence beside it
            first, last = (values[0], values[-1]) if name == "segment" else (fill, fill)
            columns[name] = pad([np.concatenate([[first], values, [last]])], fill, len(row), self.device)
        return SequenceBatch(range(0), inputs, columns)

    def tokens(self, batch: SequenceBatch) -> Tokens:
        """A batch as patterns see it."""
        ids_BT = batch.inputs["input_ids"]
        return Tokens(ids_BT, batch.valid_BT, {**self.vocabulary.columns(ids_BT), **batch.columns}, {})

    def special_BT(self, batch: SequenceBatch) -> Tensor:
        """Which tokens are special, bool; padding may be."""
        return torch.isin(batch.inputs["input_ids"], torch.tensor(self.tokenizer.all_special_ids, device=self.device))

    def guide_inputs(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """A batch as the model and its plan read it."""
        return {**batch.inputs, **{name: batch.columns[name] for name in self._plans}}

    def watch(self, batch: SequenceBatch, see: Callable[[Tensor], Seen]) -> dict[Site, Seen]:
        """What a function makes of the attention of each layer, (B, H, T, T), by site.

        It is called with one layer after the other, so that only the maps of one are in memory.  Rows are queries, and sum to 1.
        Padded keys have 0 attention; padded queries are rows like all others, so leave them out with ``batch.valid_BT``.
        Added heads (PAL) are sites of their own, whose ``attention`` is ``pal``.
        """
        seen: dict[Site, Seen] = {}

        def watcher(site: Site, attention_BHTT: Tensor) -> None:
            seen[site] = see(attention_BHTT)

        self.handle.watch(watcher, **self.guide_inputs(batch))
        return seen

    def labels(self, number: int) -> list[str]:
        """The text of each token of a sequence, with ``##`` before those inside a word."""
        return token_labels(self.tokenizer, self.rows[number])


def batches_of(run: Run[Any], watched: WatchedSequences, size: int) -> Iterator[SequenceBatch]:
    """The sequences that a probe reads, batch by batch, with a progress bar.

    Args:
        size: sequences per batch: ``run.config.batch_size``, or 1 where whole maps are kept.
    """
    with run.progress.task("probe", total=watched.number, unit="sequences") as bar:
        for batch in watched.batches(size):
            yield batch
            bar.advance(len(batch.numbers))


@dataclass
class Means:
    """The mean of F figures of each head over sequences, which grows batch by batch.

    Every sequence counts alike, whatever its length.  The heads of a site stay apart, and so do those of added heads (PAL).

    Attributes:
        totals: of each site the sum, (H, F), float64.
        examples: how many sequences there were.
    """

    totals: dict[Site, Tensor] = field(default_factory=dict)
    examples: int = 0

    def add(self, figures: Mapping[Site, Tensor]) -> None:
        """Add the figures of each sequence of a batch, of each site (B, H, F); F may be 1."""
        for site, figures_BH in figures.items():
            self.totals[site] = self.totals.get(site, 0) + figures_BH.double().sum(0).cpu()
        self.examples += len(figures_BH)

    def snapshot(self) -> Means:
        """What is known so far, which later batches do not change."""
        return Means(dict(self.totals), self.examples)

    def column(self, number: int | slice) -> dict[Site, Tensor]:
        """The mean of the figure of this number, from 0, of each site (H,), as `write_heads` takes it; or of several, (H, …)."""
        return {site: total[:, number] / max(1, self.examples) for site, total in self.totals.items()}


@dataclass
class Survey:
    """What is known of the heads so far; grows batch by batch.

    Attributes:
        relevance: of each pattern.
        means: over examples, of each site (H, 1 + 2 REACH + 1): the mean entropy of rows, as a share of the most it can be, and the
            attention at each distance.
        focus: of each example the mean over rows of the highest attention, a list of (H,).
        masses: of each example the attention on each pattern, a list of (H, P), float16.
    """

    relevance: Relevance
    means: Means = field(default_factory=Means)
    focus: dict[Site, list[np.ndarray]] = field(default_factory=dict)
    masses: dict[Site, list[np.ndarray]] = field(default_factory=dict)

    def add(self, watched: WatchedSequences, patterns: Mapping[str, Pattern], batch: SequenceBatch) -> None:
        """Read a batch."""
        tokens, valid_BT = watched.tokens(batch), batch.valid_BT
        (size, length), device = valid_BT.shape, valid_BT.device
        wanted = (
            torch.stack([keys_of(pattern, tokens) for pattern in patterns.values()], dim=1)
            if patterns
            else torch.zeros(size, 0, length, length, device=device)
        )
        self.relevance.begin(watched.examples(batch), uniform(wanted, valid_BT, is_causal=watched.is_causal))
        lengths_B = valid_BT.sum(-1)
        most_B = highest_entropy(valid_BT, is_causal=watched.is_causal)
        summaries = watched.watch(batch, lambda attention: summarise(attention, wanted, valid_BT, reach=REACH))
        figures = {}
        for site, summary in summaries.items():
            self.relevance.add(site, summary.masses_BHP)
            entropy_BH = summary.entropy_BHQ.sum(-1) / lengths_B[:, None] / most_B[:, None]
            figures[site] = torch.cat([entropy_BH[..., None], summary.offsets_BHO], dim=-1)
            focus_BH = summary.highest_BHQ.sum(-1) / lengths_B[:, None]
            self.focus.setdefault(site, []).extend(focus_BH.cpu().numpy())
            self.masses.setdefault(site, []).extend(summary.masses_BHP.cpu().numpy().astype(np.float16))
        self.means.add(figures)

    def snapshot(self) -> Survey:
        """What is known so far, which later batches do not change; the lists go on growing."""
        return replace(self, relevance=self.relevance.snapshot(), means=self.means.snapshot())

    def join(self, other: Survey) -> None:
        """Add the patterns of another pass over the same sequences."""
        for site, rows in self.masses.items():
            self.masses[site] = [np.concatenate(pair, axis=1) for pair in zip(rows, other.masses[site], strict=True)]
        self.relevance.join(other.relevance)  # last, since requests ask for the patterns that it names

    def mean_entropy(self) -> Mapping[Site, Tensor]:
        """The mean entropy of each head, from 0, one key, to 1, all keys alike."""
        return self.means.column(0)

    def mean_offsets(self) -> Mapping[Site, Tensor]:
        """The mean attention of each head at each distance from -REACH to +REACH."""
        return self.means.column(slice(1, None))


def survey(
    watched: WatchedSequences,
    patterns: Mapping[str, Pattern],
    batch_size: int | Callable[[], int],
    advance: Callable[[Survey, int], object],
) -> Survey:
    """Read all sequences.  After each batch `advance` is called with what is known so far, and the number of sequences of the
    batch; what it raises ends the survey."""
    known = Survey(Relevance(list(patterns)))
    for batch in watched.batches(batch_size):
        known.add(watched, patterns, batch)
        advance(known, len(batch.numbers))
    return known


def token_labels(tokenizer: Any, ids: np.ndarray) -> list[str]:
    """The text of each token: without marks for word starts, and with ``##`` before tokens that continue a word."""
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    special = set(tokenizer.all_special_tokens)
    marks = tuple(mark for mark in ("Ġ", "▁") if any(name.startswith(mark) for name in names))
    labels: list[str] = []
    for name in names:
        if name in special or name.startswith("##") or not marks:
            labels.append(name)
            continue
        text = tokenizer.convert_tokens_to_string([name]).strip()
        begins = name.startswith(marks)
        continues = not begins and text[:1].isalnum() and bool(labels) and labels[-1][-1:].isalnum()
        labels.append(f"##{text}" if continues else text or ("␣" if begins else name))
    return labels
