"""The tests that transformers has for all its models, as a class for each family.

`tests.transformers_contract.common_tests` lets pytest run this file.  Its environment says more: ``TRANSFORMERS_TESTS`` is a folder
in which these tests are the package ``common``, ``GUIDE_FAMILIES`` has names of families with commas between them, and ``GUIDE_PLAN``
is the one of `PLANS` that is installed in every model at its first call, or empty.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from guidance import Guide, Plan, install
from tests.guidance.models import tiny_config
from tests.transformers_contract.common_tests import class_name

sys.path.insert(0, os.environ["TRANSFORMERS_TESTS"])

from common.test_modeling_common import ModelTesterMixin, ids_tensor  # type: ignore[import-not-found]

NEUTRAL = tuple(
    Guide(
        "previous",
        "bias",
        stack=stack,
        attention=attention,
        optional=True,
        options={"inside": 1.0, "outside": 1 - 1e-9},
    )
    for stack, attention in (("encoder", "self"), ("decoder", "self"), ("decoder", "cross"))
)
PLANS = {"empty": Plan(), "neutral": Plan(NEUTRAL)}
"""A plan without rows, and one whose rows guide all heads and change nothing."""

HEADS = ("MAPPING", "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION")
HEADS += ("TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "PRETRAINING")


def classes_of(config: Any) -> tuple[type[PreTrainedModel], ...]:
    """The models of that configuration, without heads and with each."""
    names = ["MODEL_MAPPING", *(f"MODEL_FOR_{head}_MAPPING" for head in HEADS[1:])]
    found = [getattr(modeling_auto, name).get(type(config), None) for name in names]
    return tuple(dict.fromkeys(kind for kind in found if kind is not None))


class Tester:
    """What the common tests ask about a family: its configuration, inputs and sizes."""

    batch_size, seq_length, encoder_seq_length, decoder_seq_length = 3, 7, 7, 7
    num_hidden_layers, num_attention_heads, hidden_size, num_labels, num_choices = 2, 4, 16, 3, 4
    type_sequence_label_size, is_training = 2, True

    def __init__(self, family: str) -> None:
        self.family = family

    def get_config(self) -> Any:
        """The tiny one of our own tests, with weights as transformers draws them."""
        return tiny_config(
            self.family, initializer_range=0.02, init_std=0.02, num_labels=3, pad_token_id=0, bos_token_id=1
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        config = self.get_config()
        shape = [self.batch_size, self.seq_length]
        ids = ids_tensor(shape, config.vocab_size).clamp(min=3)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids_tensor(shape, config.vocab_size).clamp(min=3)
            inputs["decoder_attention_mask"] = torch.ones_like(ids)
        return config, inputs


def class_of(family: str) -> type[unittest.TestCase]:
    """The tests of a family."""
    config = Tester(family).get_config()

    def set_up(self: Any) -> None:
        self.model_tester = Tester(family)

    facts = {
        "all_model_classes": classes_of(config),
        "is_encoder_decoder": config.is_encoder_decoder,
        "setUp": set_up,
        "__module__": __name__,
    }
    return type(class_name(family), (ModelTesterMixin, unittest.TestCase), facts)


for _family in os.environ["GUIDE_FAMILIES"].split(","):
    _tests = class_of(_family)
    globals()[_tests.__name__] = _tests
del _tests

# a plan at the first call

_guided = 0
"""How many models have the plan."""


def guided_call(call: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """``model(...)`` that first installs the plan, unless a test chose another attention function than the usual for the model."""
    installing = False

    def guided(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        nonlocal installing
        global _guided
        usual = "sdpa" if self._supports_sdpa else "eager"
        if not installing and "guide_handles" not in self.__dict__ and self.config._attn_implementation == usual:
            installing = True
            try:
                install(self, plan)
                _guided += 1
            finally:
                installing = False
        return call(self, *args, **kwargs)

    return guided


if os.environ["GUIDE_PLAN"]:
    PreTrainedModel.__call__ = guided_call(PreTrainedModel.__call__, PLANS[os.environ["GUIDE_PLAN"]])  # type: ignore[method-assign]


@pytest.fixture(autouse=True, scope="module")
def _say_how_many(record_testsuite_property: Callable[[str, object], None]) -> Iterator[None]:
    yield
    record_testsuite_property("guided", _guided)
