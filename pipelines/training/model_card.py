"""The model card that every published model carries: data, licence and provenance, plan, metrics, how to open it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipelines.engine.stage import Run

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.training.loop import Outcome
    from pipelines.training.objectives import ModelFolder


class Kind(NamedTuple):
    """What an objective makes: in words, as hubs call its use, and the class of transformers that opens it."""

    words: str
    pipeline: str
    auto_class: str


KINDS = {
    "mlm": Kind("masked language model", "fill-mask", "AutoModelForMaskedLM"),
    "mlm+nsp": Kind("masked language model that predicts next sentences", "fill-mask", "AutoModelForPreTraining"),
    "electra": Kind("discriminator of replaced tokens", "feature-extraction", "AutoModelForPreTraining"),
    "translation": Kind("translation model", "translation", "AutoModelForSeq2SeqLM"),
}

OTHER_FOLDERS = {
    "generator/": "`generator/` holds the masked language model that filled in masked tokens while this one learned. Open it "
    "with `AutoModelForMaskedLM`; only further training of the same kind needs it.\n",
}
"""What is said of the model folders beside the one at the top."""


def card(run: Run, plan: Plan, outcome: Outcome, folders: Sequence[ModelFolder]) -> str:
    """The card in Markdown, with the metadata block that model hubs read.

    Args:
        folders: the models of the run, that which the card is about first.
    """
    config, out, kind = run.config, run.out, KINDS[run.config.objective]
    licences = sorted({entry["license"] for entry in out.provenance if entry.get("license")})
    sources = [
        f"- {_line(e.get('source') or 'unnamed source')}: {_line(e.get('license') or 'licence not stated')}"
        for e in out.provenance
    ]
    origin = "Its weights were taken from an earlier model. " if "init" in run.inputs else ""
    losses = "\n".join(f"| {k} | {v:.4f} |" for k, v in outcome.last.items() if k.startswith(("loss/", "valid/")))
    batch = f"at most {config.batch_tokens} tokens" if config.batch_tokens else f"{config.batch_size} sequences"
    best = (
        f" `best/` holds the weights of the lowest validation loss (step {outcome.best_step})."
        if outcome.best_step
        else ""
    )
    others = "".join(f"\n{OTHER_FOLDERS[folder.path]}" for folder in folders[1:])
    guided = (
        f"It was guided by this plan (`plan.toml`):\n\n```toml\n{plan.dumps()}```"
        if plan.guides or plan.pal
        else "No head was guided."
    )
    return f"""---
library_name: transformers
pipeline_tag: {kind.pipeline}
license: {json.dumps(licences[0].lower() if len(licences) == 1 else "other")}
tags: [attention-guidance]
---

# A {folders[0].model.config.model_type} {kind.words}

Trained by `guide pretrain` for {out.counts["steps"]} steps of {batch}, seed {config.seed}:
{out.counts["parameters"]:,} parameters. {origin}{guided}

## Data

{chr(10).join(sources) or "Source and licence of the text were not recorded (`guide build-corpus --source --license`)."}

The licence of the data travels with the model; ask its owner where it is not stated.

## Metrics at the last step

Losses in nats per token or example that is predicted; those of guides before their weight.

| metric | value |
|---|---|
{losses}

Every step is in `metrics.parquet`.{best}

## How to open it

{_opening(plan, kind.auto_class)}{others}"""


_ORDINARY = """\
```python
from transformers import AUTO_CLASS, AutoTokenizer

model = AUTO_CLASS.from_pretrained("FOLDER")
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


def _opening(plan: Plan, auto_class: str) -> str:
    """How to open a model that was trained with a plan, and what happens without it."""
    if plan.shapes_outputs:
        return _GUIDED
    ordinary = _ORDINARY.replace("AUTO_CLASS", auto_class)
    if plan.guides:
        return ordinary + "The plan worked through the loss alone: the model needs no further code.\n"
    return ordinary


def _line(text: object) -> str:
    """Text of the user's on one line, so that it cannot pass for the card's own structure."""
    return " ".join(str(text).split())
