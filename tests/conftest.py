"""What all tests share."""

from __future__ import annotations

import json
import os
import signal
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.main import run
from pipelines.storage.manifest import MANIFEST, seal
from pipelines.storage.store import Store


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GUIDE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "artifacts")


@pytest.fixture
def guide(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Run a command line in this process, in ``tmp_path`` with its own store: gives code, out and err."""
    before = Path.cwd()
    os.chdir(tmp_path)

    def call(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    yield call
    os.chdir(before)


@pytest.fixture
def edit_manifest() -> Callable[..., None]:
    """Change a manifest as somebody would who knows the format: the seal fits."""

    def edit(folder: Path, **changes: Any) -> None:
        path = folder / MANIFEST
        path.write_text(json.dumps(seal(json.loads(path.read_bytes()) | changes)))

    return edit


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", action="store_true", help="every case of large products of cases, not one in some")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with the mark ``one_in(n)`` keep one case in n, others for each test: together they have nearly all.

    Files with few tests come first: theirs take longest, and processes that share the work should end together.
    """
    if not config.getoption("--every"):
        left = _left_out(items)
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))
    number = Counter(item.path for item in items)
    items.sort(key=lambda item: (number[item.path], item.path))


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """All but every n-th diagonal of what a test's ``parametrize`` marks span; never all that there is of a test."""
    left, kept = defaultdict(list), set()
    places: defaultdict[tuple[object, ...], dict[tuple[int, ...], int]] = defaultdict(dict)  # of the values of an axis
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        test = (item.parent, item.originalname)
        place = zlib.crc32(item.originalname.encode())
        for number, axis in enumerate(item.iter_markers("parametrize")):
            names = axis.args[0].split(",") if isinstance(axis.args[0], str) else axis.args[0]
            value = tuple(id(item.callspec.params[name.strip()]) for name in names)
            known = places[*test, number]
            place += known.setdefault(value, len(known))
        if place % mark.args[0]:
            left[test].append(item)
        else:
            kept.add(test)
    return {item for test in left.keys() & kept for item in left[test]}


def pytest_configure(config: pytest.Config) -> None:
    """Undo what a shell's ``&`` or ``nohup`` hands down: where a signal is ignored, tests of it would prove nothing."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
