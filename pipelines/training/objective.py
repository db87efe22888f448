"""What an objective is: a class in `pipelines.training.objectives`, which holds every fact about it.

These classes are imported when the command line starts, so this module and theirs import only the standard library and
pydantic.  What needs torch is imported inside their methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from guidance.errors import InputError, PlanError
from pipelines.engine.stage import Config
from pipelines.text.tokenizer_files import laid_out
from pipelines.training.plan_checks import check_generator_guides
from pipelines.training.settings import Filling

if TYPE_CHECKING:
    from pathlib import Path

    from guidance.guide import Guide
    from guidance.plan import Plan
    from pipelines.engine.stage import Run
    from pipelines.metrics.comparison import Compared, Table
    from pipelines.storage.artifacts import Artifact
    from pipelines.training.learner import Setup
    from pipelines.training.learners.guided import Learner


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


class Objective:
    """An objective of ``guide pretrain``.  The class itself holds what is known about it; pre-training makes no instances.

    Attributes:
        name: its name after ``--objective``.
        learns: what the model learns, in a few words; the help lists it.
        needs: which data it needs, in a sentence or two; the help of the command says it.
        families: the model families that it can train from nothing; ``--architecture auto`` is the first.
        card: what the model card says.
        settings: groups of settings that mean something in this objective only, or in the objectives that list the same
            group.  Every field becomes a flag.
        needs_mask_token: whether the tokenizer must have a mask token.
        needs_pad_token: whether it must have a padding token; else its end token may stand in for it.
        examples: command lines for the help.
        columns: further columns of the sequences that the learner reads, besides the ids.
        trains_generator: whether a generator learns beside the model with any plan.
        learner: the function ``prepare(setup, objective)`` that makes the learner of a run, as ``module:name``.
        measured_as: what ``metrics.json`` of an evaluation calls the task of the model; empty if there is no evaluation.
        head: the name of the model class that the evaluation is for, or the end of it, such as ``ForMaskedLM``.
        evaluation: the function ``evaluate(run, folder, model, handle)``, as ``module:name``.
        evaluation_settings: groups of settings of the evaluation; every field becomes a flag of ``guide evaluate``.
        needs_corpus: whether the evaluation reads the text of the sequences, so that their corpus must be in the store.
        wants_corpus: whether the evaluation reads that text if it is in the store, and works without it.
        source: the papers that the objective comes from.
        floors: how the sequences are laid out for the n-gram floors beside the metrics, a ``layout`` of
            `pipelines.stages.floors`; empty if there are none.
    """

    command: ClassVar[str] = "pretrain"
    """The command that trains it, and ``flag``, the option that chooses it."""
    flag: ClassVar[str] = "--objective"

    name: ClassVar[str]
    learns: ClassVar[str]
    needs: ClassVar[str]
    families: ClassVar[tuple[str, ...]]
    card: ClassVar[Card]
    settings: ClassVar[tuple[type[Config], ...]] = ()
    needs_mask_token: ClassVar[bool] = True
    needs_pad_token: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[tuple[str, ...]] = ()
    trains_generator: ClassVar[bool] = False
    learner: ClassVar[str]
    measured_as: ClassVar[str] = ""
    head: ClassVar[str] = ""
    evaluation: ClassVar[str] = ""
    evaluation_settings: ClassVar[tuple[type[Config], ...]] = ()
    needs_corpus: ClassVar[bool] = False
    wants_corpus: ClassVar[bool] = False
    floors: ClassVar[str] = ""
    source: ClassVar[str] = ""

    @classmethod
    def prepare(cls, setup: Setup) -> Learner:
        """The learner of a run.

        Raises:
            InputError: data, plan, model and settings do not fit each other.
        """
        learner: Learner = resolve_name(cls.learner)(setup, cls)
        return learner

    @classmethod
    def check_plan(cls, plan: Plan, config: Any, source: str) -> None:
        """Raises PlanError when a guide cannot work in this objective.

        Args:
            config: the settings of the run.
            source: where the plan comes from, for messages.
        """
        if Filling in cls.settings:
            check_generator_guides(plan, config, source, always=cls.trains_generator)
            return
        for number, guide in enumerate(plan.guides, 1):
            if reason := cls.refusal(guide):
                raise PlanError(f"{source}, guide {number} ({guide.label}): {reason}")

    @classmethod
    def refusal(cls, guide: Guide) -> str:
        """Why a guide cannot work in this objective, which has no generator; empty if it can."""
        training = "fine-tuning" if cls.command == "finetune" else cls.name
        if guide.part != "model":
            return f"it is for a {guide.part}, and {training} trains one model"
        if guide.makes("row_losses"):
            return f"{guide.mechanism} acts where a generator mis-predicts, and {training} has none"
        return ""

    @classmethod
    def measures(cls, config: Any, data: Artifact) -> bool:
        """Whether `evaluate` is for a model with this configuration, on these sequences."""
        return bool(cls.head) and has_head(config, cls.head)

    @classmethod
    def tokenizer_of(cls, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """The tokenizer files that are saved beside a trained model, made from those of its sequences.  They put the special tokens
        around a text that its sequences have."""
        return laid_out(files)

    @classmethod
    def opened_as(cls) -> str | None:
        """The class of transformers that opens a model to be evaluated; None for the one that was saved."""
        return None

    @classmethod
    def evaluate(cls, run: Run[Any], folder: Path, model: Any, handle: Any) -> None:
        """Measure a trained model: write ``predictions.parquet`` and ``metrics.json``.

        Args:
            folder: of the model; ``handle``: of the guides that act in it.
        """
        resolve_name(cls.evaluation)(run, folder, model, handle)

    compared_by: ClassVar[Sequence[str]] = ()
    """Settings of an evaluation by which `compare` computes its metrics."""

    @classmethod
    def compare(cls, one: Table, other: Table) -> list[Compared]:
        """Metrics of two models beside each other, from their predictions of the same examples; further arguments are the settings
        that ``compared_by`` names.

        Raises:
            InputError: predictions of this objective cannot be compared.
        """
        raise InputError(f"evaluations of {cls.measured_as} have no predictions that could be compared")

    @classmethod
    def compare_sets(cls, one: Table, other: Table) -> list[Compared]:
        """Metrics of one model on two sets of examples beside each other; see `compare`."""
        raise InputError(f"evaluations of {cls.measured_as} on other examples have no labels that could be compared")

    @classmethod
    def family(cls, architecture: str) -> str:
        """The family of a new model, with ``auto`` resolved.

        Raises:
            InputError: the objective cannot train this family.
        """
        if architecture == "auto":
            return cls.families[0]
        if architecture not in cls.families:
            raise InputError(
                f"{cls.flag} {cls.name} trains {' or '.join(cls.families)}, not {architecture}",
                hint=f"--architecture {cls.families[0]}, or leave it out",
            )
        return architecture


def has_head(config: Any, *names: str) -> bool:
    """Whether a model was saved as a class with one of these heads, such as ``ForSequenceClassification``."""
    return any(str(saved).endswith(names) for saved in config.architectures or ())


def classifies(config: Any) -> bool:
    """Whether a model has a head for whole texts."""
    return has_head(config, "ForSequenceClassification", "ForMultipleChoice")


def predicts_a_value(config: Any) -> bool:
    """Whether a model for whole texts has one output, not one for each class."""
    return bool(config.problem_type == "regression" or config.num_labels == 1)
