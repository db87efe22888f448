"""From a model and data to what a probe of sequences reads; what is missing is built by the stages that a user would run by hand."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from guidance.errors import InputError
from pipelines.engine.declaration import Opening, Take
from pipelines.inputs import Model
from pipelines.progress import log
from pipelines.stages import corpus, missing
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import where_known
from pipelines.storage.manifest import ArtifactMissing
from pipelines.training.learner import folder_of
from pipelines.training.plan_inputs import load_inputs


def read_data(reference: str, role: str, opening: Opening[Any], config: Any) -> tuple[Artifact, Any]:
    """Data as sequences for the model in one role, and the settings with the masks that its plan needs.  The reference names
    sequences that were made with its tokenizer, a dataset, a corpus or a text file.  Raises InputError if there are no such
    data."""
    store, progress = opening.store, opening.progress
    model = opening.references[role]
    try:
        data = opening.load(reference)
    except ArtifactMissing:
        if not Path(reference).is_file():
            raise
        try:
            made = corpus.run([reference], corpus.Config(valid=0.0), store=store, progress=progress)
        except InputError as error:
            if error.hint and "--" in error.hint:  # flags of the stage, which a probe does not have
                error.hint = f"guide build-corpus {shlex.quote(reference)} makes a corpus to give in its place; there {error.hint}"
            raise
        assert made is not None, "only shards give None"
        data = opening.load(made.reference)
        config = config.model_copy(update={"split": "train"})
    if data.kind == "corpus":
        missing.check_here(data, store)
    if role == "model":
        _warn_of_idle_settings(config, data)
    if data.kind == "corpus":
        folder = folder_of(opening.inputs[role])
        data, config = missing.read_by(model, folder, data, config, store, progress)
        return opening.stack.enter_context(data), config
    return opening.load(reference, kind="sequences"), config


def _warn_of_idle_settings(config: Any, data: Artifact) -> None:
    """Warn of settings that say how to read data of another kind."""
    for name in ("sequence_length", "parser"):
        if (value := getattr(config, name)) and data.kind == "sequences":
            flag = f"--{name.replace('_', '-')} {value}"
            log.warning(
                "%s has no effect: it is for datasets and texts, and %s has sequences already", flag, data.reference
            )


class Reading(Take):
    """Data for a model: sequences of its tokenizer; or a dataset, a corpus or a text file, of which sequences are made."""

    def __init__(self, help: str = "Sequences of its tokenizer, a dataset or a corpus, or a text file.") -> None:
        super().__init__(help, kinds=("sequences", "corpus"))

    def find(self, reference: str, opening: Opening[Any]) -> None:
        if not Path(reference).is_file():
            opening.store.find(reference)

    def add(self, role: str, reference: str, opening: Opening[Any]) -> None:
        data, opening.config = read_data(reference, "model", opening, opening.config)
        opening.inputs["sequences"] = data
        with where_known():
            self.check(opening)
            if data.counts.get("shape") in ("tags", "summaries", "segments"):
                # the version before read `segment` of other parts, and put sequences of one example into both halves
                opening.stage = replace(opening.stage, version=opening.stage.version + 1)
        opening.inputs |= load_inputs(opening.config, [data], opening.store)

    def check(self, opening: Opening[Any]) -> None:
        """Raises InputError when the data cannot be read by the model, or their split is empty."""
        missing.check_split(opening.inputs["sequences"], opening.config.split)


ON_SEQUENCES = {"model": Model(), "data": Reading()}
"""What probes of sequences take."""
