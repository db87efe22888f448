"""From a model and data to what a probe of sequences reads; what is missing is built by the stages that a user would run by hand."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipelines import task_inputs
from pipelines.engine import stage
from pipelines.engine.declaration import Opening, Take
from pipelines.engine.stage import knob
from pipelines.inputs import Model, is_dataset, measured_patterns
from pipelines.progress import Progress
from pipelines.stages import corpus, sequences
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
from pipelines.training.learner import folder_of
from pipelines.training.plan_inputs import load_inputs, model_inputs


class SequencesConfig(stage.Config):
    """Which sequences are read."""

    split: Literal["train", "valid", "test"] = Field(
        "valid", description="which split of the sequences; a text file is read as a whole"
    )
    limit: int = Field(1000, ge=0, description="maximum number of sequences; 0 for all")
    masks: str = knob("", "what `guide build-masks` made of the sequences, for patterns that read words, idf or trees")
    scores: str = knob(
        "", "JSON, CSV or Parquet file with columns layer, head and score, for plans that choose heads by score"
    )
    parser: str = knob("", "for a dataset: the parser, for plans that read syntax")
    sequence_length: int = knob(
        0, "for a dataset or a text: longest sequence, in tokens; by default as in training, or 128", ge=0
    )
    batch_size: int = knob(8, "sequences per batch", ge=1)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "where to compute; auto takes a GPU if there is one")


def open_inputs(
    model: str, data: str, config: Any, store: Store, opened: ExitStack, progress: Progress | None = None
) -> tuple[dict[str, Any], Any]:
    """The inputs of a probe, and its configuration with the masks that the plan of the model needs.

    Args:
        model: a reference, or a model folder.
        data: reference of sequences that were made with its tokenizer, of a dataset, or of a corpus; or a text file.  What is
            missing is built, as artifacts of their own.

    Raises:
        InputError: there is no such model or data, or the split is empty.
    """
    inputs = model_inputs(model, store, measured_patterns(config))
    read, config = read_data(model, folder_of(inputs["model"]), data, config, store, opened, progress)
    return inputs | read, config


def read_data(
    model: str, folder: Path, data: str, config: Any, store: Store, opened: ExitStack, progress: Progress | None
) -> tuple[dict[str, Any], Any]:
    """See `open_inputs`; without the model, whose folder is given."""
    try:
        given = opened.enter_context(store.load(data))
    except ArtifactMissing:
        if not Path(data).is_file():
            raise
        made = corpus.run([data], corpus.Config(valid=0.0), store=store, progress=progress)
        assert made is not None, "only shards give None"
        given = opened.enter_context(store.load(made.reference))
        config = config.model_copy(update={"split": "train"})
    if given.kind == "corpus" and is_dataset(given):
        found, config = task_inputs.read_by(model, folder, given, config, store, progress)
    elif given.kind == "corpus":
        length = task_inputs.longest(model, config.sequence_length, store)
        sequences.check_length(length)
        packed = sequences.run(
            given.reference, str(folder), sequences.Config(max_length=length), store=store, progress=progress
        )
        found = store.load(packed.reference, kind="sequences")
    else:
        found = store.load(data, kind="sequences")
    opened.enter_context(found)
    task_inputs.check_split(found, config.split)
    return {"sequences": found, **load_inputs(config, [found], store)}, config


class Reading(Take):
    """Data for a model: sequences of its tokenizer; or a dataset, a corpus or a text file, of which sequences are made."""

    def __init__(self, help: str = "Sequences of its tokenizer, a dataset or a corpus, or a text file.") -> None:
        super().__init__(help, kinds=("sequences", "corpus"))

    def add(self, role: str, reference: str, opening: Opening[Any]) -> None:
        model, folder = opening.references["model"], folder_of(opening.inputs["model"])
        found = read_data(model, folder, reference, opening.config, opening.store, opening.stack, opening.progress)
        opening.inputs |= found[0]
        opening.config = found[1]


ON_SEQUENCES = {"model": Model(), "data": Reading()}
"""What probes of sequences take."""
