"""Stage ``evaluate``: how good a trained model is at its task.

Reads model@1, sequences@1, and where the evaluation needs it the corpus of these sequences, or their n-gram floors.  Writes
evaluation@1: ``metrics.json`` and ``predictions.parquet`` (one row for each example, in the order of the sequences).  The
first objective whose ``evaluation`` is for the model measures it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.declaration import Opening, Stage
from pipelines.engine.stage import Device, Files, Run, knob
from pipelines.inputs import Model
from pipelines.progress import log
from pipelines.stages import missing
from pipelines.stages.floors import OWN_NGRAMS
from pipelines.stages.reading import Reading
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMissing
from pipelines.text.tokenizer_files import TOKENIZER_FILES, folder_files, laid_out, load_tokenizer, tokenizer_files
from pipelines.training.evaluations import MEASURED, EvaluationConfig, measured_by
from pipelines.training.learner import folder_of
from pipelines.training.objective import Objective
from pipelines.training.plan_inputs import check_needs, read_tables
from pipelines.training.task import Task

__all__ = ["STAGE", "Config", "run"]


class SharedConfig(stage.Config):
    """Settings of every evaluation."""

    split: Literal["train", "valid", "test"] = Field(
        "test", description="Split of the sequences; a text file is read as a whole."
    )
    weights: str = Field(
        "last",
        pattern=r"^(last|best(-[2-9]|-[1-9][0-9])?)$",
        description="The weights of the last step, or those of the best validation; best-2 takes the second best one of "
        "`guide finetune --keep-best`.",
    )
    limit: int = Field(0, ge=0, description="Maximum number of examples; 0 for all.")
    sequence_length: int = knob(
        0,
        "For a dataset or a text: longest sequence, in tokens; by default that of the model's own sequences, or 128.",
        ge=0,
    )
    parser: str = knob(
        "", "For a dataset or a text: the parser, for plans that read syntax, as in `guide build-deps --parser`."
    )
    masks: str = knob(
        "", "Artifact that `guide build-masks` made of the sequences, for plans that read words, idf or trees."
    )
    scores: str = knob("", "A JSON, CSV or Parquet file with scores of heads, for plans that choose heads by score.")
    batch_size: int = knob(32, "Examples per batch.", ge=1)
    device: Device = "auto"


class Config(EvaluationConfig, SharedConfig):
    """Settings of an evaluation; those of a single task are in its class."""

    if TYPE_CHECKING:
        floors: bool = True


_FIRST = {"split", "weights", "limit", "beams", "length_penalty", "max_length", "bleu_tokenizer"}
"""Settings that stand in all recipes, because recipes have always had them."""

Config.later = Config.model_fields.keys() - _FIRST


class Examples(Reading):
    """What the model is measured on."""

    def check(self, opening: Opening[Any]) -> None:
        """Raises InputError when no objective can measure the model on such data, or the split is empty."""
        sequences = opening.inputs["sequences"]
        _check_settings(measured_by(folder_of(opening.inputs["model"]), sequences), opening.config)
        super().check(opening)


def _prepare(opening: Opening[Config]) -> None:
    """Add what the evaluation of this model reads besides its sequences."""
    config, inputs, sequences = opening.config, opening.inputs, opening.inputs["sequences"]
    row = measured_by(folder_of(inputs["model"]), sequences)
    if row.needs_corpus:
        inputs["corpus"] = opening.load_input(sequences, "corpus")
    if row.wants_corpus:
        try:
            inputs["corpus"] = opening.load_input(sequences, "corpus")
        except ArtifactMissing:
            log.warning("the corpus of %s is not in the store, so nothing is said by the byte", sequences.reference)
    if row.needs_corpus and (trained_on := missing.training_data(inputs["model"], opening.store)) is not None:
        opening.stack.enter_context(trained_on)
        if issubclass(row, Task):
            inputs["trained_on"] = trained_on
        else:
            _tell_of_seen_texts(inputs["corpus"], trained_on, config.split)
    if issubclass(row, Task):
        if isinstance(inputs["model"], Files):
            _tell_of_layout(folder_of(inputs["model"]))
        # since version 2 seen examples and unknown labels are counted; since 3 no document is scored that the limit has cut, and
        # what is not defined of a class is null; since 4 plans of taggers read the words of the parser
        opening.stage = replace(opening.stage, version=4 if row.shape == "tags" and config.masks else 3)
    if row.floors and config.floors:
        if config.split == "train":
            log.warning("%s: %s", sequences.reference, OWN_NGRAMS)
        elif _rows(sequences, "train"):
            inputs["floors"] = _floors(row, opening)
        else:
            log.warning("%s has no training text to count, so there are no n-gram floors", sequences.reference)


def _tell_of_layout(folder: Path) -> None:
    """Warn of a model from elsewhere whose tokenizer puts other special tokens around texts than sequences have."""
    if TOKENIZER_FILES[0] not in (found := folder_files(folder)).names:
        return
    files = tokenizer_files(found)
    if (ours := laid_out(files)) != files:
        around = (" ".join(load_tokenizer(each).encode("", "").tokens) for each in (files, ours))
        log.warning(
            "%s: its tokenizer puts '%s' around two texts, and guide '%s'; other programs may compute other scores",
            folder,
            *around,
        )


def _tell_of_seen_texts(corpus: Artifact, trained_on: Artifact, split: str) -> None:
    """Warn of examples of a split that a model was trained on, where its evaluation does not count them."""
    from pipelines.text.corpus_files import text_digests

    known = set(text_digests(trained_on, split="train").values())
    tested = text_digests(corpus, split=split).values()
    if seen := sum(digest in known for digest in tested):
        log.warning("%s of %s examples have the text of an example that the model was trained on", seen, len(tested))


def _check_settings(row: type[Objective], config: Any) -> None:
    """Raises InputError when a setting of another evaluation was changed."""
    own = {name for group in row.evaluation_settings for name in group.model_fields}
    for task, other in MEASURED.items():
        for name, field in (pair for group in other.evaluation_settings for pair in group.model_fields.items()):
            if name not in own and getattr(config, name) not in (
                field.default,
                False,
            ):  # what is not there is left out already
                flag = "--" + name.replace("_", "-")
                raise InputError(f"{flag} is for {task}, and this model is measured as {row.measured_as}")


def _rows(data: Artifact, split: str) -> int:
    """How many sequences a split has."""
    return int(data.files.get(f"{split}.parquet", {}).get("rows") or 0)


def _floors(row: type[Objective], opening: Opening[Config]) -> Artifact:
    """The n-gram floors of the tokens that will be predicted."""
    from pipelines.stages import floors
    from pipelines.training.learners.masked_scores import probability

    config: Any = opening.config
    masking: dict[str, Any] = {}
    if "mask_seed" in {name for group in row.evaluation_settings for name in group.model_fields}:
        masking = {"seed": config.mask_seed, "mask_probability": probability(config, opening.inputs["model"])}
    settings = floors.Config(split=config.split, layout=row.floors, limit=config.limit, **masking)
    wait, progress = opening.options.get("wait", True), opening.progress
    sequences = opening.inputs["sequences"].reference
    return floors.run(sequences, settings, store=opening.store, wait=wait, progress=progress).artifact


def build(run: Run[Config]) -> None:
    """Evaluate a model on a split.  Raises InputError if model and sequences do not fit each other, and NumericalError if a
    likelihood is not finite."""
    from guidance.checkpoint import CONFIG_FILE, find_plan
    from guidance.plan import Plan
    from pipelines.training.opening import open_trained

    given = run.inputs["model"]
    folder = folder_of(given)
    if (weights := run.config.weights) != "last":
        if not (isinstance(given, Artifact) and f"{weights}/{CONFIG_FILE}" in given.files):
            raise no_weights(folder, weights)
        folder = folder / weights
    row = measured_by(folder, run.inputs["sequences"])
    check_needs(find_plan(folder) or Plan(), str(folder), run.inputs, training=False)
    model, handle = open_trained(folder, read_tables(run.inputs), run.config.device, row.opened_as())
    row.evaluate(run, folder, model, handle)


def no_weights(folder: Path, weights: str) -> InputError:
    """The error for a model without the best weights that were asked for."""
    if (folder / weights / "config.json").is_file():
        return InputError(
            f"{folder}: a folder that no run of this store wrote; {weights} in it is a model of its own",
            hint=f"give {folder / weights} as the model, with --weights last",
        )
    if weights == "best":
        return InputError(f"{folder}: has no best model, because there was no validation", hint="--weights last")
    return InputError(
        f"{folder}: has no {weights} weights", hint="guide finetune --keep-best keeps more than the best ones"
    )


STAGE = Stage(
    "evaluate",
    "evaluation",
    1,
    Config,
    build,
    takes={
        "model": Model(),
        "data": Examples("A dataset of its task, sequences of its tokenizer, a corpus, or a text file."),
    },
    prepare=_prepare,
)

run = STAGE.run
