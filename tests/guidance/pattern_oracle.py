"""Patterns by plain loops over one example, written from the papers, and batches on which to compare.

An `Example` holds the features of each token in lists.  `keys` answers for one query at a time and uses no tensors.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from guidance.patterns.features import FEATURES, RELATIONS, UPOS, Cooccurrence, Tokens

CHARACTERS = {5: ".", 6: ",", 7: "!", 8: ":", 9: "a"}
"""The ids of single characters; 0 and 1 are delimiters."""
ROWS = [-1, -1, 0, 1, 2, 3, -1, 4, 1, 0]
"""Rows of the co-occurrence table, which does not have the ids 10 to 12."""
SCORES = [[((3 * i + 5 * j) % 9) / 8 for j in range(5)] for i in range(5)]
DTYPES = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}

MAJOR = ("nsubj", "obj", "amod", "advmod")


@dataclass(frozen=True)
class Example:
    """One example of a batch, padding included."""

    ids: list[int]
    valid: list[bool]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def positions(self) -> list[int]:
        """The valid positions."""
        return [position for position in range(len(self)) if self.valid[position]]

    @property
    def words(self) -> dict[int, list[int]]:
        """The positions of each word's pieces."""
        words: dict[int, list[int]] = {}
        for position in self.positions:
            if self.columns["word"][position] >= 0:
                words.setdefault(self.columns["word"][position], []).append(position)
        return words

    @property
    def delimiters(self) -> list[int]:
        return [position for position in self.positions if self.columns["delimiter"][position]]

    def of_word(self, name: str, word: int) -> Any:
        """A feature of a word."""
        return self.columns[name][self.words[word][0]]

    def relatives(self, word: int) -> set[int]:
        """A word, its head and its children."""
        children = {other for other in self.words if self.of_word("head", other) == word}
        return {word, *children} | ({self.of_word("head", word)} & self.words.keys())

    def pieces(self, words: set[int]) -> set[int]:
        return {position for word in words for position in self.words[word]}


# patterns


def keys(spec: Any, example: Example, query: int) -> dict[int, float]:
    """The keys that a pattern names for one valid query, with their weights."""
    if isinstance(spec, str):
        spec = {"name": spec}
    if "or" in spec:
        return dict.fromkeys({k for part in spec["or"] for k in keys(part, example, query)}, 1.0)
    if "and" in spec:
        found = [set(keys(part, example, query)) for part in spec["and"]]
        return dict.fromkeys(set.intersection(*found), 1.0)
    if "not" in spec:
        return dict.fromkeys(set(example.positions) - set(keys(spec["not"], example, query)), 1.0)
    if "queries" in spec:
        return dict.fromkeys(example.positions if query in keys(spec["queries"], example, query) else [], 1.0)
    if "shuffled" in spec:
        named, places, n = keys(spec["shuffled"], example, query), example.positions, len(example.positions)
        prime, text = 2**31 - 1, [example.columns["original"][place] for place in places]
        digest = sum((token + 1) * pow(rank + 48271, 5, prime) % prime for rank, token in enumerate(text, 1))
        order = [places[rank] for rank in sorted(range(n), key=lambda rank: pow(rank + 1 + digest, 5, prime))]
        return {place: named[instead] for place, instead in zip(places, order, strict=True) if instead in named}
    if "sum" in spec:
        total: dict[int, float] = {}
        for part in spec["sum"]:
            part = {"name": part} if isinstance(part, str) else dict(part)
            weight = part.pop("weight", 1.0)
            for key, value in keys(part, example, query).items():
                total[key] = total.get(key, 0.0) + weight * value
        return total
    options = {name: value for name, value in spec.items() if name != "name"}
    if spec["name"] in ("matrix", "weight_matrix"):
        row = example.columns[spec["name"]][query]
        return {key: float(row[key]) for key in example.positions if row[key]}
    if spec["name"] == "conflict":
        return _conflict(example, query, **options)
    return dict.fromkeys(_named(spec["name"], options, example, query), 1.0)


def _named(name: str, options: Mapping[str, Any], example: Example, query: int) -> set[int]:
    positions, columns = example.positions, example.columns
    ends = {example.delimiters[0], example.delimiters[-1]} if options.get("ends") and example.delimiters else set()
    if name in ("delimiter", "marked", "negation", "stop_word"):
        found = {k for k in positions if columns[name][k]}
        found |= {k for k in positions if options.get("written") and columns["written"][k]}
        related = {columns["word"][k] for k in found} - {-1} if options.get("related") else set()
        return found | ends | example.pieces({other for word in related for other in example.relatives(word)})
    if name in ("next", "previous", "self"):
        return {query + {"next": 1, "previous": -1, "self": 0}[name]} & set(positions)
    if name == "first":
        return {positions[0]}
    if name == "sink":
        return set(positions[: options.get("size", 4)])
    if name == "all":
        return set(positions)
    if name == "none":
        return set()
    if name == "period":
        return {k for k in positions if CHARACTERS.get(example.ids[k]) == "."}
    if name == "separator":
        marks = options.get("marks", ",;.?!")
        return {k for k in positions if columns["delimiter"][k] or CHARACTERS.get(example.ids[k], "none") in marks}
    if name == "matching_token":
        same = {k for k in positions if example.ids[k] == example.ids[query]}
        if len(same) == 1:
            return {"all": set(positions), "self": {query}, "none": set()}[options.get("unique", "all")]
        return same if options.get("include_self", True) else same - {query}
    if name == "induction":
        places = [p for p in positions if example.ids[p] == example.ids[query] and p != query]
        if options.get("earlier"):
            places = [p for p in places if p < query]
        return {p + 1 for p in places} & set(positions)
    if name == "same_segment":
        if options.get("free_first") and query == positions[0]:
            return set(positions)
        segment = columns["segment"][query]
        return {k for k in positions if columns["segment"][k] == segment} if segment >= 0 else {query}
    if name == "window":
        return _window(options, example, query)
    if name == "rare":
        return _rare(example, options.get("fraction", 0.1), options.get("least", 2))
    if name == "dependency":
        word = columns["word"][query]
        return example.pieces(example.relatives(word)) if word >= 0 else {query}
    if name == "major_relation":
        return _major(options, example, query)
    tags = {"noun": {"NOUN", "PROPN"}, "verb": {"VERB"}, "adjective": {"ADJ"}}[name]
    if not options.get("proper", True):
        tags = tags - {"PROPN"}
    chosen = {k for k in positions if columns["pos"][k] >= 0 and UPOS[columns["pos"][k]] in tags} | ends
    return set() if options.get("square") and query not in chosen else chosen


def _window(options: Mapping[str, Any], example: Example, query: int) -> set[int]:
    reach = options.get("size", 3) // 2
    if not options.get("words"):
        return {k for k in example.positions if abs(k - query) <= reach}
    words = example.columns["word"]
    word_at = {k: words[k] if words[k] >= 0 else None for k in example.positions}
    numbers = [n for n in word_at.values() if n is not None]
    lowest, highest = min(numbers, default=0), max(numbers, default=-1)
    of_words = [k for k, n in word_at.items() if n is not None]
    ends = example.delimiters
    if ends:
        if all(k > ends[0] for k in of_words):
            word_at[ends[0]] = lowest - 1
        if all(k < ends[-1] for k in of_words) and word_at[ends[-1]] is None:
            word_at[ends[-1]] = highest + 1
    own = word_at[query]
    if own is None:
        return {query}
    return {k for k, n in word_at.items() if n is not None and abs(n - own) <= reach}


def _rare(example: Example, fraction: float, least: int) -> set[int]:
    segments: dict[int, list[int]] = {}
    for word in example.words:
        segment = example.of_word("segment", word) if "segment" in example.columns else 0
        if segment >= 0:
            segments.setdefault(segment, []).append(word)
    found: set[int] = set()
    fills = not segments
    for words in segments.values():
        wanted = max(least, math.floor(len(words) * Fraction(str(fraction))))
        candidates = [word for word in words if example.of_word("idf", word) > 0]
        candidates.sort(key=lambda word: (example.of_word("idf", word), example.words[word][0]))
        found |= set(candidates[-wanted:])
        fills = fills or len(candidates) < wanted
    return example.pieces(found) | ({example.positions[0]} if fills else set())


def _major(options: Mapping[str, Any], example: Example, query: int) -> set[int]:
    wanted = options.get("relations", MAJOR)
    involved: set[int] = set()
    for word in example.words:
        relation = example.of_word("relation", word)
        if relation >= 0 and RELATIONS[relation] in wanted:
            involved |= example.relatives(word)
    ends = {example.delimiters[0], example.delimiters[-1]} if example.delimiters else set()
    chosen = example.pieces(involved) | ends
    if options.get("square"):
        return chosen if query in chosen else set()
    return {query} if query in set(example.delimiters) - ends else chosen


def _conflict(example: Example, query: int, truth: bool = False, constant: float | None = None) -> dict[int, float]:
    def row(token: int) -> int:
        return ROWS[token] if token < len(ROWS) else -1

    query_row = row(example.columns["original"][query] if truth else example.ids[query])
    found: dict[int, float] = {}
    for key in example.positions:
        key_row = row(example.ids[key])
        if query_row >= 0 and key_row >= 0 and not example.columns["delimiter"][key]:
            found[key] = SCORES[query_row][key_row] if constant is None else constant
    return found


# batches


def sentence(seed: int, length: int) -> Example:
    """A random example with all features: delimiters at both ends and sometimes inside, words of one or more pieces."""
    dice = random.Random(seed)
    inner = dice.randrange(2, length - 2) if length > 5 and dice.random() < 0.5 else -1
    ids, word, segment = [], [], []
    number = -1
    for position in range(length):
        is_delimiter = position in (0, length - 1, inner)
        is_special = not is_delimiter and dice.random() < 0.08
        ids.append((0 if position == 0 else 1) if is_delimiter else dice.randrange(2, 13))
        continues = position > 0 and word[-1] >= 0 and dice.random() < 0.35
        number += not (is_delimiter or is_special or continues)
        word.append(-1 if is_delimiter or is_special else number)
        segment.append(-1 if is_special else int(0 <= inner < position))
    per_word = [
        {
            "head": dice.choice([*range(number + 1), n, -1, number + 7]),
            "relation": dice.choice(
                [-1, *(RELATIONS.index(r) for r in (*MAJOR, "nsubj:pass", "det", "root", "punct"))]
            ),
            "pos": dice.choice([-1, *(UPOS.index(tag) for tag in ("NOUN", "PROPN", "VERB", "AUX", "ADJ", "DET"))]),
            "idf": dice.choice([math.nan, 0.0, -1.0, 1.0, 2.5, 2.5, 4.0]),
            "negation": dice.random() < 0.2,
            "stop_word": dice.random() < 0.4,
        }
        for n in range(number + 1)
    ]
    nothing = {"head": -1, "relation": -1, "pos": -1, "idf": math.nan, "negation": False, "stop_word": False}
    spread = [per_word[n] if n >= 0 else nothing for n in word]
    columns: dict[str, list[Any]] = {name: [values[name] for values in spread] for name in nothing}
    columns |= {
        "delimiter": [token in (0, 1) for token in ids],
        "character": [ord(CHARACTERS.get(token, "\0")) for token in ids],
        "mask_token": [token == 12 for token in ids],
        "word": word,
        "segment": segment,
        "marked": [dice.random() < 0.3 for _ in ids],
        "original": [dice.choice([token, dice.randrange(2, 13)]) for token in ids],
    }
    pairs = random.Random(seed)
    columns["written"] = [pairs.random() < 0.2 for _ in ids]
    columns["matrix"] = [[pairs.random() < 0.3 for _ in ids] for _ in ids]
    columns["weight_matrix"] = [[pairs.choice([0.0, 0.25, 0.5, 2.0]) for _ in ids] for _ in ids]
    columns["mispredicted"] = [a != b for a, b in zip(ids, columns["original"], strict=True)]
    return Example(ids, [True] * length, columns)


def padded(example: Example, left: int, right: int, seed: int = 0) -> Example:
    """The same example with padding around it, whose features claim words, marks and delimiters."""
    dice = random.Random(seed)
    noise: dict[str, Any] = {"bool": lambda: True, "int": lambda: dice.randrange(0, 3), "float": lambda: 9.0}

    def around(values: list[Any], make: Any) -> list[Any]:
        return [make() for _ in range(left)] + values + [make() for _ in range(right)]

    def column(name: str, values: list[Any]) -> list[Any]:
        make = noise[FEATURES[name].kind]
        if not FEATURES[name].of_pairs:
            return around(values, make)
        size = left + len(example) + right
        return around([around(row, make) for row in values], lambda: [make() for _ in range(size)])

    return Example(
        around(example.ids, lambda: dice.randrange(2, 13)),
        around(example.valid, lambda: False),
        {name: column(name, values) for name, values in example.columns.items()},
    )


def holed(example: Example, *holes: int) -> Example:
    """The same example with padding inside."""
    return Example(example.ids, [position not in holes for position in range(len(example))], example.columns)


def tokens(*examples: Example, without: tuple[str, ...] = ()) -> Tokens:
    """A batch of examples of one length."""
    columns = {
        name: torch.tensor([example.columns[name] for example in examples], dtype=DTYPES[FEATURES[name].kind])
        for name in examples[0].columns
        if name not in without
    }
    table = Cooccurrence(torch.tensor(ROWS), torch.tensor(SCORES))
    ids_BT = torch.tensor([example.ids for example in examples])
    valid_BT = torch.tensor([example.valid for example in examples])
    return Tokens(ids_BT, valid_BT, columns, {"cooccurrence": table})


def dense(spec: Any, *examples: Example) -> torch.Tensor:
    """The weights of a pattern by loops over examples, queries and keys: float64 (B, Q, K)."""
    size = len(examples[0])
    found = torch.zeros(len(examples), size, size, dtype=torch.float64)
    for number, example in enumerate(examples):
        for query in example.positions:
            for key, weight in keys(spec, example, query).items():
                found[number, query, key] = weight
    return found


SPECS: tuple[Any, ...] = (
    {"name": "sink", "size": 2},
    {"name": "window", "size": 1},
    {"name": "window", "size": 5},
    {"name": "window", "words": True},
    {"name": "window", "words": True, "size": 5},
    {"name": "separator", "marks": ";?,.:"},
    {"name": "separator", "marks": ""},
    {"name": "matching_token", "include_self": False},
    {"name": "matching_token", "unique": "self"},
    {"name": "matching_token", "include_self": False, "unique": "self"},
    {"name": "matching_token", "include_self": False, "unique": "none"},
    {"name": "induction", "earlier": True},
    {"name": "same_segment", "free_first": True},
    {"name": "rare", "fraction": 0.29, "least": 1},
    {"name": "rare", "fraction": 1.0},
    {"name": "major_relation", "relations": ["nsubj:pass"]},
    {"name": "major_relation", "square": True},
    {"name": "noun", "proper": False},
    {"name": "noun", "square": True},
    {"name": "verb", "square": True},
    {"name": "adjective", "square": True},
    {"name": "noun", "square": True, "ends": True},
    {"name": "verb", "ends": True},
    {"name": "adjective", "square": True, "ends": True},
    {"name": "negation", "related": True},
    {"name": "negation", "ends": True},
    {"name": "negation", "related": True, "ends": True},
    {"name": "marked", "written": True},
    {"name": "conflict", "truth": True},
    {"name": "conflict", "constant": 0.875},
    {"or": ["next", "previous"]},
    {"or": ["first", "delimiter", "marked"]},
    {"or": ["first", "self"]},
    {"and": ["same_segment", {"name": "window", "size": 5}]},
    {"and": ["delimiter", {"not": "first"}]},
    {"not": "same_segment"},
    {"not": {"or": ["dependency", {"name": "window", "size": 3}]}},
    {"queries": "delimiter"},
    {"or": ["same_segment", {"queries": "delimiter"}]},
    {"and": ["noun", {"queries": {"or": ["noun", "first"]}}]},
    {"shuffled": {"name": "matching_token", "include_self": False}},
    {"shuffled": "same_segment"},
    {"shuffled": "rare"},
    {"shuffled": "conflict"},
    {"sum": ["next", {"name": "first", "weight": 0.5}]},
    {"sum": ["conflict", {"or": ["self", "rare"], "weight": 2}, {"sum": ["next", "marked"], "weight": 0.25}]},
)
"""Patterns with options, and combinations."""

_BASE = sentence(2, 12)
_IDS = [*range(2, 8), *range(2, 8)]
_NOTHING = {
    "delimiter": [False] * 12,
    "word": [-1] * 12,
    "character": [ord(CHARACTERS.get(token, "\0")) for token in _IDS],
}
EXAMPLES: tuple[Example, ...] = (
    sentence(1, 12),
    sentence(7, 12),
    padded(sentence(3, 7), 0, 5),
    padded(sentence(4, 8), 4, 0),
    padded(sentence(5, 6), 3, 3),
    padded(sentence(6, 1), 5, 6),
    padded(sentence(8, 2), 0, 10),
    holed(_BASE, 3, 4, 9),
    holed(_BASE, *range(12)),
    Example(_IDS, [True] * 12, {**_BASE.columns, **_NOTHING}),
)
"""Full, padded on either side, of one or two tokens, with padding inside, only padding, without delimiters or words."""
