"""Sites: on which heads?  The attention modules of a model, and rules that select layers and heads by number.

A site is one attention module.  Its layer is its place among the modules of its kind, never a module's ``layer_idx``,
which several architectures leave out.  A new architecture is a new row in `ATTENTION_CLASSES`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from guidance.errors import PlanError, UnsupportedModel


@dataclass(frozen=True)
class Site:
    """One attention module: ``stack`` is encoder or decoder, ``attention`` self or cross; layers count from 0."""

    stack: str
    attention: str
    layer: int
    num_heads: int
    name: str


ATTENTION_CLASSES: Mapping[str, str] = {
    "BertSelfAttention": "self",
    "RobertaSelfAttention": "self",
    "XLMRobertaSelfAttention": "self",
    "CamembertSelfAttention": "self",
    "ElectraSelfAttention": "self",
    "ModernBertAttention": "self",
}
"""The attention classes that route through the interface of transformers, and what they attend to."""

SUPPORTED = "BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ModernBERT"


def find_sites(model: nn.Module) -> dict[nn.Module, Site]:
    """Every attention module of a model, in the order of its layers.

    Raises:
        UnsupportedModel: it has none that we know.
    """
    found: dict[nn.Module, Site] = {}
    seen: dict[tuple[str, str], int] = {}
    num_heads = getattr(getattr(model, "config", None), "num_attention_heads", 0)
    for name, module in model.named_modules():
        attention = ATTENTION_CLASSES.get(type(module).__name__)
        if attention:
            stack = "decoder" if "decoder" in name.split(".") else "encoder"
            layer = seen.get((stack, attention), 0)
            seen[stack, attention] = layer + 1
            found[module] = Site(stack, attention, layer, int(num_heads), name)
    if not found:
        raise UnsupportedModel(
            f"{type(model).__name__}: no attention module that can be guided", hint=f"supported: {SUPPORTED}"
        )
    return found


Selector = int | str
"""A number, or a rule: ``all``, ``2-4`` (both ends included), ``first 2``, ``last 2``, ``fraction 0.5`` (the first half),
``not 0-1`` (takes away what came before it)."""


def select(selectors: Iterable[Selector], count: int, what: str) -> tuple[int, ...]:
    """The numbers below ``count`` that a list of selectors names, sorted.

    Raises:
        PlanError: a selector that is no rule, or a number that does not exist.

    Example:
        >>> select(["fraction 0.5", "not 0-1"], 12, "head")
        (2, 3, 4, 5)
    """
    chosen: set[int] = set()
    for selector in selectors:
        if isinstance(selector, str) and selector.startswith("not "):
            chosen -= set(range(count)).intersection(_numbers(selector.removeprefix("not "), count))
            continue
        numbers = _numbers(selector, count)
        outside = next((n for n in numbers if not 0 <= n < count), None)
        if outside is not None:
            raise PlanError(f"{what} {outside} does not exist: the model has {what}s 0 to {count - 1}")
        chosen.update(numbers)
    return tuple(sorted(chosen))


def _numbers(selector: Selector, count: int) -> Iterable[int]:
    if isinstance(selector, int):
        return [selector]
    if selector == "all":
        return range(count)
    if match := re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", selector):
        return range(int(match[1]), int(match[2] or match[1]) + 1)
    if match := re.fullmatch(r"(first|last) (\d{1,6})", selector):
        number = int(match[2])
        return range(number) if match[1] == "first" else range(count - number, count)
    if match := re.fullmatch(r"fraction (0?\.\d+|1(?:\.0*)?)", selector):
        return range(math.floor(float(match[1]) * count + 0.5))  # half a head counts as one
    raise PlanError(
        f"{selector!r} selects nothing", hint="use a number, all, 2-4, first 2, last 2, fraction 0.5, or not 0-1"
    )
