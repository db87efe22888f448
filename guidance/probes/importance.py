"""How much a loss depends on each head: the first-order Taylor importance of its weights.

Source: Molchanov et al. 2017; the form of T3-Vis, which Li et al. 2022, section 3.1, used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from guidance.attention.mixing import PROJECTIONS
from guidance.errors import NumericalError, UnsupportedModel
from guidance.sites import Site

Form = Literal["elementwise", "joint"]

_FUSED = ("Wqkv", "qkv_proj", "query_key_value", "c_attn")
"""The names of queries', keys' and values' matrices in one."""

_OUT = ("out_lin", "out_proj", "o_proj", "o", "Wo", "dense", "c_proj", "up")
"""The names of the matrix whose columns belong to heads, where it is part of the attention module."""


@dataclass(frozen=True)
class _Part:
    """A matrix or a bias of an attention module, of which each head has a slice.

    Attributes:
        dim: the dimension that heads divide.
        blocks: along it, one block after the other, by how many slices each has; heads share a slice where there are fewer.
    """

    parameter: Tensor
    dim: int
    blocks: tuple[int, ...]

    def by_head(self, heads: int) -> Tensor:
        """Gradient times weight, (H, N), float64."""
        assert self.parameter.grad is not None
        product = (self.parameter.grad.double() * self.parameter.detach().double()).movedim(self.dim, 0)
        width = len(product) // sum(self.blocks)
        slices = zip(self.blocks, product.split([width * number for number in self.blocks]), strict=True)
        own = [block.reshape(number, -1).repeat_interleave(heads // number, dim=0) for number, block in slices]
        return torch.cat(own, dim=1)


class Importance:
    """Collects the importance of heads from the gradients of a model.

    It sums over a head's rows of the query, key and value matrices and biases, and its columns of the output matrix, whose bias
    belongs to no head: the squares of gradient times weight, or with ``joint`` the square of their sum.  For added heads the
    output matrix is the projection back to the model's width.  Rows of keys and values that heads share count in each of them.
    Layers that share their weights share their importance.

    Args:
        model: with the gradients of a loss in its parameters when `scores` is called.
        sites: of its attention modules; `guidance.installation.Handle.sites`.
    """

    def __init__(
        self, model: nn.Module, sites: Mapping[nn.Module, tuple[Site, ...]], form: Form = "elementwise"
    ) -> None:
        self.form = form
        names = {module: name for name, module in model.named_modules()}
        self._parts = [(own, list(_parts(model, names[module], module, own[0]))) for module, own in sites.items()]

    def scores(self) -> dict[Site, Tensor]:
        """The importance of each head, (H,), float64; a parameter without a gradient counts nothing."""
        scores: dict[Site, Tensor] = {}
        for sites, parts in self._parts:
            heads = sites[0].num_heads
            terms = [part.by_head(heads) for part in parts if part.parameter.grad is not None]
            products_HN = torch.cat(terms, dim=1) if terms else torch.zeros(heads, 1, dtype=torch.float64)
            summed = products_HN.square().sum(-1) if self.form == "elementwise" else products_HN.sum(-1).square()
            scores |= dict.fromkeys(sites, summed.cpu())
        return scores


def _parts(model: nn.Module, name: str, module: nn.Module, site: Site) -> Iterator[_Part]:
    """The parameters of the heads of a module.  Raises UnsupportedModel if they were not found."""
    children, heads = dict(module.named_children()), site.num_heads
    into: list[tuple[nn.Module, tuple[int, ...]]]
    if fused := next((child for child in _FUSED if child in children), None):
        into = [(children[fused], _blocks(fused, module, heads))]
    else:
        chosen = next((names for names in PROJECTIONS if all(child in children for child in names)), None)
        if chosen is None:
            raise UnsupportedModel(f"{name}: a {type(module).__name__}, whose queries, keys and values were not found")
        rows = [len(children[child].weight) for child in chosen]  # type: ignore[arg-type]
        into = [(children[child], (heads * own // rows[0],)) for child, own in zip(chosen, rows, strict=True)]
    for linear, blocks in into:
        if isinstance(weight := linear.weight, Tensor):
            yield _Part(weight, int(isinstance(linear, Conv1D)), blocks)
        if isinstance(bias := linear.bias, Tensor):
            yield _Part(bias, 0, blocks)
    yield _output(model, name, module, heads)


def _blocks(fused: str, module: nn.Module, heads: int) -> tuple[int, ...]:
    """The blocks of the rows of a matrix of queries, keys and values."""
    if fused == "query_key_value" or getattr(module, "multi_query", None) is False:
        return (heads,)  # the queries, keys and values of each head stand together
    keys = heads // getattr(module, "num_key_value_groups", 1)
    return heads, keys, keys


def _output(model: nn.Module, name: str, module: nn.Module, heads: int) -> _Part:
    """The output matrix of a module, whose columns belong to heads."""
    children = dict(module.named_children())
    out = next((children[child] for child in _OUT if child in children), None)
    if out is None:  # BERT and its kind have it beside the attention module
        parent = model.get_submodule(name.rpartition(".")[0])
        out = getattr(getattr(parent, "output", None), "dense", None)
    if not isinstance(out, nn.Linear | Conv1D):
        raise UnsupportedModel(f"{name}: the output matrix of a {type(module).__name__} was not found")
    return _Part(out.weight, int(isinstance(out, nn.Linear)), (heads,))


@contextmanager
def switched_off(
    model: nn.Module, sites: Mapping[nn.Module, tuple[Site, ...]], heads: Iterable[tuple[nn.Module, int]]
) -> Iterator[None]:
    """Within the context some heads of modules contribute nothing: their columns of the output matrix are 0."""
    names = {module: name for name, module in model.named_modules()}
    before: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for module, head in heads:
                (own, *_) = sites[module]
                part = _output(model, names[module], module, own.num_heads)
                width = part.parameter.shape[part.dim] // own.num_heads
                columns = part.parameter.narrow(part.dim, head * width, width)
                before.append((columns, columns.clone()))
                columns.zero_()
        yield
    finally:
        with torch.no_grad():
            for columns, values in reversed(before):
                columns.copy_(values)


def check_finite(scores: Mapping[Site, Tensor]) -> None:
    """Raises NumericalError where the importance of a head is no number: such a head would count as the least important one."""
    for site, values in scores.items():
        if not torch.isfinite(values).all():
            head = int((~torch.isfinite(values)).nonzero()[0])
            raise NumericalError(
                f"the importance of layer {site.layer}, head {head} is {float(values[head])}",
                hint="the loss or its gradient overflows; are the weights of the model finite?",
            )


def normalised(scores: Mapping[Site, Tensor], *, by_layer: bool = False) -> dict[Site, Tensor]:
    """Scores from 0 to 1: (I - min) / (max - min) over all heads, or over those of each site; 0 where all are equal."""
    check_finite(scores)
    everything = torch.cat(list(scores.values())) if scores else torch.zeros(0)
    scaled = {}
    for site, values in scores.items():
        group = values if by_layer else everything
        low, spread = group.min(), group.max() - group.min()
        scaled[site] = (values - low) / spread if spread > 0 else torch.zeros_like(values)
    return scaled
