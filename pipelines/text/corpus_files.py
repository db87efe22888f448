"""The two tables of a corpus, ``blocks.parquet`` and ``documents.parquet``: their columns, and reading them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from pipelines.engine.declaration import Opening
from pipelines.lazy import pa, pc
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.storage.tables import BLOCKS, DOCUMENTS, schema_of

SPLITS = ("train", "valid", "test")
PAIR = "_pair"
"""Ends the role of an input of a dataset that is the other side of parallel text."""

DOCUMENT_BATCH = 1024
"""Blocks that `whole_documents` reads at once."""

BLOCK_OF_COLUMN = {"text": 0, "pair": 1}
"""Which block of a task's example holds which of its two texts."""


CountedColumn = Annotated[
    Literal["both", "text", "pair"],
    Field(description="Text to count, for examples with two texts.  In translation data the source is text."),
]


def check_column(opening: Opening[Any]) -> None:
    """Raises ArtifactMismatch when a column is to be counted and the corpus does not have two texts everywhere."""
    if opening.config.column != "both":
        check_pairs(opening.inputs["corpus"])


def fraction_of(key: str) -> float:
    """A number in [0, 1) that depends only on the key, so a document gets the same split in every corpus."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def split_of(key: str, valid: float, test: float) -> str:
    """The split of a document, given its id."""
    fraction = fraction_of(key)
    return "valid" if fraction < valid else "test" if fraction < valid + test else "train"


def block_schema() -> Any:
    """Columns of ``blocks.parquet``; the metadata of each field says its unit."""
    span = pa.struct([pa.field("start", pa.int32(), False), pa.field("end", pa.int32(), False)])
    return schema_of(
        {
            "document": ("int64", "row in documents.parquet"),
            "block": ("int32", "running number in the document"),
            "split": (pa.dictionary(pa.int8(), pa.string()), "train, valid or test"),
            "start": ("int64", "code points before it in the document, blocks being joined by one newline"),
            "first_sentence": ("int32", "running number in the document of its first sentence"),
            "text": ("string", "NFC"),
            "sentences": (pa.list_(pa.field("element", span, False)), "code points in text, end exclusive"),
        }
    )


def document_schema() -> Any:
    """Columns of ``documents.parquet``."""
    columns = {
        "document": ("int64", "row number"),
        "id": ("string", "unique; a digest of the text where the source has none"),
        "source": ("string", "name of the file"),
        "blocks": ("int32", "count"),
        "sentences": ("int64", "count"),
        "characters": ("int64", "code points, without the newlines between blocks"),
        "split": ("string", "train, valid or test; mixed when its blocks differ"),
        "pair": ("string", "second text of a task's example"),
        "label": ("string", "label of a task's example"),
    }
    return schema_of(columns, may_be_null=("pair", "label"))


def read_blocks(corpus: Artifact, columns: Iterable[str], *, batch: int = 2048) -> Iterator[Any]:
    """Record batches of ``blocks.parquet``, in order.  Raises ArtifactMismatch if a column is missing, occurs twice, has
    another type or has nulls."""
    columns = list(columns)
    with corpus.open(BLOCKS) as raw:
        try:
            file = open_parquet(raw)
            for name in columns:
                wanted = block_schema().field(name)
                types = [str(field.type) for field in file.schema_arrow if field.name == name]
                if types != [str(wanted.type)]:
                    raise ArtifactMismatch(
                        f"{corpus.path / BLOCKS}: column {name!r} is {types or 'missing'}, expected {wanted.type}"
                    )
            for record_batch in file.iter_batches(batch_size=batch, columns=columns):
                if any(values.null_count for values in record_batch.columns):
                    raise ArtifactMismatch(f"{corpus.path / BLOCKS}: a column has nulls, which are not allowed")
                yield record_batch
        except pa.ArrowException as error:
            raise ArtifactMismatch(f"{corpus.path / BLOCKS}: unreadable ({str(error)[:160]!r})") from error


def text_digest(texts: Iterable[str]) -> bytes:
    """A digest of the blocks of a document, without differences of case and white space."""
    sha256 = hashlib.sha256()
    for text in texts:
        sha256.update(" ".join(text.casefold().split()).encode() + b"\n")
    return sha256.digest()


def text_digests(corpus: Artifact, *, first_only: bool = False, split: str | None = None) -> dict[int, bytes]:
    """The `text_digest` of each document of a split, or of all, by its row; perhaps of its first block alone."""
    texts: dict[int, list[str]] = {}
    for batch in read_blocks(corpus, ["document", "block", "split", "text"]):
        splits = batch.column("split").cast("string").to_pylist()
        columns = (batch.column(name).to_pylist() for name in ("document", "block", "text"))
        for own, document, block, text in zip(splits, *columns, strict=True):
            if split in (None, own) and (block == 0 or not first_only):
                texts.setdefault(document, []).append(text)
    return {document: text_digest(own) for document, own in texts.items()}


def whole_documents(corpus: Artifact) -> Iterator[Any]:
    """The blocks of a corpus, in tables of whole documents."""
    pending: list[Any] = []
    columns = ["document", "block", "split", "start", "first_sentence", "text", "sentences"]
    for batch in read_blocks(corpus, columns, batch=DOCUMENT_BATCH):
        table = pa.Table.from_batches([batch])
        split = table.column_names.index("split")
        table = pa.concat_tables([*pending, table.set_column(split, "split", table["split"].cast(pa.string()))])
        documents = table["document"].to_numpy()
        last = int(documents.searchsorted(documents[-1]))
        pending = [table.slice(last)]
        if last:
            yield table.slice(0, last)
    yield from pending


def training_blocks(blocks: Any, number: int | None = None) -> Any:
    """The rows of a table of blocks that belong to the training split; perhaps only those with a number, see `BLOCK_OF_COLUMN`."""
    chosen = pc.equal(blocks["split"].cast("string"), "train")
    return blocks.filter(chosen if number is None else pc.and_(chosen, pc.equal(blocks["block"], number)))


def is_parallel(corpus: Artifact) -> bool:
    """Whether a dataset was built from parallel files."""
    return any(role.endswith(PAIR) for role in corpus.manifest["inputs"])


def check_pairs(corpus: Artifact) -> None:
    """Raise ArtifactMismatch unless every document of the corpus is an example with two texts."""
    with corpus.open(DOCUMENTS) as raw:
        try:
            batches = open_parquet(raw).iter_batches(columns=["pair"])
            if not any(batch.column(0).null_count for batch in batches):
                return
        except (pa.ArrowException, KeyError) as error:
            raise ArtifactMismatch(f"{corpus.path / DOCUMENTS}: unreadable ({str(error)[:160]!r})") from error
    raise ArtifactMismatch(
        f"{corpus.reference} has documents without a second text",
        hint="build it with: guide build-dataset --train-pair FILE, or --pair-column NAME",
    )
