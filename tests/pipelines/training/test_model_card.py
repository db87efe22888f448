"""What the model card says about a plan, and how to open the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.stages.pretrain import Config
from pipelines.training.learner import ModelFolder
from pipelines.training.model_card import card
from pipelines.training.objectives import OBJECTIVES


def written(plan: Plan, *paths: str, best_step: int | None = None, **settings: Any) -> str:
    """The card of a minimal run, with model folders at ``paths`` beside the first one."""
    files = ["best/config.json"] if best_step else []
    out = SimpleNamespace(provenance=[], counts={"steps": 3, "parameters": 1234}, files=files)
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


def test_the_card_says_how_large_batches_were() -> None:
    assert "3 steps of 4 sequences" in written(Plan())
    assert "3 steps of at most 4096 tokens" in written(Plan(), batch_tokens=4096)
