"""Pair counts match plain loops, do not depend on shards, and give tables for their own tokenizer only."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

import guidance
from guidance.errors import InputError
from guidance.statistics.cooccurrence import context_scores
from pipelines.engine.shards import parquet_file, shards_of
from pipelines.stages import corpus, dataset, sequences, tokenizer
from pipelines.stages.cooccurrence import Config, run
from pipelines.statistics import pair_counting, pair_files
from pipelines.statistics.cooccurrence_table import Counts, check_tokenizer, load_table
from pipelines.statistics.pair_files import count_schema, merge_pairs
from pipelines.storage import removal
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch, ArtifactMissing
from pipelines.storage.store import Store
from pipelines.views import contexts
from tests.shared import shared

ROOT = Path(__file__).resolve().parents[3]
Pairs = dict[tuple[int, int], int]


def pairs_of(found: Any) -> Pairs:
    """Counts as a dictionary; checks that pairs are sorted, unique, not below the diagonal, and have a count above 0."""
    pairs: Pairs = {}
    last = (-1, -1)
    for i, j, count in found:
        for pair in zip(i.tolist(), j.tolist(), count.tolist(), strict=True):
            assert last < pair[:2] and pair[0] <= pair[1] and pair[2] > 0
            last = pair[:2]
            pairs[last] = pair[2]
    return pairs


def looped(units: list[list[int]], size: int, window: int | None = None, presence: bool = False) -> Pairs:
    """Counts ordered pairs of distinct positions one by one; rows from ``size`` on are not counted."""
    pairs: Counter[tuple[int, int]] = Counter()
    for unit in units:
        tokens = sorted(set(unit)) if presence else unit
        for (p, i), (q, j) in itertools.permutations(enumerate(tokens), 2):
            if i <= j < size and (window is None or abs(p - q) <= window):
                pairs[i, j] += 1
    return dict(pairs)


# the compiled loops


@pytest.mark.parametrize(
    ("window", "presence"), [(None, False), (None, True), (1, False), (2, False), (5, False), (1000, False)]
)
@pytest.mark.parametrize("size", [1, 4, 30])
def test_compiled_counts_match_plain_loops(
    size: int, window: int | None, presence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(size)
    for occurrences, capacity in ((1 << 20, 1 << 20), (7, 3)):
        monkeypatch.setattr(pair_counting, "OCCURRENCES", occurrences)
        monkeypatch.setattr(pair_counting, "CAPACITY", capacity)
        for _ in range(5):
            lengths = random.choice([0, 1, 2, 3, 9, 40], 12)
            units = [random.integers(0, size + 1, length).tolist() for length in lengths]
            rows = np.array([row for unit in units for row in unit], np.uint16)
            before = rows.copy()
            offsets = np.concatenate([[0], lengths]).cumsum()
            found = pairs_of(pair_counting.count_pairs(rows, offsets, size, window=window, presence=presence))
            assert found == looped(units, size, window, presence)
            assert (rows == before).all()


def test_empty_text_gives_no_pairs() -> None:
    assert pairs_of(pair_counting.count_pairs(np.empty(0, np.uint16), np.array([0]), 3)) == {}
    assert pairs_of(pair_counting.count_pairs(np.empty(0, np.uint16), np.array([0, 0, 0]), 3, window=2)) == {}


def test_too_many_rows_are_refused() -> None:
    assert Config(top=pair_counting.MOST_ROWS)
    with pytest.raises(ValueError, match="no more than"):
        next(pair_counting.count_pairs(np.empty(0, np.uint16), np.array([0]), pair_counting.MOST_ROWS + 1))


def test_the_cost_of_a_long_sentence_depends_on_its_vocabulary_not_its_length() -> None:
    # 10^13 pairs of positions, too many to visit: only counting distinct tokens is feasible
    length = 3_000_000
    rows = (np.arange(length) % 3).astype(np.uint16)
    found = pairs_of(pair_counting.count_pairs(rows, np.array([0, length]), 3))
    each = length // 3
    assert found == {
        (i, j): each * each if i < j else each * (each - 1) for i in range(3) for j in range(i, 3)
    }  # fmt: skip


def test_frequent_tokens_come_first_and_ties_are_ordered_by_id() -> None:
    counts = np.array([9, 0, 5, 7, 5, 9, 5])
    assert pair_counting.most_frequent(counts, 4).tolist() == [0, 5, 3, 2]
    assert pair_counting.most_frequent(counts, 4, exclude=[0, 3]).tolist() == [5, 2, 4, 6]
    assert pair_counting.most_frequent(counts, 99).tolist() == [0, 5, 3, 2, 4, 6]
    assert counts.tolist() == [9, 0, 5, 7, 5, 9, 5]


def test_compiled_code_is_cached_only_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = pair_counting.cache_folder()
    assert folder == tmp_path / "cache" / "attention-guide" / "compiled" and folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o770)
    assert pair_counting.cache_folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("in the way")
    assert pair_counting.cache_folder() is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cache", ["cache", "in the way"])
def test_counting_writes_nothing_beside_the_sources(cache: str, tmp_path: Path) -> None:
    (tmp_path / "in the way").write_text("no folder")
    program = (
        "import numpy as np\n"
        "from pipelines.statistics.pair_counting import count_pairs\n"
        "assert [c.tolist() for *_, c in count_pairs(np.array([0, 1, 0], np.uint16), np.array([0, 3]), 2)] == [[2, 2]]\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / cache), "PYTHONPATH": str(ROOT)}
    environment.pop("NUMBA_CACHE_DIR", None)
    before = set(ROOT.glob("pipelines/**/*.nb?"))
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, check=True)
    assert set(ROOT.glob("pipelines/**/*.nb?")) == before
    assert bool(list(tmp_path.glob("cache/**/*.nbc"))) == (cache == "cache")


def test_the_command_line_does_not_import_numba_and_torch() -> None:
    program = (
        "import sys; from cli.main import load_app; load_app(); print('numba' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# the stage


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def make_corpus(store: Store, texts: list[str], **settings: Any) -> Artifact:
    folder = store.root.parent / f"in-{len(list(store.root.parent.glob('in-*')))}"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return corpus.run([str(folder)], corpus.Config(**{"valid": 0.0, **settings}), store=store).artifact


def make_tokenizer(store: Store, text: Artifact, **settings: Any) -> Artifact:
    chosen = {"kind": "word", "vocab_size": 200, "min_frequency": 1, **settings}
    return tokenizer.run(text.reference, tokenizer.Config(**chosen), store=store).artifact


def random_texts(seed: int, documents: int = 6) -> list[str]:
    """Paragraphs of short and one-word sentences over a vocabulary with very frequent and very rare words."""
    random = np.random.default_rng(seed)

    def sentence() -> str:
        words = [f"w{int(n)}" for n in random.zipf(1.5, int(random.choice([1, 2, 5, 12]))).clip(1, 40)]
        return " ".join(words).capitalize() + "."

    def document() -> str:
        return "\n\n".join(
            " ".join(sentence() for _ in range(random.integers(1, 5))) for _ in range(random.integers(1, 6))
        )

    return [document() for _ in range(documents)]


def counted(store: Store, text: Artifact, made: Artifact, **settings: Any) -> Artifact:
    result = run(text.reference, made.reference, Config(**settings), store=store, force=True)
    assert result is not None
    return result.artifact


def ids_of(text: Artifact, made: Artifact, unit: str) -> list[list[int]]:
    """The token ids of each sentence, or block, of the training text, assigned by their offsets."""
    opened = Tokenizer.from_file(str(made.path / "tokenizer.json"))
    opened.encode_special_tokens = True
    units = []
    for block in pq.read_table(text.path / "blocks.parquet").to_pylist():
        if block["split"] != "train":
            continue
        encoding = opened.encode(block["text"], add_special_tokens=False)
        spans = block["sentences"] if unit == "sentence" else [{"start": 0, "end": len(block["text"])}]
        for span in spans:
            inside = [span["start"] <= start and end <= span["end"] for start, end in encoding.offsets]
            units.append([id_ for id_, is_inside in zip(encoding.ids, inside, strict=True) if is_inside])
    return units


def vocabulary_of(artifact: Artifact) -> list[dict[str, Any]]:
    return pq.read_table(artifact.path / "vocabulary.parquet").to_pylist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top": 7},
        {"presence": True},
        {"window": "1"},
        {"window": "3", "top": 12},
        {"window": "4", "cross_sentences": True},
    ],
    ids=str,
)
def test_counts_match_plain_loops_over_the_corpus(settings: dict[str, Any], store: Store) -> None:
    text = make_corpus(store, random_texts(0), valid=0.2)
    assert {"train", "valid"} <= set(text.counts["splits"])
    made = make_tokenizer(store, text)
    artifact = counted(store, text, made, **settings)
    units = ids_of(text, made, "block" if settings.get("cross_sentences") else "sentence")
    frequencies = Counter(itertools.chain.from_iterable(units))
    special = set(range(5))
    order = sorted((id_ for id_ in frequencies if id_ not in special), key=lambda id_: (-frequencies[id_], id_))
    order = order[: settings.get("top", 5000)]
    opened = Tokenizer.from_file(str(made.path / "tokenizer.json"))
    assert vocabulary_of(artifact) == [
        {"row": row, "id": id_, "token": opened.id_to_token(id_), "count": frequencies[id_]}
        for row, id_ in enumerate(order)
    ]
    row_of = {id_: row for row, id_ in enumerate(order)}
    rows = [[row_of.get(id_, len(order)) for id_ in unit] for unit in units]
    window = settings.get("window")
    expected = looped(rows, len(order), int(window) if window else None, settings.get("presence", False))
    found = pairs_of(Counts(artifact))
    assert found == expected and len(found) > 10
    counts = artifact.counts
    assert (counts["vocabulary"], counts["pairs"]) == (len(order), len(expected))
    assert counts["places"] == sum(n * (1 + (i != j)) for (i, j), n in expected.items())
    assert counts["tokens"] == sum(frequencies.values())
    assert counts["counted_tokens"] == sum(frequencies[id_] for id_ in order)


def digests(artifact: Artifact) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in artifact.files.items()}


@pytest.mark.parametrize(("jobs", "size"), [(1, 100), (1, 700), pytest.param(2, 300, marks=pytest.mark.every)])
def test_counts_do_not_depend_on_shards_and_workers(
    jobs: int, size: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = make_corpus(store, random_texts(1, 20))
    made = make_tokenizer(store, text)
    whole = digests(counted(store, text, made))
    monkeypatch.setattr(pair_files, "PIECE", 500)
    assert digests(counted(store, text, made, jobs=jobs, shard_size=size)) == whole
    assert not store.unfinished()


def test_shares_encode_then_count_and_the_plain_command_merges(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_corpus(store, random_texts(2, 20))
    made = make_tokenizer(store, text)
    with counted(store, text, made) as artifact:
        whole = digests(artifact)
    removal.remove(store, artifact.path)
    monkeypatch.setattr(pair_files, "PIECE", 1500)

    def share(number: int) -> None:
        config = Config(shard=f"{number}/2", shard_size=300)
        assert run(text.reference, made.reference, config, store=store) is None

    def kept(kind: str) -> int:
        return len([path for folder in store.unfinished() for path in folder.glob(f"{kind}/*.partial")])

    share(1)
    shards = len(shards_of(text, 300))
    assert kept("ids") == -(-shards // 2) > 3 and kept("pairs") == 0
    share(2)  # the last share to encode finds all shards encoded, so it counts its share of pairs too
    assert kept("ids") > shards and kept("pairs") == 1
    share(1)
    assert kept("pairs") == 2
    for name in ("encode", "count"):  # no work is left
        monkeypatch.setattr(pair_files, name, lambda *_: pytest.fail("again"))
    result = run(text.reference, made.reference, Config(shard_size=300), store=store)
    assert result is not None and digests(result.artifact) == whole
    assert not store.unfinished()


def test_a_stopped_run_continues_and_rebuilds_damaged_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_corpus(store, random_texts(3, 12))
    made = make_tokenizer(store, text)
    with counted(store, text, made) as artifact:
        whole = digests(artifact)
    removal.remove(store, artifact.path)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pair_files, "count", stop)
        with pytest.raises(KeyboardInterrupt):
            run(text.reference, made.reference, Config(shard_size=300), store=store)
    paths = [path for folder in store.unfinished() for path in folder.glob("ids/*.partial")]
    assert len(paths) > 3
    data = bytearray(paths[1].read_bytes())
    data[len(data) // 2] ^= 4
    paths[1].write_bytes(data)
    encoded = []
    encode = pair_files.encode
    monkeypatch.setattr(pair_files, "encode", lambda *task: (encoded.append(task), encode(*task)))
    result = run(text.reference, made.reference, Config(shard_size=300), store=store)
    assert result is not None and digests(result.artifact) == whole
    shards = [path for path in paths if not path.name.startswith("merged")]
    assert 0 < len(encoded) < len(shards)


def test_sums_of_partial_files_are_exact_beyond_float_precision(tmp_path: Path) -> None:
    counts = [{(0, 0): 2**31 - 1, (0, 2): 2**53, (2, 2): 1}, {(0, 0): 5, (0, 2): 1, (1, 1): 7}, {}, {(0, 2): 2**60}]
    paths = []
    for number, pairs in enumerate(counts):
        paths.append(tmp_path / str(number))
        with parquet_file(paths[-1], count_schema()) as file:
            rows = [{"i": i, "j": j, "count": n} for (i, j), n in sorted(pairs.items())]
            file.write_table(pa.Table.from_pylist(rows, schema=count_schema()))
    merge_pairs(paths, {"rows": 3}, tmp_path / "sum")
    merged = pq.read_table(tmp_path / "sum")
    assert merged.schema.field("count").type == pa.int64()
    assert [tuple(row.values()) for row in merged.to_pylist()] == [
        (0, 0, 2**31 + 4),
        (0, 2, 2**60 + 2**53 + 1),
        (1, 1, 7),
        (2, 2, 1),
    ]


def test_merging_in_bands_adds_every_pair_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    total: Counter[tuple[int, int]] = Counter()
    paths = []
    for number in range(3):
        pairs = {tuple(sorted(pair)): int(n) for *pair, n in random.integers(1, 200, (5000, 3)).tolist()}
        total.update(pairs)
        paths.append(tmp_path / str(number))
        with parquet_file(paths[-1], count_schema()) as file:
            rows = [{"i": i, "j": j, "count": n} for (i, j), n in sorted(pairs.items())]
            file.write_table(pa.Table.from_pylist(rows, schema=count_schema()), row_group_size=97)
    monkeypatch.setattr(pair_files, "BAND", 1000)
    merge_pairs(paths, {"rows": 200}, tmp_path / "sum")
    merged = {(row["i"], row["j"]): row["count"] for row in pq.read_table(tmp_path / "sum").to_pylist()}
    assert merged == dict(total)


def test_fewer_tokens_than_requested_give_a_warning(store: Store) -> None:
    text = make_corpus(store, ["One two. Two three."])
    artifact = counted(store, text, make_tokenizer(store, text), top=50)
    assert artifact.counts["vocabulary"] == 4 + 1  # One, two, Two, three and the full stop
    assert artifact.manifest["warnings"] == ["only 5 tokens occur, fewer than --top 50"]
    assert artifact.manifest["config"]["top"] == 50


def test_sentences_of_one_token_have_no_pairs(store: Store) -> None:
    text = make_corpus(store, ["Yes\n\nNo\n\nYes"])
    artifact = counted(store, text, make_tokenizer(store, text))
    assert artifact.counts["pairs"] == 0 and pairs_of(Counts(artifact)) == {}
    assert "no two of the counted tokens occur together" in artifact.manifest["warnings"]
    table = load_table(artifact)
    assert table.scores_NN.shape == (2, 2) and not table.scores_NN.any()


def test_one_text_of_each_pair_can_be_counted(store: Store, tmp_path: Path) -> None:
    sides = {"text": ["good film", "bad film"], "pair": ["guter Film", "schlechter Film"]}
    for side, texts in sides.items():
        (tmp_path / side).write_text("\n".join(texts))
    settings = dataset.Config(valid_fraction=0.0, sentences="line")
    files = {side: {"train": [str(tmp_path / side)]} for side in sides}
    text = dataset.run(files["text"], settings, pairs=files["pair"], store=store).artifact
    made = make_tokenizer(store, text, kind="word", vocab_size=100)
    found = {side: counted(store, text, made, column=side) for side in ("text", "pair", "both")}
    seen = {side: {row["token"] for row in vocabulary_of(artifact)} for side, artifact in found.items()}
    assert {token.lower() for token in seen["text"]} == {"good", "bad", "film"}
    assert {token.lower() for token in seen["pair"]} == {"guter", "schlechter", "film"}
    assert seen["both"] == seen["text"] | seen["pair"]
    assert {side: artifact.counts["pairs"] for side, artifact in found.items()} == {"text": 2, "pair": 2, "both": 4}
    plain = make_corpus(store, ["One text."])
    with pytest.raises(ArtifactMismatch, match="without a second text"):
        counted(store, plain, made, column="pair")


def test_special_tokens_are_never_counted_even_if_the_text_spells_them(store: Store) -> None:
    text = make_corpus(store, ["<s> a </s> b [MASK] [CLS] a. <mask> b <pad> a"] * 3)
    made = make_tokenizer(store, text)
    special = {
        id_ for token, id_ in Tokenizer.from_file(str(made.path / "tokenizer.json")).get_vocab().items() if id_ < 5
    }
    artifact = counted(store, text, made)
    assert vocabulary_of(artifact) and not special & {row["id"] for row in vocabulary_of(artifact)}


def test_a_corpus_without_training_text_is_refused(store: Store) -> None:
    text = make_corpus(store, [f"Alpha beta gamma {n}." for n in range(25)], valid=0.9999)
    assert set(text.counts["splits"]) == {"valid"}
    made = make_tokenizer(store, make_corpus(store, ["Alpha beta gamma."]))
    with pytest.raises(InputError, match="no training text to count"):
        run(text.reference, made.reference, Config(), store=store)
    assert not list(store.root.glob("cooccur/*"))


def test_text_of_only_unknown_tokens_is_refused(store: Store) -> None:
    made = make_tokenizer(store, make_corpus(store, ["Alpha beta gamma"]))
    with pytest.raises(InputError, match="no training text that this tokenizer turns into tokens"):
        run(make_corpus(store, ["Delta epsilon"]).reference, made.reference, Config(), store=store)
    assert not list(store.root.glob("cooccur/*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": "0"}, "expected `sentence`"),
        ({"window": "-3"}, "expected `sentence`"),
        ({"window": "word"}, "expected `sentence`"),
        ({"window": "20000"}, "expected `sentence`"),
        ({"cross_sentences": True}, "needs a --window"),
        ({"window": "5", "presence": True}, "--presence needs --window sentence"),
        ({"top": 0}, "greater than or equal"),
        ({"top": 70_000}, "less than or equal"),
    ],
    ids=str,
)
def test_meaningless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_a_window_has_one_spelling() -> None:
    assert Config(window="007").window == "7"


# reading


@pytest.fixture
def small(store: Store) -> tuple[Artifact, Artifact, Artifact]:
    """A corpus of two sentences, its tokenizer and its counts."""
    text = make_corpus(store, ["a b a\n\nb c"])
    made = make_tokenizer(store, text)
    return text, made, counted(store, text, made)


def test_a_table_has_the_scores_of_a_case_worked_by_hand(small: tuple[Artifact, Artifact, Artifact]) -> None:
    _, made, artifact = small
    opened = Tokenizer.from_file(str(made.path / "tokenizer.json"))
    table = load_table(artifact, tokenizer=made)
    assert len(table.rows_V) == opened.get_vocab_size()
    a, b, c = (int(table.rows_V[opened.token_to_id(letter)]) for letter in "abc")
    # counts: aa 2, ab 2, bc 1; totals 4, 3, 1
    expected = {(a, a): 0.75, (a, b): 1, (a, c): 0, (b, a): 0.5, (b, b): 0, (b, c): 1, (c, a): 0, (c, b): 1, (c, c): 0}
    assert {place: pytest.approx(float(table.scores_NN[place])) for place in expected} == expected
    # divided by occurrences, 2, 2 and 1: aa 1, ab 1, bc 1 / 2, ba 1, cb 1 / 2
    other = load_table(artifact, totals="tokens")
    assert other.scores_NN[a].tolist() == pytest.approx([{a: 1.0, b: 1.0, c: 0.0}[row] for row in range(3)])
    assert other.scores_NN[b].tolist() == pytest.approx([{a: 1.0, b: 0.0, c: 1.0}[row] for row in range(3)])
    assert load_table(artifact, half=True).scores_NN.dtype == torch.float16


def test_a_table_has_the_scores_of_its_counts(store: Store) -> None:
    text = make_corpus(store, random_texts(4))
    artifact = counted(store, text, make_tokenizer(store, text))
    size = artifact.counts["vocabulary"]
    columns = zip(*((i, j, n) for (i, j), n in pairs_of(Counts(artifact)).items()), strict=True)
    parts = [tuple(np.array(column) for column in columns)]
    assert torch.equal(load_table(artifact).scores_NN, context_scores(parts, size))  # type: ignore[arg-type]


def test_a_table_of_another_tokenizer_is_refused(small: tuple[Artifact, Artifact, Artifact], store: Store) -> None:
    text, made, artifact = small
    sequence = sequences.run(text.reference, made.reference, sequences.Config(), store=store).artifact
    load_table(artifact, tokenizer=sequence)
    other = make_tokenizer(store, make_corpus(store, ["x y z"]))
    with pytest.raises(ArtifactMismatch, match="was counted with one tokenizer") as raised:
        load_table(artifact, tokenizer=other)
    assert "build-cooccur" in str(raised.value.hint)
    with pytest.raises(ArtifactMismatch, match="no tokenizer"):
        check_tokenizer(artifact, text)
    with pytest.raises(ArtifactMismatch, match="needed is a cooccur"):
        load_table(text)


def test_a_tokenizer_folder_gives_the_same_counts_as_the_artifact(
    small: tuple[Artifact, Artifact, Artifact], store: Store, tmp_path: Path
) -> None:
    text, made, artifact = small
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(made.read(name))
    result = run(text.reference, str(folder), Config(), store=store)
    assert result is not None
    assert digests(result.artifact)["counts.parquet"] == digests(artifact)["counts.parquet"]
    check_tokenizer(result.artifact, made)


# contexts


def test_contexts_are_rows_of_the_table_for_the_tokens_of_a_text(small: tuple[Artifact, Artifact, Artifact]) -> None:
    (context,) = contexts.contexts_of(small[2], "a", "b a zzz c")
    assert (context.text, context.known) == ("a", True)
    assert [(text, value) for text, _, value in context.keys] == [("b", 1.0), ("a", 0.75), ("zzz", None), ("c", 0.0)]
    # a word that is not in the text, and one that is not in the table
    (context,) = contexts.contexts_of(small[2], "b", "c c")
    assert [value for *_, value in context.keys] == [1.0, 1.0]
    (context,) = contexts.contexts_of(small[2], "zzz", "a b")
    assert not context.known and [value for *_, value in context.keys] == [None, None]


@pytest.mark.parametrize(("word", "text"), [("", "a b"), ("a", " "), ("a", "\ud800"), ("a", "a " * 60_000)])
def test_texts_that_cannot_be_shown_are_refused(
    word: str, text: str, small: tuple[Artifact, Artifact, Artifact]
) -> None:
    with pytest.raises(InputError):
        contexts.contexts_of(small[2], word, text)


def test_a_word_of_several_pieces_has_a_context_for_each(store: Store) -> None:
    text = make_corpus(store, ["low lower lowest newer newest wide wider widest. " * 5])
    made = make_tokenizer(store, text, kind="wordpiece", vocab_size=30)
    artifact = counted(store, text, made)
    found = contexts.contexts_of(artifact, "newest", "the newest one")
    pieces = Tokenizer.from_file(str(made.path / "tokenizer.json")).encode("newest", add_special_tokens=False).tokens
    assert len(pieces) > 1 and [context.token for context in found] == pieces


def test_the_newest_table_is_found(small: tuple[Artifact, Artifact, Artifact], store: Store) -> None:
    text, made, first = small
    assert contexts.newest(store).reference == first.reference
    second = counted(store, text, made, window="2")
    os.utime(second.path, (2e9, 2e9))
    assert contexts.newest(store).reference == second.reference
    with pytest.raises(ArtifactMissing, match="no co-occurrence"):
        contexts.newest(Store(store.root / "empty"))


def test_the_exported_matrix_equals_the_table(small: tuple[Artifact, Artifact, Artifact], tmp_path: Path) -> None:
    from safetensors.torch import load

    artifact = small[2]
    for half in (False, True):
        data = contexts.dense(artifact, half=half)
        tensors = load(data)
        table = load_table(artifact, half=half)
        assert torch.equal(tensors["scores"], table.scores_NN)
        assert table.rows_V[tensors["ids"]].tolist() == list(range(3))
        assert contexts.dense(artifact, half=half) == data


# the command line


@pytest.fixture
def place(guide: Any, tmp_path: Path) -> Any:
    """The command line in a folder whose store has a corpus and a tokenizer."""
    (tmp_path / "text.txt").write_text("he is swimming\n\nshe is here\n\nhe was here yesterday\n")
    assert guide("build-corpus", "text.txt", "--name", "text", "--valid", 0).code == 0
    settings = ("--kind", "word", "--min-frequency", 1, "--vocab-size", 50)
    assert guide("build-tokenizer", "text", *settings, "--name", "words").code == 0
    return guide


def test_the_command_prints_a_reference_and_the_next_command(place: Any) -> None:
    done = place("build-cooccur", "text", "words", "--name", "pairs")
    assert done.code == 0 and done.out.startswith("cooccur/")
    assert "guide cooccur show" in done.err and "fewer than --top 5,000" in done.err
    again = place("build-cooccur", "text", "words", "--json")
    assert json.loads(again.out)["reused"] and json.loads(again.out)["counts"]["vocabulary"] == 7


def test_show_prints_the_scores_of_a_sentence(place: Any) -> None:
    assert place("cooccur", "show", "is", "--text", "he is here").code == 2  # no counts yet
    place("build-cooccur", "text", "words", "--name", "pairs")
    done = place("cooccur", "show", "is", "--text", "he is swimming yesterday today")
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0] == ["is", "expects"]
    assert [line[0] for line in lines[2:]] == ["he", "is", "swimming", "yesterday", "today"]
    assert lines[4][1] == "1.0000" and lines[4][2] == "█" * 20
    assert lines[5][1] == "0.0000" and lines[6][1] == "-" and "not among the 7" in done.err
    plain = place("cooccur", "show", "is", "--text", "is swimming", "--ascii", "--cooccur", "pairs")
    assert "#" * 20 in plain.out and plain.out.isascii()
    found = json.loads(place("cooccur", "show", "is", "--text", "he is today", "--json").out)
    assert [key["coefficient"] is None for key in found["contexts"][0]["keys"]] == [False, False, True]
    unknown = place("cooccur", "show", "today", "--text", "he is")
    assert unknown.code == 0 and "today is not among the 7 tokens" in unknown.out


def test_export_writes_a_safetensors_file(place: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    place("build-cooccur", "text", "words", "--name", "pairs")
    done = place("cooccur", "export", "pairs", "--dense", "s.safetensors", "--half")
    assert done.code == 0 and done.out == "s.safetensors\n"
    assert load_file(tmp_path / "s.safetensors")["scores"].dtype == np.float16
    said = json.loads(place("cooccur", "export", "pairs", "--dense", "s.safetensors", "--json").out)
    assert (said["rows"], said["dtype"]) == (7, "F32")
    assert said["bytes"] == (tmp_path / "s.safetensors").stat().st_size


@pytest.mark.parametrize(
    "arguments",
    [
        ("build-cooccur", "text"),
        ("build-cooccur", "text", "nothing"),
        ("build-cooccur", "words", "words"),
        ("build-cooccur", "text", "words", "--window", "wide"),
        ("build-cooccur", "text", "words", "--shard", "3/2"),
        ("build-cooccur", "text", "words", "--shard", "1/2", "--name", "x"),
        ("cooccur", "show", "is"),
        ("cooccur", "show", "", "--text", "he is"),
        ("cooccur", "show", "is", "--text", "he is", "--cooccur", "text"),
        ("cooccur", "export", "pairs"),
        ("cooccur", "export", "pairs", "--dense", "s.npy"),
        ("cooccur", "export", "pairs", "--dense", "nowhere/s.safetensors"),
        ("cooccur", "export", "text", "--dense", "s.safetensors"),
    ],
    ids=" ".join,
)
def test_wrong_commands_exit_with_2_and_a_short_message(arguments: tuple[str, ...], place: Any) -> None:
    place("build-cooccur", "text", "words", "--name", "pairs")
    done = place(*arguments)
    assert done.code == 2 and done.out == "" and done.err.startswith("guide: ") and len(done.err.splitlines()) < 6


# end to end


def test_a_model_trains_on_conflicts_with_counted_pairs(store: Store) -> None:
    text = make_corpus(store, random_texts(5, 8))
    made = make_tokenizer(store, text)
    artifact = counted(store, text, made, top=12)
    settings = json.loads(made.read("tokenizer_config.json"))
    special = {key: value for key, value in settings.items() if key.endswith("_token")}
    opened = PreTrainedTokenizerFast(tokenizer_file=str(made.path / "tokenizer.json"), **special)
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 32}
    config = BertConfig(vocab_size=len(opened), num_hidden_layers=5, num_attention_heads=4, **size)
    model = BertForMaskedLM(config)
    table = load_table(artifact, tokenizer=made)
    plan = guidance.Plan.load("preset:mcmisp-bert")
    handle = guidance.install(model, plan, opened, tables={"cooccurrence": table})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sentences = [unit[:20] for unit in ids_of(text, made, "sentence") if len(unit) > 4][:8]
    batch = opened.pad({"input_ids": [[0, *ids, 2] for ids in sentences]}, return_tensors="pt")
    known = table.rows(batch["input_ids"]) >= 0
    wrong = known & (torch.rand(known.shape) < 0.5)
    losses = []
    for step in range(6):
        guided = handle.guide(batch["input_ids"], batch["attention_mask"], mispredicted=wrong)
        output = model(**batch, labels=batch["input_ids"], guidance=guided)
        conflict = guided.loss(step, 6)
        losses.append(float(conflict.detach()))
        (output.loss + conflict).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert wrong.any() and all(np.isfinite(losses)) and losses[0] > 0 and losses[-1] < losses[0]
    # without mispredicted tokens of the table the loss is 0
    guided = handle.guide(batch["input_ids"], batch["attention_mask"], mispredicted=~known)
    model(**batch, guidance=guided)
    assert float(guided.loss(0, 6).detach()) == 0


def test_counts_of_real_books_match_plain_loops(store: Store, tmp_path: Path) -> None:
    import gzip

    books = sorted((shared("data/lm-litbank-books") / "books").glob("*masque*.gz"))
    text = make_corpus(store, [gzip.decompress(book.read_bytes()).decode() for book in books])
    made = make_tokenizer(store, text, kind="byte-bpe", vocab_size=400)
    artifact = counted(store, text, made, top=100)
    units = ids_of(text, made, "sentence")
    row_of = {row["id"]: row["row"] for row in vocabulary_of(artifact)}
    assert len(row_of) == 100
    total = sum(n * (1 + (i != j)) for (i, j), n in pairs_of(Counts(artifact)).items())
    # a token may include the space before its sentence, so these loops miss the first token of some sentences
    rows = [[row_of.get(id_, 100) for id_ in unit] for unit in units]
    expected = sum(n * (1 + (i != j)) for (i, j), n in looped(rows, 100).items())
    assert expected <= total < 1.2 * expected
