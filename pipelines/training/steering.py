"""Continue prompts with a causal language model, whose guides may act on parts of the prompt that the user marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import guidance
from guidance.checkpoint import find_plan
from guidance.errors import InputError, PlanError
from guidance.plan import Plan
from guidance.prompts import Prompt, Span, prompt_length
from pipelines.training.live_text import LiveModel, check_bare_text, without_controls
from pipelines.training.objective import has_head
from pipelines.training.opening import Unguided
from pipelines.training.text_words import TextWords


class Writer(LiveModel):
    """A causal language model that continues prompts.  It follows a given plan, or else its own.

    Args:
        plan: rows that act while the model reads and writes.  Their patterns may read tokens and their places, words, sentences
            and ``marked``.
        strength: how strongly these rows act, above 0 and up to 1, which is as the plan says.
        scores: of heads, by (layer, head), for plans that choose heads by score.
        called: how messages call the plan.
        words: finds the words that the model's own plan reads, and has the tables that it looks up; by default rules, and none.

    Raises:
        InputError: the model is no causal language model.
        PlanError: the plan does nothing when a model writes, has rows that must be trained, or needs features that a prompt does not
            have; or the model already has a plan of its own that acts when it writes.
    """

    given = ("marked",)

    def __init__(
        self,
        folder: Path,
        plan: Plan | None = None,
        *,
        strength: float = 1.0,
        scores: Mapping[tuple[int, int], float] | None = None,
        device: str = "auto",
        called: str = "plan",
        words: TextWords | None = None,
    ) -> None:
        if plan is not None:
            self._check_plan(folder, plan, called)
        super().__init__(folder, device, words=words)
        self._tables = {} if scores is None else {"importance": scores}
        self.tokenizer.no_truncation()
        if plan is not None:
            wanted = check_bare_text(plan, folder, self.takes_masks, self.given)
            self.needed = tuple(dict.fromkeys((*self.needed, *wanted)))
            self.steer(at_strength(plan, strength))

    def steer(self, plan: Plan) -> None:
        """Follow other rows from now on; an empty plan leaves the model as it is."""
        if not isinstance(self.handle, Unguided):
            self.handle.remove()  # also a plan of losses, which do nothing when a model writes
        self.handle = guidance.install(self.model, plan, self.wrapped_tokenizer(), tables=self._tables, training=False)

    @staticmethod
    def _check_plan(folder: Path, plan: Plan, called: str) -> None:
        if not plan.shapes_outputs:
            raise PlanError(
                f"{called}: nothing in it acts when a model writes", hint="losses and attacks are for training"
            )
        if plan.pal is not None or any(row.learns for row in plan.guides):
            raise PlanError(
                f"{called}: a row of it is learned, and has learned nothing in this model",
                hint="mask, bias, fix, gaussian and off need no training, nor does mix with learn = false",
            )
        if (own := find_plan(folder)) is not None and own.shapes_outputs:
            raise PlanError(
                f"{folder} has a plan of its own that shapes it, and cannot follow {called} too",
                hint="without --plan it follows its own",
            )

    def check(self, folder: Path, config: Any) -> None:
        if config.is_encoder_decoder or not has_head(config, "ForCausalLM", "LMHeadModel"):
            raise InputError(
                f"{folder}: a {config.model_type} model that does not continue texts",
                hint="a causal language model does, such as `guide pretrain --objective clm` trains",
            )

    def reads_marks(self) -> bool:
        """Whether a guide reads which tokens are marked."""
        return "marked" in self.handle.plan.needs(training=False)

    def marked_tokens(self, prompt: Prompt, offsets: Sequence[Span]) -> list[bool]:
        """Which tokens of a prompt are marked.  Raises InputError if the plan reads marks, and none is."""
        marked = prompt.marked_tokens(offsets)
        if self.reads_marks() and not any(marked):
            raise InputError(
                f"nothing is marked in the prompt: {prompt.text[:80]!r}",
                hint="<<a part that is marked>>, or --mark 'a part'",
            )
        return marked

    def write(
        self, prompt: Prompt, *, max_new_tokens: int, tell: Callable[[str], object] = lambda text: None, **search: Any
    ) -> str:
        """What the model writes after a prompt.

        Args:
            tell: is told if the model has room for fewer tokens than that.
            search: further settings of ``generate`` of transformers, such as ``do_sample``, ``temperature``, ``num_beams``.

        Raises:
            InputError: the prompt is empty, the model has no room for a token after it, or the plan reads marks and the prompt has
                none.
        """
        batch = self.read([prompt.text])
        encoding = batch.encodings[0]
        length = prompt_length(encoding)
        if not length:
            raise InputError("the prompt is empty")
        room = max_new_tokens if self.longest is None else min(max_new_tokens, self.longest - length)
        if room < 1:
            raise InputError(
                f"the prompt has {length} tokens, and the model has room for {self.longest}", hint="cut it"
            )
        if room < max_new_tokens:
            tell(f"the model has room for {room} tokens after the prompt, not for {max_new_tokens}")
        inputs = {name: values[:, :length] for name, values in batch.inputs.items()}
        columns = {name: values[:, :length] for name, values in batch.columns.items()}
        if self.reads_marks():
            marked = self.marked_tokens(prompt, encoding.offsets[:length])
            columns["marked"] = torch.tensor([marked], device=self.model.device)
        if isinstance(self.handle, Unguided):
            columns = {}
        with torch.no_grad():
            ids_BT = self.model.generate(
                **inputs, **columns, max_new_tokens=room, pad_token_id=self.pad_id, use_cache=True, **search
            )
        # decoded together with the prompt: some tokenizers drop a space before the first token that they are given
        before, whole = (
            self.tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in (ids_BT[0, :length], ids_BT[0])
        )
        return without_controls(whole.removeprefix(before))


def at_strength(plan: Plan, strength: float) -> Plan:
    """The rows of a plan that shape a model, at a share of their strength.  Raises PlanError if one cannot act in part."""
    rows = []
    for row in plan.inherited(None).guides:
        try:
            rows.append(replace(row, strength=row.strength * strength))
        except PlanError as error:
            error.message = f"guide {row.label!r} at a strength of {strength:g}: {error.message}"
            raise
    return Plan(tuple(rows))


def on_heads(plan: Plan, heads: Sequence[tuple[int, int]]) -> Plan:
    """A plan whose rows act on these heads alone, given by layer and number.

    Raises:
        PlanError: a row mixes in whole layers.
    """
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        by_layer.setdefault(layer, []).append(head)
    return Plan(
        tuple(replace(row, layers=(layer,), heads=tuple(own)) for row in plan.guides for layer, own in by_layer.items())
    )
