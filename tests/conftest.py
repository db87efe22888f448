"""Fixtures and options for all tests."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from cli.main import run
from pipelines.storage.manifest import MANIFEST, seal
from pipelines.storage.store import Store

LARGE = 250
"""From this number of tests on, a file takes about as long as the longest others."""


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GUIDE_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Let fsync return at once, here and in forked children: no test cuts the power, and a shared disk takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _seeds_of_this_device_only() -> Iterator[None]:
    """Without accelerators, let ``torch.manual_seed`` not format its callers for each kind of them: half a millisecond."""
    torch: Any = sys.modules.get("torch")
    with pytest.MonkeyPatch.context() as patch:
        if torch is not None and not torch.accelerator.is_available():
            for kind in (torch.cuda, torch.xpu, torch.mtia):
                patch.setattr(kind, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_parser_of_command_lines() -> Iterator[None]:
    """Build the parser of an app once, not in every call of `cli.main.run`: it takes 30 ms."""
    build, built = typer.main.get_command, dict[tuple[int, ...], tuple[Any, list[Any]]]()

    def get_command(app: typer.Typer) -> Any:
        parts = _parts(app)
        key = (id(app), *map(id, parts))
        if key not in built:
            built[key] = build(app), parts  # while we keep the parts, no others get their ids
        return built[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", get_command)
        yield


def _parts(app: typer.Typer) -> list[Any]:
    """What is registered with an app and its groups; some tests register commands."""
    groups = [group.typer_instance for group in app.registered_groups]
    return [*app.registered_commands, *(part for group in groups if group for part in (group, *_parts(group)))]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "artifacts")


@pytest.fixture
def guide(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Runs a command line in this process, in ``tmp_path`` with its own store; returns code, out and err."""
    before = Path.cwd()
    os.chdir(tmp_path)

    def call(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    yield call
    os.chdir(before)


@pytest.fixture(autouse=True)
def _log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log as a new process has it, whatever a command or a benchmark in this process has set before."""
    log = logging.getLogger("guide")
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "handlers", [])
    log.setLevel(logging.NOTSET)


@pytest.fixture
def edit_manifest() -> Callable[..., None]:
    """Changes a manifest and updates its seal."""

    def edit(folder: Path, **changes: Any) -> None:
        path = folder / MANIFEST
        path.write_text(json.dumps(seal(json.loads(path.read_bytes()) | changes)))

    return edit


@pytest.fixture(scope="session")
def every(pytestconfig: pytest.Config) -> bool:
    """Whether ``--every`` asks for all cases, for tests that go through many themselves."""
    return bool(pytestconfig.getoption("--every"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", action="store_true", help="also run what the marks every and one_in leave out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked ``every``, and keep one case in n of tests marked ``one_in(n)``: different cases for each
    test, to cover most together.

    The few files of hundreds of tests come first, then those with few tests, which are long: parallel processes, each
    of which takes a whole file, should finish at about the same time.
    """
    if not config.getoption("--every"):
        dropped = _dropped(items)
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=list(dropped))
    number = Counter(item.path for item in items)
    items.sort(key=lambda item: (number[item.path] < LARGE, number[item.path], item.path))


def pytest_collection_finish() -> None:
    """Leave what the imports made out of garbage collections, which then neither visit it nor copy it in a forked child."""
    gc.collect()
    gc.freeze()


def _dropped(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases to leave out: those marked ``every``, and, of a test marked ``one_in(n)``, all but every n-th diagonal of
    the product of its axes, or all but one case where that would leave none.
    """
    dropped, kept = defaultdict(list), set()
    indices: defaultdict[tuple[object, ...], dict[tuple[int, ...], int]] = defaultdict(dict)  # of the values per axis
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        test = (item.parent, item.originalname)
        diagonal = zlib.crc32(item.originalname.encode())
        for number, names in enumerate(_axes(item)):
            value = tuple(id(item.callspec.params[name]) for name in names)
            known = indices[*test, number]
            diagonal += known.setdefault(value, len(known))
        if diagonal % mark.args[0]:
            dropped[test].append(item)
        else:
            kept.add(test)
    for test in dropped.keys() - kept:
        del dropped[test][zlib.crc32(test[1].encode()) % len(dropped[test])]
    rest = {item for cases in dropped.values() for item in cases}
    return rest | {item for item in items if item.get_closest_marker("every")}


def _axes(item: pytest.Function) -> list[list[str]]:
    """The names of each ``parametrize`` of a test, then of each fixture with ``params`` that it asks for."""
    given = [mark.args[0] for mark in item.iter_markers("parametrize")]
    axes = [[name.strip() for name in (names.split(",") if isinstance(names, str) else names)] for names in given]
    fixtures = getattr(item, "callspec", SimpleNamespace(params={})).params.keys() - {
        n for names in axes for n in names
    }
    return axes + [[name] for name in sorted(fixtures)]


def pytest_configure(config: pytest.Config) -> None:
    """Restore signals that a shell made us ignore (``&``, ``nohup``); tests of ignored signals would prove nothing."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
