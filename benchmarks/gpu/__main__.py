"""What can be trusted on a GPU, and what it costs there; `make gpu`.

    python -m benchmarks.gpu [--only PART,…] [--device cuda] [--minutes 7.5] [--out docs/results]

    agreement    all families with all mechanisms in float32 and bfloat16, against the CPU: outputs, losses, gradients
    trajectory   the losses of a resumed run, and of two processes if there are two devices, against those of one run
    cost         steps of every preset at 128, 512, 2,048 and 8,192 tokens, over plain ones with the fastest kernel
    backends     flex and varlen over the default backend, at 2,048 and 8,192 tokens
    throughput   tokens a second of a model of the size of BERT-base

Needs torch, transformers and pyarrow, and no network.  Without a GPU it says so, and writes nothing.  Otherwise it writes
``gpu.json`` and ``gpu.md``, keeps what is there of other parts on the same machine, and prints every claim (`claims`) with what
was measured.  It ends with 1 if a claim fails or something could not be measured.

The steps are those of `benchmarks.step_cost` with bfloat16 autocast and without dropout.  Every kind of step has the device for
itself.  Memory is the peak of one step above weights, gradients and optimizer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from pathlib import Path

import torch
import transformers

from benchmarks.gpu.claims import Found, claims, failures
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import BASE, PARTS, ROWS, TINY, Setting
from tests.guidance.plans import EVERY, PLANS

FULL = Setting(
    device="cuda",
    size=BASE,
    lengths=(128, 512, 2048, 8192),
    kinds=tuple(ROWS),
    tokens=16_384,
    rounds=7,
    families=EVERY,
    plans=tuple(PLANS),
    backends=(("ag", "flex"), ("kl", "flex"), ("roles", "flex"), ("ag", {"plain": "varlen"})),
    compiles=True,
)
SMALL = Setting(
    device="cpu",
    size=TINY,
    lengths=(16,),
    kinds=("plain", "ag"),
    tokens=32,
    rounds=1,
    families=("bert",),
    plans=("mask", "attention_loss"),
    backends=(("ag", "blocks"),),
    compiles=False,
)
"""What tries this out without a GPU."""


def machine(setting: Setting) -> Found:
    """What figures have to share to stand on one page."""
    found: Found = {"device": platform.machine()}
    if setting.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found = {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        found["cuda"] = torch.version.cuda
    found |= {"torch": torch.__version__, "transformers": transformers.__version__, "model": setting.size._asdict()}
    return found | {"tokens_per_batch": setting.tokens, "rounds": setting.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, parted by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries this out with tiny models")
    parser.add_argument("--minutes", type=float, default=7.5, help="nothing more is measured after these")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[2] / "docs" / "results")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device, so nothing was measured or written")
        return
    setting = FULL if arguments.device == "cuda" else SMALL
    path = arguments.out / "gpu.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = machine(setting)
    same = all(known.get(key) == value for key, value in found.items())
    found |= {part: known[part] if same else {} for part in ("dates", "parts")}
    begun = time.monotonic()
    end, shares = begun, sum(PARTS[name][1] for name in wanted)
    for name in wanted:
        measure, share = PARTS[name]
        end += 60 * arguments.minutes * share / shares
        found["parts"][name] = measure(setting._replace(end=end))
        found["dates"][name] = datetime.date.today().isoformat()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(found), encoding="utf-8")
    print(f"{path.with_suffix('.md')}, after {time.monotonic() - begun:.0f} s\n")
    said = {True: "holds", False: "FAILS", None: "not measured"}
    for claim in claims(found):
        print(f"{said[claim.holds]:>12}  {claim.name}: {claim.measured} (goal {claim.goal})")
    wrong = [f"the claim fails: {claim.name}, {claim.measured}" for claim in claims(found) if claim.holds is False]
    wrong += failures({name: found["parts"][name] for name in wanted})
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
