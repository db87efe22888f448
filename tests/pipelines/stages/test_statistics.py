"""All statistics together: they run on real data of many kinds, and their bytes do not depend on the executor."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.engine import executor
from pipelines.stages import cooccurrence, corpus, dataset, dependencies, idf, masks, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from tests.pipelines.engine.test_executor_dask import Cluster
from tests.shared import shared

LABELLED = {"format": "label-text", "encoding": "latin-1"}
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lm-litbank-books": ("books/1064_the_masque_of_the_red_death.txt.gz", {}),
    "lm-masakhane-text": ("swahili_voa.txt.gz", {"sentences": "line"}),
    "ud-tagalog": ("tl_ugnayan-ud-test.conllu", {}),
    "ud-wolof-wtb": ("wo_wtb-ud-dev.conllu", {}),
    "ud-english-ewt": ("en_ewt-ud-dev.conllu.gz", {}),
    "cls-cr": ("custrev.all", LABELLED),
    "cls-mpqa": ("mpqa.shared.all", LABELLED),
    "cls-mr": ("rt-polarity.all", LABELLED),
    "cls-subj": ("subj.all", LABELLED),
    "cls-sst": ("stsa.fine.dev", LABELLED),
    "cls-trec": ("TREC.train.all", LABELLED),
    "cls-masakhanews": ("orm/dev.tsv.gz", {"quoting": True, "pair_column": "headline", "label_column": "category"}),
}
LINES = 300


def slice_of(folder: str, name: str, place: Path) -> Path:
    """The first lines of a file, or for a treebank its first whole sentences."""
    path = shared("data") / folder / name
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        lines = list(itertools.islice(file, LINES))
    if ".conllu" in path.name:
        lines = lines[: len(lines) - lines[::-1].index(b"\n")]
    short = place / path.name.removesuffix(".gz")
    short.write_bytes(b"".join(lines))
    return short


def made(result: Any) -> Artifact:
    assert result is not None
    artifact: Artifact = result.artifact
    return artifact


@pytest.mark.one_in(3)
@pytest.mark.parametrize("folder", TEXTS)
def test_every_statistic_runs_on_real_data(folder: str, tmp_path: Path) -> None:
    name, settings = TEXTS[folder]
    store, path = Store(tmp_path / "artifacts"), slice_of(folder, name, tmp_path)
    if folder.startswith("cls-"):
        text = made(dataset.run({"train": [str(path)]}, dataset.Config(**settings), store=store))
    else:
        text = made(corpus.run([str(path)], corpus.Config(**settings), store=store))
    pieces = made(tokenizer.run(text.reference, tokenizer.Config(kind="wordpiece", vocab_size=400), store=store))
    packed = made(sequences.run(text.reference, pieces.reference, sequences.Config(max_length=64), store=store))
    rare = made(idf.run(text.reference, None, idf.Config(unit="sentence"), store=store))
    pairs = made(cooccurrence.run(text.reference, pieces.reference, cooccurrence.Config(top=100), store=store))
    given = {"idf": rare.reference}
    if path.suffix == ".conllu":
        given["deps"] = made(
            dependencies.run(text.reference, dependencies.Config(parser=f"conllu:{path}"), store=store)
        ).reference
    roles = made(masks.run(packed.reference, masks.Config(**given), store=store)).counts["splits"]["train"]
    assert roles["with_idf"] > 0.2 * roles["tokens"] and roles["silent_words"] < 0.001 * roles["words"]
    assert rare.files["idf.parquet"]["rows"] > 30 and pairs.counts["vocabulary"] == 100
    if "deps" in given:
        assert roles["with_head"] > 0.7 * roles["tokens"] and roles["with_relation"] >= roles["with_head"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A scheduler and two workers, each in its own process."""
    pytest.importorskip("distributed")
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        for _ in range(2):
            cluster.add_worker("--no-nanny")
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def warm_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two worker processes for all stages that run with ``jobs=2``: each stage's own would import everything anew."""
    pools: list[concurrent.futures.Executor] = []

    @contextlib.contextmanager
    def warm(config: executor.Workers, num_tasks: int) -> executor.Started:
        if not pools:
            spawn = multiprocessing.get_context("spawn")
            pools.append(concurrent.futures.ProcessPoolExecutor(config.jobs, spawn, executor._start_worker))
        yield pools[0], 2 * config.jobs, lambda: True

    monkeypatch.setattr(executor, "_processes", warm)
    yield
    for pool in pools:
        pool.shutdown(cancel_futures=True)


@pytest.mark.every
@pytest.mark.usefixtures("warm_pool")
def test_statistics_do_not_depend_on_the_executor(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = slice_of("ud-english-ewt", "en_ewt-ud-dev.conllu.gz", tmp_path)
    store = Store(tmp_path / "artifacts")
    text = made(corpus.run([str(path)], corpus.Config(), store=store)).reference
    pieces = made(tokenizer.run(text, tokenizer.Config(vocab_size=400), store=store)).reference
    packed = made(sequences.run(text, pieces, sequences.Config(max_length=32), store=store)).reference
    executions: list[dict[str, Any]] = [
        {},
        {"jobs": 2, "shard_size": 1500},
        {"executor": "dask", "scheduler": cluster.address, "shard_size": 500},
    ]
    contents: dict[str, set[str]] = {}
    for number, execution in enumerate(executions):
        monkeypatch.setenv("PYTHONHASHSEED", str(number))  # for the workers
        again: dict[str, Any] = {"store": store, "force": True}
        rare = made(idf.run(text, None, idf.Config(**execution), **again))
        trees = made(dependencies.run(text, dependencies.Config(parser=f"conllu:{path}", **execution), **again))
        pairs = made(cooccurrence.run(text, pieces, cooccurrence.Config(top=50, **execution), **again))
        settings = masks.Config(idf=rare.reference, deps=trees.reference, **execution)
        for artifact in (rare, trees, pairs, made(masks.run(packed, settings, **again))):
            contents.setdefault(artifact.kind, set()).add(artifact.content)
    assert {kind: len(found) for kind, found in contents.items()} == dict.fromkeys(
        ("idf", "deps", "cooccur", "masks"), 1
    )
