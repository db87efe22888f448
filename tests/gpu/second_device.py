"""A second device for a machine that has none: what code does wrong on a GPU shows without one.

Tensors say that they are on the device ``second`` and hold their numbers in memory.  Operations on tensors of two devices are
refused, as CUDA refuses them, and so is what its kernels do not take.  Run as a program, this compares guided training steps there
with those on the CPU, and trains with plans; it changes torch for the whole process.

    python -m tests.gpu.second_device FAMILY,… PLAN;…
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "second"


class Module(backend_registration._DummyBackendModule):
    """What ``torch.second`` is."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class OnSecond(Tensor):
    """A tensor that says that it is on the second device; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnSecond:
        options: dict[str, Any] = {
            "strides": held.stride(),
            "storage_offset": held.storage_offset(),
            "dtype": held.dtype,
        }
        made: Any = Tensor._make_wrapper_subclass(cls, held.size(), device=torch.device(NAME, 0), **options)
        made.held = held
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """Within the context the device exists."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def held_by(value: Any) -> Any:
    return value.held if isinstance(value, OnSecond) else value


def is_second(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives, on the device where it belongs.  Raises RuntimeError where CUDA would."""
    name, device = func._schema.name, kwargs.get("device")
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    here = [each for each in tensors if isinstance(each, OnSecond)]
    is_copy, is_index = name in ("aten::_to_copy", "aten::copy_", "aten::_copy_from"), name.startswith("aten::index")
    stays = is_index and not isinstance(tensors[0], OnSecond)
    if here and not is_copy and device is None:
        joins = name in ("aten::cat", "aten::stack")  # other operations take single numbers from the CPU
        others = [each for each in tensors if not isinstance(each, OnSecond) and (each.dim() or joins)]
        if (others and not is_index) or stays:
            shown = [(each.device.type, tuple(each.shape)) for each in tensors]
            raise RuntimeError(f"{name}: tensors of two devices: {shown}")
    plain = tree_map(held_by, args)
    if is_second(device):
        kwargs = kwargs | {"device": torch.device("cpu")}
    if name == "aten::_softmax_backward_data":
        grad, wanted = args[0], args[3]
        if wanted not in (grad.dtype, torch.float16):
            raise RuntimeError(f"{name}: expected input and grad types to match, or input to be at::Half")
        plain = (*plain[:3], grad.dtype)
    found = func(*plain, **tree_map(held_by, kwargs))
    goes_there = bool(here) and (name != "aten::copy_" or isinstance(args[0], OnSecond))
    if not (goes_there if device is None else is_second(device)):
        return found
    known = {id(held_by(each)): each for each in tensors}  # operations in place give what they got

    def placed(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return known[id(each)] if id(each) in known else OnSecond(each)

    return tree_map(placed, found)


def set_up() -> None:
    """Register the device, and let what is not an operation of torch know it: numbers of lists, and weights that are tied."""
    from transformers import PreTrainedModel

    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    made, listed, moved = torch.tensor, Tensor.tolist, PreTrainedModel.to

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        return made(data, **options).to(device or "cpu")

    def new_tensor(self: Tensor, data: Any, *, device: Any = None, dtype: Any = None) -> Tensor:
        return tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        whole = data if isinstance(data, Tensor) else tensor(data, dtype=dtype)
        return whole.to(device=device or whole.device, dtype=dtype or whole.dtype)

    def to(self: Any, *args: Any, **options: Any) -> Any:
        there = moved(self, *args, **options)
        there.tie_weights()
        return there

    patched: Any = torch
    patched.tensor, patched.as_tensor = tensor, as_tensor
    patched.Tensor.new_tensor, patched.Tensor.tolist = new_tensor, lambda self: listed(self.cpu())
    PreTrainedModel.to = to  # type: ignore[method-assign, assignment]
    # what torch calls below its dispatch to Python
    for name, kernel in (("empty_strided", _strided), ("empty.memory_format", _empty), ("_copy_from", _copied)):
        torch.library.impl(f"aten::{name}", "privateuseone")(kernel)


def _strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return OnSecond(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _empty(size: Any, dtype: Any = None, **_: Any) -> Tensor:
    return OnSecond(torch.empty(size, dtype=dtype, device="cpu"))


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    held_by(target).copy_(held_by(source))
    return target


def steps_that_differ(families: list[str], plans: list[str]) -> list[str]:
    """The steps of `tests.gpu.agreement` that the second device refuses, or computes otherwise than the CPU."""
    from tests.gpu.agreement import LENGTHS, step

    wrong = []
    for family in families:
        for plan in plans:
            expected = step(family, plan, "cpu", "fp32", LENGTHS[0])
            try:
                with SecondDevice():
                    found = step(family, plan, NAME, "fp32", LENGTHS[0])
            except (RuntimeError, NotImplementedError) as error:
                wrong.append(f"{family}, {plan}: {error}")
                continue
            far = {part: float((found[part] - one).norm() / one.norm()) for part, one in expected.items()}
            wrong += [f"{family}, {plan}: {part} {distance:.1e}" for part, distance in far.items() if distance > 1e-5]
    return wrong


def trainings_that_fail(trained: dict[str, dict[str, Any]]) -> list[str]:
    """Pre-trainings, by name with their settings, that fail on the second device, or have other weights there or none at all."""
    from pipelines.storage.store import Store
    from pipelines.training import cluster, optimization
    from tests import trainings

    begin, clip, places, wrong = cluster.Cluster.__init__, optimization.Optimizer.clip, set[str](), []

    def on_second(self: Any, device: str, precision: str) -> None:
        begin(self, "cpu", "fp32")
        self.device = self.accelerator.state.device = torch.device(NAME, 0)

    def noted(self: Any) -> Any:
        places.update(each.device.type for group in self._clipped.values() for each in group)
        return clip(self)

    cluster.Cluster.__init__ = on_second  # type: ignore[method-assign]
    optimization.Optimizer.clip = noted  # type: ignore[method-assign]
    for name, settings in trained.items():
        places.clear()
        with tempfile.TemporaryDirectory() as folder:
            plan = settings.get("plan", "")
            if "\n" in plan:
                (Path(folder) / "plan.toml").write_text(plan)
                settings = settings | {"plan": str(Path(folder) / "plan.toml")}
            try:
                with SecondDevice():
                    trainings.train(Store(Path(folder) / "store"), **settings)
            except (RuntimeError, NotImplementedError) as error:
                wrong.append(f"{name}: {error}")
                continue
        if places != {NAME}:
            wrong.append(f"{name}: weights are on {places}")
    return wrong


TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{name: {"plan": f"preset:{name}"} for name in ("ag", "neighbours", "neighbours-fixed", "asa-pretraining")},
    "frozen adversary": {"plan": '[[guide]]\nmechanism = "adversary"\ntrain = false\n'},
    "causal": {"objective": "clm"},
    "electra": {"objective": "electra", "plan": "preset:ag"},
    "muon": {"optimizer": "muon"},
}


def main(families: str, plans: str) -> None:
    """Compare steps and train; what is wrong is printed, and then this ends with 1."""
    torch.set_num_threads(1)
    set_up()
    wrong = steps_that_differ(families.split(","), plans.split(";")) + trainings_that_fail(TRAININGS)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
