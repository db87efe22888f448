"""Artifacts that are damaged, malformed, hostile or in a newer format are refused."""

from __future__ import annotations

import json
import logging
import os
import random
import time

import pytest

from guidance.errors import InputError
from pipelines.storage import manifest
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import MANIFEST, ArtifactDamaged, ArtifactMismatch, ArtifactMisplaced, ArtifactMissing
from tests.tiny import make


@pytest.fixture
def folder(store):
    artifact = make(store, text="some text that is long enough to have bits to flip").artifact
    artifact.close()
    return artifact.path


def opens(folder) -> bool:
    try:
        with Artifact(folder) as artifact:
            artifact.verify()
        return True
    except InputError:
        return False


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["part-0.txt", "folder/summary.json", MANIFEST])
def test_every_flipped_bit_is_detected(folder, name):
    path, generator = folder / name, random.Random(7)
    good = path.read_bytes()
    for _ in range(1000):
        bit = generator.randrange(len(good) * 8)
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        # flipping white space in the manifest may leave the same JSON object
        same = name == MANIFEST and _object(damaged) == json.loads(good)
        assert opens(folder) == same, bit
    path.write_bytes(good)
    assert opens(folder)


def _object(data: bytes) -> object:
    try:
        return json.loads(data.decode())
    except ValueError:
        return None


@pytest.mark.parametrize("name", ["part-0.txt", "folder/summary.json", MANIFEST])
def test_every_truncation_is_detected(folder, name):
    path = folder / name
    good = path.read_bytes().rstrip() if name == MANIFEST else path.read_bytes()
    for length in range(0, len(good), 7 if len(good) > 100 else 1):
        path.write_bytes(good[:length])
        assert not opens(folder), length


def test_a_file_of_zeros_is_detected_and_named(folder):
    path = folder / "part-1.txt"
    path.write_bytes(bytes(path.stat().st_size))
    with (
        pytest.raises(ArtifactDamaged, match=r"part-1\.txt: damaged \(its digest differs\)"),
        Artifact(folder) as artifact,
    ):
        artifact.verify()


def test_a_missing_file_is_named(folder):
    (folder / "part-1.txt").unlink()
    with pytest.raises(ArtifactDamaged, match=r"part-1\.txt"), Artifact(folder) as artifact:
        artifact.verify()


STRANGE_MANIFESTS = {
    "empty": b"",
    "text": b"hello",
    "a list": b"[]",
    "null": b"null",
    "bad utf-8": b"\xff\xfe{}",
    "utf-16": '{"format":1}'.encode("utf-16"),
    "deep": b"[" * 100_000,
    "deep objects": b'{"format":' * 50_000,
    "not a number": b'{"format": 1, "counts": {"a": NaN}}',
    "infinity": b'{"format": 1, "counts": {"a": 1e999}, "seal": ""}',
    "a long number": b'{"format": ' + b"9" * 5000 + b"}",
    "a repeated key": b'{"format": 1, "format": 1}',
    "format as text": b'{"format": "1"}',
    "format true": b'{"format": true}',
    "format zero": b'{"format": 0}',
    "a lone surrogate": b'{"format": 1, "guide": "\\ud800"}',
}


@pytest.mark.parametrize("data", STRANGE_MANIFESTS.values(), ids=STRANGE_MANIFESTS)
def test_a_strange_manifest_is_refused_at_once(folder, data):
    (folder / MANIFEST).write_bytes(data)
    started = time.monotonic()
    with pytest.raises(ArtifactDamaged):
        Artifact(folder)
    assert time.monotonic() - started < 1


def test_a_manifest_with_a_long_number_is_refused_in_plain_words(folder):
    (folder / MANIFEST).write_bytes(STRANGE_MANIFESTS["a long number"])
    with pytest.raises(ArtifactDamaged, match=r"artifact\.json: a number has too many digits"):
        Artifact(folder)


def test_a_manifest_of_100_megabytes_is_refused_at_once(folder):
    with open(folder / MANIFEST, "wb") as file:
        file.truncate(100 << 20)
    started = time.monotonic()
    with pytest.raises(ArtifactDamaged, match="larger than"):
        Artifact(folder)
    assert time.monotonic() - started < 1


def test_a_newer_format_is_refused_and_kept(folder, edit_manifest, store):
    edit_manifest(folder, format=2, guide="9.9")
    with pytest.raises(ArtifactMismatch, match=r"made by guide 9\.9, format 2; this guide reads formats up to 1"):
        Artifact(folder)
    with pytest.raises(ArtifactMismatch):
        make(store, text="some text that is long enough to have bits to flip")


def test_unknown_keys_are_kept_and_cause_one_warning(folder, edit_manifest, monkeypatch):
    manifest._warn_of_unknown.cache_clear()
    warnings = []
    monkeypatch.setattr(logging.getLogger("guide"), "warning", lambda text, *rest: warnings.append(text % rest))
    edit_manifest(folder, colour="blue")
    for _ in range(3):
        with Artifact(folder) as artifact:
            artifact.verify()
            assert artifact.manifest["colour"] == "blue"
    assert warnings == ["ignored unknown keys in a manifest, perhaps written by a newer guide: colour"]


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../b", "a\0b", "C:\\x", ".hidden", "a//b", "", "artifact.json"]
)
def test_a_manifest_that_names_files_elsewhere_is_refused(folder, edit_manifest, name):
    files = {name: {"bytes": 1, "sha256": "0" * 64}}
    edit_manifest(folder, files=files, content=manifest.content_of(files))
    with pytest.raises(ArtifactDamaged, match="outside its directory"):
        Artifact(folder)


MALFORMED = {
    "files as a list": {"files": ["a"]},
    "an entry without a digest": {"files": {"a": {"bytes": 1}}},
    "a negative size": {"files": {"a": {"bytes": -1, "sha256": "0" * 64}}},
    "a kind with ..": {"kind": "../../x"},
    "the kind of names": {"kind": "names"},
    "a kind that is a list": {"kind": ["tiny"]},
    "a recipe with ..": {"recipe": "../../../../etc"},
    "foreign content": {"content": "0" * 64},
    "inputs as a list": {"inputs": []},
    "an input as text": {"inputs": {"a": "b"}},
    "counts as text": {"counts": "many"},
    "no stage": {"stage": None},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_manifest_is_refused_even_if_its_seal_matches(folder, edit_manifest, changes):
    edit_manifest(folder, **changes)
    with pytest.raises(ArtifactDamaged):
        Artifact(folder)


def test_links_inside_an_artifact_are_not_followed(folder, tmp_path):
    good = (folder / "part-0.txt").read_bytes()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "summary.json").write_bytes((folder / "folder" / "summary.json").read_bytes())
    (tmp_path / "outside" / "copy").write_bytes(good)
    (folder / "part-0.txt").unlink()
    (folder / "part-0.txt").symlink_to(tmp_path / "outside" / "copy")
    assert not opens(folder)
    (folder / "part-0.txt").unlink()
    (folder / "part-0.txt").write_bytes(good)
    assert opens(folder)
    os.rename(folder / "folder", tmp_path / "moved")
    (folder / "folder").symlink_to(tmp_path / "outside")
    assert not opens(folder)


def test_a_named_pipe_instead_of_a_file_does_not_block(folder):
    for name in ("part-0.txt", MANIFEST):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert not opens(folder)


def test_a_path_to_anything_but_an_artifact_is_refused(tmp_path, store):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    for name in ("empty", "file", "tool", "pipe"):
        with pytest.raises(ArtifactMissing, match="not a guide artifact"):
            store.load(str(tmp_path / name))


def test_a_folder_under_another_id_is_neither_used_nor_replaced(store):
    first, second = make(store, text="one").artifact, make(store, text="two").artifact
    first.close()
    second.close()
    os.rename(first.path, store.root / "aside")
    os.rename(second.path, first.path)
    with pytest.raises(ArtifactMisplaced, match=f"holds tiny/{second.id}"):
        make(store, text="one")
    os.rename(first.path, second.path)
    assert make(store, text="two").reused
    assert not make(store, text="one").reused


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{}", b'{"kind": "../..", "recipe": "x", "content": "y"}', b"[" * 99999]
)
def test_a_damaged_name_file_is_ignored(store, data):
    make(store, name="wiki")
    (store.root / "names" / "wiki" / "2").write_bytes(data)
    (store.root / "names" / "wiki" / "x").write_bytes(data)
    (store.root / "names" / "Strange Name").mkdir()
    (store.root / "names" / "Strange Name" / "1").write_bytes(data)
    assert [str(name) for name in store.names()] == ["wiki@1"]
    store.load("wiki").close()
