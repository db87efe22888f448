"""What the server of the page refuses, what it says of errors, and that its names come from a table."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from guidance.errors import MachineError
from pipelines.explorer import server
from pipelines.explorer.routes import MOST_BODY, PAGE
from pipelines.explorer.server import MOST_WAITING, free_socket, serving
from pipelines.explorer.workspace import as_json
from tests.pipelines.explorer.serving import Page, model_folder, served


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("server")
    with served(folder, [model_folder(folder / "model")]) as found:
        yield found


def ask(
    page: Page,
    path: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    host: str | list[str] | None = "127.0.0.1",
    cookie: str | None = "",
    headers: Mapping[str, str] = {},
) -> tuple[int, Mapping[str, str], bytes]:
    """An answer; ``host`` without a port gets that of the page, and ``cookie`` empty means the right one."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name in [] if host is None else [host] if isinstance(host, str) else host:
        connection.putheader("Host", name if ":" in name else f"{name}:{page.port}")
    if cookie is not None:
        connection.putheader("Cookie", cookie or page.cookie)
    for name, value in headers.items():
        connection.putheader(name, value.encode("latin-1"))
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    response = connection.getresponse()
    found = response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()
    connection.close()
    return found


NOTHING: Any = None
"""Stands for the workspace of a page that is not asked for data."""

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "0.0.0.0",
        "127.0.0.1:1",
        None,
        ["127.0.0.1"] * 2,
        "",
    ],
)
def test_other_hosts_are_refused_before_anything_else(page: Page, host: Any) -> None:
    for path in ("/", "/api/overview", "/nothing"):
        status, headers, body = ask(page, path, host=host)
        assert status in (400, 403), "no Host at all is refused by the server itself"
        assert b"problem" in body or status == 400
        assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize("cookie", [None, "guide_1=x", "wrong", "token", "\u00e9", "double"])
def test_data_need_the_cookie(page: Page, cookie: str | None) -> None:
    given = {
        "wrong": f"guide_{page.port}=" + "x" * len(page.token),
        "token": f"guide_{page.port}={page.token}",
        "\u00e9": f"guide_{page.port}=\u00e9",
        "double": f"{page.cookie}; {page.cookie}",
    }.get(cookie or "", cookie)
    headers = {} if given is None else {"Cookie": given}
    status, _, body = ask(page, "/api/overview", cookie=None, headers=headers)
    assert status == 401 and page.token.encode() not in body
    assert ask(page, "/", cookie=None)[0] == 200, "the page itself holds no data"


def test_the_token_is_exchanged_for_a_cookie(page: Page) -> None:
    body = json.dumps({"token": page.token}).encode()
    status, headers, _ = ask(page, "/api/session", method="POST", body=body, cookie=None, headers=JSON)
    assert status == 200
    assert "httponly" in headers["set-cookie"].lower() and "samesite=strict" in headers["set-cookie"].lower()
    status, headers, _ = ask(page, "/api/session", method="POST", body=body, headers=JSON)
    assert status == 200 and "set-cookie" not in headers, "whoever comes again stays the same"
    for wrong in ("", "x" * len(page.token), "\u00e9", None, 3):
        body = json.dumps({"token": wrong}).encode()
        assert ask(page, "/api/session", method="POST", body=body, cookie=None, headers=JSON)[0] == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
        (JSON, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_other_sites_cannot_ask(page: Page, headers: Mapping[str, str], status: int) -> None:
    body = json.dumps({"pattern": "next"}).encode()
    found, answer, _ = ask(page, "/api/patterns", method="POST", body=body, headers=headers)
    assert found == status
    assert not any(name.startswith("access-control") for name in answer)


def test_no_preflight_is_answered(page: Page) -> None:
    asked = {"Origin": f"http://127.0.0.1:{page.port}", "Access-Control-Request-Method": "POST"}
    status, headers, _ = ask(page, "/api/patterns", method="OPTIONS", headers=asked)
    assert status == 405 and not any(name.startswith("access-control") for name in headers)


def test_every_answer_has_the_headers_that_browsers_obey(page: Page) -> None:
    for path in (*PAGE, "/api/overview", "/nothing", "/api/map"):
        _, headers, _ = ask(page, path)
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert "unsafe" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
        assert "server" not in headers and "location" not in headers


def test_names_come_from_a_table(page: Page) -> None:
    assert {path for path in PAGE if ask(page, path)[0] == 200} == set(PAGE)
    draw = random.Random(0)
    parts = [
        "..",
        "%2e%2e",
        "%252e%252e",
        "/",
        "//",
        "%2f",
        "..%5c",
        "%00",
        "etc",
        "passwd",
        "style.css",
        "api",
        "a",
        "\\",
    ]
    known = set(PAGE)
    for _ in range(300):
        path = "/" + "".join(draw.choice(parts) for _ in range(draw.randint(1, 5)))
        if path not in known:
            status, headers, body = ask(page, path)
            assert status in (404, 401, 400), path
            assert b"root:" not in body and "location" not in headers


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/api/map?example=0&layer=0", "head is not a number"),
        ("/api/map?example=99999&layer=0&head=0", "no such example"),
        ("/api/map?example=0&layer=9&head=0", "no such head"),
        ("/api/map?example=-1&layer=0&head=0", "example is not a number"),
        ("/api/map?example=%D9%A1&layer=0&head=0", "example is not a number"),
        ("/api/heads?model=7", "no such model"),
        ("/api/top?layer=0&head=0&pattern=nothing", "unknown pattern"),
        ("/api/preview?example=0&pattern=next+and", "character 9: something is missing"),
        ("/api/preview?example=0&pattern=dependency", "needs the feature"),
        (f"/api/preview?example=0&pattern={'x' * 2001}", "not a text"),
    ],
)
def test_wrong_questions_get_plain_answers(page: Page, path: str, says: str) -> None:
    status, headers, body = ask(page, path)
    assert status == 400 and headers["content-type"] == "application/json"
    told = json.loads(body)["problem"]
    assert says in told and "Traceback" not in told and str(Path.cwd()) not in told


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"[" * 20_000, 400),
        (b'{"pattern": 3}', 400),
        (b'{"pattern": "next; import os"}', 400),
        (b'{"pattern": "' + b"x" * MOST_BODY + b'"}', 413),
    ],
)
def test_wrong_bodies_are_refused(page: Page, body: bytes, status: int) -> None:
    assert ask(page, "/api/patterns", method="POST", body=body, headers=JSON)[0] == status


def test_a_body_of_unknown_length_is_cut_off(page: Page) -> None:
    connection = socket.create_connection(("127.0.0.1", page.port), timeout=10)
    head = (
        f"POST /api/patterns HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nCookie: {page.cookie}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    connection.sendall(head.encode())
    with pytest.MonkeyPatch.context():
        try:
            for _ in range(40):
                connection.sendall(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
        except OSError:
            pass  # it hung up
    answer = connection.recv(100)
    assert b" 413 " in answer.split(b"\r\n")[0]
    connection.close()


def test_too_many_headers_and_slow_clients_leave_the_page_up(page: Page) -> None:
    many = socket.create_connection(("127.0.0.1", page.port), timeout=10)
    many.sendall(b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(10_000)) + b"\r\n")
    assert many.recv(200).split(b"\r\n")[0].split()[1] in (b"400", b"431")
    slow = [socket.create_connection(("127.0.0.1", page.port), timeout=10) for _ in range(20)]
    for connection in slow:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
    assert ask(page, "/api/overview")[0] == 200
    for connection in (many, *slow):
        connection.close()


def half_open(page: Page, number: int) -> list[socket.socket]:
    """Connections with half a header each."""
    found = [socket.create_connection(("127.0.0.1", page.port), timeout=10) for _ in range(number)]
    for connection in found:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
    return found


def test_half_open_connections_do_not_lock_anybody_out(page: Page) -> None:
    held = half_open(page, MOST_WAITING + 30)
    assert ask(page, "/api/overview")[0] == 200
    held[0].settimeout(5)
    with contextlib.suppress(ConnectionResetError):  # what it has sent was not read
        assert held[0].recv(1) == b"", "the oldest is closed"
    for connection in held:
        connection.close()


def test_a_header_must_arrive_in_time(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SLOWEST", 0.5)
    silent = socket.create_connection(("127.0.0.1", page.port), timeout=5)
    (dripping,) = half_open(page, 1)
    again = http.client.HTTPConnection("127.0.0.1", page.port, timeout=5)
    again.request("GET", "/")
    assert again.getresponse().read()
    begun = time.monotonic()
    again.sock.sendall(b"GET / HTTP/1.1\r\n")
    with contextlib.suppress(OSError):
        while time.monotonic() < begun + 4:
            dripping.sendall(b"a")
            time.sleep(0.1)
    assert time.monotonic() < begun + 4, "a byte now and then does not extend it"
    assert silent.recv(1) == b"" and again.sock.recv(1) == b""
    for connection in (silent, dripping, again):
        connection.close()


def test_fifty_at_once_are_answered(page: Page) -> None:
    found: list[int] = []
    path = "/api/map?example=1&layer=0&head=1"
    threads = [threading.Thread(target=lambda: found.append(ask(page, path)[0])) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {200}


def test_an_error_of_ours_has_a_number_and_nothing_more(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("/secret/path")

    monkeypatch.setattr(page.workspace.sides[0], "heads", broken)
    status, _, body = ask(page, "/api/heads")
    assert status == 500 and b"secret" not in body and json.loads(body)["problem"].startswith("error ")


def test_numbers_that_are_not_finite_are_null() -> None:
    assert (
        as_json({"a": [float("nan"), 1.0, {"b": float("inf")}], "c": "é"})
        == '{"a": [null, 1.0, {"b": null}], "c": "é"}'.encode()
    )


def test_maps_are_those_of_the_model(page: Page) -> None:
    import numpy as np

    _, _, body = ask(page, "/api/example?example=0")
    tokens = json.loads(body)["tokens"]
    raw = np.frombuffer(ask(page, "/api/map?example=0&layer=0&head=5")[2], "<u2").reshape(len(tokens), -1)
    attention = (raw / 65535.0) ** 2
    np.testing.assert_allclose(attention.sum(-1), 1, atol=1e-3)
    place = tokens.index("anna")
    same = [n for n, token in enumerate(tokens) if token == "anna"]
    others = [n for n in range(len(tokens)) if n not in same]
    assert attention[place, same].min() > 2 * attention[place, others].max()
    keys = np.frombuffer(ask(page, "/api/preview?example=0&pattern=matching_token+and+not+self")[2], np.uint8)
    assert keys.reshape(raw.shape)[place].nonzero()[0].tolist() == [n for n in same if n != place]


def test_the_planted_head_comes_first(page: Page) -> None:
    name = json.loads(
        ask(page, "/api/patterns", method="POST", body=b'{"pattern": "query.id == key.id and not self"}', headers=JSON)[
            2
        ]
    )["name"]
    for _ in range(200):
        heads = json.loads(ask(page, "/api/heads")[2])
        if name in heads["patterns"]:
            break
        time.sleep(0.05)
    place = heads["patterns"].index(name)
    best = max(heads["heads"], key=lambda head: head["relevance"][place])
    assert (best["layer"], best["head"]) == (0, 5)
    assert heads["outstanding"][name] == [5]
    examples = json.loads(ask(page, f"/api/top?layer=0&head=5&pattern={quote(name)}")[2])["examples"]
    values = [each["value"] for each in examples]
    assert values == sorted(values, reverse=True) and len(values) == min(12, heads["examples"])


def test_a_port_that_is_taken_is_refused_if_it_was_asked_for() -> None:
    taken = free_socket("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(MachineError, match=f"port {port}"):
        free_socket("127.0.0.1", port)
    other = free_socket("127.0.0.1", 0)
    assert other.getsockname()[1] != port and other.getsockname()[0] == "127.0.0.1"
    taken.close()
    other.close()


def test_of_two_servers_each_listens_where_it_says() -> None:
    with serving(NOTHING) as (one, _), serving(NOTHING) as (other, _):
        assert one.partition("/#")[0] != other.partition("/#")[0]
        for address in (one, other):
            socket.create_connection(("127.0.0.1", urlsplit(address).port), timeout=5).close()


def test_a_port_that_was_asked_for_is_taken_by_one_server_only() -> None:
    with serving(NOTHING) as (address, _):
        port = urlsplit(address).port
        assert port
        with pytest.raises(MachineError, match=f"port {port}"):
            serving(NOTHING, port=port).__enter__()


def test_a_server_for_the_network_answers_to_the_addresses_of_this_machine() -> None:
    with serving(NOTHING, "0.0.0.0") as (address, serve):
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        shown, port = urlsplit(address).hostname, urlsplit(address).port
        assert shown and port and shown != "0.0.0.0"

        def asked(at: str, host: str, **headers: str) -> int:
            connection = http.client.HTTPConnection(at, port, timeout=10)
            connection.request("GET", "/", headers={"Host": f"{host}:{port}", **headers})
            with contextlib.closing(connection):
                return connection.getresponse().status

        assert asked(shown, shown) == 200 and asked(shown, socket.gethostname().lower()) == 200
        for at, host in (("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "localhost"), ("127.0.0.2", "127.0.0.2")):
            assert asked(at, host, Origin=f"http://{host}:{port}") == 200
        for host in ("evil.example", "0.0.0.0", "127.0.0.3"):
            assert asked("127.0.0.1", host) == 403
        assert asked("127.0.0.1", "127.0.0.1", Origin="http://evil.example") == 403
    thread.join(timeout=10)


def test_artifacts_that_vanish_do_not_matter_to_a_page_that_is_open(tmp_path: Path) -> None:
    import shutil

    folder = model_folder(tmp_path / "model")
    with served(tmp_path, [folder]) as page:
        shutil.rmtree(tmp_path / "artifacts")
        assert ask(page, "/api/map?example=2&layer=1&head=3")[0] == 200
        assert not (tmp_path / "artifacts").exists(), "looking writes nothing"


def test_data_that_cannot_be_read_are_told_on_the_page(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    with served(tmp_path, [folder], split="test", text="one .\n", wait=False) as page:
        Path(folder, "config.json").write_text("{")
        for _ in range(200):
            state = page.workspace.worker.state
            if state["phase"] == "failed":
                break
            time.sleep(0.05)
        told = json.loads(ask(page, "/api/overview")[2])
        assert told["state"]["phase"] in ("failed", "ready")


def test_what_one_browser_did_is_not_that_of_another(tmp_path: Path) -> None:
    with served(tmp_path, [model_folder(tmp_path / "model")]) as page:
        anna, bob = page.visit(), page.visit()

        def post(path: str, sent: Mapping[str, Any], cookie: str) -> None:
            body = json.dumps(sent).encode()
            assert ask(page, path, method="POST", body=body, cookie=cookie, headers=JSON)[0] == 200

        def accepted(cookie: str, pattern: str) -> dict[str, Any]:
            marked = [{"layer": 0, "head": 5, "kind": "self", "pattern": pattern}]
            post("/api/accept", {"decisions": marked, "into": "found", "mechanism": "bias", "pal": False}, cookie)
            page.workspace.wait()
            made = json.loads(ask(page, "/api/overview", cookie=cookie)[2])["accepted"]
            return dict(made)

        post("/api/patterns", {"pattern": " next "}, anna)
        assert ask(page, "/api/preview?example=0&pattern=distance+%3C+2", cookie=bob)[0] == 200
        assert ask(page, "/api/example?example=1", cookie=bob)[0] == 200
        post("/api/text", {"text": "anna  saw the dog"}, bob)
        of_bob = accepted(bob, "matching_token")
        assert json.loads(ask(page, "/api/overview", cookie=anna)[2])["accepted"] is None
        of_anna = accepted(anna, "next")
        assert json.loads(ask(page, "/api/overview", cookie=bob)[2])["accepted"] == of_bob != of_anna

        seen = {
            name: json.loads((page.store.load(made["reference"]).path / "findings.json").read_text())["seen"]
            for name, made in (("anna", of_anna), ("bob", of_bob))
        }
        assert (seen["anna"]["patterns"], seen["anna"]["examples"], seen["anna"]["texts"]) == (["next"], [], [])
        assert (seen["bob"]["patterns"], seen["bob"]["examples"]) == (["distance < 2"], [1])
        assert seen["bob"]["texts"] == ["anna saw the dog"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"into": "somewhere"}, "into: "),
        ({"into": 3}, "into: "),
        ({"mechanism": "magic"}, "mechanism: "),
        ({"pal": "perhaps"}, "pal: "),
        ({"decisions": []}, "no head is marked"),
        ({"decisions": [{"layer": 0, "head": 5, "pattern": "nothing"}]}, "unknown pattern"),
        ({"decisions": [{"layer": "0", "head": 5, "pattern": "next"}]}, "a layer, a head and a pattern"),
        ({"decisions": [{"layer": 0, "head": 5, "kind": "added", "pattern": "next"}]}, "one that a plan added"),
    ],
)
def test_what_cannot_be_accepted_is_refused_at_once(page: Page, changed: Mapping[str, Any], says: str) -> None:
    sent = {
        "decisions": [{"layer": 0, "head": 5, "pattern": "next"}],
        "into": "found",
        "mechanism": "fix",
        "pal": False,
    }
    status, _, body = ask(
        page, "/api/accept", method="POST", body=json.dumps({**sent, **changed}).encode(), headers=JSON
    )
    assert status == 400 and says in json.loads(body)["problem"]
