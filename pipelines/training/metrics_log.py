"""The metrics of every step of a run: a file of JSON objects, one a line, which a resumed run continues.

The log has a copy beside it, and every checkpoint records the length and the digest of the log up to its step.  If a disk
damages one of the two files, the other one repairs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipelines.progress import log
from pipelines.storage.files import machine_errors
from pipelines.storage.manifest import ArtifactDamaged

METRICS_LOG = "metrics.jsonl"
"""The name of the file in the folder of a run and in the model artifact."""

METRICS_COPY = "metrics-copy.jsonl"
"""The name of its copy in the folder of a run."""


@dataclass(frozen=True)
class Beginning:
    """The part of a log up to a step: its length in bytes and its sha256."""

    size: int
    sha256: str


class MetricsLog:
    """The log in the folder of a run, and its copy; every line is flushed before the next step."""

    def __init__(self, folder: Path) -> None:
        self.path, self.copy = folder / METRICS_LOG, folder / METRICS_COPY
        self._hash, self._size = hashlib.sha256(), 0
        self._files: list[IO[bytes]] = []

    @property
    def written(self) -> Beginning:
        """What `restore` kept and `add` has added since."""
        return Beginning(self._size, self._hash.hexdigest())

    def seconds(self) -> float:
        """The seconds that all steps in the log took, without validation and saving; 0 if there is no log."""
        total = 0.0
        # a file that cannot be read, or a damaged line, is for `restore` to refuse
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError), open(self.path, "rb") as file:
            for line in file:
                total += json.loads(line).get("seconds", 0.0)
        return total

    def restore(self, last_step: int, wanted: Beginning | None = None) -> dict[str, Any]:
        """Remove the lines after a step, and repair a damaged file with the other one; gives the metrics of that step.

        Args:
            wanted: the log up to this step, as a checkpoint recorded it; without it, the number of the step is compared.

        Raises:
            ArtifactDamaged: neither file holds the log up to that step.
        """
        with machine_errors(f"cannot read {self.path}"):
            logs = {path: _read(path, last_step) for path in (self.path, self.copy)}
        intact = [
            path
            for path, (digest, size, row) in logs.items()
            if (Beginning(size, digest.hexdigest()) == wanted if wanted else row.get("step", 0) == last_step)
        ]
        if not intact:
            raise ArtifactDamaged(
                f"{self.path}: damaged, and {self.copy.name} beside it too: neither holds the metrics of steps 1 to {last_step}",
                hint="put one of the two files back from a backup; without it, --force starts from the beginning",
            )
        self._hash, self._size, row = logs[intact[0]]
        with machine_errors(f"cannot write {self.path}"):
            for path in logs:
                if path not in intact:
                    if wanted:
                        log.warning("%s is damaged; %s is whole and replaces it", path, intact[0].name)
                    shutil.copyfile(intact[0], path)
                with open(path, "ab") as file:
                    file.truncate(self._size)
        return row

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the files for `add` and `sync`."""
        with ExitStack() as stack:
            self._files = [stack.enter_context(open(path, "ab")) for path in (self.path, self.copy)]
            stack.callback(self._files.clear)
            yield

    def add(self, row: Mapping[str, float]) -> None:
        """Append the metrics of a step; does nothing if the log is not open, as in processes that do not lead."""
        if not self._files:
            return
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with machine_errors(f"cannot write {self.path}"):
            for file in self._files:
                file.write(line)
                file.flush()
        self._hash.update(line)
        self._size += len(line)

    def sync(self) -> None:
        """Flush the files to the disk."""
        with machine_errors(f"cannot save {self.path}"):
            for file in self._files:
                os.fsync(file.fileno())


def _read(path: Path, last_step: int) -> tuple[Any, int, dict[str, Any]]:
    """The digest and the size of the first lines of a log, one a step, and the last of them as a dict, empty if unreadable."""
    digest, size, line = hashlib.sha256(), 0, b"{}"
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in itertools.islice(file, last_step):
            digest.update(line)
            size += len(line)
    try:
        row = json.loads(line)
    except ValueError:
        row = {}
    return digest, size, row if isinstance(row, dict) else {}
