"""What an earlier version wrote still opens, and still means the same.

Commit 7e4d01b wrote the files below `golden/before`.  A failure here means that plans, models or
artifacts of users change their meaning.  Mend the code; do not write the files anew.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import guidance
from cli.main import run
from guidance.patterns.features import Cooccurrence

BEFORE = Path(__file__).parent / "golden" / "before"
EXPECTED = BEFORE / "expected"

MAY_HAVE_RISEN = {"pretrain": 1, "build-corpus": 1, "build-dataset": 2, "build-tokenizer": 1}
"""Stages whose version may have risen since, and by how much at most."""

ADDED_COUNTS = {
    "build-sequences": {"tokens_per_word"},
    "pretrain": {"memory_bytes", "unigram_floor"},
    "finetune": {"memory_bytes"},
}
"""The counts that stages have made since."""

# plans


@pytest.mark.parametrize("name", sorted(path.stem for path in (BEFORE / "plans" / "dumped").iterdir()))
def test_a_plan_is_dumped_as_before(name: str) -> None:
    dumped = _text(BEFORE / "plans" / "dumped" / f"{name}.toml")
    assert guidance.Plan.parse(dumped).dumps() == dumped


@pytest.mark.parametrize("name", sorted(path.stem for path in (BEFORE / "plans" / "written").iterdir()))
def test_a_plan_written_by_hand_is_read_as_before(name: str) -> None:
    plan = guidance.Plan.load(BEFORE / "plans" / "written" / f"{name}.toml")
    assert plan.dumps() == _text(BEFORE / "plans" / "dumped" / f"{name}.toml")


def test_the_presets_say_what_they_said_before() -> None:
    dumped = sorted((BEFORE / "plans" / "dumped").glob("preset-*.toml"))
    assert dumped
    for path in dumped:
        preset = path.stem.removeprefix("preset-")
        assert guidance.Plan.load(f"preset:{preset}").dumps() == _text(path), preset


# models

MODELS = sorted(path.name for path in (BEFORE / "models").iterdir())
STEP, TOTAL_STEPS = 3, 10


@pytest.mark.parametrize("name", MODELS)
def test_a_guided_model_computes_what_it_computed_before(name: str) -> None:
    model, handle = _opened(name)
    batch = load_file(EXPECTED / f"{name}.batch.safetensors")
    tensors, numbers = _measured(model.double(), handle, batch)
    expected = load_file(EXPECTED / f"{name}.safetensors")
    assert set(tensors) >= set(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(tensors[key].double(), tensor.double(), rtol=1e-6, atol=1e-6, msg=_says(key))
    expected_numbers = json.loads(_text(EXPECTED / f"{name}.json"))
    assert numbers.keys() == expected_numbers.keys()
    assert numbers == _approximately(expected_numbers)


@pytest.mark.parametrize("name", MODELS)
def test_a_guided_model_is_saved_under_the_same_names(name: str, tmp_path: Path) -> None:
    _, handle = _opened(name)
    old, new = BEFORE / "models" / name, tmp_path / "model"
    guidance.save(handle, new, tokenizer=_tokenizer(old))
    assert {path.name for path in new.iterdir()} == {path.name for path in old.iterdir()}
    assert _text(new / "plan.toml") == _text(old / "plan.toml")
    for path in old.glob("*.safetensors"):
        assert _values(load_file(new / path.name)) == _values(load_file(path))
    old_config, new_config = (json.loads(_text(folder / "config.json")) for folder in (old, new))
    for key in ("architectures", "dtype", "guide_plan", "model_type"):
        assert new_config.get(key) == old_config.get(key)


def _opened(name: str) -> tuple[Any, Any]:
    """A model of the earlier version with all that its losses look up."""
    given = load_file(EXPECTED / "tables.safetensors")
    tables = {
        "cooccurrence": Cooccurrence(given["rows_V"], given["scores_NN"]),
        "importance": given["importance"],
    }
    return guidance.load(BEFORE / "models" / name, training=True, tables=tables)


def _tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    names = {k: v for k, v in json.loads(_text(folder / "tokenizer_config.json")).items() if k.endswith("_token")}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)


def _measured(model: Any, handle: Any, batch: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a model computes on a batch: tensors, and numbers by name."""
    seeds_B = batch.pop("seeds_B")
    inputs = {key: value for key, value in batch.items() if key.endswith(("input_ids", "attention_mask"))}
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    with torch.no_grad():
        tensors["logits"] = model(**inputs, guidance=handle.guide(**batch)).logits
        with contextlib.suppress(guidance.GuideError):  # plans that read features of words cannot do without them
            tensors["logits without guidance"] = model(**inputs).logits
    model.train()
    context = handle.guide(**batch, step=STEP)
    output = model(**inputs, guidance=context)
    for label, values in context.per_example().items():
        tensors[f"per example: {label}"] = values.detach()
        tensors[f"weights: {label}"] = context.weights_B(label)
        numbers[f"denominator: {label}"] = float(context.denominators()[label])
    loss = context.loss(STEP, TOTAL_STEPS)
    numbers["loss"] = float(loss.detach())
    total = loss + output.logits.double().square().mean()
    if any(guide.mechanism in ("adversary", "random_mask") for guide in handle.plan.guides):
        attack = context.attack(seeds_B)
        attacked = model(**inputs, guidance=attack)
        tensors["attacked logits"] = attacked.logits.detach()
        tensors["penalties"] = attack.penalties_B().detach()
        numbers["penalty"] = float(attack.penalty().detach())
        classes = output.logits[:, 0], attacked.logits[:, 0]
        second = attack.adversarial_loss(*classes, "classification", step=STEP, total_steps=TOTAL_STEPS)
        numbers["adversarial loss"] = float(second.detach())
        total = total + second
    numbers["total"] = float(total.detach())
    total.backward()
    for name, parameter in model.named_parameters():
        numbers[f"gradient: {name}"] = None if parameter.grad is None else float(parameter.grad.norm())
    return tensors, numbers


# the library

PUBLIC = {
    "install": "model plan tokenizer decoder_tokenizer part tables training backend",
    "load": "folder auto_class tokenizer options",
    "save": "guided folder tokenizer plan",
    "pattern": "spec ids mask tokenizer tables columns",
    "attention_loss": "probabilities spec ids mask tokenizer tables options columns",
    "logit_loss": "scores spec ids mask mispredicted tokenizer tables options columns",
    "register_pattern": "name build source needs tables positional weighted same_keys looks_ahead option_facts package",
    "register_feature": "name kind summary package source of_pairs",
    "register_mechanism": "name mechanism package",
    "register_family": "name attention label layers package",
    "register_backend": "name attend paths package",
    "Guide": "pattern mechanism part stack attention layers heads weight reference_length schedule hold_steps optional"
    " enabled name options",
    "Plan": "guides pal",
    "GuidedTrainer": "model args plan tokenizer tables options",
    "Handle.guide": "input_ids attention_mask decoder_input_ids decoder_attention_mask step columns",
    "Handle.probabilities": "input_ids attention_mask more",
    "BatchGuidance.loss": "step total_steps",
    "BatchGuidance.attack": "seeds_B",
    "BatchGuidance.adversarial_loss": "clean attacked form selected step total_steps",
}
"""Arguments of the earlier version, in their order; later ones may have more."""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_takes_the_arguments_it_took_before(name: str) -> None:
    known = inspect.signature(functools.reduce(getattr, name.split("."), guidance)).parameters
    own = [argument for argument in known if argument != "self"]
    before = PUBLIC[name].split()
    assert [argument for argument in own if argument in before] == before
    added = [known[argument] for argument in own if argument not in before]
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in added)
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in added)


def test_every_public_name_of_the_earlier_version_is_still_there() -> None:
    classes = "BatchGuidance Cooccurrence GuidanceHadNoEffect GuideError Handle InputError MachineError Mechanism"
    classes += " NumericalError PlanError Tokens UnknownName UnsupportedModel"
    assert {*classes.split(), *(name.partition(".")[0] for name in PUBLIC)} <= set(guidance.__all__)


# random numbers


@pytest.mark.parametrize("name", sorted(path.stem for path in (BEFORE / "random").glob("*.toml")))
def test_a_plan_draws_the_numbers_it_drew_before(name: str) -> None:
    given = json.loads(_text(BEFORE / "random" / f"{name}.json"))
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    model = (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForMaskedLM).from_config(config)
    own = set(model.state_dict())
    torch.manual_seed(0)
    guidance.install(
        model, guidance.Plan.load(BEFORE / "random" / f"{name}.toml"), _tokenizer(BEFORE / "models" / "bert")
    )
    drawn = {key: tensor for key, tensor in model.state_dict().items() if key not in own}
    drawn["next"] = torch.rand(4)
    expected = load_file(BEFORE / "random" / f"{name}.safetensors")
    assert drawn.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(drawn[key], tensor, rtol=1e-6, atol=1e-6, msg=_says(key))


# artifacts

COMMANDS = [(step["command"], step["reference"]) for step in json.loads((EXPECTED / "commands.json").read_bytes())]
NAMES = [f"{line.split()[0]}-{line.split()[-1]}" for line, _ in COMMANDS]
LOOKS = {step["command"]: step["stdout"] for step in json.loads((EXPECTED / "looks.json").read_bytes())}


@contextlib.contextmanager
def _in_a_copy(folder: Path) -> Iterator[Any]:
    """In a copy of the earlier store, a function that runs a command: gives code, out and err."""

    def call(line: str) -> SimpleNamespace:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(line.split())
        return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())

    for part in ("text", "store"):
        shutil.copytree(BEFORE / part, folder / part)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        for name in [name for name in os.environ if name.startswith("GUIDE_")]:
            patch.delenv(name)
        patch.setenv("GUIDE_STORE", "store")
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "200")
        yield call


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By command that looks at artifacts: what it says about the earlier store."""
    with _in_a_copy(tmp_path_factory.mktemp("looks")) as call:
        return {line: call(line) for line in LOOKS}


@pytest.mark.parametrize("line", [line for line in LOOKS if not line.startswith("compare")])
def test_a_command_shows_the_earlier_store_as_before(line: str, looks: Mapping[str, Any]) -> None:
    assert looks[line].code == 0, looks[line].err
    if line.startswith("ls"):  # since then by time, then by kind: the same rows in another order
        assert _rows(line, looks[line].out) == _rows(line, LOOKS[line])
    elif line.endswith("--json"):
        assert json.loads(looks[line].out) == json.loads(LOOKS[line])
    else:
        assert looks[line].out == LOOKS[line]


def _rows(line: str, out: str) -> Any:
    """What ``guide ls`` says, its rows in the order of their ids."""
    if not line.endswith("--json"):
        title, *rows = out.splitlines()
        return [title, *sorted(rows)]
    found = json.loads(out)
    return found | {"artifacts": sorted(found["artifacts"], key=lambda row: row["artifact"])}


@pytest.mark.parametrize("line", [line for line in LOOKS if line.startswith("compare")])
def test_earlier_runs_are_compared_as_before(line: str, looks: Mapping[str, Any]) -> None:
    """Schema 2 has given losses in place of *equal loss*, and seconds only of steps that were timed alone."""
    assert looks[line].code == 0, looks[line].err
    if line.endswith("--json"):
        found, expected = _flat(json.loads(looks[line].out)), _flat(json.loads(LOOKS[line]))
        gone = ("definitions", "schema", "equal_loss", "share_of", "equal_seconds")
        kept = {key: value for key, value in expected.items() if not any(word in str(key) for word in gone)}
        assert len(kept) > 50 and {key: found[key] for key in kept} == _approximately(kept)
    else:
        for run in line.split()[1:]:
            first, before = (
                next(row.split() for row in out.splitlines() if row.startswith(f"{run} "))
                for out in (looks[line].out, LOOKS[line])
            )
            assert first == before, "the losses of the first table"


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By command: what it says when it is run on the earlier store once more."""
    with _in_a_copy(tmp_path_factory.mktemp("again")) as call:
        return {line: call(f"{_nameless(line)} --json") for line, _ in COMMANDS}


@pytest.mark.parametrize(("line", "reference"), COMMANDS, ids=NAMES)
def test_an_earlier_artifact_is_up_to_date(line: str, reference: str, again: Mapping[str, Any]) -> None:
    assert again[line].code == 0, again[line].err
    said = json.loads(again[line].out)
    if said["reused"] or line.split()[0] not in MAY_HAVE_RISEN:
        old = _manifest(BEFORE / "store", reference)
        assert (said["reused"], said["content"]) == (True, old["content"])


@pytest.fixture(scope="module")
def anew(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The store after each command has built its artifact anew, and what each command said.

    The last command runs first, so that each of them reads what the earlier version wrote.
    """
    folder = tmp_path_factory.mktemp("anew")
    with _in_a_copy(folder) as call:
        return folder / "store", {line: call(f"{_as_then(line)} --force --json") for line, _ in reversed(COMMANDS)}


def _as_then(line: str) -> str:
    """A command without names; masked language models were RoBERTas unless something else was said."""
    chosen = ("--objective", "--architecture", "--init")
    is_auto = line.startswith("pretrain") and not any(flag in line for flag in chosen)
    return _nameless(line) + (" --architecture roberta" if is_auto else "")


@pytest.mark.parametrize(("line", "reference"), COMMANDS, ids=NAMES)
def test_a_stage_writes_what_it_wrote_before(line: str, reference: str, anew: tuple[Path, dict[str, Any]]) -> None:
    store, results = anew
    assert results[line].code == 0, results[line].err
    said = json.loads(results[line].out)
    assert not said["reused"]
    old, new = _manifest(BEFORE / "store", reference), _manifest(store, said["artifact"])
    risen = new["stage_version"] - old["stage_version"]
    assert 0 <= risen <= MAY_HAVE_RISEN.get(old["stage"], 0)
    assert risen or new["recipe"] == old["recipe"]
    # version 2 of build-corpus has more settings, finds sentence lines by default, and divides few documents otherwise
    is_corpus_2 = old["stage"] == "build-corpus" and risen
    for key in ("stage", "kind", "inputs", "config", "seed", "provenance", "format"):
        if (
            key == "config"
        ):  # new settings may be added; those of today's recipe decide nothing, or the recipe would differ
            kept = {name for name in old[key] if not (is_corpus_2 and name == "sentences") and name != "architecture"}
            assert {name: new[key].get(name) for name in kept} == {name: old[key][name] for name in kept}
        else:
            assert new[key] == old[key]
    assert new.keys() == old.keys()
    assert new["counts"].keys() - ADDED_COUNTS.get(old["stage"], set()) == old["counts"].keys()
    assert new["files"].keys() == old["files"].keys()
    if is_corpus_2:
        assert _sentences(store / said["artifact"]) == _sentences(BEFORE / "store" / reference)
        return
    for name in old["files"]:
        _check_file(BEFORE / "store" / reference / name, store / said["artifact"] / name, old["kind"])


def _sentences(corpus: Path) -> tuple[Any, list[tuple[int, str]]]:
    """The columns of a corpus, and its sentences, each with the number of its document."""
    blocks = pq.read_table(corpus / "blocks.parquet")
    schemas = blocks.schema, pq.read_schema(corpus / "documents.parquet")
    columns = [[(field.name, field.type, field.nullable, field.metadata) for field in schema] for schema in schemas]
    return columns, [
        (row["document"], row["text"][span["start"] : span["end"]])
        for row in blocks.to_pylist()
        for span in row["sentences"]
    ]


def _check_file(old: Path, new: Path, kind: str) -> None:
    """Fails unless two files of an artifact have the same names, columns and units; and what is certain, values."""
    if old.suffix == ".parquet":
        schemas = [pq.read_schema(path) for path in (old, new)]
        assert schemas[1].equals(schemas[0], check_metadata=True), f"{old.name}: {schemas[1]} != {schemas[0]}"
        rows = [pq.read_table(path).to_pylist() for path in (old, new)]
        assert len(rows[1]) == len(rows[0])
        if old.name == "metrics.parquet":
            sure = ("step", "tokens", "learning_rate", "loss/total")
            sure += tuple(key for key in rows[0][0] if key.startswith(("loss/", "weight/", "valid/")))
            rows = [[{key: row[key] for key in sure} for row in table] for table in rows]
            assert _flat(rows[1]) == _approximately(_flat(rows[0]), rel=1e-3, abs=1e-4)
        elif kind != "evaluation":
            assert _flat(rows[1]) == _approximately(_flat(rows[0]))
    elif old.suffix == ".safetensors":
        tensors = [load_file(path) for path in (old, new)]
        assert _shapes(tensors[1]) == _shapes(tensors[0])
        for key, tensor in tensors[0].items():  # three steps move no weight further than that
            torch.testing.assert_close(tensors[1][key], tensor, rtol=0, atol=1e-3, msg=_says(key))
    elif old.suffix == ".jsonl":
        lines = [[set(json.loads(line)) for line in path.read_text().splitlines()] for path in (old, new)]
        assert lines[1] == lines[0]
    elif old.suffix == ".toml":
        assert _text(new) == _text(old)
    elif old.suffix == ".json" and not old.name.startswith(("tokenizer", "special_tokens", "config", "generation")):
        assert _flat(json.loads(_text(new))).keys() == _flat(json.loads(_text(old))).keys()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("asa", "--plan preset:asa-pretraining"),
        ("guided-roles", "--plan preset:roles-unparsed --masks roles"),
        ("nsp", "--objective mlm+nsp"),
        ("translator", "--objective translation --plan preset:gaussian"),
    ],
)
def test_training_starts_from_an_earlier_model(model: str, options: str, tmp_path: Path) -> None:
    sequences = "translations" if model == "translator" else "packed"
    shape = "--steps 1 --batch-size 4 --learning-rate 1e-12 --device cpu"
    with _in_a_copy(tmp_path) as call:
        result = call(f"pretrain {sequences} --init {model} {options} {shape}")
    assert result.code == 0, result.err
    old, new = _trained(model), tmp_path / "store" / result.out.strip()
    for path in old.glob("*.safetensors"):
        found = load_file(new / path.name)
        assert _shapes(found) == _shapes(load_file(path))
        for key, tensor in load_file(path).items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6, msg=_says(f"{path.name}: {key}"))


@pytest.mark.parametrize("model", ["ag", "guided-roles", "asa", "nsp", "translator"])
def test_an_earlier_trained_model_opens(model: str) -> None:
    old = _trained(model)
    opened, handle = guidance.load(old)
    assert handle.plan.dumps() == _text(old / "plan.toml")
    stored = {key: tensor for path in old.glob("*.safetensors") for key, tensor in load_file(path).items()}
    for key, tensor in opened.state_dict().items():
        assert key not in stored or torch.equal(stored[key], tensor), key


def _nameless(line: str) -> str:
    """A command without its ``--name``, so that names keep standing for what the earlier version wrote."""
    words = line.split()
    place = words.index("--name")
    return " ".join(words[:place] + words[place + 2 :])


def _trained(name: str) -> Path:
    """The folder of an earlier model; of several with one name, the first."""
    return BEFORE / "store" / next(reference for line, reference in COMMANDS if line.endswith(f"--name {name}"))


def _manifest(store: Path, reference: str) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((store / reference / "artifact.json").read_bytes())
    return manifest


# comparing


def _text(path: Path) -> str:
    return path.read_bytes().decode()


def _says(name: str) -> Any:
    return lambda text: f"{name}: {text}"


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _values(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested lists and mappings, by their path."""
    if isinstance(value, Mapping):
        pairs = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(str(place), item) for place, item in enumerate(value)]
    else:
        return {path: value}
    return {key: leaf for name, item in pairs for key, leaf in _flat(item, f"{path}/{name}").items()}


def _approximately(leaves: Mapping[str, Any], rel: float = 1e-6, abs: float = 1e-6) -> dict[str, Any]:
    return {
        key: pytest.approx(leaf, rel=rel, abs=abs, nan_ok=True) if isinstance(leaf, float) else leaf
        for key, leaf in leaves.items()
    }
