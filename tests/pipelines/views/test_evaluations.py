"""Comparisons of evaluations, example by example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sklearn.metrics
from scipy import stats

from guidance.errors import InputError
from pipelines.metrics import comparison
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch, digest
from pipelines.storage.store import Store
from pipelines.training.learners.translation_scores import translation_scores
from pipelines.views.evaluations import compare_evaluations, labels_of
from tests import runs


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "ROUNDS", 500)


def evaluation(folder: Path, task: str, columns: dict[str, list[Any]], model: str = "", **config: Any) -> Artifact:
    store = Store(folder / "artifacts")
    recipe = digest([task, columns, model, config])
    table = pa.table(columns)
    inputs = {"model": {"kind": "model", "recipe": model, "content": model}} if model else {}
    manifest = {"stage": "evaluate", "stage_version": 1, "config": {"weights": "last", **config}, "inputs": inputs}
    with store.build("evaluation", recipe, manifest) as out:
        with out.parquet("predictions.parquet", table.schema) as writer:
            writer.write_table(table)
        out.counts["task"] = task
    return Artifact(store.folder("evaluation", recipe))


def labelled(predictions: list[str], gold: list[str | None]) -> dict[str, list[Any]]:
    return {"id": [str(n) for n in range(len(gold))], "gold": gold, "prediction": predictions}


def compare(folder: Path, task: str, *tables: dict[str, list[Any]]) -> dict[str, Any]:
    made = [evaluation(folder, task, table) for table in tables]
    return {tested.metric: tested for tested in compare_evaluations(made, ["one", "two", "three"][: len(made)])}


def test_accuracies_by_mcnemar_and_macro_f1_as_scikit_learn_has_it(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    gold = [str(n) for n in draw.integers(0, 3, 120)]
    first = [g if draw.random() < 0.6 else "0" for g in gold]
    second = [g if draw.random() < 0.9 else "1" for g in gold]
    found = compare(tmp_path, "classification", labelled(first, gold), labelled(second, gold))
    for metric, score in (
        ("accuracy", sklearn.metrics.accuracy_score),
        ("f1_macro", lambda g, p: sklearn.metrics.f1_score(g, p, average="macro")),
        ("matthews", sklearn.metrics.matthews_corrcoef),
    ):
        assert found[metric].first == pytest.approx(score(gold, first))
        assert found[metric].second == pytest.approx(score(gold, second))
    better = sum(b == g != a for a, b, g in zip(first, second, gold, strict=True))
    worse = sum(a == g != b for a, b, g in zip(first, second, gold, strict=True))
    assert found["accuracy"].difference.p == stats.binomtest(better, better + worse).pvalue
    assert found["f1_macro"].difference.low > 0 and found["f1_macro"].difference.p < 0.01
    assert all(tested.corrected >= tested.difference.p for tested in found.values())


def test_of_two_classes_the_f1_of_the_last_one_is_compared(tmp_path: Path) -> None:
    gold, first, second = (["no", "yes", "yes", "no"], ["yes", "yes", "no", "no"], ["no", "yes", "yes", "yes"])
    found = compare(tmp_path, "classification", labelled(first, gold), labelled(second, gold))  # type: ignore[arg-type]
    assert (found["f1 of yes"].first, found["f1 of yes"].second) == (0.5, pytest.approx(0.8))
    same = labelled(["no"] * 4, gold)  # type: ignore[arg-type]
    assert compare(tmp_path, "classification", same, same)["matthews"].first == 0
    alike = labelled(["no", "yes"], ["no", "no"])
    assert "matthews" not in compare(tmp_path, "classification", alike, alike), "it is undefined"


def test_a_model_is_no_better_than_itself(tmp_path: Path) -> None:
    gold = ["a", "b", "a", None]
    table = labelled(["a", "a", "a", "a"], gold)
    found = compare(tmp_path, "classification", table, {**table, "extra": [0, 0, 0, 0]})
    assert found["accuracy"].difference.effect == 0 and found["accuracy"].difference.p == 1
    assert found["accuracy"].difference.n == 3, "an example without a label is left out"


def test_correlations_and_entities_are_those_of_the_whole(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    gold = draw.normal(size=40)
    guesses = [(gold + draw.normal(size=40) * noise).tolist() for noise in (2, 0.1)]
    found = compare(
        tmp_path, "regression", *(labelled(list(map(repr, g)), list(map(repr, gold.tolist()))) for g in guesses)
    )
    assert found["pearson"].second == pytest.approx(np.corrcoef(gold, guesses[1])[0, 1])
    assert found["mse"].difference.effect < 0 and found["pearson"].difference.p < 0.05
    assert found["spearman"].second == pytest.approx(stats.spearmanr(gold, guesses[1]).statistic)
    known = labelled([repr(g) for g in [*guesses[0], 1.0]], [*map(repr, gold.tolist()), "n/a"])
    assert compare(tmp_path, "regression", known, known)["mse"].difference.n == 40, (
        "a label that is no number is left out"
    )
    tags = ["B-PER I-PER O", "O B-LOC"] * 10
    found = compare(tmp_path, "tagging", labelled(["B-PER O O", "O B-LOC"] * 10, tags), labelled(tags, tags))  # type: ignore[arg-type]
    assert (found["f1"].first, found["f1"].second) == (0.5, 1.0)
    assert found["token_f1"].first == pytest.approx(0.8)
    assert {name: tested.first for name, tested in found.items()} == pytest.approx(
        {"f1": 0.5, "precision": 0.5, "recall": 0.5, "accuracy": 0.8, "token_f1": 0.8}
    )


def test_correlations_far_from_zero_are_those_of_scipy(tmp_path: Path) -> None:
    gold = [1.7e9 + value for value in (-10.0, -3.0, 2.0, 5.0, 9.0, 10.0)]
    first, second = [gold[i] for i in (1, 0, 2, 4, 3, 5)], [gold[i] for i in (5, 4, 2, 3, 1, 0)]
    found = compare(
        tmp_path, "regression", *(labelled(list(map(repr, g)), list(map(repr, gold))) for g in (first, second))
    )
    assert (
        found["pearson"].first == pytest.approx(stats.pearsonr(gold, first).statistic) == pytest.approx(0.86, abs=0.1)
    )
    assert found["pearson"].second == pytest.approx(stats.pearsonr(gold, second).statistic)
    same = labelled(["1.0", "2.0"], ["3.0", "3.0"])
    assert set(compare(tmp_path, "regression", same, same)) == {"mse"}, (
        "a correlation with one true number is undefined"
    )


def test_parts_of_speech_are_compared_by_their_words(tmp_path: Path) -> None:
    gold = ["DET NOUN", "NOUN VERB"]
    found = compare(tmp_path, "tagging", labelled(["DET DET", "NOUN VERB"], gold), labelled(gold, gold))  # type: ignore[arg-type]
    assert {metric: (tested.first, tested.second) for metric, tested in found.items()} == {
        "accuracy": (0.75, 1.0),
        "token_f1": (0.75, 1.0),
    }


def test_translations_by_sacrebleu(tmp_path: Path) -> None:
    reference = [f"the cat number {n} sat on the mat" for n in range(30)]
    tables = [
        {"source": reference, "reference": reference, "hypothesis": hypothesis}
        for hypothesis in (["the dog ran"] * 30, reference)
    ]
    found = compare(tmp_path, "translation", *tables)
    assert found["bleu"].second == pytest.approx(100) and found["bleu"].difference.p < 0.01


def test_translations_are_compared_by_the_tokenizer_of_their_evaluations(tmp_path: Path) -> None:
    reference = [f"我们 今天 去 了 第 {n} 个 公园 。".replace(" ", "") for n in range(20)]
    tables = [
        {"source": reference, "reference": reference, "hypothesis": [text[:cut] for text in reference]}
        for cut in (-3, -1)
    ]
    made = [evaluation(tmp_path, "translation", table, bleu_tokenizer="zh") for table in tables]
    found = {each.metric: each for each in compare_evaluations(made, ["one", "two"])}
    wanted = [translation_scores(table["hypothesis"], reference, "zh")[0]["bleu"] for table in tables]
    assert [found["bleu"].first, found["bleu"].second] == pytest.approx(wanted)
    assert wanted[0] > 40 > translation_scores(tables[0]["hypothesis"], reference)[0]["bleu"]
    other = evaluation(tmp_path, "translation", tables[1], bleu_tokenizer="char")
    with pytest.raises(ArtifactMismatch, match="one was measured with bleu_tokenizer zh, two with char"):
        compare_evaluations([made[0], other], ["one", "two"])


def test_evaluations_of_other_examples_or_tasks_are_refused(tmp_path: Path) -> None:
    table = labelled(["a", "b"], ["a", "b"])
    with pytest.raises(InputError, match="their columns 'gold' differ"):
        compare(tmp_path, "classification", table, labelled(["a", "b"], ["a", "a"]))
    made = [evaluation(tmp_path, task, table) for task in ("classification", "choice")]
    with pytest.raises(InputError, match="one measures classification, two measures choice"):
        compare_evaluations(made, ["one", "two"])


def test_one_model_drops_from_clean_to_adversarial_examples(tmp_path: Path) -> None:
    clean = labelled(["a"] * 90 + ["b"] * 10, ["a"] * 100)
    hard = labelled(["a"] * 20 + ["b"] * 20, ["a"] * 20 + ["a"] * 20)
    made = [evaluation(tmp_path, "classification", table, "model") for table in (clean, hard)]
    drop = compare_evaluations(made, ["clean", "hard"])[0]
    assert (drop.metric, drop.first, drop.second) == ("accuracy", 0.9, 0.5)
    assert drop.difference.effect == pytest.approx(-0.4) and drop.difference.p < 0.01
    assert drop.difference.n == 140, "the examples of both sets"
    spread = (0.9 * 0.1 / 100 + 0.5 * 0.5 / 40) ** 0.5
    assert drop.difference.low == pytest.approx(-0.4 - 1.96 * spread, abs=0.04)
    assert drop.difference.high == pytest.approx(-0.4 + 1.96 * spread, abs=0.04)
    other = evaluation(tmp_path, "classification", hard, "another")
    with pytest.raises(InputError, match="are of other examples"):
        compare_evaluations([made[0], other], ["clean", "hard"])
    unlabelled = evaluation(tmp_path, "classification", labelled(["a"], [None]), "model")
    with pytest.raises(InputError, match="no labels that could be compared"):
        compare_evaluations([made[0], unlabelled], ["clean", "none"])
    numbers = [
        evaluation(tmp_path, "regression", labelled(["1.0", "2.0", "3.5"], ["1.0", "2.0", last]), "model")
        for last in ("3.0", "4.0")
    ]
    found = {tested.metric: tested for tested in compare_evaluations(numbers, ["clean", "hard"])}
    assert found["mse"].first == pytest.approx(0.25 / 3) == found["mse"].second
    summaries = [
        evaluation(tmp_path, "summarization", {"id": ids, "summary": ["a cat"] * len(ids), "reference": gold}, "model")
        for ids, gold in ((["1", "2"], ["a cat", "a dog"]), (["3"], ["two birds"]))
    ]
    found = {tested.metric: tested for tested in compare_evaluations(summaries, ["clean", "hard"])}
    assert (found["rouge1"].first, found["rouge1"].second) == (pytest.approx(0.75), 0.0)


def test_evaluations_are_called_by_their_names_or_those_of_their_models(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    models = {name: runs.finished(store, None, plan=name) for name in ("plain", "guided", "nameless")}
    store.add_name("plain", models["plain"])
    store.add_name("guided", models["guided"])
    table, other = labelled(["a"], ["a"]), labelled(["b"], ["b"])

    def called(*made: Artifact) -> list[str]:
        return labels_of(made, [each.reference for each in made], store)

    plain, guided, nameless = (evaluation(tmp_path, "classification", table, model.recipe) for model in models.values())
    assert called(plain, guided) == ["plain@1", "guided@1"]
    assert called(plain, nameless) == ["plain@1", nameless.reference]
    again = evaluation(tmp_path, "classification", other, models["plain"].recipe)
    assert called(plain, again) == [plain.reference, again.reference], "two would be called the same"
    store.add_name("on-others", again)
    assert called(plain, again) == ["plain@1", "on-others@1"]
    assert labels_of([plain, again], [plain.reference, "on-others"], store) == ["plain@1", "on-others"]
