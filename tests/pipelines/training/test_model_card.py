"""What the model card says about a plan, and how to open the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.stages.pretrain import Config
from pipelines.storage.store import Store
from pipelines.training.learner import ModelFolder
from pipelines.training.model_card import card
from pipelines.training.objectives import OBJECTIVES


def written(
    plan: Plan, *paths: str, best_step: int | None = None, provenance: Sequence[Any] = (), **settings: Any
) -> str:
    """The card of a minimal run, with model folders at ``paths`` beside the first one."""
    files = ["best/config.json"] if best_step else []
    out = SimpleNamespace(provenance=list(provenance), counts={"steps": 3, "parameters": 1234}, files=files)
    run: Any = SimpleNamespace(config=Config(**{"batch_size": 4, **settings}), out=out, inputs={})
    outcome: Any = SimpleNamespace(last={"step": 3, "loss/mlm": 2.5}, best=[(best_step, 2.0)] if best_step else [])
    model = SimpleNamespace(config=SimpleNamespace(model_type="bert"))
    return card(run, plan, outcome, [ModelFolder(path, path, model, plan) for path in ("", *paths)])


@pytest.mark.parametrize(
    ("plan", "needed", "said"),
    [
        (Plan(), False, "No head was guided."),
        (Plan((Guide("next", "attention_loss", heads=(0,)),)), False, "through the loss alone"),
        (Plan((Guide("next", "mask", heads=(0,)),)), True, "shapes what heads compute"),
        (Plan((Guide(mechanism="gate"),)), True, "shapes what heads compute"),
        (Plan((Guide(mechanism="off", heads=(0,), enabled=False),)), False, "through the loss alone"),
    ],
)
def test_the_card_tells_how_to_open_the_model(plan: Plan, needed: bool, said: str) -> None:
    text = written(plan)
    assert said in text
    assert ("**This model needs its plan.**" in text) == ('guidance.load("FOLDER")' in text) == needed
    assert ('AutoModelForMaskedLM.from_pretrained("FOLDER")' in text) == (not needed)
    assert ("```toml" in text) == bool(plan.guides)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_card_says_what_the_model_does_and_which_class_opens_it(objective: str) -> None:
    import transformers

    text = written(Plan(), objective=objective)
    assert f"# A bert {OBJECTIVES[objective].card.words}\n" in text
    assert f"pipeline_tag: {OBJECTIVES[objective].card.pipeline}\n" in text
    assert hasattr(transformers, OBJECTIVES[objective].card.auto_class)
    assert f"model = {OBJECTIVES[objective].card.auto_class}.from_pretrained" in text and "AUTO_CLASS" not in text


def test_the_card_says_what_the_folder_of_the_generator_is() -> None:
    assert "`generator/` holds" in written(Plan(), "generator/", objective="electra")
    assert "generator" not in written(Plan(), objective="electra")


def test_the_card_mentions_the_best_model_if_there_is_one() -> None:
    assert "`best/`" not in written(Plan())
    assert "`best/` holds the weights of the lowest validation loss (step 2)." in written(Plan(), best_step=2)


def test_the_card_of_a_tagger_says_by_which_metric_its_weights_were_chosen(guide: Any, tmp_path: Path) -> None:
    (tmp_path / "tags.conll").write_text("Anna B-PER\nsees O\nRome B-LOC\n\nsees O\nit O\n\n" * 3)
    data = guide("build-dataset", "--train", "tags.conll", "--valid", "tags.conll", "--format", "conll").out.strip()
    sizes = ("--layers", 1, "--hidden", 16, "--heads", 2, "--ffn", 16, "--learning-rate", 0.01)
    guide("finetune", data, "--select", "f1", "--epochs", 3, *sizes, "--name", "tagger")
    shown = json.loads(guide("show", "tagger", "--json").out)
    best, last = shown["counts"]["best"]["value"], shown["counts"]["final"]["eval/tagging/f1"]
    text = (Store(tmp_path / "artifacts").find("tagger") / "README.md").read_text()
    assert f"the best validation f1, {best:.4f} (step {shown['counts']['best_step']})." in text
    assert f"| eval/tagging/f1 | {last:.4f} |\n" in text and "eval/tagging/precision" not in text


def test_the_card_says_how_large_batches_were() -> None:
    assert "3 steps of 4 sequences" in written(Plan())
    assert "3 steps of at most 4096 tokens" in written(Plan(), batch_tokens=4096)


def test_the_card_lists_weights_that_training_started_from_apart_from_the_data() -> None:
    entries = [{"source": "a book", "license": "cc0"}, {"source": "weights of minilm", "license": "apache-2.0"}]
    text = written(Plan(), provenance=entries)
    assert "## Data\n\n- a book: cc0\n\n" in text and "## Weights\n\n- weights of minilm: apache-2.0\n\n" in text
    assert "## Weights" not in written(Plan(), provenance=entries[:1])
