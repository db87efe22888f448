"""Files of well-known data sets: those at hand with the counts that their READMEs have, and every other layout by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from guidance.errors import InputError
from pipelines.text.blocks import Notes
from pipelines.text.examples import Layout, Record
from pipelines.text.formats import LAYOUTS, format_for
from pipelines.text.readers import TextFile
from tests.shared import shared


def read(path: Path, name: str, split: str = "train", **settings: Any) -> tuple[list[Record], Notes]:
    layout, notes = Layout(format=name, **settings), Notes()
    file = TextFile(path, path.name, layout.encoding, notes)
    return list(format_for(layout, [path.name]).read(file, split, layout)), notes


AT_HAND: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "glue-cola/in_domain_train.tsv": ("glue-cola", {"0": 2528, "1": 6023}, {}),
    "glue-mnli/kshot-16-13/dev_matched.tsv": (
        "glue-mnli",
        dict.fromkeys(("contradiction", "entailment", "neutral"), 16),
        {},
    ),
    "glue-mrpc/msr_paraphrase_test.txt": ("glue-mrpc", {"0": 578, "1": 1147}, {}),
    "glue-qqp/kshot-16-13/train.tsv": ("glue-qqp", {"0": 16, "1": 16}, {}),
    "glue-rte/dev.tsv": ("glue-rte", {"entailment": 146, "not_entailment": 131}, {}),
    "glue-qnli/dev.json": (
        "json",
        {"entailment": 504, "not_entailment": 496},
        {"text_column": "text_a", "pair_column": "text_b"},
    ),
    "nli-sick/SICK_trial.txt": ("sick", {"CONTRADICTION": 74, "ENTAILMENT": 144, "NEUTRAL": 282}, {}),
    "robust-paws-qqp/dev_and_test.tsv": ("paws", {"0": 486, "1": 191}, {}),
    "robust-americasnli/dev.tsv": ("americasnli", {"contradiction": 2155, "entailment": 2158, "neutral": 2144}, {}),
    "cls-masakhanews/orm/dev.tsv.gz": (
        "masakhanews",
        {"entertainment": 16, "health": 49, "politics": 50, "sports": 40, "technology": 7},
        {},
    ),
    "cls-trec/raw/TREC.train": (
        "trec",
        {"ABBR": 86, "DESC": 1162, "ENTY": 1250, "HUM": 1223, "LOC": 835, "NUM": 896},
        {},
    ),
    "cls-sst/trees/dev.txt": ("sst", {"negative": 139 + 289, "positive": 279 + 165}, {}),
    "cls-sst/stsa.fine.dev": ("label-text", {"0": 139, "1": 289, "2": 229, "3": 279, "4": 165}, {}),
    "cls-cr/custrev.all": ("label-text", {"0": 1368, "1": 2407}, {"encoding": "latin-1"}),
}


@pytest.mark.parametrize("file", AT_HAND)
def test_files_at_hand_have_the_counts_of_their_readme(file: str) -> None:
    name, labels, settings = AT_HAND[file]
    records, _ = read(shared("data") / file, name, **settings)
    assert Counter(record.label for record in records) == labels
    assert sum(not record.text for record in records) == (4 if "custrev" in file else 0)
    if name not in ("glue-cola", "masakhanews", "trec", "sst", "label-text"):
        assert all(record.pair for record in records)


def test_scores_of_sts_b_are_read_from_rows_of_two_lengths() -> None:
    records, _ = read(shared("data") / "glue-stsb" / "sts-test.csv", "glue-stsb")
    assert len(records) == 1379
    scores = [float(record.label or "nan") for record in records]
    assert 0 <= min(scores) <= max(scores) <= 5
    assert all(record.text and record.pair for record in records)


def test_test_files_without_labels_are_read() -> None:
    records, _ = read(shared("data") / "glue-rte" / "test.tsv", "glue-rte", "test")
    assert len(records) == 3000
    assert {record.label for record in records} == {None}
    assert [record.id for record in records[:2]] == ["0", "1"]


def test_literals_of_bytes_become_text_and_languages_are_sources() -> None:
    paws, _ = read(shared("data") / "robust-paws-qqp" / "dev_and_test.tsv", "paws")
    assert not any((record.text or "").startswith(("b'", 'b"')) for record in paws)
    assert "I 'm dating" in (paws[1].text or "")
    languages = Counter(
        record.source for record in read(shared("data") / "robust-americasnli" / "dev.tsv", "americasnli")[0]
    )
    assert languages["nah"] == 376
    assert languages["oto"] == 222
    assert len(languages) == 10


def test_trees_give_sentences_or_all_their_phrases() -> None:
    path = shared("data") / "cls-sst" / "trees" / "dev.txt"
    fine, _ = read(path, "sst-fine")
    assert fine[0].text == "It 's a lovely film with lovely performances by Buy and Accorsi ."
    assert fine[0].label == "3"
    phrases, _ = read(path, "sst-fine-phrases")
    assert len(phrases) == 41_447
    assert len({record.id for record in phrases}) == len(phrases)
    sentences, _ = read(path, "sst-fine-phrases", "valid")
    assert [record.text for record in sentences] == [record.text for record in fine]


HAND: dict[str, tuple[str, list[tuple[str | None, ...]]]] = {
    "glue-cola": ("index\tsentence\n0\tBill ran.\n", [("Bill ran.", None, None)]),
    "glue-sst2": ('sentence\tlabel\nnice "one\t1\n', [('nice "one', None, "1")]),
    "glue-stsb": (
        "index\tgenre\tsentence1\tsentence2\tscore\n0\tx\tA b.\tC d.\t2.5\n",
        [("A b.", "C d.", "2.5")],
    ),
    "glue-mrpc": (
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\tA b.\tC d.\n1\t9\t5\tE.\tF.\n",
        [("A b.", "C d.", None), ("E.", "F.", None)],
    ),
    "glue-mnli": (
        "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA\tB\tneutral\tneutral\n1\tC\tD\tneutral\t-\n",
        [("A", "B", "neutral")],
    ),
    "glue-qnli": ("index\tquestion\tsentence\tlabel\n0\tWho?\tMe.\tentailment\n", [("Who?", "Me.", "entailment")]),
    "glue-qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tA?\tB?\t0\nbroken row\n",
        [("A?", "B?", "0")],
    ),
    "glue-wnli": ("index\tsentence1\tsentence2\tlabel\n0\tA\tB\t1\n", [("A", "B", "1")]),
    "sick-relatedness": (
        "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n1\tA\tB\t4.5\tNEUTRAL\n",
        [("A", "B", "4.5")],
    ),
    "anli": ('{"uid": "u", "context": "A", "hypothesis": "B", "label": "c"}\n', [("A", "B", "contradiction")]),
    "advglue-qnli": (
        '{"sst2": [], "qnli": [{"idx": 0, "question": "Q", "sentence": "S", "label": 1}]}',
        [("Q", "S", "1")],
    ),
    "advglue-sst2": ('{"sst2": [{"idx": 7, "label": 0, "sentence": "S"}]}', [("S", None, "0")]),
    "json": (
        '{"10": {"text": "ten", "label": 1}, "9": {"text": "nine", "label": 0}}',
        [("nine", None, "0"), ("ten", None, "1")],
    ),
    "lines": ("one text\n\nA\tB\n", [("one text", None, None), ("A", "B", None)]),
    "trec-fine": ("DESC:manner How ?\n", [("How ?", None, "DESC:manner")]),
    "trec": ("DESC:manner How ?\n", [("How ?", None, "DESC")]),
    "sst-phrases": (
        "(3 (2 A) (4 (3 fine) (2 film)))\n",
        [("A fine film", None, "positive"), ("fine film", None, "positive"), ("fine", None, "positive")],
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_layouts_by_hand(name: str, tmp_path: Path) -> None:
    content, wanted = HAND[name]
    path = tmp_path / "file"
    path.write_text(content)
    records, _ = read(path, name, "test" if name in ("glue-cola", "glue-mrpc") else "train")
    assert [(record.text, record.pair, record.label) for record in records] == wanted
    if content.startswith("index\t"):
        assert [record.id for record in records] == [str(number) for number in range(len(records))]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("glue-rte", "a\tb\n1\t2\n", "not --format glue-rte, whose columns are sentence1, sentence2, label"),
        ("paws", "id\tsentence1\tsentence2\tlabel\n1\tb'\\xff'\tb'a'\t0\n", "line 2: neither text nor a bytes literal"),
        ("advglue-mnli", '{"sst2": []}', "has no task 'mnli'"),
        ("json", '"text"', "expected a JSON list"),
        ("json", "[1]", "example 1: expected a JSON object"),
        ("sst", "(3 (2 A) (4 film)\n", "line 1: a bracket is missing"),
        ("sst", "(7 A)\n", "line 1: not a tree"),
        ("sst", "(3 A))\n", "line 1: a bracket too many"),
        ("anli", "[]\n", "not --format anli"),
    ],
)
def test_other_files_are_refused_with_their_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read(path, name)


def test_every_layout_is_tested() -> None:
    tested = {name for name, _, _ in AT_HAND.values()} | set(HAND) | {"glue-stsb", "sst-fine", "sst-fine-phrases"}
    related = {"advglue-qqp": "advglue-qnli", "advglue-mnli": "advglue-qnli", "advglue-rte": "advglue-qnli"}
    assert {name for name in LAYOUTS if related.get(name, name) not in tested} == set()
