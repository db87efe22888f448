"""One text as a batch of one example, with the features that patterns read, for drawing patterns.

Features that follow from the text alone (words, sentences, characters) are always available.  A parser adds trees.  The user may
give any other feature, with one value per word or token.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from guidance.errors import InputError, UnknownName
from guidance.patterns import Pattern
from guidance.patterns.features import FEATURES, UPOS, Cooccurrence, Tokens, Vocabulary, relation_id
from guidance.statistics.cooccurrence import cooccurrence_table
from guidance.statistics.texts import Word, word_features
from pipelines.storage.store import Store
from pipelines.text.parsers import SYNTAX
from pipelines.text.records import check_utf8
from pipelines.text.tokenizer_files import load_tokenizer, open_tokenizer, special_ids, tokenizer_files
from pipelines.training.text_words import TextParser, words_of

MOST_TOKENS = 256
"""A picture of more tokens would be unreadable."""

SAMPLE = "The old dog chased a cat. The cat ran home, but the dog did not."
"""The text to draw if none is given; `_SAMPLE` has its parse and idf, so it also has the features in `SYNTAX`."""

_SAMPLE = """
#   word    head  relation  pos    idf  stop_word  marked
0   The     2     det       DET    1.0  1          0
1   old     2     amod      ADJ    4.1  0          0
2   dog     3     nsubj     NOUN   3.2  0          0
3   chased  3     root      VERB   5.9  0          0
4   a       5     det       DET    1.1  1          0
5   cat     3     obj       NOUN   3.4  0          1
6   .       3     punct     PUNCT  0    0          0
7   The     8     det       DET    1.0  1          0
8   cat     9     nsubj     NOUN   3.4  0          1
9   ran     9     root      VERB   3.9  0          0
10  home    9     advmod    ADV    3.0  0          0
11  ,       15    punct     PUNCT  0    0          0
12  but     15    cc        CCONJ  1.6  1          0
13  the     14    det       DET    1.0  1          0
14  dog     15    nsubj     NOUN   3.2  0          0
15  did     9     conj      AUX    2.0  1          0
16  not     15    advmod    PART   1.5  1          0
17  .       9     punct     PUNCT  0    0          0
"""


@dataclass(frozen=True)
class OneText:
    """A text as patterns see it.

    Attributes:
        labels: a label for each token.
        tokens: the batch, without padding.
        notes: for the user, on how the text was read.
    """

    labels: tuple[str, ...]
    tokens: Tokens
    notes: tuple[str, ...] = ()


class _Encoding(NamedTuple):
    """A text as `guidance.word_features` reads it; special tokens have no part."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    sequence_ids: list[int | None]

    @property
    def encodings(self) -> list[_Encoding]:
        return [self]


def read(
    text: str | None,
    *,
    store: Store,
    tokenizer: str | None = None,
    parser: str | None = None,
    features: Mapping[str, str] | None = None,
) -> OneText:
    """Turn a text into tokens with all available features.

    Args:
        text: None for `SAMPLE`, whose parse is known.
        tokenizer: a folder with ``tokenizer.json`` or a tokenizer artifact; by default tokens are words, between [CLS]
            and [SEP].
        parser: for heads, relations, parts of speech, negation and stop words; see `TextParser`.
        features: those of the user by name: comma-separated values, one per word or one per token.

    Raises:
        InputError: the text is empty or too long, the tokenizer cannot be read, or a feature does not fit the text.
        MachineError: the parser is not installed.
    """
    for written in (text or "", *(features or {}).values()):
        check_utf8(written)
    values: dict[str, Sequence[Any]] = {}
    stop_words = None
    if parser:
        parsing = TextParser(parser)
        words, stop_words = parsing.words(SAMPLE if text is None else text), parsing.stop_words
    elif text is None:
        words, values = _sample()
    else:
        words = words_of(text)
    text = SAMPLE if text is None else text
    if not words:
        raise InputError("the text is empty", hint='for example: --text "The dog ran. It was late."')
    spans = [(word.start, word.end) for word in words]
    if tokenizer:
        backend, names = _load(tokenizer, store)
        encoded = backend.encode(text, add_special_tokens=False)
        ids, spans = encoded.ids, encoded.offsets
    else:
        backend, names = _word_level([text[start:end] for start, end in spans])
        ids = [backend.token_to_id(text[start:end]) for start, end in spans]
    if len(ids) + 2 > MOST_TOKENS:
        raise InputError(f"the text has {len(ids)} tokens; the limit is {MOST_TOKENS - 2}", hint="use a shorter text")
    ids = [backend.token_to_id(names["cls_token"]), *ids, backend.token_to_id(names["sep_token"])]
    encoding = _Encoding(ids, [(0, 0), *spans, (0, 0)], [None, *([0] * len(spans)), None])
    ids_BT = torch.tensor([ids])
    columns = {
        **Vocabulary.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **names)).columns(ids_BT),
        **word_features(encoding, text, [words], stop_words=stop_words, parsed=bool(parser) or None),
    }
    word_of = columns["word"][0].tolist()
    written_values = {
        name: _values(name, text, len(words), word_of, backend) for name, text in (features or {}).items()
    }
    for name, each in (values | written_values).items():
        columns[name] = torch.tensor([each if len(each) == len(ids) else _spread(name, each, word_of)])
    counts = _counted_in_text(ids, [word.sentence for word in words], word_of)
    split = "the text is split into words; --tokenizer splits it into the tokens of a model"
    tokens = Tokens(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), columns, {"cooccurrence": counts})
    letters = [None, *(text[start:end] for start, end in spans), None]
    labels = word_labels([backend.id_to_token(id_) for id_ in ids], letters, word_of)
    return OneText(tuple(labels), tokens, () if tokenizer or parser else (split,))


def word_labels(tokens: Sequence[str], letters: Sequence[str | None], words: Sequence[int]) -> list[str]:
    """A label for each token: its characters, with ``##`` before those inside a word, as in WordPiece.

    Args:
        letters: the characters of each token; None if they are not known, as of special tokens.
        words: the word of each token; -1 for none.
    """
    labels, before = [], -1
    for token, text, word in zip(tokens, letters, words, strict=True):
        label = (text or "").strip() or token
        labels.append(f"##{label}" if text is not None and 0 <= word == before else label)
        before = word
    return labels


def weights_of(pattern: Pattern, example: OneText) -> Any:
    """The weights of a pattern for a text: a numpy array (queries, keys).

    Raises:
        InputError: the text lacks a feature that the pattern reads; the hint says where to get it.
    """
    missing = [name for name in pattern.needs if name not in example.tokens.columns]
    if missing:
        hints = [f"{name}: {FEATURES[name].source}" for name in missing]
        if set(missing) <= set(SYNTAX):
            hints.append("for this text: --parser spacy:en_core_web_sm, or stanza:LANG")
        if any(FEATURES[name].of_pairs for name in missing):
            hints.append(f'in Python: guidance.pattern("{missing[0]}", ids, {missing[0]}=...)')
            raise InputError(f"{pattern} is a matrix of the caller's", hint="\n".join(hints))
        or_sample = " (or leave out --text: the sample has it)" if missing[0] in (*SYNTAX, "idf", "marked") else ""
        hints.append(f"for this text: --feature {missing[0]}=..., one value for each word{or_sample}")
        raise InputError(f"{pattern} needs {', '.join(missing)}, which this text lacks", hint="\n".join(hints))
    return pattern.on(example.tokens).dense()[0].float().numpy()


# words


def _sample() -> tuple[list[Word], dict[str, Sequence[Any]]]:
    """The words of `SAMPLE` with their parse, and further features by name, one value per word."""
    names, *rows = (line.split() for line in _SAMPLE.strip().splitlines())
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    parse = zip(words_of(SAMPLE), columns["head"], columns["relation"], columns["pos"], strict=True)
    words = [replace(word, head=int(head), relation=relation, pos=pos) for word, head, relation, pos in parse]
    return words, {name: list(map(_reader(name), columns[name])) for name in ("idf", "stop_word", "marked")}


# tokens


def _load(reference: str, store: Store) -> tuple[Any, dict[str, str]]:
    file = Path(reference)
    with contextlib.ExitStack() as stack:
        is_file = file.name == "tokenizer.json" and file.is_file()
        files = tokenizer_files(open_tokenizer(str(file.parent) if is_file else reference, store, stack))
    backend = load_tokenizer(files)
    special = special_ids(files, backend)
    ids = {role: special[role] for role in ("cls", "sep", "mask")}
    return backend, {f"{role}_token": backend.id_to_token(id_) for role, id_ in ids.items() if id_ is not None}


def _word_level(words: Sequence[str]) -> tuple[Any, dict[str, str]]:
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    tokens = dict.fromkeys(["[UNK]", *names.values(), *words])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")), names


# features


def _reader(name: str) -> Callable[[str], Any]:
    """A function that parses a value of a feature, as written on the command line."""
    truth = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    labels: dict[str, Callable[[str], int]] = {
        "relation": relation_id,
        "pos": lambda value: UPOS.index(value.upper()) if value.upper() in UPOS else -1,
    }

    def read_value(value: str) -> Any:
        try:
            if name in labels and not re.fullmatch(r"-?\d+", value):
                if labels[name](value) < 0 and value not in ("_", "-", ""):
                    raise KeyError(value)
                return labels[name](value)
            kind = FEATURES[name].kind
            if kind == "int" and abs(int(value)) >= 1 << 31:
                raise ValueError(value)
            return truth[value.lower()] if kind == "bool" else int(value) if kind == "int" else float(value)
        except (KeyError, ValueError) as error:
            expected = {"bool": "0 or 1", "int": "a whole number", "float": "a number"}[FEATURES[name].kind]
            expected += f", or the name of a {name}" if name in labels else ""
            raise InputError(f"--feature {name}: {value!r} is not {expected}", hint=FEATURES[name].summary) from error

    return read_value


def _values(name: str, written: str, num_words: int, word_of: Sequence[int], backend: Any) -> list[Any]:
    if name not in FEATURES:
        raise UnknownName("feature", name, FEATURES)
    read_value, texts = _reader(name), [value.strip() for value in written.split(",")]
    if name == "original":
        ids = {token: backend.token_to_id(token) for token in texts}
        values = [read_value(token) if ids[token] is None else ids[token] for token in texts]
    else:
        values = list(map(read_value, texts))
    if len(values) not in (num_words, len(word_of)):
        raise InputError(
            f"--feature {name} has {len(values)} values; the text has {num_words} words and {len(word_of)} tokens",
            hint="give one value for each word, or one for each token, special tokens included",
        )
    return values


def _spread(name: str, values: Sequence[Any], word_of: Sequence[int]) -> list[Any]:
    """Expand values per word to values per token."""
    return [values[word] if word >= 0 else FEATURES[name].fill for word in word_of]


def _counted_in_text(ids: Sequence[int], segments: Sequence[int], word_of: Sequence[int]) -> Cooccurrence:
    """A co-occurrence table of this text alone, with sentences as windows (Xing et al. 2020, eq. 9 and 10)."""
    kinds, row_of = np.unique([id_ for id_, word in zip(ids, word_of, strict=True) if word >= 0], return_inverse=True)
    segment = np.array([segments[word] for word in word_of if word >= 0])
    counts_NN = np.zeros((len(kinds), len(kinds)), np.int64)
    for number in set(segments):
        counts_N = np.bincount(row_of[segment == number], minlength=len(kinds))
        counts_NN += np.outer(counts_N, counts_N) - np.diag(counts_N)
    i, j = np.nonzero(np.triu(counts_NN))
    return cooccurrence_table(kinds, max(ids) + 1, [(i, j, counts_NN[i, j])])
