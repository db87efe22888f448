"""The model card that every published model carries: data, licence and provenance, plan, metrics, how to open it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pipelines.stage import Run

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.training import Outcome


def card(run: Run, plan: Plan, outcome: Outcome, architecture: str) -> str:
    """The card in Markdown, with the metadata block that model hubs read."""
    config, out = run.config, run.out
    licences = sorted({entry["license"] for entry in out.provenance if entry.get("license")})
    sources = [
        f"- {_line(e.get('source') or 'unnamed source')}: {_line(e.get('license') or 'licence not stated')}"
        for e in out.provenance
    ]
    origin = {"init": "Its weights were taken from an earlier model. "} if "init" in run.inputs else {}
    last = outcome.rows[-1]
    losses = "\n".join(f"| {k} | {v:.4f} |" for k, v in last.items() if k.startswith(("loss/", "valid/")))
    guided = (
        f"It was guided by this plan (`plan.toml`):\n\n```toml\n{plan.dumps()}```"
        if plan.guides or plan.pal
        else "No head was guided."
    )
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
license: {json.dumps(licences[0].lower() if len(licences) == 1 else "other")}
tags: [attention-guidance]
---

# A {architecture} masked language model

Trained by `guide pretrain` for {out.counts["steps"]} steps of {config.batch_size} sequences, seed {config.seed}:
{out.counts["parameters"]:,} parameters. {origin.get("init", "")}{guided}

## Data

{chr(10).join(sources) or "Source and licence of the text were not recorded (`guide build-corpus --source --license`)."}

The licence of the data travels with the model; ask its owner where it is not stated.

## Metrics at the last step

Losses in nats per predicted token; those of guides before their weight.

| metric | value |
|---|---|
{losses}

Every step is in `metrics.parquet`. `best/` holds the weights of the lowest validation loss{f" (step {outcome.best_step})" if outcome.best_step else ""}.

## How to open it

{_opening(plan)}"""


_ORDINARY = """\
```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

model = AutoModelForMaskedLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

"""
_GUIDED = """\
**This model needs its plan.** The plan shapes what heads compute, at inference too; opened without it, this is another model
than the one that was trained and measured (transformers then reports a tensor named `open_with.guidance_load…`). With the
package `attention-guide`:

```python
import guidance

model, handle = guidance.load("FOLDER")
```

The model makes its own guidance from `input_ids`; features that do not follow from them go to `handle.guide(...)`, whose
answer the model takes as `guidance=`.
"""


def _opening(plan: Plan) -> str:
    """How to open a model that was trained with a plan, and what happens without it."""
    if plan.shapes_outputs:
        return _GUIDED
    if plan.guides:
        return _ORDINARY + "The plan worked through the loss alone: the model needs no further code.\n"
    return _ORDINARY


def _line(text: object) -> str:
    """Text of the user's on one line, so that it cannot pass for the card's own structure."""
    return " ".join(str(text).split())
