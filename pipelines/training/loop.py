"""The training loop: several losses, each divided by its own global denominator, and resuming bit for bit.

The order of examples, masking and dropout are functions of (seed, step), so a checkpoint needs only weights, optimizer
state and the step.  The global batch is split over processes and micro-batches.  Every loss is a sum divided by a count
over the whole global batch, so the trajectory does not depend on the split.  ``accelerate`` launches, wraps and autocasts.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guidance.checkpoint import tensors_of
from guidance.errors import GuidanceHadNoEffect, InputError, Interrupted, MachineError, NumericalError
from guidance.guided_model import check_matches
from pipelines.progress import Progress, log
from pipelines.storage.artifacts import Artifact, Builder
from pipelines.training.batches import shares
from pipelines.training.checkpoints import NAMES, Checkpoints
from pipelines.training.cluster import Cluster, StopRequest
from pipelines.training.memory import compile_model
from pipelines.training.metrics_log import Beginning, MetricsLog
from pipelines.training.optimization import Optimizer, share_of_muon
from pipelines.training.preparation import Prepared
from pipelines.training.report import training_losses, validation_losses
from pipelines.training.sharding import gather, gathered, make_whole, shard
from pipelines.training.state import State, read_state, write_state, write_weights
from pipelines.training.trackers import Trackers

KEEP_CHECKPOINTS = 2
MATCHED_BY = 20
"""The step after which to warn about patterns that have matched nothing."""


@dataclass
class Outcome:
    """What a finished run gives, besides its checkpoints.

    Attributes:
        last: the metrics of the last step.
        log: the file with the metrics of every step, one JSON object a line; only the leading process writes it.
        best: the step of each kept validation, and its loss, or its metric if one selects; the best one first.
        tallies: what the learner counted in all processes since the first step.
        facts: see `_Loop._circumstances`.
        memory: the peak of the leading process, in bytes, since the run began or was resumed; see `Cluster.peak_memory`.
    """

    last: dict[str, float]
    log: Path
    best: Sequence[tuple[int, float]] = ()
    tallies: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    memory: int = 0


def train(prepared: Prepared, cluster: Cluster, partial: Path, progress: Progress) -> Outcome:
    """Train to the last step, from the newest checkpoint in ``partial`` if there is one.

    Raises:
        GuidanceHadNoEffect: the pattern of a guide matched nothing in the whole run.
        NumericalError: a loss or the gradient is not finite; the weights were not updated with it.
        Interrupted: the run was stopped after a step; a checkpoint is saved.
        InputError: a batch has fewer examples than there are processes; or a tracker does not exist.
        MachineError: a file could not be saved; or there is not enough memory.
    """
    world, smallest = cluster.world, prepared.order.smallest
    if cluster.leads:
        kind = cluster.device.type
        log.info("training on %s, %s, %d process%s", kind, cluster.precision, world, "es" if world > 1 else "")
        if prepared.settings.optimizer == "muon":
            log.info("%s", share_of_muon(prepared.learner.model))
    if smallest < world:
        raise InputError(
            f"a batch of {smallest} cannot be split over {world} processes",
            hint="a larger --batch-size or --batch-tokens, or fewer processes",
        )
    if prepared.settings.parallel == "fsdp":
        _check_sharding(prepared, world)
    trackers = partial.parents[2] / "trackers" / f"{partial.parent.name}-{partial.name}"
    try:
        outcome = _Loop(prepared, cluster, partial, progress, trackers).run()
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):  # torch has no exception class for this on the CPU
            raise MachineError("not enough memory", hint="a smaller batch, or --micro-batches 2") from error
        if "C++ compiler" in str(error):
            raise MachineError("--compile needs a C++ compiler", hint="install g++, or leave --compile out") from error
        if "onnection closed by peer" in str(error) or "onnection reset by peer" in str(error):
            raise MachineError("another process of this run has ended", hint="see its message") from error
        raise
    try:
        check_matches(outcome.tallies)
    except GuidanceHadNoEffect as error:
        error.hint = f"{error.hint}; `guide rm model/{partial.name}` removes the unfinished run"
        raise
    return outcome


def _check_sharding(prepared: Prepared, world: int) -> None:
    """Raises InputError if the model of a run cannot be divided over so many processes."""
    settings, smallest = prepared.settings, prepared.order.smallest
    if world == 1:
        raise InputError(
            "--parallel fsdp divides the model over processes, and there is one", hint="start it by torchrun"
        )
    if settings.compile:
        raise InputError("--parallel fsdp does not work with --compile", hint="leave one of them out")
    if settings.optimizer == "muon":  # the steps of matrices in parts differ in their second digit
        raise InputError("--parallel fsdp: Muon needs whole matrices", hint="--optimizer adamw, or --parallel ddp")
    if smallest < world * settings.micro_batches:  # each forward pass gathers weights from all processes
        raise InputError(
            f"--parallel fsdp: a batch of {smallest} does not give each of {world} processes {settings.micro_batches} micro-batches",
            hint="fewer --micro-batches, a larger batch, or --parallel ddp",
        )


def step_timer(prepared: Prepared, cluster: Cluster, folder: Path) -> Callable[[], float]:
    """A function that makes one training step and gives its seconds; nothing is validated, logged or saved."""
    loop = _Loop(prepared, cluster, folder, Progress(), folder)
    prepared.learner.at(0)
    return lambda: loop._train_step()["seconds"]


class _Loop:
    def __init__(
        self, prepared: Prepared, cluster: Cluster, partial: Path, progress: Progress, tracker_folder: Path
    ) -> None:
        self.learner, self.order, self.cluster = prepared.learner, prepared.order, cluster
        self.settings = settings = prepared.settings
        learner = self.learner
        learner.begin(settings.steps)
        self.progress, self.tracker_folder, self.wanted = progress, tracker_folder, settings.best
        self.checkpoints = Checkpoints(partial)
        self.metrics = MetricsLog(partial)
        if cluster.precision == "fp64":
            learner.model.double()
        self.bare, self.is_sharded = learner.model, settings.parallel == "fsdp" and cluster.world > 1
        if self.is_sharded:
            shard(self.bare, cluster.device, cluster.world)
        else:
            self.bare.to(cluster.device)
        # what accelerate calls evaluation is a model without data parallelism
        self.model = cluster.accelerator.prepare_model(self.bare, evaluation_mode=self.is_sharded)
        if settings.compile:
            compile_model(self.bare)
        self.optimizer = Optimizer(self.bare, settings)
        self.step, self.last = 0, dict[str, float]()
        self.best: list[tuple[int, float]] = []  # step and value of the kept validations, the best one first
        self.protected: list[int] = []  # the best steps that the kept checkpoints refer to

    # the run

    def run(self) -> Outcome:
        settings, cluster = self.settings, self.cluster
        stop = StopRequest(settings.max_time, speaks=cluster.leads)
        cluster.reset_peak_memory()
        with cluster.only_leader() as leads:
            if leads:
                self.checkpoints.prepare()
        self._resume()
        self.learner.at(self.step)
        with (
            self._trackers().following() as trackers,
            stop.listening(),
            self.progress.task("training", total=settings.steps, unit="steps", done=self.step) as bar,
            self.metrics.opened() if cluster.leads else nullcontext(),
        ):
            self._snapshot()
            while self.step < settings.steps:
                row = self._train_step()
                if self._due(settings.evaluate_every):
                    row |= self._evaluate()
                    self._report(row)
                if self.step == MATCHED_BY:
                    self._warn_of_unmatched_patterns()
                self.last = row
                with cluster.only_leader():
                    self.metrics.add(row)
                trackers.log(row)
                bar.advance(1, training_losses(row))
                self._snapshot()
                if self._out_of_patience():
                    break
                number = self._asked_to_stop(stop)
                if number or self._due(settings.save_every):
                    self._save()
                if number and self.step < settings.steps:
                    raise Interrupted(
                        f"stopped after step {self.step} of {settings.steps}; the run is saved",
                        signal_number=number,
                        hint="the same command continues it",
                    )
        with cluster.only_leader() as leads:
            if leads:
                self.metrics.restore(self.step, self.metrics.written)
        tallies = cluster.sum(self.learner.tallies())
        if self.is_sharded:
            make_whole(self.bare, keep=cluster.leads)
        return Outcome(self.last, self.metrics.path, self.best, tallies, self._circumstances(), cluster.peak_memory())

    def _report(self, row: Mapping[str, float]) -> None:
        if self.cluster.leads:
            parts = filter(
                None,
                (
                    training_losses(row),
                    validation_losses(row, self.best[0] if self.best else None, self.wanted.select, self.learner.floor),
                ),
            )
            log.info("step %s of %s: %s", f"{self.step:,}", f"{self.settings.steps:,}", "; ".join(parts))

    def _out_of_patience(self) -> bool:
        """Whether the last validations were all no better than the best one."""
        since = self.step - (self.best[0][0] if self.best else self.step)
        if not self.wanted.patience or since < self.wanted.patience * self.settings.evaluate_every:
            return False
        if self.cluster.leads:
            log.info("step %d: no better validation since step %d; training ends", self.step, self.step - since)
        return True

    def _warn_of_unmatched_patterns(self) -> None:
        tallies = self.cluster.sum(self.learner.tallies())
        for label in (label for label, found in tallies.items() if not found and self.cluster.leads):
            log.warning(
                "guide %r: its pattern has matched no token in the first %d steps; if it never does, the run ends with an error",
                label,
                self.step,
            )

    def _asked_to_stop(self, stop: StopRequest) -> int:
        """The signal that any process received, or 0; the same in all processes."""
        code = stop.code
        asked = self.cluster.sum(
            {"interrupt": float(code == signal.SIGINT), "end": float(code not in (0, signal.SIGINT))}
        )
        return int(signal.SIGTERM if asked["end"] else signal.SIGINT if asked["interrupt"] else 0)

    def _circumstances(self) -> dict[str, Any]:
        """What the exact bits depend on besides the configuration."""
        packing = getattr(self.settings, "packing", "none")
        return {
            **({} if packing == "none" else {"packing": packing}),
            **({"parallel": "fsdp"} if self.is_sharded else {}),
            "world": self.cluster.world,
            "device": self.cluster.device.type,
            "precision": self.cluster.precision,
            "micro_batches": self.settings.micro_batches,
            "compiled": self.settings.compile,
            "threads": torch.get_num_threads(),
        }

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.settings.steps

    def _train_step(self) -> dict[str, float]:
        settings, cluster = self.settings, self.cluster
        started = time.monotonic()
        mine = shares(self.order.batch(self.step), cluster.world)[cluster.rank]
        batches = [self.learner.prepare(part) for part in shares(mine, settings.micro_batches) if part]
        factors = self.learner.weights(self.step)
        rate = settings.rate(self.step)
        # dropout is a function of (seed, step, process), so a checkpoint needs no random state
        torch.manual_seed(int(np.random.SeedSequence([settings.seed, self.step, cluster.rank]).generate_state(1)[0]))

        self.model.train()
        totals, sums = self._backward(batches, factors)
        clipped = self.optimizer.clip()
        # one transfer from the device for all numbers
        packed = cluster.sum_tensor(torch.stack(list(sums.values())))
        numbers = torch.cat((packed, torch.stack(list(clipped.values())).double())).tolist()
        values = dict(zip(sums, numbers[: len(sums)], strict=True))
        norms = dict(zip(clipped, numbers[len(sums) :], strict=True))
        self._check_finite(values, norms, mine)
        self.optimizer.update(rate)
        self.step += 1
        self.learner.at(self.step)
        seconds = time.monotonic() - started
        return {
            "step": self.step,
            "loss/total": sum(factor * values[name] for name, factor in factors.items()),
            **{f"loss/{name}": values[name] for name in factors},
            **{f"weight/{name}": factor for name, factor in factors.items()},
            **{name: value for name, value in values.items() if name not in factors},
            "learning_rate": rate,
            **norms,
            "tokens": totals["tokens"],
            "seconds": seconds,
            "tokens_per_second": totals["tokens"] / max(seconds, 1e-9),
        }

    def _backward(
        self, batches: Sequence[Any], factors: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Run all passes over all micro-batches; gives the global denominators and this process's part of every loss."""
        cluster, passes = self.cluster, self.learner.passes
        totals: dict[str, float] = {}
        sums: dict[str, Tensor] = {}
        held: Tensor | None = None
        for current in passes:
            counted = [current.counts(batch) for batch in batches]
            totals |= cluster.sum({key: sum(count[key] for count in counted) for key in counted[0]})
            for batch in batches:
                last = batch is batches[-1]
                sync = self.is_sharded or (last and current is passes[-1])
                with nullcontext() if sync else cluster.accelerator.no_sync(self.model), cluster.accelerator.autocast():
                    parts = current.losses(self.model, batch, self.step)
                    divided = {name: part / max(totals[name], 1.0) for name, part in parts.items()}
                    terms = [factors[name] * part for name, part in divided.items() if name in factors]
                    # data parallelism averages gradients over processes, but these are parts of a sum
                    total = sum(terms, torch.zeros((), device=cluster.device)) * cluster.world
                    total = total if held is None or not sync else total + held
                    if last and not sync and not getattr(current, "at_once", False):
                        held = (
                            total if held is None else held + total
                        )  # gradients are synchronised once, with the last pass
                    else:
                        total.backward()
                for name, part in divided.items():
                    sums[name] = sums.get(name, 0.0) + part.detach().double()
        return totals, sums

    def _check_finite(
        self, values: Mapping[str, float], norms: Mapping[str, float], examples: list[tuple[int, int]]
    ) -> None:
        numbers = {**values, **{name.replace("_", " "): norm for name, norm in norms.items()}}
        if all(map(math.isfinite, numbers.values())):
            return
        shown = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        raise NumericalError(
            f"step {self.step + 1}: not finite: {shown}; "
            f"examples {', '.join(str(e) for _, e in examples[:8])}{', …' if len(examples) > 8 else ''}",
            hint="the weights were not updated; a lower learning rate, warm-up or clipping may help",
        )

    def _evaluate(self) -> dict[str, float]:
        self.model.eval()
        # validation is rare, and would need graphs of its own
        plain = torch.compiler.set_stance("force_eager") if self.settings.compile else nullcontext()
        with torch.no_grad(), self.cluster.accelerator.autocast(), plain, gathered(self.bare):
            losses = self._validation_losses()
            scores = {
                f"eval/{task}/{metric}": float(value)
                for task, score in self.learner.scorers.items()
                for metric, value in score(self.bare).items()
            }
        select = self.wanted.select
        value = scores.get(select) if select else next(iter(losses.values()), None)
        if value is not None:
            self._keep_best(float(value))
        elif select and self.cluster.leads:
            log.warning(
                "step %d: %s is undefined on the validation examples, so no weights are kept as best", self.step, select
            )
        return {**{f"valid/{name}": value for name, value in losses.items()}, **scores}

    def _validation_losses(self) -> dict[str, float]:
        """The mean losses over the validation examples of all processes.  Raises NumericalError if one is not finite."""
        sums = self.learner.evaluate(self.bare, self.cluster.rank, self.cluster.world)
        added = self.cluster.sum({f"{n}/{i}": v for n, pair in sums.items() for i, v in enumerate(pair)})
        # a loss over no examples is undefined, not 0
        losses = {name: added[f"{name}/0"] / added[f"{name}/1"] for name in sums if added[f"{name}/1"]}
        if not all(map(math.isfinite, losses.values())):
            shown = ", ".join(f"{name} {value:.6g}" for name, value in losses.items())
            raise NumericalError(f"step {self.step}: a validation loss is not finite: {shown}")
        return losses

    def _keep_best(self, value: float) -> None:
        """Keep the weights of this step if its validation is among the best; of equal ones the first is better."""
        sign = -1 if self.wanted.select else 1
        ranked = sorted([*self.best, (self.step, value)], key=lambda one: sign * one[1])[: self.wanted.kept]
        if ranked == self.best:
            return
        self.best = ranked
        self._write("best")
        if self.cluster.leads:
            self.checkpoints.retain("best", {*(step for step, _ in self.best), *self.protected})

    # saving and resuming

    def _snapshot(self) -> None:
        if self.step in self.settings.snapshots:
            self._write("snapshot")

    def _write(self, name: str, state: State | None = None) -> None:
        """Save the weights of this step, and with ``state`` all that a resumed run needs."""
        with self.cluster.only_leader() as leads:
            weights = gather(tensors_of(self.bare), keep=leads)
            moments = gather(self.optimizer.moments() if state else {}, keep=leads)

            def write(builder: Builder) -> None:
                if state:
                    write_state(builder, state, weights, moments)
                else:
                    write_weights(builder, weights)

            if leads:
                self.checkpoints.save(name, self.step, write, keep=KEEP_CHECKPOINTS if state else None)

    def _save(self) -> None:
        tallies = self.cluster.sum(self.learner.tallies())
        with self.cluster.only_leader():
            self.metrics.sync()
        state = State(self.step, tuple(self.best), tallies, self._circumstances(), self.metrics.written)
        self._write("checkpoint", state)
        kept = KEEP_CHECKPOINTS * self.wanted.kept
        self.protected = [*self.protected, *(step for step, _ in self.best)][-kept:]

    def _resume(self) -> None:
        artifact = self.checkpoints.newest("checkpoint")
        written = None
        if artifact is not None:
            with artifact:
                written = self._restore(artifact)
        with self.cluster.only_leader() as leads:
            if leads:  # later steps are repeated, so their metrics and checkpoints go
                self.last = self.metrics.restore(self.step, written)
                for name in NAMES:
                    self.checkpoints.forget_after(name, self.step if artifact is not None else -1)
        self.protected = self.checkpoints.steps("best")

    def _restore(self, artifact: Artifact) -> Beginning | None:
        """Continue from a checkpoint; gives the log of metrics that belongs to it.

        Raises:
            ArtifactDamaged: it is no checkpoint of this run.
        """
        state = read_state(artifact, self.bare, self.optimizer)
        self.step, self.best = state.step, list(state.best)
        if not self.cluster.leads:
            return None
        self.learner.restore(state.tallies)
        before, now = state.circumstances, self._circumstances()
        changed = [
            f"{key} was {before.get(key, 'none')}, is {now.get(key, 'none')}"
            for key in {**before, **now}
            if before.get(key) != now.get(key)
        ]
        if changed:
            log.warning("continuing with the same order of examples, but not bit-equal: %s", ", ".join(changed))
        log.info("continuing after step %d of %d", self.step, self.settings.steps)
        return state.log

    def _trackers(self) -> Trackers:
        """The trackers of the run; only the leading process has any."""
        with self.cluster.only_leader() as leads:
            if leads:
                return Trackers.start(self.settings.report_to, self.tracker_folder)
        return Trackers()
