"""Commands that train."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cli.completion import artifacts
from cli.options import Session, stage_command
from cli.tables import folded
from cli.usual_names import usual
from pipelines import quickstart
from pipelines.engine.stage import Result
from pipelines.stages import finetune, search
from pipelines.training.topics import FINETUNE_TOPICS

SEARCH_TOPICS = {
    "Search": ("grid", "seeds", "folds", "fold_seed", "weights", "shard"),
    **{
        heading: tuple(name for name in names if name not in ("resume", "allow_change"))
        for heading, names in FINETUNE_TOPICS.items()
    },
}


@stage_command(
    "search",
    search.Config,
    kind=search.STAGE.kind,
    group="Train",
    topics=SEARCH_TOPICS,
    examples=[
        "guide search reviews --init my-model --grid learning-rate=1e-5,2e-5,5e-5 --seeds 3",
        "guide search reviews --init my-model --folds 10 --plan preset:asa --name asa-folds",
        "guide search reviews --grid layers=2,4 --grid dropout=0.2,0.3 --select accuracy --patience 5 --epochs 30",
        "guide search reviews --init my-model --seeds 5 --shard 2/8   # one of 8 jobs; afterwards, without --shard, it goes on",
        "guide compare plain-folds asa-folds",
    ],
    next_command="guide show {}",
)
def search_command(
    session: Session,
    config: search.Config,
    data: Annotated[
        str, typer.Argument(help="A dataset: a name, name@n, an id, or a path.", autocompletion=artifacts("corpus"))
    ],
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
        (_as_flags(name) or "(no grid)", _mean_and_sd(found), f"{found['chosen']:,}")
        for name, found in counts["settings"].items()
    ]
    metrics = [(name, _mean_and_sd(found)) for name, found in counts["metrics"].items()]
    return [
        *folded(("setting", f"validation: {counts['select']}", "runs chosen"), settings, None),
        *folded(("metric", "on the test split"), metrics, None),
    ]


def _as_flags(setting: str) -> str:
    """``learning_rate=0.1 ffn=8``, as tables hold it, in the way that people write it after ``--grid``."""
    return re.sub(r"(?:^| )\w+=", lambda name: name[0].replace("_", "-"), setting)


def _mean_and_sd(found: Mapping[str, float | None]) -> str:
    if found["mean"] is None:
        return "undefined"
    return f"{found['mean']:.4f}" + (f" ± {found['sd']:.4f}" if found["sd"] is not None else "")


@stage_command(
    "quickstart",
    quickstart.Config,
    kind=quickstart.STAGE.kind,
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
    for line in result.artifact.counts["table"].splitlines():
        session.tell(line)
    session.tell(f"learning curves: {folder / 'learning.png'}")
    session.tell(f"attention of guided heads: {folder / 'attention.png'}")
    return result
