"""The metrics of every step of a run: a file of JSON objects, one a line, which a resumed run continues."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pipelines.storage.files import machine_errors
from pipelines.storage.manifest import ArtifactDamaged

METRICS_LOG = "metrics.jsonl"
"""The name of the file in the folder of a run and in the model artifact."""


class MetricsLog:
    """The log at a path; every line is flushed before the next step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def cut(self, last_step: int) -> dict[str, float]:
        """Remove the lines after a step, an incomplete last line too; gives the metrics of that step.

        Raises:
            ArtifactDamaged: the log does not reach that step.
        """
        end, line = 0, b"{}"
        with machine_errors(f"cannot write {self.path}"), open(self.path, "a+b") as file:
            file.seek(0)
            for line in itertools.islice(file, last_step):
                end += len(line)
            row = _read_row(line)
            if row.get("step", 0) != last_step:
                raise ArtifactDamaged(
                    f"{self.path}: does not hold steps 1 to {last_step}", hint="--force starts from the beginning"
                )
            file.truncate(end)
        return row

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the file for `add` and `sync`."""
        try:
            with open(self.path, "a", encoding="utf-8") as self._file:
                yield
        finally:
            self._file = None

    def add(self, row: Mapping[str, float]) -> None:
        """Append the metrics of a step; does nothing if the log is not open, as in processes that do not lead."""
        if self._file is None:
            return
        with machine_errors(f"cannot write {self.path}"):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Flush the log to the disk."""
        if self._file is None:
            return
        with machine_errors(f"cannot save {self.path}"):
            os.fsync(self._file.fileno())


def _read_row(line: bytes) -> dict[str, float]:
    """A line of the log as a dict; empty if the line is incomplete."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
