"""Role masks through the whole pipeline: text, tokenizer, sequences, trees written by hand, masks, patterns."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer

from guidance.errors import InputError, NumericalError, PlanError
from guidance.patterns import features
from guidance.patterns.combinations import read_pattern
from guidance.patterns.features import FEATURES, RELATIONS, Tokens, Vocabulary
from pipelines.stages import (
    corpus,
    idf,
    masks,
    pretrain,
    probe_distance,
    probe_induction,
    probe_pairs,
    sequences,
    tokenizer,
)
from pipelines.stages.dependencies import dependency_schema
from pipelines.statistics.codes import check_codes
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged, ArtifactMismatch, ArtifactMissing, digest
from pipelines.storage.store import Store
from pipelines.storage.tables import TREES
from pipelines.training.batches import Examples
from tests.shared import shared
from tests.trainings import one_thread  # noqa: F401

KINDS = ("byte-bpe", "wordpiece", "unigram")

# Each word with its head (a root's is its own), relation, part of speech and, if it differs from the form, its lemma.  Then
# the words that major_relation keeps (words of a major relation, their heads and children), and for some words those that
# dependency keeps.
SENTENCES: dict[str, tuple[str, str, dict[str, str]]] = {
    "The dog chased a cat.": (
        "The 1 det DET|dog 2 nsubj NOUN|chased 2 root VERB|a 4 det DET|cat 2 obj NOUN|. 2 punct PUNCT",
        "The dog chased a cat",
        {"dog": "The dog chased", "chased": "dog chased cat .", "The": "The dog"},
    ),
    "She has red shoes.": (
        "She 1 nsubj PRON|has 1 root VERB|red 3 amod ADJ|shoes 1 obj NOUN|. 1 punct PUNCT",
        "She has red shoes",
        {"red": "red shoes", "shoes": "has red shoes"},
    ),
    "He never runs quickly.": (
        "He 2 nsubj PRON|never 2 advmod ADV|runs 2 root VERB|quickly 2 advmod ADV|. 2 punct PUNCT",
        "He runs quickly",
        {"runs": "He never runs quickly .", "never": "never runs"},
    ),
    "Old men often drink very cold tea.": (
        "Old 1 amod ADJ|men 3 nsubj NOUN|often 3 advmod ADV|drink 3 root VERB|very 5 advmod ADV|cold 6 amod ADJ"
        "|tea 3 obj NOUN|. 3 punct PUNCT",
        "Old men often drink very cold tea",
        {"cold": "very cold tea", "drink": "men often drink tea ."},
    ),
    "Mice were eaten.": (
        "Mice 2 nsubj:pass NOUN|were 2 aux:pass AUX|eaten 2 root VERB|. 2 punct PUNCT",
        "",
        {"Mice": "Mice eaten", "eaten": "Mice were eaten ."},
    ),
    "Dogs and cats bark.": (
        "Dogs 3 nsubj NOUN|and 2 cc CCONJ|cats 0 conj NOUN|bark 3 root VERB|. 3 punct PUNCT",
        "Dogs cats bark",
        {"Dogs": "Dogs cats bark", "and": "and cats"},
    ),
    "I don't know.": (
        "I 3 nsubj PRON|do 3 aux AUX|n't 3 advmod PART not|know 3 root VERB|. 3 punct PUNCT",
        "I know",
        {"know": "I do n't know ."},
    ),
    "Cats 😀👍🏽 sleep soundly 😴.": (
        "Cats 3 nsubj NOUN|😀 0 discourse SYM|👍🏽 0 discourse SYM|sleep 3 root VERB|soundly 3 advmod ADV"
        "|😴 3 discourse SYM|. 3 punct PUNCT",
        "Cats 😀 👍🏽 sleep soundly",
        {"Cats": "Cats 😀 👍🏽 sleep"},
    ),
    "Give him books.": (
        "Give 0 root VERB|him 0 iobj PRON|books 0 obj NOUN|. 0 punct PUNCT",
        "Give books",
        {"him": "Give him"},
    ),
    "It rains.": ("It 1 expl PRON|rains 1 root VERB|. 1 punct PUNCT", "", {"It": "It rains"}),
    "Vuelve del mar.": (
        "Vuelve 0 root VERB|de 3 case ADP|el 3 det DET|mar 0 obl NOUN|. 0 punct PUNCT",
        "",
        {"mar": "Vuelve del mar", "del": "del mar", "Vuelve": "Vuelve mar ."},
    ),
    "Run!": ("Run 0 root VERB|! 0 punct PUNCT", "", {"Run": "Run !"}),
    "Nobody parsed this one.": ("", "", {"parsed": "parsed"}),
}
SPACY = {
    "obj": "dobj",
    "iobj": "dative",
    "nsubj:pass": "nsubjpass",
    "aux:pass": "auxpass",
    "root": "ROOT",
    "discourse": "intj",
    "obl": "pobj",
    "case": "prep",
}


def make_corpus(store: Store, text: str, name: str = "a.txt", **settings: Any) -> Artifact:
    folder = store.root.parent / digest(text)[:8]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    settings = {"sentences": "line", "valid": 0.0} | settings
    return corpus.run([str(folder)], corpus.Config(**settings), store=store).artifact


def tree_of(text: str, first: int, scheme: str) -> dict[str, Any]:
    """The row of ``deps.parquet`` for a sentence that begins ``first`` code points into its document."""
    row: dict[str, Any] = {name: [] for name in ("start", "end", "form", "lemma", "upos", "head", "relation")}
    described = SENTENCES[text][0]
    place = 0
    for word in described.split("|") if described else []:
        form, head, relation, upos, *lemma = word.split()
        if form == "el":  # the second word of `del` has the span of the first
            start, end = row["start"][-1] - first, row["end"][-1] - first
        else:
            letters = "del" if form == "de" else form
            start = text.index(letters, place)
            end = place = start + len(letters)
        if scheme == "spacy-en":
            negates = relation == "advmod" and (lemma or [form])[0] in ("not", "never")
            relation = "neg" if negates else SPACY.get(relation, relation)
        for name, value in (("start", first + start), ("end", first + end), ("form", form), ("upos", upos)):
            row[name].append(value)
        row["lemma"].append((lemma or [form.lower()])[0])
        row["head"].append(int(head))
        row["relation"].append(relation)
    return row | {"status": "ok" if described else "failed: by hand"}


def write_deps(store: Store, text: Artifact, scheme: str = "ud", **changes: Any) -> Artifact:
    """An artifact as ``build-deps`` would write it, with the trees above."""
    rows = []
    for block in pq.read_table(text.path / "blocks.parquet").to_pylist():
        for number, span in enumerate(block["sentences"]):
            sentence = block["text"][span["start"] : span["end"]]
            place = {"document": block["document"], "sentence": block["first_sentence"] + number}
            rows.append(place | tree_of(sentence, block["start"] + span["start"], scheme) | changes)
    recipe = digest(["deps by hand", text.content, scheme, repr(changes)])
    manifest = {
        "stage": "build-deps",
        "config": {"parser": "spacy:en_by_hand" if scheme == "spacy-en" else "conllu:by_hand"},
        "inputs": {"corpus": text.describe()},
    }
    with store.build("deps", recipe, manifest) as out:
        with out.parquet(TREES, dependency_schema()) as writer:
            table = pa.Table.from_pylist(rows, schema=dependency_schema())
            for first in range(0, len(rows), 5):  # sentences of one document in several row groups
                writer.write_table(table.slice(first, 5))
        out.counts |= {"language": "en" if scheme == "spacy-en" else ""}
    return Artifact(store.folder("deps", recipe))


def build(store: Store, data: Artifact, **settings: Any) -> Artifact:
    result = masks.run(data.reference, masks.Config(**settings), store=store)
    assert result is not None
    return result.artifact


class Made:
    """All artifacts of one text: corpus, sequences, idf, deps and masks."""

    def __init__(self, store: Store, text: str, kind: str = "wordpiece", scheme: str = "ud", length: int = 512) -> None:
        self.text = make_corpus(store, text)
        words = tokenizer.Config(kind=kind, vocab_size=400, min_frequency=1)
        made = tokenizer.run(self.text.reference, words, store=store)
        packing = sequences.Config(max_length=length)
        self.data = sequences.run(self.text.reference, made.reference, packing, store=store).artifact
        counted = idf.run(self.text.reference, None, idf.Config(unit="sentence"), store=store)
        assert counted is not None
        self.idf, self.deps = counted.artifact, write_deps(store, self.text, scheme)
        self.masks = build(store, self.data, idf=self.idf.reference, deps=self.deps.reference)
        blocks = pq.read_table(self.text.path / "blocks.parquet").to_pylist()
        self.letters = "\n".join(block["text"] for block in blocks)

    def rows(self, split: str = "train") -> list[dict[str, list[Any]]]:
        tables = [pq.read_table(a.path / f"{split}.parquet").to_pylist() for a in (self.data, self.masks)]
        return [ours | theirs for ours, theirs in zip(*tables, strict=True)]

    def keeps(self, pattern: Any, row: dict[str, list[Any]]) -> torch.Tensor:
        """The mask of a pattern for a sequence, (queries, keys)."""
        from transformers import PreTrainedTokenizerFast

        backend = Tokenizer.from_str(self.data.read("tokenizer/tokenizer.json").decode())
        special = json.loads(self.data.read("tokenizer/special_tokens_map.json"))
        names = {name: special[name] for name in ("cls_token", "sep_token")}
        ids = torch.tensor([row["id"]])
        columns = Vocabulary.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **names)).columns(ids)
        columns |= {name: torch.tensor([row[name]]) for name in FEATURES if name in row}
        return read_pattern(pattern).build(Tokens(ids, torch.ones_like(ids, dtype=torch.bool), columns)).dense()[0]

    def letters_of(self, row: dict[str, list[Any]], keep: Any, start: int, end: int) -> str:
        """The letters of the kept tokens inside a stretch of the text."""
        kept: set[int] = set()
        for place in np.flatnonzero(np.asarray(keep)).tolist():
            if row["word"][place] >= 0 and start - 1 <= row["start"][place] and row["end"][place] <= end:
                kept.update(range(row["start"][place], row["end"][place]))
        return "".join(self.letters[place] for place in sorted(kept)).replace(" ", "").strip()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masks")


@pytest.fixture(scope="module")
def store(place: Path) -> Store:
    return Store(place / "store")


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, store: Store) -> Made:
    return Made(store, "\n".join(SENTENCES), request.param)


# roles by hand


@pytest.mark.parametrize("sentence", SENTENCES)
def test_roles_of_a_sentence_match_those_found_by_hand(sentence: str, made: Made) -> None:
    (row,) = made.rows()
    start = made.letters.index(sentence)
    inside = (start, start + len(sentence))
    major, dependency = made.keeps("major_relation", row), made.keeps("dependency", row)
    _, related, neighbours = SENTENCES[sentence]
    assert made.letters_of(row, major[1], *inside) == related.replace(" ", "")
    for word, expected in neighbours.items():
        first = start + sentence.index(word)
        query = next(place for place, (s, e) in enumerate(zip(row["start"], row["end"], strict=True)) if s <= first < e)
        assert made.letters_of(row, dependency[query], *inside) == expected.replace(" ", ""), word


def test_treebank_and_spacy_labels_give_the_same_roles(made: Made, store: Store) -> None:
    other = build(store, made.data, deps=write_deps(store, made.text, "spacy-en").reference)
    assert [name for name in other.counts["columns"] if name not in made.masks.counts["columns"]] == ["stop_word"]
    ours, theirs = (pq.read_table(a.path / "train.parquet").to_pylist()[0] for a in (made.masks, other))
    for name in ("word", "segment", "head", "pos", "negation"):
        assert ours[name] == theirs[name], name
    row = made.rows()[0]
    for pattern in ("major_relation", "dependency", "negation"):
        assert torch.equal(made.keeps(pattern, row), made.keeps(pattern, row | theirs)), pattern
    negating = {
        made.letters[s:e].strip() for s, e, no in zip(row["start"], row["end"], row["negation"], strict=True) if no
    }
    negating.discard("")  # a bare word-start mark
    assert negating and all(any(part in word for word in ("not", "n't", "never")) for part in negating)
    stops = {
        made.letters[s:e].strip()
        for s, e, stop in zip(row["start"], row["end"], theirs["stop_word"], strict=True)
        if stop
    }
    assert "dog" not in stops and stops


def test_the_rarest_words_of_each_sentence_are_kept(made: Made) -> None:
    (row,) = made.rows()
    keep = made.keeps({"name": "rare", "least": 1}, row)[0]
    by_hand = {
        # units are sentences, and most words occur in one of 13; of words with equal idf the later is kept
        "The dog chased a cat.": "cat",
        "She has red shoes.": "shoes",
        "I don't know.": "know",
        "Give him books.": "books",
        "Run!": "Run",
        "Nobody parsed this one.": "one",
    }
    for sentence, word in by_hand.items():
        start = made.letters.index(sentence)
        assert made.letters_of(row, keep, start, start + len(sentence)) == word


def test_columns_match_the_words_of_the_text(made: Made) -> None:
    (row,) = made.rows()
    assert {len(row[name]) for name in made.masks.counts["columns"]} == {len(row["id"])}
    text = [place for place, special in enumerate(row["special"]) if not special]
    assert [row["word"][place] for place in (0, -1)] == [-1, -1]
    segments = [row["segment"][place] for place in text]
    assert segments == sorted(segments) and set(segments) == set(range(len(SENTENCES)))
    for place in text:
        form = made.letters[row["start"][place] : row["end"][place]].strip()
        if form == "dog":
            assert RELATIONS[row["relation"][place]] == "nsubj"
            assert row["idf"][place] == pytest.approx(np.log(14 / 2) + 1)
        if form in (".", "!"):
            assert row["idf"][place] == 0


@pytest.mark.parametrize("length", [8, 9])
def test_sequences_that_cut_sentences_keep_the_values_inside(length: int, store: Store) -> None:
    whole, cut = Made(store, "\n".join(SENTENCES)), Made(store, "\n".join(SENTENCES), length=length)
    arcs = {split: counts["cut_arcs"] for split, counts in cut.masks.counts["splits"].items()}
    assert arcs["train"] > 0 == whole.masks.counts["splits"]["train"]["cut_arcs"]
    assert any(re.search("leads? out of a sequence", warning) for warning in cut.masks.manifest["warnings"])
    known = whole.rows()[0]
    token_at = {start: place for place, start in enumerate(known["start"]) if start >= 0}
    dropped = set()
    for row in cut.rows():
        for place, start in enumerate(row["start"]):
            if start < 0:
                continue
            in_whole = token_at[start]
            for name in ("relation", "pos", "idf", "negation"):
                assert row[name][place] == known[name][in_whole]
            head = row["head"][place]
            if head >= 0:
                # the same word as in the uncut sequence, found by its offset
                of_head = row["start"][row["word"].index(head)]
                if known["word"][token_at[of_head]] != known["head"][in_whole]:
                    pytest.fail(f"token {place} has another head")
            elif known["head"][in_whole] >= 0:
                dropped.add((tuple(row["start"]), row["word"][place]))
    assert len(dropped) == arcs["train"]


def test_without_trees_only_syntactic_columns_are_missing_with_the_reason(store: Store) -> None:
    made = Made(store, "\n".join(SENTENCES))
    alone = build(store, made.data, idf=made.idf.reference)
    assert alone.counts["columns"] == ["word", "segment", "idf"]
    assert set(alone.counts["missing"]) == {"head", "relation", "pos", "negation", "stop_word"}
    assert alone.counts["missing"]["head"] == "no --deps was given: guide build-deps"
    assert alone.manifest.get("warnings", []) == []
    assert build(store, made.data).counts["columns"] == ["word", "segment"]


# the artifact


def test_masks_do_not_depend_on_shards(store: Store, every: bool) -> None:
    """Nor on processes, which `test_statistics` tries for all statistics."""
    made = Made(store, "\n".join([*SENTENCES] * 40), length=32)
    kept = {"idf": made.idf.reference, "deps": made.deps.reference}
    for settings in (
        {"shard_size": 300},
        {"shard_size": 1 << 30},
        *([{"shard_size": 1000, "jobs": 2}] if every else []),
    ):
        again = masks.run(made.data.reference, masks.Config(**kept, **settings), store=store, force=True)
        assert again is not None and not again.reused
        assert again.artifact.files == made.masks.files
        assert again.artifact.counts == made.masks.counts


def test_shares_are_merged_by_the_plain_command(store: Store) -> None:
    made = Made(store, "\n".join([*SENTENCES] * 30), length=16)
    settings = {"idf": made.idf.reference, "shard_size": 300}
    for share in ("1/3", "2/3", "3/3"):
        assert masks.run(made.data.reference, masks.Config(**settings, shard=share), store=store) is None
    partial = [path for path in store.unfinished() if path.parent.name == "masks"]
    assert len(list(partial[0].rglob("*.partial"))) > 6
    assert build(store, made.data, **settings).counts["splits"]["train"]["sequences"] == len(made.rows())
    assert not [path for path in store.unfinished() if path.parent.name == "masks"]


def test_tables_of_another_corpus_are_refused_with_both_names(store: Store) -> None:
    made, other = Made(store, "\n".join(SENTENCES)), Made(store, "\n".join([*SENTENCES] * 2))
    for role in ("idf", "deps"):
        theirs = getattr(other, role)
        with pytest.raises(
            ArtifactMismatch, match=f"{theirs.reference} is of the corpus {other.text.reference}"
        ) as raised:
            build(store, made.data, **{role: theirs.reference})
        assert made.data.reference in raised.value.message and made.text.reference in raised.value.message


def test_idf_of_tokens_is_refused(store: Store) -> None:
    made = Made(store, "\n".join(SENTENCES))
    recipe = made.data.manifest["inputs"]["tokenizer"]["recipe"]
    counted = idf.run(made.text.reference, f"tokenizer/{recipe[:16]}", idf.Config(), store=store)
    assert counted is not None
    with pytest.raises(ArtifactMismatch, match="masks need the idf of words"):
        build(store, made.data, idf=counted.reference)


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    made = Made(store, "\n".join(SENTENCES))
    made.text.path.rename(tmp_path / "gone")
    with pytest.raises(
        ArtifactMissing, match=f"{made.data.reference} was made from {made.text.reference}, which is not in"
    ):
        masks.run(made.data.reference, masks.Config(), store=store, force=True)


def test_heads_outside_their_sentence_and_invalid_idf_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    made = Made(store, "It rains.\nIt rains.")
    for wrong in ([0, 7, 0], [-2, 0, 0]):
        with pytest.raises(ArtifactDamaged, match="a head lies outside its sentence"):
            build(store, made.data, deps=write_deps(store, made.text, head=wrong).reference)
    with pytest.raises(ArtifactDamaged, match="different lengths"):
        build(store, made.data, deps=write_deps(store, made.text, head=[0]).reference)
    with store.build("idf", digest("nan"), {"stage": "build-idf", "inputs": {"corpus": made.text.describe()}}) as out:
        with out.parquet("idf.parquet", idf.idf_schema()) as writer:
            writer.write_table(pa.table([["it"], [1], [float("nan")]], schema=idf.idf_schema()))
    with pytest.raises(NumericalError, match="negative or not finite"):
        build(store, made.data, idf=Artifact(store.folder("idf", digest("nan"))).reference)


def test_every_token_gets_the_tree_of_its_own_sentence(store: Store) -> None:
    """Checks thirty documents in three splits."""
    folder = store.root.parent / "many"
    folder.mkdir(exist_ok=True)
    names: Sequence[str] = [*SENTENCES]
    for number in range(30):
        lines = [names[(number + k) % len(names)] for k in range(number % 5 + 1)]
        (folder / f"{number:02}.txt").write_text("\n".join(lines), encoding="utf-8")
    text = corpus.run([str(folder)], corpus.Config(sentences="line", valid=0.3, test=0.2), store=store).artifact
    made = tokenizer.run(
        text.reference, tokenizer.Config(kind="wordpiece", vocab_size=300, min_frequency=1), store=store
    )
    data = sequences.run(text.reference, made.reference, sequences.Config(max_length=48), store=store).artifact
    found = build(store, data, deps=write_deps(store, text).reference, shard_size=400)
    blocks = pq.read_table(text.path / "blocks.parquet").to_pylist()
    trees = {}
    for block in blocks:
        for number, span in enumerate(block["sentences"]):
            sentence = block["text"][span["start"] : span["end"]]
            trees[block["document"], block["first_sentence"] + number] = tree_of(
                sentence, block["start"] + span["start"], "ud"
            )
    splits = [split for split in ("train", "valid", "test") if f"{split}.parquet" in data.files]
    assert len(splits) == 3
    checked = 0
    for split in splits:
        tables = [pq.read_table(a.path / f"{split}.parquet").to_pylist() for a in (data, found)]
        for row, roles in zip(*tables, strict=True):
            for place, (document, sentence) in enumerate(zip(row["document"], row["sentence"], strict=True)):
                tree = trees.get((document, sentence))
                if tree is None or not tree["form"]:
                    continue
                word = next(
                    n
                    for n, (s, e) in enumerate(zip(tree["start"], tree["end"], strict=True))
                    if s <= row["start"][place] < e
                )
                expected = tree["relation"][word]
                expected = (
                    "advmod:neg" if expected == "advmod" and tree["lemma"][word] in ("not", "never") else expected
                )
                assert RELATIONS[roles["relation"][place]] == expected
                checked += 1
    assert checked > 300


# training


ROLES = "preset:roles"


def train(store: Store, made: Made, **settings: Any) -> Artifact:
    tiny = {"size": "tiny", "layers": 2, "hidden": 40, "heads": 5, "ffn": 32, "steps": 2, "batch_size": 4}
    config = pretrain.Config(**(tiny | {"evaluate_every": 2} | settings))
    result = pretrain.run(made.data.reference, config, store=store)
    assert result is not None
    return result.artifact


def test_preset_roles_trains_from_these_artifacts(store: Store) -> None:
    made = Made(store, "\n".join([*SENTENCES] * 6), length=32)
    model = train(store, made, plan=ROLES, masks=made.masks.reference)
    assert len(model.counts["matches"]) == 5 and all(model.counts["matches"].values())
    assert model.manifest["inputs"]["masks"]["content"] == made.masks.content
    rows = [json.loads(line) for line in model.read("metrics.jsonl").splitlines()]
    assert all(np.isfinite(row["loss/mlm"]) for row in rows)


def test_the_content_of_masks_decides_the_recipe(store: Store) -> None:
    made = Made(store, "\n".join([*SENTENCES] * 6), length=32)
    plan = store.root.parent / "rare.toml"
    plan.write_text('[[guide]]\npattern = "rare"\nmechanism = "mask"\nheads = [0]\n')
    other = build(store, made.data, idf=made.idf.reference)
    first, second = (train(store, made, plan=str(plan), masks=m.reference) for m in (made.masks, other))
    assert first.recipe != second.recipe
    # the path of masks does not matter, only their content
    assert train(store, made, plan=str(plan), masks=str(made.masks.path)).recipe == first.recipe


def test_masks_of_other_sequences_are_refused(store: Store) -> None:
    made, other = Made(store, "\n".join([*SENTENCES] * 6), length=32), Made(store, "\n".join(SENTENCES))
    with pytest.raises(ArtifactMismatch, match=f"{other.masks.reference} is of {other.data.reference}"):
        train(store, made, plan=ROLES, masks=other.masks.reference)


def test_each_of_several_sequences_has_its_own_masks(store: Store) -> None:
    first, second = (Made(store, "\n".join([*some] * 6), length=32) for some in (SENTENCES, list(SENTENCES)[::-1]))
    pieces = first.data.manifest["inputs"]["tokenizer"]["recipe"][:16]
    settings = sequences.Config(max_length=32)
    data = [first.data, sequences.run(second.text.reference, f"tokenizer/{pieces}", settings, store=store).artifact]
    sources = {"idf": second.idf.reference, "deps": second.deps.reference}
    of_data = [first.masks, build(store, data[1], **sources)]
    config = {
        "size": "tiny",
        "layers": 1,
        "hidden": 40,
        "heads": 5,
        "ffn": 32,
        "steps": 2,
        "batch_size": 4,
        "plan": ROLES,
    }

    def run(*given: Artifact) -> Artifact:
        settings = pretrain.Config(masks=[masks.reference for masks in given], **config)
        result = pretrain.run([one.reference for one in data], settings, store=store)
        assert result is not None
        return result.artifact

    inputs = run(*of_data).manifest["inputs"]
    assert [inputs[role]["content"] for role in ("masks", "masks-2")] == [masks.content for masks in of_data]
    found = Examples.read_all(data, "train", 400, features=("head",), masks=of_data)
    alone = [
        Examples.read(one, "train", 400, features=("head",), masks=masks)
        for one, masks in zip(data, of_data, strict=True)
    ]
    assert found.columns["head"].tolist() == [head for part in alone for head in part.columns["head"]]
    with pytest.raises(InputError, match="1 masks for 2 sequences"):
        run(of_data[0])
    with pytest.raises(ArtifactMismatch, match=f"{of_data[1].reference} is of {data[1].reference}"):
        run(*of_data[::-1])
    poor = build(store, data[1], idf=second.idf.reference)
    with pytest.raises(PlanError, match=f"head, relation .*{poor.reference} does not have"):
        run(of_data[0], poor)


@pytest.mark.parametrize(
    ("given", "missing", "hint"), [("idf", "head, relation", "build-deps"), ("deps", "idf", "build-idf")]
)
def test_a_pattern_whose_source_is_missing_is_refused_with_its_name(
    given: str, missing: str, hint: str, store: Store
) -> None:
    made = Made(store, "\n".join([*SENTENCES] * 6), length=32)
    part = build(store, made.data, **{given: getattr(made, given).reference})
    with pytest.raises(PlanError, match=f"needs the features {missing}.*{part.reference} does not have") as raised:
        train(store, made, plan=ROLES, masks=part.reference)
    assert hint in str(raised.value.hint)
    if given == "idf":
        assert "preset:roles-unparsed" in str(raised.value.hint)
        train(store, made, plan="preset:roles-unparsed", masks=part.reference)
    with pytest.raises(PlanError) as raised:
        train(store, made, plan=ROLES)
    assert "guide build-masks" in str(raised.value.hint) and "--masks" in str(raised.value.hint)


def test_a_role_that_matches_no_token_is_refused_by_name(store: Store) -> None:
    made = Made(store, "\n".join([*SENTENCES] * 6), length=32)
    no_words: dict[str, Any] = {key: [] for key in ("start", "end", "form", "lemma", "upos", "head", "relation")}
    deps = write_deps(store, made.text, **no_words, status="too long")
    part = build(store, made.data, idf=made.idf.reference, deps=deps.reference)
    assert any("no token has a head, relation or pos value" in line for line in part.manifest["warnings"])
    with pytest.raises(
        PlanError, match=r"guide '.*' matches nothing in the training text: .* no token has the feature head"
    ):
        train(store, made, plan=ROLES, masks=part.reference)


def test_the_meaning_of_codes_is_stored_and_checked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(store, "\n".join([*SENTENCES] * 6), length=32)
    schema = pq.read_schema(made.masks.path / "train.parquet")
    for name, codes in (("relation", features.RELATIONS), ("pos", features.UPOS)):
        assert json.loads(schema.field(name).metadata[b"codes"]) == list(codes)
    check_codes(made.masks)
    monkeypatch.setattr(features, "CODES", {"relation": features.RELATIONS[::-1], "pos": features.UPOS})
    with pytest.raises(ArtifactMismatch, match="column relation was written by a version of guide with other codes"):
        train(store, made, plan=ROLES, masks=made.masks.reference)


def test_scores_of_heads_choose_them(store: Store) -> None:
    made = Made(store, "\n".join([*SENTENCES] * 6), length=32)
    plan = store.root.parent / "least.toml"
    plan.write_text('[[guide]]\npattern = "next"\nmechanism = "attention_loss"\nheads = ["least important 1"]\n')
    scores = store.root.parent / "scores.json"
    scores.write_text(json.dumps([[5, 4, 3, 2, 1], [1, 2, 3, 4, 5]]))
    with pytest.raises(InputError, match="needs a table of scores"):
        train(store, made, plan=str(plan))
    model = train(store, made, plan=str(plan), scores=str(scores))
    assert model.manifest["inputs"]["scores"]["count"] == 1
    scores.write_text(json.dumps([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]))
    assert train(store, made, plan=str(plan), scores=str(scores)).recipe != model.recipe


def test_patterns_with_weights_use_cooccurrence_counts(store: Store) -> None:
    from pipelines.stages import cooccurrence

    made, other = Made(store, "\n".join([*SENTENCES] * 6), length=32), Made(store, "\n".join(SENTENCES), "byte-bpe")
    plan = store.root.parent / "conflict.toml"
    plan.write_text('[[guide]]\npattern = "conflict"\nmechanism = "bias"\nheads = [0]\n')
    with pytest.raises(PlanError, match="needs the table cooccurrence") as raised:
        train(store, made, plan=str(plan))
    assert "give it with --cooccur" in str(raised.value.hint)
    counted = {}
    for name, one in (("ours", made), ("theirs", other)):
        pieces = one.data.manifest["inputs"]["tokenizer"]["recipe"][:16]
        result = cooccurrence.run(one.text.reference, f"tokenizer/{pieces}", cooccurrence.Config(top=50), store=store)
        assert result is not None
        counted[name] = result.artifact
    with pytest.raises(ArtifactMismatch, match="has another tokenizer"):
        train(store, made, plan=str(plan), cooccur=counted["theirs"].reference)
    model = train(store, made, plan=str(plan), cooccur=counted["ours"].reference)
    assert model.manifest["inputs"]["cooccur"]["content"] == counted["ours"].content
    rows = [json.loads(line) for line in model.read("metrics.jsonl").splitlines()]
    assert all(np.isfinite(row["loss/mlm"]) for row in rows)
    pairs = store.root.parent / "pairs.tsv"
    pairs.write_text("{}\t{}\n".format(*list(SENTENCES)[:2]))
    scores = []
    for follows in (True, False):
        probed = probe_pairs.run(model.reference, [str(pairs)], probe_pairs.Config(plan=follows), store=store).artifact
        scores.append(pq.read_table(probed.path / "pairs.parquet")["good_score"].to_pylist())
    assert scores[0] != scores[1], "the counts move the attention, and with it the score"
    repeated = probe_induction.run(model.reference, probe_induction.Config(length=8, sequences=2), store=store)
    assert repeated.artifact.manifest["inputs"]["cooccur"]["content"] == counted["ours"].content
    plain = train(store, made)
    whole = probe_distance.Config(split="train")
    between = probe_distance.run(plain.reference, made.data.reference, model.reference, whole, store=store).artifact
    assert {"cooccur", "other_cooccur"} & set(between.manifest["inputs"]) == {"other_cooccur"}
    itself = probe_distance.run(model.reference, made.data.reference, model.reference, whole, store=store).artifact
    assert all(row["counterpart"] == 0 for row in pq.read_table(itself.path / "heads.parquet").to_pylist())


# real data


def test_a_real_treebank_gives_masks_that_follow_its_trees(tmp_path: Path) -> None:
    from pipelines.stages import dependencies

    source = shared("data") / "ud-english-ewt" / "en_ewt-ud-dev.conllu.gz"
    store = Store(tmp_path / "store")
    text = corpus.run([str(source)], corpus.Config(), store=store).artifact
    trees = dependencies.run(text.reference, dependencies.Config(parser=f"conllu:{source}"), store=store)
    counted = idf.run(text.reference, None, idf.Config(unit="sentence"), store=store)
    pieces = tokenizer.run(text.reference, tokenizer.Config(vocab_size=2000), store=store)
    data = sequences.run(text.reference, pieces.reference, sequences.Config(max_length=128), store=store).artifact
    assert trees is not None and counted is not None
    found = build(store, data, idf=counted.reference, deps=trees.reference)
    table = {(row["document"], row["sentence"]): row for row in pq.read_table(trees.artifact.path / TREES).to_pylist()}
    words = arcs = 0
    for split in ("train", "valid"):
        tables = [pq.read_table(a.path / f"{split}.parquet").to_pylist() for a in (data, found)]
        for row, roles in zip(*tables, strict=True):
            seen: dict[int, tuple[int, int, int]] = {}
            for place, number in enumerate(roles["word"]):
                if number < 0:
                    continue
                tree = table[row["document"][place], row["sentence"][place]]
                start, end = row["start"][place], row["end"][place]
                shares = [min(end, e) - max(start, s) for s, e in zip(tree["start"], tree["end"], strict=True)]
                word = shares.index(max(shares))
                seen[number] = (row["document"][place], row["sentence"][place], word)
                words += 1
            for place, head in enumerate(roles["head"]):
                if head >= 0:
                    document, sentence, word = seen[roles["word"][place]]
                    wanted = table[document, sentence]["head"][word]
                    of_head = seen[head]
                    same_place = (
                        table[document, sentence]["start"][wanted] == table[document, sentence]["start"][of_head[2]]
                    )
                    assert of_head[:2] == (document, sentence) and (of_head[2] == wanted or same_place)
                    arcs += 1
    assert words > 25_000 and arcs > 0.95 * words
