"""``guide probe steering`` on a model with known answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from guidance.plan import Plan
from guidance.prompts import Prompt
from pipelines.stages import probe_steering
from pipelines.storage.store import Store
from pipelines.training.steering import Writer
from tests.pipelines.stages.test_probes import saved, table_of
from tests.trainings import one_thread  # noqa: F401

SIZE = 20
MARKED = [
    ("anna anna <<man>> it", "man"),
    ("the the dog <<she>>", "she"),
    ("anna <<dog>> dog", "dog"),
    ("was was <<glad>> the it", "glad glad"),
]
"""Prompts that ask for the marked word; the third one is answered right in any case."""

OTHERS = [("anna anna <<man>> it", "anna"), ("the the dog <<she>>", "the")]


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder of a model that writes the word with the most attention of head 0; all tokens have the same.  Head 1 writes
    nothing."""
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=2 * SIZE,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    layer, one = model.model.layers[0], torch.eye(SIZE)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.model.embed_tokens.weight[:, :SIZE] = one
        layer.self_attn.v_proj.weight[:SIZE, :SIZE] = one
        layer.self_attn.o_proj.weight[SIZE:, :SIZE] = one
        model.lm_head.weight[:, SIZE:] = one
    return saved(tmp_path / "llama", model)


def written(folder: Path, name: str, prompts: list[tuple[str, str]]) -> str:
    (folder / name).write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in prompts))
    return str(folder / name)


def log_probability(prompt: str, answer: str, outside: float) -> float:
    """That of an answer by hand, where attention to the tokens of the prompt that are not marked is multiplied by a factor."""
    parts = prompt.replace("<<", "*").replace(">>", "").split()
    words, total = [("<begin>", outside)] + [(w.strip("*"), 1.0 if "*" in w else outside) for w in parts], 0.0
    for word in answer.split():
        seen: dict[str, float] = {}
        for other, weight in words:
            seen[other] = seen.get(other, 0.0) + weight / sum(weight for _, weight in words)
        # the embedding of the last word has the norm of the root of SIZE * 2, as the values are of normalised states
        states = {other: share * math.sqrt(2 * SIZE) for other, share in seen.items()}
        scale = math.sqrt(2 * SIZE / (1 + sum(state**2 for state in states.values())))
        logits = [scale * states.get(other, 0.0) for other in seen] + [0.0] * (SIZE - len(seen) - (word not in seen))
        total += scale * states.get(word, 0.0) - math.log(sum(map(math.exp, logits)))
        words.append((word, 1.0))
    return total


def test_the_head_that_writes_what_it_looks_at_is_chosen(llama: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    artifact = probe_steering.run(
        llama, written(tmp_path, "marked.jsonl", MARKED), probe_steering.Config(top=1, batch_size=3), store=store
    ).artifact
    heads = {row["head"]: row for row in pq.read_table(artifact.path / "heads.parquet").to_pylist()}
    counts = artifact.counts
    plain, steered = (
        sum(log_probability(*prompt, outside) for prompt in MARKED) / len(MARKED) for outside in (1.0, 0.01)
    )
    assert (heads[0]["score"], heads[0]["right"], heads[1]["score"], heads[1]["right"]) == (1, 1, 0, 0.25)
    assert heads[0]["log_probability"] == pytest.approx(steered, abs=1e-4)
    assert heads[1]["log_probability"] == pytest.approx(plain, abs=1e-4)
    assert counts["plain"] == {name: heads[1][name] for name in ("right", "log_probability")}
    assert counts["all"] == counts["held_out"] == {name: heads[0][name] for name in ("right", "log_probability")}
    assert counts["chosen"] == [[0, 0]]
    assert table_of(artifact).rows[:3] == [
        ("none", "25.0 %", f"{plain:.3f}"),
        ("all", "100.0 %", f"{steered:.3f}"),
        ("best of the other half", "100.0 %", f"{steered:.3f}"),
    ]

    writer = Writer(Path(llama), Plan.load(str(artifact.path / "plan.toml")), device="cpu")
    assert {own.heads for plan in writer.handle.site_plans.values() for own in plan.assignments} == {(0,)}
    for prompt, answer in MARKED:
        assert f"{writer.write(Prompt.parse(prompt), max_new_tokens=3)} ".startswith(f" {answer} ")


def test_what_stands_between_prompt_and_answer_is_not_part_of_the_answer(llama: str, tmp_path: Path) -> None:
    """Words mean the same to the probe at the end of a prompt and in the delimiter."""
    store, cut = Store(tmp_path / "artifacts"), [(prompt.removesuffix(" it"), answer) for prompt, answer in MARKED[::3]]
    files = {" it ": cut, " ": [(f"{prompt} it", answer) for prompt, answer in cut]}
    found = []
    for number, (delimiter, prompts) in enumerate(files.items()):
        path = written(tmp_path, f"{number}.jsonl", prompts)
        made = probe_steering.run(llama, path, probe_steering.Config(top=1, delimiter=delimiter), store=store).artifact
        found.append((pq.read_table(made.path / "heads.parquet").to_pylist(), made.counts["plain"]))
    assert found[0] == found[1]
    assert found[0][0][0]["right"] == 1.0


def test_heads_are_chosen_that_are_good_for_every_file(
    llama: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Head 0 must not be steered where the right word is not the marked one."""
    store = Store(tmp_path / "artifacts")
    files = [written(tmp_path, "marked.jsonl", MARKED), written(tmp_path, "others.jsonl", OTHERS)]
    none, both = (
        probe_steering.run(llama, files, probe_steering.Config(top=top), store=store).artifact for top in (0.5, 2)
    )
    assert none.counts["chosen"] == [] and "plan.toml" not in none.files
    assert "the files do not have one of their 1 best heads in common" in caplog.text
    assert both.counts["chosen"] == [[0, 0], [0, 1]]
    rows = pq.read_table(both.path / "tasks.parquet").to_pylist()
    assert [(Path(row["task"]).name, row["head"], row["right"], row["rank"]) for row in rows] == [
        ("marked.jsonl", 0, 1.0, 1),
        ("marked.jsonl", 1, 0.25, 2),
        ("others.jsonl", 0, 0.0, 2),
        ("others.jsonl", 1, 1.0, 1),
    ]
    assert both.counts["plain"]["right"] == (0.25 + 1) / 2


@pytest.mark.parametrize(
    ("line", "flags", "words"),
    [
        ({"prompt": "the <<dog>>"}, [], 'bad.jsonl\', line 1: no "prompt" and "answer"'),
        ({"prompt": "the dog", "answer": "it"}, [], "bad.jsonl', line 1: nothing is marked"),
        ({"prompt": "the <<dog", "answer": "it"}, [], "bad.jsonl', line 1: << without its other end"),
        ({"prompt": "the << >>dog", "answer": "it"}, [], "bad.jsonl', line 1: nothing is marked"),
        ({"prompt": "the <<dog>>", "answer": "it"}, ["--delimiter", ""], "line 1: no token of the model begins with"),
        ({"prompt": "the <<dog>>", "answer": "it " * 3000}, [], "line 1: prompt and answer have 3003 tokens"),
        (None, [], "bad.jsonl': no prompt in it"),
        ({"prompt": "the <<dog>>", "answer": "it"}, ["--top", 1.5], "--top 1.5 is no number of heads"),
        (
            {"prompt": "the <<dog>>", "answer": "it"},
            ["--plan", "preset:ag-causal"],
            "no row of it looks at what is marked",
        ),
        ({"prompt": "the <<dog>>", "answer": "it"}, ["--plan", "STREAM"], "belongs to whole layers"),
        ({"prompt": "the <<dog>>", "answer": "it"}, ["--plan", "LEARNED"], "has learned nothing"),
    ],
)
def test_wrong_inputs_are_refused(
    llama: str, guide: Callable[..., Any], tmp_path: Path, line: Any, flags: list[Any], words: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("" if line is None else json.dumps(line) + "\n")
    row = '[[guide]]\npattern = "marked"\nmechanism = "mix"\n'
    (tmp_path / "STREAM").write_text(row + "learn = false\n")
    (tmp_path / "LEARNED").write_text(row + 'of = ["value"]\n')
    flags = [tmp_path / flag if flag in ("STREAM", "LEARNED") else flag for flag in flags]
    done = guide("probe", "steering", llama, file, *flags, "--store", tmp_path / "artifacts")
    assert done.code == 2 and words in done.err, done.err
