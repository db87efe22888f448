"""Shell completion: artifacts of the store, presets of plans and patterns, for the parameters that take one.

A key press waits for the answer, so manifests are not opened, and nothing imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, MutableMapping
from importlib import resources
from typing import Any

from cli.settings import source_of, store_path
from guidance.errors import InputError
from pipelines.storage.store import Store

Complete = Callable[[Any], list[str]]
"""From the context of a half-written command line to the words to offer; Typer drops those that begin differently."""

BEFORE = "_GUIDE_COMPLETE_BEFORE"
"""The environment variable with the beginning of the last word that bash keeps, such as ``preset:``; bash replaces only what follows."""


def join_words(environ: MutableMapping[str, str]) -> None:
    """Put the words of a command line together again that bash has divided at ``:``, ``@`` and ``=``.

    Bash passes ``--plan=preset:ag`` as the words --plan, =, preset, : and ag, and completes ag alone.  So the last word stays divided:
    its last part remains in ``COMP_WORDS``, and the parts before it go to `BEFORE`.
    """
    words = environ.get("COMP_WORDS", "").split("\n")[: int(environ.get("COMP_CWORD") or 0) + 1]
    joined: list[list[str]] = [[]]  # the parts of each word
    for word in words:
        if word == "=" and joined[-1] and joined[-1][0].startswith("--"):
            joined.append([])
            continue
        if joined[-1] and not _is_break(word) and not _is_break(joined[-1][-1]):
            joined.append([])
        joined[-1].append(word)
    last = "" if not joined[-1] or _is_break(joined[-1][-1]) else joined[-1].pop()
    environ[BEFORE] = "".join(joined[-1])
    environ["COMP_WORDS"] = "\n".join([*map("".join, joined[:-1]), last])
    environ["COMP_CWORD"] = str(len(joined) - 1)


def _is_break(word: str) -> bool:
    return bool(word) and not word.strip(":@=")


def _offered(words: Iterator[str]) -> list[str]:
    """The words that begin with `BEFORE`, without that beginning; each once."""
    before = os.environ.get(BEFORE, "")
    return list(dict.fromkeys(word.removeprefix(before) for word in words if word.startswith(before)))


def artifacts(*kinds: str, unfinished: bool = False) -> Complete:
    """Completion by the names and ids of artifacts.

    Args:
        kinds: offer only artifacts of these kinds; by default of all.
        unfinished: also offer unfinished work.
    """

    def complete(ctx: Any) -> list[str]:
        store = _store(ctx)
        return _offered(_references(store, kinds, unfinished)) if store else []

    return complete


def _references(store: Store, kinds: tuple[str, ...], unfinished: bool) -> Iterator[str]:
    names = [name for name in store.names() if not kinds or name.kind in kinds]
    works = [folder for folder in store.unfinished() if unfinished and (not kinds or folder.parent.name in kinds)]
    yield from (name.name for name in names)
    yield from (str(name) for name in names)
    yield from filter(None, map(store.unfinished_name, works))
    for folder in (*store.folders(), *works):
        if not kinds or folder.parent.name in kinds:
            yield f"{folder.parent.name}/{folder.name}"


def _store(ctx: Any) -> Store | None:
    """The store of the command line so far, of the environment or of ``guide.toml``."""
    before = ctx.parent.params.get("store") if ctx.parent else None
    is_given_later = source_of(ctx, "store") == "COMMANDLINE" or before is None
    try:
        return Store(store_path(ctx.params.get("store") if is_given_later else before))
    except (InputError, TypeError):
        return None


def names(ctx: Any) -> list[str]:
    """The names in the store, without versions."""
    store = _store(ctx)
    return sorted({name.name for name in store.names()}) if store else []


def kinds(ctx: Any) -> list[str]:
    """The kinds of artifacts in the store."""
    store = _store(ctx)
    return sorted({folder.parent.name for folder in (*store.folders(), *store.unfinished())}) if store else []


def plans(ctx: Any) -> list[str]:
    """The plans that ship with the package, and those that were found in heads; if none fits, the shell offers files."""
    return [*_offered(f"preset:{name}" for name in presets(ctx)), *artifacts("findings")(ctx)]


def presets(ctx: Any) -> list[str]:
    """The names of the plans that ship with the package."""
    files = (resources.files("guidance") / "presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def patterns(ctx: Any) -> list[str]:
    """The names in the rows of the catalogue of patterns, which would import torch."""
    catalogue = (resources.files("guidance") / "patterns" / "catalogue.py").read_text(encoding="utf-8")
    return sorted(re.findall(r'^    Pattern\(\s*"(\w+)"', catalogue, re.MULTILINE))


SETTINGS: dict[str, Complete] = {
    **{kind: artifacts(kind) for kind in ("tokenizer", "idf", "deps", "masks", "cooccur")},
    **{name: artifacts("model") for name in ("init", "masking", "embeddings_from", "along")},
    "resume": artifacts("model", unfinished=True),
    "plan": plans,
    "patterns": patterns,
}
"""What to offer for settings of stages, by their names; inputs of stages and other parameters declare it themselves."""
