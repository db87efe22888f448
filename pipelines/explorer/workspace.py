"""What the page shows, and the work behind it: opens models, surveys their heads, and measures patterns that a person tries.

What takes long is done in the background (`pipelines.explorer.worker`).  Nothing here writes to the store except
`Workspace.accept`.
"""

from __future__ import annotations

import collections
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError, UnknownName
from pipelines.explorer.worker import Worker
from pipelines.progress import Progress

if TYPE_CHECKING:
    import numpy as np

    from guidance.patterns.pattern import Pattern
    from guidance.sites import Site
    from pipelines.probing.sequences import WatchedSequences
    from pipelines.probing.survey import Survey

MOST_PATTERNS = 32
"""Patterns of one's own that may be tried at once; each needs a pass over the data."""

CACHED_BYTES = 256 << 20
"""Maps of examples that were looked at are kept in so much memory."""

PATIENCE = 0.2
"""Seconds that a batch of the work in the background may take, since a person waits for its end."""

TILE = 32
"""Rows and columns of the small picture of a head."""

AVERAGED = 64
"""The first tokens, and the first examples, whose attention is averaged."""

TOP = 12
"""Examples in the list of those where a head looks most at a pattern."""


@dataclass
class Side:
    """One model with its data.

    Attributes:
        name: how it is called on the page.
        watched: the opened model; ``survey``: what is known of its heads; None until then.
        importance: of each site the importance of its heads, from 0 to 1; None if it cannot be measured.
        average: of each site the mean attention between the first tokens, (H, AVERAGED, AVERAGED).
    """

    name: str
    open: Callable[[], tuple[dict[str, Any], Any]]
    inputs: dict[str, Any] = field(default_factory=dict)
    config: Any = None
    watched: WatchedSequences | None = None
    survey: Survey | None = None
    importance: Mapping[Site, Any] | None = None
    task: str | None = None
    average: dict[Site, Any] = field(default_factory=dict)
    averaged: Any = None

    @property
    def sites(self) -> list[Site]:
        """The sites of its heads, the model's own first."""
        assert self.survey is not None
        return sorted(self.survey.entropy, key=lambda site: (site.attention != "self", site.layer))

    def ready(self) -> WatchedSequences:
        """Its model.

        Raises:
            InputError: it is still being opened.
        """
        if self.watched is None:
            raise InputError("the model is still being opened")
        return self.watched


class Workspace:
    """One or two models on the same data, and what was found in them.

    Args:
        sides: by name, a function that finds the inputs of a model, as `pipelines.probe_inputs.open_inputs` does.
        data: how the data are called on the page.
        accept: turns marked heads into a plan; None where nothing may be written.
    """

    def __init__(
        self,
        sides: Mapping[str, Callable[[], tuple[dict[str, Any], Any]]],
        data: str,
        patterns: Sequence[str] = (),
        accept: Callable[[Mapping[str, Any], Progress], Mapping[str, Any]] | None = None,
    ) -> None:
        self.sides = [Side(name, opener) for name, opener in sides.items()]
        self.data, self._asked, self._accept = data, list(patterns), accept
        self.patterns: dict[str, Pattern] = {}
        self.left_out: dict[str, str] = {}
        self.tried: list[str] = []
        self.worker = Worker()
        self.accepted: Mapping[str, Any] | None = None
        self.seen: dict[str, Any] = {"examples": [], "patterns": []}
        self._maps: collections.OrderedDict[tuple[int, int], dict[Site, Any]] = collections.OrderedDict()

    # work

    def start(self) -> None:
        """Begin to open the models."""
        self.worker.start(self._begin)

    def close(self) -> None:
        """End the work; what runs stops at the next batch."""
        self.worker.close()

    def wait(self, progress: Progress | None = None) -> None:
        """Wait until all that was asked for is done; shown as ``progress``.

        Raises:
            InputError: the models or the data could not be opened.
        """
        self.worker.wait(progress)

    def _begin(self) -> None:
        """Open the models one after the other, and survey their heads."""
        from pipelines.probing.patterns import measurable
        from pipelines.probing.sequences import WatchedSequences

        for side in self.sides:
            self.worker.tell("loading", f"opening {side.name}")
            side.inputs, side.config = side.open()
            with self.worker.model:
                side.watched = WatchedSequences(side.inputs, side.config)
            self.worker.version += 1
        known = [side.ready().known for side in self.sides]
        both = [name for name in known[0] if all(name in other for other in known)]
        self.patterns, self.left_out = measurable(self._asked, both)
        for side in self.sides:
            self._survey(side, self.patterns, f"looking at the heads of {side.name}")
        for side in self.sides:
            self._measure_importance(side)

    def _survey(self, side: Side, patterns: Mapping[str, Pattern], what: str) -> None:
        from pipelines.probing.survey import survey

        watched, started = side.ready(), side.survey is None
        done, size, begun = 0, 1, time.monotonic()

        def advance(found: Survey, read: int) -> None:
            nonlocal done, size, begun
            done += read
            if time.monotonic() - begun < PATIENCE / 2:
                size = min(2 * size, side.config.batch_size)
            elif time.monotonic() - begun > PATIENCE:
                size = max(1, size // 2)
            if started:
                side.survey = found.snapshot()
            self.worker.let_others(what, done, watched.number)
            begun = time.monotonic()

        with self.worker.model:
            found = survey(watched, patterns, lambda: size, advance)
        if started:
            side.survey = found
            self._average(side)
        else:
            assert side.survey is not None
            _join(side.survey, found)

    def _average(self, side: Side) -> None:
        """The mean attention between the first tokens, over the first examples."""
        import numpy as np

        watched = side.ready()
        side.averaged = np.zeros((AVERAGED, AVERAGED))
        totals: dict[Site, Any] = {}
        number = min(watched.number, AVERAGED)
        for n in range(number):
            with self.worker.first():
                maps = self._read(watched, n)
            size = min(AVERAGED, len(watched.rows[n]))
            side.averaged[:size, :size] += 1
            for site, quantised in maps.items():
                kept = (quantised[:, :size, :size].astype(np.float32) / 255) ** 2
                total = totals.setdefault(site, np.zeros((site.num_heads, AVERAGED, AVERAGED), np.float32))
                total[:, :size, :size] += kept
            self.worker.advance("averaging maps", n + 1, number)
        side.average = {site: total / np.maximum(side.averaged, 1) for site, total in totals.items()}

    def _measure_importance(self, side: Side) -> None:
        from types import SimpleNamespace

        from guidance.probes.importance import normalised
        from pipelines.probing.importance import importance_of
        from pipelines.probing.losses import HeldOut

        settings = {name: getattr(side.config, name) for name in ("split", "limit", "batch_size", "device")}
        config = SimpleNamespace(**settings, seed=0, form="elementwise", accumulate="gradients")
        try:
            held_out = HeldOut(side.inputs, config)
            bar = self.worker.progress(f"importance of the heads of {side.name}")
            side.importance = normalised(importance_of(held_out, config, bar))
            side.task = held_out.task
        except InputError:
            side.importance = None  # an encoder without a head, or data without labels
        self.worker.version += 1

    # what requests ask for

    def overview(self) -> dict[str, Any]:
        """The state, the models, the patterns, and what was tried."""
        rows = []
        for side in self.sides:
            row: dict[str, Any] = {"name": side.name, "task": side.task, "ready": side.watched is not None}
            if side.watched is not None:
                row |= {"examples": side.watched.number, "plan": bool(side.watched.plan.guides)}
            rows.append(row)
        return {
            "schema": 1,
            "version": self.worker.version,
            "state": self.worker.state,
            "problem": self.worker.problem,
            "data": self.data,
            "models": rows,
            "patterns": [{"name": name, "summary": pattern.summary} for name, pattern in self.patterns.items()],
            "tried": list(self.tried),
            "left_out": self.left_out,
            "can_accept": self._accept is not None,
            "accepted": self.accepted,
        }

    def heads(self, side: int) -> dict[str, Any]:
        """What is known of every head: numbers for the grid."""
        one = self._side(side)
        if one.survey is None or not one.survey.examples:
            raise InputError("nothing is known of the heads yet")
        from guidance.probes.relevance import outstanding

        survey = one.survey
        entropy, offsets = survey.mean_entropy(), survey.mean_offsets()
        names = list(survey.relevance.names)
        relevance = {name: survey.relevance.of(name) for name in names}
        rows: list[dict[str, Any]] = []
        for site in one.sites:
            for head in range(site.num_heads):
                importance = None if one.importance is None else _number(one.importance[site][head])
                rows.append(
                    {
                        "layer": site.layer,
                        "head": head,
                        "kind": site.attention,
                        "importance": importance,
                        "entropy": _number(entropy[site][head]),
                        "offsets": [round(value, 4) for value in offsets[site][head].tolist()],
                        "relevance": [_number(relevance[name][site][head]) for name in names],
                    }
                )
        import torch

        marks = {}
        for place, name in enumerate(names):
            values = torch.tensor([row["relevance"][place] for row in rows], dtype=torch.float64)
            marks[name] = [n for n, out in enumerate(outstanding(values).tolist()) if out]
        by_chance = {name: survey.relevance.by_chance(name) for name in names}
        return {
            "schema": 1,
            "patterns": names,
            "by_chance": by_chance,
            "outstanding": marks,
            "examples": survey.examples,
            "heads": rows,
        }

    def example(self, side: int, number: int) -> dict[str, Any]:
        """The tokens of an example, with what is known of them."""
        from guidance.patterns.features import CODES, FEATURES

        watched = self._example(side, number)
        columns: dict[str, list[Any]] = {}
        for name in watched.rows.columns:
            if name not in FEATURES:
                continue
            values = watched.rows.column(name, number).tolist()
            if name in CODES:
                values = [CODES[name][value] if value >= 0 else "" for value in values]
            columns[name] = [_number(value) if isinstance(value, float) else value for value in values]
        special = set(watched.tokenizer.all_special_ids)
        self._saw("examples", number)
        return {
            "schema": 1,
            "number": number,
            "tokens": watched.labels(number),
            "special": [id_ in special for id_ in watched.rows[number].tolist()],
            "columns": columns,
        }

    def map(self, side: int, number: int, layer: int, head: int, kind: str) -> bytes:
        """The attention of a head on an example: a byte for each query and key, 255 times the square root, row by row."""
        site = self._site(side, layer, head, kind)
        maps = self._maps_of(side, number)
        return bytes(maps[site][head].tobytes())

    def tiles(self, side: int, number: int | None) -> bytes:
        """A small picture of each head, in the order of `heads`: of an example, or of the average; TILE rows and columns."""
        import numpy as np

        one = self._side(side)
        if number is None:
            if not one.average:
                raise InputError("the average is not known yet")
            maps = {site: np.sqrt(one.average[site]) * 255 for site in one.sites}
        else:
            maps = self._maps_of(side, number)
        return b"".join(_tile(maps[site]).tobytes() for site in one.sites)

    def average(self, side: int, layer: int, head: int, kind: str) -> bytes:
        """The mean attention of a head between the first tokens; the form is that of `map`."""
        import numpy as np

        site, one = self._site(side, layer, head, kind), self._side(side)
        if site not in one.average:
            raise InputError("the average is not known yet")
        size = self.average_size(side)
        return bytes(np.round(np.sqrt(one.average[site][head][:size, :size]) * 255).astype(np.uint8).tobytes())

    def average_size(self, side: int) -> int:
        """How many tokens the average has: positions that some example has."""
        averaged = self._side(side).averaged
        return 0 if averaged is None else int((averaged.diagonal() > 0).sum())

    def top(self, side: int, layer: int, head: int, kind: str, pattern: str) -> list[dict[str, Any]]:
        """The examples where a head looks most at a pattern, or without one those where its rows have the highest peaks."""
        import numpy as np

        site, one = self._site(side, layer, head, kind), self._side(side)
        assert one.survey is not None
        if pattern:
            names = one.survey.relevance.names
            if pattern not in names:
                raise UnknownName("pattern", pattern, names)
            values = np.array([row[head, names.index(pattern)] for row in one.survey.masses[site]], np.float32)
        else:
            values = np.array([row[head] for row in one.survey.focus[site]], np.float32)
        order = np.argsort(-values, kind="stable")[:TOP]
        return [
            {"number": int(n), "value": _number(values[n]), "text": self._snippet(one.ready(), int(n))} for n in order
        ]

    def preview(self, side: int, number: int, text: str) -> bytes:
        """The keys of a pattern on an example, a byte for each query and key: 255 where it is true.

        Raises:
            PlanError: the pattern cannot be read; the message says where.
            InputError: the data lack a feature that it reads.
        """
        import numpy as np

        from guidance.probes.relevance import keys_of

        watched = self._example(side, number)
        pattern = self._readable(text, watched)
        batch = watched.batch(range(number, number + 1))
        keys = keys_of(pattern, watched.tokens(batch))[0].clamp(0, 1)
        return bytes(np.round(keys.cpu().numpy() * 255).astype(np.uint8).tobytes())

    def try_pattern(self, text: str) -> str:
        """Measure a pattern on all sequences, in the background; returns its name.

        Raises:
            PlanError: the pattern cannot be read.
            InputError: the data lack a feature that it reads, or too many were tried.
        """
        text = text.strip()
        for side in self.sides:
            pattern = self._readable(text, side.ready())
        if text in self.patterns or text in self.tried:
            return text
        if len(self.tried) >= MOST_PATTERNS:
            raise InputError(f"{MOST_PATTERNS} patterns were tried already; start anew to try more")
        self.tried.append(text)
        self._saw("patterns", text)

        def job() -> None:
            try:
                for side in self.sides:
                    self._survey(side, {text: pattern}, f"measuring {text}")
            except BaseException:
                self.tried.remove(text)
                raise

        self.worker.add(f"measuring {text}", job)
        return text

    def accept(self, marked: Mapping[str, Any]) -> None:
        """Turn marked heads into a plan, in the background; the result is in `overview`.

        Raises:
            InputError: nothing may be written here.
        """
        if self._accept is None:
            raise InputError("this page only shows; nothing can be accepted")
        accept = self._accept

        def job() -> None:
            self.accepted = None
            self.accepted = accept({**marked, "seen": self.seen}, self.worker.progress("making the plan"))
            self.worker.version += 1

        self.worker.add("making the plan", job)

    # parts

    def _side(self, side: int) -> Side:
        if not 0 <= side < len(self.sides):
            raise InputError("there is no such model")
        return self.sides[side]

    def _example(self, side: int, number: int) -> WatchedSequences:
        watched = self._side(side).ready()
        if not 0 <= number < watched.number:
            raise InputError("there is no such example")
        return watched

    def _site(self, side: int, layer: int, head: int, kind: str) -> Site:
        one = self._side(side)
        if one.survey is not None:
            for site in one.sites:
                if site.layer == layer and site.attention == kind and 0 <= head < site.num_heads:
                    return site
        raise InputError("there is no such head")

    def _readable(self, text: str, watched: WatchedSequences) -> Pattern:
        from pipelines.probing.patterns import lack, read_written

        pattern = read_written(text)
        if reason := lack(pattern, watched.known):
            raise InputError(f"it cannot be measured: {reason}", hint="give --masks")
        return pattern

    def _maps_of(self, side: int, number: int) -> dict[Site, Any]:
        watched = self._example(side, number)
        key = (side, number)
        if key in self._maps:
            self._maps.move_to_end(key)
            return self._maps[key]
        with self.worker.first():
            if key not in self._maps:
                self._maps[key] = self._read(watched, number)
        held = sum(array.nbytes for maps in self._maps.values() for array in maps.values())
        while held > CACHED_BYTES and len(self._maps) > 1:
            _, old = self._maps.popitem(last=False)
            held -= sum(array.nbytes for array in old.values())
        return self._maps[key]

    @staticmethod
    def _read(watched: WatchedSequences, number: int) -> dict[Site, Any]:
        """The maps of an example, of each site (H, T, T), uint8: 255 times the square root of the attention."""
        import torch

        found: dict[Site, Any] = {}

        def watch(site: Site, attention: torch.Tensor) -> None:
            found[site] = (attention[0].float().sqrt() * 255).round().to(torch.uint8).cpu().numpy()

        watched.watch(watched.batch(range(number, number + 1)), watch)
        return found

    @staticmethod
    def _snippet(watched: WatchedSequences, number: int) -> str:
        words = watched.labels(number)[1:40]
        text = " ".join(words).replace(" ##", "")
        return text[:80] + ("…" if len(text) > 80 else "")

    def _saw(self, what: str, value: Any) -> None:
        if value not in self.seen[what] and len(self.seen[what]) < 1000:
            self.seen[what].append(value)


def _join(known: Survey, new: Survey) -> None:
    """Add the patterns of a second pass over the same sequences to what is known."""
    import numpy as np

    for site, rows in known.masses.items():
        known.masses[site] = [np.concatenate(pair, axis=1) for pair in zip(rows, new.masses[site], strict=True)]
    known.relevance.join(new.relevance)  # last, since requests ask for the patterns that it names


def _tile(maps_HTT: np.ndarray) -> np.ndarray:
    """Maps made smaller by the maximum of each cell, or kept where they are small already, (H, TILE, TILE), uint8."""
    import numpy as np

    size = maps_HTT.shape[-1]
    edges = np.unique(np.linspace(0, size, TILE + 1).astype(int)[:-1]) if size >= TILE else np.arange(size)
    small = np.maximum.reduceat(np.maximum.reduceat(maps_HTT, edges, axis=1), edges, axis=2)
    places = np.arange(TILE) * small.shape[-1] // TILE
    return np.round(small[:, places][:, :, places]).astype(np.uint8)


def _number(value: Any) -> float | None:
    number = float(value)
    return round(number, 6) if math.isfinite(number) else None


def as_json(value: Any) -> bytes:
    """JSON that every browser reads: a number that is not finite is null."""

    def clean(item: Any) -> Any:
        if isinstance(item, float):
            return item if math.isfinite(item) else None
        if isinstance(item, Mapping):
            return {str(key): clean(each) for key, each in item.items()}
        return [clean(each) for each in item] if isinstance(item, Sequence) and not isinstance(item, str) else item

    return json.dumps(clean(value), allow_nan=False, ensure_ascii=False).encode()
