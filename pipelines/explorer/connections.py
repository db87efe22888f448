"""Connections that cannot be held open by sending nothing, or a header byte by byte; uvicorn waits for ever for these."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

SLOWEST = 10.0
"""Seconds within which the header of a request must have arrived."""

MOST_WAITING = 64
"""How many connections may be open without a request; if there are more, the oldest of them is closed."""


def protocol() -> type[H11Protocol]:
    """How uvicorn speaks HTTP, as a class of its own for each server, whose connections count together."""
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
