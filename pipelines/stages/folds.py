"""Stage ``build-fold``: one fold of a cross-validation, as a dataset.

Reads a dataset (corpus@2 by ``build-dataset``) and writes the same examples with other splits: one fold is the test split, a
tenth of the rest the validation split, and what remains the training split.  The fold of an example is a hash of its text,
so that examples with the same text share a fold, and no example moves when others are added.  For multiple choice it is a
hash of what the questions are about.
"""

from __future__ import annotations

from collections import Counter

from pydantic import Field, model_validator

from guidance.errors import InputError, counted
from pipelines.engine import stage
from pipelines.engine.declaration import Command, Stage
from pipelines.engine.stage import Run
from pipelines.inputs import Dataset
from pipelines.lazy import np, pa
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.tables import BLOCKS, DOCUMENTS
from pipelines.text.corpus_files import SPLITS, block_schema, document_schema, fraction_of, read_blocks, text_digests

TRAIN, VALID, TEST = range(len(SPLITS))

VALID_FRACTION = 0.1
"""The share of the other folds that is for validation, unless a command says otherwise."""


class Config(stage.Config):
    """Which fold of how many."""

    folds: int = Field(10, ge=2, le=1000, description="Number of folds.")
    fold: int = Field(0, ge=0, description="The fold that becomes the test split, from 0.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the hash that assigns examples to folds.")
    valid_fraction: float = Field(VALID_FRACTION, ge=0, lt=1, description="Fraction of the other folds for validation.")

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.fold >= self.folds:
            raise ValueError(f"fold {self.fold} of {self.folds}: folds are numbered from 0 to {self.folds - 1}")
        return self


def build(run: Run[Config]) -> None:
    """Write one fold of a dataset.  Raises InputError if there are fewer different texts than folds, or none in this fold."""
    dataset: Artifact = run.inputs["dataset"]
    groups = text_digests(dataset, first_only=dataset.counts.get("shape") == "choices")
    codes = _splits(list(groups.values()), run.config, dataset.reference)
    counts = _write_blocks(run, dataset, codes)
    labels = _write_documents(run, dataset, codes)
    sizes = ("blocks", "sentences", "words", "characters")
    changed = {"splits", "examples", "sharing_test_documents", "sharing_text", *sizes}
    run.out.counts |= {name: value for name, value in dataset.counts.items() if name not in changed}
    for code, count in enumerate(np.bincount(codes, minlength=len(SPLITS)).tolist()):
        counts[SPLITS[code]]["documents"] = count
    names = [SPLITS[code] for code in np.unique(codes)]
    run.out.counts |= {key: sum(counts[name][key] for name in names) for key in sizes}
    run.out.counts["splits"] = {name: dict(counts[name]) for name in names}
    if "examples" in dataset.counts:
        run.out.counts["examples"] = {name: dict(sorted(labels[name].items())) for name in names if labels[name]}
    if dataset.counts.get("shape") == "segments":
        shared = _sharing(dataset, codes)
        run.out.counts["sharing_test_documents"] = shared
        if shared:
            share = counted(shared, "shares", "share", of=f"{counts['test']['documents']:,} test documents")
            run.warn(f"{share} a sentence with a training document: scores are contaminated")


def _splits(groups: list[bytes], config: Config, reference: str) -> np.ndarray:
    """The split of each document, as an index in `SPLITS`."""
    distinct = len(set(groups))
    if distinct < config.folds:
        raise InputError(
            f"{reference} has {counted(distinct, 'different text')}, too few for {config.folds} folds",
            hint="fewer --folds",
        )
    codes = np.empty(len(groups), np.int8)
    for number, group in enumerate(groups):
        fold = int(fraction_of(f"fold {config.seed} {group.hex()}") * config.folds)
        is_valid = fraction_of(f"valid {config.seed} {group.hex()}") < config.valid_fraction
        codes[number] = TEST if fold == config.fold else VALID if is_valid else TRAIN
    for code in (TRAIN, TEST):
        if not (codes == code).any():
            raise InputError(
                f"{reference}: fold {config.fold} of {config.folds} leaves no example for {SPLITS[code]}",
                hint="fewer --folds, or another --seed",
            )
    return codes


def _write_blocks(run: Run[Config], dataset: Artifact, codes: np.ndarray) -> dict[str, Counter[str]]:
    """Copy the blocks with their new splits; returns the counts of each split."""
    schema = block_schema()
    index = schema.get_field_index("split")
    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    with run.out.parquet(BLOCKS, schema) as writer:
        for batch in read_blocks(dataset, schema.names):
            split = codes[batch.column("document").to_numpy()]
            column = pa.DictionaryArray.from_arrays(pa.array(split, pa.int8()), pa.array(SPLITS))
            table = pa.Table.from_batches([batch])
            writer.write_table(table.set_column(index, schema.field(index), column))
            texts, sentences = table["text"].to_pylist(), table["sentences"].to_pylist()
            for code, text, spans in zip(split.tolist(), texts, sentences, strict=True):
                own = {"blocks": 1, "sentences": len(spans), "words": len(text.split()), "characters": len(text)}
                counts[SPLITS[code]].update(own)
    return counts


def _write_documents(run: Run[Config], dataset: Artifact, codes: np.ndarray) -> dict[str, Counter[str]]:
    """Copy the documents with their new splits; returns the labels of each split."""
    schema = document_schema()
    with dataset.open(DOCUMENTS) as raw:
        table = open_parquet(raw).read()
    index = schema.get_field_index("split")
    names = [SPLITS[code] for code in codes.tolist()]
    with run.out.parquet(DOCUMENTS, schema) as writer:
        writer.write_table(table.set_column(index, schema.field(index), pa.array(names)).cast(schema))
    labels: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    for name, label in zip(names, table["label"].to_pylist(), strict=True):
        if label is not None:
            labels[name].update(label.split() if dataset.counts.get("shape") == "tags" else [label])
    return labels


def _sharing(dataset: Artifact, codes: np.ndarray) -> int:
    """How many test documents have a sentence that a training document has, too."""
    own: list[set[str]] = [set() for _ in codes]
    for batch in read_blocks(dataset, ["document", "text", "sentences"]):
        for document, text, spans in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            own[document].update(text[span["start"] : span["end"]] for span in spans)
    known = set[str]().union(*(own[number] for number in np.flatnonzero(codes == TRAIN)))
    return sum(not known.isdisjoint(own[number]) for number in np.flatnonzero(codes == TEST))


STAGE = Stage(
    "build-fold",
    "corpus",
    1,
    Config,
    build,
    takes={"dataset": Dataset()},
    command=Command(
        "build-fold",
        """Take one fold of a cross-validation as test split, a tenth of the other folds for validation, and the rest to train.

        The fold of an example depends on its text alone: examples with the same text share a fold, and no example moves when
        others are added.  `guide search --folds` trains and tests on all folds.
        """,
        examples=(
            "guide build-fold reviews --folds 10 --fold 3",
            "for f in $(seq 0 9); do guide finetune $(guide build-fold reviews --fold $f); done",
        ),
        next="guide finetune {}",
    ),
)

run = STAGE.run
