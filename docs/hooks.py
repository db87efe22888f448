"""A step of `make site`: replaces links to files outside of ``docs/``, which the site does not have, by the names of these files."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """The Markdown of a page, in which links that lead out of ``docs/`` are replaced by their text and the name of the file.  MkDocs
    calls this by its name."""
    depth = len(PurePosixPath(page.file.src_uri).parts)

    def named(link: re.Match[str]) -> str:
        text, goal = link.groups()
        ups = len(re.match(r"(?:\.\./)*", goal)[0]) // 3  # type: ignore[index]
        if ups < depth:
            return link[0]
        name = goal[3 * ups :].partition("#")[0]
        return text if text.strip("`") == name else f"{text} (`{name}` of the repository)"

    return re.sub(r"(?<!!)\[([^\]\n]*)\]\(((?:\.\./)+[^)\s]*)\)", named, markdown)
