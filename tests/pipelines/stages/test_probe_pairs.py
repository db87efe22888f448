"""Minimal pairs: the scores are those of minicons and of transformers, equal ones are wrong, heads can be switched off."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import guidance
from guidance.errors import InputError
from guidance.statistics.ngrams import FLOORS
from pipelines.probing.likelihood import Scorer
from pipelines.stages import probe_induction, probe_pairs
from pipelines.storage.store import Store
from tests import trainings
from tests.shared import shared
from tests.trainings import one_thread  # noqa: F401

VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *["the", "dog", "##s", "sleep", "##ing", "ran", "un", "##happ", "##y", "cat", ".", "a"],
]
TEXTS = ["the dogs sleep .", "the dog sleeping .", "unhappy cats ran", "the cat ran ."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with word pieces."""
    made = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(VOCABULARY), initializer_range=1.0, **shape)
    BertForMaskedLM(config).save_pretrained(made)
    backend = Tokenizer(models.WordPiece({name: n for n, name in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    special = {f"{role}_token": name for role, name in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(made)
    return made


@pytest.mark.parametrize(("masking", "metric"), [("token", "original"), ("word", "within_word_l2r")])
def test_scores_are_those_of_minicons(folder: Path, masking: Any, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = pytest.importorskip("minicons.scorer")
    # minicons calls a method that transformers 5 has no more
    again = lambda self, texts, **more: self(texts, **more)  # noqa: E731
    monkeypatch.setattr(PreTrainedTokenizerBase, "batch_encode_plus", again, raising=False)
    theirs = scorer.MaskedLMScorer(str(folder), "cpu")
    wanted = theirs.sequence_score(TEXTS, reduction=lambda scores: scores.sum(0).item(), PLL_metric=metric)
    for size in (1, 3, 64):
        found = [each.total for each in Scorer(folder).likelihoods(TEXTS, masking, size)]
        assert found == pytest.approx(wanted, abs=1e-4)


def test_each_token_is_scored_while_it_is_masked(folder: Path) -> None:
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    (found,) = Scorer(folder).likelihoods(["unhappy cat"], "token", 8)
    ids = [VOCABULARY.index(name) for name in ("[CLS]", "un", "##happ", "##y", "cat", "[SEP]")]
    assert found.ids.tolist() == ids[1:-1]
    for place, score in enumerate(found.scores, 1):
        seen = torch.tensor([ids])
        seen[0, place] = VOCABULARY.index("[MASK]")
        with torch.no_grad():
            wanted = model(seen).logits[0, place].log_softmax(-1)[ids[place]]
        assert score == pytest.approx(float(wanted), abs=1e-5)


def test_a_decoder_needs_a_token_to_begin_texts_with(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    made = tmp_path / "llama"
    words = ["<none>", "<stop>", "the", "dog", "dogs", "ran", "."]
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape)).save_pretrained(made)
    backend = Tokenizer(models.WordLevel({name: n for n, name in enumerate(words)}, unk_token="<none>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<stop>", unk_token="<none>").save_pretrained(made)
    (tmp_path / "own.tsv").write_text("the dog .\tthe dogs .\n")
    with pytest.raises(InputError, match="its tokenizer has no token to begin a text with"):
        probe_pairs.run(str(made), [str(tmp_path / "own.tsv")], probe_pairs.Config(), store=Store(tmp_path / "a"))
    config = probe_induction.Config(sequences=2, length=4)
    found = probe_induction.run(str(made), config, store=Store(tmp_path / "a")).artifact
    # the tokens of the second copy stand at places 4 to 7
    chance = sum(1 / (place + 1) for place in range(4, 8)) / 4
    assert found.counts["by_chance"]["induction"] == pytest.approx(chance)


def test_a_table_of_paradigms_and_ties_are_wrong(folder: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    rows = [
        {"sentence_good": "the dog ran .", "sentence_bad": "the dog ran .", "UID": "equal"},
        {"sentence_good": "the cats ran .", "sentence_bad": "the cats sleep .", "UID": "verbs"},
        {"sentence_good": "the cats sleep .", "sentence_bad": "the cats ran .", "UID": "verbs"},
    ]
    with gzip.open(tmp_path / "pairs.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.tsv").write_text("the dog .\tthe dogs .\n\na cat\tthe cat\n")
    files = [str(tmp_path / "pairs.jsonl.gz"), str(tmp_path / "own.tsv")]
    made = probe_pairs.run(str(folder), files, probe_pairs.Config(), store=store).artifact
    table = {row["paradigm"]: row for row in pq.read_table(made.path / "paradigms.parquet").to_pylist()}
    assert (table["equal"]["accuracy"], table["equal"]["equal"], table["equal"]["pairs"]) == (0.0, 1, 1)
    assert table["verbs"]["accuracy"] == 0.5 and table["own"]["pairs"] == 2 and table["own"]["unigram"] is None
    pairs = pq.read_table(made.path / "pairs.parquet").to_pylist()
    assert pairs[0]["good_score"] == pairs[0]["bad_score"] and not pairs[0]["right"]
    assert made.counts["accuracy"] == pytest.approx((0 + 0.5 + table["own"]["accuracy"]) / 3)
    few = probe_pairs.run(str(folder), files, probe_pairs.Config(limit=1, random=3), store=store).artifact
    assert few.counts["pairs"] == 3
    assert pq.read_table(few.path / "pairs.parquet").to_pylist()[1]["good_score"] != pairs[1]["good_score"]


def test_heads_are_switched_off_one_after_the_other(folder: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    (tmp_path / "own.tsv").write_text("".join(f"{one}\t{other}\n" for one in TEXTS for other in TEXTS if one != other))
    file = [str(tmp_path / "own.tsv")]
    each = probe_pairs.run(str(folder), file, probe_pairs.Config(each_head=True), store=store).artifact
    rows = pq.read_table(each.path / "heads.parquet").to_pylist()
    assert len(rows) == 8 and (each.path / "heads.png").is_file()
    one = probe_pairs.run(str(folder), file, probe_pairs.Config(off=["1-2"]), store=store).artifact
    assert one.counts["accuracy"] == next(r for r in rows if (r["layer"], r["head"]) == (1, 2))["accuracy"]
    scorer = Scorer(folder)
    whole = scorer.likelihoods(TEXTS, "token", 8)[0].total
    with scorer.without([(0, 1), (1, 2)]):
        assert scorer.likelihoods(TEXTS, "token", 8)[0].total != whole
    assert scorer.likelihoods(TEXTS, "token", 8)[0].total == whole
    with pytest.raises(InputError, match="there is no head 5-0: the model has layers 0 to 1"):
        probe_pairs.run(str(folder), file, probe_pairs.Config(off=["5-0"]), store=store)


def test_ngrams_of_the_training_text_stand_beside_the_score(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    data = trainings.sequences(store)
    model = trainings.train(store, data, steps=1).reference
    texts = [" ".join(["w1", "w2", "w3"]), " ".join(["w3", "w1"])]
    (tmp_path / "own.tsv").write_text(f"{texts[0]}\t{texts[1]}\n")
    config = probe_pairs.Config(floors=data.reference)
    made = probe_pairs.run(model, [str(tmp_path / "own.tsv")], config, store=store).artifact
    assert set(made.counts["floors"]) == {"unigram", "ngrams"} <= set(FLOORS)
    assert all(value in (0.0, 1.0) for value in made.counts["floors"].values())


def test_a_guided_model_is_scored_with_and_without_its_plan(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    data = trainings.sequences(store)
    (tmp_path / "plan.toml").write_text('[[guide]]\npattern = "next"\nmechanism = "fix"\nheads = [0]\n')
    model = trainings.train(store, data, steps=2, plan=str(tmp_path / "plan.toml")).artifact
    guided, plain = Scorer(model.path), Scorer(model.path, guided=False)
    text = [" ".join(["w1", "w2", "w3", "w4"])]
    one, other = (scorer.likelihoods(text, "token", 4)[0].total for scorer in (guided, plain))
    assert math.isfinite(one) and one != other


def test_every_masked_copy_of_a_text_has_its_shuffled_keys(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    (tmp_path / "plan.toml").write_text('[[guide]]\npattern = { shuffled = "window" }\nmechanism = "mask"\n')
    folder = trainings.train(store, steps=1, plan=str(tmp_path / "plan.toml")).artifact.path
    (found,) = Scorer(folder).likelihoods(["w1 w2 w3 w4"], "token", 4)
    model, handle = guidance.load(folder)
    text = torch.tensor([[0, *found.ids.tolist(), 2]])
    for place, score in enumerate(found.scores, 1):
        seen = text.clone()
        seen[0, place] = trainings.SPECIAL.index("<mask>")
        with torch.no_grad():
            logits_V = model.eval()(seen, guidance=handle.guide(seen, original=text)).logits[0, place]
        assert score == pytest.approx(float(logits_V.log_softmax(-1)[text[0, place]]), abs=1e-5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("one sentence", "line 1: not a minimal pair"),
        ('{"sentence_good": "a"}', "not a minimal pair"),
        ('{"sentence_good": "a", "sentence_bad": 3}', "not a minimal pair"),
        ("{", "not a minimal pair"),
        ('{"a":' * 10_000, "not a minimal pair"),
        ('{"sentence_good": "a", "sentence_bad": "\\ud800"}', "line 1: unpaired surrogate"),
        ("a\t ", "not a minimal pair"),
        ("", "no minimal pairs"),
    ],
)
def test_what_is_no_pair_is_refused(folder: Path, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "own.tsv").write_text(line + "\n")
    with pytest.raises(InputError, match=message):
        probe_pairs.run(
            str(folder), [str(tmp_path / "own.tsv")], probe_pairs.Config(), store=Store(tmp_path / "artifacts")
        )
    with pytest.raises(InputError, match="not LAYER-HEAD"):
        probe_pairs.run(str(folder), [], probe_pairs.Config(off=["two"]), store=Store(tmp_path / "artifacts"))


def test_the_pairs_of_blimp(guide: Callable[..., Any], folder: Path) -> None:
    done = guide("probe", "blimp", folder, shared("data/probe-blimp"), "--limit", 3)
    assert done.code == 0, done.err
    assert "principle_A_case_1" in done.err and "mean" in done.err
