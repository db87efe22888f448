"""The function that transformers calls in every layer, registered as ``guide``.

Without guidance, or in a layer without guides, it computes exactly what the model computes.  Otherwise each head takes the
cheapest path that is right: plain and masked heads go through a fast kernel, heads whose scores or probabilities are read or
changed are computed explicitly, and heads whose attention is replaced need neither scores nor softmax.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from guidance.attention import logsumexp, sdpa
from guidance.attention.call import UNKNOWN_CACHE, AttentionCall, edited, heads_of, refuse_unguided
from guidance.attention.eager import eager
from guidance.attention.mixing import mixed, mixed_values
from guidance.attention.sdpa import mask_dtype
from guidance.batch import BatchGuidance
from guidance.errors import InputError
from guidance.models.canary import Canary
from guidance.site_plans import SitePlan
from guidance.sites import Site

NAME = "guide" if __name__.startswith("guidance.") else f"guide-{zlib.crc32(__name__.encode()):08x}"
"""The name under which transformers knows the attention function and its mask: in the file of a standalone model one of its own,
since a process may open several."""


def guided_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    guidance: BatchGuidance | Canary | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    layer_input: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: from queries, keys and values (B, H, T, D) to outputs (B, T, H, D).

    Keys and values may have fewer heads, which neighbouring heads of queries share.

    The second result is None, or the probabilities (B, H, Q, K) before dropout if the guidance records them.

    Args:
        position_bias: added to the scores, (B or 1, H, Q, K).
        softcap: see `AttentionCall`.
        layer_input: the hidden states that the module reads, if a mechanism needs them.
    """
    if isinstance(guidance, BatchGuidance) and (its := guidance.documents) and its.is_packed(query.transpose(1, 2)):
        scores: dict[str, Any] = {"position_bias": position_bias, "softcap": softcap}
        more = {"dropout": dropout, "scaling": scaling, **kwargs}
        return _packed_attention(module, (query, key, value), attention_mask, guidance, layer_input, scores, **more)
    canary = guidance if isinstance(guidance, Canary) else None
    if canary is not None:
        canary.record(module, attention_mask, query.shape[1] // key.shape[1], value.shape[-1])
        guidance = canary.guidance
    elif guidance is None:
        refuse_unguided(module)
    site: Site | None = None
    site_plan: SitePlan | None = None
    if isinstance(guidance, BatchGuidance) and (site := guidance.site(module)) is not None:
        site_plan = guidance.site_plan(site)
    if site is None or site_plan is None or not isinstance(guidance, BatchGuidance):
        if guidance is None and kwargs.get("output_attentions"):
            raise InputError(
                "output_attentions was asked of a part of a guided model, or of its forward method",
                hint="call model(...) as a whole, or handle.probabilities(...)",
            )
        settings = {"dropout": dropout, "scaling": scaling, "softcap": softcap, **kwargs}
        if softcap is not None and (own := eager(module, query, key, value, attention_mask, **settings)):
            return own  # PyTorch's kernel has no soft cap
        biased: dict[str, Any] = {} if position_bias is None else {"position_bias": position_bias}
        is_shared = attention_mask is not None and attention_mask.dtype == torch.bool and not biased
        if isinstance(guidance, BatchGuidance) and attention_mask is not None and is_shared:
            attention_mask = guidance.additive(attention_mask, mask_dtype(query))
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **biased, **kwargs)
    if (
        query.shape[2] != key.shape[2]
        and guidance.past is None
        and site.attention != "cross"
        and site_plan.reads_prefix
    ):
        raise InputError(UNKNOWN_CACHE[0], hint=UNKNOWN_CACHE[1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if site_plan.query_factors:
        query = query * query.new_tensor(site_plan.query_factors)[:, None, None]
    call = AttentionCall(
        module=module,
        site=site,
        site_plan=site_plan,
        batch=guidance,
        scope=guidance.scope(
            module,
            attention_mask,
            (query.shape[0], query.shape[2], key.shape[2]),
            query.device,
            bool(kwargs.get("sliding_window")),
        ),
        query=query,
        key=key,
        value=value,
        mask_B1QK=attention_mask,
        dropout=dropout,
        scale=scale,
        position_bias=position_bias,
        softcap=softcap,
        layer_input=layer_input,
        kwargs=kwargs,
    )
    if site_plan.making("mix"):
        each = call.shared(value, tuple(range(query.shape[1])))  # every head mixes what it reads
        call = replace(call, value=mixed_values(guidance, module, site, call.scope, each))
    output = _output(call)
    if canary is not None:
        canary.compare(call, output)
    if guidance.recorded is None:
        return output, None
    if guidance.watcher is not None:
        guidance.watcher(site, guidance.recorded.pop(site))
        return output, None
    return output, guidance.recorded[site]


def _packed_attention(
    module: nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    guidance: BatchGuidance,
    layer_input: Tensor | None,
    scores: dict[str, Any],
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """`guided_attention` of a packed row.

    Queries, keys and values (1, H, N, D) are taken apart into the padded batch, (B, H, T, D), and the outputs are put together again,
    (1, N, H, D).

    Args:
        states: queries, keys and values.
        scores: what else changes scores: position biases and a soft cap, each of which may be None.
    """
    query, key, value = states
    documents = guidance.documents
    assert documents is not None and mask is not None
    has_kernel = documents.one_by_one(query) and all(each is None for each in scores.values())
    if has_kernel and guidance.passes_by(module):
        return documents.plain_attention(module, query, key, value, mask, **more), None
    query, key, value = (documents.apart(each.transpose(1, 2)).transpose(1, 2) for each in states)
    read = None if layer_input is None else documents.apart(layer_input)
    more = {"guidance": guidance, "layer_input": read, **scores, **more}
    output, attention = guided_attention(module, query, key, value, mask, **more)
    return documents.together(output), attention


def _output(call: AttentionCall) -> Tensor:
    """The output of all heads, each by its path, in order: (B, Q, H, D)."""
    batch, plan = call.batch, call.site_plan
    if batch.measuring and not batch.attacking:
        for assignment in plan.making("row_losses"):
            query, key = heads_of(call.query, assignment.heads), call.shared(call.key, assignment.heads)
            loss_B = assignment.mechanism.row_losses(query, key, call.scale, call.inputs(assignment))
            batch.losses[assignment.number, call.site] = loss_B
    output = _recorded(call) if batch.recorded is not None else _cheapest(call)
    for assignment in plan.making("edit_output"):
        output = edited(output, assignment.heads, call.edit(assignment, "edit_output"), dim=2)
    return mixed(batch, call.module, call.site, call.scope, "output", output) if plan.making("mix") else output


def _recorded(call: AttentionCall) -> Tensor:
    """The output of all heads by way of the probabilities that are recorded, so that gradients reach these."""
    batch, plan = call.batch, call.site_plan
    assert batch.recorded is not None
    batch.recorded.pop(call.site, None)  # gradient checkpointing runs the forward pass twice
    paths = plan.paths(attacking=batch.attacking, measuring=batch.measuring, recording=True)
    if paths.explicit:
        batch.guided.backends["explicit"](call, paths.explicit)
    for assignment in plan.making("replace"):
        call.record(assignment.heads, assignment.mechanism.replaced_attention(call.inputs(assignment)), assignment)
    attention = batch.recorded[call.site]
    if call.value.requires_grad and not attention.requires_grad and not torch.compiler.is_compiling():
        attention.requires_grad_()  # all heads are replaced; whoever asks for gradients wants theirs too
    dropped = nn.functional.dropout(attention, call.dropout, training=call.dropout > 0)
    output = dropped.to(call.value.dtype) @ call.shared(call.value, tuple(range(call.query.shape[1])))
    return output.masked_fill(batch.empty(call.scope), 0.0).transpose(1, 2)


def _cheapest(call: AttentionCall) -> Tensor:
    """The output of all heads, each by its path."""
    batch, plan, num_heads = call.batch, call.site_plan, call.query.shape[1]
    paths = plan.paths(attacking=batch.attacking, measuring=batch.measuring, recording=False)
    parts: list[tuple[tuple[int, ...], Tensor]] = []
    backends, explicit, plain = batch.guided.backends, paths.explicit, paths.plain
    is_usual = backends["explicit"] is logsumexp.attend and backends["plain"] is sdpa.attend
    if explicit and plain and is_usual and logsumexp.takes_plain(call, explicit, plain):
        explicit, plain = tuple(sorted(explicit + plain)), ()
    if explicit:
        parts.append((explicit, backends["explicit"](call, explicit)))
    fading = []
    for assignment in plan.making("replace"):
        inputs = call.inputs(assignment)
        value = call.shared(call.value, assignment.heads)
        replaced = assignment.mechanism.replace(value, inputs, call.dropout)
        replaced = replaced.masked_fill(batch.empty(call.scope), 0.0).transpose(1, 2)
        if assignment.number in plan.fading:
            fading.append((assignment, replaced))
        else:
            parts.append((assignment.heads, replaced))
    for name, heads in (("masked", paths.masked), ("plain", plain)):
        if heads:  # PyTorch's kernel has no soft cap
            backend = backends[name if call.softcap is None else "explicit"]
            parts.append((heads, backend(call, heads)))
    order = tuple(head for heads, _ in parts for head in heads)
    output = torch.cat([part for _, part in parts], dim=2) if len(parts) > 1 else parts[0][1]
    if order != tuple(range(num_heads)):
        # graphs that take several plans cannot sort
        output = output[:, :, [order.index(head) for head in range(num_heads)]]
    for assignment, replaced in fading:
        output = edited(output, assignment.heads, lambda own, a=assignment, r=replaced: call.faded(a, own, r), dim=2)  # type: ignore[misc]
    return output


AttentionInterface.register(NAME, guided_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
