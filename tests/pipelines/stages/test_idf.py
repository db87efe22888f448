"""``build-idf``, compared with plain loops over the text, for any shards and executor."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from guidance.errors import InputError
from pipelines.stages import corpus, dataset, idf, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.storage.store import Store

WORDS = [
    "cat",
    "dog",
    "don't",
    "mother-in-law",
    "x",
    "3.14",
    "Straße",
    "naïve",
    "The",
    "the",
    "it's",
    "42",
    "ok",
    "İstanbul",
    "हिन्दी",
]


def make_corpus(store: Store, tmp_path: Path, number: int = 40, **settings: Any) -> Artifact:
    """Documents of one to five blocks with one to four sentences each."""
    folder = tmp_path / "text"
    folder.mkdir(exist_ok=True)
    turn = itertools.count()

    def sentence() -> str:
        return " ".join(WORDS[next(turn) ** 2 % 13 + next(turn) % 3] for _ in range(next(turn) % 6 + 1)).capitalize()

    for n in range(number):
        blocks = [". ".join(sentence() for _ in range(1 + (n + k) % 4)) + "." for k in range(1 + n % 5)]
        (folder / f"{n:03}.txt").write_text("\n\n".join([f"Number {n}.", *blocks]))
    return corpus.run([str(folder)], corpus.Config(**({"valid": 0.2} | settings)), store=store).artifact


def table_of(result: Any) -> dict[str, tuple[int, float]]:
    table = pq.read_table(result.artifact.path / "idf.parquet")
    assert table.schema.equals(idf.idf_schema())
    rows = table.to_pylist()
    assert [row["token"] for row in rows] == sorted({row["token"] for row in rows})
    return {row["token"]: (row["df"], row["idf"]) for row in rows}


def units_of(text: Artifact, unit: str) -> list[list[str]]:
    """The texts of each unit of the training split, found with plain loops."""
    found: dict[Any, list[str]] = {}
    for row in pq.read_table(text.path / "blocks.parquet").to_pylist():
        if row["split"] != "train":
            continue
        if unit == "document":
            found.setdefault(row["document"], []).append(row["text"])
            continue
        for number, span in enumerate(row["sentences"]):
            key = (row["document"], row["first_sentence"] + number)
            found.setdefault(key, []).append(row["text"][span["start"] : span["end"]])
    return list(found.values())


def plain_words(text: str) -> list[str]:
    """Runs of letters and marks, found with one regular expression."""
    runs = re.findall(r"[\w\u0300-\u036f\u0900-\u0963]{2,}", text)
    return [run.lower() for run in runs]


@pytest.mark.parametrize("unit", ["document", "sentence"])
def test_counts_of_words_match_plain_loops(unit: str, store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, tmp_path)
    units = units_of(text, unit)
    expected = Counter(word for parts in units for word in {w for part in parts for w in plain_words(part)})
    result = idf.run(text.reference, None, idf.Config(unit=unit), store=store)
    assert result is not None
    n = len(units)
    found = table_of(result)
    assert {word: df for word, (df, _) in found.items()} == expected
    for df, value in found.values():
        assert value == pytest.approx(math.log((1 + n) / (1 + df)) + 1, rel=1e-14)
    counts = result.artifact.counts
    assert (counts["documents"], counts["tokens"], counts["unit"], counts["of"]) == (n, len(expected), unit, "words")
    assert idf.STAGE.command.show(result.artifact, idf.Config()).notes == [
        f"{n:,} {unit}s, {len(expected):,} different words"
    ]


@pytest.mark.parametrize("kind", ["byte-bpe", "wordpiece"])
@pytest.mark.parametrize("unit", ["document", "sentence"])
def test_counts_of_tokens_match_plain_loops(unit: str, kind: str, store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, tmp_path)
    made = tokenizer.run(
        text.reference, tokenizer.Config(kind=kind, vocab_size=330, min_frequency=1), store=store
    ).artifact
    opened = Tokenizer.from_file(str(made.path / "tokenizer.json"))
    expected: Counter[str] = Counter()
    seen: dict[Any, set[str]] = {}
    for row in pq.read_table(text.path / "blocks.parquet").to_pylist():
        if row["split"] != "train":
            continue
        encoding = opened.encode(row["text"], add_special_tokens=False)
        for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
            sentence = sum(span["start"] <= max(end - 1, start) for span in row["sentences"]) + row["first_sentence"]
            seen.setdefault((row["document"], sentence if unit == "sentence" else 0), set()).add(token)
    expected.update(token for tokens in seen.values() for token in tokens)
    result = idf.run(text.reference, made.reference, idf.Config(unit=unit, shard_size=300), store=store)
    assert result is not None
    assert {token: df for token, (df, _) in table_of(result).items()} == expected
    assert result.artifact.counts["documents"] == len(units_of(text, unit))
    assert result.artifact.counts["of"] == "tokens"
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in made.files:
        (folder / name).write_bytes((made.path / name).read_bytes())
    again = idf.run(text.reference, str(folder), idf.Config(unit=unit), store=store)
    assert again is not None
    assert again.artifact.content == result.artifact.content


@pytest.mark.parametrize("unit", ["document", "sentence"])
def test_the_table_does_not_depend_on_shards_and_executors(
    unit: str, store: Store, tmp_path: Path, every: bool
) -> None:
    """Without ``--every`` only on shards: `test_statistics` has all statistics on two processes and on Dask."""
    text = make_corpus(store, tmp_path)
    contents = set()
    settings: list[dict[str, Any]] = [{"shard_size": size} for size in (1, 97, 400, 10**7)]
    if every:
        settings += [{"jobs": 2, "shard_size": 300}, {"executor": "dask", "jobs": 2, "shard_size": 500}]
    for given in settings:
        result = idf.run(text.reference, None, idf.Config(unit=unit, **given), store=store, force=True)
        assert result is not None
        contents.add(result.artifact.content)
    assert len(contents) == 1


def test_document_larger_than_many_shards_is_counted_once(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "long.txt").write_text("\n\n".join(f"again and again block{n}" for n in range(200)))
    (folder / "short.txt").write_text("again it ends")
    text = corpus.run([str(folder)], corpus.Config(valid=0.0), store=store).artifact
    result = idf.run(text.reference, None, idf.Config(shard_size=1), store=store)
    assert result is not None
    found = table_of(result)
    assert (found["again"][0], found["and"][0], found["block7"][0], found["ends"][0]) == (2, 1, 1, 1)
    assert result.artifact.counts["documents"] == 2


def test_few_documents_give_a_warning(store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, tmp_path)
    result = idf.run(text.reference, None, idf.Config(), store=store)
    assert result is not None
    assert "--unit sentence" in result.artifact.manifest["warnings"][0]


def test_rare_words_can_be_left_out_and_formulas_chosen(store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, tmp_path)
    whole = idf.run(text.reference, None, idf.Config(unit="sentence"), store=store)
    common = idf.run(text.reference, None, idf.Config(unit="sentence", min_df=3, formula="max"), store=store)
    assert whole is not None and common is not None
    frequent = {word: df for word, (df, _) in table_of(whole).items() if df >= 3}
    assert {word: df for word, (df, _) in table_of(common).items()} == frequent
    assert 0 < len(frequent) < len(table_of(whole))
    assert common.artifact.counts["documents"] == whole.artifact.counts["documents"]
    for df, value in table_of(common).values():
        assert value == pytest.approx(math.log(max(frequent.values()) / df), abs=1e-14)


def test_labelled_examples_are_documents_and_a_pair_belongs_to_its_text(store: Store, tmp_path: Path) -> None:
    rows = [{"text": "good film", "pair": "good idea", "label": "1"}, {"text": "bad film", "pair": "it", "label": "0"}]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = dataset.Config(pair_column="pair", valid_fraction=0.0)
    text = dataset.run({"train": [str(path)]}, config, store=store).artifact
    result = idf.run(text.reference, None, idf.Config(shard_size=1), store=store)
    assert result is not None
    assert {word: df for word, (df, _) in table_of(result).items()} == {
        "bad": 1,
        "film": 2,
        "good": 1,
        "idea": 1,
        "it": 1,
    }
    assert result.artifact.counts["documents"] == 2


def test_text_without_words_gives_an_empty_table(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("... ! a b")
    text = corpus.run([str(tmp_path / "a.txt")], corpus.Config(valid=0.0), store=store).artifact
    result = idf.run(text.reference, None, idf.Config(), store=store)
    assert result is not None
    assert table_of(result) == {}
    assert result.artifact.counts["documents"] == 1
    assert "nothing was counted" in " ".join(result.artifact.manifest["warnings"])


def test_corpus_without_training_text_is_refused(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(f"Some text here, {n}." for n in range(20)))
    text = corpus.run([str(path)], corpus.Config(documents="line", valid=0.9999), store=store).artifact
    assert set(pq.read_table(text.path / "blocks.parquet")["split"].to_pylist()) == {"valid"}
    with pytest.raises(InputError, match="no training text"):
        idf.run(text.reference, None, idf.Config(), store=store)


def test_wrong_inputs_are_refused_by_name(store: Store, tmp_path: Path, guide: Any) -> None:
    text = make_corpus(store, tmp_path, 3)
    result = idf.run(text.reference, None, idf.Config(), store=store)
    assert result is not None
    with pytest.raises(ArtifactMismatch, match="expected: corpus"):
        idf.run(result.artifact.reference, None, idf.Config(), store=store)
    with pytest.raises(ArtifactMismatch, match="expected: tokenizer"):
        idf.run(text.reference, text.reference, idf.Config(), store=store)
    for wrong in (["--unit", "word"], ["--min-df", "0"], ["--shard", "4/3"], ["--executor", "spark"], ["--jobs", "0"]):
        answer = guide("build-idf", text.reference, *wrong)
        assert answer.code == 2, answer.err
        assert wrong[0] in answer.err
        assert answer.out == ""


def test_the_command_names_the_next_one_and_shares_print_nothing(store: Store, tmp_path: Path, guide: Any) -> None:
    text = make_corpus(store, tmp_path)
    share = guide("build-idf", text.reference, "--shard", "1/2", "--shard-size", 500)
    assert (share.code, share.out) == (0, "")
    assert "--shard 1/2" in share.err
    assert "unfinished" in guide("ls").out
    done = guide("build-idf", text.reference, "--shard-size", 500, "--json")
    assert json.loads(done.out)["counts"]["unit"] == "document"
    assert f"next: guide build-tokenizer {text.reference}\n" in done.err
    assert "up to date" in guide("build-idf", text.reference).err
    assert "unfinished" not in guide("ls").out


def test_merging_reads_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idf, "ROWS", 7)
    expected: Counter[str] = Counter()
    paths = []
    for part in range(5):
        rows = {f"w{n:03}": n % 4 + 1 for n in range(part * 13, 100, part + 1)}
        expected.update(rows)
        path = tmp_path / f"{part}.parquet"
        schema = idf._partial_schema(part)
        table = pa.table([list(rows), list(rows.values())], schema=schema)
        with idf.parquet_file(path, schema) as file:
            file.write_table(table, row_group_size=7)
        paths.append(path)
    empty = tmp_path / "empty.parquet"
    with idf.parquet_file(empty, idf._partial_schema(3)) as file:
        file.write_table(idf._partial_schema(3).empty_table())
    idf.merge([empty, *paths, empty], {}, tmp_path / "merged.parquet")
    merged = pq.ParquetFile(tmp_path / "merged.parquet")
    rows = merged.read().to_pylist()
    assert {row["token"]: row["df"] for row in rows} == expected
    assert [row["token"] for row in rows] == sorted(expected)
    assert idf._units(tmp_path / "merged.parquet") == 0 + 1 + 2 + 3 + 4 + 3 + 3
    assert {merged.metadata.row_group(n).num_rows for n in range(merged.num_row_groups - 1)} == {7}
