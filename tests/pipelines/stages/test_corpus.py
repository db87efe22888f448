"""The corpus: which files, documents and splits it has, and that its bytes do not depend on the environment."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from guidance.errors import InputError, MachineError
from pipelines.stages import corpus
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.text import corpus_writer
from pipelines.text.corpus_files import fraction_of
from tests.shared import shared

ROOT = Path(__file__).resolve().parents[3]


def blocks(artifact: Artifact) -> list[dict[str, Any]]:
    return pq.read_table(artifact.path / "blocks.parquet").to_pylist()


def documents(artifact: Artifact) -> list[dict[str, Any]]:
    return pq.read_table(artifact.path / "documents.parquet").to_pylist()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def build(store: Store, *sources: str | Path, stdin: Any = None, **settings: Any) -> Artifact:
    settings = {"sentences": "line"} | settings
    return corpus.run([str(s) for s in sources], corpus.Config(**settings), store=store, stdin=stdin).artifact


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


# which files


def test_a_folder_is_read_in_path_order_and_unknown_or_hidden_files_are_skipped(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = write(
        tmp_path / "in", {"b.txt": "B.", "a/z.txt": "Z.", "a/b.TXT": "AB.", "x.md": "no", ".hidden.txt": "no"}
    )
    assert [row["id"] for row in documents(build(store, folder))] == ["a/b.TXT", "a/z.txt", "b.txt"]
    assert "2 files skipped, hidden, of unknown format, or given twice: '.hidden.txt', 'x.md'" in caplog.text


def test_a_glob_and_files_one_by_one_give_the_same_corpus(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {"b.txt": "B.", "a.txt": "A."})
    assert build(store, f"{folder}/*.txt").recipe == build(store, folder / "a.txt", folder / "b.txt").recipe


def test_two_files_of_the_same_name_are_refused_unless_their_folder_is_given(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {"x/a.txt": "A.", "y/a.txt": "B."})
    with pytest.raises(InputError, match=r"would both be document 'a\.txt'") as caught:
        build(store, folder / "x/a.txt", folder / "y/a.txt")
    assert "folder" in (caught.value.hint or "")
    assert [row["id"] for row in documents(build(store, folder))] == ["x/a.txt", "y/a.txt"]


@pytest.mark.parametrize("name", ["with space", "é", "🙂", "new\nline", "-dash", "x" * 251, "'quote\""])
def test_strange_names_work(name: str, store: Store, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.txt"
    path.write_text("A.", encoding="utf-8")
    assert documents(build(store, path))[0]["id"] == path.name


def test_a_name_that_is_not_utf8_is_refused(store: Store, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.txt"
    Path(os.fsdecode(path)).write_bytes(b"A.")
    for given in (os.fsdecode(path), tmp_path):
        with pytest.raises(InputError, match="not UTF-8") as caught:
            build(store, given)
        assert caught.value.message.isprintable()


def test_cyclic_links_are_followed_once(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {"a.txt": "A.", "sub/b.txt": "B."})
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "z.txt").symlink_to(folder / "a.txt")
    assert [row["id"] for row in documents(build(store, folder))] == ["a.txt", "sub/b.txt"]
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    with pytest.raises(InputError, match=r"loop\.txt"):
        build(store, tmp_path / "loop.txt")


def test_pipes_and_devices_are_refused_at_once(store: Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    started = time.monotonic()
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(InputError, match="not a regular file"):
            build(store, path)
    with pytest.raises(InputError, match="not a regular file"):
        build(store, "/dev/zero", format="text")
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("source", ["missing.txt", "*.nothing", "builtin:other", "a.xyz"])
def test_missing_or_unknown_sources_are_refused(source: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_text("A.")
    with pytest.raises(InputError):
        build(store, source if ":" in source else tmp_path / source)


def test_standard_input_is_read_to_its_end(store: Store) -> None:
    artifact = build(store, "-", stdin=io.BytesIO(b"A.\n\nB.\n"))
    assert [row["text"] for row in blocks(artifact)] == ["A.", "B."]
    assert build(store, "-", stdin=io.BytesIO(b"A.\n\nB.\n")).recipe == artifact.recipe
    assert build(store, "-", stdin=io.BytesIO(b"A.\n")).recipe != artifact.recipe
    records = build(store, "-", stdin=io.BytesIO(b'{"text": "A."}\n'), format="jsonl")
    assert [row["text"] for row in blocks(records)] == ["A."]
    with pytest.raises(InputError, match="closed"):
        build(store, "-", stdin=None)


def test_a_file_that_changes_while_it_is_read_gives_no_artifact(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("A.\n\n" * 1000)
    original = corpus_writer.write_corpus

    def late(*arguments: Any, **settings: Any) -> Any:
        with path.open("a") as file:
            thread = threading.Thread(target=file.write, args=("B.",))
            thread.start()
            thread.join()
        return original(*arguments, **settings)

    monkeypatch.setattr(corpus_writer, "write_corpus", late)
    with pytest.raises(InputError, match="changed during the run"):
        build(store, path)
    assert not list(store.root.glob("corpus/*"))


# documents, blocks and sentences


def test_layouts_of_plain_text(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("A\nb.\n\nC.\nD.\n")
    texts = {
        layout: [(row["document"], row["text"]) for row in blocks(build(store, path, documents=layout))]
        for layout in ("file", "paragraph", "line")
    }
    assert texts == {
        "file": [(0, "A b."), (0, "C. D.")],
        "paragraph": [(0, "A b."), (1, "C. D.")],
        "line": [(0, "A"), (1, "b."), (2, "C."), (3, "D.")],
    }


def test_offsets_of_blocks_and_sentences_are_those_of_the_document(store: Store, tmp_path: Path) -> None:
    text = "Dr. Who ran.  Was it “late”? Yes!\nNo 3.14 now.\n\nשלום. 🇩🇪 e\u0301x. 각 नमस्ते। Ok\n\nEnd"
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    rows = blocks(build(store, path, sentences="rules", valid=0.0))
    whole = "\n".join(row["text"] for row in rows)
    running = 0
    found = []
    for row in rows:
        assert whole[row["start"] : row["start"] + len(row["text"])] == row["text"]
        assert row["first_sentence"] == running
        running += len(row["sentences"])
        found += [row["text"][span["start"] : span["end"]] for span in row["sentences"]]
    assert found == [
        "Dr. Who ran.",
        "Was it “late”?",
        "Yes!",
        "No 3.14 now.",
        "שלום.",
        "🇩🇪 éx.",
        "각 नमस्ते।",
        "Ok",
        "End",
    ]
    assert [row["text"].count(" ") for row in rows] == [10, 5, 0]


def test_treebanks_keep_their_sentences_documents_and_paragraphs(store: Store, tmp_path: Path) -> None:
    def sentence(word: str, comment: str = "") -> str:
        return f"{comment}1\t{word}" + "\t_" * 4 + "\t0\troot\t_\t_\n\n"

    text = sentence("a") + sentence("b", "# newpar\n") + sentence("c", "# newdoc id = d\n") + sentence("e")
    write(tmp_path, {"t.conllu": text})
    artifact = build(store, tmp_path / "t.conllu")
    assert [(row["document"], row["text"], len(row["sentences"])) for row in blocks(artifact)] == [
        (0, "a", 1),
        (0, "b", 1),
        (1, "c e", 2),
    ]
    assert [row["id"] for row in documents(artifact)] == ["t.conllu", "d"]


def test_small_and_large_duplicates_are_dropped(store: Store, tmp_path: Path) -> None:
    large = "\n\n".join(f"{number} " + "word " * 2000 for number in range(1000))
    write(tmp_path, {"a.txt": "A e\u0301.", "b.txt": "A \u00e9.", "c.txt": large, "d.txt": large, "e.txt": "E."})
    artifact = build(store, tmp_path)
    assert [row["id"] for row in documents(artifact)] == ["a.txt", "c.txt", "e.txt"]
    assert [row["document"] for row in documents(artifact)] == [0, 1, 2]
    assert sorted({row["document"] for row in blocks(artifact)}) == [0, 1, 2]
    assert artifact.counts["dropped"] == {"duplicate": 2}
    assert artifact.counts["documents"] == 3


def test_counts_agree_with_the_tables(store: Store, tmp_path: Path) -> None:
    write(tmp_path, {f"{n}.txt": f"One {n}.\nTwo.\n\nThree {n} more." for n in range(40)})
    artifact = build(store, tmp_path, valid=0.2, test=0.2)
    rows = blocks(artifact)
    expected: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        count = expected[row["split"]]
        count["blocks"] += 1
        count["sentences"] += len(row["sentences"])
        count["words"] += len(row["text"].split())
        count["characters"] += len(row["text"])
    for row in documents(artifact):
        expected[row["split"]]["documents"] += 1
    assert artifact.counts["splits"] == expected
    assert len(expected) == 3
    assert artifact.counts["documents"] == 40 and artifact.counts["words"] == 240


# splits


def splits_by_id(artifact: Artifact) -> dict[str, str]:
    return {row["id"]: row["split"] for row in documents(artifact)}


def test_adding_documents_does_not_move_others_to_another_split(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {f"{n:03}.txt": f"Text {n}." for n in range(0, 100, 2)})
    before = splits_by_id(build(store, folder, valid=0.3, test=0.2))
    write(folder, {f"{n:03}.txt": f"Text {n}." for n in range(1, 100, 2)})
    after = splits_by_id(build(store, folder, valid=0.3, test=0.2))
    assert {id_: after[id_] for id_ in before} == before
    assert set(after.values()) == {"train", "valid", "test"}
    for id_, split in after.items():
        fraction = fraction_of(id_)
        assert split == ("valid" if fraction < 0.3 else "test" if fraction < 0.5 else "train")


def sentences_by_split(artifact: Artifact) -> dict[str, int]:
    return {split: count["sentences"] for split, count in artifact.counts["splits"].items()}


@pytest.mark.parametrize(("lines", "valid"), [(300, 15), (1058, 60)])
@pytest.mark.parametrize("sentences", ["auto", "line", "rules"])
def test_a_file_of_one_sentence_a_line_gets_the_validation_text_that_was_asked_for(
    sentences: str, lines: int, valid: int, store: Store, tmp_path: Path
) -> None:
    path = write(tmp_path, {"a.txt": "".join(f"Line {n} of this text is here.\n" for n in range(lines))}) / "a.txt"
    artifact = build(store, path, sentences=sentences, valid=0.05)
    assert sentences_by_split(artifact) == {"train": lines - valid, "valid": valid}
    rows = blocks(artifact)
    found = [row["text"][span["start"] : span["end"]] for row in rows for span in row["sentences"]]
    assert found == path.read_text().splitlines()
    assert documents(artifact)[0]["split"] == "mixed"
    assert not artifact.manifest["warnings"]


def test_few_documents_are_split_by_stretches_whose_hashes_are_lowest(store: Store, tmp_path: Path) -> None:
    names = write(tmp_path, {f"{n}.txt": "\n\n".join(f"Number {k} of {n}." for k in range(250)) for n in range(2)})
    artifact = build(store, names, valid=0.1, test=0.1)
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for row in blocks(artifact):
        for number in range(row["first_sentence"], row["first_sentence"] + len(row["sentences"])):
            found[f"{row['document']}.txt", number // 5].add(row["split"])
    ranked = sorted(found, key=lambda key: fraction_of(f"{key[0]}\0{key[1]}"))
    assert [found[key] for key in ranked] == [{"valid"}] * 10 + [{"test"}] * 10 + [{"train"}] * 80


def test_a_block_is_cut_between_sentences_where_the_split_changes(store: Store, tmp_path: Path) -> None:
    text = " ".join(f"Sentence {n} is  here." for n in range(400))
    artifact = build(store, write(tmp_path, {"a.txt": text}) / "a.txt", valid=0.1, sentences="rules")
    rows = blocks(artifact)
    assert 3 < len(rows) < 82
    assert all(one["split"] != other["split"] for one, other in itertools.pairwise(rows))
    running = start = 0
    for number, row in enumerate(rows):
        assert (row["block"], row["first_sentence"], row["start"]) == (number, running, start)
        running += len(row["sentences"])
        start += len(row["text"]) + 1
        assert row["sentences"][0]["start"] == 0 and row["sentences"][-1]["end"] == len(row["text"])
    found = [row["text"][span["start"] : span["end"]] for row in rows for span in row["sentences"]]
    assert " ".join(found) == text
    assert sentences_by_split(artifact) == {"train": 360, "valid": 40}
    assert artifact.counts["words"] == 1600
    assert documents(artifact)[0]["blocks"] == len(rows)


def test_a_split_far_from_the_fraction_asked_for_is_a_warning(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path, {"small.txt": "A.\n\nB."}) / "small.txt"
    artifact = build(store, path, valid=0.05)
    assert {row["split"] for row in blocks(artifact)} == {"train"}
    assert artifact.manifest["warnings"] == [
        "valid has 0 sentences of 2, 0.0% instead of 5%: the text has only 2 sentences"
    ]
    many = write(tmp_path / "in", {f"{n}.txt": f"Text {n}.\n" * (1 if n else 5000) for n in range(40)})
    (warning,) = build(store, many, valid=0.05).manifest["warnings"]
    assert "instead of 5%: a document is never divided; --documents line makes the smallest ones" in warning
    lines = write(tmp_path / "lines", {"a.txt": "".join(f"Text {n}.\n" for n in range(40))}) / "a.txt"
    (warning,) = build(store, lines, documents="line", sentences="line", valid=0.01).manifest["warnings"]
    assert "instead of 1%: documents are chosen by chance, and there are only 40" in warning


def test_the_size_of_every_split_is_told(guide: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "".join(f"Line {n} of this text is here.\n" for n in range(300))})
    result = guide("build-corpus", "a.txt")
    assert result.code == 0
    assert "train 285 sentences (95.0%), valid 15 sentences (5.0%)\n" in result.err
    assert "one sentence a line: 'a.txt'; --sentences rules reads it as prose\n" in result.err


def test_splits_that_leave_nothing_to_train_on_are_refused() -> None:
    with pytest.raises(ValidationError):
        corpus.Config(valid=0.5, test=0.5)


# provenance, determinism, real text


def test_licence_and_source_are_recorded(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": "A."}) / "a.txt"
    assert build(store, path, license="CC0-1.0", source="me").provenance == [{"source": "me", "license": "CC0-1.0"}]
    assert build(store, path).provenance == [{"source": "a.txt", "license": None}]


@pytest.mark.every
def test_the_same_bytes_come_out_of_every_environment(tmp_path: Path) -> None:
    text = "Żółw ran. Über “it”.\n\n" * 30
    folder = write(tmp_path / "in", {f"é{n}.txt": f"{n} " + text for n in range(3)})
    program = (
        "import sys\nfrom pathlib import Path\nfrom pipelines.stages import corpus\nfrom pipelines.storage.store import Store\n"
        "r = corpus.run([sys.argv[1]], corpus.Config(), store=Store(Path(sys.argv[2])))\n"
        "print(r.artifact.recipe, r.artifact.content)"
    )
    environments = [
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "2", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONHASHSEED": "3", "TZ": "Asia/Tokyo", "PYTHONOPTIMIZE": "1"},
    ]
    found = {
        subprocess.run(
            [sys.executable, "-c", program, str(folder), str(tmp_path / f"store{number}")],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment},
            check=True,
            capture_output=True,
        ).stdout
        for number, environment in enumerate(environments)
    }
    assert len(found) == 1


def test_building_again_reuses_and_forcing_gives_the_same_content(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": "A.\n\nB."}) / "a.txt"
    first = corpus.run([str(path)], corpus.Config(), store=store)
    assert not first.reused
    assert corpus.run([str(path)], corpus.Config(), store=store).reused
    contents = {corpus.run([str(path)], corpus.Config(), store=store, force=True).artifact.content for _ in range(10)}
    assert contents == {first.artifact.content}


@pytest.mark.every
def test_the_built_in_python_documentation_is_a_corpus(store: Store) -> None:
    artifact = build(store, "builtin:python-docs")
    assert artifact.counts["words"] > 250_000
    assert artifact.counts["documents"] > 300
    assert artifact.provenance[0]["license"] == "PSF-2.0"
    assert {row["split"] for row in documents(artifact)} == {"train", "valid"}


@pytest.mark.parametrize("model", ["spacy:{}/spacy-en_ud_ewt_sm", "stanza:{}/stanza:en:udewt", "stanza:{}/stanza"])
def test_models_find_sentences_and_are_part_of_the_recipe(model: str, store: Store, tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": "The dog ran home . It was late , and nobody saw it ."}) / "a.txt"
    artifact = build(store, path, sentences=model.format(shared("models")))
    assert "parser" in artifact.manifest["inputs"]
    text = blocks(artifact)[0]["text"]
    spans = blocks(artifact)[0]["sentences"]
    assert [text[s["start"] : s["end"]] for s in spans] == ["The dog ran home .", "It was late , and nobody saw it ."]


def test_a_model_that_is_not_installed_is_a_machine_error(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": "A."}) / "a.txt"
    with pytest.raises(MachineError) as caught:
        build(store, path, sentences="spacy:tl_nothing_here")
    assert caught.value.hint == "python -m spacy download tl_nothing_here"
    with pytest.raises(MachineError):
        build(store, path, sentences="stanza:qq")
    for spec in ("guess", "spacy:", "spacy:/no/such/folder", "stanza:/no/such/folder"):
        with pytest.raises(InputError):
            build(store, path, sentences=spec)


@pytest.mark.parametrize("pattern", ["ud-wolof-wtb/*.conllu*", "ud-tagalog/*.conllu*", "ud-english-ewt/*dev*"])
def test_real_treebanks_are_read_without_errors(pattern: str, store: Store) -> None:
    artifact = build(store, f"{shared('data')}/{pattern}")
    assert artifact.counts["sentences"] > 50
    assert set(artifact.counts["dropped"]) <= {"duplicate"}
