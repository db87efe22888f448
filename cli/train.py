"""Commands that train."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.completion import artifacts
from cli.flags import make_config
from cli.options import Session, stage_command
from cli.tables import folded
from cli.usual_names import usual
from pipelines import quickstart
from pipelines.engine.stage import Result
from pipelines.searching.config import AllSettings
from pipelines.searching.settings import PLAN
from pipelines.stages import finetune, pretrain, search
from pipelines.storage.artifacts import Artifact
from pipelines.training.topics import FINETUNE_TOPICS

SEARCH_TOPICS = {
    "Search": ("grid", "leave_one_out", "subsets", "folds", "fold_seed", "along", "limit"),
    "Choice and test": ("seeds", "select", "weights", "test_seeds", "test_every"),
    "Parallel runs": ("jobs", "executor", "scheduler", "shard"),
    **{
        heading: tuple(name for name in names if name not in ("resume", "allow_change", "select"))
        for heading, names in FINETUNE_TOPICS.items()
    },
    "Only of pretrain": tuple(
        name for name in pretrain.Config.model_fields if name not in finetune.Config.model_fields
    ),
}


@stage_command(
    "search",
    AllSettings,
    kind=search.STAGE.kind,
    group="Train",
    topics=SEARCH_TOPICS,
    examples=[
        "guide search reviews --init my-model --grid learning-rate=1e-5,2e-5,5e-5 --seeds 3",
        "guide search reviews --init my-model --folds 10 --plan preset:asa --name asa-folds",
        "guide search reviews --grid layers=2,4 --grid dropout=0.2,0.3 --select accuracy --patience 5 --epochs 30",
        "guide search reviews --init my-model --grid learning-rate=1e-5,2e-5 --seeds 2 --test-seeds 5 --jobs 4",
        "guide search reviews --init my-model --seeds 5 --shard 2/8   # one of 8 jobs; afterwards, without --shard, it goes on",
        "guide search wiki-128 --architecture roberta --plan preset:ag --leave-one-out --seeds 3 --steps 2000",
        "guide search wiki-128 --architecture roberta --plan preset:ag --grid plan.next.weight=1,10,100 --steps 2000 --jobs 2",
        "guide search papers --plan preset:patterns --subsets --select rouge1 --jobs 4",
        "guide compare plain-folds asa-folds",
    ],
    next_command="guide compare {}",
)
def search_command(
    session: Session,
    config: Any,
    data: Annotated[
        list[str],
        typer.Argument(
            help="A dataset, for fine-tuning, or sequences of running text, for pre-training (one or more).",
            autocompletion=artifacts("corpus", "sequences"),
        ),
    ],
) -> Result | None:
    """Train with every combination of some settings, over several seeds or folds, and test the best one.

    Given a dataset it fine-tunes, with the options of `guide finetune`; given sequences of running text it pre-trains, with the
    options and the defaults of `guide pretrain`.  In each fold the combination with the best mean validation over its
    seeds is chosen, and only its models are measured on the test split: the means and standard deviations that are printed.
    Without --folds the splits of the data are used.

    --leave-one-out and --subsets compare rows of the plan: each set of rows is tested, with the best combination of the grid for
    these rows.  --test-seeds tests with seeds that the choice has not seen.

    Every run is a model of its own.  An interrupted search goes on where it was, and jobs can share the runs by --shard.
    `guide compare` tests two searches over the same seeds or folds, or the rows of one.
    """
    given = {name: getattr(config, name) for name in config.model_fields_set}
    kind = search.config_for(data, given, session.store)
    config = make_config(kind, given)
    config = config.model_copy(update={"grid": [_usual_names(text, kind) for text in config.grid]})
    result = search.run(data, config, **session.options())
    for line in search_lines(result.artifact) if result else ():
        session.tell(line)
    return result


def _usual_names(text: str, kind: Any) -> str:
    """An axis of a grid, with our name for a setting that others call otherwise, such as ``lr``."""
    name, equals, values = text.partition("=")
    if name.startswith(PLAN):
        return text
    flag = "--" + name.strip().removeprefix("--").replace("_", "-")
    known = ["--" + field.replace("_", "-") for field in kind.model_fields]
    return (usual(flag, known) or flag)[2:] + equals + values


def search_lines(found: Artifact) -> list[str]:
    """What a search has found: the validation of each setting, and the test metrics of those that were tested."""
    from pipelines.views.search_tables import search_tables

    return [line for each in search_tables(found) for line in (*folded(each.titles, each.rows, None), *each.notes)]


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
    """See what guidance does: train a small model plain and with preset:neighbours-fixed, in a few minutes."""
    result = quickstart.run([*(corpus or []), *(more or [])], config, **session.options())
    folder = result.artifact.path
    for line in result.artifact.counts["table"].splitlines():
        session.tell(line)
    session.tell(f"learning curves: {folder / 'learning.png'}")
    session.tell(f"attention of guided heads: {folder / 'attention.png'}")
    return result
