"""Decoding with a cache gives what a pass over the whole text gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from guidance.errors import InputError
from guidance.guide import Guide
from guidance.guided_model import leading
from guidance.patterns.catalogue import PATTERNS, register_pattern
from guidance.patterns.features import FEATURES, register_feature
from guidance.plan import Plan
from tests.guidance.models import DECODERS, MAIN_DECODERS, SEQ2SEQ, batch, tiny_model
from tests.guidance.plans import guide, install_plan, installed

RIGHT = batch((9, 6, 4))
LEFT = {name: tensor.flip(-1) for name, tensor in RIGHT.items()}
PIECES = (4, 2, 1, 1, 1)
MATCHING = {"name": "matching_token", "unique": "self"}


def row(mechanism: str, pattern: Any, *heads: int, **more: Any) -> Guide:
    return guide(mechanism, pattern, *heads, stack="decoder", **more)


PLANS: Mapping[str, tuple[Guide, ...]] = {
    "mask": (row("mask", "window", 0), row("mask", MATCHING, 1, 2), row("mask", "previous", 3, scale="d_model")),
    "bias": (
        row("bias", "first", 1),
        row("bias", {"sum": ["previous", "self"]}, 2, schedule="linear"),
        row("bias", {"where": "query.id > key.id"}, 0, learn=True),
    ),
    "fix": (
        row("fix", "previous", 1),
        row("fix", "first", 3, schedule="cosine"),
        row("fix", "delimiter", 0, boundary="self"),
        row("fix", {"not": "period"}, 2),
    ),
    "gaussian": (row("gaussian", "", 0, 1), row("gaussian", "", 3, offsets=[-3])),
    "off": (row("off", "", 2),),
    "gate": (row("gate", "", 0), row("mask", "window", 0)),
    "gate, query": (row("gate", "", 0, 2, input="query", elementwise=True),),
    "mix": (
        row("mix", "previous", of=["stream"]),
        row("mix", {"where": "distance == -2"}, of=["stream"]),
        row("mix", "previous", 0, 2, of=["value", "output"]),
        row("mix", "window", 0, 1, of=["value", "output"]),
        row("mix", MATCHING, of=["stream"], schedule="linear"),
    ),
    "mix, projections": (row("mix", "previous", of=["input"]), row("mix", "window", 0, 2, of=["query"])),
    "mix, keys": (row("mix", "previous", 0, 2, of=["key"]), row("mix", MATCHING, 1, of=["key", "query"])),
}
_ONE_PROJECTION = ("gpt_neox", "phi3", "gpt_bigcode")
"""Families that mix no projections."""
_OWN_KEYS = ("gpt2", "opt", "biogpt", *SEQ2SEQ)
"""Families whose heads do not share keys."""

CASES = [
    (family, name)
    for family in (*DECODERS, *SEQ2SEQ)
    for name in PLANS
    if not (name == "mix, projections" and family in _ONE_PROJECTION) and (name != "mix, keys" or family in _OWN_KEYS)
]
MIXED_EXPERTS = ("mixtral", "qwen3_moe")
"""Families that PyTorch does not compute in double precision."""

CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "whole": lambda config: DynamicCache(),  # also in layers with a window
    "static": lambda config: StaticCache(config=config, max_cache_len=12),
}


def guided(family: str, plan: Plan) -> PreTrainedModel:
    model, _ = installed(family, plan)
    return model if family in MIXED_EXPERTS else model.double()


def arguments(family: str, inputs: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """The tokens from one place to another, with the mask of all so far; sources are the same in every call."""
    ids, mask = inputs["input_ids"][:, start:stop], inputs["attention_mask"][:, :stop]
    if family not in SEQ2SEQ:
        return {"input_ids": ids, "attention_mask": mask}
    return {**batch((7, 4, 5)), "decoder_input_ids": ids, "decoder_attention_mask": mask}


def in_pieces(model: PreTrainedModel, family: str, inputs: Mapping[str, Tensor], cached: Cache) -> Tensor:
    """The logits of all tokens, read a few at a time."""
    cached = EncoderDecoderCache(cached, DynamicCache()) if family in SEQ2SEQ else cached
    logits, start = [], 0
    for size in PIECES:
        given = arguments(family, inputs, start, start + size)
        logits.append(model(**given, past_key_values=cached).logits)
        start += size
    return torch.cat(logits, dim=1)


@pytest.mark.one_in(13)
@pytest.mark.parametrize(("family", "name"), CASES)
@torch.no_grad()
def test_a_text_read_in_pieces_gives_what_the_whole_gives(family: str, name: str) -> None:
    model = guided(family, Plan(PLANS[name]))
    tolerance = 1e-9 if model.dtype == torch.float64 else 3e-5
    for inputs in (RIGHT, LEFT):
        whole = model(**arguments(family, inputs, 0, 9), use_cache=False).logits
        valid = inputs["attention_mask"].bool()
        for make in CACHES.values():
            pieces = in_pieces(model, family, inputs, make(model.config))
            torch.testing.assert_close(pieces[valid], whole[valid], rtol=0, atol=tolerance)


@torch.no_grad()
def test_a_cache_in_single_precision_gives_logits_within_1e_5() -> None:
    for family in ("gpt2", "gemma2"):
        model, _ = installed(family, Plan(PLANS["bias"]), initializer_range=0.2)
        whole = model(**RIGHT).logits
        pieces = in_pieces(model, family, RIGHT, DynamicCache())
        valid = RIGHT["attention_mask"].bool()
        torch.testing.assert_close(pieces[valid], whole[valid], rtol=0, atol=1e-5)


# generation

EVERYTHING = Plan(
    (
        guide("mask", "window", 0),
        guide("bias", "first", 1),
        guide("fix", "previous", 2),
        guide("gate", "", 0, 1, 3, input="query"),
        guide("mix", "previous", of=["stream"]),
        guide("mix", MATCHING, 0, 3, of=["value", "output"]),
    )
)
MARKED = Plan(
    (
        guide("bias", "marked", 0, 1),
        guide("mask", {"or": ["marked", "self"]}, 2),
        guide("mix", "marked", 1, 3, of=["value"], learn=False, strength=0.5),
        guide("mix", "marked", of=["stream"], learn=False, strength=0.1),
    )
)
PROMPTS = {name: tensor.flip(-1) for name, tensor in batch((7, 4, 5)).items()}
MARKS = PROMPTS["input_ids"] % 3 == 0
SETTINGS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True, "cache_implementation": "static"},
    "in chunks": {"prefill_chunk_size": 3},
}


def generated(model: PreTrainedModel, prompts: Mapping[str, Tensor], **settings: Any) -> Tensor:
    torch.manual_seed(3)
    length = {"max_new_tokens": 6, "min_new_tokens": 6}
    found: Tensor = model.generate(**prompts, **{"num_beams": 1, "do_sample": False, **length, **settings})
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", MAIN_DECODERS)
@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("is_marked", [False, True])
def test_generation_with_a_cache_gives_the_tokens_of_whole_passes(family: str, how: str, is_marked: bool) -> None:
    model, handle = installed(family, MARKED if is_marked else EVERYTHING)
    model.double()
    prompts = {**PROMPTS, "marked": MARKS} if is_marked else PROMPTS
    search = {name: value for name, value in SETTINGS[how].items() if name.startswith(("do", "num"))}
    whole = generated(model, prompts, use_cache=False, **search)
    assert torch.equal(generated(model, prompts, guidance=handle, **SETTINGS[how]), whole)


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_tokens_that_another_model_guesses_are_dropped_again(family: str) -> None:
    model = guided(family, EVERYTHING)
    prompt = {name: tensor[:1] for name, tensor in PROMPTS.items()}
    whole = generated(model, prompt, use_cache=False)
    for assistant in (tiny_model(family, seed=1).double(), copy.deepcopy(model)):
        assert torch.equal(generated(model, prompt, assistant_model=assistant), whole)
    assert torch.equal(generated(model, prompt, prompt_lookup_num_tokens=3), whole)


@torch.no_grad()
def test_a_guided_assistant_knows_the_features_of_the_prompt() -> None:
    model = guided("llama", MARKED)
    prompt = {name: tensor[:1] for name, tensor in (*PROMPTS.items(), ("marked", MARKS))}
    whole = generated(model, prompt, use_cache=False)
    assert torch.equal(generated(model, prompt, assistant_model=copy.deepcopy(model)), whole)
    assert not torch.equal(generated(model, {**prompt, "marked": ~MARKS[:1]}), whole)


@torch.no_grad()
def test_new_tokens_are_not_marked() -> None:
    model, handle = installed("gpt2", MARKED)
    tokens = generated(model, {**PROMPTS, "marked": MARKS})
    mask = torch.cat([PROMPTS["attention_mask"], torch.ones(3, 5, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {"input_ids": tokens[:, :-1], "attention_mask": mask}
    marked = torch.cat([MARKS, torch.zeros(3, 5, dtype=torch.bool)], dim=1)
    guidance = handle.guide(**given, marked=marked)
    logits = model(**given, position_ids=positions, guidance=guidance).logits[:, 6:]
    logits[..., model.config.eos_token_id] = -torch.inf
    assert torch.equal(logits.argmax(-1), tokens[:, 7:])


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
def test_what_a_model_has_written_counts_as_marked_where_a_row_says_so(use_cache: bool) -> None:
    def plan(**options: Any) -> Plan:
        return Plan((guide("bias", "marked", 0, 1, inside=1.0, outside=0.01, **options),))

    model = guided("llama", plan(written=True))
    tokens = generated(model, {**PROMPTS, "marked": MARKS}, use_cache=use_cache)
    assert not torch.equal(tokens, generated(guided("llama", plan()), {**PROMPTS, "marked": MARKS}))
    assert not torch.equal(
        tokens, generated(model, {**PROMPTS, "marked": MARKS, "written": PROMPTS["attention_mask"].bool()})
    )
    new = tokens.shape[1] - MARKS.shape[1]
    mask = torch.cat([PROMPTS["attention_mask"], torch.ones(3, new, dtype=torch.long)], dim=1)[:, :-1]
    marked = torch.cat([MARKS, torch.ones(3, new, dtype=torch.bool)], dim=1)[:, :-1]
    given = {"input_ids": tokens[:, :-1], "attention_mask": mask}
    other, handle = installed("llama", plan())
    guidance = handle.guide(**given, marked=marked)
    logits = other(**given, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), guidance=guidance).logits[
        :, MARKS.shape[1] - 1 :
    ]
    logits[..., other.config.eos_token_id] = -torch.inf
    assert torch.equal(logits.argmax(-1), tokens[:, MARKS.shape[1] :])


@torch.no_grad()
def test_a_decoder_reads_features_of_its_own_with_a_cache() -> None:
    plan = Plan((row("mask", "marked", 0, 1), guide("bias", "marked", 0, stack="decoder", attention="cross")))
    model = guided("bart", plan)
    sources = batch((7, 4, 5))
    features = {"marked": sources["input_ids"] % 2 == 0}
    features["decoder_marked"] = torch.ones(3, 1, dtype=torch.bool)
    for beams in (1, 3):
        found = [
            generated(model, {**sources, **features}, num_beams=beams, use_cache=use_cache)
            for use_cache in (False, True)
        ]
        assert torch.equal(*found)


# what a cache keeps


@torch.no_grad()
def test_a_copied_cache_keeps_what_it_was_filled_with() -> None:
    model = guided("gpt2", EVERYTHING)
    expected = model(**RIGHT).logits[:, 5:][RIGHT["attention_mask"][:, 5:].bool()]
    filled = DynamicCache(config=model.config)
    model(**arguments("gpt2", RIGHT, 0, 5), past_key_values=filled)
    for cached in (copy.deepcopy(filled), pickle.loads(pickle.dumps(filled))):
        assert isinstance(cached, DynamicCache) and repr(cached) == repr(DynamicCache(config=model.config))
        found = model(**arguments("gpt2", RIGHT, 5, 9), past_key_values=cached).logits
        torch.testing.assert_close(found[RIGHT["attention_mask"][:, 5:].bool()], expected, rtol=0, atol=1e-9)
    assert filled.get_seq_length() == 5


@torch.no_grad()
def test_what_happens_to_a_cache_happens_to_what_it_keeps() -> None:
    model = guided("llama", EVERYTHING)
    full = batch((9, 9, 9))
    whole = model(**full).logits
    cached = DynamicCache()
    model(**arguments("llama", full, 0, 8), past_key_values=cached)
    cached.crop(-3)
    cached.batch_select_indices(torch.tensor([2, 0]))
    cached.batch_repeat_interleave(2)
    cached.reorder_cache(torch.tensor([3, 0, 1]))
    index = torch.tensor([0, 2, 2])
    rest = {name: tensor[index] for name, tensor in arguments("llama", full, 5, 9).items()}
    found = model(**rest, past_key_values=cached).logits
    torch.testing.assert_close(found, whole[index, 5:], rtol=0, atol=1e-9)
    cached.reset()
    found = model(**arguments("llama", full, 0, 9), past_key_values=cached).logits
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-9)


def forked(cached: Cache) -> Cache:
    """A cache with layers of its own, which shares all tensors."""
    fork = copy.copy(cached)
    fork.layers = [copy.copy(layer) for layer in cached.layers]
    return fork


@torch.no_grad()
def test_forks_of_a_cache_continue_in_their_own_ways() -> None:
    """States of new tokens are written behind those of earlier ones, and two forks share these."""
    model = guided("llama", EVERYTHING)
    first = batch((9, 9, 9))
    second = {**first, "input_ids": torch.cat([first["input_ids"][:, :6], first["input_ids"][:, :3]], dim=1)}
    cached = DynamicCache()
    for start, stop in ((0, 5), (5, 6)):
        model(**arguments("llama", first, start, stop), past_key_values=cached)
    other = forked(cached)
    found: dict[str, list[Tensor]] = {"first": [], "second": []}
    for start in (6, 7, 8):
        for name, text, own in (("first", first, cached), ("second", second, other)):
            found[name].append(model(**arguments("llama", text, start, start + 1), past_key_values=own).logits)
    for name, text in (("first", first), ("second", second)):
        expected = model(**text).logits[:, 6:]
        torch.testing.assert_close(torch.cat(found[name], dim=1), expected, rtol=0, atol=1e-9)


@torch.no_grad()
def test_what_a_model_read_and_returned_is_never_written_to() -> None:
    model, full = guided("llama", EVERYTHING), batch((9, 9, 9))
    handle, read = leading(model), {"output_hidden_states": True}
    embedded = model.get_input_embeddings()(full["input_ids"][:, :6]).clone()
    given, cached = embedded.clone(), DynamicCache()
    made = handle.at_inference(**arguments("llama", full, 0, 6))["guidance"]
    states = model(
        inputs_embeds=given, attention_mask=full["attention_mask"][:, :6], past_key_values=cached, guidance=made, **read
    ).hidden_states
    kept = [each.clone() for each in states]
    cached.crop(-3)
    model(**arguments("llama", full.copy() | {"input_ids": full["input_ids"].flip(1)}, 3, 5), past_key_values=cached)
    assert torch.equal(given, embedded)
    assert all(map(torch.equal, states, kept))


@pytest.mark.parametrize("pieces", [(5, 4), (4, 3, 2)])
def test_gradients_reach_weights_through_a_cache_in_several_pieces(pieces: tuple[int, ...]) -> None:
    plan = Plan((row("mix", "previous", of=["stream"]), row("mix", "previous", 0, 2, of=["value"])))
    full, found = batch((9, 9, 9)), []
    for sizes in ((9,), pieces):
        model, start, logits = guided("gpt2", plan), 0, []
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".guided." in name)
        cached = DynamicCache()
        for size in sizes:
            logits.append(model(**arguments("gpt2", full, start, start + size), past_key_values=cached).logits)
            start += size
        torch.cat(logits, dim=1).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert any("mix" in name for name in found[0])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_a_cache_in_single_precision_is_continued_under_autocast() -> None:
    model, _ = installed("gpt2", Plan((row("mix", "first", 0, 2, of=["query", "output"]),)))
    full, cached = batch((9, 9, 9)), DynamicCache()
    model(**arguments("gpt2", full, 0, 5), past_key_values=cached)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**arguments("gpt2", full, 5, 9), past_key_values=cached).logits
    torch.testing.assert_close(found.float(), model(**full).logits[:, 5:], rtol=0.1, atol=0.3)


@torch.no_grad()
def test_a_cache_is_not_continued_at_another_step_of_training() -> None:
    model, handle = installed("gpt2", Plan((row("mix", "previous", of=["value"], learn=False, schedule="linear"),)))
    full, cached = batch((9, 9, 9)), DynamicCache()
    handle.advance(2, 10)
    model(**arguments("gpt2", full, 0, 5), past_key_values=cached)
    handle.advance(3, 10)
    with pytest.raises(InputError, match="at another step of training"):
        model(**arguments("gpt2", full, 5, 9), past_key_values=cached)


@torch.no_grad()
def test_a_cache_may_drop_more_tokens_than_its_last_call_has_added() -> None:
    model = guided("gpt2", EVERYTHING)
    full = batch((9, 9, 9))
    cached = DynamicCache()
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8)):
        model(**arguments("gpt2", full, start, stop), past_key_values=cached)
    cached.crop(-3)
    found = model(**arguments("gpt2", full, 5, 9), past_key_values=cached).logits
    torch.testing.assert_close(found, model(**full).logits[:, 5:], rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_model_that_makes_its_cache_itself_lets_it_keep_what_guides_have_read() -> None:
    model, handle = installed("gpt2", EVERYTHING)
    model.double()
    whole = model(**RIGHT).logits
    given = arguments("gpt2", RIGHT, 0, 5)
    cached = model(**given, guidance=handle.at_inference(**given)["guidance"], return_dict=False)[1]
    rest = arguments("gpt2", RIGHT, 5, 9)
    guidance = handle.at_inference(**RIGHT)["guidance"]  # of all tokens so far
    found = model(**rest, past_key_values=cached, guidance=guidance).logits
    valid = RIGHT["attention_mask"][:, 5:].bool()
    torch.testing.assert_close(found[valid], whole[:, 5:][valid], rtol=0, atol=1e-9)


# what is refused


def refused(model: PreTrainedModel, cached: Any, message: str, **more: Any) -> InputError:
    with torch.no_grad(), pytest.raises(InputError, match=message) as raised:
        model(**arguments("", RIGHT, 5, 9), past_key_values=cached, **more)
    return raised.value


def test_a_cache_that_guides_have_not_read_is_refused() -> None:
    plain = tiny_model("llama")
    model, _ = installed("llama", Plan(PLANS["mask"]))
    with torch.no_grad():
        cached = plain(**arguments("", RIGHT, 0, 5)).past_key_values
        assert "empty cache" in str(refused(model, cached, "holds 5 tokens that were read without the plan").hint)
        other, _ = installed("llama", Plan(PLANS["bias"]))
        cached = other(**arguments("", RIGHT, 0, 5)).past_key_values
        refused(model, cached, "read without the plan")
        cached = model(**arguments("", RIGHT, 0, 5)).past_key_values
        for layer in cached.layers:
            layer.crop(-1)
        refused(model, cached, "holds 4 tokens, and was filled with 5")
        refused(model, ((),), "is a tuple, not a cache")


def test_losses_read_whole_texts() -> None:
    model, handle = installed("llama", Plan((*PLANS["mask"], guide("attention_loss", "previous", 0))))
    with torch.no_grad():
        cached = model(**arguments("", RIGHT, 0, 5)).past_key_values
        hint = refused(model, cached, "losses and attacks on heads read whole", guidance=handle.guide(**RIGHT)).hint
    assert "at_inference" in str(hint)


@torch.no_grad()
def test_a_boundary_of_all_tokens_is_refused_where_a_cache_drops_some() -> None:
    model = guided("mistral", Plan((guide("fix", "none", 0, boundary="all"),)))
    whole = model(**RIGHT).logits
    pieces = in_pieces(model, "mistral", RIGHT, DynamicCache())
    valid = RIGHT["attention_mask"].bool()
    torch.testing.assert_close(pieces[valid], whole[valid], rtol=0, atol=1e-9)
    with pytest.raises(InputError, match='boundary = "all" reads all earlier tokens') as raised:
        in_pieces(model, "mistral", RIGHT, DynamicCache(config=model.config))
    assert "DynamicCache()" in str(raised.value.hint)


def test_features_of_pairs_need_whole_texts() -> None:
    register_feature("near", "bool", "is near", package=__name__, of_pairs=True)
    register_pattern("near", lambda tokens: tokens.column("near"), source="a test", needs=("near",))
    try:
        model, _ = installed("llama", Plan((guide("mask", "near", 0, 1),)))
        prompts = {**PROMPTS, "near": torch.rand(3, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.5}
        assert generated(model, prompts, use_cache=False).shape == (3, 13)
        with pytest.raises(InputError, match="near has a value for each pair of tokens"):
            generated(model, prompts)
        with torch.no_grad():
            cached = model(**arguments("", RIGHT, 0, 5), near=torch.ones(3, 5, 5, dtype=torch.bool)).past_key_values
        refused(model, cached, "the batch has no feature 'near'")
    finally:
        PATTERNS.remove("near")
        FEATURES.remove("near")


def test_a_part_of_a_model_is_not_told_what_its_cache_holds() -> None:
    model, handle = installed("llama", Plan(PLANS["fix"]))
    part: Any = model.model
    with torch.no_grad():
        cached = model(**arguments("", RIGHT, 0, 5)).past_key_values
        given = arguments("", RIGHT, 5, 9)
        with pytest.raises(InputError, match="nothing tells them which tokens this cache"):
            part(**given, past_key_values=cached, guidance=handle.guide(RIGHT["input_ids"][:, 5:]))


def test_generate_says_what_it_takes_as_guidance() -> None:
    model, handle = installed("llama", MARKED)
    with pytest.raises(InputError, match="takes the handle of the plan") as raised:
        generated(model, PROMPTS, guidance=handle.guide(**PROMPTS, marked=MARKS))
    assert "marked=marked" in str(raised.value.hint)
    with pytest.raises(InputError, match="marked has a length of 5, and the prompt one of 7"):
        generated(model, {**PROMPTS, "marked": MARKS[:, :5]})
    with pytest.raises(InputError, match="the batch has no feature 'marked'"):
        generated(model, PROMPTS)
    losses, other = installed("llama", Plan((guide("attention_loss", "previous", 0),)))
    plain = install_plan(tiny_model("llama"), Plan())
    assert torch.equal(generated(losses, PROMPTS, guidance=other), generated(plain.model, PROMPTS, guidance=plain))
