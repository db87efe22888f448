"""Every objective and every task learns the same with one process or two, in one micro-batch or four, and after being killed twice.

A new objective or task is a new row of `CASES`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.utils

from guidance.errors import InputError, Interrupted
from pipelines.progress import Progress
from pipelines.stages import cooccurrence, corpus, dataset, finetune, pretrain, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import write_file
from pipelines.storage.store import Store
from pipelines.training import memory, preparation
from pipelines.training.cluster import Cluster
from pipelines.training.order import AnyOrder
from tests import trainings
from tests.documents import articles, make, sections, write
from tests.generator_objectives import CONFLICT
from tests.tiny import KILLED, flags, in_child, processes, torchrun
from tests.trainings import At, assert_close, one_thread, send  # noqa: F401


class Case(NamedTuple):
    """A training: on ``words``, sequences of text, ``documents``, which end with their document, or ``pairs``, of parallel text, or
    on the examples of a task; ``plan`` is a preset or TOML."""

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
MIX = '[[guide]]\npattern = "previous"\nmechanism = "mix"\nof = ["stream"]\n'
PAL = '[pal]\nwidth = 8\nheads = 2\ndropout = 0.0\n[[guide]]\npattern = "next"\nmechanism = "fix"\nheads = ["pal:0"]\n'
SENTENCES = '[[guide]]\npattern = "same_segment"\nmechanism = "mask"\nheads = "all"\n'
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
    "classification": Case(("reviews",), {"batch_tokens": 50}, "preset:asa"),
    "classification, freelb": Case(("reviews",), {"adversarial": "freelb"}, "preset:ag"),
    "classification, smart": Case(("reviews",), {"adversarial": "smart"}, "preset:ag"),
    "classification, bilstm": Case(("reviews",), {"architecture": "bilstm"}),
    "regression": Case(("scores",), {"select": "pearson"}, MIX),
    "choice": Case(("questions",), plan="preset:ag"),
    "tagging": Case(("tags",), plan=PAL),
    "summarization": Case(("summaries",), plan=SENTENCES),
    "segmentation": Case(("segments",), {"max_length": 8}, "preset:ag"),
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
    words: Mapping[str, Artifact]
    """The tokenizers of the data of tasks."""


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
    tasks = examples(store, folder)
    tokenizers = {name: tokenizer.run(made.reference, words, store=store).artifact for name, made in tasks.items()}
    return World(folder, data | tasks, counts.artifact, tokenizers)


def examples(store: Store, folder: Path) -> dict[str, Artifact]:
    """A dataset for every task, in two splits that are not multiples of two."""

    def built(name: str, text: str, **settings: Any) -> Artifact:
        path = write(folder / name, text)
        return dataset.run(
            {"train": [str(path)]}, dataset.Config(**{"valid_fraction": 0.2} | settings), store=store
        ).artifact

    texts = [f"{'very ' * (n % 5)}good number {n}" for n in range(35)]
    # no two are alike, since rounding would rank equal answers
    praises = [" ".join("very" if n >> bit & 1 else "so" for bit in range(6)) for n in range(35)]
    questions = [
        {"text": f"ball {n}", "choices": [f"{n + k}" for k in range(2 + n % 2)], "label": 0} for n in range(35)
    ]
    words = [("Ada", "B-PER"), ("Lovelace", "I-PER"), ("went", "O"), ("to", "O"), ("Paris", "B-LOC")]
    return {
        "reviews": built("reviews.csv", "text,label\n" + "".join(f"{t},{n % 3}\n" for n, t in enumerate(texts))),
        "scores": built("scores.csv", "text,label\n" + "".join(f"{t},{t.count('very') / 2}\n" for t in praises)),
        "questions": built("questions.jsonl", "\n".join(map(json.dumps, questions)), choices_column="choices"),
        "tags": built(
            "tags.conll",
            "\n".join(f"{word}\t{tag}{chr(10) * (word == 'Paris')}" for n in range(35) for word, tag in words[n % 4 :]),
            format="conll",
        ),
        "summaries": make(
            store, articles(folder, 35, 1), summary_column="summary", summary_sentences=1, valid_fraction=0.2
        ),
        "segments": make(store, sections(folder, 12, 1), format="choi", valid_fraction=0.2),
    }


def settings_of(world: World, case: str, into: Path, **changes: Any) -> dict[str, Any]:
    """The settings of a case that is trained into a store, which gets the datasets of tasks."""
    into.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (into / "corpus").symlink_to(world.folder / "artifacts/corpus")
    data, settings, plan, counts = CASES[case]
    if plan and not plan.startswith("preset:"):
        path = into.parent / f"{into.name}.toml"
        write_file(path, plan.encode())  # whole at any moment: another process of the run may be reading it
        plan = str(path)
    tokenizer = {"tokenizer": str(world.words[data[0]].path)} if data[0] in world.words else {}
    counted = {"cooccur": str(world.counts.path)} if counts else {}
    return {**trainings.TINY, **EXACT, **tokenizer, **settings, "plan": plan, **counted, **changes}


def train(
    world: World, case: str, into: Path, on: tuple[str, ...] = (), *, progress: Progress | None = None, **changes: Any
) -> None:
    """Train a case into a store, under `processes` as one of the processes."""
    data = on or CASES[case].data
    settings, store = settings_of(world, case, into, **changes), Store(into)
    if data[0] in world.words:
        finetune.run(world.data[data[0]].reference, finetune.Config(**settings), store=store, progress=progress)
    else:
        references = [str(world.data[name].path) for name in data]
        pretrain.run(references, pretrain.Config(**settings), store=store, progress=progress)


def model(store: Path) -> Path:
    (folder,) = (store / "model").iterdir()
    return folder


@pytest.fixture(scope="module", params=CASES)
def whole(request: pytest.FixtureRequest, world: World) -> tuple[str, Path]:
    """A case, and its model folder when trained by one process in one micro-batch."""
    into = world.folder / f"whole-{request.param}"
    train(world, request.param, into)
    return request.param, model(into)


@pytest.mark.one_in(6)
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


@pytest.fixture(scope="module")
def of_two_processes(request: pytest.FixtureRequest, world: World, every: bool) -> Mapping[str, Sequence[Path]]:
    """The stores into which ``torchrun`` has trained each case that is to be compared in two processes.

    Each process holds the whole model in every second case and a part in the others; ``--every`` tries both, and more.
    """
    name = test_two_processes_learn_the_same_as_one.__name__
    cases = [item.callspec.params["whole"] for item in request.session.items if item.originalname == name]  # type: ignore[attr-defined]
    fsdp = {"parallel": "fsdp"}
    ways: list[tuple[str, dict[str, Any]]] = [("four", {"micro_batches": 4}), ("divided", fsdp)]
    runs = [(case, *way) for n, case in enumerate(cases) for way in (ways if every else [ways[n % 2]])]
    runs += [
        (case, way, changes)
        for case in cases
        for way, changes in (("one", {}), ("divided-two", {**fsdp, "micro_batches": 2}))
        if every
    ]
    folders = {case: [world.folder / f"{way}-{case}" for of, way, _ in runs if of == case] for case in cases}
    command_lines = []
    for case, way, changes in runs:
        into, data = world.folder / f"{way}-{case}", CASES[case].data
        settings = settings_of(world, case, into, **changes)
        is_task = data[0] in world.words
        named = [world.data[name].reference if is_task else str(world.data[name].path) for name in data]
        command_lines.append(["finetune" if is_task else "pretrain", *named, "--store", str(into), *flags(settings)])
    ended = torchrun(2, command_lines, world.folder)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == len(command_lines), "only the first process names what was made"
    return folders


@pytest.mark.one_in(12)
def test_two_processes_learn_the_same_as_one(
    whole: tuple[str, Path], of_two_processes: Mapping[str, Sequence[Path]]
) -> None:
    for into in of_two_processes[whole[0]]:
        assert_close(model(into), whole[1])
        assert (model(into) / "config.json").read_bytes() == (whole[1] / "config.json").read_bytes()


def test_all_processes_end_well_where_the_model_exists(world: World, tmp_path: Path) -> None:
    train(world, "mlm, packed", tmp_path)
    assert processes(2, lambda rank: train(world, "mlm, packed", tmp_path)) == [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is that since the process started")
def test_peak_memory_is_that_since_it_was_reset() -> None:
    def growth() -> tuple[int, int]:
        """Of the peak by pages that are written, and once those are gone."""
        cluster.reset_peak_memory()
        before = cluster.peak_memory()
        with mmap.mmap(-1, size) as pages:  # a tensor may lie where the process has freed as much before
            pages[:: mmap.PAGESIZE] = b"1" * (size // mmap.PAGESIZE)
        grown = cluster.peak_memory() - before
        cluster.reset_peak_memory()
        return grown, cluster.peak_memory() - before

    cluster, size, most = Cluster("cpu", "fp32"), 200 << 20, 50 << 20
    # the kernel may take back pages of libraries in the meantime, which count too
    tries = [growth() for _ in range(3)]
    assert any(abs(grown - size) < most and left < most for grown, left in tries), tries


def test_no_process_has_the_leaders_value_before_all_have_asked_for_it(tmp_path: Path) -> None:
    """A leader that went on at once, and ended, would break the connections of those that are still joining."""

    def ask(rank: int) -> None:
        cluster = Cluster("cpu", "fp32")
        if rank == 3:
            time.sleep(0.5)
            (tmp_path / "asked").touch()
        assert cluster.broadcast(3.0 if cluster.leads else 5.0) == 3.0
        assert not cluster.leads or (tmp_path / "asked").exists()

    assert processes(4, ask) == [0] * 4


@pytest.mark.every
def test_a_divided_run_goes_on_to_the_bit_and_one_process_can_go_on(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = "electra with conflicts"  # model and generator share a matrix

    def divided(into: Path, step: int | None = None) -> list[int]:
        kill = At(step, send(signal.SIGKILL)) if step else None
        return processes(2, lambda rank: train(world, case, into, progress=kill, parallel="fsdp"))

    killed, uninterrupted, other = (tmp_path / name for name in ("killed", "uninterrupted", "other"))
    assert divided(uninterrupted) == [0, 0]
    for step in (3, 7):
        assert set(divided(killed, step)) <= {KILLED, 3}
    assert divided(killed) == [0, 0]
    assert trainings.metrics(model(killed)) == trainings.metrics(model(uninterrupted))
    for path in model(uninterrupted).rglob("*.safetensors"):
        assert (model(killed) / path.relative_to(model(uninterrupted))).read_bytes() == path.read_bytes(), path
    assert set(divided(other, 5)) <= {KILLED, 3}
    with caplog.at_level(logging.WARNING):
        train(world, case, other)
    assert "not bit-equal: parallel was fsdp, is none, world was 2, is 1" in caplog.text
    assert_close(model(other), model(uninterrupted))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 3, "micro_batches": 2}, "a batch of 3 does not give each of 2 processes 2 micro-batches"),
        ({"compile": True}, "--parallel fsdp does not work with --compile"),
        ({"optimizer": "muon"}, "--parallel fsdp: Muon needs whole matrices"),
        ({}, "--parallel fsdp divides the model over processes, and there is one"),
    ],
)
def test_what_cannot_be_divided_is_refused(world: World, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    def refused(rank: int) -> None:
        with pytest.raises(InputError, match=message):
            train(world, "electra with conflicts", tmp_path / "refused", parallel="fsdp", **changes)

    if changes:
        assert processes(2, refused) == [0, 0]
    else:
        refused(0)


@pytest.mark.one_in(4)
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
