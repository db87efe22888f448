"""``guide plan``: show plans, check them against a model, compare two, and start a new one."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from cli import completion
from cli.options import Session, command, newest
from cli.output import check_output_path
from cli.tables import table
from guidance.errors import GateFailed, InputError, PlanError, counted

if TYPE_CHECKING:
    from guidance.plan import Plan
    from guidance.sites import Site
    from pipelines.views.plans import Reach, Shape

Reference = Annotated[
    str,
    Argument(
        metavar="REF",
        help="preset:NAME, a TOML file, findings of `guide discover accept`, or a model with a plan.",
        autocompletion=completion.plans,
    ),
]
Model = Annotated[
    str | None,
    Option(
        metavar="MODEL",
        help="A model folder, a config.json, a model artifact, or roberta:12x12.",
        autocompletion=completion.artifacts("model"),
    ),
]
Scores = Annotated[
    Path | None,
    Option(metavar="FILE", help="JSON, CSV or Parquet with layer, head, score, for selectors by importance."),
]


@command(
    "plan show",
    examples=[
        "guide plan show",
        "guide plan show preset:ag",
        "guide plan show preset:ag --model roberta:12x12",
        "guide plan show my-model   # the plan that it carries",
    ],
)
def show_plan(
    session: Session,
    reference: Annotated[
        str | None,
        Argument(
            metavar="[REF]",
            help="preset:NAME, a TOML file, findings of `guide discover accept`, or a model with a plan; by default all presets are listed.",
            autocompletion=completion.plans,
        ),
    ] = None,
    model: Model = None,
    scores: Scores = None,
) -> None:
    """Show the guides of a plan, and with --model the heads that each one selects."""
    from pipelines.views import plans

    if reference is None:
        if model is not None or scores is not None:
            raise InputError(
                "--model and --scores say on which heads a plan acts, and no plan is given",
                hint=f"guide plan show preset:ag --model {model or 'MODEL'}; `guide plan show {model or 'MODEL'}` shows the plan "
                "that it carries",
            )
        summaries = {f"preset:{name}": summary for name, summary in plans.preset_summaries().items()}
        facts = [{"name": name, "summary": summary} for name, summary in summaries.items()]
        session.answer({"presets": facts}, table(("PRESET", "SUMMARY"), list(summaries.items())))
        return
    plan, shape, reach = _read(session, reference, model, scores)
    rows = plans.rows_of(plan)
    guides = [
        row | ({"reach": _as_json(reach[number])} if shape else {}) | {"explanation": guide.bound_mechanism.explanation}
        for number, (row, guide) in enumerate(zip(rows, plan.guides, strict=True))
    ]
    if not plan.guides and plan.pal is None:
        session.tell(f"{reference} carries no plan: none of its heads is guided")
        session.answer({"plan": reference, "guides": [], "pal": None, "model": model}, ())
        return
    pal = dataclasses.asdict(plan.pal) if plan.pal else None
    session.answer(
        {"plan": reference, "guides": guides, "pal": pal, "model": model}, _shown(plan, shape, reach, rows, model)
    )


def _shown(
    plan: Plan, shape: Shape | None, reach: Reach, rows: Sequence[dict[str, Any]], model: str | None
) -> Iterator[str]:
    from guidance.sites import stack_meant
    from pipelines.views import plans

    cells = []
    for number, (row, guide) in enumerate(zip(rows, plan.guides, strict=True)):
        if shape:
            layers, heads = plans.heads_text(reach[number])
            heads = "whole layer" if guide.bound_mechanism.of_whole_layers else heads
            stack = stack_meant(guide.stack, shape.sites)
            depth = sum((site.stack, site.attention) == (stack, guide.attention) for site in shape.sites)
            row = row | {
                "place": f"{stack} {guide.attention}",
                "layers": layers,
                "heads": heads,
                "weight": f"{guide.weight_for(depth):g}" if guide.is_loss else "-",
            }
        cells.append([str(cell) for cell in row.values()])
    titles = ["#", "LABEL", "PATTERN", "MECHANISM", "WHERE", "LAYERS", "HEADS", "WEIGHT", "SCHEDULE", "OPTIONS"]
    yield from table(titles, cells)
    for number, guide in enumerate(plan.guides, 1):
        if explanation := guide.bound_mechanism.explanation:
            yield f"guide {number}: {explanation}"
    if added := plans.pal_keys(plan):
        yield "added heads: " + ", ".join(f"{key} = {text}" for key, text in added.items())
    for name, titles, grid in plans.grids(plan, shape, reach) if shape else ():
        yield ""
        yield f"{name} of {model}: the guides on each head, by number"
        yield from table(titles, grid)


@command(
    "plan check", examples=["guide plan check my-plan.toml", "guide plan check my-plan.toml --model ./roberta-base"]
)
def check_plan(session: Session, reference: Reference, model: Model = None, scores: Scores = None) -> None:
    """Check a plan, and with --model that every guide selects heads and no two guides conflict."""
    from pipelines.views import plans

    plan, shape, reach = _read(session, reference, model, scores)
    if not plan.guides and plan.pal is None:
        raise PlanError(f"{reference}: this plan has no guides", hint="`guide plan new` writes a plan to start from")
    needs = plans.needs_of(plan)
    selected = {(site, head) for sites in reach.values() for site, heads in sites.items() for head in heads}
    silent = [label for number, label in enumerate(plan.labels) if shape and not reach[number]]
    count = counted(len(plan.guides), "guide")
    if shape:
        total = sum(site.num_heads for site in shape.sites)
        added = sum(site.attention == "pal" for site, _ in selected)
        more = f" and {counted(added, 'added one')}" if added else ""
        count += f", on {len(selected) - added} of the {total} heads of {model}{more}"
    facts = {"plan": reference, "ok": True, "guides": len(plan.guides), "model": model}
    facts |= {"heads": len(selected) if shape else None, "silent": silent}
    session.answer({**facts, "needs": needs}, [f"ok: {count}"])
    if not shape:
        session.tell("to check it against a model, add --model, for example --model roberta:12x12")
    for label in silent:
        session.tell(f"guide {label} is disabled, or selects no head of this model")
    for (number, label, source), group in itertools.groupby(needs, operator.itemgetter("number", "label", "source")):
        session.tell(f"guide {number} ({label}) reads {', '.join(need['name'] for need in group)}: {source}")


@command(
    "plan diff",
    examples=["guide plan diff preset:ag my-plan.toml", "guide plan diff old.toml new.toml --fail-if-different"],
)
def diff_plans(
    session: Session,
    first: Annotated[
        str,
        Argument(
            metavar="A",
            help="preset:NAME, a TOML file, findings of `guide discover accept`, or a model with a plan.",
            autocompletion=completion.plans,
        ),
    ],
    second: Annotated[str, Argument(metavar="B", help="Another plan, likewise.", autocompletion=completion.plans)],
    fail: Annotated[bool, Option("--fail-if-different", help="Exit with code 5 if they differ.")] = False,
) -> None:
    """Show the differences between two plans, row by row; formatting does not matter."""
    from pipelines.views import plans

    changes = plans.differences(*(plans.plan_of(reference, session.store) for reference in (first, second)))
    session.answer(
        {"first": first, "second": second, "equal": not changes, "differences": changes},
        (line for change in changes for line in _difference(change)),
    )
    if not changes:
        session.tell("the plans are equal")
    elif fail:
        raise GateFailed(f"{first} and {second} differ in {counted(len(changes), 'row')}")


def _difference(change: Mapping[str, Any]) -> Iterator[str]:
    kind = change["change"]
    sign = {"removed": "-", "added": "+", "changed": "~"}[kind]
    yield f"{sign} {change['row']}"
    for key, (ours, theirs) in change["keys"].items():
        both = {"removed": ours, "added": theirs}.get(kind, f"{ours or 'default'} -> {theirs or 'default'}")
        yield f"    {key}: {both}"


@command("plan new", examples=["guide plan new > my-plan.toml", "guide plan new --preset ag --output my-plan.toml"])
def new_plan(
    session: Session,
    preset: Annotated[
        str | None, Option(help="Preset with whose rows to start.", autocompletion=completion.presets)
    ] = None,
    output: Annotated[Path | None, Option(metavar="FILE", help="File to write to, instead of stdout.")] = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented plan to start from, which explains all keys, patterns and mechanisms."""
    from pipelines.storage.files import write_file
    from pipelines.views.plan_template import template

    text = template(preset.removeprefix("preset:") if preset else None)
    check_output_path(output, "--output")
    if output is not None:
        if output.exists() and not force:
            raise InputError(f"{str(output)!r} exists already", hint="overwrite it with --force")
        write_file(output, text.encode())
        model = newest("model", session.store) or "roberta:12x12"
        session.suggest(f"guide plan check {shlex.quote(str(output))} --model {model}")
    session.answer({"plan": text, "path": output}, text.rstrip("\n").split("\n") if output is None else [output])


def _read(session: Session, reference: str, model: str | None, scores: Path | None) -> tuple[Plan, Shape | None, Reach]:
    """A plan, and with a model also its shape and the heads that each guide selects."""
    from pipelines.statistics.head_scores import read_scores
    from pipelines.views import plans

    plan = plans.plan_of(reference, session.store)
    if model is None:
        if scores is not None:
            raise InputError("--scores needs a model", hint="give --model too")
        return plan, None, {}
    if scores is not None and not plan.selects_by_score():
        session.tell(f"--scores {scores}: no guide of the plan selects heads by them")
    shape = plans.read_shape(model, session.store)
    try:
        return plan, shape, plans.reach_of(plan, shape, read_scores(scores) if scores else None)
    except PlanError as error:
        raise PlanError(f"{reference}: {error.message}", hint=error.hint) from error


def _as_json(selected: Mapping[Site, tuple[int, ...]]) -> list[dict[str, Any]]:
    return [
        {"stack": site.stack, "attention": site.attention, "layer": site.layer, "heads": list(heads)}
        for site, heads in selected.items()
    ]
