"""Stage ``pretrain``: from sequences and a plan to a model folder that Hugging Face tools open.

Reads sequences@1.  Writes model@1: ``config.json``, ``model.safetensors`` (the last step), tokenizer, ``plan.toml``,
``metrics.jsonl`` and ``metrics.parquet`` (one row a step), ``README.md`` (the model card), ``best/`` (the weights of the
lowest validation loss) and ``snapshots/step-N/`` (``--snapshots``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import Field, field_validator, model_validator

from guidance.errors import InputError, Interrupted, PlanError
from pipelines.engine.stage import (
    Options,
    Result,
    Run,
    Stage,
    check_working_folder,
    internal,
    knob,
    recipe_of,
    run_stage,
)
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import machine_errors, remove_tree
from pipelines.storage.store import Store
from pipelines.training import resuming
from pipelines.training.models import ModelConfig
from pipelines.training.objectives import DEFAULT, OBJECTIVES, ObjectiveConfig, check_settings, is_in_recipe
from pipelines.training.plan_inputs import check_needs, model_input, roles
from pipelines.training.processes import Announcement, follow, train
from pipelines.training.run_inputs import PlanText, check_corpora, load_tables


class Config(ModelConfig, ObjectiveConfig):
    """Settings of a pre-training run; those of a single objective are in its row of `OBJECTIVES`."""

    if TYPE_CHECKING:
        objective: str = DEFAULT

    steps: int = Field(1000, ge=1, description="Optimizer steps.")
    epochs: float | None = Field(None, gt=0, description="Passes over the training sequences, instead of --steps.")
    batch_size: int = Field(32, ge=1, description="Sequences per step, over all processes and micro-batches.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["linear", "cosine", "constant", "inverse-sqrt"] = Field(
        "linear", description="How the learning rate falls after warm-up; inverse-sqrt as 1 / √step."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from zero.")
    weight_decay: float = Field(
        0.01, ge=0, description="Decoupled weight decay of matrices; biases and norms do not decay."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Epsilon of AdamW.")
    clip: float = Field(
        1.0, ge=0, description="Largest norm of the gradient; adversaries are clipped separately; 0 does not clip."
    )
    batch_tokens: int = Field(
        0, ge=0, description="Tokens per step, padding included, instead of --batch-size; batches have similar lengths."
    )
    bucket: bool = Field(False, description="Make batches of --batch-size from sequences of similar length.")
    sampling: list[Annotated[float, Field(gt=0)]] = Field(
        [],
        description="The share of each of several sequences in the batches, counted in rows and given in their order "
        "(repeatable: --sampling 0.8 --sampling 0.2); by default each has as much as it has rows.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of weights, order, masking and dropout.")
    precision: Literal["auto", "fp32", "bf16", "fp64"] = Field(
        "auto", description="Arithmetic; auto is bf16 autocast on GPUs that support it, else fp32."
    )
    evaluate_every: int = Field(500, ge=1, description="Steps between validations; the last step is always validated.")
    valid_sequences: int = Field(512, ge=0, description="At most so many validation sequences; 0 for all.")
    snapshots: list[int] = Field([], description="A step whose weights are kept in the artifact (repeatable).")
    continued_from: str = internal("The run that this one continues with other settings (--resume, --allow-change).")
    plan: str = knob("", "Plan of guides: a preset, such as preset:ag, or a TOML file.")
    masks: list[str] = knob(
        [],
        "What `guide build-masks` made of the sequences, for plans that read words, idf or trees; for several sequences, "
        "one each, in their order (repeatable).",
    )
    cooccur: str = knob("", "What `guide build-cooccur` counted with the same tokenizer, for plans with `conflict`.")
    totals: Literal["pairs", "tokens"] = Field(
        "pairs", description="What the counts of --cooccur are divided by: the pairs of a token, or its occurrences."
    )
    masking: str = Field(
        "",
        description="A finished run with an adversary, for plans with `random_mask` of kind `scheduled`, which follows the "
        "masking proportions of that run.",
        json_schema_extra={"knob": True, "flag": "masking-run"},
    )
    scores: str = knob("", "A JSON, CSV or Parquet file with scores of heads, for plans that choose heads by score.")
    init: str = knob("", "Model folder or artifact to start from.")
    micro_batches: int = knob(1, "Parts into which each process splits its share of a batch, to save memory.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "Where to train; auto takes a GPU if there is one.")
    save_every: int = knob(500, "Steps between checkpoints, from which an interrupted run continues.", ge=1)
    gradient_checkpointing: bool = knob(
        False, "Recompute activations in the backward pass: less memory, a third more time."
    )
    compile: bool = knob(
        False,
        "Compile the model (torch.compile), which takes minutes; whether steps get faster depends on the machine.",
    )
    max_time: float | None = knob(
        None, "Minutes after which to save and stop; the same command continues the run.", gt=0
    )
    report_to: list[str] = knob(
        [], "An experiment tracker, such as tensorboard or wandb; its files go to STORE/trackers (repeatable)."
    )

    @field_validator("masks", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        return ([value] if value else []) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Config:
        check_settings(self)
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(
                "--steps and --epochs both say how long to train: give one of them (the other may stand in guide.toml, or in "
                "GUIDE_STEPS or GUIDE_EPOCHS)"
            )
        if self.schedule == "inverse-sqrt" and not self.warmup_steps:
            raise ValueError("--schedule inverse-sqrt falls from the end of warm-up: it needs --warmup-steps")
        if self.batch_tokens and self.bucket:
            raise ValueError("--batch-tokens already makes batches of similar lengths: leave --bucket out")
        if self.sampling and (self.batch_tokens or self.bucket):
            raise ValueError("--sampling does not work with --batch-tokens or --bucket")
        return self

    def recipe(self) -> dict[str, Any]:
        """The settings that decide the result, without those of other objectives; see `is_in_recipe`."""
        return {name: value for name, value in super().recipe().items() if is_in_recipe(name, self.objective)}


def run(
    sequences: str | Sequence[str],
    config: Config,
    *,
    store: Store,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
    **options: Unpack[Options],
) -> Result | None:
    """Pre-train a model.  Under ``torchrun`` every process calls this; all but the first get None.

    Args:
        sequences: reference of a sequences artifact, or of several; the model is trained on all of them.
        resume: the unfinished run to continue, ``model/<id>``; a setting that differs is an error.
        allow_change: settings that may differ from those of ``resume``.

    Raises:
        InputError: a setting differs from the run to resume; or data, plan and model do not fit each other.
        NumericalError: see `pipelines.training.loop.train`.
        Interrupted: the run was stopped; the same call continues it.
    """
    check_working_folder()
    force = options.get("force", False)
    if resume and force:
        raise InputError("--resume continues a run, but --force starts again", hint="leave one of them out")
    references = [sequences] if isinstance(sequences, str) else sequences
    for reference in (*references, *config.masks, config.cooccur, config.masking):
        if reference:
            store.find(reference)  # report a missing artifact before torch is imported, which takes seconds

    from guidance.plan import Plan

    plan = Plan.load(config.plan) if config.plan else Plan()
    if config.plan:
        if not plan.guides and plan.pal is None:
            raise PlanError(f"{config.plan}: the plan has no guides", hint="leave --plan out to train without guides")
        OBJECTIVES[config.objective].check_plan(plan, config, config.plan)
    with ExitStack() as opened:
        corpora = [opened.enter_context(store.load(reference, kind="sequences")) for reference in references]
        check_corpora(config, corpora)
        inputs: dict[str, Any] = dict(zip(roles("sequences", len(corpora)), corpora, strict=True))
        inputs |= {"plan": PlanText(plan.dumps()), **load_tables(config, plan, corpora, store)}
        if config.plan:
            check_needs(plan, config.plan, inputs)
        if config.init:
            inputs["init"] = model_input(config.init, store)
        begun = None
        if resume:
            config, begun = resuming.resumed(STAGE, resume, allow_change, config, inputs, store)
        recipe = recipe_of(STAGE, config, inputs)
        partial = store.partial("model", recipe)
        if int(os.environ.get("RANK", "0")) > 0:
            follow(config, inputs, partial)
            return None
        announcement = Announcement(config)
        build_it = functools.partial(build, announcement=announcement, from_scratch=force, begun=begun)
        try:
            result = run_stage(replace(STAGE, build=build_it), config, inputs, store=store, **options)
        except Interrupted as error:
            if force:
                error.hint = "the same command without --force continues it"
            raise
        finally:
            announcement.send(go=False)
        store.forget_unfinished(STAGE.kind, recipe)
        return result


def build(
    run: Run,
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
    from pipelines.training.preparation import Prepared

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
    outcome = train(run.config, prepared, cluster, run.partial, run.progress)
    model_folder.write_model(run, prepared, outcome)
    card = model_card.card(run, prepared.plan, outcome, prepared.learner.folders())
    run.out.write("README.md", card.encode())


STAGE = Stage("pretrain", "model", 3, Config, build)
