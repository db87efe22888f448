"""From a dataset to what a model needs to read its examples: sequences, and the masks that a plan asks for.

What is missing is made by the stages that a user would run by hand, as artifacts of their own.
"""

from __future__ import annotations

import shlex
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from guidance.errors import InputError, PlanError
from pipelines.inputs import is_dataset
from pipelines.progress import Progress, log
from pipelines.stages import dependencies, idf, masks, sequences
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import where_known
from pipelines.storage.manifest import MANIFEST, ArtifactMismatch, ArtifactMissing
from pipelines.storage.store import Store
from pipelines.text.parsers import SYNTAX
from pipelines.training.plan_inputs import features, model_input, read_tables, trained_tables

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.engine.stage import Files, Result
    from pipelines.training.text_words import TextWords

AnyConfig = TypeVar("AnyConfig", bound=Any)


def open_data(reference: str, store: Store, opened: ExitStack) -> tuple[Artifact, Artifact | None]:
    """A dataset, and its sequences if these were given instead.  Raises InputError if it is neither a dataset nor sequences
    of one, or a dataset that is not in the store."""
    data = opened.enter_context(store.load(reference))
    if data.kind == "sequences":
        with where_known():
            if "shape" not in data.counts:
                raise InputError(
                    f"{data.reference} has running text, not examples",
                    hint="guide build-dataset FILE, and give the dataset; or guide build-sequences DATASET TOKENIZER --packing examples",
                )
        return opened.enter_context(store.load_input(data, "corpus")), data
    if data.kind != "corpus":
        raise InputError(
            f"{reference!r} is an artifact of kind {data.kind}; expected: a dataset", hint="guide build-dataset FILE"
        )
    with where_known():
        if not is_dataset(data):
            raise InputError(
                f"{data.reference} is running text, not examples of a task", hint="guide build-dataset FILE"
            )
    check_here(data, store)
    return data, None


def check_here(data: Artifact, store: Store) -> None:
    """Raises InputError for a corpus of another store: what is made of it refers to it, and would not find it."""
    try:
        store.load(data.reference, verify=False).close()
    except ArtifactMissing as error:
        raise InputError(
            f"{data.path} is not in the store {store.root}, where sequences would be made of it",
            hint=f"guide import {shlex.quote(str(data.path))}",
        ) from error


def build_sequences(
    data: Artifact, tokenizer: str, max_length: int, store: Store, progress: Progress | None, packing: str = ""
) -> Artifact:
    """The examples of a dataset, or the text of a corpus, as sequences of a tokenizer's tokens.  Raises InputError if
    ``max_length`` is out of range.

    Args:
        packing: see `pipelines.stages.sequences.Config`; by default that of examples, or of text.
    """
    sequences.check_length(max_length)
    packed: dict[str, Any] = {"packing": packing or "examples"} if packing or is_dataset(data) else {}
    from guidance.checkpoint import TARGET_FOLDER

    config = sequences.Config(max_length=max_length, **packed)
    targets = Path(tokenizer) / TARGET_FOLDER
    target: dict[str, Any] = {"target_tokenizer": str(targets)} if packing == "pairs" and targets.is_dir() else {}
    made = _tell(
        "sequences", sequences.run(data.reference, tokenizer, config, store=store, progress=progress, **target)
    )
    return store.load(made.reference, kind="sequences")


def check_parser(plan: Plan, source: str, parser: str, *, training: bool = True, learned: str = "") -> None:
    """Raises PlanError if a plan reads syntax, and no parser is given.

    Args:
        source: what the message calls the plan.
        training: whether the losses of the plan are computed; else only what acts at inference reads anything.
        learned: the parser with which the model was trained, for the hint.
    """
    syntax = [need for need in features(plan, training=training) if need in SYNTAX]
    if syntax and not parser:
        known = (
            f"{shlex.quote(learned)}, with which it was trained" if learned else "spacy:en_core_web_sm, or stanza:LANG"
        )
        raise PlanError(
            f"{source}: it needs the features {', '.join(syntax)}, which a parser finds", hint=f"--parser {known}"
        )


def check_parser_of_trained(plan: Plan, model: str, parser: str, store: Store) -> None:
    """Raises PlanError if the plan of a trained model, a reference or a folder, reads syntax, and no parser is given."""
    learned = "" if parser else _trained_parser(model, store)
    check_parser(plan, model, parser, training=False, learned=learned)


def _trained_parser(model: str, store: Store) -> str:
    """The parser with which a model was trained; empty if nothing tells, or if it was a treebank, which parses no other text."""
    with suppress(ArtifactMissing, ArtifactMismatch), ExitStack() as opened:
        known = opened.enter_context(store.load(model, kind="model", verify=False))
        for role in ("masks", "deps"):
            known = opened.enter_context(store.load_input(known, role, verify=False))
        parser = str(known.manifest["config"]["parser"])
        return "" if parser.startswith("conllu:") else parser
    return ""


def build_masks(
    data: Artifact,
    dataset: Artifact,
    plan: Plan,
    source: str,
    parser: str,
    store: Store,
    progress: Progress | None,
    *,
    training: bool = True,
    known_idf: str = "",
) -> list[str]:
    """The references of the masks that a plan needs for some sequences; empty if it needs none.  Raises PlanError if the
    plan reads syntax, and there is no parser.

    Args:
        known_idf: the idf that the model learned with (see `trained_idf`); by default that of the dataset is counted.
        source: names the plan in messages.
        parser: see `pipelines.stages.dependencies.Config`.
    """
    needed = [need for need in features(plan, training=training) if need != "segment"]
    if not needed:
        return []
    check_parser(plan, source, parser, training=training)
    tables: dict[str, str] = {}
    if "idf" in needed and known_idf:
        tables["idf"] = known_idf
    elif "idf" in needed:
        tables["idf"] = _tell("idf", idf.run(dataset.reference, store=store, progress=progress)).reference
    if any(need in SYNTAX for need in needed):
        trees = dependencies.run(dataset.reference, dependencies.Config(parser=parser), store=store, progress=progress)
        tables["deps"] = _tell("trees", trees).reference
    stage = masks.FOR_A_MODEL if known_idf else masks.STAGE
    joined = stage.run(data.reference, masks.Config(**tables), store=store, progress=progress)
    return [_tell("masks", joined).reference]


def read_by(
    model: str,
    folder: Path,
    data: Artifact,
    config: AnyConfig,
    store: Store,
    progress: Progress | None,
    packing: str = "",
) -> tuple[Artifact, AnyConfig]:
    """The sequences of a dataset or a corpus for a trained model, and the configuration with the masks that its plan needs.  Raises
    PlanError if the plan reads syntax, and there is neither a parser nor masks.

    Args:
        model: its reference or folder; folder: that of its files.
        config: with ``sequence_length``, ``parser`` and ``masks``, which are not made if they were given.
        packing: see `build_sequences`.
    """
    from guidance.checkpoint import find_plan
    from guidance.plan import Plan

    # random weights follow no plan; of a dataset masks are made all the same, for patterns that read words
    is_free = getattr(config, "random", None) is not None and not is_dataset(data)
    plan = Plan() if is_free else find_plan(folder) or Plan()
    if not config.masks:
        check_parser_of_trained(plan, model, config.parser, store)
    if not packing and is_dataset(data) and number_of_pairs(data) == data.counts["documents"] and _translates(folder):
        packing = "pairs"
    made = build_sequences(data, str(folder), longest(model, config.sequence_length, store), store, progress, packing)
    if config.masks:
        return made, config
    idf_of_training = trained_idf(model, plan, store)
    masks_made = build_masks(
        made, data, plan, str(folder), config.parser, store, progress, training=False, known_idf=idf_of_training
    )
    return made, config.model_copy(update={"masks": "".join(masks_made)})


def text_words(
    model: str,
    folder: Path,
    parser: str,
    device: str,
    store: Store,
    *,
    sentences: str = "rules",
    parses: bool = False,
) -> TextWords:
    """What finds the words of texts that come one by one, and what the plan of a trained model looks up, as the model learned with it.

    Raises:
        PlanError: the plan reads syntax, and there is no parser; or co-occurrence counts, and the model is a folder without its store.
        InputError: the parser cannot be opened, or the idf or the counts that the model learned with are gone.

    Args:
        model: its reference or folder; folder: that of its files.
        parser: see `pipelines.training.text_words.TextParser`; opened only if the plan reads syntax, or if ``parses`` says so.
        sentences: how texts are split into sentences, as in ``guide build-corpus --sentences``, if the text that the model was
            trained on is gone and does not say it.
    """
    from guidance.checkpoint import find_plan
    from guidance.plan import Plan
    from pipelines.statistics.role_tables import rarity_of
    from pipelines.text.sentences import splitter
    from pipelines.training.text_words import TextParser, TextWords, lines_of

    plan = find_plan(folder) or Plan()
    check_parser_of_trained(plan, model, parser, store)
    needed = features(plan, training=False)
    idf = None
    if "idf" in needed:
        with store.load(trained_idf(model, plan, store, is_needed=True), kind="idf") as table:
            idf = rarity_of(str(table.path))
    tables = looked_up(model, folder, store)
    if not needed and not (parser and parses):
        return TextWords(tables=tables)
    with suppress(ArtifactMissing), store.load(model, kind="model", verify=False) as trained:
        if (data := training_data(trained, store)) is not None:
            sentences = data.manifest["config"].get("sentences") or sentences
    split_all = splitter("rules" if sentences == "auto" else sentences)
    split = lines_of if sentences == "line" else lambda text: split_all([text])[0]
    is_parsed = bool(parser) and (parses or any(need in SYNTAX for need in needed))
    return TextWords(TextParser(parser, device, split) if is_parsed else None, idf, split, tables)


def looked_up(model: str, folder: Path, store: Store) -> dict[str, Any]:
    """What the plan of a trained model looks up by token when it is used, by name, as the model learned with it.  Raises InputError
    if it is gone."""
    from guidance.checkpoint import find_plan

    plan = find_plan(folder)
    if plan is None or not plan.tables(training=False):
        return {}
    with ExitStack() as opened:
        given = model_input(model, store)
        counts = {name: opened.enter_context(table) for name, table in trained_tables(given, store).items()}
        return read_tables({"model": given, **counts})


def check_split(data: Artifact, split: str) -> None:
    """Raises InputError if the split of these sequences is empty."""
    if not int(data.files.get(f"{split}.parquet", {}).get("rows") or 0):
        splits = [name.removesuffix(".parquet") for name in data.files if name.endswith(".parquet")]
        hint = f"--split {' or '.join(splits)}"
        if split == "test":
            hint += "; `guide build-corpus --test 0.05` holds back text for a test, build-dataset by --test or --test-fraction"
        raise InputError(f"{data.reference} has no sequences in {split!r}", hint=hint)


def training_data(model: Artifact | Files, store: Store) -> Artifact | None:
    """The dataset that a model was trained on; None if nothing tells, or if it is gone."""
    if not isinstance(model, Artifact) or "sequences" not in model.manifest["inputs"]:
        return None
    with suppress(ArtifactMissing), store.load_input(model, "sequences", verify=False) as data:
        return store.load_input(data, "corpus", verify=False)
    return None


def trained_idf(model: str, plan: Plan, store: Store, *, is_needed: bool = False) -> str:
    """The path of the idf of words that a model learned with; empty if it learned with none, or if it is gone.  Raises
    InputError if it is gone but needed.

    Args:
        model: a reference, or a model folder.
        plan: of the model; that its idf is gone is told only if the plan reads one.
        is_needed: whether none can be counted instead.
    """
    with suppress(ArtifactMissing), ExitStack() as opened:
        artifact = opened.enter_context(store.load(model, kind="model", verify=False))
        for role in ("masks", "idf"):
            if role not in artifact.manifest["inputs"]:
                break
            artifact = opened.enter_context(store.load_input(artifact, role, verify=False))
        else:
            return str(artifact.path.absolute())
    if "idf" in features(plan, training=False):
        problem = f"the plan of {model} reads idf, and that of its training text is not in this store"
        if is_needed:
            raise InputError(problem, hint="guide import the masks that the model was trained with, and their idf")
        log.warning("%s; it is counted in the data that are read now", problem)
    return ""


def _tell(what: str, made: Result | None) -> Result:
    assert made is not None, "only shards give None"
    log.info("%s: %s%s", what, made.reference, " (already there)" if made.reused else "")
    return made


USUAL_LENGTH = 128
"""Tokens of a sequence, where nobody says anything else."""


def longest(model: str, given: int, store: Store) -> int:
    """How many tokens the sequences of a model may have: ``given``, unless it is 0; else as many as in its training, if that is
    known; else 128, or what the model can read at most.  The model is a reference or a folder."""
    if given:
        return given
    folder, origin = Path(model), ""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        with store.load(model, kind="model", verify=False) as artifact:
            if "sequences" in artifact.manifest["inputs"]:
                with suppress(ArtifactMissing), store.load_input(artifact, "sequences", verify=False) as data:
                    return int(data.manifest["config"]["max_length"])
                origin = artifact.reference
            folder = artifact.path
    length = _usual_length(folder)
    if origin:
        log.warning(
            "the sequences that %s was trained on are not in this store, and with them their length; a sequence may have "
            "%d tokens",
            origin,
            length,
        )
    return length


def trained_summary(model: str, store: Store) -> int | None:
    """How many sentences a summary has in the data that a model was trained on; None if that is not known.  The model is a
    reference or a folder."""
    if Path(model).is_dir() and not (Path(model) / MANIFEST).exists():
        return None
    with store.load(model, kind="model", verify=False) as artifact:
        if "sequences" in artifact.manifest["inputs"]:
            with suppress(ArtifactMissing), store.load_input(artifact, "sequences", verify=False) as data:
                size: int | None = data.counts.get("summary_sentences")
                return size
    return None


def trained_pairs(model: str, store: Store) -> bool | None:
    """Whether the examples that a model was trained on are pairs of texts; None if that is not known.  The model is a reference or
    a folder."""
    if Path(model).is_dir() and not (Path(model) / MANIFEST).exists():
        return None
    with ExitStack() as opened, suppress(ArtifactMissing):
        artifact = opened.enter_context(store.load(model, kind="model", verify=False))
        if "sequences" in artifact.manifest["inputs"]:
            data = opened.enter_context(store.load_input(artifact, "sequences", verify=False))
            dataset = opened.enter_context(store.load_input(data, "corpus", verify=False))
            return number_of_pairs(dataset) > dataset.counts["documents"] / 2  # a second text may be empty
    return None


def number_of_pairs(dataset: Artifact) -> int:
    """How many examples of a dataset of texts and pairs have a second text."""
    pairs: int = dataset.counts["blocks"] - dataset.counts["documents"]
    return pairs


def _translates(folder: Path) -> bool:
    from guidance.checkpoint import config_of

    return bool(config_of(folder).is_encoder_decoder)


def _usual_length(folder: Path) -> int:
    """128 tokens, or as many as the model in a folder reads, if these are fewer."""
    if not (folder / "config.json").is_file():
        return USUAL_LENGTH
    from guidance.checkpoint import config_of
    from pipelines.training.model_checks import longest_input

    most = longest_input(config_of(folder))
    return USUAL_LENGTH if most is None else min(USUAL_LENGTH, most)
