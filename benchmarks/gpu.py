"""Every mechanism on a GPU against the CPU, and what a guided step costs there; `make gpu`.

    python -m benchmarks.gpu [--device cuda] [--minutes 5] [--out docs/results]

Needs torch, transformers and pyarrow, and no network.  Without a GPU it says so, and writes nothing.  Otherwise it writes
``gpu.json`` and ``gpu.md``, and ends with 1 if a deviation is above its limit (tests/gpu/agreement.py) or something failed.

The steps are those of `benchmarks.step_cost`, of a model of the size of BERT-base with bfloat16 autocast and without dropout.
Every kind of step has the device for itself.  Memory is the peak of one step above weights, gradients and optimizer.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.step_cost import BASELINES, Size, kept_bytes, make
from tests.gpu.agreement import LENGTHS, PRECISIONS, deviations, limits
from tests.guidance.plans import PLANS

BASE, TINY = Size(layers=12, width=768, heads=12), Size(layers=2, width=64, heads=8)
ROWS = {
    "plain": "no guide",
    "mix": "`preset:neighbours`",
    "neighbours": "`preset:neighbours-fixed`",
    "unparsed": "`preset:roles-unparsed`",
    "ag": "`preset:ag`",
    "kl": '`preset:ag` with `distance = "kl"`',
    "asa": "`preset:asa`, two passes",
    "electra": "ELECTRA, no guide",
    "mcmisp": "ELECTRA, `preset:mcmisp` in all layers",
}
"""The steps, and what the page calls them."""

Found = dict[str, Any]


def attempt(function: Callable[[], Found]) -> Found:
    """What a function finds, or its error, so that one failure does not cost the rest of the run."""
    try:
        return function()
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def agreement(family: str, plan: str, device: str, precision: str) -> Found:
    """The largest deviations of a plan over the batches, and whether they are within their limits."""
    each = [deviations(family, plan, device, precision, lengths) for lengths in LENGTHS]
    worst = {part: max(found[part] for found in each) for part in each[0]}
    return {**worst, "within": all(worst[part] <= limit for part, limit in limits(plan, precision).items())}


def cost(kind: str, length: int, tokens: int, rounds: int, device: str, size: Size) -> Found:
    """Seconds of a step, tokens a second and MiB."""
    step = make(kind, length, max(tokens // length, 1), 0.0, device, size, True)
    memory = kept_bytes(step)
    step()
    seconds = statistics.median(sum(step().values()) for _ in range(rounds))
    return {"seconds": seconds, "tokens_per_second": step.ids.numel() / seconds, "mib": memory / 2**20}


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def hardware(device: str) -> Found:
    if device != "cuda":
        return {"device": platform.machine()}
    found = torch.cuda.get_device_properties(0)
    return {"device": found.name, "memory_gib": round(found.total_memory / 2**30, 1), "cuda": torch.version.cuda}


def measure(
    device: str, size: Size, lengths: list[int], tokens: int, rounds: int, families: list[str], end: float
) -> Found:
    """Everything that is written to ``gpu.json``."""
    found: Found = {
        "date": datetime.date.today().isoformat(),
        **hardware(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": size._asdict(),
        "tokens_per_batch": tokens,
        "rounds": rounds,
        "agreement": {},
        "cost": {},
    }
    for plan in PLANS:
        found["agreement"][plan] = {
            family: {
                precision: attempt(lambda: agreement(family, plan, device, precision))  # noqa: B023
                if time.monotonic() < end
                else {"error": "no time left"}
                for precision in PRECISIONS
            }
            for family in families
        }
    for length in lengths:
        rows = found["cost"][str(length)] = {}
        for kind in ROWS:
            rows[kind] = {"error": "no time left"}
            if time.monotonic() < end:
                rows[kind] = attempt(lambda: cost(kind, length, tokens, rounds, device, size))  # noqa: B023
            release(device)
            print(length, kind, json.dumps(rows[kind]), flush=True)
    return found


def failures(found: Found) -> list[str]:
    """What is not as it should be, a line each."""
    lines = [
        f"{plan}, {family}, {precision}: {one.get('error', one)}"
        for plan, by_family in found["agreement"].items()
        for family, by_precision in by_family.items()
        for precision, one in by_precision.items()
        if not one.get("within")
    ]
    return lines + [
        f"{kind}, {length} tokens: {one['error']}"
        for length, rows in found["cost"].items()
        for kind, one in rows.items()
        if "error" in one
    ]


def page(found: Found) -> str:
    """``gpu.md``."""
    size, memory = found["model"], f", {found['memory_gib']} GiB" if "memory_gib" in found else ""
    lines = [
        "# On a GPU",
        "",
        f"`make gpu`, {found['date']}: {found['device']}{memory}, torch {found['torch']}, transformers "
        f"{found['transformers']}. [All figures](gpu.json).",
        "",
        "## What a step costs",
        "",
        f"{size['layers']} layers × {size['width']}, {size['heads']} heads, bfloat16 autocast, no dropout, "
        f"{found['tokens_per_batch']:,} tokens in a batch; forward, backward and update, the median of {found['rounds']} steps. "
        "Memory is the peak of a step above weights, gradients and optimizer. Ratios are to the same model without a guide.",
    ]
    for length, rows in found["cost"].items():
        lines += ["", f"{int(length):,} tokens in a sequence:", ""]
        lines += ["| step | ms | ratio | tokens a second | MiB | ratio |", "|---|--:|--:|--:|--:|--:|"]
        for kind, row in rows.items():
            base = rows[BASELINES.get(kind, kind if kind in BASELINES.values() else "plain")]
            lines.append(f"| {ROWS[kind]} | {_cells(row, base)} |")
    lines += [
        "",
        "## Against the CPU",
        "",
        "Distance of outputs, losses and gradients of a small model from those of the CPU in float32, relative to their "
        f"length: the largest of {', '.join(next(iter(found['agreement'].values())))}. The limits are in "
        "`tests/gpu/agreement.py`.",
        "",
        "| plan | float32 | bfloat16 | within the limits |",
        "|---|---|---|---|",
    ]
    for plan, by_family in found["agreement"].items():
        cells = [_worst([one[precision] for one in by_family.values()]) for precision in PRECISIONS]
        good = all(one.get("within") for by_precision in by_family.values() for one in by_precision.values())
        lines.append(f"| {plan} | {' | '.join(cells)} | {'yes' if good else '**no**'} |")
    return "\n".join(lines) + "\n"


def _cells(row: Found, base: Found) -> str:
    if "error" in row:
        return f"{row['error']} | | | |"
    ratios = ["–" if "error" in base else f"{row[part] / base[part]:.2f}" for part in ("seconds", "mib")]
    return (
        f"{row['seconds'] * 1000:.1f} | {ratios[0]} | {row['tokens_per_second']:,.0f} | {row['mib']:,.0f} | {ratios[1]}"
    )


def _worst(each: list[Found]) -> str:
    if errors := [one["error"] for one in each if "error" in one]:
        return str(errors[0])
    return ", ".join(f"{max(one[part] for one in each):.0e}" for part in ("outputs", "losses", "gradients"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries this out with a tiny model"
    )
    parser.add_argument("--minutes", type=float, default=5, help="no further step is measured after these")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "results")
    arguments = parser.parse_args()
    start = time.monotonic()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device, so nothing was measured or written")
        return
    if arguments.device == "cuda":
        given: tuple[Any, ...] = (BASE, [128, 512, 2048], 8192, 7, ["bert", "modernbert", "deberta-v2", "t5"])
    else:
        given = (TINY, [16], 32, 1, ["bert"])
    found = measure(arguments.device, *given, start + 60 * arguments.minutes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (arguments.out / "gpu.md").write_text(page(found), encoding="utf-8")
    print(f"{arguments.out / 'gpu.md'}, after {time.monotonic() - start:.0f} s")
    if wrong := failures(found):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
