"""One text as a batch of one example, with the features that patterns read, for drawing patterns.

Features that follow from the text alone (words, sentences, characters) are always available.  A spaCy model adds
parses. The user may give any other feature, with one value per word or token.
"""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError, UnknownName
from pipelines.storage.store import Store
from pipelines.text.sentence_rules import split_sentences

if TYPE_CHECKING:
    from torch import Tensor

    from guidance.patterns import Pattern
    from guidance.patterns.features import Cooccurrence, Tokens

MOST_TOKENS = 256
"""A picture of more tokens would be unreadable."""

SAMPLE = "The old dog chased a cat. The cat ran home, but the dog did not."
"""The text to draw if none is given; `_SAMPLE` has its parse and idf."""

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


@dataclass
class _Words:
    """The words of a text.

    Attributes:
        spans: start and end of each word, in code points.
        segments: the number of the sentence of each word.
        known: values of other features for each word, by name.
    """

    spans: list[tuple[int, int]]
    segments: list[int]
    known: dict[str, Any] = field(default_factory=dict)


def read(
    text: str | None,
    *,
    store: Store,
    tokenizer: str | None = None,
    parser: str | None = None,
    given: Mapping[str, str] | None = None,
) -> OneText:
    """Turn a text into tokens with all available features.

    Args:
        text: None for `SAMPLE`, whose parse is known.
        tokenizer: a folder with ``tokenizer.json`` or a tokenizer artifact; by default tokens are words, between [CLS]
            and [SEP].
        parser: ``spacy:NAME_OR_FOLDER``, for heads, relations, parts of speech, negation and stop words.
        given: features of the user by name: comma-separated values, one per word or one per token.

    Raises:
        InputError: the text is empty or too long, the tokenizer cannot be read, or a feature does not fit the text.
        MachineError: the spaCy model is not installed.
    """
    import torch

    from guidance.patterns.features import Tokens, Vocabulary

    sample = text is None
    text = SAMPLE if text is None else text
    for written in (text, *(given or {}).values()):
        if any("\ud800" <= letter <= "\udfff" for letter in written):
            raise InputError("the text is not UTF-8")
    words = _parse(text, parser) if parser else _split(text)
    if not words.spans:
        raise InputError("the text is empty", hint='for example: --text "The dog ran. It was late."')
    if sample and not parser:
        words.known |= _sample_features()
    if tokenizer:
        backend, names = _load(tokenizer, store)
        encoding = backend.encode(text, add_special_tokens=False)
        ids, spans = encoding.ids, encoding.offsets
    else:
        spans = words.spans
        backend, names = _word_level([text[start:end] for start, end in spans])
        ids = [backend.token_to_id(text[start:end]) for start, end in spans]
    if len(ids) + 2 > MOST_TOKENS:
        raise InputError(f"the text has {len(ids)} tokens; the limit is {MOST_TOKENS - 2}", hint="use a shorter text")
    ids = [backend.token_to_id(names["cls_token"]), *ids, backend.token_to_id(names["sep_token"])]
    word_of, roles = _roles(spans, words)

    ids_BT = torch.tensor([ids])
    columns = Vocabulary.from_tokenizer(_wrap(backend, names)).columns(ids_BT) | roles
    for name, written in (given or {}).items():
        values = _values(name, written, len(words.spans), word_of, backend)
        columns[name] = torch.tensor([values if len(values) == len(ids) else _spread(name, values, word_of)])
    tables = {"cooccurrence": _counted_in_text(ids, words.segments, word_of)}
    notes = (
        ()
        if tokenizer or parser
        else ("the text is split into words; --tokenizer splits it into the tokens of a model",)
    )
    tokens = Tokens(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), columns, tables)
    return OneText(_labels(text, ids, spans, word_of, backend), tokens, notes)


def weights_of(pattern: Pattern, example: OneText) -> Any:
    """The weights of a pattern for a text: a numpy array (queries, keys).

    Raises:
        InputError: the text lacks a feature that the pattern reads; the hint says where to get it.
    """
    from guidance.patterns.features import FEATURES

    missing = [name for name in pattern.needs if name not in example.tokens.columns]
    if missing:
        hints = [f"{name}: {FEATURES[name].source}" for name in missing]
        if set(missing) <= {"head", "relation", "pos", "negation", "stop_word"}:
            hints.append("for this text: --parser spacy:en_core_web_sm, or any other spaCy model")
        if any(FEATURES[name].of_pairs for name in missing):
            hints.append(f'in Python: guidance.pattern("{missing[0]}", ids, {missing[0]}=...)')
            raise InputError(f"{pattern} is a matrix of the caller's", hint="\n".join(hints))
        or_sample = " (or leave out --text: the sample has it)" if missing[0] in _sample_features() else ""
        hints.append(f"for this text: --feature {missing[0]}=..., one value for each word{or_sample}")
        raise InputError(f"{pattern} needs {', '.join(missing)}, which this text lacks", hint="\n".join(hints))
    return pattern.build(example.tokens).dense()[0].float().numpy()


# words


def _sample_features() -> dict[str, Any]:
    from guidance.statistics.roles import parts_of_speech, relations

    names, *rows = (line.split() for line in _SAMPLE.strip().splitlines())
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    found = {name: list(map(_reader(name), columns[name])) for name in ("head", "idf", "stop_word", "marked")}
    relation, negation = relations(columns["relation"], columns["word"])
    return found | {"relation": relation, "negation": negation, "pos": parts_of_speech(columns["pos"])}


def _split(text: str) -> _Words:
    from guidance.statistics.words import word_spans

    spans = word_spans(text)
    return _Words(spans, _segments(text, spans))


def _segments(text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """The number of the sentence of each word, by the rules of ``build-corpus``."""
    starts = [start for start, _ in split_sentences(text)]
    return [bisect.bisect_right(starts, start) - 1 for start, _ in spans]


def _parse(text: str, parser: str) -> _Words:
    from guidance.statistics.roles import parts_of_speech, relations
    from pipelines.text.spacy_models import load_spacy

    kind, _, name = parser.partition(":")
    if kind != "spacy" or not name:
        raise InputError(f"unknown parser {parser!r}", hint="spacy:NAME_OR_FOLDER, for example spacy:en_core_web_sm")
    doc = load_spacy(name)(text)
    kept = [token for token in doc if not token.is_space]
    number = {token.i: index for index, token in enumerate(kept)}
    spans = [(token.idx, token.idx + len(token)) for token in kept]
    if doc.has_annotation("SENT_START"):
        sentence = {token.i: index for index, span in enumerate(doc.sents) for token in span}
        segments = [sentence[token.i] for token in kept]
    else:
        segments = _segments(text, spans)
    words = _Words(spans, segments, {"stop_word": [token.is_stop for token in kept]})
    if doc.has_annotation("DEP"):
        words.known["head"] = [number.get(token.head.i, index) for index, token in enumerate(kept)]
        labels, lemmas = [token.dep_ for token in kept], [token.lemma_ or token.lower_ for token in kept]
        words.known["relation"], words.known["negation"] = relations(labels, lemmas)
    if doc.has_annotation("POS"):
        words.known["pos"] = parts_of_speech([token.pos_ for token in kept])
    return words


def _roles(spans: Sequence[tuple[int, int]], words: _Words) -> tuple[list[int], dict[str, Tensor]]:
    """The word of each token (-1 for none), and features of tokens (1, T) computed from those of words.

    They are the same that ``guide build-masks`` computes for a corpus.
    """
    import numpy as np
    import torch

    from guidance.statistics.roles import COLUMNS, Pieces, Words, assign, role_columns

    places = np.array(spans, np.int64).reshape(-1, 2)
    firsts = [
        start for place, (start, _) in enumerate(words.spans) if words.segments[place] not in words.segments[:place]
    ]
    sentence = np.searchsorted(firsts, np.maximum(places[:, 0], places[:, 1] - 1), side="right") - 1
    columns = (np.zeros(len(spans)), np.maximum(sentence, 0), places[:, 0], places[:, 1])
    pieces = Pieces(
        np.array([0, len(spans) + 2]), *(np.pad(c.astype(np.int64), 1, constant_values=-1) for c in columns)
    )
    start, end = np.array(words.spans, np.int64).T
    known = {name: np.array(values, COLUMNS[name].dtype) for name, values in words.known.items() if name in COLUMNS}
    head = known.pop("head", None)
    table = Words(np.zeros(len(start), np.int64), start, end, None if head is None else head.astype(np.int64), known)
    word_of = assign(pieces, table).tolist()
    found = role_columns(pieces, table).columns
    found |= {n: np.array(_spread(n, values, word_of)) for n, values in words.known.items() if n not in COLUMNS}
    tensors = {name: torch.from_numpy(column)[None] for name, column in found.items()}
    return word_of, {n: t if t.dtype == torch.bool or t.is_floating_point() else t.long() for n, t in tensors.items()}


# tokens


def _load(reference: str, store: Store) -> tuple[Any, dict[str, str]]:
    from pipelines.text.tokenizer_files import load_tokenizer, open_tokenizer, special_ids, tokenizer_files

    file = Path(reference)
    with contextlib.ExitStack() as stack:
        is_file = file.name == "tokenizer.json" and file.is_file()
        files = tokenizer_files(open_tokenizer(str(file.parent) if is_file else reference, store, stack))
    backend = load_tokenizer(files)
    special = special_ids(files, backend)
    return backend, {f"{role}_token": backend.id_to_token(special[role]) for role in ("cls", "sep")}


def _word_level(words: Sequence[str]) -> tuple[Any, dict[str, str]]:
    from tokenizers import Tokenizer, models

    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(["[UNK]", "[CLS]", "[SEP]", *words]))}
    return Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")), {"cls_token": "[CLS]", "sep_token": "[SEP]"}


def _wrap(backend: Any, names: Mapping[str, str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def _labels(
    text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]], word_of: Sequence[int], backend: Any
) -> tuple[str, ...]:
    """The characters of each token, with ``##`` before those inside a word, as in WordPiece."""
    labels = [backend.id_to_token(ids[0])]
    for n, (start, end) in enumerate(spans, 1):
        letters = text[start:end].strip() or backend.id_to_token(ids[n])
        is_inside_word = word_of[n] >= 0 and word_of[n] == word_of[n - 1]
        labels.append(f"##{letters}" if is_inside_word else letters)
    return (*labels, backend.id_to_token(ids[-1]))


# features


def _reader(name: str) -> Callable[[str], Any]:
    """A function that parses a value of a feature, as written on the command line."""
    from guidance.patterns.features import FEATURES, UPOS, relation_id

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
    from guidance.patterns.features import FEATURES

    if name not in FEATURES:
        raise UnknownName("feature", name, FEATURES)
    read_value = _reader(name)
    if name == "original":
        tokens = [value.strip() for value in written.split(",")]
        found = [backend.token_to_id(token) for token in tokens]
        values = [read_value(token) if id_ is None else id_ for token, id_ in zip(tokens, found, strict=True)]
    else:
        values = [read_value(value.strip()) for value in written.split(",")]
    if len(values) not in (num_words, len(word_of)):
        raise InputError(
            f"--feature {name} has {len(values)} values; the text has {num_words} words and {len(word_of)} tokens",
            hint="give one value for each word, or one for each token, special tokens included",
        )
    return values


def _spread(name: str, values: Sequence[Any], word_of: Sequence[int]) -> list[Any]:
    """Expand values per word to values per token."""
    from guidance.patterns.features import FEATURES

    nothing = {"bool": False, "int": -1, "float": 0.0}[FEATURES[name].kind]
    return [values[word] if word >= 0 else nothing for word in word_of]


def _counted_in_text(ids: Sequence[int], segments: Sequence[int], word_of: Sequence[int]) -> Cooccurrence:
    """A co-occurrence table of this text alone, with sentences as windows (Xing et al. 2020, eq. 9 and 10)."""
    import numpy as np

    from guidance.statistics.cooccurrence import cooccurrence_table

    kinds, row_of = np.unique([id_ for id_, word in zip(ids, word_of, strict=True) if word >= 0], return_inverse=True)
    segment = np.array([segments[word] for word in word_of if word >= 0])
    counts_NN = np.zeros((len(kinds), len(kinds)), np.int64)
    for number in set(segments):
        counts_N = np.bincount(row_of[segment == number], minlength=len(kinds))
        counts_NN += np.outer(counts_N, counts_N) - np.diag(counts_N)
    i, j = np.nonzero(np.triu(counts_NN))
    return cooccurrence_table(kinds, max(ids) + 1, [(i, j, counts_NN[i, j])])
