"""``docs/tables.md`` says what the tables are, and its examples run, whatever the library, with one answer."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from guidance.statistics.roles import COLUMNS
from pipelines.stages import (
    STAGES,
    cooccurrence,
    corpus,
    idf,
    masks,
    sequences,
    tokenizer,
)
from pipelines.stages.dependencies import dependency_schema
from pipelines.stages.masks import mask_schema
from pipelines.stages.search import run_schema
from pipelines.storage.store import Store
from pipelines.storage.tables import schema_of
from pipelines.text.corpus_files import block_schema, document_schema
from pipelines.text.sequence_files import document_schema as document_sequence_schema
from pipelines.text.sequence_files import pair_schema, sequence_schema, word_schema
from pipelines.training.learners.causal_scores import OF_NEXT_WORDS
from pipelines.training.learners.masked_scores import OF_PAIRS, OF_TOKENS, OF_WORDS
from pipelines.training.learners.task_scores import prediction_schema
from pipelines.training.learners.translation_scores import prediction_schema as translation_schema
from pipelines.training.learners.word_scores import score_schema
from pipelines.training.tasks.segmentation import boundary_fields
from pipelines.training.tasks.summarization import summary_fields
from tests import trainings

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "tables.md").read_text(encoding="utf-8")
SCHEMAS = {
    "blocks.parquet": block_schema(),
    "documents.parquet": document_schema(),
    "train.parquet of sequences": sequence_schema(),
    "train.parquet of pairs": pair_schema(),
    "train.parquet of examples": word_schema(),
    "train.parquet of documents": document_sequence_schema(),
    "train.parquet of masks": mask_schema(list(COLUMNS)),
    "predictions.parquet of translation": translation_schema(),
    "predictions.parquet of masked words": score_schema(OF_WORDS),
    "predictions.parquet of next sentences": score_schema(OF_PAIRS),
    "predictions.parquet of replaced tokens": score_schema(OF_TOKENS),
    "predictions.parquet of next words": score_schema(OF_NEXT_WORDS),
    "predictions.parquet of tasks": prediction_schema(),
    "predictions.parquet of summaries": pa.schema([*prediction_schema(), *summary_fields()]),
    "predictions.parquet of sections": pa.schema([*prediction_schema(), *boundary_fields()]),
    "runs.parquet": run_schema(),
    **{title: schema_of(columns) for stage in map(resolve_name, STAGES) for title, columns in stage.writes.items()},
}
LIBRARIES = ("pyarrow", "pandas", "polars", "duckdb")
SECTIONS = {part.splitlines()[0]: part for part in re.split(r"^## ", PAGE, flags=re.M)[1:]}
EXAMPLES = {title: re.findall(r"```python\n# (\w+)\n(.*?)```", part, re.S) for title, part in SECTIONS.items()}


def spelled(kind: Any) -> str:
    """A type as the page writes it."""
    if pa.types.is_list(kind):
        return f"list<{spelled(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {spelled(field.type)}' for field in kind)}>"
    if pa.types.is_dictionary(kind):
        return f"dictionary<{spelled(kind.value_type)}>"
    return str(kind)


def test_every_table_has_its_section() -> None:
    assert sorted(re.findall(r"^### (.*)", PAGE, re.M)) == sorted(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_columns_types_and_units_are_those_of_the_code(name: str) -> None:
    section = PAGE.split(f"\n### {name}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", section, re.M)
    assert rows == [(f.name, spelled(f.type), f.metadata[b"unit"].decode()) for f in SCHEMAS[name]]


@pytest.mark.parametrize(
    "settings",
    [{"plan": "preset:ag"}, {"plan": "preset:asa-pretraining"}, {"objective": "electra"}],
    ids=["guided", "attacked", "electra"],
)
def test_every_metric_column_is_described(settings: dict[str, Any], tmp_path: Path) -> None:
    store = Store(tmp_path)
    trained = trainings.train(store, trainings.sequences(store), steps=2, evaluate_every=1, **settings).artifact
    columns = re.findall(r"^\| (`.*?) \| ", SECTIONS["Training"], re.M)
    described = [re.sub("<.*?>", ".+", re.escape(name)) for cell in columns for name in re.findall("`(.*?)`", cell)]
    found = pq.read_schema(trained.path / "metrics.parquet").names
    assert [name for name in found if not any(re.fullmatch(pattern, name) for pattern in described)] == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small artifacts, under the names of the page."""
    place = tmp_path_factory.mktemp("tables")
    store = Store(place / "store")
    sentences = [f"The {a} cat {b} the {c} dog." for a in ("old", "wet") for b in ("saw", "bit") for c in "xyz"]
    text = "\n\n".join(" ".join(sentences[n : n + 3]) for n in range(len(sentences)))
    (place / "a.txt").write_text(text)
    (place / "b.txt").write_text("Another text, by somebody else. It ends.")
    made = {"CORPUS": corpus.run([str(place / "a.txt"), str(place / "b.txt")], corpus.Config(valid=0.0), store=store)}
    of = made["CORPUS"].reference
    pieces = tokenizer.run(of, tokenizer.Config(kind="wordpiece", vocab_size=200, min_frequency=1), store=store)
    made["SEQUENCES"] = sequences.run(of, pieces.reference, sequences.Config(max_length=32), store=store)
    for name, result in {
        "IDF": idf.run(of, None, idf.Config(unit="sentence"), store=store),
        "COOCCUR": cooccurrence.run(of, pieces.reference, cooccurrence.Config(top=20), store=store),
    }.items():
        assert result is not None
        made[name] = result
    config = masks.Config(idf=made["IDF"].reference)
    result = masks.run(made["SEQUENCES"].reference, config, store=store)
    assert result is not None
    made["MASKS"] = result
    for name, result in made.items():
        (place / name).symlink_to(result.artifact.path)
    (place / "DEPS").mkdir()
    trees = [
        [0, 0, [0, 4, 8], [3, 7, 11], ["The", "cat", "sat"], ["the", "cat", "sit"], ["DET", "NOUN", "VERB"]],
        [0, 1, [], [], [], [], []],
        [0, 2, [20, 23], [22, 26], ["It", "ran"], ["it", "run"], ["PRON", "VERB"]],
    ]
    arcs: list[list[Any]] = [[[1, 2, 2], ["det", "nsubj", "root"]], [[], []], [[1, 1], ["nsubj", "root"]]]
    rows = [[*tree, *arc, "ok" if arc[0] else "too long"] for tree, arc in zip(trees, arcs, strict=True)]
    columns = [
        pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), dependency_schema(), strict=True)
    ]
    pq.write_table(pa.table(columns, schema=dependency_schema()), place / "DEPS" / "deps.parquet")
    return place


def rows_of(found: Any) -> list[tuple[Any, ...]]:
    """What an example found, as rows of plain values."""
    if isinstance(found, pa.Table):
        return [tuple(row.values()) for row in found.to_pylist()]
    if hasattr(found, "itertuples"):
        return [tuple(row) for row in found.itertuples(index=False)]
    return list(found.rows() if hasattr(found, "rows") else found.fetchall())


@pytest.mark.parametrize("title", [title for title, found in EXAMPLES.items() if found])
def test_examples_run_and_agree(title: str, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)
    assert [library.lower() for library, _ in EXAMPLES[title]] == list(LIBRARIES)
    answers = {}
    for library, code in EXAMPLES[title]:
        try:
            importlib.import_module(library.lower())
        except ImportError:
            continue
        names: dict[str, Any] = {}
        exec(compile(code, f"{title}, {library}", "exec"), names)
        answers[library] = rows_of(names["found"])
    assert answers["pyarrow"]
    for library, answer in answers.items():
        assert answer == answers["pyarrow"], library


def test_every_library_is_there_in_continuous_integration() -> None:
    if not os.environ.get("CI"):
        pytest.skip("only where the dev extra is installed as a whole")
    assert all(importlib.import_module(library).__version__ for library in LIBRARIES)
