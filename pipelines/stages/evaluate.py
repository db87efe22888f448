"""Stage ``evaluate``: how good a trained model is at its task.

Reads model@1, sequences@1, and where the evaluation needs it the corpus of these sequences, or their n-gram floors.  Writes
evaluation@1: ``metrics.json`` and ``predictions.parquet`` (one row for each example, in the order of the sequences).  The
first objective whose ``evaluation`` is for the model measures it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from pydantic import Field

from guidance.errors import InputError
from pipelines import task_inputs
from pipelines.engine import stage
from pipelines.engine.stage import Options, Result, Run, Stage, check_working_folder, knob, run_stage
from pipelines.inputs import is_dataset
from pipelines.progress import log
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.evaluations import EVALUATIONS, EvaluationConfig, evaluation_of
from pipelines.training.learner import folder_of
from pipelines.training.objective import Evaluation
from pipelines.training.plan_inputs import check_needs, load_inputs, model_inputs, read_tables
from pipelines.training.tasks import TASKS

__all__ = ["STAGE", "Config", "run"]


class SharedConfig(stage.Config):
    """Settings of every evaluation."""

    split: Literal["train", "valid", "test"] = Field("test", description="Which split of the sequences.")
    weights: str = Field(
        "last",
        pattern=r"^(last|best(-[2-9]|-[1-9][0-9])?)$",
        description="The weights of the last step, or those of the best validation; best-2 takes the second best one of "
        "`guide finetune --keep-best`.",
    )
    limit: int = Field(0, ge=0, description="Maximum number of examples; 0 for all.")
    sequence_length: int = knob(
        0, "For a dataset: longest sequence, in tokens; by default that of the model's own sequences, or 128.", ge=0
    )
    parser: str = knob("", "For a dataset: the parser, for plans that read syntax, as in `guide build-deps --parser`.")
    masks: str = knob("", "What `guide build-masks` made of the sequences, for plans that read words, idf or trees.")
    scores: str = knob("", "A JSON, CSV or Parquet file with scores of heads, for plans that choose heads by score.")
    batch_size: int = knob(32, "Examples per batch.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "Where to compute; auto takes a GPU if there is one.")


class Config(EvaluationConfig, SharedConfig):
    """Settings of an evaluation; those of a single task are in the row of its objective."""

    if TYPE_CHECKING:
        floors: bool = True

    def recipe(self) -> dict[str, Any]:
        """The settings that decide the result; what was added to the first ones counts where it is not the default."""
        fields = type(self).model_fields
        found = super().recipe()
        return {name: value for name, value in found.items() if name in _FIRST or value != fields[name].default}


_FIRST = {"split", "weights", "limit", "beams", "length_penalty", "max_length", "bleu_tokenizer"}
"""Settings that stand in all recipes, because recipes have always had them."""


def run(model: str, data: str, config: Config, *, store: Store, **options: Unpack[Options]) -> Result:
    """Evaluate a model on a split of some sequences, or of a dataset.

    Args:
        model: a reference, or a model folder.
        data: reference of sequences whose corpus is still in the store, or of a dataset; of a dataset sequences are made with
            the tokenizer of the model, and the masks that its plan needs.

    Raises:
        InputError: no objective can measure this model; the split is empty; or model and sequences do not fit each other.
        NumericalError: a likelihood is not finite.
    """
    check_working_folder()
    with contextlib.ExitStack() as stack:
        inputs = model_inputs(model, store)
        given = stack.enter_context(store.load(data))
        if given.kind == "corpus" and is_dataset(given):
            folder, progress = folder_of(inputs["model"]), options.get("progress")
            sequences, config = task_inputs.read_by(model, folder, given, config, store, progress)
        else:
            sequences = store.load(data, kind="sequences")
        stack.enter_context(sequences)
        evaluation = evaluation_of(folder_of(inputs["model"]), sequences)
        _check_settings(evaluation, config)
        inputs["sequences"] = sequences
        if evaluation.needs_corpus:
            inputs["corpus"] = stack.enter_context(store.load_input(sequences, "corpus"))
        is_task = evaluation.task in TASKS
        if is_task and (trained_on := task_inputs.training_data(inputs["model"], store)) is not None:
            inputs["trained_on"] = stack.enter_context(trained_on)
        inputs |= load_inputs(config, [sequences], store)
        task_inputs.check_split(sequences, config.split)
        if evaluation.floors and config.floors:
            if _rows(sequences, "train"):
                inputs["floors"] = _floors(evaluation, config, inputs, store, options)
            else:
                log.warning("%s has no training text to count, so there are no n-gram floors", sequences.reference)
        return run_stage(_OF_TASKS if is_task else STAGE, config, inputs, store=store, **options)


def _check_settings(evaluation: Evaluation, config: Any) -> None:
    """Raises InputError when a setting of another evaluation was changed."""
    own = {name for group in evaluation.settings for name in group.model_fields}
    for other in EVALUATIONS:
        for name, field in ((name, field) for group in other.settings for name, field in group.model_fields.items()):
            if name not in own and getattr(config, name) != field.default:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"{flag} is for {other.task}, and this model is measured as {evaluation.task}")


def _rows(data: Artifact, split: str) -> int:
    """How many sequences a split has."""
    return int(data.files.get(f"{split}.parquet", {}).get("rows") or 0)


def _floors(evaluation: Evaluation, config: Any, inputs: Mapping[str, Any], store: Store, options: Options) -> Artifact:
    """The n-gram floors of the tokens that will be predicted."""
    from pipelines.stages import floors
    from pipelines.training.learners.masked_scores import probability

    settings = floors.Config(
        split=config.split,
        layout=evaluation.floors,
        seed=config.mask_seed,
        mask_probability=probability(config, inputs["model"]),
        limit=config.limit,
    )
    wait, progress = options.get("wait", True), options.get("progress")
    return floors.run(inputs["sequences"].reference, settings, store=store, wait=wait, progress=progress).artifact


def build(run: Run) -> None:
    """The stage itself; see `run`."""
    from guidance.checkpoint import CONFIG_FILE, find_plan
    from guidance.plan import Plan
    from pipelines.training.opening import open_trained

    given = run.inputs["model"]
    folder = folder_of(given)
    if (weights := run.config.weights) != "last":
        if not (isinstance(given, Artifact) and f"{weights}/{CONFIG_FILE}" in given.files):
            raise no_weights(folder, weights)
        folder = folder / weights
    evaluation = evaluation_of(folder, run.inputs["sequences"])
    check_needs(find_plan(folder) or Plan(), str(folder), run.inputs, training=False)
    model, handle = open_trained(folder, read_tables(run.inputs), run.config.device, evaluation.auto_class)
    evaluation.run(run, folder, model, handle)


def no_weights(folder: Path, weights: str) -> InputError:
    """The error for a model without the best weights that were asked for."""
    if (folder / weights / "config.json").is_file():
        return InputError(
            f"{folder}: a folder that no run of this store wrote; {weights} in it is a model of its own",
            hint=f"give {folder / weights} as the model, with --weights last",
        )
    if weights == "best":
        return InputError(f"{folder}: has no best model, because there was no validation", hint="--weights last")
    return InputError(
        f"{folder}: has no {weights} weights", hint="guide finetune --keep-best keeps more than the best ones"
    )


STAGE = Stage("evaluate", "evaluation", 1, Config, build)
_OF_TASKS = replace(STAGE, version=2)
"""Since version 2 evaluations of tasks count examples that were trained on, and correlations may be undefined."""
