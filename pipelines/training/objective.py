"""What an objective is: one row of `pipelines.training.objectives`, which holds every fact about it.

Rows are imported when the command line starts, so this module and the rows import only the standard library and pydantic.
What needs torch is in `pipelines.training.learners`, which a row imports inside its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from guidance.errors import InputError
from pipelines.engine.stage import Config

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.storage.artifacts import Artifact
    from pipelines.training.learner import Given, Learner


@dataclass(frozen=True)
class Card:
    """What the model card says about a trained model.

    Attributes:
        words: what kind of model it is.
        pipeline: its ``pipeline_tag`` on model hubs.
        auto_class: the class of transformers that opens it, and that makes a new one.
        folders: the folders of other models beside it, such as ``generator/``, each with what the card says about it.
    """

    words: str
    pipeline: str
    auto_class: str
    folders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """How ``guide evaluate`` measures a trained model.

    Attributes:
        task: its name in ``metrics.json``.
        is_for: whether a model with this configuration is measured so, on these sequences.
        run: measures it, given the `Run`, the model folder, the model and its handle.
        settings: groups of settings of this task; every field becomes a flag of ``guide evaluate``.
        auto_class: the class of transformers that opens the model; by default the one that was saved.
        needs_corpus: whether it reads the text of the sequences, so that their corpus must still be in the store.
        floors: how the sequences are laid out for the n-gram floors beside its metrics, a ``layout`` of
            `pipelines.stages.floors`; empty if there are none.
    """

    task: str
    is_for: Callable[[Any, Artifact], bool]
    run: Callable[..., None]
    settings: tuple[type[Config], ...] = ()
    auto_class: str | None = None
    needs_corpus: bool = True
    floors: str = ""


def has_head(config: Any, name: str) -> bool:
    """Whether a model was saved as a class with this head, such as ``ForSequenceClassification``."""
    return any(str(saved).endswith(name) for saved in config.architectures or ())


def classifies(config: Any) -> bool:
    """Whether a model has a head for whole texts."""
    return has_head(config, "ForSequenceClassification") or has_head(config, "ForMultipleChoice")


def predicts_a_value(config: Any) -> bool:
    """Whether a model for whole texts has one output, not one for each class."""
    return config.problem_type == "regression" or config.num_labels == 1


Answers = Callable[[Any, Any, Any], Iterator[dict[str, Any]]]
"""From settings and inputs as `pipelines.training.learners.task_scores.predict` reads them, a model and its handle."""


def accept_every_plan(plan: Plan, config: Any, source: str) -> None:
    """For an objective in which every guide works."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective of ``guide pretrain``.

    Attributes:
        name: its name after ``--objective``.
        learns: what the model learns, in a few words; the help lists it.
        needs: which data it needs, in a sentence or two; the help of the command says it.
        families: the model families that it can train from nothing; ``--architecture auto`` is the first.
        card: what the model card says.
        prepare: makes the `Learner` of a run.  Raises InputError when data, plan, model and settings do not fit each other.
        check_plan: raises PlanError when a guide cannot work in this objective, given the plan, the settings of the run and
            where the plan comes from.
        settings: groups of settings that mean something in this objective only, or in the objectives that list the same
            group.  Every field becomes a flag.
        needs_mask_token: whether the tokenizer must have a mask token.
        examples: command lines for the help.
        evaluation: how ``guide evaluate`` measures the model; None if it cannot.
        columns: further columns of the sequences that the learner reads, besides the ids.
        trains_generator: whether a generator learns beside the model with any plan.
    """

    command: ClassVar[str] = "pretrain"
    """The command that trains it, and ``flag``, the option that chooses it."""
    flag: ClassVar[str] = "--objective"

    name: str
    learns: str
    needs: str
    families: tuple[str, ...]
    card: Card
    prepare: Callable[[Given], Learner]
    check_plan: Callable[[Plan, Any, str], None] = accept_every_plan
    settings: tuple[type[Config], ...] = ()
    needs_mask_token: bool = True
    examples: tuple[str, ...] = ()
    evaluation: Evaluation | None = None
    columns: tuple[str, ...] = ()
    trains_generator: bool = False

    def family(self, architecture: str) -> str:
        """The family of a new model, with ``auto`` resolved.

        Raises:
            InputError: the objective cannot train this family.
        """
        if architecture == "auto":
            return self.families[0]
        if architecture not in self.families:
            raise InputError(
                f"{self.flag} {self.name} trains {' or '.join(self.families)}, not {architecture}",
                hint=f"--architecture {self.families[0]}, or leave it out",
            )
        return architecture


@dataclass(frozen=True, kw_only=True)
class Task(Objective):
    """A task of ``guide finetune``: an objective that learns from the labelled examples of a dataset.

    Attributes:
        shape: of the datasets that it reads; see `pipelines.stages.dataset`.
        fits: whether ``--task auto`` chooses it for a dataset of this shape, given the counts of the dataset.  The first row
            that fits is chosen.
        metrics: the metrics that a validation reports; all of them are better when they are higher.
        answers: what ``guide predict`` says of each example of a split, in JSON's types.
        head: gives the class of its `pipelines.training.learners.examples.Head`, which is imported only then.
        output: the name of the model's output, if it has only one.
    """

    shape: str
    metrics: tuple[str, ...]
    answers: Answers
    head: Callable[[], Any]
    output: str = ""
    fits: Callable[[Mapping[str, Any]], bool] = lambda counts: True

    command: ClassVar[str] = "finetune"
    flag: ClassVar[str] = "--task"
