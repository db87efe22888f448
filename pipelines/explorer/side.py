"""One model on the page with its data: what is known of its heads, and what people ask of them."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from guidance.errors import InputError, UnknownName
from guidance.patterns.features import CODES, FEATURES
from guidance.patterns.pattern import Pattern
from guidance.probes.importance import normalised
from guidance.probes.relevance import keys_of, outstanding
from guidance.sites import Site
from pipelines.engine.declaration import Opening
from pipelines.explorer.worker import Worker
from pipelines.lazy import pa
from pipelines.probing.patterns import lack, read_written
from pipelines.progress import log
from pipelines.text.sequence_files import NOT_TEXT

if TYPE_CHECKING:
    from pipelines.probing.sequences import (  # imports transformers, and the page is to be seen at once
        SequenceBatch,
        Survey,
        WatchedSequences,
    )

CACHED_BYTES = 128 << 20
"""Maps of examples that were looked at are kept in so much memory for each model."""

PATIENCE = 0.2
"""Seconds that a batch of the work in the background may take, since a person waits for its end."""

TILE = 64
"""Rows and columns of the small picture of a head, at most."""

MOST_SHARE = (1 << 16) - 1
"""What stands for an attention of 1 in a map, of which each cell is this times the square root of the attention."""

AVERAGED = 64
"""The first tokens, and the first examples, whose attention is averaged."""

FIRST_TEXT = 10**8
"""The number of the first text of a person's own; those of examples are below."""

LONGEST_DOCUMENT = 1 << 40
"""More code points than any document has."""

TOP = 12
"""Examples in the list of those where a head looks most at a pattern."""


class Side:
    """One model with its data.

    Attributes:
        name: how it is called on the page.
        task: whose loss gives the importance of heads; None if there is none.
        same_tokens: whether it reads the same tokens as the first model on the page.
    """

    def __init__(self, name: str, worker: Worker) -> None:
        self.name, self._worker = name, worker
        self.task: str | None = None
        self.same_tokens = True
        self._opening: Opening[Any] | None = None
        # the sequence of each example, if these are numbered as those of another model
        self._places: np.ndarray | None = None
        self._watched: WatchedSequences | None = None
        self._survey: Survey | None = None
        self._importance: Mapping[Site, Any] | None = None
        self._average: dict[Site, Any] = {}
        self._average_size = 0
        self._maps: collections.OrderedDict[int, dict[Site, Any]] = collections.OrderedDict()
        self._texts: list[SequenceBatch] = []

    # work in the background

    def open(self, opening: Opening[Any]) -> None:
        """Open the model."""
        from pipelines.probing.sequences import WatchedSequences

        self._opening = opening
        with self._worker.model:
            self._watched = WatchedSequences(opening.inputs, opening.config)
        self._worker.show()

    def follow(self, other: Side) -> None:
        """Number examples as another model does, whose tokenizer may divide the same text into other sequences: an example is the
        sequence that has the first token of the other model's."""
        ours, theirs = self.ready().rows, other.ready().rows
        self.same_tokens = np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.bounds, theirs.bounds)
        if self.same_tokens:
            return
        begins, wanted = self._first_tokens("start"), other._first_tokens("end")[: other.ready().number] - 1
        if (np.diff(begins) >= 0).all():
            self._places = np.maximum(np.searchsorted(begins, wanted, side="right") - 1, 0)

    def _first_tokens(self, edge: str) -> np.ndarray:
        """Where the first token of text of each sequence begins (``start``) or ends (``end``), as a number that grows from document to
        document."""
        from pipelines.training.batches import read_column

        assert self._opening is not None
        data, name = self._opening.inputs["sequences"], f"{self._settings.split}.parquet"
        documents, lengths = read_column(data, name, "document", pa.int32(), np.asarray)
        places, _ = read_column(data, name, edge, pa.int64(), np.asarray)
        is_text = np.flatnonzero(documents != NOT_TEXT)
        first = is_text[np.searchsorted(is_text, np.cumsum(lengths) - lengths)]
        found: np.ndarray = documents[first].astype(np.int64) * LONGEST_DOCUMENT + places[first]
        return found

    def survey(self, patterns: Mapping[str, Pattern], what: str) -> None:
        """Measure patterns on all sequences; the first time also what else is known of heads."""
        from pipelines.probing.sequences import survey

        watched, is_first, most = self.ready(), self._survey is None, self._settings.batch_size
        done, size, begun = 0, 1, time.monotonic()

        def advance(known: Survey, read: int) -> None:
            nonlocal done, size, begun
            done += read
            if time.monotonic() - begun < PATIENCE / 2:
                size = min(2 * size, most)
            elif time.monotonic() - begun > PATIENCE:
                size = max(1, size // 2)
            if is_first:
                self._survey = known.snapshot()
            self._worker.let_others(what, done, watched.number)
            begun = time.monotonic()

        with self._worker.model:
            whole = survey(watched, patterns, lambda: size, advance)
        if is_first:
            self._survey = whole
            self._measure_average()
        else:
            self._known().join(whole)

    def _measure_average(self) -> None:
        """The mean attention between the first tokens, over the first examples."""
        watched = self.ready()
        counts = np.zeros((AVERAGED, AVERAGED))
        totals: dict[Site, Any] = {}
        number = min(watched.number, AVERAGED)
        for n in range(number):
            with self._worker.first():
                maps = _read(watched, watched.batch(range(n, n + 1)))
            size = min(AVERAGED, len(watched.rows[n]))
            counts[:size, :size] += 1
            for site, quantised in maps.items():
                total = totals.setdefault(site, np.zeros((site.num_heads, AVERAGED, AVERAGED), np.float32))
                total[:, :size, :size] += (quantised[:, :size, :size].astype(np.float32) / MOST_SHARE) ** 2
            self._worker.advance("averaging maps", n + 1, number)
        self._average_size = int((counts.diagonal() > 0).sum())
        self._average = {site: total / np.maximum(counts, 1) for site, total in totals.items()}

    def measure_importance(self) -> None:
        """Measure the importance of heads, unless the model is an encoder without a head, or the data have no labels."""
        from pipelines.probing.losses import HeldOut, importance_of

        assert self._opening is not None
        try:
            held_out = HeldOut(self._opening.inputs, self._settings, self._settings.seed)
            bar = self._worker.progress(f"importance of the heads of {self.name}")
            self._importance = normalised(importance_of(held_out, bar))
            self.task = held_out.task
        except InputError as error:
            log.info("%s: the importance of heads is not measured: %s", self.name, error.message)
            self._importance = None
        self._worker.show()

    # what people ask for

    def about(self) -> dict[str, Any]:
        """The model in the overview."""
        row: dict[str, Any] = {"name": self.name, "task": self.task, "ready": self._watched is not None}
        if self._watched is not None:
            row |= {
                "heads": self._is_surveyed,
                "average": bool(self._average),
                "examples": self.num_examples,
                "plan": bool(self._watched.plan.guides),
                "same_tokens": self.same_tokens,
            }
        return row

    @property
    def num_examples(self) -> int:
        """The number of its examples."""
        return self.ready().number if self._places is None else len(self._places)

    def ready(self) -> WatchedSequences:
        """The opened model.  Raises InputError if it is still being opened."""
        if self._watched is None:
            raise InputError("the model is still being opened")
        return self._watched

    def readable(self, text: str) -> Pattern:
        """A pattern that a person wrote.

        Raises:
            PlanError: it cannot be read; the message says where.
            InputError: the data lack a feature that it reads.
        """
        pattern = read_written(text)
        if reason := lack(pattern, self.ready().known):
            raise InputError(f"it cannot be measured: {reason}", hint="give --masks")
        return pattern

    def heads(self) -> dict[str, Any]:
        """What is known of every head: numbers for the grid."""
        survey = self._known()
        entropy, offsets = survey.mean_entropy(), survey.mean_offsets()
        names = list(survey.relevance.names)
        relevance = {name: survey.relevance.of(name) for name in names}
        rows: list[dict[str, Any]] = [
            {
                "layer": site.layer,
                "head": head,
                "kind": site.attention,
                "importance": None if self._importance is None else _number(self._importance[site][head]),
                "entropy": _number(entropy[site][head]),
                "offsets": [round(value, 4) for value in offsets[site][head].tolist()],
                "relevance": [_number(relevance[name][site][head]) for name in names],
            }
            for site in self._sites()
            for head in range(site.num_heads)
        ]
        marks = {}
        for column, name in enumerate(names):
            values = torch.tensor([row["relevance"][column] for row in rows], dtype=torch.float64)
            marks[name] = [n for n, stands_out in enumerate(outstanding(values).tolist()) if stands_out]
        return {
            "schema": 1,
            "patterns": names,
            "by_chance": {name: survey.relevance.by_chance(name) for name in names},
            "outstanding": marks,
            "examples": survey.means.examples,
            "heads": rows,
        }

    def add_text(self, batch: SequenceBatch) -> int:
        """Take a text of the person's own, as `WatchedSequences.read` gives it; returns the number of its example."""
        self._texts.append(batch)
        return FIRST_TEXT + len(self._texts) - 1

    def example(self, number: int) -> dict[str, Any]:
        """The tokens of an example, or of a text of the person's own, with what is known of them."""
        from pipelines.probing.sequences import token_labels

        watched, batch = self.ready(), self._batch(number)
        ids = batch.inputs["input_ids"][0].cpu().numpy()
        columns: dict[str, list[Any]] = {}
        for name, column_BT in batch.columns.items():
            if name not in FEATURES:
                continue
            values = column_BT[0].tolist()
            if name in CODES:
                values = [CODES[name][value] if value >= 0 else "" for value in values]
            columns[name] = [_number(value) if isinstance(value, float) else value for value in values]
        named = watched.tokenizer
        special = set(named.all_special_ids) - {named.unk_token_id, named.mask_token_id}
        return {
            "schema": 1,
            "number": number,
            "tokens": token_labels(named, ids),
            "special": [id_ in special for id_ in ids.tolist()],
            "columns": columns,
        }

    def map(self, number: int, layer: int, head: int, kind: str) -> bytes:
        """The attention of a head on an example, row by row: two bytes for each query and key, the lower one first, which are
        `MOST_SHARE` times its square root."""
        site = self._site(layer, head, kind)
        return bytes(self._maps_of(number)[site][head].tobytes())

    def tiles(self, number: int | None) -> bytes:
        """A small picture of each head, in the order of `heads`: of an example, or of the average.

        All have as many rows and columns as the example has tokens, but at most TILE; a byte for each cell is 255 times the square
        root of the highest attention in it.
        """
        if number is not None:
            maps = self._maps_of(number)
        elif self._average:
            size = self._average_size
            maps = {site: _roots(mean[:, :size, :size]) for site, mean in self._average.items()}
        else:
            raise InputError("the average is not known yet")
        return b"".join(_tile(maps[site]).tobytes() for site in self._sites())

    def average(self, layer: int, head: int, kind: str) -> bytes:
        """The mean attention of a head between the first tokens, as far as some example reaches; in the form of `map`."""
        site, size = self._site(layer, head, kind), self._average_size
        if site not in self._average:
            raise InputError("the average is not known yet")
        return bytes(_roots(self._average[site][head][:size, :size]).tobytes())

    def top(self, layer: int, head: int, kind: str, pattern: str) -> list[dict[str, Any]]:
        """The examples where a head looks most at a pattern, or without one those where its rows have the highest peaks."""
        site, survey, watched = self._site(layer, head, kind), self._known(), self.ready()
        if pattern:
            names = survey.relevance.names
            if pattern not in names:
                raise UnknownName("pattern", pattern, names)
            values = np.array([row[head, names.index(pattern)] for row in survey.masses[site]], np.float32)
        else:
            values = np.array([row[head] for row in survey.focus[site]], np.float32)
        order = np.argsort(-values, kind="stable")[:TOP].tolist()
        return [{"number": self._shown(n), "value": _number(values[n]), "text": _snippet(watched, n)} for n in order]

    def preview(self, number: int, text: str) -> bytes:
        """The keys of a pattern on an example, a byte for each query and key: 255 where it is true.

        Raises:
            PlanError, InputError: see `readable`.
        """
        batch, pattern = self._batch(number), self.readable(text)
        if reason := lack(pattern, batch.columns):
            raise InputError(f"it cannot be drawn on a text of your own: {reason}")
        keys = keys_of(pattern, self.ready().tokens(batch))[0].clamp(0, 1)
        return bytes(np.round(keys.cpu().numpy() * 255).astype(np.uint8).tobytes())

    # parts

    @property
    def _settings(self) -> Any:
        assert self._opening is not None
        return self._opening.config

    @property
    def _is_surveyed(self) -> bool:
        return self._survey is not None and bool(self._survey.means.examples)

    def _known(self) -> Survey:
        if self._survey is None or not self._is_surveyed:
            raise InputError("nothing is known of the heads yet")
        return self._survey

    def _sites(self) -> list[Site]:
        """The sites of its heads, the model's own first."""
        return sorted(self._known().means.totals, key=lambda site: (site.attention != "self", site.layer))

    def _site(self, layer: int, head: int, kind: str) -> Site:
        for site in self._sites():
            if site.layer == layer and site.attention == kind and 0 <= head < site.num_heads:
                return site
        raise InputError("there is no such head")

    def _batch(self, number: int) -> SequenceBatch:
        """An example of the data, or a text of the person's own.  Raises InputError if there is none of this number."""
        watched = self.ready()
        if FIRST_TEXT <= number < FIRST_TEXT + len(self._texts):
            return self._texts[number - FIRST_TEXT]
        if not 0 <= number < self.num_examples:
            raise InputError("there is no such example")
        own = number if self._places is None else int(self._places[number])
        return watched.batch(range(own, own + 1))

    def _shown(self, own: int) -> int:
        """The number under which a sequence is shown, or of the example that it goes on with."""
        return own if self._places is None else max(0, int(np.searchsorted(self._places, own, side="right")) - 1)

    def _maps_of(self, number: int) -> dict[Site, Any]:
        watched, batch = self.ready(), self._batch(number)
        if number in self._maps:
            self._maps.move_to_end(number)
            return self._maps[number]
        with self._worker.first():
            if number not in self._maps:
                self._maps[number] = _read(watched, batch)
        held = sum(array.nbytes for maps in self._maps.values() for array in maps.values())
        while held > CACHED_BYTES and len(self._maps) > 1:
            _, old = self._maps.popitem(last=False)
            held -= sum(array.nbytes for array in old.values())
        return self._maps[number]


def _read(watched: WatchedSequences, batch: SequenceBatch) -> dict[Site, Any]:
    """The maps of one sequence, of each site (H, T, T); see `_roots`."""
    return watched.watch(batch, lambda attention_BHTT: _roots(attention_BHTT[0].float().cpu().numpy()))


def _roots(attention: np.ndarray) -> np.ndarray:
    """Attention as it is sent, uint16: `MOST_SHARE` times its square root, which keeps four digits of 1 and two of 1/1000 %."""
    return np.round(np.sqrt(attention) * MOST_SHARE).astype("<u2")


def _snippet(watched: WatchedSequences, number: int) -> str:
    text = " ".join(watched.labels(number)[1:40]).replace(" ##", "")
    return text[:80] + ("…" if len(text) > 80 else "")


def _tile(maps_HTT: np.ndarray) -> np.ndarray:
    """Maps made smaller by the maximum of each cell, or kept where they are small already, uint8."""
    size = maps_HTT.shape[-1]
    edges = np.linspace(0, size, min(size, TILE) + 1).astype(int)[:-1]
    small = np.maximum.reduceat(np.maximum.reduceat(maps_HTT, edges, axis=1), edges, axis=2)
    return np.round(small / (MOST_SHARE / 255)).astype(np.uint8)


def _number(value: Any) -> float | None:
    number = float(value)
    return round(number, 6) if math.isfinite(number) else None
