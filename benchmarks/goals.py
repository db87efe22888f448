"""The goals of speed and memory beside what was measured before the work on them, and now: ``speed.md``.

    python -m benchmarks.goals [--results docs/results]

Reads the figures that other benchmarks have written: ``step_cost_2048_before.json``, ``step_cost_2048_now.json``,
``step_cost_2048_other.json``, ``step_cost_128_beside.json``, ``packing.json``, ``generation_cost.json``, and ``gpu.json``, where there is
one.  Every figure is a ratio to a side that took turns with it in the same run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.claims import claims
from benchmarks.pages import known


class Goal(NamedTuple):
    """A limit for a figure of step costs at 2,048 tokens."""

    name: str
    row: str
    figure: str
    most: float


GOALS = (
    Goal("squared losses (`preset:ag`): step", "ag", "ratio", 1.15),
    Goal("squared losses (`preset:ag`): memory", "ag", "memory_ratio", 1.05),
    Goal("divergences (`kl`): step", "kl", "ratio", 1.15),
    Goal("divergences (`kl`): memory", "kl", "memory_ratio", 1.05),
    Goal("masks (`preset:roles`): step", "roles", "ratio", 1.10),
    Goal("masks (`preset:roles`): memory", "roles", "memory_ratio", 1.15),
)
SOURCES = {
    "before": "step_cost_2048_before.json",
    "now": "step_cost_2048_now.json",
    "on another machine": "step_cost_2048_other.json",
    "128 tokens": "step_cost_128_beside.json",
    "packing": "packing.json",
    "generation": "generation_cost.json",
}
BESIDE = (
    "python -m benchmarks.step_cost --processor-time --lengths 128 --only ag,kl,roles,patterns --rounds 9 --beside OLD"
)
OLD = "the parent of 7924571"
SLOWER = 1.02
"""What times of two versions that do the same may differ by."""

GENERATION, CACHED = "python -m benchmarks.generation_cost", 1.10
COST = "python -m benchmarks.step_cost --processor-time --lengths 2048 --dropouts 0.0 --only ag,kl,roles --rounds 3"
PACKING, PACKED = "python -m benchmarks.packing --plan preset:ag", 1.25


def page(results: Path) -> str:
    """The page of the figures in a folder."""
    before, now = (known(results / f"step_cost_2048{suffix}.json") for suffix in ("_before", "_now"))
    sources = [f"[{said}]({name})" for said, name in SOURCES.items() if (results / name).exists()]
    lines = [
        "# Goals of speed and memory",
        "",
        f"`python -m benchmarks.goals` makes this page from {', '.join(sources)}, and from `gpu.json`, "
        "which `make gpu` writes. The first rows are for 2,048 tokens without dropout on "
        f"a CPU (torch {now['torch']}): ratios to the same step without a plan, before of elapsed time and now of processor time. "
        "The other machine is an Intel Xeon with AVX-512 and AMX, on which both versions took turns. "
        "The rows on packing are ratios to padded batches. OLD is a checkout of this project before losses were read off kernels "
        f"({OLD}).",
        "",
        "| what | goal | before | now | reached | command |",
        "|---|--:|--:|--:|---|---|",
    ]
    for goal in GOALS:
        old, new = (one["results"][0]["rows"][goal.row][goal.figure] for one in (before, now))
        lines.append(_row(goal.name, f"≤ {goal.most:.2f}", f"{old:.3f}", f"{new:.3f}", new <= goal.most, COST))
    for part in known(results / "step_cost_2048_other.json").get("results", ()):
        plain = part["rows"]["plain"]
        for goal in GOALS:
            row, beside = part["rows"][goal.row], "before" if goal.figure == "ratio" else "memory_before"
            new = row[goal.figure]
            old = new / row[beside] * plain[beside]
            name = f"on another machine, {goal.name}"
            lines.append(
                _row(name, f"≤ {goal.most:.2f}", f"{old:.3f}", f"{new:.3f}", new <= goal.most, f"{COST} --beside OLD")
            )
    for part in known(results / "step_cost_128_beside.json").get("results", ()):
        for row in ("ag", "kl", "roles", "patterns"):
            now = part["rows"][row]["before"]
            name = f"128 tokens, dropout {part['dropout']:g}, `{row}`: step, over the version before"
            lines.append(_row(name, f"≤ {SLOWER:.2f}", "1.00", f"{now:.3f}", now <= SLOWER, BESIDE))
    for row, figure in known(results / "generation_cost.json").get("figures", {}).items():
        if row != "plain":
            name, now = f"one token after 1,024 in a cache, `{row}`: step", figure["ratio"]
            lines.append(_row(name, f"≤ {CACHED:.2f}", "–", f"{now:.3f}", now <= CACHED, GENERATION))
    for plan, ways in known(results / "packing.json")["rows"].items():
        rate = ways["packed"]["ratio"]
        name = f"packing, {plan}: tokens a second"
        lines.append(_row(name, f"≥ {PACKED:.2f}", "1.00", f"{rate:.2f}", rate >= PACKED, PACKING))
    found: dict[str, Any] = known(results / "gpu.json") or {"device": "", "parts": {}}
    for claim in claims(found):
        lines.append(_row(f"on a GPU, {claim.name}", claim.goal, "–", claim.measured, claim.holds, "make gpu"))
    return "\n".join(lines) + "\n"


def _row(name: str, goal: str, before: str, now: str, reached: bool | None, command: str) -> str:
    said = {True: "yes", False: "**no**", None: "not measured"}[reached]
    return f"| {name} | {goal} | {before} | {now} | {said} | `{command}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "results")
    folder = parser.parse_args().results
    (folder / "speed.md").write_text(page(folder), encoding="utf-8")
    print(folder / "speed.md")


if __name__ == "__main__":
    main()
