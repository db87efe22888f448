"""What the page asks for, by path, and what every request must pass before."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from guidance.errors import GuideError
from pipelines.explorer.export import MODULES
from pipelines.explorer.side import FIRST_TEXT, Side
from pipelines.explorer.workspace import Visit, Workspace, as_json
from pipelines.progress import log

MOST_BODY = 64 << 10
"""The longest body of a request, in bytes."""

PAGE: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in MODULES},
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

SLOWEST = 10.0
"""Seconds within which a body must have arrived."""


class Json(JSONResponse):
    """An answer in JSON; see `as_json`."""

    def render(self, content: Any) -> bytes:
        return as_json(content)


class Raw(Response):
    """An answer in bytes."""

    media_type = "application/octet-stream"


def in_address(host: str) -> str:
    """A host as it stands in the address of a page."""
    host = host.removeprefix("::ffff:")
    return f"[{host}]" if ":" in host else host


class Guard:
    """What every request must pass before it is routed; see RFC 9110, section 7.2, for Host."""

    def __init__(self, app: Starlette, hosts: tuple[str, ...], visits: Visits) -> None:
        self.app, self.hosts, self.visits = app, hosts, visits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are no web sockets

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send_with_headers)
        else:
            status, problem = refusal
            await Json({"problem": problem}, status, {"connection": "close"})(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers, (address, port) = Headers(scope=scope), scope["server"]
        known = (*self.hosts, f"{in_address(address)}:{port}")
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0] not in known:
            return 403, "this page is for this machine only"
        if any(origin not in [f"http://{host}" for host in known] for origin in headers.getlist("origin")):
            return 403, "another site asked"
        if any(site not in ("same-origin", "none") for site in headers.getlist("sec-fetch-site")):
            return 403, "another site asked"
        if scope["method"] not in ("GET", "POST"):
            return 405, "GET or POST"
        if scope["method"] == "POST":
            if [kind.partition(";")[0].strip() for kind in headers.getlist("content-type")] != ["application/json"]:
                return 415, "JSON only"
            sizes = headers.getlist("content-length")
            if any(not (size.isascii() and size.isdigit()) or int(size) > MOST_BODY for size in sizes):
                return 413, f"at most {MOST_BODY:,} bytes"
        if scope["path"] in PAGE or scope["path"] == "/api/session":
            return None
        if scope["path"].startswith("/api/") and self.visits.of(headers) is None:
            return 401, "open the address that the command printed"
        return None


class Visits:
    """The browsers that opened the page with its token, each of which is known by a cookie of its own.

    Args:
        token: what the address has in its fragment; ``cookie``: the name of the cookies.
    """

    def __init__(self, token: str, cookie: str) -> None:
        self.cookie, self._token = cookie, token
        self._known: dict[bytes, Visit] = {}

    def of(self, headers: Headers) -> Visit | None:
        """The visit whose cookie a request carries; None if there is none, or if it carries several."""
        pairs = [pair.strip().partition("=") for line in headers.getlist("cookie") for pair in line.split(";")]
        values = [value for name, _, value in pairs if name == self.cookie]
        return self._known.get(_digest(values[0])) if len(values) == 1 else None

    def admits(self, token: Any) -> bool:
        """Whether a token is that of the page."""
        return isinstance(token, str) and hmac.compare_digest(_digest(token), _digest(self._token))

    def begin(self) -> str:
        """Register a new visit, and return the value of its cookie."""
        value = secrets.token_urlsafe(24)
        self._known[_digest(value)] = Visit()
        return value


def _digest(text: str) -> bytes:
    """A digest, by which secrets are compared and found: how long that takes says nothing about them."""
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


class Routes:
    """Answers from a workspace.  Methods without ``async`` may take a while; Starlette runs them in threads."""

    def __init__(self, workspace: Workspace, visits: Visits) -> None:
        self.workspace, self.visits = workspace, visits

    def application(self) -> Starlette:
        """All routes, and what errors say."""
        routes = [
            *(Route(path, self.page) for path in PAGE),
            Route("/api/session", self.session, methods=["POST"]),
            Route("/api/overview", self.overview),
            Route("/api/heads", self.heads),
            Route("/api/example", self.example),
            Route("/api/map", self.map),
            Route("/api/average", self.average),
            Route("/api/tiles", self.tiles),
            Route("/api/top", self.top),
            Route("/api/preview", self.preview),
            Route("/api/patterns", self.patterns, methods=["POST"]),
            Route("/api/text", self.text, methods=["POST"]),
            Route("/api/accept", self.accept, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {GuideError: refused, HTTPException: failed, Exception: broken}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    def page(self, request: Request) -> Response:
        name, kind = PAGE[request.url.path]
        return Response((files("pipelines.explorer") / "page" / name).read_bytes(), media_type=kind)

    async def session(self, request: Request) -> Response:
        if not self.visits.admits((await body(request)).get("token")):
            return Json({"problem": "open the address that the command printed"}, 401)
        response = Json({"schema": 1})
        if self.visits.of(request.headers) is None:  # whoever opens the address again stays the same
            response.set_cookie(self.visits.cookie, self.visits.begin(), httponly=True, samesite="strict", path="/")
        return response

    async def overview(self, request: Request) -> Response:
        return Json({**self.workspace.overview(), "accepted": self._visit(request).accepted})

    def heads(self, request: Request) -> Response:
        return Json(self._side(request).heads())

    def example(self, request: Request) -> Response:
        example = number(request, "example")
        answer = self._side(request).example(example)
        if example < FIRST_TEXT:
            self._visit(request).saw("examples", example)
        return Json(answer)

    def map(self, request: Request) -> Response:
        return Raw(self._side(request).map(number(request, "example"), *head(request)))

    def average(self, request: Request) -> Response:
        return Raw(self._side(request).average(*head(request)))

    def tiles(self, request: Request) -> Response:
        example = number(request, "example") if "example" in request.query_params else None
        return Raw(self._side(request).tiles(example))

    def top(self, request: Request) -> Response:
        examples = self._side(request).top(*head(request), pattern(request))
        return Json({"schema": 1, "examples": examples})

    def preview(self, request: Request) -> Response:
        drawn = self._side(request).preview(number(request, "example"), text := pattern(request).strip())
        self._visit(request).saw("patterns", text)
        return Raw(drawn)

    async def patterns(self, request: Request) -> Response:
        text = text_of((await body(request)).get("pattern"), "pattern")
        name = await run_in_threadpool(self.workspace.try_pattern, text)
        self._visit(request).saw("patterns", name)
        return Json({"schema": 1, "name": name})

    async def text(self, request: Request) -> Response:
        text = " ".join(text_of((await body(request)).get("text"), "this").split())
        example = await run_in_threadpool(self.workspace.try_text, text)
        self._visit(request).saw("texts", text)
        return Json({"schema": 1, "example": example})

    async def accept(self, request: Request) -> Response:
        self.workspace.accept(await body(request), self._visit(request))
        return Json({"schema": 1})

    def _visit(self, request: Request) -> Visit:
        visit = self.visits.of(request.headers)
        assert visit is not None, "the guard lets nobody else through"
        return visit

    def _side(self, request: Request) -> Side:
        return self.workspace.side(number(request, "model", 0))


def number(request: Request, name: str, default: int | None = None) -> int:
    """A number in the address of a request."""
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HTTPException(400, f"{name} is not a number")
    return int(text)


def head(request: Request) -> tuple[int, int, str]:
    """The layer, number and kind of the head that a request is about."""
    return number(request, "layer"), number(request, "head"), request.query_params.get("kind", "self")[:10]


def pattern(request: Request) -> str:
    """The pattern that a request is about, as a person writes it."""
    return text_of(request.query_params.get("pattern", ""), "pattern")


def text_of(value: Any, name: str) -> str:
    """A value itself, if it is a text of a reasonable length."""
    if not isinstance(value, str) or len(value) > 2000:
        raise HTTPException(400, f"{name} is not a text")
    return value


async def body(request: Request) -> dict[str, Any]:
    """The JSON object that a request has sent."""
    raw = b""
    try:
        async with asyncio.timeout(SLOWEST):
            async for part in request.stream():
                raw += part
                if len(raw) > MOST_BODY:
                    raise HTTPException(413, f"at most {MOST_BODY:,} bytes")
    except TimeoutError:
        raise HTTPException(408, "too slow") from None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise HTTPException(400, "not JSON") from None
    if not isinstance(value, dict):
        raise HTTPException(400, "not a JSON object")
    return value


async def refused(request: Request, error: GuideError) -> Response:
    """The answer to what a person asked wrongly."""
    return Json({"problem": error.message, "hint": error.hint}, 400)


async def failed(request: Request, error: HTTPException) -> Response:
    """The answer to a request that is none of the page's."""
    return Json({"problem": error.detail}, error.status_code)


async def broken(request: Request, error: Exception) -> Response:
    """The answer to an error of ours: a number, under which the terminal says more."""
    name = secrets.token_hex(4)
    log.error("error %s on the page", name, exc_info=error)
    return Json({"problem": f"error {name}; the terminal says more"}, 500)
