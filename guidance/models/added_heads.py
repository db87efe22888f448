"""Projected attention layers: small extra heads beside a layer's own, which can be guided without changing the layer's.

Source: Li et al. 2022, section 3.3, after Stickland & Murray 2019.  With the layer's input h,

    PAL(h) = gelu(W2 MHA(W1 h + b1) + b2),

is added to the input of the layer's last normalisation, as in the published code, or of the normalisation after the
self-attention, as in the paper.  A pre-norm layer has no such normalisation: there h is the layer's input after its attention
norm, and PAL(h) is added to the residual stream where the attention's output is, which is our choice.  The published code
starts every weight at zero, and from there only b2 ever moves.  Here
only W2 and b2 are zero, so the model starts out equal to the plain one and every weight can learn.
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
    """The table ``[pal]`` of a plan: extra heads, which guides address as ``pal:0`` and so on.

    Attributes:
        width: the width of the projection; each head has ``width / heads``.
        heads: the number of extra heads in a layer.
        layers: the layers that get extra heads.
        placement: ``layer``: before the layer's last normalisation; ``attention``: before the one after the self-attention.
            Pre-norm layers have one place only, whatever this says.
        dropout: the dropout of the attention probabilities.
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


class ProjectedHeads(nn.Module):
    """The extra heads of one layer; 591,616 parameters from 768 to 256."""

    # no "Attention" in the name: transformers thinks that where code has such a class, such as standalone code, no attention
    # function can be chosen

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
        """What the extra heads add for a layer's input, (B, T, d); ``attend`` gives their output (B, T, heads, D)."""
        states = self.down(layer_input_BTd)
        query, key, value = (
            linear(states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        output = attend(self, query, key, value, self.dropout if self.training else 0.0)
        return nn.functional.gelu(self.up(output.flatten(2)))


NORMALISATIONS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer", "ElectraLayer", "DebertaV2Layer"),
        ("attention.output.LayerNorm", "output.LayerNorm"),
    ),
    "TransformerBlock": ("sa_layer_norm", "output_layer_norm"),
    "AlbertLayer": ("attention.LayerNorm", "full_layer_layer_norm"),
    **dict.fromkeys(("MarianEncoderLayer", "BartEncoderLayer"), ("self_attn_layer_norm", "final_layer_norm")),
}
"""By layer class: the normalisation after the self-attention, and the last one.  Extra heads are added to their input."""


PRE_NORM: dict[str, str] = {
    "ModernBertEncoderLayer": "attn",
    "T5LayerSelfAttention": "SelfAttention",
    "MT5LayerSelfAttention": "SelfAttention",
    "MBartEncoderLayer": "self_attn",
}
"""By layer class, of layers that normalise before the attention: the module to whose output extra heads are added."""


def added_sites(pal: Pal, sites: Mapping[nn.Module, tuple[Site, ...]]) -> dict[nn.Module, tuple[Site, ...]]:
    """The sites of a model's extra heads, by the attention module beside which they stand; one for each of its calls."""
    encoder = {m: own for m, own in sites.items() if (own[0].stack, own[0].attention) == ("encoder", "self")}
    if not encoder:
        raise PlanError("[pal]: heads are added beside an encoder's self-attention, which the model does not have")
    count = 1 + max((site.layer for own in encoder.values() for site in own), default=-1)
    try:
        layers = set(select(pal.layers, count, "layer"))
    except PlanError as error:
        raise PlanError(f"[pal]: {error.message}", hint=error.hint) from error
    if not layers:
        raise PlanError("[pal]: layers selects no layer", hint="leave the key out to mean all of them")
    for own in encoder.values():
        if 0 < len(shared := layers & {site.layer for site in own}) < len(own):
            raise PlanError(
                f"[pal]: layer {min(shared)} shares its module with layers that get no added heads",
                hint=f"select layers {own[0].layer} to {own[-1].layer} together, or none of them",
            )
    return {
        module: tuple(Site("encoder", "pal", s.layer, pal.heads, f"{s.name}.{EXTRA}.pal") for s in own)
        for module, own in encoder.items()
        if own[0].layer in layers
    }


def place_of(model: nn.Module, attention: nn.Module, placement: str) -> tuple[nn.Module, bool]:
    """The module at which the extra heads beside an attention module are added: to its output if True, else to its input."""
    for layer in model.modules():
        for base in type(layer).__mro__:
            known = base.__name__ in NORMALISATIONS or base.__name__ in PRE_NORM
            if known and any(module is attention for module in layer.modules()):
                if base.__name__ in PRE_NORM:
                    return layer.get_submodule(PRE_NORM[base.__name__]), True
                return layer.get_submodule(NORMALISATIONS[base.__name__][placement == "layer"]), False
    raise PlanError(
        f"[pal]: it is not known where extra heads are added in the layers of a {type(model).__name__}",
        hint=f"layers that can have extra heads: {', '.join(sorted((*NORMALISATIONS, *PRE_NORM)))}",
    )


def add_to_output(module: nn.Module, arguments: Any, output: Any) -> Any:
    """After a module of a pre-norm layer has run: add the output of the layer's extra heads to its own."""
    pal: ProjectedHeads = module.__dict__["guide_pal"][0]
    if pal.pending is None:
        return None
    added, pal.pending = pal.pending, None
    if isinstance(output, Tensor):
        return output + added.to(output.dtype)
    return (output[0] + added.to(output[0].dtype), *output[1:])


def add_pending(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Before a normalisation runs: add the output of the layer's extra heads to its input."""
    pal: ProjectedHeads = module.__dict__["guide_pal"][0]
    if pal.pending is None:
        return None
    size = arguments[0].shape[1]  # shorter than the sequence if the model runs its feed-forward part in chunks
    added, rest = pal.pending[:, :size], pal.pending[:, size:]
    pal.pending = rest if rest.shape[1] else None
    return (arguments[0] + added.to(arguments[0].dtype), *arguments[1:])
