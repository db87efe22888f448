"""Models that follow the plan in their configuration, made by their class alone, without `guidance.install`.

``guide export MODEL FOLDER --standalone`` writes the source of `FollowsPlan`, and of all that it needs, into one file beside the
weights.  What the plan needs besides its text is in the configuration, under `FACTS_KEY`; see `facts_of`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from guidance.guided_model import PLAN_KEY
from guidance.installation import Handle
from guidance.models.canary import send
from guidance.models.methods import MARKER
from guidance.patterns.features import FEATURES, Vocabulary
from guidance.plan import Plan
from guidance.sites import Site

FACTS_KEY = "guide_facts"
"""The key under which the configuration of a standalone model holds what `facts_of` says."""

CODE = "modeling_guided"
"""The module beside the weights, which has the code."""

CLASS_PREFIX, TYPE_PREFIX = "Guided", "guided-"
"""What stands before the names of classes and of the architecture: transformers, which does not know them, asks before it opens them."""

CLASS_NAME = re.compile(rf"([\w./-]+--)?{CODE}\.{CLASS_PREFIX}\w+")
"""How a configuration refers to a class, after the repository if it was opened from a hub."""


class FollowsPlan:
    """Stands before a model class of transformers: its models follow the plan in their configuration."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        model: Any = self
        facts, plan = getattr(config, FACTS_KEY), Plan.parse(getattr(config, PLAN_KEY))
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), MARKER}
        vocabularies: dict[str, Any] = {name: _vocabulary(known) for name, known in facts["vocabularies"].items()}
        handle = Handle(model, plan, **vocabularies, forward=True)
        handle.install({module: facts["head_widths"][_kind(sites)] for module, sites in handle.sites.items()})
        model.register_forward_pre_hook(_First(handle), prepend=True)


class _First:
    """A hook that sends the canary before the first call of a model: weights are loaded only after it was made."""

    def __init__(self, handle: Handle) -> None:
        self.handle, self.is_sent = handle, False

    def __call__(self, model: nn.Module, args: Any) -> None:
        if not (self.is_sent or torch.compiler.is_compiling() or torch.compiler.is_exporting()):
            self.is_sent = True
            handle = self.handle
            send(handle.model, {m: sites for m, sites in handle.sites.items() if sites[0].attention != "pal"})


def facts_of(handle: Handle) -> dict[str, Any]:
    """What a standalone model needs besides its weights and the text of its plan, as JSON has it.

    Returns:
        ``head_widths``: of the heads, by stack and kind of attention.  ``vocabularies``: what patterns read of each vocabulary, by
        the names of the arguments of `GuidedModel`.
    """
    own = {module: sites for module, sites in handle.sites.items() if sites[0].attention != "pal"}
    widths = {_kind(own[module]): width for module, width in send(handle.model, own).head_widths.items()}
    reads = handle.reads(training=False)
    vocabularies = {}
    for prefix, vocabulary in (("", handle.vocabulary), ("decoder_", handle.decoder_vocabulary)):
        known = vocabulary.columns_V if vocabulary is not None else {}
        if columns := {name: values for name, values in known.items() if prefix + name in reads}:
            vocabularies[f"{prefix}vocabulary"] = {
                "size": len(next(iter(columns.values()))),
                **{
                    name: " ".join(f"{n}:{int(values[n])}" for n in values.nonzero().flatten().tolist())
                    for name, values in columns.items()
                },
            }
    return {"head_widths": widths, "vocabularies": vocabularies}


def _kind(sites: tuple[Site, ...]) -> str:
    return f"{sites[0].stack} {sites[0].attention}"


def _vocabulary(known: Mapping[str, Any]) -> Vocabulary:
    """A vocabulary of which `facts_of` tells: by feature, the ids whose value is not 0, each with its value."""
    columns = {}
    with torch.device("cpu"):  # transformers makes models without memory for their weights
        for name in Vocabulary.FEATURES:
            if name in known:
                pairs = [pair.split(":") for pair in known[name].split()]
                values = torch.zeros(known["size"], dtype=FEATURES[name].dtype)
                values[[int(number) for number, _ in pairs]] = torch.tensor(
                    [int(v) for _, v in pairs], dtype=values.dtype
                )
                columns[name] = values
        return Vocabulary(columns)
