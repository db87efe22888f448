"""What tests do with the page in a browser.

A request to any other host, an error of the page, or a violation of its policy fails the test.
"""

from __future__ import annotations

import re
import time
from typing import Any


class opened:
    """A tab on an address; leaving it fails if it asked other hosts, or had an error."""

    def __init__(self, browser: Any, address: str, **settings: Any) -> None:
        self._browser, self.address, self._settings = browser, address, settings
        self.wrong: list[str] = []

    def __enter__(self) -> Any:
        size = {"width": 1280, "height": 720}
        self._context = self._browser.new_context(**{"viewport": size, "reduced_motion": "reduce", **self._settings})
        tab = self._context.new_page()
        origin = self.address.partition("#")[0]
        tab.on("request", lambda r: r.url.startswith((origin, "data:", "blob:")) or self.wrong.append(f"asked {r.url}"))
        tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        tab.on("console", lambda m: self._heard(m))
        tab.goto(self.address)
        tab.wrong = self.wrong
        return tab

    def _heard(self, message: Any) -> None:
        # browsers report every answer of 400 and above, and a server that is gone
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.wrong.append(message.text)

    def __exit__(self, *_: Any) -> None:
        self._context.close()
        assert not self.wrong, self.wrong


def head(tab: Any, layer: int, number: int, model: str = "guided") -> Any:
    of = f"{model}: " if model else ""
    return tab.get_by_role("button", name=re.compile(rf"^{of}layer {layer} head {number},"))


def until(tab: Any, condition: str) -> None:
    """Wait for a condition; the page's policy forbids the way in which Playwright does."""
    ends = time.monotonic() + 15
    while not tab.evaluate(condition):
        assert time.monotonic() < ends, condition
        time.sleep(0.03)


def ready(tab: Any) -> None:
    tab.get_by_text("ready", exact=True).wait_for(timeout=30_000)
    tab.locator("#maps canvas[aria-label]").first.wait_for()
