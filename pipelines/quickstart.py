"""Quickstart: all stages in one run, on the documentation that comes with Python or on the user's own text.

Builds a corpus, a tokenizer and sequences.  For a first look it trains a small ModernBERT with guided heads for a tenth of
the steps and draws their attention.  Then it trains the same model with and without guided heads, with the same seed and
steps.  Writes report@1: ``comparison.json``, ``learning.png``, ``attention.png``; the first look has ``attention.png``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from pydantic import Field

from pipelines.engine import stage
from pipelines.engine.declaration import Stage
from pipelines.engine.stage import Options, Result, Run, run_stage
from pipelines.progress import log
from pipelines.stages import corpus, floors, pretrain, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.text.sources import BUILTIN
from pipelines.training.models import read_tokenizer

if TYPE_CHECKING:
    import numpy as np

PLAN = "preset:neighbours-fixed"
VALID_SEQUENCES = 256
SHOWN_TOKENS = 16
"""How many tokens the attention picture shows."""


class Config(stage.Config):
    """Settings of both runs; the defaults take a few minutes on two cores."""

    steps: int = Field(320, ge=4, description="Optimizer steps of each run.")
    layers: int = Field(8, ge=1, description="Layers of the model.")
    hidden: int = Field(128, ge=8, description="Width of the model.")
    heads: int = Field(4, ge=2, description="Attention heads per layer; two of them are guided.")
    max_length: int = Field(64, ge=8, description="Tokens per sequence.")
    vocab_size: int = Field(4000, ge=300, description="Size of the byte-level BPE vocabulary.")
    learning_rate: float = Field(1e-3, gt=0, description="Constant learning rate of AdamW.")
    seed: int = Field(0, ge=0, description="Seed of both runs.")


def run(sources: Sequence[str], config: Config, *, store: Store, **options: Unpack[Options]) -> Result:
    """Run all stages and write the report; stages whose artifacts exist are skipped.

    Args:
        sources: the user's text, as for `corpus.run`; empty for the documentation of Python.
    """
    for_models: Options = {**options, "name": None}
    for_data: Options = {**for_models, "force": False}  # --force trains again but does not read the same text again
    log.info("1/6 corpus")
    built = corpus.run(sources or [BUILTIN], corpus.Config(), store=store, **for_data)
    assert built is not None, "only --shard gives None"
    text = built.reference
    log.info("2/6 tokenizer")
    bpe = tokenizer.run(text, tokenizer.Config(vocab_size=config.vocab_size), store=store, **for_data).reference
    log.info("3/6 sequences")
    packing = sequences.Config(max_length=config.max_length)
    packed = store.load(sequences.run(text, bpe, packing, store=store, **for_data).reference, kind="sequences")

    def train(config: Config, plan: str) -> Artifact:
        result = pretrain.run(packed.reference, training(config, plan), store=store, **for_models)
        assert result is not None, "only non-zero ranks of torchrun get None"
        return result.artifact

    short = config.model_copy(update={"steps": tenth(config.steps)})
    log.info("4/6 a first look: pre-training, guided, %d steps", short.steps)
    first = {"guided": train(short, PLAN), "sequences": packed}
    look = run_stage(FIRST_LOOK, config, first, store=store, **for_models).artifact
    log.info("where guided heads look so far: %s", look.path / "attention.png")
    models = {}
    for number, (label, plan) in enumerate((("guided", PLAN), ("plain", "")), 5):
        log.info("%d/6 pre-training, %s, %d steps", number, label, config.steps)
        models[label] = train(config, plan)
    inputs = {**models, "sequences": packed}
    if packed.files.get("valid.parquet", {}).get("rows"):
        limit = floors.Config(limit=VALID_SEQUENCES)
        inputs["floors"] = floors.run(packed.reference, limit, store=store, **for_data).artifact
    return run_stage(STAGE, config, inputs, store=store, **options)


def training(config: Config, plan: str) -> pretrain.Config:
    """The settings of one run."""
    return pretrain.Config(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        ffn=4 * config.hidden,
        attention_dropout=0.0,
        steps=config.steps,
        learning_rate=config.learning_rate,
        schedule="constant",
        seed=config.seed,
        plan=plan,
        evaluate_every=-(-config.steps // 4),
        valid_sequences=VALID_SEQUENCES,
        snapshots=snapshot_steps(config.steps),
    )


def tenth(steps: int) -> int:
    """A tenth of the steps, but at least one."""
    return max(1, steps // 10)


def snapshot_steps(steps: int) -> list[int]:
    """The steps at which to show attention: at 0 %, 10 % and 100 % of training."""
    return sorted({0, tenth(steps), steps})


def build_first_look(run: Run) -> None:
    """Draw the attention of guided and free heads before and after a short training."""
    _draw_attention(run, [0, tenth(run.config.steps)])


def build(run: Run) -> None:
    """Compare the two runs, and draw learning curves and attention."""
    from pipelines.views.comparison import Group, compare
    from pipelines.views.comparison_tables import as_json, as_text
    from pipelines.views.curves import Curve
    from pipelines.views.learning_curves import learning_curves

    curves = [Curve.of(run.inputs[label], label) for label in ("plain", "guided")]
    known = run.inputs["floors"].counts["nats"] if "floors" in run.inputs else {}
    comparison = compare([Group(curve.label, (curve,)) for curve in curves], floors=known)
    run.out.write_json("comparison.json", as_json(comparison))
    run.out.counts |= {"table": "\n".join(as_text(comparison)), "comparison": as_json(comparison)}
    shape = f"ModernBERT, {run.config.layers} layers, {run.config.heads} heads"
    title = f"{shape}: two of them guided in every layer, compared with none"
    run.out.write("learning.png", learning_curves(curves, window=comparison.window, title=title, floors=known))
    _draw_attention(run, snapshot_steps(run.config.steps))


def _draw_attention(run: Run, steps: Sequence[int]) -> None:
    from pipelines.drawing import attention_grid

    maps, tokens = guided_attention(run.inputs["guided"], run.inputs["sequences"], steps, run.config.steps)
    run.out.write(
        "attention.png",
        attention_grid(maps, tokens, title="Where guided and free heads of the guided model look during training"),
    )


def guided_attention(
    model: Any, data: Any, steps: Sequence[int], total: int
) -> tuple[Mapping[str, Mapping[str, np.ndarray]], list[str]]:
    """The attention of the guided heads of the lowest layer and of two free heads, at given steps of training.

    Args:
        total: the steps of the whole training, of which the picture tells percentages.

    Returns:
        A (Q, K) array for each step and head, and the tokens.
    """
    import torch
    from transformers import AutoModelForMaskedLM

    from guidance.checkpoint import load_model
    from guidance.installation import install
    from guidance.plan import Plan
    from pipelines.training.batches import Examples

    wrapped = read_tokenizer(data)
    split = next(s for s in ("valid", "train") if f"{s}.parquet" in data.files)
    ids = torch.tensor(_readable(Examples.read(data, split, len(wrapped)), wrapped))[None]
    maps: dict[str, dict[str, np.ndarray]] = {}
    for step in steps:
        plan = Plan.load(PLAN)
        loaded = load_model(model.path / "snapshots" / f"step-{step}", AutoModelForMaskedLM, plan)
        handle = install(loaded, plan, wrapped)
        attention = handle.probabilities(ids)
        first, last = (next(site for site in attention if site.layer == n) for n in (0, handle.num_layers - 1))
        heads = {(first, a.heads[0]): handle.plan.labels[a.number] for a in handle.site_plans[first].assignments}
        heads |= {(site, site.num_heads - 1): "free" for site in (first, last)}
        maps[f"step {step} ({100 * step // total} %)"] = {
            f"layer {site.layer}, head {head}\n({label})": attention[site][0, head][
                :SHOWN_TOKENS, :SHOWN_TOKENS
            ].numpy()
            for (site, head), label in heads.items()
        }
    tokens = [wrapped.decode([i]).strip() or "·" for i in ids[0, :SHOWN_TOKENS].tolist()]
    return maps, tokens


def _readable(examples: Any, tokenizer: Any) -> np.ndarray:
    """The one of the first 50 sequences whose beginning has the most words, for a readable picture."""
    candidates = [examples[i] for i in range(min(50, len(examples)))]
    return max(candidates, key=lambda ids: sum(w.isalpha() for w in tokenizer.decode(ids[:SHOWN_TOKENS]).split()))


STAGE = Stage("quickstart", "report", 4, Config, build)
FIRST_LOOK = Stage("quickstart-first-look", "report", 2, Config, build_first_look)
