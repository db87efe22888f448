"""``guide build-dataset`` on documents with summaries or sections: every format and its quirks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from guidance.errors import InputError
from pipelines.stages import dataset
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from tests.documents import column, make, parts, write
from tests.shared import shared

PAPER = """<PAPER>
  <S sid="0">A Title</S>
  <ABSTRACT><S sid="1" ssid="1">Secret abstract.</S></ABSTRACT>
  <SECTION title="1 Introduction" number="1"><S sid="2">We &amp; they parse.</S><S sid="3">It   works.</S></SECTION>
  <SECTION title="Abstract" number="2"><S sid="4">Secret again.</S></SECTION>
  <SECTION title="2 End" number="3"><S sid="5">The end.</S></SECTION>
</PAPER>
"""


def paper(folder: Path, id_: str, xml: str = PAPER, summary: str = "A Title\nWe parse.\n\nIt works.\n") -> None:
    write(folder / f"{id_}.xml.gz", gzip.compress(xml.encode()))
    write(folder / f"{id_}.scisummnet_human.txt", summary)
    write(folder / f"{id_}.abstract.txt", "")  # some are empty


def test_scisummnet_reads_sections_and_never_an_abstract(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "papers"
    paper(folder, "A1")
    paper(folder, "A2", "<PAPER><S sid='0'>Flat.</S></PAPER>")
    write(folder / "A3.xml", PAPER)
    write(folder / "README.md", "not read")
    made = make(store, folder, format="scisummnet")
    assert parts(made) == [[["We & they parse.", "It works."], ["The end."]]]
    assert column(made, "pair") == ["We parse.\nIt works."]
    assert column(made, "label") == [None]
    assert made.counts["shape"] == "summaries" and made.counts["summary_sentences"] == 3
    assert made.counts["dropped"] == {"a paper without sections, whose abstract nothing marks": 1, "no summary": 1}


@pytest.mark.parametrize(
    ("xml", "message"),
    [("<PAPER><S>", "A1.xml.gz': not XML"), ('<!DOCTYPE x [<!ENTITY a "b">]><x/>', "with declarations of its own")],
)
def test_scisummnet_refuses_what_is_no_paper(store: Store, tmp_path: Path, xml: str, message: str) -> None:
    paper(tmp_path / "papers", "A1", xml)
    with pytest.raises(InputError, match=message):
        make(store, tmp_path / "papers", format="scisummnet")


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_scitldr_keeps_all_references_and_takes_one_sentence(store: Store, tmp_path: Path) -> None:
    record = {"paper_id": "p", "source": ["First one. \n", "", "Second."], "target": ["Short one.", "Another."]}
    made = make(store, write(tmp_path / "a.jsonl", lines(record)), format="scitldr")
    assert parts(made) == [[["First one.", "Second."]]]
    assert column(made, "pair") == ["Short one.\n\nAnother."]
    assert column(made, "id") == ["p"] and made.counts["summary_sentences"] == 1


def test_presumm_joins_tokens_and_nyt_50_drops_short_summaries(store: Store, tmp_path: Path) -> None:
    long, short = ([["word"] * number] for number in (50, 49))
    records = [{"src": [["a", "word", "."]], "tgt": target} for target in (long, short)]
    path = write(tmp_path / "a.json", json.dumps(records))
    assert parts(make(store, path, format="presumm")) == [[["a word ."]]] * 2
    made = make(store, path, format="presumm", min_summary_words=50)
    assert len(parts(made)) == 1 and made.counts["dropped"] == {"a summary of fewer than 50 words": 1}


def test_qmsum_reads_turns_and_the_general_query(store: Store, tmp_path: Path) -> None:
    turns = [{"speaker": "A", "content": "We meet. All came."}, {"speaker": "B", "content": "Yes."}]
    record = {"meeting_transcripts": turns, "general_query_list": [{"query": "q", "answer": "They meet."}]}
    made = make(store, write(tmp_path / "a.jsonl", lines(record, {**record, "general_query_list": []})), format="qmsum")
    assert parts(made) == [[["We meet.", "All came."], ["Yes."]]]
    assert column(made, "pair") == ["They meet."] and made.counts["dropped"] == {"no summary": 1}


def test_own_json_lines_with_summaries(store: Store, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        lines(
            {"body": "One here. Two here.\n\nThree.", "gist": ["Here.", "Three."], "n": 7},
            {"body": ["Setup sentence. Not split.", "Next."], "gist": "unrelated", "n": 8},
            {"body": "Text.", "gist": None, "n": 9},
            {"body": "", "gist": "x", "n": 10},
        ),
    )
    made = make(store, path, text_column="body", summary_column="gist", id_column="n")
    assert parts(made) == [[["One here.", "Two here."], ["Three."]], [["Setup sentence. Not split.", "Next."]]]
    assert column(made, "id") == ["7", "8"]
    assert made.counts["dropped"] == {"no summary": 1, "empty text": 1}
    assert any("a summary shares no word with its text: 'a.jsonl', line 2" in w for w in made.manifest["warnings"])


def test_choi_takes_separators_anywhere_and_counts_documents_without_a_boundary(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    write(folder / "1/a.ref", "==========\nOne .\nTwo .\n==========\nThree .\n==========\n")
    write(folder / "b.txt", "First\n\n==========\n==========\nSecond\n==========")
    write(folder / "c.ref", "Only one\nsection here\n")
    made = make(store, folder, format="choi")
    assert parts(made) == [[["One .", "Two ."], ["Three ."]], [["First"], ["Second"]], [["Only one", "section here"]]]
    assert column(made, "id") == ["1/a.ref", "b.txt", "c.ref"]
    assert any("a document has one section, so no boundary: 'c.ref'" in w for w in made.manifest["warnings"])
    other = make(store, write(tmp_path / "d.txt", "a\n--\nb\n"), format="choi", separator="--")
    long = write(tmp_path / "long.txt", "One of many sentences .\n--\n" * 5000)
    with pytest.raises(InputError, match=r"'long.txt': no line is '==========', which parts sections"):
        make(store, long, format="choi")
    assert parts(other) == [[["a"], ["b"]]]


def test_wiki_727k_drops_preface_lists_and_deep_headings(store: Store, tmp_path: Path) -> None:
    text = """========,1,preface.
Preface.
========,2,History.
Old.
***LIST***.
========,3,Detail.
Deeper.
========,2,Empty.
========,1,Now.
New.
"""
    write(tmp_path / "wiki/0/12345", text)
    made = make(store, tmp_path / "wiki", format="wiki-727k")
    assert parts(made) == [[["Old.", "Deeper."], ["New."]]]
    with pytest.raises(InputError, match="'x', line 1: not a heading of Wiki-727K"):
        make(store, write(tmp_path / "x", "==========\nA.\n"), format="wiki-727k")


def test_wikisection_cuts_the_text_at_its_annotations(store: Store, tmp_path: Path) -> None:
    text = "City is big. It grows.\nHistory is long."
    spans = [{"begin": 23, "length": 16}, {"begin": 0, "length": 22}]
    record = {"id": "c1", "text": text, "annotations": spans}
    made = make(store, write(tmp_path / "a.json", json.dumps([record])), format="wikisection")
    assert parts(made) == [[["City is big.", "It grows."], ["History is long."]]]
    for wrong, message in (({"begin": 30, "length": 99}, "inside the text"), ({"begin": 5, "length": 9}, "overlap")):
        path = write(tmp_path / "b.json", json.dumps([record | {"annotations": [spans[1], wrong]}]))
        with pytest.raises(InputError, match=f"'b.json', document 1: .*{message}"):
            make(store, path, format="wikisection")


def test_wikisection_names_documents_and_not_lines(store: Store, tmp_path: Path) -> None:
    text = "City is big."
    record = {"text": text, "annotations": [{"begin": 0, "length": len(text)}]}
    without = [record | {"id": None}, record | {"id": None, "text": text.upper()}]
    assert make(store, write(tmp_path / "a.json", json.dumps(without)), format="wikisection").counts["documents"] == 2
    twice = json.dumps([record | {"id": "c"}, record | {"id": "c"}])
    with pytest.raises(InputError, match=r"'b.json', document 2: duplicate id 'c', first used at 'b.json', document 1"):
        make(store, write(tmp_path / "b.json", twice), format="wikisection")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_are_sentences_of_formats_that_leave_their_texts_whole(store: Store, tmp_path: Path, end: str) -> None:
    text = f"no marks here{end}a second line{end}{end}third"
    record = {"id": "c1", "text": text, "annotations": [{"begin": 0, "length": len(text)}]}
    path = write(tmp_path / "a.json", json.dumps([record]))
    wanted = ["no marks here", "a second line", "third"]
    assert parts(make(store, path, format="wikisection", sentences="line")) == [[wanted]]
    path = write(tmp_path / "a.jsonl", lines({"sections": [text, "other"]}))
    assert parts(make(store, path, sections_column="sections", sentences="line")) == [[wanted, ["other"]]]
    path = write(tmp_path / "b.jsonl", lines({"text": text, "summary": "marks"}))
    found = parts(make(store, path, summary_column="summary", sentences="line"))
    assert [sentence for part in found[0] for sentence in part] == wanted


@pytest.mark.parametrize("is_list", [False, True])
def test_a_sentence_too_long_for_a_block_is_divided(store: Store, tmp_path: Path, is_list: bool) -> None:
    long, short = "word " * 30_000 + "end", "One more."
    section = [long, short] if is_list else f"{long}\n{short}"
    path = write(tmp_path / "a.jsonl", lines({"sections": [section, "other"]}))
    made = make(store, path, sections_column="sections", sentences=None if is_list else "line")
    (document,) = parts(made)
    assert " ".join(sentence for part in document for sentence in part) == f"{long} {short} other"
    assert all(len(sentence) <= 100_000 for part in document for sentence in part)
    assert any("a section over 100,000 characters was divided" in w for w in made.manifest["warnings"])


def test_a_splitter_that_has_no_effect_is_told(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "c.ref", "A. B.\n==========\nC.\n")
    assert parts(make(store, path, format="choi", sentences="rules")) == [[["A. B."], ["C."]]]
    assert "--sentences rules has no effect: files of --format choi say themselves" in caplog.text


def test_unpaired_surrogates_in_ids_are_refused(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"sections": ["A.", "B."], "name": "\\ud800"}\n')
    with pytest.raises(InputError, match=r"'a.jsonl', line 1: unpaired surrogate in the id"):
        make(store, path, sections_column="sections", id_column="name")


def test_own_json_lines_with_sections(store: Store, tmp_path: Path) -> None:
    records = {"sections": ["One here. Two here.", ["Setup sentence", "and another"]]}, {"sections": 5}
    made = make(store, write(tmp_path / "a.jsonl", lines(records[0])), sections_column="sections")
    assert parts(made) == [[["One here.", "Two here."], ["Setup sentence", "and another"]]]
    assert made.counts["shape"] == "segments"
    with pytest.raises(InputError, match=r"'a.jsonl', line 1: 'sections' must be a list of sections, found int"):
        make(store, write(tmp_path / "a.jsonl", lines(records[1])), sections_column="sections")
    with pytest.raises(InputError, match="--sections-column is for JSON lines"):
        make(store, write(tmp_path / "a.csv", "text\nx\n"), sections_column="sections")
    with pytest.raises(InputError, match="--summary-column and --sections-column exclude each other"):
        make(store, tmp_path / "a.jsonl", sections_column="sections", summary_column="s")


def test_test_documents_that_share_a_sentence_with_training_are_counted_or_dropped(
    store: Store, tmp_path: Path
) -> None:
    train = write(tmp_path / "train.ref", "A shared one .\n==========\nB .\n")
    folder = tmp_path / "test"
    write(folder / "a.ref", "A  shared one .\n==========\nC .\n")
    write(folder / "b.ref", "D .\n==========\nE .\n")
    made = make(store, train, test=folder, format="choi")
    assert made.counts["sharing_test_documents"] == 1 and made.counts["documents"] == 3
    assert any("1 of 2 test documents shares a sentence" in warning for warning in made.manifest["warnings"])
    clean = make(store, train, test=folder, format="choi", drop_shared=True)
    assert column(clean, "id") == ["train/train.ref", "test/b.ref"]
    assert clean.counts["dropped"] == {"test documents that share a sentence with training": 1}
    assert clean.counts["sharing_test_documents"] == 0, "no evaluation is contaminated"
    (folder / "b.ref").unlink()
    with pytest.raises(InputError, match=r"1 test document shares a sentence.* leaves no test document"):
        make(store, train, test=folder, format="choi", drop_shared=True)


def test_new_settings_do_not_change_old_recipes() -> None:
    assert dataset.Config(valid_fraction=0.1).recipe().keys().isdisjoint({"separator", "drop_shared", "summary_column"})
    assert "separator" in dataset.Config(separator="--").recipe()


REAL: dict[str, tuple[dict[str, list[str]], dict[str, Any], int]] = {
    "sum-scisummnet": ({"train": ["docs"]}, {"format": "scisummnet"}, 116),
    "sum-scitldr": ({"train": ["dev.jsonl"], "test": ["test.jsonl"]}, {"format": "scitldr"}, 619 + 618),
    "sum-cnndm-sample": ({"train": ["cnndm_sample.train.0.json"]}, {"format": "presumm"}, 6),
    "sum-qmsum": ({"train": ["Committee.val.jsonl"], "test": ["Committee.test.jsonl"]}, {"format": "qmsum"}, 12),
    "seg-choi": ({"train": [""]}, {"format": "choi"}, 80),
    "seg-wiki300": ({"train": ["docs"]}, {"format": "choi"}, 120),
    "seg-clinical": ({"train": [""]}, {"format": "choi"}, 29),
    "seg-manifesto": ({"train": ["*.txt"]}, {"format": "choi"}, 3),
}


@pytest.mark.parametrize("name", REAL)
def test_real_data_is_read_with_one_command(store: Store, name: str) -> None:
    files, settings, number = REAL[name]
    folder = shared(f"data/{name}")
    given = {split: [str(folder / path) for path in paths] for split, paths in files.items()}
    made: Artifact = dataset.run(given, dataset.Config(**settings), store=store).artifact
    assert made.counts["documents"] == number
    assert made.counts["shape"] == ("summaries" if name.startswith("sum") else "segments")
