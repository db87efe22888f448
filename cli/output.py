"""All output: one line or one JSON object on stdout, everything else on stderr, control characters escaped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from guidance.errors import InputError

MAX_LINES = 20
"""Maximum length of a message."""


def escape(text: object) -> str:
    r"""The text with control and other unprintable characters written as escapes such as ``\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def say(text: str = "") -> None:
    """Print one line on stdout; nothing else prints results."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_json(value: object) -> None:
    """Print one JSON object on stdout, as one line of ASCII, which is safe in any encoding."""
    import json

    say(json.dumps(value, allow_nan=False, default=str))


def say_texts(value: object) -> None:
    """Print one JSON object about texts on stdout, its letters as they are where the encoding of stdout has them."""
    import json

    line = json.dumps(value, allow_nan=False, default=str, ensure_ascii=False)
    line = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
    try:
        line.encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        say_json(value)
    else:
        say(line)


def tell(text: str = "") -> None:
    """Print one line on stderr; errors such as a closed stderr are ignored."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def human_size(count: float) -> str:
    """A number of bytes with a unit: ``512 B``, ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def speaks_unicode() -> bool:
    """Whether the encoding of stdout has block characters."""
    try:
        "░▒▓█·…".encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def check_output_path(path: Path | None, flag: str, *endings: str) -> None:
    """Check before the work that a file can be written to ``path``, if one was given.  Its name must have one of the
    ``endings``, such as ``.png``, if there are any.  Raises InputError if the ending is wrong, the parent folder does not
    exist, or the path is a folder."""
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        raise InputError(
            f"{flag} {str(path)!r}: the name must end in {' or '.join(endings)}",
            hint=f"for example: {flag} {path.stem or 'picture'}{endings[0]}",
        )
    if not path.parent.is_dir():
        raise InputError(f"{str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder")


def prepare_streams() -> None:
    """Open closed standard streams on /dev/null, and escape characters that an encoding lacks.

    Otherwise, after ``>&-``, the next file to be opened would get descriptor 1, and output would be written into it.
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
    """True if stdout is a pipe whose reader has closed it."""
    import select

    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False
