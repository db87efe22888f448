"""Ctrl-C, SIGTERM and SIGHUP: end the process at once during imports, later raise so that ``finally`` blocks run.

A signal that was ignored when the process started (``nohup``, ``&`` in a script) stays ignored.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

AGAIN_SECONDS = 0.01

_arrived: int | None = None
"""The signal that raised; None before."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived.  Like KeyboardInterrupt, it is not caught by ``except Exception``."""


def exit_code(number: int) -> int:
    """130 for SIGINT, 143 for SIGTERM, and also for SIGHUP: a closed terminal is a request to end."""
    return 130 if number == signal.SIGINT else 143


def exit_on_signals() -> None:
    """Use during imports: there is nothing to clean up yet, and an imported module could swallow an exception."""
    _install(_exit)


def raise_on_signals() -> None:
    """Use during the work: the first signal raises, a second Ctrl-C exits at once."""
    _install(_raise)
    sys.unraisablehook = _raise_again
    os.register_at_fork(after_in_child=_restore)


def cause(error: BaseException) -> BaseException:
    """Why the work ended: the error, or the signal that came before it.

    Compiled code that is interrupted, above all while it is being imported, may answer with an error of its own.
    """
    known = (Terminated, KeyboardInterrupt, SystemExit)
    if _arrived is None or isinstance(error, known) or hasattr(error, "signal_number"):
        return error
    raised = KeyboardInterrupt() if _arrived == signal.SIGINT else Terminated()
    raised.__cause__ = error
    return raised


def _install(handler: object) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(exit_code(number))


def _raise(number: int, frame: FrameType | None) -> None:
    global _arrived
    _arrived = number
    if number == signal.SIGINT:
        signal.signal(number, _exit)
        raise KeyboardInterrupt
    raise Terminated


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Raise once more, in a moment, what a signal raised in a callback or a destructor, where Python drops it."""
    if isinstance(lost.exc_value, Terminated | KeyboardInterrupt):
        signal.signal(signal.SIGALRM, lambda *_: _raise(_arrived or signal.SIGTERM, None))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(lost)


def _restore() -> None:
    """Restore default handlers in a forked worker; its parent ends it."""
    for number in SIGNALS:
        if signal.getsignal(number) in (_exit, _raise):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
