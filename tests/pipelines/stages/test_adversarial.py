"""FreeLB and SMART: gradients of whole steps against plain PyTorch; formulas; batches; resuming; refusals."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

from guidance.checkpoint import load_model
from guidance.errors import InputError, Interrupted, PlanError
from guidance.mechanisms.attacks import seeds_of
from guidance.perturbations import freelb_ascend, freelb_start, perturbed, smart_start, smart_step
from pipelines.stages import dataset, finetune
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.batches import Examples
from pipelines.training.cluster import StopRequest
from pipelines.training.learners.guided import Learner
from pipelines.training.learners.perturbed import _GUIDE
from tests import finetunings
from tests.trainings import one_thread  # noqa: F401

BOUND = 0.05
VISIBLE: dict[str, Any] = {
    "steps": 1,
    "epochs": None,
    "batch_size": 12,
    "learning_rate": 1.0,
    "warmup_steps": 0,
    "warmup_fraction": 0,
    "schedule": "constant",
    "weight_decay": 0,
    "clip": 0,
    "epsilon": 1.0,
    "seed": 3,
}
"""One step of AdamW in which each weight moves by g / (|g| + 1), so that gradients can be read off the weights."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Artifact:
    rows = finetunings.reviews(18)
    rows[0]["text"] += " and so on and on"
    return finetunings.build(
        store, tmp_path_factory.mktemp("data"), {"train": rows[:12], "test": rows[12:]}, valid_fraction=0
    )


@pytest.fixture(scope="module")
def first(store: Store, data: Artifact) -> Artifact:
    """A model without dropout to start from."""
    quiet = {"dropout": 0, "attention_dropout": 0}
    return finetunings.train(store, data, architecture="bert", steps=30, epochs=None, **quiet).artifact


def trained(store: Store, data: Artifact, **changes: Any) -> Artifact:
    return finetunings.train(store, data, **changes).artifact


def weights(folder: Path) -> Mapping[str, Tensor]:
    return load_model(folder, AutoModelForSequenceClassification).state_dict()


def gradients_of_a_step(store: Store, data: Artifact, first: Artifact, **changes: Any) -> dict[str, Tensor]:
    made = trained(store, data, init=first.reference, **VISIBLE, **changes)
    before, after = weights(first.path), weights(made.path)
    moved = {name: before[name].double() - after[name].double() for name in before if before[name].is_floating_point()}
    return {name: delta / (1 - delta.abs()) for name, delta in moved.items()}


class Plain:
    """The model, and the batch of all training examples, as tensors."""

    def __init__(self, store: Store, first: Artifact) -> None:
        self.model: Any = load_model(first.path, AutoModelForSequenceClassification).eval()
        sequences = store.load_input(first, "sequences")
        rows = Examples.read(sequences, "train", self.model.config.vocab_size, features=(), masks=None, own=("text",))
        lists = [torch.as_tensor(rows[number]) for number in range(len(rows))]
        self.ids = torch.nn.utils.rnn.pad_sequence(
            lists, batch_first=True, padding_value=self.model.config.pad_token_id
        )
        self.valid = torch.nn.utils.rnn.pad_sequence([torch.ones(len(ids)) for ids in lists], batch_first=True).bool()
        self.labels = torch.tensor([self.model.config.label2id[label] for label in rows.labels])
        seeds = Learner.seeds(3, [(0, number) for number in range(len(rows))])
        self.seeds = seeds_of(seeds, "encoder", 0, _GUIDE)
        self.width = self.model.config.hidden_size

    def logits(self, delta: Tensor | None = None) -> Tensor:
        embedded = self.model.bert.embeddings.word_embeddings(self.ids)
        embedded = embedded if delta is None else embedded + delta
        found: Tensor = self.model(inputs_embeds=embedded, attention_mask=self.valid.long()).logits
        return found

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.double() for name, p in self.model.named_parameters() if p.grad is not None}


def check(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-3)


def test_a_step_of_freelb_is_that_of_plain_torch(store: Store, data: Artifact, first: Artifact) -> None:
    settings = {"adversarial_steps": 3, "adversarial_bound": BOUND, "adversarial_rate": 0.04}
    found = gradients_of_a_step(store, data, first, adversarial="freelb", **settings)
    plain = Plain(store, first)
    delta = freelb_start(plain.seeds, plain.valid, plain.width, 0.02)
    for _ in range(3):
        delta = delta.detach().requires_grad_(True)
        loss = functional.cross_entropy(plain.logits(delta), plain.labels) / 3
        loss.backward()
        climbed = []
        for row, gradient in zip(delta.detach(), delta.grad, strict=True):
            row = row + 0.04 * gradient / max(float(gradient.norm()), 1e-8)
            climbed.append(row * BOUND / row.norm() if row.norm() > BOUND else row)
        delta = torch.stack(climbed)
    check(found, plain.gradients())


def test_a_step_of_smart_is_that_of_plain_torch(store: Store, data: Artifact, first: Artifact) -> None:
    settings = {"adversarial_weight": 50.0, "adversarial_rate": 0.05}
    found = gradients_of_a_step(store, data, first, adversarial="smart", **settings)
    plain = Plain(store, first)
    clean = plain.logits()
    delta = smart_start(plain.seeds, plain.valid, plain.width, 1e-5).requires_grad_(True)
    target = clean.detach().softmax(-1)
    moved = functional.kl_div(plain.logits(delta).log_softmax(-1), target, reduction="sum")
    (gradient,) = torch.autograd.grad(moved, delta)
    step = torch.zeros_like(gradient)
    for b in range(len(step)):
        for t in range(int(plain.valid[b].sum())):
            step[b, t] = 0.05 * gradient[b, t] / (gradient[b, t].abs().max() + 1e-6)
    attacked = plain.logits(step)
    both = [
        functional.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="batchmean")
        for one, other in ((clean, attacked), (attacked, clean))
    ]
    (functional.cross_entropy(clean, plain.labels) + 50 * (both[0] + both[1])).backward()
    check(found, plain.gradients())


def test_micro_batches_change_nothing(store: Store, data: Artifact, first: Artifact) -> None:
    for kind in ("freelb", "smart"):
        whole, parts = (
            gradients_of_a_step(store, data, first, adversarial=kind, micro_batches=number) for number in (1, 3)
        )
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, atol=1e-5, rtol=1e-3)


def test_noise_is_that_of_the_formulas_and_leaves_padding_alone() -> None:
    seeds = torch.arange(400)
    valid = torch.ones(400, 5, dtype=torch.bool)
    valid[1, 2:] = False
    uniform = freelb_start(seeds, valid, 16, 0.02)
    assert not uniform[1, 2:].any()
    assert uniform[0].abs().max() <= 0.02 / math.sqrt(5 * 16)
    assert uniform[1].abs().max() <= 0.02 / math.sqrt(2 * 16)
    assert uniform[2:].std().item() == pytest.approx(0.02 / math.sqrt(80) / math.sqrt(3), rel=0.02)
    normal = smart_start(seeds, valid, 16, 2.0)[2:]
    assert normal.mean().item() == pytest.approx(0, abs=0.02)
    assert normal.std().item() == pytest.approx(2, rel=0.02)
    assert (normal.abs() > 4).float().mean().item() == pytest.approx(0.0455, abs=0.005)
    torch.testing.assert_close(freelb_start(seeds[1:2], valid[1:2, :2], 16, 0.02)[0], uniform[1, :2])
    nothing = freelb_ascend(uniform, torch.zeros_like(uniform), valid, 0.1)
    torch.testing.assert_close(nothing, uniform)
    assert smart_step(torch.randn(400, 5, 16), valid, 1e-3)[1, 2:].abs().max() == 0


def test_the_hook_is_gone_after_an_error() -> None:
    table = torch.nn.Embedding(3, 2)
    with perturbed(table, torch.ones(1, 1, 2)):
        torch.testing.assert_close(table(torch.tensor([[1]])), table.weight[1][None, None] + 1)
    with pytest.raises(IndexError), perturbed(table, torch.ones(1, 1, 2)):
        table(torch.tensor([[9]]))
    torch.testing.assert_close(table(torch.tensor([[1]])), table.weight[1][None, None])


@pytest.mark.parametrize("kind", ["freelb", "smart"])
def test_a_stopped_run_ends_like_one_that_was_not(
    store: Store, data: Artifact, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"adversarial": kind, "steps": 6, "epochs": None, "save_every": 3, "seed": 11}
    whole = trained(store, data, **settings)
    other = Store(tmp_path / "other")
    shutil.copytree(store.root, other.root)
    shutil.rmtree(other.root / "model" / whole.path.name)
    codes = iter([0, 0, 0, int(signal.SIGTERM)])  # asked after every step
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "code", property(lambda self: next(codes)))
        with pytest.raises(Interrupted, match="stopped after step"):
            trained(other, other.load(data.reference), **settings)
    finished = trained(other, other.load(data.reference), **settings)
    assert (finished.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("architecture", ["roberta", "electra", "modernbert", "role-transformer"])
def test_other_families_train_under_perturbations_beside_guides(
    store: Store, data: Artifact, architecture: str
) -> None:
    for kind in ("freelb", "smart"):
        made = trained(store, data, architecture=architecture, adversarial=kind, steps=2, epochs=None, plan="preset:ag")
        rows = [name for name in made.counts["final"] if name.startswith("loss/")]
        assert ("loss/smart" in rows) == (kind == "smart")
        assert any("guidance" in name for name in rows)


def test_choices_and_tags_train_under_perturbations(store: Store, tmp_path: Path) -> None:
    tags = tmp_path / "tags.conll"
    tags.write_text("Ann B-PER\nruns O\n\nrain O\nfalls O\n\n" * 8)
    lines = "\n".join(f'{{"text": "Text {i}.", "choices": ["yes", "no"], "label": {i % 2}}}' for i in range(12))
    (tmp_path / "choices.jsonl").write_text(lines)
    for file, config in (
        (tags, dataset.Config(format="conll")),
        (tmp_path / "choices.jsonl", dataset.Config(choices_column="choices")),
    ):
        made = dataset.run({"train": [str(file)]}, config, store=store).artifact
        for kind in ("freelb", "smart"):
            assert trained(store, made, adversarial=kind, steps=2, epochs=None).counts["steps"] == 2


def test_what_does_not_go_together_is_refused(store: Store, data: Artifact) -> None:
    with pytest.raises(PlanError, match="its guides attack already"):
        trained(store, data, adversarial="smart", plan="preset:asa")
    for settings, message in (
        ({"adversarial_rate": 0.1}, "--adversarial-rate belongs to --adversarial freelb or smart, not to none"),
        ({"adversarial": "smart", "adversarial_steps": 2}, "--adversarial-steps belongs to --adversarial freelb"),
        ({"adversarial": "freelb", "adversarial_weight": 2.0}, "belongs to --adversarial smart"),
    ):
        with pytest.raises((ValueError, InputError), match=message):
            finetune.Config(**settings)
    assert not {name for name in finetune.Config().recipe() if name.startswith("adversarial")}
