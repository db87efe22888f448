"""Pre-training with next-sentence prediction, from sequences to a model folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from guidance.errors import InputError, Interrupted, PlanError
from guidance.objectives.masked_lm import IGNORED
from guidance.objectives.next_sentence import FOREIGN, NEXT
from guidance.plan import Plan
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged
from pipelines.storage.store import Store
from pipelines.text.encoding import Tokens
from pipelines.text.packing import Packer
from pipelines.text.sequence_files import Packed
from pipelines.training import models
from pipelines.training.batches import Examples
from pipelines.training.learner import Setup
from pipelines.training.learners.guided import VALID_EPOCH
from pipelines.training.learners.next_sentence import NextSentence
from pipelines.training.objectives.next_sentence import NextSentencePrediction
from tests import trainings
from tests.trainings import one_thread  # noqa: F401

Text = list[list[list[int]]]
"""Documents, each a list of sentences, each a list of ids."""


def stories(number: int, seed: int = 0) -> Text:
    """Documents of 1 to 9 sentences of 1 to 7 tokens; within a document each token is its predecessor plus one."""
    random = np.random.default_rng(seed)
    found: Text = []
    for _ in range(number):
        at, document = int(random.integers(59)), []
        for length in random.integers(1, 8, random.integers(1, 10)):
            document.append([5 + (at + place) % 59 for place in range(length)])
            at += length
        found.append(document)
    return found


def packed(texts: Text, length: int, *, cross_documents: bool) -> pa.Table:
    """Sequences of the text, as ``build-sequences`` packs them."""
    places = [(d, s) for d, document in enumerate(texts) for s, sentence in enumerate(document) for _ in sentence]
    ids = [id_ for document in texts for sentence in document for id_ in sentence]
    document, sentence = (np.array(column, np.int32) for column in zip(*places, strict=True))
    nowhere = np.zeros(len(ids), np.int64)
    packer = Packer(length, 0, 2, cross_documents)
    parts = [packer.add(Tokens(np.array(ids, np.int32), document, sentence, nowhere, nowhere)), packer.flush()]
    columns: dict[str, list[list[int]]] = {"id": [], "document": [], "sentence": []}
    for part in parts:
        if isinstance(part, Packed):
            for name, column in columns.items():
                column += [row.tolist() for row in np.split(getattr(part.tokens, name), part.offsets[1:-1])]
    return pa.table({name: pa.array(column, trainings.IDS) for name, column in columns.items()})


def sequences(
    store: Store,
    train: Text | None = None,
    valid: Text | None = None,
    *,
    length: int = 16,
    cross_documents: bool = True,
) -> Artifact:
    texts = {"train": stories(30) if train is None else train, "valid": stories(8, 1) if valid is None else valid}
    tables = {split: packed(text, length, cross_documents=cross_documents) for split, text in texts.items() if text}
    return trainings.write_sequences(store, tables, max_length=length)


def given(data: Artifact, plan: str = "", **changes: Any) -> Setup:
    tokenizer = models.read_tokenizer(data)
    config = trainings.config(objective="mlm+nsp", **changes)
    train, valid = (Examples.read(data, split, len(tokenizer)) for split in ("train", "valid"))
    return Setup(config, Plan.parse(plan), data, tokenizer, train, valid)


def prepared(found: Setup) -> NextSentence:
    learner: Any = NextSentencePrediction.prepare(found)
    assert isinstance(learner, NextSentence)
    return learner


def documents(objective: NextSentence, split: str = "train") -> Any:
    return objective.splits[split]


def train(store: Store, data: Artifact | None = None, **changes: Any) -> Artifact:
    return trainings.train(store, data or sequences(store), objective="mlm+nsp", **changes).artifact


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "plan.toml").write_text(text)
    return str(tmp_path / "plan.toml")


SEGMENTS = '[[guide]]\npattern = "same_segment"\nmechanism = "attention_loss"\nheads = [0]\nweight = 1.0\n'
ADVERSARY = '[[guide]]\nmechanism = "adversary"\ntau = 0.1\n'


# the text


@pytest.mark.parametrize("length", [9, 16, 40])
def test_the_text_is_the_same_however_it_was_packed(store: Store, length: int) -> None:
    texts = stories(30)
    found = []
    for cross_documents in (True, False):
        data = sequences(store, texts, texts, length=length, cross_documents=cross_documents)
        found.append(documents(prepared(given(data))))
    one, other = found
    assert one.ids.tolist() == [id_ for document in texts for sentence in document for id_ in sentence]
    for name in ("ids", "starts", "document", "stretches", "earliest"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.document[-1] == len(texts) - 1
    lengths = [len(sentence) for document in texts for sentence in document]
    if max(lengths) <= length - 3:
        assert np.diff(one.starts).tolist() == lengths
    assert max(one.lengths) <= length


def test_several_sequences_give_their_documents_one_after_the_other(store: Store) -> None:
    one, other = (sequences(store, stories(9, seed)) for seed in (3, 4))
    both = prepared(Setup(**{**vars(given(one)), "corpora": (one, other)}))
    parts = [documents(prepared(given(data))) for data in (one, other)]
    assert documents(both).ids.tolist() == [*parts[0].ids, *parts[1].ids]
    assert documents(both).document.tolist() == [*parts[0].document, *(parts[1].document + 9)]
    assert both.sizes == list(map(len, parts))
    result = trainings.train(store, one, other, objective="mlm+nsp", sampling=[3, 1]).artifact
    assert result.counts["steps"] == 6


def test_batches_of_pairs_can_be_made_by_length(store: Store) -> None:
    rows = trainings.metrics(train(store, batch_tokens=60, epochs=2.0).path)
    tokens = [float.fromhex(row["tokens"]) for row in rows]
    assert max(tokens) <= 60 and len(set(tokens)) > 3
    assert sum(tokens) == 2 * prepared(given(sequences(store))).lengths.sum()


def test_examples_are_masked_pairs_that_change_with_the_epoch(store: Store) -> None:
    objective = prepared(given(sequences(store)))
    text, everything = documents(objective), range(len(objective.lengths))
    first, second = (objective.prepare([(epoch, i) for i in everything]) for epoch in (0, 1))
    assert first.relations != second.relations
    by_chance = 0
    for batch in (first, second):
        assert {NEXT, FOREIGN, IGNORED} == set(batch.relations)
        assert batch.pairs == text.has_pair.sum() == sum(label != IGNORED for label in batch.relations)
        assert [len(row) for row in batch.seen] == objective.lengths.tolist()
        for example, (seen, labels, types) in enumerate(zip(batch.seen, batch.labels, batch.types, strict=True)):
            ids = np.where(labels == IGNORED, seen, labels)
            assert ids[0] == 0 and ids[-1] == 2
            (ends,) = np.nonzero(ids == 2)
            assert len(ends) == 1 + types.max()
            assert types.tolist() == [int(place > ends[0]) for place in range(len(ids))]
            assert (labels[[0, *ends]] == IGNORED).all()
            begin, end = text.starts[text.stretches[example : example + 2]]
            goes_on = np.array_equal(ids[(ids != 0) & (ids != 2)], text.ids[begin:end])
            foreign = batch.relations[example] == FOREIGN
            assert goes_on or foreign
            by_chance += goes_on and foreign
    assert by_chance <= 2
    again = prepared(given(sequences(store))).prepare([(1, i) for i in everything])
    assert all(map(np.array_equal, again.seen, second.seen)) and again.relations == second.relations


def test_examples_without_a_second_text_are_reported(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        objective = prepared(given(sequences(store)))
    alone = int((~documents(objective).has_pair).sum())
    assert f"train: {alone} of {len(objective.lengths)} examples have no second text" in caplog.text


# losses


def model_outputs(objective: NextSentence, batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of both heads for each example alone, without padding."""
    found = []
    for seen, types in zip(batch.seen, batch.types, strict=True):
        output = objective.model(torch.from_numpy(seen)[None], token_type_ids=torch.from_numpy(types)[None])
        found.append((output.prediction_logits[0], output.seq_relationship_logits[0]))
    return found


def test_losses_are_sums_over_chosen_tokens_and_over_pairs(store: Store) -> None:
    objective = prepared(given(sequences(store), mask_probability=0.4))
    objective.model.double().eval()
    batch = objective.prepare([(0, i) for i in range(20)])
    masked, asked, right = 0.0, 0.0, 0
    for (words, relation), labels, label in zip(
        model_outputs(objective, batch), batch.labels, batch.relations, strict=True
    ):
        for place in np.flatnonzero(labels != IGNORED):
            masked -= words[place].log_softmax(-1)[labels[place]].item()
        if label != IGNORED:
            asked -= relation.log_softmax(-1)[label].item()
            right += int(relation[label] > relation[1 - label])
    losses = objective.losses(objective.model, batch, 0)
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(
        {"mlm": masked, "nsp": asked, "accuracy/nsp": right}, rel=1e-9
    )
    counts = objective.counts(batch)
    assert counts["nsp"] == counts["accuracy/nsp"] == sum(label != IGNORED for label in batch.relations)
    assert counts["mlm"] == sum((labels != IGNORED).sum() for labels in batch.labels)
    assert objective.weights(0) == {"mlm": 1.0, "nsp": 1.0}


def test_validation_does_not_depend_on_the_number_of_processes(store: Store) -> None:
    objective = prepared(given(sequences(store, valid=stories(40, 1)), valid_sequences=50))
    objective.model.eval()
    with torch.no_grad():
        whole = objective.evaluate(objective.model, 0, 1)
        parts = [objective.evaluate(objective.model, rank, 3) for rank in range(3)]
        again = objective.evaluate(objective.model, 0, 1)
    batch = objective.prepare([(VALID_EPOCH, i) for i in range(50)], "valid")
    assert whole == again and list(whole) == ["mlm", "nsp", "accuracy/nsp"]
    assert whole["nsp"][1] == batch.pairs > 10
    for name, (total, count) in whole.items():
        assert sum(part[name][0] for part in parts) == pytest.approx(total, rel=1e-5)
        assert sum(part[name][1] for part in parts) == count


def test_guides_see_the_sentences_of_a_pair(store: Store) -> None:
    objective = prepared(given(sequences(store), SEGMENTS))
    batch = objective.prepare([(0, i) for i in range(12)])
    inputs = objective.tensors(batch)
    assert inputs.columns["segment"].shape == inputs.model["input_ids"].shape == inputs.model["token_type_ids"].shape
    for row, segments in enumerate(batch.columns["segment"]):
        assert inputs.columns["segment"][row, : len(segments)].tolist() == segments.tolist()
        assert set(np.diff(segments)) <= {0, 1}
    losses = objective.losses(objective.model, batch, 0)
    assert losses["guidance/same_segment"] > 0


# runs


def test_a_run_gives_a_model_with_both_heads(store: Store) -> None:
    from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, BertForPreTraining

    import guidance

    result = train(store, plan="preset:ag")
    rows = trainings.metrics(result.path)
    always = {"loss/total", "loss/mlm", "loss/nsp", "accuracy/nsp", "weight/mlm", "weight/nsp", "loss/guidance/next"}
    assert all(always <= set(row) for row in rows)
    assert all(0 <= float.fromhex(row["accuracy/nsp"]) <= 1 for row in rows)
    assert {"valid/mlm", "valid/nsp", "valid/accuracy/nsp"} <= set(rows[-1])
    assert result.counts["best_valid_loss"] == min(float.fromhex(r["valid/mlm"]) for r in rows if "valid/mlm" in r)
    model, _ = AutoModelForPreTraining.from_pretrained(result.path, output_loading_info=True)
    assert isinstance(model, BertForPreTraining)
    own, _ = guidance.load(result.path)
    inputs = {"input_ids": torch.tensor([[0, 7, 8, 2, 9, 2]]), "token_type_ids": torch.tensor([[0, 0, 0, 0, 1, 1]])}
    with torch.no_grad():
        one, other = model.eval()(**inputs), own(**inputs)
        words = AutoModelForMaskedLM.from_pretrained(result.path).eval()(**inputs).logits
    assert torch.equal(one.seq_relationship_logits, other.seq_relationship_logits)
    assert torch.equal(one.prediction_logits, words)


def test_the_trajectory_under_attack_does_not_depend_on_micro_batches(store: Store, tmp_path: Path) -> None:
    data, plan = sequences(store), write(tmp_path, ADVERSARY)
    changes: dict[str, Any] = {"precision": "fp64", "dropout": 0.0, "attention_dropout": 0.0, "plan": plan}
    found = [trainings.metrics(train(store, data, micro_batches=parts, force=True, **changes).path) for parts in (1, 4)]
    for one, other in zip(*found, strict=True):
        values = [{name: float.fromhex(value) for name, value in row.items()} for row in (one, other)]
        assert values[0] == pytest.approx(values[1], rel=1e-9, abs=1e-9)


def test_a_killed_run_resumes_bit_for_bit(store: Store, tmp_path: Path) -> None:
    data = sequences(store)
    changes: dict[str, Any] = {"plan": write(tmp_path, ADVERSARY), "steps": 8, "batch_size": 12}
    whole = train(store, data, **changes)
    expected = trainings.files_of(whole), trainings.metrics(whole.path)
    elsewhere = Store(tmp_path / "elsewhere")
    data = sequences(elsewhere)
    for _ in range(2):
        with pytest.raises(Interrupted):
            train(elsewhere, data, max_time=1e-9, **changes)
    again = train(elsewhere, data, **changes)
    assert (trainings.files_of(again), trainings.metrics(again.path)) == expected
    assert "guidance.safetensors" in again.files


# --init


def bert(folder: Path, kind: str, **changes: Any) -> str:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"intermediate_size": 16, "max_position_embeddings": 32, "pad_token_id": 1}
    model_type = changes.pop("model_type", "bert")
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **more, **changes})
    torch.manual_seed(5)
    getattr(transformers, kind).from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["AutoModelForPreTraining", "AutoModelForMaskedLM"])
def test_init_takes_a_bert_with_or_without_the_second_head(store: Store, tmp_path: Path, kind: str) -> None:
    import safetensors.torch

    init = bert(tmp_path / "bert", kind)
    tensors = [
        safetensors.torch.load(train(store, init=init, snapshots=[0], steps=1, **more).read(name))
        for more in ({}, {"force": True}, {"seed": 1})
        for name in ("snapshots/step-0/model.safetensors",)
    ]
    before = safetensors.torch.load_file(Path(init) / "model.safetensors")
    head = "cls.seq_relationship.weight"
    assert all(torch.equal(tensors[0][name], before[name]) for name in before)
    assert torch.equal(tensors[0][head], tensors[1][head])
    assert torch.equal(tensors[0][head], tensors[2][head]) == (kind == "AutoModelForPreTraining")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "electra"}, "mlm\\+nsp trains bert, and the model to start from is electra"),
        ({"type_vocab_size": 1}, "has 1 token types, and pairs need 2"),
        ({"max_position_embeddings": 15}, "the model allows 15 tokens"),
    ],
)
def test_a_model_that_cannot_read_pairs_is_refused(
    store: Store, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train(store, init=bert(tmp_path / "model", "AutoModelForPreTraining", **changes))


# refusals


def test_text_of_one_document_is_refused_with_what_is_needed(store: Store) -> None:
    for texts in ([[[7, 8], [9, 10], [11]]], [[[7, 8], [9, 10]], [[11, 12]]]):
        with pytest.raises(InputError, match="no pair of texts from different documents") as caught:
            train(store, sequences(store, texts))
        assert "two documents" in str(caught.value.hint)
    assert not list(store.unfinished())


def test_validation_text_of_one_document_gives_only_the_loss_on_masked_words(store: Store) -> None:
    result = train(store, sequences(store, valid=[[[7, 8], [9, 10], [11, 12, 13]]]), mask_probability=0.5)
    assert "valid/mlm" in result.counts["final"] and "valid/nsp" not in result.counts["final"]


def test_without_validation_text_there_is_no_validation(store: Store) -> None:
    assert train(store, sequences(store, valid=[])).counts["best_step"] is None


def damaged(columns: dict[str, Sequence[Any]]) -> pa.Table:
    return pa.table({name: pa.array(rows, trainings.IDS) for name, rows in columns.items()})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "column document is missing"),
        ({"document": [[-1, 0, -1]] * 2, "sentence": [[-1, 0]] * 2}, "column sentence does not have one value"),
        ({"document": [[-1, 1, -1], [-1, 0, -1]], "sentence": [[-1, 0, -1]] * 2}, "document .* is not in order"),
    ],
)
def test_sequences_without_document_and_sentence_columns_are_refused(
    store: Store, columns: dict[str, Any], message: str
) -> None:
    data = trainings.write_sequences(store, {"train": damaged({"id": [[0, 7, 2]] * 2, **columns})})
    with pytest.raises(ArtifactDamaged, match=message):
        train(store, data)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("preset:roles", r"guide 1 \(rare\): it needs word, idf, which are known for whole sequences"),
        ("preset:mcmisp-bert", r"guide 1 \(conflict\): logit_loss acts where a generator mis-predicts"),
        ("preset:mcmisp", r"guide 1 \(conflict\): it is for a discriminator, and mlm\+nsp trains one model"),
    ],
)
def test_guides_that_do_not_fit_pairs_are_refused_with_the_reason(store: Store, plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        train(store, plan=plan)


@pytest.mark.parametrize("architecture", ["roberta", "electra"])
def test_other_families_are_refused(store: Store, architecture: str) -> None:
    with pytest.raises(InputError, match=f"--objective mlm\\+nsp trains bert, not {architecture}"):
        train(store, architecture=architecture)
