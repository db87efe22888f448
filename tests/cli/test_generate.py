"""``guide generate``: what a causal model writes, where it is steered to, and wrong inputs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import guidance
from guidance.plan import Plan
from guidance.prompts import Prompt
from pipelines.stages import pretrain
from pipelines.statistics.head_scores import read_scores
from pipelines.storage.store import Store
from pipelines.training.steering import Writer
from tests import trainings
from tests.trainings import one_thread  # noqa: F401

BIAS = '[[guide]]\npattern = "marked"\nmechanism = "bias"\nlayers = [0]\n'
MIX = '[[guide]]\npattern = "marked"\nmechanism = "mix"\nof = ["value"]\nlearn = false\nlayers = [0]\n'


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A store with three small models: a causal one, one that carries a plan that fixes a head, and one of masked words."""
    folder = tmp_path_factory.mktemp("generate")
    store = Store(folder / "artifacts")
    text = trainings.sequences(store)
    shape: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "steps": 12, "learning_rate": 3e-2}
    fixed = folder / "fixed.toml"
    fixed.write_text('[[guide]]\npattern = "previous"\nmechanism = "fix"\nheads = [0]\n')
    made = {
        name: pretrain.run(text.reference, pretrain.Config(**settings, **shape), store=store).artifact
        for name, settings in {
            "plain": {"objective": "clm"},
            "fixed": {"objective": "clm", "plan": str(fixed)},
            "masked": {},
        }.items()
    }
    plan = folder / "steer.toml"
    plan.write_text(BIAS)
    return SimpleNamespace(store=store, plan=str(plan), **made)


@pytest.mark.parametrize("text_of_plan", [BIAS, MIX])
def test_it_writes_what_the_logits_of_whole_texts_say_with_the_plan(work: SimpleNamespace, text_of_plan: str) -> None:
    """Against a loop that reads the whole text anew for each token, without a cache."""
    folder, plan = work.plain.path, Plan.parse(text_of_plan)
    writer = Writer(folder, plan, strength=0.5, device="cpu")
    text = writer.tokenizer.decode(range(8, 14))
    encoding = writer.tokenizer.encode(text)
    first = encoding.ids.index(writer.tokenizer.encode(text, add_special_tokens=False).ids[0])
    span = encoding.offsets[first]
    written = writer.write(Prompt(text, (span,)), max_new_tokens=6)

    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    of_prompt: list[torch.Tensor] = []  # the logits after the prompt, without and with the plan
    for has_plan in (False, True):
        ids = encoding.ids[: max(n for n, part in enumerate(encoding.sequence_ids, 1) if part is not None)]
        if has_plan:
            row = Plan.parse(text_of_plan.replace("[0]\n", "[0]\nstrength = 0.5\n"))
            handle = guidance.install(model, row)
        for step in range(6):
            ids_BT = torch.tensor([ids])
            marked = torch.tensor([[n == first for n in range(len(ids))]])
            extra = (
                handle.at_inference(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), marked=marked)
                if has_plan
                else {}
            )
            with torch.no_grad():
                logits = model(input_ids=ids_BT, use_cache=False, **extra).logits[0, -1]
            of_prompt += [logits] if step == 0 else []
            ids.append(int(logits.argmax()))
            if ids[-1] == model.generation_config.eos_token_id:
                break
    assert f"<s> {text}{written}" == writer.tokenizer.decode(ids), (
        "with the space before the first word that was written"
    )
    assert not torch.equal(*of_prompt), "the plan does something"


def test_prompts_come_from_a_pipe_and_continuations_leave_as_json(
    work: SimpleNamespace, guide: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the <<value>> of\n\nan object\n")))
    flags = ["--store", work.store.root, "--max-new-tokens", 3, "--json", "--mark", "e"]
    done = guide("generate", work.plain.reference, "--plan", work.plan, *flags)
    assert done.code == 0, done.err
    first, empty, second = map(json.loads, done.out.splitlines())
    assert empty == {"prompt": "", "marked": [], "text": ""} and "an empty line has an empty answer" in done.err
    assert first["prompt"] == "the value of" and first["marked"] == ["e", "value", "e"]
    assert second["prompt"] == "an object" and second["marked"] == ["e"]
    assert isinstance(first["text"], str)


def test_marks_that_nothing_reads_and_a_lack_of_room_are_told_once(
    work: SimpleNamespace, guide: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the <<value>> of\n1 << 3\n<<an>> object\n")))
    done = guide("generate", work.plain.reference, "--store", work.store.root, "--max-new-tokens", 500, "--json")
    assert done.code == 0, done.err
    assert done.err.count("<< and >> are read as text") == 1
    assert "the model has room for " in done.err
    assert json.loads(done.out.splitlines()[0])["prompt"] == "the <<value>> of"


def test_samples_follow_the_seed(work: SimpleNamespace, guide: Callable[..., Any]) -> None:
    def sample(seed: int) -> str:
        flags = ["--sample", "--seed", seed, "--store", work.store.root]
        done = guide("generate", work.plain.reference, "the value", "--max-new-tokens", 12, *flags)
        assert done.code == 0, done.err
        return str(done.out)

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_a_plan_chooses_heads_by_their_scores(work: SimpleNamespace, guide: Callable[..., Any], tmp_path: Path) -> None:
    plan, scores = tmp_path / "best.toml", tmp_path / "heads.csv"
    plan.write_text('[[guide]]\npattern = "marked"\nmechanism = "bias"\nheads = ["most important 1"]\n')
    scores.write_text("layer,head,score\n0,0,0.2\n0,1,0.1\n1,0,0.3\n1,1,0.9\n")
    arguments = ["generate", work.plain.reference, "a <<value>>", "--plan", plan, "--store", work.store.root]
    assert "--scores" in guide(*arguments).err
    done = guide(*arguments, "--scores", scores)
    assert done.code == 0, done.err
    writer = Writer(work.plain.path, Plan.load(str(plan)), scores=read_scores(scores), device="cpu")
    assert [(site.layer, own.heads) for site, own in _acting(writer)] == [(1, (1,))]


def _acting(writer: Writer) -> list[Any]:
    """The sites at which a plan acts, with its assignments there."""
    return [(site, own) for site, plan in writer.handle.site_plans.items() for own in plan.assignments]


def test_a_model_follows_its_own_plan(work: SimpleNamespace) -> None:
    writer = Writer(work.fixed.path, device="cpu")
    assert not writer.reads_marks()
    guided = writer.write(Prompt("the value of the object"), max_new_tokens=4)
    model, handle = guidance.load(work.fixed.path, AutoModelForCausalLM)
    ids = writer.tokenizer.encode("the value of the object").ids
    end = writer.special["sep"]
    ids = ids[:-1] if ids[-1] == end else ids
    for _ in range(4):
        ids_BT = torch.tensor([ids])
        with torch.no_grad():
            extra = handle.at_inference(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT))
            ids.append(int(model(input_ids=ids_BT, use_cache=False, **extra).logits[0, -1].argmax()))
    assert writer.tokenizer.decode(ids, skip_special_tokens=True).endswith(guided)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plain", "a value", "--plan", "PLAN"], "nothing is marked"),
        (["plain", "a value", "--mark", "value"], "no guide looks"),
        (["plain", "a value", "--strength", 0.5], "--strength is for"),
        (
            ["plain", "a <<value>>", "--strength", 0.5, "--plan", "MASK"],
            "guide 'marked' at a strength of 0.5: a mask cannot",
        ),
        (["plain", "a value", "--scores", "heads.json"], "--scores are for"),
        (["plain", "a <<value>>", "--plan", "PLAN", "--scores", "heads.json"], "heads.json: cannot be read"),
        (["plain", "a value", "--top-p", 0.5], "are for --sample"),
        (["plain", "a value", "--seed", 5], "are for --sample"),
        (["plain", "caf\udce9"], "the text is not UTF-8"),
        (["plain", ""], "the prompt is empty"),
        (["plain", "a value " * 600], "has room for"),
        (["plain", "a value", "--plan", "preset:ag-causal"], "nothing in it acts"),
        (["plain", "a value", "--plan", "preset:rolez"], "rolez"),
        (["plain", "a <<value>>", "--plan", "preset:roles-unparsed"], "feature idf"),
        (["fixed", "a <<value>>", "--plan", "PLAN"], "plan of its own"),
        (["masked", "a value"], "does not continue texts"),
    ],
)
def test_wrong_inputs_are_refused(
    work: SimpleNamespace, guide: Callable[..., Any], arguments: list[Any], words: str, tmp_path: Path
) -> None:
    mask = tmp_path / "mask.toml"
    mask.write_text('[[guide]]\npattern = "marked"\nmechanism = "mask"\nheads = [0]\n')
    name, *rest = [{"PLAN": work.plan, "MASK": mask}.get(each, each) for each in arguments]
    done = guide("generate", getattr(work, name).reference, *rest, "--store", work.store.root)
    assert done.code == 2 and words in done.err, done.err
    assert done.out == ""


def test_a_row_that_is_learned_is_refused_where_nothing_was_learned(work: SimpleNamespace, tmp_path: Path) -> None:
    plan = Plan.parse('[[guide]]\npattern = "previous"\nmechanism = "mix"\n')
    with pytest.raises(guidance.PlanError, match="has learned nothing"):
        Writer(work.plain.path, plan, called="mine")
