"""Experiment trackers (TensorBoard, Weights & Biases and others), through ``accelerate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from guidance.errors import MachineError, UnknownName
from pipelines.progress import log
from pipelines.storage.files import machine_errors


class Trackers:
    """Several trackers as one; without trackers it does nothing."""

    def __init__(self, trackers: Sequence[Any] = ()) -> None:
        self._trackers = trackers

    @classmethod
    def start(cls, names: Sequence[str], folder: Path) -> Trackers:
        """Start the trackers with these names; their files go to ``folder``.

        Raises:
            UnknownName: there is no such tracker.
            MachineError: a tracker is not installed; or the folder cannot be made.
        """
        if not names:
            return cls()
        known = sorted(LOGGER_TYPE_TO_CLASS)
        for name in names:
            if name not in known:
                raise UnknownName("tracker", name, known)
        with machine_errors(f"cannot create {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            accelerator = Accelerator(log_with=list(names), project_dir=str(folder))
            accelerator.init_trackers("guide")
        except (ImportError, ValueError) as error:
            raise MachineError(f"{', '.join(names)}: {error}", hint=f"pip install {' '.join(names)}") from error
        missing = [name for name in names if name not in {tracker.name for tracker in accelerator.trackers}]
        if missing:
            raise MachineError(f"{missing[0]} is not installed", hint=f"pip install {missing[0]}")
        log.info("%s: %s", ", ".join(names), folder)
        return cls(list(accelerator.trackers))

    @contextmanager
    def following(self) -> Iterator[Trackers]:
        """Finish the trackers at the end, also after an exception."""
        try:
            yield self
        finally:
            for tracker in self._trackers:
                tracker.finish()

    def log(self, row: Mapping[str, float]) -> None:
        """Log the metrics of a step; ``step`` is its number."""
        for tracker in self._trackers:
            tracker.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])
