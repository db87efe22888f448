"""The command that a stage suggests next works when it is pasted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.options import suggestion
from pipelines.storage.store import Store
from pipelines.training.run_inputs import PlanText
from tests import runs

Guide = Callable[..., Any]

LINES = "".join(f"The number {n} is followed by the number {n + 1} .\n" for n in range(300))
SHORT = ["--layers", "2", "--hidden", "16", "--heads", "4", "--steps", "2", "--batch-size", "4"]


def after(answer: Any) -> list[str]:
    """The words of the command that an answer suggests."""
    assert answer.code == 0, answer.err
    (command,) = re.findall(r"^next: guide (.*)$", answer.err, re.M)
    return shlex.split(command)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text(LINES)
    return path


def test_suggestions_lead_from_a_text_to_a_comparison(guide: Guide, text: Path) -> None:
    corpus = guide("build-corpus", text, "--documents", "line", "--sentences", "line", "--name", "lines")
    assert after(corpus) == ["build-tokenizer", "lines@1"]
    tokenizer = guide(*after(corpus), "--vocab-size", "300", "--name", "bpe")
    assert after(tokenizer) == ["build-sequences", "lines@1", "bpe@1"]
    sequences = guide(*after(tokenizer), "--max-length", "32")
    rate = ["--learning-rate", "1e-3"]
    assert after(sequences) == ["pretrain", sequences.out.strip(), *rate]
    plain = guide(*after(sequences), *SHORT, "--name", "plain")
    assert after(plain) == ["show", "plain@1"]

    idf = guide("build-idf", "lines", "--unit", "sentence", "--name", "rare")
    assert after(idf) == ["build-masks", sequences.out.strip(), "--idf", "rare@1"]
    masks = guide(*after(idf))
    made = masks.out.strip()
    assert after(masks) == [
        "pretrain",
        sequences.out.strip(),
        "--masks",
        made,
        "--plan",
        "preset:roles-unparsed",
        *rate,
    ]
    guided = guide(*after(masks), *SHORT, "--name", "guided")
    assert after(guided) == ["compare", "plain@1", "guided@1"]
    plan = guide("plan", "new", "--output", "my plan.toml")
    assert after(plan) == ["plan", "check", "my plan.toml", "--model", "guided@1"]
    assert guide(*after(plan)).code == 0
    again = guide(*after(masks), *SHORT, "--seed", "1", "--name", "again")
    assert after(again) == ["compare", "plain@1", "again@1"]
    assert guide(*after(guided)).code == 0


def test_only_a_plain_run_of_the_same_objective_and_data_is_there_to_compare_with(tmp_path: Path) -> None:
    store, plain = Store(tmp_path), PlanText("").content
    others = [{"config": {"objective": "electra"}}, {"sequences": "other"}, {"sequences": ["same", "more"]}]
    guided = runs.finished(store, None, plan="guided")
    for other in others:
        runs.finished(store, None, plan=plain, **other)
    lines = ("guide compare {model} {}", "guide show {}")
    assert suggestion(lines, guided, "mine", store) == "guide show mine"
    fits = runs.finished(store, None, plan=plain)
    for other in others:
        runs.finished(store, None, plan=plain, **other)
    assert suggestion(lines, guided, "mine", store) == f"guide compare {fits.reference} mine"


def test_sequences_of_another_corpus_are_not_suggested(guide: Guide, text: Path) -> None:
    (text.parent / "other.txt").write_text(LINES.replace("number", "figure"))
    lines = ["--documents", "line", "--sentences", "line"]
    for path, name in ((text, "one"), (text.parent / "other.txt", "two")):
        guide("build-corpus", path, *lines, "--name", name)
    guide("build-tokenizer", "one", "--vocab-size", "300", "--name", "bpe")
    guide("build-sequences", "two", "bpe", "--max-length", "32", "--name", "of-two")
    assert after(guide("build-idf", "one", "--unit", "sentence")) == ["build-sequences", "one@1", "bpe@1"]


def test_without_sequences_the_next_step_is_to_make_some(guide: Guide, text: Path) -> None:
    corpus = guide("build-corpus", text, "--documents", "line", "--sentences", "line").out.strip()
    assert after(guide("build-idf", corpus)) == ["build-tokenizer", corpus]
    tokenizer = guide("build-tokenizer", corpus, "--vocab-size", "300").out.strip()
    again = guide("build-idf", corpus)
    assert after(again) == ["build-sequences", corpus, tokenizer]
    guide(*after(again), "--max-length", "32")
    of_tokens = guide("build-idf", corpus, tokenizer)
    assert after(of_tokens) == ["show", of_tokens.out.strip()]


def test_a_store_of_the_command_line_is_part_of_the_suggestion(guide: Guide, text: Path, tmp_path: Path) -> None:
    for place in (["--store", "my store"], [f"--store={tmp_path / 'other'}"]):
        made = guide("build-corpus", text, *place)
        assert after(made)[-2:] == ["--store", place[-1].removeprefix("--store=")]
        assert guide(*after(made), "--vocab-size", "300").code == 0
    made = guide("--store", "third", "build-corpus", text)
    assert after(made)[-2:] == ["--store", "third"]


def test_parallel_text_is_packed_in_pairs(guide: Guide, text: Path) -> None:
    made = guide("build-dataset", "--train", text, "--train-pair", text, "--name", "pairs")
    tokenizer = guide(*after(made), "--vocab-size", "300", "--name", "bpe")
    assert after(tokenizer) == ["build-sequences", "pairs@1", "bpe@1", "--packing", "pairs"]
    made = guide(*after(tokenizer))
    assert after(made)[2:] == ["--objective", "translation"]
    trained = guide(*after(made), *SHORT, "--name", "translator")
    evaluate = [line.removeprefix("next: guide ") for line in trained.err.splitlines() if "guide evaluate" in line]
    assert len(evaluate) == 1 and "--split valid" in evaluate[0], "there is no test split"
    assert guide(*shlex.split(evaluate[0]), "--beams", "1").code == 0


def test_build_sequences_says_how_many_sequences_and_tokens_it_made_also_when_they_are_there_already(guide):
    Path("text.txt").write_text("The dog ran. It barked and ran home.\n" * 40)
    corpus = guide("build-corpus", "text.txt").out.strip()
    tokenizer = guide("build-tokenizer", corpus, "--vocab-size", 300).out.strip()
    for _ in range(2):
        said = guide("build-sequences", corpus, tokenizer, "--max-length", 16).err
        assert re.search(
            r"^train \d+ sequences, [\d,]+ tokens; valid \d+ sequences, \d+ tokens; [\d.]+ tokens to a word$",
            said,
            re.M,
        )


def test_a_dataset_without_training_examples_is_not_to_be_trained_on(guide: Guide, tmp_path: Path) -> None:
    (tmp_path / "reviews.csv").write_text("text,label\nfine,good\ndull,bad\n")
    assert after(guide("build-dataset", "--test", "reviews.csv", "--name", "late")) == ["show", "late@1"]
    assert after(guide("build-dataset", "--train", "reviews.csv", "--name", "late")) == ["finetune", "late@2"]
