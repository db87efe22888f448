"""Stanza's models: finding and opening them, and parsing sentences into trees."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guidance.errors import InputError, MachineError
from guidance.statistics.dependencies import Scheme, Tree, label_scheme, spell
from pipelines.engine.stage import Files, require
from pipelines.text.parsing import parse_all

_PARSER_PARTS = ("tokenize", "mwt", "pos", "lemma", "depparse", "pretrain", "forward_charlm", "backward_charlm")


def find_stanza(spec: str) -> tuple[Path, str, str | None]:
    """Folder, language and package of ``LANG``, ``FOLDER``, ``FOLDER:LANG`` or ``FOLDER:LANG:PACKAGE``, which must be there."""
    language, *more = spec.split(":")
    folder = Path(language)
    if len(more) > 2:
        raise InputError(f"stanza:{spec!r}: expected stanza:FOLDER:LANG:PACKAGE")
    if os.sep in language or more or folder.is_dir():
        if not folder.is_dir():
            raise InputError(f"{language!r}: no such folder with Stanza models")
        languages = more or sorted(path.parent.name for path in folder.glob("*/tokenize"))
        if not more and len(languages) != 1:
            raise InputError(f"{language!r} has {languages or 'no Stanza models'}", hint="name one: stanza:FOLDER:LANG")
        language = languages[0]
    else:
        folder = Path(os.environ.get("STANZA_RESOURCES_DIR", Path.home() / "stanza_resources"))
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
    """A Stanza pipeline of installed models; nothing is downloaded."""
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
    """Parses with Stanza's models, in a language and in a ``scheme`` of labels."""

    def __init__(self, spec: str, device: str, max_words: int) -> None:
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise MachineError("there is no CUDA device for Stanza", hint="use --device cpu")
        folder, language, package = find_stanza(spec)
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


def stanza_files(folder: Path, language: str, package: str | None, parts: Sequence[str]) -> Files:
    """The files of some parts of Stanza's models; of tokenizers only those of the package, if one is given."""
    paths = [folder / "resources.json"]
    for part in parts:
        wanted = package if package and part in ("tokenize", "mwt") else "*"
        paths += sorted((folder / language / part).glob(f"{wanted}.pt"))
    paths = [path for path in paths if path.is_file()]
    return Files.of(paths, (path.relative_to(folder).as_posix() for path in paths))


def parser_files(spec: str) -> Files:
    """The files of Stanza's models for parsing, which must be there."""
    folder, language, package = find_stanza(spec)
    if not any((folder / language / "depparse").glob("*.pt")):
        raise MachineError(
            f"Stanza has no parser for {language!r} in {folder}",
            hint=f"python -c \"import stanza; stanza.download('{language}')\"",
        )
    return stanza_files(folder, language, package, _PARSER_PARTS)
