"""Where sentences end: spaCy's rules, a spaCy or Stanza model.  Blocks go in, spans of code points come out."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from guidance.errors import InputError, MachineError
from pipelines.blocks import Span
from pipelines.stage import Files, require

Splitter = Callable[[Sequence[str]], list[list[Span]]]

_LONG_RUN = re.compile(r"\S{101,}")
_SIMPLE_WORD = re.compile(r"\s|\S{1,100}")
_RELOAD_AFTER = 400_000


def check_spec(spec: str) -> None:
    """Raises InputError unless ``spec`` is ``rules``, ``line``, ``spacy:...`` or ``stanza:...``."""
    kind, _, rest = spec.partition(":")
    if spec not in ("rules", "line") and not (kind in ("spacy", "stanza") and rest):
        raise InputError(
            f"unknown way to find sentences: {spec!r}",
            hint="rules, line, spacy:NAME_OR_FOLDER, stanza:LANG, stanza:FOLDER, stanza:FOLDER:LANG:PACKAGE",
        )


def model_files(spec: str) -> Files | None:
    """The files of the model that finds the sentences, which decide the result as much as the text does.

    Raises:
        InputError: the folder is not there.
        MachineError: the model is not installed; the message has the install line.
    """
    check_spec(spec)
    kind, _, rest = spec.partition(":")
    if kind == "spacy":
        return Files.below(_spacy_folder(rest))
    if kind == "stanza":
        folder, language, package = _stanza_place(rest)
        paths = [folder / "resources.json"]
        for part in ("tokenize", "mwt"):
            paths += sorted((folder / language / part).glob(f"{package or '*'}.pt"))
        paths = [path for path in paths if path.is_file()]
        return Files.of(paths, (path.relative_to(folder).as_posix() for path in paths))
    return None


def splitter(spec: str) -> Splitter:
    """A function from texts to the spans of their sentences, white space at the ends left out."""
    check_spec(spec)
    kind, _, rest = spec.partition(":")
    if kind == "stanza":
        return _stanza_splitter(*_stanza_place(rest))
    return _SpacySplitter(None if spec in ("rules", "line") else rest)


def _spacy_folder(name: str) -> Path:
    if os.sep in name or Path(name).is_dir():
        if not Path(name).is_dir():
            raise InputError(f"{name!r}: no such folder with a spaCy model")
        return Path(name)
    require("spacy", "spacy")
    found = importlib.util.find_spec(name) if re.fullmatch(r"\w+", name) else None
    if found is None or not found.submodule_search_locations:
        raise MachineError(f"the spaCy model {name!r} is not installed", hint=f"python -m spacy download {name}")
    return Path(next(iter(found.submodule_search_locations)))


class _SpacySplitter:
    """spaCy's sentences.  The vocabulary grows with every new word, so the model is loaded afresh now and then."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._model: Any = None

    def _load(self) -> None:
        spacy = require("spacy", "spacy")
        if self._name is None:
            self._model = spacy.blank("xx")
            self._model.add_pipe("sentencizer")
        else:
            try:
                self._model = spacy.load(self._name)
            except (OSError, ValueError, ImportError) as error:
                raise InputError(f"{self._name!r}: not a spaCy model ({str(error)[:200]!r})") from error
            wanted = ("tok2vec", "transformer", "parser", "senter", "sentencizer")
            if not {"parser", "senter", "sentencizer"}.intersection(self._model.pipe_names):
                raise InputError(f"the spaCy model {self._name!r} does not find sentences")
            self._model.select_pipes(enable=[pipe for pipe in wanted if pipe in self._model.pipe_names])
        self._model.tokenizer = _guarded(self._model.tokenizer)
        self._limit = len(self._model.vocab.strings) + _RELOAD_AFTER

    def __call__(self, texts: Sequence[str]) -> list[list[Span]]:
        if self._model is None or len(self._model.vocab.strings) > self._limit:
            self._load()
        found = []
        for text, doc in zip(texts, self._model.pipe(texts), strict=True):
            columns = doc.to_array(["SENT_START", "IDX"])
            starts = columns[columns[:, 0] == 1, 1].tolist()
            found.append(list(_stripped(text, starts)))
        return found


def _guarded(tokenize: Callable[[str], Any]) -> Callable[[str], Any]:
    """spaCy's tokenizer takes quadratic time on a long run without spaces ("(((((..."); cut such runs for it."""
    from spacy.tokens import Doc

    vocab = tokenize.vocab  # type: ignore[attr-defined]

    def cut(text: str) -> Any:
        if not _LONG_RUN.search(text):
            return tokenize(text)
        words, spaces = [], []
        position = 0
        for run in _LONG_RUN.finditer(text):
            for doc in (tokenize(text[position : run.start()]),):
                words += [token.text for token in doc]
                spaces += [bool(token.whitespace_) for token in doc]
            pieces = _SIMPLE_WORD.findall(run[0])
            last = pieces[-1]
            # a full stop at the very end still ends the sentence
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


def _stripped(text: str, starts: list[int]) -> Iterator[Span]:
    if not starts or starts[0] != 0:
        starts = [0, *starts]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        sentence = text[start:end]
        bare = sentence.strip()
        if bare:
            start += len(sentence) - len(sentence.lstrip())
            yield start, start + len(bare)


def _stanza_place(rest: str) -> tuple[Path, str, str | None]:
    """Folder, language and package of ``LANG``, ``FOLDER``, ``FOLDER:LANG`` or ``FOLDER:LANG:PACKAGE``."""
    place, *more = rest.split(":")
    if len(more) > 2:
        raise InputError(f"stanza:{rest!r}: expected stanza:FOLDER:LANG:PACKAGE")
    if os.sep in place or more or Path(place).is_dir():
        folder = Path(place)
        if not folder.is_dir():
            raise InputError(f"{place!r}: no such folder with Stanza models")
        found = sorted(path.parent.name for path in folder.glob("*/tokenize"))
        if not more and len(found) != 1:
            raise InputError(f"{place!r} holds {found or 'no Stanza models'}", hint="say which: stanza:FOLDER:LANG")
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


def _stanza_splitter(folder: Path, language: str, package: str | None) -> Splitter:
    stanza = require("stanza", "stanza")
    try:
        pipeline = stanza.Pipeline(
            language,
            dir=str(folder),
            package=package or "default",
            processors="tokenize",
            download_method=None,
            verbose=False,
            use_gpu=False,
        )
    except Exception as error:
        raise InputError(f"{folder}: Stanza cannot open {language!r} ({str(error)[:200]!r})") from error

    def split(texts: Sequence[str]) -> list[list[Span]]:
        found: list[list[Span]] = []
        for document in pipeline.bulk_process([stanza.Document([], text=text) for text in texts]):
            spans = [(s.tokens[0].start_char, s.tokens[-1].end_char) for s in document.sentences if s.tokens]
            text = document.text
            found.append(list(_stripped(text, [start for start, _ in spans])))
        return found

    return split
