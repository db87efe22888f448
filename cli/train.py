"""Commands that train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from cli.next_commands import named
from cli.options import Session, stage_command
from cli.tables import folded
from cli.usual_names import usual
from guidance.errors import InputError
from pipelines import quickstart
from pipelines.engine.stage import Result
from pipelines.stages import finetune, pretrain, search
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.adversarial import AdversarialConfig
from pipelines.training.objectives import OBJECTIVES, OWNERS
from pipelines.training.run_inputs import is_guided
from pipelines.training.tasks import OWNERS as TASK_OWNERS
from pipelines.training.tasks import TASKS

TOPICS: dict[str, tuple[str, ...]] = {
    "Most used": ("plan", "steps", "name", "architecture", "size", "learning_rate", "batch_size", "seed"),
    "What is learned": ("objective", *OWNERS),
    "Model": ("init", "architecture", "size", "layers", "hidden", "heads", "ffn", "dropout", "attention_dropout"),
    "Guidance": ("plan", "masks", "cooccur", "totals", "masking", "scores"),
    "Batches": ("steps", "epochs", "batch_size", "batch_tokens", "bucket", "sampling", "seed"),
    "Optimizer": (
        "learning_rate",
        "schedule",
        "warmup_steps",
        "weight_decay",
        "beta1",
        "beta2",
        "epsilon",
        "clip",
    ),
    "Validation and checkpoints": (
        "evaluate_every",
        "valid_sequences",
        "snapshots",
        "save_every",
        "max_time",
        "resume",
        "allow_change",
        "report_to",
    ),
    "Machine": ("device", "precision", "micro_batches", "gradient_checkpointing", "compile"),
}


def _describe_needs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Put what each objective and task needs into the help of a command."""
    needs = "  ".join(objective.needs for objective in OBJECTIVES.values())
    tasks = "  ".join(task.needs for task in TASKS.values() if task.needs)
    command.__doc__ = (command.__doc__ or "").replace("{objectives}", needs).replace("{tasks}", tasks)
    return command


def after_pretrain(made: Artifact, store: Store) -> tuple[str, ...]:
    """The commands to suggest after `pretrain`: see how good the model is, or how much better than a plain one."""
    settings = made.manifest["config"]
    evaluate = ("guide evaluate {} {sequences}",) if settings["objective"] == "translation" else ()
    compare = ("guide compare {model} {}",) if is_guided(made.manifest) else ()
    return (*evaluate, *compare, "guide show {}")


@stage_command(
    "pretrain",
    pretrain.Config,
    group="Train",
    topics=TOPICS,
    examples=[
        *(example for objective in OBJECTIVES.values() for example in objective.examples),
        "for s in 0 1 2; do guide pretrain wiki-128 --architecture bert --seed $s --name plain-$s; done",
        "guide pretrain wiki-128 news-128 --sampling 0.8 --sampling 0.2 --plan my-plan.toml",
        "guide pretrain wiki-128 --layers 8 --hidden 128 --heads 4 --learning-rate 1e-3 --schedule constant",
        "torchrun --nproc-per-node 2 --no-python guide pretrain wiki-128 --plan preset:neighbours",
        "guide pretrain wiki-128 --steps 9000 --resume model/1f0c --allow-change steps",
    ],
    next_command=after_pretrain,
)
@_describe_needs
def pretrain_command(
    session: Session,
    config: pretrain.Config,
    sequences: Annotated[
        list[str], typer.Argument(help="Sequences: a name, name@n, an id, or a path; one or more.", show_default=False)
    ],
    resume: Annotated[
        str | None, typer.Option(help="The unfinished run to continue, model/ID; a setting that differs is an error.")
    ] = None,
    allow_change: Annotated[
        list[str] | None, typer.Option(help="A setting that may differ from that of --resume (repeatable).")
    ] = None,
) -> Result | None:
    """Pre-train a model, with or without guided heads.

    {objectives}

    A plan may need more inputs: preset:roles needs what `guide build-masks` makes of the same sequences; preset:mcmisp (for
    electra) and preset:mcmisp-bert (for mlm) need what `guide build-cooccur` counts.  With --init, make the sequences with
    that model's tokenizer: `guide build-sequences` takes the model folder.  Missing inputs are reported before training
    starts.  `guide plan show` lists all presets; `guide plan new` writes a plan to edit.

    Ctrl-C or SIGTERM finishes the current step and saves; the same command continues the run, bit for bit.
    """
    return pretrain.run(sequences, config, resume=resume, allow_change=allow_change or (), **session.options())


FINETUNE_TOPICS = {
    **TOPICS,
    "Most used": ("init", "plan", "epochs", "name", "task", "learning_rate", "batch_size", "seed"),
    "What is learned": ("task", "select", *TASK_OWNERS),
    "Model": (*TOPICS["Model"], "vectors", "embeddings_from", "tokenizer", "max_length"),
    "Guidance": (*TOPICS["Guidance"], "parser"),
    "Adversarial training": tuple(AdversarialConfig.model_fields),
    "Batches": ("epochs", "steps", *TOPICS["Batches"][2:]),
    "Optimizer": (*TOPICS["Optimizer"][:3], "warmup_fraction", *TOPICS["Optimizer"][3:]),
    "Validation and checkpoints": ("evaluate_every", "patience", *TOPICS["Validation and checkpoints"][1:]),
}


def after_finetune(made: Artifact, store: Store) -> tuple[str, ...]:
    """The commands to suggest after `finetune`: measure the model on the test split, if there is one."""
    dataset = next((other for other in _datasets_of(made, store)), None)
    return (f"guide evaluate {{}} {dataset}",) if dataset else ("guide show {}",)


def _datasets_of(made: Artifact, store: Store) -> Iterator[str]:
    with contextlib.suppress(InputError):
        with store.load_input(made, "sequences", verify=False) as data:
            if "test.parquet" in data.files:
                known = data.manifest["inputs"]["corpus"]
                yield named(store, "corpus", known["recipe"])


@stage_command(
    "finetune",
    finetune.Config,
    group="Train",
    topics=FINETUNE_TOPICS,
    examples=[
        *(example for task in TASKS.values() for example in task.examples),
        "for s in 0 1 2; do guide finetune reviews --init my-model --seed $s --name reviews-$s; done",
    ],
    next_command=after_finetune,
)
@_describe_needs
def finetune_command(
    session: Session,
    config: finetune.Config,
    data: Annotated[
        str,
        typer.Argument(
            help="A dataset, or sequences that were made of it with the model's tokenizer.", show_default=False
        ),
    ],
    resume: Annotated[
        str | None, typer.Option(help="The unfinished run to continue, model/ID; a setting that differs is an error.")
    ] = None,
    allow_change: Annotated[
        list[str] | None, typer.Option(help="A setting that may differ from that of --resume (repeatable).")
    ] = None,
) -> Result | None:
    """Fine-tune a model on the labelled examples of a task, with or without guided heads.

    The dataset comes from `guide build-dataset`.  The task follows from it; --task chooses another.  --init takes a model of
    `guide pretrain` or any local Hugging Face folder; without it a new model is trained.  Sequences, and the masks that the
    plan needs, are made on the way, as artifacts of their own.

    {tasks}

    Ctrl-C or SIGTERM finishes the current step and saves; the same command continues the run, bit for bit.
    """
    return finetune.run(data, config, resume=resume, allow_change=allow_change or (), **session.options())


SEARCH_TOPICS = {
    "Search": ("grid", "seeds", "folds", "fold_seed", "weights", "shard"),
    **{
        heading: tuple(name for name in names if name not in ("resume", "allow_change"))
        for heading, names in FINETUNE_TOPICS.items()
    },
}


def after_search(made: Artifact, store: Store) -> tuple[str, ...]:
    """The command to suggest after `search`: look at all runs."""
    return ("guide show {}",)


@stage_command(
    "search",
    search.Config,
    group="Train",
    topics=SEARCH_TOPICS,
    examples=[
        "guide search reviews --init my-model --grid learning-rate=1e-5,2e-5,5e-5 --seeds 3",
        "guide search reviews --init my-model --folds 10 --plan preset:asa --name asa-folds",
        "guide search reviews --grid layers=2,4 --grid dropout=0.2,0.3 --select accuracy --patience 5 --epochs 30",
        "guide search reviews --init my-model --seeds 5 --shard 2/8   # one of 8 jobs; afterwards, without --shard, it goes on",
        "guide compare plain-folds asa-folds",
    ],
    next_command=after_search,
)
def search_command(
    session: Session,
    config: search.Config,
    data: Annotated[str, typer.Argument(help="A dataset: a name, name@n, an id, or a path.", show_default=False)],
) -> Result | None:
    """Fine-tune with every combination of some settings, over several seeds or folds, and test the best one.

    All options of `guide finetune` apply to every run.  In each fold the combination with the best mean validation over its
    seeds is chosen, and only its models are measured on the test split: the means and standard deviations that are
    printed.  Without --folds the splits of the dataset are used.

    Every run is a model of its own.  An interrupted search goes on where it was, and jobs can share the runs by --shard.
    `guide compare` tests two searches over the same seeds or folds.
    """
    config = config.model_copy(update={"grid": [_usual_names(text) for text in config.grid]})
    result = search.run(data, config, **session.options())
    for line in search_lines(result.artifact.counts) if result else ():
        session.tell(line)
    return result


def _usual_names(text: str) -> str:
    """An axis of a grid, with our name for a setting that others call otherwise, such as ``lr``."""
    name, equals, values = text.partition("=")
    flag = "--" + name.strip().removeprefix("--").replace("_", "-")
    known = ["--" + field.replace("_", "-") for field in finetune.Config.model_fields]
    return (usual(flag, known) or flag)[2:] + equals + values


def search_lines(counts: Mapping[str, Any]) -> list[str]:
    """What a search has found: the validation of each setting, and the test metrics of the chosen ones."""
    settings = [
        (name or "(no grid)", _mean_and_sd(found), f"{found['chosen']:,}") for name, found in counts["settings"].items()
    ]
    metrics = [(name, _mean_and_sd(found)) for name, found in counts["metrics"].items()]
    return [
        *folded(("setting", f"validation: {counts['select']}", "runs chosen"), settings, None),
        *folded(("metric", "on the test split"), metrics, None),
    ]


def _mean_and_sd(found: Mapping[str, float | None]) -> str:
    if found["mean"] is None:
        return "undefined"
    return f"{found['mean']:.4f}" + (f" ± {found['sd']:.4f}" if found["sd"] is not None else "")


@stage_command(
    "quickstart",
    quickstart.Config,
    group="Start",
    examples=[
        "guide quickstart",
        "guide quickstart --corpus novel.txt",
        "guide quickstart --corpus text/*.txt --steps 300",
    ],
    next_command="guide lineage {}",
)
def quickstart_command(
    session: Session,
    config: quickstart.Config,
    more: Annotated[list[str] | None, typer.Argument(help="Further files of --corpus.", show_default=False)] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="Your own text, in a format of build-corpus, instead of Python's documentation."),
    ] = None,
) -> Result:
    """See what guidance does: train the same small model with and without guided heads, in a few minutes."""
    result = quickstart.run([*(corpus or []), *(more or [])], config, **session.options())
    folder = result.artifact.path
    session.tell(result.artifact.counts["table"])
    session.tell(f"learning curves: {folder / 'learning.png'}\nattention of guided heads: {folder / 'attention.png'}")
    return result
