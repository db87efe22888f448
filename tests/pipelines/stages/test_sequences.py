"""Sequences: no text is lost, and every token has its offsets in the text."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from guidance.errors import InputError
from pipelines.stages import corpus, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.storage.store import Store
from pipelines.text import encoding
from pipelines.text.tokenizer_files import TOKENIZER_FILES

KINDS = ("byte-bpe", "bpe", "wordpiece", "unigram", "word")
STRANGE = [
    "שלום עולם. مرحبا بالعالم!",
    "abc \u202edef\u202c ghi.",
    "cafe\u0301 x\u0323\u0307y.",
    "각 \u1100\u1161\u11a8 한국어.",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ok.",
    "Now İstanbul ﬁne ½.",
    "a\u00a0b\u3000c \u200bd. zero\u200dwidth.",
    "[MASK] </s> <s> [CLS][SEP] <mask> <pad> {{x}} =1+1.",
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.parametrize("packing", ["full-sentences", "document"])
def test_tokens_to_a_word_leave_out_special_ones(store: Store, packing: Any) -> None:
    text = make_corpus(store, {"a.txt": "one two. three four five.", "b.txt": "six."}).reference
    words = tokenizer.run(text, tokenizer.Config(kind="word", vocab_size=40, min_frequency=1), store=store).reference
    made = sequences.run(text, words, sequences.Config(max_length=8, packing=packing), store=store).artifact
    tokens = sum(row["special"].count(False) for row in rows_of(made))
    assert made.counts["tokens_per_word"] == round(tokens / 6, 2) == 1.5


def make_corpus(store: Store, texts: dict[str, str], **settings: Any) -> Artifact:
    folder = store.root.parent / "in"
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return corpus.run([str(folder)], corpus.Config(**settings), store=store).artifact


def rows_of(artifact: Artifact) -> list[dict[str, Any]]:
    found = []
    for split in ("train", "valid", "test"):
        if f"{split}.parquet" in artifact.files:
            found += pq.read_table(artifact.path / f"{split}.parquet").to_pylist()
    return found


def document_texts(text: Artifact) -> dict[int, str]:
    found: dict[int, list[str]] = {}
    for row in pq.read_table(text.path / "blocks.parquet").to_pylist():
        found.setdefault(row["document"], []).append(row["text"])
    return {number: "\n".join(blocks) for number, blocks in found.items()}


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_those_of_the_document_in_any_script(kind: str, lowercase: bool, store: Store) -> None:
    text = make_corpus(store, {"a.txt": "\n\n".join(STRANGE), "b.txt": "Other.\n\nText here."}, valid=0.0)
    config = tokenizer.Config(kind=kind, vocab_size=600, min_frequency=1, lowercase=lowercase)
    made = tokenizer.run(text.reference, config, store=store)
    artifact = sequences.run(text.reference, made.reference, sequences.Config(max_length=16), store=store).artifact
    opened = Tokenizer.from_file(str(made.artifact.path / "tokenizer.json"))
    texts = document_texts(text)
    whole = 0
    seen: dict[int, set[int]] = {number: set() for number in texts}
    for row in rows_of(artifact):
        columns = (row[name] for name in ("id", "document", "start", "end", "special"))
        for id_, document, start, end, special in zip(*columns, strict=True):
            if special:
                assert (document, start, end) == (-1, -1, -1)
                continue
            piece = texts[document][start:end]
            seen[document].update(range(start, end))
            token = opened.id_to_token(id_)
            if token not in ("[UNK]", "<unk>"):
                plain = opened.decode([id_]).replace("##", "").strip() if kind != "word" else token
                if "\ufffd" not in plain:
                    whole += 1
                    normal = opened.normalizer.normalize_str(piece) if opened.normalizer else piece
                    # lowercasing İ gives two code points, which may fall into two tokens
                    assert plain == normal.strip() or (lowercase and piece == "İ")
    assert whole > 50
    for number, content in texts.items():
        missing = {content[i] for i in range(len(content)) if i not in seen[number] and not content[i].isspace()}
        # BERT's normaliser drops invisible format characters; no other character may be lost
        assert not {letter for letter in missing if letter.isprintable()}


@pytest.mark.parametrize("packing", ["full-sentences", "document"])
@pytest.mark.parametrize("length", [8, 13, 128])
def test_nothing_is_lost_and_no_sequence_is_too_long(packing: str, length: int, store: Store) -> None:
    texts = {
        f"{n}.txt": "\n\n".join(f"Word {n} number {k}. And more of it!" for k in range(n % 7 + 1)) for n in range(25)
    }
    text = make_corpus(store, texts | {"long.txt": "one two three four five six seven " * 40}, valid=0.2, test=0.1)
    made = tokenizer.run(text.reference, tokenizer.Config(vocab_size=300), store=store)
    config = sequences.Config(max_length=length, packing=packing)
    artifact = sequences.run(text.reference, made.reference, config, store=store).artifact
    opened = Tokenizer.from_file(str(made.artifact.path / "tokenizer.json"))
    expected: dict[str, list[int]] = {}
    for row in pq.read_table(text.path / "blocks.parquet").to_pylist():
        expected.setdefault(row["split"], []).extend(opened.encode(row["text"], add_special_tokens=False).ids)
    for split, ids in expected.items():
        rows = pq.read_table(artifact.path / f"{split}.parquet").to_pylist()
        found = [i for row in rows for i, special in zip(row["id"], row["special"], strict=True) if not special]
        assert found == ids
        for row in rows:
            assert 3 <= len(row["id"]) <= length
            assert (row["id"][0], row["id"][-1]) == (0, 2)
            assert row["special"][0] and row["special"][-1]
            inside = [d for d in row["document"] if d >= 0]
            assert inside == sorted(inside)
            assert packing == "full-sentences" or len(set(inside)) == 1
            gaps = sum(a != b for a, b in itertools.pairwise(inside))
            assert sum(row["special"]) == 2 + gaps
        counts = artifact.counts["splits"][split]
        assert counts["sequences"] == len(rows)
        assert counts["tokens"] == sum(len(row["id"]) for row in rows)
    cut = sum(counts["cut_sentences"] for counts in artifact.counts["splits"].values())
    assert cut > 0 or length == 128
    assert any("no token is lost" in warning for warning in artifact.manifest["warnings"]) == bool(cut)


def test_tokens_have_the_number_of_their_sentence(store: Store) -> None:
    text = make_corpus(store, {"a.txt": "One here. Two there!\n\nThree now. Four."}, valid=0.0)
    made = tokenizer.run(text.reference, tokenizer.Config(kind="word", vocab_size=50, min_frequency=1), store=store)
    row = rows_of(sequences.run(text.reference, made.reference, sequences.Config(), store=store).artifact)[0]
    content = document_texts(text)[0]
    found: dict[int, list[str]] = {}
    for sentence, start, end in zip(row["sentence"], row["start"], row["end"], strict=True):
        if sentence >= 0:
            found.setdefault(sentence, []).append(content[start:end])
    assert found == {0: ["One", "here", "."], 1: ["Two", "there", "!"], 2: ["Three", "now", "."], 3: ["Four", "."]}


@pytest.mark.parametrize("kind", KINDS)
def test_text_never_becomes_a_special_token(kind: str, store: Store) -> None:
    text = make_corpus(store, {"a.txt": "<s> <s>a</s> [MASK] [CLS] <mask> <pad> [SEP] [PAD] b. " * 50}, valid=0.0)
    made = tokenizer.run(text.reference, tokenizer.Config(kind=kind, vocab_size=400, min_frequency=1), store=store)
    artifact = sequences.run(text.reference, made.reference, sequences.Config(), store=store).artifact
    unknown = artifact.counts["special_tokens"]["unk"]
    for row in rows_of(artifact):
        for id_, special in zip(row["id"], row["special"], strict=True):
            assert special or id_ >= 5 or id_ == unknown


def test_special_tokens_listed_as_words_become_unknown_tokens(store: Store, tmp_path: Path) -> None:
    from tokenizers import models, pre_tokenizers

    text = make_corpus(store, {"a.txt": "hello [MASK] hello"}, valid=0.0)
    words = Tokenizer(
        models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "hello": 4}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.enable_truncation(3)
    words.enable_padding(length=50)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    artifact = sequences.run(text.reference, str(folder), sequences.Config(), store=store).artifact
    assert [row["id"] for row in rows_of(artifact)] == [[1, 4, 0, 4, 2]]
    assert "became unknown" in artifact.manifest["warnings"][0]


def test_a_tokenizer_without_named_special_tokens_is_published_with_them(store: Store, tmp_path: Path) -> None:
    from tokenizers import models
    from transformers import AutoTokenizer

    from guidance.patterns.features import Vocabulary

    text = make_corpus(store, {"a.txt": "hello hello"}, valid=0.0)
    words = Tokenizer(
        models.WordLevel({"[UNK]": 0, "hello": 1, "[CLS]": 2, "[SEP]": 3, "<mask>": 4}, unk_token="[UNK]")
    )
    (tmp_path / "tokenizer").mkdir()
    words.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    artifact = sequences.run(text.reference, str(tmp_path / "tokenizer"), sequences.Config(), store=store).artifact
    opened = AutoTokenizer.from_pretrained(artifact.path / "tokenizer")
    roles = (opened.cls_token, opened.sep_token, opened.unk_token, opened.mask_token, opened.pad_token)
    assert roles == ("[CLS]", "[SEP]", "[UNK]", "<mask>", None)
    assert Vocabulary.from_tokenizer(opened).columns_V["delimiter"].tolist() == [False, False, True, True, False]


def test_only_the_tokenizer_files_of_a_transformers_folder_are_used(store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, {"a.txt": "Some text. And more."}, valid=0.0)
    made = tokenizer.run(text.reference, tokenizer.Config(vocab_size=300), store=store)
    folder = tmp_path / "tokenizer"
    shutil.copytree(made.artifact.path, folder)
    (folder / "artifact.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    settings |= {"chat_template": "{{ 1/0 }}", "auto_map": {"AutoTokenizer": "evil.Evil"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    given = sequences.run(text.reference, str(folder), sequences.Config(), store=store).artifact
    assert sorted(given.manifest["inputs"]["tokenizer"]["first"]) == sorted(TOKENIZER_FILES)
    own = sequences.run(text.reference, made.reference, sequences.Config(), store=store).artifact
    assert given.files["train.parquet"] == own.files["train.parquet"]
    assert own.read("tokenizer/tokenizer.json") == made.artifact.read("tokenizer.json")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("special_tokens_map.json", b"[]"),
    ],
)
def test_a_damaged_tokenizer_is_refused(name: str, data: bytes, store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, {"a.txt": "Some text. And more."}, valid=0.0)
    made = tokenizer.run(text.reference, tokenizer.Config(vocab_size=300), store=store)
    folder = tmp_path / "tokenizer"
    shutil.copytree(made.artifact.path, folder)
    (folder / "artifact.json").unlink()
    (folder / name).write_bytes(data)
    with pytest.raises(InputError) as caught:
        sequences.run(text.reference, str(folder), sequences.Config(), store=store)
    assert name in caught.value.message and caught.value.message.isprintable()


def test_inputs_of_the_wrong_kind_are_refused(store: Store) -> None:
    text = make_corpus(store, {"a.txt": "Some text. And more."}, valid=0.0)
    made = tokenizer.run(text.reference, tokenizer.Config(vocab_size=300), store=store)
    for first, second in ((made, made), (text, text)):
        with pytest.raises(ArtifactMismatch):
            sequences.run(first.reference, second.reference, sequences.Config(), store=store)


def test_the_result_does_not_depend_on_the_batch_size(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_corpus(store, {f"{n}.txt": f"Number {n}. It is {n * n}!\n\nMore." for n in range(30)}, valid=0.3)
    made = tokenizer.run(text.reference, tokenizer.Config(vocab_size=300), store=store)

    def build() -> list[dict[str, Any]]:
        return rows_of(
            sequences.run(text.reference, made.reference, sequences.Config(), store=store, force=True).artifact
        )

    whole = build()
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 40)
    assert build() == whole
    assert (
        len(
            {
                sequences.run(
                    text.reference, made.reference, sequences.Config(), store=store, force=True
                ).artifact.content
                for _ in range(3)
            }
        )
        == 1
    )
