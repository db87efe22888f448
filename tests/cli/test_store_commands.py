"""ls, show, lineage, verify, rm, rename, gc, export, import and doctor on the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cli.tables import folded, nested
from pipelines.engine.stage import Files
from pipelines.storage.store import Store
from tests.runs import going, metrics
from tests.tiny import OTHER, in_child, make


@pytest.fixture
def here(guide) -> Store:
    """The default store, with ``wiki``, made from a file, and ``kid``, made from ``wiki``."""
    Path("input.txt").write_text("some text")
    store = Store(Path("artifacts"))
    files = Files.of([Path("input.txt")], ["input.txt"])
    with make(store, name="wiki", inputs={"text": files}).artifact as parent:
        make(store, stage=OTHER, name="kid", inputs={"corpus": parent}).artifact.close()
    return store


def test_ls_lists_artifacts_names_and_unfinished_work(guide, here):
    partial = here.partial("model", "ab" * 32)
    partial.mkdir(parents=True)
    (partial / "step-1").write_text("12345")
    lines = guide("ls").out.splitlines()
    assert lines[0].split() == ["ARTIFACT", "NAMES", "SIZE", "CREATED", "STAGE"]
    assert {line.split()[0].split("/")[0] for line in lines[1:3]} == {"other", "tiny"}
    assert lines[3].split()[0] == "model/" + "ab" * 8
    assert "unfinished" in lines[3] and "5 B" in lines[3]
    answer = json.loads(guide("ls", "--json", "--kind", "tiny").out)
    assert [row["names"] for row in answer["artifacts"]] == [["wiki@1"]]
    assert answer["unfinished"] == []


def test_ls_of_an_empty_store_says_so_on_stderr_only(guide):
    answer = guide("ls")
    assert (answer.code, answer.out) == (0, "")
    assert "nothing in artifacts" in answer.err


def test_ls_lists_the_oldest_first(guide, here, edit_manifest):
    for text, created in (("new", "2030-01-02T00:00:00Z"), ("old", "1999-01-02T00:00:00Z")):
        edit_manifest(make(here, text=text, name=text).artifact.path, created=created)
    assert [line.split()[1] for line in guide("ls").out.splitlines()[1:]][::3] == ["old@1", "new@1"]
    assert [row["names"] for row in json.loads(guide("ls", "--json").out)["artifacts"]][::3] == [["old@1"], ["new@1"]]


def test_columns_are_straight_in_every_script():
    assert folded(("a", "", "b"), [("x", "", "y")], None) == ["a    b", "x    y"], "a column may be empty"
    lines = folded(("token", "p"), [("日本語", "0.1"), ("ab", "0.2"), ("e\u0301", "0.3")], None)
    assert lines == ["token   p", "日本語  0.1", "ab      0.2", "e\u0301       0.3"]
    assert folded(("text", "p"), [("日本語" * 4, "0.1")], 20) == [
        "text" + 13 * " " + "p",
        "日本語日本語日   0.1",
        "本語日本語",
    ]


def test_ids_and_names_are_never_broken_over_lines():
    rows = [("sequences/fb67e2b5bbec313d", "translations@1", "2026-11-22T19:34:12Z", "unfinished, step 4 of 1,000")]
    lines = folded(("ARTIFACT", "NAMES", "CREATED", "STAGE"), rows, 60, whole=("ARTIFACT", "NAMES"))
    assert lines[1].split()[:2] == ["sequences/fb67e2b5bbec313d", "translations@1"]
    assert len(lines) > 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_artifact_that_cannot_be_read_hides_no_other_one(guide, here):
    (here.find("wiki") / "artifact.json").chmod(0)
    for parent in (Path.cwd(), *Path.cwd().parents):
        if parent.stat().st_uid == os.getuid() and parent.name.startswith(("pytest", "popen", "test")):
            parent.chmod(0o755)

    def as_other_user() -> None:
        os.setuid(65534)
        lines = guide("ls").out.splitlines()
        assert [line.split()[-1] for line in lines[1:]] == ["build-other", "unreadable"]
        answer = guide("verify")
        assert (answer.code, answer.out) == (2, "1 verified, 1 damaged\n")
        assert "artifact.json: Permission denied" in answer.err

    assert in_child(as_other_user) == 0


def test_ls_shows_damaged_artifacts_too(guide, here):
    (here.find("wiki") / "artifact.json").write_text("{}")
    answer = guide("ls")
    assert answer.code == 0
    assert "damaged" in answer.out


def test_nested_values_are_spread_over_lines_for_people():
    splits = {"train": {"documents": 5, "sentences": 1234}, "valid": {"documents": 1}}
    expected = ["splits:", "  train: documents 5, sentences 1,234", "  valid: documents 1"]
    assert list(nested("splits", splits)) == expected
    assert list(nested("final", {"loss/total": 5.25})) == ["final: loss/total 5.25"]
    assert list(nested("dropped", {})) == ["dropped: {}"]
    assert list(nested("words", ["a"])) == ['words: ["a"]']


def test_unfinished_runs_have_a_name_and_a_step(guide, here):
    reference = going(here, metrics([3.0, 2.0]), torn='{"step": 3, "lo')
    here.begin("model", reference.removeprefix("model/"), "plain")
    row = guide("ls").out.splitlines()[-1].split()
    assert (row[:2], row[-5:]) == ([reference, "plain"], ["unfinished,", "step", "2", "of", "8"])
    (found,) = json.loads(guide("ls", "--json").out)["unfinished"]
    assert (found["name"], found["step"], found["steps"]) == ("plain", 2, 8)
    for given in ("plain", reference, reference[:12]):
        text = guide("show", given).out
        assert all(part in text for part in (reference, "plain", "unfinished, step 2 of 8", "objective: mlm")), given
    assert json.loads(guide("show", "plain", "--json").out)["config"]["objective"] == "mlm"
    answer = guide("compare", "plain")
    assert answer.code == 0 and "plain is unfinished, at step 2 of 8" in answer.err
    answer = guide("verify", "plain")
    assert answer.code == 2 and f"'plain' is not finished: {reference}" in answer.err
    assert guide("rm", "plain").out == f"{reference}\n"
    assert not here.unfinished()


def test_unfinished_work_in_shards_says_how_many_parts_are_done(guide, here):
    partial = here.partial("idf", "cd" * 32)
    partial.mkdir(parents=True)
    for name in ("000000-0.ab.partial", "000001-0.cd.partial", "merged-1.ef.partial"):
        (partial / name).touch()
    assert "unfinished, 2 parts done" in guide("ls").out


def test_an_artifact_goes_before_unfinished_work_of_the_same_name(guide, here):
    reference = going(here, metrics([3.0]))
    here.begin("model", reference.removeprefix("model/"), "kid")
    assert "artifact   other/" in guide("show", "kid").out
    assert guide("rm", "kid").out.startswith("other/")
    assert guide("rm", "kid").out == f"{reference}\n"


def test_show_has_configuration_inputs_and_files(guide, here):
    text = guide("show", "wiki").out
    assert all(part in text for part in ("wiki@1", "build-tiny", "repeat: 2", "text: files", "part-0.txt", "parts: 2"))
    answer = json.loads(guide("show", "wiki", "--json").out)
    assert answer["config"]["text"] == "hello"


def test_show_escapes_what_a_manifest_says(guide, here, edit_manifest):
    edit_manifest(here.find("wiki"), counts={"\x1b[31mred\nline": 1}, stage="\x1b]0;x\x07")
    for command in (["show", "wiki"], ["ls"], ["lineage", "wiki"]):
        text = guide(*command).out
        assert all(c == "\n" or c.isprintable() for c in text)


def test_lineage_goes_back_to_the_files_of_the_user(guide, here):
    kid, parent, file = guide("lineage", "kid").out.splitlines()
    assert kid.startswith("other/")
    assert parent.startswith("  corpus: tiny/")
    assert file == "    text: files  1 input.txt"
    tree = json.loads(guide("lineage", "kid", "--json").out)
    assert tree["inputs"]["corpus"]["inputs"]["text"]["first"] == ["input.txt"]


def test_lineage_marks_artifacts_that_are_gone_or_were_built_again(guide, here):
    folder = here.find("wiki")
    manifest = json.loads((folder / "artifact.json").read_bytes())
    kept = folder.rename(folder.with_name("kept"))
    with here.build(manifest["kind"], manifest["recipe"], {"stage": manifest["stage"], "inputs": {}}) as out:
        out.write("part", b"other")
    assert "(built again since: other content)" in guide("lineage", "kid").out
    guide("rm", "wiki", "--force")
    assert "(not in this store)" in guide("lineage", "kid").out
    kept.rename(folder)
    assert "(" not in guide("lineage", "kid").out


def test_show_warns_of_files_that_are_gone(guide, here):
    assert "warning" not in guide("show", "wiki").err
    (here.find("wiki") / "part-0.txt").unlink()
    answer = guide("show", "wiki")
    assert answer.code == 0 and answer.err.endswith("part-0.txt: missing\n")


def test_verify_names_damaged_files_and_warns_of_unlisted_ones(guide, here):
    assert guide("verify").out == "2 verified, 0 damaged\n"
    folder = here.find("wiki")
    (folder / "unlisted\x1b").write_text("x")
    answer = guide("verify")
    assert answer.code == 0
    assert "unlisted\\x1b: not in the manifest" in answer.err
    (folder / "part-0.txt").write_text("other")
    answer = guide("verify")
    assert answer.code == 2
    assert answer.out == "1 verified, 1 damaged\n"
    assert "part-0.txt: damaged" in answer.err
    assert guide("verify", "kid").code == 0
    assert guide("verify", "wiki").code == 2
    assert json.loads(guide("verify", "--json").out)["damaged"][0]["artifact"].startswith("tiny/")


def test_verify_and_lineage_notice_folders_that_were_swapped(guide, here):
    one, two = here.find("wiki"), make(here, text="two").artifact.path
    one.rename("aside")
    two.rename(one)
    Path("aside").rename(two)
    answer = guide("verify")
    assert (answer.code, answer.out) == (2, "1 verified, 2 damaged\n")
    assert f"{one}: holds tiny/{two.name}" in answer.err and f"rename it to {two}" in answer.err
    assert "corpus: tiny/" in guide("lineage", "kid").out and "(its folder holds another" in guide("lineage", "kid").out
    assert guide("ls").out.count("misplaced") == 2


def test_rm_removes_nothing_if_one_of_several_is_missing_or_needed(guide, here):
    make(here, text="loose", name="loose").artifact.close()
    assert guide("rm", "loose", "nothing").code == 2
    answer = guide("rm", "loose", "wiki")
    assert answer.code == 2 and "was made from tiny/" in answer.err
    assert len(here.folders()) == 3


def test_rm_refuses_an_artifact_that_others_were_made_from(guide, here):
    answer = guide("rm", "wiki")
    assert answer.code == 2
    assert "was made from" in answer.err
    assert guide("rm", "wiki", "kid").code == 0
    assert here.folders() == []


def test_rm_refuses_an_artifact_in_use_with_code_3(guide, here):
    with here.load("kid"):
        answer = guide("rm", "kid")
    assert answer.code == 3
    assert "being read" in answer.err
    assert guide("rm", "kid").code == 0


def test_rm_removes_damaged_artifacts_and_unfinished_work(guide, here):
    (here.find("kid") / "artifact.json").write_text("{}")
    assert guide("rm", here.find("kid").name).code == 0
    partial = here.partial("model", "ab" * 32)
    partial.mkdir(parents=True)
    assert guide("rm", f"model/{partial.name}").code == 0
    assert not partial.exists()
    assert guide("rm", f"model/{partial.name}").code == 2


def test_rm_removes_nothing_outside_the_store(guide, here):
    guide("export", "kid", "copy")
    assert guide("rm", "copy").code == 2
    assert Path("copy/artifact.json").exists()
    assert guide("rm", os.fspath(here.find("kid").resolve())).code == 0


def test_a_renamed_artifact_is_found_by_its_new_name_only(guide, here):
    assert guide("rename", "wiki", "books").code == 0
    assert guide("show", "wiki").code == 2
    assert guide("show", "books@1").code == 0
    assert guide("rename", "books", "kid").code == 2
    assert guide("rename", "books", "../x").code == 2


def test_gc_keeps_named_artifacts_and_lists_what_it_would_remove(guide, here):
    make(here, text="loose").artifact.close()
    answer = guide("gc", "--unnamed", "--dry-run")
    assert answer.out.count("tiny/") == 1
    assert len(here.folders()) == 3
    guide("gc", "--unnamed")
    assert len(here.folders()) == 2
    assert guide("--store", "nowhere", "gc").code == 2
    assert not Path("nowhere").exists()


def test_import_restores_what_export_wrote(guide, here):
    assert guide("export", "wiki", "folder").out == "folder\n"
    assert guide("export", "wiki", "folder").code == 2
    answer = guide("--store", "second", "import", "folder", "--name", "copy")
    assert (answer.code, answer.out) == (
        0,
        guide("show", "wiki", "--json").out.split('"artifact": "')[1].split('"')[0] + "\n",
    )
    assert guide("--store", "second", "show", "copy").code == 0
    assert guide("import", "nowhere").code == 2


def test_commands_that_only_read_do_not_create_the_store(guide):
    for command in (["ls"], ["show", "x"], ["verify"], ["lineage", "x"], ["rm", "x"], ["rename", "a", "b"]):
        guide("--store", "nowhere", *command)
    assert not Path("nowhere").exists()


def test_doctor_fails_if_a_package_is_too_old(guide, monkeypatch):
    answer = guide("doctor", "--json")
    report = json.loads(answer.out)
    assert (answer.code, report["ok"]) == (0, True)
    assert {"python", "package", "extra", "device", "store", "import"} <= {f["topic"] for f in report["findings"]}
    monkeypatch.setattr("pipelines.tools.doctor.FLOORS", {"torch": "99.0", "pyarrow": "1"})
    answer = guide("doctor")
    assert answer.code == 3
    assert "torch" in answer.err and "99.0" in answer.err


def test_doctor_notices_a_package_that_shadows_ours(guide, monkeypatch, tmp_path):
    import importlib.util

    from pipelines.tools import doctor

    (tmp_path / "guidance").mkdir()
    (tmp_path / "guidance" / "__init__.py").write_text("")
    find_spec = importlib.util.find_spec
    fake = importlib.util.spec_from_file_location("guidance", tmp_path / "guidance" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: fake if name == "guidance" else find_spec(name))
    bad = [finding.name for finding in doctor.shadows() if finding.state == "bad"]
    assert bad == ["guidance"]


@pytest.mark.parametrize(
    ("version", "key"),
    [
        ("2.13.0+cpu", (2, 13)),
        ("2.10", (2, 10)),
        ("14.0.1", (14, 0, 1)),
        ("0.8.0rc1", (0, 8)),
        ("5.17.0.dev0", (5, 17)),
    ],
)
def test_versions_compare_as_numbers(version, key):
    from pipelines.tools.doctor import version_key

    assert version_key(version) == key


def test_control_characters_in_file_names_are_escaped(guide, tmp_path):
    name = "line\n\x1b[31mred\u202e.txt"
    for arguments in (
        ("build-corpus", name),
        ("build-tokenizer", name),
        ("build-sequences", name, name),
        ("pretrain", name),
        ("show", name),
        ("import", name),
        ("build-corpus", "a.txt", "--config", name),
    ):
        result = guide(*arguments)
        assert result.code == 2, arguments
        assert "red" in result.err and result.out == ""
        assert not set("\x1b\u202e") & set(result.err) and "\nred" not in result.err
    (tmp_path / name).write_bytes(b"A \x00 word.")
    result = guide("build-corpus", name, "--sentences", "line")
    assert result.code == 0 and not set("\x1b\u202e") & set(result.err + result.out)


def test_ls_of_a_kind_without_artifacts_lists_the_kinds_that_exist(guide, here):
    answer = guide("ls", "--kind", "corpus")
    assert (answer.code, answer.out) == (0, "")
    assert "nothing of kind 'corpus' in artifacts; there are: other, tiny" in answer.err
    misspelled = guide("ls", "--kind", "corpsu", "--json")
    assert (misspelled.code, misspelled.out) == (2, "")
    assert "unknown kind 'corpsu'; did you mean 'corpus'?" in misspelled.err
