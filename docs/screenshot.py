"""Takes the picture of the page of ``guide discover`` that the documentation shows.

    echo "The keys to the cabinet that the old man had lost are on the table, and he could not find them." > keys.txt
    guide discover export all-MiniLM-L6-v2 keys.txt --to page.html
    python docs/screenshot.py page.html docs/images/discovery.png 'layer=3&head=1&view=lines&special=off'

Needs Chromium and the development tools.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1440, 900


def main(page: str, picture: str, view: str) -> None:
    """Open a saved page at a view, which is what its address has after ``#``, and write what a window of it shows."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        tab = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        tab.goto(f"{Path(page).resolve().as_uri()}#{view}")
        tab.wait_for_timeout(3000)
        tab.screenshot(path=picture)
        chromium.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
