"""The page of what was measured on a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.claims import Found, claims, ratio
from benchmarks.gpu.parts import ROWS
from tests.gpu.agreement import PRECISIONS


def page(found: Found) -> str:
    """``gpu.md``."""
    memory = f", {found['memory_gib']} GiB" if "memory_gib" in found else ""
    lines = [
        "# On a GPU",
        "",
        f"`make gpu`: {found['device']}{memory}, torch {found['torch']}, transformers {found['transformers']}. "
        "[All figures](gpu.json).",
        "",
        "## Claims",
        "",
        "| claim | goal | measured | |",
        "|---|---|--:|---|",
    ]
    said = {True: "holds", False: "**fails**", None: "not measured"}
    lines += [f"| {one.name} | {one.goal} | {one.measured} | {said[one.holds]} |" for one in claims(found)]
    for name, part in found["parts"].items():
        lines += ["", f"## {TITLES[name]}", "", f"{found['dates'][name]}. {_model(found) * (name in WITH_MODEL)}", ""]
        lines += WRITTEN[name](part)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _model(found: Found) -> str:
    size = found["model"]
    return (
        f"{size['layers']} layers × {size['width']}, {size['heads']} heads, bfloat16 autocast, no dropout, "
        f"{found['tokens_per_batch']:,} tokens in a batch; forward, backward and update, the median of {found['rounds']} steps. "
    )


def _agreement(part: Found) -> list[str]:
    lines = [
        "Distance of outputs, losses and gradients of small models of all families from those of the CPU in float32, relative to "
        "their norms: the largest of each. The limits are in `tests/gpu/agreement.py`.",
        "",
        "| plan | float32 | bfloat16 | within the limits |",
        "|---|---|---|---|",
    ]
    for plan, by_family in part.items():
        cells = [_worst([one[precision] for one in by_family.values()]) for precision in PRECISIONS]
        good = all(one.get("within") for by_precision in by_family.values() for one in by_precision.values())
        lines.append(f"| {plan} | {' | '.join(cells)} | {'yes' if good else '**no**'} |")
    return lines


def _trajectory(part: Found) -> list[str]:
    lines = [
        "The largest relative distance of losses from those of one run in one process: of a run that went on from what was saved, and "
        "of two processes with half of the batch each.",
        "",
        "| plan | resumed, float32 | resumed, bfloat16 | two processes |",
        "|---|--:|--:|--:|",
    ]
    two = part.get("two processes", {})
    for plan, resumed in part["resumed"].items():
        each = [*(resumed[precision] for precision in PRECISIONS), two if "error" in two else two.get(plan, {})]
        cells = [one.get("error", f"{one['losses']:.0e}" if one else "one device") for one in each]
        lines.append(f"| {plan} | {' | '.join(cells)} |")
    return lines


def _cost(part: Found) -> list[str]:
    lines = [
        "Memory is the peak of a step above weights, gradients and optimizer. Ratios are to the same model without a guide, with "
        "the fastest of PyTorch's kernels."
    ]
    for length, rows in part.items():
        lines += ["", f"{int(length):,} tokens in a sequence:", ""]
        lines += ["| step | ms | ratio | tokens a second | MiB | ratio | kernels |", "|---|--:|--:|--:|--:|--:|---|"]
        for kind, row in rows.items():
            ratios = [ratio(rows, kind, unit) for unit in ("seconds", "mib")]
            time, memory = ("–" if one is None else f"{one:.2f}" for one in ratios)
            lines.append(
                f"| {ROWS[kind]} | {row['error']} | | | | | |"
                if "error" in row
                else f"| {ROWS[kind]} | {row['seconds'] * 1000:.1f} | {time} | {row['tokens_per_second']:,.0f} | {row['mib']:,.0f} "
                f"| {memory} | {_kernels(row)} |"
            )
    return lines


def _throughput(part: Found) -> list[str]:
    lines = ["With BERT's vocabulary of 30,522 and the fused AdamW.", ""]
    lines += ["| step | tokens a second | kernel |", "|---|--:|---|"]
    return lines + [
        f"| {way} | {one['error']} | |"
        if "error" in one
        else f"| {way} | {one['tokens_per_second']:,.0f} | {_kernels(one)} |"
        for way, one in part.items()
    ]


def _backends(part: Found) -> list[str]:
    lines = [
        "Ratios to the same step with the default backend, and the relative distance of its first loss and gradients.",
        "",
        "| length | step and backend | time | memory | loss | gradients |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for length, rows in part.items():
        for name, one in rows.items():
            cells = [one["error"], *[""] * 3] if "error" in one else _distances(one)
            lines.append(f"| {int(length):,} | {name} | {' | '.join(cells)} |")
    return lines


def _distances(one: Found) -> list[str]:
    return [
        f"{one['ratio']:.2f}",
        f"{one['memory_ratio']:.2f}",
        f"{one['losses']:.0e}",
        f"{one['gradients']:.0e}",
    ]


def _kernels(one: Found) -> str:
    return one.get("kernel") or ", ".join(one["kernels"])


def _worst(each: list[Found]) -> str:
    if errors := [one["error"] for one in each if "error" in one]:
        return str(errors[0])
    return ", ".join(f"{max(one[part] for one in each):.0e}" for part in ("outputs", "losses", "gradients"))


TITLES = {
    "agreement": "Against the CPU",
    "trajectory": "Resumed, and in two processes",
    "cost": "What a step costs",
    "throughput": "Tokens a second",
    "backends": "Backends",
}
WITH_MODEL = ("cost", "throughput", "backends")
WRITTEN: dict[str, Any] = {
    "agreement": _agreement,
    "trajectory": _trajectory,
    "cost": _cost,
    "throughput": _throughput,
    "backends": _backends,
}
