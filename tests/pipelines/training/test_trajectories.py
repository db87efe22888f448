"""Every objective learns the same with one process or two, in one micro-batch or four, and after being killed twice.

A new objective is a new row of `CASES`.
"""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.utils

from guidance.errors import InputError, Interrupted
from pipelines.progress import Progress
from pipelines.stages import cooccurrence, corpus, dataset, pretrain, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training import memory, preparation
from pipelines.training.order import AnyOrder
from tests import trainings
from tests.generator_objectives import CONFLICT
from tests.tiny import KILLED, in_child, processes
from tests.trainings import At, assert_close, one_thread, send  # noqa: F401


class Case(NamedTuple):
    """A training: on ``words``, sequences of text, ``documents``, which end with their document, or ``pairs``, of parallel text;
    ``plan`` is a preset or TOML."""

    data: tuple[str, ...]
    settings: Mapping[str, Any] = {}
    plan: str = ""
    counts: bool = False
    """Whether it gets the co-occurrence counts of the words."""


ADVERSARY = '[[guide]]\nmechanism = "adversary"\ntau = 0.1\n'
BERNOULLI = '[[guide]]\nmechanism = "random_mask"\nproportion = 0.3\n'
FADING = """
[[guide]]
pattern = "next"
mechanism = "fix"
heads = [0]
schedule = "linear"

[[guide]]
pattern = "previous"
mechanism = "bias"
heads = [1]
schedule = "cosine"

[[guide]]
pattern = "first"
mechanism = "attention_loss"
distance = "kl"
heads = [1]
weight = 0.5
"""
SEGMENTS = '[[guide]]\npattern = "same_segment"\nmechanism = "attention_loss"\nheads = [0]\nweight = 1.0\n'
ELECTRA: dict[str, Any] = {"objective": "electra", "mask_probability": 0.3}
CASES = {
    "mlm": Case(("words",), {"batch_tokens": 100}, "preset:ag"),
    "mlm, packed": Case(("documents",), {"packing": "documents"}, "preset:ag"),
    "mlm, attacked": Case(("words",), plan=ADVERSARY),
    "mlm, randomly attacked": Case(("words",), {"batch_tokens": 100}, BERNOULLI),
    "mlm, guides that fade": Case(("words",), plan=FADING),
    "mlm, of two corpora": Case(("words", "more"), {"sampling": [1, 2], "schedule": "inverse-sqrt", "warmup_steps": 2}),
    "mlm with conflicts": Case(("words",), {"architecture": "bert", "mask_probability": 0.3}, CONFLICT, counts=True),
    "mlm+nsp": Case(("words",), {"objective": "mlm+nsp"}, SEGMENTS),
    "electra with conflicts": Case(("words",), ELECTRA, CONFLICT, counts=True),
    "electra, unigram": Case(("words",), {**ELECTRA, "generator": "unigram"}, CONFLICT, counts=True),
    "electra, attacked": Case(("words",), ELECTRA, ADVERSARY),
    "clm": Case(("words",), {"objective": "clm", "batch_tokens": 100}, "preset:ag-causal"),
    "clm, attacked": Case(("words",), {"objective": "clm", "architecture": "gpt2"}, ADVERSARY),
    "translation": Case(("pairs",), {"objective": "translation", "bucket": True}, "preset:ag-translation"),
}

EXACT: dict[str, Any] = {
    "precision": "fp64",
    "dropout": 0,
    "attention_dropout": 0,
    "layers": 1,
    "steps": 9,
    "batch_size": 7,
    "evaluate_every": 4,
    "save_every": 2,
}
"""Batches that neither two processes nor four micro-batches divide evenly; an epoch has three to five of them."""


class World(NamedTuple):
    """The data of all cases."""

    folder: Path
    data: Mapping[str, Artifact]
    counts: Artifact


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Texts in which words have fixed neighbours; and pairs in which the translation of a word is its reverse."""
    folder, drawn = tmp_path_factory.mktemp("world"), random.Random(0)
    store = Store(folder / "artifacts")
    texts = {"words": 8, "more": 3}
    for name, number in texts.items():
        (folder / name).mkdir()
        for document in range(number):
            rows = [
                drawn.sample([f"w{5 * company + n}" for n in range(5)], 5) for company in drawn.choices(range(8), k=8)
            ]
            (folder / name / f"{document}.txt").write_text(" ".join(" ".join(row).capitalize() + "." for row in rows))

    def built(name: str) -> str:
        return corpus.run([str(folder / name)], corpus.Config(valid=0.25), store=store).reference

    words = tokenizer.Config(kind="word", vocab_size=100, min_frequency=1)
    made = tokenizer.run(built("words"), words, store=store).reference
    config = sequences.Config(max_length=16)
    data = {name: sequences.run(built(name), made, config, store=store).artifact for name in texts}
    apart = sequences.Config(max_length=16, packing="document")
    data["documents"] = sequences.run(built("words"), made, apart, store=store).artifact
    counts = cooccurrence.run(built("words"), made, cooccurrence.Config(top=30), store=store)
    assert counts is not None

    files: dict[str, dict[str, list[str]]] = {"source": {}, "target": {}}
    for split, number in (("train", 24), ("valid", 6)):
        rows = [drawn.choices([f"{a}{b}" for a in "bdfg" for b in "aei"], k=drawn.randint(2, 5)) for _ in range(number)]
        for side, step in (("source", 1), ("target", -1)):
            path = folder / f"{split}.{side}"
            path.write_text("".join(" ".join(word[::step] for word in row) + " .\n" for row in rows))
            files[side][split] = [str(path)]
    parallel = dataset.run(files["source"], dataset.Config(), pairs=files["target"], store=store).reference
    both = tokenizer.run(parallel, words, store=store).reference
    data["pairs"] = sequences.run(parallel, both, sequences.Config(packing="pairs", max_length=8), store=store).artifact
    return World(folder, data, counts.artifact)


def train(
    world: World, case: str, into: Path, on: tuple[str, ...] = (), *, progress: Progress | None = None, **changes: Any
) -> None:
    """Train a case into a store, under `processes` as one of the processes."""
    data, settings, plan, counts = CASES[case]
    data = on or data
    if plan and not plan.startswith("preset:"):
        (into.parent / f"{into.name}.toml").write_text(plan)
        plan = str(into.parent / f"{into.name}.toml")
    given = {**EXACT, **settings, "plan": plan, **({"cooccur": str(world.counts.path)} if counts else {}), **changes}
    references = [str(world.data[name].path) for name in data]
    pretrain.run(references, trainings.config(**given), store=Store(into), progress=progress)


def model(store: Path) -> Path:
    (folder,) = (store / "model").iterdir()
    return folder


@pytest.fixture(scope="module", params=CASES)
def whole(request: pytest.FixtureRequest, world: World) -> tuple[str, Path]:
    """A case, and its model folder when trained by one process in one micro-batch."""
    into = world.folder / f"whole-{request.param}"
    train(world, request.param, into)
    return request.param, model(into)


@pytest.mark.one_in(3)
def test_four_micro_batches_learn_the_same_as_one(world: World, whole: tuple[str, Path], tmp_path: Path) -> None:
    train(world, whole[0], tmp_path / "four", micro_batches=4)
    assert_close(model(tmp_path / "four"), whole[1])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case", [name for name, case in CASES.items() if name.startswith(("mlm", "electra")) and "nsp" not in name]
)
def test_packed_documents_learn_the_same_as_padded_ones(world: World, case: str, tmp_path: Path) -> None:
    for packing in ("none", "documents"):
        train(world, case, tmp_path / packing, ("documents",), packing=packing, sampling=[])
    assert_close(model(tmp_path / "documents"), model(tmp_path / "none"))


def test_objectives_whose_sequences_hold_several_texts_are_not_packed(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="may hold several documents, which would see each other"):
        train(world, "mlm", tmp_path / "words", packing="documents")
    with pytest.raises(ValueError, match=r"--packing belongs to --objective mlm or electra, not to mlm\+nsp"):
        train(world, "mlm+nsp", tmp_path / "nsp", packing="documents")


@pytest.mark.one_in(3)
def test_two_processes_learn_the_same_as_one(world: World, whole: tuple[str, Path], tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for parts in (1, 4):
            train(world, whole[0], tmp_path / str(parts), micro_batches=parts)

    assert processes(2, work) == [0, 0]
    for parts in (1, 4):
        assert_close(model(tmp_path / str(parts)), whole[1])


@pytest.mark.one_in(3)
def test_a_run_that_is_killed_twice_ends_with_the_same_bits(
    world: World, whole: tuple[str, Path], tmp_path: Path
) -> None:
    into = tmp_path / "killed"
    for step in (3, 7):  # in the first epoch, and in the second or third
        kill = At(step, send(signal.SIGKILL))
        assert in_child(lambda kill=kill: train(world, whole[0], into, progress=kill)) == KILLED  # type: ignore[misc]
    train(world, whole[0], into)
    assert trainings.metrics(model(into)) == trainings.metrics(whole[1])
    for path in whole[1].rglob("*.safetensors"):
        assert (model(into) / path.relative_to(whole[1])).read_bytes() == path.read_bytes(), path


@pytest.mark.every
def test_losses_on_mispredictions_are_compiled_without_graph_breaks(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = torch._dynamo.utils.counters
    monkeypatch.setattr(memory, "COMPILER", "eager")
    for name, compiled in (("plain", False), ("compiled", True)):
        torch._dynamo.reset()
        counters.clear()
        train(world, "mlm with conflicts", tmp_path / name, compile=compiled, steps=3)
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    assert_close(model(tmp_path / "compiled"), model(tmp_path / "plain"))


@pytest.mark.parametrize("case", ["mlm", "electra with conflicts"])
def test_a_run_resumes_with_fewer_processes_in_the_same_order_and_warns(
    world: World, case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    into, seen = tmp_path / "fewer", dict[int, list[tuple[int, int]]]()
    stop: dict[str, Any] = {"max_time": 1e-9}

    def work(rank: int) -> None:
        try:
            train(world, case, into, **stop)
        except Interrupted:
            os._exit(7)

    assert processes(2, work) == [7, 7]
    order_of = preparation.order_of

    def watched(*given: Any) -> AnyOrder:
        order = order_of(*given)
        batch = order.batch
        order.batch = lambda step: seen.setdefault(step, batch(step))  # type: ignore[method-assign]
        return order

    monkeypatch.setattr(preparation, "order_of", watched)
    with caplog.at_level(logging.WARNING):
        train(world, case, into)
    assert "the same order of examples, but not bit-equal: world was 2, is 1" in caplog.text
    assert min(seen) == 1, "the first step was taken by two processes"
    resumed = dict(seen)
    seen.clear()
    train(world, case, tmp_path / "one")
    assert resumed == {step: batch for step, batch in seen.items() if step > 0}
    assert_close(model(into), model(tmp_path / "one"))
