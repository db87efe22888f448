"""The commands that make the runs of a report again, from their manifests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from pipelines.engine.stage import is_internal
from pipelines.report.blocks import Listing, Prose, Section
from pipelines.report.given import Runs
from pipelines.stages import find
from pipelines.storage.manifest import ID_LENGTH, digest
from pipelines.text.sources import BUILTIN
from pipelines.training.plan_inputs import model_folders

BY_HAND = {"evaluate": "pipelines.stages.evaluate:STAGE", "search": "pipelines.stages.search:STAGE"}
"""Stages that `pipelines.stages.find` does not know, because their commands are written by hand and not declared."""

DATA = ("dataset", "sequences", "corpus", "builtin", "files", "text")
"""Roles in which a manifest may hold the data that a command reads, if not under the name of the command's argument."""


def section(runs: Runs) -> tuple[Section, dict[str, bytes]]:
    """The commands, and the plans that they read, by file name."""
    script = Script(runs)
    lines = [line for manifest in runs.manifests.values() if (line := script.command(manifest))]
    head = ["#!/bin/sh", "# Makes the runs of this report again; what exists is not made twice.", "set -e"]
    said = (
        "Each command prints the artifact that it made, which the next ones read. Artifacts that exist already are not made again. "
        "Files of data and folders of models are named without the folders that they are in, plans as they were given; the manifests of "
        "artifacts have their digests."
    )
    listing = Listing("commands.sh", "\n".join([*head, *lines]) + "\n")
    return Section("commands", "The commands to redo it", [Prose(said), listing]), script.plans


class Script:
    """Writes command lines, each of which keeps its artifact in a variable of the shell.

    Attributes:
        plans: the files that the commands read as plans.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs, self.plans = runs, dict[str, bytes]()
        self._own_plans = {
            each.artifact.recipe: each.artifact.read("plan.toml")
            for each in runs.given
            if "plan.toml" in each.artifact.files
        }
        self._variables: dict[str, str] = {}  # by recipe
        self._words: dict[str, str] = {}  # by what a setting may call an artifact

    def command(self, manifest: Mapping[str, Any]) -> str:
        """The command line that makes an artifact; empty if another command makes it on the way."""
        recipe, kind = str(manifest["recipe"]), str(manifest["kind"])
        if (corpus := self._behind(manifest)) is not None:
            self._variables[recipe] = self._variables[corpus]
            return ""
        stage = find(manifest["stage"])
        if stage is None:
            if manifest["stage"] not in BY_HAND:
                return ""
            stage = resolve_name(BY_HAND[manifest["stage"]])
        words = [*self._inputs(stage, manifest), *self._settings(stage, manifest)]
        name = self.runs.names.get(recipe, "").partition("@")[0]
        if name and "/" not in name:
            words += ["--name", shlex.quote(name)]
        prefix = kind.replace("-", "_")
        number = 1 + len({each for each in self._variables.values() if each.rpartition("_")[0] == prefix})
        self._variables[recipe] = variable = f"{prefix}_{number}"
        self._words |= {each: f'"${variable}"' for each in (f"{kind}/{recipe[:ID_LENGTH]}", name) if each}
        return f"{variable}=$(guide {stage.command.name if stage.command else stage.name} {' '.join(words)})"

    def _behind(self, manifest: Mapping[str, Any]) -> str | None:
        """The corpus behind sequences that a command made on the way, with the tokenizer of a model; None for all other artifacts."""
        inputs = manifest.get("inputs", {})
        if manifest["kind"] != "sequences" or "tokenizer.json" not in inputs.get("tokenizer", {}).get("first", ()):
            return None
        recipe = inputs.get("corpus", {}).get("recipe")
        return recipe if recipe in self._variables and manifest["recipe"] not in self.runs.names else None

    def _inputs(self, stage: Any, manifest: Mapping[str, Any]) -> Iterator[str]:
        """The arguments and flags of what a command reads."""
        inputs, folders, used = manifest.get("inputs", {}), model_folders(manifest), set[str]()
        for role, take in (stage.takes or {"dataset": None}).items():
            stored = [name for name in inputs if name == role or name.startswith(f"{role}-")]
            stored = stored or [name for name in DATA if name in inputs][:1]
            flag = f"--{(take.flag or role).replace('_', '-')} " if take is not None and take.option else ""
            for name in [name for name in stored if name not in used]:
                used.add(name)
                words = [shlex.quote(folders[name])] if name in folders else self._input(name, inputs[name])
                yield from (flag + word for word in words)

    def _input(self, role: str, source: Mapping[str, Any]) -> Sequence[str]:
        if role == "builtin":
            return [BUILTIN]
        if source.get("recipe") in self._variables:
            return [f'"${self._variables[source["recipe"]]}"']
        if "recipe" in source:
            return [f"{source.get('kind')}/{str(source['recipe'])[:ID_LENGTH]}"]
        if folder := source.get("folder"):
            return [self._words.get(folder) or shlex.quote(folder)]
        names = [str(name) for name in source.get("first", [])]
        if "tokenizer.json" in names:  # of a manifest that has no names of folders
            return ['"${TOKENIZER:?a folder with tokenizer.json}"']
        if source.get("count", 0) > len(names):
            first = re.sub(r"[^\w./ -]", "?", names[0])  # the shell reads what is in double quotes
            return [f'${{FILES:?"{source["count"]:,} files, the first of them {first}"}}']  # several words
        return [shlex.quote(name) for name in names]

    def _settings(self, stage: Any, manifest: Mapping[str, Any]) -> Iterator[str]:
        """The flags of all settings that are not the default."""
        inputs, config, folders = manifest.get("inputs", {}), manifest.get("config", {}), model_folders(manifest)
        for name, field in stage.config.model_fields.items():
            value = config.get(name)
            if value == field.get_default(call_default_factory=True) or is_internal(field):
                continue
            values = [str(each) for each in (value if isinstance(value, list) else [value]) if each not in ("", None)]
            flag = "--" + str((field.json_schema_extra or {}).get("flag", name.replace("_", "-")))
            plan = self._own_plans.get(str(manifest["recipe"])) if name == "plan" else None
            if isinstance(value, bool):
                yield flag if value else flag.replace("--", "--no-", 1)
            elif plan and not all(each.startswith("preset:") or each == "none" for each in values):
                file = f"plans/{digest(plan.decode())[:8]}.toml"
                self.plans[file] = plan
                yield f"{flag} {file}"
            elif name in folders:
                yield f"{flag} {shlex.quote(folders[name])}"
            elif len(values) == 1 and inputs.get(name, {}).get("recipe") in self._variables:
                yield f"{flag} {self._input(name, inputs[name])[0]}"
            else:
                yield from (f"{flag} {self._words.get(each) or shlex.quote(each)}" for each in values)
