"""spaCy and Stanza models: finding and opening them, and parsing sentences into trees.

The corpus decides where sentences end: a parser takes each sentence as one, even if its own model would split it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guidance.errors import GuideError, InputError, MachineError
from guidance.statistics.dependencies import Scheme, Tree, label_scheme, spell, without
from pipelines.engine.progress import log
from pipelines.engine.stage import Files, require

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

_STANZA_PARTS = ("tokenize", "mwt", "pos", "lemma", "depparse", "pretrain", "forward_charlm", "backward_charlm")

Device = str
"""``auto``, ``cpu`` or ``cuda``."""


# spaCy


def spacy_folder(name: str) -> Path:
    """The folder of a spaCy model, which is given as a folder or as the name of an installed package.

    Raises:
        InputError: the folder does not exist.
        MachineError: the package is not installed; the message says how to install it.
    """
    if os.sep in name or Path(name).is_dir():
        if not Path(name).is_dir():
            raise InputError(f"{name!r}: this folder with a spaCy model does not exist")
        return Path(name)
    require("spacy", "spacy")
    found = importlib.util.find_spec(name) if re.fullmatch(r"\w+", name) else None
    if found is None or not found.submodule_search_locations:
        raise MachineError(f"the spaCy model {name!r} is not installed", hint=f"python -m spacy download {name}")
    return Path(next(iter(found.submodule_search_locations)))


def load_spacy(name: str) -> Any:
    """The spaCy pipeline of a folder or package.

    Raises:
        InputError: it is not a spaCy model, or cannot be opened.
    """
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

    def cut(text: str) -> Any:
        if not long_run.search(text):
            return tokenize(text)
        words, spaces = [], []
        position = 0
        for run in long_run.finditer(text):
            doc = tokenize(text[position : run.start()])
            words += [token.text for token in doc]
            spaces += [bool(token.whitespace_) for token in doc]
            pieces = _SIMPLE_WORD.findall(run[0])
            last = pieces[-1]
            # keep a final full stop as a token of its own, so that it still ends the sentence
            if len(last) > 1 and not last[-1].isalnum():
                pieces[-1:] = [last[:-1], last[-1]]
            words += pieces
            spaces += [False] * len(pieces)
            position = run.end()
        rest = tokenize(text[position:])
        words += [token.text for token in rest]
        spaces += [bool(token.whitespace_) for token in rest]
        return Doc(vocab, words=words, spaces=spaces)

    return cut


class SpacyParser:
    """Parses with a spaCy model.  Its vocabulary grows with every new word, so the model is reloaded from time to time.

    Attributes:
        scheme: label scheme of the relations.
        language: language code, such as ``en``.
    """

    def __init__(self, name: str, device: Device, max_words: int) -> None:
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
        kept = [place for place, doc in enumerate(docs) if 0 < len(doc) <= self._max_words]
        parsed = list(self._model.pipe((_one_sentence(docs[place]) for place in kept), batch_size=BATCH))
        for place, tree in zip(kept, self._trees([texts[place] for place in kept], parsed), strict=True):
            trees[place] = tree if len(tree) else Tree(status="empty")
        return trees

    def _trees(self, texts: Sequence[str], docs: Sequence[Any]) -> Iterator[Tree]:
        """The trees of parsed sentences, without words that are white space.

        Converts all sentences to lists at once: one by one takes a quarter longer.
        """
        import numpy as np
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
            here = slice(first, first := first + len(doc))
            end = [place + size for place, size in zip(start[here], length[here], strict=True)]
            tree = Tree(
                start[here],
                end,
                [text[since:until] for since, until in zip(start[here], end, strict=True)],
                lemma[here],
                [NAMES[key] for key in upos[here]],
                [place + distance for place, distance in enumerate(offset[here])],
                relation[here],
            )
            yield without(tree, [place for place, is_space in enumerate(space[here]) if is_space])


def _unused_components(factories: Mapping[str, str]) -> list[str]:
    """Names of the components that do not affect trees; the tagger is one unless another component reads its tags.

    Args:
        factories: for each component its factory.
    """
    known = _NOT_FOR_PARSING | _WITHOUT_TAGS
    unread = {"tagger"} if known.issuperset(factories.values()) else set()
    return [name for name, factory in factories.items() if factory in _NOT_FOR_PARSING | unread]


def _one_sentence(doc: Any) -> Any:
    """The words of a doc as one sentence that no parser may split; ten times as fast as setting each token."""
    import numpy as np
    from spacy.attrs import SENT_START

    starts_N1 = np.full((len(doc), 1), -1)
    starts_N1[0] = 1
    return doc.from_array([SENT_START], starts_N1.view("uint64"))


def _spacy_device(device: Device) -> None:
    """Set the device on which spaCy computes.

    Raises:
        MachineError: a GPU was asked for and spaCy finds none.
    """
    spacy = require("spacy", "spacy")
    if device == "cpu":
        spacy.require_cpu()
    elif not spacy.prefer_gpu() and device == "cuda":
        raise MachineError(
            "spaCy finds no GPU", hint="--device cpu; or, with a CUDA device: pip install 'spacy[cuda12x]'"
        )


# Stanza


def stanza_place(rest: str) -> tuple[Path, str, str | None]:
    """Folder, language and package of ``LANG``, ``FOLDER``, ``FOLDER:LANG`` or ``FOLDER:LANG:PACKAGE``."""
    place, *more = rest.split(":")
    if len(more) > 2:
        raise InputError(f"stanza:{rest!r}: expected stanza:FOLDER:LANG:PACKAGE")
    if os.sep in place or more or Path(place).is_dir():
        folder = Path(place)
        if not folder.is_dir():
            raise InputError(f"{place!r}: this folder with Stanza models does not exist")
        found = sorted(path.parent.name for path in folder.glob("*/tokenize"))
        if not more and len(found) != 1:
            raise InputError(f"{place!r} has {found or 'no Stanza models'}", hint="name one: stanza:FOLDER:LANG")
        language = more[0] if more else found[0]
    else:
        folder = Path(os.environ.get("STANZA_RESOURCES_DIR", Path.home() / "stanza_resources"))
        language = place
    models = sorted(path.stem for path in (folder / language / "tokenize").glob("*.pt"))
    if not models:
        raise MachineError(
            f"Stanza has no tokenizer for {language!r} in {folder}",
            hint=f"python -c \"import stanza; stanza.download('{language}')\"",
        )
    package = more[1] if len(more) == 2 else models[0] if len(models) == 1 else None
    if package and package not in models:
        raise InputError(f"Stanza has no package {package!r} for {language!r} in {folder}; it has {models}")
    return folder, language, package


def load_stanza(folder: Path, language: str, package: str | None, processors: str, **options: Any) -> Any:
    """A Stanza pipeline of installed models; nothing is downloaded.

    Raises:
        InputError: the models cannot be opened.
    """
    stanza = require("stanza", "stanza")
    try:
        return stanza.Pipeline(
            language,
            dir=str(folder),
            package=package or "default",
            processors=processors,
            download_method=None,
            verbose=False,
            **options,
        )
    except Exception as error:
        raise InputError(f"{folder}: Stanza cannot open {language!r} ({str(error)[:200]!r})") from error


class StanzaParser:
    """Parses with Stanza's models.

    Attributes:
        scheme: label scheme of the relations.
        language: language code, such as ``en``.
    """

    def __init__(self, place: str, device: Device, max_words: int) -> None:
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise MachineError("there is no CUDA device for Stanza", hint="--device cpu")
        folder, language, package = stanza_place(place)
        self._max_words, self.language = max_words, language
        self._model = load_stanza(
            folder,
            language,
            package,
            "tokenize,pos,lemma,depparse",
            use_gpu=device != "cpu" and torch.cuda.is_available(),
            tokenize_no_ssplit=True,
        )
        self.scheme: Scheme = label_scheme(self._model.processors["depparse"].get_known_relations())

    def __call__(self, texts: Sequence[str]) -> list[Tree]:
        """The tree of each sentence; a sentence that cannot be parsed does not affect the others."""
        return parse_all(self._parse, texts, self._max_words)

    def _parse(self, texts: Sequence[str]) -> list[Tree]:
        from stanza import Document

        # Stanza ends a paragraph at two line ends
        documents = [Document([], text=re.sub(r"\s", " ", text)) for text in texts]
        tokenized = self._model.process(documents, processors="tokenize") if documents else []
        words = [sum(len(sentence.words) for sentence in document.sentences) for document in tokenized]
        kept = [document for document, count in zip(tokenized, words, strict=True) if 0 < count <= self._max_words]
        if kept:
            self._model.process(kept, processors="pos,lemma,depparse")
        return [
            _stanza_tree(text, document)
            if 0 < count <= self._max_words
            else Tree(status="too long" if count else "empty")
            for text, document, count in zip(texts, tokenized, words, strict=True)
        ]


def _stanza_tree(text: str, document: Any) -> Tree:
    tree = Tree()
    for sentence in document.sentences:
        first = len(tree)
        for token in sentence.tokens:
            start, end = token.start_char, token.end_char
            spans = [(start, end)]
            if len(token.words) > 1:
                spans = spell(text[start:end], start, end, [word.text for word in token.words])
            tree.start.extend(start for start, _ in spans)
            tree.end.extend(end for _, end in spans)
            for word in token.words:
                # Stanza replaces words that are too long for it by <UNK>
                is_known = len(token.words) > 1 or word.text == text[start:end]
                tree.form.append(word.text if is_known else text[start:end])
                tree.lemma.append(word.lemma or "" if is_known else "")
                tree.upos.append(word.upos or "")
                tree.head.append(first + word.head - 1 if word.head else len(tree.head))
                tree.relation.append(word.deprel or "")
    return tree


class Reader(NamedTuple):
    """One row of `READERS`: how to open a kind of parser, and which files determine its output."""

    open: Callable[[str, Device, int], Callable[[Sequence[str]], list[Tree]]]
    files: Callable[[str], Files]


def _spacy_files(name: str) -> Files:
    return model_folder(spacy_folder(name))


def _stanza_files(place: str) -> Files:
    folder, language, package = stanza_place(place)
    if not any((folder / language / "depparse").glob("*.pt")):
        raise MachineError(
            f"Stanza has no parser for {language!r} in {folder}",
            hint=f"python -c \"import stanza; stanza.download('{language}')\"",
        )
    paths = [folder / "resources.json"]
    for part in _STANZA_PARTS:
        wanted = package if package and part in ("tokenize", "mwt") else "*"
        paths += sorted((folder / language / part).glob(f"{wanted}.pt"))
    paths = [path for path in paths if path.is_file()]
    return Files.of(paths, (path.relative_to(folder).as_posix() for path in paths))


def model_folder(folder: Path) -> Files:
    """All files of a model's folder, except Python's caches."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return Files.of(paths, (path.relative_to(folder).as_posix() for path in paths))


READERS = {"spacy": Reader(SpacyParser, _spacy_files), "stanza": Reader(StanzaParser, _stanza_files)}
"""Kinds of parser by the word before the colon of ``--parser``."""


def parse_all(parse: Callable[[Sequence[str]], list[Tree]], texts: Sequence[str], max_words: int) -> list[Tree]:
    """The tree of each sentence; sentences that are too long or make ``parse`` fail get a status instead of words."""
    trees = [Tree(status="too long")] * len(texts)
    # a sentence with too many words between spaces has too many tokens in any case
    places = [place for place, text in enumerate(texts) if len(text.split()) <= max_words]
    with _one_thread():
        found = _parse_or_halve(parse, [texts[place] for place in places])
    for place, tree in zip(places, found, strict=True):
        trees[place] = tree
    return trees


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
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
