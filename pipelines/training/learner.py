"""`Setup`, from which an objective makes its learner, and two parts of a learner: its passes, and its model folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipelines.storage.artifacts import Artifact

if TYPE_CHECKING:
    from torch import Tensor, nn

    from guidance.plan import Plan
    from pipelines.engine.stage import Files
    from pipelines.training.batches import Examples


@dataclass(frozen=True)
class ModelFolder:
    """One of the model folders that a finished run writes.

    Attributes:
        path: where it is in the artifact: ``""`` for the main model, at the top; ``generator/`` for its generator.
        prefix: what the names of its tensors begin with in the weights of the whole learner.
        plan: the guides that act in it.
    """

    path: str
    prefix: str
    model: Any
    plan: Plan


class Pass(Protocol):
    """A forward pass over a micro-batch.  All sums are over its examples; the loop divides them.

    A pass with a true attribute ``at_once`` has its gradients computed before the next pass, which may read them; then all
    parameters that it trains must be trained by the last pass, too.
    """

    def counts(self, batch: Any) -> dict[str, float]:
        """The denominator of each loss of this pass for one micro-batch; the first pass also counts ``tokens``.

        The loop calls this for all micro-batches after the earlier passes and before this one.
        """

    def losses(self, model: nn.Module, batch: Any, step: int) -> dict[str, Tensor]:
        """The undivided sum of each loss for one micro-batch, after ``step`` finished updates.  A loss without a factor in
        `pipelines.training.learners.guided.Learner.weights` is only reported."""


@dataclass(frozen=True)
class Setup:
    """What a run gives to its objective.

    Attributes:
        config: the `pipelines.training.config.TrainingConfig`.
        sequences: the artifact with the training sequences; the first if there are several.
        train, valid: the sequences of all ``corpora``, with the token features that the plan reads.
        tables: what patterns and head rules look up apart from token features, by name.
        init: the model to start from: an artifact, or files of a folder.
        corpora: all artifacts with training sequences; empty means ``sequences`` alone.
        vectors: a file of word vectors for a new model; ``embeddings``: a model whose word embeddings it takes.
        handles: of models that are only evaluated and have their plans already, by their folder: ``""``, ``generator/``.
    """

    config: Any
    plan: Plan
    sequences: Artifact
    tokenizer: Any
    train: Examples
    valid: Examples
    tables: Mapping[str, Any] = field(default_factory=dict)
    init: Any = None
    corpora: tuple[Artifact, ...] = ()
    handles: Mapping[str, Any] = field(default_factory=dict)
    vectors: Path | None = None
    embeddings: Artifact | Files | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of the model to start from, if there is one."""
        return None if self.init is None else folder_of(self.init)

    @property
    def max_length(self) -> int:
        """The greatest length that a sequence may have, in tokens."""
        return max(int(data.manifest["config"]["max_length"]) for data in self.corpora or (self.sequences,))


def folder_of(init: Artifact | Files) -> Path:
    """The folder of a model to start from."""
    return init.path if isinstance(init, Artifact) else init.paths[0].parent


def name_of_model(model: Artifact | Files) -> str:
    """What a picture calls a model: its reference, or the name of its folder."""
    return model.reference if isinstance(model, Artifact) else model.paths[0].parent.name
