"""Headings for the settings of training on help pages."""

from __future__ import annotations

from pipelines.training.adversarial import AdversarialConfig
from pipelines.training.objectives import OWNERS
from pipelines.training.tasks import OWNERS as TASK_OWNERS

TOPICS: dict[str, tuple[str, ...]] = {
    "Most used": ("plan", "steps", "name", "architecture", "size", "learning_rate", "batch_size", "seed"),
    "What is learned": ("objective", *OWNERS),
    "Model": ("init", "architecture", "size", "layers", "hidden", "heads", "ffn", "dropout", "attention_dropout"),
    "Guidance": ("plan", "masks", "cooccur", "totals", "masking", "scores"),
    "Batches": ("steps", "epochs", "batch_size", "batch_tokens", "bucket", "sampling", "seed"),
    "Optimizer": (
        "optimizer",
        "learning_rate",
        "added_learning_rate",
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
    "Machine": ("device", "precision", "micro_batches", "parallel", "gradient_checkpointing", "compile"),
}

FINETUNE_TOPICS = {
    **TOPICS,
    "Most used": ("init", "plan", "epochs", "name", "task", "learning_rate", "batch_size", "seed"),
    "What is learned": ("task", "select", *TASK_OWNERS),
    "Model": (*TOPICS["Model"], "vectors", "embeddings_from", "tokenizer", "max_length"),
    "Guidance": (*TOPICS["Guidance"], "parser"),
    "Adversarial training": tuple(AdversarialConfig.model_fields),
    "Batches": ("epochs", "steps", *TOPICS["Batches"][2:]),
    "Optimizer": (*TOPICS["Optimizer"][:5], "warmup_fraction", *TOPICS["Optimizer"][5:]),
    "Validation and checkpoints": ("evaluate_every", "patience", *TOPICS["Validation and checkpoints"][1:]),
}
