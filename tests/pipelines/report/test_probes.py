"""Probes of several models stand beside each other in a report, and models that are folders have their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import BertConfig, BertModel

from pipelines.engine.declaration import Table
from pipelines.report import make
from pipelines.report.blocks import Grid
from pipelines.report.commands import Script
from pipelines.report.given import Runs
from pipelines.report.results import beside
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.training.plan_inputs import model_folders
from tests import trainings

MANIFEST = {
    "inputs": {
        "model": {"kind": "files", "content": "a", "count": 2, "first": ["config.json", "model.safetensors"]},
        "texts": {"kind": "files", "content": "b", "count": 1, "first": ["gap.tsv"]},
    },
    "provenance": [{"source": "weights of bert"}, {"source": "gap.tsv"}],
    "config": {"random": None},
}


def test_columns_that_differ_stand_once_for_each_model() -> None:
    tables = {
        "bert": Table(("relation", "words", "right"), [("case", "9", "66 %"), ("det", "5", "80 %")]),
        "random": Table(("relation", "words", "right"), [("det", "5", "9 %"), ("case", "9", "10 %")]),
    }
    titles, rows = beside(tables)
    assert titles == ["relation", "words", "right: bert", "right: random"]
    assert rows == [["case", "9", "66 %", "10 %"], ["det", "5", "80 %", "9 %"]]


def test_rows_of_their_own_stand_below_each_other_and_shared_ones_once() -> None:
    tables = {
        "bert": Table(("", "all"), [("questions", "382"), ("head 3-1", "69 %"), ("nearest", "55 %")]),
        "random": Table(("", "all"), [("questions", "382"), ("head 0-5", "52 %"), ("nearest", "55 %")]),
    }
    titles, rows = beside(tables)
    assert titles == ["", "model", "all"]
    assert rows == [
        ["questions", "all", "382"],
        ["head 3-1", "bert", "69 %"],
        ["head 0-5", "random", "52 %"],
        ["nearest", "all", "55 %"],
    ]


def test_one_table_is_as_it_is_and_equal_ones_are_shown_once() -> None:
    table = Table(("", "all"), [("questions", "382")])
    assert beside({"bert": table}) == (["", "all"], [["questions", "382"]])
    assert beside({"bert": table, "copy": table}) == (["", "all"], [["questions", "382"]])


def test_rows_that_only_one_model_has_and_names_that_stand_twice_are_all_shown() -> None:
    few, more = Table(("", "all"), [("a", "1")]), Table(("", "all"), [("a", "1"), ("b", "2")])
    assert beside({"few": few, "more": more})[1] == [["a", "all", "1"], ["b", "more", "2"]]
    twice = Table(("", "all"), [("a", "1"), ("a", "2")])
    assert beside({"few": few, "twice": twice})[1] == [["a", "all", "1"], ["a", "twice", "2"]]


def test_a_model_folder_is_no_data_and_has_its_name(tmp_path: Path) -> None:
    runs = Runs([], Store(tmp_path))
    assert model_folders(MANIFEST) == {"model": "bert"}
    assert (runs.model_of(MANIFEST), runs.data_of(MANIFEST)) == ("bert", "gap.tsv")
    assert runs.model_of({**MANIFEST, "config": {"random": 0}}) == "bert, random weights"


def test_the_command_of_a_fine_tuning_names_the_model_folder_without_the_folders_that_it_is_in(tmp_path: Path) -> None:
    folder = {"kind": "files", "content": "a", "count": 1, "first": ["config.json"], "folder": "my bert"}
    sst = {"kind": "corpus", "recipe": "c" * 64, "content": "d"}
    manifest = {
        "stage": "finetune",
        "kind": "model",
        "recipe": "b" * 64,
        "inputs": {"init": folder, "dataset": sst},
        "config": {"init": "/home/me/my bert"},
    }
    command = Script(Runs([], Store(tmp_path))).command(manifest)
    assert "--init 'my bert'" in command and "/home" not in command


def test_probes_that_would_have_one_title_have_the_settings_that_differ_in_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for by in ("taylor", "off"):
        manifest = {"stage": "probe-importance", "inputs": {}, "config": {"by": by, "limit": 150}}
        with store.build("probe", digest(by), manifest) as out:
            out.counts |= {"probe": "importance"}
            out.write("probe.json", b"{}")
    made, _ = make.make([f"probe/{digest(by)[:16]}" for by in ("taylor", "off")], store)
    assert [each.title for each in made.sections if each.name.startswith("probe")] == [
        "Probe: importance (by taylor)",
        "Probe: importance (by off)",
    ]


def test_two_model_folders_keep_their_own_names_whatever_models_were_made_from() -> None:
    folder = {"kind": "files", "content": "a", "count": 1, "first": ["config.json"]}
    inputs = {"model": {"kind": "model", "recipe": "c"}, "other": {**folder, "folder": "roberta"}}
    assert model_folders({**MANIFEST, "inputs": inputs}) == {"other": "roberta"}


def test_the_report_of_a_model_folder_names_it_and_its_commands_run_beside_it(
    guide: Callable[..., Any], store: Store, tmp_path: Path
) -> None:
    folder, words = tmp_path / "my-bert", [*trainings.SPECIAL, "anna", "saw", "the", "cat", "."]
    BertModel(
        BertConfig(
            vocab_size=len(words),
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            initializer_range=1.0,
        )
    ).save_pretrained(folder)
    for name, data in trainings.tokenizer_files(words).items():
        (folder / name).write_bytes(data)
    (tmp_path / "text.txt").write_text("anna saw the cat .\n" * 5)
    probes = [guide("probe", "sinks", "my-bert", "text.txt", *more).out.strip() for more in ((), ("--random", 3))]
    made, _ = make.make(probes, store)
    (section,) = (section for section in made.sections if section.name == "probe-1")
    assert section.title == "Probe: sinks, text.txt"
    caption, first = next((b.table.caption, b.table.titles[1:3]) for b in section.blocks if isinstance(b, Grid))
    assert caption == "probe sinks of my-bert and of my-bert, random weights"
    assert first == ["special: my-bert", "special: my-bert, random weights"]
    script = next(content.decode() for name, content in made.files() if name == "commands.sh")
    assert 'probe_1=$(guide probe sinks my-bert "$corpus_1"' in script
    assert script.rstrip().endswith("--random 3)")
