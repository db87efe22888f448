"""An objective is one file: a copy of the code with one more file has one more objective, everywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines import ROOT
from pipelines.stages import pretrain
from pipelines.storage.store import Store
from pipelines.training.objectives import DEFAULT, OBJECTIVES, OWNERS
from tests import trainings

COPYING = '''
"""The objective ``copy``: predict some of the tokens that the model reads."""

from __future__ import annotations

from pydantic import Field

from pipelines.engine.stage import Config
from pipelines.training.objective import Card, Objective


class Settings(Config):
    copied_share: float = Field(0.5, gt=0, le=1, description="Share of tokens that are copied.")


class Copy(Objective):
    name = "copy"
    learns = "to copy"
    needs = "copy reads any sequences."
    families = ("bert", "electra")
    card = Card("model that copies", "fill-mask", "AutoModelForMaskedLM")
    settings = (Settings,)
    needs_mask_token = False
    examples = ("guide pretrain wiki-128 --objective copy --copied-share 0.2",)

    @classmethod
    def prepare(cls, given):
        import dataclasses

        import numpy as np

        from guidance.objectives.masked_lm import IGNORED
        from pipelines.training.learners.masked_lm import MaskedLM
        from pipelines.training.models import build_model

        class Copying(MaskedLM):
            TASKS = ("copy",)

            def prepare(self, examples, split="train"):
                batch, labels = super().prepare(examples, split), []
                for epoch, example in examples:
                    ids = self.splits[split][example]
                    random = np.random.default_rng([self.seed, epoch, example]).random(len(ids))
                    labels.append(np.where(random < given.config.copied_share, ids, IGNORED))
                return dataclasses.replace(batch, seen=[self.splits[split][i] for _, i in examples], labels=labels)

            def weights(self, step):
                return {"copy": 1.0, **self.guided.weights(step)}

            def task_counts(self, batch):
                return {"copy": batch.chosen}

            def task_losses(self, output, inputs):
                return {"copy": super().task_losses(output, inputs)["mlm"]}

        return Copying(given, build_model(given, cls, given.plan))
'''

Guide = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Guide:
    """The command line of a copy of the code with one more file."""
    tree = tmp_path_factory.mktemp("code")
    for package in ("cli", "pipelines", "guidance"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "pipelines/training/objectives/copying.py").write_text(COPYING)

    def call(*arguments: str, module: bool = True) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "200"}
        command = [sys.executable, *(("-m", "cli") if module else ()), *arguments]
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300)

    return call


def test_a_new_objective_is_in_the_help_with_its_setting_and_its_example(extended: Guide) -> None:
    done = extended("pretrain", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert "--objective <copy|mlm|mlm+nsp|electra|translation>" in words and "copy reads any sequences." in words
    learned = words[words.index("What is learned:") : words.index("Model: ")]
    assert "--copied-share <float> Share of tokens that are copied. [> 0, ≤ 1] [default: 0.5]" in learned
    assert "bert for copy, modernbert for mlm" in words
    assert "  $ guide pretrain wiki-128 --objective copy --copied-share 0.2\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--copied-share", "0.2"], "--copied-share belongs to --objective copy, not to mlm"),
        (
            ["--objective", "copy", "--mask-probability", "0.3"],
            "--mask-probability belongs to --objective mlm or mlm+nsp or electra, not to copy",
        ),
        (["--objective", "copy", "--copied-share", "2"], "--copied-share: input should be less than or equal to 1"),
    ],
)
def test_settings_of_another_objective_are_refused(extended: Guide, arguments: list[str], message: str) -> None:
    done = extended("pretrain", "wiki-128", *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


@pytest.mark.every
def test_a_new_objective_trains_and_publishes_a_model_with_its_own_card(extended: Guide, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    data = trainings.sequences(store)
    sizes = ["--layers", "1", "--hidden", "16", "--heads", "2", "--steps", "4", "--evaluate-every", "2"]
    given = [
        "pretrain",
        data.reference,
        "--store",
        str(store.root),
        "--objective",
        "copy",
        *sizes,
        "--plan",
        "preset:ag",
    ]
    refused = extended(*given, "--architecture", "roberta")
    assert refused.returncode == 2 and "--objective copy trains bert or electra, not roberta" in refused.stderr
    done = extended(*given, "--copied-share", "0.25")
    assert done.returncode == 0, done.stderr
    model = store.load(done.stdout.strip(), kind="model")
    assert model.manifest["config"]["copied_share"] == 0.25
    rows = trainings.metrics(model.path)
    assert len(rows) == 4 and {"loss/copy", "loss/guidance/next"} <= set(rows[0]) and "valid/copy" in rows[-1]
    assert "# A bert model that copies\n" in model.read("README.md").decode()


RECIPES = """
import json
from pipelines.stages.pretrain import Config
print(json.dumps([Config(objective=name).recipe() for name in ("mlm", "electra", "translation", "copy")]))
"""


def test_a_new_objective_does_not_change_the_recipes_of_the_others(extended: Guide) -> None:
    done = extended("-c", RECIPES, module=False)
    *others, new = json.loads(done.stdout)
    assert others == [pretrain.Config(objective=name).recipe() for name in ("mlm", "electra", "translation")]
    assert new.keys() - others[0].keys() == {"copied_share"}


def test_no_shared_setting_hides_one_of_an_objective() -> None:
    for objective in OBJECTIVES.values():
        for group in objective.settings:
            for name, info in group.model_fields.items():
                assert pretrain.Config.model_fields[name].description == info.description, name


def test_the_examples_of_an_objective_name_it() -> None:
    for name, objective in OBJECTIVES.items():
        assert objective.examples and all(
            f"--objective {name} " in f"{example} " or name == DEFAULT for example in objective.examples
        )


def test_every_setting_of_its_own_belongs_to_some_objectives_but_not_to_all() -> None:
    for name, owners in OWNERS.items():
        assert 0 < len(owners) < len(OBJECTIVES), name
