"""One pass over the sequences of a split that gathers what is known of every head: how it attends, and on which patterns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from guidance.patterns.pattern import Pattern
from guidance.probes.relevance import Relevance, keys_of, uniform
from guidance.probes.summary import summarise
from guidance.sites import Site
from pipelines.probing.sequences import Batch, Means, WatchedSequences

REACH = 16
"""The largest distance at which attention is summed up."""


@dataclass
class Survey:
    """What is known of the heads so far; grows batch by batch.

    Attributes:
        relevance: of each pattern.
        means: over examples, of each site (H, 1 + 2 REACH + 1): the mean entropy of rows, as a share of the most it can be, and the
            attention at each distance.
        focus: of each example the mean over rows of the highest attention, a list of (H,).
        masses: of each example the attention on each pattern, a list of (H, P), float16.
    """

    relevance: Relevance
    means: Means = field(default_factory=Means)
    focus: dict[Site, list[np.ndarray]] = field(default_factory=dict)
    masses: dict[Site, list[np.ndarray]] = field(default_factory=dict)

    def add(self, watched: WatchedSequences, patterns: Mapping[str, Pattern], batch: Batch) -> None:
        """Read a batch."""
        tokens, valid_BT = watched.tokens(batch), batch.valid_BT
        (size, length), device = valid_BT.shape, valid_BT.device
        wanted = (
            torch.stack([keys_of(pattern, tokens) for pattern in patterns.values()], dim=1)
            if patterns
            else torch.zeros(size, 0, length, length, device=device)
        )
        self.relevance.begin(batch.numbers, uniform(wanted, valid_BT))
        lengths_B = valid_BT.sum(-1)
        most_B = torch.tensor([math.log(max(2, n)) for n in lengths_B.tolist()], device=device)
        summaries = watched.watch(batch, lambda attention: summarise(attention, wanted, valid_BT, reach=REACH))
        figures = {}
        for site, summary in summaries.items():
            self.relevance.add(site, summary.masses_BHP)
            entropy_BH = summary.entropy_BHQ.sum(-1) / lengths_B[:, None] / most_B[:, None]
            figures[site] = torch.cat([entropy_BH[..., None], summary.offsets_BHO], dim=-1)
            focus_BH = summary.highest_BHQ.sum(-1) / lengths_B[:, None]
            self.focus.setdefault(site, []).extend(focus_BH.cpu().numpy())
            self.masses.setdefault(site, []).extend(summary.masses_BHP.cpu().numpy().astype(np.float16))
        self.means.add(figures)

    def snapshot(self) -> Survey:
        """What is known so far, which later batches do not change; the lists go on growing."""
        return replace(self, relevance=self.relevance.snapshot(), means=self.means.snapshot())

    def join(self, other: Survey) -> None:
        """Add the patterns of another pass over the same sequences."""
        for site, rows in self.masses.items():
            self.masses[site] = [np.concatenate(pair, axis=1) for pair in zip(rows, other.masses[site], strict=True)]
        self.relevance.join(other.relevance)  # last, since requests ask for the patterns that it names

    def mean_entropy(self) -> Mapping[Site, Tensor]:
        """The mean entropy of each head, from 0, one key, to 1, all keys alike."""
        return self.means.column(0)

    def mean_offsets(self) -> Mapping[Site, Tensor]:
        """The mean attention of each head at each distance from -REACH to +REACH."""
        return self.means.column(slice(1, None))


def survey(
    watched: WatchedSequences,
    patterns: Mapping[str, Pattern],
    batch_size: int | Callable[[], int],
    advance: Callable[[Survey, int], object],
) -> Survey:
    """Read all sequences.

    Args:
        patterns: by name.
        batch_size: see `WatchedSequences.batches`.
        advance: called after each batch with what is known so far, and the number of sequences of the batch; what it raises
            ends the survey.
    """
    known = Survey(Relevance(list(patterns)))
    for batch in watched.batches(batch_size):
        known.add(watched, patterns, batch)
        advance(known, len(batch.numbers))
    return known
