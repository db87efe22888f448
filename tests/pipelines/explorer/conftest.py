"""A browser, and a page of two models that is open in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pipelines.explorer.browsing import opened
from tests.pipelines.explorer.serving import HOSTILE, TEXT, Page, model_folder, served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
    ]
    playwright = pytest.importorskip("playwright.sync_api")
    found = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=found, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("page")
    models = [model_folder(folder / "guided"), model_folder(folder / "plain")]
    with served(folder, models, TEXT + f"anna saw {HOSTILE} . looooooooooooong man .\n") as found:
        yield found


@pytest.fixture
def tab(browser: Any, page: Page) -> Iterator[Any]:
    with opened(browser, page.address) as found:
        yield found
