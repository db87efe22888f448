"""The runs that a report is about: models, searches, evaluations and probes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from guidance.errors import InputError
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.training.plan_inputs import model_folders
from pipelines.views.comparison import common_labels

KINDS = ("model", "search", "evaluation", "probe")
"""The kinds of artifacts that a report is about."""
INHERITED = ", inherited"
"""Follows the name of a plan that a model was not given itself, but has from the model that it was initialised from."""


@dataclass(frozen=True)
class Given:
    """One run: how the user called it, and its artifact."""

    label: str
    artifact: Artifact

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.artifact.manifest.get("config", {}))


@dataclass(frozen=True)
class Runs:
    """All runs of a report, in the order in which they were given.

    Attributes:
        manifests: the manifests of the runs and of all that they were made from, by recipe; inputs come before what reads them.
        names: the names of artifacts, by recipe.
    """

    given: Sequence[Given]
    store: Store
    manifests: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def of(self, kind: str) -> list[Given]:
        """The runs of one kind."""
        return [each for each in self.given if each.artifact.kind == kind]

    def input_of(self, manifest: Mapping[str, Any], *roles: str) -> dict[str, Any] | None:
        """The manifest of the input that has the first of these roles to be in the store; None if no such input is."""
        for role in roles:
            recipe = manifest.get("inputs", {}).get(role, {}).get("recipe")
            if recipe in self.manifests:
                return self.manifests[recipe]
        return None

    def name_of(self, manifest: Mapping[str, Any]) -> str:
        """The name of an artifact, or else its kind and id."""
        recipe = str(manifest["recipe"])
        return self.names.get(recipe) or f"{manifest['kind']}/{recipe[:16]}"

    def model_of(self, manifest: Mapping[str, Any]) -> str:
        """What people call the model that a run has read, as it has read it; empty if it has read none."""
        model = self.input_of(manifest, "model")
        name = self.name_of(model) if model else model_folders(manifest).get("model", "")
        is_random = manifest.get("config", {}).get("random") is not None
        return f"{name}, random weights" if name and is_random else name

    def plan_of(self, manifest: Mapping[str, Any]) -> str:
        """The name of the plan of a run; empty if it has none.

        An evaluation or a probe has the plan of its model.  A model that was given no plan has that of the model it was initialised from,
        if guides of it are left.
        """
        if own := plan_of(manifest.get("config", {})):
            return own
        if manifest["kind"] != "model":
            model = self.input_of(manifest, "model")
            return self.plan_of(model) if model else ""
        start = self.input_of(manifest, "init") if "plan.toml" in manifest.get("files", {}) else None
        before = self.plan_of(start) if start else ""
        return f"{before.removesuffix(INHERITED)}{INHERITED}" if before else ""

    def data_of(self, manifest: Mapping[str, Any]) -> str:
        """What people call the data of a run: the name of its sequences or dataset, or of the corpus behind them."""
        data = self.input_of(manifest, "sequences", "dataset", "corpus")
        if data is None:
            inputs = manifest.get("inputs", {})
            if any(role in inputs for role in ("sequences", "dataset", "corpus")):
                return "data that are not in this store"
            models = model_folders(manifest)
            files = (each for role, each in inputs.items() if each.get("kind") == "files" and role not in models)
            return next(map(names_of_files, files), "–")
        corpus = self.input_of(data, "corpus")
        if corpus is None or data["recipe"] in self.names:
            return self.name_of(data)
        text = corpus.get("inputs", {}).get("text")
        return names_of_files(text) if text and corpus["recipe"] not in self.names else self.name_of(corpus)


def names_of_files(source: Mapping[str, Any]) -> str:
    """Files that a command has read: the name of one, or the first name and how many there are."""
    first, count = str(next(iter(source.get("first", ())), "files")), int(source.get("count", 1))
    return first if count == 1 else f"{first} and {count - 1:,} more"


def plan_of(config: Mapping[str, Any]) -> str:
    """What people call the plan of a run: its preset, or the names of its files; empty if it was given none."""
    plan = config.get("plan") or []
    return ", ".join(str(each).rpartition("/")[2] for each in ([plan] if isinstance(plan, str) else plan))


def open_all(references: Iterable[str], store: Store, stack: ExitStack) -> Runs:
    """Open the runs of a report, and read what they were made from.

    Raises:
        ArtifactMissing: there is no such run, or it is not finished.
        InputError: an artifact of another kind, or none at all.
    """
    given: dict[str, Given] = {}
    for reference in references:
        artifact = stack.enter_context(store.load(reference, verify=False))
        if artifact.kind not in KINDS:
            raise InputError(
                f"{reference} is of kind {artifact.kind}; a report is about models, searches, evaluations and probes",
                hint=f"`guide lineage {reference}` shows what it was made from",
            )
        given.setdefault(artifact.recipe, Given(reference, artifact))
    if not given:
        raise InputError("no runs to report on", hint="guide report RUN…, such as the models of `guide pretrain`")
    manifests: dict[str, dict[str, Any]] = {}
    for each in given.values():
        _add(each.artifact.manifest, store, manifests)
    names = {name.recipe: name.name if name.version == 1 else str(name) for name in store.names()}
    names |= {recipe: each.label for recipe, each in given.items()}
    return Runs(list(given.values()), store, manifests, names)


def _add(manifest: dict[str, Any], store: Store, found: dict[str, dict[str, Any]]) -> None:
    """Add the manifests of an artifact and of what it was made from; runs that a search made itself are left out."""
    recipe = str(manifest["recipe"])
    if recipe in found:
        return
    manifest = _with_inputs_of_runs(manifest, store)
    for role, source in manifest.get("inputs", {}).items():
        if "recipe" not in source or is_made_by_search(manifest, role):
            continue
        with contextlib.suppress(InputError), store.open(store.folder(source["kind"], source["recipe"])) as parent:
            _add(parent.manifest, store, found)
    found[recipe] = manifest


def _with_inputs_of_runs(manifest: dict[str, Any], store: Store) -> dict[str, Any]:
    """The manifest of a search with the artifacts that its settings name, such as the model of ``--init``, among its inputs; only the
    manifests of its runs have them.  Any other manifest as it is."""
    for role, source in manifest.get("inputs", {}).items():
        if not is_made_by_search(manifest, role) or source.get("kind") != "model" or "recipe" not in source:
            continue
        with contextlib.suppress(InputError), store.open(store.folder(source["kind"], source["recipe"])) as run:
            own = run.manifest.get("inputs", {})
            named = {name: own[name] for name in own if manifest["config"].get(name) and "recipe" in own[name]}
            return {**manifest, "inputs": {**named, **manifest["inputs"]}}
    return manifest


def seconds_of(manifest: Mapping[str, Any], store: Store) -> dict[str, float]:
    """Seconds by recipe: of an artifact, and of the runs that a search made itself; nan for a run that is gone."""
    found = {str(manifest["recipe"]): float(manifest.get("seconds") or 0)}
    for role, source in manifest.get("inputs", {}).items():
        if is_made_by_search(manifest, role) and "recipe" in source:
            found[source["recipe"]] = math.nan
            with contextlib.suppress(InputError), store.open(store.folder(source["kind"], source["recipe"])) as made:
                found[source["recipe"]] = float(made.manifest.get("seconds") or 0)
    return found


def is_made_by_search(manifest: Mapping[str, Any], role: str) -> bool:
    """Whether an input of a search is one of the runs that it made."""
    return bool(manifest["kind"] == "search" and role.split("-")[0] in ("model", "evaluation"))


def grouped(given: Sequence[Given], key: Callable[[Given], Any]) -> dict[str, list[Given]]:
    """Group runs by a key, in the order of their first runs.  A group has the label that the labels of its runs share."""
    members: dict[str, list[Given]] = {}
    for each in given:
        members.setdefault(digest(key(each)), []).append(each)
    labels = common_labels([[each.label for each in group] for group in members.values()])
    return dict(zip(labels, members.values(), strict=True))


def without_seed(manifest: Mapping[str, Any]) -> list[Any]:
    """The stage, the settings and the contents of inputs: equal for two runs that differ only in their seed."""
    config = {name: value for name, value in manifest.get("config", {}).items() if name != "seed"}
    return [manifest.get("stage"), config, {role: each["content"] for role, each in manifest["inputs"].items()}]
