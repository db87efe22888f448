"""Ctrl-C, SIGTERM and SIGHUP: at once while modules are imported, later as exceptions so that ``finally`` runs.

A signal that was ignored when we were started (``nohup``, ``&`` in a script) stays ignored.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; like KeyboardInterrupt, no ``except Exception`` stops it."""


def exit_code(number: int) -> int:
    """130 for SIGINT; 143 for the others: a closed terminal means the same as a request to end."""
    return 130 if number == signal.SIGINT else 143


def leave_on_signals() -> None:
    """For the time of the imports: there is nothing to clean up, and an exception could be swallowed."""
    _install(_leave)


def raise_on_signals() -> None:
    """For the time of the work: the first signal raises, a second Ctrl-C leaves at once."""
    _install(_raise)
    os.register_at_fork(after_in_child=_restore)


def _install(handler: object) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(exit_code(number))


def _raise(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        signal.signal(number, _leave)
        raise KeyboardInterrupt
    raise Terminated


def _restore() -> None:
    """A forked worker is ended by its parent in the ordinary way."""
    for number in SIGNALS:
        if signal.getsignal(number) in (_leave, _raise):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
