"""What people and programs see: one line or one object on stdout, everything else on stderr, nothing raw."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from guidance.errors import InputError

MAX_LINES = 20
"""No message is longer."""


def escape(text: object) -> str:
    r"""The text with every character that a terminal would obey, or not show, written as ``\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def say(text: str = "") -> None:
    """One line on stdout; the only place where results are written."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_json(value: object) -> None:
    """One object on stdout, in one line of ASCII, so that any encoding and any reader will do."""
    import json

    say(json.dumps(value, allow_nan=False, default=str))


def tell(text: str = "") -> None:
    """One line on stderr.  A reader of stderr that went away is no reason to fail."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def human_size(count: float) -> str:
    """Bytes as people write them: ``512 B``, ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def speaks_unicode() -> bool:
    """Whether stdout can write block characters."""
    try:
        "░▒▓█·…".encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def check_place(path: Path, flag: str, *endings: str) -> None:
    """See that a file can be written there, before the work.

    Args:
        endings: those that its name may have, with their dots; any where none is given.

    Raises:
        InputError: another ending; there is no such folder; a folder is in the way.
    """
    if endings and path.suffix.lower() not in endings:
        raise InputError(
            f"{flag} {str(path)!r}: a name that ends in {' or '.join(endings)} is expected",
            hint=f"for example: {flag} {path.stem or 'picture'}{endings[0]}",
        )
    if not path.parent.is_dir():
        raise InputError(f"{str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder")


def prepare_streams() -> None:
    """Give closed standard streams a place, and let no encoding stop a message.

    With ``>&-`` the first file that is opened would get number 1, and whatever is printed would end up in it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        else:
            stream.reconfigure(errors="backslashreplace")


def reader_gone() -> bool:
    """True when stdout is a pipe that nobody reads any more."""
    import select

    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False
