"""Serves the page to one person on this machine.

A request must name this server, or the address at which it arrived, as its host and carry a cookie, which each browser gets for
a token that stands only in the fragment of the address that is printed.  Nothing is shared with other origins, file names come
from a table, and errors say nothing about the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from guidance.errors import MachineError
from pipelines.engine.stage import require
from pipelines.explorer.workspace import Workspace

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

SLOWEST = 10.0
"""Seconds within which the header of a request must have arrived."""

MOST_WAITING = 64
"""How many connections may be open without a request; if there are more, the oldest of them is closed."""

DEFAULT_PORT = 8765
_PORTS = 20


def free_socket(host: str, port: int) -> socket.socket:
    """A socket that listens: on a port, or if that is 0 on the default one or the next that is free.  Raises
    MachineError if the port is taken, or the address is not of this machine."""
    wanted = [port] if port else [*range(DEFAULT_PORT, DEFAULT_PORT + _PORTS), 0]
    for number in wanted:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen()  # another server may have bound it too, but only one can listen
        except OSError as error:
            listening.close()
            problem = error
            continue
        return listening
    raise MachineError(f"port {port} of {host} cannot be used ({problem.strerror})", hint="choose another --port")


_EVERYWHERE = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}
"""Addresses that stand for all of this machine, each with one that is reserved for documentation (RFC 5737, RFC 3849)."""


def _own_address(host: str) -> str:
    """The address at which others reach a server: of all those of this machine the one from which it would send."""
    if host not in _EVERYWHERE:
        return host
    family, loopback = (socket.AF_INET6, "::1") if ":" in host else (socket.AF_INET, "127.0.0.1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((_EVERYWHERE[host], 9))  # of a datagram socket, it sends nothing
            return str(asked.getsockname()[0])
    except OSError:
        return loopback


def protocol() -> type[H11Protocol]:
    """How uvicorn speaks HTTP, as a class of its own for each server, whose connections count together; none can be held open by
    sending nothing, or a header byte by byte, for which uvicorn waits for ever."""
    from uvicorn.protocols.http.h11_impl import H11Protocol  # of the extra `ui`, which not every installation has

    waiting: dict[Any, None] = {}

    class Impatient(H11Protocol):
        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Give a connection without a request a time limit; data that are no whole header do not extend it."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif self._patience is None:
                self._patience = self.loop.call_later(SLOWEST, self._hang_up)
                waiting[self] = None
                if len(waiting) > MOST_WAITING:
                    next(iter(waiting))._hang_up()

        def _hang_up(self) -> None:
            self._stop_waiting()
            self.transport.close()

        def _stop_waiting(self) -> None:
            waiting.pop(self, None)
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return Impatient


@contextlib.contextmanager
def serving(workspace: Workspace, host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server that listens; gives the address to open, and a function that answers requests until it is told to stop.
    Raises MachineError if the port is taken, or Starlette or uvicorn is not installed."""
    for package in ("starlette", "uvicorn"):
        require(package, "'attention-guide[ui]'")
    import uvicorn

    from pipelines.explorer.routes import Guard, Routes, Visits, in_address

    listening = free_socket(host, port)
    number, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    shown = in_address(_own_address(host))
    more = ["localhost"] if host in ("127.0.0.1", "::1", *_EVERYWHERE) else []
    more += [socket.gethostname().lower()] if host in _EVERYWHERE else []
    names = tuple(f"{name}:{number}" for name in (shown, *more))
    visits = Visits(token, f"guide_{number}")
    config = uvicorn.Config(
        Guard(Routes(workspace, visits).application(), names, visits),
        http=protocol(),
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="off",
        proxy_headers=False,
        timeout_keep_alive=5,
        limit_concurrency=256,
        h11_max_incomplete_event_size=32 << 10,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    begun = False

    def serve() -> None:
        nonlocal begun
        begun = True
        server.run(sockets=[listening])

    try:
        yield f"http://{shown}:{number}/#token={token}", serve
    finally:
        server.should_exit = True  # it closes its socket itself
        if not begun:
            listening.close()
