"""Calls of a guided model: each gets the guidance that its plan needs, or is refused where it is made.

`guide_batch` makes the guidance of a batch of a call's arguments, which it checks against what the plan reads.

`BeforeCall` runs before a model and before its encoder.  `keep_source` runs after the encoder: guides on cross-attention read
the tokens of the source, and a decoder that is called with ``encoder_outputs`` gets no ids of it.  So they travel with the
states, under names of their own, and whatever repeats the states for several beams repeats them too.

`keep_prefix` runs after the model: guides on a decoder's self-attention read earlier tokens, of which a call with a cache gets no ids.
So they travel with the cache; see `guidance.prefix`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from guidance.attention.function import NAME
from guidance.batch import BatchGuidance
from guidance.errors import InputError, did_you_mean
from guidance.generation import new_tokens, states_of
from guidance.guided_model import GuidedModel, leading
from guidance.patterns.features import FEATURES, INPUTS, Tokens, TokensWithoutIds, Vocabulary, is_feature
from guidance.prefix import Prefix, cache_of, keep, prefix_of

_SOURCE = "guide_source_"
"""What stands before the names under which the tokens of the source travel with the states of an encoder."""


def guide_batch(
    guided: GuidedModel, batch: Mapping[str, Any], *, step: int = 0, measuring: bool = True
) -> BatchGuidance:
    """The guidance of a batch of the arguments of `guidance.Handle.guide`; ``measuring``: losses will be asked for."""
    tokens = tokens_of(guided, batch)
    _check_features(guided, tokens, measuring)
    return BatchGuidance(guided, tokens, step, measuring=measuring, strengths=guided.strengths())


def tokens_of(guided: GuidedModel, batch: Mapping[str, Any]) -> dict[str, Tokens]:
    """The features of a batch by stack; the batch need not have all that the plan reads."""
    if not guided.is_installed:
        raise InputError("this plan is not installed in its model any more", hint="handle.install() puts it in again")
    columns = _columns(guided, batch)
    mine = {name: column for name, column in columns.items() if not name.startswith("decoder_")}
    theirs = {name.removeprefix("decoder_"): column for name, column in columns.items() if name not in mine}
    tokens: dict[str, Tokens] = {}
    for prefix, stack, own in (("", guided.stack_of_inputs, mine), ("decoder_", "decoder", theirs)):
        ids, embeddings = batch.get(f"{prefix}input_ids"), batch.get(f"{prefix}inputs_embeds")
        if ids is not None or embeddings is not None:
            tokens[stack] = _tokens(guided, ids, embeddings, batch.get(f"{prefix}attention_mask"), own, prefix)
    if not tokens:
        raise InputError(
            "there is no batch to guide", hint="give input_ids, and decoder_input_ids where a decoder is guided"
        )
    return tokens


def _columns(guided: GuidedModel, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The features in a batch; what is neither a feature nor an argument of the model is refused."""
    columns = {name: value for name, value in batch.items() if is_feature(name)}
    others = [name for name in batch if name not in INPUTS and name not in columns]
    known = inspect.signature(guided.model.forward).parameters if others else {}
    for name in others:
        if name not in known:
            feature = name.removeprefix("decoder_")
            raise InputError(
                f"there is no feature {feature!r}{did_you_mean(feature, FEATURES)}",
                hint=f"known: {', '.join(sorted(FEATURES))}",
            )
    for name, column in columns.items():
        if not isinstance(column, Tensor):
            raise InputError(
                f"the feature {name!r} is a {type(column).__name__}, not a tensor (B, T)",
                hint="guidance.FeatureCollator makes tensors of lists",
            )
    return columns


def _tokens(
    guided: GuidedModel,
    ids_BT: Tensor | None,
    embeddings_BTD: Any,
    mask_BT: Tensor | None,
    columns: Mapping[str, Tensor],
    prefix: str,
) -> Tokens:
    """The tokens of a stack, of which the ids or the embeddings are given."""
    if ids_BT is not None and (ids_BT.dim() not in (2, 3) or ids_BT.is_floating_point()):
        raise InputError(
            f"input_ids are {ids_BT.dtype} {tuple(ids_BT.shape)}, not whole numbers (B, T)",
            hint="give the batch that the model gets",
        )
    like_BT = embeddings_BTD[..., 0] if ids_BT is None else ids_BT
    if mask_BT is not None and mask_BT.dim() == 4:
        raise InputError(
            f"the attention mask is {tuple(mask_BT.shape)}, and patterns read which tokens are padding, (B, T)",
            hint="pass guidance=handle.guide(input_ids, padding_mask) beside a mask of your own, which must be boolean",
        )
    words_of = getattr(guided.model, "words_of", None)  # of models of words, which know padding by its id
    if mask_BT is None and ids_BT is not None and words_of is not None:
        mask_BT = words_of(ids_BT)
    valid_BT = torch.ones_like(like_BT, dtype=torch.bool) if mask_BT is None else mask_BT.bool()
    if like_BT.dim() == 3:  # (B, choices, T), which models of multiple choice flatten too
        like_BT, valid_BT = like_BT.flatten(0, 1), valid_BT.flatten(0, 1)
        columns = {name: column.flatten(0, 1) for name, column in columns.items()}
    if ids_BT is None:
        return TokensWithoutIds(like_BT, valid_BT, columns, guided.tables)
    vocabulary = guided.decoder_vocabulary if prefix else guided.vocabulary
    reads = guided.reads()
    names = [name for name in Vocabulary.FEATURES if prefix + name in reads]
    known = vocabulary.columns(like_BT, names) if vocabulary else {}
    return Tokens(like_BT, valid_BT, {**known, **columns}, guided.tables)


def _check_features(guided: GuidedModel, tokens: Mapping[str, Tokens], measuring: bool) -> None:
    """Raises InputError if a batch lacks features that the plan reads."""
    lacking: dict[str, str] = {}
    for name, label in guided.needs(training=measuring).items():
        stack = "decoder" if name.startswith("decoder_") else guided.stack_of_inputs
        if stack in tokens and name.removeprefix("decoder_") not in tokens[stack].columns:
            lacking[name] = label
    if lacking:
        names, labels = (", ".join(map(repr, dict.fromkeys(each))) for each in (lacking, lacking.values()))
        sources = dict.fromkeys(FEATURES[name.removeprefix("decoder_")].source for name in lacking)
        raise InputError(
            f"the batch has no feature {names}, which the plan reads (guide {labels})", hint="\n".join(sources)
        )


class BeforeCall:
    """A hook before a model runs: it adds the guidance that the call lacks, and makes it record what was asked for."""

    def __init__(self, handle: GuidedModel, module: nn.Module) -> None:
        self.handle = handle
        self._reads_prefix = module is handle.model and handle.reads_prefix
        self._parameters = tuple(inspect.signature(type(module).forward).parameters)[1:]
        parts = [part for part in handle.model.modules() if isinstance(part, PreTrainedModel)]
        self._configs = [part.config for part in parts if part.config._attn_implementation == NAME]

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if kwargs.get("guidance") is self.handle:  # as `generate` takes it: the plan acts with or without it
            kwargs = {name: value for name, value in kwargs.items() if name != "guidance"}
            return self(module, args, kwargs) or (args, kwargs)
        passed = kwargs.get("guidance")
        if leading(self.handle.model) is not self.handle or not (passed is None or isinstance(passed, BatchGuidance)):
            return None
        asked = kwargs.get("output_attentions")
        recording = getattr(self.handle.model.config, "output_attentions", False) if asked is None else asked
        if passed is None and not (self.handle.shaping or recording):
            return None
        _refuse_sharded(self.handle.model)
        if any(config._attn_implementation != NAME for config in self._configs):
            raise InputError(
                "the attention implementation of this model was changed after its plan was installed",
                hint=f"config._attn_implementation = {NAME!r}, or handle.remove()",
            )
        if passed is not None and self.handle.shaping and passed.guided.plan != self.handle.plan:
            raise InputError(
                "the guidance is of another plan than the one that shapes this model's outputs",
                hint="make it by the handle of that plan, or remove that plan",
            )
        arguments = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        prefix = self._prefix(arguments) if self._reads_prefix else None
        guidance = passed if passed is not None else self._made(module, arguments, prefix)
        if guidance is None:
            return None
        if self._reads_prefix:
            guidance = self._with_cache(guidance, arguments, prefix)
        if guidance.documents is None and any(_is_own_mask(*argument) for argument in arguments.items()):
            guidance = guidance.but(has_own_mask=True)
        if passed is None:  # the features went into the guidance
            kwargs = {name: value for name, value in kwargs.items() if not is_feature(name)}
        if recording and guidance.recorded is None:
            guidance = guidance.but(recorded={})
        return args, {**kwargs, "guidance": guidance}

    def _prefix(self, arguments: Mapping[str, Any]) -> Prefix | None:
        """What the cache of a call keeps; None if there is none, or an empty one."""
        given = arguments.get("past_key_values")
        if given is None:
            return None
        if (cached := cache_of(given)) is None:
            raise InputError(f"past_key_values is a {type(given).__name__}, not a cache of transformers")
        if not (length := int(cached.get_seq_length())):
            return None
        prefix, plan = prefix_of(cached), self.handle.plan
        if prefix is None or (prefix.plan is not plan and prefix.plan != plan):
            raise InputError(
                f"the cache holds {length} tokens that were read without the plan of this model",
                hint="begin with an empty cache, or give all tokens without one",
            )
        fades = any(guide.fades for guide in self.handle.fading.values())
        if fades and prefix.progress != self.handle.progress:
            raise InputError(
                f"the cache holds {length} tokens that were read at another step of training, and guides fade in its course",
                hint="begin with an empty cache",
            )
        if prefix.length != length:
            raise InputError(
                f"the cache holds {length} tokens, and was filled with {prefix.length}",
                hint="change it by its own methods: crop, reorder_cache, batch_select_indices",
            )
        return prefix

    def _with_cache(
        self, guidance: BatchGuidance, arguments: Mapping[str, Any], prefix: Prefix | None
    ) -> BatchGuidance:
        """The guidance of a call that reads a cache, fills one, or both."""
        measures = guidance.attacking or (
            guidance.measuring and any(plan.measured() for plan in guidance.site_plans.values())
        )
        if prefix is not None and measures:
            raise InputError(
                "losses and attacks on heads read whole texts, and this call has a part of its text in a cache",
                hint="give all tokens without a cache; handle.at_inference(...) makes guidance that measures nothing",
            )
        keeps = arguments.get("past_key_values") is not None or arguments.get("use_cache") is not False
        return guidance.but(
            past=0 if prefix is None else prefix.length,
            earlier={} if prefix is None else prefix.states,
            kept={} if keeps and not torch.compiler.is_compiling() else None,
        )

    def _made(self, module: nn.Module, arguments: Mapping[str, Any], prefix: Prefix | None) -> BatchGuidance | None:
        """The guidance of a call that comes without; it measures no loss."""
        handle = self.handle
        batch = {name: value for name, value in arguments.items() if name in INPUTS or is_feature(name)}
        model: Any = handle.model
        has_labels = arguments.get("labels") is not None and model.config.is_encoder_decoder
        if (
            batch.get("decoder_input_ids") is None
            and has_labels
            and module is handle.model
            and handle.shapes("decoder")
        ):
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=arguments["labels"])
        source, target = (states_of(batch, side) for side in ("", "decoder_"))
        if source is None and target is None:
            reason = "this model's plan shapes its outputs" if handle.shaping else "output_attentions was asked for"
            raise InputError(
                f"{reason}, and there are no input_ids to make its guidance from",
                hint="pass guidance=handle.guide(...)",
            )
        if source is None and not handle.shapes("decoder"):
            return None
        tokens = tokens_of(handle, new_tokens(handle, batch, arguments.get("past_key_values")))
        if prefix is not None and "decoder" in tokens:
            tokens["decoder"] = prefix.before(tokens["decoder"])
        if source is None and handle.shapes("decoder", "cross"):
            tokens["encoder"] = self._source(arguments)
        _check_features(handle, tokens, measuring=False)
        return BatchGuidance(handle, tokens, measuring=False, strengths=handle.strengths())

    def _source(self, arguments: Mapping[str, Any]) -> Tokens:
        """The tokens of the source, which `keep_source` has put beside the encoder's states."""
        states = arguments.get("encoder_outputs")
        kept = states if isinstance(states, Mapping) else {}
        columns = {n.removeprefix(_SOURCE): c for n, c in kept.items() if n.startswith(_SOURCE)}
        if not columns:
            raise InputError(
                "guides on cross-attention read the source, and encoder_outputs come without its tokens",
                hint="pass what model.get_encoder()(...) returned as it is, or input_ids beside it",
            )
        kind = Tokens if "ids_BT" in columns else TokensWithoutIds
        valid_BT = columns.pop("valid_BT")
        return kind(columns.pop("ids_BT", valid_BT), valid_BT, columns, self.handle.tables)


def _is_own_mask(name: str, value: Any) -> bool:
    """Whether an argument of a model is a mask that says for each query which keys it may see, (B, 1, Q, K), or one for each kind
    of layer."""
    if isinstance(value, Mapping):
        return any(_is_own_mask(name, mask) for mask in value.values())
    return name.endswith("attention_mask") and isinstance(value, Tensor) and value.dim() == 4


def _refuse_sharded(model: nn.Module) -> None:
    """Raises InputError for the first FSDP, which flattens the weights of several modules, added ones too, into one."""
    if torch.compiler.is_compiling() or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise InputError(
            "guides are not carried through FullyShardedDataParallel",
            hint="fully_shard and DistributedDataParallel carry them",
        )


def keep_prefix(model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    """After a model has run: let the cache that it has filled keep what guides have read."""
    guidance = kwargs.get("guidance")
    if isinstance(guidance, BatchGuidance) and guidance.kept is not None:
        values = output.values() if isinstance(output, Mapping) else output
        cached = next((own for value in values if (own := cache_of(value)) is not None), None)
        if cached is not None:
            guided = guidance.guided
            keep(cached, guided.plan, guided.progress, guidance.tokens["decoder"], guidance.kept)


def keep_source(encoder: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    """After an encoder has run: put the tokens that it has read beside its states."""
    guidance = kwargs.get("guidance")
    if not (isinstance(guidance, BatchGuidance) and isinstance(output, ModelOutput)) or torch.compiler.is_compiling():
        return
    if (source := guidance.tokens.get("encoder")) is not None:
        ids = {} if isinstance(source, TokensWithoutIds) else {"ids_BT": source.ids_BT}
        for name, column in {**ids, "valid_BT": source.valid_BT, **source.columns}.items():
            output[_SOURCE + name] = column
