"""spaCy models: finding and opening them, and parsing sentences into trees."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from guidance.errors import InputError, MachineError
from guidance.statistics.dependencies import Scheme, Tree, label_scheme, without
from pipelines.engine.stage import require
from pipelines.lazy import np
from pipelines.progress import log
from pipelines.text.parsing import parse_all

BATCH = 128
"""Sentences per batch for spaCy; larger batches are slower on a CPU."""

LONGEST_RUN = 500
"""Longest run of characters without a space that spaCy's rule-based tokenizer gets when parsing: its time is quadratic."""

_RELOAD_AFTER = 400_000
_SIMPLE_WORD = re.compile(r"\s|\S{1,100}")
_NOT_FOR_PARSING = frozenset(
    [
        *("ner", "entity_linker", "entity_ruler", "span_ruler", "span_finder", "spancat", "spancat_singlelabel"),
        *("textcat", "textcat_multilabel", "senter", "sentencizer", "doc_cleaner"),
        *("merge_entities", "merge_noun_chunks", "merge_subtokens"),
    ]
)
_WITHOUT_TAGS = frozenset({"tok2vec", "transformer", "curated_transformer", "tagger", "morphologizer", "parser"})
"""Components that do not read tags, unlike lemmatizers and attribute rulers."""


def spacy_folder(name: str) -> Path:
    """The folder of a spaCy model, which is given as a folder or as the name of an installed package."""
    if os.sep in name or Path(name).is_dir():
        if not Path(name).is_dir():
            raise InputError(f"{name!r}: no such folder with a spaCy model")
        return Path(name)
    require("spacy", "spacy")
    package = importlib.util.find_spec(name) if re.fullmatch(r"\w+", name) else None
    if package is None or not package.submodule_search_locations:
        raise MachineError(f"the spaCy model {name!r} is not installed", hint=f"python -m spacy download {name}")
    return Path(next(iter(package.submodule_search_locations)))


def load_spacy(name: str) -> Any:
    """The spaCy pipeline of a folder or package."""
    folder = spacy_folder(name)
    if Path(name).is_dir() and not any((folder / file).is_file() for file in ("meta.json", "__init__.py")):
        raise InputError(f"{name!r}: not a spaCy model (no meta.json)")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = require("spacy", "spacy").load(name)
        for line in dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning):
            log.warning("%s: %s", name, line)
        return model
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"{name!r}: not a spaCy model ({str(error)[:200]!r})") from error


def guarded(tokenize: Callable[[str], Any], longest: int = 100) -> Callable[[str], Any]:
    """The tokenizer, but with runs of over ``longest`` characters without spaces cut into pieces.

    spaCy's tokenizer takes quadratic time on such a run ("(((((...").
    """
    from spacy.tokens import Doc

    vocab = tokenize.vocab  # type: ignore[attr-defined]
    long_run = re.compile(rf"\S{{{longest + 1},}}")

    def tokens(text: str) -> Iterator[tuple[str, bool]]:
        """Words, and whether a space follows each of them."""
        position = 0
        for run in long_run.finditer(text):
            yield from ((token.text, bool(token.whitespace_)) for token in tokenize(text[position : run.start()]))
            pieces = _SIMPLE_WORD.findall(run[0])
            last = pieces[-1]
            # keep a final full stop as a token of its own, so that it still ends the sentence
            if len(last) > 1 and not last[-1].isalnum():
                pieces[-1:] = [last[:-1], last[-1]]
            yield from ((piece, False) for piece in pieces)
            position = run.end()
        yield from ((token.text, bool(token.whitespace_)) for token in tokenize(text[position:]))

    def cut(text: str) -> Any:
        if not long_run.search(text):
            return tokenize(text)
        words, spaces = map(list, zip(*tokens(text), strict=True))
        return Doc(vocab, words=words, spaces=spaces)

    return cut


class SpacyParser:
    """Parses with a spaCy model, in a language and in a ``scheme`` of labels.  Its vocabulary grows with every new word, so the
    model is reloaded from time to time."""

    def __init__(self, name: str, device: str, max_words: int) -> None:
        self._name, self._device, self._max_words = name, device, max_words
        self._load()

    def _load(self) -> None:
        from spacy.tokenizer import Tokenizer

        _spacy_device(self._device)
        self._model = load_spacy(self._name)
        self.language = str(self._model.lang)
        meta = {name: self._model.get_pipe_meta(name) for name in self._model.pipe_names}
        parsers = [name for name, pipe in meta.items() if "token.dep" in pipe.assigns or pipe.factory == "parser"]
        if not parsers:
            raise InputError(
                f"the spaCy model {self._name!r} has no parser: {', '.join(meta) or 'it is empty'}",
                hint="use a model with a parser, for example: python -m spacy download en_core_web_sm",
            )
        self._model.select_pipes(disable=_unused_components({name: pipe.factory for name, pipe in meta.items()}))
        self.scheme: Scheme = label_scheme(
            label for name in parsers for label in getattr(self._model.get_pipe(name), "labels", ())
        )
        tokenizer = self._model.tokenizer
        # the rule-based tokenizer; some languages have others, which may change the text
        self._keeps_text = isinstance(tokenizer, Tokenizer)
        self._tokenize = guarded(tokenizer, LONGEST_RUN) if self._keeps_text else tokenizer
        self._strings = self._model.vocab.strings
        self._limit = len(self._strings) + _RELOAD_AFTER

    def __call__(self, texts: Sequence[str]) -> list[Tree]:
        """The tree of each sentence; a sentence that cannot be parsed does not affect the others."""
        if len(self._strings) > self._limit:
            self._load()
        _spacy_device(self._device)  # spaCy's setting belongs to the thread
        return parse_all(self._parse, texts, self._max_words)

    def _parse(self, texts: Sequence[str]) -> list[Tree]:
        docs = [self._tokenize(text) for text in texts]
        trees = [Tree(status="too long" if len(doc) else "empty") for doc in docs]
        kept = [number for number, doc in enumerate(docs) if 0 < len(doc) <= self._max_words]
        parsed = list(self._model.pipe((_one_sentence(docs[number]) for number in kept), batch_size=BATCH))
        for number, tree in zip(kept, self._trees([texts[number] for number in kept], parsed), strict=True):
            trees[number] = tree if len(tree) else Tree(status="empty")
        return trees

    def _trees(self, texts: Sequence[str], docs: Sequence[Any]) -> Iterator[Tree]:
        """The trees of parsed sentences, without words that are white space; one by one would take a quarter longer."""
        from spacy.attrs import DEP, HEAD, IDX, IS_SPACE, LEMMA, LENGTH, POS
        from spacy.parts_of_speech import NAMES

        if not self._keeps_text and any(doc.text != text for text, doc in zip(texts, docs, strict=True)):
            raise ValueError("the tokenizer changed the text")
        attributes = [IDX, LENGTH, LEMMA, POS, HEAD, DEP, IS_SPACE]
        table = np.concatenate([np.empty((0, len(attributes)), "uint64"), *(doc.to_array(attributes) for doc in docs)])
        start, length, lemma, upos, _, relation, space = table.T.tolist()
        lemma, relation = ([self._strings[key] for key in keys] for keys in (lemma, relation))
        offset = table[:, attributes.index(HEAD)].view("int64").tolist()
        first = 0
        for text, doc in zip(texts, docs, strict=True):
            rows = slice(first, first := first + len(doc))
            end = [first_letter + size for first_letter, size in zip(start[rows], length[rows], strict=True)]
            tree = Tree(
                start[rows],
                end,
                [text[since:until] for since, until in zip(start[rows], end, strict=True)],
                lemma[rows],
                [NAMES[key] for key in upos[rows]],
                [word + distance for word, distance in enumerate(offset[rows])],
                relation[rows],
            )
            yield without(tree, [word for word, is_space in enumerate(space[rows]) if is_space])


def _unused_components(factories: Mapping[str, str]) -> list[str]:
    """Names of the components that do not affect trees, given the factory of each; the tagger is one unless another component
    reads its tags."""
    known = _NOT_FOR_PARSING | _WITHOUT_TAGS
    unread = {"tagger"} if known.issuperset(factories.values()) else set()
    return [name for name, factory in factories.items() if factory in _NOT_FOR_PARSING | unread]


def _one_sentence(doc: Any) -> Any:
    """The words of a doc as one sentence that no parser may split; ten times as fast as setting each token."""
    from spacy.attrs import SENT_START

    starts_N1 = np.full((len(doc), 1), -1)
    starts_N1[0] = 1
    return doc.from_array([SENT_START], starts_N1.view("uint64"))


def _spacy_device(device: str) -> None:
    """Set the device on which spaCy computes."""
    spacy = require("spacy", "spacy")
    if device == "cpu":
        spacy.require_cpu()
    elif not spacy.prefer_gpu() and device == "cuda":
        raise MachineError(
            "spaCy finds no GPU", hint="use --device cpu, or install GPU support: pip install 'spacy[cuda12x]'"
        )
