"""From the settings and inputs of a run to what the loop trains, checked before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError, counted
from guidance.plan import Plan
from guidance.sites import is_added
from pipelines.storage.artifacts import Artifact
from pipelines.training.batches import Examples
from pipelines.training.config import TrainingConfig
from pipelines.training.learner import Setup
from pipelines.training.learners.guided import Learner
from pipelines.training.memory import checkpoint_activations
from pipelines.training.models import WORD_MODELS, dimensions, read_tokenizer
from pipelines.training.order import BLOCK, AnyOrder, LengthOrder, MixedOrder, Order
from pipelines.training.plan_inputs import features, inputs_of, read_tables

if TYPE_CHECKING:
    import numpy as np
    from torch import nn


@dataclass
class Prepared:
    """The plan of a run, its learner, the order of its examples, and its settings with the number of steps."""

    plan: Plan
    learner: Learner
    order: AnyOrder
    settings: TrainingConfig

    @classmethod
    def of(cls, config: Any, inputs: Mapping[str, Any]) -> Prepared:
        """Raises InputError when data, plan, model and settings do not fit each other."""
        _check(config, inputs)
        objective, corpora = config.row, inputs_of("sequences", inputs)
        tokenizer = read_tokenizer(corpora[0], masked=objective.needs_mask_token, padded=objective.needs_pad_token)
        plan = Plan.parse(inputs["plan"].text)
        train_split, valid = (
            Examples.read_all(
                corpora,
                split,
                len(tokenizer),
                features=features(plan),
                masks=inputs_of("masks", inputs),
                own=objective.columns,
                limit=config.valid_sequences if split == "valid" else 0,
            )
            for split in ("train", "valid")
        )
        tables, init = read_tables(inputs, config.totals), inputs.get("init")
        learner = objective.prepare(
            Setup(
                config,
                plan,
                corpora[0],
                tokenizer,
                train_split,
                valid,
                tables,
                init,
                corpora,
                vectors=inputs["vectors"].paths[0] if "vectors" in inputs else None,
                embeddings=inputs.get("embeddings"),
            )
        )
        if config.gradient_checkpointing:
            checkpoint_activations(folder.model for folder in learner.folders())
        rows = [data.files["train.parquet"]["rows"] for data in corpora]
        order = order_of(config, learner.lengths, learner.sizes or rows)
        steps = config.steps if config.epochs is None else order.steps(config.epochs)
        from pipelines.training.optimization import hidden_matrices

        if config.optimizer == "muon" and not hidden_matrices(learner.model):
            raise InputError(
                "--optimizer muon: the model has no matrices between its embeddings and its head", hint="leave it out"
            )
        outside = [step for step in config.snapshots if not 0 <= step <= steps]
        if outside:
            raise InputError(f"--snapshots {outside[0]}: the run has {steps} steps")
        return cls(plan, learner, order, config.with_steps(steps, order.steps(1)))

    def warnings(self, config: Any, inputs: Mapping[str, Any]) -> list[str]:
        """What to tell the user about settings and data that do less than they seem to."""
        return [
            *_too_few_examples(self.order, inputs_of("sequences", inputs)),
            *_without_effect(config, self.settings.steps),
            *_short_masking_run(inputs.get("masking"), self.settings.steps),
            *_nothing_added(config, self.learner.model),
        ]


def _check(config: Any, inputs: Mapping[str, Any]) -> None:
    """Raises InputError when the sizes of the model do not fit each other, or sequences have no training split."""
    _, hidden, heads, _ = dimensions(config)
    if not config.init and config.architecture not in WORD_MODELS and hidden % heads:
        raise InputError(f"the width {hidden} is not divisible by {heads} heads", hint="--hidden or --heads")
    for data in inputs_of("sequences", inputs):
        if not data.files.get("train.parquet", {}).get("rows"):
            raise InputError(f"{data.reference} has no training sequences")


def order_of(config: Any, lengths: np.ndarray, sizes: Sequence[int]) -> AnyOrder:
    """The order of examples with these lengths, from artifacts of these sizes."""
    if config.batch_tokens:
        return LengthOrder(lengths, config.seed, batch_tokens=config.batch_tokens)
    if config.bucket:
        return LengthOrder(lengths, config.seed, batch_size=config.batch_size)
    if config.sampling:
        return MixedOrder(sizes, config.sampling, config.batch_size, config.seed)
    return Order(len(lengths), config.batch_size, config.seed)


def _nothing_added(config: Any, model: nn.Module) -> list[str]:
    """A warning for a learning rate of weights that no plan has added."""
    if config.added_learning_rate is None or any(is_added(name) for name, _ in model.named_parameters()):
        return []
    return ["--added-learning-rate has no effect: the plan adds no weights to the model"]


def _too_few_examples(order: AnyOrder, corpora: Sequence[Artifact]) -> list[str]:
    """A warning for data with fewer examples than they have places in a batch."""
    if isinstance(order, MixedOrder):
        places = [order.batch_size * quota / BLOCK for quota in order.quotas]
        demands = list(zip((data.reference for data in corpora), order.sizes, places, strict=True))
    elif isinstance(order, Order):
        demands = [(" and ".join(data.reference for data in corpora), order.num_examples, order.batch_size)]
    else:
        return []  # its batches never span two epochs, so none repeats an example
    return [
        f"{reference}: {counted(size, 'training example')} for {place:g} places in every batch, so a batch repeats examples"
        for reference, size, place in demands
        if size < place
    ]


def _short_masking_run(followed: Artifact | None, steps: int) -> list[str]:
    """A warning if the masking run has fewer steps than this run."""
    last = followed.files["metrics.parquet"].get("rows", steps) if followed else steps
    if not followed or last >= steps:
        return []
    return [f"{followed.reference} ends at step {last}: later steps use its masking proportions of that step"]


def _without_effect(config: Any, steps: int) -> list[str]:
    """A warning for every setting that has no effect beside the others."""
    found, fields = [], type(config).model_fields
    shape = ("architecture", "size", "layers", "hidden", "heads", "ffn")
    if config.init and (given := [name for name in shape if getattr(config, name) != fields[name].default]):
        found.append(f"--{', --'.join(given)}: no effect, because the model of --init has its own shape")
    if config.totals != "pairs" and not config.cooccur:
        found.append("--totals: no effect without --cooccur")
    if config.warmup_steps >= steps:
        found.append(f"warm-up takes {config.warmup_steps} of {steps} steps: the learning rate never reaches its peak")
    return found
