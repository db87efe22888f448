"""A model that was exported is used where nothing of what it was made from exists."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
from tests.finetunings import build, reviews, train

Call = Callable[..., Any]

SHORT = ("--epochs", 1, "--batch-size", 8)


def exported(guide: Call, folder: Path, **changes: Any) -> str:
    """Put a model into ``./out`` and, named ``col``, into an otherwise empty store; gives a dataset there."""
    mine = Store(folder / "mine")
    data = build(mine, folder, {"train": reviews(8)}, valid_fraction=0.0)
    model = train(mine, data, epochs=1, max_length=32, **changes).reference
    assert guide("export", model, "out", "--store", mine.root).code == 0
    shutil.rmtree(mine.root)
    assert guide("import", "out", "--name", "col").code == 0
    (folder / "long.txt").write_text("the film was fine " * 40 + "\n")
    splits = {"train": reviews(8, 1), "test": reviews(6)}
    return build(Store(folder / "artifacts"), folder, splits, valid_fraction=0.0).reference


@pytest.mark.parametrize("model", ["col", "out"])
def test_an_exported_model_needs_nothing_but_its_folder(guide: Call, tmp_path: Path, model: str) -> None:
    data = exported(guide, tmp_path)
    answer = guide("predict", model, "long.txt")
    assert answer.code == 0 and "prediction" in answer.out, answer.err
    assert "are not in this store, and with them their length; a sequence may have 32 tokens" in answer.err
    for command in (
        ("evaluate", model, data),
        ("finetune", data, "--init", model, "--epochs", 1, "--batch-size", 8),
        ("probe", "sinks", model, "long.txt"),
        ("discover", "score", model, data, "--split", "test"),
    ):
        answer = guide(*command)
        assert answer.code == 0, (command, answer.err)


def test_a_plan_that_reads_idf_says_so_where_that_of_the_training_is_gone(guide: Call, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(Plan((Guide("rare", "mask", heads=(0,)),)).dumps())
    data = exported(guide, tmp_path, plan=str(tmp_path / "plan.toml"))
    problem = "the plan of col reads idf, and that of its training text is not in this store"
    answer = guide("predict", "col", "long.txt")
    assert answer.code == 2 and f"{problem}\n  guide import the masks" in answer.err
    answer = guide("evaluate", "col", data)
    assert answer.code == 0 and f"{problem}; it is counted in the data that are read now" in answer.err


def test_a_lost_input_is_named_with_its_role(guide: Call, tmp_path: Path, store: Store) -> None:
    exported(guide, tmp_path)
    with (
        store.load("col") as model,
        pytest.raises(ArtifactMissing, match=r"model/\w+ was made from sequences/\w+, which"),
    ):
        store.load_input(model, "sequences")
