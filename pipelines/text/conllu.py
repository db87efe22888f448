"""Sentences and dependency trees from CoNLL-U files, read strictly: an error names the line.

A multi-word token (``3-4``) belongs to the surface text only.  An empty node (``3.1``) is neither surface text nor a word.
So each word counts once.

A `Treebank` gives a sentence of a corpus the tree at the same position, that is, with the same document and sentence number,
if both have the same text.  Otherwise it gets the first tree with the same text.  White space is ignored when texts are
compared.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from sys import intern

from guidance.errors import InputError, counted
from guidance.statistics.dependencies import Scheme, Tree, label_scheme, spell
from pipelines.text.blocks import BLOCK_LIMIT, Block, Document, Notes, block_of, pieces_of
from pipelines.text.readers import open_lines

COLUMNS = 10
BLOCK_SENTENCES = 50
_MAX_WORDS = 100_000
_WORD = re.compile(r"[1-9][0-9]*")
_RANGE = re.compile(r"([1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
_EMPTY = re.compile(r"([0-9]+)\.([1-9][0-9]*)")
_NEW = re.compile(r"#\s*new(doc|par)(?:\s+id\s*=\s*(.*?)\s*)?$")
_TEXT = re.compile(r"#\s*text\s*=\s?(.*)$")


@dataclass(frozen=True)
class Sentence:
    """One sentence with its tree.

    Attributes:
        text: surface text, NFC.
        line: line of its first word, from 1.
        forms: the words, with multi-word tokens split.
        heads: for each word the number of its head, from 1; 0 for the root.  None if the sentence has no tree.
        relations: for each word the label of the arc to its head.
        lemmas: for each word its lemma, or "".
        tags: for each word its universal part of speech, or "".
        tokens: the surface tokens in order: the form, and the number of words it covers.
        starts_document: id of the document that begins here, "" if ``# newdoc`` gives none; None if no document begins.
        starts_paragraph: whether ``# newpar`` precedes the sentence.
    """

    text: str
    line: int
    forms: list[str]
    heads: list[int] | None
    relations: list[str]
    lemmas: list[str]
    tags: list[str]
    tokens: list[tuple[str, int]]
    starts_document: str | None = None
    starts_paragraph: bool = False


def read_sentences(lines: Iterable[tuple[int, str]], name: str, notes: Notes) -> Iterator[Sentence]:
    """All sentences of a file; raises InputError, which names the line, for wrong columns, ids or trees."""
    comments: list[str] = []
    rows: list[tuple[int, list[str]]] = []
    for number, line in lines:
        if line.startswith("#") and not rows:
            comments.append(line)
        elif line.strip(" \t"):
            rows.append((number, _cells(line, f"{name!r}, line {number}")))
            if len(rows) > _MAX_WORDS:
                raise InputError(f"{name!r}, line {number}: a sentence of more than {_MAX_WORDS:,} lines")
        elif rows:
            yield _sentence(comments, rows, name, notes)
            comments, rows = [], []
    if rows:
        yield _sentence(comments, rows, name, notes)


def _cells(line: str, place: str) -> list[str]:
    cells = line.split("\t")
    if len(cells) != COLUMNS:
        hint = "columns are separated by one tab, not by spaces" if len(cells) == 1 else None
        raise InputError(f"{place}: {counted(len(cells), 'column')}, CoNLL-U has {COLUMNS}", hint=hint)
    if "" in cells:
        raise InputError(f"{place}: column {cells.index('') + 1} is empty", hint="write `_` for a missing value")
    return cells


def _sentence(comments: list[str], rows: list[tuple[int, list[str]]], name: str, notes: Notes) -> Sentence:
    words: list[tuple[int, list[str]]] = []
    tokens: list[tuple[str, int]] = []
    covered, rebuilt = 0, ""
    for number, cells in rows:
        place, size = f"{name!r}, line {number}", 0
        if _WORD.fullmatch(cells[0]):
            if int(cells[0]) != len(words) + 1:
                raise InputError(f"{place}: expected word number {len(words) + 1}, found {cells[0]}")
            words.append((number, cells))
            size = int(len(words) > covered)
        elif match := _RANGE.fullmatch(cells[0]):
            first, last = int(match[1]), int(match[2])
            if first != len(words) + 1 or last <= first or first <= covered:
                raise InputError(f"{place}: multi-word token {cells[0]} must come right before its words")
            covered, size = last, last - first + 1
        elif match := _EMPTY.fullmatch(cells[0]):
            if int(match[1]) != len(words):
                raise InputError(f"{place}: empty node {cells[0]} must come right after word {match[1]}")
        else:
            raise InputError(f"{place}: {cells[0][:20]!r} is not a word number")
        if size:
            tokens.append((cells[1], size))
            rebuilt += cells[1] + ("" if "SpaceAfter=No" in cells[9].split("|") else " ")
    first_line = rows[0][0]
    if not words or covered > len(words):
        raise InputError(
            f"{name!r}, line {rows[-1][0]}: a multi-word token covers words that the sentence does not have"
        )
    heads = _heads(words, name)
    rebuilt = rebuilt.rstrip(" ")
    text = next((match[1] for comment in comments if (match := _TEXT.match(comment))), rebuilt)
    if "".join(text.split()) != "".join(rebuilt.split()):
        notes.warn("`# text` does not match the words; the words were used", f"{name!r}, line {first_line}")
        text = rebuilt
    new = {match[1]: match[2] or "" for comment in comments if (match := _NEW.match(comment))}
    return Sentence(
        _nfc(text).strip(),
        first_line,
        [cells[1] for _, cells in words],
        heads,
        [cells[7] for _, cells in words],
        ["" if cells[2] == "_" != cells[1] else cells[2] for _, cells in words],
        ["" if cells[3] == "_" else cells[3] for _, cells in words],
        tokens,
        new.get("doc"),
        "par" in new,
    )


def _heads(words: list[tuple[int, list[str]]], name: str) -> list[int] | None:
    """The heads, checked to form one tree; None if no word has a head."""
    if all(cells[6] == "_" for _, cells in words):
        return None
    heads = []
    for position, (number, cells) in enumerate(words, start=1):
        place = f"{name!r}, line {number}"
        if not re.fullmatch(r"[0-9]{1,9}", cells[6]):
            raise InputError(f"{place}: head {cells[6][:20]!r} is not a number")
        head = int(cells[6])
        if head > len(words):
            raise InputError(f"{place}: head {head} in a sentence of {counted(len(words), 'word')}")
        if head == position:
            raise InputError(f"{place}: word {position} is its own head")
        heads.append(head)
    roots = [number for (number, _), head in zip(words, heads, strict=True) if head == 0]
    if len(roots) != 1:
        line = roots[1] if roots else words[0][0]
        raise InputError(f"{name!r}, line {line}: {'two roots' if roots else 'no root'} in one sentence")
    reach_root = {0}
    for position in range(1, len(words) + 1):
        path = []
        while position not in reach_root:
            path.append(position)
            if len(path) > len(words):
                raise InputError(f"{name!r}, line {words[position - 1][0]}: the heads form a cycle")
            position = heads[position - 1]
        reach_root.update(path)
    return heads


def document_id(first: Sentence, name: str, number: int) -> str:
    """The id of the document that begins with this sentence; ``number`` counts the documents of the file from 1."""
    return name if first.starts_document is None else first.starts_document or f"{name}:{number}"


def conllu_documents(lines: Iterable[tuple[int, str]], name: str, notes: Notes) -> Iterator[Document]:
    """The documents of a file: split at ``# newdoc``, or one for the whole file.

    Blocks are split at ``# newpar`` and have at most `BLOCK_SENTENCES` sentences.
    """
    sentences = read_sentences(lines, name, notes)
    pending, count = next(sentences, None), 0

    def blocks() -> Iterator[Block]:
        nonlocal pending
        waiting, size, first = list[Sentence](), 0, True
        while pending is not None and (first or pending.starts_document is None):
            full = len(waiting) >= BLOCK_SENTENCES or size + len(pending.text) + 1 > BLOCK_LIMIT
            if waiting and (full or pending.starts_paragraph):
                yield block_of([sentence.text for sentence in waiting], waiting[0].line)
                waiting, size = [], 0
            if len(pending.text) > BLOCK_LIMIT:
                notes.warn(f"a sentence over {BLOCK_LIMIT:,} characters was cut", f"{name!r}, line {pending.line}")
                yield from (block_of([piece], pending.line) for piece in pieces_of(pending.text))
            elif pending.text:
                waiting.append(pending)
                size += len(pending.text) + 1
            first = False
            pending = next(sentences, None)
        if waiting:
            yield block_of([sentence.text for sentence in waiting], waiting[0].line)

    while pending is not None:
        count += 1
        yield Document(document_id(pending, name, count), name, f"{name!r}, line {pending.line}", blocks())


# trees of a corpus


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
        [head - 1 if head else word for word, head in enumerate(sentence.heads)],
        [intern(relation) for relation in sentence.relations],
    )


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _placed(tree: Tree, text: str) -> Tree:
    """The tree with offsets in ``text``, which has the same letters and perhaps other white space."""
    offsets = [offset for offset, letter in enumerate(text) if not letter.isspace()]
    offsets.append(len(text))  # for a word without letters at the end
    start = [offsets[first] for first in tree.start]
    spans = zip(tree.start, tree.end, strict=True)
    end = [offsets[last - 1] + 1 if last > first else offsets[first] for first, last in spans]
    return Tree(start, end, tree.form, tree.lemma, tree.upos, tree.head, tree.relation, tree.status)
