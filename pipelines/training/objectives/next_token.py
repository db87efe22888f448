"""The objective ``clm``: causal language modelling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.text.tokenizer_files import laid_out, settings_file
from pipelines.training.objective import Card, Objective, has_head
from pipelines.training.settings import FloorEvaluation

if TYPE_CHECKING:
    from guidance.guide import Guide
    from pipelines.metrics.comparison import Compared, Table
    from pipelines.storage.artifacts import Artifact


class CausalLanguageModelling(Objective):
    """Causal language modelling: each token is predicted from those of its document before it."""

    name = "clm"
    learns = "the next word"
    needs = "clm predicts the next word from those of the document before it, in any sequences."
    families = ("llama", "gpt2")
    source = "Radford et al. 2019, section 2"
    card = Card("causal language model", "text-generation", "AutoModelForCausalLM")
    needs_mask_token = False
    needs_pad_token = False
    examples = (
        "guide pretrain novels-256 --objective clm --architecture llama --layers 8 --hidden 128 --heads 4 --plan preset:neighbours-causal",
        "guide pretrain my-text-of-smollm --objective clm --init ./smollm --learning-rate 2e-5",
    )
    learner = "pipelines.training.learners.causal_lm:prepare"
    measured_as = "causal-lm"
    evaluation = "pipelines.training.learners.causal_scores:evaluate"
    evaluation_settings = (FloorEvaluation,)
    wants_corpus = True
    floors = "causal"

    @classmethod
    def tokenizer_of(cls, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """The same files, in which the tokens that begin and end sequences are also ``bos_token`` and ``eos_token``, the names that
        other tools look for in causal models.  None stands behind a text, so that the model goes on with it."""
        settings = json.loads(files["tokenizer_config.json"])
        known = (("bos_token", "cls_token"), ("eos_token", "sep_token"))
        named = {name: settings[role] for name, role in known if role in settings} | settings
        return {**laid_out(files, ends=False), "tokenizer_config.json": settings_file(named)}

    @classmethod
    def measures(cls, config: Any, data: Artifact | None) -> bool:
        return has_head(config, "ForCausalLM", "LMHeadModel")

    @classmethod
    def compare(cls, one: Table, other: Table) -> list[Compared]:
        """Loss, accuracy and bits per byte, with a paired bootstrap over sequences."""
        from pipelines.training.learners.causal_scores import compare

        return compare(one, other)

    @classmethod
    def refusal(cls, guide: Guide) -> str:
        if reason := super().refusal(guide):
            return reason
        if guide.bound_pattern and guide.bound_pattern.is_only_ahead() and not guide.optional:
            return (
                f"{guide.pattern} names only later tokens, and a model that predicts them sees none; "
                "see preset:ag-causal and preset:neighbours-causal"
            )
        return ""
