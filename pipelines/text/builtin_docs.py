"""English text that comes with CPython: the language reference in ``pydoc_data.topics`` and the docstrings of the standard
library, about 330,000 words.  Source files are parsed, never imported."""

from __future__ import annotations

import ast
import inspect
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from guidance.errors import MachineError
from pipelines.engine.stage import Files
from pipelines.text.blocks import Document, Notes, record_blocks
from pipelines.text.sources import BUILTIN

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
_TOPICS = "pydoc_data/topics.py"
_MIN_WORDS = 5


def python_docs_files() -> Files:
    """The source files from which the text is taken, with their digests.  Raises MachineError if this Python comes without the
    source of its standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(library).as_posix()
        for path in library.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(library).parts)
    )
    if _TOPICS not in names:
        raise MachineError(f"{BUILTIN}: this Python lacks {library / _TOPICS}", hint="give a text file instead")
    version = ".".join(platform.python_version_tuple()[:2])
    provenance = [{"source": f"CPython {version} documentation and docstrings", "license": "PSF-2.0"}]
    return Files.of((library / name for name in names), names, provenance)


def python_docs_documents(files: Files, notes: Notes, *, keep_lines: bool = False) -> Iterator[Document]:
    """A document for each topic of the reference, then one for each module with docstrings, from `python_docs_files`."""
    by_name = dict(zip(files.names, files.paths, strict=True))
    topics = ast.parse(by_name.pop(_TOPICS).read_bytes())
    texts: list[tuple[str, Iterator[str]]] = []
    for node in topics.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            table = ast.literal_eval(node.value)
            texts += [(f"topics/{topic}", iter([table[topic]])) for topic in sorted(table)]
    texts += [(name, _docstrings(path)) for name, path in by_name.items()]
    for name, parts in texts:
        text = "\n\n".join(parts)
        if text:
            blocks = record_blocks(text, source=BUILTIN, line=1, notes=notes, keep_lines=keep_lines)
            yield Document(f"python-docs/{name}", BUILTIN, f"{BUILTIN}, {name}", blocks)


def _docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, except those under `_MIN_WORDS` words."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False) or ""
            if len(text.split()) >= _MIN_WORDS:
                yield inspect.cleandoc(text)
