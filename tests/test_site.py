"""The documentation builds as a site: every page is in its contents, links hold, and nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Addresses(HTMLParser):
    """The addresses that a browser loads by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe"):
            self.found.append(given.get("src") or "")
        elif tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "preconnect"):
            self.found.append(given.get("href") or "")


def test_every_page_is_there_and_loads_only_what_is_beside_it(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    for page in pages:
        path = site / (page.with_name("index.html") if page.name == "README.html" else page)
        parser = Addresses()
        parser.feed(path.read_text(encoding="utf-8"))
        assert len(parser.found) > 3
        for address in filter(None, parser.found):
            assert (path.parent / address.partition("?")[0]).resolve().is_file(), (page, address)


def test_every_page_is_in_the_contents() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in listed] == []


def test_the_site_can_be_searched_for_a_command(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert '"commands/train.html#guide-pretrain"' in index


def test_a_link_out_of_the_folder_becomes_the_name_of_its_file() -> None:
    hook = run_path(str(ROOT / "docs" / "hooks.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results/a.md"))
    text = "[the examples](../../examples/x.py#main), [`CHANGELOG.md`](../../CHANGELOG.md), [plans](../plans.md), ![p](../p.png)"
    assert hook(text, page=page) == (
        "the examples (`examples/x.py` of the repository), `CHANGELOG.md`, [plans](../plans.md), ![p](../p.png)"
    )
    assert not re.search(
        r"\]\(\.\./[A-Z]", hook("[x](../CONTRIBUTING.md)", page=SimpleNamespace(file=SimpleNamespace(src_uri="a.md")))
    )
