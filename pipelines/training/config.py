"""The settings that all training shares, pre-training and fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from pipelines.engine.stage import internal, knob
from pipelines.training.models import ModelConfig


@dataclass(frozen=True)
class Best:
    """Which validations of a run are the best, and what follows from that.

    Attributes:
        select: the metric of a scorer that decides, the higher the better; "" for the first validation loss.
        patience: how many validations in a row may be no better before training ends; 0 for any number.
        kept: the number of best validations whose weights are kept.
    """

    select: str = ""
    patience: int = 0
    kept: int = 1


MODEL, NONE = "model", "none"
"""What ``--plan`` takes besides presets, files and findings: the plan of the model of ``--init``, and no plan."""


def is_text(name: str) -> bool:
    """Whether a plan is given as TOML text, as `guide search` does for rows that it varies, and not as a name."""
    return "\n" in name


class TrainingConfig(ModelConfig):
    """Settings of a training run; those of a single objective or task are in its row."""

    later: ClassVar[Set[str]] = frozenset({"optimizer", "added_learning_rate"})

    steps: int = Field(1000, ge=1, description="Optimizer steps.")
    epochs: float | None = Field(None, gt=0, description="Passes over the training sequences, instead of --steps.")
    batch_size: int = Field(32, ge=1, description="Sequences per step, over all processes and micro-batches.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw; or muon, which updates the matrices between embeddings and head by orthogonal steps, of the size of "
        "AdamW's, and all other weights by AdamW.",
    )
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    added_learning_rate: float | None = Field(
        None,
        gt=0,
        description="Peak learning rate of the weights that the plan adds to the model, such as those of `mix` and `gate`, which are new "
        "even where a model of --init is not; by default --learning-rate.",
    )
    schedule: Literal["linear", "cosine", "constant", "inverse-sqrt"] = Field(
        "linear", description="Course of the learning rate after warm-up; inverse-sqrt as 1 / √step."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from zero.")
    weight_decay: float = Field(
        0.01, ge=0, description="Decoupled weight decay of matrices; biases, norms and gates do not decay."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Epsilon of AdamW.")
    clip: float = Field(
        1.0, ge=0, description="Largest norm of the gradient; adversaries are clipped separately; 0 does not clip."
    )
    batch_tokens: int = Field(
        0, ge=0, description="Tokens per step, padding included, in batches of similar lengths; 0 uses --batch-size."
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
    valid_sequences: int = Field(512, ge=0, description="Maximum number of validation sequences; 0 for all.")
    snapshots: list[int] = Field([], description="A step whose weights are kept in the artifact (repeatable).")
    continued_from: str = internal("The run that this one continues with other settings (--resume, --allow-change).")
    plan: list[str] = knob(
        [],
        "Plan of guides: a preset, such as preset:neighbours, a TOML file, or findings of `guide discover accept` (repeatable: their rows act together).  By default "
        "what shapes the model of --init: `model` names that, `none` leaves it out.",
    )
    masks: list[str] = knob(
        [],
        "Artifact that `guide build-masks` made of the sequences, for plans that read words, idf or trees; for several sequences, "
        "one each, in their order (repeatable).",
    )
    cooccur: str = knob(
        "", "Artifact that `guide build-cooccur` counted with the same tokenizer, for plans with `conflict`."
    )
    totals: Literal["pairs", "tokens"] = Field(
        "pairs", description="Divisor of the counts of --cooccur: the pairs of a token, or its occurrences."
    )
    masking: str = Field(
        "",
        description="A finished run with an adversary, for plans with `random_mask` of kind `scheduled`, which follows the "
        "masking proportions of that run.",
        json_schema_extra={"knob": True, "flag": "masking-run"},
    )
    scores: str = knob(
        "",
        "JSON, CSV or Parquet file with columns layer, head and score, such as heads.parquet of `guide probe importance`, for "
        "plans that choose heads by score.",
    )
    init: str = knob("", "Model folder or artifact to start from.")
    micro_batches: int = knob(1, "Parts into which each process splits its share of a batch, to save memory.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "Device to train on; auto takes a GPU if there is one.")
    save_every: int = knob(500, "Steps between checkpoints, from which an interrupted run continues.", ge=1)
    parallel: Literal["ddp", "fsdp"] = knob(
        "ddp",
        "Way to share a model among the processes of torchrun: with ddp each holds all of it; with fsdp a part of its weights, gradients "
        "and moments, and the layer that it computes, which takes less memory and more communication.",
    )
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

    @field_validator("masks", "plan", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        return ([value] if value else []) if isinstance(value, str) else value

    @field_serializer("plan")
    def _as_before(self, value: Any) -> Any:
        """Manifests held one name before there could be several."""
        return value if isinstance(value, str) or len(value) > 1 else "".join(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.epochs is not None and {"steps", "epochs"} <= self.model_fields_set:
            raise ValueError(
                "--steps and --epochs both say how long to train: give one of them (the other may stand in guide.toml, or in "
                "GUIDE_STEPS or GUIDE_EPOCHS)"
            )
        if self.schedule == "inverse-sqrt" and not self.warms_up:
            raise ValueError("--schedule inverse-sqrt falls from the end of warm-up: it needs --warmup-steps")
        if self.batch_tokens and self.bucket:
            raise ValueError("--batch-tokens already makes batches of similar lengths: leave --bucket out")
        if self.sampling and (self.batch_tokens or self.bucket):
            raise ValueError("--sampling does not work with --batch-tokens or --bucket")
        return self

    def with_steps(self, steps: int, steps_of_epoch: float) -> Self:
        """The settings of a run of so many steps.

        Args:
            steps_of_epoch: the steps of one pass over the training sequences.
        """
        return self.model_copy(update={"steps": steps})

    @property
    def plan_name(self) -> str:
        """The name of the run's plan in messages."""
        if self.plan and self.plan != [MODEL]:
            return " and ".join(map(self.called, self.plan))
        return f"the plan of {self.init}" if self.init else "the empty plan"

    def called(self, plan: str) -> str:
        """The name of one ``--plan`` in messages."""
        return f"the plan of {self.init}" if plan == MODEL else "the plan" if is_text(plan) else plan

    @property
    def warms_up(self) -> bool:
        """Whether the learning rate rises at first."""
        return self.warmup_steps > 0

    @property
    def best(self) -> Best:
        """Which validations are the best; see `Best`."""
        return Best()

    def rate(self, step: int) -> float:
        """The learning rate of the update after ``step`` finished updates.

        Source: ``inverse-sqrt`` is Vaswani et al. 2017, equation 3.  Its peak, at the last step of warm-up, is a setting
        here; theirs is (width * warm-up steps) ** -0.5, which is 9.9e-4 for width 256 and 4000 steps.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        if self.schedule == "inverse-sqrt":
            return self.learning_rate * math.sqrt(self.warmup_steps / (step + 1))
        left = (self.steps - step) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (left if self.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)
