"""How long a training step of finished runs takes: measured now, one run after the other, never two at once."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from guidance.errors import InputError
from pipelines.progress import Progress, log
from pipelines.stages import pretrain
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.run_inputs import PlanText

WARM_UP, ROUNDS, STEPS = 3, 7, 3
"""Steps that are not counted; rounds, in each of which all runs take their turn; steps of a turn."""


def step_seconds(
    references: Sequence[str], store: Store, *, device: str = "auto", progress: Progress | None = None
) -> dict[str, float]:
    """The median seconds of a step of each run, by its reference.

    The runs start anew with the batches of their first steps.  They alternate in a random order, so that a machine that
    becomes slower does so for all of them.

    Raises:
        InputError: a run has not finished, was made by another command than ``guide pretrain``, started from files, or its
            data are gone.
    """
    from guidance.plan import Plan
    from pipelines.training.cluster import Cluster
    from pipelines.training.loop import step_timer
    from pipelines.training.preparation import Prepared

    names, order = list(dict.fromkeys(references)), random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in names}
    total = len(names) * (WARM_UP + ROUNDS * STEPS)
    with ExitStack() as opened, (progress or Progress()).task("timing", total=total, unit="steps") as bar:
        step: dict[str, Callable[[], float]] = {}
        for name in names:
            model = opened.enter_context(store.load(name, kind="model", verify=False))
            config, inputs = _read(model, store)
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            cluster = Cluster(device, config.precision)
            if any(guide.fades for guide in Plan.parse(inputs["plan"].text).guides):
                log.warning("%s: its guides fade, and its steps are timed before they do", name)
            prepared = Prepared.of(config, inputs)
            step[name] = step_timer(prepared, cluster, folder)
        turns = [name for name in names for _ in range(WARM_UP)]
        turns += [name for _ in range(ROUNDS) for name in order.sample(names, len(names)) for _ in range(STEPS)]
        for name in turns:
            taken[name].append(step[name]())
            bar.advance(1)
    return {name: statistics.median(seconds[WARM_UP:]) for name, seconds in taken.items()}


def _read(model: Artifact, store: Store) -> tuple[Any, dict[str, Any]]:
    """The settings and the inputs of a finished run."""
    if model.manifest.get("stage") != pretrain.STAGE.name:
        raise InputError(f"{model.reference} was not made by guide pretrain, so its steps cannot be timed")
    known = {name: value for name, value in model.manifest["config"].items() if name in pretrain.Config.model_fields}
    config = pretrain.Config.model_validate(known)
    if config.steps is None or config.steps < WARM_UP + ROUNDS * STEPS:
        config = config.model_copy(update={"steps": WARM_UP + ROUNDS * STEPS, "epochs": None})
    inputs: dict[str, Any] = {}
    for role, source in model.manifest["inputs"].items():
        if role == "plan":
            continue
        if "recipe" not in source:
            raise InputError(f"{model.reference} was made from files ({role}), so its steps cannot be timed")
        inputs[role] = store.load_input(model, role)
    return config, inputs | {"plan": PlanText(model.read("plan.toml").decode())}
