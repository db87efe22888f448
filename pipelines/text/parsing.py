"""What parsers of both libraries share: the files of a model, and parsing many sentences where some may fail."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from guidance.errors import GuideError
from guidance.statistics.dependencies import Tree
from pipelines.engine.stage import Files

Device = str
"""``auto``, ``cpu`` or ``cuda``."""


def model_folder(folder: Path) -> Files:
    """All files of a model's folder, except Python's caches."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return Files.of(paths, (path.relative_to(folder).as_posix() for path in paths))


def parse_all(parse: Callable[[Sequence[str]], list[Tree]], texts: Sequence[str], max_words: int) -> list[Tree]:
    """The tree of each sentence; sentences that are too long or make ``parse`` fail get a status instead of words."""
    trees = [Tree(status="too long")] * len(texts)
    # a sentence with too many words between spaces has too many tokens in any case
    places = [place for place, text in enumerate(texts) if len(text.split()) <= max_words]
    with _one_thread():
        found = _parse_or_halve(parse, [texts[place] for place in places])
    for place, tree in zip(places, found, strict=True):
        trees[place] = tree
    return trees


def _parse_or_halve(parse: Callable[[Sequence[str]], list[Tree]], texts: Sequence[str]) -> list[Tree]:
    """All trees at once; if that fails, the trees of each half, down to the sentence that causes the failure."""
    if not texts:
        return []
    try:
        return parse(texts)
    except Exception as error:
        if isinstance(error, (GuideError, MemoryError)) or "OutOfMemory" in type(error).__name__:
            raise  # not caused by the sentence
        if len(texts) == 1:
            words = " ".join(str(error).split())
            return [Tree(status=f"failed: {type(error).__name__}{f': {words[:100]}' if words else ''}")]
    middle = len(texts) // 2
    return _parse_or_halve(parse, texts[:middle]) + _parse_or_halve(parse, texts[middle:])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: otherwise the last bits of a sum depend on the number of threads."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
