"""lm-evaluation-harness scores a standalone decoder as transformers does by hand.

The tasks are YAML files over local JSON lines, and neither the network nor this package is there.  `pip install 'lm-eval[hf]==0.4.13'`
installs the harness, which is no development tool of ours, since it needs 28 packages more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import guidance
from pipelines.standalone.folder import export_standalone
from pipelines.storage.store import Store
from tests.guidance.plans import installed
from tests.guidance.test_cache import EVERYTHING
from tests.pipelines.standalone.test_standalone import (  # noqa: F401
    CLOSE,
    NOT_INSTALLED,
    _code_is_copied_to,
    logits,
    tokenizer,
)

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")

CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""

ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["."], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""

DOCUMENTS: list[dict[str, Any]] = [
    {"text": "a b c d e a b", "choices": ["c", "d e", "f"], "label": 0},
    {"text": "f g h f", "choices": ["h", "g h", "x y z"], "label": 1},
    {"text": "k l", "choices": ["m n", "k", "l"], "label": 0},
    {"text": "A B C D A B C", "choices": ["D", "A B", "z"], "label": 0},
    {"text": "p q r p q", "choices": ["q", "p", "r"], "label": 2},
]

_HARNESS = "import runpy\nrunpy.run_module('lm_eval', run_name='__main__')\n"


def samples(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """By task, what the harness has written of each document, and of the requests that it made of it."""
    data, tasks = tmp_path / "documents.jsonl", tmp_path / "tasks"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    tasks.mkdir()
    for name, text in (("choices", CHOICES), ("answers", ANSWERS)):
        (tasks / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    for name in ("HF_HOME", "HF_MODULES_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = ["--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True", "--device", "cpu"]
    what = ["--tasks", "choices,answers", "--include_path", str(tasks), "--batch_size", "3"]
    out = ["--log_samples", "--output_path", str(tmp_path / "results")]
    command = [sys.executable, "-I", "-c", NOT_INSTALLED + _HARNESS, "run", *model, *what, *out]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in ("choices", "answers"):
        (path,) = (tmp_path / "results").rglob(f"samples_{name}_*.jsonl")
        found[name] = sorted(map(json.loads, path.read_text().splitlines()), key=lambda each: each["doc_id"])
    return found


def test_the_harness_scores_a_standalone_decoder_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guided, handle = installed("llama", EVERYTHING)
    words = tokenizer()
    words.bos_token, words.eos_token = "[CLS]", "[SEP]"
    guidance.save(handle, tmp_path / "model", tokenizer=words)
    folder = tmp_path / "out"
    export_standalone(str(tmp_path / "model"), Store(tmp_path / "store"), folder)
    found = samples(folder, tmp_path, monkeypatch)
    model, encode = (
        kind.from_pretrained(folder, trust_remote_code=True) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    handle.remove()
    for document, choices, answers in zip(DOCUMENTS, found["choices"], found["answers"], strict=True):
        text, label = document["text"], document["label"]
        prompt = encode(text, return_tensors="pt")
        start = prompt["input_ids"].shape[1]
        scores, plain = ([], [])
        for each in document["choices"]:
            whole = encode(f"{text} {each}", return_tensors="pt")["input_ids"]
            for of, to in ((model, scores), (guided, plain)):
                predicted = logits(of, {"input_ids": whole}).log_softmax(-1)[0, start - 1 : -1]
                to.append(predicted.gather(1, whole[0, start:, None]).sum())
        given = torch.tensor([float(first) for ((first, _),) in choices["resps"]])
        torch.testing.assert_close(given, torch.stack(scores), **CLOSE)
        assert choices["acc"] == float(torch.stack(scores).argmax() == label)
        assert (given - torch.stack(plain)).abs().max() > 0.1  # than without the plan
        tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, start:]
        answer = encode.decode(tokens, skip_special_tokens=True).split(".")[0]
        assert answers["resps"] == [[answer]]
        assert answers["exact_match"] == float(answer == document["choices"][label])
