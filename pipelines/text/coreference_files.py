"""Reads texts with coreference: CoNLL-2012 columns, GUM and OntoGUM, GAP, and the sentences of WinoBias.

In GAP and WinoBias a pronoun has candidates: two names, two occupations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from guidance.errors import InputError, counted
from guidance.probes.coreference import Mention, head_word, kind_of
from pipelines.text.blocks import Notes
from pipelines.text.readers import TextFile
from pipelines.text.records import plain_rows

FORMATS = ("conll-2012", "gum", "gap", "winobias")

_BRACKET = re.compile(r"\(([^()|]+)\)|\(([^()|]+)|([^()|]+)\)")
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_MARKED = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Text:
    """A document.

    Attributes:
        words: its words; sentences: the first word of each sentence, one for a text whose sentences are not marked.
        mentions: in the order of their first words.
        stereotype: of a sentence of WinoBias: ``pro`` or ``anti``, if its file says so.
    """

    name: str
    words: Sequence[str]
    sentences: Sequence[int]
    mentions: Sequence[Mention]
    stereotype: str = ""


def read_coreference(
    paths: Sequence[Path], names: Sequence[str], format_: str | None, encoding: str, notes: Notes
) -> Iterator[Text]:
    """The documents of some files, in one of `FORMATS`; by default the first line of each file tells which.  Raises InputError
    if a file is in none of these formats, or its brackets do not match."""
    for path, name in zip(paths, names, strict=True):
        file = TextFile(path, name, encoding, notes)
        first = file.first_line() if format_ is None else ""
        kind = format_ or next((kind for kind, start in _BEGINNINGS.items() if re.match(start, first)), None)
        if kind is None:
            raise InputError(
                f"{name!r}: no format of coreference that is known, begins with {first[:60]!r}",
                hint=f"--format {', '.join(FORMATS)}",
            )
        yield from _READERS[kind](file)


_BEGINNINGS = {
    "conll-2012": "#begin document",
    "gum": "# begin document",
    "gap": "ID\tText\tPronoun",
    "winobias": r"\d+ .*\[",
}


def _conll(file: TextFile) -> Iterator[Text]:
    """CoNLL-2012: the word in the fourth column, brackets in the last; tabs or spaces.  A part is a document."""
    title, words, sentences, brackets = file.name, list[str](), list[int](), list[tuple[int, str, str]]()
    begins = True
    for number, line in file.lines():
        place = file.place(number)
        if line.startswith("#begin document"):
            about = re.match(r"#begin document \((.*)\);\s*(?:part\s*(\w+))?", line)
            title = "/".join(filter(None, about.groups())) if about else file.name
        elif line.startswith("#end document"):
            yield _text(title, words, sentences, brackets, place)
            words, sentences, brackets, begins = [], [], [], True
        elif not line.strip():
            begins = True
        elif not line.startswith("#"):
            cells = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
            if len(cells) < 5:
                raise InputError(f"{place}: {counted(len(cells), 'column')}, fewer than CoNLL-2012 has")
            if begins:
                sentences.append(len(words))
                begins = False
            brackets.append((len(words), cells[-1], place))
            words.append(cells[3])
    if words:
        yield _text(title, words, sentences, brackets, repr(file.name))


def _gum(file: TextFile) -> Iterator[Text]:
    """GUM and OntoGUM: number, word and brackets; an entity is a number, perhaps between its type and its name."""
    title, words, brackets = file.name, list[str](), list[tuple[int, str, str]]()
    for number, line in file.lines():
        place = file.place(number)
        if line.startswith("# begin document"):
            title = line.partition("document")[2].strip() or file.name
        elif line.startswith("# end document"):
            yield _text(title, words, [0], brackets, place)
            words, brackets = [], []
        elif line.strip() and not line.startswith("#"):
            cells = line.rstrip("\r\n").split("\t")
            if len(cells) < 3:
                raise InputError(f"{place}: {counted(len(cells), 'column')}; GUM has a number, a word and brackets")
            brackets.append((len(words), cells[2], place))
            words.append(cells[1])
    if words:
        yield _text(title, words, [0], brackets, repr(file.name))


def _text(
    title: str, words: Sequence[str], sentences: Sequence[int], brackets: Sequence[tuple[int, str, str]], place: str
) -> Text:
    """A document from the brackets at its words, which must match."""
    opened, mentions = dict[str, list[int]](), list[Mention]()
    for word, text, where in brackets:
        for alone, begins, ends in _BRACKET.findall(text):
            label = alone or begins or ends
            number = re.match(r"[A-Za-z]+-(\d+)", label)  # of an entity such as person-12-Name
            entity = number[1] if number else label
            if begins:
                opened.setdefault(entity, []).append(word)
            else:
                starts = [word] if alone else opened.get(entity)
                if not starts:
                    raise InputError(f"{where}: entity {entity!r} ends where none has begun")
                mentions.append(_mention(words, starts.pop(), word + 1, entity))
    if left := [entity for entity, starts in opened.items() if starts]:
        raise InputError(f"{place}: entity {left[0]!r} begins and never ends")
    return Text(title, words, sentences, sorted(mentions, key=lambda mention: (mention.start, mention.end)))


def _mention(words: Sequence[str], start: int, end: int, entity: str, asks: bool | None = None) -> Mention:
    head = head_word(words, start, end)
    return Mention(start, end, head, entity, kind_of(words, start, head, end), asks)


GAP_COLUMNS = (
    *("ID", "Text", "Pronoun", "Pronoun-offset"),
    *(f"{name}{column}" for name in "AB" for column in ("", "-offset", "-coref")),
)


def _gap(file: TextFile) -> Iterator[Text]:
    """GAP: a pronoun in a text and its candidates, two names; a name whose column says TRUE corefers with the pronoun."""
    rows = plain_rows(file.lines(), "\t")
    first, header = next(rows, (1, []))
    if missing := [name for name in GAP_COLUMNS if name not in header]:
        raise InputError(
            f"{file.place(first)}: a column {missing[0]} is missing, so this is no header of GAP",
            hint="the first line names the columns: " + ", ".join(GAP_COLUMNS),
        )
    for number, cells in rows:
        place, row = file.place(number), dict(zip(header, cells, strict=False))
        if len(row) < len(header):
            raise InputError(f"{place}: not a row of GAP, {counted(len(cells), 'cell')} for {len(header)} columns")
        mentions = []
        try:
            spans = [(role, int(row[f"{role}-offset"]), row[role]) for role in ("Pronoun", "A", "B")]
            corefer = {"Pronoun"} | {role for role in ("A", "B") if row[f"{role}-coref"] == "TRUE"}
            found = list(_WORD.finditer(row["Text"]))
        except ValueError as error:
            raise InputError(f"{place}: not a row of GAP, an offset is no number") from error
        words = [word[0] for word in found]
        for role, start, phrase in spans:
            end = start + len(phrase)
            inside = [n for n, word in enumerate(found) if start < word.end() and word.start() < end]
            if not inside or row["Text"][start:end] != phrase:
                raise InputError(f"{place}: {phrase!r} is not at character {start} of the text")
            entity, asks = "pronoun" if role in corefer else role, role == "Pronoun"
            mention = _mention(words, inside[0], inside[-1] + 1, entity, asks)
            mentions.append(replace(mention, kind="pronominal") if asks else mention)
        yield Text(row["ID"], words, [0], sorted(mentions, key=lambda mention: mention.start))


def _winobias(file: TextFile) -> Iterator[Text]:
    """WinoBias: a number and a sentence on each line; the mentions in brackets, an occupation and a pronoun, corefer.  The other
    occupation of the sentence, which is not marked, is the other candidate of the pronoun."""
    stereotype = next((kind for kind in STEREOTYPES if Path(file.name).name.startswith(f"{kind}_")), "")
    for number, line in file.lines():
        if not line.strip():
            continue
        own, _, sentence = line.strip().partition(" ")
        if not own.isdecimal() or not _MARKED.search(sentence):
            raise InputError(f"{file.place(number)}: not a number and a sentence with mentions in brackets")
        words: list[str] = []
        marked: list[tuple[int, int]] = []
        # every second part is what stands in brackets
        for part, text in enumerate(_MARKED.split(sentence)):
            start = len(words)
            words += _WORD.findall(text)
            if part % 2 and len(words) > start:
                marked.append((start, len(words)))
        mentions = [_mention(words, *span, "marked") for span in marked]
        inside = {word for mention in mentions for word in range(mention.start, mention.end)}
        mentions += [_mention(words, *span, "other") for span in _occupations(words) if inside.isdisjoint(range(*span))]
        mentions = [replace(mention, asks=mention.kind == "pronominal") for mention in mentions]
        mentions.sort(key=lambda mention: mention.start)
        yield Text(f"{file.name}/{own}", words, [0], mentions, stereotype)


STEREOTYPES = ("pro", "anti")

OCCUPATIONS = re.compile(
    "accountant|analyst|assistant|attendant|auditor|baker|carpenter|cashier|ceo|chief|cleaner|clerk|cook|counselor|designer"
    "|developer|driver|editor|farmer|guard|hairdresser|housekeeper|janitor|laborer|lawyer|librarian|manager|mechanic|mover"
    "|nurse|physician|receptionist|salesperson|secretary|sheriff|supervisor|tailor|teacher|worker|writer"
)
"""The last words of the forty occupations of WinoBias (Zhao et al. 2018)."""


def _occupations(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Occupations with their articles: the first word, and the one behind the last."""
    for number, word in enumerate(words):
        start = number - 1 - (word == "worker")
        if OCCUPATIONS.fullmatch(word.lower()) and start >= 0 and words[start].lower() in ("the", "a", "an"):
            yield start, number + 1


_READERS = {"conll-2012": _conll, "gum": _gum, "gap": _gap, "winobias": _winobias}
