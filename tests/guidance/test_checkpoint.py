"""Model folders: ours open without this package, and nothing in a stranger's folder is ever run."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import guidance
from guidance.checkpoint import (
    EXTRA_FILE,
    MARKER,
    PLAN_FILE,
    load_model,
    model_files,
    new_model,
    read_config,
    restore,
    weights,
)
from guidance.checkpoint.opening import read_tokenizer
from guidance.errors import InputError, MachineError, NumericalError, PlanError, UnsupportedModel
from guidance.guide import Guide
from guidance.installation import Handle, install
from guidance.models.added_heads import Pal
from guidance.models.families import FAMILIES
from guidance.patterns.features import Vocabulary
from guidance.plan import Plan
from tests.guidance.models import batch, tiny_model
from tests.guidance.plans import Words, tables

PLAN = Plan((Guide("next", "attention_loss", heads=(0,)),))
four_families = pytest.mark.parametrize("family", ["bert", "roberta", "electra", "modernbert"])


def save(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in model_files(model, PLAN).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid folder of a RoBERTa model."""
    return save(tiny_model("roberta"), tmp_path / "model")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def test_a_model_without_width_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_model("roberta"), tmp_path / "model")
    edit(folder, hidden_size=0)
    refused(folder, "the model cannot be opened")


def refused(folder: Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(folder, AutoModelForMaskedLM)


class Evil:
    """Unpickling this creates a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


# our folders


@four_families
def test_a_saved_model_opens_with_transformers_alone_and_computes_the_same(family: str, tmp_path: Path) -> None:
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


def test_a_new_task_head_is_allowed_and_the_encoder_is_loaded(folder: Path) -> None:
    model = load_model(folder, AutoModelForSequenceClassification)
    original = load_model(folder, AutoModelForMaskedLM)
    assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)


# folders of strangers


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
    # a safetensors file of another name does not change that
    (folder / "other.safetensors").write_bytes(safetensors.torch.save({"x": torch.zeros(1)}))
    refused(folder, "no model.safetensors, only other.safetensors")
    assert not (tmp_path / "owned").exists()


def test_weights_under_another_name_are_refused_with_advice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    with pytest.raises(InputError, match=r"no model\.safetensors, only model\.fp16\.safetensors") as raised:
        load_model(folder, AutoModelForMaskedLM)
    assert "rename it to model.safetensors" in str(raised.value.hint)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
        ({"quantization_config": {"quant_method": "attacker"}}, "its weights are quantised"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "opens as a ministral"),
    ],
)
def test_folders_that_would_compute_something_else_are_refused(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    edit(folder, **settings)
    refused(folder, message)


def test_a_configuration_without_a_type_is_refused(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    del settings["model_type"]
    (folder / "config.json").write_text(json.dumps(settings))
    refused(folder, "it has no model_type")


def test_labels_may_have_any_name(folder: Path) -> None:
    labels = ["_", "__label__pos", "backbone"]
    edit(folder, id2label=dict(enumerate(labels)), label2id={label: n for n, label in enumerate(labels)})
    config = load_model(folder, AutoModelForMaskedLM).config
    assert config.label2id == {"_": 0, "__label__pos": 1, "backbone": 2} and config.id2label == dict(enumerate(labels))


def test_a_head_that_the_folder_names_must_be_in_its_weights(folder: Path) -> None:
    weights = {
        name: tensor
        for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items()
        if not name.startswith("lm_head.")
    }
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="the weights lack lm_head"):
        load_model(folder, None)
    assert load_model(folder, AutoModelForMaskedLM) is not None  # a new head is asked for


@pytest.mark.parametrize(
    ("special", "named", "delimiters", "mask"),
    [
        (["[CLS]", "[SEP]", "[MASK]"], {}, {0, 1}, 2),
        (["<s>", "</s>", "<mask>"], {"unk_token": "<s>"}, {0, 1}, 2),
        (["<|endoftext|>", "a", "b"], {}, {0}, None),
        (["<s>", "[CLS]", "x"], {"bos_token": "x"}, {2}, None),
        (["<|endoftext|>", "x"], {"bos_token": None, "eos_token": "x"}, {1}, None),  # Qwen's
    ],
)
def test_special_tokens_that_no_file_names_are_the_usual_ones(
    tmp_path: Path, special: list[str], named: dict[str, Any], delimiters: set[int], mask: int | None
) -> None:
    words = tokenizers.models.WordLevel({token: number for number, token in enumerate(special)})
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, **named}))
    columns = Vocabulary.from_tokenizer(read_tokenizer(tmp_path)).columns_V
    assert set(columns["delimiter"].nonzero().flatten().tolist()) == delimiters
    assert (None if "mask_token" not in columns else int(columns["mask_token"].nonzero())) == mask


@pytest.mark.parametrize("open_", [load_model, new_model])
def test_keys_that_could_name_kernels_are_dropped(open_: Any, folder: Path) -> None:
    hostile = {
        "_attn_implementation": "attacker/kernel",
        "_attn_implementation_internal": "attacker/kernel",
        "attn_implementation": "attacker/kernel",
        "_experts_implementation": "attacker/kernel",
        "name_or_path": "attacker/model",
        "experts_implementation": "attacker/kernel",
        "backbone": "attacker/model",
        "transformers_weights": "evil.bin",
        "to_dict": "attacker",
        "surprise": 1,
    }
    edit(folder, **hostile)
    model = open_(folder, AutoModelForMaskedLM)
    assert model.config._attn_implementation == "sdpa"
    assert "attacker" not in json.dumps(model.config.to_dict(), default=str)
    assert not hasattr(model.config, "surprise") and not hasattr(model.config, "transformers_weights")


EARLIER: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "num_key_value_heads": 2},
    "mistral": {"rope_theta": 1e6, "rope_scaling": None, "sliding_window": None},
    "qwen2": {
        "rope_theta": 1e6,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "head_dim": 48,
    },
    "gemma3_text": {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "sliding_window_pattern": 3},
    "phi": {"rope_theta": 2e4, "partial_rotary_factor": 0.4},
    "gpt_neox": {"rotary_emb_base": 2e4, "rotary_pct": 0.5},
    "smollm3": {"rope_theta": 5e6, "no_rope_layer_interval": 3},
    "modernbert": {"global_rope_theta": 9e4, "local_rope_theta": 8e3, "global_attn_every_n_layers": 4},
    "t5": {"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"},
    "gpt2": {"n_embd": 24, "n_head": 2, "summary_last_dropout": 0.3},
    "deberta-v2": {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm", "cls_dropout": 0.3},
}
"""Keys that files of published models have and that configurations of today do not declare, beside some that they do."""


@pytest.mark.parametrize("model_type", EARLIER)
def test_a_configuration_of_an_earlier_version_is_read_as_transformers_reads_it(model_type: str) -> None:
    ours = read_config(json.dumps({"model_type": model_type} | EARLIER[model_type]).encode(), "x")
    expected = AutoConfig.for_model(model_type, **EARLIER[model_type])
    assert ours.to_dict() == expected.to_dict() != AutoConfig.for_model(model_type).to_dict()


def test_every_family_with_rotary_positions_reads_their_base() -> None:
    rotary = [t for t in _model_types() if hasattr(CONFIG_MAPPING[t](), "rope_parameters")]
    assert {"llama", "olmo2", "cohere", "granite", "starcoder2", "exaone4"} <= set(rotary)
    for model_type in rotary:
        base = {"gpt_neox": "rotary_emb_base", "modernbert": "global_rope_theta"}.get(
            model_type.split("-")[0], "rope_theta"
        )
        ours = read_config(json.dumps({"model_type": model_type, base: 77_777.0}).encode(), "x")
        assert "77777.0" in repr(ours.rope_parameters), model_type


def _model_types() -> list[str]:
    """The model types of all families that can be guided."""
    return [t for t in CONFIG_MAPPING if CONFIG_MAPPING[t].__module__.split(".")[-2] in FAMILIES]


@pytest.mark.parametrize(
    "old", [{"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}]
)
def test_a_model_of_an_earlier_version_computes_what_it_computes_in_transformers(old: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in settings.items() if key != "rope_parameters"} | old)
    )
    inputs = {"input_ids": torch.arange(24)[None] % 9 + 4}
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(**inputs).logits
    assert not torch.allclose(model.eval()(**inputs).logits, expected)
    torch.testing.assert_close(load_model(tmp_path, AutoModelForCausalLM)(**inputs).logits, expected)


DIRECT = re.compile(
    r"\b(?:Auto\w+|\w*Config|\w*Tokenizer\w*|\w*Model\w*|auto_class|model_class|opened_by)"
    r"\.(?:from_pretrained|from_dict|from_json_file|get_config_dict)\("
)
"""Calls that would read a configuration, weights or a tokenizer past `guidance.checkpoint.opening`."""


def test_folders_are_opened_in_one_place_only() -> None:
    root = Path(guidance.__file__).parents[1]
    found = {
        (path.relative_to(root).as_posix(), call)
        for package in ("guidance", "pipelines", "cli")
        for path in sorted((root / package).rglob("*.py"))
        for call in DIRECT.findall(path.read_text())
    }
    assert found == {
        ("guidance/checkpoint/opening.py", "model_class.from_pretrained("),
        ("guidance/checkpoint/opening.py", "GenerationConfig.from_pretrained("),
        ("guidance/checkpoint/adapters.py", "PeftConfig.from_pretrained("),
        ("guidance/checkpoint/adapters.py", "PeftModel.from_pretrained("),
        ("pipelines/training/model_card.py", "AutoTokenizer.from_pretrained("),
        ("pipelines/training/live_text.py", "AutoTokenizer.from_pretrained("),
        ("pipelines/standalone/folder.py", "AutoTokenizer.from_pretrained("),
    }, "a model folder may come from a stranger; guidance.checkpoint opens it, the last three are texts for people"


@pytest.mark.parametrize(("key", "value"), [("return_dict", False), ("chunk_size_feed_forward", 7)])
def test_how_a_model_was_called_is_not_taken_over(key: str, value: Any, folder: Path) -> None:
    expected = load_model(folder, AutoModelForMaskedLM)(**batch()).logits
    edit(folder, **{key: value})
    torch.testing.assert_close(load_model(folder, AutoModelForMaskedLM)(**batch()).logits, expected)


@pytest.mark.parametrize("open_", [load_model, new_model])
def test_an_unknown_activation_is_refused(open_: Any, folder: Path) -> None:
    edit(folder, hidden_act="nothing")
    with pytest.raises(InputError, match=r"cannot be opened \(unknown name 'nothing'\)"):
        open_(folder, AutoModelForMaskedLM)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, folder: Path) -> None:
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    name = "roberta.encoder.layer.0.output.dense.weight"
    stored[name][1, 2:5] = value
    safetensors.torch.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    for open_ in (lambda: load_model(folder, AutoModelForMaskedLM), lambda: guidance.load(folder)):
        with pytest.raises(NumericalError, match=f"{folder}: {name} has 3 values of .* that are not finite"):
            open_()


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
        (b'{"model_type": ' + b"9" * 5000 + b"}", r"not a model configuration \(a number has too many digits\)"),
        (b"{}", "it has no model_type"),
        (b'{"model_type": "attacker"}', "no architecture 'attacker'"),
        (b'{"model_type": ["roberta"]}', "no architecture"),
        (b'{"model_type": "roberta", "hidden_size": "wide"}', "not a configuration of roberta"),
        (b'{"model_type": "roberta", "id2label": 3}', "not a configuration of roberta"),
        (b'{"model_type": "roberta", "num_attention_heads": 0}', "num_attention_heads is 0, not 1 to 10,000"),
        (b'{"model_type": "roberta", "num_hidden_layers": 1000000000}', "num_hidden_layers is 1000000000, not 0 to"),
        (b'{"model_type": "clip", "text_config": {"num_attention_heads": 0}}', "num_attention_heads is 0"),
    ],
)
def test_an_invalid_configuration_is_refused(data: bytes, message: str) -> None:
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


def test_weights_that_are_missing_or_do_not_fit_are_refused(folder: Path) -> None:
    stored = weights(tiny_model("roberta"))
    name = "roberta.encoder.layer.1.attention.self.key.weight"
    path = folder / "model.safetensors"
    safetensors.torch.save_file({k: v for k, v in stored.items() if k != name}, path, {"format": "pt"})
    refused(folder, f"the weights lack {name}$")
    wide = stored[name].shape[0]
    safetensors.torch.save_file(stored | {name: torch.zeros(3, 3)}, path, {"format": "pt"})
    refused(folder, rf"{name} has the shape \(3, 3\), and by config.json it is \({wide}, {wide}\)$")
    safetensors.torch.save_file({"x": torch.zeros(1)}, path, {"format": "pt"})
    refused(folder, "and more")
    edit(folder, vocab_size=0)
    refused(folder, "cannot be opened")


# guided models


def gated_plan() -> Plan:
    """A plan that adds parameters and matters at inference."""
    return Plan((Guide(mechanism="gate"), Guide("window", "mask", heads=(0,), options={"size": 3})))


SHAPING = {
    "mask": Plan((Guide("window", "mask", heads=(0,), options={"size": 3}),)),
    "fix": Plan((Guide("next", "fix", heads=(1,)),)),
    "off": Plan((Guide(mechanism="off", heads=(2,)),)),
    "gate": gated_plan(),
    "pal": Plan((Guide("previous", "fix", heads=("pal:0",)),), Pal(width=8, heads=2)),
}
PLANS = {"attention_loss": PLAN, "adversary": Plan((Guide(mechanism="adversary"),)), **SHAPING}
every_plan = pytest.mark.parametrize("kind", PLANS)


def installed(family: str, plan: Plan, **options: Any) -> Handle:
    """A guided model whose added parameters have random values."""
    handle = install(tiny_model(family), plan, **options)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in handle.model.named_parameters():
        if ".guided." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return handle


def same_state(one: PreTrainedModel, other: PreTrainedModel) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


@pytest.mark.parametrize(
    ("kind", "family"), [*((kind, "bert") for kind in PLANS), ("pal", "roberta"), ("gate", "modernbert")]
)
def test_a_loaded_guided_model_equals_the_saved_one(kind: str, family: str, tmp_path: Path) -> None:
    handle = installed(family, PLANS[kind])
    expected = handle.model(**batch()).logits
    guidance.save(handle, tmp_path / "model")
    model, again = guidance.load(tmp_path / "model")
    assert again.plan == handle.plan and again.model is model and not model.training
    same_state(handle.model, model)
    assert torch.equal(model(**batch()).logits, expected)
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()(**batch()).logits
    assert torch.equal(plain, expected) == (kind not in SHAPING)


@every_plan
def test_added_parameters_are_stored_apart_from_the_models_weights(kind: str, tmp_path: Path) -> None:
    handle = installed("bert", PLANS[kind])
    guidance.save(handle, tmp_path)
    added = {name for name in handle.model.state_dict() if ".guided." in name}
    assert bool(added) == (kind in ("gate", "pal", "adversary"))
    assert (tmp_path / EXTRA_FILE).exists() == bool(added)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert set(stored) - {MARKER} == set(weights(tiny_model("bert")))
    assert (MARKER in stored) == (kind in SHAPING)
    if added:
        assert set(safetensors.torch.load_file(tmp_path / EXTRA_FILE)) == added


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_another_precision_is_loaded_in_that_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    handle = install(tiny_model("bert").to(dtype), gated_plan())
    expected = handle.model(**batch()).logits
    guidance.save(handle, tmp_path)
    model, _ = guidance.load(tmp_path)
    same_state(handle.model, model)
    assert torch.equal(model(**batch()).logits, expected)
    assert load_model(tmp_path, AutoModelForMaskedLM).dtype == torch.float32


def test_inputs_that_only_losses_read_are_not_needed_to_load(tmp_path: Path) -> None:
    plan = Plan((Guide("conflict", "logit_loss", heads=(0,)),))
    handle = install(tiny_model("bert"), plan, Words(), tables=tables())
    expected = handle.model(**batch()).logits
    guidance.save(handle, tmp_path)
    model, again = guidance.load(tmp_path, tokenizer=Words())
    assert torch.equal(model(**batch()).logits, expected)
    measured = again.guide(batch()["input_ids"], mispredicted=batch()["input_ids"] > 7)
    with pytest.raises(InputError, match="no table 'cooccurrence'"):
        model(**batch(), guidance=measured)
    with pytest.raises(PlanError, match="needs the table cooccurrence"):
        guidance.load(tmp_path, tokenizer=Words(), training=True)
    _, again = guidance.load(tmp_path, tokenizer=Words(), training=True, tables=tables())
    assert again.tables


def test_saving_a_loaded_model_writes_the_same_bytes(tmp_path: Path) -> None:
    guidance.save(installed("bert", gated_plan()), tmp_path / "one")
    guidance.save(guidance.load(tmp_path / "one")[1], tmp_path / "two")
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {"config.json", "model.safetensors", PLAN_FILE, EXTRA_FILE}
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_model_can_be_loaded_with_another_task_head(tmp_path: Path) -> None:
    handle = installed("bert", gated_plan())
    guidance.save(handle, tmp_path)
    model, _ = guidance.load(tmp_path, AutoModelForSequenceClassification)
    assert type(model).__name__ == "BertForSequenceClassification"
    for name, tensor in model.state_dict().items():
        if ".guided." in name:
            assert torch.equal(tensor, handle.model.state_dict()[name])


def test_the_generation_configuration_is_saved_and_loaded(tmp_path: Path) -> None:
    config = BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=40,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    model.generation_config.num_beams = 3
    guidance.save(install(model, SHAPING["mask"]), tmp_path)
    assert guidance.load(tmp_path)[0].generation_config.num_beams == 3


def test_patterns_that_need_a_tokenizer_use_the_one_in_the_folder(tmp_path: Path) -> None:
    plan = Plan((Guide("period", "mask", heads=(0,)),))
    handle = installed("bert", plan, tokenizer=tokenizer())
    expected = handle.model(**batch()).logits
    guidance.save(handle, tmp_path / "with", tokenizer=tokenizer())
    model, _ = guidance.load(tmp_path / "with")
    assert torch.equal(model(**batch()).logits, expected)
    guidance.save(handle, tmp_path / "without")
    with pytest.raises(InputError, match="needs the feature"):
        guidance.load(tmp_path / "without")
    model, _ = guidance.load(tmp_path / "without", tokenizer=tokenizer())
    assert torch.equal(model(**batch()).logits, expected)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<s>", "<pad>", "</s>", ".", *(f"w{number}" for number in range(36))]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, "w0")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), cls_token="<s>", sep_token="</s>", pad_token="<pad>"
    )


# folders that need this package say so


OPEN = """
import sys; sys.modules["guidance"] = None
from transformers import AutoModel, AutoModelForMaskedLM, pipeline
for folder in {folders!r}:
    for opening in (AutoModelForMaskedLM.from_pretrained, AutoModel.from_pretrained,
                    lambda f: pipeline("fill-mask", model=f), lambda f: pipeline("feature-extraction", model=f)):
        print("<opened>", file=sys.stderr, flush=True)
        opening(folder)
"""


def test_opening_a_model_without_this_package_and_its_plan_warns(tmp_path: Path) -> None:
    """The warning appears under the default settings of transformers."""
    words = tokenizer()
    words.add_special_tokens({"mask_token": "w1"})
    folders = [str(tmp_path / name) for name in ("shaped", "ordinary")]
    for folder, plan in zip(folders, (SHAPING["mask"], PLAN), strict=True):
        guidance.save(install(tiny_model("bert"), plan, words), folder, tokenizer=words)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TRANSFORMERS_")}
    script = OPEN.format(folders=folders)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean, check=True)
    outputs = done.stderr.split("<opened>")[1:]
    assert [MARKER in text and "UNEXPECTED" in text for text in outputs] == [True] * 4 + [False] * 4, done.stderr


def test_guidance_load_gives_no_warning_and_removes_the_marker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    guidance.save(installed("bert", gated_plan()), tmp_path)
    transformers.utils.logging.set_verbosity_warning()
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        model, _ = guidance.load(tmp_path)
    assert not caplog.records and MARKER not in model.state_dict()
    with caplog.at_level(logging.WARNING):
        load_model(tmp_path, AutoModelForMaskedLM)
    # the record may arrive twice, depending on how other tests have left the loggers
    assert {record.name for record in caplog.records} == {"guide.checkpoint"}
    assert "its plan is not applied" in caplog.text


def test_the_configuration_names_the_plan_only_if_it_matters_at_inference(tmp_path: Path) -> None:
    for name, plan in (("shaped", SHAPING["fix"]), ("ordinary", PLAN)):
        guidance.save(install(tiny_model("bert"), plan), tmp_path / name)
        config = AutoConfig.from_pretrained(tmp_path / name)
        assert getattr(config, "guide_plan", None) == (PLAN_FILE if name == "shaped" else None)


def test_a_model_saved_again_without_its_plan_differs_from_an_ordinary_one(tmp_path: Path) -> None:
    guidance.save(installed("bert", gated_plan()), tmp_path / "ours")
    AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    with pytest.raises(InputError, match="the weights were saved without the plan of this model"):
        guidance.load(tmp_path / "theirs")
    (tmp_path / "ours" / PLAN_FILE).unlink()
    with pytest.raises(InputError, match="needs the plan that guided it"):
        guidance.load(tmp_path / "ours")
    tiny_model("bert").save_pretrained(tmp_path / "ordinary")
    with pytest.raises(InputError, match="an ordinary model") as found:
        guidance.load(tmp_path / "ordinary")
    assert "install(model, plan)" in str(found.value.hint)
    with pytest.raises(InputError, match="not a model folder"):
        guidance.load(tmp_path / "absent")


# files that do not fit


def refused_after(folder: Path, message: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Assert that `load` refuses the folder after a change of its added parameters."""
    path = folder / EXTRA_FILE
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(InputError, match=message):
        guidance.load(folder)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("lacks (.*)", lambda tensors, name: tensors.pop(name)),
        ("has bert.surprise.guided.x", lambda tensors, _: tensors.update({"bert.surprise.guided.x": torch.ones(1)})),
        ("NAME has shape", lambda tensors, name: tensors.update({name: torch.ones(3, 3, 3)})),
        ("NAME is not finite", lambda tensors, name: tensors[name].view(-1)[:1].fill_(float("nan"))),
        ("NAME is not finite", lambda tensors, name: tensors[name].view(-1)[:1].fill_(float("inf"))),
        ("NAME is torch.float64", lambda tensors, name: tensors.update({name: tensors[name].double()})),
    ],
)
def test_added_parameters_that_do_not_fit_are_refused_by_name(
    message: str, change: Callable[[dict[str, Any], str], Any], tmp_path: Path
) -> None:
    handle = installed("bert", gated_plan())
    guidance.save(handle, tmp_path)
    name = sorted(name for name in handle.model.state_dict() if ".guided." in name)[-1]
    refused_after(tmp_path, message.replace("NAME", name).replace("(.*)", name), lambda tensors: change(tensors, name))


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps({"x": 1})])
def test_a_damaged_file_of_added_parameters_is_refused(data: bytes, tmp_path: Path) -> None:
    guidance.save(installed("bert", gated_plan()), tmp_path)
    (tmp_path / EXTRA_FILE).write_bytes(data)
    with pytest.raises(InputError, match="cannot be opened"):
        guidance.load(tmp_path)
    (tmp_path / EXTRA_FILE).unlink()
    with pytest.raises(InputError, match=r"lacks bert\.encoder\.layer\.0"):
        guidance.load(tmp_path)


@pytest.mark.parametrize(
    "named",
    [None, [], "BertModel", ["pipeline"], ["PreTrainedModel"], ["os.system"], [3], ["RobertaModel"], ["A", "B"]],
)
def test_only_a_fitting_class_of_transformers_is_opened(named: Any, tmp_path: Path) -> None:
    guidance.save(installed("bert", gated_plan()), tmp_path)
    edit(tmp_path, architectures=named)
    with pytest.raises(InputError, match="names no model of transformers"):
        guidance.load(tmp_path)
    model, _ = guidance.load(tmp_path, AutoModelForMaskedLM)
    assert type(model).__name__ == "BertForMaskedLM"


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    guidance.save(installed("bert", gated_plan()), tmp_path)
    (tmp_path / PLAN_FILE).write_text(Plan((Guide("next", "fix", heads=(17,)),)).dumps())
    with pytest.raises(InputError, match="17 does not exist"):
        guidance.load(tmp_path)
    (tmp_path / PLAN_FILE).write_text("[[guide]]\nnonsense = 3\n")
    with pytest.raises(InputError, match=PLAN_FILE):
        guidance.load(tmp_path)


def test_restoring_weights_of_another_model_is_refused(tmp_path: Path) -> None:
    guidance.save(installed("bert", gated_plan()), tmp_path)
    other = install(tiny_model("bert", hidden_size=32), gated_plan())
    with pytest.raises(InputError, match="has shape"):
        restore(other.model, tmp_path, other.plan)
    with pytest.raises(InputError, match="another plan"):
        restore(other.model, tmp_path, PLAN)


# saving


def test_a_guided_model_is_not_saved_without_its_plan(tmp_path: Path) -> None:
    handle = installed("bert", gated_plan())
    with pytest.raises(InputError, match="saved with its plan"):
        guidance.save(handle.model, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    guidance.save(handle.model, tmp_path / "x", plan=handle.plan)
    same_state(guidance.load(tmp_path / "x")[0], handle.model)


def test_a_folder_with_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("twenty years")
    with pytest.raises(InputError, match=r"holds 'thesis.tex' and is no model folder"):
        guidance.save(installed("bert", gated_plan()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(MachineError, match="cannot be written"):
        guidance.save(installed("bert", gated_plan()), tmp_path / "thesis.tex" / "x")


def test_a_model_folder_is_replaced_without_leftovers(tmp_path: Path) -> None:
    guidance.save(installed("bert", gated_plan()), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    handle = install(tiny_model("bert", seed=5), PLAN)
    guidance.save(handle, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", PLAN_FILE, "notes.txt"}
    same_state(guidance.load(tmp_path)[0], handle.model)


@pytest.mark.parametrize("old", [False, True])
def test_a_crash_while_saving_leaves_the_old_model_the_new_one_or_none(
    old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crash at every system call that changes the folder."""
    before, after = install(tiny_model("bert", seed=5), PLAN), installed("bert", gated_plan())
    calls = 0

    def dying(function: Callable[..., Any], last: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > last:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    for last in range(100):
        folder = tmp_path / str(last)
        if old:
            guidance.save(before, folder)
            (folder / "notes.txt").write_text("mine")
        for last_call in (last, 3):  # and once more
            calls = 0
            with monkeypatch.context() as patch:
                for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink")):
                    patch.setattr(owner, name, dying(getattr(owner, name), last_call))
                try:
                    guidance.save(after, folder)
                except KeyboardInterrupt:
                    pass
                else:
                    assert last > 8
                    return
            if (folder / "config.json").exists():
                same_state(guidance.load(folder)[0], before.model if old else after.model)
        guidance.save(after, folder)
        same_state(guidance.load(folder)[0], after.model)
    raise AssertionError("no save was whole")


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "deberta-v2"])
def test_weights_of_a_plan_are_found_with_and_without_the_head_of_their_model(family: str, tmp_path: Path) -> None:
    plan, ids = Plan((Guide("previous", "mix"),)), torch.tensor([[3, 4, 5, 6, 7]])
    model = tiny_model(family)
    handle = install(model, plan)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mix0." in name:
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
    (whole, trunk) = (tmp_path / "whole", tmp_path / "trunk")
    guidance.save(handle, whole)
    expected = model(ids, output_hidden_states=True).hidden_states[-1]
    bare, handle = guidance.load(whole, AutoModel)
    assert type(bare) is type(model.base_model)
    torch.testing.assert_close(bare(ids).last_hidden_state, expected)
    guidance.save(handle, trunk)
    classifier, _ = guidance.load(trunk, AutoModelForSequenceClassification)
    torch.testing.assert_close(classifier(ids, output_hidden_states=True).hidden_states[-1], expected)


# the package


def test_importing_the_package_does_not_import_torch() -> None:
    script = (
        "import sys, guidance\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert set(guidance.__all__) <= set(dir(guidance))\n"
        "for name in guidance.__all__: assert getattr(getattr(guidance, name), '__module__', 'guidance.').startswith('guidance.'), name\n"
        "assert 'torch' in sys.modules\n"
        "try: guidance.nonsense\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "has no attribute 'nonsense'" in done.stdout


def test_a_padding_token_that_is_no_token_of_the_model_is_none() -> None:
    handles = [
        install(tiny_model("llama", pad_token_id=pad), Plan((Guide("previous", "mask", heads=(0,)),)))
        for pad in (-1, 0)
    ]
    ids = torch.tensor([[3, 4, 5, 6]])
    one, other = (handle.model(ids, guidance=handle.guide(ids)).logits for handle in handles)
    torch.testing.assert_close(one, other)


def test_a_decoder_that_was_made_to_see_later_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="is_causal = false in its configuration lets tokens see later ones"):
        install(tiny_model("qwen2", is_causal=False), Plan((Guide("previous", "attention_loss", heads=(0,)),)))
