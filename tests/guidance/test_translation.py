"""Translation: the loss by hand, beam search against all possible translations, and plans that act during decoding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from guidance.errors import InputError, PlanError
from guidance.guide import Guide
from guidance.installation import Handle, install
from guidance.objectives.selection import logits_at, places_of
from guidance.objectives.translation import shift_right, translate, translation_losses
from guidance.plan import Plan
from tests.guidance.models import batch, pair_batch, tiny_model

GAUSSIAN = Plan.load("preset:gaussian")
MASKS = Plan((Guide("window", "mask", heads=(0, 1)), Guide("first", "fix", heads=(2,))))
DECODER = Plan((Guide("previous", "mask", stack="decoder", heads=(0,)), Guide("self", "bias", heads=(1,))))
PLANS = {"plain": Plan(), "encoder": MASKS, "decoder": DECODER, "gaussian": GAUSSIAN}


def talkative(**changes: Any) -> PreTrainedModel:
    """A model with flat output distributions; one with random weights would always repeat itself."""
    model = tiny_model("marian", tie_word_embeddings=False, init_std=0.3, **changes)
    with torch.no_grad():
        weight_VD = model.get_decoder().embed_tokens.weight.mul_(3)
        after_V = (7 * torch.arange(len(weight_VD)) + 4) % len(weight_VD)
        model.get_output_embeddings().weight[after_V] = 0.15 * weight_VD
    return model


every_plan = pytest.mark.parametrize("name", PLANS)


# the loss


def test_the_smoothed_loss_by_hand() -> None:
    """With probabilities 1/2, 1/4, 1/4 and the first as label, -log p is log 2 for the label and 5/3 log 2 on average.  With
    uniform probabilities smoothing changes nothing."""
    logits_NV = torch.tensor([[0.5, 0.25, 0.25], [1.0, 1.0, 1.0]]).log()
    smoothed, likelihood = translation_losses(logits_NV, torch.tensor([0, 2]), 0.1)
    assert likelihood.item() == pytest.approx(math.log(2) + math.log(3))
    assert smoothed.item() == pytest.approx((0.9 + 0.1 * 5 / 3) * math.log(2) + math.log(3))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_loss_is_that_of_torch_summed(smoothing: float) -> None:
    logits_NV = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    labels_N = torch.randint(11, (7,))
    smoothed, likelihood = translation_losses(logits_NV, labels_N, smoothing)
    entropy = torch.nn.functional.cross_entropy
    torch.testing.assert_close(smoothed, entropy(logits_NV, labels_N, label_smoothing=smoothing, reduction="sum"))
    torch.testing.assert_close(likelihood, entropy(logits_NV, labels_N, reduction="sum").detach())
    assert smoothed.requires_grad and not likelihood.requires_grad


def test_without_targets_the_loss_is_zero_with_a_graph() -> None:
    logits_NV = torch.zeros(0, 5, requires_grad=True)
    smoothed, likelihood = translation_losses(logits_NV, torch.zeros(0, dtype=torch.long), 0.1)
    smoothed.backward()
    assert (smoothed.item(), likelihood.item()) == (0.0, 0.0)
    assert logits_NV.grad is not None


def test_half_precision_is_summed_in_single() -> None:
    smoothed, _ = translation_losses(torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.long), 0.1)
    assert smoothed.dtype == torch.float32 and smoothed.item() == pytest.approx(3 * math.log(5))


def test_the_decoder_reads_the_targets_one_step_late() -> None:
    assert shift_right(torch.tensor([[7, 8, 2], [9, 2, 1]]), start=0).tolist() == [[0, 7, 8], [0, 9, 2]]


def test_logits_of_an_encoder_decoder_at_its_targets_only() -> None:
    model, inputs = talkative(), pair_batch()
    del inputs["labels"]
    places_N = places_of(inputs["decoder_attention_mask"])
    expected = model(**inputs).logits.flatten(0, 1)[places_N]
    torch.testing.assert_close(logits_at(model, places_N, **inputs).logits, expected)


# beam search


def _scores(
    model: PreTrainedModel, handle: Handle, source: dict[str, Tensor], length: int, penalty: float
) -> dict[tuple[int, ...], float]:
    """The score of every translation of one source up to a length, from whole forward passes."""
    end = model.config.eos_token_id
    every = torch.tensor(list(itertools.product(range(model.config.vocab_size), repeat=length)))
    ids = shift_right(every, model.config.decoder_start_token_id)
    inputs = {name: row.expand(len(every), -1) for name, row in source.items()}
    guidance = handle.guide(**inputs, decoder_input_ids=ids)
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=ids, guidance=guidance, use_cache=False).logits
    log_p = logits.log_softmax(-1).gather(2, every[:, :, None])[:, :, 0]
    found: dict[tuple[int, ...], float] = {}
    for row, values in zip(every.tolist(), log_p.tolist(), strict=True):
        size = row.index(end) + 1 if end in row else length
        found[tuple(row[:size])] = sum(values[:size]) / size**penalty
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@every_plan
def test_enough_beams_find_the_best_of_all_translations(name: str, penalty: float) -> None:
    model = talkative(vocab_size=6, decoder_vocab_size=6)
    handle = install(model, PLANS[name])
    sources = {k: v % 6 if k == "input_ids" else v for k, v in batch((5, 3), seed=3).items()}
    sources["input_ids"] = sources["input_ids"].where(sources["attention_mask"].bool(), 1)
    found = translate(model, handle, sources, beams=220, max_length=4, length_penalty=penalty, early_stopping="never")
    for b in range(2):
        scores = _scores(model, handle, {k: v[b : b + 1] for k, v in sources.items()}, 4, penalty)
        best = max(scores, key=scores.__getitem__)
        assert found[b] == [token for token in best if token != model.config.eos_token_id]


@every_plan
def test_a_source_is_translated_the_same_alone_and_in_a_padded_batch(name: str) -> None:
    model = talkative()
    handle = install(model, PLANS[name])
    sources = batch((7, 4, 5))
    together = translate(model, handle, sources, beams=3, max_length=6)
    for b, length in enumerate((7, 4, 5)):
        alone = {key: value[b : b + 1, :length] for key, value in sources.items()}
        assert translate(model, handle, alone, beams=3, max_length=6) == [together[b]]


def test_one_beam_is_greedy() -> None:
    model, sources = talkative(), batch()
    handle = install(model, Plan())
    greedy = translate(model, handle, sources, beams=1, max_length=5)
    ids = torch.zeros(len(sources["input_ids"]), 1, dtype=torch.long)
    for _ in range(5):
        logits = model(**sources, decoder_input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    assert greedy == [_until(row, 2) for row in ids[:, 1:].tolist()]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_return_sequences": 2, "num_beams": 4},
        {"return_dict_in_generate": True, "output_scores": True},
        {"num_beam_groups": 2, "diversity_penalty": 1.0},
        {"penalty_alpha": 0.5, "top_k": 3},
        {"stop_strings": ["a"]},
        {"token_healing": True},
        {"max_time": 0.0},
    ],
    ids=str,
)
def test_the_generation_configuration_of_a_model_does_not_change_the_search(
    settings: dict[str, Any], beams: int
) -> None:
    model, sources = tiny_model("bart"), pair_batch()
    inputs = {name: sources[name] for name in ("input_ids", "attention_mask")}
    expected = translate(model, None, inputs, beams=beams, max_length=5)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    assert translate(model, None, inputs, beams=beams, max_length=5) == expected
    assert all(getattr(model.generation_config, name) == value for name, value in settings.items()), "it is put back"


@pytest.mark.parametrize("settings", [{"bad_words_ids": [[10_000]]}, {"decoder_start_token_id": 10_000}], ids=str)
def test_a_generation_configuration_with_unknown_tokens_is_refused(settings: dict[str, Any]) -> None:
    model, sources = tiny_model("bart"), pair_batch()
    inputs = {name: sources[name] for name in ("input_ids", "attention_mask")}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(InputError, match="the model cannot generate"):
        translate(model, None, inputs, max_length=5)


def _until(row: list[int], end: int) -> list[int]:
    return row[: row.index(end)] if end in row else row


# plans at work while it decodes


def test_masks_that_read_features_act_in_the_encoder_during_decoding() -> None:
    """Two segments cannot see each other: changing a word of the second does not change the states of the first."""
    model = talkative()
    handle = install(model, Plan((Guide("same_segment", "mask"),)))
    sources = batch((6,))
    segment = torch.tensor([[0, 0, 0, 1, 1, 1]])
    states: list[Tensor] = []
    hook = model.get_encoder().register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state))
    changed = dict(sources)
    changed["input_ids"] = sources["input_ids"].clone()
    changed["input_ids"][0, 4] = 3 + (int(sources["input_ids"][0, 4]) - 2) % 37
    for inputs in (sources, changed):
        translate(model, handle, inputs, {"segment": segment}, beams=2, max_length=4)
    translate(model, handle, changed, {"segment": torch.zeros_like(segment)}, beams=2, max_length=4)
    hook.remove()
    before, after, open_ = states
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])
    assert not torch.allclose(after[:, :3], open_[:, :3])


def test_a_plan_of_losses_changes_neither_decoding_nor_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sources = talkative(), batch()
    expected = translate(model, None, sources, beams=3, max_length=5)
    handle = install(model, Plan((Guide("next", "attention_loss"), Guide("self", "attention_loss", stack="decoder"))))
    lengths = _decoder_lengths(model)
    assert translate(model, handle, sources, beams=3, max_length=5) == expected
    assert set(lengths) == {1}


@every_plan
def test_a_decoder_reads_each_token_once(name: str) -> None:
    model = talkative()
    handle = install(model, PLANS[name])
    lengths = _decoder_lengths(model)
    translate(model, handle, batch(), beams=2, max_length=4)
    assert set(lengths) == {1}


def _decoder_lengths(model: Any) -> list[int]:
    """A list that records how many tokens the decoder reads in each call."""
    lengths: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    return lengths


def test_translating_restores_the_mode_of_the_model() -> None:
    model = talkative().train()
    translate(model, None, batch(), beams=2, max_length=3)
    assert all(module.training for module in model.modules())


# two vocabularies


class _Tokenizer:
    """A tokenizer whose full stop is this token."""

    cls_token_id, sep_token_id, bos_token_id, eos_token_id = 0, 2, None, None

    def __init__(self, size: int, period: int) -> None:
        self.size, self.period = size, period

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {"." if n == self.period else f"w{n}": n for n in range(self.size)}


def test_a_decoder_with_its_own_vocabulary_is_guided_by_it() -> None:
    """The token that is the full stop of the decoder, and beyond the encoder's vocabulary, is what its heads look at."""
    model = talkative(vocab_size=20, decoder_vocab_size=40, share_encoder_decoder_embeddings=False)
    plan = Plan((Guide("period", "mask", stack="decoder"), Guide("period", "attention_loss")))
    handle = install(model, plan, _Tokenizer(20, 5), decoder_tokenizer=_Tokenizer(40, 30))
    sources = {"input_ids": torch.tensor([[0, 5, 6, 2]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    guidance = handle.guide(**sources, decoder_input_ids=torch.tensor([[0, 30, 5, 30]]))
    assert guidance.tokens["decoder"].columns["character"].tolist() == [[0, ord("."), 0, ord(".")]]
    assert guidance.tokens["encoder"].columns["character"].tolist() == [[0, ord("."), 0, 0]]
    handle.remove()
    install(model, Plan(plan.guides[:1]), decoder_tokenizer=_Tokenizer(40, 30)).remove()  # the other is not needed
    with pytest.raises(PlanError, match="needs the feature character"):
        install(model, plan, decoder_tokenizer=_Tokenizer(40, 30))
    handle.install()
    assert translate(model, handle, sources, beams=2, max_length=4)
