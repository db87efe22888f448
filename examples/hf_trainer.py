"""A plan in the Hugging Face Trainer: one more argument.

    python examples/hf_trainer.py                    # attention guidance
    python examples/hf_trainer.py preset:ag out/     # save checkpoints and model to a folder

A small BERT learns to predict masked words in a few sentences; nothing is downloaded.
"""

# ruff: noqa: T201
from __future__ import annotations

import sys
import tempfile

import torch
from sentences import blanked, new_model, new_tokenizer
from transformers import TrainingArguments

import guidance


def main(plan: str = "preset:ag", folder: str = "") -> None:
    """Train with a plan, save, load, and check that the loaded model computes the same."""
    torch.manual_seed(0)
    tokenizer = new_tokenizer()
    batches = [blanked(tokenizer, seed) for seed in range(20)]
    dataset = [{key: column[row] for key, column in batch.items()} for batch in batches for row in range(8)]
    with tempfile.TemporaryDirectory() as temporary:
        arguments = TrainingArguments(
            output_dir=folder or temporary,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=40,
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = guidance.GuidedTrainer(
            model=new_model(tokenizer),
            args=arguments,
            plan=plan,  # preset:NAME, a TOML file, or a Plan
            tokenizer=tokenizer,
            train_dataset=dataset,
            eval_dataset=dataset[:8],
        )
        trainer.train()
        print({"eval_loss": round(trainer.evaluate()["eval_loss"], 3)})
        trainer.save_model()
        opened, _ = guidance.load(folder or temporary)
        same = torch.equal(opened(**batches[0]).logits, trainer.model.eval()(**batches[0]).logits)
    print(f"saved and opened again: {'the same' if same else 'NOT the same'} to the last bit")


if __name__ == "__main__":
    main(*sys.argv[1:])
