"""Continue prompts with a causal language model, whose guides may act on parts of the prompt that the user marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import guidance
from guidance.checkpoint import find_plan
from guidance.errors import InputError, PlanError
from guidance.plan import Plan
from pipelines.training.live_text import LiveModel, check_bare_text
from pipelines.training.objective import has_head
from pipelines.training.opening import Unguided

Span = tuple[int, int]
"""Where a part of a text starts and ends, in characters."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
        marked: the spans of its marked parts, in their order.
    """

    text: str
    marked: tuple[Span, ...] = ()

    @classmethod
    def parse(cls, text: str, marks: Sequence[str] = ()) -> Prompt:
        """The prompt of a text, whose marked parts stand between ``<<`` and ``>>``.

        Args:
            marks: strings that are marked wherever they stand in the text.

        Raises:
            InputError: a ``<<`` or ``>>`` has no other end, or one of ``marks`` is not in the text.
        """
        parts = re.split(r"(<<|>>)", text)
        bare, spans, start = "", list[Span](), -1
        for part in parts:
            if part not in ("<<", ">>"):
                bare += part
            elif (part == "<<") != (start < 0):
                raise InputError(f"{part} without its other end: {text[:80]!r}", hint="<<the part that is marked>>")
            elif part == "<<":
                start = len(bare)
            else:
                spans.append((start, len(bare)))
                start = -1
        if start >= 0:
            raise InputError(f"<< without its other end: {text[:80]!r}", hint="<<the part that is marked>>")
        for mark in marks:
            places = [found.span() for found in re.finditer(re.escape(mark), bare)] if mark else []
            if not places:
                raise InputError(f"the prompt does not have what should be marked: {mark!r}")
            spans += places
        return cls(bare, tuple(sorted(spans)))


class Writer(LiveModel):
    """A causal language model that continues prompts.  It follows a given plan, or else its own.

    Args:
        plan: rows that act while the model reads and writes.  Their patterns may read tokens and their places, words, sentences
            and ``marked``.
        strength: how strongly these rows act, above 0 and up to 1, which is as the plan says.
        called: how messages call the plan.

    Raises:
        InputError: the model is no causal language model.
        PlanError: the plan does nothing when a model writes, has rows that must be trained, or needs features that a prompt does not
            have; or the model already has a plan of its own that acts when it writes.
    """

    given = ("marked",)
    takes_masks = "`guide evaluate` reads"

    def __init__(
        self,
        folder: Path,
        plan: Plan | None = None,
        *,
        strength: float = 1.0,
        device: str = "auto",
        called: str = "plan",
    ) -> None:
        if plan is not None:
            self._check_plan(folder, plan, called)
        super().__init__(folder, device)
        self.tokenizer.no_truncation()
        if plan is not None:
            rows = tuple(replace(row, strength=row.strength * strength) for row in plan.inherited(None).guides)
            wanted = check_bare_text(plan, folder, self.takes_masks, self.given)
            self.needed = tuple(dict.fromkeys((*self.needed, *wanted)))
            if not isinstance(self.handle, Unguided):
                self.handle.remove()  # a plan of losses, which do nothing when a model writes
            self.handle = guidance.install(self.model, Plan(rows), self.wrapped_tokenizer(), training=False)

    @staticmethod
    def _check_plan(folder: Path, plan: Plan, called: str) -> None:
        if not plan.shapes_outputs:
            raise PlanError(
                f"{called}: nothing in it acts when a model writes", hint="losses and attacks are for training"
            )
        if plan.pal is not None or any(row.learns for row in plan.guides):
            raise PlanError(
                f"{called}: a row of it is learned, and has learned nothing in this model",
                hint="mask, bias, fix, gaussian and off need no training",
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
                hint="`guide generate` takes causal language models, such as `guide pretrain --objective clm` trains",
            )

    def reads_marks(self) -> bool:
        """Whether a guide reads which tokens are marked."""
        return "marked" in self.handle.plan.needs(training=False)

    def write(self, prompt: Prompt, *, max_new_tokens: int, **search: Any) -> str:
        """What the model writes after a prompt.

        Args:
            search: further settings of ``generate`` of transformers, such as ``do_sample``, ``temperature``, ``num_beams``.

        Raises:
            InputError: the prompt is empty, the model has no room for a token after it, or the plan reads marks and the prompt has
                none.
        """
        batch = self.read([prompt.text])
        encoding = batch.encodings[0]
        # models write after the last token of the text: a special token behind it would end the text
        ends = [n for n, part in enumerate(encoding.sequence_ids, 1) if part is not None]
        if not ends:
            raise InputError("the prompt is empty")
        length = ends[-1]
        room = max_new_tokens if self.longest is None else min(max_new_tokens, self.longest - length)
        if room < 1:
            raise InputError(
                f"the prompt has {length} tokens, and the model has room for {self.longest}", hint="cut it"
            )
        inputs = {name: values[:, :length] for name, values in batch.inputs.items()}
        columns = {name: values[:, :length] for name, values in batch.columns.items()}
        if self.reads_marks():
            columns["marked"] = self._marked(prompt, encoding.offsets[:length])
        if isinstance(self.handle, Unguided):
            columns = {}
        with torch.no_grad():
            ids_BT = self.model.generate(
                **inputs, **columns, max_new_tokens=room, pad_token_id=self.pad_id, use_cache=True, **search
            )
        text: str = self.tokenizer.decode(ids_BT[0, length:].tolist(), skip_special_tokens=True)
        return text

    def _marked(self, prompt: Prompt, offsets: Sequence[Span]) -> torch.Tensor:
        if not prompt.marked:
            raise InputError(
                f"nothing is marked in the prompt: {prompt.text[:80]!r}",
                hint="<<a part that is marked>>, or --mark 'a part'",
            )
        hits = [any(a < end and start < b for start, end in prompt.marked) for a, b in offsets]
        return torch.tensor([hits], device=self.model.device)
