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
from guidance.probes.summary import Summary, watch_summaries
from guidance.sites import Site
from pipelines.probing.sequences import Batch, WatchedSequences

REACH = 16
"""The largest distance at which attention is summed up."""


@dataclass
class Survey:
    """What is known of the heads so far; grows batch by batch.

    Attributes:
        relevance: of each pattern.
        examples: how many sequences were read.
        entropy: of each site the sum over examples of the mean entropy of rows, as a share of the most it can be, (H,).
        offsets: the sum over examples of the attention at each distance, (H, 2 REACH + 1).
        focus: of each example the mean over rows of the highest attention, a list of (H,).
        masses: of each example the attention on each pattern, a list of (H, P), float16.
    """

    relevance: Relevance
    examples: int = 0
    entropy: dict[Site, Tensor] = field(default_factory=dict)
    offsets: dict[Site, Tensor] = field(default_factory=dict)
    focus: dict[Site, list[np.ndarray]] = field(default_factory=dict)
    masses: dict[Site, list[np.ndarray]] = field(default_factory=dict)

    def snapshot(self) -> Survey:
        """What is known so far, which later batches do not change; the lists go on growing."""
        return replace(
            self, relevance=self.relevance.snapshot(), entropy=dict(self.entropy), offsets=dict(self.offsets)
        )

    def join(self, other: Survey) -> None:
        """Add the patterns of another pass over the same sequences."""
        for site, rows in self.masses.items():
            self.masses[site] = [np.concatenate(pair, axis=1) for pair in zip(rows, other.masses[site], strict=True)]
        self.relevance.join(other.relevance)  # last, since requests ask for the patterns that it names

    def mean_entropy(self) -> Mapping[Site, Tensor]:
        """The mean entropy of each head, from 0, one key, to 1, all keys alike."""
        return {site: total / max(1, self.examples) for site, total in self.entropy.items()}

    def mean_offsets(self) -> Mapping[Site, Tensor]:
        """The mean attention of each head at each distance from -REACH to +REACH."""
        return {site: total / max(1, self.examples) for site, total in self.offsets.items()}


def survey(
    watched: WatchedSequences,
    patterns: Mapping[str, Pattern],
    batch_size: int | Callable[[], int],
    advance: Callable[[Survey, int], object] = lambda _, __: None,
) -> Survey:
    """Read all sequences.

    Args:
        patterns: by name.
        batch_size: sequences per batch, or a function that gives it before each batch.
        advance: called after each batch with what is known so far, and the number of sequences of the batch; what it raises
            ends the survey.
    """
    found = Survey(Relevance(list(patterns)))
    start = 0
    while start < watched.number:
        size = batch_size if isinstance(batch_size, int) else batch_size()
        batch = watched.batch(range(start, min(start + size, watched.number)))
        _add(found, watched, patterns, batch)
        start += len(batch.numbers)
        advance(found, len(batch.numbers))
    return found


def _add(found: Survey, watched: WatchedSequences, patterns: Mapping[str, Pattern], batch: Batch) -> None:
    tokens, valid_BT = watched.tokens(batch), batch.valid_BT
    (size, length), device = valid_BT.shape, valid_BT.device
    wanted = (
        torch.stack([keys_of(pattern, tokens) for pattern in patterns.values()], dim=1)
        if patterns
        else torch.zeros(size, 0, length, length, device=device)
    )
    found.relevance.begin(batch.numbers, uniform(wanted, valid_BT))
    lengths_B = valid_BT.sum(-1)
    most_B = torch.tensor([math.log(max(2, n)) for n in lengths_B.tolist()], device=device)

    def receive(site: Site, summary: Summary) -> None:
        found.relevance.add(site, summary.masses_BHP)
        entropy_BH = summary.entropy_BHQ.sum(-1) / lengths_B[:, None] / most_B[:, None]
        focus_BH = summary.highest_BHQ.sum(-1) / lengths_B[:, None]
        found.entropy[site] = found.entropy.get(site, 0) + entropy_BH.double().sum(0).cpu()
        found.offsets[site] = found.offsets.get(site, 0) + summary.offsets_BHO.double().sum(0).cpu()
        found.focus.setdefault(site, []).extend(focus_BH.cpu().numpy())
        found.masses.setdefault(site, []).extend(summary.masses_BHP.cpu().numpy().astype(np.float16))

    watch_summaries(watched.handle, receive, wanted, watched.guide_inputs(batch), reach=REACH)
    found.examples += size
