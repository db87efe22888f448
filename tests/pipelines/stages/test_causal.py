"""Causal language models from text to figures: trained, continued, evaluated, compared, refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
)

import guidance
from guidance.errors import InputError, PlanError
from guidance.objectives.causal_lm import documents_of, words_of
from guidance.probes.importance import switched_off
from pipelines.probing.likelihood import CausalScorer
from pipelines.stages import (
    corpus,
    dataset,
    evaluate,
    finetune,
    pretrain,
    probe_importance,
    probe_loss,
    probe_pairs,
    sequences,
    tokenizer,
)
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.batches import Examples
from pipelines.training.learners.causal_scores import bytes_of_sequences
from pipelines.training.models import read_tokenizer
from pipelines.views.evaluations import compare_evaluations
from tests import trainings
from tests.guidance.models import tiny_model
from tests.trainings import one_thread  # noqa: F401

CLM: dict[str, Any] = {"objective": "clm", "learning_rate": 1e-2, "batch_size": 8}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Artifact]:
    """Short documents, several of them in a sequence, of words that mostly follow each other."""
    folder, drawn = tmp_path_factory.mktemp("shop"), random.Random(0)
    for document in range(60):
        first = drawn.randrange(30)
        words = [f"w{(first + n) % 30}" if drawn.random() < 0.9 else "été" for n in range(drawn.randrange(3, 9))]
        (folder / f"{document:02}.txt").write_text(" ".join(words) + ".")
    store = Store(folder / "store")
    text = corpus.run([str(folder)], corpus.Config(valid=0.2), store=store).reference
    words = tokenizer.run(text, tokenizer.Config(kind="word", vocab_size=60, min_frequency=1), store=store).reference
    made = sequences.run(text, words, sequences.Config(max_length=24), store=store)
    assert made.artifact is not None
    return store, made.artifact


@pytest.fixture(scope="module")
def trained(shop: tuple[Store, Artifact]) -> Artifact:
    return trainings.train(*shop, **CLM, steps=40, plan="preset:ag-causal").artifact


def measured(shop: tuple[Store, Artifact], model: Any, **settings: Any) -> Artifact:
    reference = model.reference if isinstance(model, Artifact) else str(model)
    config = evaluate.Config(split="valid", **settings)
    return evaluate.run(reference, shop[1].reference, config, store=shop[0]).artifact


def last(model: Artifact) -> dict[str, Any]:
    return [row for row in map(json.loads, model.read("metrics.jsonl").splitlines()) if "valid/clm" in row][-1]


def test_the_loss_falls_below_that_of_word_frequencies_and_any_tool_opens_the_model(
    shop: tuple[Store, Artifact], trained: Artifact
) -> None:
    found = measured(shop, trained)
    assert found.counts["metrics"]["loss"] < found.counts["floors"]["unigram"] - 0.3
    model = AutoModelForCausalLM.from_pretrained(trained.path)
    words = AutoTokenizer.from_pretrained(trained.path)
    assert (words.bos_token_id, words.eos_token_id) == (model.config.bos_token_id, model.config.eos_token_id)
    assert words.convert_ids_to_tokens(words("w3 w4")["input_ids"]) == ["[CLS]", "w3", "w4"]
    written = model.generate(**words("w3 w4", return_tensors="pt"), max_new_tokens=3)
    assert written.shape[1] <= 6
    assert model.config.model_type == "llama" and "text-generation" in (trained.path / "README.md").read_text()


@torch.no_grad()
def test_an_evaluation_gives_what_documents_read_one_by_one_give(
    shop: tuple[Store, Artifact], trained: Artifact
) -> None:
    found, data = measured(shop, trained), shop[1]
    assert found.counts["metrics"]["loss"] == pytest.approx(last(trained)["valid/clm"], rel=1e-5)
    words, rows = read_tokenizer(data), Examples.read(data, "valid", 60)
    model, nats, tokens, inside = AutoModelForCausalLM.from_pretrained(trained.path), 0.0, 0, 0
    for i in range(len(rows)):
        documents = documents_of(rows[i], words.sep_token_id, words_of(words))
        inside += len(documents) > 1
        for ids, labels in documents:
            logits = model(torch.tensor(ids)[None]).logits[0].log_softmax(-1)
            for place in np.flatnonzero(labels >= 0):
                nats -= float(logits[place - 1, labels[place]])
                tokens += 1
    assert inside > 1, "no sequence had two documents"
    assert found.counts["predicted"] == tokens
    assert found.counts["metrics"]["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    # the text of a document stands in one sequence here, so its bytes are those of its file
    with shop[0].load_input(data, "corpus") as text:
        table = pq.read_table(text.path / "blocks.parquet").to_pydict()
    size = sum(len(t.encode()) for t, s in zip(table["text"], table["split"], strict=True) if s == "valid")
    assert found.counts["bytes"] == size
    assert found.counts["metrics"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    floors = found.counts["floors"]
    assert set(floors) == {"unigram", "previous", "ngrams"} and floors["unigram"] > floors["previous"]


def test_bytes_leave_out_what_is_in_another_split(tmp_path: Path) -> None:
    store, paragraphs = Store(tmp_path / "store"), [f"Été w{n}. Now w{n % 7} and w{n % 5}." for n in range(60)]
    (tmp_path / "one.txt").write_text("\n\n".join(paragraphs))
    text = corpus.run([str(tmp_path / "one.txt")], corpus.Config(valid=0.3), store=store)
    words = tokenizer.run(text.reference, tokenizer.Config(kind="word", min_frequency=1), store=store).reference
    made = sequences.run(text.reference, words, sequences.Config(max_length=16), store=store).artifact
    table = pq.read_table(text.artifact.path / "blocks.parquet").to_pydict()
    for split in ("train", "valid"):
        whole = sum(len(t.encode()) for t, s in zip(table["text"], table["split"], strict=True) if s == split)
        found = bytes_of_sequences(made, text.artifact, split)
        between = len(table["text"]) + len(found)  # line ends between paragraphs, and spaces between sequences
        assert whole > 300 and abs(int(found.sum()) - whole) <= between


def test_two_models_are_compared_sequence_by_sequence(shop: tuple[Store, Artifact], trained: Artifact) -> None:
    short = trainings.train(*shop, **CLM, steps=1).artifact
    one, other = measured(shop, short), measured(shop, trained)
    tested = {each.metric: each for each in compare_evaluations([one, other], ["short", "long"])}
    assert set(tested) == {"loss", "accuracy", "bits_per_byte"}
    assert tested["loss"].first == pytest.approx(one.counts["metrics"]["loss"])
    assert tested["loss"].difference.p < 0.05 and tested["loss"].second < tested["loss"].first
    with pytest.raises(InputError, match="did not predict the same tokens"):
        compare_evaluations([one, measured(shop, trained, limit=2)], ["short", "few"])


def test_a_causal_model_of_a_folder_is_continued_and_fine_tuned_with_a_tokenizer_without_padding(
    shop: tuple[Store, Artifact], labelled: dict[str, str], tmp_path: Path
) -> None:
    store, data = shop
    folder = tmp_path / "gpt2"
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=60, n_positions=32))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(data.read("tokenizer/tokenizer.json").replace(b"[PAD]", b"[-]"))
    end = "[SEP]"
    bare = {"bos_token": end, "eos_token": end, "unk_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(bare))
    with store.load_input(data, "corpus") as text:
        made = sequences.run(text.reference, str(folder), sequences.Config(max_length=24), store=store).artifact
    assert "pad_token" not in json.loads(made.read("tokenizer/tokenizer_config.json"))
    assert made.counts["splits"]["train"]["unknown_tokens"] == 0, "its separators have the id of the unknown token"
    continued = trainings.train(store, made, **CLM, steps=2, init=str(folder)).artifact
    assert AutoModelForCausalLM.from_pretrained(continued.path).config.model_type == "gpt2"
    assert evaluate.run(continued.reference, made.reference, evaluate.Config(split="valid"), store=store).artifact
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] is None
    settings = finetune.Config(init=str(folder), epochs=1, batch_size=8)
    tuned = finetune.run(labelled["tsv"], settings, store=store).artifact
    assert json.loads((tuned.path / "config.json").read_text())["pad_token_id"] is not None
    words, texts = AutoTokenizer.from_pretrained(tuned.path), ["w1 w2 w3", "w4"]
    assert (words.pad_token, words.model_max_length) == (end, 32)
    model = AutoModelForSequenceClassification.from_pretrained(tuned.path)
    with torch.no_grad():
        together = model(**words(texts, padding=True, return_tensors="pt")).logits
        alone = torch.cat([model(**words(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(together, alone)


def test_the_training_text_itself_has_no_floors(
    shop: tuple[Store, Artifact], trained: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    found = evaluate.run(trained.reference, shop[1].reference, evaluate.Config(split="train"), store=shop[0]).artifact
    assert "floors" not in found.manifest["inputs"]
    assert "its own n-grams would predict it too well" in caplog.text


def test_what_cannot_work_is_refused_by_name(shop: tuple[Store, Artifact], trained: Artifact, tmp_path: Path) -> None:
    sees_all = tmp_path / "bert"
    BertLMHeadModel(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=60)
    ).save_pretrained(sees_all)
    with pytest.raises(InputError, match="bert: BertLMHeadModel: its tokens see later ones"):
        trainings.train(*shop, **CLM, steps=1, init=str(sees_all))
    with pytest.raises(InputError, match="bert: BertLMHeadModel: its tokens see later ones"):
        measured(shop, sees_all)
    with pytest.raises(InputError, match="a llama, which --objective mlm does not train") as refused:
        trainings.train(*shop, steps=1, init=trained.reference)
    assert refused.value.hint == "--objective clm"
    for preset, message in (
        ("ag", "next names only later tokens, and a model that predicts them sees none; see preset:ag-causal"),
        ("neighbours", "next names only later tokens.*preset:neighbours-causal"),
        ("mcmisp-bert", "logit_loss acts where a generator mis-predicts, and clm has none"),
        ("roles", "would tell a query about later tokens|needs the features"),
    ):
        with pytest.raises(PlanError, match=message):
            trainings.train(*shop, **CLM, steps=1, plan=f"preset:{preset}")
    with pytest.raises(ValueError, match="--mask-probability belongs to --objective mlm"):
        pretrain.Config(objective="clm", mask_probability=0.3)


def test_a_guided_model_is_measured_with_its_plan(
    guide: Callable[..., Any], shop: tuple[Store, Artifact], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[[guide]]\npattern = "previous"\nmechanism = "fix"\nheads = [0]\n')
    model = trainings.train(*shop, **CLM, steps=2, plan=str(plan)).artifact
    found = measured(shop, model)
    assert found.counts["metrics"]["loss"] == pytest.approx(last(model)["valid/clm"], rel=1e-5)
    guidance.load(model.path)
    said = guide("evaluate", model.reference, shop[1].reference, "--split", "valid", "--store", shop[0].root)
    assert said.code == 0 and "bits_per_byte" in said.err and "floor: ngrams" in said.err


# minimal pairs


def pairs_in(folder: Path) -> list[str]:
    (folder / "order.tsv").write_text("w1 w2 w3 w4\tw4 w2 w3 w1\nw7 w8 .\tw8 w7 .\n")
    return [str(folder / "order.tsv")]


@torch.no_grad()
def test_minimal_pairs_are_scored_by_the_likelihood_of_whole_sentences(
    shop: tuple[Store, Artifact], trained: Artifact, tmp_path: Path
) -> None:
    settings = probe_pairs.Config(floors=shop[1].reference, batch_size=3)
    made = probe_pairs.run(trained.reference, pairs_in(tmp_path), settings, store=shop[0]).artifact
    rows = pq.read_table(made.path / "pairs.parquet").to_pylist()
    model, words = AutoModelForCausalLM.from_pretrained(trained.path), read_tokenizer(shop[1])
    for row in rows:
        for side in ("good", "bad"):
            ids = [words.cls_token_id, *words(row[side], add_special_tokens=False)["input_ids"]]
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = sum(float(logits[place, wanted]) for place, wanted in enumerate(ids[1:]))
            assert row[f"{side}_score"] == pytest.approx(expected, rel=1e-4)
    assert all(row["right"] for row in rows) and made.counts["floors"]["ngrams"] == 1.0
    with pytest.raises(InputError, match=r"--masking word: .* is a causal language model"):
        probe_pairs.run(trained.reference, pairs_in(tmp_path), probe_pairs.Config(masking="word"), store=shop[0])


def test_minimal_pairs_are_those_of_minicons_and_heads_can_be_switched_off(
    shop: tuple[Store, Artifact], trained: Artifact, tmp_path: Path
) -> None:
    scorer = pytest.importorskip("minicons.scorer")
    texts = ["w1 w2 w3 w4", "w9 w3 .", "w5"]
    theirs = scorer.IncrementalLMScorer(str(trained.path), "cpu")
    # the tokenizer puts a special token before the text, and a score begins after it
    expected = theirs.sequence_score(texts, reduction=lambda scores: scores.sum().item())
    found = [each.total for each in CausalScorer(trained.path).likelihoods(texts, "token", 2)]
    assert found == pytest.approx(expected, rel=1e-4)
    settings = probe_pairs.Config(each_head=True)
    made = probe_pairs.run(trained.reference, pairs_in(tmp_path), settings, store=shop[0]).artifact
    assert len(pq.read_table(made.path / "heads.parquet")) == 4


def test_a_head_of_gpt2_or_of_a_group_is_switched_off_alone() -> None:
    for family in ("gpt2", "llama"):
        model = tiny_model(family)
        handle = guidance.install(model, guidance.Plan())
        (module, _), *_ = handle.sites.items()
        name = {"gpt2": "c_proj", "llama": "o_proj"}[family]
        before = getattr(module, name).weight.clone()
        with switched_off(model, handle.sites, [(module, 2)]):
            weight = getattr(module, name).weight
            by_head = (weight if family == "gpt2" else weight.T).unflatten(0, (4, -1)).abs().amax((1, 2))
            assert (by_head == 0).tolist() == [False, False, True, False]
        assert torch.equal(getattr(module, name).weight, before)


def test_the_loss_of_every_slice_has_floors_of_earlier_tokens(shop: tuple[Store, Artifact], trained: Artifact) -> None:
    settings = probe_loss.Config(split="valid")
    made = probe_loss.run(trained.reference, shop[1].reference, settings, store=shop[0]).artifact
    rows = pq.read_table(made.path / "slices.parquet").to_pylist()
    assert {row["slice"] for row in rows} == {"all", "frequency", "place"}
    whole, found = rows[0], measured(shop, trained).counts
    assert whole["tokens"] == found["predicted"] and whole["neighbours"] is None
    assert whole["loss"] == pytest.approx(found["metrics"]["loss"], rel=1e-5)
    for floor in ("unigram", "previous", "ngrams"):
        assert whole[floor] == pytest.approx(found["floors"][floor], abs=1e-9)
    for name in ("frequency", "place"):
        assert sum(row["tokens"] * row["loss"] for row in rows if row["slice"] == name) == pytest.approx(
            whole["tokens"] * whole["loss"]
        )
    with pytest.raises(InputError, match="--mask-probability is for masked language models"):
        probe_loss.run(trained.reference, shop[1].reference, probe_loss.Config(mask_probability=0.3), store=shop[0])


@pytest.mark.parametrize("by", ["taylor", "off"])
def test_the_importance_of_heads_is_that_for_the_next_word(
    shop: tuple[Store, Artifact], trained: Artifact, by: Any
) -> None:
    settings = probe_importance.Config(split="valid", by=by, batch_size=4)
    made = probe_importance.run(trained.reference, shop[1].reference, settings, store=shop[0]).artifact
    rows = pq.read_table(made.path / "heads.parquet").to_pylist()
    assert len(rows) == 4 and made.counts["task"] == "causal-lm"
    if by == "off":
        assert made.counts["loss"] == pytest.approx(measured(shop, trained).counts["metrics"]["loss"], rel=1e-5)


# fine-tuning


@pytest.fixture(scope="module")
def labelled(shop: tuple[Store, Artifact], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Texts whose class their first word tells, and the same words with tags."""
    folder, drawn = tmp_path_factory.mktemp("labelled"), random.Random(1)
    for split, number in (("train", 60), ("valid", 20)):
        firsts = [drawn.choice(("w1", "w2")) for _ in range(number)]
        texts = [[first, *(f"w{drawn.randrange(3, 30)}" for _ in range(drawn.randrange(1, 6)))] for first in firsts]
        lines = [f"{' '.join(text)}\t{'one' if text[0] == 'w1' else 'two'}\n" for text in texts]
        (folder / f"{split}.tsv").write_text("text\tlabel\n" + "".join(lines))
        (folder / f"{split}.conll").write_text("\n".join("".join(f"{w} B-X\n{w} O\n" for w in t) for t in texts))
    made = {}
    for ending, config in (("tsv", dataset.Config()), ("conll", dataset.Config(format="conll"))):
        files = {split: [str(folder / f"{split}.{ending}")] for split in ("train", "valid")}
        made[ending] = dataset.run(files, config, store=shop[0]).reference
    return made


def test_a_causal_model_learns_classes_by_its_last_token(
    shop: tuple[Store, Artifact], trained: Artifact, labelled: dict[str, str]
) -> None:
    settings = finetune.Config(
        init=trained.reference, epochs=12, learning_rate=1e-2, batch_size=8, select="accuracy", dropout=0
    )
    made = finetune.run(labelled["tsv"], settings, store=shop[0]).artifact
    found = evaluate.run(made.reference, labelled["tsv"], evaluate.Config(split="valid"), store=shop[0]).artifact
    assert found.counts["metrics"]["accuracy"] > 0.75
    model = AutoModelForSequenceClassification.from_pretrained(made.path)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    predictions = pq.read_table(found.path / "predictions.parquet").to_pylist()
    words = read_tokenizer(shop[1])
    short, long = ([words.cls_token_id, *words(t, add_special_tokens=False)["input_ids"], words.sep_token_id] for t in ("w1 w2", "w4 w5 w6 w7"))  # fmt: skip
    padded = torch.tensor([[*short, *[words.pad_token_id] * 2], long])
    with torch.no_grad():
        torch.testing.assert_close(model(padded).logits[0], model(torch.tensor([short])).logits[0])
    assert len(predictions) == 20


def test_tasks_that_read_words_before_their_context_are_refused(
    shop: tuple[Store, Artifact], trained: Artifact, labelled: dict[str, str]
) -> None:
    with pytest.raises(
        InputError, match="a causal language model, and tagging reads words whose context is still to come"
    ):
        finetune.run(labelled["conll"], finetune.Config(init=trained.reference, epochs=1), store=shop[0])
