"""A paragraph of methods in plain words, and the BibTeX of what was used."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from guidance.checkpoint import EXTRA_FILE, find_plan
from guidance.errors import GuideError, counted
from guidance.mechanisms import MECHANISMS
from guidance.patterns import PATTERNS
from guidance.patterns.combinations import pattern_names
from guidance.plan import Plan
from pipelines import papers
from pipelines.engine.stage import version_of
from pipelines.papers import PaperTable
from pipelines.report.blocks import Block, Listing, Prose, Section
from pipelines.report.given import Given, Runs, grouped, without_seed
from pipelines.report.training import objective_of
from pipelines.stages import find
from pipelines.training.objectives import OBJECTIVES
from pipelines.views.comparison import Comparison
from pipelines.views.evaluations import Tested

PAL = "Li et al. 2022, section 3.3, after Stickland & Murray 2019"
"""The source of added heads."""


def section(runs: Runs, compared: Sequence[Comparison], tests: Sequence[Tested], table: PaperTable | None) -> Section:
    """What was done, as a text for a paper, and what it cites."""
    plans = {each.label: _plan(each) for each in runs.of("model")}
    said = [
        *_models(runs, plans),
        *_measures(runs),
        *_tests(compared, tests),
        f"Everything was made by guide {version_of('attention-guide') or ''}".rstrip() + ".",
    ]
    sources = list(_sources(runs, plans.values(), tests))
    cited = list(dict.fromkeys([*papers.cited(sources), *([table.paper] if table else [])]))
    entries = papers.entries()
    bibtex = "\n\n".join([*(entries[key] for key in cited), _ourselves()]) + "\n"
    blocks: list[Block] = [Prose(" ".join(said)), Listing("references.bib", bibtex)]
    return Section("methods", "Methods and references", blocks)


def _plan(each: Given) -> Plan:
    try:
        return find_plan(each.artifact.path) or Plan()
    except GuideError:  # a plan of a package that is not installed
        return Plan()


def _models(runs: Runs, plans: Mapping[str, Plan]) -> Iterable[str]:
    """A sentence or two for each group of models."""
    for label, group in grouped(runs.of("model"), lambda each: without_seed(each.artifact.manifest)).items():
        first = group[0]
        config, counts, plan = first.config, first.artifact.counts, plans[first.label]
        seeds = ", ".join(str(each.config.get("seed")) for each in group)
        size = size_of(first)
        about = f" ({size})" if size else ""
        tokens, batch = config.get("batch_tokens"), config.get("batch_size")
        of = f"of at most {tokens:,} tokens" if tokens else f"of {batch} sequences" if batch else ""
        steps = counts.get("steps") or config.get("steps")
        how = [f"for {steps:,} steps" if isinstance(steps, int) else "", of]
        rate, own = config.get("learning_rate"), config.get("added_learning_rate")
        by = " by Muon and AdamW" if config.get("optimizer") == "muon" else ""
        verb = "pre-trained" if first.artifact.manifest["stage"] == "pretrain" else "fine-tuned"
        yield (
            f"{label}: {counted(len(group), 'model')}{about} {'was' if len(group) == 1 else 'were'} {verb} ({objective_of(first)}) on "
            f"{runs.data_of(first.artifact.manifest)} {' '.join(filter(None, how))}{by}"
            + (f", with a learning rate of {rate:g}" if isinstance(rate, int | float) else "")
            + (
                f" ({own:g} for the weights that the plan adds)"
                if isinstance(own, int | float) and EXTRA_FILE in first.artifact.files
                else ""
            )
            + f" and {'seed' if len(group) == 1 else 'seeds'} {seeds}."
        )
        rows = [" ".join(dict.fromkeys((guide.mechanism, guide.label))) for guide in plan.guides if guide.enabled]
        if plan.pal is not None:
            rows.append("added heads")
        yield f"Its heads were guided by {', '.join(rows)}." if rows else "No head of it was guided."


def size_of(each: Given) -> str:
    """The size of a model in words, as far as it is known."""
    config, counts = each.config, each.artifact.counts
    parts = [
        f"{config['layers']} layers" if isinstance(config.get("layers"), int) else "",
        f"width {config['hidden']}" if isinstance(config.get("hidden"), int) else "",
        f"{config['heads']} heads" if isinstance(config.get("heads"), int) else "",
        f"{counts['parameters']:,} parameters" if isinstance(counts.get("parameters"), int) else "",
    ]
    return ", ".join(filter(None, parts))


def _tested(config: Mapping[str, Any]) -> str:
    """What a search has tested, after its choice."""
    of_rows = config.get("leave_one_out") or config.get("subsets")
    what = "every setting" if config.get("test_every") else "only that"
    seeds = f", with {counted(config['test_seeds'], 'other seed')}" if config.get("test_seeds") else ""
    return f"{' for each set of rows of the plan' if of_rows else ''}; {what} was tested{seeds}"


def _measures(runs: Runs) -> Iterable[str]:
    tasks = dict.fromkeys(str(each.artifact.counts.get("task")) for each in runs.of("evaluation"))
    if tasks:
        yield f"Models were evaluated on {', '.join(tasks)}."
    for each in runs.of("search"):
        select = each.artifact.counts.get("select", "loss")
        number = counted(int(each.artifact.counts.get("runs", 0)), "run")
        yield f"The search {each.label} trained {number}, and chose the setting with the best validation ({select}){_tested(each.config)}."
    kinds = dict.fromkeys(str(each.artifact.counts.get("probe")) for each in runs.of("probe"))
    if kinds:
        yield f"Heads were probed for {', '.join(kinds)}."


def _tests(compared: Sequence[Comparison], tests: Sequence[Tested]) -> Iterable[str]:
    if compared:
        yield "Losses are those of the task in nats per prediction, without the losses of guides."
    paired = any(row.num_pairs > 1 for each in compared for row in each.rows[1:])
    used = dict.fromkeys(tested.difference.test for tested in tests)
    if paired or used:
        names = ", ".join(used) or "paired t-test"
        yield (
            f"Deviations are sample standard deviations. Differences were tested by: {names} (two-sided; runs of the same seed or fold are "
            "pairs), and p-values were corrected for the number of comparisons by Holm's method."
        )
    else:
        yield "No difference between runs was tested over seeds: that takes two runs or more of each kind, of the same seeds."


def _sources(runs: Runs, plans: Iterable[Plan], tests: Sequence[Tested]) -> Iterable[str]:
    """What the code names as the origin of everything that was used."""
    for plan in plans:
        for guide in plan.guides:
            yield MECHANISMS[guide.mechanism].source
            for name in pattern_names(guide.pattern) if guide.pattern else ():
                yield PATTERNS[name].source
        if plan.pal is not None:
            yield PAL
    for each in runs.of("model"):
        objective = OBJECTIVES.get(str(each.config.get("objective")))
        yield objective.source if objective else ""
    for each in runs.of("probe"):
        stage: Any = find(each.artifact.manifest["stage"])
        module = sys.modules.get(stage.config.__module__) if stage else None
        yield " ".join(((module and module.__doc__) or "").partition("Source:")[2].split())
    if any(tested.difference.test.startswith("corrected") for tested in tests):
        yield "Nadeau & Bengio 2003"


def _ourselves() -> str:
    version = version_of("attention-guide")
    return "\n".join(
        [
            "@software{guide,",
            "  title   = {guide: guiding attention heads in transformers},",
            "  author  = {{The guide developers}},",
            *([f"  version = {{{version}}},"] if version else []),
            "}",
        ]
    )
