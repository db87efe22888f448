"""Kinds of inputs that stages take, besides artifacts of one kind (`pipelines.engine.declaration.Stored`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError
from pipelines.engine.declaration import Opening, Stored, Take
from pipelines.engine.stage import Files
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMissing
from pipelines.text.readers import known_extension

if TYPE_CHECKING:
    from pipelines.text.sources import Sources

REFERENCE = "a name, name@n, an id, or a path"


class Corpus(Stored):
    """A corpus of running text, or of the examples of a task."""

    def __init__(self, **more: Any) -> None:
        super().__init__("corpus", f"A corpus: {REFERENCE}.", **more)


class Sequences(Stored):
    """Sequences of token ids."""

    def __init__(self, how_many: str = "", **more: Any) -> None:
        number = f"; {how_many}" if how_many else ""
        super().__init__("sequences", f"Sequences: {REFERENCE}{number}.", **more)


class Dataset(Stored):
    """A corpus that holds the examples of a task."""

    def __init__(self, **more: Any) -> None:
        super().__init__("corpus", f"A dataset: {REFERENCE}.", **more)

    def open(self, reference: str, opening: Opening[Any]) -> Artifact:
        corpus = super().open(reference, opening)
        if not is_dataset(corpus):
            raise InputError(
                f"{corpus.reference} is running text, not examples of a task", hint="guide build-dataset FILE"
            )
        return corpus


def is_dataset(corpus: Artifact) -> bool:
    """Whether a corpus holds the examples of a task."""
    return corpus.manifest["stage"] in ("build-dataset", "build-fold")


class Tokenizer(Take):
    """A tokenizer: an artifact, or that of a model or of a Hugging Face folder."""

    def __init__(self, help: str = "A tokenizer, likewise, or a folder with tokenizer.json.", **more: Any) -> None:
        super().__init__(help, kinds=("tokenizer",), **more)

    def open(self, reference: str, opening: Opening[Any]) -> Artifact | Files:
        from pipelines.text.tokenizer_files import open_tokenizer

        return open_tokenizer(reference, opening.store, opening.stack)


class Model(Take):
    """A trained model: an artifact, or any Hugging Face model folder."""

    def __init__(self, help: str = "A model: a name, name@n, an id, or a folder.", **more: Any) -> None:
        super().__init__(help, kinds=("model",), **more)

    def find(self, reference: str, opening: Opening[Any]) -> None:
        from pipelines.training.plan_inputs import refuse_file

        if Path(reference).is_dir():
            return
        try:
            opening.store.find(reference, "model")
        except ArtifactMissing:
            refuse_file(reference)
            raise

    def add(self, role: str, reference: str, opening: Opening[Any]) -> None:
        """Also adds what its plan looks up, under the name of the table; for a second model after its role."""
        from pipelines.training.plan_inputs import trained_tables

        super().add(role, reference, opening)
        for name, table in trained_tables(opening.inputs[role], opening.store).items():
            opening.inputs[name if role == "model" else f"{role}_{name}"] = opening.stack.enter_context(table)

    def open(self, reference: str, opening: Opening[Any]) -> Artifact | Files:
        from pipelines.training.plan_inputs import model_inputs

        inputs = model_inputs(reference, opening.store, measured_patterns(opening.config))
        model: Artifact | Files = inputs.pop("model")
        opening.inputs |= inputs
        return model


def measured_patterns(config: Any) -> Iterable[str | Mapping[str, Any]]:
    """The patterns that a probe measures, as plans describe them: those of its setting, or all; none if it has no such setting."""
    from guidance.patterns import PATTERNS
    from pipelines.probing.patterns import spec_of

    asked = getattr(config, "patterns", None)
    return () if asked is None else map(spec_of, asked or PATTERNS)


@dataclass(frozen=True)
class TextFiles(Take):
    """Files of the user that are read in a format of their own.

    Attributes:
        in_folders: which files of a folder are read, by their names.
    """

    many: bool = True
    in_folders: Callable[[str], bool] = known_extension

    def find(self, reference: str | Sequence[str], opening: Opening[Any]) -> None:
        self._sources(reference, opening)

    def open(self, reference: str | Sequence[str], opening: Opening[Any]) -> Files:
        return self._sources(reference, opening).files(None, None)

    def _sources(self, reference: str | Sequence[str], opening: Opening[Any]) -> Sources:
        from pipelines.text.sources import expand

        names = [reference] if isinstance(reference, str) else reference
        return opening.stack.enter_context(expand(names, any_kind=True, stdin=None, in_folders=self.in_folders))
