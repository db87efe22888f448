"""Calls of a guided model: each gets the guidance that its plan needs, or is refused where it is made.

`BeforeCall` runs before a model and before its encoder.  `keep_source` runs after the encoder: guides on cross-attention read
the tokens of the source, and a decoder that is called with ``encoder_outputs`` gets no ids of it.  So they travel with the
states, under names of their own, and whatever repeats the states for several beams repeats them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from guidance.attention.function import NAME
from guidance.batch import BatchGuidance
from guidance.errors import InputError
from guidance.guided_model import GuidedModel
from guidance.inputs import guide_batch
from guidance.patterns.features import INPUTS, Tokens, TokensWithoutIds, is_feature

_SOURCE = "guide_source_"
"""What stands before the names under which the tokens of the source travel with the states of an encoder."""


def installed_in(model: nn.Module) -> list[GuidedModel]:
    """The plans that are installed in a model, in the order of their installation."""
    handles: list[GuidedModel] = model.__dict__.get("guide_handles", [])
    return handles


def leading(model: nn.Module) -> GuidedModel | None:
    """The plan that shapes a model's outputs; of several that do not, the last one installed."""
    handles = installed_in(model)
    return next((handle for handle in handles if handle.shaping), handles[-1] if handles else None)


class BeforeCall:
    """A hook before a model runs: it adds the guidance that the call lacks, and makes it record what was asked for."""

    def __init__(self, handle: GuidedModel) -> None:
        self.handle = handle
        parts = [part for part in handle.model.modules() if isinstance(part, PreTrainedModel)]
        self._configs = [part.config for part in parts if part.config._attn_implementation == NAME]

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        passed = kwargs.get("guidance")
        if leading(self.handle.model) is not self.handle or not (passed is None or isinstance(passed, BatchGuidance)):
            return None
        asked = kwargs.get("output_attentions")
        recording = getattr(self.handle.model.config, "output_attentions", False) if asked is None else asked
        if passed is None and not (self.handle.shaping or recording):
            return None
        _refuse_sharded(self.handle.model)
        if any(config._attn_implementation != NAME for config in self._configs):
            raise InputError(
                "the attention implementation of this model was changed after its plan was installed",
                hint=f"config._attn_implementation = {NAME!r}, or handle.remove()",
            )
        if passed is not None and self.handle.shaping and passed.guided.plan != self.handle.plan:
            raise InputError(
                "the guidance is of another plan than the one that shapes this model's outputs",
                hint="make it by the handle of that plan, or remove that plan",
            )
        guidance = passed if passed is not None else self._made(module, args, kwargs)
        if guidance is None:
            return None
        if passed is None:  # the features went into the guidance
            kwargs = {name: value for name, value in kwargs.items() if not is_feature(name)}
        if recording and guidance.recorded is None:
            guidance = replace(guidance, recorded={})
        return args, {**kwargs, "guidance": guidance}

    def _made(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> BatchGuidance | None:
        """The guidance of a call that comes without; it measures no loss."""
        handle = self.handle
        batch: dict[str, Any] = dict(zip(INPUTS[:2], args, strict=False))
        batch |= {name: kwargs[name] for name in kwargs if name in INPUTS or is_feature(name)}
        model: Any = handle.model
        has_labels = kwargs.get("labels") is not None and model.config.is_encoder_decoder
        if (
            batch.get("decoder_input_ids") is None
            and has_labels
            and module is handle.model
            and handle.shapes("decoder")
        ):
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=kwargs["labels"])
        source, target = (_first_of(batch, f"{side}input_ids", f"{side}inputs_embeds") for side in ("", "decoder_"))
        if source is None and target is None:
            reason = "this model's plan shapes its outputs" if handle.shaping else "output_attentions was asked for"
            raise InputError(
                f"{reason}, and there are no input_ids to make its guidance from",
                hint="pass guidance=handle.guide(...)",
            )
        if source is None and not handle.shapes("decoder"):
            return None
        mask = batch.get("decoder_attention_mask")
        if mask is not None and target is not None:  # it spans the cached tokens too
            batch["decoder_attention_mask"] = mask[..., -target.shape[1] :]
        guidance = guide_batch(handle, batch, measuring=False)
        if source is None and handle.shapes("decoder", "cross"):
            guidance = replace(guidance, tokens={**guidance.tokens, "encoder": self._source(kwargs)})
        return guidance

    def _source(self, kwargs: Mapping[str, Any]) -> Tokens:
        """The tokens of the source, which `keep_source` has put beside the encoder's states."""
        states = kwargs.get("encoder_outputs")
        kept = states if isinstance(states, Mapping) else {}
        columns = {n.removeprefix(_SOURCE): c for n, c in kept.items() if n.startswith(_SOURCE)}
        if not columns:
            raise InputError(
                "guides on cross-attention read the source, and encoder_outputs come without its tokens",
                hint="pass what model.get_encoder()(...) returned as it is, or input_ids beside it",
            )
        kind = Tokens if "ids_BT" in columns else TokensWithoutIds
        valid_BT = columns.pop("valid_BT")
        return kind(columns.pop("ids_BT", valid_BT), valid_BT, columns, self.handle.tables)


def _first_of(batch: Mapping[str, Any], *names: str) -> Any:
    return next((batch[name] for name in names if batch.get(name) is not None), None)


def _refuse_sharded(model: nn.Module) -> None:
    """Raises InputError for FSDP, which hands copies of the guidance to its parts, so that losses never come back."""
    if torch.compiler.is_compiling() or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        raise InputError("guides are not carried through FSDP", hint="DistributedDataParallel carries them")


def keep_source(encoder: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    """After an encoder has run: put the tokens that it has read beside its states."""
    guidance = kwargs.get("guidance")
    if not (isinstance(guidance, BatchGuidance) and isinstance(output, ModelOutput)) or torch.compiler.is_compiling():
        return
    if (source := guidance.tokens.get("encoder")) is not None:
        ids = {} if isinstance(source, TokensWithoutIds) else {"ids_BT": source.ids_BT}
        for name, column in {**ids, "valid_BT": source.valid_BT, **source.columns}.items():
            output[_SOURCE + name] = column
