"""Writes the golden files of `tests/test_compatibility.py`.

Run this with the code of commit 7e4d01b, the last one of the old layout, and with no other: the files are worth something
only because that commit wrote them.  In a checkout of it, with its requirements installed:

    PYTHONPATH=. OMP_NUM_THREADS=1 python PATH/TO/THIS/make.py

It writes beside itself: `plans/` (plans as a person writes them, and as ``Plan.dumps`` wrote them), `models/` (folders of
``guidance.save``), `random/` (what installing a plan drew), `text/` and `store/` (made-up text, and what the commands of
``COMMANDS`` made of it), and in `expected/` what the old code computed and printed.  All text is made up here.

Later code moves the modules that it imports, so it stops there at once.  Do not make it run on later code to get a failing
test to pass: a difference is a change of behaviour.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from guidance.features import Cooccurrence
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

import guidance
from cli.main import run
from guidance import Plan
from guidance.errors import InputError
from guidance.mechanisms import MECHANISMS
from guidance.patterns import PATTERNS
from guidance.plan import SCHEDULES, presets

HERE = Path(__file__).resolve().parent

# plans

PLANS = {
    "every-key": """
[[guide]]
name = "all keys, with \\"quotes\\" and ü"
pattern = "next"
mechanism = "attention_loss"
part = "discriminator"
stack = "decoder"
attention = "self"
layers = [0, "2-4", "first 2", "last 2", "fraction 0.5", "not 0-1"]
heads = ["all", "not 3"]
weight = { 1 = 100, 6 = 50.5, 12 = 10.0 }
reference_length = 512
schedule = "hold"
hold_steps = 7
optional = true
enabled = false

[[guide]]
pattern = "first"
mechanism = "attention_loss"
attention = "cross"
stack = "decoder"
layers = "all"
heads = 0
weight = 3
schedule = "cosine"
""",
    "selectors": """
[[guide]]
pattern = "self"
mechanism = "bias"
layers = "last 1"
heads = ["least important 3"]

[[guide]]
pattern = "self"
mechanism = "bias"
layers = ["fraction .5", "not first 1"]
heads = ["most important 0.25", "not 2-3"]

[[guide]]
pattern = "self"
mechanism = "bias"
heads = ["least important 1 per layer", 3, "0", "not fraction 0.25"]
""",
    "positions": """
[[guide]]
pattern = "next"
mechanism = "mask"

[[guide]]
pattern = "previous"
mechanism = "mask"
scale = "d_model"

[[guide]]
pattern = "window"
mechanism = "mask"
size = 5
words = true

[[guide]]
pattern = "all"
mechanism = "mask"

[[guide]]
pattern = "none"
mechanism = "fix"
boundary = "self"
""",
    "tokens": """
[[guide]]
pattern = "delimiter"
mechanism = "bias"
inside = 2
outside = 1e-5

[[guide]]
pattern = "period"
mechanism = "bias"
outside = 0.5

[[guide]]
pattern = "separator"
mechanism = "mask"
marks = ";?,.:\\"\\\\"

[[guide]]
pattern = "matching_token"
mechanism = "mask"
include_self = false
unique = "self"

[[guide]]
pattern = "marked"
mechanism = "bias"
inside = 4.0
outside = 1.0
""",
    "words": """
[[guide]]
pattern = "same_segment"
mechanism = "mask"
free_first = true

[[guide]]
pattern = "rare"
mechanism = "mask"
fraction = 0.2
least = 1

[[guide]]
pattern = "dependency"
mechanism = "mask"

[[guide]]
pattern = "major_relation"
mechanism = "mask"
relations = ["nsubj", "nsubj:pass"]
square = true

[[guide]]
pattern = "noun"
mechanism = "attention_loss"
proper = false
square = true

[[guide]]
pattern = "verb"
mechanism = "attention_loss"
square = true

[[guide]]
pattern = "adjective"
mechanism = "attention_loss"
square = false

[[guide]]
pattern = "negation"
mechanism = "attention_loss"

[[guide]]
pattern = "stop_word"
mechanism = "attention_loss"
""",
    "conflict": """
[[guide]]
pattern = "conflict"
mechanism = "logit_loss"
truth = true
rows = "all"
key_reduction = "mean"
head_reduction = "sum"

[[guide]]
pattern = "conflict"
mechanism = "logit_loss"
constant = 1

[[guide]]
pattern = "conflict"
mechanism = "bias"
""",
    "attention-losses": """
[[guide]]
pattern = "next"
mechanism = "attention_loss"
reduction = "frobenius"
boundary = "zero"

[[guide]]
pattern = "period"
mechanism = "attention_loss"
reduction = "head_mean"
token_rows = "indicator"
empty_rows = "skip"
schedule = "linear"
hold_steps = 10

[[guide]]
pattern = "period"
mechanism = "attention_loss"
reduction = "group_mean"
empty_rows = "zero"
weight = 0
""",
    "replacements": """
[[guide]]
pattern = "first"
mechanism = "fix"
boundary = "all"
heads = [0]

[[guide]]
mechanism = "gaussian"
sigma = 2
offsets = [-2, 0, 2]
heads = [1]

[[guide]]
mechanism = "off"
heads = [2]

[[guide]]
mechanism = "gate"
heads = [3]
""",
    "attacks": """
[[guide]]
mechanism = "adversary"
tau = 0.25
penalty_weight = 0.5
noise = "gumbel"
per_head = true
normalise = true
init_bias = 1
sentence = "head"
weight = 2
schedule = "linear"

[[guide]]
mechanism = "random_mask"
kind = "magnitude"
proportion = 0.5
sentence = "head"
layers = [0]
enabled = false

[[guide]]
mechanism = "random_mask"
kind = "scheduled"
enabled = false
""",
    "combinations": """
[[guide]]
pattern = { or = ["next", "previous", { and = ["period", { not = "first" }] }] }
mechanism = "mask"

[[guide]]
pattern = { sum = ["next", { name = "window", size = 5, weight = 0.25 }, { or = ["first", "period"], weight = 2 }] }
mechanism = "attention_loss"

[[guide]]
pattern = { not = { name = "separator", marks = "." } }
mechanism = "bias"

[[guide]]
pattern = { name = "rare", fraction = 0.5 }
least = 3
mechanism = "mask"
""",
    "pal": """
[pal]

[[guide]]
pattern = "next"
mechanism = "fix"
heads = ["pal:0", "pal:1-2", "pal:last 1"]
""",
    "pal-options": """
[pal]
width = 24
heads = 3
layers = ["last 2", "not 3"]
placement = "attention"
dropout = 0
start = "zero"

[[guide]]
pattern = "previous"
mechanism = "attention_loss"
heads = "pal:all"
name = "added"
""",
    "empty": "",
}


def write_plans(out: Path) -> None:
    """Plans as written, and as the old `Plan.dumps` writes them."""
    folder = out / "plans"
    folder.mkdir()
    (folder / "written").mkdir()
    (folder / "dumped").mkdir()
    for name, text in PLANS.items():
        (folder / "written" / f"{name}.toml").write_text(text.lstrip("\n"), encoding="utf-8")
    for name in presets():
        (folder / "dumped" / f"preset-{name}.toml").write_text(Plan.load(f"preset:{name}").dumps(), encoding="utf-8")
    seen: dict[str, set[str]] = {"pattern": set(), "mechanism": set(), "schedule": set(), "option": set()}
    for name, text in PLANS.items():
        plan = Plan.parse(text)
        (folder / "dumped" / f"{name}.toml").write_text(plan.dumps(), encoding="utf-8")
        for guide in plan.guides:
            seen["mechanism"].add(guide.mechanism)
            seen["schedule"].add(guide.schedule)
            seen["option"] |= {f"{guide.mechanism}.{key}" for key in guide.options if key in guide.acts.option_names}
            if isinstance(guide.pattern, str) and guide.pattern:
                seen["pattern"].add(guide.pattern)
                seen["option"] |= {f"{guide.pattern}.{k}" for k in guide.options if k not in guide.acts.option_names}
    wanted = {
        "pattern": set(PATTERNS),
        "mechanism": set(MECHANISMS),
        "schedule": set(SCHEDULES),
        "option": {
            f"{name}.{key}" for rows in (PATTERNS, MECHANISMS) for name, row in rows.items() for key in row.option_names
        },
    }
    for what, names in wanted.items():
        if missing := names - seen[what]:
            sys.exit(f"no plan uses the {what} {', '.join(sorted(missing))}")


# models

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sees",
    "finds",
    "likes",
    "red",
    "small",
    "old",
    "not",
    "in",
    "on",
    "and",
    "house",
    "tree",
    "river",
    ",",
    ".",
    ";",
    "?",
]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Thirty words, each one token."""
    names = [*SPECIAL, *WORDS]
    names += [f"word{n}" for n in range(30 - len(names))]
    base = Tokenizer(models.WordLevel({word: n for n, word in enumerate(names)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    base.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=base,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


COMMON = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SEQ2SEQ = {
    "vocab_size": 30,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 20,
    "init_std": 0.5,
    "dropout": 0.0,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": COMMON,
    "roberta": COMMON,
    "albert": {**COMMON, "embedding_size": 16},
    "modernbert": {
        **{key: value for key, value in COMMON.items() if not key.endswith("_prob")},
        "local_attention": 4,
        "global_attn_every_n_layers": 2,
        "cls_token_id": 0,
        "sep_token_id": 2,
        "initializer_cutoff_factor": 2.0,
    },
    "deberta-v2": {
        **COMMON,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4,
        "type_vocab_size": 0,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    },
    "bart": SEQ2SEQ,
    "t5": {
        "vocab_size": 30,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 0,
    },
}
MODELS: dict[str, tuple[str, str]] = {
    "bert": (
        "bert",
        """
[[guide]]
mechanism = "gate"
heads = [0, 2]

[[guide]]
mechanism = "adversary"
per_head = true
noise = "gumbel"
init_bias = 0.1
weight = 2
schedule = "linear"

[[guide]]
pattern = "separator"
mechanism = "mask"
heads = [0]
scale = "d_model"

[[guide]]
pattern = "window"
mechanism = "mask"
heads = [1]
words = true

[[guide]]
pattern = { or = ["next", "period"] }
mechanism = "bias"
heads = [2]

[[guide]]
pattern = { sum = ["next", { name = "first", weight = 0.5 }] }
mechanism = "bias"
layers = ["last 1"]
heads = [3]
inside = 3.0
outside = 0.5
""",
    ),
    "bert-losses": (
        "bert",
        """
[[guide]]
pattern = "next"
mechanism = "attention_loss"
heads = [0]
weight = { 1 = 7.0, 2 = 5.0 }
reference_length = 10
schedule = "linear"

[[guide]]
pattern = "first"
mechanism = "attention_loss"
heads = ["fraction 0.5", "not 0"]
reduction = "frobenius"
schedule = "cosine"

[[guide]]
pattern = "separator"
mechanism = "attention_loss"
heads = [1, 2]
reduction = "head_mean"
token_rows = "indicator"

[[guide]]
pattern = "noun"
mechanism = "attention_loss"
heads = ["least important 1 per layer"]
square = true
empty_rows = "skip"

[[guide]]
pattern = "previous"
mechanism = "attention_loss"
heads = [3]
boundary = "zero"
schedule = "hold"
hold_steps = 2

[[guide]]
pattern = "rare"
mechanism = "attention_loss"
heads = [2]
fraction = 0.4
least = 1

[[guide]]
pattern = "conflict"
mechanism = "logit_loss"
heads = ["first 3"]

[[guide]]
pattern = "conflict"
mechanism = "logit_loss"
name = "truth"
layers = [1]
heads = [3]
truth = true
rows = "all"
key_reduction = "mean"
head_reduction = "sum"

[[guide]]
pattern = "period"
mechanism = "attention_loss"
heads = [0]

[[guide]]
pattern = "period"
mechanism = "attention_loss"
heads = [1]
name = "period or nothing"
empty_rows = "zero"

[[guide]]
mechanism = "random_mask"
kind = "magnitude"
proportion = 0.4
""",
    ),
    "roberta-pal": (
        "roberta",
        """
[pal]
width = 8
heads = 2
layers = ["last 1"]
dropout = 0.0

[[guide]]
pattern = "next"
mechanism = "fix"
heads = ["pal:0"]

[[guide]]
pattern = "same_segment"
mechanism = "mask"
heads = ["pal:1"]

[[guide]]
pattern = "previous"
mechanism = "fix"
heads = [0]
boundary = "self"

[[guide]]
pattern = { name = "matching_token", include_self = false }
mechanism = "fix"
heads = [1]
boundary = "all"

[[guide]]
mechanism = "off"
layers = [1]
heads = [2]

[[guide]]
mechanism = "adversary"
heads = [3]
normalise = true
penalty_weight = 0.5
""",
    ),
    "albert-shared": (
        "albert",
        """
[[guide]]
mechanism = "gate"
heads = [1]

[[guide]]
pattern = "dependency"
mechanism = "mask"
heads = [0]

[[guide]]
pattern = "major_relation"
mechanism = "mask"
heads = [2]

[[guide]]
mechanism = "random_mask"
proportion = 0.3
""",
    ),
    "modernbert": (
        "modernbert",
        """
[[guide]]
pattern = "delimiter"
mechanism = "mask"
heads = [0]

[[guide]]
mechanism = "gaussian"
heads = [1, 2]
sigma = 1.5

[[guide]]
pattern = "next"
mechanism = "attention_loss"
heads = [3]

[[guide]]
mechanism = "adversary"
heads = [0, 3]
""",
    ),
    "deberta": (
        "deberta-v2",
        """
[[guide]]
pattern = "matching_token"
mechanism = "mask"
heads = [0]

[[guide]]
pattern = "negation"
mechanism = "bias"
heads = [1]

[[guide]]
pattern = { not = "stop_word" }
mechanism = "attention_loss"
heads = [2]
""",
    ),
    "bart": (
        "bart",
        """
[[guide]]
mechanism = "gaussian"
layers = [0]
heads = ["all", "not 0"]

[[guide]]
pattern = "previous"
mechanism = "fix"
layers = [0]
heads = [0]

[[guide]]
pattern = "next"
mechanism = "fix"
layers = [1]
heads = [0]

[[guide]]
mechanism = "gaussian"
name = "decoder"
stack = "decoder"
heads = ["first 2"]

[[guide]]
pattern = "previous"
mechanism = "attention_loss"
stack = "decoder"
heads = [3]
reference_length = 8

[[guide]]
pattern = "first"
mechanism = "bias"
stack = "decoder"
attention = "cross"
heads = [1]

[[guide]]
pattern = "separator"
mechanism = "attention_loss"
stack = "decoder"
attention = "cross"
heads = [2]

[[guide]]
mechanism = "gate"
stack = "decoder"
heads = [2]
layers = ["last 1"]
""",
    ),
    "t5": (
        "t5",
        """
[[guide]]
pattern = "verb"
mechanism = "mask"
heads = [0]
scale = "d_model"

[[guide]]
pattern = "adjective"
mechanism = "bias"
heads = [1]

[[guide]]
pattern = "previous"
mechanism = "mask"
stack = "decoder"
heads = [0]
""",
    ),
}
STEP, TOTAL = 3, 10
"""Where in training the losses are asked for."""


def batch(family: str) -> dict[str, torch.Tensor]:
    """Two sentences of different length, with features of every kind, as the caller gives them to `Handle.guide`."""
    wrapped = tokenizer()
    texts = ["the old cat sees a dog , not the red bird .", "a small dog likes the house ; the dog sees ."]
    texts[1] = texts[1].removesuffix(" sees .")
    given = wrapped(texts, padding=True, return_tensors="pt")
    ids, mask = given["input_ids"], given["attention_mask"]
    places = torch.arange(ids.shape[1]).expand_as(ids)
    special = (ids < 5) | (mask == 0)
    word = torch.where(special, -1, places - 1)
    head = torch.where(special, -1, torch.where(places % 3 == 0, places - 1, (places - 2).clamp(min=0)))
    generator = torch.Generator().manual_seed(1)
    found = {
        "input_ids": ids,
        "attention_mask": mask,
        "word": word,
        "segment": torch.where(special, -1, (places > 5).long()),
        "idf": torch.where(special, 0.0, 1 + (ids % 7) / 4),
        "head": head,
        "relation": torch.where(special, -1, ids % 12),
        "pos": torch.where(special, -1, ids % 17),
        "negation": ids == len(SPECIAL) + WORDS.index("not"),
        "stop_word": (ids == 5) | (ids == 6),
        "mispredicted": (places % 4 == 2) & ~special,
        "original": torch.where(places % 4 == 2, (ids + 3) % 30, ids),
    }
    if family in ("bart", "t5"):
        target = wrapped(["the bird finds a tree .", "not a river ."], padding=True, return_tensors="pt")
        decoder = {"input_ids": target["input_ids"], "attention_mask": target["attention_mask"]}
        found |= {f"decoder_{key}": value for key, value in decoder.items()}
    found["seeds_B"] = torch.randint(1 << 62, (2,), generator=generator)
    return found


def tables() -> dict[str, torch.Tensor]:
    """The table of conflicts and the scores of heads that ``bert-losses`` looks up."""
    rows = torch.full((30,), -1)
    rows[5:20] = torch.arange(15)
    numbers = torch.arange(15 * 15, dtype=torch.float32).reshape(15, 15)
    importance = torch.tensor([[0.5, 0.3, 0.9, 0.1], [0.7, 0.2, 0.4, 0.8]])
    return {"rows_V": rows, "scores_NN": (numbers * 0.37) % 1, "importance": importance}


def new_model(family: str, config: Any = None) -> Any:
    """A model from nothing."""
    config = config or AutoConfig.for_model(family, **FAMILIES[family])
    auto = AutoModelForSeq2SeqLM if family in ("bart", "t5") else AutoModelForMaskedLM
    return auto.from_config(config)


def opened(folder: Path, looked_up: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """A guided model from its folder, in double precision, with all that its losses look up."""
    counts = Cooccurrence(looked_up["rows_V"], looked_up["scores_NN"])
    model, handle = guidance.load(
        folder, training=True, tables={"cooccurrence": counts, "importance": looked_up["importance"]}
    )
    return model.double(), handle


def measured(model: Any, handle: Any, given: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What a model computes on a batch: tensors, and numbers by name."""
    given = dict(given)
    seeds_B = given.pop("seeds_B")
    inputs = {key: value for key, value in given.items() if key.endswith(("input_ids", "attention_mask"))}
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    with torch.no_grad():
        tensors["logits"] = model(**inputs, guidance=handle.guide(**given)).logits
        with contextlib.suppress(InputError):  # a plan that reads features of words cannot do without
            tensors["logits without guidance"] = model(**inputs).logits
    model.train()
    guidance_of_batch = handle.guide(**given, step=STEP)
    output = model(**inputs, guidance=guidance_of_batch)
    for label, values in guidance_of_batch.per_example().items():
        tensors[f"per example: {label}"] = values.detach()
        tensors[f"weights: {label}"] = guidance_of_batch.weights_B(label)
        numbers[f"denominator: {label}"] = float(guidance_of_batch.denominators()[label])
    loss = guidance_of_batch.loss(STEP, TOTAL)
    numbers["loss"] = float(loss.detach())
    total = loss + output.logits.double().square().mean()
    if any(guide.mechanism in ("adversary", "random_mask") for guide in handle.plan.guides):
        attack = guidance_of_batch.attack(seeds_B)
        attacked = model(**inputs, guidance=attack)
        tensors["attacked logits"] = attacked.logits.detach()
        tensors["penalties"] = attack.penalties_B().detach()
        numbers["penalty"] = float(attack.penalty().detach())
        classes = output.logits[:, 0], attacked.logits[:, 0]
        second = attack.adversarial_loss(*classes, "classification", step=STEP, total_steps=TOTAL)
        numbers["adversarial loss"] = float(second.detach())
        total = total + second
    numbers["total"] = float(total.detach())
    total.backward()
    for name, parameter in model.named_parameters():
        numbers[f"gradient: {name}"] = None if parameter.grad is None else float(parameter.grad.norm())
    return tensors, numbers


def write_models(out: Path) -> None:
    """Guided models, a batch for each, and what they compute on it."""
    (out / "expected").mkdir()
    looked_up = tables()
    save_file(looked_up, out / "expected" / "tables.safetensors")
    counts = Cooccurrence(looked_up["rows_V"], looked_up["scores_NN"])
    for name, (family, text) in MODELS.items():
        torch.manual_seed(3)
        model = new_model(family)
        given = {"cooccurrence": counts, "importance": looked_up["importance"]}
        handle = guidance.install(model, Plan.parse(text), tokenizer(), tables=given)
        with torch.no_grad():
            for parameter, tensor in model.named_parameters():
                if ".guided." in parameter:  # away from the start, where a gate is 1 and an added head silent
                    tensor.add_(torch.randn_like(tensor) * 0.3)
        folder = out / "models" / name
        guidance.save(handle, folder, tokenizer=tokenizer())
        tensors = batch(family)
        save_file(tensors, out / "expected" / f"{name}.batch.safetensors")
        found, numbers = measured(*opened(folder, looked_up), tensors)
        save_file({key: value.contiguous() for key, value in found.items()}, out / "expected" / f"{name}.safetensors")
        (out / "expected" / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


# random numbers

RANDOM: dict[str, tuple[str, str]] = {
    "gate-adversary": (
        "bert",
        """
[[guide]]
mechanism = "adversary"
init_bias = 0.5
layers = [1]

[[guide]]
mechanism = "gate"
""",
    ),
    "per-head": (
        "bert",
        """
[[guide]]
mechanism = "adversary"
per_head = true
heads = [0, 1]
""",
    ),
    "pal": (
        "bert",
        """
[pal]
width = 8
heads = 2

[[guide]]
mechanism = "gate"

[[guide]]
mechanism = "adversary"
layers = [0]

[[guide]]
pattern = "next"
mechanism = "fix"
heads = ["pal:0"]
""",
    ),
    "pal-zero": (
        "bert",
        """
[pal]
width = 8
heads = 2
layers = ["last 1"]
placement = "attention"
start = "zero"

[[guide]]
mechanism = "adversary"
layers = [1]
""",
    ),
    "shared": (
        "albert",
        """
[pal]
width = 8
heads = 1

[[guide]]
mechanism = "adversary"

[[guide]]
mechanism = "gate"
heads = [0, 3]
""",
    ),
    "decoder": (
        "bart",
        """
[[guide]]
mechanism = "gate"
stack = "decoder"
attention = "cross"

[[guide]]
mechanism = "adversary"
layers = [1]

[[guide]]
mechanism = "adversary"
stack = "decoder"
layers = [0]
per_head = true
""",
    ),
}


def write_random(out: Path) -> None:
    """The parameters that installing a plan adds, from seed 0, and what is drawn next."""
    (out / "random").mkdir()
    for name, (family, text) in RANDOM.items():
        config = AutoConfig.for_model(family, **FAMILIES[family])
        (out / "random" / f"{name}.toml").write_text(text.lstrip("\n"))
        shown = {"model_type": config.model_type, **FAMILIES[family]}
        (out / "random" / f"{name}.json").write_text(json.dumps(shown, indent=1, sort_keys=True) + "\n")
        model = new_model(family, config)
        torch.manual_seed(0)
        guidance.install(model, Plan.parse(text), tokenizer())
        drawn = {key: value.clone() for key, value in model.state_dict().items() if ".guided." in key}
        drawn["next"] = torch.rand(4)
        save_file(drawn, out / "random" / f"{name}.safetensors")


# artifacts

COMMANDS = (
    "build-corpus text/trees.conllu --valid 0.2 --license CC0-1.0 --source made-up --name corpus",
    "build-tokenizer corpus --kind wordpiece --vocab-size 150 --model-max-length 64 --name pieces",
    "build-sequences corpus pieces --max-length 32 --name packed",
    "build-idf corpus --unit sentence --name word-idf",
    "build-idf corpus pieces --formula max --name token-idf",
    "build-deps corpus --parser conllu:text/trees.conllu --name trees",
    "build-cooccur corpus pieces --top 30 --name counts",
    "build-masks packed --idf word-idf --deps trees --name roles",
    "build-dataset --train text/source.txt --train-pair text/target.txt --valid-fraction 0.2 --name pairs",
    "build-tokenizer pairs --kind word --vocab-size 60 --min-frequency 1 --name words",
    "build-sequences pairs words --packing pairs --max-length 16 --name translations",
    "pretrain packed --plan preset:ag {tiny} --snapshots 1 --name ag",
    "pretrain packed --plan preset:ag {tiny} --seed 1 --name ag",
    "pretrain packed {tiny} --name plain",
    "pretrain packed --plan preset:roles-unparsed --masks roles {tiny} --name guided-roles",
    "pretrain packed --plan preset:asa-pretraining {tiny} --name asa",
    "pretrain packed --plan preset:random-mask-scheduled --masking asa {tiny} --name naive",
    "pretrain packed --objective mlm+nsp --plan preset:ag {tiny} --name nsp",
    "pretrain packed --objective electra --plan preset:mcmisp --cooccur counts {tiny5} --name electra",
    "pretrain packed --plan preset:mcmisp-bert --cooccur counts {tiny5} --name mcmisp-bert",
    "pretrain translations --objective translation --plan preset:gaussian {tiny} --name translator",
    "evaluate translator translations --split valid --beams 2 --name scores",
)
LOOKS = (
    "verify",
    "verify --json",
    "ls",
    "ls --json",
    "ls --kind model",
    "show corpus",
    "show roles --json",
    "show ag@1",
    "show electra --json",
    "lineage guided-roles",
    "lineage electra --json",
    "lineage translator",
    "compare plain ag",
    "compare plain ag asa --json",
    "compare ag@1 ag@2 guided-roles",
)
TINY = "--steps 3 --batch-size 4 --layers 2 --hidden 8 --heads 4 --ffn 8 --evaluate-every 2 --device cpu"
TINY5 = TINY.replace("--layers 2 --hidden 8 --heads 4", "--layers 5 --hidden 10 --heads 5")

SUBJECTS = ("the old cat", "a small dog", "the red bird", "a quiet river", "the green tree", "one young farmer")
VERBS = ("sees", "finds", "likes", "follows", "forgets")
OBJECTS = ("the house", "a garden", "no flowers", "the long road", "a wooden boat", "two stones", "the morning")
GERMAN = {
    "the": "die",
    "a": "eine",
    "one": "eine",
    "no": "keine",
    "two": "zwei",
    "old": "alte",
    "small": "kleine",
    "red": "rote",
    "quiet": "stille",
    "green": "gruene",
    "young": "junge",
    "long": "lange",
    "wooden": "hoelzerne",
    "cat": "katze",
    "dog": "huendin",
    "bird": "amsel",
    "river": "elbe",
    "tree": "eiche",
    "farmer": "baeuerin",
    "sees": "sieht",
    "finds": "findet",
    "likes": "mag",
    "follows": "begleitet",
    "forgets": "vergisst",
    "house": "huette",
    "garden": "wiese",
    "flowers": "blumen",
    "road": "strasse",
    "boat": "barke",
    "stones": "steine",
    "morning": "fruehe",
}


def sentences() -> list[list[tuple[str, str, int, str]]]:
    """Made-up sentences: for each word its text, part of speech, head and relation."""
    found = []
    for n in range(36):
        subject, verb, thing = SUBJECTS[n % 6], VERBS[(n * 3 + n // 6) % 5], OBJECTS[(n * 5 + n // 7) % 7]
        left, right = subject.split(), thing.split()
        root = len(left) + 1
        rows = []
        for words, relation, start in ((left, "nsubj", 1), ([verb], "root", root), (right, "obj", root + 1)):
            last = start + len(words) - 1
            for place, word in enumerate(words, start):
                if place == last:
                    rows.append(
                        (word, "VERB" if relation == "root" else "NOUN", 0 if relation == "root" else root, relation)
                    )
                else:
                    kind = "DET" if place == start else "ADJ"
                    rows.append((word, kind, last, "det" if kind == "DET" else "amod"))
        rows.append((".", "PUNCT", root, "punct"))
        found.append(rows)
    return found


def write_text(out: Path) -> None:
    """Trees, and pairs of sentences."""
    (out / "text").mkdir()
    lines, source, target = [], [], []
    for number, rows in enumerate(sentences()):
        if number % 6 == 0:
            lines.append(f"# newdoc id = story-{number // 6}")
        if number % 3 == 0:
            lines.append("# newpar")
        lines.append(f"# sent_id = {number}")
        lines.append(f"# text = {' '.join(row[0] for row in rows).replace(' .', '.')}")
        for place, (word, kind, head, relation) in enumerate(rows, 1):
            after = "SpaceAfter=No" if place == len(rows) - 1 else "_"
            lines.append("\t".join((str(place), word, word, kind, "_", "_", str(head), relation, "_", after)))
        lines.append("")
        source.append(" ".join(row[0] for row in rows))
        target.append(" ".join(GERMAN.get(row[0], row[0]) for row in rows))
    (out / "text" / "trees.conllu").write_text("\n".join(lines) + "\n")
    (out / "text" / "source.txt").write_text("\n".join(source) + "\n")
    (out / "text" / "target.txt").write_text("\n".join(target) + "\n")


def guide(line: str) -> str:
    """What a command prints on stdout."""
    printed = io.StringIO()
    arguments = line.format(tiny=TINY, tiny5=TINY5).split()
    with contextlib.redirect_stdout(printed):
        code = run(arguments)
    if code:
        sys.exit(f"guide {line}: exit code {code}")
    return printed.getvalue()


def write_store(out: Path) -> None:
    """The artifacts of all commands, and what the commands print that look at them."""
    os.chdir(out)
    os.environ |= {"GUIDE_STORE": "store", "NO_COLOR": "1", "COLUMNS": "200"}
    steps = []
    for line in COMMANDS:
        printed = guide(line)
        steps.append({"command": line.format(tiny=TINY, tiny5=TINY5), "reference": printed.strip()})
    (out / "expected" / "commands.json").write_text(json.dumps(steps, indent=1) + "\n")
    for leftover in (".locks", ".tmp", ".partial", "trackers"):
        shutil.rmtree(out / "store" / leftover, ignore_errors=True)
    looks = [{"command": line, "stdout": guide(line)} for line in LOOKS]
    (out / "expected" / "looks.json").write_text(json.dumps(looks, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Write everything anew."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for name in ("plans", "models", "random", "expected", "text", "store"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    write_plans(HERE)
    write_models(HERE)
    write_random(HERE)
    write_text(HERE)
    write_store(HERE)


if __name__ == "__main__":
    main()
