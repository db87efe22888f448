"""``guide finetune`` and ``guide evaluate`` on extractive summaries and on topic segments."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from guidance.errors import InputError, Interrupted
from guidance.tasks.segments import pk, window_diff
from guidance.tasks.summaries import normalised_gain
from pipelines.probing.probe import SequencesConfig
from pipelines.probing.sequences import WatchedSequences
from pipelines.stages import evaluate, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.report import training_losses
from pipelines.training.task import Prediction
from pipelines.training.tasks.segmentation import Segmentation
from pipelines.training.tasks.summarization import Summarization
from tests import trainings
from tests.documents import articles, make, sections, write
from tests.finetunings import train
from tests.shared import shared
from tests.trainings import At, one_thread, send

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("documents") / "artifacts")


@pytest.fixture(scope="module")
def summaries(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("summaries")
    files = articles(folder, 40, 1), articles(folder, 12, 2)
    settings: dict[str, Any] = {"summary_column": "summary", "summary_sentences": 1, "valid_fraction": 0.2}
    return make(store, files[0], test=files[1], **settings)


@pytest.fixture(scope="module")
def segments(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("segments")
    return make(store, sections(folder, 24, 1), test=sections(folder, 6, 2), format="choi", valid_fraction=0.2)


def measured(store: Store, model: Artifact, data: Artifact, **settings: Any) -> tuple[Artifact, list[dict[str, Any]]]:
    made = evaluate.run(model.reference, data.reference, evaluate.Config(**settings), store=store).artifact
    return made, pq.read_table(made.path / "predictions.parquet").to_pylist()


SENTENCES = """
[[guide]]
pattern = "same_segment"
mechanism = "mask"
heads = "all"
"""
"""Every token looks at its own sentence."""


def test_a_summariser_learns_which_sentence_is_the_summary(store: Store, summaries: Artifact, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    plan = write(tmp_path / "sentences.toml", SENTENCES)
    model = train(store, summaries, steps=40, plan=str(plan)).artifact
    assert AutoModelForTokenClassification.from_pretrained(model.path).config.num_labels == 1
    made, rows = measured(store, model, summaries)
    metrics = made.counts["metrics"]
    assert metrics["oracle_f1"] == metrics["rouge1"] == metrics["rougeLsum"] == metrics["rouge1_oracle"] == 1.0
    assert 0 < metrics["rouge1_lead"] < 1
    assert made.counts["gain_over_lead"]["rouge1"] == 1.0
    assert all(row["summary"] == row["reference"] for row in rows)
    assert [row["sentences"][row["chosen"][0]] for row in rows] == [row["gold"].split().index("1") for row in rows]
    with pytest.raises(InputError, match="segmentation learns from segments"):
        train(store, summaries, task="segmentation")


def test_a_segmenter_is_measured_by_document(store: Store, segments: Artifact) -> None:
    model = train(store, segments, steps=60, select="f1", max_length=8).artifact
    assert AutoModelForSequenceClassification.from_pretrained(model.path).config.num_labels == 1
    made, rows = measured(store, model, segments)
    metrics = made.counts["metrics"]
    assert metrics["f1"] > 0.9
    assert metrics["pk"] <= metrics["window_diff"] < 0.1
    assert made.counts["documents"] == 6 and made.counts["documents_without_pk"] == 0
    assert made.counts["sharing_test_documents"] == 6
    assert any("contaminated: 6 test documents" in warning for warning in made.manifest["warnings"])
    assert [row["sentence"] for row in rows][:3] == [0, 1, 2]
    assert all((row["scores"][0] > 0.5) == (row["prediction"] == "1") for row in rows)
    ends = [
        n for n, row in enumerate(rows, 1) if n == len(rows) or rows[n]["sentence"] == 0
    ]  # of documents, among boundaries
    cut, some = measured(store, model, segments, limit=ends[1] + 1)
    assert len(some) == ends[1] and cut.counts["documents"] == 2, "no document that the limit has cut"
    told = f"--limit {ends[1] + 1} ends within a document: {ends[1]} boundaries of whole documents are evaluated"
    assert told in cut.manifest["warnings"]
    whole, _ = measured(store, model, segments, limit=ends[1])
    assert not any("--limit" in warning for warning in whole.manifest["warnings"])
    assert whole.counts["metrics"] == cut.counts["metrics"]
    assert made.manifest["stage_version"] == cut.manifest["stage_version"] == 3, "no result of before is used again"
    assert len(measured(store, model, segments, limit=ends[0] - 1)[1]) == ends[0], "at least the first document"


def test_a_validation_of_a_segmenter_ends_with_a_document(store: Store, segments: Artifact) -> None:
    rows = measured(store, train(store, segments, steps=2, max_length=8).artifact, segments, split="valid")[1]
    first, second = [n for n, row in enumerate(rows, 1) if n == len(rows) or rows[n]["sentence"] == 0][:2]

    def validated(number: int) -> tuple[Artifact, float]:
        model = train(store, segments, steps=2, max_length=8, valid_sequences=number).artifact
        return model, json.loads(model.read("metrics.jsonl").splitlines()[-1])["eval/segmentation/pk"]

    for number, whole in ((second + 1, second), (second, second), (second - 1, first), (first - 1, first)):
        model, found = validated(number)
        evaluated, _ = measured(store, model, segments, split="valid", limit=whole)
        assert found == evaluated.counts["metrics"]["pk"]
        assert model.manifest["stage_version"] == 2, "no result of before is used again"


def sequences_of(store: Store, data: Artifact, max_length: int = 128) -> Artifact:
    words = tokenizer.run(data.reference, tokenizer.Config(kind="word", min_frequency=1), store=store)
    config = sequences.Config(packing="examples", max_length=max_length)
    return sequences.run(data.reference, words.reference, config, store=store).artifact


@pytest.mark.parametrize("name", ["summaries", "segments"])
def test_the_first_loss_is_the_binary_cross_entropy_of_the_first_batch(
    store: Store, name: str, request: pytest.FixtureRequest
) -> None:
    """Summed over all sentences of a batch for summaries; the mean over boundaries for segments."""
    data = sequences_of(store, request.getfixturevalue(name))
    rows = pq.read_table(data.path / "train.parquet").to_pylist()
    settings: dict[str, Any] = {"steps": 1, "snapshots": [0], "dropout": 0, "attention_dropout": 0}
    run = train(store, data, batch_size=len(rows), micro_batches=2, **settings).artifact
    expected = []
    kind = AutoModelForTokenClassification if name == "summaries" else AutoModelForSequenceClassification
    opened = kind.from_pretrained(run.path / "snapshots/step-0")
    begin = rows[0]["id"][0]
    for row in rows:
        ids = torch.tensor([row["id"]])
        with torch.no_grad():
            logits = opened(input_ids=ids, token_type_ids=torch.tensor([row["text"]])).logits[0]
        if name == "summaries":
            logits = logits[ids[0] == begin]
        gold = torch.tensor([float(answer) for answer in row["label"].split()])
        expected.append(functional.binary_cross_entropy_with_logits(logits.flatten(), gold, reduction="sum"))
    total = torch.stack(expected).sum().item() / (1 if name == "summaries" else len(rows))
    found = json.loads(run.read("metrics.jsonl").splitlines()[0])
    task = {"summaries": "summarization", "segments": "segmentation"}[name]
    assert found[f"loss/{task}"] == pytest.approx(total, rel=1e-5)
    if name == "summaries":
        sentences = sum(len(row["label"].split()) for row in rows)
        assert found["loss/mean"] == pytest.approx(total / sentences, rel=1e-5), "beside the mean of validations"
        assert f"mean {found['loss/mean']:.3f}" in training_losses(found)


PLANS = {"patterns": "preset:patterns", "attack": "preset:asa"}


@pytest.mark.parametrize("name", ["summaries", "segments"])
@pytest.mark.parametrize("plan", PLANS)
def test_plans_act_and_a_killed_run_continues_bit_for_bit(
    store: Store, tmp_path: Path, name: str, plan: str, request: pytest.FixtureRequest
) -> None:
    data = sequences_of(store, request.getfixturevalue(name))
    settings: dict[str, Any] = {"steps": 4, "evaluate_every": 2, "save_every": 2, "heads": 4, "plan": PLANS[plan]}
    plain = train(store, data, **{**settings, "plan": ""}).artifact
    other = Store(shutil.copytree(store.root, tmp_path / "artifacts"))
    whole = train(store, data, **settings).artifact
    assert trainings.metrics(whole.path) != trainings.metrics(plain.path)
    with pytest.raises(Interrupted):
        train(other, data, progress=At(3, send(signal.SIGTERM)), **settings)
    resumed = train(other, data, **settings).artifact
    assert trainings.metrics(resumed.path) == trainings.metrics(whole.path)
    if plan == "attack":
        last = json.loads(whole.read("metrics.jsonl").splitlines()[-1])
        assert last["loss/adversary/outputs"] > 0, "the two probabilities differ under attack"


@pytest.mark.parametrize(("name", "answers"), [("summaries", "no sentence"), ("segments", "no training document")])
def test_training_data_with_one_answer_is_refused(store: Store, tmp_path: Path, name: str, answers: str) -> None:
    sentences = ["a b c d e f", "b c d e f g", "c d e f g h"]
    if name == "summaries":
        path = write(tmp_path / "a.jsonl", json.dumps({"text": sentences, "summary": "zzz"}))
        data = make(store, path, summary_column="summary")
    else:
        data = make(store, write(tmp_path / "a.ref", "\n".join(sentences)), format="choi")
    with pytest.raises(InputError, match=answers):
        train(store, data, steps=1)


@pytest.mark.parametrize("title", ["Extractive summarisation", "Topic segmentation"])
def test_the_commands_of_the_page_run(title: str, guide: Callable[..., Any], tmp_path: Path) -> None:
    if title == "Extractive summarisation":
        pytest.importorskip("rouge_score")
        articles(tmp_path, 12, 1).rename(tmp_path / "papers.jsonl")
    else:
        sections(tmp_path, 20, 1).rename(tmp_path / "texts")
    page = (Path(__file__).resolve().parents[3] / "docs/finetuning.md").read_text(encoding="utf-8")
    commands = page.split(f"## {title}\n")[1].split("```bash\n")[1].split("```")[0].splitlines()
    tiny = "--steps 2 --layers 1 --hidden 16 --heads 4 --ffn 16"
    for command in commands:
        command = command.replace("--init my-model", tiny).replace(" --drop-shared", "")
        found = guide(*shlex.split(command)[1:], *(["--json"] if " evaluate " in command else []))
        assert found.code == 0, found.err
    assert {"rouge1", "f1"} & json.loads(found.out)["counts"]["metrics"].keys()


def boundary(document: int, gold: int, predicted: int) -> Prediction:
    return Prediction(document, str(gold), str(predicted), [float(predicted)])


def test_metrics_of_boundaries_by_hand() -> None:
    first = [boundary(0, *pair) for pair in [(0, 0), (1, 0), (0, 1), (0, 0), (1, 1), (0, 0)]]
    short = [boundary(1, 1, 0)]
    found = Segmentation().metrics(first + short)
    assert found["precision"] == 1 / 2 and found["recall"] == 1 / 3 and found["f1"] == pytest.approx(0.4)
    gold = [False, True, False, False, True, False, True]
    predicted = [False, False, True, False, True, False, True]
    assert found["pk"] == pk(gold, predicted) and found["window_diff"] == window_diff(gold, predicted)
    assert Segmentation().report(first + short) == {"documents": 2, "documents_without_pk": 1}
    nothing = Segmentation().metrics(short)
    assert nothing == {"precision": 0.0, "recall": 0.0, "f1": 0.0}, "the one document is too short for a window"
    assert Segmentation().metrics([]) == {}


def test_segmenters_are_compared_document_by_document() -> None:
    """Three documents of 6, 2 and 5 sentences; the second is too short for a window."""
    gold = ["01000", "1", "0100"]
    one, other = ["01000", "1", "0000"], ["00100", "0", "0100"]

    def table(answers: list[str]) -> dict[str, list[Any]]:
        columns = {"gold": [*"".join(gold)], "prediction": [*"".join(answers)]}
        return columns | {"sentence": [number for own in gold for number in range(len(own))]}

    def ends(answers: str) -> list[bool]:
        return [*(answer == "1" for answer in answers), True]

    compared = {each.metric: each for each in Segmentation.compare(table(one), table(other))}
    assert list(compared) == ["f1", "precision", "recall", "pk", "window_diff"]
    assert {each.unit for each in compared.values()} == {"documents"}
    assert (compared["recall"].first, compared["recall"].second) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert {name: each.difference.n for name, each in compared.items()} == dict.fromkeys(compared, 3) | {
        "pk": 2,
        "window_diff": 2,
    }
    for name, measure in (("pk", pk), ("window_diff", window_diff)):
        for found, answers in ((compared[name].first, one), (compared[name].second, other)):
            values = [measure(ends(gold[number]), ends(answers[number])) for number in (0, 2)]
            assert measure(ends(gold[1]), ends(answers[1])) is None
            assert found == pytest.approx(sum(value or 0 for value in values) / 2)
    (apart,) = [each for each in Segmentation.compare_sets(table(one), table(other)) if each.metric == "pk"]
    assert apart.difference.effect == pytest.approx(compared["pk"].difference.effect) and apart.difference.n == 4


def test_metrics_of_sentences_by_hand() -> None:
    tied = Prediction(0, "0 1 0", "0 0 0", [0.4, 0.4, 0.1])
    right = Prediction(1, "1", "1", [0.9])
    empty = Prediction(2, "0 0", "1 1", [0.9, 0.9])
    assert Summarization().metrics([tied, right, empty])["oracle_f1"] == 0.5, (
        "of equal scores the first sentence is taken"
    )
    assert Summarization().metrics([empty])["oracle_f1"] == 0.0
    assert Summarization().metrics([]) == {}


def test_gains_are_shares_of_the_way_to_the_oracle() -> None:
    assert normalised_gain(0.5, 0.4, 0.8) == pytest.approx(0.25)
    assert normalised_gain(0.5, 0.8, 0.8) is None


def test_rouge_by_hand() -> None:
    pytest.importorskip("rouge_score")
    from pipelines.training.tasks.summarization import rouge

    found = rouge([["the cats sat", "dogs run"], []], [["the cat sat\ndogs ran"], ["x"]])
    # stems: the cat sat dog run against the cat sat dog ran; the second summary is empty
    assert found["rouge1"] == pytest.approx(4 / 5 / 2)
    assert found["rouge2"] == pytest.approx(3 / 4 / 2)
    assert found["rougeLsum"] == pytest.approx(4 / 5 / 2)
    assert rouge([["a b"]], [["c d", "a b"]])["rouge1"] == 1.0, "of several references the best one counts"


@pytest.mark.parametrize("name", ["sum-scitldr", "seg-choi"])
def test_real_slices_run_from_files_to_metrics(store: Store, tmp_path: Path, name: str) -> None:
    folder = shared(f"data/{name}")
    if name == "sum-scitldr":
        pytest.importorskip("rouge_score")
        some = (folder / "dev.jsonl").read_text().splitlines()[:60]
        files = (
            write(tmp_path / "train.jsonl", "\n".join(some[:40])),
            write(tmp_path / "test.jsonl", "\n".join(some[40:])),
        )
        data = make(store, files[0], test=files[1], format="scitldr")
    else:
        data = make(store, folder / "1/3-5/0.ref", folder / "1/3-5/1.ref", test=folder / "1/9-11/0.ref", format="choi")
    made, rows = measured(store, train(store, data, steps=2).artifact, data)
    assert len(rows) == made.counts["examples"] > 10
    if name == "sum-scitldr":
        metrics = made.counts["metrics"]
        assert metrics["rouge1"] <= metrics["rouge1_oracle_seen"] <= metrics["rouge1_oracle"] + 0.05
        assert all(len(row["chosen"]) == 1 for row in rows)


@pytest.mark.parametrize("name", ["summaries", "segments"])
def test_probes_read_the_parts_of_the_sequences_and_keep_an_example_in_one_half(
    store: Store, name: str, request: pytest.FixtureRequest
) -> None:
    data = request.getfixturevalue(name)
    model = train(store, data, steps=1, max_length=16).artifact
    read = sequences_of(store, data, max_length=16)
    watched = WatchedSequences({"model": model, "sequences": read}, SequencesConfig(split="test"))
    rows = pq.read_table(read.path / "test.parquet").to_pylist()
    assert len(rows) == watched.number > 2
    seen = [number for batch in watched.batches(5) for number in watched.examples(batch)]
    for number, row in enumerate(rows):
        assert watched.rows.column("segment", number).tolist() == row["segment"]
        assert (seen[number] == seen[0]) == (row["example"] == rows[0]["example"])
    assert seen == sorted(seen) and seen[-1] + 1 == len({row["example"] for row in rows})
    watched.tokenizer.unk_token = None  # as GPT-2's
    assert watched.read("some words").inputs["input_ids"].shape[0] == 1


def test_sparsity_counts_what_masks_and_fixed_heads_cannot_use(
    store: Store, segments: Artifact, tmp_path: Path
) -> None:
    plan = write(tmp_path / "plan.toml", '[[guide]]\npattern = "same_segment"\nmechanism = "mask"\nheads = [0]\n')
    model = train(store, segments, steps=1, plan=str(plan), max_length=8).artifact
    made, _rows = measured(store, model, segments)
    data = sequences_of(store, segments, max_length=8)
    read = pq.read_table(data.path / "test.parquet", columns=["segment"]).to_pylist()[:32]
    lefts = [(row["segment"].count(0), len(row["segment"])) for row in read]
    # one head of two sees only its side, the other one everything
    used = sum(left**2 + (n - left) ** 2 + n**2 for left, n in lefts)
    assert made.counts["sparsity"] == pytest.approx(1 - used / sum(2 * n**2 for _, n in lefts))
    fixed = write(tmp_path / "fixed.toml", '[[guide]]\npattern = "next"\nmechanism = "fix"\nheads = [0]\n')
    made, _ = measured(store, train(store, segments, steps=1, plan=str(fixed), max_length=8).artifact, segments)
    # a last row without a target is uniform over the valid tokens
    used = sum((n - 1) + n + n**2 for _, n in lefts)
    assert made.counts["sparsity"] == pytest.approx(1 - used / sum(2 * n**2 for _, n in lefts))
    made, _ = measured(store, train(store, segments, steps=1, max_length=8).artifact, segments)
    assert "sparsity" not in made.counts
