"""Searches over the rows of a plan, with pre-training and in several processes: what is trained, chosen, tested and refused."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from guidance.errors import InputError, NumericalError
from guidance.plan import Plan
from pipelines.searching import trials
from pipelines.searching.config import AllSettings, PretrainConfig
from pipelines.searching.settings import Setting, axes_of, settings_of
from pipelines.stages import evaluate, pretrain, search, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.views.search_tables import labels_of_settings, search_tables
from pipelines.views.searches import compare_searches, compare_settings
from tests import finetunings, trainings
from tests.trainings import one_thread  # noqa: F401

ROWS = """
[[guide]]
pattern = "next"
mechanism = "attention_loss"
heads = [0]

[[guide]]
pattern = "previous"
mechanism = "attention_loss"
heads = [1]
weight = 2.0

[[guide]]
pattern = "first"
mechanism = "bias"
enabled = false
"""
TINY: dict[str, Any] = {
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "ffn": 32,
    "steps": 2,
    "batch_size": 4,
    "evaluate_every": 1,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "two-rows.toml"
    path.write_text(ROWS)
    return str(path)


@pytest.fixture(scope="module")
def text(store: Store) -> Artifact:
    """Sequences of running text, with a test split."""
    splits = {"train": 24, "valid": 6, "test": 6}
    ids = {name: trainings.rows_of_ids(number, 12, seed) for seed, (name, number) in enumerate(splits.items())}
    return trainings.write_sequences(store, {name: trainings.table(rows) for name, rows in ids.items()})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Artifact:
    rows = [{**row, "text": f"{row['text']} {number}"} for number, row in enumerate(finetunings.reviews(36))]
    splits = {"train": rows[:20], "valid": rows[20:28], "test": rows[28:]}
    return finetunings.build(store, tmp_path_factory.mktemp("data"), splits)


def rows_of(made: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(made.artifact.path / "runs.parquet").to_pylist()
    return rows


def plan_of(store: Store, row: dict[str, Any]) -> Plan:
    return Plan.load(store.load(f"model/{row['model']}").path / "plan.toml")


def fine(store: Store, data: Artifact, **changes: Any) -> search.Config:
    words = tokenizer.run(data.reference, tokenizer.Config(kind="word", min_frequency=1), store=store)
    return search.Config(**(finetunings.TINY | {"layers": 1, "epochs": 1, "tokenizer": words.reference} | changes))


# settings


def grid(*texts: str) -> list[tuple[Any, ...]]:
    return [axis.values for axis in axes_of(texts, {"learning_rate", "plan"})]


def test_values_of_a_plan_are_toml_and_words_need_no_quotes() -> None:
    assert grid("plan.next.weight=1,10.5") == [(1, 10.5)]
    assert grid('plan.a.heads=[0],[0, 1],"all"') == [([0], [0, 1], "all")]
    assert grid("plan.a.heads=fraction 0.5,all", "plan.b, c.schedule=linear") == [("fraction 0.5", "all"), ("linear",)]
    assert grid("plan.1.weight={ 1 = 100.0, 12 = 10.0 },3") == [({"1": 100.0, "12": 10.0}, 3)]
    (axis,) = axes_of(["plan.next.v2.weight=1"], ())
    assert (axis.row, axis.key) == ("next.v2", "weight")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan.next.weight=1,1.0", "different values"),
        ("plan.next.weight=", "different values"),
        ("plan.next=1,2", "not plan.ROW.KEY"),
        ("plan.next.heads=[0,1", "not TOML"),
        ("learning-rat=1", "did you mean 'learning-rate'"),
    ],
)
def test_bad_axes_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        grid(text)


def test_settings_are_shown_as_flags_and_rows_of_a_plan_by_their_own_names() -> None:
    shown = {"learning_rate": 0.1, "plan.matching_token.weight": 3}
    run = trials.Trial(0, 0, Setting({}), shown, None, ("text",), pretrain.Config())
    assert str(run) == "learning-rate=0.1, plan.matching_token.weight=3, seed 0"
    counts = {"settings": {"": {"values": shown}}}
    found: Any = SimpleNamespace(counts=counts, manifest={"config": {}})
    assert labels_of_settings(found) == {"": "learning-rate=0.1 plan.matching_token.weight=3"}
    with pytest.raises(InputError, match=r"names plan\.a_b\.weight twice"):
        grid("plan.a_b.weight=1", "plan.a_b.weight=2")


def test_a_row_that_is_left_out_does_not_vary() -> None:
    plan = Plan.parse(ROWS)
    axes = axes_of(["plan.next.weight=1,10", "learning-rate=1,2"], {"learning_rate"})
    found = [(setting.kept, *setting.values.values()) for setting in settings_of(axes, [(0, 1), (1,)], plan)]
    both = [((0, 1), weight, rate) for weight in (1, 10) for rate in ("1", "2")]
    assert found == [*both, ((1,), "1"), ((1,), "2")]


def test_a_setting_changes_the_rows_that_it_names_and_no_other() -> None:
    plan = Plan.parse(ROWS + "\n[pal]\nheads = 2\n")
    changed = Setting({"plan.1.name": "after", "plan.next.weight": 7, "plan.pal.heads": 4}, (0,)).changed(plan)
    (row,) = changed.guides
    assert (row.name, row.weight, row.heads) == ("after", 7.0, (0,))
    assert changed.pal is not None
    assert changed.pal.heads == 4
    assert Setting({}, None).changed(plan) == plan
    with pytest.raises(InputError, match="are the same key"):
        Setting({"plan.next.weight": 1, "plan.1.weight": 2}).changed(plan)


# pre-training


def test_a_plan_is_compared_with_the_plan_without_each_row(store: Store, text: Artifact, plan: str) -> None:
    config = PretrainConfig(**TINY, plan=[plan], leave_one_out=True, seeds=2, learning_rate=1e-2)
    made = search.run(text.reference, config, store=store)
    assert made is not None
    rows = rows_of(made)
    kept = [["next", "previous"], ["previous"], ["next"]]
    assert [(row["rows"], row["seed"]) for row in rows] == [(each, seed) for each in kept for seed in (0, 1)]
    assert [plan_of(store, row).labels for row in rows[2:]] == [("previous",)] * 2 + [("next",)] * 2
    assert plan_of(store, rows[2]).guides[0].weight == 2.0
    # each set of rows is tested, as by hand
    assert all(row["chosen"] and row["selected_on"] for row in rows)
    alone = pretrain.run(text.reference, pretrain.Config(**TINY, plan=[plan], learning_rate=1e-2), store=store)
    assert alone is not None
    assert alone.reused
    assert alone.artifact.id == rows[0]["model"]
    by_hand = evaluate.run(
        f"model/{rows[3]['model']}", text.reference, evaluate.Config(weights="best", floors=False), store=store
    )
    assert by_hand.artifact.id == rows[3]["evaluation"]
    assert by_hand.artifact.counts["metrics"]["loss"] == rows[3]["test/loss"]
    # what people read
    compared, tested = search_tables(made.artifact)
    assert [row[0] for row in compared.rows] == ["all rows", "without next", "without previous"]
    assert tested.rows[1][1].startswith(f"{statistics.fmean(row['test/loss'] for row in rows[2:4]):.4f} ±")
    losses = {each.other: each for each in compare_settings(made.artifact) if each.metric == "loss"}
    assert list(losses) == ["without next", "without previous"]
    differences = [rows[2 + seed]["test/loss"] - rows[seed]["test/loss"] for seed in (0, 1)]
    assert losses["without next"].difference.effect == pytest.approx(statistics.fmean(differences))
    assert {each.metric for each in compare_searches([made.artifact] * 2, ["a", "b"])} >= {
        "loss, rows next + previous",
        "loss, rows next",
    }


def test_every_subset_has_the_best_value_of_the_grid_for_its_own_rows(
    store: Store, text: Artifact, plan: str, guide: Any
) -> None:
    words = ["--plan", plan, "--subsets", "--grid", "plan.previous.weight=1,3", "--jobs", "1", "--json"]
    settings = [part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", value)]
    answer = guide("search", text.reference, *words, *settings, "--store", store.root)
    assert answer.code == 0, answer.err
    found = store.find(next(line for line in answer.out.split('"') if line.startswith("search/")))
    rows = pq.read_table(found / "runs.parquet").to_pylist()
    assert [row["setting"] for row in rows] == [
        "rows=none",
        "rows=next",
        *(f"rows=previous plan.previous.weight={weight}" for weight in (1, 3)),
        *(f"rows=next+previous plan.previous.weight={weight}" for weight in (1, 3)),
    ]
    for start, end in ((2, 4), (4, 6)):
        least = min(rows[start:end], key=lambda row: row["valid"])
        assert [row for row in rows[start:end] if row["chosen"]] == [least]
    assert [row["evaluation"] is not None for row in rows] == [row["chosen"] for row in rows]
    assert plan_of(store, rows[0]).guides == ()
    assert [row.weight for row in plan_of(store, rows[5]).guides if row.enabled] == [1.0, 3.0]
    shown = guide("show", f"search/{found.name}", "--store", store.root).out
    assert "next + previous" not in shown
    assert "all rows, plan.previous.weight=3" in shown
    compared = guide("compare", f"search/{found.name}", "--store", store.root)
    assert "no rows" in compared.out
    assert "--seeds 3" in compared.err


def test_test_seeds_are_not_selected_on(store: Store, data: Artifact) -> None:
    config = fine(store, data, grid=["learning-rate=1e-6,1e-2"], seeds=2, test_seeds=2)
    made = search.run(data.reference, config, store=store)
    assert made is not None
    rows = rows_of(made)
    seen, fresh = [[row for row in rows if row["selected_on"] is each] for each in (True, False)]
    assert [row["seed"] for row in seen] == [0, 1, 0, 1]
    means = {
        row["setting"]: statistics.fmean(r["valid"] for r in seen if r["setting"] == row["setting"]) for row in seen
    }
    best = min(means, key=lambda setting: means[setting])
    assert [(row["setting"], row["seed"]) for row in fresh] == [(best, 2), (best, 3)]
    assert [row["chosen"] for row in rows] == [row["setting"] == best for row in rows]
    assert [row["evaluation"] is not None for row in rows] == [not row["selected_on"] for row in rows]
    found = made.artifact.counts
    assert found["metrics"]["accuracy"]["mean"] == statistics.fmean(row["test/accuracy"] for row in fresh)
    setting = found["settings"][best]
    assert setting["mean"] == means[best]
    assert setting["valid_of_test_seeds"]["mean"] == statistics.fmean(row["valid"] for row in fresh)
    assert found["chosen"] == [best] * 2


def test_every_setting_is_tested_on_request(store: Store, data: Artifact) -> None:
    config = fine(store, data, grid=["learning-rate=1e-6,1e-2"], test_every=True)
    made = search.run(data.reference, config, store=store)
    assert made is not None
    assert all(row["evaluation"] for row in rows_of(made))
    assert [row["chosen"] for row in rows_of(made)].count(True) == 1
    assert all("test" in found for found in made.artifact.counts["settings"].values())


def test_recipes_of_earlier_searches_do_not_change() -> None:
    new = {"leave_one_out", "subsets", "test_seeds", "test_every", "limit", "jobs", "executor", "scheduler"}
    assert not new & search.Config(task="classification", grid=["layers=1,2"]).recipe().keys()
    assert search.Config(task="classification", subsets=True).recipe()["subsets"]


# failures and processes


def test_runs_that_fail_are_named_and_the_others_are_kept(
    store: Store, text: Artifact, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = pretrain.run

    def diverging(data: Any, config: Any, **more: Any) -> Any:
        if config.learning_rate == 3e-3:
            raise NumericalError("the loss is not finite", hint="a lower rate")
        return train(data, config, **more)

    config = PretrainConfig(**TINY, grid=["learning-rate=3e-3,4e-3"])
    monkeypatch.setattr(trials.pretrain, "run", diverging)
    with pytest.raises(NumericalError, match=r"^run 1 of 2 \(learning-rate=0.003, seed 0\): the loss is not") as caught:
        search.run(text.reference, config, store=store)
    assert (
        caught.value.hint == "a lower rate; the other runs are kept, and the same command trains only what is missing"
    )
    monkeypatch.undo()
    before = {folder.name for folder in (store.root / "model").iterdir()}
    made = search.run(text.reference, config, store=store)
    assert made is not None
    assert len({row["model"] for row in rows_of(made)} - before) == 1


@pytest.mark.every
@pytest.mark.parametrize("executor", ["local", "dask"])
def test_runs_in_other_processes_give_the_same(
    store: Store, text: Artifact, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = {**TINY, "plan": [plan], "grid": ["plan.next.weight=1,10"]}
    here = search.run(text.reference, PretrainConfig(**settings), store=store)
    other = Store(tmp_path / "other")
    with store.load(text.reference) as source:
        copied = trainings.write_sequences(
            other, {name: pq.read_table(source.path / f"{name}.parquet") for name in ("train", "valid", "test")}
        )
    there = search.run(copied.reference, PretrainConfig(**settings, jobs=2, executor=executor), store=other)
    assert here is not None
    assert there is not None
    assert [row["valid"] for row in rows_of(there)] == [row["valid"] for row in rows_of(here)]
    assert [row["model"] for row in rows_of(there)] == [row["model"] for row in rows_of(here)]


def test_bad_searches_over_rows_are_refused_in_one_line(
    store: Store, text: Artifact, data: Artifact, plan: str
) -> None:
    many = Path(plan).with_name("twelve.toml")
    many.write_text("".join(f'[[guide]]\npattern = "next"\nmechanism = "mask"\nname = "r{n}"\n' for n in range(12)))
    before = {folder.name for folder in (store.root / "model").glob("*")}
    for settings, message in (
        ({"grid": ["plan.nxt.weight=1"]}, "plan.nxt.weight: unknown row of the plan 'nxt'; did you mean 'next'"),
        ({"grid": ["plan.3.wait=1"]}, "unknown key 'wait'"),
        ({"grid": ["plan.next.weight=1,-1"]}, "plan.next.weight: weight -1.0 is not"),
        ({"plan": [], "grid": ["plan.next.weight=1"]}, "no plan that has rows"),
        ({"plan": [], "subsets": True}, "no plan whose rows"),
        ({"plan": [str(many)], "subsets": True}, "12 rows of .* have 4,096 subsets, which are 4,096 runs or more"),
        ({"grid": ["seed=1,2"]}, "seed is no setting"),
        ({"grid": ["plan=preset:ag"], "subsets": True}, "the rows of one plan"),
        ({"grid": ["plan.next.weight=1,2,3"], "limit": 2}, "3 runs; at most 2"),
    ):
        with pytest.raises(InputError, match=message):
            search.run(text.reference, PretrainConfig(**{**TINY, "plan": [plan], **settings}), store=store)
    for given, message in (
        ({"folds": 2}, "--folds is for fine-tuning"),
        ({"subsets": True, "leave_one_out": True}, "exclude each other"),
    ):
        with pytest.raises(ValueError, match=message):
            PretrainConfig(**given)
    for reference, name, message in (
        (data.reference, "mask_probability", "--mask-probability is for `guide pretrain`"),
        (text.reference, "patience", "--patience is for `guide finetune`"),
    ):
        with pytest.raises(InputError, match=message):
            search.config_for([reference], {name: 1}, store)
    assert {folder.name for folder in (store.root / "model").glob("*")} == before


def test_a_name_that_is_taken_is_refused_before_the_first_run(store: Store, data: Artifact) -> None:
    store.add_name("examples", data)
    before = {folder.name for folder in (store.root / "model").glob("*")}
    with pytest.raises(InputError, match="belongs to artifacts of kind corpus"):
        search.run(data.reference, fine(store, data, grid=["learning-rate=2e-6,3e-2"]), store=store, name="examples")
    assert {folder.name for folder in (store.root / "model").glob("*")} == before


def test_a_dry_run_checks_every_setting_of_a_search_and_trains_nothing(
    store: Store, text: Artifact, plan: str, guide: Any
) -> None:
    def models() -> set[str]:
        return {folder.name for folder in (store.root / "model").glob("*")}

    common = ("--plan", plan, "--steps", 3, "--hidden", 16, "--layers", 1, "--seeds", 2, "--store", store.root)
    of_heads = ("search", text.reference, *common, "--grid")
    before = models()
    for data in (text.reference, "dry:sequences"):
        answer = guide("search", data, *common, "--leave-one-out", "--dry-run")
        assert (answer.code, answer.out) == (0, "dry:search\n"), answer.err
        assert guide("search", data, *common, "--grid", "plan.nxt.weight=1", "--dry-run").code == 2
    # the plan has a guide on head 1, which a model with one head does not have
    bad = guide(*of_heads, "heads=4,2,1", "--dry-run")
    assert bad.code == 2
    assert "guide: run 5 of 6 (heads=1, seed 0): " in bad.err
    assert models() == before
    # a run that exists is no reason to skip the settings after it
    assert guide("pretrain", text.reference, *common[:-4], *common[-2:], "--heads", 4).code == 0
    assert guide(*of_heads, "heads=4,1", "--dry-run").code == 2
    assert guide(*of_heads, "heads=4,2", "--dry-run").code == 0


def test_one_command_has_the_settings_of_both_kinds(store: Store, text: Artifact, data: Artifact) -> None:
    assert AllSettings.model_fields.keys() == search.Config.model_fields.keys() | PretrainConfig.model_fields.keys()
    kinds = [search.config_for([each.reference], {}, store) for each in (data, text)]
    assert kinds == [search.Config, PretrainConfig]
    for kind, family in itertools.product((AllSettings, PretrainConfig), ("marian", "modernbert")):
        assert kind(architecture=family).architecture == family
