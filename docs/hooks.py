"""A step of the site's build (`make site`): links to files outside ``docs/`` become their names, since the site has no such files."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """The text of a page without links that leave the folder."""
    depth = len(PurePosixPath(page.file.src_uri).parts)

    def named(link: re.Match[str]) -> str:
        text, goal = link.groups()
        ups = len(re.match(r"(?:\.\./)*", goal)[0]) // 3  # type: ignore[index]
        if ups < depth:
            return link[0]
        name = goal[3 * ups :].partition("#")[0]
        return text if text.strip("`") == name else f"{text} (`{name}` of the repository)"

    return re.sub(r"(?<!!)\[([^\]\n]*)\]\(((?:\.\./)+[^)\s]*)\)", named, markdown)
