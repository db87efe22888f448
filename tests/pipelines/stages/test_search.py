"""Searches over settings, seeds and folds: what is trained, chosen and tested; interruption; shares of jobs; comparing."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.train import search_lines
from guidance.errors import InputError
from pipelines.metrics.significance import paired_t
from pipelines.report import make
from pipelines.searching.trials import Outcome
from pipelines.stages import evaluate, finetune, folds, pretrain, search, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMismatch, digest
from pipelines.storage.store import Store
from pipelines.views.search_tables import search_tables
from pipelines.views.searches import compare_searches, equal_scores
from tests import finetunings
from tests.trainings import one_thread  # noqa: F401


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Artifact:
    rows = finetunings.reviews(90)
    rows = [{**row, "text": f"{row['text']} {number}"} for number, row in enumerate(rows)]
    splits = {"train": rows[:60], "valid": rows[60:75], "test": rows[75:]}
    return finetunings.build(store, tmp_path_factory.mktemp("data"), splits)


def settings(store: Store, data: Artifact, **changes: Any) -> search.Config:
    words = tokenizer.run(data.reference, tokenizer.Config(kind="word", min_frequency=1), store=store)
    tiny = finetunings.TINY | {"layers": 1, "epochs": 1, "tokenizer": words.reference}
    return search.Config(**(tiny | changes))


def searched(store: Store, data: Artifact, **changes: Any) -> tuple[Artifact, list[dict[str, Any]]]:
    made = search.run(data.reference, settings(store, data, **changes), store=store)
    assert made is not None
    return made.artifact, pq.read_table(made.artifact.path / "runs.parquet").to_pylist()


def models(store: Store) -> set[str]:
    return {folder.name for folder in (store.root / "model").glob("*")}


def test_the_setting_with_the_best_mean_validation_is_tested_and_no_other(
    store: Store, data: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "guide")
    made, rows = searched(store, data, grid=["learning-rate=1e-6,1e-2"], seeds=2, select="accuracy")
    assert [(row["setting"], row["seed"]) for row in rows] == [
        *(("learning_rate=1e-06", seed) for seed in (0, 1)),
        *(("learning_rate=0.01", seed) for seed in (0, 1)),
    ]
    assert [row["chosen"] for row in rows] == [False, False, True, True]
    assert [row["evaluation"] is not None for row in rows] == [False, False, True, True]
    assert statistics.fmean(row["valid"] for row in rows[2:]) > statistics.fmean(row["valid"] for row in rows[:2])
    assert [line.split()[0] for line in search_lines(made)[1:3]] == ["learning-rate=1e-06", "learning-rate=0.01"]
    assert "run 1 of 4: learning-rate=1e-06, seed 0" in caplog.messages
    assert "tested run 1 of 2: learning-rate=0.01, seed 0" in caplog.messages
    tested = [row["test/accuracy"] for row in rows[2:]]
    assert made.counts["metrics"]["accuracy"] == {"mean": statistics.fmean(tested), "sd": statistics.stdev(tested)}
    for row in rows:
        alone = finetune.Config(
            **settings(store, data).model_dump(
                exclude=set(search.Config.model_fields) - set(finetune.Config.model_fields), exclude_unset=True
            )
            | {"learning_rate": float(row["setting"].partition("=")[2]), "seed": row["seed"], "select": "accuracy"}
        )
        result = finetune.run(data.reference, alone, store=store)
        assert result is not None
        assert result.reused
        assert result.artifact.id == row["model"]


def test_an_interrupted_search_repeats_no_run_and_shares_join(store: Store, data: Artifact) -> None:
    config = settings(store, data, grid=["dropout=0.1,0.2,0.3"], seeds=1, learning_rate=3e-3)
    before = models(store)
    assert search.run(data.reference, config.model_copy(update={"shard": "2/3"}), store=store) is None
    first = models(store) - before
    assert len(first) == 1
    assert search.run(data.reference, config.model_copy(update={"shard": "1/3"}), store=store) is None
    made = search.run(data.reference, config, store=store)
    assert made is not None
    assert len(models(store) - before) == 3
    again = search.run(data.reference, config, store=store)
    assert again is not None
    assert again.reused


def test_each_fold_is_searched_and_tested_by_itself(store: Store, data: Artifact) -> None:
    made, rows = searched(store, data, folds=3, grid=["learning-rate=1e-2,2e-2"])
    assert [row["fold"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert [sum(row["chosen"] for row in rows[start : start + 2]) for start in (0, 2, 4)] == [1, 1, 1]
    fold = folds.run(data.reference, folds.Config(folds=3, fold=1), store=store).artifact
    model = store.load(f"model/{rows[2]['model']}")
    sequences = store.load_input(model, "sequences")
    assert sequences.manifest["inputs"]["corpus"]["content"] == fold.content
    assert made.counts["runs"] == 6


@pytest.mark.every
def test_the_same_search_in_two_stores_writes_the_same_bytes(tmp_path: Path) -> None:
    rows = [{**row, "text": f"{row['text']} {number}"} for number, row in enumerate(finetunings.reviews(36))]
    found = []
    for name in ("one", "two"):
        own = Store(tmp_path / name)
        (tmp_path / f"{name}-files").mkdir()
        data = finetunings.build(own, tmp_path / f"{name}-files", {"train": rows})
        config = search.Config(
            **(finetunings.TINY | {"layers": 1, "epochs": 1, "folds": 2})
        )  # with tokenizers of its own
        made = search.run(data.reference, config, store=own)
        assert made is not None
        found.append((made.artifact.path / "search.json").read_bytes())
    assert found[0] == found[1]


def test_searches_over_the_same_folds_or_seeds_are_compared(store: Store, data: Artifact) -> None:
    one, rows = searched(store, data, seeds=3)
    other, others = searched(store, data, seeds=3, learning_rate=1e-4)
    found = {tested.metric: tested for tested in compare_searches([one, other], ["one", "other"])}
    wanted = paired_t([b["test/accuracy"] - a["test/accuracy"] for a, b in zip(rows, others, strict=True)])
    assert found["accuracy"].difference == wanted
    assert found["accuracy"].unit == "seeds"
    folded, rows = searched(store, data, folds=3)
    slower, others = searched(store, data, folds=3, learning_rate=1e-4)
    accuracy = next(t for t in compare_searches([folded, slower], ["a", "b"]) if t.metric == "accuracy")
    differences = [b["test/accuracy"] - a["test/accuracy"] for a, b in zip(rows, others, strict=True)]
    assert accuracy.difference == paired_t(differences, shared_folds=True)
    assert accuracy.unit == "folds"
    with pytest.raises(ArtifactMismatch, match="other seeds or folds"):
        compare_searches([one, folded], ["one", "folded"])


def test_runs_say_which_fold_they_test(store: Store, data: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    searched(store, data, folds=3, learning_rate=2e-4)
    assert all(f"seed 0, fold {fold} of 3" in caplog.text for fold in (1, 2, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": ["learning-rte=1,2"]}, "learning-rte is no setting"),
        ({"grid": ["seed=1,2"]}, "seed is no setting that can vary"),
        ({"grid": ["learning-rate"]}, "not NAME=VALUE"),
        ({"grid": ["learning-rate="]}, "not NAME=VALUE"),
        ({"grid": ["plan="]}, "not NAME=VALUE"),
        ({"grid": ["learning-rate=1e-3,1e-3"]}, "different values"),
        ({"grid": ["learning-rate=1e-3,0.001"]}, "different values"),
        ({"grid": ["learning-rate=1e-3,fast"]}, "learning-rate: .*number"),
        ({"grid": ["layers=1", "layers=2"]}, "twice"),
        ({"folds": 1000}, "too few for 1000 folds"),
        ({"select": "rouge1"}, "--select rouge1"),
    ],
)
def test_bad_searches_are_refused_before_anything_is_trained(
    store: Store, data: Artifact, changes: dict[str, Any], message: str
) -> None:
    before = models(store)
    with pytest.raises(InputError, match=message):
        search.run(data.reference, settings(store, data, **changes), store=store)
    assert models(store) == before


def test_settings_cannot_be_compared_without_validation(tmp_path: Path, store: Store) -> None:
    rows = finetunings.reviews(24)
    data = finetunings.build(store, tmp_path, {"train": rows}, valid_fraction=0)
    before = models(store)
    with pytest.raises(InputError, match="no validation examples"):
        search.run(data.reference, settings(store, data, grid=["dropout=0.1,0.2"]), store=store)
    assert models(store) == before
    made, found = searched(store, data, seeds=2)
    assert [row["valid"] for row in found] == [None, None]
    assert made.counts["metrics"] == {}


def test_the_last_weights_are_chosen_by_the_metric_that_selects_and_not_by_one_that_begins_alike(
    store: Store, data: Artifact
) -> None:
    _, rows = searched(store, data, grid=["learning-rate=1e-3,1e-2"], select="f1", weights="last")
    for row in rows:
        final = store.load(f"model/{row['model']}").counts["final"]
        assert row["valid"] == final["eval/classification/f1"] != final["eval/classification/f1_macro"]


@pytest.mark.parametrize(("select", "valid"), [("loss", (None, 0.4)), ("matthews", (None, -0.2))])
def test_a_setting_whose_validation_is_undefined_is_not_chosen(select: str, valid: tuple[float | None, ...]) -> None:
    trials: Any = [
        SimpleNamespace(
            fold=0, start=None, setting=SimpleNamespace(kept=None), outcome=Outcome(valid=one), chosen=False
        )
        for one in valid
    ]
    search._choose(trials, search.Config(select=select, seeds=1))
    assert [trial.chosen for trial in trials] == [False, True]


def test_the_metrics_of_several_best_weights_are_averaged(store: Store, data: Artifact) -> None:
    made, (row,) = searched(store, data, keep_best=2, evaluate_every=2, epochs=2)
    single = [
        evaluate.run(f"model/{row['model']}", data.reference, evaluate.Config(weights=weights), store=store).artifact
        for weights in ("best", "best-2")
    ]
    means = [one.counts["metrics"]["accuracy"] for one in single]
    assert row["test/accuracy"] == pytest.approx(statistics.fmean(means))
    assert made.counts["metrics"]["accuracy"]["mean"] == row["test/accuracy"]


def test_runs_start_from_each_snapshot_of_a_pre_training(store: Store, data: Artifact, guide: Any) -> None:
    words = tokenizer.run(data.reference, tokenizer.Config(kind="word", min_frequency=1), store=store)
    packed = sequences.run(data.reference, words.reference, sequences.Config(max_length=16), store=store)
    shape: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "steps": 6, "batch_size": 4}
    made = [
        pretrain.run(packed.reference, pretrain.Config(**shape, snapshots=[0, 3], seed=seed), store=store)
        for seed in (0, 1)
    ]
    found = []
    for model in made:
        assert model is not None
        config = search.Config(**finetunings.TINY | {"epochs": 1, "seeds": 2}, along=model.reference)
        for name in ("layers", "hidden", "heads", "ffn"):
            config = config.model_copy(update={name: search.Config.model_fields[name].default})
        result = search.run(data.reference, config, store=store)
        assert result is not None
        found.append(result.artifact)
        rows = pq.read_table(result.artifact.path / "runs.parquet").to_pylist()
        assert [(row["step"], row["seed"]) for row in rows] == [(step, seed) for step in (0, 3, 6) for seed in (0, 1)]
        assert all(row["chosen"] and row["evaluation"] for row in rows)
        seconds = pq.read_table(model.artifact.path / "metrics.parquet")["seconds"].to_pylist()
        assert [row["seconds"] for row in rows[::2]] == pytest.approx([0, sum(seconds[:3]), sum(seconds)])
        assert len({row["model"] for row in rows}) == 6
        means = result.artifact.counts["along"]
        assert means["3"]["accuracy"]["mean"] == statistics.fmean(row["test/accuracy"] for row in rows[2:4])
        assert result.artifact.counts["metrics"] == {}, "a mean over moments means nothing"
        assert result.artifact.manifest["stage_version"] == 2, "a search by an earlier version is not used again"
        validation, test = search_tables(result.artifact)
        assert validation.titles[:3] == ("setting", "step", "validation: loss")
        assert [row[1] for row in validation.rows] == [row[1] for row in test.rows] == ["0", "3", "6"]
        losses = [row["valid"] for row in rows[2:4]]
        assert validation.rows[1][2] == f"{statistics.fmean(losses):.4f} ± {statistics.stdev(losses):.4f}"
    tested = compare_searches(found, ["one", "two"])
    assert [each.metric for each in tested if each.metric.startswith("accuracy")] == [
        f"accuracy, step {step}" for step in (0, 3, 6)
    ]
    shown = guide("compare", *(each.reference for each in found), "--store", store.root)
    assert "steps to it" in shown.out, shown.err
    page, _ = make.make([found[0].reference], store)
    (metrics,) = (
        block
        for section in page.sections
        for block in section.blocks
        if getattr(block, "name", "") == "search-1-metrics"
    )
    assert [row[:2] for row in metrics.table.cells] == [[f"step {step}", "2"] for step in (0, 3, 6)]
    plain = pretrain.run(packed.reference, pretrain.Config(**shape), store=store)
    assert plain is not None
    with pytest.raises(InputError, match="no snapshots to start from"):
        search.run(data.reference, search.Config(along=plain.reference), store=store)
    with pytest.raises(ValueError, match="--along and --init exclude each other"):
        search.Config(along="a", init="b")


def test_equal_scores_are_read_between_two_moments(store: Store) -> None:
    def along(name: str, points: list[tuple[int, float, float]]) -> Artifact:
        rows = [
            {"fold": 0, "step": step, "seconds": seconds, "seed": 0, "setting": "", "model": "", "valid": 0.0}
            | {"selected_on": True, "chosen": True, "evaluation": "e", "test/accuracy": value, "test/mse": 1 - value}
            for step, seconds, value in points
        ]
        schema = search.run_schema(["accuracy", "mse"])
        with store.build("search", digest([name, points]), {"stage": "search", "inputs": {}}) as out:
            with out.parquet("runs.parquet", schema) as writer:
                writer.write_table(pa.Table.from_pylist(rows, schema))
        return Artifact(store.folder("search", digest([name, points])))

    plain = along("plain", [(0, 0, 0.5), (100, 10, 0.6), (200, 20, 0.7)])
    faster = along("faster", [(0, 0, 0.5), (100, 30, 0.8), (200, 60, 0.75)])
    worse = along("worse", [(0, 0, 0.5), (200, 20, 0.6)])
    found = equal_scores([plain, faster, worse], ["plain", "faster", "worse"])
    reached = {(each.other, each.metric): (each.steps, each.seconds) for each in found}
    assert reached["faster", "accuracy"] == pytest.approx((200 / 3, 20))
    assert reached["faster", "mse"] == pytest.approx((200 / 3, 20))
    assert reached["worse", "accuracy"] == (None, None)
    assert (found[0].score, found[0].all_steps, found[0].all_seconds) == (0.7, 200, 20)
