"""Stage ``probe-steering``: which heads of a causal model are worth steering to what is marked in a prompt?

Reads a model and files of prompts with marked parts and their answers.  Writes probe@1: ``heads.parquet`` (one row for each head),
``tasks.parquet`` (one row for each file and head), ``probe.json``, ``heads.png``, and ``plan.toml``, which steers the chosen heads.
Plans also choose heads by ``heads.parquet`` (``--scores``).

Source: Zhang et al. 2023 (PASTA, 2311.02262), section 3.2; `guidance.probes.steering`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from guidance.errors import InputError, PlanError, counted
from pipelines.engine import stage
from pipelines.engine.declaration import Opening, Table
from pipelines.engine.stage import Device, Run, knob
from pipelines.inputs import Model, TextFiles
from pipelines.probing.heads import (
    COLUMNS,
    SHOWN_HEADS,
    TABLE,
    best,
    head_columns,
    head_name,
    heads_of,
    key_of,
    number,
    share,
    write_heads,
)
from pipelines.probing.probe import Findings, probe
from pipelines.storage.artifacts import Artifact
from pipelines.storage.tables import Columns
from pipelines.training.learner import folder_of

if TYPE_CHECKING:
    from guidance.probes.steering import Answers
    from pipelines.probing.steering import Question

PLAN, TASKS = "plan.toml", "tasks.parquet"

UNITS: Mapping[str, str] = {
    "score": "share of other heads that rank below it, in the file in which the head ranks worst",
    "right": "share of prompts answered right while the head alone is steered, mean over files",
    "log_probability": "mean log-probability of the expected answers meanwhile, in nats, mean over files",
}

OF_TASKS: Columns = {
    "task": ("string", "name of the file"),
    **COLUMNS,
    "right": ("float64", "share of its prompts answered right while the head alone is steered"),
    "log_probability": ("float64", "mean log-probability of the expected answers meanwhile, in nats"),
    "rank": ("int32", "place among all heads by these two, from 1"),
}
"""Columns of ``tasks.parquet``."""


class Config(stage.Config):
    """How heads are steered, and how many are chosen."""

    top: float = Field(
        0.25,
        gt=0,
        description="Best heads of each file, of which those are chosen that all files share: a number, or a share below 1.",
    )
    plan: str = knob(
        "preset:pasta",
        "Plan whose rows each head follows in turn, whatever heads they name: preset:NAME, a TOML file, or findings of `guide discover accept`.",
    )
    strength: float = Field(1.0, gt=0, le=1, description="Strength of the rows of --plan; 1 is as the plan says.")
    delimiter: str = Field(" ", description="Text between a prompt and its answer.")
    limit: int = Field(0, ge=0, description="Maximum number of prompts of each file; 0 for all.")
    batch_size: int = knob(8, "Prompts per batch.", ge=1)
    device: Device = "auto"


def check(config: Config, references: Mapping[str, object]) -> None:
    """Raises InputError if ``top`` is neither a number of heads nor a share."""
    if config.top >= 1 and not config.top.is_integer():
        raise InputError(f"--top {config.top:g} is no number of heads", hint="a whole number, or a share below 1")


def prepare(opening: Opening[Config]) -> None:
    """Read the plan.  Raises PlanError if it does not read marks, or acts on whole layers."""
    from pipelines.training.plans import read_plan
    from pipelines.training.run_inputs import PlanText

    if opening.config.delimiter.strip(" "):
        opening.stage = replace(opening.stage, version=2)  # version 1 took it for a part of the answer
    called = opening.config.plan
    plan = read_plan(called, opening.store)
    if "marked" not in plan.needs(training=False):
        raise PlanError(
            f"{called}: no row of it looks at what is marked when a model writes",
            hint="preset:pasta does; `guide plan new --preset pasta` writes it to a file",
        )
    for row in plan.guides:
        if of_layers := row.bound_mechanism.of_whole_layers:
            raise PlanError(f"{called}: {of_layers} belongs to whole layers, so no head can be chosen for it")
    opening.inputs["plan"] = PlanText(plan.dumps())


def measure(run: Run[Config]) -> Findings:
    """How the model answers while each head is steered.

    Raises:
        InputError: a line of a file is no prompt with its answer; or the model is no causal language model.
        PlanError: a row of the plan must be trained, or the model has a plan of its own that shapes it.
    """
    import torch

    from guidance.plan import Plan
    from guidance.probes.steering import chosen_heads, held_out, ranks, worst_ranks
    from pipelines.probing.steering import Answering
    from pipelines.training.steering import at_strength, on_heads

    config, plan = run.config, Plan.parse(run.inputs["plan"].text)
    tasks = _tasks(run)  # before the model is opened, so that a wrong file fails at once
    model = Answering(
        folder_of(run.inputs["model"]),
        plan,
        list(tasks.values()),
        delimiter=config.delimiter,
        batch_size=config.batch_size,
        device=config.device,
        called=config.plan,
    )
    heads, steering = model.heads(), at_strength(plan, config.strength)
    names = [(site.layer, head) for site, head in heads]
    top = int(config.top) if config.top >= 1 else max(1, round(config.top * len(heads)))
    prompts, has_halves = sum(map(len, tasks.values())), min(map(len, tasks.values())) > 1
    with run.progress.task("probe", total=(len(heads) + 2 + 2 * has_halves) * prompts, unit="prompts") as bar:

        def answers(steered: Sequence[int]) -> list[Answers]:
            """The answers to each task while these heads are steered, given by their place among all."""
            found = model.answers(on_heads(steering, [names[n] for n in steered]))
            bar.advance(prompts)
            return found

        plain, everywhere = answers([]), answers(range(len(heads)))
        alone = [answers([n]) for n in range(len(heads))]
        other_half = held_out(alone, top, answers) if has_halves else None
    chosen = chosen_heads(alone, top)
    if chosen:
        run.out.write(PLAN, on_heads(steering, [names[n] for n in chosen]).dumps().encode())
    else:
        run.warn(f"the files do not have one of their {top} best heads in common; a larger --top chooses more")
    sites, lower = dict.fromkeys(site for site, _ in heads), len(heads) - worst_ranks(alone)
    figures = {"score": torch.from_numpy(lower / max(1, len(heads) - 1))}
    for name in ("right", "log_probability"):
        figures[name] = torch.tensor([_mean(own)[name] for own in alone], dtype=torch.float64)
    sizes = [site.num_heads for site in sites]
    table = write_heads(
        run,
        {name: dict(zip(sites, own.split(sizes), strict=True)) for name, own in figures.items()},
        UNITS,
        "right",
        title=f"Prompts answered right while the head is steered\n{counted(prompts, 'prompt')}",
        label="% of prompts",
    )
    rows = [
        {"task": name, **key_of(*head), **own[task].figures(), "rank": int(rank)}
        for task, name in enumerate(tasks)
        for head, own, rank in zip(heads, alone, ranks([own[task] for own in alone]), strict=True)
    ]
    run.out.write_rows(TASKS, OF_TASKS, rows)
    summary = {
        "plain": _mean(plain),
        "all": _mean(everywhere),
        "held_out": other_half and _mean(other_half),
        "chosen": [list(names[n]) for n in chosen],
        "top": top,
        "best": best(table, "score"),
        "tasks": {
            name: {"prompts": len(own), "plain": plain[task].figures(), "all": everywhere[task].figures()}
            for task, (name, own) in enumerate(tasks.items())
        },
    }
    return Findings({"prompts": prompts, "heads": len(heads)}, summary)


def _tasks(run: Run[Config]) -> dict[str, list[Question]]:
    """The prompts of each file.  Raises InputError if a line is no prompt with its answer, or a file has none."""
    from pipelines.probing.steering import EXAMPLE, read_questions

    files, tasks = run.inputs["prompts"], {}
    for path, name in zip(files.paths, files.names, strict=True):
        tasks[name] = list(itertools.islice(read_questions(path, name), run.config.limit or None))
        if not tasks[name]:
            raise InputError(f"{name!r}: no prompt in it", hint=EXAMPLE)
    return tasks


def _mean(tasks: Sequence[Answers]) -> dict[str, float]:
    """The means of the figures of several tasks, each of which counts alike."""
    each = [task.figures() for task in tasks]
    return {name: sum(figures[name] for figures in each) / len(each) for name in each[0]}


def _table(artifact: Artifact, config: Config) -> Table:
    counts = artifact.counts
    ranked = sorted(heads_of(artifact), key=lambda row: (-row["score"], -row["right"]))
    measured = {"none": counts["plain"], "all": counts["all"]}
    if counts["held_out"] is not None:
        measured["best of the other half"] = counts["held_out"]
    measured |= {head_name(row): row for row in ranked[:SHOWN_HEADS]}
    rows = [(name, share(own["right"]), number(own["log_probability"])) for name, own in measured.items()]
    notes = [
        f"{counted(counts['prompts'], 'prompt')} in {counted(len(counts['tasks']), 'file')}; log-probabilities of the expected "
        "answers in nats",
    ]
    if counts["held_out"] is not None:
        notes.append("best of the other half: one half of the prompts chose the heads that were steered on the other")
    if len(ranked) > SHOWN_HEADS:
        notes.append(f"the first {SHOWN_HEADS} of {len(ranked):,} heads; {TABLE} has all")
    if counts["chosen"]:
        names = [f"{layer}-{head}" for layer, head in counts["chosen"]]
        notes += [f"chosen: {', '.join(names)}", f"guide generate MODEL --plan {artifact.path / PLAN} steers them"]
    return Table(("steered", "right", "log-probability"), rows, notes)


STAGE = probe(
    "steering",
    1,
    Config,
    measure,
    takes={
        "model": Model("A causal language model: a name, name@n, an id, or a folder."),
        "prompts": TextFiles(
            'JSON lines with a "prompt", in which <<parts>> are marked, and its "answer"; each file is a task.',
            argument="files",
        ),
    },
    check=check,
    prepare=prepare,
    table=_table,
    writes={"heads.parquet of steering": head_columns(UNITS), TASKS: OF_TASKS},
    help="""Find the heads of a causal language model that are worth steering to what is marked in a prompt (PASTA).

    Each head is steered alone while the model answers the prompts of some files.  For each file the heads are ranked by the share of
    right answers, then by the log-probability of the expected ones.  The heads that are among the best --top in every file are chosen.
    An answer is right if greedy search would write it, token by token.  For comparison, no head is steered, all heads are, and those
    that one half of the prompts chose, on the other half.  The file plan.toml of the result steers the chosen heads.
    """,
    examples=(
        "guide probe steering ./llama capitals.jsonl",
        "guide probe steering ./llama capitals.jsonl formats.jsonl --top 0.5 --limit 200",
        'guide generate ./llama "The capital of <<France>> is" --plan "$(guide show probe/58a1 --json | jq -r .path)/plan.toml"',
    ),
)

run = STAGE.run
