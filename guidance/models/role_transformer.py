"""The role-guided transformer: the classifier of paper B, trained from nothing on whole words.

It saves, loads and registers like the classes of transformers, and its heads are guided like those of any encoder.

Source: Wang et al. 2020, section 3, and its published code.  Unlike in the code, heads are scaled by the root of their own width, the
mean leaves padding out, and a normalisation adds 1e-6 to the variance instead of the standard deviation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, initialization
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from guidance.models.families import FAMILIES, Family, module_name
from guidance.models.word_models import WordClassifier, WordModel, WordTrunk, register


class RoleTransformerConfig(PreTrainedConfig):
    """The configuration of a role-guided transformer.

    The width of a head is ``hidden_size // num_attention_heads``; what is left over is not used, as in the paper's code.
    """

    model_type = "role-transformer"
    vocab_size: int = 1000
    hidden_size: int = 100
    num_hidden_layers: int = 2
    num_attention_heads: int = 6
    intermediate_size: int = 256
    hidden_dropout_prob: float = 0.2
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 90
    pad_token_id: int = 0


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed positions (length + 1, width): row p holds sin and cos of p / 10000^(2⌊i/2⌋/width); row 0, of padding, is zero."""
    positions = torch.arange(length + 1, dtype=torch.float64)[:, None]
    angles = positions / 10_000 ** (2 * (torch.arange(width, dtype=torch.float64) // 2) / width)
    table = torch.where(torch.arange(width) % 2 == 0, angles.sin(), angles.cos())
    table[0] = 0
    return table.float()


class RoleAttention(nn.Module):
    """Attention without biases of queries, keys and values, whose heads are joined by one matrix."""

    def __init__(self, config: RoleTransformerConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer, False
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // self.num_heads
        inner = self.num_heads * self.head_dim
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, inner, bias=False) for _ in range(3))
        self.output = nn.Linear(inner, config.hidden_size)

    def forward(self, states: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        """From states (B, T, d) to states (B, T, d)."""
        heads = [
            layer(states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sdpa_attention_forward)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        context, _ = attend(self, *heads, mask, dropout=dropout, scaling=self.head_dim**-0.5, **kwargs)
        joined: Tensor = self.output(context.flatten(-2))
        return joined


class RoleLayer(nn.Module):
    """A layer with normalisation after each sum."""

    def __init__(self, config: RoleTransformerConfig, layer: int) -> None:
        super().__init__()
        self.attention = RoleAttention(config, layer)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.inner = nn.Linear(config.hidden_size, config.intermediate_size)
        self.outer = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, states: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        """From states (B, T, d) to states (B, T, d)."""
        states = self.attention_norm(states + self.dropout(self.attention(states, mask, **kwargs)))
        return self.output_norm(states + self.dropout(self.outer(functional.relu(self.inner(states)))))


class _RoleModel(WordModel):
    """What the transformer and its classifier share."""

    config_class = RoleTransformerConfig
    _supports_sdpa = True
    _supports_attention_backend = True
    has_heads = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RoleTransformerModel):
            initialization.copy_(module.positions, sinusoids(len(module.positions) - 1, module.config.hidden_size))
        else:
            super()._init_weights(module)


class RoleTransformerModel(_RoleModel, WordTrunk):
    """The transformer of paper B without its classifier: states (B, T, d).  Positions count valid tokens from 1."""

    def __init__(self, config: RoleTransformerConfig) -> None:
        super().__init__(config)
        self.positions: Tensor
        positions = sinusoids(config.max_position_embeddings, config.hidden_size)
        self.register_buffer("positions", positions, persistent=False)
        self.layers = nn.ModuleList(RoleLayer(config, number) for number in range(config.num_hidden_layers))
        self.post_init()

    def _states(self, embedded_BTd: Tensor, valid_BT: Tensor, **kwargs: Any) -> Tensor:
        positions_BT = valid_BT.long().cumsum(-1) * valid_BT
        states: Tensor = self.dropout(embedded_BTd + self.positions[positions_BT].to(embedded_BTd.dtype))
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=states, attention_mask=valid_BT.long())
        for layer in self.layers:
            states = layer(states, mask, **kwargs)
        return states


class RoleTransformerForSequenceClassification(_RoleModel, WordClassifier):
    """Classifies the mean over valid tokens."""

    def __init__(self, config: RoleTransformerConfig) -> None:
        super().__init__(config, RoleTransformerModel(config), config.hidden_size)
        self.post_init()

    def _vector(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            return states.mean(1)
        weights = attention_mask.to(states.dtype)[..., None]
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


register(RoleTransformerConfig, RoleTransformerModel, RoleTransformerForSequenceClassification)
FAMILIES.add(module_name(__name__), Family("role-guided transformer", "RoleAttention"))
