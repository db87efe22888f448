"""Sharded training (FSDP2): every process keeps a part of each weight, of its gradient, and of what the optimizer remembers of it.

A block of a model is gathered while it computes, and freed afterwards.  What is outside of blocks, such as the embeddings, stays
gathered from its first use in a step to the end of the backward pass.  A gathered tensor equals that of a model that was never
divided, so a checkpoint holds whole tensors and does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from guidance.errors import InputError


def shard(model: nn.Module, device: torch.device, world: int) -> None:
    """Divide a model over all processes, in place, and move it to their devices, block by block.

    Raises:
        InputError: a parameter is a single number, which cannot be divided.
    """
    numbers = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    if numbers:
        raise InputError(f"--parallel fsdp cannot divide the single number {numbers[0]}", hint="--parallel ddp")
    mesh = init_device_mesh(device.type, (world,))
    for module in (*_blocks(model), model):
        # what is outside of blocks is used again at once, in the backward pass
        divided = fully_shard(module, mesh=mesh, reshard_after_forward=module is not model)
        divided.set_force_sum_reduction_for_comms(True)  # gloo cannot take means


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules, such as the layers of an encoder."""
    for child in model.children():
        yield from child if isinstance(child, nn.ModuleList) else _blocks(child)


def gather(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Copies of whole tensors on the CPU, gathered one by one.  All processes must call it; those without ``keep`` get none."""
    whole = {}
    for name, tensor in tensors.items():
        tensor = whole_of(tensor.detach())
        if keep:
            whole[name] = tensor.to("cpu", copy=True).contiguous()
    return whole


def whole_of(tensor: Tensor) -> Tensor:
    """A tensor as it is when it is not divided.  All processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor divided and placed as another one is."""
    if isinstance(like, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor.to(like.device)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep all weights gathered, so that processes need not run the same number of forward passes."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not model)
            part.reshard()


def make_whole(model: nn.Module, *, keep: bool) -> None:
    """Turn a divided model back into an ordinary one, with its weights on the CPU.  All processes must call it; in those without
    ``keep`` the model stays divided."""
    found: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # what modules share, they share afterwards
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in found:
                tensors = gather({name: parameter}, keep=keep)
                made = nn.Parameter(tensors[name], parameter.requires_grad) if keep else parameter
                found[id(parameter)] = parameter, made
            if keep:
                setattr(module, name, found[id(parameter)][1])
        if keep and isinstance(module, FSDPModule):
            module.__class__ = type(module).__bases__[1]  # `fully_shard` derived a class from it
