"""Stage ``finetune``: from the labelled examples of a dataset, and a model to start from, to a model of the task.

Reads a dataset (corpus@2 by ``build-dataset``), of which it makes sequences, and the statistics that the plan needs, as
artifacts of their own.  Writes model@1; see `pipelines.training.run`.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from guidance.errors import InputError, PlanError
from pipelines.engine.declaration import Command, Opening, Take
from pipelines.engine.stage import knob
from pipelines.progress import log
from pipelines.stages import missing
from pipelines.stages import tokenizer as tokenizers
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import NotYet
from pipelines.storage.store import Store
from pipelines.training.adversarial import AdversarialConfig
from pipelines.training.config import Best, TrainingConfig
from pipelines.training.labels import says_many_labels
from pipelines.training.learner import folder_of
from pipelines.training.models import HEADLESS, WORD_MODELS
from pipelines.training.plan_inputs import features, model_input
from pipelines.training.plans import check_files, load_plan
from pipelines.training.rows import check_settings
from pipelines.training.run import RUN_OPTIONS, Training, add_inputs, build
from pipelines.training.task import Task
from pipelines.training.tasks import OWNERS, TASKS, TaskConfig, task_for
from pipelines.training.topics import FINETUNE_TOPICS

AnyConfig = TypeVar("AnyConfig", bound="Config")


class Config(TrainingConfig, AdversarialConfig, TaskConfig):
    """Settings of a fine-tuning run; those of a single task are in its class in `TASKS`."""

    later: ClassVar[Set[str]] = TrainingConfig.later | AdversarialConfig.later

    if TYPE_CHECKING:
        task: str = "auto"
        architecture: str = "auto"

    epochs: float | None = Field(3.0, gt=0, description="Passes over the training examples, unless --steps is given.")
    steps: int = Field(
        1000, ge=1, description="Optimizer steps, instead of --epochs; without the flag, --epochs counts."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of new weights, order and dropout.")
    warmup_steps: int = Field(0, ge=0, description="Steps of warm-up; 0 warms up for --warmup-fraction.")
    batch_size: int = Field(32, ge=1, description="Examples per step, over all processes and micro-batches.")
    learning_rate: float = Field(2e-5, gt=0, description="Peak learning rate.")
    warmup_fraction: float = Field(
        0.06,
        ge=0,
        lt=1,
        description="Share of the steps over which the learning rate rises, if --warmup-steps is 0.",
    )
    evaluate_every: int = Field(0, ge=0, description="Steps between validations; 0 validates after every epoch.")
    valid_sequences: int = Field(0, ge=0, description="Maximum number of validation examples; 0 for all.")
    select: str = Field(
        "loss",
        description="Measure of the best validation, for best/ and --patience: loss, or a metric of the task such as "
        "accuracy.",
    )
    patience: int = Field(
        0, ge=0, description="Validations without improvement after which training stops; 0 trains to the last step."
    )
    keep_best: int = Field(
        1, ge=1, le=100, description="Number of best validations whose weights are kept: best/, best-2/, and so on."
    )
    max_length: int = knob(
        0, "Longest sequence, in tokens; by default that of the model's own sequences, or 128.", ge=0
    )
    tokenizer: str = knob(
        "",
        "Tokenizer of a new model; by default that of --embeddings-from, or one that is trained on the dataset. A model of --init "
        "has its own.",
    )
    random_init: bool = Field(
        False, description="Take over only the shape and the tokenizer of --init: all weights are new."
    )
    extend_positions: bool = Field(
        False,
        description="Give a model of --init with too few positions for --max-length more of them, copies of its last one.",
    )
    vectors: str = knob(
        "",
        "A file of word vectors (GloVe or word2vec as text, also .gz) for the embeddings of a new model; sets --hidden.",
    )
    embeddings_from: str = knob(
        "", "A model with the same tokenizer whose word embeddings a new model takes over; all else is new."
    )
    parser: str = knob("", "Parser for plans that read syntax, as in `guide build-deps --parser`.")

    @model_validator(mode="before")
    @classmethod
    def _steps_instead_of_epochs(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("steps") is not None and "epochs" not in given:
            return {**given, "epochs": None}
        return given

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        for name in ("vectors", "embeddings_from"):
            if self.init and getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} is for a new model, and --init has its own embeddings")
        for name in ("random_init", "extend_positions"):
            if getattr(self, name) and not self.init:
                raise ValueError(f"--{name.replace('_', '-')} is about the model of --init, and there is none")
        if self.vectors and self.embeddings_from:
            raise ValueError("--vectors and --embeddings-from exclude each other")
        if self.task != "auto":
            check_settings(self, "--task", self.task, OWNERS)
        return self

    @property
    def row(self) -> type[Task]:
        """What is known about the task."""
        return TASKS[self.task]

    def recipe(self) -> dict[str, Any]:
        """The settings that decide the result, without those of other tasks."""
        settings = super().recipe().items()
        return {name: value for name, value in settings if self.task in OWNERS.get(name, (self.task,))}

    @property
    def warms_up(self) -> bool:
        return super().warms_up or self.warmup_fraction > 0

    def with_steps(self, steps: int, steps_of_epoch: float) -> Self:
        given = {
            "steps": steps,
            "warmup_steps": self.warmup_steps
            or round(self.warmup_fraction * steps)
            or int(self.schedule == "inverse-sqrt"),
            "evaluate_every": self.evaluate_every or max(1, round(steps_of_epoch)),
        }
        return self.model_copy(update=given)

    @property
    def best(self) -> Best:
        select = "" if self.select == "loss" else f"eval/{self.task}/{self.select}"
        return Best(select, self.patience, self.keep_best)


class TaskData(Take):
    """A dataset, or its sequences; both are added, as ``dataset`` and ``sequences``."""

    def __init__(self) -> None:
        super().__init__(
            "A dataset, or sequences that were made of it with the model's tokenizer.", kinds=("sequences", "corpus")
        )

    def add(self, role: str, reference: str, opening: Opening[Any]) -> None:
        dataset, sequences = missing.open_data(reference, opening.store, opening.stack)
        opening.inputs |= {"dataset": dataset} | ({"sequences": sequences} if sequences else {})


def _prepare(opening: Opening[Config]) -> None:
    """Make what is missing: sequences, and the masks that the plan needs.  Raises InputError if no task learns from this
    dataset, and PlanError if the plan reads syntax, and there is neither a parser nor masks."""
    store, progress, dataset = opening.store, opening.progress, opening.inputs.pop("dataset")
    task = _task(opening.config, dataset, store)
    config = opening.config = resolved(opening.config, task)
    if task.shape == "segments" and config.valid_sequences:
        opening.stage = replace(opening.stage, version=2)  # version 1 scored a cut document as a whole one
    if config.plan and config.architecture in HEADLESS and not config.init:
        raise PlanError(
            f"--architecture {config.architecture} has no attention heads to guide", hint="leave --plan out"
        )
    task.family(config.architecture)
    _check_validation(config, dataset)
    if (not config.init or config.random_init) and "learning_rate" not in config.model_fields_set:
        log.warning(
            "new weights hardly change at the default rate of %g, which is for models of --init; try --learning-rate 1e-3",
            config.learning_rate,
        )
    if config.vectors and not config.hidden:
        from pipelines.training.embeddings import vector_width

        opening.change(hidden=vector_width(Path(config.vectors)))
    plan = load_plan(config, task, store)
    if config.adversarial != "none" and any(guide.enabled and guide.makes("attack") for guide in plan.guides):
        raise PlanError(
            f"{config.plan_name}: its guides attack already", hint=f"leave out --adversarial {config.adversarial}"
        )
    if not config.masks:
        missing.check_parser(plan, config.plan_name, config.parser)
    if "sequences" not in opening.inputs:
        _check_length(config, store)
        tokenizer = _tokenizer(opening.config, dataset, store, progress)
        length = (
            missing.longest(config.init, config.max_length, store)
            if config.init
            else config.max_length or missing.USUAL_LENGTH
        )
        made = missing.build_sequences(dataset, tokenizer, length, store, progress)
        opening.inputs["sequences"] = opening.stack.enter_context(made)
    if not config.masks:
        sequences = opening.inputs["sequences"]
        masks = missing.build_masks(sequences, dataset, plan, config.plan_name, config.parser, store, progress)
        opening.change(masks=masks)
    add_inputs(opening, plan)
    if task.shape == "tags" and "word" in features(plan):
        # version 1 took the words that have tags for those of the parser
        opening.stage = replace(opening.stage, version=2)


def _task(config: Config, dataset: Artifact, store: Store) -> type[Task]:
    """The task that learns from a dataset; in a dry run without it, the one of the settings.  Raises NotYet if they name none."""
    try:
        task = task_for(config.task, dataset.counts, dataset.reference)
        if config.task == "auto" and task.shape == "examples" and (told := says_many_labels(dataset.counts)):
            log.warning("%s: %s", dataset.reference, told)
        return task
    except NotYet:
        if config.task == "auto":
            check_files(config, store)
            raise
        return TASKS[config.task]


def _check_validation(config: Config, dataset: Artifact) -> None:
    """Raises InputError for settings that read the validation, if there is none."""
    with contextlib.suppress(NotYet):
        if (config.select != "loss" or config.patience) and "valid" not in dataset.counts["splits"]:
            flag = "--patience" if config.patience else "--select"
            raise InputError(
                f"{flag} reads the validation, and {dataset.reference} has no validation examples",
                hint="guide build-dataset --valid-fraction 0.1",
            )


def _check_length(config: Config, store: Store) -> None:
    """Raises InputError for a ``--max-length`` that the model of ``--init`` cannot read, before sequences of it are made."""
    if not config.init or not config.max_length or config.extend_positions:
        return
    from guidance.checkpoint import config_of
    from pipelines.training.model_checks import longest_input

    most = longest_input(config_of(folder_of(model_input(config.init, store))))
    if most is not None and config.max_length > most:
        raise InputError(
            f"--max-length {config.max_length}: the model of --init reads at most {most} tokens",
            hint=f"--max-length {most}, or --extend-positions",
        )


def resolved(config: AnyConfig, task: type[Task]) -> AnyConfig:
    """The configuration with its task named.  Raises InputError if a setting belongs to another task, or ``select`` names
    no metric."""
    if config.select not in ("loss", *task.selectable):
        raise InputError(f"--select {config.select}: {task.name} has {', '.join(('loss', *task.selectable))}")
    try:
        check_settings(config, "--task", task.name, OWNERS)
    except ValueError as error:
        raise InputError(str(error)) from error
    return config.model_copy(update={"task": task.name})


def _tokenizer(config: Config, dataset: Artifact, store: Store, progress: Any) -> str:
    """The tokenizer of the model to start from, or the one that was given, or else a new one.

    A new one is trained on the texts of the dataset: a WordPiece tokenizer, or one of whole words for `WORD_MODELS`.
    """
    if config.init:
        return str(folder_of(model_input(config.init, store)))
    if config.tokenizer or config.embeddings_from:
        return config.tokenizer or str(folder_of(model_input(config.embeddings_from, store)))
    wanted = tokenizers.Config(kind="wordpiece", lowercase=True)
    if config.architecture in WORD_MODELS:  # a word without a vector needs two occurrences to be learned
        rare = 1 if config.vectors else 2
        wanted = tokenizers.Config(kind="word", lowercase=True, numbers=True, vocab_size=50_000, min_frequency=rare)
    made = tokenizers.run(dataset.reference, wanted, store=store, progress=progress)
    log.info("tokenizer: %s%s", made.reference, " (already there)" if made.reused else "")
    return made.reference


def _next(made: Artifact, store: Store) -> tuple[str, ...]:
    """Measure the model on the test split, if there is one."""
    with contextlib.suppress(InputError), store.load_input(made, "sequences", verify=False) as data:
        if "test.parquet" in data.files:
            dataset = store.name_of("corpus", data.manifest["inputs"]["corpus"]["recipe"])
            parser = made.manifest["config"].get("parser") if "masks" in made.manifest["inputs"] else ""
            needed = f" --parser {shlex.quote(parser)}" if parser else ""  # the test split is parsed, too
            return (f"guide evaluate {{}} {dataset}{needed}",)
    return ("guide show {}",)


STAGE = Training(
    "finetune",
    "model",
    1,
    Config,
    build,
    takes={"data": TaskData()},
    prepare=_prepare,
    options=RUN_OPTIONS,
    command=Command(
        "finetune",
        f"""Fine-tune a model on the labelled examples of a task, with or without guided heads.

        The dataset comes from `guide build-dataset`.  The task follows from it; --task chooses another.  --init takes a model of
        `guide pretrain` or any local Hugging Face folder; without it a new model is trained.  Sequences, and the masks that the
        plan needs, are made on the way, as artifacts of their own.

        {"  ".join(task.needs for task in TASKS.values() if task.needs)}

        Ctrl-C or SIGTERM finishes the current step and saves; the same command continues the run, bit for bit.
        """,
        examples=(
            *(example for task in TASKS.values() for example in task.examples),
            "for s in 0 1 2; do guide finetune reviews --init my-model --seed $s --name reviews-$s; done",
        ),
        next=_next,
        group="Train",
        topics=FINETUNE_TOPICS,
    ),
)

run = STAGE.run
