"""The real stages on a full disk, in a bare environment, and with inputs that are not what they claim to be."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from guidance.checkpoint import opening
from guidance.errors import GuideError, InputError, NumericalError, PlanError
from pipelines.stages import corpus, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged, ArtifactMismatch, ArtifactMissing
from pipelines.storage.store import Store
from pipelines.storage.tables import BLOCKS
from pipelines.text.corpus_files import block_schema
from tests import trainings
from tests.tiny import in_child
from tests.trainings import one_thread  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
TEXT = "".join(f"Sentence {n} of the text is here. It has {n * n} words, or so!\n\n" for n in range(60))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One artifact of each kind, by kind."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "a.txt").write_text(TEXT)
    store = Store(folder / "store")
    text = corpus.run([str(folder / "a.txt")], corpus.Config(documents="paragraph", valid=0.2), store=store).artifact
    words = tokenizer.run(text.reference, tokenizer.Config(vocab_size=300), store=store).artifact
    packed = sequences.run(text.reference, words.reference, sequences.Config(max_length=16), store=store).artifact
    model = trainings.train(store, packed, steps=2, architecture="bert").artifact
    found = {a.kind: a.path for a in (text, words, packed, model)}
    for artifact in (text, words, packed, model):
        artifact.close()
    return found


def damaged_copy(made: dict[str, Path], kind: str, tmp_path: Path) -> Path:
    """A copy outside any store, for the test to damage."""
    return Path(shutil.copytree(made[kind], tmp_path / kind))


def within(seconds: int, function: Callable[[], object]) -> int:
    """Exit code of a function in a child process that is killed after some seconds."""

    def limited() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        function()

    return in_child(limited)


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


# disks


def in_namespace(mount: str, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a Python script after a mount that only this process sees."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting in a user namespace is not permitted on this machine")
    command = f'{mount} && exec "$@"'
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "sh", sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


FULL = """
import json, os, sys
from pathlib import Path
from cli.main import exit_code
from pipelines.stages import corpus, pretrain, sequences, tokenizer
from pipelines.storage.store import Store
from tests import trainings

disk, text, made = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
stages = {
    "corpus": lambda s: corpus.run([text], corpus.Config(sentences="line"), store=s),
    "tokenizer": lambda s: tokenizer.run(made["corpus"], tokenizer.Config(vocab_size=300), store=s),
    "sequences": lambda s: sequences.run(made["corpus"], made["tokenizer"], sequences.Config(max_length=16), store=s),
    "model": lambda s: pretrain.run(made["sequences"], trainings.config(steps=2, save_every=1), store=s),
}
for kind, stage in stages.items():
    outcomes = []
    for space in map(int, sys.argv[4:]):
        store = Store(disk / kind)
        store.root.mkdir(exist_ok=True)
        with open(disk / "filler", "wb") as filler:
            filler.write(bytes(max(0, os.statvfs(disk).f_bavail * 4096 - space)))
        try:
            stage(store)
            code, message = 0, ""
        except Exception as error:
            code, message = exit_code(error), str(error)
        published = [str(folder) for folder in store.folders()]
        outcomes.append([code, message, published])
        (disk / "filler").unlink()
    stage(store)
    for artifact in store.artifacts():
        artifact.verify()
    os.system(f"rm -rf '{disk / kind}'")
    print(json.dumps([kind, outcomes]))
"""


@pytest.mark.every
def test_a_full_disk_gives_the_same_exit_code_and_message_in_every_stage(made: dict[str, Path], tmp_path: Path) -> None:
    disk, text = tmp_path / "disk", tmp_path / "a.txt"
    disk.mkdir()
    letters = np.random.default_rng(0).integers(97, 123, (2000, 40), np.uint8)
    text.write_bytes(b"\n".join(row.tobytes() for row in letters))  # random, so it hardly compresses
    given = json.dumps({kind: str(path) for kind, path in made.items()})
    mount = f"mount -t tmpfs -o size=1024k tmpfs '{disk}'"
    done = in_namespace(mount, FULL, disk, text, given, 4 << 10, 12 << 10)
    assert done.returncode == 0, done.stderr
    for kind, outcomes in map(json.loads, done.stdout.splitlines()):
        for code, message, published in outcomes:
            assert (kind, code) == (kind, 3), message
            assert "no space left on device" in message
            assert published == []
    assert len(done.stdout.splitlines()) == 4


READ_ONLY = """
import sys, time
from pathlib import Path
from tests.tiny import *
stage = Stage("build-tiny", "tiny", 1, TinyConfig, lambda run: sys.exit("computed"))
started = time.monotonic()
try:
    make(Store(Path(sys.argv[1])), stage=stage)
except Exception as error:
    print(exit_code(error), error)
assert time.monotonic() - started < 1
"""


def test_a_read_only_disk_is_noticed_before_the_work(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    mount = f"mount --bind '{folder}' '{folder}' && mount -o remount,ro,bind '{folder}'"
    done = in_namespace(mount, READ_ONLY, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 ") and "read-only" in done.stdout.lower()


@pytest.mark.parametrize(("umask", "file_mode"), [(0o002, 0o664), (0o077, 0o600)])
def test_files_of_real_stages_follow_the_umask(made: dict[str, Path], store: Store, umask: int, file_mode: int) -> None:
    before = os.umask(umask)
    try:
        words = tokenizer.run(str(made["corpus"]), tokenizer.Config(vocab_size=300), store=store).artifact
        data = sequences.run(
            str(made["corpus"]), words.reference, sequences.Config(max_length=16), store=store
        ).artifact
        trainings.train(store, data, steps=1)
    finally:
        os.umask(before)
    found = {p.suffix: stat.S_IMODE(p.stat().st_mode) for k in ("tokenizer", "sequences", "model")
             for p in (store.root / k).rglob("*") if p.is_file()}  # fmt: skip
    assert {".json", ".parquet", ".safetensors", ".toml", ".md"} <= set(found)
    assert set(found.values()) == {file_mode}


# environments

BARE = """
import os, sys
from pathlib import Path
from cli.main import run
assert not os.environ.get("HOME")
os.chdir(sys.argv[1])
def guide(*arguments, expected=0):
    code = run(["--store", sys.argv[2], "--quiet", *arguments])
    if code != expected:
        sys.exit(f"{arguments[0]}: exit code {code}")
os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
text = sys.argv[1] + "/a.txt"
guide("build-corpus", text, expected=3)  # native libraries would abort there
os.chdir(sys.argv[1])
guide("build-corpus", text)
guide("build-corpus", text, "--name", "text", "--sentences", "line")
guide("build-tokenizer", "text", "--name", "words", "--vocab-size", "300")
guide("build-sequences", "text", "words", "--name", "data", "--max-length", "16")
train = ["--steps", "1", "--layers", "1", "--hidden", "8", "--heads", "2", "--batch-size", "2"]
guide("pretrain", "data", *train)
"""


@pytest.mark.every
def test_all_stages_run_without_home_cache_or_temporary_folder_and_refuse_a_working_folder_that_is_gone(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    places = ("HF_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCH_HOME", "TMPDIR")
    environment = {place: f"/proc/{place}" for place in places} | {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path), str(tmp_path / "store")],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("model/")


def test_a_jumping_clock_affects_neither_results_nor_durations(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    steady = trainings.train(store, plan="preset:ag").artifact
    year, now, calls = 365 * 86400.0, time.time(), iter(range(10**9))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + year * (-1) ** next(calls) * 20)
        patch.setattr(time, "gmtime", lambda *_: time.struct_time((1970, 1, 1, 0, 0, 0, 3, 1, 0)))
        jumping = trainings.train(store, plan="preset:ag", force=True).artifact
    assert trainings.metrics(steady.path) == trainings.metrics(jumping.path)
    rows = [json.loads(line) for line in jumping.read("metrics.jsonl").splitlines()]
    assert all(0 <= row["seconds"] < 600 and row["tokens_per_second"] > 0 for row in rows)
    assert 0 <= jumping.manifest["seconds"] < 600


# pipes and devices


def test_a_pipe_as_input_is_refused_at_once(made: dict[str, Path], store: Store, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = trainings.sequences(store)
    folders = []
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = tmp_path / f"model-{name}"
        shutil.copytree(made["model"], folder, ignore=shutil.ignore_patterns("artifact.json", "best"))
        (folder / name).unlink()
        os.mkfifo(folder / name)
        folders.append(folder)
    words = damaged_copy(made, "tokenizer", tmp_path)
    (words / "artifact.json").unlink()
    (words / "tokenizer_config.json").unlink()
    os.mkfifo(words / "tokenizer_config.json")
    tries: list[Callable[[], object]] = [lambda: trainings.train(store, data, plan=str(pipe))]
    tries += [lambda folder=folder: trainings.train(store, data, init=str(folder)) for folder in folders]  # type: ignore[misc]
    tries += [lambda: trainings.train(store, data, init=str(pipe))]
    tries += [lambda: sequences.run(str(made["corpus"]), str(words), sequences.Config(), store=store)]
    assert [within(20, attempt) for attempt in tries] == [2] * len(tries)


# damaged artifacts of every kind


@pytest.mark.parametrize("kind", ["corpus", "tokenizer", "sequences", "model"])
def test_every_bit_flip_and_truncation_of_a_real_artifact_is_detected(
    made: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    folder, generator = damaged_copy(made, kind, tmp_path), random.Random(3)
    with Artifact(folder) as artifact:
        artifact.verify()
        names = sorted(name for name, about in artifact.files.items() if about["bytes"])
    assert {Path(name).suffix for name in names} >= {"model": {".safetensors", ".parquet"}}.get(kind, set())
    for name in names:
        path = folder / name
        good = path.read_bytes()
        flips = []
        for _ in range(15):
            place = generator.randrange(len(good) * 8)
            flipped = bytearray(good)
            flipped[place // 8] ^= 1 << place % 8
            flips.append(bytes(flipped))
        step = 97 * max(1, len(good) // (97 * 15))
        for data in flips + [good[:length] for length in range(0, len(good), step)]:
            path.write_bytes(data)
            with pytest.raises(ArtifactDamaged, match=path.name), Artifact(folder) as artifact:
                artifact.verify()
        path.write_bytes(good)


def test_artifacts_of_the_wrong_kind_are_refused(made: dict[str, Path], store: Store) -> None:
    wanted: dict[str, Callable[[str], object]] = {
        "corpus": lambda r: tokenizer.run(r, tokenizer.Config(), store=store),
        "tokenizer": lambda r: sequences.run(str(made["corpus"]), r, sequences.Config(), store=store),
        "sequences": lambda r: trainings.pretrain.run(r, trainings.config(), store=store),
        "model": lambda r: trainings.train(store, init=r),
    }
    fit_too = {"tokenizer": {"model"}}  # a model brings its tokenizer along
    for kind, use in wanted.items():
        for other in set(made) - {kind} - fit_too.get(kind, set()):
            with pytest.raises(ArtifactMismatch) as caught:
                use(str(made[other]))
            assert kind in caught.value.message and other in caught.value.message


def blocks(**changes: Any) -> pa.Table:
    """A table of one block with some columns replaced; None leaves a column out."""
    schema = block_schema()
    columns = {field.name: pa.array([None], field.type) for field in schema}
    columns |= {f.name: pa.array([0], f.type) for f in schema if pa.types.is_integer(f.type)}
    columns |= {f.name: pa.array(["Some text."], f.type) for f in schema if pa.types.is_string(f.type)}
    columns |= changes
    return pa.table({name: column for name, column in columns.items() if column is not None})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (blocks(text=None), "'text' is missing"),
        (blocks(text=None, txt=pa.array(["A."])), "'text' is missing"),
        (blocks(text=pa.array([7])), r"'text' is \['int64'\], expected"),
        (blocks(text=pa.array([b"A."])), r"'text' is \['binary'\], expected"),
        (blocks(text=pa.array([None], pa.string())), "nulls"),
        (pa.table([*blocks().columns, pa.array(["B."])], names=[*blocks().column_names, "text"]), "'text' is"),
        (b"not a table" * 20, "unreadable"),
    ],
)
def test_a_corpus_with_invalid_columns_is_refused_in_spite_of_a_valid_digest(
    store: Store, table: pa.Table | bytes, message: str
) -> None:
    manifest = {"stage": "build-corpus", "stage_version": 1, "config": {}, "inputs": {}}
    with store.build("corpus", "0" * 64, manifest) as out:
        if isinstance(table, bytes):
            out.write(BLOCKS, table)
        else:
            with out.open(BLOCKS) as file:
                pq.write_table(table, file)
    with pytest.raises(ArtifactMismatch, match=message):
        tokenizer.run("corpus/" + "0" * 16, tokenizer.Config(), store=store)


def test_sequences_that_are_not_a_table_are_refused_in_spite_of_a_valid_digest(store: Store) -> None:
    manifest = {"stage": "build-sequences", "stage_version": 1, "config": {"max_length": 16}, "inputs": {}}
    with store.build("sequences", "0" * 64, manifest) as out:
        out.write("train.parquet", b"PAR1" + b"not a table" * 20 + b"PAR1")
        out.files["train.parquet"]["rows"] = 8
        for name, content in trainings.tokenizer_files().items():
            out.write(f"tokenizer/{name}", content)
    with pytest.raises(ArtifactDamaged, match=r"train\.parquet"):
        trainings.pretrain.run("sequences/" + "0" * 16, trainings.config(), store=store)


# foreign models


def model_folder(made: dict[str, Path], tmp_path: Path) -> Path:
    """The model as a plain folder, without a manifest."""
    folder = damaged_copy(made, "model", tmp_path)
    (folder / "artifact.json").unlink()
    return folder


def start_from(store: Store, made: dict[str, Path], folder: Path) -> None:
    trainings.pretrain.run(str(made["sequences"]), trainings.config(init=str(folder), steps=1), store=store)


def safetensors_file(header: bytes, data: bytes = bytes(64), length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(start: int, end: int, shape: str = "[4]", name: str = "a") -> bytes:
    return b'"%b":{"dtype":"F32","shape":%b,"data_offsets":[%d,%d]}' % (name.encode(), shape.encode(), start, end)


STRANGE_WEIGHTS = {
    "overlap": safetensors_file(b"{%b,%b}" % (entry(0, 16), entry(8, 24, name="b")), bytes(24)),
    "a huge header": safetensors_file(b"{}", length=1 << 60),
    "a header past the end": safetensors_file(b"{}", length=1000),
    "negative offsets": safetensors_file(b"{%b}" % entry(-16, 0)),
    "backwards": safetensors_file(b"{%b}" % entry(16, 0)),
    "a key twice": safetensors_file(b"{%b,%b}" % (entry(0, 16), entry(16, 32)), bytes(32)),
    "2^40 numbers": safetensors_file(b"{%b}" % entry(0, 64, f"[{1 << 40}]")),
    "a product that overflows": safetensors_file(b"{%b}" % entry(0, 0, f"[{1 << 33},{1 << 33}]"), b""),
    "nested": safetensors_file(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "a list": safetensors_file(b"[1]"),
    "no utf-8": safetensors_file(b'{"\xff":1}'),
    "names that climb": safetensors_file(b"{%b}" % entry(0, 16, name="../../climbed"), bytes(16)),
}


@pytest.mark.parametrize("name", STRANGE_WEIGHTS)
def test_malformed_safetensors_are_refused_as_initial_weights(
    made: dict[str, Path], store: Store, tmp_path: Path, name: str
) -> None:
    folder = model_folder(made, tmp_path)
    (folder / "model.safetensors").write_bytes(STRANGE_WEIGHTS[name])
    with pytest.raises(InputError):
        start_from(store, made, folder)
    assert not list(tmp_path.rglob("climbed*")) and not list(store.root.glob("model/*"))


def test_tensor_names_never_become_file_names(made: dict[str, Path], store: Store, tmp_path: Path) -> None:
    import safetensors.torch

    folder = model_folder(made, tmp_path)
    weights = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").write_bytes(
        safetensors.torch.save(weights | {"../../climbed": torch.ones(2), "/tmp/climbed": torch.ones(2)})
    )
    start_from(store, made, folder)
    (model,) = (a for a in store.artifacts() if a.kind == "model")
    assert not any("climbed" in name for name in safetensors.torch.load(model.read("model.safetensors")))
    assert not list(tmp_path.rglob("*climbed*")) and not Path("/tmp/climbed").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_initial_weights_that_are_not_finite_never_give_a_model(
    made: dict[str, Path], store: Store, tmp_path: Path, value: float
) -> None:
    import safetensors.torch

    folder = model_folder(made, tmp_path)
    weights = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    name = next(n for n in weights if "layer.0.attention.self.value.weight" in n)
    weights[name][0, 0] = value
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(weights, {"format": "pt"}))
    with pytest.raises(NumericalError, match=f"{re.escape(name)} has 1 values of .* that are not finite"):
        start_from(store, made, folder)
    assert not list(store.root.glob("model/*"))


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_tokenizer_beside_a_model_is_refused(
    made: dict[str, Path], store: Store, tmp_path: Path, data: bytes
) -> None:
    folder = model_folder(made, tmp_path)
    (folder / "tokenizer.json").write_bytes(data)
    with pytest.raises(InputError, match=r"tokenizer\.json: damaged"):
        start_from(store, made, folder)


# files that would run code


@pytest.mark.parametrize("name", ["a.pt", "a.pkl", "a.npy", "a.joblib", "a.bin", "model.safetensors", ".metadata"])
def test_no_pickle_is_ever_opened(
    made: dict[str, Path], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trace = tmp_path / "owned"
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / name
    if name == "a.pt":
        torch.save({"weights": Evil(trace)}, path)
    elif name == "a.npy":
        np.save(path, np.array([Evil(trace)], dtype=object), allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps({"weights": Evil(trace)}))
    (folder / "__0_0.distcp").write_bytes(bytes(64))
    data = str(made["sequences"])
    for given in (path, folder):
        tries: list[Callable[[], object]] = [
            lambda given=given: store.load(str(given)),  # type: ignore[misc]
            lambda given=given: trainings.pretrain.run(str(given), trainings.config(), store=store),  # type: ignore[misc]
            lambda given=given: trainings.pretrain.run(data, trainings.config(init=str(given)), store=store),  # type: ignore[misc]
            lambda given=given: trainings.pretrain.run(data, trainings.config(plan=str(given)), store=store),  # type: ignore[misc]
            lambda given=given: sequences.run(str(made["corpus"]), str(given), sequences.Config(), store=store),  # type: ignore[misc]
            lambda given=given: corpus.run([str(given)], corpus.Config(format="text"), store=store),  # type: ignore[misc]
        ]
        for attempt in tries:
            with pytest.raises((InputError, PlanError, ArtifactMissing)):
                attempt()
    shutil.copy(made["model"] / "config.json", folder)
    with pytest.raises(InputError):
        start_from(store, made, folder)
    assert not trace.exists() and not store.folders()


def test_templates_and_classes_of_a_tokenizer_are_never_executed(
    made: dict[str, Path], store: Store, tmp_path: Path
) -> None:
    folder = damaged_copy(made, "tokenizer", tmp_path)
    (folder / "artifact.json").unlink()
    plain = sequences.run(str(made["corpus"]), str(folder), sequences.Config(), store=store).artifact
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    template = "{{ lipsum.__globals__['os'].mkdir('%s') }}" % (tmp_path / "owned")
    hostile = {
        "chat_template": template,
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": "evil.Evil"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | hostile))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'owned')!r})")
    strange = sequences.run(str(made["corpus"]), str(folder), sequences.Config(), store=store).artifact
    assert strange.files["train.parquet"] == plain.files["train.parquet"]
    assert not any("jinja" in name or "evil" in name for name in strange.files)
    published = json.loads(strange.read("tokenizer/tokenizer_config.json"))
    assert not set(published) & {"chat_template", "auto_map"} and published["tokenizer_class"] != "EvilTokenizer"
    trainings.train(store, strange, steps=1)
    assert not (tmp_path / "owned").exists()


def test_a_tokenizer_saved_by_transformers_can_be_used_for_training(
    made: dict[str, Path], store: Store, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(made["tokenizer"]).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "special_tokens_map.json").unlink(missing_ok=True)
    packed = sequences.run(str(made["corpus"]), str(tmp_path / "hf"), sequences.Config(), store=store).artifact
    model = trainings.train(store, packed, steps=1).artifact
    again = AutoTokenizer.from_pretrained(model.path)
    assert again("a text").input_ids == AutoTokenizer.from_pretrained(made["tokenizer"])("a text").input_ids


# a model that is rebuilt while another run reads it


def test_a_model_rebuilt_while_it_is_opened_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    first = trainings.train(store, learning_rate=1e-3).artifact
    read = opening._shards

    def republish_then_read(path: Path) -> list[str]:
        monkeypatch.setattr(opening, "_shards", read)
        with Artifact(first.path) as old:
            content = {name: old.read(name) for name in old.files}
        weights = safetensors.torch.load(content["model.safetensors"])
        content["model.safetensors"] = safetensors.torch.save({k: v + 1 for k, v in weights.items()}, {"format": "pt"})
        with store.build("model", first.recipe, {**old.manifest}) as out:
            for name, blob in content.items():
                out.write(name, blob)
        return read(path)

    monkeypatch.setattr(opening, "_shards", republish_then_read)
    with pytest.raises(GuideError, match="was rebuilt while it was being read"):
        trainings.train(store, init=first.reference, steps=1)
