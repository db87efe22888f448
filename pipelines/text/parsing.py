"""What parsers of both libraries share: the files of a model, and parsing many sentences where some may fail.

The corpus decides where sentences end: a parser takes each sentence as one, even if its own model would split it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from guidance.errors import GuideError
from guidance.statistics.dependencies import Tree
from pipelines.engine.stage import Files


def model_folder(folder: Path) -> Files:
    """All files of a model's folder, except Python's caches."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return Files.of(paths, (path.relative_to(folder).as_posix() for path in paths))


def parse_all(parse: Callable[[Sequence[str]], list[Tree]], texts: Sequence[str], max_words: int) -> list[Tree]:
    """The tree of each sentence; sentences that are too long or make ``parse`` fail get a status instead of words."""
    # a sentence with too many words between spaces has too many tokens in any case
    is_short = [len(text.split()) <= max_words for text in texts]
    with _one_thread():
        trees = iter(_parse_or_halve(parse, list(itertools.compress(texts, is_short))))
    return [next(trees) if short else Tree(status="too long") for short in is_short]


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
    before = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(before)
