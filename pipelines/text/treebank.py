"""Finds the trees of a corpus's sentences in existing CoNLL-U files.

A sentence gets the tree at the same position, that is, with the same document and sentence number, if both have the same
text.  Otherwise it gets the first tree with the same text.  White space is ignored when texts are compared.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from sys import intern

from guidance.statistics.dependencies import Scheme, Tree, label_scheme, spell
from pipelines.text.blocks import Notes
from pipelines.text.conllu import Sentence, document_id, read_sentences
from pipelines.text.readers import open_lines


class Treebank:
    """The trees of some files, held in memory: about 200 bytes per word.

    Attributes:
        scheme: label scheme of the relations.
        warnings: what was left out of the files, or is odd in them.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str], max_words: int) -> None:
        """Read the files, which must be valid CoNLL-U."""
        self._max_words = max_words
        self._by_place: dict[tuple[str, int], tuple[str, Tree]] = {}
        self._by_letters: dict[str, Tree] = {}
        self.warnings: list[str] = []
        labels: set[str] = set()
        for path, name in zip(paths, names, strict=True):
            notes = Notes()
            for document, number, sentence in _numbered(path, name, notes):
                letters, tree = _letters(sentence.text), _tree(sentence)
                labels.update(tree.relation)
                self._by_letters.setdefault(letters, tree)
                self._by_place.setdefault((document, number), (letters, tree))
            self.warnings += notes.lines()
        self.scheme: Scheme = label_scheme(labels)

    def find(self, document: str, number: int, text: str) -> Tree:
        """The tree of a sentence of the corpus, given the id of its document and its number there, with offsets in ``text``."""
        letters = _letters(text)
        letters_there, tree = self._by_place.get((document, number), ("", None))
        if tree is None or letters_there != letters:
            tree = self._by_letters.get(letters)
        if tree is None:
            return Tree(status="not found")
        return _placed(tree, text) if len(tree) <= self._max_words else Tree(status="too long")


def _numbered(path: Path, name: str, notes: Notes) -> Iterator[tuple[str, int, Sentence]]:
    """The sentences of a file, each with its document id and its number there, as `build-corpus` would number them."""
    document, documents, number = "", 0, 0
    for sentence in read_sentences(open_lines(path, name, "utf-8", notes), name, notes):
        if not documents or sentence.starts_document is not None:
            documents, number = documents + 1, 0
            document = document_id(sentence, name, documents)
        if sentence.text:
            yield document, number, sentence
            number += 1


def _letters(text: str) -> str:
    return "".join(text.split())


def _tree(sentence: Sentence) -> Tree:
    """The tree of a sentence, with offsets that do not count white space."""
    if sentence.heads is None:
        return Tree(status="no tree")
    tokens = [_letters(form) for form, _ in sentence.tokens]
    whole, bounds = "".join(tokens), [0, *accumulate(map(len, tokens))]
    if not unicodedata.is_normalized("NFC", whole):
        bounds = [len(_nfc(whole[:bound])) for bound in bounds]
    forms = [intern(_nfc(form)) for form in sentence.forms]
    spans: list[tuple[int, int]] = []
    for (form, count), start, end in zip(sentence.tokens, bounds[:-1], bounds[1:], strict=True):
        words = [_letters(word) for word in forms[len(spans) : len(spans) + count]]
        spans += spell(_letters(_nfc(form)), start, end, words) if count > 1 else [(start, end)]
    return Tree(
        [start for start, _ in spans],
        [end for _, end in spans],
        forms,
        [intern(_nfc(lemma)) for lemma in sentence.lemmas],
        [intern(tag) for tag in sentence.tags],
        [head - 1 if head else place for place, head in enumerate(sentence.heads)],
        [intern(relation) for relation in sentence.relations],
    )


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _placed(tree: Tree, text: str) -> Tree:
    """The tree with offsets in ``text``, which has the same letters and perhaps other white space."""
    places = [place for place, letter in enumerate(text) if not letter.isspace()]
    places.append(len(text))  # for a word without letters at the end
    start = [places[first] for first in tree.start]
    end = [
        places[last - 1] + 1 if last > first else places[first]
        for first, last in zip(tree.start, tree.end, strict=True)
    ]
    return Tree(start, end, tree.form, tree.lemma, tree.upos, tree.head, tree.relation, tree.status)
