"""The command of the trial."""

from __future__ import annotations

from dataclasses import replace

import benchmarks.trial
from benchmarks.pages import command
from benchmarks.trial import decoders, head_start, lasting
from benchmarks.trial.page import report
from benchmarks.trial.runs import Results, Run
from benchmarks.trial.training import costs_of, floors_of, read, train_all
from benchmarks.trial.uses import Use
from pipelines.report.blocks import as_markdown
from pipelines.report.make import write
from pipelines.storage.store import Store

PHASES = {**head_start.PHASES, **lasting.PHASES, **decoders.PHASES}


def timed(results: Results) -> dict[str, Run]:
    """A run of each plan whose steps are timed, by label."""
    phases = [phase for phase in ("long", "final") if results.of(phase)]
    runs = (run for phase in phases for group in PHASES[phase](results) for run in group if isinstance(run, Run))
    return {run.label: run for run in runs}


def shortened(run: Run | Use, steps: int) -> Run | Use:
    """The same with so many steps of training."""
    return replace(run, steps=steps) if isinstance(run, Run) else replace(run, model=replace(run.model, steps=steps))


def main() -> None:
    parser = command(benchmarks.trial.__doc__)
    parser.add_argument("--only", choices=PHASES, help="one phase, whose earlier ones have been run")
    parser.add_argument("--first", type=int, help="only the first runs of each phase")
    parser.add_argument("--steps", type=int, help="steps of each run, instead of those of the phase")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, store = arguments.out / "trial.json", Store(arguments.store)
    for phase in [arguments.only] if arguments.only else PHASES:
        for group in PHASES[phase](results := read(path)):
            runs = [shortened(run, arguments.steps) if arguments.steps else run for run in group[: arguments.first]]
            train_all(runs, path, store)
            results.rows = read(path).rows  # the next group of the phase depends on them
            if arguments.first:
                break
        if arguments.first:
            break
    results = read(path)
    nats, costs = floors_of(path, results, store), costs_of(path, timed(results), store)
    path.with_suffix(".lock").unlink(missing_ok=True)
    made = report(results, list(PHASES), nats, costs)
    write(made, {}, arguments.out, "trial")
    print(as_markdown(made, "trial"))


if __name__ == "__main__":
    main()
