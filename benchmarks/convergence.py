"""How much faster does a guided model learn?  Masked LM on novels, with and without guided heads, over several seeds.

    python -m benchmarks.convergence --text FOLDER [--seeds 3] [--steps 900] [--store artifacts] [--out docs/results]

8 layers x 128, 4 heads of which 2 are guided (next, previous), length 64, batch 32, byte-level BPE of 4,000, AdamW
at a constant 1e-3, weight decay 0.01, clipping 1.0, no warm-up, attention dropout 0, weight 12 in the default
reduction (the paper's 100 at length 512 corresponds to 12.5), linear to zero.  Losses are means over the last 50
steps.  Unfinished runs are continued; finished ones are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

import torch

from guidance.plan import Guide, Plan
from pipelines.stages import corpus, pretrain, sequences, tokenizer
from pipelines.storage.store import Store
from pipelines.views.curves import Curve
from pipelines.views.drawing import learning_curves

WINDOW = 50
PLAN = Plan(
    tuple(
        Guide(pattern, "attention_loss", heads=(head,), weight=12.0, schedule="linear")
        for head, pattern in enumerate(("next", "previous"))
    )
)


def books() -> Path:
    """The folder of novels below ``GUIDE_SHARED``, or else next to the checkout."""
    shared = Path(os.environ.get("GUIDE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    return shared / "data" / "lm-litbank-books" / "books"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=books())
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--store", type=Path, default=Path("artifacts"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    store = Store(arguments.store)
    plan_file = arguments.store / "convergence-plan.toml"
    plan_file.parent.mkdir(parents=True, exist_ok=True)
    plan_file.write_text(PLAN.dumps(), encoding="utf-8")

    text = corpus.run([str(arguments.text)], corpus.Config(), store=store).reference
    bpe = tokenizer.run(text, tokenizer.Config(vocab_size=4000), store=store).reference
    packed = sequences.run(text, bpe, sequences.Config(max_length=64), store=store).reference
    rows, curves = [], []
    print(
        f"{'seed':>4} {'plain':>7} {'guided':>7} {'below':>6} {'equal loss at step':>19} {'share':>6} {'tokens/s':>17}"
    )
    for seed in range(arguments.seeds):
        pair = []
        for label, plan in (("plain", ""), ("guided", str(plan_file))):
            config = pretrain.Config(
                architecture="roberta",
                layers=8,
                hidden=128,
                heads=4,
                ffn=512,
                dropout=arguments.dropout,
                attention_dropout=0.0,
                steps=arguments.steps,
                batch_size=32,
                learning_rate=1e-3,
                schedule="constant",
                weight_decay=0.01,
                clip=1.0,
                seed=seed,
                plan=plan,
                evaluate_every=300,
                save_every=100,
            )
            result = pretrain.run(packed, config, store=store)
            assert result is not None
            pair.append(Curve.of(result.artifact, label))
        plain, guided = pair
        losses = [curve.smoothed(WINDOW)[-1] for curve in pair]
        reached = guided.first_step_at(losses[0], WINDOW)
        row = {
            "seed": seed,
            "plain": losses[0],
            "guided": losses[1],
            "valid_plain": plain.valid[-1][1],
            "valid_guided": guided.valid[-1][1],
            "equal_loss_step": reached,
            "tokens_per_second": [curve.tokens_per_second for curve in pair],
        }
        rows.append(row)
        curves.append(pair)
        print(
            f"{seed:4d} {losses[0]:7.3f} {losses[1]:7.3f} {losses[0] - losses[1]:6.3f} {reached or 0:19d} "
            f"{(reached or 0) / arguments.steps:6.2f} {row['tokens_per_second'][0]:8,.0f} {row['tokens_per_second'][1]:8,.0f}",
            flush=True,
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "machine": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    about |= {"steps": arguments.steps, "dropout": arguments.dropout, "window": WINDOW}
    (arguments.out / "convergence.json").write_text(
        json.dumps(about | {"rows": rows}, indent=2) + "\n", encoding="utf-8"
    )
    title = "8 layers x 128 on 26 novels, half of the heads guided"
    (arguments.out / "convergence.png").write_bytes(learning_curves(curves[0], window=WINDOW, title=title))


if __name__ == "__main__":
    main()
