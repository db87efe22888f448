"""Prompts with marked parts: the texts that a causal language model continues, and which of their tokens are marked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from guidance.errors import InputError

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
        r"""The prompt of a text, whose marked parts stand between ``<<`` and ``>>``; ``\<<`` and ``\>>`` are these signs themselves.

        Args:
            marks: strings that are marked wherever they stand in the text.

        Raises:
            InputError: a ``<<`` or ``>>`` has no other end, or one of ``marks`` is not in the text.
        """
        hint = r"<<the part that is marked>>; \<< and \>> are signs of the text itself"
        parts = re.split(r"(\\<<|\\>>|<<|>>)", text)
        bare, spans, start = "", list[Span](), -1
        for part in parts:
            if part not in ("<<", ">>"):
                bare += part[1:] if part in (r"\<<", r"\>>") else part
            elif (part == "<<") != (start < 0):
                raise InputError(f"{part} without its other end: {text[:80]!r}", hint=hint)
            elif part == "<<":
                start = len(bare)
            else:
                spans.append((start, len(bare)))
                start = -1
        if start >= 0:
            raise InputError(f"<< without its other end: {text[:80]!r}", hint=hint)
        for mark in marks:
            places = [found.span() for found in re.finditer(re.escape(mark), bare)] if mark else []
            if not places:
                raise InputError(f"the prompt does not have what should be marked: {mark!r}")
            spans += places
        return cls(bare, tuple(sorted(set(spans))))

    @staticmethod
    def has_marks(text: str) -> bool:
        r"""Whether a text has a part between ``<<`` and ``>>`` that are not written ``\<<`` and ``\>>``."""
        return re.search(r"(?<!\\)<<.*?(?<!\\)>>", text, re.DOTALL) is not None

    def marked_tokens(self, offsets: Sequence[Span]) -> list[bool]:
        """Whether each token has a part in a marked span, given where the tokens start and end in the text."""
        return [any(a < end and start < b for start, end in self.marked) for a, b in offsets]


def prompt_length(encoding: Any) -> int:
    """How many tokens of an encoded text a model reads before it writes: all up to the last token of the text, since a special
    token behind it would end the text.  0 if the text has no token.

    Args:
        encoding: as ``tokenizers`` gives it.
    """
    return max((n for n, part in enumerate(encoding.sequence_ids, 1) if part is not None), default=0)


def encode_prompts(tokenizer: Any, texts: str | Sequence[str], marks: Sequence[str] = ()) -> dict[str, Tensor]:
    """One prompt or several as ``generate`` takes them: ``input_ids``, ``attention_mask`` and ``marked``, (B, T) each.

    Marked parts stand between ``<<`` and ``>>``, which the model does not read.  Padding is on the left, and special tokens that
    would end a prompt are left out.

    Args:
        tokenizer: a fast tokenizer of transformers.
        marks: strings that are marked wherever they stand in a prompt.

    Raises:
        InputError: see `Prompt.parse`; a prompt is empty; or the tokenizer is not a fast one.

    Example:
        >>> model.generate(**encode_prompts(tokenizer, "Answer in French. <<Be brief.>> What is a cat?"), max_new_tokens=40)
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, and does not say where its tokens are in a text"
        )
    prompts = [Prompt.parse(text, marks) for text in ([texts] if isinstance(texts, str) else texts)]
    encodings = [tokenizer(prompt.text, padding=False).encodings[0] for prompt in prompts]
    lengths = [prompt_length(encoding) for encoding in encodings]
    if not lengths:
        raise InputError("no prompt is given")
    if not all(lengths):
        raise InputError("the prompt is empty" if len(lengths) == 1 else "a prompt is empty")
    width = max(lengths)
    # any token can stand where the mask is 0, and GPT-2's tokenizer has none of its own for padding
    pad_id = next(known for known in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if known is not None)
    rows: dict[str, list[list[Any]]] = {"input_ids": [], "attention_mask": [], "marked": []}
    for prompt, encoding, length in zip(prompts, encodings, lengths, strict=True):
        missing = width - length
        rows["input_ids"].append([pad_id] * missing + encoding.ids[:length])
        rows["attention_mask"].append([0] * missing + [1] * length)
        rows["marked"].append([False] * missing + prompt.marked_tokens(encoding.offsets[:length]))
    return {name: torch.tensor(values) for name, values in rows.items()}
