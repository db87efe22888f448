"""Tiny artifacts and models, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, models, pre_tokenizers

from pipelines.artifacts import Artifact, Store, digest

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = [".", ",", *(f"w{n}" for n in range(57))]
VOCABULARY = [*SPECIAL, *WORDS]


def tokenizer_json() -> str:
    """A word-level tokenizer of 64 tokens in RoBERTa's order."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str()


def sequence_ids(number: int, length: int, seed: int = 0) -> list[list[int]]:
    """Sequences with something to learn: each token is its predecessor plus one, now and then a new start."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        body = [int(random.integers(5, 64))]
        while len(body) < length - 2 - int(random.integers(0, 4)):
            body.append(int(random.integers(5, 64)) if random.random() < 0.2 else 5 + (body[-1] - 4) % 59)
        rows.append([0, *body, 2])
    return rows


def sequences(store: Store, *, train: int = 40, valid: int = 8, length: int = 16, seed: int = 0) -> Artifact:
    """A sequences artifact with the columns that training reads."""
    import json

    recipe = digest(["tiny sequences", train, valid, length, seed])
    manifest: dict[str, Any] = {
        "stage": "build-sequences",
        "stage_version": 1,
        "guide": "0.0.0",
        "config": {"max_length": length},
        "inputs": {},
    }
    if not (store.place("sequences", recipe) / "artifact.json").exists():
        with store.build("sequences", recipe, manifest) as out:
            schema = pa.schema([("id", pa.list_(pa.field("element", pa.int32())))])
            for split, number in (("train", train), ("valid", valid)):
                if number:
                    rows = sequence_ids(number, length, seed + (split == "valid"))
                    with out.parquet(f"{split}.parquet", schema) as writer:
                        writer.write_table(pa.table({"id": pa.array(rows, schema.field("id").type)}, schema))
            special = dict(
                zip(
                    ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), SPECIAL, strict=True
                )
            )
            out.write("tokenizer/tokenizer.json", tokenizer_json().encode())
            special |= {"cls_token": "<s>", "sep_token": "</s>"}
            out.write("tokenizer/special_tokens_map.json", json.dumps(special).encode())
            out.write(
                "tokenizer/tokenizer_config.json",
                json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **special}).encode(),
            )
            out.counts |= {"sequences": {"train": train, "valid": valid}}
            out.provenance.append({"source": "made by hand", "license": "Apache-2.0"})
    return Artifact(store.place("sequences", recipe))


def store(folder: Path) -> Store:
    return Store(folder / "store")
