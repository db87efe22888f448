"""Adapters: make models call our attention function.

Most models look up their attention function by name in the interface of transformers.  `switch` changes that name in
every part of a model.

DeBERTa-v2 and v3 compute attention in their own module and drop unknown keywords before it.  `adapt` replaces the classes
of their layers, attention modules, encoders and convolutions by subclasses.  Names, parameters and the keys of ``state_dict``
stay, and a module without guided heads runs its own code.

Guidance reaches a DeBERTa attention module in three steps.  A hook takes ``guidance=`` out of the model's call and stores
it on every layer, on the encoder and on its convolution.  The layer passes it to itself as a keyword, because gradient
checkpointing saves keywords for its replay in the backward pass, when the model may have received other guidance.  The layer
then sets it on its attention module just before that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    ConvLayer,
    DebertaV2Encoder,
    DebertaV2Layer,
    DisentangledSelfAttention,
)

from guidance.attention.call import refuse_unguided
from guidance.packing import Documents


class Guidance(Protocol):
    """The object that a model receives as ``guidance=``."""

    @property
    def documents(self) -> Documents | None:
        """Where documents are in a packed row."""

    def works_at(self, module: nn.Module) -> bool:
        """True if the attention function must run in this module."""

    def boolean(self, mask: Tensor) -> Tensor:
        """The mask as booleans; the same mask gives the same object."""


AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


class GuidedDebertaAttention(DisentangledSelfAttention):
    """Disentangled attention whose content scores, position scores and values go to an attention function."""

    attention_function: AttentionFunction
    guidance: Guidance | None = None
    """Valid for the next call only."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        guidance, self.guidance = self.guidance, None
        if guidance is None:
            refuse_unguided(self)
        if guidance is None or not guidance.works_at(self):
            return super().forward(
                hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings
            )
        queries = hidden_states if query_states is None else query_states
        # (B * H, T, D), the layout in which the position scores are computed
        query = self.transpose_for_scores(self.query_proj(queries), self.num_attention_heads)
        key = self.transpose_for_scores(self.key_proj(hidden_states), self.num_attention_heads)
        value = self.transpose_for_scores(self.value_proj(hidden_states), self.num_attention_heads)
        documents = guidance.documents
        if documents is not None:  # distances count within documents
            query, key, value = (
                documents.apart(states.transpose(0, 1)[None]).permute(0, 2, 1, 3).flatten(0, 1)
                for states in (query, key, value)
            )
            hidden_states = documents.apart(hidden_states)
        num_terms = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        bias_BHQK = None
        if self.relative_attention:
            bias = self.disentangled_attention_bias(
                query, key, relative_pos, self.pos_dropout(rel_embeddings), num_terms
            )
            # without c2p and p2c, transformers returns the number 0
            bias_BHQK = self._split_heads(bias) if isinstance(bias, Tensor) else None
        context_BQHD, attention_BHQK = self.attention_function(
            self,
            self._split_heads(query),
            self._split_heads(key),
            self._split_heads(value),
            guidance.boolean(attention_mask),
            dropout=self.dropout.p if self.training else 0.0,
            scaling=(query.shape[-1] * num_terms) ** -0.5,
            guidance=guidance,
            position_bias=bias_BHQK,
            layer_input=hidden_states,
        )
        context = context_BQHD.flatten(-2)
        if documents is not None:
            context = documents.together(context)
        return context, attention_BHQK if output_attentions else None

    def _split_heads(self, states: Tensor) -> Tensor:
        return states.unflatten(0, (-1, self.num_attention_heads))


class GuidedDebertaLayer(DebertaV2Layer):
    """A layer that passes the guidance of a forward pass to its attention module, also in a checkpoint's replay."""

    current: Guidance | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **({"guidance": self.current} | kwargs))

    def forward(self, *args: Any, guidance: Guidance | None = None, **kwargs: Any) -> Any:
        self.attention.self.guidance = guidance
        return super().forward(*args, **kwargs)


class GuidedDebertaEncoder(DebertaV2Encoder):
    """The layers of a model: in a packed row, its masks and distances are those of the padded batch."""

    current: Guidance | None = None

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor:
        if (documents := self._documents) is not None:
            return documents.padding(attention_mask.device)
        mask: Tensor = super().get_attention_mask(attention_mask)
        return mask

    def get_rel_pos(
        self, hidden_states: Tensor, query_states: Tensor | None = None, relative_pos: Tensor | None = None
    ) -> Tensor | None:
        if (documents := self._documents) is not None:
            hidden_states = hidden_states.new_empty(*documents.shape, 1)  # only its shape is read
        found: Tensor | None = super().get_rel_pos(hidden_states, query_states, relative_pos)
        return found

    @property
    def _documents(self) -> Documents | None:
        return None if self.current is None else self.current.documents


class GuidedDebertaConvolution(ConvLayer):
    """The convolution over neighbouring tokens, which in a packed row must not reach into other documents."""

    current: Guidance | None = None

    def forward(self, hidden_states: Tensor, residual_states: Tensor, input_mask: Tensor) -> Tensor:
        documents = None if self.current is None else self.current.documents
        if documents is None:
            return super().forward(hidden_states, residual_states, input_mask)
        valid_BT = documents.padding(hidden_states.device)[:, 0, 0].long()
        output: Tensor = super().forward(documents.apart(hidden_states), documents.apart(residual_states), valid_BT)
        return documents.together(output)


_RECEIVERS = (GuidedDebertaLayer, GuidedDebertaEncoder, GuidedDebertaConvolution)
_ADAPTED: Mapping[type[nn.Module], type[nn.Module]] = {
    DebertaV2Layer: GuidedDebertaLayer,
    DisentangledSelfAttention: GuidedDebertaAttention,
    DebertaV2Encoder: GuidedDebertaEncoder,
    ConvLayer: GuidedDebertaConvolution,
}
"""The classes of DeBERTa's parts, each with the subclass that an installed plan puts in its place."""


def switch(model: nn.Module, name: str) -> Callable[[], None]:
    """Make all parts of a model look up the attention function of that name in transformers; returns what undoes it.

    Setting it on the whole model is not enough: in older versions of transformers the stacks of T5 have their own
    configurations and silently keep their function.  Models without the interface stay as they are.
    """
    parts = [p for p in model.modules() if isinstance(p, PreTrainedModel) and not _is_deberta(p)]
    before = [str(part.config._attn_implementation or "sdpa") for part in parts]
    _set_implementations(parts, [name] * len(parts))
    return partial(_set_implementations, parts, before)


def _set_implementations(parts: list[PreTrainedModel], names: list[str]) -> None:
    for part, name in zip(parts, names, strict=True):
        type(part).set_attn_implementation(part, name)  # the method of a guided model refuses


def adapt(model: nn.Module, attention_function: AttentionFunction) -> Callable[[], None]:
    """Make every DeBERTa-v2 layer of a model call an attention function where it is guided; other models stay as they are.

    The function receives (module, query, key, value, mask) as in transformers, with a boolean mask (B, 1, Q, K).  Its
    keywords are dropout, scaling, guidance, ``position_bias`` (B, H, Q, K), which is added to the scaled scores, and
    ``layer_input`` (B, K, width).

    Returns:
        A function that undoes it.  A model that was adapted twice is restored once both are undone.
    """
    parts: list[Any] = [part for part in model.modules() if isinstance(part, tuple(_ADAPTED))]
    hooks = []
    for part in parts:
        part.__class__ = next(guided for own, guided in _ADAPTED.items() if isinstance(part, own))
        part.adapters = part.__dict__.get("adapters", 0) + 1  # how many installed plans have adapted it
        if isinstance(part, GuidedDebertaAttention):
            part.attention_function = attention_function
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and _is_deberta(part):
            hooks.append(part.register_forward_pre_hook(_distribute_guidance, with_kwargs=True))
            hooks.append(part.register_forward_hook(_clear_guidance, always_call=True))

    return partial(_restore, parts, hooks)


def _restore(parts: list[Any], hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    for part in parts:
        part.adapters -= 1
        if part.adapters == 0:
            part.__class__ = next(own for own, guided in _ADAPTED.items() if isinstance(part, guided))
            for name in ("current", "adapters", "guidance", "attention_function"):
                part.__dict__.pop(name, None)


def _is_deberta(model: nn.Module) -> bool:
    return any(isinstance(module, DebertaV2Layer) for module in model.modules())


def _receivers(model: nn.Module) -> Iterator[Any]:
    """The parts that keep the guidance of a call; not cached, so that a copy of a model finds its own."""
    return (part for part in model.modules() if isinstance(part, _RECEIVERS))


def _distribute_guidance(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before the model runs: take the guidance out of its call and store it on the parts that read it."""
    guidance = kwargs.pop("guidance", None)
    if guidance is not None:
        model.took_guidance = True  # type: ignore[assignment]
        for part in _receivers(model):
            part.current = guidance
    return args, kwargs


def _clear_guidance(model: nn.Module, args: Any, output: Any) -> None:
    """After the model has run or failed: a later call without guidance must not find this one's."""
    if model.__dict__.pop("took_guidance", False):
        for part in _receivers(model):
            part.current = None
