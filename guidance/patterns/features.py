"""Token features: the information about a batch that patterns can use.

Shapes in this package: B examples, T padded length, Q query tokens, K key tokens, H heads, D width, V vocabulary.
Rows are queries, columns are keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.patterns.predicates import entries
from guidance.registry import Registry


@dataclass(frozen=True)
class Feature:
    """One row of `FEATURES`.

    Attributes:
        kind: the type of the values; only ``float`` can hold NaN.
        summary: the meaning of a value, in one line.
        source: where the feature comes from, for messages.
        of_pairs: True if there is a value for each (query, key), shape (B, T, T), and not for each token, (B, T).
    """

    name: str
    kind: Literal["bool", "int", "float"]
    summary: str
    source: str
    of_pairs: bool = False

    @property
    def fill(self) -> bool | int | float:
        """The value where the feature does not apply: for special tokens, and for padding."""
        return {"bool": False, "int": -1, "float": 0.0}[self.kind]

    def applies(self, values: Tensor) -> Tensor:
        """Where some values say something, bool: integers from 0, floats other than 0 and NaN; truth values everywhere."""
        return values.abs() > 0 if self.kind == "float" else values >= 0

    def accepts(self, dtype: torch.dtype) -> bool:
        """True if a tensor of that type can hold the values."""
        if self.kind == "int":
            return dtype != torch.bool and not dtype.is_floating_point and not dtype.is_complex
        return dtype == torch.bool if self.kind == "bool" else dtype.is_floating_point

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values where we make them."""
        return {"bool": torch.bool, "int": torch.int64, "float": torch.float32}[self.kind]


_VOCABULARY = "it follows from the token ids: give `install` the tokenizer, or the column to `handle.guide`"
_MASK_TOKEN = "give `install` a tokenizer that has a mask token, or the column to `handle.guide`"
_MASKS = "it is a column of the artifact that `guide build-masks` writes; for new text see `guidance.word_features`"
_CALLER = "the caller gives it: `handle.guide(input_ids, attention_mask, {})`"
_OBJECTIVE = "an objective with a generator gives it in pre-training"

_IDS = "pass guidance=handle.guide(input_ids, attention_mask) beside inputs_embeds"

FEATURES: Registry[Feature] = Registry("feature")
"""Every feature by name."""

for _row in (
    Feature("delimiter", "bool", "opens, closes or parts sequences", _VOCABULARY),
    Feature("character", "int", "code point of a token that is exactly one character, else 0", _VOCABULARY),
    Feature("mask_token", "bool", "is the mask token", _MASK_TOKEN),
    Feature("word", "int", "number of its word within the example; -1 for special tokens", _MASKS),
    Feature("segment", "int", "number of its sentence or segment; -1 for none", _MASKS),
    Feature("idf", "float", "how rare its word is; 0 or NaN where the word is no candidate", _MASKS),
    Feature("head", "int", "word number of its word's syntactic head; a root's is its own; -1 for none", _MASKS),
    Feature("relation", "int", "its word's relation to the head, a place in `RELATIONS`; -1 for none", _MASKS),
    Feature("pos", "int", "its word's part of speech, a place in `UPOS`; -1 for none", _MASKS),
    Feature("negation", "bool", "belongs to a word that negates", _MASKS),
    Feature("stop_word", "bool", "belongs to a stop word", _MASKS),
    Feature("marked", "bool", "the caller marks it", _CALLER.format("marked=...")),
    Feature(
        "written", "bool", "a model wrote it behind its prompt", "`generate` gives it; by default no token is written"
    ),
    Feature("matrix", "bool", "which keys each query may see", _CALLER.format("matrix=..."), of_pairs=True),
    Feature(
        "weight_matrix", "float", "how much each key counts for each query", _CALLER.format("weight_matrix=..."), True
    ),
    Feature("mispredicted", "bool", "the generator put another token here than the text has", _OBJECTIVE),
    Feature("predicted", "int", "id of the token that a generator put here; by default the id itself", _OBJECTIVE),
    Feature("original", "int", "id of the token that the text has here", _OBJECTIVE),
):
    FEATURES.add(_row.name, _row)


INPUTS = (
    *("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"),
    *("inputs_embeds", "decoder_inputs_embeds"),
)
"""The arguments of a model that guidance is made from, apart from features."""


def is_feature(name: str) -> bool:
    """Whether an argument of a model is a feature of its tokens, or, with ``decoder_`` before it, of its decoder's."""
    return name.removeprefix("decoder_") in FEATURES


def register_feature(
    name: str,
    kind: Literal["bool", "int", "float"],
    summary: str,
    *,
    package: str,
    source: str = "",
    of_pairs: bool = False,
) -> Feature:
    """Add a feature, which `handle.guide` then accepts as a keyword and patterns can require.

    Args:
        package: the package that registers it, usually ``__name__``.
        source: where the feature comes from, for messages; by default from the caller.

    Raises:
        PlanError: the name is taken, or is not a valid name.
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
"""The tables that patterns and rules look up, and where each comes from."""


@dataclass(frozen=True)
class Tokens:
    """A batch of token sequences as the model sees it.

    Attributes:
        ids_BT: token ids, int64; positions that objectives masked hold the mask token.
        valid_BT: bool, False at padding, which never attends and is never attended to.
        columns: further features by name, each (B, T), or (B, T, T) for features of pairs.  Names outside `FEATURES` may
            have any type.
        tables: tables by name, for example a `Cooccurrence`.

    Raises:
        InputError: a feature does not have the shape or the type that `FEATURES` declares.
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
        """A feature by name."""
        if name not in self.columns:
            feature = FEATURES.get(name)
            raise InputError(f"the batch has no feature {name!r}", hint=feature.source if feature else None)
        return self.columns[name]

    def table(self, name: str) -> Any:
        """A table by name."""
        if name not in self.tables:
            raise InputError(f"the batch has no table {name!r}", hint=TABLES.get(name))
        return self.tables[name]

    def between(self, places: slice) -> Tokens:
        """Neighbouring tokens; those past the end of the sequence are padding.  Features of pairs are left out."""
        columns = {
            name: entries(column, places, FEATURES[name].fill if name in FEATURES else 0)
            for name, column in self.columns.items()
            if column.dim() == 2
        }
        valid_BT = entries(self.valid_BT, places)
        if isinstance(self, TokensWithoutIds):
            return TokensWithoutIds(valid_BT, valid_BT, columns, self.tables)
        return Tokens(entries(self.ids_BT, places), valid_BT, columns, self.tables)

    @property
    def lengths_B(self) -> Tensor:
        """The number of valid tokens in each example, special tokens included."""
        return self.valid_BT.sum(-1)


class IdsNotKnown(InputError):
    """Something reads token ids where only embeddings are given."""


class TokensWithoutIds(Tokens):
    """Tokens that a model reads as ``inputs_embeds``: reading their ids is refused, all else works.

    In place of the ids it is given any tensor of their shape.
    """

    @property
    def ids_BT(self) -> Tensor:
        """Raises IdsNotKnown, always: only embeddings are given."""
        raise IdsNotKnown("inputs_embeds come without token ids", hint=_IDS)

    def __init__(self, like_BT: Tensor, *values: Any) -> None:
        Tokens(like_BT, *values)  # checks the shapes
        for name, value in zip(("valid_BT", "columns", "tables"), values, strict=True):
            object.__setattr__(self, name, value)


# the features that follow from a token's id

_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PLAIN))
_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""The characters that stand for bytes in byte-level vocabularies; printable ones stand for themselves."""


@dataclass(frozen=True)
class Vocabulary:
    """The features that follow from a token's id alone.

    Attributes:
        columns_V: by name, a (V,) tensor: ``delimiter`` marks the tokens that open, close or part sequences
            (``<s>``, ``</s>``, ``[CLS]``, ``[SEP]``); ``character`` is the code point of every token that is a single
            character, at the start of a word or inside it, else 0; ``mask_token`` is there if the tokenizer has a mask token.
    """

    FEATURES: ClassVar = ("delimiter", "character", "mask_token")

    columns_V: Mapping[str, Tensor]
    _by_device: dict[torch.device, dict[str, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # one more entry, for ids outside the vocabulary
        padded = {name: torch.cat([values, values.new_zeros(1)]) for name, values in self.columns_V.items()}
        self._by_device[torch.device("cpu")] = padded

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Read the features off a Hugging Face tokenizer."""
        vocabulary = tokenizer.get_vocab()
        size = max(len(tokenizer), 1 + max(vocabulary.values(), default=0))  # some vocabularies skip ids
        delimiter, character = torch.zeros(size, dtype=torch.bool), [0] * size
        for name in ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"):
            if (token_id := getattr(tokenizer, name, None)) is not None:
                delimiter[token_id] = True
        is_byte_level = _is_byte_level(tokenizer)
        for token, token_id in vocabulary.items():
            text = _text(token, is_byte_level)
            if len(text) == 1:
                character[token_id] = ord(text)
        columns = {"delimiter": delimiter, "character": torch.tensor(character)}
        if (mask_id := getattr(tokenizer, "mask_token_id", None)) is not None:
            columns["mask_token"] = torch.arange(size) == mask_id
        return cls(columns)

    def columns(self, ids_BT: Tensor, names: Collection[str] = FEATURES) -> dict[str, Tensor]:
        """Features of a batch of ids, by default all; those that the vocabulary does not know are missing."""
        if not names:
            return {}
        device, size = ids_BT.device, len(next(iter(self.columns_V.values())))
        outside_BT = (ids_BT < 0) | (ids_BT >= size)
        if device.type == "cpu" and not torch.compiler.is_compiling() and bool(outside_BT.any()):
            raise InputError(
                f"the tokenizer has the ids 0 to {size - 1}, the batch has {int(ids_BT[outside_BT][0])}",
                hint="are the ids from another tokenizer?",
            )
        known = self._by_device.get(device)
        if known is None:
            known = {name: values.to(device) for name, values in self._by_device[torch.device("cpu")].items()}
            if not torch.compiler.is_exporting():  # which works on stand-ins without values
                self._by_device[device] = known
        indices_BT = ids_BT.masked_fill(outside_BT, size)
        return {name: known[name][indices_BT] for name in names if name in known}


def _is_byte_level(tokenizer: Any) -> bool:
    """True if the vocabulary consists of bytes instead of characters (GPT-2, RoBERTa, ModernBERT)."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return type(decoder).__name__ == "ByteLevel" or hasattr(tokenizer, "byte_decoder")


def _text(token: str, is_byte_level: bool) -> str:
    """The text of a token, without the marks for word starts and continuations; "" if its bytes are not text."""
    if is_byte_level and all(letter in _BYTES for letter in token):
        try:
            text = bytes(_BYTES[letter] for letter in token).decode("utf-8")
        except UnicodeDecodeError:  # part of a character
            return ""
        return text if len(text) == 1 else text.removeprefix(" ")
    plain = token.replace("Ġ", "").replace("▁", "")
    return plain.removeprefix("##") if len(plain) > 2 else plain


# tables


@dataclass(frozen=True)
class Cooccurrence:
    """How strongly the frequent tokens of a language predict each other (Xing et al. 2020, equations 9 and 10).

    Attributes:
        rows_V: int64 (V,), the row of each token id in ``scores_NN``, or -1.
        scores_NN: float (N, N) in [0, 1]; row i says how strongly token i predicts each of the others.

    Raises:
        InputError: wrong shapes, types or ranges.
    """

    rows_V: Tensor
    scores_NN: Tensor
    _by_device: dict[torch.device, Cooccurrence] = field(default_factory=dict, init=False, repr=False, compare=False)

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
            raise InputError("scores of a co-occurrence table must be between 0 and 1; some are not")

    def to(self, device: torch.device) -> Cooccurrence:
        """The same table on a device; copied once and then reused."""
        if device == self.scores_NN.device == self.rows_V.device:
            return self
        if device not in self._by_device:
            self._by_device[device] = Cooccurrence(self.rows_V.to(device), self.scores_NN.to(device))
        return self._by_device[device]

    def rows(self, ids_BT: Tensor) -> Tensor:
        """The row of each id, (B, T); -1 for ids that the table does not have."""
        size = len(self.rows_V)
        outside_BT = (ids_BT < 0) | (ids_BT >= size)
        return self.rows_V[ids_BT.clamp(0, size - 1)].masked_fill(outside_BT, -1)


# labels

UPOS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM"),
    *("PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)
"""Universal parts of speech; a token's ``pos`` is an index into this tuple."""

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
"""Universal dependency relations with their common subtypes; a token's ``relation`` is an index into this tuple."""

CODES: Mapping[str, tuple[str, ...]] = {"relation": RELATIONS, "pos": UPOS}
"""The names behind a feature's numbers: each number is an index into its tuple."""

_RELATION_IDS = {name: number for number, name in enumerate(RELATIONS)}

_LABELS = """
dobj=obj dative=iobj pobj=obl npadvmod=obl:npmod tmod=obl:tmod nsubjpass=nsubj:pass csubjpass=csubj:pass auxpass=aux:pass
acomp=xcomp attr=xcomp oprd=xcomp pcomp=advcl relcl=acl:relcl rcmod=acl:relcl partmod=acl infmod=acl vmod=acl complm=mark
prep=case agent=case possessive=case poss=nmod:poss prt=compound:prt nn=compound num=nummod number=compound
quantmod=advmod:emph neg=advmod:neg preconj=cc:preconj predet=det:predet intj=discourse meta=dep hmod=dep abbrev=appos
mwe=fixed name=flat:name foreign=flat:foreign subtok=goeswith
"""
_OTHER_LABELS = dict(pair.split("=") for pair in _LABELS.split())
"""The relations of spaCy's English models, and of the Stanford labels that they derive from."""


def relation_id(label: str) -> int:
    """The index of a dependency label in `RELATIONS`, or -1.

    Labels of Universal Dependencies and of spaCy's English models are known, in upper or lower case.  An unknown subtype
    becomes its base: ``obl:with`` is ``obl``.  A known subtype stays: ``nsubj:pass`` is not ``nsubj``, and spaCy's ``neg``
    is ``advmod:neg``, not ``advmod``.
    """
    label = label.strip().lower()
    label = _OTHER_LABELS.get(label, label)
    return _RELATION_IDS.get(label, _RELATION_IDS.get(label.split(":")[0], -1))
