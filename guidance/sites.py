"""Sites: the attention modules of a model, and the rules that select layers and heads.

A site is one call of an attention module in a forward pass.  Layers are counted over the calls of one kind, because
several architectures have no ``layer_idx``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from guidance.errors import PlanError

EXTRA = "guided"
"""The attribute of an attention module that holds the parameters that a plan adds to it."""


ADDED_HEADS = "pal:"
"""What stands before a selector of heads that the plan adds."""


def is_added(name: str) -> bool:
    """Whether a parameter of this name is one that a plan has added."""
    return EXTRA in name.split(".")


@dataclass(frozen=True)
class Site:
    """One call of an attention module: ``stack`` is encoder or decoder, ``attention`` self, cross, or pal for added heads.

    Attributes:
        layer: counted from 0 over the sites of the same stack and attention.
        name: the name of the module; layers that share a module share its name.
    """

    stack: str
    attention: str
    layer: int
    num_heads: int
    name: str


def stack_of_inputs(sites: Iterable[Site]) -> str:
    """The stack that reads ``input_ids``: the encoder; in a model without one, the decoder."""
    stacks = {site.stack for site in sites}
    return "decoder" if stacks == {"decoder"} else "encoder"


def stack_meant(stack: str, sites: Iterable[Site]) -> str:
    """The stack on which a row acts that has this ``stack``: a model that is a decoder alone has one, whatever the row calls it."""
    return "decoder" if stack_of_inputs(sites) == "decoder" else stack


Selector = int | str
"""A number, or a rule: ``all``, ``2-4`` (both ends included), ``first 2``, ``last 2``, ``fraction 0.5`` (the first half),
``not 0-1`` (removes from what came before).  Heads can also be selected by a table of scores: ``least important 3`` or
``most important 0.25`` of all heads in the guide's layers, or ``least important 1 per layer``."""

_HINT = "use a number, all, 2-4, first 2, last 2, fraction 0.5, or not 0-1"


def select(selectors: Iterable[Selector], count: int, what: str) -> tuple[int, ...]:
    """The numbers below ``count`` that a list of selectors names, sorted.

    Args:
        what: ``layer`` or ``head``, for messages.

    Raises:
        PlanError: a selector is not a rule, or a number does not exist.

    Example:
        >>> select(["fraction 0.5", "not 0-1"], 12, "head")
        (2, 3, 4, 5)
    """
    chosen: set[int] = set()
    for selector in selectors:
        removes, rule = _split(selector)
        numbers = _numbers(rule, count)
        if removes:
            chosen -= set(range(count)).intersection(numbers)
            continue
        outside = next((n for n in numbers if not 0 <= n < count), None)
        if outside is not None:
            reason = f"{what} {outside} does not exist"
            if isinstance(selector, str) and outside < 0:
                reason = f"{selector!r} asks for more {what}s than there are"
            needed = count - outside if outside < 0 else max(numbers) + 1
            raise PlanError(
                f"{reason}: the model has {what}s 0 to {count - 1}",
                hint=f"use a model with at least {needed} {what}s, or a plan that names fewer",
            )
        chosen.update(numbers)
    return tuple(sorted(chosen))


Scores = Mapping[tuple[int, int], float] | Tensor
"""A number for each (layer, head): a mapping, or a tensor (layers, heads)."""


def select_heads(
    selectors: Iterable[Selector],
    layers: Sequence[int],
    num_heads: int,
    scores: Scores | None = None,
    *,
    num_layers: int | None = None,
) -> dict[int, tuple[int, ...]]:
    """For each of a guide's layers, the heads that a list of selectors names, sorted.

    Rules by score compare all heads in the given layers.  Ties go to the lower layer, then to the lower head.

    Args:
        layers: the layers of the guide.
        scores: one for every head of the model.
        num_layers: the layers of the model, to detect scores of another model.

    Raises:
        PlanError: a selector is not a rule, a head does not exist, or the scores are missing or do not fit the model.

    Example:
        >>> select_heads(["least important 2"], [0, 1], 2, {(0, 0): 0.3, (0, 1): 0.1, (1, 0): 0.2, (1, 1): 0.4})
        {0: (1,), 1: (0,)}
    """
    chosen: set[tuple[int, int]] = set()
    for selector in selectors:
        removes, rule = _split(selector)
        if by_score := _BY_SCORE.fullmatch(str(rule)):
            if scores is None:
                raise PlanError(
                    f"{rule!r} needs a table of scores", hint="give --scores FILE, or tables={'importance': ...}"
                )
            table = _score_table(scores, layers, num_heads, num_layers)
            groups = [[layer] for layer in layers] if by_score["per"] else [list(layers)]
            pairs = {pair for group in groups for pair in _ranked(by_score, table, group)}
        else:
            # heads to remove need not exist
            heads = _numbers(rule, num_heads) if removes else select([rule], num_heads, "head")
            pairs = {(layer, head) for layer in layers for head in heads}
        chosen = chosen - pairs if removes else chosen | pairs
    return {layer: tuple(sorted(head for other, head in chosen if other == layer)) for layer in layers}


def is_by_score(selector: Selector) -> bool:
    """Whether a selector compares heads by a table of scores, such as ``least important 3``."""
    return bool(_BY_SCORE.fullmatch(str(_split(selector)[1])))


_BY_SCORE = re.compile(
    r"(?P<end>least|most) important (?:(?P<number>\d{1,6})|(?P<fraction>0?\.\d+|1\.0*))(?P<per> per layer)?"
)


def _score_table(
    scores: Scores, layers: Sequence[int], num_heads: int, num_layers: int | None
) -> dict[tuple[int, int], float]:
    """The scores of the heads in the guide's layers, checked."""
    if isinstance(scores, Tensor):
        rows, columns = scores.shape if scores.dim() == 2 else (0, 0)
        if columns != num_heads or rows <= max(layers, default=-1) or rows != (num_layers or rows):
            raise PlanError(
                f"the table of scores has shape {tuple(scores.shape)}, not (layers, heads)"
                f" = ({num_layers or max(layers, default=0) + 1}, {num_heads})",
                hint="compute it with this model",
            )
        scores = {(layer, head): float(s) for layer, row in enumerate(scores.tolist()) for head, s in enumerate(row)}
    wanted = [(layer, head) for layer in layers for head in range(num_heads)]
    for layer, head in wanted:
        score = scores.get((layer, head))
        if score is None or math.isnan(score):
            what = "no score" if score is None else "NaN"
            raise PlanError(f"the table of scores has {what} for layer {layer}, head {head}")
    for layer, head in scores:
        if not (0 <= head < num_heads and 0 <= layer < (num_layers or math.inf)):
            raise PlanError(
                f"the table of scores has layer {layer}, head {head}, which the model does not have",
                hint="compute it with this model",
            )
    return {pair: float(scores[pair]) for pair in wanted}


def _ranked(rule: re.Match[str], table: Mapping[tuple[int, int], float], group: list[int]) -> list[tuple[int, int]]:
    sign = 1 if rule["end"] == "least" else -1
    ranked = sorted((pair for pair in table if pair[0] in group), key=lambda pair: (sign * table[pair], pair))
    number = _fraction_of(rule["fraction"], len(ranked)) if rule["fraction"] else int(rule["number"])
    if number > len(ranked):
        raise PlanError(f"{rule[0]!r} asks for more heads than the {len(ranked)} that exist")
    return ranked[:number]


def _split(selector: Selector) -> tuple[bool, Selector]:
    """Whether a selector removes numbers, and its rule."""
    if isinstance(selector, str) and selector.startswith("not "):
        return True, selector.removeprefix("not ")
    return False, selector


def check_selector(selector: Selector, what: str) -> None:
    """Raises PlanError if a selector is no rule for ``what``, which is ``layer`` or ``head``."""
    added = what == "head" and str(selector).startswith(ADDED_HEADS)
    _, rule = _split(str(selector).removeprefix(ADDED_HEADS) if added else selector)
    if what == "layer" or added or not _BY_SCORE.fullmatch(str(rule)):
        _numbers(rule, 1)


def _fraction_of(fraction: str, count: int) -> int:
    return math.floor(float(fraction) * count + 0.5)  # half a head counts as one


def _numbers(selector: Selector, count: int) -> Sequence[int]:
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
        return range(_fraction_of(match[1], count))
    if _BY_SCORE.fullmatch(selector):
        raise PlanError(f"{selector!r} selects heads, not layers", hint=_HINT)
    raise PlanError(f"{selector!r} is not a selector", hint=f"{_HINT}; for heads also least important 3")
