"""An objective, a task and a probe are one file each: a copy of the code with one more file has one more of them, everywhere."""

from __future__ import annotations

import json
import os
import re
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

        return Copying(given, build_model(given, cls, given.plan))
'''

GRADING = '''
"""The task ``grade``: a whole number for each text."""

from __future__ import annotations

from pipelines.training.objective import Card
from pipelines.training.task import Prediction, Task, at_least_float32


class Grade(Task):
    name = "grade"
    learns = "a grade"
    needs = "grade learns from texts whose labels are whole numbers."
    card = Card("text grader", "text-classification", "AutoModelForSequenceClassification")
    examples = ("guide finetune essays --init my-model --task grade",)
    columns = ("text",)
    shape = "examples"
    selectable = ("exact",)
    output = "grade"
    form = "regression"

    @classmethod
    def fits(cls, counts):
        return False

    @classmethod
    def of_training(cls, given):
        return cls()

    @classmethod
    def of_model(cls, config):
        return cls()

    def fields(self):
        return {"num_labels": 1, "id2label": {0: "grade"}, "label2id": {"grade": 0}}

    def targets(self, batch):
        return [float(batch.labels[row]) for row in batch.firsts]

    def loss(self, outputs, targets, batch):
        return (at_least_float32(outputs[:, 0]) - targets).square().sum()

    def predictions(self, outputs, batch):
        grades = zip(batch.firsts, outputs[:, 0].tolist(), strict=True)
        return [Prediction(batch.numbers[row], batch.labels[row], str(round(grade)), [grade]) for row, grade in grades]

    def metrics(self, predictions):
        return {"exact": sum(p.gold == p.prediction for p in predictions) / len(predictions)}

    @classmethod
    def statistics(cls, gold, predicted, labels):
        from pipelines.metrics.comparison import ShareRight

        return {"exact": ShareRight.of(gold, predicted)}
'''

LOOKING = '''
"""Stage ``probe-last``: how much attention does each head leave on the last token?"""

from __future__ import annotations

from pipelines.engine.declaration import Table
from pipelines.probing.heads import best, head_columns, head_name, share, write_heads
from pipelines.probing.probe import Findings, SequencesConfig, probe
from pipelines.stages.reading import ON_SEQUENCES

Config = SequencesConfig
UNITS = {"last": "mean attention of a token on the last token"}


def measure(run):
    from guidance.probes.relevance import masses
    from pipelines.probing.sequences import Means, WatchedSequences, batches_of

    watched, means = WatchedSequences(run.inputs, run.config), Means()

    def looking(batch):
        is_last_BT = batch.valid_BT.cumsum(-1) == batch.valid_BT.sum(-1)[:, None]
        wanted = (is_last_BT[:, None, None] & batch.valid_BT[:, None, :, None]).float()
        return watched.watch(batch, lambda attention: masses(attention, wanted, batch.valid_BT))

    for batch in batches_of(run, watched, run.config.batch_size):
        means.add(looking(batch))
    rows = write_heads(run, {"last": means.column(0)}, UNITS, "last", title="Last token", label="% of attention")
    return Findings({"sequences": watched.number, "heads": len(rows)}, {"best": best(rows, "last")})


def shown(artifact, config):
    head = artifact.counts["best"]
    return Table(("head", "last"), [(head_name(head), share(head["last"]))])


STAGE = probe(
    "last",
    1,
    Config,
    measure,
    takes=ON_SEQUENCES,
    table=shown,
    writes={"heads.parquet of last": head_columns(UNITS)},
    help="Measure how much attention each head leaves on the last token.",
    examples=("guide probe last guided wiki-128",),
)

run = STAGE.run
'''

FILES = {
    "pipelines/training/objectives/copying.py": COPYING,
    "pipelines/training/tasks/grading.py": GRADING,
    "pipelines/stages/probe_last.py": LOOKING,
}

Guide = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Guide:
    """The command line of a copy of the code with these files."""
    tree = tmp_path_factory.mktemp("code")
    for package in ("cli", "pipelines", "guidance"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in FILES.items():
        (tree / path).write_text(text)

    def call(*arguments: str, module: bool = True) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "200"}
        command = [sys.executable, *(("-m", "cli") if module else ()), *arguments]
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300)

    return call


def test_a_new_objective_is_in_the_help_with_its_setting_and_its_example(extended: Guide) -> None:
    done = extended("pretrain", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert "--objective <copy|mlm|mlm+nsp|clm|electra|translation>" in words and "copy reads any sequences." in words
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


IN_ONE_PROCESS = """
import json, sys
from contextlib import redirect_stdout
from io import StringIO
from cli.main import run
said = []
for command in json.load(sys.stdin):
    with redirect_stdout(StringIO()) as out:
        said.append([run(command), out.getvalue()])
print(json.dumps(said))
"""


def in_one_process(extended: Guide, folder: Path, *commands: str) -> list[str]:
    """What commands print, one after the other in one process of the extended code; all must succeed."""
    lines = json.dumps([[*command.split(), "--store", str(folder / "artifacts")] for command in commands])
    program = IN_ONE_PROCESS.replace("json.load(sys.stdin)", f"json.loads({lines!r})")
    done = extended("-c", program, module=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert all(code == 0 for code, _ in said), (said, done.stderr)
    return [out for _, out in said]


def test_a_new_task_is_trained_measured_compared_and_put_to_work(extended: Guide, tmp_path: Path) -> None:
    rows = [f"essay {('poor', 'fair', 'great')[n % 3]} {n % 5},{n % 3}" for n in range(48)]
    (tmp_path / "essays.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    (tmp_path / "new.txt").write_text("essay great 4\nessay poor 1\n")
    tiny = "--layers 1 --hidden 16 --heads 2 --batch-size 8 --learning-rate 1e-2"
    *_, measured, compared, answers, searched = in_one_process(
        extended,
        tmp_path,
        f"build-dataset --train {tmp_path}/essays.csv --test {tmp_path}/essays.csv --valid-fraction 0.2 --name essays",
        f"finetune essays --task grade --select exact --epochs 1 {tiny} --name once",
        f"finetune essays --task grade --select exact --epochs 30 {tiny} --name often",
        "evaluate once essays --name first",
        "evaluate often essays --name second --json",
        "compare first second --json",
        f"predict often {tmp_path}/new.txt",
        f"search essays --task grade --select exact --grid learning-rate=0.01 --seeds 1 --epochs 1 {tiny} --json",
    )
    counts = json.loads(measured)["counts"]
    assert counts["task"] == "grade" and counts["metrics"]["exact"] > 0.5, measured
    (tested,) = json.loads(compared)["comparisons"]
    assert tested["metric"] == "exact" and tested["difference"]["test"] == "McNemar's exact test", compared
    assert tested["difference"]["low"] <= tested["difference"]["effect"] <= tested["difference"]["high"]
    assert [json.loads(line)["prediction"] for line in answers.splitlines()] == ["2", "0"]
    assert "exact" in searched


@pytest.mark.every
def test_a_new_probe_measures_and_shows_its_table(extended: Guide, tmp_path: Path) -> None:
    data = trainings.sequences(Store(tmp_path / "artifacts"))
    tiny = "--layers 1 --hidden 16 --heads 2 --steps 2 --architecture bert"
    *_, probed, shown, again = in_one_process(
        extended,
        tmp_path,
        f"pretrain {data.reference} {tiny} --name tiny",
        f"probe last tiny {data.reference} --json --name last",
        "show last",
        f"probe last tiny {data.reference}",
    )
    best = json.loads(probed)["counts"]["best"]
    assert 0 < best["last"] < 1
    assert re.search(rf"{best['layer']}-{best['head']} +{100 * best['last']:.1f} %", shown), shown
    assert again.startswith("probe/")
