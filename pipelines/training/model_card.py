"""The model card of a trained model: data, licence and provenance, plan, metrics, how to open it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from guidance.checkpoint import EXTRA_FILE
from pipelines.engine.stage import Run
from pipelines.training.plan_inputs import WEIGHTS_OF

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.training.learner import ModelFolder
    from pipelines.training.loop import Outcome


def card(run: Run, plan: Plan, outcome: Outcome, folders: Sequence[ModelFolder]) -> str:
    """The card in Markdown, with the metadata block that model hubs read.

    Args:
        folders: the models of the run; the first is the one that the card is about.
    """
    config, out, about = run.config, run.out, run.config.row.card
    licences = {entry.get("license") for entry in out.provenance}
    licence = licences.pop() if len(licences) == 1 else None
    entries = [(_line(e.get("source") or "unnamed source"), e.get("license")) for e in out.provenance]
    lines = [f"- {source}: {_line(under or 'licence not stated')}" for source, under in entries]
    sources = "\n".join(line for line in lines if not line.startswith(f"- {WEIGHTS_OF}"))
    weights = "\n".join(line for line in lines if line.startswith(f"- {WEIGHTS_OF}"))
    start = (
        f"## Weights\n\n{weights}\n\nTraining started from these, whose licence travels with them too.\n\n"
        if weights
        else ""
    )
    origin = "Its weights were taken from an earlier model. " if "init" in run.inputs else ""
    chosen = config.best.select
    rows = [(key, value) for key, value in outcome.last.items() if key.startswith(("loss/", "valid/")) or key == chosen]
    metrics = "\n".join(f"| {key} | {value:.4f} |" for key, value in rows)
    batch = f"at most {config.batch_tokens} tokens" if config.batch_tokens else f"{config.batch_size} sequences"
    muon = (
        ""
        if config.optimizer == "adamw"
        else ", by Muon for the matrices between embeddings and head and by AdamW for the rest"
    )
    own = config.added_learning_rate if EXTRA_FILE in out.files else None
    added = f". Weights that its plan added had a learning rate of {own:g}" if own else ""
    best = ""
    if "best/config.json" in out.files:
        step, value = outcome.best[0]
        measured = f"best validation {chosen.rpartition('/')[2]}, {value:.4f}" if chosen else "lowest validation loss"
        best = f" `best/` holds the weights of the {measured} (step {step})."
    others = "".join(f"\n{about.folders[folder.path]}" for folder in folders[1:])
    guided = (
        f"It was guided by this plan (`plan.toml`):\n\n```toml\n{plan.dumps()}```"
        if plan.guides or plan.pal
        else "No head was guided."
    )
    return f"""---
library_name: transformers
pipeline_tag: {about.pipeline}
license: {json.dumps(licence.lower() if licence else "other")}
tags: [attention-guidance]
---

# A {folders[0].model.config.model_type} {about.words}

Trained by `guide {run.config.row.command}` for {out.counts["steps"]} steps of {batch}, seed {config.seed}{muon}{added}.
It has {out.counts["parameters"]:,} parameters. {origin}{guided}

## Data

{sources or "Source and licence of the text were not recorded (`guide build-corpus --source --license`)."}

The licence of the data travels with the model; ask its owner where it is not stated.

{start}## Metrics at the last step

Losses in nats per predicted token or example; losses of guides without their weight.

| metric | value |
|---|---|
{metrics}

Every step is in `metrics.parquet`.{best}

## How to open it

{_opening(plan, about.auto_class)}{others}"""


_ORDINARY = """\
```python
from transformers import AUTO_CLASS, AutoTokenizer

model = AUTO_CLASS.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

"""
_GUIDED = """\
**This model needs its plan.** The plan shapes what heads compute, at inference too. Without the plan, the model computes
other outputs than those that were trained and measured (transformers then reports a tensor named
`open_with.guidance_load…`). Open it with the package `attention-guide`:

```python
import guidance

model, handle = guidance.load("FOLDER")
```

The model makes its own guidance from `input_ids`. Features that do not follow from the ids go to `handle.guide(...)`; pass
its result to the model as `guidance=`.
"""


def _opening(plan: Plan, auto_class: str) -> str:
    """How to open the model; with its plan, if the plan acts at inference."""
    if plan.shapes_outputs:
        return _GUIDED
    ordinary = _ORDINARY.replace("AUTO_CLASS", auto_class)
    if plan.guides:
        return ordinary + "The plan worked through the loss alone: the model needs no further code.\n"
    return ordinary


def _line(text: object) -> str:
    """The user's text on one line, so that it cannot break the Markdown of the card."""
    return " ".join(str(text).split())
