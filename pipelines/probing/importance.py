"""The importance of the heads of a trained model, from its loss on held-out data."""

from __future__ import annotations

from typing import Any, Literal

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
    found: dict[Site, torch.Tensor] = {}
    with progress.task("importance", total=held_out.number, unit="examples") as bar:
        for loss in held_out.losses():
            bar.advance(loss.examples)
            if not loss.count:
                continue
            judged += loss.count
            (loss.total / loss.count).backward()
            if accumulate == "scores":
                found = {site: found.get(site, 0) + scores for site, scores in counted.scores().items()}
                model.zero_grad()
    held_out.check_judged(judged)
    found = found if accumulate == "scores" else counted.scores()
    check_finite(found)
    return found


def rises_of(held_out: HeldOut, progress: Progress) -> tuple[dict[Site, torch.Tensor], dict[str, Any]]:
    """How much the mean loss rises without each head, by site, (H,), and the loss of the whole model."""
    sites = held_out.handle.sites
    passes = 1 + sum(own[0].num_heads for own in sites.values())
    found: dict[Site, torch.Tensor] = {}
    with progress.task("importance", total=passes * held_out.number, unit="examples") as bar:
        whole = held_out.mean(bar.advance)
        for module, own in sites.items():
            rises = []
            for head in range(own[0].num_heads):
                with switched_off(held_out.model, sites, [(module, head)]):
                    rises.append(held_out.mean(bar.advance) - whole)
            found |= dict.fromkeys(own, torch.tensor(rises, dtype=torch.float64))
    check_finite(found)
    return found, {"loss": whole}
