"""Projected attention layers: small extra heads beside a layer's own, in which patterns can be put without touching it.

Source: Li et al. 2022, section 3.3, after Stickland & Murray 2019.  With the layer's input h,

    PAL(h) = gelu(W2 MHA(W1 h + b1) + b2),

is added inside the layer's last normalisation, where the published code has it, or beside the self-attention, as the
paper writes.  The published code starts every weight at zero, which is a point from which only b2 ever moves; here only
W2 and b2 are zero, so that a model begins as the plain one and everything can learn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from guidance.errors import PlanError
from guidance.options import Count, Share
from guidance.sites import EXTRA, Selector, Site, select


@dataclass(frozen=True)
class Pal:
    """The table ``[pal]`` of a plan: extra heads, which its guides address as ``pal:0`` and so on.

    Attributes:
        width: of the projection; each head has ``width / heads`` of it.
        heads: how many.
        layers: which layers get them.
        placement: ``layer``: inside the layer's last normalisation; ``attention``: beside the self-attention.
        dropout: of the attention probabilities.
        start: ``trainable``, or ``zero`` as in the published code.
    """

    width: Count = 256
    heads: Count = 4
    layers: tuple[Selector, ...] = ("all",)
    placement: Literal["layer", "attention"] = "layer"
    dropout: Share = 0.1
    start: Literal["trainable", "zero"] = "trainable"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise PlanError(f"pal: the width {self.width} cannot be shared by {self.heads} heads")
        if not self.layers:
            raise PlanError("pal: an empty list of layers", hint="leave the key out to mean all of them")


class ProjectedAttention(nn.Module):
    """The extra heads of one layer; 591,616 parameters from 768 to 256."""

    is_causal = False

    def __init__(self, options: Pal, hidden_size: int) -> None:
        super().__init__()
        self.num_attention_heads, self.dropout = options.heads, options.dropout
        self.down = nn.Linear(hidden_size, options.width)
        self.query, self.key, self.value = (nn.Linear(options.width, options.width) for _ in range(3))
        self.up = nn.Linear(options.width, hidden_size)
        for linear in (self.down, self.query, self.key, self.value, self.up):
            std = 0.0 if options.start == "zero" or linear is self.up else 0.02
            for parameter in linear.parameters():
                nn.init.normal_(parameter, std=std)
        self.pending: Tensor | None = None
        self.guide_sites: tuple[Site, ...] = ()

    def forward(self, layer_input_BTd: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """From the layer's input to what is added, (B, T, d).

        Args:
            attend: the attention function, from (self, query, key, value, dropout) to (B, T, heads, D).
        """
        states = self.down(layer_input_BTd)
        query, key, value = (
            linear(states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        output = attend(self, query, key, value, self.dropout if self.training else 0.0)
        return nn.functional.gelu(self.up(output.flatten(2)))


PLACES: dict[str, tuple[str, str]] = {
    "BertLayer": ("attention.output.LayerNorm", "output.LayerNorm"),
    "RobertaLayer": ("attention.output.LayerNorm", "output.LayerNorm"),
    "XLMRobertaLayer": ("attention.output.LayerNorm", "output.LayerNorm"),
    "CamembertLayer": ("attention.output.LayerNorm", "output.LayerNorm"),
    "ElectraLayer": ("attention.output.LayerNorm", "output.LayerNorm"),
    "DebertaV2Layer": ("attention.output.LayerNorm", "output.LayerNorm"),
    "TransformerBlock": ("sa_layer_norm", "output_layer_norm"),
    "AlbertLayer": ("attention.LayerNorm", "full_layer_layer_norm"),
    "MarianEncoderLayer": ("self_attn_layer_norm", "final_layer_norm"),
    "BartEncoderLayer": ("self_attn_layer_norm", "final_layer_norm"),
}
"""By layer class: the normalisation after the self-attention, and the last one; what is added goes into their input."""


def added_sites(pal: Pal, sites: Mapping[nn.Module, tuple[Site, ...]]) -> dict[nn.Module, tuple[Site, ...]]:
    """The extra heads of a model, by the attention module beside which they stand; a site for each of its calls.

    Args:
        sites: of the model, by module.

    Raises:
        PlanError: no layer is to have them, or some are and others that share their module are not.
    """
    mine = {m: found for m, found in sites.items() if (found[0].stack, found[0].attention) == ("encoder", "self")}
    count = 1 + max((site.layer for found in mine.values() for site in found), default=-1)
    try:
        layers = set(select(pal.layers, count, "layer"))
    except PlanError as error:
        raise PlanError(f"[pal]: {error.message}", hint=error.hint) from error
    if not layers:
        raise PlanError("[pal]: its layers select none", hint="leave the key out to mean all of them")
    for found in mine.values():
        if 0 < len(shared := layers & {site.layer for site in found}) < len(found):
            raise PlanError(
                f"[pal]: layer {min(shared)} shares its module with layers that are to have no added heads",
                hint=f"select layers {found[0].layer} to {found[-1].layer} together, or none of them",
            )
    return {
        module: tuple(Site("encoder", "pal", s.layer, pal.heads, f"{s.name}.{EXTRA}.pal") for s in found)
        for module, found in mine.items()
        if found[0].layer in layers
    }


def place_of(model: nn.Module, attention: nn.Module, placement: str) -> nn.Module:
    """The normalisation into whose input the extra heads of a layer go.

    Raises:
        PlanError: the layer normalises before its parts, or is not in the table.
    """
    for layer in model.modules():
        for base in type(layer).__mro__:
            if base.__name__ in PLACES and any(module is attention for module in layer.modules()):
                return layer.get_submodule(PLACES[base.__name__][placement == "layer"])
    raise PlanError(
        f"[pal]: {type(model).__name__}: its layers normalise before their parts, and extra heads go into the input of a"
        " normalisation that follows them",
        hint=f"layers with a place for them: {', '.join(sorted(PLACES))}",
    )


def add_pending(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Before a normalisation runs: add what the extra heads of its layer have computed to its input."""
    pal: ProjectedAttention = module.__dict__["guide_pal"][0]
    if pal.pending is None:
        return None
    size = arguments[0].shape[1]  # less than the sequence where the model runs its feed-forward part in chunks
    added, rest = pal.pending[:, :size], pal.pending[:, size:]
    pal.pending = rest if rest.shape[1] else None
    return (arguments[0] + added.to(arguments[0].dtype), *arguments[1:])
