"""The importance of the heads of a trained model, from its loss on held-out data."""

from __future__ import annotations

from typing import Literal

import torch

from guidance.probes.importance import Importance, check_finite, switched_off
from guidance.sites import Site
from pipelines.probing.losses import HeldOut
from pipelines.progress import Progress


def importance_of(
    held_out: HeldOut,
    progress: Progress,
    form: Literal["elementwise", "joint"] = "elementwise",
    accumulate: Literal["gradients", "scores"] = "gradients",
) -> dict[Site, torch.Tensor]:
    """The Taylor importance of each head, by site, (H,).

    Args:
        form, accumulate: see `pipelines.stages.probe_importance.Config`.

    Raises:
        InputError: nothing is judged.
        NumericalError: the importance of a head is not finite.
    """
    model, judged = held_out.model, 0.0
    model.zero_grad()
    counted = Importance(model, held_out.handle.sites, form)
    scores: dict[Site, torch.Tensor] = {}
    with progress.task("importance", total=held_out.number, unit="examples") as bar:
        for loss in held_out.losses():
            bar.advance(loss.examples)
            if not loss.count:
                continue
            judged += loss.count
            (loss.total / loss.count).backward()
            if accumulate == "scores":
                scores = {site: scores.get(site, 0) + own for site, own in counted.scores().items()}
                model.zero_grad()
    held_out.check_judged(judged)
    scores = scores if accumulate == "scores" else counted.scores()
    check_finite(scores)
    return scores


def rises_of(held_out: HeldOut, progress: Progress) -> tuple[dict[Site, torch.Tensor], float]:
    """How much the mean loss rises without each head, by site, (H,), and the loss of the whole model."""
    sites = held_out.handle.sites
    passes = 1 + sum(own[0].num_heads for own in sites.values())
    rises: dict[Site, torch.Tensor] = {}
    with progress.task("importance", total=passes * held_out.number, unit="examples") as bar:
        whole = held_out.mean(bar.advance)
        for module, own in sites.items():
            losses = []
            for head in range(own[0].num_heads):
                with switched_off(held_out.model, sites, [(module, head)]):
                    losses.append(held_out.mean(bar.advance))
            rises |= dict.fromkeys(own, torch.tensor(losses, dtype=torch.float64) - whole)
    check_finite(rises)
    return rises, whole
