"""The collator pads features like the ids, beside any other collator, and for Trainer and GuidedTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import (
    BartForConditionalGeneration,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import guidance
from guidance.collator import FeatureCollator
from guidance.errors import InputError
from guidance.guide import Guide
from guidance.plan import Plan
from tests.guidance.models import tiny_config, tiny_model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(5, 40))]
ROLES = Plan((Guide("rare", "mask", heads=0), Guide("matrix", "mask", heads=1)))


def tokenizer(side: str = "right") -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: n for n, w in enumerate(WORDS)}, "[UNK]"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side=side, **names)


def example(length: int, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": [2, *range(5, 3 + length), 3],
        "attention_mask": [1] * length,
        "word": [-1, *range(length - 2), -1],
        "idf": [0.0] + [1.5] * (length - 1),
        "matrix": [[True] * length for _ in range(length)],
        **more,
    }


def test_an_example_without_ids_is_refused_and_does_not_end_the_epoch() -> None:
    def of_texts(examples: list[dict[str, Any]]) -> Any:
        return tokenizer()([each["text"] for each in examples], return_tensors="pt", padding=True)

    loader = torch.utils.data.DataLoader(
        [{"text": "w5 w6", "idf": [1.0, 1.0]}],  # type: ignore[arg-type]
        collate_fn=FeatureCollator(tokenizer(), of_texts),
    )
    with pytest.raises(InputError, match="idf belongs to input_ids, and example 0 has none"):
        list(loader)


def test_features_of_different_lengths_are_padded_on_the_side_of_the_ids() -> None:
    for side in ("right", "left"):
        batch = FeatureCollator(tokenizer(side))([example(4), example(6)])
        assert {name: tuple(column.shape) for name, column in batch.items()} == {
            **dict.fromkeys(("input_ids", "attention_mask", "word", "idf"), (2, 6)),
            "matrix": (2, 6, 6),
        }
        padded = batch["attention_mask"][0] == 0
        assert (batch["word"][0][~padded] == torch.tensor([-1, 0, 1, -1])).all()
        assert (batch["word"][0][padded] == -1).all() and (batch["idf"][0][padded] == 0).all()
        valid = ~padded
        assert torch.equal(batch["matrix"][0], valid[:, None] & valid[None])
        assert batch["word"].dtype == torch.int64 and batch["idf"].dtype == torch.float32
        assert batch["matrix"].dtype == torch.bool


def test_another_collator_makes_the_rest_of_the_batch() -> None:
    rows = [example(4, labels=[-100, 1, 2, -100]), example(6, labels=[0] * 6)]
    labelled = FeatureCollator(tokenizer(), DataCollatorForTokenClassification(tokenizer()))(rows)
    assert labelled["labels"][0].tolist() == [-100, 1, 2, -100, -100, -100] and labelled["word"].shape == (2, 6)
    masking = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.5, pad_to_multiple_of=8)
    batch = FeatureCollator(tokenizer(), masking)([example(4), example(6)])
    assert batch["word"].shape == batch["labels"].shape == (2, 8)
    assert rows[0]["word"] == [-1, 0, 1, -1]  # the examples are not changed


def test_columns_of_a_decoder_follow_its_labels() -> None:
    model = BartForConditionalGeneration(tiny_config("bart"))
    inner = DataCollatorForSeq2Seq(tokenizer(), model=model)
    rows = [example(n, labels=[5] * m, decoder_character=[46] * m) for n, m in ((4, 5), (6, 2))]
    for row in rows:
        del row["matrix"]
    batch = FeatureCollator(tokenizer(), inner)(rows)
    assert batch["decoder_character"].tolist() == [[46] * 5, [46] * 2 + [-1] * 3]
    assert batch["decoder_character"].shape == batch["decoder_input_ids"].shape


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"word": [0, 1]}, r"example 1: word has the shape \(2,\), and its 4 tokens want \(4,\)"),
        ({"matrix": [True] * 4}, r"example 1: matrix has the shape \(4,\), and its 4 tokens want \(4, 4\)"),
        ({"word": [0.5] * 4}, "example 1: word has torch.float32, not whole numbers"),
        ({"idf": ["a"] * 4}, "example 1: idf has values that are no table of numbers"),
        ({"idf": None}, "example 1: idf has no values"),
    ],
)
def test_a_column_that_does_not_fit_is_named_with_its_example(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FeatureCollator(tokenizer())([example(6), example(4, **wrong)])


def test_a_column_that_an_example_lacks_is_named() -> None:
    short = example(4)
    del short["idf"]
    with pytest.raises(InputError, match="example 1: idf has no values"):
        FeatureCollator(tokenizer())([example(6), short])


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=3,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


@pytest.mark.parametrize("kind", ["Trainer", "GuidedTrainer"])
def test_ragged_examples_train_in_both_trainers(kind: str, tmp_path: Path) -> None:
    words, model = tokenizer(), tiny_model("bert")
    rows = [example(4 + number % 4, idf=[float(number)] * (4 + number % 4)) for number in range(6)]
    inner = DataCollatorForLanguageModeling(words, mlm_probability=0.5, seed=0)
    given: dict[str, Any] = {"args": arguments(tmp_path), "data_collator": FeatureCollator(words, inner)}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    if kind == "Trainer":
        # a model whose plan shapes it takes the features as inputs
        guidance.install(model, ROLES)
        trainer: Trainer = Trainer(model=model, train_dataset=rows, processing_class=words, **given)
    else:
        plan = Plan((*ROLES.guides, Guide("dependency", "attention_loss", heads=2)))
        for row in rows:
            row["head"] = row["word"]
        trainer = guidance.GuidedTrainer(model=model, plan=plan, tokenizer=words, train_dataset=rows, **given)
    assert trainer.train().global_step == 2
    assert any(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_the_guided_trainer_pads_features_by_itself(tmp_path: Path) -> None:
    rows = [example(4 + number % 4) for number in range(6)]
    for row in rows:
        row["labels"] = 0
    given: dict[str, Any] = {"model": tiny_model("bert"), "args": arguments(tmp_path), "train_dataset": rows}
    trainer = guidance.GuidedTrainer(plan=ROLES, tokenizer=tokenizer(), **given)
    (batch, *_) = trainer.get_train_dataloader()
    assert batch["word"].shape == batch["input_ids"].shape and batch["matrix"].dim() == 3
