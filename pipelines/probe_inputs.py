"""From a model and data to what a probe of sequences reads; what is missing is built by the stages that a user would run by hand."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pipelines import task_inputs
from pipelines.engine import stage
from pipelines.engine.stage import check_working_folder, knob, run_stage
from pipelines.progress import Progress
from pipelines.stages import corpus, sequences
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
from pipelines.training.learner import folder_of
from pipelines.training.plan_inputs import load_inputs, model_inputs

if TYPE_CHECKING:
    from pipelines.engine.stage import Options, Result, Stage


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
    from guidance.patterns import PATTERNS
    from pipelines.probing.patterns import spec_of

    asked = getattr(config, "patterns", None)
    measured = () if asked is None else map(spec_of, asked or PATTERNS)
    inputs = model_inputs(model, store, measured)
    folder = folder_of(inputs["model"])
    try:
        given = opened.enter_context(store.load(data))
    except ArtifactMissing:
        if not Path(data).is_file():
            raise
        made = corpus.run([data], corpus.Config(valid=0.0), store=store, progress=progress)
        assert made is not None, "only shards give None"
        given = opened.enter_context(store.load(made.reference))
        config = config.model_copy(update={"split": "train"})
    if given.kind == "corpus" and task_inputs.is_dataset(given):
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
    inputs["sequences"] = opened.enter_context(found)
    inputs |= load_inputs(config, [found], store)
    task_inputs.check_split(found, config.split)
    return inputs, config


def run_on(probe: Stage, model: str, data: str, config: SequencesConfig, store: Store, options: Options) -> Result:
    """Run a probe of sequences; see `open_inputs`.

    Args:
        options: the further options of every stage.
    """
    check_working_folder()
    with ExitStack() as opened:
        inputs, read = open_inputs(model, data, config, store, opened, options.get("progress"))
        return run_stage(probe, read, inputs, store=store, **options)
