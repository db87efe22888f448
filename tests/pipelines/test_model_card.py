"""What the model card says about a plan, and how to open the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guidance.plan import Guide, Plan
from pipelines.model_card import card


def written(plan: Plan) -> str:
    """The card of a run that did nothing else of note."""
    out = SimpleNamespace(provenance=[], counts={"steps": 3, "parameters": 1234})
    run: Any = SimpleNamespace(config=SimpleNamespace(batch_size=4, seed=0), out=out, inputs={})
    outcome: Any = SimpleNamespace(rows=[{"step": 3, "loss/mlm": 2.5}], best_step=None)
    return card(run, plan, outcome, "bert")


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
