"""The commands ``build-masks``, ``masks show``, ``masks export`` and ``build-dataset``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.views import role_masks
from tests.pipelines.stages.test_masks import SENTENCES, write_deps
from tests.trainings import one_thread  # noqa: F401

Guide = Callable[..., Any]

TEXT = "\n".join([*SENTENCES] * 3)


@pytest.fixture
def made(guide: Guide, tmp_path: Path) -> dict[str, str]:
    """References of the masks and of all artifacts that they are built from."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    found = {}

    def run(role: str, *arguments: object) -> None:
        answer = guide(*arguments, "-q")
        assert answer.code == 0, answer.err
        found[role] = answer.out.strip()

    run("corpus", "build-corpus", "text.txt", "--sentences", "line", "--valid", "0")
    run(
        "tokenizer",
        "build-tokenizer",
        found["corpus"],
        "--kind",
        "wordpiece",
        "--vocab-size",
        "400",
        "--min-frequency",
        "1",
    )
    run("sequences", "build-sequences", found["corpus"], found["tokenizer"], "--max-length", "96")
    run("idf", "build-idf", found["corpus"], "--unit", "sentence")
    store = Store(tmp_path / "artifacts")
    with store.load(found["corpus"]) as corpus:
        found["deps"] = write_deps(store, corpus, "spacy-en").reference
    run("masks", "build-masks", found["sequences"], "--idf", found["idf"], "--deps", found["deps"])
    return found


def test_build_masks_says_what_it_did_and_what_comes_next(guide: Guide, made: dict[str, str]) -> None:
    again = guide("build-masks", made["sequences"], "--idf", made["idf"], "--deps", made["deps"], "--json")
    answer = json.loads(again.out)
    assert (answer["artifact"], answer["reused"]) == (made["masks"], True)
    assert answer["counts"]["columns"] == ["word", "segment", "idf", "head", "relation", "pos", "negation", "stop_word"]
    assert (
        f"next: guide pretrain {made['sequences']} --masks {made['masks']} --plan preset:roles --size small\n"
        in again.err
    )
    alone = guide("build-masks", made["sequences"])
    assert alone.code == 0
    assert "columns: word, segment\n" in alone.err
    assert f"next: guide masks show {alone.out.strip()}\n" in alone.err


def test_build_masks_does_not_warn_of_tables_that_were_not_given(guide: Guide, made: dict[str, str]) -> None:
    unparsed = guide("build-masks", made["sequences"], "--idf", made["idf"])
    assert "warning" not in unparsed.err
    assert "columns: word, segment, idf\n" in unparsed.err
    assert unparsed.err.rstrip().endswith(
        f"--masks {unparsed.out.strip()} --plan preset:roles-unparsed --learning-rate 1e-3"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build-masks", "nothing"], "no artifact 'nothing'"),
        (["build-masks", "{corpus}"], "is an artifact of kind corpus; expected: sequences"),
        (["build-masks", "{sequences}", "--idf", "{deps}"], "is an artifact of kind deps; expected: idf"),
        (["build-masks", "{sequences}", "--shard", "4/3"], "i/n with i from 1 to n"),
        (["masks", "show", "{sequences}"], "expected: masks"),
        (["masks", "show", "{masks}", "--example", "500"], "train has the sequences 0 to"),
        (["masks", "show", "{masks}", "--example", "0", "--sentence", "77"], "has the sentences 0 to"),
        (["masks", "show", "{masks}", "--split", "valid"], "has no sequences in 'valid'"),
        (["masks", "show", "{masks}", "--role", "nonsense"], "nonsense"),
        (["masks", "show", "{masks}", "--role", '{{ sum = ["next"] }}'], "gives weights, not a mask"),
        (["masks", "show", "{masks}", "--role", "marked"], "lacks data that marked needs"),
        (["masks", "show", "{masks}", "--png", "roles.jpg"], "the name must end in .png"),
        (["masks", "export", "{masks}", "--dense", "."], "exists already"),
    ],
)
def test_wrong_arguments_are_refused_with_a_short_message(
    guide: Guide, made: dict[str, str], arguments: list[str], words: str
) -> None:
    answer = guide(*(argument.format(**made) for argument in arguments))
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.err and len(answer.err.splitlines()) < 6


def test_show_draws_every_role_of_a_sentence(guide: Guide, made: dict[str, str]) -> None:
    answer = guide("masks", "show", made["masks"], "--sentence", "1", "--ascii", "--png", "roles.png")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0] == f"{made['masks']}, train 0, sentence 1"
    drawn = json.loads(guide("masks", "show", made["masks"], "--sentence", "1", "--json").out)
    assert [line for line in lines if line in drawn["roles"]] == list(drawn["roles"])
    assert list(drawn["roles"])[:4] == ["rare", "separator", "dependency", "major_relation"]
    words = "".join(token.removeprefix("##") for token in drawn["tokens"])
    assert words == "Shehasredshoes."
    red = drawn["tokens"].index(next(token for token in drawn["tokens"] if token.startswith("r")))
    full_stop = len(drawn["tokens"]) - 1
    assert drawn["roles"]["dependency"][red][full_stop] == 0 == drawn["roles"]["dependency"][red][0]
    assert drawn["roles"]["separator"][red] == [0] * full_stop + [1]
    assert Path("roles.png").read_bytes().startswith(b"\x89PNG")


def test_of_a_long_sequence_one_sentence_is_shown_unless_whole_is_given(guide: Guide, made: dict[str, str]) -> None:
    answer = guide("masks", "show", made["masks"], "--json")
    assert "showing sentence 0 of" in answer.err
    part, whole = json.loads(answer.out), json.loads(guide("masks", "show", made["masks"], "--json", "--whole").out)
    assert part["sentence"] == 0 and whole["sentence"] is None
    size = len(part["tokens"])
    assert len(whole["tokens"]) > 64 and whole["tokens"][:size] == part["tokens"]
    for role, mask in part["roles"].items():
        assert [row[:size] for row in whole["roles"][role][:size]] == mask


def test_roles_that_lack_their_source_are_named(guide: Guide, made: dict[str, str]) -> None:
    alone = guide("build-masks", made["sequences"], "--idf", made["idf"], "-q").out.strip()
    answer = guide("masks", "show", alone, "--json")
    assert set(json.loads(answer.out)["missing"]) == {"dependency", "major_relation"}
    assert "left out: dependency (no head: no --deps was given: guide build-deps)\n" in answer.err
    assert "left out: major_relation (no head, relation: no --deps was given: guide build-deps)\n" in answer.err


def test_dense_masks_match_the_patterns(
    guide: Guide, made: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_masks, "ENTRIES", 50_000)  # several batches
    answer = guide("masks", "export", made["masks"], "--dense", "dense", "--json")
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    found = pq.read_table("dense/train.parquet")
    assert said["rows"] == {"train.parquet": found.num_rows} and found.column_names[2:] == said["roles"]
    store = Store(tmp_path / "artifacts")
    with Artifact(store.find(made["masks"])) as masks, role_masks.Opened(masks, store) as opened:
        roles = role_masks.choose(masks)
        for row in found.to_pylist():
            example = opened.example("train", row["sequence"], roles.known)
            assert len(example.labels) == row["length"]
            for name, mask in example.masks.items():
                assert np.array_equal(np.reshape(row[name], (row["length"], row["length"])), mask), name
    again = guide("masks", "export", made["masks"], "--dense", "dense")
    assert again.code == 2 and "exists already" in again.err


def test_labels_are_tokens_if_the_corpus_is_missing(guide: Guide, made: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "artifacts" / made["corpus"]).rename(tmp_path / "gone")
    answer = guide("masks", "show", made["masks"], "--sentence", "1", "--json")
    assert answer.code == 0
    assert "[CLS]" not in json.loads(answer.out)["tokens"]
    assert json.loads(guide("masks", "show", made["masks"], "--whole", "--json").out)["tokens"][0] == "[CLS]"


# build-dataset


def test_build_dataset_reads_the_files_of_a_task(guide: Guide, tmp_path: Path) -> None:
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text(f"label\tone\ttwo\n1\tText of {split}.\tIts pair.\n0\tMore.\tAnother.\n")
    call = ["build-dataset", "--text-column", "one", "--pair-column", "two", "--valid", "dev.tsv"]
    answer = guide(*call, "--train", "train.tsv", "--json", "--license", "CC0-1.0")
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    assert said["kind"] == "corpus"
    assert said["counts"]["examples"] == {"train": {"0": 1, "1": 1}, "valid": {"0": 1, "1": 1}}
    assert f"next: guide finetune {said['artifact']}\n" in answer.err
    assert guide(*call, "train.tsv", "--license", "CC0-1.0").out.strip() == said["artifact"]
    twice = guide(*call, "train.tsv", "--train", "train.tsv")
    assert twice.code == 2 and "given twice" in twice.err
    nothing = guide("build-dataset")
    assert nothing.code == 2 and "no files were given" in nothing.err
    column = guide("build-dataset", "train.tsv")
    assert column.code == 2 and "no column 'text'; it has 'label', 'one', 'two'" in column.err
