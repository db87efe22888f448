"""The training loop: several losses, each divided by its own global denominator, and a run that continues bit for bit.

Order of examples, masking and dropout are functions of (seed, step), so a checkpoint needs only weights, optimizer state
and the step.  The global batch is cut over processes and micro-batches; since every loss is a sum divided by a count
over the whole global batch, the trajectory does not depend on how.  ``accelerate`` launches, wraps and autocasts.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from guidance.checkpoint import weights
from guidance.errors import Interrupted, MachineError, NumericalError
from pipelines.artifacts import Artifact, ArtifactDamaged, Builder
from pipelines.batches import Order, shares
from pipelines.checkpoints import Checkpoints
from pipelines.progress import Progress, log

KEEP_CHECKPOINTS = 2


@dataclass(frozen=True)
class Settings:
    """What the loop needs to know; see `pipelines.pretrain.Config` for meanings and units."""

    steps: int
    batch_size: int
    micro_batches: int
    learning_rate: float
    schedule: Literal["linear", "cosine", "constant"]
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    clip: float
    seed: int
    precision: str
    device: str
    evaluate_every: int
    save_every: int
    snapshots: tuple[int, ...]
    max_time: float | None
    report_to: tuple[str, ...] = ()

    def rate(self, step: int) -> float:
        """The learning rate of the update that follows ``step`` finished ones."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        left = (self.steps - step) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (left if self.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


class Objective(Protocol):
    """What is trained.  All sums are over the examples of one micro-batch; the loop divides them."""

    model: nn.Module
    num_examples: int

    def prepare(self, examples: Sequence[tuple[int, int]]) -> Any:
        """Make a micro-batch from (epoch, example) pairs, with all its random choices, on the CPU."""

    def counts(self, batch: Any) -> dict[str, float]:
        """The denominator of each loss, and ``tokens``, for one micro-batch."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The undivided sum of each loss, for one micro-batch."""

    def weights(self, step: int) -> dict[str, float]:
        """The factor of each loss in the total after ``step`` finished updates."""

    def evaluate(self, model: nn.Module, rank: int, world: int) -> dict[str, tuple[float, float]]:
        """Sum and count of each validation loss over this process's share."""

    def state(self) -> dict[str, Any]:
        """What must be remembered in a checkpoint besides weights, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""


@dataclass
class Outcome:
    """What a finished run leaves: the metrics of every step, and the best step by validation loss."""

    rows: list[dict[str, float]]
    best_step: int | None
    best_loss: float | None
    facts: dict[str, Any] = field(default_factory=dict)


class Cluster:
    """The processes of a run, one or many, and the device of this one."""

    def __init__(self, device: str, precision: str) -> None:
        """Raises MachineError when the device that was asked for is not there."""
        if device == "cuda" and not torch.cuda.is_available():
            raise MachineError("no CUDA device is available", hint="--device cpu, or auto")
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        if precision == "auto":
            precision = "bf16" if not on_cpu and torch.cuda.is_bf16_supported() else "fp32"
        if precision == "bf16" and not on_cpu and not torch.cuda.is_bf16_supported():
            raise MachineError("this device has no bfloat16", hint="--precision fp32")
        AcceleratorState._reset_state()  # one process may train several models in turn
        self.accelerator = Accelerator(cpu=on_cpu, mixed_precision="bf16" if precision == "bf16" else "no")
        self.precision = precision
        self.device: torch.device = self.accelerator.device
        self.world: int = self.accelerator.num_processes
        self.rank: int = self.accelerator.process_index

    @property
    def leads(self) -> bool:
        """True for the one process that writes and speaks."""
        return self.rank == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add up numbers by name over all processes."""
        if self.world == 1:
            return dict(values)
        packed = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(packed)
        return dict(zip(values, packed.tolist(), strict=True))

    def agree(self, failure: Exception | None) -> None:
        """Everybody fails when the leader did, so that nobody waits for ever."""
        if self.sum({"failed": float(failure is not None)})["failed"] and failure is None:
            raise MachineError("the leading process could not save; see its message")
        if failure is not None:
            raise failure


class StopRequest:
    """Remembers that the user, the scheduler or the clock wants the run to end after the current step."""

    def __init__(self, max_minutes: float | None) -> None:
        self.signal_number = 0
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes

    @property
    def time_is_up(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def code(self) -> int:
        """0 to go on; else the signal that asks for the end, SIGINT when time is up."""
        return self.signal_number or (int(signal.SIGINT) if self.time_is_up else 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn Ctrl-C and termination into a request; a second Ctrl-C is not held back."""

        def ask(number: int, frame: Any) -> None:
            if self.signal_number == number == signal.SIGINT:
                os._exit(130)
            if not self.signal_number:
                log.info("finishing the step and saving (Ctrl-C again leaves at once)")
            self.signal_number = number

        previous = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, ask)
        except ValueError:  # not the main thread: whoever owns it decides
            pass
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def train(
    objective: Objective, settings: Settings, cluster: Cluster, partial: Path, *, progress: Progress, title: str
) -> Outcome:
    """Train to the last step, from the newest checkpoint in ``partial`` if there is one.

    Raises:
        NumericalError: a loss or the gradient is not finite; nothing was updated with it.
        Interrupted: the run was asked to end; a checkpoint is saved.
    """
    return _Loop(objective, settings, cluster, partial, progress, title).run()


class _Loop:
    def __init__(
        self, objective: Objective, settings: Settings, cluster: Cluster, partial: Path, progress: Progress, title: str
    ) -> None:
        self.objective, self.settings, self.cluster = objective, settings, cluster
        self.progress, self.title = progress, title
        self.checkpoints = Checkpoints(partial)
        self.log_path = partial / "metrics.jsonl"
        if cluster.precision == "fp64":
            objective.model.double()
        self.bare = objective.model.to(cluster.device)
        self.model = cluster.accelerator.prepare(self.bare)
        named = [(name, p) for name, p in self.bare.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for _, p in named if p.ndim > 1], "weight_decay": settings.weight_decay},
                {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},  # biases and norms
            ],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
        )
        self.parameter_names = {id(p): name for name, p in named}
        self.order = Order(objective.num_examples, settings.batch_size, settings.seed)
        self.rows: list[dict[str, float]] = []
        self.step = 0
        self.best: tuple[int, float] | None = None

    # the run

    def run(self) -> Outcome:
        settings, stop = self.settings, StopRequest(self.settings.max_time)
        if self.cluster.leads:
            self.checkpoints.prepare()
        if self.cluster.world > 1:
            torch.distributed.barrier()
        self._resume()
        trackers = self._trackers()
        with (
            stop.listening(),
            self.progress.task(self.title, total=settings.steps, unit="step") as bar,
            self._open_log() as metrics_log,
        ):
            bar.advance(self.step)
            self._snapshot()
            while self.step < settings.steps:
                row = self._train_step()
                if self._due(settings.evaluate_every):
                    row |= self._evaluate()
                self.rows.append(row)
                if metrics_log:
                    metrics_log.write(json.dumps(row) + "\n")
                    metrics_log.flush()
                if trackers:
                    trackers.log({k: v for k, v in row.items() if k != "step"}, step=self.step)
                bar.advance(1, f"loss {row['loss/total']:.3f}")
                self._snapshot()
                code = int(self.cluster.sum({"stop": float(stop.code)})["stop"])
                if code and self.step < settings.steps:
                    self._save(metrics_log)
                    raise Interrupted(
                        f"stopped after step {self.step} of {settings.steps}; the run is saved",
                        signal_number=stop.code or int(signal.SIGTERM),
                        hint="the same command continues it",
                    )
                if self.step % settings.save_every == 0 and self.step < settings.steps:
                    self._save(metrics_log)
        if trackers:
            trackers.end_training()
        best_step, best_loss = self.best or (None, None)
        return Outcome(
            self.rows,
            best_step,
            best_loss,
            {"world": self.cluster.world, "device": self.cluster.device.type, "precision": self.cluster.precision},
        )

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.settings.steps

    def _train_step(self) -> dict[str, float]:
        settings, cluster = self.settings, self.cluster
        started = time.monotonic()
        mine = shares(self.order.batch(self.step), cluster.world)[cluster.rank]
        batches = [self.objective.prepare(part) for part in shares(mine, settings.micro_batches) if part]
        counted = [self.objective.counts(batch) for batch in batches]
        names = list(self.objective.weights(self.step))
        totals = cluster.sum({key: sum(c[key] for c in counted) for key in [*names, "tokens"]})
        factors = self.objective.weights(self.step)
        rate = settings.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # dropout is a function of (seed, step, process), so that a checkpoint needs no state of a generator
        torch.manual_seed(int(np.random.SeedSequence([settings.seed, self.step, cluster.rank]).generate_state(1)[0]))

        self.model.train()
        sums = dict.fromkeys(names, 0.0)
        for place, batch in enumerate(batches):
            last = place == len(batches) - 1
            with nullcontext() if last else cluster.accelerator.no_sync(self.model), cluster.accelerator.autocast():
                parts = self.objective.losses(self.model, batch)
                divided = {name: parts[name] / max(totals[name], 1.0) for name in names}
                # data parallelism averages gradients over processes; these are shares of a sum
                total = sum((factors[name] * divided[name] for name in names), torch.zeros((), device=cluster.device))
                (total * cluster.world).backward()
            for name in names:
                sums[name] += divided[name].item()
        values = cluster.sum(sums)
        norm = nn.utils.clip_grad_norm_(self.bare.parameters(), settings.clip or math.inf).item()
        self._check_finite(values, norm, mine)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.monotonic() - started
        return {
            "step": self.step,
            "loss/total": sum(factors[name] * values[name] for name in names),
            **{f"loss/{name}": values[name] for name in names},
            **{f"weight/{name}": factors[name] for name in names[1:]},
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens": totals["tokens"],
            "seconds": seconds,
            "tokens_per_second": totals["tokens"] / max(seconds, 1e-9),
        }

    def _check_finite(self, values: Mapping[str, float], norm: float, examples: list[tuple[int, int]]) -> None:
        if math.isfinite(norm) and all(map(math.isfinite, values.values())):
            return
        shown = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
        raise NumericalError(
            f"step {self.step + 1}: not finite: {shown}, gradient norm {norm:.6g}; "
            f"examples {', '.join(str(e) for _, e in examples[:8])}{', …' if len(examples) > 8 else ''}",
            hint="nothing was updated; a lower learning rate, warm-up or clipping may help",
        )

    def _evaluate(self) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad(), self.cluster.accelerator.autocast():
            sums = self.objective.evaluate(self.bare, self.cluster.rank, self.cluster.world)
        if not sums:
            return {}
        added = self.cluster.sum({f"{n}/{i}": v for n, pair in sums.items() for i, v in enumerate(pair)})
        losses = {name: added[f"{name}/0"] / max(added[f"{name}/1"], 1.0) for name in sums}
        first = next(iter(losses.values()))
        if self.best is None or first < self.best[1]:
            self.best = (self.step, first)
            self._write("best", self._write_weights, keep=1)
        return {f"valid/{name}": value for name, value in losses.items()}

    # saving and coming back

    def _snapshot(self) -> None:
        if self.step in self.settings.snapshots:
            self._write("snapshot", self._write_weights, keep=None)

    def _write(self, name: str, write: Callable[[Builder], None], keep: int | None) -> None:
        failure: MachineError | None = None
        if self.cluster.leads:
            try:
                self.checkpoints.save(name, self.step, write, keep=keep)
            except MachineError as error:
                failure = error
        self.cluster.agree(failure)

    def _write_weights(self, builder: Builder) -> None:
        builder.write("model.safetensors", safetensors.torch.save(weights(self.bare), metadata={"format": "pt"}))

    def _save(self, metrics_log: Any) -> None:
        if metrics_log:
            os.fsync(metrics_log.fileno())
        self._write("checkpoint", self._write_state, keep=KEEP_CHECKPOINTS)

    def _write_state(self, builder: Builder) -> None:
        self._write_weights(builder)
        moments = {
            f"{key}/{self.parameter_names[id(p)]}": state[key].detach().cpu()
            for group in self.optimizer.param_groups
            for p in group["params"]
            if (state := self.optimizer.state.get(p))
            for key in ("exp_avg", "exp_avg_sq")
        }
        builder.write("optimizer.safetensors", safetensors.torch.save(moments))
        state = {"step": self.step, "best": self.best, "world": self.cluster.world, "objective": self.objective.state()}
        builder.write_json("state.json", state)

    def _resume(self) -> None:
        artifact = self.checkpoints.newest("checkpoint")
        if artifact is None:
            return
        state = json.loads(artifact.read("state.json"))
        _load_weights(self.bare, artifact)
        moments = safetensors.torch.load(artifact.read("optimizer.safetensors"))
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                name = self.parameter_names[id(p)]
                self.optimizer.state[p] = {
                    "step": torch.tensor(float(state["step"])),
                    **{key: moments[f"{key}/{name}"].to(p.device) for key in ("exp_avg", "exp_avg_sq")},
                }
        self.step, self.best = state["step"], tuple(state["best"]) if state["best"] else None
        self.objective.restore(state["objective"])
        self.rows = _read_log(self.log_path, self.step)
        if state["world"] != self.cluster.world:
            log.warning(
                "continuing with %d processes what %d began: the same order of examples, but not bit-equal",
                self.cluster.world,
                state["world"],
            )
        log.info("continuing after step %d of %d", self.step, self.settings.steps)

    @contextmanager
    def _open_log(self) -> Iterator[Any]:
        if not self.cluster.leads:
            yield None
            return
        with open(self.log_path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.rows)
            yield file

    def _trackers(self) -> Accelerator | None:
        if not self.settings.report_to:
            return None
        accelerator = Accelerator(
            log_with=list(self.settings.report_to), project_dir=str(self.log_path.parent / "trackers")
        )
        accelerator.init_trackers("guide")
        return accelerator


def _load_weights(model: nn.Module, artifact: Artifact) -> None:
    tensors = safetensors.torch.load(artifact.read("model.safetensors"))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    if unexpected or set(missing) - tied:
        raise ArtifactDamaged(f"{artifact.path}: the weights are not those of this model")


def _read_log(path: Path, last_step: int) -> list[dict[str, float]]:
    """The metrics up to a step; what was logged after the checkpoint is left out, and so is a torn last line."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("step", last_step + 1) <= last_step:
            rows.append(row)
    if [row["step"] for row in rows] != list(range(1, last_step + 1)):
        raise ArtifactDamaged(f"{path}: does not hold steps 1 to {last_step}", hint="--force starts again")
    return rows
