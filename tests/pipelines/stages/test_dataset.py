"""Examples of tasks: every layout is read completely, and errors name the line."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from guidance.errors import InputError
from guidance.patterns.features import RELATIONS
from pipelines.stages import dataset, idf, masks, sequences, tokenizer
from pipelines.stages.dependencies import dependency_schema
from pipelines.statistics.role_tables import RoleTables
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.storage.tables import TREES
from pipelines.training.labels import are_numbers, says_many_labels
from tests.shared import shared

ROWS = [
    {"id": "7", "first": "The dog ran. It was late.", "second": "A dog runs.", "label": "yes"},
    {"id": "8", "first": 'He said "no".', "second": "007", "label": "no"},
    {"id": "9", "first": "Naïve café 😀", "second": "null", "label": "yes"},
]


def make(store: Store, *train: Path, valid: Path | None = None, test: Path | None = None, **settings: Any) -> Artifact:
    files = {"train": [str(path) for path in train], "valid": [str(valid)] if valid else []}
    files["test"] = [str(test)] if test else []
    return dataset.run(
        files, dataset.Config(**({"valid_fraction": 0.0} if not valid else {}) | settings), store=store
    ).artifact


def documents(artifact: Artifact) -> list[dict[str, Any]]:
    return pq.read_table(artifact.path / "documents.parquet").to_pylist()


def blocks(artifact: Artifact) -> list[dict[str, Any]]:
    return pq.read_table(artifact.path / "blocks.parquet").to_pylist()


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def as_csv(rows: list[dict[str, str]]) -> str:
    quoted = [[value.replace('"', '""') for value in row.values()] for row in rows]
    return "\n".join([",".join(rows[0]), *(",".join(f'"{value}"' for value in row) for row in quoted)]) + "\n"


def as_tsv(rows: list[dict[str, str]], header: bool = True) -> str:
    return "\n".join(["\t".join(rows[0])] * header + ["\t".join(row.values()) for row in rows]) + "\n"


NAMED = {"text_column": "first", "pair_column": "second", "label_column": "label", "id_column": "id"}
NUMBERED = {"text_column": "2", "pair_column": "3", "label_column": "4", "id_column": "1", "header": False}
LAYOUTS: dict[str, tuple[str, str | bytes, dict[str, Any]]] = {
    "csv": ("a.csv", as_csv(ROWS), NAMED),
    "csv, columns by number": ("a.csv", as_csv(ROWS), {**NUMBERED, "header": True}),
    "tsv": ("a.tsv", as_tsv(ROWS), NAMED),
    "tsv without header": ("a.tsv", as_tsv(ROWS, header=False), NUMBERED),
    "tsv under another name": ("a.txt", as_tsv(ROWS), NAMED | {"format": "tsv"}),
    "tsv with a mark": ("a.tsv", "\ufeff" + as_tsv(ROWS), NAMED),
    "tsv with carriage returns": ("a.tsv", as_tsv(ROWS).replace("\n", "\r\n"), NAMED),
    "gzip": ("a.tsv.gz", gzip.compress(as_tsv(ROWS).encode()), NAMED),
    "jsonl": ("a.jsonl", "\n".join(map(json.dumps, ROWS)), NAMED),
    "jsonl with numbers": ("a.jsonl", "\n".join(json.dumps(row | {"id": int(row["id"])}) for row in ROWS), NAMED),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_corpus(layout: str, store: Store, tmp_path: Path) -> None:
    name, content, settings = LAYOUTS[layout]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if layout == "jsonl":  # its ids are strings that look like numbers
        settings = settings | {"id_column": None}
    found = documents(made := make(store, path, **settings))
    assert [row["pair"] for row in found] == [row["second"] for row in ROWS]
    assert [row["label"] for row in found] == [row["label"] for row in ROWS]
    assert [row["id"] for row in found] == (["1", "2", "3"] if layout == "jsonl" else ["7", "8", "9"])
    texts = [(row["document"], row["block"], row["start"], row["text"]) for row in blocks(made)]
    expected = []
    for number, row in enumerate(ROWS):
        expected += [(number, 0, 0, row["first"]), (number, 1, len(row["first"]) + 1, row["second"])]
    assert texts == expected
    assert [len(row["sentences"]) for row in blocks(made)][:2] == [2, 1]
    assert [row["first_sentence"] for row in blocks(made)][:2] == [0, 2]
    assert made.counts["examples"] == {"train": {"no": 1, "yes": 2}}


def test_parquet_labels_may_be_numbers_and_null_texts_are_dropped(store: Store, tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array(["One.", "Two.", None, "Four."]).dictionary_encode(),
            "label": pa.array([1, 0, 1, None], pa.int64()),
            "score": [0.5, 5.0, 1.0, 2.0],
            "gap": [1.0, math.nan, 0.0, math.nan],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    made = make(store, tmp_path / "a.parquet")
    assert [(row["id"], row["label"]) for row in documents(made)] == [("1", "1"), ("2", "0"), ("4", None)]
    assert made.counts["dropped"] == {"null text": 1}
    assert [row["label"] for row in documents(make(store, tmp_path / "a.parquet", label_column="score"))] == [
        *("0.5", "5.0", "2.0")
    ]
    gaps = documents(make(store, tmp_path / "a.parquet", label_column="gap"))
    assert [row["label"] for row in gaps] == ["1.0", None, None], "NaN is how tables of floats write that there is none"


def test_label_text_files_are_read_in_the_encoding_given(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.all", "1 a café film\n0\tdull\n0\n0 \n", "latin-1")
    with pytest.raises(InputError, match=r"'a.all', line 1, byte \d+ of the file: not utf-8"):
        make(store, path, format="label-text")
    made = make(store, path, format="label-text", encoding="latin-1")
    assert [(row["label"], row["id"]) for row in documents(made)] == [("1", "1"), ("0", "2")]
    assert [row["text"] for row in blocks(made)] == ["a café film", "dull"]
    assert made.counts["dropped"] == {"empty text": 2}
    assert any("2 dropped as empty text, first 'a.all', line 3" in warning for warning in made.manifest["warnings"])


def test_files_of_splits_and_their_ids(store: Store, tmp_path: Path) -> None:
    paths = {split: write(tmp_path / f"{split}.tsv", as_tsv(ROWS)) for split in ("train", "valid")}
    test = write(tmp_path / "test.tsv", as_tsv([{k: v for k, v in row.items() if k != "label"} for row in ROWS]))
    made = make(store, paths["train"], valid=paths["valid"], test=test, **NAMED)
    found = documents(made)
    assert [row["id"] for row in found] == [f"{split}/{n}" for split in ("train", "valid", "test") for n in (7, 8, 9)]
    assert [row["split"] for row in found] == ["train"] * 3 + ["valid"] * 3 + ["test"] * 3
    assert [row["label"] for row in found[6:]] == [None] * 3
    assert any("a test file has no labels" in warning for warning in made.manifest["warnings"])
    assert any(
        "an example repeats the text of an earlier one; it was kept: 6 times" in w for w in made.manifest["warnings"]
    )
    with pytest.raises(InputError, match=r"'test.tsv', line 1: no column 'label'; it has 'id', 'first', 'second'"):
        make(store, test, **NAMED)


def test_fractions_divide_one_file_and_equal_texts_stay_together(store: Store, tmp_path: Path) -> None:
    lines = [f"{n % 2}\tText number {n % 150}." for n in range(300)]
    path = write(tmp_path / "a.tsv", "\n".join(["label\ttext", *lines]))
    made = make(store, path, valid_fraction=0.2, test_fraction=0.1)
    assert made.counts["documents"] == 300
    by_text: dict[str, set[str]] = {}
    for row, block in zip(documents(made), blocks(made), strict=True):
        by_text.setdefault(block["text"], set()).add(row["split"])
    assert {len(splits) for splits in by_text.values()} == {1}
    assert 30 < made.counts["splits"]["valid"]["documents"] < 90
    again = make(
        store,
        write(tmp_path / "b.tsv", "\n".join(["label\ttext", *reversed(lines)])),
        valid_fraction=0.2,
        test_fraction=0.1,
    )
    there = {block["text"]: row["split"] for row, block in zip(documents(again), blocks(again), strict=True)}
    assert there == {text: next(iter(splits)) for text, splits in by_text.items()}
    # few examples are split one by one too, not in groups of sentences
    few = make(store, write(tmp_path / "c.tsv", "\n".join(["label\ttext", *lines[:15]])), valid_fraction=0.4)
    assert {row["split"] for row in documents(few)} == {"train", "valid"}


def test_a_fraction_is_one_of_the_training_examples_and_not_of_those_in_a_file_for_testing(
    store: Store, tmp_path: Path
) -> None:
    lines = [f"{n % 2}\tText number {n}." for n in range(300)]
    train, test = (
        write(tmp_path / f"{name}.tsv", "\n".join(["label\ttext", *own]))
        for name, own in (("train", lines[:100]), ("test", lines[100:]))
    )
    made = make(store, train, test=test, valid_fraction=0.2)
    valid = made.counts["splits"]["valid"]["documents"]
    assert 10 <= valid <= 30 and not made.manifest["warnings"], "a fifth of 100; it is less than a tenth of 300"
    few = make(store, train, test=test, valid_fraction=0.01)
    (warning,) = few.manifest["warnings"]
    assert warning.startswith("valid has 0 examples of 100, 0.0% instead of 1%")


def test_a_setting_that_these_files_do_not_have_is_a_warning(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(store, write(tmp_path / "a.tsv", as_tsv(ROWS)), text_column="first", drop_shared=True, min_summary_words=3)
    told = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert told == [
        "--drop-shared has no effect: it is for segments, and these files have examples",
        "--min-summary-words has no effect: it is for summaries, and these files have examples",
    ]


def test_many_labels_are_numbers_and_a_fraction_among_them_says_so(store: Store, tmp_path: Path) -> None:
    whole, fractions = (
        make(
            store,
            write(tmp_path / f"{step}.tsv", "label\ttext\n" + "".join(f"{n * step}\tText {n}\n" for n in range(120))),
        )
        for step in (1, 0.5)
    )
    assert are_numbers(whole.counts) and are_numbers(fractions.counts)
    assert "its 120 labels are too many to be taken for classes" in says_many_labels(whole.counts)
    assert not says_many_labels(fractions.counts)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_fraction_in_place_of_a_file_leads_to_the_setting_of_fractions(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    write(tmp_path / "a.tsv", as_tsv(ROWS))
    monkeypatch.chdir(tmp_path)
    files, config = {"train": ["a.tsv"], split: ["0.2"]}, dataset.Config(text_column="first")
    with pytest.raises(InputError, match=rf"^--{split} takes files, not 0\.2$") as refused:
        dataset.run(files, config, store=store)
    assert str(refused.value.hint).startswith(f"--{split}-fraction 0.2 ")
    write(tmp_path / "0.2", as_tsv(ROWS))
    with pytest.raises(InputError, match=r"'0\.2'"):  # it is a file now, of no known kind
        dataset.run(files, config, store=store)


def test_without_a_validation_file_a_twentieth_of_the_training_examples_is_taken(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", as_tsv(ROWS))
    assert (
        dataset.run({"train": [str(path)]}, dataset.Config(text_column="first"), store=store).artifact.manifest[
            "config"
        ]["valid_fraction"]
        == 0.05
    )
    with pytest.raises(InputError, match="--valid and --valid-fraction exclude each other"):
        make(store, path, valid=path, text_column="first", valid_fraction=0.1)
    with pytest.raises(InputError, match="there are none"):
        dataset.run({"test": [str(path)]}, dataset.Config(text_column="first", valid_fraction=0.1), store=store)
    with pytest.raises(InputError, match="no files were given"):
        dataset.run({}, dataset.Config(), store=store)


def test_texts_of_several_lines_are_one_block(store: Store, tmp_path: Path) -> None:
    record = {"text": "A heading\r\n\r\nA line\n  and another. \n\n\nThe end.", "pair": "\n \n"}
    path = write(tmp_path / "a.jsonl", json.dumps(record) + "\n")
    made = make(store, path, pair_column="pair")
    assert [row["text"] for row in blocks(made)] == ["A heading A line and another. The end."]
    assert documents(made)[0]["pair"] == ""
    lined = blocks(make(store, path, sentences="line"))[0]
    spans = [lined["text"][span["start"] : span["end"]] for span in lined["sentences"]]
    assert spans == ["A heading", "A line", "and another.", "The end."]


def test_a_very_long_text_is_cut_with_a_warning(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "Some words here. " * 10_000, "pair": "p"}))
    made = make(store, path, pair_column="pair")
    assert [row["block"] for row in blocks(made)] == [0, 1]
    assert 90_000 < len(blocks(made)[0]["text"]) <= 100_000
    assert any("a text over 100,000 characters was cut off" in w for w in made.manifest["warnings"])


def test_examples_that_share_their_text_with_training_are_counted(store: Store, tmp_path: Path) -> None:
    train = write(tmp_path / "a.csv", "text,label\nSame text,1\nother,0\n")
    test = write(tmp_path / "b.csv", "text,label\nsame  TEXT,1\nnew,0\nother one,0\n")
    made = make(store, train, test=test)
    assert made.counts["sharing_text"] == {"test": 1}
    assert "test: 1 of 3 examples has the text of a training example" in made.manifest["warnings"]
    words = [write(tmp_path / f"{n}.conll", text) for n, text in enumerate(("a O\nb O\n", "a O\nb O\n\nb O\n"))]
    assert make(store, words[0], test=words[1], format="conll").counts["sharing_text"] == {"test": 1}
    texts = [write(tmp_path / f"{n}.jsonl", '{"text": "A b.", "summary": "a"}\n') for n in range(2)]
    assert make(store, texts[0], test=texts[1], summary_column="summary").counts["sharing_text"] == {"test": 1}


def test_labels_unknown_in_training_are_warned_about_unless_they_are_numbers(store: Store, tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", "label\ttext\na\tone\nb\ttwo\n")
    valid = write(tmp_path / "valid.tsv", "label\ttext\na\tone more\nc\tthree\nc\tfour\n")
    warnings = make(store, train, valid=valid).manifest["warnings"]
    assert "valid: 2 examples have labels that no training example has: 'c'" in warnings
    train = write(tmp_path / "train.tsv", "label\ttext\n0.5\tone\n3\ttwo\n")
    valid = write(tmp_path / "valid.tsv", "label\ttext\n0.25\tone more\n")
    assert not [w for w in make(store, train, valid=valid).manifest["warnings"] if "no training example" in w]


BAD: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "column": ("a.tsv", as_tsv(ROWS), {}, r"line 1: no column 'text'; it has 'id', 'first', 'second', 'label'"),
    "nearly": ("a.tsv", as_tsv(ROWS), {"text_column": "firts"}, r"'label'; did you mean 'first'\?"),
    "number": ("a.tsv", as_tsv(ROWS), {"text_column": "5"}, r"line 1: no column '5'; it has 'id'"),
    "number of 20 digits": (
        "a.tsv",
        as_tsv(ROWS),
        {"text_column": "9" * 20},
        r"line 1: no column '9{20}'; it has 'id'",
    ),
    "number of 5,000 digits": ("a.tsv", as_tsv(ROWS), {"text_column": "9" * 5000}, r"line 1: no column '9"),
    "name without header": (
        "a.tsv",
        as_tsv(ROWS),
        {"header": False},
        r"no column 'text'; without a header columns are numbers",
    ),
    "twice": ("a.tsv", "text\ttext\nx\ty\n", {}, r"line 1: 2 columns are called 'text'"),
    "ragged": ("a.tsv", "text\tlabel\n" + "x\t1\n" * 3 + "x\n" * 7, {}, r"line 5 \(1\), line 6 \(1\).* and 2 more"),
    "open quote": ("a.csv", 'text,label\n"x,1\ny,2\n', {}, r"line 2: .*end of data"),
    "field": ("a.jsonl", '{"text": "a"}\n{"tekst": "b"}\n', {}, r"line 2: no field 'text'; it has 'tekst'"),
    "label field": ("a.jsonl", '{"text": "a"}\n', {"label_column": "y"}, r"line 1: no field 'y'; it has 'text'"),
    "number as text": ("a.jsonl", '{"text": 5}\n', {}, r"line 1: 'text' must be a string, found int"),
    "list as label": (
        "a.jsonl",
        '{"text": "a", "label": [1]}\n',
        {},
        r"line 1: 'label' must be a string or a number, found list",
    ),
    "surrogate": ("a.jsonl", '{"text": "a\\ud800"}\n', {}, r"line 1: unpaired surrogate in 'text'"),
    "list": ("a.jsonl", "[1]\n", {}, r"line 1: expected a JSON object, found list"),
    "not json": ("a.jsonl", "{\n", {}, r"line 1: not JSON"),
    "the same id": (
        "a.tsv",
        "id\ttext\n1\ta\n1\tb\n",
        {"id_column": "id"},
        r"line 3: duplicate id '1', first used at .*line 2",
    ),
    "nothing": ("a.tsv", "", {}, "no records in 'a.tsv'"),
    "a header only": ("a.tsv", "text\tlabel\n", {}, "no records in 'a.tsv'"),
    "only empty texts": ("a.tsv", "text\tlabel\n \t1\n", {}, "no records in 'a.tsv': 1 empty text"),
    "plain text": ("a.txt", "Hello.\n", {}, r"'a.txt': examples cannot be read from text files"),
    "not parquet": ("a.parquet", "text\n", {}, "not Parquet; it looks like plain text"),
}


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("a.csv", "text;label\nx;1\n", "parted by semicolons: write the file with commas, or with tabs as .tsv"),
        ("a.csv", "a film,good\nanother,bad\n", "--no-header --text-column 1 --label-column 2"),
    ],
)
def test_a_missing_column_says_what_the_file_may_be(
    name: str, text: str, hint: str, store: Store, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        make(store, write(tmp_path / name, text))
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("case", BAD)
def test_errors_name_their_cause(case: str, store: Store, tmp_path: Path) -> None:
    name, text, settings, message = BAD[case]
    with pytest.raises(InputError, match=message):
        make(store, write(tmp_path / name, text), **settings)
    assert not list(store.artifacts())


def test_ragged_rows_are_dropped_or_kept_when_asked(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "label\ttext\n1\tone\n1\ttwo\tmore\n1\n0\tthree\n")
    dropped, kept = (make(store, path, ragged=ragged) for ragged in ("drop", "keep"))
    assert [row["text"] for row in blocks(dropped)] == ["one", "three"]
    assert [row["text"] for row in blocks(kept)] == ["one", "two", "three"]
    assert (dropped.counts["dropped"], kept.counts["dropped"]) == (
        {"a row of another length": 2},
        {"a row of another length": 1},
    )


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", as_tsv(ROWS))
    made = [make(Store(tmp_path / f"store-{n}"), path, **NAMED) for n in range(2)]
    assert made[0].files == made[1].files


# later stages


def test_statistics_and_masks_accept_examples(store: Store, tmp_path: Path) -> None:
    made = make(store, write(tmp_path / "a.tsv", as_tsv(ROWS)), **NAMED)
    counted = idf.run(made.reference, None, idf.Config(), store=store)
    assert counted is not None
    table = {row["token"]: row["df"] for row in pq.read_table(counted.artifact.path / "idf.parquet").to_pylist()}
    assert (table["dog"], table["runs"], table["ran"], table["007"]) == (1, 1, 1, 1)
    pieces = tokenizer.run(made.reference, tokenizer.Config(vocab_size=300), store=store)
    packed = sequences.run(made.reference, pieces.reference, sequences.Config(), store=store).artifact
    found = masks.run(packed.reference, masks.Config(idf=counted.reference), store=store)
    assert found is not None and found.artifact.counts["splits"]["train"]["silent_words"] == 0


def test_features_of_an_example_cover_text_and_pair(store: Store, tmp_path: Path) -> None:
    made = make(store, write(tmp_path / "a.tsv", as_tsv(ROWS)), **NAMED)
    counted = idf.run(made.reference, None, idf.Config(), store=store)
    assert counted is not None
    # a tree only for the pair of the first example: A dog runs.
    start = len(ROWS[0]["first"]) + 1
    spans = [(start, start + 1), (start + 2, start + 5), (start + 6, start + 10), (start + 10, start + 11)]
    tree = {
        "document": 0,
        "sentence": 2,
        "start": [s for s, _ in spans],
        "end": [e for _, e in spans],
        "form": ["A", "dog", "runs", "."],
        "lemma": ["a", "dog", "run", "."],
        "upos": ["DET", "NOUN", "VERB", "PUNCT"],
        "head": [1, 2, 2, 2],
        "relation": ["det", "nsubj", "root", "punct"],
        "status": "ok",
    }
    with store.build("deps", digest("tree"), {"stage": "build-deps", "inputs": {}}) as out:
        with out.parquet(TREES, dependency_schema()) as writer:
            writer.write_table(pa.Table.from_pylist([tree], schema=dependency_schema()))
    deps = store.folder("deps", digest("tree"))
    words = ["[UNK]", "[CLS]", "[SEP]", "The", "dog", "ran", "It", "was", "late", ".", "A", "runs", "He", "said"]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    texts = {(row["document"], row["block"]): row["text"] for row in blocks(made)}
    tables = RoleTables(str(made.path), idf=str(counted.artifact.path), deps=str(deps))
    encoding = backend.encode(texts[0, 0], texts[0, 1])
    columns = tables.of_examples([0], [encoding]).columns
    #   [CLS] The dog ran . It was late . [SEP] A dog runs . [SEP]
    assert columns["word"].tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 7, -1, 8, 9, 10, 11, -1]
    assert columns["segment"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert columns["head"].tolist() == [-1] * 10 + [9, 10, 10, 10, -1]
    assert [RELATIONS[n] if n >= 0 else "" for n in columns["relation"]] == [""] * 10 + [
        "det",
        "nsubj",
        "root",
        "punct",
        "",
    ]
    assert (columns["idf"] > 0).tolist() == [n in (1, 2, 3, 5, 6, 7, 11, 12) for n in range(15)]
    # truncated, in one batch, and without a pair: the same as each example alone
    alone = backend.encode(texts[1, 0])
    backend.enable_truncation(13, strategy="only_second")
    short = backend.encode(texts[0, 0], texts[0, 1])
    both = tables.of_examples([0, 1], [short, alone]).columns
    assert both["word"].tolist()[:13] == [*columns["word"].tolist()[:12], -1]
    assert both["head"].tolist()[:13] == [-1] * 10 + [9, -1, -1]
    assert both["word"].tolist()[13:] == tables.of_examples([1], [alone]).columns["word"].tolist()
    assert tables.of_examples([], []).columns["word"].tolist() == []
    with pytest.raises(ValueError, match="must be in increasing order"):
        tables.of_examples([1, 0], [alone, short])
    encoding.truncate(10)
    with pytest.raises(ValueError, match="let the tokenizer truncate"):
        tables.of_examples([0], [encoding])


REAL: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, int]]] = {
    "cls-mr": ({"train": "rt-polarity.all"}, {"format": "label-text", "encoding": "latin-1"}, {"0": 5331, "1": 5331}),
    "glue-mrpc": (
        {"train": "msr_paraphrase_train.txt"},
        {"format": "tsv", "text_column": "#1 String", "pair_column": "#2 String", "label_column": "Quality"},
        {"0": 1323, "1": 2753},
    ),
    "glue-cola": (
        {"train": "in_domain_train.tsv"},
        {"header": False, "text_column": "4", "label_column": "2"},
        {"0": 2528, "1": 6023},
    ),
    "cls-masakhanews": (
        {"train": "orm/dev.tsv.gz"},
        {"quoting": True, "pair_column": "headline", "label_column": "category"},
        {"entertainment": 16, "health": 49, "politics": 50, "sports": 40, "technology": 7},
    ),
}


@pytest.mark.parametrize("folder", REAL)
def test_real_tasks_have_the_expected_examples(folder: str, store: Store) -> None:
    files, settings, expected = REAL[folder]
    place = shared("data") / folder
    made = make(store, place / files["train"], **settings)
    assert made.counts["examples"]["train"] == expected
    chosen = random.Random(5).sample(documents(made), 20)
    texts = {(row["document"], row["block"]): row["text"] for row in blocks(made)}
    assert all(row["pair"] is None or texts.get((row["document"], 1), "") == row["pair"] for row in chosen)
