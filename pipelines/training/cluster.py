"""The processes of a run, and requests to stop it."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from guidance.errors import MachineError
from pipelines.progress import log


class Cluster:
    """The processes of a run, one or many, and the device of this process."""

    def __init__(self, device: str, precision: str) -> None:
        """Raises MachineError when the requested device or arithmetic is not available."""
        if device == "cuda" and not torch.cuda.is_available():
            raise MachineError("no CUDA device is available", hint="--device cpu, or auto")
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        if precision == "auto":
            precision = "bf16" if not on_cpu and torch.cuda.is_bf16_supported() else "fp32"
        if precision == "bf16" and not on_cpu and not torch.cuda.is_bf16_supported():
            raise MachineError("this device has no bfloat16", hint="--precision fp32")
        # one process may train several models in turn, on different devices
        AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
        self.accelerator = Accelerator(cpu=on_cpu, mixed_precision="bf16" if precision == "bf16" else "no")
        self.precision = precision
        self.device: torch.device = self.accelerator.device
        self.world: int = self.accelerator.num_processes
        self.rank: int = self.accelerator.process_index

    @property
    def leads(self) -> bool:
        """True for the one process that writes files and logs."""
        return self.rank == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add up numbers by name over all processes."""
        if self.world == 1:
            return dict(values)
        packed = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        return dict(zip(values, self.sum_tensor(packed).tolist(), strict=True))

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Add up a tensor on this process's device over all processes, in place."""
        if self.world > 1:
            torch.distributed.all_reduce(values)
        return values

    def broadcast(self, value: float) -> float:
        """The leader's value, in every process.

        All wait for all: a leader that sent its value and ended would break the connections of those that are still joining.
        """
        return self.sum({"value": value if self.leads else 0.0})["value"]

    def reset_peak_memory(self) -> None:
        """Measure `peak_memory` from here on.  Of a process only Linux can; elsewhere its peak is that since it started."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with suppress(OSError):  # only Linux has this file
            Path("/proc/self/clear_refs").write_text("5")

    def peak_memory(self) -> int:
        """The peak memory in bytes: of the tensors on a CUDA device; on a CPU, of this process with all its libraries."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        with suppress(OSError):
            status = Path("/proc/self/status").read_text()
            if known := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
                return int(known[1]) << 10
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10

    @contextmanager
    def only_leader(self) -> Iterator[bool]:
        """Work that only the leading process does: True for it.  If it fails, all processes raise, so none waits for ever."""
        failure: Exception | None = None
        try:
            yield self.leads
        except Exception as error:
            failure = error
        failed = self.sum({"failed": float(failure is not None)})["failed"]
        if failure is not None:
            raise failure
        if failed:
            raise MachineError("the leading process failed; see its message")


class StopRequest:
    """Remembers that the user, the scheduler or ``--max-time`` asked to stop after the current step."""

    def __init__(self, max_minutes: float | None, *, speaks: bool = True) -> None:
        self.signal_number = 0
        self._speaks = speaks
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes

    @property
    def time_is_up(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def code(self) -> int:
        """0 to continue; else the signal that asked to stop, SIGINT if time is up."""
        return self.signal_number or (int(signal.SIGINT) if self.time_is_up else 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn Ctrl-C and SIGTERM into a request to stop; a second Ctrl-C ends the process at once."""

        def ask(number: int, frame: Any) -> None:
            if self.signal_number == number == signal.SIGINT:
                os._exit(130)
            if not self.signal_number and self._speaks:
                log.info("finishing the step and saving (Ctrl-C again leaves at once)")
            self.signal_number = number

        previous = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    previous[number] = signal.signal(number, ask)
        except ValueError:  # not the main thread, which alone may set handlers
            pass
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
