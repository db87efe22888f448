"""Stage ``discover-accept``: turns what was found in heads into a plan to train with.

Reads a discovery.  Writes findings@1: ``plan.toml``, and ``findings.json``, which says what was accepted, by whom it was seen
and on which evidence.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.declaration import Opening, Stage, Stored
from pipelines.engine.stage import Run, internal
from pipelines.probing.heads import heads_of
from pipelines.probing.patterns import read_written, spec_of
from pipelines.stages.discover_score import PLAN, SUMMARY

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.storage.artifacts import Artifact


class Config(stage.Config):
    """What is accepted, and how it is injected."""

    patterns: list[str] = Field(
        [], description="A pattern to inject (repeatable); by default those that `discover score` proposed."
    )
    heads: list[str] = Field(
        [],
        description="A head and the pattern that goes into it, such as 2-5=previous (repeatable); instead of --patterns.",
    )
    into: Literal["each-layer", "found", "least-important"] = Field(
        "each-layer",
        description="Heads that take the patterns: each-layer: one head of every layer for each pattern, as in paper E; found: the heads "
        "that stand out, each with the first of its patterns; least-important: the least important heads of every layer; "
        "training then needs --scores.",
    )
    mechanism: Literal["auto", "mask", "fix", "bias", "attention_loss"] = Field(
        "auto",
        description="Mechanism by which they act; auto fixes heads on patterns of places, such as next, and masks heads for others.",
    )
    pal: bool = Field(
        False,
        description="Add one new head per pattern to every layer, and guide these; --into, and the places in --heads, then have no effect.",
    )
    most: int = Field(4, ge=1, le=16, description="Maximum number of proposed patterns to accept.")
    seen: str = internal("what the page knows of how it was found, as JSON")


def _check_written(config: Config, references: Mapping[str, Any]) -> None:
    """Raises InputError if a head is not written as LAYER-HEAD=PATTERN, or settings exclude each other, and PlanError if there is no
    such pattern."""
    others = {
        "--patterns": bool(config.patterns),
        "--most": config.most != Config.model_fields["most"].default,
        "--into least-important": config.into == "least-important",
    }
    if config.heads and (given := [flag for flag, is_given in others.items() if is_given]):
        raise InputError(
            f"{given[0]} beside --heads, which says what goes into which head", hint="leave one of them out"
        )
    for pattern in [head_of(text)[1] for text in config.heads] or config.patterns:
        read_written(pattern)


Head = tuple[int, int]
Accepted = list[tuple[str, list[Head]]]
"""Patterns as they are written, each with heads."""


def head_of(text: str) -> tuple[Head, str]:
    """A head, and the pattern that goes into it.  Raises InputError if it is not written as LAYER-HEAD=PATTERN."""
    match = re.fullmatch(r"(\d{1,4})-(\d{1,4})=(.+)", text.strip(), re.DOTALL)
    if match is None:
        raise InputError(f"--heads {text!r} is not LAYER-HEAD=PATTERN", hint="for example: --heads 2-5=previous")
    return (int(match[1]), int(match[2])), match[3].strip()


def patterns_of(config: Config, summary: dict[str, Any], deviations: float) -> Accepted:
    """What is injected: each pattern with the heads that it was found in.

    Args:
        summary: the content of ``discovery.json``.
        deviations: how far heads had to stand out.

    Raises:
        InputError: there is nothing to inject, or two patterns are given for one head.
    """
    heads_with = {each["pattern"]: [(layer, head) for layer, head in each["heads"]] for each in summary["candidates"]}
    if config.heads:
        own: dict[str, list[Head]] = {}
        taken: dict[Head, str] = {}
        for head, pattern in map(head_of, config.heads):
            if taken.setdefault(head, pattern) != pattern:
                raise InputError(
                    f"head {head[0]}-{head[1]} has two patterns, {taken[head]} and {pattern}",
                    hint=f"""one that is both: --heads '{head[0]}-{head[1]}={{ or = ["next", "previous"] }}'""",
                )
            own.setdefault(pattern, []).append(head)
        return list(own.items())
    names = config.patterns or summary["proposed"][: config.most]
    if not names:
        raise InputError(
            "no pattern was proposed, so there is nothing to accept",
            hint="--patterns NAME injects one anyway"
            + (
                f"; `guide discover score` with --deviations {deviations - 1:g} is less strict"
                if deviations > 1
                else ""
            ),
        )
    if config.into == "found" and (missing := [name for name in names if name not in heads_with]):
        raise InputError(
            f"no head stands out on {missing[0]}",
            hint="--into each-layer, or name the heads: --heads 2-5=" + missing[0],
        )
    return [(name, heads_with.get(name, [])) for name in dict.fromkeys(names)]


def one_each(accepted: Accepted) -> tuple[Accepted, list[str]]:
    """The patterns with those of their heads that no earlier pattern has; and the names of patterns that have none left."""
    taken: set[Head] = set()
    own = []
    for name, heads in accepted:
        own.append((name, [head for head in heads if head not in taken]))
        taken |= set(heads)
    return [each for each in own if each[1]], [name for name, heads in own if not heads]


def _check_plan(opening: Opening[Config]) -> None:
    """Raises InputError if the least important heads are asked for although no importance was measured.  Raises what `made` raises, too."""
    config, discovery = opening.config, opening.inputs["discovery"]
    if config.into == "least-important" and not (config.heads or config.pal) and discovery.counts["task"] is None:
        raise InputError(
            f"{discovery.reference} does not say how important heads are, so none can be the least important",
            hint="guide discover score measures it for a model that predicts words, and for one with a head for a task on a "
            "dataset of this task, unless --no-importance is given\nor choose other heads: --into each-layer",
        )
    made(config, discovery, json.loads(discovery.read(SUMMARY)))


def made(config: Config, discovery: Artifact, summary: dict[str, Any]) -> tuple[Plan, Accepted, list[str]]:
    """The plan, the patterns in it with the heads that they were found in, and those for which no head is left.

    Raises:
        InputError: nothing was found and nothing is given.
        PlanError: the mechanism does not take a pattern, or the model has no such head.
    """
    from guidance.probes.discovery import plan_for

    covered: list[str] = []
    accepted = patterns_of(config, summary, discovery.manifest["config"]["deviations"])
    into: Literal["each-layer", "found", "least-important"] = "found" if config.heads else config.into
    if into == "found" and not config.pal:
        accepted, covered = one_each(accepted)
    specs: Sequence[tuple[Any, Any]] = [(spec_of(name), heads) for name, heads in accepted]
    plan = plan_for(specs, into=into, mechanism=config.mechanism, pal=config.pal)
    _check(plan, discovery)
    return plan, accepted, covered


def build(run: Run[Config]) -> None:
    """Accept findings."""
    config, discovery = run.config, run.inputs["discovery"]
    summary = json.loads(discovery.read(SUMMARY))
    plan, accepted, covered = made(config, discovery, summary)
    why = "a head takes one pattern, and its heads have taken one of those before"
    run.warn(*(f"{name} is left out: {why}" for name in covered))
    run.out.write(PLAN, plan.dumps().encode())
    evidence = {each["pattern"]: each for each in summary["candidates"]}
    rows = [
        {"pattern": name, "heads": [list(head) for head in heads], "evidence": evidence.get(name)}
        for name, heads in accepted
    ]
    about = {role: discovery.manifest["inputs"][role] for role in ("model", "sequences")}
    seen = json.loads(config.seen) if config.seen else None
    run.out.write_json("findings.json", {"schema": 1, "accepted": rows, "of": about, "seen": seen})
    run.out.counts |= {"guides": len(plan.guides), "patterns": [name for name, _ in accepted]}


def _check(plan: Plan, discovery: Artifact) -> None:
    """Raises PlanError for a plan that the model which was scored would refuse in training."""
    from guidance.site_plans import plan_sites
    from guidance.sites import Site

    rows = [row for row in heads_of(discovery) if row["attention"] == "self"]
    heads = Counter(row["layer"] for row in rows)
    stack = rows[0]["stack"]  # probes read models with one
    sites = [Site(stack, "self", layer, number, "") for layer, number in heads.items()]
    if plan.pal is not None:
        sites += [Site(stack, "pal", layer, plan.pal.heads, "") for layer in heads]
    # which heads are least important does not matter to whether there are enough of them
    plan_sites(plan, sites, scores={(row["layer"], row["head"]): row.get("score") or 0.0 for row in rows})


STAGE = Stage(
    "discover-accept",
    "findings",
    2,
    Config,
    build,
    takes={"discovery": Stored("discovery", "Artifact of `guide discover score`.")},
    check=_check_written,
    prepare=_check_plan,
)

run = STAGE.run
