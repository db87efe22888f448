"""Generators: what they fill in, what the model must not see, and losses where they mis-predict."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from guidance.errors import InputError, PlanError
from guidance.objectives.masked_lm import IGNORED
from guidance.plan import Plan
from pipelines.training.learners.generator import generator_sizes
from pipelines.training.objectives import OBJECTIVES
from tests import trainings
from tests.generator_objectives import CONFLICT, objective, passes, table
from tests.trainings import one_thread  # noqa: F401

PLACES = [(0, 0), (0, 3), (1, 0), (0, 7)]
SPECIAL = (0, 1, 2, 3, 4)
KINDS = ("unigram", "transformer")


def masked(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The masked tokens of the text, and the tokens that were drawn for them."""
    return torch.from_numpy(np.concatenate([row[row != IGNORED] for row in batch.labels])), batch.drawn_N


# the network


def test_a_third_of_the_base_size_is_that_of_the_paper() -> None:
    base = SimpleNamespace(num_hidden_layers=12, hidden_size=768, num_attention_heads=12)
    assert generator_sizes(base, 1 / 3) == (12, 256, 4, 1024)
    tiny = SimpleNamespace(num_hidden_layers=2, hidden_size=128, num_attention_heads=2)
    assert generator_sizes(tiny, 1 / 3) == (2, 43, 1, 172)
    assert generator_sizes(tiny, 0.001) == (2, 1, 1, 4)
    assert generator_sizes(tiny, 1.0) == (2, 128, 2, 512)


def test_the_models_of_electra_share_token_embeddings() -> None:
    found = objective(objective="electra", hidden=24, heads=3)
    assert found.generator.network.config.hidden_size == 8
    weight = found.main.get_input_embeddings().weight
    assert found.generator.network.get_input_embeddings().weight is weight
    assert found.generator.network.get_output_embeddings().weight is weight
    assert sum(p is weight for p in found.model.parameters()) == 1


@pytest.mark.parametrize("family", ["roberta", "bert", "electra", "modernbert"])
def test_the_generator_of_mlm_has_its_own_embeddings(family: str) -> None:
    found = objective(plan=CONFLICT, architecture=family)
    shared = {id(p) for p in found.main.parameters()} & {id(p) for p in found.generator.network.parameters()}
    assert not shared
    _, _, losses = passes(found, PLACES)
    torch.stack([losses[name] for name in found.weights(0)]).sum().backward()
    assert all(p.grad is not None for p in found.model.parameters())


def test_the_generator_does_not_start_with_the_weights_of_the_model() -> None:
    found = objective(objective="electra", generator_size=1.0, ffn=64)
    main, generator = found.main.state_dict(), found.generator.network.state_dict()
    alike = [name for name in main if name in generator and main[name].shape == generator[name].shape]
    own = [name for name in alike if main[name].is_floating_point() and main[name].std() > 0 and "word_emb" not in name]
    assert len(own) > 10, "matrices of both models, at random"
    assert not [name for name in own if torch.equal(main[name], generator[name])]


# drawing


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_tokens_do_not_depend_on_how_a_batch_is_split(kind: str) -> None:
    found = objective(objective="electra", generator=kind)
    whole, _, _ = passes(found, PLACES)
    parts = [passes(found, [place])[0].drawn_N for place in PLACES]
    assert torch.equal(whole.drawn_N, torch.cat(parts)) and len(whole.drawn_N) > 2
    assert not torch.isin(whole.drawn_N, torch.tensor(SPECIAL)).any()
    other, _, _ = passes(found, [(epoch + 1, example) for epoch, example in PLACES])
    assert not torch.equal(whole.drawn_N[:5], other.drawn_N[:5])


def test_the_unigram_generator_draws_the_distribution_of_the_training_text() -> None:
    rows = [[0, 7, 7, 7, 7, 7, 7, 2], [0, 7, 9, 7, 9, 7, 7, 2]]
    found = objective(rows, objective="electra", generator="unigram", mask_probability=0.5)
    drawn = torch.cat([found.prepare([(epoch, 0), (epoch, 1)]).drawn_N for epoch in range(200)])
    assert set(drawn.tolist()) == {7, 9}
    assert (drawn == 9).double().mean().item() == pytest.approx(2 / 12, abs=0.04)


# the discriminator


@pytest.mark.parametrize("kind", KINDS)
def test_the_discriminator_reads_the_filled_in_text(kind: str) -> None:
    found = objective(objective="electra", generator=kind)
    batch, counts, losses = passes(found, PLACES)
    inputs = found.tensors(batch)
    texts = [found.splits["train"][example] for _, example in PLACES]
    drawn = iter(batch.drawn_N.tolist())
    ids, replaced = [], []
    for text, labels in zip(texts, batch.labels, strict=True):
        row = [next(drawn) if label != IGNORED else int(token) for token, label in zip(text, labels, strict=True)]
        ids.append(row)
        replaced += [int(a != b) for a, b in zip(row, text.tolist(), strict=True)]
    for row, seen in zip(ids, inputs.model["input_ids"].tolist(), strict=True):
        assert seen[: len(row)] == row and set(seen[len(row) :]) <= {found.pad_id}
    assert inputs.labels_N.tolist() == replaced and set(inputs.model) == {"input_ids", "attention_mask"}
    assert counts["discriminator"] == len(replaced) and counts["recall/discriminator"] == sum(replaced) > 0
    with torch.no_grad():
        logits = found.main(**inputs.model).logits[inputs.model["attention_mask"].bool()]
    by_hand = sum(math.log1p(math.exp(-z if y else z)) for z, y in zip(logits.tolist(), replaced, strict=True))
    assert losses["discriminator"].item() == pytest.approx(by_hand, rel=1e-9)
    assert int(losses["accuracy/discriminator"]) == sum((z > 0) == y for z, y in zip(logits, replaced, strict=True))
    assert int(losses["recall/discriminator"]) == sum(z > 0 and y == 1 for z, y in zip(logits, replaced, strict=True))
    assert int(losses["share/replaced"]) == sum(replaced)


def test_the_generator_predicts_all_masked_tokens_from_masks() -> None:
    found = objective(objective="electra", mask_probability=0.6)
    batch, counts, losses = passes(found, PLACES)
    labels_N, drawn_N = masked(batch)
    inputs = super(type(found), found).tensors(batch)  # with the places of masked tokens
    ids, mask_id = inputs.columns["original"].flatten().clone(), trainings.SPECIAL.index("<mask>")
    seen = np.concatenate([row[labels != IGNORED] for row, labels in zip(batch.seen, batch.labels, strict=True)])
    assert 0 < (seen != mask_id).sum() < len(seen), "80/10/10 left some of the chosen tokens without a mask"
    ids[inputs.places_N] = mask_id
    with torch.no_grad():
        read = ids.view_as(inputs.columns["original"])
        logits = found.generator.network(read, inputs.model["attention_mask"]).logits.flatten(0, 1)[inputs.places_N]
    expected = -logits.log_softmax(-1).gather(1, labels_N[:, None]).sum()
    assert losses["generator"].item() == pytest.approx(expected.item(), rel=1e-9)
    assert counts["generator"] == counts["accuracy/generator"] == len(labels_N)
    assert int(losses["accuracy/generator"]) == int((logits.argmax(-1) == labels_N).sum())
    assert int(losses["share/mispredicted"]) == int((drawn_N != labels_N).sum())


def test_the_discriminator_cannot_see_which_unreplaced_tokens_were_masked() -> None:
    """With other tokens chosen but none replaced, inputs, labels and losses are bit-equal."""
    found = objective(objective="electra", generator="unigram", plan=CONFLICT)
    text = found.splits["train"][0]
    results = []
    for chosen in ([2, 5], [1, 3, 4], []):
        batch = found.prepare([(0, 0)])
        labels = np.full(len(text), IGNORED)
        labels[chosen] = text[chosen]
        batch.labels[0], batch.seen[0] = labels, np.where(labels != IGNORED, 4, text)
        batch.fill(torch.from_numpy(text[chosen]))
        inputs = found.tensors(batch)
        results.append((inputs, found.counts(batch), found.losses(found.model, batch, 0)))
    for inputs, counts, losses in results[1:]:
        assert counts == results[0][1]
        for name, loss in losses.items():
            assert torch.equal(loss, results[0][2][name]), name
        for mine, first in ((inputs.model, results[0][0].model), (inputs.columns, results[0][0].columns)):
            assert all(torch.equal(mine[name], first[name]) for name in first)
        assert torch.equal(inputs.labels_N, results[0][0].labels_N)


def test_the_discriminator_gives_the_generator_no_gradient() -> None:
    found = objective(objective="electra")
    _, _, losses = passes(found, PLACES)
    losses["discriminator"].backward()
    shared = found.main.get_input_embeddings().weight
    assert all(p.grad is None for p in found.generator.network.parameters() if p is not shared)


def test_attacks_on_electra_are_judged_by_the_two_classes_of_every_token() -> None:
    found = objective(objective="electra", plan='[[guide]]\nmechanism = "adversary"')
    batch, counts, losses = passes(found, PLACES)
    assert counts["adversary/tokens"] == batch.tokens and counts["adversary/sentence"] == len(PLACES)
    inputs = found.tensors(batch)
    attack = found.guide(inputs).attack()
    with torch.no_grad():
        clean, attacked = (found.main(**inputs.model, **extra).logits for extra in ({}, {"guidance": attack}))
    valid = inputs.model["attention_mask"].bool()
    by_hand = 0.0
    for z, w in zip(clean[valid].tolist(), attacked[valid].tolist(), strict=True):
        p, q = (1 / (1 + math.exp(-logit)) for logit in (z, w))
        by_hand += 0.5 * ((p - q) * math.log(p / q) + (q - p) * math.log((1 - p) / (1 - q)))
    assert losses["adversary/tokens"].item() == pytest.approx(by_hand, rel=1e-6)


# conflicts with mis-predictions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["electra", "mlm"])
def test_the_loss_on_scores_covers_only_mispredicted_rows(task: str, kind: str) -> None:
    """By hand from the queries and keys of the last layer; its gradient is twice the score times the weight."""
    plan = CONFLICT + "layers = [1]\n"
    family = {"architecture": "roberta"} if task == "mlm" else {}  # its queries and keys have layers of their own
    found = objective(objective=task, generator=kind, plan=plan, mask_probability=0.4, **family)
    attention = next(m for m in found.main.modules() if getattr(m, "guide_sites", ()) and m.guide_sites[0].layer == 1)
    states: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            states[name] = output

        return hook

    hooks = [getattr(attention, name).register_forward_hook(keep(name)) for name in ("query", "key")]
    batch, counts, losses = passes(found, PLACES)
    for hook in hooks:
        hook.remove()
    conflict = losses["guidance/conflict"]
    conflict.backward()
    inputs = found.tensors(batch)
    wrong_BT = inputs.columns["mispredicted"]
    predicted_BT = inputs.model["input_ids"] if task == "electra" else inputs.columns["predicted"]
    original_BT, scores = inputs.columns["original"], table()
    known_BT = scores.rows(predicted_BT) >= 0
    expected, rows = 0.0, 0
    gradient_BTD = torch.zeros_like(states["query"])
    for b, t in wrong_BT.nonzero().tolist():
        assert predicted_BT[b, t] != original_BT[b, t]
        if not known_BT[b, t]:
            continue
        rows += 1
        query = states["query"][b, t, :8].detach()
        for k in range(len(wrong_BT[b])):
            if known_BT[b, k] and inputs.model["attention_mask"][b, k]:
                weight = float(scores.scores_NN[scores.rows(predicted_BT[b, t]), scores.rows(predicted_BT[b, k])])
                key = states["key"][b, k, :8].detach()
                score = float(query @ key) / math.sqrt(8)
                expected += (score * weight) ** 2
                gradient_BTD[b, t, :8] += 2 * score * weight * key / math.sqrt(8)
    assert rows and conflict.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(states["query"].grad, gradient_BTD, rtol=1e-5, atol=1e-9)
    assert counts["guidance/conflict"] == rows == int(losses["share/in_vocabulary/conflict"])
    assert counts["share/in_vocabulary/conflict"] == int(wrong_BT.sum())


@pytest.mark.parametrize("options", ["truth = true", "constant = 0.8", 'rows = "all"'])
def test_each_variant_divides_by_the_number_of_its_rows(options: str) -> None:
    found = objective(objective="electra", plan=CONFLICT + options, mask_probability=0.4)
    batch, counts, losses = passes(found, PLACES)
    inputs = found.tensors(batch)
    ids = inputs.columns["original"] if "truth" in options else inputs.model["input_ids"]
    wrong = inputs.columns["mispredicted"]
    known = int((wrong & (table().rows(ids) >= 0)).sum())
    assert 0 < known < int(wrong.sum())
    assert counts["guidance/conflict"] == (int(wrong.sum()) if "all" in options else known)
    assert int(losses["share/in_vocabulary/conflict"]) == known and losses["guidance/conflict"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_does_not_change_the_inputs_of_mlm(kind: str) -> None:
    alone, beside = objective(), objective(plan=CONFLICT, generator=kind)
    batch, counts, losses = passes(beside, PLACES)
    plain, few, others = passes(alone, PLACES)
    for name in ("seen", "labels"):
        assert all(map(np.array_equal, getattr(batch, name), getattr(plain, name)))
    assert torch.equal(losses["mlm"], others["mlm"]) and counts["mlm"] == few["mlm"]
    assert beside.weights(0)["mlm"] == 1.0 and next(iter(beside.weights(0))) == "mlm"


def test_masks_and_biases_read_the_inputs_and_not_the_drawn_tokens() -> None:
    bias = '\n[[guide]]\npattern = "matching_token"\nmechanism = "bias"\nheads = [1]\n'
    found = objective(plan=CONFLICT + bias, mask_probability=0.4)
    batch, _, losses = passes(found, PLACES)
    batch.fill(batch.drawn_N.flip(0))
    again = found.losses(found.model, batch, 0)
    assert torch.equal(losses["mlm"], again["mlm"]) and losses["guidance/conflict"] != again["guidance/conflict"]


def test_a_generator_can_be_guided_too() -> None:
    plan = '[[guide]]\npart = "generator"\npattern = "next"\nmechanism = "attention_loss"\nheads = [0]\n'
    found = objective(objective="electra", plan=plan + plan.replace("generator", "discriminator"))
    _, counts, losses = passes(found, PLACES)
    assert {"guidance/generator/next", "guidance/next"} <= set(losses) and counts["guidance/generator/next"] == 4
    losses["guidance/generator/next"].backward()
    heads = [p.grad for p in found.main.electra.encoder.parameters()]
    assert all(gradient is None for gradient in heads)
    assert set(found.tallies()) == {"next", "generator/next"} and all(found.tallies().values())
    found.restore({"next": 10.0, "generator/next": 20.0})
    assert found.tallies()["next"] > 10 and found.tallies()["generator/next"] > 20
    assert [(f.path, f.plan.guides[0].part) for f in found.folders()] == [("", "model"), ("generator/", "model")]


# empty cases and errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["electra", "mlm"])
def test_a_batch_without_a_masked_token_has_losses_with_a_graph(task: str, kind: str) -> None:
    rows = [[0, 2], [0, 3, 4, 2], *trainings.rows_of_ids(2, 16)]  # special tokens are never chosen
    found = objective(rows, objective=task, generator=kind, plan=CONFLICT)
    batch, counts, losses = passes(found, [(0, 0), (0, 1)])
    assert not len(batch.drawn_N) and counts["guidance/conflict"] == 0
    assert losses["guidance/conflict"] == 0 and all(
        losses[name] == 0 for name in ("generator", "mlm") if name in losses
    )
    torch.stack([losses[name] for name in found.weights(0)]).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in found.model.parameters())


def test_a_batch_in_which_nothing_is_mispredicted_has_no_conflict() -> None:
    found = objective(objective="electra", generator="unigram", plan=CONFLICT)
    batch = found.prepare(PLACES)
    batch.fill(masked(batch)[0])
    losses = found.losses(found.model, batch, 0)
    assert found.counts(batch)["guidance/conflict"] == 0 and losses["guidance/conflict"] == 0
    assert losses["guidance/conflict"].requires_grad and losses["share/replaced"] == 0


def test_a_non_finite_generator_gives_a_non_finite_loss() -> None:
    found = objective(objective="electra")
    with torch.no_grad():
        found.generator.network.generator_lm_head.bias.fill_(torch.nan)
    batch, _, losses = passes(found, PLACES)
    assert losses["generator"].isnan() and not torch.isin(batch.drawn_N, torch.tensor(SPECIAL)).any()


REFUSED = {
    "mlm none": ({"generator": "none"}, CONFLICT, "acts where a generator mis-predicts, and --generator none"),
    "mlm discriminator": ({}, CONFLICT + 'part = "discriminator"', "is for a discriminator, and mlm trains none"),
    "unigram heads": (
        {"objective": "electra", "generator": "unigram"},
        '[[guide]]\npattern = "next"\nmechanism = "mask"\npart = "generator"',
        "--generator unigram has no heads",
    ),
    "conflict of the generator": (
        {"objective": "electra"},
        CONFLICT + 'part = "generator"',
        "heads of the model that reads its mistakes",
    ),
    "attack on the generator": (
        {"objective": "electra"},
        '[[guide]]\nmechanism = "adversary"\npart = "generator"',
        "but adversary needs a second pass, which only the model makes",
    ),
    "the truth in a bias": (
        {"objective": "electra"},
        '[[guide]]\npattern = "conflict"\ntruth = true\nmechanism = "bias"',
        "would show the model the answers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_guides_that_cannot_work_are_refused_with_the_reason(case: str) -> None:
    changes, plan, message = REFUSED[case]
    config = trainings.config(**changes)
    with pytest.raises(PlanError, match=message) as raised:
        OBJECTIVES[config.objective].check_plan(Plan.parse(plan), config, "plan")
    assert case != "mlm none" or "--generator transformer" in str(raised.value.hint)


def test_electra_without_a_generator_is_refused() -> None:
    with pytest.raises(InputError, match="--objective electra needs a generator"):
        objective(objective="electra", generator="none")
