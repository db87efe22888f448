"""Stage ``build-masks``: what is known about words, for every token of some sequences.

Reads sequences, the corpus that they are of, and where given ``idf`` and ``deps`` of the same corpus.  Writes one file for
each split of the sequences, row by row in their order, with list columns as long as ``id`` (`mask_schema`).
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError, NumericalError
from pipelines import executor
from pipelines.artifacts import Artifact
from pipelines.blocks import BLOCK_LIMIT
from pipelines.corpus_writer import BLOCKS, SPLITS
from pipelines.files import open_parquet
from pipelines.manifest import ArtifactDamaged, ArtifactMismatch, ArtifactMissing, digest
from pipelines.progress import Progress, log
from pipelines.shards import Shard, ShareDone, map_shards, parquet_file, run_sharded
from pipelines.stage import Result, Run, Stage, internal, knob, read_json, require
from pipelines.store import Store

if TYPE_CHECKING:
    from guidance.statistics.roles import Pieces, Rarity, Roles, Words

__all__ = ["STAGE", "Config", "RoleTables", "mask_schema", "run"]

DEPS, IDF = "deps.parquet", "idf.parquet"
GROUP_TOKENS = 1 << 18
"""Tokens of a row group of the result, about: it ends with the first sequence that reaches them."""

_TREE = ("head", "relation", "pos", "negation")
_SOURCES = {
    "idf": ("idf", "no --idf was given: guide build-idf"),
    **dict.fromkeys(_TREE, ("deps", "no --deps was given: guide build-deps")),
    "stop_word": ("stop_words", "no --deps of a spaCy model was given, which would know the language's stop words"),
}
"""Columns that need more than text: the setting that gives them, and why they are missing without it."""

_FAR = 1 << 62


class Config(executor.Config):
    """What is joined to the sequences, and where."""

    idf: str = knob("", "How rare words are: what `guide build-idf` has made of the same corpus; rare words need it.")
    deps: str = knob("", "Trees: what `guide build-deps` has made of the same corpus; syntactic roles need it.")
    stop_words: str = internal("Digest of the language's stop words.")


def run(
    sequences: str,
    config: Config,
    *,
    store: Store,
    name: str | None = None,
    force: bool = False,
    wait: bool = True,
    progress: Progress | None = None,
) -> Result | None:
    """Join sequences with what is known about their words; None where ``--shard`` asked for a share only.

    Raises:
        ArtifactMismatch: ``idf`` or ``deps`` are of another corpus.
        ArtifactMissing: the corpus of the sequences is no longer there.
    """
    with contextlib.ExitStack() as stack:
        # a share reads a part of all that, with the checksums of pages; the run that merges verifies the whole
        verify = not config.shard
        data = stack.enter_context(store.load(sequences, kind="sequences", verify=verify))
        text = stack.enter_context(origin(data, "corpus", store, verify=verify))
        inputs: dict[str, Any] = {"sequences": data, "corpus": text}
        for role in ("idf", "deps"):
            if reference := getattr(config, role):
                inputs[role] = stack.enter_context(store.load(reference, kind=role, verify=verify))
                _check_corpus(inputs[role], inputs["corpus"], data)
        if "idf" in inputs:
            _check_words(inputs["idf"])
        words = stop_words(inputs["deps"]) if "deps" in inputs else None
        if words is not None:
            config = config.model_copy(update={"stop_words": digest(words)})

        def share(folder: Path, progress: Progress) -> None:
            _partials(inputs, config, words, folder, progress)

        stage = Stage(STAGE.name, STAGE.kind, STAGE.version, STAGE.config, functools.partial(build, stop_words=words))
        options: dict[str, Any] = {"name": name, "force": force, "wait": wait, "progress": progress}
        return run_sharded(stage, config, inputs, share, store=store, **options)


def origin(artifact: Artifact, role: str, store: Store, *, verify: bool = True) -> Artifact:
    """An input of an artifact, as it was when the artifact was made.

    Raises:
        ArtifactMissing: it is gone, or has another content by now.
    """
    known = artifact.manifest.get("inputs", {}).get(role, {})
    reference = f"{known.get('kind', role)}/{str(known.get('recipe', ''))[:16]}"
    try:
        found = store.load(reference, verify=verify)
    except ArtifactMissing as error:
        raise ArtifactMissing(
            f"the {role} of {artifact.reference}, {reference}, is not in {store.root}",
            hint="build it again from the same text: it gets the same id",
        ) from error
    if found.content != known.get("content"):
        raise ArtifactMissing(
            f"{found.reference} has been built again with another content since {artifact.reference} was made of it",
            hint=f"build {artifact.kind} again",
        )
    return found


def _check_corpus(table: Artifact, corpus: Artifact, data: Artifact) -> None:
    known = table.manifest.get("inputs", {}).get("corpus", {})
    if known.get("content") != corpus.content:
        raise ArtifactMismatch(
            f"{table.reference} is of the corpus {known.get('kind')}/{str(known.get('recipe'))[:16]} "
            f"({str(known.get('content'))[:12]}), the sequences {data.reference} are of {corpus.reference} "
            f"({corpus.content[:12]})",
            hint=f"guide build-{table.kind} {corpus.reference}",
        )


def _check_words(table: Artifact) -> None:
    if "tokenizer" in table.manifest.get("inputs", {}):
        raise ArtifactMismatch(
            f"{table.reference} says how rare tokens are; rare are words",
            hint="guide build-idf CORPUS, without a tokenizer",
        )


def stop_words(deps: Artifact) -> list[str] | None:
    """The stop words of the language of a spaCy model; None where another parser made the trees."""
    kind, _, place = str(deps.manifest.get("config", {}).get("parser", "")).partition(":")
    language = _language(place) if kind == "spacy" else None
    if language is None:
        return None
    try:
        return sorted(require("spacy", "spacy").util.get_lang_class(language).Defaults.stop_words)
    except ImportError:  # a language that this spaCy does not have
        return None


def _language(place: str) -> str | None:
    """The language of a spaCy model: ``en`` of ``en_core_web_sm``; a folder says its own while it is there."""
    if match := re.fullmatch(r"([a-z]{2,3})_\w+", place):
        return match[1]
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(read_json(Path(place) / "meta.json")["lang"])
    return None


def mask_schema(columns: Sequence[str]) -> Any:
    """Columns of a file of masks: lists of one length, one entry for each token of a sequence."""
    import pyarrow as pa

    from guidance.features import FEATURES
    from guidance.statistics.roles import NOTHING

    return pa.schema(
        [
            pa.field(
                name,
                pa.list_(pa.field("element", pa.from_numpy_dtype(kind), False)),
                False,
                metadata={"unit": FEATURES[name].summary},
            )
            for name, (_, kind) in NOTHING.items()
            if name in columns
        ]
    )


# the tables, read where they are needed


class RoleTables:
    """Corpus, idf and trees, from which it gives the words of any stretch of text; nothing is held but an index.

    Args:
        corpus: folder of the corpus.
        idf, deps: folders of these artifacts, or None.
        stop_words: the language's, or None.
    """

    def __init__(
        self, corpus: str, idf: str | None = None, deps: str | None = None, stop_words: Sequence[str] | None = None
    ) -> None:
        self.corpus, self.idf, self.deps = Path(corpus), idf, deps
        self._stop_words = frozenset(stop_words) if stop_words is not None else None

    def roles(self, pieces: Pieces) -> Roles:
        """The columns for some sequences; see `guidance.statistics.roles.role_columns`."""
        from guidance.statistics.roles import role_columns

        return role_columns(pieces, self.words(pieces))

    def of_examples(self, documents: Sequence[int], encodings: Sequence[Any]) -> Roles:
        """The columns for examples of a task, encoded as ``[CLS] text [SEP]`` or ``[CLS] text [SEP] pair [SEP]``.

        Args:
            documents: their rows in the corpus that ``build-dataset`` made, rising.
            encodings: what a tokenizer of Hugging Face gives for text and pair (``BatchEncoding.encodings``, or
                ``tokenizers.Tokenizer.encode_batch``): the first block of the document, and its second one if there is a
                pair.  They may be cut short by the tokenizer's own truncation.

        Returns:
            Columns over all tokens of all encodings, one after the other.
        """
        return self.roles(self._pieces_of_examples(documents, encodings))

    def _pieces_of_examples(self, documents: Sequence[int], encodings: Sequence[Any]) -> Pieces:
        import numpy as np

        from guidance.statistics.roles import Pieces

        if any(later <= earlier for earlier, later in itertools.pairwise(documents)):
            raise ValueError("the documents of examples must rise")
        wanted = _Range(np.array(documents, np.int64), (0, _FAR), (0, _FAR)) if len(documents) else _Range.empty()
        blocks: dict[tuple[int, int], tuple[int, int, list[int]]] = {}
        for table in _rows(self.corpus / BLOCKS, (*_BLOCK_COLUMNS, "block"), wanted, "start", wanted.places, 0):
            for row in table.drop_columns(["text"]).to_pylist():
                starts = [span["start"] for span in row["sentences"]]
                blocks[row["document"], row["block"]] = (row["start"], row["first_sentence"], starts)
        bounds, rows = [0], []
        for document, encoding in zip(documents, encodings, strict=True):
            known = (encoding.sequence_ids, encoding.special_tokens_mask, encoding.offsets)
            for part, is_special, (start, end) in zip(*known, strict=True):
                if is_special and part is not None:
                    raise ValueError(
                        "this encoding has lost what is text and what is pair: let the tokenizer cut it short"
                    )
                if part is None:
                    rows.append((-1, -1, -1, -1))
                    continue
                first, sentence, starts = blocks[document, part]
                within = max(0, bisect.bisect_right(starts, max(start, end - 1)) - 1)
                rows.append((document, sentence + within, first + start, first + end))
            bounds.append(len(rows))
        return Pieces(np.array(bounds, np.int64), *np.array(rows, np.int64).reshape(-1, 4).T)

    def letters(self, pieces: Pieces) -> list[str]:
        """The text of each piece; "" for special tokens."""
        import numpy as np

        ordinary = np.flatnonzero(pieces.document >= 0)
        if not len(ordinary):
            return [""] * len(pieces.document)
        wanted = _Range.of(pieces, ordinary)
        found: dict[int, list[tuple[int, str]]] = {}
        for table in _rows(self.corpus / BLOCKS, _BLOCK_COLUMNS, wanted, "start", wanted.places, 2 * BLOCK_LIMIT):
            for row in _block_rows([table]):
                found.setdefault(row["document"], []).append((row["start"], row["text"]))
        letters = []
        for document, start, end in zip(
            pieces.document.tolist(), pieces.start.tolist(), pieces.end.tolist(), strict=True
        ):
            rows = found.get(document, [])
            place = bisect.bisect_right(rows, start, key=lambda row: row[0]) - 1
            letters.append(rows[place][1][start - rows[place][0] : end - rows[place][0]] if place >= 0 else "")
        return letters

    def words(self, pieces: Pieces) -> Words:
        """All words of the documents and sentences that pieces are of, and perhaps more, in the order of the text."""
        import numpy as np

        ordinary = np.flatnonzero(pieces.document >= 0)
        if not len(ordinary):
            return self._join([], None, _Range.empty())
        wanted = _Range.of(pieces, ordinary)
        blocks = list(_rows(self.corpus / BLOCKS, _BLOCK_COLUMNS, wanted, "start", wanted.places, 2 * BLOCK_LIMIT))
        trees = None
        if self.deps:
            trees = list(_rows(Path(self.deps) / DEPS, _TREE_COLUMNS, wanted, "sentence", wanted.sentences, 0))
        return self._join(blocks, trees, wanted)

    def _join(self, blocks: list[Any], trees: list[Any] | None, wanted: _Range) -> Words:
        import numpy as np

        from guidance.statistics.roles import NOTHING, Words, parts_of_speech, relations

        parts = [] if trees is None else [_parsed(table) for table in trees]
        done = np.concatenate([part["sentences"] for part in parts]) if parts else np.zeros((0, 2), np.int64)
        split = _split(blocks, None if trees is None else done, wanted)
        keys = ("document", "start", "end", "head")
        columns = {key: np.concatenate([*(part[key] for part in parts), split[key]]) for key in keys}
        before = np.cumsum([0, *(len(part["document"]) for part in parts)])
        for part, first in zip(parts, before, strict=False):
            place = slice(first, first + len(part["document"]))
            columns["head"][place] += np.where(part["head"] >= 0, first, 0)
        forms = [form for part in (*parts, split) for form in part["form"]]
        order = np.lexsort((columns["end"], columns["start"], columns["document"]))
        place_of = np.empty(len(order), np.int64)
        place_of[order] = np.arange(len(order))
        head = columns["head"]
        head = np.where(head >= 0, place_of[head], -1)[order] if len(head) else head
        features: dict[str, Any] = {}
        if trees is not None:
            count = len(split["document"])
            lemmas = [lemma for part in parts for lemma in part["lemma"]]
            numbers, negation = relations([label for part in parts for label in part["relation"]], lemmas)
            tags = parts_of_speech([tag for part in parts for tag in part["upos"]])
            for name, values in (("relation", numbers), ("pos", tags), ("negation", negation)):
                nothing, kind = NOTHING[name]
                features[name] = np.concatenate([values, np.full(count, nothing, kind)])[order]
        if self._stop_words is not None:
            stops = self._stop_words
            features["stop_word"] = np.fromiter((form in stops for form in forms), bool, len(forms))[order]
        document, start, end = (columns[key][order] for key in keys[:3])
        if self.idf:
            table = _rarity(self.idf, os.stat(Path(self.idf) / IDF).st_ino)
            features["idf"] = np.fromiter(map(table.__getitem__, forms), np.float32, len(forms))[order]
        return Words(document, start, end, head if trees is not None else None, features)


class _Range:
    """What pieces touch: their documents, and how far it goes in the first and in the last of them."""

    def __init__(self, documents: Any, places: tuple[int, int], sentences: tuple[int, int]) -> None:
        self.documents, self.places, self.sentences = documents, places, sentences

    @classmethod
    def of(cls, pieces: Pieces, ordinary: Any) -> _Range:
        import numpy as np

        documents = np.unique(pieces.document[ordinary])
        first = ordinary[pieces.document[ordinary] == documents[0]]
        last = ordinary[pieces.document[ordinary] == documents[-1]]
        return cls(
            documents,
            (int(pieces.start[first].min()), int(pieces.end[last].max())),
            (int(pieces.sentence[first].min()), int(pieces.sentence[last].max())),
        )

    @classmethod
    def empty(cls) -> _Range:
        import numpy as np

        return cls(np.zeros(0, np.int64), (0, 0), (0, 0))

    def holds(self, document: Any, place: Any, bounds: tuple[int, int], length: Any) -> Any:
        """Which rows lie in it, at least in part, by their documents, their places there and their lengths."""
        import numpy as np

        first, last = self.documents[0], self.documents[-1]
        after = (document > first) | (place + length >= bounds[0])
        before = (document < last) | (place <= bounds[1])
        return np.isin(document, self.documents) & after & before


_BLOCK_COLUMNS = ("document", "start", "first_sentence", "text", "sentences")
_TREE_COLUMNS = ("document", "sentence", "start", "end", "form", "lemma", "upos", "head", "relation")


def _rows(
    path: Path, columns: Sequence[str], wanted: _Range, place: str, bounds: tuple[int, int], reach: int
) -> Iterator[Any]:
    """The rows of a table in the order of the text that lie in a range, one ``pyarrow.Table`` for each row group.

    Args:
        place: the column that says where in its document a row begins.
        reach: how far a row can reach beyond its place.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not len(wanted.documents):
        return
    try:
        with open(path, "rb") as raw:
            footer = _footer(str(path), os.fstat(raw.fileno()).st_ino)
            file = open_parquet(raw, metadata=footer, page_checksum_verification=True)
            low, high = (int(wanted.documents[0]), bounds[0] - reach), (int(wanted.documents[-1]), bounds[1])
            for number, (first, last) in enumerate(_extents(str(path), os.fstat(raw.fileno()).st_ino, place)):
                if first <= high and last >= low:
                    table = file.read_row_group(number, columns=list(columns))
                    numbers, places = (table.column(name).to_numpy() for name in ("document", place))
                    lengths = pc.utf8_length(table["text"]).to_numpy() if "text" in columns else 0
                    inside = wanted.holds(numbers, places, bounds, lengths)
                    if inside.any():
                        yield table.filter(pa.array(inside)).combine_chunks()
    except (pa.ArrowException, KeyError, OSError) as error:
        raise ArtifactDamaged(f"{path}: unreadable ({str(error)[:160]!r})") from error


@functools.lru_cache(maxsize=8)
def _footer(path: str, inode: int) -> Any:
    with open(path, "rb") as file:
        return open_parquet(file).metadata


@functools.lru_cache(maxsize=8)
def _extents(path: str, inode: int, place: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """For each row group where it begins and ends, as (document, place); within a document where there is but one."""
    metadata = _footer(path, inode)
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        documents, places = (group.column(names.index(name)).statistics for name in ("document", place))
        if documents is None or places is None or not documents.has_min_max or not places.has_min_max:
            found.append(((0, 0), (_FAR, _FAR)))
        elif documents.min == documents.max:
            found.append(((documents.min, places.min), (documents.max, places.max)))
        else:
            found.append(((documents.min, 0), (documents.max, _FAR)))
    return found


def _parsed(table: Any) -> dict[str, Any]:
    """The words of some sentences with trees; ``sentences`` has the (document, sentence) of those that have words.

    Raises:
        ArtifactDamaged: lists of different lengths, or a head outside its sentence.
    """
    import numpy as np

    lists = {name: table.column(name).combine_chunks() for name in _TREE_COLUMNS[2:]}
    sizes = lists["start"].value_lengths().to_numpy()
    document, sentence = (table.column(name).to_numpy().astype(np.int64) for name in ("document", "sentence"))
    flat = {name: column.flatten() for name, column in lists.items()}
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    head = flat["head"].to_numpy().astype(np.int64)
    if any(not np.array_equal(column.value_lengths().to_numpy(), sizes) for column in lists.values()):
        raise ArtifactDamaged("deps.parquet: the columns of a sentence have different lengths")
    if len(head) and (head.min() < -1 or (head >= np.repeat(sizes, sizes)).any()):
        raise ArtifactDamaged("deps.parquet: a head lies outside its sentence")
    has_words = sizes > 0
    return {
        "sentences": np.stack([document[has_words], sentence[has_words]], axis=1),
        "document": np.repeat(document, sizes),
        "start": flat["start"].to_numpy().astype(np.int64),
        "end": flat["end"].to_numpy().astype(np.int64),
        "head": np.where(head >= 0, head + first, -1),
        "form": [form.lower() for form in flat["form"].to_pylist()],
        **{name: flat[name].to_pylist() for name in ("lemma", "upos", "relation")},
    }


def _block_rows(blocks: list[Any]) -> Iterator[dict[str, Any]]:
    for table in blocks:
        texts = table.column("text").to_pylist()
        for document, start, text in zip(
            *(table.column(c).to_pylist() for c in ("document", "start")), texts, strict=True
        ):
            yield {"document": document, "start": start, "text": text}


def _split(blocks: list[Any], parsed: Any, wanted: _Range) -> dict[str, Any]:
    """The words of text without trees: of all blocks, or only of the sentences that are not among the parsed ones."""
    import numpy as np

    from guidance.statistics.words import word_spans

    document: list[int] = []
    spans: list[tuple[int, int]] = []
    forms: list[str] = []

    def add(number: int, place: int, text: str) -> None:
        found = word_spans(text)
        document.extend([number] * len(found))
        spans.extend((place + first, place + last) for first, last in found)
        forms.extend(text[first:last].lower() for first, last in found)

    if parsed is None:
        for row in _block_rows(blocks):
            add(row["document"], row["start"], row["text"])
    else:
        known = {*map(tuple, parsed.tolist())}
        for table in blocks:
            numbers, starts, firsts = (table.column(c).to_numpy() for c in ("document", "start", "first_sentence"))
            column = table.column("sentences").combine_chunks()
            sizes = column.value_lengths().to_numpy()
            row_of = np.repeat(np.arange(len(sizes)), sizes)
            sentence = np.arange(len(row_of)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + firsts[row_of]
            first, last = (column.flatten().field(name).to_numpy() for name in ("start", "end"))
            inside = wanted.holds(numbers[row_of], sentence, wanted.sentences, 0)
            texts = table.column("text")
            for place in np.flatnonzero(inside).tolist():
                row = row_of[place]
                if (int(numbers[row]), int(sentence[place])) not in known:
                    text = texts[int(row)].as_py()[first[place] : last[place]]
                    add(int(numbers[row]), int(starts[row]) + int(first[place]), text)
    places = np.array(spans, np.int64).reshape(-1, 2)
    return {
        "document": np.array(document, np.int64),
        "start": places[:, 0],
        "end": places[:, 1],
        "head": np.full(len(document), -1, np.int64),
        "form": forms,
    }


@functools.lru_cache(maxsize=2)
def _rarity(folder: str, inode: int) -> Rarity:
    """The table of an ``idf`` artifact.

    Raises:
        NumericalError: a value that is no number from 0.
    """
    import numpy as np
    import pyarrow as pa

    from guidance.statistics.roles import Rarity

    path = Path(folder) / IDF
    try:
        with open(path, "rb") as raw:
            table = open_parquet(raw, page_checksum_verification=True).read(["token", "idf"])
        values, tokens = table.column("idf").to_numpy(), table.column("token").to_pylist()
    except (pa.ArrowException, KeyError, OSError) as error:
        raise ArtifactDamaged(f"{path}: unreadable ({str(error)[:160]!r})") from error
    if not np.isfinite(values).all() or (values < 0).any():
        raise NumericalError(f"{path}: an idf that is no number from 0")
    return Rarity(zip(tokens, values.tolist(), strict=True))


# the stage


def _settings(inputs: Mapping[str, Artifact], words: list[str] | None) -> dict[str, Any]:
    folders = {role: str(inputs[role].path.absolute()) for role in ("corpus", "idf", "deps") if role in inputs}
    return {**folders, "stop_words": words}


def _partials(
    inputs: Mapping[str, Artifact], config: Config, words: list[str] | None, folder: Path, progress: Progress
) -> dict[str, list[Path]]:
    """The partial files of every split."""
    data, found, is_share = inputs["sequences"], {}, False
    for split in SPLITS:
        name = f"{split}.parquet"
        if data.files.get(name, {}).get("rows"):
            shards = _shards(data, name, config.shard_size)
            try:
                found[split] = map_shards(_work, shards, _settings(inputs, words), folder / split, config, progress)
            except ShareDone:
                is_share = True
    if is_share:
        raise ShareDone
    return found


def _shards(data: Artifact, name: str, size: int) -> list[Shard]:
    """The rows of a file of sequences in shards of about ``size`` characters, four for each token."""
    with data.open(name) as file:
        metadata = open_parquet(file).metadata
    shards = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = max(1, min(group.num_rows, round(4 * group.column(0).num_values / size)))
        bounds = [group.num_rows * part // parts for part in range(parts + 1)]
        pairs = itertools.pairwise(bounds)
        shards += [Shard(str(data.path.absolute() / name), ((number, start, stop),)) for start, stop in pairs]
    return shards


def _work(shard: Shard, settings: Mapping[str, Any], path: Path) -> None:
    """One partial file: the columns, and the counts in the metadata of its schema."""
    tables = RoleTables(**settings)
    rows = shard.read(["document", "sentence", "start", "end"]).combine_chunks()
    pieces = pieces_of(rows)
    roles = tables.roles(pieces)
    schema = mask_schema(list(roles.columns))
    counts = {"sequences": rows.num_rows, "tokens": len(pieces.document), **roles.counts}
    with parquet_file(path, schema.with_metadata({"counts": json.dumps(counts)})) as writer:
        writer.write_table(_table(roles.columns, pieces.bounds, schema))


def pieces_of(rows: Any) -> Pieces:
    """The tokens of a table of sequences."""
    import numpy as np

    from guidance.statistics.roles import Pieces

    lists = [rows.column(name).combine_chunks() for name in ("document", "sentence", "start", "end")]
    sizes = lists[0].value_lengths().to_numpy()
    if any(not np.array_equal(column.value_lengths().to_numpy(), sizes) for column in lists):
        raise ArtifactDamaged("a file of sequences has columns of different lengths")
    flat = (column.flatten().to_numpy().astype(np.int64) for column in lists)
    return Pieces(np.concatenate([[0], np.cumsum(sizes)]), *flat)


def _table(columns: Mapping[str, Any], bounds: Any, schema: Any) -> Any:
    import numpy as np
    import pyarrow as pa

    offsets = pa.array(bounds.astype(np.int32))
    arrays = [pa.ListArray.from_arrays(offsets, pa.array(columns[f.name]), type=f.type) for f in schema]
    return pa.table(arrays, schema=schema)


def build(run: Run, stop_words: list[str] | None = None) -> None:
    """The stage itself; see `run`."""
    partials = _partials(run.inputs, run.config, stop_words, run.partial, run.progress)
    if not partials:
        raise InputError(f"{run.inputs['sequences'].reference} has no sequences")
    totals: dict[str, dict[str, int]] = {}
    names: list[str] = []
    for split, paths in partials.items():
        counts: Counter[str] = Counter()
        names = _merge(paths, run, f"{split}.parquet", counts)
        totals[split] = dict(counts)
    missing = {name: why for name, (_, why) in _SOURCES.items() if name not in names}
    run.out.counts |= {"columns": names, "missing": missing, "splits": totals}
    _warn(run, totals, missing)


def _merge(paths: Sequence[Path], run: Run, name: str, counts: Counter[str]) -> list[str]:
    """Partial files to one, and their counts to one; gives the columns."""
    with open(paths[0], "rb") as raw:
        schema = mask_schema(open_parquet(raw).schema_arrow.names)
    with run.out.parquet(name, schema) as writer:
        for table in _groups(paths, counts):
            writer.write_table(table.cast(schema))
    return list(schema.names)


def _groups(paths: Sequence[Path], counts: Counter[str]) -> Iterator[Any]:
    """The rows of partial files in groups that depend on the sequences alone."""
    import pyarrow as pa

    held, size = [], 0
    for path in paths:
        with open(path, "rb") as raw:
            file = open_parquet(raw)
            counts.update(json.loads(file.schema_arrow.metadata[b"counts"]))
            for batch in file.iter_batches(batch_size=1024):
                table, start = pa.Table.from_batches([batch]), 0
                for row, tokens in enumerate(batch.column(0).value_lengths().to_pylist(), start=1):
                    size += tokens
                    if size >= GROUP_TOKENS:
                        held.append(table.slice(start, row - start))
                        yield pa.concat_tables(held).combine_chunks()
                        held, size, start = [], 0, row
                held.append(table.slice(start))
    if size:
        yield pa.concat_tables(held).combine_chunks()


def _warn(run: Run, totals: Mapping[str, Mapping[str, int]], missing: Mapping[str, str]) -> None:
    warnings = []
    for why in dict.fromkeys(missing.values()):
        warnings.append(f"no {', '.join(name for name in missing if missing[name] == why)}: {why}")
    for split, counts in totals.items():
        if counts.get("cut_arcs"):
            warnings.append(
                f"{split}: {counts['cut_arcs']:,} of {counts['arcs']:,} arcs lead out of a sequence and were dropped"
            )
        if counts.get("silent_words"):
            warnings.append(f"{split}: of {counts['silent_words']:,} words the tokenizer has left nothing")
    run.out.warnings += warnings
    for warning in warnings:
        log.warning("%s", warning)


STAGE = Stage("build-masks", "masks", 1, Config, build)
