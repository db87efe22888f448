"""What the training stages share: check the inputs, train in all processes, and write a model artifact.

A training stage reads sequences@1 and writes model@1: ``config.json``, ``model.safetensors`` (the last step), tokenizer,
``plan.toml``, ``metrics.jsonl`` and ``metrics.parquet`` (one row a step), ``README.md`` (the model card), ``best/`` (the
weights of the best validation) and ``snapshots/step-N/`` (``--snapshots``).
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from guidance.errors import InputError, Interrupted
from pipelines.engine.declaration import Opening, Option, Stage
from pipelines.engine.stage import C, Files, Options, Result, Run, recipe_of, run_stage
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import DryArtifact, DryStore, where_known
from pipelines.storage.files import machine_errors, remove_tree
from pipelines.training import resuming
from pipelines.training.learner import folder_of
from pipelines.training.packages import family_owner, packages_input
from pipelines.training.plan_inputs import check_needs, inputs_of, model_input
from pipelines.training.processes import Announcement, follow
from pipelines.training.run_inputs import PlanText, check_corpora, load_tables

if TYPE_CHECKING:
    from guidance.plan import Plan


RUN_OPTIONS = {
    "resume": Option("The unfinished run to continue, model/ID; a setting that differs is an error."),
    "allow_change": Option("A setting that may differ from that of --resume (repeatable).", many=True),
}


def add_inputs(opening: Opening[Any], plan: Plan) -> None:
    """Add what the settings of a training name, checked against its sequences.

    Raises:
        InputError: data, plan and model do not fit each other.
    """
    config, inputs, store = opening.config, opening.inputs, opening.store
    corpora = inputs_of("sequences", inputs)
    with where_known():
        check_corpora(config, corpora)
    inputs |= {"plan": PlanText(plan.dumps()), **load_tables(config, plan, corpora, store)}
    owners = set(plan.packages.values())
    check_needs(plan, config.plan_name, inputs)
    if config.init:
        inputs["init"] = model_input(config.init, store)
        with where_known():
            owners |= family_owner(folder_of(inputs["init"]))
    if vectors := getattr(config, "vectors", ""):
        inputs["vectors"] = Files.of([Path(vectors)], [Path(vectors).name])
    if other := getattr(config, "embeddings_from", ""):
        inputs["embeddings"] = model_input(other, store)
    inputs |= packages_input(owners)


@dataclass(frozen=True)
class Training(Stage[C, Result | None]):
    """A stage that trains a model.  Under ``torchrun`` every process runs it; all but the first get None."""

    def steps_of(self, config: C) -> int | None:
        settings: Any = config
        return settings.steps if settings.epochs is None else None

    def execute(self, opening: Opening[C], **options: Unpack[Options]) -> Result | None:
        """Train.

        Raises:
            InputError: a setting differs from the run to resume.
            NumericalError: see `pipelines.training.loop.train`.
            Interrupted: the run was stopped; the same call continues it.
        """
        config, inputs, store = opening.config, opening.inputs, opening.store
        force, resume, begun = options.get("force", False), opening.own.get("resume"), None
        if resume and force:
            raise InputError("--resume continues a run, but --force starts again", hint="leave one of them out")
        if resume:
            config, begun = resuming.resumed(self, resume, opening.own.get("allow_change") or (), config, inputs, store)
        is_first = int(os.environ.get("RANK", "0")) == 0
        if isinstance(store, DryStore):
            return _dry_run(self, config, inputs, store, **options) if is_first else None
        recipe = recipe_of(self, config, inputs)
        partial = store.partial(self.kind, recipe)
        if not is_first:
            follow(config, inputs, partial)
            return None
        announcement = Announcement(config)
        build_it = functools.partial(build, announcement=announcement, from_scratch=force, begun=begun)
        try:
            result = run_stage(replace(self, build=build_it), config, inputs, store=store, **options)
        except Interrupted as error:
            if force:
                error.hint = "the same command without --force continues it"
            raise
        finally:
            announcement.send(go=False)
        store.forget_unfinished(self.kind, recipe)
        return result


def _dry_run(
    stage: Training[Any], config: Any, inputs: dict[str, Any], store: DryStore, **options: Unpack[Options]
) -> Result:
    """Check model, plan and data against each other as a training does before its first step.  Raises InputError if they do not
    fit, and NotYet if an input does not exist yet."""
    result = run_stage(stage, config, inputs, store=store, **options)
    if result.reused:
        return result
    from pipelines.training.rehearsal import rehearse

    recipe = result.artifact.recipe
    unfinished = None if options.get("force") else store.partial(stage.kind, recipe)
    steps, seconds = rehearse(config, inputs, unfinished)
    return replace(result, artifact=DryArtifact(stage.kind, recipe, steps=steps, seconds=seconds))


def build(
    run: Run[Any],
    announcement: Announcement | None = None,
    from_scratch: bool = False,
    begun: tuple[Artifact, Path] | None = None,
) -> None:
    """Train, then write the model folder.  The caller holds the lock of the recipe, and so of its unfinished work.

    Args:
        announcement: what the other processes wait for.
        from_scratch: drop the unfinished work of an earlier run.
        begun: the checkpoint to start from, and the unfinished run that it belongs to.
    """
    from pipelines.training import model_card, model_folder
    from pipelines.training.cluster import Cluster
    from pipelines.training.loop import train
    from pipelines.training.metrics_log import MetricsLog
    from pipelines.training.preparation import Prepared
    from pipelines.training.report import is_above

    try:
        cluster = Cluster(run.config.device, run.config.precision)
    except BaseException:
        if announcement:
            announcement.sent = True  # the other processes fail in the same way
        raise
    prepared = Prepared.of(run.config, run.inputs)  # refuses bad inputs before anything is written
    if from_scratch:
        remove_tree(run.partial)
    with machine_errors(f"cannot write to {run.partial}"):
        run.partial.mkdir(parents=True, exist_ok=True)
    if begun:
        resuming.seed_partial(*begun, run.partial)
    resuming.note(run.partial, run.config, run.inputs)
    run.warn(*prepared.warnings(run.config, run.inputs))
    if announcement:
        announcement.send(go=True, cluster=cluster)
    run.out.seconds_before = MetricsLog(run.partial).seconds()
    outcome = train(prepared, cluster, run.partial, run.progress)
    floor = prepared.learner.floor
    if floor is not None and is_above(outcome.last, floor):
        run.warn(
            f"the validation loss is no lower than what word frequencies alone give ({floor:.3f}): the model has learned nothing"
            " from context yet"
        )
    model_folder.write_model(run, prepared, outcome)
    if floor is not None:
        run.out.counts["unigram_floor"] = floor
    card = model_card.card(run, prepared.plan, outcome, prepared.learner.folders())
    run.out.write("README.md", card.encode())
