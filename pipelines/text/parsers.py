"""The kinds of parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from guidance.statistics.dependencies import Tree
from pipelines.engine.stage import Files
from pipelines.text.parsing import Device, model_folder
from pipelines.text.spacy_models import SpacyParser, spacy_folder
from pipelines.text.stanza_models import StanzaParser, parser_files


class Reader(NamedTuple):
    """One row of `READERS`: how to open a kind of parser, and which files determine its output."""

    open: Callable[[str, Device, int], Callable[[Sequence[str]], list[Tree]]]
    files: Callable[[str], Files]


READERS: Mapping[str, Reader] = {
    "spacy": Reader(SpacyParser, lambda name: model_folder(spacy_folder(name))),
    "stanza": Reader(StanzaParser, parser_files),
}
"""Kinds of parser by the word before the colon of ``--parser``."""
