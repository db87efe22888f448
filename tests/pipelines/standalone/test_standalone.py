"""A standalone folder is the guided model: in transformers without this package, saved again, and opened by its plan."""

from __future__ import annotations

import ast
import builtins
import copy
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoModelForMaskedLM, BertModel, PreTrainedTokenizerFast
from transformers.utils import logging

import guidance
from guidance.errors import InputError
from guidance.models.added_heads import Pal, ProjectedHeads
from guidance.plan import Plan
from pipelines.standalone.folder import Exported, export_standalone
from pipelines.storage.store import Store
from tests.guidance.models import DECODERS, PAD, SEQ2SEQ, batch, inputs_of, tiny_config, tiny_model
from tests.guidance.plans import EVERY, PLANS, guide, install_plan, installed
from tests.guidance.test_cache import EVERYTHING

SHAPING = [name for name, plan in PLANS.items() if plan.shapes_outputs]
CASES = [(family, name) for family in EVERY for name in SHAPING]
CLOSE = {"rtol": 0.0, "atol": 1e-5}

MIXED = Plan(
    (
        guide("fix", "next", 0),
        guide("mask", {"or": ["separator", "self"]}, 1),
        guide("gate", "", 2, input="query"),
        guide("mix", {"where": "abs(distance) <= 2 and key.frequency > 1"}, of=["stream"]),
        guide("bias", "period", 3, schedule="linear"),
        guide("attention_loss", "first", 1),
        guide("adversary", "", 1),
        guide("off", "", "pal:1"),
    ),
    Pal(width=8),
)
"""Rows that read the vocabulary, a condition, added heads, a schedule, a loss and an attack."""

OPENED: Mapping[str, Plan | str] = {
    "bert": MIXED,
    "modernbert": MIXED,
    "deberta-v2": MIXED,
    "t5": "mask",
    "gpt2": EVERYTHING,
}

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGH"


def tokenizer() -> Any:
    """Words of one letter, as the tiny models have ids for them."""
    vocabulary = {"[UNK]": 0, "[PAD]": PAD, "[MASK]": 2, "[CLS]": 3, "[SEP]": 4, ".": 5}
    vocabulary |= {letter: 6 + place for place, letter in enumerate(LETTERS)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    named = {"pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]", "cls": "[CLS]", "sep": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=20, **{f"{role}_token": token for role, token in named.items()}
    )


@pytest.fixture(autouse=True)
def _code_is_copied_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers copies the code of models before it imports it."""
    place = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(place))
    monkeypatch.syspath_prepend(str(place))
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def exported(tmp_path: Path, family: str, plan: Plan | str) -> tuple[Any, Path, Exported]:
    """A guided model, and the standalone folder that was written of it."""
    model, handle = installed(family, plan)
    guidance.save(handle, tmp_path / "model", tokenizer=tokenizer())
    out = tmp_path / "out"
    return model, out, export_standalone(str(tmp_path / "model"), Store(tmp_path / "store"), out)


def opened(folder: Path, auto_class: str, **options: Any) -> Any:
    return getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True, **options)


def logits(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits  # type: ignore[no-any-return]


def padded_left(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.flip(-1) for name, value in inputs.items()}


@pytest.mark.one_in(128)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_standalone_model_computes_what_the_guided_one_does(family: str, name: str, tmp_path: Path) -> None:
    right = {key: value for key, value in inputs_of(family).items() if key != "labels"}
    model, folder, done = exported(tmp_path, family, name)
    found = opened(folder, done.auto_class)
    again = tmp_path / "again"
    found.save_pretrained(again)
    others = [
        found,
        opened(again, done.auto_class),
        guidance.load(folder)[0],
        guidance.load(again, tokenizer=tokenizer())[0],
    ]
    for inputs in (right, padded_left(right)):
        wanted = logits(model, inputs)
        for other in others:
            torch.testing.assert_close(logits(other, inputs), wanted, **CLOSE)
    assert found.training is False and type(found).__name__ == f"Guided{type(model).__name__}"


def test_another_plan_in_the_configuration_gives_another_model(tmp_path: Path) -> None:
    """So the law above can fail."""
    model, folder, _ = exported(tmp_path, "bert", "off")
    config = json.loads((folder / "config.json").read_text())
    config["guide_plan"] = config["guide_plan"].replace("heads = [0]", "heads = [1]")
    (folder / "config.json").write_text(json.dumps(config))
    moved = logits(opened(folder, "AutoModelForMaskedLM"), batch()) - logits(model, batch())
    assert moved.abs().max() > 0.01


NOT_INSTALLED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("guidance", "pipelines", "cli"):
            raise ModuleNotFoundError(f"No module named {name!r}: it is blocked")

sys.meta_path.insert(0, Refuse())
"""

_OPENS = """
import json, torch, transformers

transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)
found = {}
for name, (folder, auto_class) in json.loads(sys.argv[1]).items():
    inputs = torch.load(folder + "/inputs.pt")
    auto = getattr(transformers, auto_class)
    model = auto.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32, device_map=None)
    half = auto.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    with torch.no_grad():
        found[name] = model(**inputs).logits
        assert half(**inputs).logits.dtype == torch.bfloat16
    if auto_class == "AutoModelForCausalLM":
        for beams in (1, 3):
            done = model.generate(**inputs, num_beams=beams, **json.loads(sys.argv[3]))
            found[f"{name}, {beams}"] = (done.sequences, done.logits)
    if auto_class != "AutoModelForMaskedLM":
        continue
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    fill = transformers.pipeline("fill-mask", model=folder, trust_remote_code=True)
    found[name + ", pipeline"] = fill("a b [MASK] d .", top_k=3)
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        continue
    sentences = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
    found[name + ", sentences"] = sentences.encode(["a b c .", "a", "d e f g h i"], convert_to_tensor=True)
assert not {"guidance", "pipelines", "cli"} & {name.partition(".")[0] for name in sys.modules}
torch.save(found, sys.argv[2])
"""

_GENERATION = {
    "max_new_tokens": 6,
    "min_new_tokens": 6,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}


@pytest.mark.parametrize(
    "families",
    [("bert", "gpt2"), pytest.param(("modernbert", "deberta-v2", "t5"), marks=pytest.mark.every)],
    ids="-".join,
)
def test_it_opens_where_this_package_is_not_installed(
    families: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, models = {}, {}
    for family in families:
        plan = OPENED[family]
        models[family], folder, written = exported(tmp_path / family, family, plan)
        inputs = {key: value for key, value in inputs_of(family).items() if key != "labels"}
        torch.save(padded_left(inputs) if family in DECODERS else inputs, folder / "inputs.pt")
        folders[family] = (str(folder), written.auto_class)
    result = tmp_path / "found.pt"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "its modules"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = [sys.executable, "-I", "-c", NOT_INSTALLED + _OPENS]
    command = [*code, json.dumps(folders), str(result), json.dumps(_GENERATION)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(result)
    words = tokenizer()
    for family, model in models.items():
        inputs = torch.load(Path(folders[family][0]) / "inputs.pt")
        torch.testing.assert_close(found[family], logits(model, inputs), **CLOSE)
        for beams in (1, 3) if family in DECODERS else ():
            wanted, given = model.generate(**inputs, num_beams=beams, **_GENERATION), found[f"{family}, {beams}"]
            torch.testing.assert_close(given, (wanted.sequences, wanted.logits), **CLOSE)
        if family in (*SEQ2SEQ, *DECODERS):
            continue
        masked = words(["a b [MASK] d ."], return_tensors="pt")
        likely = logits(model, masked)[0, 2].softmax(-1).topk(3)
        each = found[f"{family}, pipeline"]
        assert [one["token"] for one in each] == likely.indices.tolist()
        torch.testing.assert_close(torch.tensor([one["score"] for one in each]), likely.values, **CLOSE)
        if (sentences := found.get(f"{family}, sentences")) is not None:
            inputs = words(["a b c .", "a", "d e f g h i"], padding=True, return_tensors="pt")
            with torch.no_grad():
                states = model(**inputs, output_hidden_states=True).hidden_states[-1]
            mask = inputs["attention_mask"][:, :, None]
            torch.testing.assert_close(sentences, (states * mask).sum(1) / mask.sum(1), **CLOSE)


_OPENS_BARE = """
import torch, transformers

folder, result = sys.argv[1:]
model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    torch.save(model(**torch.load(folder + "/inputs.pt")).last_hidden_state, result)
"""


@pytest.mark.every
def test_an_encoder_with_added_heads_is_the_first_model_that_a_process_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers judges by the code whether the attention function can be chosen, and later models inherit what it found."""
    model = BertModel(tiny_config("bert")).eval()
    handle = guidance.install(model, Plan((guide("mask", "next", "pal:0"),), Pal(width=8)))
    for module in model.modules():
        if isinstance(module, ProjectedHeads):
            torch.nn.init.normal_(module.up.weight)  # which begins at 0
    guidance.save(handle, tmp_path / "model", tokenizer=tokenizer())
    folder, result = tmp_path / "out", tmp_path / "found.pt"
    export_standalone(str(tmp_path / "model"), Store(tmp_path / "store"), folder)
    inputs = {key: value for key, value in inputs_of("bert").items() if key != "labels"}
    torch.save(inputs, folder / "inputs.pt")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "its modules"))
    command = [sys.executable, "-I", "-c", NOT_INSTALLED + _OPENS_BARE, str(folder), str(result)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with torch.no_grad():
        torch.testing.assert_close(torch.load(result), model(**inputs).last_hidden_state, **CLOSE)


def test_the_code_imports_nothing_else_and_defines_all_that_it_names(tmp_path: Path) -> None:
    _, folder, done = exported(tmp_path, "bert", MIXED)
    text = (folder / "modeling_guided.py").read_text()
    assert len(text.splitlines()) == done.lines < 6000
    tree = ast.parse(text)
    imported = [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
    imported += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert packages == {"torch", "transformers"}
    bound = {*dir(builtins), "__name__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs) and node.name:
            bound.add(node.name)
    assert {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - bound == set()


def test_a_plan_brings_only_the_rows_that_it_names(tmp_path: Path) -> None:
    _, folder, _ = exported(tmp_path, "bert", Plan((guide("off", "", 0), guide("attention_loss", "next", 1))))
    text = (folder / "modeling_guided.py").read_text()
    assert "class Off(" in text and "_is_deberta" in text
    for needless in (
        "class Mix(",
        "class Gate(",
        "class AttentionLoss(",
        "class Adversary(",
        "def window(",
        "DebertaV2Layer",
    ):
        assert needless not in text


# what the folder holds


def test_losses_and_attacks_are_left_out_and_a_schedule_stays_where_it_was(tmp_path: Path) -> None:
    _, folder, done = exported(tmp_path, "bert", MIXED)
    plan = Plan.parse(json.loads((folder / "config.json").read_text())["guide_plan"])
    assert done.left_out == ("first", "adversary")
    assert [row.mechanism for row in plan.guides] == ["fix", "mask", "gate", "mix", "bias", "off"]
    assert [(row.schedule, row.strength) for row in plan.guides][4] == ("constant", 0.75)
    assert not any("adversary" in name for name in opened(folder, done.auto_class).state_dict())


def test_the_card_says_what_each_row_does_and_which_command_made_the_folder(tmp_path: Path) -> None:
    _, handle = installed("bert", MIXED)
    source = tmp_path / "my model"
    guidance.save(handle, source, tokenizer=tokenizer())
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    export_standalone(str(source), Store(tmp_path / "store"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"guide export '{source}' FOLDER --standalone" in card
    assert 'license: "apache-2.0"' in card and "AutoModelForMaskedLM.from_pretrained" in card and "hf upload" in card
    sentences = [line for line in card.splitlines() if line.startswith("- ")]
    assert len(sentences) == 7  # six rows, and the heads that [pal] adds
    assert sentences[4].startswith(
        "- `bias` with the pattern `period` (Every token looks at the full stops), layers all, heads 3 of"
    )
    assert Plan.parse(card.split("```toml\n")[1].split("```")[0]).guides[4].strength == 0.75


def test_the_tokenizer_comes_along_without_names_of_code(tmp_path: Path) -> None:
    _, handle = installed("bert", "off")
    source = tmp_path / "model"
    guidance.save(handle, source, tokenizer=tokenizer())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(
        json.dumps(settings | {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    export_standalone(str(source), Store(tmp_path / "store"), tmp_path / "out")
    assert "evil" not in (tmp_path / "out" / "tokenizer_config.json").read_text()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words("a b")["input_ids"] == tokenizer()("a b")["input_ids"]


# who opens it


def test_transformers_opens_nothing_else_in_its_place(tmp_path: Path) -> None:
    _, folder, _ = exported(tmp_path, "bert", "fix")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False)


def test_guide_opens_the_plan_and_the_weights_and_never_the_code(tmp_path: Path) -> None:
    model, folder, _ = exported(tmp_path, "bert", MIXED)
    (folder / "modeling_guided.py").write_text("raise SystemExit('the code ran')")
    other, handle = guidance.load(folder)
    assert type(other).__module__.startswith("transformers.models.bert")
    torch.testing.assert_close(logits(other, batch()), logits(model, batch()), **CLOSE)
    guidance.save(handle, tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())


@pytest.mark.parametrize(
    "change",
    [
        {"auto_map": {"AutoConfig": "modeling_guided.GuidedBertConfig", "AutoModel": "evil.Evil"}},
        {"auto_map": {"AutoModel": "modeling_guided.Evil"}},
        {"auto_map": "modeling_guided.GuidedBertModel"},
        {"guide_plan": None},
    ],
)
def test_guide_refuses_the_code_of_others(change: dict[str, Any], tmp_path: Path) -> None:
    _, folder, _ = exported(tmp_path, "bert", "off")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(InputError, match="own code, which is never run"):
        guidance.load(folder)


def test_heads_that_ask_transformers_for_what_is_below_them_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = type(model.config)(**{**model.config.to_dict(), "num_labels": 3})
    classifier = transformers.LlamaForSequenceClassification(config).eval()
    handle = guidance.install(classifier, Plan((guide("fix", "previous", 0),)))
    guidance.save(handle, tmp_path / "model", tokenizer=tokenizer())
    with pytest.raises(InputError, match="LlamaForSequenceClassification asks transformers for the model inside it"):
        export_standalone(str(tmp_path / "model"), Store(tmp_path / "store"), tmp_path / "out")


def test_gradients_are_those_of_the_guided_model_a_new_head_learns_and_copies_stand_alone(tmp_path: Path) -> None:
    guided, folder, done = exported(tmp_path, "bert", MIXED)
    same = opened(folder, done.auto_class)
    for model in (guided, same):
        model(**batch()).logits.square().mean().backward()
    wanted = dict(guided.named_parameters())
    for name, parameter in same.named_parameters():
        if parameter.grad is not None and ".guided." not in name:
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-5)
    model = opened(folder, "AutoModelForSequenceClassification", num_labels=3)
    model(**batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("guided.mix" in name for name in learned) and "classifier.weight" in learned
    copied = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert logits(copied, batch()).any() and not logits(model.eval(), batch()).any()


# what is refused


def refused(
    tmp_path: Path, plan: Plan, change: Callable[[Path], object] = lambda folder: None, **more: Any
) -> InputError:
    """The error for a model with a plan; nothing is written."""
    model = tiny_model("bert")
    source, out = tmp_path / "model", tmp_path / "out"
    guidance.save(model, source, tokenizer=tokenizer(), plan=plan, **more)
    change(source)
    with pytest.raises(InputError) as caught:
        export_standalone(str(source), Store(tmp_path / "store"), out)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "modules") == ["model"]
    return caught.value


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (guide("mask", "dependency", 0), "guide 'dependency': it reads the feature word,"),
        (guide("mask", "rare", 0, name="rarest"), "guide 'rarest': it reads the feature word,"),
        (guide("mask", {"and": ["next", "marked"]}, 0), "it reads the feature marked,"),
        (guide("bias", "conflict", 0), "guide 'conflict': it reads the table cooccurrence,"),
        (guide("off", "", "least important 2"), "guide 'off': its heads are selected by a table of scores"),
        (guide("bias", "next", 0, schedule="linear"), "guide 'next#2': it fades in the course of training, and"),
    ],
)
def test_what_does_not_follow_from_a_batch_is_refused_by_name(row: Any, named: str, tmp_path: Path) -> None:
    assert named in refused(tmp_path, Plan((guide("fix", "next", 1), row))).message


def test_a_model_that_no_plan_shapes_is_not_exported(tmp_path: Path) -> None:
    error = refused(tmp_path, Plan((guide("attention_loss", "next", 0),)))
    assert "no plan shapes this model, only its training" in error.message


@pytest.mark.parametrize("damaged", ["config.json", "model.safetensors"])
def test_a_damaged_folder_without_a_plan_is_refused_as_that(damaged: str, tmp_path: Path) -> None:
    error = refused(tmp_path, Plan(), lambda folder: (folder / damaged).write_bytes(b"{"))
    assert "no plan shapes" not in error.message and "transformers opens it" not in str(error.hint)


def test_adapters_and_folders_that_exist_are_refused(tmp_path: Path) -> None:
    def adapt(folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")

    error = refused(tmp_path, PLANS["off"], adapt)
    assert "an adapter of PEFT" in error.message and "merge" in str(error.hint)
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="exists already"):
        export_standalone(str(tmp_path / "model"), Store(tmp_path / "store"), tmp_path / "out")


def test_patterns_of_other_packages_are_refused_by_name(tmp_path: Path) -> None:
    from guidance.patterns import PATTERNS, Shift, register_pattern

    register_pattern("second", lambda tokens: Shift(2, tokens.valid_BT), source="a test", package="elsewhere")
    try:
        error = refused(tmp_path, Plan((guide("fix", "second", 0),)))
    finally:
        PATTERNS.remove("second")
    assert "'second' is code of the package 'elsewhere'" in error.message


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.standalone import folder

    def fails(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "_card", fails)
    _, handle = installed("bert", "off")
    guidance.save(handle, tmp_path / "model", tokenizer=tokenizer())
    with pytest.raises(OSError, match="No space"):
        export_standalone(str(tmp_path / "model"), Store(tmp_path / "store"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "modules") == ["model"]


def test_the_command_writes_it_and_says_what_it_left_out(guide: Callable[..., Any]) -> None:
    model = tiny_model("bert")
    guidance.save(install_plan(model, MIXED), "model", tokenizer=tokenizer())
    answer = guide("export", "model", "for-everyone", "--standalone")
    assert (answer.code, answer.out) == (0, "for-everyone\n")
    assert "left out, since they do nothing at inference: first, adversary" in answer.err
    assert "next: guide plan show for-everyone\n" in answer.err
    assert guide("plan", "show", "for-everyone").code == 0
    facts = json.loads(guide("export", "model", "another", "--standalone", "--json").out)
    assert (facts["path"], facts["auto_class"], facts["left_out"]) == (
        "another",
        "AutoModelForMaskedLM",
        ["first", "adversary"],
    )
    assert guide("export", "model", "another", "--standalone").code == 2
    assert guide("export", "nothing", "third", "--standalone").code == 2


@pytest.mark.parametrize("kind", ["sentence_transformers.models.Pooling", "evil.Evil"])
def test_settings_of_a_sentence_encoder_come_along_unless_they_name_code_of_others(kind: str, tmp_path: Path) -> None:
    _, handle = installed("bert", "off")
    source = tmp_path / "model"
    guidance.save(handle, source, tokenizer=tokenizer())
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": kind},
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / "1_Pooling" / "code.py").write_text("")
    export_standalone(str(source), Store(tmp_path / "store"), tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    own = {"modules.json", "1_Pooling", "1_Pooling/config.json"}
    assert found & {*own, "1_Pooling/code.py"} == (own if kind != "evil.Evil" else set())


def test_the_card_tells_of_the_weights_that_the_model_started_from(tmp_path: Path) -> None:
    _, handle = installed("bert", "off")
    source = tmp_path / "model"
    guidance.save(handle, source, tokenizer=tokenizer())
    (source / "README.md").write_text(
        '---\nlicense: "other"\n---\n\n## Data\n\n- a book: licence not stated\n\nIt travels.\n\n## Weights\n\n'
        "- weights of minilm: apache-2.0\n\nTraining started from these.\n"
    )
    export_standalone(str(source), Store(tmp_path / "store"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "licences:\n\n- a book: licence not stated\n\n" in card
    assert "They started from these:\n\n- weights of minilm: apache-2.0\n\nThe code" in card
