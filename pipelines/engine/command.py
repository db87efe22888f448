"""How people call a stage: the words of its help page, and what they see of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store

Templates = str | Sequence[str] | Callable[[Artifact, Store], str | Sequence[str]]
"""Command lines, of which the first whose gaps can be filled is suggested, or a function that gives them.

``{}`` stands for the artifact itself and ``{kind}`` for its input of that kind, or else for the newest artifact of that
kind that was made from the same corpus; a model from the same sequences, without a plan.
"""

SEQUENCES_FIRST = ("guide build-sequences {corpus} {tokenizer}", "guide build-tokenizer {corpus}")
"""What to do before a command that needs sequences, if there are none of this corpus."""


@dataclass(frozen=True)
class Table:
    """A table with sentences below it.

    Attributes:
        titles: of the columns; a table without any is only its sentences.
        rows: as wide as ``titles``.
    """

    titles: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    notes: Sequence[str] = ()


def _nothing(artifact: Artifact, config: Any) -> Table:
    return Table()


@dataclass(frozen=True)
class Command:
    """The command of a stage.

    Attributes:
        name: one word, or two, the first of which is a family such as ``probe``.
        help: what it does: one sentence, and further paragraphs for the help page.
        examples: command lines for the help page, without the prompt.
        next: the command to suggest afterwards.
        show: a table of the result for people, given the settings of the run or their defaults; by default none.
        group: the heading under which ``guide --help`` lists it.
        topics: headings for groups of options on the help page, each with the names of its settings; all others stand under
            "Options".
    """

    name: str
    help: str
    examples: Sequence[str]
    next: Templates | None = None
    show: Callable[[Artifact, Any], Table] = _nothing
    group: str = "Data"
    topics: Mapping[str, Sequence[str]] = field(default_factory=dict)
