"""Trained models at work on files: what they say of every example.

The files become a dataset and sequences in a temporary store, so that a model reads them exactly as ``guide evaluate`` would.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import Field, create_model

from guidance.errors import InputError, counted
from pipelines.engine import stage
from pipelines.engine.stage import knob
from pipelines.progress import Progress, log, warnings_only
from pipelines.stages import dataset, evaluate, missing
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import machine_errors
from pipelines.storage.store import Store
from pipelines.text.blocks import Notes
from pipelines.text.examples import NO_LABELS
from pipelines.text.formats import FORMATS
from pipelines.text.line_layout import check_not_columns
from pipelines.text.readers import TextFile, format_of, known_extension
from pipelines.text.sources import STDIN, expand
from pipelines.text.structured import ONE_SECTION
from pipelines.text.task_examples import EMPTY_CHOICE
from pipelines.training.learner import folder_of
from pipelines.training.plan_inputs import check_needs, model_input, read_tables, trained_tables
from pipelines.training.task import Task
from pipelines.training.tasks import TASKS, task_of

_OF_FILES = (
    *("encoding", "text_column", "pair_column", "id_column", "choices_column", "question_column", "separator"),
    *("summary_sentences", "header", "quoting", "ragged", "sentences"),
)
"""Settings of ``build-dataset`` that files without labels have too."""

_OF_MODELS = ("weights", "limit", "sequence_length", "parser", "scores", "batch_size", "device")
"""Settings of ``evaluate`` that have nothing to do with what is right."""


_OF_LABELS = (NO_LABELS, ONE_SECTION)
"""What is said of data without labels: files to predict need none."""


def _fields(config: type[stage.Config], names: Sequence[str]) -> dict[str, Any]:
    return {name: (config.model_fields[name].annotation, config.model_fields[name]) for name in names}


_task: Any = Literal.__getitem__(("auto", *TASKS))

Config: Any = create_model(
    "Config",
    __base__=stage.Config,
    __doc__="How to read files, and how to compute.",
    format=(
        dataset.FormatName | None,
        Field(None, description="Format of the files, as in build-dataset; by default decided by their extension."),
    ),
    **_fields(dataset.Config, _OF_FILES),
    **_fields(evaluate.SharedConfig, _OF_MODELS),
    task=(
        _task,
        knob("auto", "Task of the model; by default its configuration tells."),
    ),
)


def predict(
    model: str,
    files: Sequence[str],
    config: Any,
    *,
    store: Store,
    stdin: BinaryIO | None = None,
    progress: Progress | None = None,
) -> Iterator[dict[str, Any]]:
    """What a fine-tuned model says of each example of some files, in their order.  Raises InputError if the model has no
    head for a task, or a file cannot be read, and PlanError if the plan of the model needs a parser, and none is given.

    Args:
        model: a reference, or a model folder.
        files: files, folders, patterns or ``-``.  Text files have an example on each line; for summarisation and
            segmentation a file is a document.

    Returns:
        For each example its ``id`` and what the model says, in JSON's types; see the ``answers`` of its task.
    """
    from guidance.checkpoint import config_of, find_plan
    from guidance.plan import Plan
    from pipelines.training.opening import open_trained

    given = model_input(model, store)
    folder = folder_of(given)
    described = config_of(folder)
    task = TASKS[config.task] if config.task != "auto" else task_of(described)
    if task is None:
        raise InputError(
            f"{folder}: a {described.model_type} model without a head for a task",
            hint="guide finetune DATASET --init MODEL; `guide fill` and `guide translate` put other models to work",
        )
    plan = find_plan(folder) or Plan()
    missing.check_parser_of_trained(plan, model, config.parser, store)
    length = missing.longest(model, config.sequence_length, store)
    idf = missing.trained_idf(model, plan, store, is_needed=True)
    if task.shape == "summaries" and config.summary_sentences is None:
        config = config.model_copy(update={"summary_sentences": missing.trained_summary(model, store)})
    weights = folder
    if config.weights != "last":
        weights = folder / config.weights
        if not weights.is_dir():
            raise evaluate.no_weights(folder, config.weights)
    with contextlib.ExitStack() as stack:
        with machine_errors("the folder for temporary files"):
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="guide-predict-")))
        own = Store(scratch / "artifacts")
        sources, config = _spool(stdin, files, config, scratch)
        with warnings_only(without=_OF_LABELS):
            made = stack.enter_context(own.load(_dataset(task, sources, config, own, progress)))
            for warning in made.manifest["warnings"]:
                if warning.startswith(EMPTY_CHOICE):
                    place = re.sub(r"^[\d,]+ times, first ", "", warning.removeprefix(f"{EMPTY_CHOICE}: "))
                    raise InputError(
                        f"{place}: a choice is empty, and predictions number the choices",
                        hint="give it a text, or leave it out",
                    )
            if task.shape == "examples":
                _check_pairs(made, missing.trained_pairs(model, store))
            tokens = stack.enter_context(missing.build_sequences(made, str(folder), length, own, progress))
            inputs: dict[str, Any] = {"model": given, "corpus": made, "sequences": tokens}
            for masks in missing.build_masks(
                tokens, made, plan, str(folder), config.parser, own, progress, training=False, known_idf=idf
            ):
                inputs["masks"] = stack.enter_context(own.load(masks))
        if config.scores:
            inputs["scores"] = stage.Files.of([Path(config.scores)], [Path(config.scores).name])
        inputs |= {name: stack.enter_context(table) for name, table in trained_tables(given, store).items()}
        check_needs(plan, str(folder), inputs, training=False)
        opened, handle = open_trained(weights, read_tables(inputs), config.device, task.opened_as())
        settings = evaluate.Config(split="test", limit=config.limit, batch_size=config.batch_size)
        yield from task.answers(stage.Work(settings, inputs, scratch, progress or Progress()), opened, handle)


def _check_pairs(made: Artifact, are_pairs: bool | None) -> None:
    """Warns of examples that are no pairs for a model of pairs, and the other way round.

    Args:
        are_pairs: whether the model learned pairs; None if that is not known.
    """
    number, pairs = made.counts["documents"], missing.number_of_pairs(made)
    if are_pairs and pairs < number:
        log.warning(
            "%s no second text, and the model learned pairs; lines have a tab between their texts, and --pair-column names the second one",
            counted(number - pairs, "has", "have", of=counted(number, "example")),
        )
    elif are_pairs is False and pairs:
        log.warning(
            "%s a second text, and the model learned single texts",
            counted(pairs, "has", "have", of=counted(number, "example")),
        )


def _spool(stdin: BinaryIO | None, files: Sequence[str], config: Any, folder: Path) -> tuple[list[str], Any]:
    """The files, one of them with what stdin holds, and the settings, with the format if they leave it open.

    Beside other files its name says whether these are JSON lines, since all have one format.
    """
    if STDIN not in files:
        return list(files), config
    data = stdin.read() if stdin is not None else b""
    is_json = data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    path = folder / ("stdin" if len(files) == 1 else "stdin.jsonl" if is_json else "stdin.txt")
    if len(files) == 1 and is_json and config.format is None:
        config = config.model_copy(update={"format": "jsonl"})
    with machine_errors(str(path)):
        path.write_bytes(data)
    return [str(path) if file == STDIN else file for file in files], config


_OF_TEXT = {"examples": "lines", "tags": "words", "summaries": "documents", "segments": "choi"}
"""For each shape, the format of text files."""


def _dataset(task: type[Task], sources: Sequence[str], config: Any, store: Store, progress: Progress | None) -> str:
    """The reference of a dataset of these files, all of it in the split ``test``."""
    names = list(sources)
    if config.format is None:
        with expand(sources, any_kind=True, stdin=None) as found:
            names = [str(path) for path in found.paths] or names
    first = next(filter(known_extension, names), names[0])
    kind = config.format or (format_of(first, None) if known_extension(first) else "text")
    settings: dict[str, Any] = {name: getattr(config, name) for name in _OF_FILES}
    if kind == "text":
        if task.shape not in _OF_TEXT:
            raise InputError(f"{first!r}: {task.name} reads JSON lines with a list of choices", hint="--format jsonl")
        settings["format"] = _OF_TEXT[task.shape]
        if config.format is None:
            hint = "for words with their tags: --format conll" if task.shape == "tags" else "give texts"
            hint += f"\nif it is text all the same: --format {settings['format']}"
            for source in names:
                file = TextFile(Path(source), Path(source).name, config.encoding, Notes())
                check_not_columns(file.first_lines(), file.name, hint)
    elif config.format is not None:
        shape = FORMATS[kind].shape if kind in FORMATS else "examples"
        if shape not in ("examples", task.shape):
            raise InputError(f"--format {kind} is for {shape}, and the model learned {task.name}")
        settings["format"] = kind
    if task.shape == "tags" and kind not in (*FORMATS, "text"):
        raise InputError(f"{first!r}: a tagger reads text with a sentence on each line", hint="--format words")
    if task.shape in ("summaries", "segments") and kind not in (*FORMATS, "jsonl", "text"):
        hint = f"JSON lines, or a text file for each document: --format {_OF_TEXT[task.shape]}"
        raise InputError(f"{first!r}: {task.name} reads documents, not tables", hint=hint)
    if kind == "jsonl":
        if task.shape == "choices" and config.choices_column is None:
            settings["choices_column"] = "choices"
        elif task.shape == "summaries":
            settings["format"] = "documents"
        elif task.shape == "segments":
            settings["sections_column"] = config.text_column
    return dataset.run({"test": sources}, dataset.Config(**settings), store=store, progress=progress).reference
