"""Artifacts: recipes, skipping, names, references, lineage, removal, transfer."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.stage import Files
from pipelines.storage import removal, transfer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import (
    ArtifactAmbiguous,
    ArtifactDamaged,
    ArtifactInUse,
    ArtifactMismatch,
    ArtifactMisplaced,
    ArtifactMissing,
)
from pipelines.storage.names import read_name
from pipelines.storage.store import Store
from tests.tiny import OTHER, TINY, TinyConfig, make


def test_the_same_recipe_is_built_once(store):
    first, second = make(store), make(store)
    assert (first.reused, second.reused) == (False, True)
    assert first.reference == second.reference


def test_settings_and_inputs_change_the_recipe_but_execution_settings_do_not(store, tmp_path):
    (tmp_path / "a").write_text("a")
    files = Files.of([tmp_path / "a"], ["a"])
    references = [make(store).reference, make(store, text="x").reference, make(store, inputs={"text": files}).reference]
    assert len(set(references)) == 3
    assert make(store, jobs=7).reference == references[0]


def test_an_input_that_changes_while_it_is_read_gives_no_artifact(store, tmp_path):
    (tmp_path / "a").write_text("a")
    files = Files.of([tmp_path / "a"], ["a"])
    (tmp_path / "a").write_text("b")
    with pytest.raises(InputError, match="changed during the run"):
        make(store, inputs={"text": files})
    assert not store.folders()
    assert not list((store.root / ".tmp").iterdir())


def test_a_damaged_artifact_is_built_again(store):
    result = make(store)
    (result.artifact.path / "part-0.txt").write_text("hullo 0\n")
    with pytest.raises(ArtifactDamaged, match=r"part-0\.txt"):
        store.load(result.reference)
    again = make(store)
    assert not again.reused
    store.load(again.reference).close()


def test_force_builds_again(store):
    make(store)
    assert not make(store, force=True).reused


def test_names_have_versions_and_a_bare_name_is_the_newest(store):
    first = make(store, text="one", name="wiki")
    assert make(store, text="one", name="wiki").name == "wiki@1"
    second = make(store, text="two", name="wiki")
    assert (first.name, second.name) == ("wiki@1", "wiki@2")
    assert store.load("wiki").reference == second.reference
    assert store.load("wiki@1").reference == first.reference
    with pytest.raises(ArtifactMissing):
        store.load("wiki@3")


def test_a_name_belongs_to_one_kind_and_is_checked_before_the_work(store):
    make(store, name="wiki")
    with pytest.raises(InputError, match="belongs to artifacts of kind tiny; this one is of kind other"):
        make(store, stage=OTHER, name="wiki")
    assert [folder.parent.name for folder in store.folders()] == ["tiny"]


BAD_NAMES = ["../../x", "/x", "-rf", "con", "nul.txt", "a\0b", "a" * 300, "\u202ename", "", "Wiki", "wiki@1", "a/b"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_be_mistaken_for_something_else_is_refused(store, name):
    with pytest.raises(InputError, match="bad name"):
        store.check_name_free(name, "tiny")


def test_an_old_version_does_not_open_the_content_that_force_replaced_it_with(store):
    make(store, name="wiki")
    changed = type(TINY)(TINY.name, TINY.kind, TINY.version, TinyConfig, lambda run: run.out.write("part", b"new"))
    make(store, stage=changed, name="wiki", force=True)
    with pytest.raises(ArtifactMissing, match="built again"):
        store.load("wiki@1")
    assert store.load("wiki@2").read("part") == b"new"


def test_references_are_names_ids_prefixes_and_paths(store):
    artifact = make(store, name="wiki").artifact
    for reference in ("wiki", "wiki@1", artifact.reference, artifact.id, artifact.id[:6], str(artifact.path)):
        assert store.find(reference).resolve() == artifact.path.resolve()


@pytest.mark.parametrize(
    "reference", ["nothing", "tiny/0000", "x" * 300, "a\0b", "", "..", "/etc/passwd", "names/wiki"]
)
def test_a_reference_that_matches_nothing_is_an_input_error(store, reference):
    make(store, name="wiki")
    with pytest.raises(InputError):
        store.load(reference)


@pytest.mark.parametrize(
    ("reference", "suggestion"),
    [("wkii", "; did you mean 'wiki'?"), ("wiki@7", "; the newest is 'wiki@1'"), ("else", "")],
)
def test_an_unknown_name_gets_a_suggestion(store, reference, suggestion):
    make(store, name="wiki")
    with pytest.raises(ArtifactMissing) as caught:
        store.find(reference)
    assert caught.value.message == f"no artifact {reference!r} in {store.root}{suggestion}"


@pytest.mark.parametrize("reference", ["bert-base-uncased", "google-bert/bert-base-uncased"])
def test_a_model_of_a_hub_is_said_to_be_fetched_first(store, reference):
    hints = []
    for kind in ("model", "corpus"):
        with pytest.raises(ArtifactMissing) as caught:
            store.load(reference, kind=kind)
        hints.append("hf download" in caught.value.hint)
    assert hints == [True, False]


@pytest.mark.parametrize("reference", ["./nofolder", "/no/folder", "some/model", "./abcdef"])
def test_of_a_path_is_said_that_nothing_is_there(store, reference):
    with pytest.raises(ArtifactMissing) as caught:
        store.find(reference)
    assert caught.value.message == f"there is no folder or file {reference!r}"


def test_an_artifact_of_the_wrong_kind_is_refused_and_both_kinds_are_named(store):
    make(store, name="wiki")
    with pytest.raises(ArtifactMismatch, match="is an artifact of kind tiny; expected: corpus"):
        store.load("wiki", kind="corpus")


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


@pytest.fixture
def swapped(store: Store) -> tuple[Path, Path]:
    """The folders of ``one``, made from ``base``, and of ``two``, which have been swapped."""
    with make(store, text="base").artifact as base:
        one = make(store, text="one", name="one", inputs={"base": base}).artifact
        two = make(store, text="two").artifact
    one.close(), two.close()
    _swap(one.path, two.path)
    return one.path, two.path


def test_folders_that_were_swapped_are_refused_by_name_id_and_path(store, swapped):
    one, two = swapped
    for reference in ("one", "one@1", f"tiny/{one.name}", one.name[:8], str(one), f"{one}/../{one.name}"):
        with pytest.raises(
            ArtifactMisplaced, match=f"holds tiny/{two.name}; the folder was renamed, or swapped"
        ) as caught:
            store.load(reference)
        assert caught.value.hint == f"rename it to {two}, and what is there now likewise"
    assert [artifact.manifest["config"]["text"] for artifact in store.artifacts()] == ["base"]


def test_a_stage_neither_uses_nor_replaces_a_folder_that_was_swapped(store, swapped):
    one, two = swapped
    for force in (False, True):
        with pytest.raises(ArtifactMisplaced, match=f"holds tiny/{one.name}"):
            make(store, text="two", force=force)
    _swap(one, two)
    assert make(store, text="two").reused
    store.load("one").close()


def test_gc_removes_no_folder_that_was_swapped_nor_what_it_was_made_from(store, swapped):
    assert removal.collect(store, unnamed=True) == []
    assert len(store.folders()) == 3


def test_an_artifact_below_another_kind_is_refused(store):
    with make(store).artifact as artifact:
        wrong = store.root / "corpus" / artifact.id
    wrong.parent.mkdir()
    artifact.path.rename(wrong)
    with pytest.raises(ArtifactMisplaced, match=f"holds tiny/{artifact.id}"):
        store.load(f"corpus/{artifact.id}")


def test_a_copy_outside_of_a_store_may_have_any_name_but_another_id(store, tmp_path):
    artifact = make(store).artifact
    for place in ("copy", f"backup/{artifact.id}", "corpus/of-spring"):
        shutil.copytree(artifact.path, tmp_path / place)
        store.load(str(tmp_path / place)).close()
    with contextlib.chdir(artifact.path):
        store.load(".").close()
    shutil.copytree(artifact.path, tmp_path / "other" / "tiny" / ("0" * 16))
    with pytest.raises(ArtifactMisplaced):
        store.load(str(tmp_path / "other" / "tiny" / ("0" * 16)))


def test_a_file_that_the_manifest_does_not_list_cannot_be_verified(store):
    artifact = make(store).artifact
    (artifact.path / "extra").write_text("x")
    with pytest.raises(ArtifactDamaged, match="extra: not in the manifest"):
        artifact.verify("extra")


def test_unfinished_work_is_found_by_the_name_that_its_artifact_will_get(store):
    def stop(run) -> None:
        run.partial.mkdir(parents=True)
        raise InputError("stopped")

    stopped = type(TINY)(TINY.name, TINY.kind, TINY.version, TinyConfig, stop)
    for text in ("one", "two"):
        with pytest.raises(InputError, match="stopped"):
            make(store, stage=stopped, text=text, name="wiki")
    with pytest.raises(ArtifactAmbiguous):
        store.find_unfinished(None, "wiki")
    one, two = store.unfinished()
    removal.remove_unfinished(store, one)
    assert store.find_unfinished(None, "wiki") == store.find_unfinished("tiny", two.name[:6]) == two
    assert store.find_unfinished("corpus", "wiki") is None
    with pytest.raises(ArtifactMissing, match="'wiki' is not finished"):
        store.load("wiki")
    make(store, text="one", name="wiki")
    make(store, text="two", name="wiki")
    assert store.unfinished_name(two) is None


def test_gc_forgets_the_name_of_unfinished_work_that_is_gone(store):
    store.begin("tiny", "0" * 64, "gone")
    store.begin("tiny", "1" * 64, "kept")
    store.partial("tiny", "1" * 64).mkdir()
    removal.collect(store)
    assert [path.name for path in (store.root / ".partial" / "tiny").glob("*.name")] == ["1" * 16 + ".name"]


def test_an_artifact_is_called_by_the_name_that_it_was_given_last(store):
    made = make(store).artifact
    assert store.name_of(made.kind, made.recipe) == made.reference
    for seconds, name in enumerate(("zebra", "ant", "bee")):
        store.add_name(name, made)
        os.utime(store.root / "names" / name / "1", (seconds, seconds))
        assert store.name_of(made.kind, made.recipe) == f"{name}@1"


def test_rename_moves_all_versions(store):
    make(store, text="one", name="wiki")
    make(store, text="two", name="wiki")
    make(store, text="three", name="taken")
    store.rename("wiki", "books")
    assert [str(name) for name in store.names()] == ["books@1", "books@2", "taken@1"]
    with pytest.raises(InputError, match="exists already"):
        store.rename("books", "taken")
    with pytest.raises(InputError, match="no name"):
        store.rename("wiki", "other")


def test_removing_an_artifact_removes_its_names(store):
    folder = make(store, name="wiki").artifact.path
    removal.remove(store, folder)
    assert not folder.exists()
    assert store.names() == []
    assert make(store, name="wiki").name == "wiki@1"


def test_an_artifact_that_is_being_read_is_not_removed(store):
    artifact = make(store).artifact
    with pytest.raises(ArtifactInUse):
        removal.remove(store, artifact.path)
    artifact.close()
    removal.remove(store, artifact.path)


def test_gc_keeps_named_artifacts_their_inputs_open_ones_and_unfinished_work(store):
    parent = make(store, text="parent").artifact
    child = make(store, text="child", inputs={"parent": parent}, name="kept").artifact
    loose = make(store, text="loose").artifact
    read = make(store, text="read").artifact
    partial = store.partial("tiny", "0" * 64)
    partial.mkdir(parents=True)
    for artifact in (parent, child, loose):
        artifact.close()
    assert removal.collect(store, unnamed=True, dry_run=True) == [loose.path]
    assert removal.collect(store) == []
    assert removal.collect(store, unnamed=True) == [loose.path]
    assert all(p.exists() for p in (parent.path, child.path, read.path, partial))
    assert removal.users(store, parent.recipe) == {child.path: {parent.recipe}}


def test_removing_many_artifacts_reads_each_name_only_a_few_times(store, monkeypatch):
    for number in range(12):
        make(store, text=f"named {number}", name=f"n{number}").artifact.close()
        make(store, text=f"loose {number}").artifact.close()
    reads: list[Path] = []
    monkeypatch.setattr("pipelines.storage.store.read_name", lambda entry: reads.append(entry) or read_name(entry))
    assert len(removal.collect(store, unnamed=True)) == 12
    assert len(reads) <= 4 * 12
    reads.clear()
    store.load("n3").close()
    assert len(reads) <= 4


def test_gc_removes_names_whose_artifact_is_gone(store):
    result = make(store, name="wiki")
    result.artifact.close()
    os.rename(result.artifact.path, store.root / "elsewhere")
    with pytest.raises(ArtifactMissing, match="which is gone"):
        store.load("wiki")
    removal.collect(store)
    assert store.names() == []


def test_files_that_the_manifest_does_not_list_are_reported(store):
    artifact = make(store).artifact
    (artifact.path / "extra").write_text("x")
    (artifact.path / "link").symlink_to("/etc")
    artifact.verify()
    assert artifact.unlisted_files() == ["extra", "link"]


def test_an_exported_artifact_can_be_imported_unchanged_elsewhere(store, tmp_path):
    artifact = make(store).artifact
    transfer.export(artifact, tmp_path / "out")
    other = type(store)(tmp_path / "other")
    copy, reused = transfer.import_folder(other, tmp_path / "out", name="wiki")
    assert not reused
    assert (copy.reference, copy.content) == (artifact.reference, artifact.content)
    assert transfer.import_folder(other, tmp_path / "out")[1]
    other.load("wiki").close()


def test_an_export_overwrites_nothing(store, tmp_path):
    artifact = make(store).artifact
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target in ("file", "link", "artifacts", "no/such/parent"):
        with pytest.raises(InputError):
            transfer.export(artifact, tmp_path / target)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_damaged_artifact_is_neither_exported_nor_imported(store, tmp_path):
    artifact = make(store).artifact
    transfer.export(artifact, tmp_path / "out")
    for folder in (artifact.path, tmp_path / "out"):
        (folder / "part-0.txt").write_text("hullo 0\n")
    with pytest.raises(ArtifactDamaged):
        transfer.export(artifact, tmp_path / "second")
    other = type(store)(tmp_path / "other")
    with pytest.raises(ArtifactDamaged):
        transfer.import_folder(other, tmp_path / "out")
    assert not (tmp_path / "second").exists()
    assert other.folders() == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["artifacts", "other", "out"]


def test_an_import_refuses_links_and_unlisted_files(store, tmp_path):
    artifact = make(store).artifact
    transfer.export(artifact, tmp_path / "out")
    other = type(store)(tmp_path / "other")
    (tmp_path / "out" / "evil.py").write_text("x")
    with pytest.raises(InputError, match=r"evil\.py"):
        transfer.import_folder(other, tmp_path / "out")
    (tmp_path / "out" / "evil.py").unlink()
    (tmp_path / "secret").write_text("hello 0\n")
    (tmp_path / "out" / "part-0.txt").unlink()
    (tmp_path / "out" / "part-0.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ArtifactDamaged):
        transfer.import_folder(other, tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(ArtifactMissing):
        transfer.import_folder(other, tmp_path / "link")


def test_the_golden_artifact_of_format_1_is_read(tmp_path):
    golden = Path(__file__).parents[2] / "golden" / "format-1"
    with Artifact(golden) as artifact:
        artifact.verify()
        assert artifact.unlisted_files() == []
        assert artifact.reference == "tiny/204e0be952007f3e"
        assert artifact.counts == {"parts": 2}
        assert artifact.read("part-1.txt") == b"golden 1\n"


def test_reading_the_git_revision_does_not_lock_the_repository(monkeypatch):
    if not shutil.which("git"):
        pytest.skip("needs git")
    commands = []
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: commands.append(command) or run(command, **options)
    )
    stage._git_revision.cache_clear()
    stage._git_revision()
    stage._git_revision.cache_clear()
    assert all("--no-optional-locks" in command and "describe" not in command for command in commands)
