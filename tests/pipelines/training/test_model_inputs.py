"""What belongs to the recipe of a result besides settings and data: all of a model's folder, and the code of other packages."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from guidance.errors import PlanError
from guidance.models.families import FAMILIES, register_family
from guidance.patterns import PATTERNS
from pipelines.stages import evaluate
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.packages import family_owner, owners_of, packages_input
from pipelines.training.plan_inputs import model_input
from tests import finetunings
from tests.trainings import one_thread  # noqa: F401

OFF = '[[guide]]\nmechanism = "off"\nheads = [{head}]\n'


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Artifact:
    rows = finetunings.reviews(36)
    return finetunings.build(store, tmp_path_factory.mktemp("data"), {"train": rows[:24], "test": rows[24:]})


@pytest.fixture(scope="module")
def folder(store: Store, data: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that is no artifact."""
    made = finetunings.train(store, data, steps=1).artifact
    copy = tmp_path_factory.mktemp("model") / "plain"
    shutil.copytree(made.path, copy)
    (copy / "artifact.json").unlink()
    return copy


def test_two_folders_with_the_same_weights_and_different_plans_are_two_models(
    store: Store, data: Artifact, folder: Path, tmp_path: Path
) -> None:
    results = []
    for head in (0, 1):
        copy = tmp_path / str(head)
        shutil.copytree(folder, copy)
        (copy / "plan.toml").write_text(OFF.format(head=head))
        results.append(evaluate.run(str(copy), data.reference, evaluate.Config(), store=store))
    assert [result.reused for result in results] == [False, False]
    again = evaluate.run(str(tmp_path / "0"), data.reference, evaluate.Config(), store=store)
    assert again.reused
    assert again.artifact.id == results[0].artifact.id != results[1].artifact.id


@pytest.mark.parametrize(
    "name",
    [
        *("plan.toml", "guidance.safetensors", "model.safetensors.index.json", "generation_config.json"),
        *("vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.json", "added_tokens.json"),
        *("source.spm", "bpe.codes"),
        *("adapter_config.json", "adapter_model.safetensors", "target-tokenizer/tokenizer.json", "generator/plan.toml"),
    ],
)
def test_every_file_that_decides_what_a_model_computes_is_in_its_digest(
    name: str, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    before = model_input(str(tmp_path), store).content
    (tmp_path / name).write_text("one")
    written = model_input(str(tmp_path), store).content
    (tmp_path / name).write_text("two")
    assert len({before, written, model_input(str(tmp_path), store).content}) == 3


@pytest.mark.parametrize("name", ["LICENSE.txt", "README.md", "training.log", "notes.txt"])
def test_other_files_of_a_model_folder_are_not(name: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = model_input(str(tmp_path), store).content
    (tmp_path / name).write_text("one")
    assert model_input(str(tmp_path), store).content == before


CODE = '''"""A package that registers a pattern."""
import guidance

from {package} import places


def some_way_off(tokens):
    """Each token looks some places to its right."""
    if places.OFFSET is None:
        raise ValueError("no offset")
    return guidance.Rule(lambda example, query, key: key == query + places.OFFSET, tokens.valid_BT)


guidance.register_pattern("some_way_off", some_way_off, source="a test")
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package that registers ``some_way_off``, imported."""
    name = "way_off_package"
    own = tmp_path / "site" / name
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("")
    (own / "places.py").write_text("OFFSET = 1\n")
    (own / "patterns.py").write_text(CODE.format(package=name))
    monkeypatch.syspath_prepend(str(own.parent))
    importlib.import_module(f"{name}.patterns")
    yield own
    PATTERNS.remove("some_way_off")
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.mark.every
def test_changed_code_of_another_package_trains_and_evaluates_again(
    store: Store, data: Artifact, package: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[[guide]]\npattern = "some_way_off"\nmechanism = "mask"\nheads = [0]\n')

    def made() -> tuple[bool, bool]:
        model = finetunings.train(store, data, plan=str(plan), steps=1)
        return model.reused, evaluate.run(
            first or model.reference, data.reference, evaluate.Config(), store=store
        ).reused

    first = ""
    assert made() == (False, False)
    assert made() == (True, True)
    first = finetunings.train(store, data, plan=str(plan), steps=1).reference
    (package / "places.py").write_text("OFFSET = 2\n")
    assert made() == (False, False)
    assert made() == (True, True)


def test_recipes_without_packages_of_others_have_no_such_input(store: Store, data: Artifact, folder: Path) -> None:
    model = finetunings.train(store, data, steps=1)
    measured = evaluate.run(model.reference, data.reference, evaluate.Config(), store=store)
    assert packages_input(()) == {}
    assert "packages" not in {**model.artifact.manifest["inputs"], **measured.artifact.manifest["inputs"]}


def test_the_version_of_a_package_counts(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = packages_input([package.name]).values()
    info = package.parent / "way_off-1.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: way-off\nVersion: 1.1\n")
    (info / "top_level.txt").write_text(f"{package.name}\n")
    (after,) = packages_input([package.name]).values()
    assert (before.versions, after.versions) == ({package.name: None}, {package.name: "1.1"})
    assert before.content != after.content


def test_a_package_is_found_by_what_it_registers(package: Path, folder: Path, tmp_path: Path) -> None:
    for pattern in ({"where": "some_way_off and not self"}, {"or": ["next", {"not": "some_way_off"}]}, "some_way_off"):
        assert owners_of([pattern]) == {package.name}
    assert owners_of(["next", {"where": "distance == 1"}]) == set()
    (tmp_path / "config.json").write_text('{"model_type": "data2vec-text"}')
    assert family_owner(folder) == family_owner(tmp_path) == set()
    register_family("data2vec_text", "Data2VecTextSelfAttention", package=package.name)
    try:
        assert family_owner(tmp_path) == {package.name}
    finally:
        FAMILIES.remove("data2vec_text")


@pytest.mark.parametrize(("offset", "error"), [(None, ValueError), ("1", TypeError)])
def test_a_pattern_of_another_package_that_fails_is_named(
    store: Store, data: Artifact, package: Path, tmp_path: Path, offset: object, error: type[Exception]
) -> None:
    sys.modules[f"{package.name}.places"].OFFSET = offset  # type: ignore[attr-defined]
    plan = tmp_path / "plan.toml"
    plan.write_text('[[guide]]\npattern = { not = "some_way_off" }\nmechanism = "mask"\nheads = [0]\n')
    wanted = f"the pattern 'some_way_off' of the package 'way_off_package' fails: {error.__name__}: "
    with pytest.raises(PlanError, match=wanted) as raised:
        finetunings.train(store, data, plan=str(plan), steps=1)
    assert isinstance(raised.value.__cause__, error)
