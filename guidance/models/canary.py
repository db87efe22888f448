"""The canary: proof that guidance reaches every site of a model.

A model that does not use the attention interface of transformers silently ignores the keyword ``guidance=``.  So a tiny
forward pass runs first, and a model whose modules do not answer as the table of sites says is refused by name.

So is one whose attention does more than we know of: in that pass all heads are computed as guided ones are, and must give
what the model's own function gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.attention import reference, sdpa
from guidance.attention.call import AttentionCall, heads_of
from guidance.attention.eager import eager
from guidance.batch import BatchGuidance
from guidance.errors import UnsupportedModel
from guidance.models.families import supported
from guidance.sites import Site


class _NoPlan:
    """In place of a guided model: no plan, and the backend that is the definition of correct."""

    backends: Mapping[str, Any] = {"explicit": reference.attend}

    def remaining(self, strengths: Any) -> Mapping[Site, Any]:
        return {}


LARGEST_ERROR = 0.02
"""Of an output, relative to the largest one; what half precision explains."""


class Canary:
    """Passed to a model as ``guidance=``, records which modules call the attention function.

    Attributes:
        calls: for each call, in order, the module and whether it had a mask.
        shared_keys: the modules whose heads share keys, with how many heads share each.
        head_widths: the width of the output of each head, by module.
        differing: the modules whose own attention is not what our backends compute.
        guidance: of no plan, which records the probabilities of all heads.
    """

    documents = None

    def __init__(self) -> None:
        nothing: Any = _NoPlan()
        self.guidance = BatchGuidance(nothing, {}, measuring=False, recorded={})
        self.differing: set[nn.Module] = set()
        self.calls: list[tuple[nn.Module, bool]] = []
        self.shared_keys: dict[nn.Module, int] = {}
        self.head_widths: dict[nn.Module, int] = {}

    def works_at(self, module: nn.Module) -> bool:
        """True, so that every attention module calls the attention function."""
        return True

    def boolean(self, mask: Tensor) -> Tensor:
        """The mask as booleans."""
        return mask.bool()

    def record(self, module: nn.Module, mask: Tensor | None, heads_per_key: int = 1, head_width: int = 0) -> None:
        """Record a call; the attention function calls this."""
        self.calls.append((module, mask is not None))
        self.head_widths[module] = head_width
        if heads_per_key > 1:
            self.shared_keys[module] = heads_per_key

    def compare(self, call: AttentionCall, output_BQHD: Tensor) -> None:
        """Compare all heads, and every second one alone by each backend, with what the model's own function gives."""
        settings = {"softcap": call.softcap, "position_bias": call.position_bias}
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        given |= {"dropout": 0.0, "scaling": call.scale, **call.kwargs}
        own = eager(call.module, call.query, call.key, call.value, call.mask_B1QK, **given)
        if own is None:
            return
        num_heads = call.query.shape[1]
        some = tuple(range(1, num_heads, 2)) or (0,)
        found = [(tuple(range(num_heads)), output_BQHD), (some, reference.attend(call, some))]
        if call.softcap is None:
            found.append((some, sdpa.attend(call, some)))
        is_empty = self.guidance.empty(call.scope)  # what queries without keys give differs between kernels
        expected_BHQD = own[0].transpose(1, 2).masked_fill(is_empty, 0.0)
        for heads, output in found:
            found_BHQD = output.transpose(1, 2).masked_fill(is_empty, 0.0)
            error = (found_BHQD - heads_of(expected_BHQD, heads)).abs().max()
            if not error <= LARGEST_ERROR * expected_BHQD.abs().max():
                self.differing.add(call.module)


def send(model: PreTrainedModel, sites: Mapping[nn.Module, tuple[Site, ...]]) -> Canary:
    """Prove that every site calls our function the right number of times, with a mask if there is padding.

    Runs one forward pass over two short sentences in evaluation mode, without gradients or random numbers.
    """
    canary, model_name = Canary(), type(model).__name__
    if getattr(model.config, "is_causal", None) is False and any(
        getattr(module, "is_causal", False) for module in sites
    ):
        raise UnsupportedModel(
            f"{model_name}: is_causal = false in its configuration lets tokens see later ones, which guides would hide from them"
        )
    with evaluating(model), _knowing_padding(model.config), torch.no_grad():
        model(**_tiny_batch(model, sites), guidance=canary)
    calls = [module for module, _ in canary.calls]
    for module, module_sites in sites.items():
        if calls.count(module) != len(module_sites):
            expected = "once" if len(module_sites) == 1 else f"{len(module_sites)} times"
            raise UnsupportedModel(
                f"{model_name}: {module_sites[0].name} called the attention function {calls.count(module)} times,"
                f" not {expected}",
                hint=f"supported: {supported()}",
            )
    if unknown := {type(module).__name__ for module in calls if module not in sites}:
        raise UnsupportedModel(f"{model_name}: {', '.join(sorted(unknown))} is not in the table of sites")
    for module in canary.differing:
        raise UnsupportedModel(
            f"{model_name}: {type(module).__name__} computes attention in another way than guides do, at"
            f" {sites[module][0].name}",
            hint=f"supported: {supported()}",
        )
    for module, had_mask in canary.calls:
        site = sites[module][0]
        # beside an encoder, a decoder's self-attention is causal and needs no mask for right padding
        is_spared = model.config.is_encoder_decoder and (site.stack, site.attention) == ("decoder", "self")
        if not had_mask and not is_spared:
            raise UnsupportedModel(f"{model_name}: padding does not reach the attention function at {site.name}")
    return canary


def used_parameters(
    model: PreTrainedModel,
    sites: Mapping[nn.Module, tuple[Site, ...]],
    guide: Callable[[Mapping[str, Tensor]], Any] | None = None,
) -> set[nn.Parameter]:
    """The trainable parameters on which the outputs for a tiny batch depend; ``guide`` makes its guidance, if any."""
    batch = _tiny_batch(model, sites)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with evaluating(model), _knowing_padding(model.config), torch.enable_grad():
        output = model(**batch, **({"guidance": guide(batch)} if guide else {}))
        total = sum(v.float().sum() for v in output.values() if isinstance(v, Tensor) and v.requires_grad)
        if not isinstance(total, Tensor) or not parameters:
            return set()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    return {parameter for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is not None}


def _tiny_batch(model: PreTrainedModel, sites: Mapping[nn.Module, tuple[Site, ...]]) -> dict[str, Any]:
    """Two sentences, the second with padding."""
    config = model.config
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise UnsupportedModel(
            f"{type(model).__name__}: its configuration has no vocab_size, so it reads no tokens or is made of several models",
            hint="install the plan in the part that reads tokens, for example model.encoder",
        )
    pad = getattr(config, "pad_token_id", None) or 0
    pad = pad if 0 <= pad < config.vocab_size else 0  # -1 in early conversions of Llama
    ends = getattr(config, "eos_token_id", None)
    end = ends[0] if isinstance(ends, list | tuple) and ends else ends
    word = next((word for word in range(config.vocab_size) if word not in (pad, end)), 0)
    device = next(model.parameters()).device
    chunk = getattr(config, "chunk_size_feed_forward", 0) or 1
    width = -(-6 // chunk) * chunk
    ids = torch.full((2, width), word, device=device)
    mask = torch.ones_like(ids)
    if isinstance(end, int) and 0 <= end < config.vocab_size:  # BART and T5 classify the state at the end token
        ids[0, -1] = ids[1, 3] = end
    ids[1, 4:], mask[1, 4:] = pad, 0
    if type(model).__name__.endswith("ForMultipleChoice"):  # (B, choices, T)
        ids, mask = ids[None], mask[None]
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if any(site.stack == "decoder" for own in sites.values() for site in own) and config.is_encoder_decoder:
        batch |= {"decoder_input_ids": ids, "decoder_attention_mask": mask, "use_cache": False}
    return batch


@contextmanager
def _knowing_padding(config: Any) -> Iterator[None]:
    """A padding id where the configuration has none: without it, decoders classify only single texts."""
    own = getattr(config, "pad_token_id", None)
    config.pad_token_id = own or 0
    try:
        yield
    finally:
        config.pad_token_id = own


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; restores the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
