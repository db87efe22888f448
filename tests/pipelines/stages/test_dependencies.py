"""Parsing: every sentence has a row, every word its span, and the bytes do not depend on shards and processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import spacy
from spacy.language import Language
from spacy.tokens import Doc
from spacy.training import Example

from cli.main import run as run_command
from guidance.errors import InputError, MachineError
from guidance.patterns.features import RELATIONS, relation_id
from guidance.statistics.dependencies import Tree
from pipelines.engine.shards import shards_of
from pipelines.stages import corpus, dependencies
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged
from pipelines.storage.store import Store
from pipelines.text import parsing, spacy_models
from tests.attachment import Attachment, attachment
from tests.shared import shared

Rows = list[dict[str, Any]]

# text, and for each word: form, head from 1 (0 is the root), label of spaCy's English models, label of UD
HAND = {
    "The old dog chased a cat.": """
        The 3 det det / old 3 amod amod / dog 4 nsubj nsubj / chased 0 ROOT root / a 6 det det / cat 4 dobj obj /
        . 4 punct punct""",
    "She very quickly gave him books.": """
        She 4 nsubj nsubj / very 3 advmod advmod / quickly 4 advmod advmod / gave 0 ROOT root / him 4 dative iobj /
        books 4 dobj obj / . 4 punct punct""",
    "The cat was chased by dogs.": """
        The 2 det det / cat 4 nsubjpass nsubj:pass / was 4 auxpass aux:pass / chased 0 ROOT root / by 4 agent case /
        dogs 5 pobj obl:agent / . 4 punct punct""",
    "Cats and dogs sleep.": """
        Cats 4 nsubj nsubj / and 1 cc cc / dogs 1 conj conj / sleep 0 ROOT root / . 4 punct punct""",
    "I don't know.": """
        I 4 nsubj nsubj / do 4 aux aux / n't 4 neg advmod:neg / know 0 ROOT root / . 4 punct punct""",
    "Wow 😀!": "Wow 0 ROOT root / 😀 1 dep dep / ! 1 punct punct",
    "He ran and": "He 2 nsubj nsubj / ran 0 ROOT root / and 2 cc cc",
    "Two 3.5 apples": "Two 3 nummod nummod / 3.5 3 nummod nummod / apples 0 ROOT root",
}


def words_of(text: str) -> list[list[str]]:
    return [word.split() for word in HAND[text].split("/")]


@Language.factory("by_hand", assigns=["token.dep", "token.head"])
class ByHand:
    """A parser that knows the sentences above, with labels of one of the two schemes, and parses all others as chains."""

    def __init__(self, nlp: Language, name: str, scheme: int, fails_on: str, labels: list[str]) -> None:
        self.scheme, self.fails_on, self.labels = scheme, fails_on, labels

    def __call__(self, doc: Doc) -> Doc:
        if self.fails_on and self.fails_on in doc.text:
            raise ValueError("the parser\nhad enough")
        known = words_of(doc.text) if doc.text in HAND else None
        if known:
            heads = [int(word[1]) - 1 - n if word[1] != "0" else 0 for n, word in enumerate(known)]
            relations = [word[2 + self.scheme] for word in known]
        else:
            heads = [-1 if n else 0 for n in range(len(doc))]
            relations = ["dep" if n else "ROOT" for n in range(len(doc))]
        columns = [heads, [doc.vocab.strings.add(label) for label in relations]]
        table = [[value % (1 << 64) for value in row] for row in zip(*columns, strict=True)]
        import numpy as np

        return doc.from_array(["HEAD", "DEP"], np.array(table, dtype="uint64").reshape(len(doc), 2))


def by_hand(folder: Path, scheme: str = "ud", fails_on: str = "") -> str:
    """A spaCy model in a folder with the parser above and labels of one scheme."""
    labels = {"ud": ["obj", "nsubj"], "spacy": ["dobj", "nsubj"], "tiger": ["oa", "sb"]}[scheme]
    nlp = spacy.blank("en")
    nlp.add_pipe("by_hand", config={"scheme": int(scheme == "ud"), "fails_on": fails_on, "labels": labels})
    nlp.to_disk(folder)
    return f"spacy:{folder}"


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small spaCy parser, briefly trained on the sentences above, which any process can open."""
    spacy.util.fix_random_seed(0)
    nlp = spacy.blank("en")
    sizes = {"width": 16, "depth": 2, "embed_size": 200, "window_size": 1, "maxout_pieces": 2}
    words = {"@architectures": "spacy.HashEmbedCNN.v2", "subword_features": True, "pretrained_vectors": None} | sizes
    transitions = {
        "@architectures": "spacy.TransitionBasedParser.v2",
        "state_type": "parser",
        "extra_state_tokens": False,
    }
    hidden = {"hidden_width": 16, "maxout_pieces": 2, "use_upper": True, "nO": None}
    nlp.add_pipe("parser", config={"min_action_freq": 1, "model": transitions | hidden | {"tok2vec": words}})
    examples = []
    for text in HAND:
        doc = nlp.make_doc(text)
        known = words_of(text)
        heads = [int(word[1]) - 1 if word[1] != "0" else n for n, word in enumerate(known)]
        deps = ["ROOT" if word[1] == "0" else word[3] for word in known]
        gold = Doc(nlp.vocab, words=[token.text for token in doc], heads=heads, deps=deps)
        examples.append(Example(doc, gold))
    optimizer = nlp.initialize(lambda: examples)
    for _ in range(5):
        nlp.update(examples, sgd=optimizer)
    folder = tmp_path_factory.mktemp("model")
    nlp.to_disk(folder)
    return f"spacy:{folder}"


@pytest.fixture(autouse=True)
def _close_parsers():
    yield
    dependencies._opened.cache_clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def make_corpus(store: Store, texts: dict[str, str], **settings: Any) -> Artifact:
    folder = store.root.parent / "in"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return corpus.run([str(folder)], corpus.Config(**{"valid": 0.0} | settings), store=store).artifact


def parse(store: Store, text: Artifact, parser: str, **settings: Any) -> Artifact:
    result = dependencies.run(text.reference, dependencies.Config(parser=parser, **settings), store=store)
    assert result is not None
    return result.artifact


def rows_of(artifact: Artifact) -> Rows:
    return pq.read_table(artifact.path / "deps.parquet").to_pylist()


def document_texts(text: Artifact) -> dict[int, str]:
    found: dict[int, list[str]] = {}
    for row in pq.read_table(text.path / "blocks.parquet").to_pylist():
        found.setdefault(row["document"], []).append(row["text"])
    return {number: "\n".join(blocks) for number, blocks in found.items()}


def sentences_of(text: Artifact) -> list[tuple[int, int, int, str]]:
    """For every sentence: document, running number, start in the document, and text."""
    return [
        (row["document"], row["first_sentence"] + n, row["start"] + span["start"], row["text"][span["start"] : span["end"]])
        for row in pq.read_table(text.path / "blocks.parquet").to_pylist()
        for n, span in enumerate(row["sentences"])
    ]  # fmt: skip


def check_rows(text: Artifact, artifact: Artifact, *, spelled: bool = True) -> None:
    """Check the table: a row per sentence, lists of equal length, words in order, and heads that lead to a root."""
    texts, rows = document_texts(text), rows_of(artifact)
    assert [(row["document"], row["sentence"]) for row in rows] == [place[:2] for place in sentences_of(text)]
    for row, (document, _, start, sentence) in zip(rows, sentences_of(text), strict=True):
        lists = [row[name] for name in ("start", "end", "form", "lemma", "upos", "head", "relation")]
        assert len({len(column) for column in lists}) == 1
        assert (row["status"] == "ok") == bool(row["form"])
        assert row["start"] == sorted(row["start"])
        for first, last, form in zip(row["start"], row["end"], row["form"], strict=True):
            assert start <= first <= last <= start + len(sentence)
            assert not spelled or texts[document][first:last] == form
        for place in range(len(row["head"])):
            for _ in row["head"]:
                place = row["head"][place]
            assert row["head"][place] == place
    assert artifact.counts["sentences"] == len(rows)
    assert artifact.counts["words"] == sum(len(row["form"]) for row in rows)
    assert artifact.counts["parsed"] + sum(artifact.counts["without"].values()) == len(rows)


# the table


@pytest.mark.parametrize("scheme", ["ud", "spacy"])
def test_hand_written_parses_appear_unchanged_in_the_table(scheme: str, store: Store, tmp_path: Path) -> None:
    texts = list(HAND)
    files = {"a.txt": "\n".join(texts[:3]) + "\n\n" + "\n".join(texts[3:5]), "b.txt": "\n".join(texts[5:])}
    text = make_corpus(store, files, sentences="line")
    artifact = parse(store, text, by_hand(tmp_path / "model", scheme))
    check_rows(text, artifact)
    assert artifact.counts["scheme"] == {"ud": "ud", "spacy": "spacy-en"}[scheme]
    assert artifact.counts["language"] == "en"
    whole = document_texts(text)
    rows = rows_of(artifact)
    assert [row["document"] for row in rows] == [0] * 5 + [1] * 3
    assert [row["sentence"] for row in rows] == [0, 1, 2, 3, 4, 0, 1, 2]
    for row, sentence in zip(rows, texts, strict=True):
        expected = words_of(sentence)
        assert row["form"] == [word[0] for word in expected]
        assert row["head"] == [int(word[1]) - 1 if word[1] != "0" else n for n, word in enumerate(expected)]
        assert row["relation"] == [word[2 + (scheme == "ud")] for word in expected]
        assert row["status"] == "ok"
        begin = whole[row["document"]].index(sentence)
        assert row["start"][0] == begin and row["end"][-1] == begin + len(sentence)
    assert [whole[0][a:b] for a, b in zip(rows[4]["start"], rows[4]["end"], strict=True)] == [
        "I",
        "do",
        "n't",
        "know",
        ".",
    ]


def test_both_label_schemes_give_the_same_major_relations(store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, {"a.txt": "\n".join(HAND)}, sentences="line")
    found = []
    for scheme in ("ud", "spacy"):
        rows = rows_of(parse(store, text, by_hand(tmp_path / scheme, scheme)))
        names = [[RELATIONS[relation_id(label)] for label in row["relation"]] for row in rows]
        found.append([[n if n in ("nsubj", "obj", "amod", "advmod") else "" for n in row] for row in names])
    assert found[0] == found[1]
    assert found[0][0] == ["", "amod", "nsubj", "", "", "obj", ""]
    assert found[0][1] == ["nsubj", "advmod", "advmod", "", "", "obj", ""]
    assert found[0][2] == [""] * 7


def test_an_unknown_label_scheme_gives_a_warning(store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, {"a.txt": "Der Hund schläft."})
    artifact = parse(store, text, by_hand(tmp_path / "model", "tiger"))
    assert artifact.counts["scheme"] == "other"
    assert any("not those of Universal Dependencies or of spaCy's" in line for line in artifact.manifest["warnings"])


def test_units_and_label_scheme_are_in_the_file(store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, {"a.txt": "A dog ran."})
    schema = pq.read_schema(parse(store, text, by_hand(tmp_path / "model")).path / "deps.parquet")
    assert schema.metadata[b"scheme"] == b"ud" and schema.metadata[b"language"] == b"en"
    assert schema.remove_metadata() == dependencies.dependency_schema()
    assert all(field.metadata[b"unit"] for field in schema)
    assert str(schema.field("head").type) == "list<element: int32 not null>"


def test_every_split_is_parsed(store: Store, tmp_path: Path) -> None:
    files = {f"{n}.txt": f"Sentence number {n}. And more." for n in range(30)}
    text = make_corpus(store, files, valid=0.3, test=0.2)
    check_rows(text, parse(store, text, by_hand(tmp_path / "model")))
    assert len(text.counts["splits"]) == 3


# unusual sentences

STRANGE = [
    "\x00", "\x07\x1b[31m x", "😀😀 👩‍👩‍👧‍👦 wow!", "They're gonna can't.", "3.14 is 1,000 or 5%.", "a\x0bb\x0cc\u2028d",
    "e\u0301 İstanbul ﬁne ½", "שלום עולם", "\u200b\u200b", "x\u00a0 \u3000y", "[MASK] </s> <s>", "...", "文" * 300 + "。",
    "(" * 700, "a" * 700 + ".", "http://x.y/" + "z" * 900, "word " * 600, "a  b   c", "end\ufeff",
]  # fmt: skip


@pytest.mark.parametrize("model", ["", "spacy:models/spacy-en_ud_ewt_sm", "stanza:models/stanza"])
def test_strange_sentences_have_a_row_each(model: str, store: Store, tmp_path: Path) -> None:
    kind, _, place = model.partition(":")
    parser = f"{kind}:{shared(place)}" if model else by_hand(tmp_path / "model")
    text = make_corpus(store, {"a.txt": "\n".join(STRANGE)}, sentences="line")
    artifact = parse(store, text, parser)
    check_rows(text, artifact)
    statuses = [row["status"] for row in rows_of(artifact)]
    assert statuses[STRANGE.index("word " * 600)] == "too long"
    assert sum(status == "ok" for status in statuses) >= len(STRANGE) - 2
    assert not any(status.startswith("failed") for status in statuses)
    assert any("too long" in line for line in artifact.manifest["warnings"])
    # every character except white space is in a word
    texts = document_texts(text)
    for row, (document, _, start, sentence) in zip(rows_of(artifact), sentences_of(text), strict=True):
        if row["status"] == "ok":
            inside = {n for span in zip(row["start"], row["end"], strict=True) for n in range(*span)}
            around = range(start, start + len(sentence))
            assert not [texts[document][n] for n in around if n not in inside and not texts[document][n].isspace()]


def test_a_sentence_that_cannot_be_parsed_does_not_affect_others(store: Store, tmp_path: Path) -> None:
    lines = [f"Sentence {n} is {'bad' if n % 10 == 3 else 'good'}." for n in range(40)]
    text = make_corpus(store, {"a.txt": "\n".join(lines)}, sentences="line")
    artifact = parse(store, text, by_hand(tmp_path / "model", fails_on="bad"))
    check_rows(text, artifact)
    statuses = [row["status"] for row in rows_of(artifact)]
    failed = "failed: ValueError: the parser had enough"
    assert statuses == [failed if n % 10 == 3 else "ok" for n in range(40)]
    assert artifact.counts["without"] == {"failed": 4}
    assert any("4 sentences have no tree: failed" in line for line in artifact.manifest["warnings"])


def test_a_parser_that_fails_on_every_sentence_is_refused(store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, {"a.txt": "One. Two."})
    with pytest.raises(InputError, match="no sentence of 2 has a tree: failed"):
        parse(store, text, by_hand(tmp_path / "model", fails_on="."))


class UppercaseTokenizer(spacy.util.DummyTokenizer):
    def __init__(self, vocab: Any) -> None:
        self.vocab = vocab

    def __call__(self, text: str) -> Doc:
        return Doc(self.vocab, words=text.upper().split(" "), spaces=[True] * text.count(" ") + [False])


@spacy.registry.tokenizers("uppercase_tokenizer")
def uppercase_tokenizer():
    return lambda nlp: UppercaseTokenizer(nlp.vocab)


def test_a_tokenizer_that_changes_the_text_is_detected(store: Store, tmp_path: Path) -> None:
    nlp = spacy.blank("en", config={"nlp": {"tokenizer": {"@tokenizers": "uppercase_tokenizer"}}})
    nlp.add_pipe("by_hand", config={"scheme": 1, "fails_on": "", "labels": ["obj"]})
    nlp.to_disk(tmp_path / "model")
    text = make_corpus(store, {"a.txt": "1 23\n4 five"}, sentences="line")
    artifact = parse(store, text, f"spacy:{tmp_path / 'model'}")
    check_rows(text, artifact)
    assert [row["status"] for row in rows_of(artifact)] == ["ok", "failed: ValueError: the tokenizer changed the text"]


def test_the_limit_counts_words_not_characters(store: Store, tmp_path: Path) -> None:
    lines = ["one two three", "one two three four", "one two three.", "a" * 400]
    text = make_corpus(store, {"a.txt": "\n".join(lines)}, sentences="line")
    rows = rows_of(parse(store, text, by_hand(tmp_path / "model"), max_words=3))
    assert [row["status"] for row in rows] == ["ok", "too long", "too long", "ok"]


def test_a_parser_never_splits_a_sentence(small: str, store: Store) -> None:
    text = make_corpus(store, {"a.txt": "It ran. It fell. It lay.\nSo. It. Is."}, sentences="line")
    rows = rows_of(parse(store, text, small))
    assert [len(row["form"]) for row in rows] == [9, 6]


# the same bytes for any shards and processes


def many_lines(number: int) -> str:
    words = ("the", "old", "dog", "saw", "a", "cat", "that", "ran", "home", ",", "and", "did", "not", "stop", "1,000")
    lines = []
    for n in range(number):
        lines.append(" ".join(words[(n * 7 + k * (n % 5 + 1)) % len(words)] for k in range(3 + n % 23)) + ".")
        lines += [""] if n % 6 == 5 else []
    return "\n".join(lines)


def test_the_table_does_not_depend_on_shards(small: str, store: Store, monkeypatch) -> None:
    monkeypatch.setattr(dependencies, "WINDOW", 3000)
    text = make_corpus(store, {f"{n}.txt": many_lines(300 + n) for n in range(3)}, sentences="line")
    first = parse(store, text, small, shard_size=10_000_000)
    contents = {first.content}
    for size in (1, 5000, 20_000):
        again = dependencies.run(
            text.reference, dependencies.Config(parser=small, shard_size=size), store=store, force=True
        )
        assert again is not None
        contents.add(again.artifact.content)
    assert contents == {first.content}
    check_rows(text, first)
    # the trees differ enough to make the comparison meaningful
    relations = [tuple(row["relation"]) for row in rows_of(first)]
    heads = [tuple(head - n for n, head in enumerate(row["head"])) for row in rows_of(first)]
    assert len(set(relations)) > 50 and len(set(heads)) > 50


@pytest.mark.every
def test_two_processes_write_the_same_bytes_as_one(small: str, store: Store) -> None:
    text = make_corpus(store, {f"{n}.txt": many_lines(900) for n in range(3)} | {"x.txt": "Other."}, sentences="line")
    one = parse(store, text, small)
    two = dependencies.run(
        text.reference, dependencies.Config(parser=small, jobs=2, shard_size=20_000), store=store, force=True
    )
    assert two is not None and two.artifact.content == one.content
    check_rows(text, one)


@pytest.mark.every
def test_shares_of_a_job_array_give_the_same_table(small: str, store: Store) -> None:
    text = make_corpus(store, {"a.txt": many_lines(2500)}, sentences="line")
    expected = parse(store, text, small).content
    other = Store(store.root.parent / "other")
    shutil.copytree(store.root / "corpus", other.root / "corpus")
    for share in ("2/2", "1/2"):
        config = dependencies.Config(parser=small, shard_size=20_000, shard=share)
        assert dependencies.run(text.reference, config, store=other) is None
    merged = parse(other, text, small, shard_size=20_000)
    assert merged.content == expected


@pytest.mark.parametrize("window", [1, 400, 5000, 1 << 16])
def test_windows_take_every_block_once_for_any_shards(window: int, store: Store, monkeypatch) -> None:
    monkeypatch.setattr(dependencies, "WINDOW", window)
    text = make_corpus(store, {"a.txt": many_lines(400), "b.txt": "One.\n\nTwo."}, sentences="line")
    blocks = pq.read_table(text.path / "blocks.parquet").num_rows
    found = set()
    for size in (1, 100, 3000, 10**9):
        windows = [
            tuple(zip(*(part.column(name).to_pylist() for name in ("document", "start")), strict=True))
            for shard in shards_of(text, size)
            for part in dependencies._windows(shard)
        ]
        assert sum(map(len, windows)) == blocks
        found.add(tuple(windows))
    assert len(found) == 1


# models and recipes


def test_only_the_files_of_a_model_affect_the_recipe(store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, {"a.txt": "A dog ran."})
    spec = by_hand(tmp_path / "model")
    first = parse(store, text, spec)
    shutil.copytree(tmp_path / "model", tmp_path / "moved")
    assert parse(store, text, f"spacy:{tmp_path / 'moved'}", device="cpu", jobs=2).recipe == first.recipe
    assert parse(store, text, spec, max_words=10).recipe != first.recipe
    meta = json.loads((tmp_path / "moved/meta.json").read_text())
    (tmp_path / "moved/meta.json").write_text(json.dumps(meta | {"version": "0.0.1"}))
    assert parse(store, text, f"spacy:{tmp_path / 'moved'}").recipe != first.recipe
    assert first.manifest["inputs"]["parser"]["kind"] == "files"


def test_python_caches_are_not_part_of_a_model(tmp_path: Path) -> None:
    by_hand(tmp_path / "model")
    before = parsing.model_folder(tmp_path / "model").content
    (tmp_path / "model/__pycache__").mkdir()
    (tmp_path / "model/__pycache__/__init__.cpython-311.pyc").write_bytes(b"x")
    assert parsing.model_folder(tmp_path / "model").content == before


def test_a_model_without_a_parser_cannot_parse(store: Store, tmp_path: Path) -> None:
    text = make_corpus(store, {"a.txt": "A dog ran."})
    nlp = spacy.blank("en")
    nlp.add_pipe("sentencizer")
    nlp.to_disk(tmp_path / "model")
    with pytest.raises(InputError, match=r"has no parser: sentencizer"):
        parse(store, text, f"spacy:{tmp_path / 'model'}")


def test_a_missing_model_is_a_machine_error(store: Store) -> None:
    text = make_corpus(store, {"a.txt": "A dog ran."})
    with pytest.raises(MachineError) as caught:
        parse(store, text, "spacy:tl_nothing_here")
    assert caught.value.hint == "python -m spacy download tl_nothing_here"
    with pytest.raises(MachineError) as caught:
        parse(store, text, "stanza:qq")
    assert "stanza.download('qq')" in str(caught.value.hint)


def test_stanza_without_a_parser_names_the_download(store: Store, tmp_path: Path) -> None:
    shutil.copytree(shared("models/stanza"), tmp_path / "models", ignore=shutil.ignore_patterns("depparse"))
    text = make_corpus(store, {"a.txt": "A dog ran."})
    with pytest.raises(MachineError, match="Stanza has no parser for 'en'"):
        parse(store, text, f"stanza:{tmp_path / 'models'}")


@pytest.mark.parametrize("kind", ["spacy", "stanza"])
def test_a_missing_gpu_is_a_machine_error(kind: str, store: Store, monkeypatch, tmp_path) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(spacy, "prefer_gpu", lambda: False)
    parser = by_hand(tmp_path / "model") if kind == "spacy" else f"stanza:{shared('models/stanza')}"
    with pytest.raises(MachineError) as caught:
        parse(store, make_corpus(store, {"a.txt": "A dog ran."}), parser, device="cuda")
    assert "--device cpu" in str(caught.value.hint)


def test_the_number_of_torch_threads_is_restored(small: str, store: Store) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        parse(store, make_corpus(store, {"a.txt": "A dog ran."}), small)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("parser", "meant"),
    [
        ("en_core_web_sm", "; did you mean spacy:en_core_web_sm?"),
        ("om", "; did you mean stanza:om?"),
        *((name, "") for name in ("", "spacy", "spacy:", "conllu:", "trees.conllu", "udpipe:x")),
    ],
)
def test_an_unknown_parser_is_refused(parser: str, meant: str) -> None:
    with pytest.raises(
        ValueError, match="expected spacy:NAME_OR_FOLDER.*, or conllu:FILES" + re.escape(meant) + " ?\\["
    ):
        dependencies.Config(parser=parser)


def test_the_vocabulary_of_a_model_stays_bounded(small: str, monkeypatch) -> None:
    monkeypatch.setattr(spacy_models, "_RELOAD_AFTER", 50)
    parser = spacy_models.SpacyParser(small.removeprefix("spacy:"), "cpu", 512)
    first = parser(["a dog ran"])
    start = len(parser._strings)
    for number in range(6):  # 240 new words
        parser([" ".join(f"w{number}x{n}" for n in range(40))])
    assert len(parser._strings) < start + 150
    assert parser(["a dog ran"]) == first


# existing trees


def conllu(*sentences: str) -> str:
    """CoNLL-U from lines of `id form head relation [misc]`, or of comments."""
    blocks = []
    for sentence in sentences:
        lines = []
        for line in sentence.strip().splitlines():
            line = line.strip()
            if line.startswith("#"):
                lines.append(line)
                continue
            id_, form, head, relation, *misc = line.split(" ")
            cells = [id_, form.replace("~", " "), form.lower(), "X", "_", "_", head, relation, "_", *(misc or ["_"])]
            lines.append("\t".join(cells))
        blocks.append("\n".join(lines) + "\n\n")
    return "".join(blocks)


DONT = """
    # newdoc id = one
    # text = Don't go, dog!
    1-2 Don't _ _
    1 Do 3 aux
    2 n't 3 advmod
    3 go 0 root SpaceAfter=No
    4 , 5 punct
    4.1 ran _ _
    5 dog 3 vocative SpaceAfter=No
    6 ! 3 punct
"""
DU = """
    # text = Le prix du pain
    1 Le 2 det
    2 prix 0 root
    3-4 du _ _
    3 de 5 case
    4 le 5 det
    5 pain 2 nmod
"""


def test_words_count_once_and_have_their_own_spans(store: Store, tmp_path: Path) -> None:
    (tmp_path / "trees.conllu").write_text(conllu(DONT, DU), encoding="utf-8")
    text = corpus.run([str(tmp_path / "trees.conllu")], corpus.Config(valid=0), store=store).artifact
    artifact = parse(store, text, f"conllu:{tmp_path / 'trees.conllu'}")
    check_rows(text, artifact, spelled=False)
    first, second = rows_of(artifact)
    assert first["form"] == ["Do", "n't", "go", ",", "dog", "!"]
    assert list(zip(first["start"], first["end"], strict=True)) == [(0, 2), (2, 5), (6, 8), (8, 9), (10, 13), (13, 14)]
    assert first["head"] == [2, 2, 2, 4, 2, 2]
    assert first["relation"] == ["aux", "advmod", "root", "punct", "vocative", "punct"]
    assert first["lemma"][:2] == ["do", "n't"] and first["upos"] == ["X"] * 6
    # the second sentence begins after a space: at 15
    spans = list(zip(second["start"], second["end"], strict=True))
    assert spans == [(15, 17), (18, 22), (23, 25), (23, 25), (26, 30)]
    assert second["form"] == ["Le", "prix", "de", "le", "pain"]
    assert second["head"] == [1, 1, 4, 4, 1]


def test_a_text_with_two_trees_gets_the_tree_of_its_position(store: Store, tmp_path: Path) -> None:
    one = "# newdoc id = {}\n1 dogs {} {}\n2 run {} {}\n"
    files = [one.format("a", 2, "nsubj", 0, "root"), one.format("b", 0, "root", 1, "acl"), "1 more 0 root"]
    (tmp_path / "trees.conllu").write_text(conllu(*files), encoding="utf-8")
    text = corpus.run([str(tmp_path / "trees.conllu")], corpus.Config(valid=0), store=store).artifact
    rows = rows_of(parse(store, text, f"conllu:{tmp_path / 'trees.conllu'}"))
    assert [row["relation"] for row in rows] == [["nsubj", "root"], ["root", "acl"], ["root"]]
    # in another document: the first of the two
    other = make_corpus(store, {"x.txt": "dogs run"})
    assert rows_of(parse(store, other, f"conllu:{tmp_path / 'trees.conllu'}"))[0]["relation"] == ["nsubj", "root"]


def test_trees_are_found_in_spite_of_other_white_space(store: Store, tmp_path: Path) -> None:
    (tmp_path / "trees.conllu").write_text(conllu(DONT, DU), encoding="utf-8")
    text = make_corpus(store, {"x.txt": "Don't  go,\u00a0dog!\nLe prix du pain\nLe prix"}, sentences="line")
    artifact = parse(store, text, f"conllu:{tmp_path / 'trees.conllu'}")
    check_rows(text, artifact, spelled=False)
    rows = rows_of(artifact)
    whole = document_texts(text)[0]
    assert [whole[a:b] for a, b in zip(rows[0]["start"], rows[0]["end"], strict=True)] == rows[0]["form"]
    assert [row["status"] for row in rows] == ["ok", "ok", "not found"]
    assert artifact.counts["without"] == {"not found": 1}


def test_warnings_about_the_files_of_trees_are_kept(store: Store, tmp_path: Path) -> None:
    (tmp_path / "t.conllu").write_text("# text = dogs ran\n" + conllu(DU))
    text = make_corpus(store, {"x.txt": "Le prix du pain"})
    (warning, *_) = parse(store, text, f"conllu:{tmp_path / 't.conllu'}").manifest["warnings"]
    assert "`# text` does not match the words" in warning and "t.conllu" in warning


def test_trees_with_decomposed_letters_match_the_composed_text(store: Store, tmp_path: Path) -> None:
    (tmp_path / "t.conllu").write_text(conllu("1 cafe\u0301 2 obj\n2 a\u0323\u0307b 0 root SpaceAfter=No\n3 . 2 punct"))
    text = corpus.run([str(tmp_path / "t.conllu")], corpus.Config(valid=0), store=store).artifact
    artifact = parse(store, text, f"conllu:{tmp_path / 't.conllu'}")
    check_rows(text, artifact)
    assert rows_of(artifact)[0]["form"] == ["café", "ạ\u0307b", "."]


def test_sentences_without_heads_have_no_tree(store: Store, tmp_path: Path) -> None:
    (tmp_path / "t.conllu").write_text(conllu("1 a _ _\n2 b _ _", DU))
    text = corpus.run([str(tmp_path / "t.conllu")], corpus.Config(valid=0), store=store).artifact
    rows = rows_of(parse(store, text, f"conllu:{tmp_path / 't.conllu'}"))
    assert [row["status"] for row in rows] == ["no tree", "ok"]


def test_a_share_verifies_the_parts_that_it_reads(store: Store, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "t.conllu").write_text(conllu(DU))
    text = corpus.run([str(tmp_path / "t.conllu")], corpus.Config(valid=0), store=store).artifact
    config = dependencies.Config(parser=f"conllu:{tmp_path / 't.conllu'}", shard="1/1")
    monkeypatch.setattr(Artifact, "verify", lambda _: pytest.fail("all of it"))
    path = text.path / "documents.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"t.conllu", b"u.conllu", 1))
    with pytest.raises(ArtifactDamaged, match="documents"):
        dependencies.run(text.reference, config, store=store)
    path.write_bytes(whole)
    assert dependencies.run(text.reference, config, store=store) is None


def test_trees_of_another_text_are_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "t.conllu").write_text(conllu(DU))
    with pytest.raises(InputError, match="no sentence of 1 has a tree: not found") as caught:
        parse(store, make_corpus(store, {"x.txt": "Something else."}), f"conllu:{tmp_path / 't.conllu'}")
    assert "build-corpus" in str(caught.value.hint)


def test_an_invalid_tree_is_named_with_its_line(store: Store, tmp_path: Path) -> None:
    (tmp_path / "t.conllu").write_text(conllu("1 a 2 x\n2 b 1 y"))
    with pytest.raises(InputError, match=r"'t\.conllu', line 1: no root"):
        parse(store, make_corpus(store, {"x.txt": "a b"}), f"conllu:{tmp_path / 't.conllu'}")


@pytest.mark.parametrize(
    ("folder", "pattern", "words"),
    [
        ("ud-tagalog", "tl_trg*", 734),
        ("ud-tagalog", "tl_ugnayan*", 1097),
        ("ud-wolof-wtb", "*", 10_294 + 10_403 + 23_561),
        ("ud-english-ewt", "*test*", 25_094),
    ],
)
def test_all_words_of_real_treebanks_are_in_the_table(folder: str, pattern: str, words: int, store: Store) -> None:
    place = f"{shared(f'data/{folder}')}/{pattern}.conllu*"
    text = corpus.run([place], corpus.Config(), store=store).artifact
    artifact = parse(store, text, f"conllu:{place}")
    check_rows(text, artifact, spelled=False)
    assert artifact.counts["without"] == {}
    assert artifact.counts["scheme"] == "ud" and artifact.counts["language"] == ""
    # a corpus drops duplicate documents
    dropped = sum(text.counts["dropped"].values())
    assert artifact.counts["words"] == words or (dropped and words - 50 * dropped < artifact.counts["words"] < words)
    texts = document_texts(text)
    words_seen = same = 0
    for row in rows_of(artifact):
        for first, last, form in zip(row["start"], row["end"], row["form"], strict=True):
            words_seen += 1
            same += texts[row["document"]][first:last] == form
    assert same / words_seen > 0.8  # the others are words of multi-word tokens


# models compared with gold trees


def trees_of(artifact: Artifact) -> list[Tree]:
    names = ("start", "end", "form", "lemma", "upos", "head", "relation", "status")
    return [Tree(*(row[name] for name in names)) for row in rows_of(artifact)]


@pytest.mark.every
def test_a_trained_parser_reaches_its_measured_scores(store: Store) -> None:
    model = shared("models/spacy-en_ud_ewt_sm")
    place = shared("data/ud-english-ewt") / "en_ewt-ud-dev.conllu.gz"
    text = corpus.run([str(place)], corpus.Config(), store=store).artifact
    gold = trees_of(parse(store, text, f"conllu:{place}"))
    found = parse(store, text, f"spacy:{model}")
    check_rows(text, found)
    counts = sum((attachment(*pair) for pair in zip(gold, trees_of(found), strict=True)), Attachment())
    # with gold tokens UAS 83.6 and LAS 80.0 were measured; here the model's own tokens lower the scores
    assert counts.aligned / counts.gold > 0.97
    assert 0.80 < counts.uas < 0.86
    assert 0.76 < counts.las < counts.uas


def test_stanza_does_not_split_sentences(store: Store) -> None:
    model = shared("models/stanza")
    lines = ["The old dog chased a cat.", "I don't know. Do you?", "She ran quickly", "😀 wow", "He saw 3.5 dogs."] * 3
    text = make_corpus(store, {"a.txt": "\n".join(lines)}, sentences="line")
    artifact = parse(store, text, f"stanza:{model}:en:udewt")
    check_rows(text, artifact)
    rows = rows_of(artifact)
    assert artifact.counts["scheme"] == "ud"
    assert rows[0]["form"] == ["The", "old", "dog", "chased", "a", "cat", "."]
    assert rows[0]["relation"][2] == "nsubj" and rows[0]["head"][2] == 3
    assert rows[0]["lemma"][3] == "chase" and rows[0]["upos"][3] == "VERB"
    assert rows[1]["form"][:3] == ["I", "do", "n't"] and len(rows[1]["form"]) == 8
    shift = rows[5]["start"][0]
    for one, again in zip(rows[:5], rows[5:10], strict=True):
        assert [start + shift for start in one["start"]] == again["start"]
        assert (one["head"], one["relation"]) == (again["head"], again["relation"])
    assert parse(store, text, f"stanza:{model}").counts == artifact.counts


def test_a_model_finds_subject_object_adverb_and_adjective(store: Store) -> None:
    model = shared("models/spacy-en_ud_ewt_sm")
    lines = ["The old dog quickly chased a small cat.", "The cat was chased by the dog.", "I don't know him."]
    text = make_corpus(store, {"a.txt": "\n".join(lines)}, sentences="line")
    rows = rows_of(parse(store, text, f"spacy:{model}"))
    roles = [dict(zip(row["form"], row["relation"], strict=True)) for row in rows]
    assert {word: roles[0][word] for word in ("old", "dog", "quickly", "small", "cat")} == {
        "old": "amod", "dog": "nsubj", "quickly": "advmod", "small": "amod", "cat": "obj",
    }  # fmt: skip
    assert roles[1]["cat"] == "nsubj:pass" and roles[1]["was"] == "aux:pass"
    assert rows[2]["form"] == ["I", "do", "n't", "know", "him", "."]
    assert (roles[2]["I"], roles[2]["him"]) == ("nsubj", "obj")


# the command


def test_the_command_reports_counts_and_exit_codes(store: Store, tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setenv("GUIDE_STORE", str(store.root))
    text = make_corpus(store, {"a.txt": "The old dog chased a cat."})
    spec = by_hand(tmp_path / "model")
    assert run_command(["build-deps", text.reference, "--parser", spec, "--json"]) == 0
    out, err = capfd.readouterr()
    answer = json.loads(out)
    assert (answer["kind"], answer["counts"]["words"]) == ("deps", 7)
    assert f"next: guide build-tokenizer {text.reference}" in err
    for arguments, code in [
        ([text.reference], 2),
        ([text.reference, "--parser", "guess"], 2),
        ([text.reference, "--parser", "spacy:./nothing"], 2),
        ([text.reference, "--parser", "conllu:nothing.conllu"], 2),
        ([text.reference, "--parser", "spacy:tl_nothing_here"], 3),
        ([text.reference, "--parser", spec, "--max-words", "0"], 2),
        (["nothing", "--parser", spec], 2),
        ([text.reference, "--parser", spec, "--shard", "1/2"], 0),
    ]:
        assert run_command(["build-deps", *arguments]) == code, arguments
        out, err = capfd.readouterr()
        assert "Traceback" not in err and len(err.splitlines()) < 20
        assert code == 0 or out == ""


def test_help_does_not_import_a_parser() -> None:
    code = "import sys, pipelines.stages.dependencies; print([m for m in ('spacy', 'stanza', 'torch', 'pyarrow') if m in sys.modules])"
    with os.popen(f'{sys.executable} -c "{code}"') as answer:
        assert answer.read().strip() == "[]"
