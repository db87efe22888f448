"""Names of options that other tools use, and the options of ours that they lead to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

USUAL: dict[str, str] = {
    "--allow-change": "override",
    "--architecture": "arch model-type",
    "--attention-dropout": "attn-dropout attention-probs-dropout-prob",
    "--batch-size": "batch bs train-batch-size per-device-train-batch-size per-device-batch-size global-batch-size",
    "--batch-tokens": "max-tokens tokens-per-batch",
    "--beta1": "adam-beta1",
    "--beta2": "adam-beta2",
    "--clip": "max-grad-norm grad-norm grad-clip gradient-clipping clip-norm clip-grad-norm",
    "--corpus": "text file data input dataset train-file",
    "--device": "gpu cuda cpu",
    "--dropout": "hidden-dropout hidden-dropout-prob dropout-rate",
    "--epochs": "num-epochs num-train-epochs n-epochs max-epochs passes",
    "--epsilon": "eps adam-epsilon adam-eps",
    "--evaluate-every": "eval-every eval-steps eval-interval validate-every val-every",
    "--ffn": "intermediate-size ffn-dim ffn-size d-ff feed-forward",
    "--force": "overwrite overwrite-output-dir no-cache rebuild",
    "--gradient-checkpointing": "grad-checkpointing activation-checkpointing",
    "--heads": "num-heads n-heads n-head nheads num-attention-heads attention-heads",
    "--hidden": "hidden-size hidden-dim d-model dim width n-embd embed-dim embedding-size",
    "--init": "model model-name-or-path checkpoint from-pretrained pretrained init-from",
    "--jobs": "workers num-workers n-jobs num-proc num-processes processes threads",
    "--kind": "type tokenizer-type algorithm",
    "--layers": "num-layers n-layers n-layer num-hidden-layers depth",
    "--learning-rate": "lr rate peak-lr step-size",
    "--limit": "max-samples num-samples max-examples",
    "--max-length": "length max-len max-seq-length max-seq-len seq-length seq-len block-size context-length",
    "--max-time": "time-limit timeout",
    "--micro-batches": "gradient-accumulation-steps gradient-accumulation grad-accum accumulation-steps accumulate",
    "--name": "output out output-name run-name experiment-name title tag",
    "--objective": "task loss",
    "--out": "to output output-dir out-dir o dest folder",
    "--parser": "parse spacy stanza",
    "--plan": "guides guide preset",
    "--png": "picture image plot save output out",
    "--precision": "fp16 bf16 fp32 dtype amp mixed-precision",
    "--report-to": "tracker tensorboard wandb",
    "--resume": "continue resume-from resume-from-checkpoint",
    "--save-every": "save-steps save-interval checkpoint-every",
    "--schedule": "scheduler lr-scheduler lr-scheduler-type lr-schedule",
    "--seed": "random-seed",
    "--size": "model-size",
    "--steps": "max-steps num-steps train-steps total-steps num-train-steps iterations iters max-iters updates",
    "--store": "output-dir out-dir save-dir cache-dir artifacts",
    "--text-column": "text-key",
    "--test-fraction": "test-size test-split test-ratio",
    "--text-field": "text-column text-key column",
    "--to": "out output o dest file",
    "--valid": "val dev validation val-split valid-split validation-split valid-fraction",
    "--valid-fraction": "val-fraction val-ratio valid-ratio valid-size val-size",
    "--vocab-size": "vocab vocabulary-size vocabulary",
    "--warmup-steps": "warmup warm-up num-warmup-steps",
    "--weight-decay": "wd l2",
}
"""For options of ours, what others call them.  Where a command has several that fit, the first one is meant."""


_DATA = frozenset({"corpus", "data", "dataset", "file", "files", "input", "sequences", "train-file"})
"""Names for the data that a command reads."""


def is_argument(typed: str, arguments: Iterable[str]) -> bool:
    """Whether an unknown option was probably meant as an argument of the command: it has its name, or both mean the data, as
    ``--dataset`` and ``data`` do."""
    name = typed[2:].replace("_", "-")
    return any(name == known.replace("_", "-") or {name, known} <= _DATA for known in arguments)


def intended(typed: str, options: Iterable[str]) -> str | None:
    """Which option of a command was probably meant by one that the command lacks; None if it cannot be told.

    Args:
        typed: as the user wrote it, with its dashes: ``--lr``.
        options: the long options of the command.
    """
    known = set(options)
    name = typed.replace("_", "-")
    return usual(name, known) or next(iter(difflib.get_close_matches(name, sorted(known), n=1)), None)


def usual(name: str, options: Iterable[str]) -> str | None:
    """The option that others call by this name, with dashes; None if it is in no table."""
    known = set(options)
    if name in known:
        return name
    return next((ours for ours, names in USUAL.items() if ours in known and name[2:] in names.split()), None)
