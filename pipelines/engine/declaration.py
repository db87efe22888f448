"""A stage says in one place what it takes, what it writes and how people call it; from that it can be run.

    STAGE = Stage("build-idf", "idf", 1, Config, build, takes={"corpus": Stored("corpus", "A corpus.")})
    STAGE.run("wiki", Config(unit="sentence"), store=store)

The roles of inputs are their names in the manifest.  A setting may name an input as well: ``idf: str = names(Stored("idf", …))``.
A kind of input is a class derived from `Take`, with one method, `Take.open`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, Unpack, cast

from pydantic import Field
from typing_extensions import TypeVar

from pipelines.engine.shards import run_sharded
from pipelines.engine.stage import Buildable, C, Input, Options, Result, Work, check_working_folder, run_stage
from pipelines.progress import Progress
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import DryArtifact, NotYet
from pipelines.storage.store import Store
from pipelines.storage.tables import Columns

Templates = str | Sequence[str] | Callable[[Artifact, Store], str | Sequence[str]]
"""Command lines, of which the first whose gaps can be filled is suggested, or a function that gives them.

``{}`` stands for the artifact itself and ``{kind}`` for its input of that kind, or else for the newest artifact of that
kind that was made from the same corpus.  For ``{model}`` that is a model without a plan, of the same objective and sequences.
"""

SEQUENCES_FIRST = ("guide build-sequences {corpus} {tokenizer}", "guide build-tokenizer {corpus}")
"""What to do before a command that needs sequences, if there are none of this corpus."""


@dataclass(frozen=True)
class Table:
    """A table with sentences below it.

    Attributes:
        titles: of the columns; a table without any is only its sentences.
        rows: as wide as ``titles``.
    """

    titles: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Command:
    """The command of a stage.

    Attributes:
        name: one word, or two, the first of which is a family such as ``probe``.
        help: what it does: one sentence, and further paragraphs for the help page.
        examples: command lines for the help page, without the prompt.
        next: the command to suggest afterwards.
        show: a table of the result for people, given the settings of the run or their defaults; by default none.
        group: the heading under which ``guide --help`` lists it.
        topics: headings for groups of options on the help page, each with the names of its settings; all others stand under
            "Options".
    """

    name: str
    help: str
    examples: Sequence[str]
    next: Templates | None = None
    show: Callable[[Artifact, Any], Table] = lambda artifact, config: Table()
    group: str = "Data"
    topics: Mapping[str, Sequence[str]] = field(default_factory=dict)


Reference = str | Path | Sequence[str] | None
"""How a caller names an input: a name, an id or a path; several where a stage takes several; None for none."""

R = TypeVar("R", bound="Result | None", default=Result)
"""What a stage gives."""


@dataclass
class Opening(Generic[C]):
    """A run whose inputs are being opened; all of them are closed when it ends.

    Attributes:
        stage: what runs; may be replaced, for example by a version that depends on the inputs.
        config: the settings so far; see `change`.
        given: the settings as the caller gave them.
        references: how the caller named the inputs, by role.
        inputs: the inputs so far, by role.
        stdin: what ``-`` reads.
        options: those of every run; own: those that the stage declares.
        verify: whether whole files are checked when they are opened.  A share of the work reads only a part of them.
    """

    stage: Stage[C, Any]
    config: C
    store: Store
    stdin: BinaryIO | None
    options: Options
    own: Mapping[str, Any]
    verify: bool
    stack: contextlib.ExitStack
    references: Mapping[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.given = self.config

    @property
    def progress(self) -> Progress | None:
        return self.options.get("progress")

    def change(self, **settings: Any) -> None:
        """Replace settings that follow from the inputs."""
        self.config = self.config.model_copy(update=settings)

    def load(self, reference: str, kind: str | None = None) -> Artifact:
        """An artifact, which is closed in the end.  Raises ArtifactMissing if there is none of this name, and
        ArtifactMismatch if it is of another kind."""
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

    def find(self, reference: Any, opening: Opening[Any]) -> None:
        """Raise InputError if there is nothing of this name, before any input is opened, which may take long."""

    def add(self, role: str, reference: Any, opening: Opening[Any]) -> None:
        """Find and check what the caller named, and add it to the inputs."""
        opening.inputs[role] = self.open(reference, opening)

    def open(self, reference: Any, opening: Opening[Any]) -> Input:
        """Find and check one input, or several if it takes many.  Raises InputError if there is no such input, or it is of the
        wrong kind.

        Abstract: every subclass defines it, or overrides `add`, which calls it.
        """
        raise NotImplementedError


def names(take: Take, default: Any = "", **rules: Any) -> Any:
    """A field that names an input, such as an artifact: it is opened under the name of the field, unless it is empty."""
    more: Any = {"knob": True, "take": take}
    return Field(default, description=take.help, json_schema_extra=more, **rules)


def take_of(info: Any) -> Take | None:
    """What a field made by `names` names."""
    take: Take | None = (info.json_schema_extra or {}).get("take")
    return take


def roles(name: str, number: int) -> list[str]:
    """The roles of several inputs of one kind, in their order: ``sequences``, ``sequences-2``, …"""
    return [name, *(f"{name}-{n}" for n in range(2, number + 1))][:number]


class Stored(Take):
    """An artifact of one kind, or several."""

    def __init__(self, kind: str, help: str, **more: Any) -> None:
        super().__init__(help, kinds=(kind,), **more)

    def find(self, reference: Any, opening: Opening[Any]) -> None:
        for each in [reference] if isinstance(reference, str) else reference:
            opening.store.find(each)

    def add(self, role: str, reference: Any, opening: Opening[Any]) -> None:
        references = [reference] if isinstance(reference, str) else reference
        for name, each in zip(roles(role, len(references)), references, strict=True):
            opening.inputs[name] = self.open(each, opening)

    def open(self, reference: str, opening: Opening[Any]) -> Artifact:
        return opening.load(reference, kind=self.kinds[0])


@dataclass(frozen=True)
class Option:
    """A keyword argument of a stage that is neither an input nor a setting.

    Attributes:
        help: what it says, for the help page.
        many: whether it may be given several times.
    """

    help: str
    many: bool = False


def _nothing(*given: Any) -> None:
    """Does nothing: for a stage whose inputs only need to be opened."""


@dataclass(frozen=True)
class Stage(Buildable[C], Generic[C, R]):
    """A stage: what it takes, what it writes, and how people call it.

    ``Stage[Config]`` gives a `Result`; ``Stage[Config, Result | None]`` gives None to a process that does a part of the work.

    Attributes:
        takes: its inputs by role, in the order of the arguments of `run`.
        check: raises an error about settings and names of inputs that cannot work, before any input is opened.
        prepare: called when the inputs are open: checks them against each other and the settings, adds inputs that follow from
            others, and replaces settings that follow from them.
        share: for a stage that maps over shards: processes those that ``--shard`` selects, and raises `ShareDone`.
        options: further keyword arguments of `run`, each with what it says; they are neither inputs nor settings.
        command: how people call it; None for a stage that other stages run.
        writes: the columns of its tables, by the title of their section in ``docs/tables.md``.
    """

    takes: Mapping[str, Take] = field(default_factory=dict)
    check: Callable[[C, Mapping[str, Any]], None] = _nothing
    prepare: Callable[[Opening[C]], None] = _nothing
    share: Callable[[Work[C]], object] | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    command: Command | None = None
    writes: Mapping[str, Columns] = field(default_factory=dict)

    def run(
        self,
        *inputs: Reference | C,
        store: Store,
        name: str | None = None,
        force: bool = False,
        wait: bool = True,
        progress: Progress | None = None,
        stdin: BinaryIO | None = None,
        **named: Any,
    ) -> R:
        """Run the stage, unless the artifact that it would write exists and verifies.  Raises InputError if an input does
        not exist, is of another kind, or does not fit the others.

        Args:
            inputs: how to find each input, in the order of `takes`, and last the configuration, unless its defaults are meant.
            name, force, wait, progress: see `Options`.
            stdin: what ``-`` reads.
            named: inputs by role, instead of by their place, and `options`.

        Returns:
            The `Result`; None if ``--shard`` selected a share of the work, or if another process of ``torchrun`` publishes it.
        """
        references = list(inputs)
        is_given = bool(references) and isinstance(references[-1], self.config)
        config = cast("C", references.pop()) if is_given else self.config()
        if len(references) > len(self.takes):
            raise TypeError(f"{self.name} takes {', '.join(self.takes) or 'no inputs'}, and was given {references}")
        given = dict(zip(self.takes, references, strict=False)) | named
        own = {key: given.pop(key) for key in self.options if key in given}
        options = Options(name=name, force=force, wait=wait, progress=progress)
        check_working_folder()
        if name:  # before inputs that are missing are made
            store.check_name_free(name, self.kind)
        self.check(config, given)
        try:
            with opened(self, config, given, store, stdin=stdin, options=options, own=own) as opening:
                return opening.stage.execute(opening, **options)
        except NotYet:
            return cast("R", unmade(self.kind, store, name, steps=self.steps_of(config)))

    def steps_of(self, config: C) -> int | None:
        """How many steps the stage trains; None if it does not train, or if its settings alone do not say how many."""

    def execute(self, opening: Opening[C], **options: Unpack[Options]) -> R:
        """Run the stage on opened inputs."""
        config: Any = opening.config
        if self.share:
            return cast("R", run_sharded(self, self.share, config, opening.inputs, store=opening.store, **options))
        return cast("R", run_stage(self, config, opening.inputs, store=opening.store, **options))


def unmade(kind: str, store: Store, name: str | None, *, steps: int | None = None) -> Result:
    """The result of a dry run that ended early, because it needs an artifact that does not exist yet."""
    if name:
        store.check_name_free(name, kind)
    return Result(DryArtifact(kind, steps=steps), False)


@contextlib.contextmanager
def opened(
    stage: Stage[C, Any],
    config: C,
    references: Mapping[str, Any],
    store: Store,
    *,
    stdin: BinaryIO | None = None,
    options: Options | None = None,
    own: Mapping[str, Any] | None = None,
) -> Iterator[Opening[C]]:
    """The inputs of a stage, opened and prepared.

    Raises:
        TypeError: a role is unknown, or an input is missing.
        NotYet: in a dry run, an input cannot be checked or prepared, because an artifact does not exist yet.
    """
    if unknown := set(references) - set(stage.takes):
        raise TypeError(f"{stage.name} does not take {min(unknown)}, but {', '.join(stage.takes) or 'nothing'}")
    with contextlib.ExitStack() as stack:
        verify = not getattr(config, "shard", None)
        opening = Opening(stage, config, store, stdin, options or Options(), own or {}, verify, stack, references)
        given = []
        for role, take in stage.takes.items():
            if reference := references.get(role):
                given.append((role, take, reference))
            elif not take.optional:
                raise TypeError(f"{stage.name} needs {role}: {take.help}")
        for _, take, reference in given:
            take.find(reference, opening)
        fields, not_yet = type(config).model_fields.items(), None
        named = ((role, its, getattr(opening.config, role)) for role, info in fields if (its := take_of(info)))
        for role, take, reference in itertools.chain(given, named):
            try:
                if reference:
                    take.add(role, reference, opening)
            except NotYet as error:  # go on, since a later input can be wrong
                opening.inputs.setdefault(role, DryArtifact(take.kinds[0] if take.kinds else role))
                not_yet = error
        if not_yet:
            raise not_yet
        stage.prepare(opening)
        yield opening
