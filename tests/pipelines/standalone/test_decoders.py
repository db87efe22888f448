"""A standalone decoder is the guided one, also with a cache and in generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import guidance
from guidance.mechanisms import MECHANISMS
from guidance.plan import Plan
from tests.guidance.models import MAIN_DECODERS, SEQ2SEQ
from tests.guidance.test_cache import (
    CACHES,
    CASES,
    EVERYTHING,
    LEFT,
    PLANS,
    PROMPTS,
    RIGHT,
    SETTINGS,
    arguments,
    generated,
    in_pieces,
)
from tests.pipelines.standalone.test_standalone import CLOSE, _code_is_copied_to, exported, opened  # noqa: F401


@pytest.mark.one_in(120)
@pytest.mark.parametrize(("family", "name"), CASES)
@torch.no_grad()
def test_a_standalone_decoder_computes_what_the_guided_one_does(family: str, name: str, tmp_path: Path) -> None:
    model, folder, done = exported(tmp_path, family, Plan(PLANS[name]))
    assert done.auto_class == ("AutoModelForSeq2SeqLM" if family in SEQ2SEQ else "AutoModelForCausalLM")
    found = opened(folder, done.auto_class)
    found.save_pretrained(tmp_path / "again")
    others = [found, opened(tmp_path / "again", done.auto_class), guidance.load(folder)[0]]
    for inputs in (RIGHT, LEFT):
        given = arguments(family, inputs, 0, 9)
        for other in others:
            torch.testing.assert_close(other(**given).logits, model(**given).logits, **CLOSE)
        for make in CACHES.values():
            wanted, pieces = (in_pieces(each, family, inputs, make(each.config)) for each in (model, found))
            torch.testing.assert_close(pieces, wanted, **CLOSE)
        tokens = [generated(each, given, num_beams=3) for each in (model, found)]
        assert torch.equal(*tokens)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("family", MAIN_DECODERS)
def test_a_standalone_decoder_generates_what_the_guided_one_does(family: str, tmp_path: Path) -> None:
    model, folder, done = exported(tmp_path, family, EVERYTHING)
    found = opened(folder, done.auto_class)
    asked = {"output_logits": True, "return_dict_in_generate": True}
    for settings in SETTINGS.values():
        wanted, answer = (generated(each, PROMPTS, **settings, **asked) for each in (model, found))
        assert torch.equal(answer.sequences, wanted.sequences)
        torch.testing.assert_close(answer.logits, wanted.logits, **CLOSE)
    prompt = {name: tensor[:1] for name, tensor in PROMPTS.items()}
    whole = generated(model, prompt)
    assert torch.equal(generated(found, prompt, assistant_model=opened(folder, done.auto_class)), whole)
    assert torch.equal(generated(found, prompt, prompt_lookup_num_tokens=3), whole)


def test_every_mechanism_that_shapes_models_is_among_the_plans() -> None:
    assert {row.mechanism for rows in PLANS.values() for row in rows} == {
        name for name, mechanism in MECHANISMS.items() if not mechanism.is_loss()
    }
