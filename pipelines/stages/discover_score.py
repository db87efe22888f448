"""Stage ``discover-score``: how important is every head, on which patterns does it look, and which patterns are worth injecting?

Reads a model, and sequences with masks if they are given.  Writes discovery@1: ``heads.parquet`` (one row for each head, with its
importance, entropy and relevance to each pattern), ``discovery.json`` (the patterns on which heads stand out, ranked), ``plan.toml``
(the plan that is proposed, if there is one) and ``heads.png``.

Source: Li et al. 2022, section 3.1; `guidance.probes.discovery`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pydantic import Field

from guidance.errors import InputError, counted
from pipelines.engine.declaration import Command, Stage, Table
from pipelines.engine.stage import Run
from pipelines.probing.heads import write_heads
from pipelines.probing.patterns import UNIT, PatternsConfig, check_patterns, measurable, spec_of
from pipelines.stages.reading import ON_SEQUENCES
from pipelines.storage.artifacts import Artifact

PLAN = "plan.toml"
SUMMARY = "discovery.json"


FEW = 50
"""With fewer sequences, what stands out may be chance."""


class Config(PatternsConfig):
    """Which patterns are looked for, and what stands out."""

    deviations: float = Field(
        3.0,
        gt=0,
        description="Standard deviations above the mean of all heads at which the relevance of a head stands out.",
    )
    most: int = Field(4, ge=1, le=16, description="Patterns in the plan that is proposed, at most.")
    importance: bool = Field(
        True, description="Also measure the importance of heads, if the model has a head for a task or predicts words."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the masked words, for masked language models.")
    folder: str = Field(
        "",
        description="The model as it was called, for the command that trains with what is accepted.",
        json_schema_extra={"knob": True, "internal": True},
    )


def build(run: Run[Config]) -> None:
    """Score the heads of a model.  Raises InputError if a pattern needs a feature that is not there."""
    from guidance.probes.discovery import candidates, chosen, guided_heads, plan_for
    from guidance.probes.importance import normalised
    from pipelines.probing.sequences import WatchedSequences, survey

    config = run.config
    watched = WatchedSequences(run.inputs, config)
    if watched.number < FEW:
        split = f"of the split {config.split}"
        read = counted(watched.number, f"sequence {split} is read", f"sequences {split} are read")
        run.warn(
            f"only {read}, so what stands out may be chance; give a longer text, or choose others by --split and --limit"
        )
    patterns, left_out = measurable(config.patterns, watched.known)
    with run.progress.task("relevance", total=watched.number, unit="sequences") as bar:
        known = survey(watched, patterns, config.batch_size, lambda _, read: bar.advance(read))
    importance, task = _importance(run)
    guided = guided_heads(watched.handle)
    ranked = candidates(known.relevance, importance, deviations=config.deviations, guided=guided)
    figures = {"entropy": known.mean_entropy()}
    units = {"entropy": "mean entropy of rows, from 0, one key, to 1, all keys alike"}
    if importance:
        figures |= {"score": normalised(importance), "importance": importance}
        units |= {"score": "importance from 0 to 1, over all heads", "importance": "see `guide probe importance`"}
    shown = "score" if importance else "entropy"
    table = write_heads(
        run,
        {**figures, **{name: known.relevance.of(name) for name in patterns}},
        {**units, **dict.fromkeys(patterns, UNIT)},
        shown,
        title=f"{'Importance' if importance else 'Entropy'} of heads\n{watched.number:,} sequences",
        label=f"{shown}, %",
    )
    fewest = min(Counter(row["layer"] for row in table).values())  # pattern j goes into head j of every layer
    proposed = chosen(ranked, min(config.most, fewest))
    if proposed:
        plan = plan_for([(spec_of(candidate.pattern), candidate.heads) for candidate in proposed])
        run.out.write(PLAN, plan.dumps().encode())
    counts = {"sequences": watched.number, "heads": len(table), "candidates": len(ranked)}
    summary = {
        "task": task,
        "candidates": [{**vars(each), "heads": [list(head) for head in each.heads]} for each in ranked],
        "proposed": [each.pattern for each in proposed],
        "left_out": left_out,
    }
    run.out.write_json(SUMMARY, {"schema": 1, "counts": counts, **summary})
    run.out.counts |= {**counts, **summary}


def _importance(run: Run) -> tuple[dict[Any, Any] | None, str | None]:
    """The importance of heads, and for which loss; None if the model has no loss on these data."""
    from pipelines.probing.losses import HeldOut, importance_of

    if not run.config.importance:
        return None, None
    try:
        held_out = HeldOut(run.inputs, run.config, run.config.seed)
        return importance_of(held_out, run.progress), held_out.task
    except InputError as error:
        run.warn(f"the importance of heads is not measured: {error.message}")
        return None, None


SHOWN_HEADS = 6


def _table(artifact: Artifact, config: Config) -> Table:
    """The patterns on which heads stand out, and why some of them are not proposed."""
    from guidance.probes.discovery import SINKS

    counts = artifact.counts
    rows = []
    for each in counts["candidates"]:
        names = [f"{layer}-{head}" for layer, head in each["heads"]]
        shown = ", ".join(names[:SHOWN_HEADS]) + (" …" if len(names) > SHOWN_HEADS else "")
        if each["pattern"] in counts["proposed"]:
            note = "proposed"
        elif each["pattern"] in SINKS:
            note = "not proposed: heads rest there"
        elif each.get("guided") == len(each["heads"]):
            note = "not proposed: the plan of the model makes these heads look there"
        elif each["covered_by"]:
            note = f"not proposed: these heads show {each['covered_by']}"
        elif len(counts["proposed"]) < config.most:
            note = "not proposed: a layer has no further head"
        else:
            note = f"not proposed: --most {config.most}"
        important = "–" if each["important"] is None else str(each["important"])
        figures = (f"{100 * each['relevance']:.1f} %", f"{each['lift']:.1f}", f"{each['deviations']:.1f}", important)
        rows.append((each["pattern"], shown, *figures, note))
    read = f"measured on {counted(counts['sequences'], 'sequence')} of the split {artifact.manifest['config']['split']}"
    if rows:
        return Table(("pattern", "heads", "relevance", "× chance", "deviations", "important", ""), rows, (read,))
    note = f"no head stands out on a pattern by {config.deviations:g} standard deviations"
    few = ": of ten heads or fewer none can by three" if counts["heads"] <= 10 else ""
    return Table(notes=(note + few, read))


STAGE = Stage(
    "discover-score",
    "discovery",
    2,
    Config,
    build,
    takes=ON_SEQUENCES,
    check=check_patterns,
    prepare=lambda opening: opening.change(folder=opening.references["model"]),
    command=Command(
        "discover score",
        """Score every head: its importance, and how much it looks at each pattern; and propose a plan.

        A pattern is a candidate if some head looks at it far more than the mean of all heads, on every other example, and again on
        the rest.  The plan that is proposed injects the best candidates; those where heads rest, such as the first token, and those
        that a better one covers are left out.
        """,
        (
            "guide discover score segmenter topics",
            "guide discover score segmenter topics --masks topics-masks --deviations 2",
            "guide discover score ./bert-base text.txt --patterns 'matching_token and not self' --patterns previous",
        ),
        next=lambda made, _: "guide discover accept {}" if made.counts["proposed"] else (),
        show=_table,
    ),
)

run = STAGE.run
