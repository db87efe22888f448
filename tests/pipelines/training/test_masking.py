"""Adversaries in pre-training: their losses and masks against plain loops; and random masks that follow their runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from guidance.errors import InputError, PlanError
from guidance.plan import Plan
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged, digest
from pipelines.storage.store import Store
from pipelines.training import models
from pipelines.training.batches import Examples
from pipelines.training.learner import Setup
from pipelines.training.learners.guided import Inputs
from pipelines.training.learners.masked_lm import MaskedLM
from pipelines.training.masking import read_proportions
from pipelines.training.objectives.masked_lm import MaskedLanguageModelling
from tests import trainings
from tests.trainings import one_thread  # noqa: F401

ADVERSARY = '[[guide]]\nmechanism = "adversary"\ntau = 0.1\n'
SCHEDULED = '[[guide]]\nmechanism = "random_mask"\nkind = "scheduled"\n'


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "plan.toml").write_text(text)
    return str(tmp_path / "plan.toml")


def rows_of(artifact: Artifact) -> list[dict[str, float]]:
    return [json.loads(line) for line in artifact.read("metrics.jsonl").splitlines()]


# what is logged, against loops


@pytest.fixture(params=["hidden", "head"])
def attacked(
    store: Store, request: pytest.FixtureRequest
) -> tuple[MaskedLM, Inputs, dict[str, Tensor], dict[int, Tensor]]:
    """A learner with an adversary, the inputs of six examples of different lengths, their losses, and the inputs of each
    layer in the second pass."""
    data = trainings.sequences(store)
    tokenizer = models.read_tokenizer(data)
    examples = Examples.read(data, "train", len(tokenizer))
    options = trainings.config(architecture="bert", mask_probability=0.3)
    plan = Plan.parse(f'{ADVERSARY}\nsentence = "{request.param}"')
    objective: Any = MaskedLanguageModelling.prepare(Setup(options, plan, data, tokenizer, examples, examples))
    model = objective.model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10 if ".guided." in name else 3)
    states: dict[int, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, layer=layer: states.update({layer: args[0] if args else kwargs["hidden_states"]}),
            with_kwargs=True,
        )
        for layer, module in enumerate(layer.attention.self for layer in model.bert.encoder.layer)
    ]
    batch = objective.prepare([(0, i) for i in range(6)])
    assert len({len(row) for row in batch.seen}) > 1
    losses = objective.losses(model, batch, 0)
    for hook in hooks:
        hook.remove()
    return objective, objective.tensors(batch), losses, states


def kept_units(model: Any, layer: int, states_Td: Tensor) -> int:
    """How many units of one example an adversary leaves unmasked, counted one by one."""
    added = next(iter(model.bert.encoder.layer[layer].attention.self.guided.values()))
    queries = states_Td @ added.query.weight.T + added.query.bias
    keys = states_Td @ added.key.weight.T + added.key.bias
    return sum(float(query @ key) / len(query) ** 0.5 > 0 for query in queries for key in keys)


def test_the_masked_share_of_each_layer_equals_a_slow_count(
    attacked: tuple[MaskedLM, Inputs, dict[str, Tensor], dict[int, Tensor]],
) -> None:
    objective, inputs, losses, states = attacked
    penalty = 0.0
    for layer in range(2):
        shares = []
        for row, length in enumerate(inputs.model["attention_mask"].sum(1).tolist()):
            kept = kept_units(objective.model, layer, states[layer][row, :length])
            shares.append(1 - kept / length**2)
            penalty += 0.1**2 * kept  # tau squared for each unmasked unit
        assert 0.05 < sum(shares) / 6 < 0.95
        assert losses[f"masked/{layer}"].item() == pytest.approx(sum(shares), rel=1e-6)
    assert losses["adversary/penalty"].item() == pytest.approx(penalty, rel=1e-6)


def test_the_losses_are_those_of_equation_10(
    attacked: tuple[MaskedLM, Inputs, dict[str, Tensor], dict[int, Tensor]],
) -> None:
    """Divergences of the distributions over words at masked tokens, and at the first token over hidden units or words."""
    objective, inputs, losses, _ = attacked
    guidance = objective.guide(inputs)
    outputs = [
        objective.model(**inputs.model, guidance=given, output_hidden_states=True)
        for given in (guidance, guidance.attack())
    ]
    places = [divmod(int(place), inputs.model["input_ids"].shape[1]) for place in inputs.places_N]
    words = sum(both_ways(*(output.logits[row, token] for output in outputs)) for row, token in places)
    said = [output.logits if objective.guided.sentence == "head" else output.hidden_states[-1] for output in outputs]
    first = sum(both_ways(*(states[row, 0] for states in said)) for row in range(6))
    assert losses["adversary/tokens"].item() == pytest.approx(words, rel=1e-9)
    assert losses["adversary/sentence"].item() == pytest.approx(first, rel=1e-9)
    assert objective.weights(0) == {"mlm": 1.0, **{f"adversary/{n}": 1.0 for n in ("tokens", "sentence", "penalty")}}
    batch = objective.prepare([(0, i) for i in range(6)])
    counts = objective.counts(batch)
    assert counts["adversary/tokens"] == len(places) and counts["adversary/sentence"] == 6
    assert counts["adversary/penalty"] == counts["masked/0"] == counts["masked/1"] == 6


def both_ways(clean: Tensor, attacked: Tensor) -> float:
    """Half the sum of both Kullback-Leibler divergences."""
    p, q = clean.softmax(-1), attacked.softmax(-1)
    return float(0.5 * ((p * (p / q).log()).sum() + (q * (q / p).log()).sum()))


# starting from an adversarial run


def test_init_without_a_plan_drops_the_adversary(store: Store, tmp_path: Path) -> None:
    data = trainings.sequences(store)
    first = trainings.train(store, data, plan=write(tmp_path, ADVERSARY)).artifact
    assert "guidance.safetensors" in first.files
    found = {}
    for name, init in (("artifact", first.reference), ("folder", str(first.path)), ("best", str(first.path / "best"))):
        second = found[name] = trainings.train(store, data, init=init, steps=1, learning_rate=1e-9).artifact
        assert "guidance.safetensors" not in second.files
        assert not any("adversary" in key or "masked" in key for key in rows_of(second)[0])
        assert second.counts["parameters"] < first.counts["parameters"]
    last, best = first.counts["final"]["valid/mlm"], first.counts["best_valid_loss"]
    assert found["artifact"].counts["final"]["valid/mlm"] == pytest.approx(last, abs=1e-5)
    assert found["best"].counts["final"]["valid/mlm"] == pytest.approx(best, abs=1e-5)


def test_adversarial_training_starts_from_a_plain_or_an_adversarial_model(store: Store, tmp_path: Path) -> None:
    data, plan = trainings.sequences(store), write(tmp_path, ADVERSARY)
    plain = trainings.train(store, data).artifact
    one = trainings.train(store, data, init=plain.reference, plan=plan, steps=2).artifact
    again = trainings.train(store, data, init=plain.reference, plan=plan, steps=2, force=True).artifact
    assert trainings.files_of(one) == trainings.files_of(again)  # the seed decides the new adversary
    other = trainings.train(store, data, init=one.reference, plan=plan, steps=2).artifact
    for artifact in (one, other):
        assert all(0 < row["masked/0"] < 1 and row["loss/adversary/tokens"] > 0 for row in rows_of(artifact))


# random masks


@pytest.mark.parametrize(("kind", "least", "most"), [("bernoulli", 0.27, 0.33), ("magnitude", 3 / 13, 4 / 14)])
def test_random_masks_mask_their_share_in_every_layer(
    store: Store, tmp_path: Path, kind: str, least: float, most: float
) -> None:
    """Masks by magnitude remove whole keys: three of 10 to 13, four of 14 to 16."""
    plan = f'[[guide]]\nmechanism = "random_mask"\nkind = "{kind}"\nproportion = 0.3\n'
    rows = rows_of(trainings.train(store, plan=write(tmp_path, plan)).artifact)
    for row in rows:
        assert row["loss/adversary/penalty"] == 0 and row["loss/adversary/tokens"] > 0
        for layer in range(2):
            assert least < row[f"masked/{layer}"] < most


def test_a_scheduled_mask_follows_an_adversarial_run_step_by_step(store: Store, tmp_path: Path) -> None:
    data = trainings.sequences(store)
    first = trainings.train(store, data, plan=write(tmp_path, ADVERSARY)).artifact
    expected = rows_of(first)
    table = read_proportions(first)
    assert table.tolist() == [[row["masked/0"], row["masked/1"]] for row in expected]
    plan = write(tmp_path, SCHEDULED)
    second = trainings.train(store, data, plan=plan, masking=first.reference, steps=8).artifact
    for step, row in enumerate(rows_of(second)):
        for layer in range(2):
            wanted = expected[min(step, 5)][f"masked/{layer}"]
            assert row[f"masked/{layer}"] == pytest.approx(wanted, abs=0.08)
    assert second.manifest["inputs"]["masking"]["content"] == first.content
    assert (
        f"{first.reference} ends at step 6: later steps use its masking proportions of that step"
        in second.manifest["warnings"]
    )
    assert not any("masking" in warning for warning in first.manifest["warnings"])


def adversarial_run(store: Store, columns: Mapping[str, Sequence[float | None]]) -> Artifact:
    """A model artifact with these metrics and nothing else."""
    recipe = digest(["a run by hand", {name: list(column) for name, column in columns.items()}])
    table = pa.table({name: pa.array(column, pa.float64()) for name, column in columns.items()})
    with store.build("model", recipe, {"stage": "pretrain", "stage_version": 1, "config": {}, "inputs": {}}) as out:
        with out.parquet("metrics.parquet", table.schema) as writer:
            writer.write_table(table)
    return Artifact(store.folder("model", recipe))


def test_each_step_and_layer_is_masked_as_the_table_says(store: Store, tmp_path: Path) -> None:
    """Proportions that mask nothing, or all but one unit of every row."""
    shares = [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    columns = {f"masked/{layer}": [row[layer] for row in shares] for layer in (1, 0)}
    run = adversarial_run(store, {"step": [1.0, 2.0, 3.0], **columns})
    data = trainings.write_sequences(store, {"train": trainings.table([[0, 7, 8, 9, 2]] * 8)})
    rows = rows_of(
        trainings.train(store, data, plan=write(tmp_path, SCHEDULED), masking=run.reference, steps=4).artifact
    )
    for layer, wanted in enumerate(([0.0, 0.8, 0.0, 0.0], [0.8, 0.0, 0.0, 0.0])):
        assert [row[f"masked/{layer}"] for row in rows] == pytest.approx(wanted, abs=1e-6)


def test_the_content_of_the_followed_run_decides_the_recipe(store: Store, tmp_path: Path) -> None:
    data, plan = trainings.sequences(store), write(tmp_path, SCHEDULED)
    runs = [adversarial_run(store, {"masked/0": [share], "masked/1": [share]}) for share in (0.1, 0.2)]
    one, other, again = (
        trainings.train(store, data, plan=plan, masking=reference, steps=1)
        for reference in (runs[0].reference, runs[1].reference, str(runs[0].path))
    )
    assert one.artifact.recipe != other.artifact.recipe
    assert again.reused and again.artifact.recipe == one.artifact.recipe


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"loss/mlm": [1.0]}, InputError, "its metrics have masking proportions for no layer"),
        ({"masked/1": [0.5]}, InputError, "for layers 1 only"),
        ({"masked/0": [0.5]}, InputError, r"masking_proportion is \(1, 1\), not \(steps, 2\)"),
        ({f"masked/{n}": [0.5] for n in range(3)}, InputError, r"masking_proportion is \(1, 3\), not \(steps, 2\)"),
        (
            {"masked/0": [0.5, None], "masked/1": [0.5, 0.5]},
            ArtifactDamaged,
            "a masking proportion is not between 0 and 1",
        ),
        ({"masked/0": [0.5], "masked/1": [1.5]}, ArtifactDamaged, "a masking proportion is not between 0 and 1"),
    ],
)
def test_a_run_that_cannot_be_followed_is_refused(
    store: Store, tmp_path: Path, columns: dict[str, list[float | None]], error: type[Exception], message: str
) -> None:
    run = adversarial_run(store, columns)
    with pytest.raises(error, match=message):
        trainings.train(store, plan=write(tmp_path, SCHEDULED), masking=run.reference)
    assert not list(store.unfinished())


def test_a_schedule_without_a_run_and_a_run_without_a_schedule_are_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"plan\.toml: guide 'random_mask' needs the table masking_proportion"
    ) as caught:
        trainings.train(store, plan=write(tmp_path, SCHEDULED))
    assert "--masking-run RUN" in str(caught.value.hint)
    run = adversarial_run(store, {"masked/0": [0.5], "masked/1": [0.5]})
    for plan in ("", write(tmp_path, ADVERSARY)):
        with pytest.raises(InputError, match=r"--masking-run model/\w+: no guide of the plan follows it"):
            trainings.train(store, plan=plan, masking=run.reference)
