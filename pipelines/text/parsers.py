"""Parsers by the names of their libraries, and what else these know of a language."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pipelines.engine.stage import require
from pipelines.text.parsing import model_folder
from pipelines.text.spacy_models import SpacyParser, spacy_folder
from pipelines.text.stanza_models import StanzaParser, parser_files

MODELS: Mapping[str, Any] = {
    "spacy": (SpacyParser, lambda name: model_folder(spacy_folder(name))),
    "stanza": (StanzaParser, parser_files),
}
"""Kinds of parsers that have a model: how to open one, and which files determine its output."""

SYNTAX = ("head", "relation", "pos", "negation", "stop_word")
"""The features that a parser finds."""

NAMES = "spacy:NAME_OR_FOLDER, stanza:LANG or stanza:FOLDER:LANG:PACKAGE"
"""How users name a parser that has a model."""

MOST_WORDS = 512
"""Longest sentence that is parsed unless a user says otherwise."""


def kind_meant(name: str) -> str:
    """``; did you mean spacy:NAME?`` for a name without its kind, and ``stanza:`` for a code of a language; otherwise nothing."""
    if not name or ":" in name or name in (*MODELS, "conllu") or name.endswith(".conllu"):
        return ""
    return f"; did you mean {'stanza' if len(name) <= 3 and name.isalpha() else 'spacy'}:{name}?"


@functools.cache
def stop_words(language: str) -> list[str] | None:
    """spaCy's stop words for a language code; None if it has none."""
    try:
        rules = require("spacy", "spacy").util.get_lang_class(language).Defaults
    except ImportError:  # spaCy does not have this language
        return None
    return sorted(rules.stop_words) or None
