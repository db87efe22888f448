"""What the page shows, and the work behind it: opens models, surveys their heads, and measures patterns that a person tries.

What takes long is done in the background (`pipelines.explorer.worker`).  Two things are written to the store: what must be made
before a text file, a corpus or a dataset can be read, such as sequences; and what `Workspace.accept` makes.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from guidance.errors import InputError
from guidance.patterns.pattern import Pattern
from pipelines.engine.declaration import opened
from pipelines.explorer.accepting import accept, read_marks
from pipelines.explorer.sentences import one_each
from pipelines.explorer.side import Side
from pipelines.explorer.worker import Worker
from pipelines.probing.patterns import measurable
from pipelines.progress import Progress
from pipelines.stages import discover_score
from pipelines.storage.store import Store

MOST_PATTERNS = 32
"""Patterns of one's own that may be tried at once; each needs a pass over the data."""

MOST_TEXTS = 1000
"""Texts of one's own that may be tried."""


@dataclass
class Visit:
    """What the person at one browser did.

    Attributes:
        examples, patterns, texts: what was looked at, each once, for the plan.
        accepted: the plan that was made of the heads that were marked.
    """

    examples: list[int] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    accepted: Mapping[str, Any] | None = None

    def saw(self, what: Literal["examples", "patterns", "texts"], value: Any) -> None:
        """Note what the person looked at."""
        seen = getattr(self, what)
        if value not in seen and len(seen) < 1000:
            seen.append(value)

    def seen(self) -> dict[str, list[Any]]:
        """What was looked at so far."""
        return {"examples": list(self.examples), "patterns": list(self.patterns), "texts": list(self.texts)}


class Workspace:
    """One or two models on the same data, and what was found in them.

    Args:
        models: references or folders, by the names that the page shows.
        data: what `discover_score` takes; ``title``: how they are called on the page, if not so.
        config: how they are read, and which patterns are measured first.
        can_accept: whether marked heads may be turned into a plan, which is written to the store.
        store_flag: what a command needs at its end to find that store.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        data: str,
        config: discover_score.Config,
        store: Store,
        *,
        title: str = "",
        can_accept: bool = False,
        store_flag: str = "",
    ) -> None:
        self.data, self.config, self.store, self.title, self.can_accept = data, config, store, title or data, can_accept
        self._store_flag = store_flag
        self.worker = Worker()
        self.sides = [Side(name, self.worker) for name in models]
        self.patterns: dict[str, Pattern] = {}
        self.left_out: dict[str, str] = {}
        self.tried: list[str] = []
        self.texts: dict[str, int] = {}
        self._reading = threading.Lock()
        self._models = list(models.values())
        self._data: list[tuple[str, discover_score.Config]] = []
        self._opened = contextlib.ExitStack()

    def start(self) -> None:
        """Begin to open the models."""
        self.worker.start(self._begin)

    def finish(self, progress: Progress | None = None) -> None:
        """Do all the work now.  Raises InputError if the models or the data could not be opened."""
        self.worker.is_awaited = True
        self.start()
        self.wait(progress)

    def close(self) -> None:
        """End the work; what runs stops at the next batch."""
        self.worker.close()
        self._opened.close()

    def wait(self, progress: Progress | None = None) -> None:
        """Wait until all that was asked for is done; shown as ``progress``.  Raises InputError if the models or the
        data could not be opened."""
        self.worker.wait(progress)

    def _begin(self) -> None:
        """Open the models one after the other, and survey their heads."""
        for side, model in zip(self.sides, self._models, strict=True):
            self.worker.tell("loading", f"opening {side.name}")
            data, config = one_each(self.data, model, self.config, self.store)
            self._data.append((data, config))
            inputs = {"model": model, "data": data}
            side.open(self._opened.enter_context(opened(discover_score.STAGE, config, inputs, self.store)))
        for side in self.sides[1:]:
            side.follow(self.sides[0])
        known = [side.ready().known for side in self.sides]
        both = [name for name in known[0] if all(name in other for other in known)]
        self.patterns, self.left_out = measurable(self.config.patterns, both)
        for side in self.sides:
            side.survey(self.patterns, f"looking at the heads of {side.name}")
        for side in self.sides:
            side.measure_importance()

    def overview(self) -> dict[str, Any]:
        """The state, the models, the patterns, and what was tried."""
        return {
            "schema": 1,
            "version": self.worker.version,
            "state": self.worker.state,
            "problem": self.worker.problem,
            "data": self.title,
            "models": [side.about() for side in self.sides],
            "patterns": [{"name": name, "summary": pattern.summary} for name, pattern in self.patterns.items()],
            "tried": list(self.tried),
            "left_out": self.left_out,
            "can_accept": self.can_accept,
        }

    def side(self, number: int) -> Side:
        """One of the models.  Raises InputError if there is no such model."""
        if not 0 <= number < len(self.sides):
            raise InputError("there is no such model")
        return self.sides[number]

    def try_text(self, text: str) -> int:
        """Read a text of the person's own with all models, on request; returns the number of its example.

        Raises:
            InputError, PlanError: see `WatchedSequences.read`; or too many texts were tried.
        """
        text = " ".join(text.split())
        with self._reading:
            if text not in self.texts:
                if len(self.texts) >= MOST_TEXTS:
                    raise InputError(f"{MOST_TEXTS:,} texts were tried already; start anew to try more")
                read = [side.ready().read(text) for side in self.sides]
                (self.texts[text],) = {side.add_text(one) for side, one in zip(self.sides, read, strict=True)}
            return self.texts[text]

    def try_pattern(self, text: str) -> str:
        """Measure a pattern on all sequences, in the background; returns its name.  Raises PlanError if the pattern
        cannot be read, and InputError if the data lack a feature that it reads, or too many were tried."""
        text = text.strip()
        for side in self.sides:
            pattern = side.readable(text)
        if text in self.patterns or text in self.tried:
            return text
        if len(self.tried) >= MOST_PATTERNS:
            raise InputError(f"{MOST_PATTERNS} patterns were tried already; start anew to try more")
        self.tried.append(text)

        def job() -> None:
            try:
                for side in self.sides:
                    side.survey({text: pattern}, f"measuring {text}")
            except BaseException:
                self.tried.remove(text)
                raise

        self.worker.add(f"measuring {text}", job)
        return text

    def accept(self, marked: Mapping[str, Any], visit: Visit) -> None:
        """Turn marked heads into a plan, in the background, which then is that of the visit.  Raises InputError if nothing
        may be written here, and what `read_marks` raises."""
        if not self.can_accept:
            raise InputError("this page only shows; nothing can be accepted")
        marks, seen = read_marks(marked), visit.seen()

        def job() -> None:
            visit.accepted = None
            bar = self.worker.progress("making the plan")
            made = accept(marks, seen, self._models[0], *self._data[0], self.store, bar)
            visit.accepted = {**made, "command": made["command"] + self._store_flag}
            self.worker.show()

        self.worker.add("making the plan", job)


def as_json(value: Any) -> bytes:
    """JSON that every browser reads: a number that is not finite is null."""

    def clean(item: Any) -> Any:
        if isinstance(item, float):
            return item if math.isfinite(item) else None
        if isinstance(item, Mapping):
            return {str(key): clean(each) for key, each in item.items()}
        return [clean(each) for each in item] if isinstance(item, Sequence) and not isinstance(item, str) else item

    return json.dumps(clean(value), allow_nan=False, ensure_ascii=False).encode()
