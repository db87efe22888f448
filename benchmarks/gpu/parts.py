"""The parts of `benchmarks.gpu`: functions from a setting to what they find, in which every failure has its place."""

from __future__ import annotations

import gc
import io
import json
import os
import socket
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.step_cost import BASELINES, Size, Step, Words, kept_bytes, make, plan_of
from guidance import install
from tests.gpu.agreement import LENGTHS, LIMITS, PRECISIONS, deviations, limits
from tests.guidance.models import batch
from tests.guidance.plans import installed, run

BASE, TINY = Size(layers=12, width=768, heads=12), Size(layers=2, width=64, heads=8)
ROWS = {
    "plain": "no guide",
    "mix": "`preset:neighbours`",
    "neighbours": "`preset:neighbours-fixed`",
    "unparsed": "`preset:roles-unparsed`",
    "roles": "`preset:roles`",
    "patterns": "`preset:patterns`",
    "pal": "`preset:pal-patterns`",
    "ag": "`preset:ag`",
    "kl": '`preset:ag` with `distance = "kl"`',
    "gaussian": "`preset:gaussian`",
    "asa": "`preset:asa`, two passes",
    "random": "`preset:random-mask`, two passes",
    "electra": "ELECTRA, no guide",
    "mcmisp": "ELECTRA, `preset:mcmisp` in all layers",
}
"""The steps, and what the page calls them."""

KERNELS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""The kernels of plain attention.  A plan has to stand beside the fastest."""

LARGE_VOCABULARY = 30_522
"""That of BERT, whose output projection is a good part of a step."""

Found = dict[str, Any]


class Setting(NamedTuple):
    """What is measured, and how large it is.

    Attributes:
        tokens: in a batch.
        rounds: steps of which the median is taken.
        backends: pairs of a step and the backend that is held against the default one.
        compiles: one step is compiled, too.
        end: the time after which nothing more is begun.
    """

    device: str
    size: Size
    lengths: tuple[int, ...]
    kinds: tuple[str, ...]
    tokens: int
    rounds: int
    families: tuple[str, ...]
    plans: tuple[str, ...]
    backends: tuple[tuple[str, Any], ...]
    compiles: bool
    end: float = float("inf")


def attempt(setting: Setting, name: str, function: Callable[[], Found]) -> Found:
    """What a function finds, or its error, so that one failure does not cost the rest of the run."""
    if time.monotonic() > setting.end:
        return {"error": "no time left"}
    try:
        found = function()
    except torch.OutOfMemoryError:
        found = {"error": "out of memory"}
    except Exception as error:
        traceback.print_exc()
        found = {"error": (f"{type(error).__name__}: {error}".splitlines() or [""])[0]}
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    print(name, json.dumps(found), flush=True)
    return found


# agreement

THOROUGHLY = ("bert", "modernbert", "deberta-v2", "t5")
"""Families that get all batches; they differ most in how they compute scores."""


def agreement(setting: Setting) -> Found:
    """The largest deviations of each plan from the CPU in float32, by family and precision, and whether they are within limits."""

    def worst(family: str, plan: str, precision: str) -> Found:
        batches = LENGTHS if family in THOROUGHLY else LENGTHS[:1]
        each = [deviations(family, plan, setting.device, precision, lengths) for lengths in batches]
        largest = {part: max(one[part] for one in each) for part in each[0]}
        return {**largest, "within": all(largest[part] <= limit for part, limit in limits(plan, precision).items())}

    return {
        plan: {
            family: {
                precision: attempt(
                    setting,
                    f"{plan}, {family}, {precision}",
                    lambda: worst(family, plan, precision),  # noqa: B023
                )
                for precision in PRECISIONS
            }
            for family in setting.families
        }
        for plan in setting.plans
    }


# trajectory

TRAINED = ("attention_loss", "gate", "mix", "adversary")
"""Plans that are trained: a loss, two with parameters of their own, and one that makes a second pass."""

STEPS = 4
FOUR = batch((7, 4, 5, 6))
"""Both halves have as many tokens, so the mean of their losses is the loss of the whole."""


def trajectory(setting: Setting) -> Found:
    """How far the losses of a run that goes on from a checkpoint, and those of two processes, are from those of one run.

    On a CPU a resumed run has the bits of the other one.
    """

    def resumed(plan: str, precision: str) -> Found:
        found = losses(plan, setting.device, precision, stop=STEPS // 2)
        limit = 0.0 if setting.device == "cpu" else limits(plan, precision)["losses"]
        return _compared(found, losses(plan, setting.device, precision), limit)

    found: Found = {
        "resumed": {
            plan: {
                precision: attempt(setting, f"resumed, {plan}, {precision}", lambda: resumed(plan, precision))  # noqa: B023
                for precision in PRECISIONS
            }
            for plan in TRAINED
        }
    }
    if setting.device == "cpu" or torch.cuda.device_count() > 1:
        found["two processes"] = attempt(setting, "two processes", lambda: _divided(setting.device))
    return found


def _divided(device: str) -> Found:
    divided = in_two_processes(device)
    return {
        plan: _compared(divided[plan], losses(plan, device, "fp32"), limits(plan, "fp32")["losses"]) for plan in TRAINED
    }


def losses(plan: str, device: str, precision: str, *, stop: int = STEPS, rank: int | None = None) -> list[float]:
    """The losses of a training of `STEPS` steps; after ``stop`` it goes on in a new model, from what was saved.

    Args:
        rank: of this process among two, of which each has half of the examples.
    """
    model, handle, optimizer = _fresh(plan, device)
    part = slice(0, 4) if rank is None else slice(2 * rank, 2 * rank + 2)
    inputs = {key: value[part].to(device) for key, value in FOUR.items()}
    wrapped: Any = model if rank is None else nn.parallel.DistributedDataParallel(model)
    found = []
    for number in range(STEPS):
        if number == stop:
            saved = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
            saved.seek(0)
            state = torch.load(saved, map_location=device)
            model, handle, optimizer = _fresh(plan, device, seed=1)
            wrapped = model
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        with torch.autocast(device, PRECISIONS[precision], enabled=precision != "fp32"):
            total = run(wrapped, handle, inputs).total
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        loss = total.detach()
        if rank is not None:
            torch.distributed.all_reduce(loss)
            loss = loss / 2
        found.append(float(loss))
    return found


def _fresh(plan: str, device: str, seed: int = 0) -> tuple[Any, Any, torch.optim.Optimizer]:
    model, handle = installed("roberta", plan, seed=seed)
    model.to(device)
    # large enough an epsilon that rounding errors of gradients that are 0 move nothing
    moving = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, handle, torch.optim.AdamW(moving, lr=1e-2, eps=1e-3)


def _compared(found: list[float], expected: list[float], limit: float) -> Found:
    far = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
    return {"losses": far, "within": far <= limit}


def in_two_processes(device: str) -> dict[str, list[float]]:
    """The losses of two processes with half of the batch each, by plan."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        # CUDA does not survive a fork; without it a fork spares the seconds of the imports
        method = "spawn" if device == "cuda" else "fork"
        torch.multiprocessing.start_processes(_process, (device, port, folder), nprocs=2, start_method=method)  # type: ignore[attr-defined]
        one, two = (json.loads((Path(folder) / str(rank)).read_text()) for rank in range(2))
    assert one == two
    return one  # type: ignore[no-any-return]


def _process(rank: int, device: str, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    found = {plan: losses(plan, device, "fp32", rank=rank) for plan in TRAINED}
    (Path(folder) / str(rank)).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


# cost


def cost(setting: Setting) -> Found:
    """By length, what a step of each kind costs: seconds, MiB, tokens a second, and the kernels of attention that it called."""
    found: Found = {}
    for length in setting.lengths:
        rows = found[str(length)] = {}
        for kind in setting.kinds:

            def measured(kind: str = kind, length: int = length) -> Found:
                return measure(_step(setting, kind, length), setting.rounds)

            rows[kind] = attempt(setting, f"{kind}, {length} tokens", measured)
    return found


def _step(setting: Setting, kind: str, length: int) -> Step:
    return make(kind, length, max(setting.tokens // length, 1), 0.0, setting.device, setting.size, True)


def measure(step: Step, rounds: int) -> Found:
    """What a step costs: a guided one with the kernels that PyTorch takes, a plain one with the fastest, which is named."""
    if step.kind not in {"plain", *BASELINES.values()}:
        return _cost(step, rounds)
    able, refused = {}, {}
    for name, kernel in KERNELS.items():
        try:
            with sdpa_kernel(kernel):
                able[name] = _cost(step, rounds)
        except RuntimeError as error:
            refused[name] = str(error).partition("\n")[0]
    if not able:
        raise RuntimeError(f"no kernel does it: {refused}")
    best = min(able, key=lambda name: able[name]["seconds"])
    tried = {name: able[name]["seconds"] if name in able else refused[name] for name in KERNELS}
    return {**able[best], "kernel": best, "tried": tried}


def _cost(step: Step, rounds: int) -> Found:
    memory = kept_bytes(step)
    kernels = attention_kernels(step)
    seconds = statistics.median(sum(step().values()) for _ in range(rounds))
    rate = step.ids.numel() / seconds
    return {"seconds": seconds, "tokens_per_second": rate, "mib": memory / 2**20, "kernels": kernels}


def attention_kernels(step: Step) -> list[str]:
    """The kernels of PyTorch's attention that a forward pass calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, step.autocast:
        step.loss(lambda part: None)
    start = "aten::_scaled_dot_product_"
    called = {event.key.removeprefix(start) for event in profile.key_averages() if event.key.startswith(start)}
    return sorted(name for name in called if not name.endswith("backward"))


# throughput


def throughput(setting: Setting) -> Found:
    """Tokens a second of pre-training at 512 tokens with BERT's vocabulary and the fused AdamW."""
    length = 512 if 512 in setting.lengths else setting.lengths[0]

    def measured(kind: str, compiled: bool) -> Found:
        step = _step(setting, kind, length)
        step.model.resize_token_embeddings(LARGE_VOCABULARY, mean_resizing=False)
        step.finish()
        step.optimizer = torch.optim.AdamW([p for p in step.model.parameters() if p.requires_grad], lr=1e-4, fused=True)
        if not compiled:
            return measure(step, setting.rounds)
        step.model.compile()
        return _cost(step, setting.rounds)

    ways = [(kind, False) for kind in ("plain", "mix", "ag")] + [("plain", True), ("ag", True)] * setting.compiles
    return {
        kind + ", compiled" * compiled: attempt(
            setting,
            f"throughput, {kind}{', compiled' * compiled}",
            lambda: measured(kind, compiled),  # noqa: B023
        )
        for kind, compiled in ways
    }


# backends


def backends(setting: Setting) -> Found:
    """Time, memory, loss and gradients of long steps with a backend, compared with those of the default backend."""

    def measured(kind: str, backend: Any, length: int) -> Found:
        expected, usual = _first_and_cost(_with_backend(setting, kind, length, "auto"), setting.rounds)
        found, cost = _first_and_cost(_with_backend(setting, kind, length, backend), setting.rounds)
        far = {part: float((found[part] - one).norm() / one.norm()) for part, one in expected.items()}
        ratios = {"ratio": cost["seconds"] / usual["seconds"], "memory_ratio": cost["mib"] / usual["mib"]}
        return {**ratios, **far, "within": all(far[part] <= LIMITS["bf16"][part] for part in far)}

    return {
        str(length): {
            f"{kind}, {_named(backend)}": attempt(
                setting,
                f"{kind}, {_named(backend)}, {length} tokens",
                lambda: measured(kind, backend, length),  # noqa: B023
            )
            for kind, backend in setting.backends
        }
        for length in setting.lengths[-2:]
    }


def _named(backend: Any) -> str:
    return backend if isinstance(backend, str) else ", ".join(f"{path} {name}" for path, name in backend.items())


def _with_backend(setting: Setting, kind: str, length: int, backend: Any) -> Step:
    step = _step(setting, "plain", length)
    plan = plan_of(kind)
    assert plan
    step.kind, step.handle = kind, install(step.model, plan, Words(), backend=backend)  # type: ignore[arg-type]
    step.finish()
    return step


def _first_and_cost(step: Step, rounds: int) -> tuple[dict[str, Tensor], Found]:
    """Loss and gradients of the first step, and what the others cost."""
    with step.autocast:
        loss = step.loss(lambda part: None)
    loss.backward()
    gradients = [p.grad.flatten() for p in step.model.parameters() if p.grad is not None]
    first = {"losses": loss.detach()[None].cpu(), "gradients": torch.cat(gradients).cpu()}
    return first, _cost(step, rounds)


PARTS: dict[str, tuple[Callable[[Setting], Found], float]] = {
    "agreement": (agreement, 0.25),
    "trajectory": (trajectory, 0.05),
    "cost": (cost, 0.4),
    "backends": (backends, 0.15),
    "throughput": (throughput, 0.15),
}
"""Each part and its share of the time.  Time that a part leaves is for those after it."""
