"""Model folders: ours open without us, and nothing in one of somebody else's is ever run."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, PreTrainedModel

from guidance.attention import install
from guidance.checkpoint import PLAN_FILE, load_model, model_files, read_config, weights
from guidance.errors import InputError
from guidance.plan import Guide, Plan
from tests.guidance.models import batch, tiny_model

PLAN = Plan((Guide("next", "attention_loss", heads=(0,)),))
four_families = pytest.mark.parametrize("family", ["bert", "roberta", "electra", "modernbert"])


def save(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in model_files(model, PLAN).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound RoBERTa."""
    return save(tiny_model("roberta"), tmp_path / "model")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(folder, AutoModelForMaskedLM)


class Evil:
    """Unpickling this makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


# ours


@four_families
def test_a_saved_model_opens_without_us_and_computes_the_same(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    expected = model(**batch()).logits
    install(model, PLAN)
    folder = save(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_bytes())
    assert not any("attn_implementation" in key for key in config)
    assert config["architectures"] == [type(model).__name__]
    opened, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert opened.config._attn_implementation == "sdpa"
    for again in (opened, load_model(folder, AutoModelForMaskedLM)):
        assert torch.equal(again.eval()(**batch()).logits, expected)
        assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert Plan.load(folder / PLAN_FILE) == PLAN


@four_families
def test_tied_weights_are_stored_once_and_the_copy_is_independent(family: str) -> None:
    model = tiny_model(family)
    stored = weights(model)
    assert len({t.data_ptr() for t in stored.values()}) == len(stored)
    assert sum(t.numel() for t in stored.values()) == sum(
        t.numel() for t in {t.data_ptr(): t for t in model.state_dict().values()}.values()
    )
    name = next(iter(stored))
    stored[name].fill_(9)
    assert not (model.state_dict()[name] == 9).all()


def test_the_same_model_gives_the_same_bytes() -> None:
    assert model_files(tiny_model("bert"), PLAN) == model_files(tiny_model("bert"), PLAN)


def test_a_saved_model_opens_in_a_process_that_never_heard_of_us(folder: Path) -> None:
    script = (
        "import sys; sys.modules['guidance'] = None\n"
        "from transformers import AutoModelForMaskedLM\n"
        f"print(type(AutoModelForMaskedLM.from_pretrained({str(folder)!r})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stdout.strip() == "RobertaForMaskedLM"


def test_a_head_for_another_task_is_new_but_the_encoder_is_not(folder: Path) -> None:
    model = load_model(folder, AutoModelForSequenceClassification)
    original = load_model(folder, AutoModelForMaskedLM)
    assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)


# somebody else's


def test_folders_without_a_configuration_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "not a model folder")
    refused(tmp_path / "absent", "not a model folder")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "tf_model.h5"])
def test_weights_that_are_only_pickled_are_refused_and_never_opened(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Evil(tmp_path / "owned"), protocol=2))
    refused(folder, f"no safetensors, only {name}, which could run code")
    # a safetensors file of another name does not open the way to it
    (folder / "other.safetensors").write_bytes(safetensors.torch.save({"x": torch.zeros(1)}))
    refused(folder, "cannot be opened")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("named", ["evil.bin", "../elsewhere.safetensors", "/etc/x.safetensors", 3])
def test_an_index_that_names_anything_but_safetensors_beside_it_is_refused(
    named: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "evil.bin").write_bytes(pickle.dumps(Evil(tmp_path / "owned"), protocol=2))
    index = folder / "model.safetensors.index.json"
    names = weights(tiny_model("roberta"))
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "part.safetensors")}))
    load_model(folder, AutoModelForMaskedLM)
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, named)}))
    refused(folder, "no safetensors file of this folder")
    for broken in ("[]", "{", '{"weight_map": 3}'):
        index.write_text(broken)
        refused(folder, "not an index")
    assert not (tmp_path / "owned").exists()


def test_code_that_comes_with_a_model_is_refused_and_never_run(folder: Path, tmp_path: Path) -> None:
    (folder / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'owned')!r})")
    edit(folder, auto_map={"AutoConfig": "evil.Evil", "AutoModelForMaskedLM": "evil.Evil"}, trust_remote_code=True)
    refused(folder, "its own code, which is never run")
    assert not (tmp_path / "owned").exists()


def test_an_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "attacker/model"}')
    refused(folder, "an adapter")


def test_keys_that_could_name_kernels_or_quantisers_are_dropped(folder: Path) -> None:
    hostile = {
        "_attn_implementation": "attacker/kernel",
        "_attn_implementation_internal": "attacker/kernel",
        "attn_implementation": "attacker/kernel",
        "_experts_implementation": "attacker/kernel",
        "quantization_config": {"quant_method": "attacker"},
        "name_or_path": "attacker/model",
        "transformers_weights": "evil.bin",
        "surprise": 1,
    }
    edit(folder, **hostile)
    model = load_model(folder, AutoModelForMaskedLM)
    assert model.config._attn_implementation == "sdpa"
    assert "attacker" not in json.dumps(model.config.to_dict(), default=str)
    assert not hasattr(model.config, "surprise") and not hasattr(model.config, "transformers_weights")


def test_nested_configurations_are_cleaned_too() -> None:
    nested = {
        "_attn_implementation": "attacker/kernel",
        "attn_implementation": "attacker/kernel",
        "_experts_implementation": "attacker/kernel",
        "_name_or_path": "attacker/model",
        "hidden_size": 24,
    }
    given = {"model_type": "clip", "text_config": nested, "vision_config": {"text_config": [nested]}}
    config = read_config(json.dumps(given).encode(), "x")
    assert config.text_config.hidden_size == 24
    assert "attacker" not in repr([vars(c) for c in (config, config.text_config, config.vision_config)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a model configuration"),
        (b"[]", "not a model configuration"),
        (b"3", "not a model configuration"),
        (b"\xff\xfe\x00", "not a model configuration"),
        (b"[" * 100_000, "not a model configuration"),
        (b"{}", "no architecture 'None'"),
        (b'{"model_type": "attacker"}', "no architecture 'attacker'"),
        (b'{"model_type": ["roberta"]}', "no architecture"),
        (b'{"model_type": "roberta", "hidden_size": "wide"}', "not a configuration of roberta"),
        (b'{"model_type": "roberta", "id2label": 3}', "not a configuration of roberta"),
    ],
)
def test_a_configuration_that_is_none_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_config(data, "config.json")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
def test_damaged_weights_are_refused(keep: float, folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refused(folder, "cannot be opened")


def test_a_pickle_under_the_name_of_safetensors_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    refused(folder, "cannot be opened")
    assert not (tmp_path / "owned").exists()


def test_weights_that_do_not_fit_or_are_not_there_are_refused(folder: Path) -> None:
    stored = weights(tiny_model("roberta"))
    name = "roberta.encoder.layer.1.attention.self.key.weight"
    path = folder / "model.safetensors"
    safetensors.torch.save_file({k: v for k, v in stored.items() if k != name}, path, {"format": "pt"})
    refused(folder, f"the weights lack {name}$")
    safetensors.torch.save_file(stored | {name: torch.zeros(3, 3)}, path, {"format": "pt"})
    refused(folder, "cannot be opened")
    safetensors.torch.save_file({"x": torch.zeros(1)}, path, {"format": "pt"})
    refused(folder, "and more")
    edit(folder, vocab_size=0)
    refused(folder, "cannot be opened")
