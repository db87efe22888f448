"""Serves the page to one person on this machine.

A request must name this server, or the address at which it arrived, as its host and carry a cookie, which the page gets for a token that stands only in the fragment
of the address that is printed.  Nothing is shared with other origins, file names come from a table, and errors say nothing about
the machine.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any

from guidance.errors import MachineError
from pipelines.engine.stage import require
from pipelines.explorer.workspace import Workspace, as_json

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MOST_BODY = 64 << 10
"""The longest body of a request, in bytes."""

PAGE: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("app", "api", "colours", "grid", "matrix", "panels")
    },
}
"""What is served without a cookie: the page itself, which holds no data."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

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


def _in_address(host: str) -> str:
    """A host as it stands in the address of a page."""
    host = host.removeprefix("::ffff:")
    return f"[{host}]" if ":" in host else host


class Guard:
    """What every request must pass before it is routed; see RFC 9110, section 7.2, for Host."""

    def __init__(self, app: Any, hosts: tuple[str, ...], token: str, cookie: str) -> None:
        self.app, self.token, self.cookie = app, token.encode(), cookie
        self.hosts = tuple(host.encode() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets
        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        await self.app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        hosts = headers.get(b"host", [])
        known = (*self.hosts, "{}:{}".format(_in_address(scope["server"][0]), scope["server"][1]).encode())
        if len(hosts) != 1 or hosts[0] not in known:
            return 403, "this page is for this machine only"
        if any(origin not in [b"http://" + host for host in known] for origin in headers.get(b"origin", [])):
            return 403, "another site asked"
        if any(site not in (b"same-origin", b"none") for site in headers.get(b"sec-fetch-site", [])):
            return 403, "another site asked"
        if scope["method"] not in ("GET", "POST"):
            return 405, "GET or POST"
        if scope["method"] == "POST":
            kinds = [kind.partition(b";")[0].strip() for kind in headers.get(b"content-type", [])]
            if kinds != [b"application/json"]:
                return 415, "JSON only"
            sizes = headers.get(b"content-length", [])
            if any(not size.isdigit() or int(size) > MOST_BODY for size in sizes):
                return 413, f"at most {MOST_BODY:,} bytes"
        if scope["path"] in PAGE or scope["path"] == "/api/session":
            return None
        if scope["path"].startswith("/api/") and not self._is_known(headers.get(b"cookie", [])):
            return 401, "open the address that the command printed"
        return None

    def _is_known(self, cookies: list[bytes]) -> bool:
        pairs = [pair.strip().partition(b"=") for line in cookies for pair in line.split(b";")]
        values = [value for name, _, value in pairs if name == self.cookie.encode()]
        return len(values) == 1 and hmac.compare_digest(values[0], self.token)


async def _answer(send: Send, status: int, what: str) -> None:
    body = as_json({"problem": what})
    headers = {**HEADERS, "content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    start = {"type": "http.response.start", "status": status, "headers": _encoded(headers)}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *_encoded(HEADERS)]
        await send(message)

    return sending


@contextlib.contextmanager
def serving(workspace: Workspace, host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server that listens; gives the address to open, and a function that answers requests until it is told to stop.
    Raises MachineError if the port is taken, or Starlette or uvicorn is not installed."""
    for package in ("starlette", "uvicorn"):
        require(package, "'attention-guide[ui]'")
    import uvicorn

    from pipelines.explorer.connections import protocol
    from pipelines.explorer.routes import Routes

    listening = free_socket(host, port)
    number, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    shown = _in_address(_own_address(host))
    more = ["localhost"] if host in ("127.0.0.1", "::1", *_EVERYWHERE) else []
    more += [socket.gethostname().lower()] if host in _EVERYWHERE else []
    names = tuple(f"{name}:{number}" for name in (shown, *more))
    cookie = f"guide_{number}"
    config = uvicorn.Config(
        Guard(Routes(workspace, token, cookie).application(), names, token, cookie),
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
