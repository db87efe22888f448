"""What a stage declares that it takes, and how each input is found, checked and closed.

    takes={"corpus": Stored("corpus", "A corpus.")}

A setting may name an input as well, as ``idf: str = names(Stored("idf", "How rare words are."))`` does.  The roles are the names of the inputs in the manifest.  A kind of input is a class derived from `Take` with one method,
`Take.open`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Generic

from pipelines.engine.stage import C, Input, Reference, Stage, take_of
from pipelines.progress import Progress
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store


@dataclass
class Opening(Generic[C]):
    """A run whose inputs are being opened; all of them are closed when it ends.

    Attributes:
        stage: what runs; may be replaced, for example by a version that depends on the inputs.
        config: the settings so far; see `change`.
        references: how the caller named the inputs, by role.
        inputs: the inputs so far, by role.
        stdin: what ``-`` reads.
        options: those of every run; own: those that the stage declares.
        verify: whether whole files are checked when they are opened.  A share of the work reads only a part of them.
    """

    stage: Stage[C]
    config: C
    store: Store
    stdin: BinaryIO | None
    options: Mapping[str, Any]
    own: Mapping[str, Any]
    verify: bool
    stack: contextlib.ExitStack
    references: Mapping[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def progress(self) -> Progress | None:
        return self.options.get("progress")

    def change(self, **settings: Any) -> None:
        """Replace settings that follow from the inputs."""
        self.config = self.config.model_copy(update=settings)

    def load(self, reference: str, kind: str | None = None) -> Artifact:
        """An artifact, which is closed in the end.

        Raises:
            ArtifactMissing: there is none of this name.
            ArtifactMismatch: it is of another kind.
        """
        return self.stack.enter_context(self.store.load(reference, kind=kind, verify=self.verify))

    def load_input(self, artifact: Artifact, role: str) -> Artifact:
        """What an artifact was made from, which is closed in the end."""
        return self.stack.enter_context(self.store.load_input(artifact, role, verify=self.verify))


@dataclass(frozen=True)
class Take:
    """An input that a stage takes.

    Attributes:
        help: what to give, for the help page.
        optional: whether it may be left out.
        many: whether several may be given.
        option: whether it is given by a flag instead of as an argument.
        flag: the flag; by default the role.
        argument: its name on the command line; by default the role.
        kinds: of the artifacts that the shell offers.
    """

    help: str
    optional: bool = False
    many: bool = False
    option: bool = False
    flag: str = ""
    argument: str = ""
    kinds: tuple[str, ...] = ()

    def add(self, role: str, reference: Any, opening: Opening[Any]) -> None:
        """Find and check what the caller named, and add it to the inputs."""
        opening.inputs[role] = self.open(reference, opening)

    def open(self, reference: Any, opening: Opening[Any]) -> Input:
        """Find and check one input.

        Args:
            reference: how the caller named it, or several if it takes many.

        Raises:
            InputError: there is no such input, or it is of the wrong kind.
        """
        raise NotImplementedError


def roles(name: str, number: int) -> list[str]:
    """The roles of several inputs of one kind, in their order: ``sequences``, ``sequences-2``, …"""
    return [name, *(f"{name}-{place}" for place in range(2, number + 1))][:number]


class Stored(Take):
    """An artifact of one kind, or several."""

    def __init__(self, kind: str, help: str, **more: Any) -> None:
        super().__init__(help, kinds=(kind,), **more)

    def add(self, role: str, reference: Any, opening: Opening[Any]) -> None:
        references = [reference] if isinstance(reference, str) else reference
        for name, each in zip(roles(role, len(references)), references, strict=True):
            opening.inputs[name] = self.open(each, opening)

    def open(self, reference: str, opening: Opening[Any]) -> Artifact:
        return opening.load(reference, kind=self.kinds[0])


@contextlib.contextmanager
def opened(
    stage: Stage[C],
    config: C,
    references: Mapping[str, Reference],
    store: Store,
    stdin: BinaryIO | None,
    options: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Iterator[Opening[C]]:
    """The inputs of a stage, opened and prepared.

    Raises:
        TypeError: a role is unknown, or an input is missing.
    """
    if unknown := set(references) - set(stage.takes):
        raise TypeError(f"{stage.name} does not take {min(unknown)}, but {', '.join(stage.takes) or 'nothing'}")
    with contextlib.ExitStack() as stack:
        verify = not getattr(config, "shard", None)
        opening = Opening(stage, config, store, stdin, options, own, verify, stack, references)
        for role, take in stage.takes.items():
            if reference := references.get(role):
                take.add(role, reference, opening)
            elif not take.optional:
                raise TypeError(f"{stage.name} needs {role}: {take.help}")
        for role, field_info in type(config).model_fields.items():
            if (named := take_of(field_info)) and (reference := getattr(opening.config, role)):
                named.add(role, reference, opening)
        stage.prepare(opening)
        yield opening
