"""Commands that train, and the one that shows everything at once."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import Session, stage_command
from pipelines.engine.stage import Result
from pipelines.stages import pretrain, quickstart

TOPICS = {
    "What is learned": (
        "objective",
        "mask_probability",
        "generator",
        "generator_size",
        "discriminator_weight",
        "label_smoothing",
        "decoder_layers",
    ),
    "Model": ("init", "architecture", "size", "layers", "hidden", "heads", "ffn", "dropout", "attention_dropout"),
    "Guidance": ("plan", "masks", "cooccur", "totals", "masking", "scores"),
    "Batches": ("steps", "epochs", "batch_size", "batch_tokens", "bucket", "sampling", "seed"),
    "Optimizer": (
        "learning_rate",
        "schedule",
        "warmup_steps",
        "weight_decay",
        "beta1",
        "beta2",
        "epsilon",
        "clip",
    ),
    "Validation and checkpoints": (
        "evaluate_every",
        "valid_sequences",
        "snapshots",
        "save_every",
        "max_time",
        "resume",
        "allow_change",
        "report_to",
    ),
    "Machine": ("device", "precision", "micro_batches", "gradient_checkpointing", "compile"),
}


@stage_command(
    "pretrain",
    pretrain.Config,
    group="Train",
    topics=TOPICS,
    examples=[
        "guide pretrain wiki-128 --plan preset:ag --size mini --steps 5000",
        "guide pretrain wiki-512 --plan preset:ag --size base --epochs 10 --weight-decay 0   # as paper A",
        "guide pretrain wiki-128 --masks wiki-masks --plan preset:roles --size small",
        "guide pretrain wiki-128 --objective mlm+nsp --epochs 40",
        "guide pretrain wiki-512 --objective electra --plan preset:mcmisp --cooccur wiki-pairs --size base --batch-size 256 --steps 1000000 --warmup-steps 10000 --beta2 0.98 --epsilon 1e-6   # as paper C",
        "guide pretrain wiki-128 --cooccur wiki-pairs --plan preset:mcmisp-bert --size base",
        "guide pretrain wiki-128 --objective electra --generator unigram --plan preset:ag --size base",
        "guide pretrain wiki-128 --init ./bert-base --plan preset:asa-pretraining --batch-size 128 --steps 20000   # batch and steps of paper D",
        "guide pretrain wiki-128 --plan preset:random-mask-scheduled --masking an-asa-run --size small",
        "guide pretrain de-en-pairs --objective translation --plan preset:gaussian --layers 2 --hidden 256 --heads 8 --ffn 512 --batch-tokens 4096",
        "guide pretrain de-en-pairs --objective translation --plan preset:ag-translation-both --layers 6 --hidden 512 --heads 8 --batch-tokens 25000 --steps 50000 --learning-rate 5e-4 --schedule inverse-sqrt --warmup-steps 4000",
        "for s in 0 1 2; do guide pretrain wiki-128 --architecture bert --seed $s --name plain-$s; done",
        "guide pretrain wiki-128 news-128 --sampling 0.8 --sampling 0.2 --plan my-plan.toml",
        "guide pretrain wiki-128 --layers 8 --hidden 128 --heads 4 --learning-rate 1e-3 --schedule constant",
        "torchrun --nproc-per-node 2 --no-python guide pretrain wiki-128 --plan preset:ag",
        "guide pretrain wiki-128 --steps 9000 --resume model/1f0c --allow-change steps",
    ],
    next_command="guide show {}",
)
def pretrain_command(
    session: Session,
    config: pretrain.Config,
    sequences: Annotated[
        list[str], typer.Argument(help="Sequences: a name, name@n, an id, or a path; one or more.", show_default=False)
    ],
    resume: Annotated[
        str | None, typer.Option(help="The unfinished run that this must be, model/ID; other settings are refused.")
    ] = None,
    allow_change: Annotated[
        list[str] | None, typer.Option(help="A setting that may differ from those of --resume (repeatable).")
    ] = None,
) -> Result | None:
    """Pre-train a model, with or without guided heads.

    mlm predicts masked words, in any sequences.  mlm+nsp (a BERT) also tells whether two parts follow each other, which
    takes a corpus of two documents or more, each of two sentences or more.  electra tells which words a small generator
    has replaced.  translation (an encoder-decoder) reads what `guide build-sequences --packing pairs` made of parallel text,
    which is read by `guide build-dataset --train TEXT --train-pair TRANSLATION`.

    A plan may need more: preset:roles what `guide build-masks` makes of the same sequences, preset:mcmisp (for electra)
    and preset:mcmisp-bert (for mlm) what `guide build-cooccur` counts.  With --init the sequences are those of that model's
    tokenizer, which `guide build-sequences` takes as a folder.  What is missing is said before training begins.
    `guide plan show` lists the presets, ablations and baselines too; `guide plan new` writes a plan to change.

    Ctrl-C or SIGTERM finishes the step and saves; the same command continues the run, bit for bit.
    """
    return pretrain.run(sequences, config, resume=resume, allow_change=allow_change or (), **session.options())


@stage_command(
    "quickstart",
    quickstart.Config,
    group="Start",
    examples=[
        "guide quickstart",
        "guide quickstart --corpus novel.txt",
        "guide quickstart --corpus text/*.txt --steps 300",
    ],
    next_command="guide lineage {}",
)
def quickstart_command(
    session: Session,
    config: quickstart.Config,
    more: Annotated[list[str] | None, typer.Argument(help="Further files of --corpus.", show_default=False)] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="Your own text, as build-corpus takes it, instead of Python's documentation."),
    ] = None,
) -> Result:
    """See attention guidance at work: the same small model with and without guided heads, in a few minutes."""
    result = quickstart.run([*(corpus or []), *(more or [])], config, **session.options())
    folder = result.artifact.path
    session.tell(result.artifact.counts["table"])
    session.tell(f"learning curves: {folder / 'learning.png'}\nattention of guided heads: {folder / 'attention.png'}")
    return result
