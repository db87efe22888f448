"""``guide plan``: show plans, check them against a model, compare two, and start a new one."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.next_commands import newest
from cli.options import Session, command
from cli.output import check_output_path, escape, say, say_json
from cli.tables import say_table
from guidance.errors import GateFailed, InputError, PlanError

Reference = Annotated[str, typer.Argument(metavar="REF", help="preset:NAME or a TOML file.", show_default=False)]
Model = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="A model folder, a config.json, a model artifact, or roberta:12x12."),
]
Scores = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON, CSV or Parquet with layer, head, score, for selectors by importance."),
]


@command(
    "plan show",
    examples=["guide plan show", "guide plan show preset:ag", "guide plan show preset:ag --model roberta:12x12"],
)
def show_plan(
    session: Session,
    reference: Annotated[
        str | None,
        typer.Argument(
            metavar="[REF]", help="preset:NAME or a TOML file; by default all presets are listed.", show_default=False
        ),
    ] = None,
    model: Model = None,
    scores: Scores = None,
) -> None:
    """Show the guides of a plan, and with --model the heads that each one selects."""
    from pipelines.views import plans

    if reference is None:
        _show_presets(session)
        return
    plan, shape, reach = _read(session, reference, model, scores)
    rows = plans.rows_of(plan)
    if session.json:
        say_json(
            {
                "schema": 1,
                "plan": reference,
                "guides": [
                    dataclasses.asdict(row) | ({"reach": _as_json(reach[row.number - 1])} if shape else {})
                    for row in rows
                ],
                "pal": dataclasses.asdict(plan.pal) if plan.pal else None,
                "model": model,
            }
        )
        return
    titles = ["#", "LABEL", "PATTERN", "MECHANISM", "WHERE", "LAYERS", "HEADS", "WEIGHT", "SCHEDULE", "OPTIONS"]
    table = []
    for row, guide in zip(rows, plan.guides, strict=True):
        cells = dataclasses.asdict(row)
        if shape:
            cells["layers"], cells["heads"] = plans.heads_text(reach[row.number - 1])
            depth = sum((site.stack, site.attention) == (guide.stack, guide.attention) for site in shape.sites)
            cells["weight"] = f"{guide.weight_for(depth):g}" if guide.is_loss else "-"
        table.append([str(cell) for cell in cells.values()])
    say_table(titles, table)
    if added := plans.pal_keys(plan):
        say("added heads: " + escape(", ".join(f"{key} = {text}" for key, text in added.items())))
    if shape:
        for name, grid in plans.grids(plan, shape, reach):
            say()
            say(f"{name} of {escape(model)}: the guides on each head, by number")
            say_table(["LAYER", *(f"h{head}" for head in range(len(grid[0]) - 1))], grid)


def _show_presets(session: Session) -> None:
    from pipelines.views import plans

    summaries = plans.preset_summaries()
    if session.json:
        say_json({"schema": 1, "presets": [{"name": f"preset:{n}", "summary": s} for n, s in summaries.items()]})
    else:
        say_table(("PRESET", "SUMMARY"), [(f"preset:{name}", summary) for name, summary in summaries.items()])


@command(
    "plan check",
    examples=["guide plan check my-plan.toml", "guide plan check my-plan.toml --model ./roberta-base"],
)
def check_plan(session: Session, reference: Reference, model: Model = None, scores: Scores = None) -> None:
    """Check a plan, and with --model that every guide selects heads and no two guides conflict."""
    from pipelines.views import plans

    plan, shape, reach = _read(session, reference, model, scores)
    if not plan.guides and plan.pal is None:
        raise PlanError(f"{reference}: this plan has no guides", hint="`guide plan new` writes a plan to start from")
    needs = plans.needs_of(plan)
    heads = {(site, head) for found in reach.values() for site, heads in found.items() for head in heads}
    silent = [row.label for row in plans.rows_of(plan) if shape and not reach[row.number - 1]]
    if session.json:
        say_json(
            {
                "schema": 1,
                "plan": reference,
                "ok": True,
                "guides": len(plan.guides),
                "model": model,
                "heads": len(heads) if shape else None,
                "silent": silent,
                "needs": [dataclasses.asdict(need) for need in needs],
            }
        )
        return
    count = f"{len(plan.guides)} guide{'' if len(plan.guides) == 1 else 's'}"
    if shape:
        total = sum(site.num_heads for site in shape.sites)
        added = sum(site.attention == "pal" for site, _ in heads)
        more = f" and {added} added ones" if added else ""
        say(f"ok: {count}, on {len(heads) - added} of the {total} heads of {escape(model)}{more}")
    else:
        say(f"ok: {count}")
        session.tell("to check it against a model, add --model, for example --model roberta:12x12")
    for label in silent:
        session.tell(f"guide {escape(label)} is disabled, or selects no head of this model")
    for (number, label, source), group in itertools.groupby(
        needs, key=lambda need: (need.number, need.label, need.source)
    ):
        session.tell(f"guide {number} ({escape(label)}) reads {', '.join(need.name for need in group)}: {source}")


@command(
    "plan diff",
    examples=["guide plan diff preset:ag my-plan.toml", "guide plan diff old.toml new.toml --fail-if-different"],
)
def diff_plans(
    session: Session,
    first: Annotated[str, typer.Argument(metavar="A", help="preset:NAME or a TOML file.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="Another plan.", show_default=False)],
    fail: Annotated[bool, typer.Option("--fail-if-different", help="Exit with code 5 if they differ.")] = False,
) -> None:
    """Show the differences between two plans, row by row; formatting does not matter."""
    from guidance.plan import Plan
    from pipelines.views import plans

    found = plans.differences(Plan.load(first), Plan.load(second))
    if session.json:
        say_json({"schema": 1, "first": first, "second": second, "equal": not found, "differences": found})
    for entry in [] if session.json else found:
        sign = {"removed": "-", "added": "+", "changed": "~"}[entry["change"]]
        say(f"{sign} {escape(entry['row'])}")
        for key, (ours, theirs) in entry["keys"].items():
            both = {"removed": ours, "added": theirs}.get(
                entry["change"], f"{ours or 'default'} -> {theirs or 'default'}"
            )
            say(f"    {key}: {escape(both)}")
    if not found:
        session.tell("the plans are equal")
    elif fail:
        raise GateFailed(f"{first} and {second} differ in {len(found)} row{'' if len(found) == 1 else 's'}")


@command(
    "plan new",
    examples=["guide plan new > my-plan.toml", "guide plan new --preset ag --output my-plan.toml"],
)
def new_plan(
    session: Session,
    preset: Annotated[str | None, typer.Option(help="Start with the rows of this preset.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented plan to start from, which explains all keys, patterns and mechanisms."""
    from pipelines.storage.files import write_file
    from pipelines.views.plan_template import template

    text = template(preset.removeprefix("preset:") if preset else None)
    if output is None:
        if session.json:
            say_json({"schema": 1, "plan": text, "path": None})
        else:
            say(text.rstrip("\n"))
        return
    check_output_path(output, "--output")
    if output.exists() and not force:
        raise InputError(f"{str(output)!r} exists already", hint="overwrite it with --force")
    write_file(output, text.encode())
    if session.json:
        say_json({"schema": 1, "plan": text, "path": output})
    else:
        say(escape(output))
    model = newest("model", session.store) or "roberta:12x12"
    session.tell(escape(f"next: guide plan check {shlex.quote(str(output))} --model {model}{session.store_flag}"))


def _read(session: Session, reference: str, model: str | None, scores: Path | None) -> tuple[Any, Any, Any]:
    """A plan, and with a model also its shape and the heads that each guide selects."""
    from guidance.plan import Plan
    from pipelines.statistics.head_scores import read_scores
    from pipelines.views import plans

    plan = Plan.load(reference)
    if model is None:
        if scores is not None:
            raise InputError("--scores needs a model", hint="give --model too")
        return plan, None, {}
    shape = plans.read_shape(model, session.store)
    try:
        return plan, shape, plans.reach_of(plan, shape, read_scores(scores) if scores else None)
    except PlanError as error:
        raise PlanError(f"{reference}: {error.message}", hint=error.hint) from error


def _as_json(found: Any) -> list[dict[str, Any]]:
    return [
        {"stack": site.stack, "attention": site.attention, "layer": site.layer, "heads": list(heads)}
        for site, heads in found.items()
    ]
