"""Token features: what a pattern may know about a batch.

Shapes in this package: B examples, T padded length, Q query tokens, K key tokens, H heads, D width, V vocabulary.
Rows are queries, columns are keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.registry import Registry


@dataclass(frozen=True)
class Feature:
    """One row of `FEATURES`.

    Attributes:
        kind: the type of its values; only a column of ``float`` may hold NaN.
        summary: what a value says about its token, in one line.
        source: where it comes from, for messages.
        of_pairs: True if it has a value for each (query, key), shape (B, T, T), instead of one for each token, (B, T).
    """

    name: str
    kind: Literal["bool", "int", "float"]
    summary: str
    source: str
    of_pairs: bool = False

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of that type can hold its values."""
        if self.kind == "int":
            return dtype != torch.bool and not dtype.is_floating_point and not dtype.is_complex
        return dtype == torch.bool if self.kind == "bool" else dtype.is_floating_point


_VOCABULARY = "it follows from the token ids: give `install` the tokenizer, or the column to `handle.guide`"
_MASKS = "it is a column of the artifact that `guide build-masks` writes"
_CALLER = "the caller gives it: `handle.guide(input_ids, attention_mask, {})`"
_OBJECTIVE = "an objective with a generator gives it in pre-training"

FEATURES: Registry[Feature] = Registry("feature")
"""Every feature by name."""

for _row in (
    Feature("delimiter", "bool", "opens, closes or parts sequences", _VOCABULARY),
    Feature("character", "int", "code point of a token that is exactly one character, else 0", _VOCABULARY),
    Feature("word", "int", "number of its word within the example; -1 for special tokens", _MASKS),
    Feature("segment", "int", "number of its sentence or segment; -1 for none", _MASKS),
    Feature("idf", "float", "how rare its word is; 0 or NaN where the word is no candidate", _MASKS),
    Feature("head", "int", "word number of its word's syntactic head; a root's is its own; -1 for none", _MASKS),
    Feature("relation", "int", "its word's relation to the head, a place in `RELATIONS`; -1 for none", _MASKS),
    Feature("pos", "int", "its word's part of speech, a place in `UPOS`; -1 for none", _MASKS),
    Feature("negation", "bool", "belongs to a word that negates", _MASKS),
    Feature("stop_word", "bool", "belongs to a stop word", _MASKS),
    Feature("marked", "bool", "the caller marks it", _CALLER.format("marked=...")),
    Feature("matrix", "bool", "which keys each query may see", _CALLER.format("matrix=..."), of_pairs=True),
    Feature(
        "weight_matrix",
        "float",
        "how much each key counts for each query",
        _CALLER.format("weight_matrix=..."),
        of_pairs=True,
    ),
    Feature("mispredicted", "bool", "the generator put another token here than the text has", _OBJECTIVE),
    Feature("predicted", "int", "id of the token that a generator put here; by default the id itself", _OBJECTIVE),
    Feature("original", "int", "id of the token that the text has here", _OBJECTIVE),
):
    FEATURES.add(_row.name, _row)


def register_feature(
    name: str,
    kind: Literal["bool", "int", "float"],
    summary: str,
    *,
    package: str,
    source: str = "",
    of_pairs: bool = False,
) -> Feature:
    """Add a feature, which `handle.guide` then takes as a keyword and patterns may need.

    Args:
        package: the package that registers it, usually ``__name__``.
        source: where users get it, for messages; by default the caller.

    Raises:
        PlanError: the name is taken, or is no name.
    """
    feature = Feature(name, kind, summary, source or _CALLER.format(f"{name}=..."), of_pairs)
    return FEATURES.add(name, feature, package)


OF_OBJECTIVES = tuple(name for name, feature in FEATURES.items() if feature.source == _OBJECTIVE)
"""The features that training objectives compute."""

TABLES: Mapping[str, str] = {
    "cooccurrence": "it is the artifact that `guide build-cooccur` writes: give it to `install` as `tables=`",
    "importance": "a number for every head, (layers, heads): give it to `install` as `tables=`",
    "masking_proportion": "(steps, layers), from an adversarial run: `guide pretrain --masking-run RUN`, or `tables=` of `install`",
}
"""What patterns look up besides tokens, and where each table comes from."""


@dataclass(frozen=True)
class Tokens:
    """A batch of token sequences as the model sees it.

    Attributes:
        ids_BT: token ids, int64; positions that objectives masked hold the mask token.
        valid_BT: bool, False at padding, which never attends and is never attended to.
        columns: further features by name, each (B, T), or (B, T, T) for features of pairs: those of `FEATURES`, or a
            pattern's own.
        tables: what patterns look up, by name, for example a `Cooccurrence`.

    Raises:
        InputError: a feature does not have the shape or the type that `FEATURES` says.
    """

    ids_BT: Tensor
    valid_BT: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in (("attention mask", self.valid_BT), *self.columns.items()):
            feature = FEATURES.get(name)
            is_of_pairs = feature is not None and feature.of_pairs
            shape = self.ids_BT.shape + (self.ids_BT.shape[-1:] if is_of_pairs else ())
            if column.shape != shape:
                raise InputError(
                    f"{name} has shape {tuple(column.shape)}, the ids have {tuple(self.ids_BT.shape)}",
                    hint=f"{name} has one value for each query and key: {tuple(shape)}" if is_of_pairs else None,
                )
            if feature and not feature.accepts(column.dtype):
                raise InputError(f"the feature {name!r} is {feature.kind}, not {column.dtype}", hint=feature.summary)

    def column(self, name: str) -> Tensor:
        """A feature by name.

        Raises:
            InputError: the batch does not have it; the message says where it comes from.
        """
        if name not in self.columns:
            feature = FEATURES.get(name)
            raise InputError(f"the batch has no feature {name!r}", hint=feature.source if feature else None)
        return self.columns[name]

    def table(self, name: str) -> Any:
        """A table by name.

        Raises:
            InputError: the batch does not have it; the message says where it comes from.
        """
        if name not in self.tables:
            raise InputError(f"the batch has no table {name!r}", hint=TABLES.get(name))
        return self.tables[name]

    @property
    def lengths_B(self) -> Tensor:
        """Valid tokens of each example, special tokens included."""
        return self.valid_BT.sum(-1)


# the features that follow from a token's id

_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PLAIN))
_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""The characters with which byte-level vocabularies write bytes: printable ones stand for themselves."""


@dataclass(frozen=True)
class Vocabulary:
    """The features that follow from a token's id alone.

    Attributes:
        columns_V: by name, a (V,) tensor: ``delimiter`` marks the tokens that open, close or part sequences
            (``<s>``, ``</s>``, ``[CLS]``, ``[SEP]``), ``character`` is the code point of every token that is one
            character and nothing else, wherever in a word it may stand.
    """

    FEATURES: ClassVar = ("delimiter", "character")

    columns_V: Mapping[str, Tensor]
    _placed: dict[torch.device, dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Read the features off a Hugging Face tokenizer."""
        vocabulary = tokenizer.get_vocab()
        size = max(len(tokenizer), 1 + max(vocabulary.values(), default=0))  # some leave ids out
        delimiter, character = torch.zeros(size, dtype=torch.bool), [0] * size
        for name in ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"):
            if (token_id := getattr(tokenizer, name, None)) is not None:
                delimiter[token_id] = True
        is_byte_level = _is_byte_level(tokenizer)
        for token, token_id in vocabulary.items():
            text = _text(token, is_byte_level)
            if len(text) == 1:
                character[token_id] = ord(text)
        return cls({"delimiter": delimiter, "character": torch.tensor(character)})

    def columns(self, ids_BT: Tensor) -> dict[str, Tensor]:
        """Every feature for a batch of ids.

        Raises:
            InputError: an id that the tokenizer does not have.  Only on the CPU: elsewhere looking would make the host
                wait for the device, and such an id is a token without features.
        """
        device, size = ids_BT.device, len(next(iter(self.columns_V.values())))
        outside_BT = (ids_BT < 0) | (ids_BT >= size)
        if device.type == "cpu" and bool(outside_BT.any()):
            raise InputError(
                f"the tokenizer has the ids 0 to {size - 1}, the batch has {int(ids_BT[outside_BT][0])}",
                hint="are the ids from another tokenizer?",
            )
        if device not in self._placed:
            # one place more, for ids outside
            self._placed[device] = {
                name: torch.cat([values, values.new_zeros(1)]).to(device) for name, values in self.columns_V.items()
            }
        places_BT = ids_BT.masked_fill(outside_BT, size)
        return {name: values[places_BT] for name, values in self._placed[device].items()}


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the vocabulary writes bytes instead of characters (GPT-2, RoBERTa, ModernBERT)."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return type(decoder).__name__ == "ByteLevel" or hasattr(tokenizer, "byte_decoder")


def _text(token: str, is_byte_level: bool) -> str:
    """What a token stands for, without the marks of word beginnings and continuations; "" where that is no text."""
    if is_byte_level and all(letter in _BYTES for letter in token):
        try:
            text = bytes(_BYTES[letter] for letter in token).decode("utf-8")
        except UnicodeDecodeError:  # a part of a character
            return ""
        return text if len(text) == 1 else text.removeprefix(" ")
    plain = token.replace("Ġ", "").replace("▁", "")
    return plain.removeprefix("##") if len(plain) > 2 else plain


# tables


@dataclass(frozen=True)
class Cooccurrence:
    """How much the frequent tokens of a language expect each other (Xing et al. 2020, equations 9 and 10).

    Attributes:
        rows_V: int64 (V,), the row of a token id in ``scores_NN``, or -1.
        scores_NN: float (N, N) in [0, 1]: row i says how strongly token i expects each of the others.

    Raises:
        InputError: other shapes, types or ranges.
    """

    rows_V: Tensor
    scores_NN: Tensor
    _placed: dict[torch.device, Cooccurrence] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows, scores = self.rows_V, self.scores_NN
        if rows.dim() != 1 or rows.dtype != torch.int64 or not len(rows):
            raise InputError(f"rows of a co-occurrence table are int64 (V,), not {rows.dtype} {tuple(rows.shape)}")
        if scores.dim() != 2 or len(set(scores.shape)) != 1 or not len(scores) or not scores.is_floating_point():
            raise InputError(
                f"scores of a co-occurrence table are float (N, N), not {scores.dtype} {tuple(scores.shape)}"
            )
        if not -1 <= int(rows.min()) <= int(rows.max()) < len(scores):
            raise InputError(
                f"rows of a co-occurrence table are -1 to {len(scores) - 1}, not {int(rows.min())} to {int(rows.max())}"
            )
        if not bool(((scores >= 0) & (scores <= 1)).all()):
            raise InputError("scores of a co-occurrence table lie between 0 and 1, and some do not")

    def to(self, device: torch.device) -> Cooccurrence:
        """The same table on a device; moved once."""
        if device == self.scores_NN.device == self.rows_V.device:
            return self
        if device not in self._placed:
            self._placed[device] = Cooccurrence(self.rows_V.to(device), self.scores_NN.to(device))
        return self._placed[device]

    def rows(self, ids_BT: Tensor) -> Tensor:
        """The row of each id, (B, T); -1 where the table does not have it."""
        size = len(self.rows_V)
        outside_BT = (ids_BT < 0) | (ids_BT >= size)
        return self.rows_V[ids_BT.clamp(0, size - 1)].masked_fill(outside_BT, -1)


# labels

UPOS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM"),
    *("PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)
"""Universal parts of speech; a token's ``pos`` is a place in this tuple."""

RELATIONS = (
    *(
        "acl",
        "acl:relcl",
        "advcl",
        "advcl:relcl",
        "advmod",
        "advmod:emph",
        "advmod:lmod",
        "advmod:neg",
        "amod",
        "appos",
    ),
    *("aux", "aux:pass", "case", "case:gen", "cc", "cc:preconj", "ccomp", "clf", "compound", "compound:lvc"),
    *("compound:prt", "compound:redup", "compound:svc", "conj", "cop", "csubj", "csubj:outer", "csubj:pass", "dep"),
    *("det", "det:numgov", "det:nummod", "det:poss", "det:predet", "discourse", "dislocated", "expl", "expl:impers"),
    *("expl:pass", "expl:pv", "fixed", "flat", "flat:foreign", "flat:name", "goeswith", "iobj", "list", "mark"),
    *("nmod", "nmod:npmod", "nmod:poss", "nmod:tmod", "nsubj", "nsubj:outer", "nsubj:pass", "nummod", "nummod:gov"),
    *("obj", "obl", "obl:agent", "obl:arg", "obl:lmod", "obl:npmod", "obl:tmod", "orphan", "parataxis", "punct"),
    *("reparandum", "root", "vocative", "xcomp"),
)
"""Universal dependency relations with their common subtypes; a token's ``relation`` is a place in this tuple."""

CODES: Mapping[str, tuple[str, ...]] = {"relation": RELATIONS, "pos": UPOS}
"""What the numbers of a feature stand for: places in these tuples."""

_PLACES = {name: place for place, name in enumerate(RELATIONS)}

_OTHER_LABELS = {
    # spaCy's English models (and the Stanford labels that they grew from)
    "dobj": "obj",
    "dative": "iobj",
    "pobj": "obl",
    "npadvmod": "obl:npmod",
    "tmod": "obl:tmod",
    "nsubjpass": "nsubj:pass",
    "csubjpass": "csubj:pass",
    "auxpass": "aux:pass",
    "acomp": "xcomp",
    "attr": "xcomp",
    "oprd": "xcomp",
    "pcomp": "advcl",
    "relcl": "acl:relcl",
    "rcmod": "acl:relcl",
    "partmod": "acl",
    "infmod": "acl",
    "vmod": "acl",
    "complm": "mark",
    "prep": "case",
    "agent": "case",
    "possessive": "case",
    "poss": "nmod:poss",
    "prt": "compound:prt",
    "nn": "compound",
    "num": "nummod",
    "number": "compound",
    "quantmod": "advmod:emph",
    "neg": "advmod:neg",
    "preconj": "cc:preconj",
    "predet": "det:predet",
    "intj": "discourse",
    "meta": "dep",
    "hmod": "dep",
    "abbrev": "appos",
    "mwe": "fixed",
    "name": "flat:name",
    "foreign": "flat:foreign",
    "subtok": "goeswith",
}


def relation_id(label: str) -> int:
    """The place of a dependency label in `RELATIONS`, or -1.

    It takes the labels of Universal Dependencies and of spaCy's English models, in any case.  An unknown subtype counts
    as its base (``obl:with`` is ``obl``), a known one does not (``nsubj:pass`` is not ``nsubj``, and ``neg``, which is
    no ``advmod`` for spaCy, is ``advmod:neg``).
    """
    label = label.strip().lower()
    label = _OTHER_LABELS.get(label, label)
    return _PLACES.get(label, _PLACES.get(label.split(":")[0], -1))
