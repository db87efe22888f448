"""Which heads to steer: each is steered alone, and those are chosen with which a model answers best.

Source: Zhang et al. 2023 (PASTA, 2311.02262), section 3.2: on each task heads are ranked by how the model does with the head steered
alone, and those are chosen that are among the first k of every ranking.  The paper leaves ties open; here the likelihood of the
expected answers breaks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Answers:
    """What a model answers to the N prompts of a task.

    Attributes:
        right_N: whether its answer is the expected one, bool.
        nats_N: the log-probability of the expected answer, in nats, float64.
    """

    right_N: np.ndarray
    nats_N: np.ndarray

    def of(self, some: slice) -> Answers:
        """The answers to some of the prompts."""
        return Answers(self.right_N[some], self.nats_N[some])

    def figures(self) -> dict[str, float]:
        """``right``, the share of right answers, and ``log_probability``, the mean of the expected ones in nats."""
        return {"right": float(self.right_N.mean()), "log_probability": float(self.nats_N.mean())}


def ranks(heads: Sequence[Answers]) -> np.ndarray:
    """The place of each head in the ranking of a task, from 1: by right answers, then by log-probability, then in their order.

    Args:
        heads: by head, the answers while it is steered alone.
    """
    figures = [head.figures() for head in heads]
    order = np.lexsort([[-own[name] for own in figures] for name in ("log_probability", "right")])
    places = np.empty(len(heads), np.int64)
    places[order] = np.arange(1, len(heads) + 1)
    return places


def worst_ranks(heads: Sequence[Sequence[Answers]]) -> np.ndarray:
    """The place of each head in the ranking of the task where it does worst.  The heads whose worst place is k or better are those
    that the first k of all rankings have in common.

    Args:
        heads: by head, the answers to each task while it is steered alone.
    """
    worst: np.ndarray = np.max([ranks(task) for task in zip(*heads, strict=True)], axis=0)
    return worst


def chosen_heads(heads: Sequence[Sequence[Answers]], top: int) -> list[int]:
    """The numbers of the heads that are among the first ``top`` of every task; see `worst_ranks`."""
    return np.flatnonzero(worst_ranks(heads) <= top).tolist()


HALVES = (slice(0, None, 2), slice(1, None, 2))
"""Every other prompt of a task, and the rest."""


def held_out(
    heads: Sequence[Sequence[Answers]], top: int, steered: Callable[[list[int]], Sequence[Answers]]
) -> list[Answers]:
    """The answers to each task where the answers to one half of its prompts chose the heads that are steered on the other half.

    Args:
        heads: see `worst_ranks`; each task has two prompts or more.
        steered: from the numbers of heads to the answers to each task while they are steered together.
    """
    right, nats = ([np.empty_like(getattr(task, name)) for task in heads[0]] for name in ("right_N", "nats_N"))
    for chooses, is_asked in (HALVES, HALVES[::-1]):
        chosen = chosen_heads([[task.of(chooses) for task in head] for head in heads], top)
        for task, found in enumerate(steered(chosen)):
            right[task][is_asked], nats[task][is_asked] = found.right_N[is_asked], found.nats_N[is_asked]
    return [Answers(*both) for both in zip(right, nats, strict=True)]
