"""Translation with an encoder-decoder: the label-smoothed loss, and beam search.

Source: Vaswani et al. 2017, sections 5.4 (label smoothing) and 6.1 (beam search).  They use the length penalty of Wu et al.
2016; ours is that of transformers, a power of the length, where the end token counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from guidance.errors import InputError
from guidance.installation import Handle
from guidance.models.canary import evaluating


def shift_right(ids_BT: Tensor, start: int) -> Tensor:
    """The decoder inputs that predict these targets: ``start``, then all targets but the last, (B, T).

    Example:
        >>> shift_right(torch.tensor([[7, 8, 2]]), start=0).tolist()
        [[0, 7, 8]]
    """
    return torch.cat([torch.full_like(ids_BT[:, :1], start), ids_BT[:, :-1]], dim=1)


def translation_losses(logits_NV: Tensor, labels_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The label-smoothed loss and the negative log-likelihood of target tokens, in nats: two sums over the tokens.

    The smoothed loss of a token is (1 - e) * -log p(label) + e * the mean over the vocabulary of -log p.  Divide both by
    the number of target tokens of the whole batch, over all processes.

    Args:
        smoothing: e, from 0 to below 1; with 0 both sums are equal.

    Returns:
        Two scalars, 0 without targets; the second has no graph.

    Source: Szegedy et al. 2016, section 7; with e = 0.1 in Vaswani et al. 2017, section 5.4.
    """
    log_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).log_softmax(-1)
    likelihood = -log_NV.gather(1, labels_N[:, None]).sum()
    smoothed = (1 - smoothing) * likelihood - smoothing * log_NV.mean(-1).sum() if smoothing else likelihood
    return smoothed, likelihood.detach()


_OF_TOKENS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "min_length"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "repetition_penalty", "encoder_repetition_penalty"),
    *("renormalize_logits", "remove_invalid_values"),
)
"""Settings of a model's ``generation_config.json`` that say which tokens it may generate, and not how they are searched."""


@contextlib.contextmanager
def _own_search(generator: Any) -> Iterator[None]:
    """Within, the generation configuration of a model has only what it says of tokens."""
    given = generator.generation_config
    generator.generation_config = GenerationConfig(**{name: getattr(given, name, None) for name in _OF_TOKENS})
    try:
        yield
    finally:
        generator.generation_config = given


def translate(
    model: PreTrainedModel,
    handle: Handle | None,
    inputs: Mapping[str, Tensor],
    columns: Mapping[str, Tensor] | None = None,
    *,
    beams: int = 5,
    max_length: int = 128,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
) -> list[list[int]]:
    """Translations of a batch by beam search, or greedily with one beam.

    The installed plan acts during decoding.  The encoder runs once, with the token features of the sources.

    Args:
        inputs: ``input_ids`` and ``attention_mask``, each (B, T).
        columns: token features of the sources, each (B, T).
        max_length: greatest length of a translation in tokens, including its end.
        length_penalty: log-likelihoods are divided by the length to this power before they are compared; 0 favours short
            translations.
        early_stopping: True stops when as many translations are finished as there are beams; False when no open beam
            looks better; "never" when none can become better.

    Returns:
        The ids of the best translation of each source, without the end token.

    Raises:
        InputError: the columns lack a feature that the plan needs, or the generation configuration of the model cannot be used.
    """
    ids_BT, mask_BT = inputs["input_ids"], inputs["attention_mask"]
    extra: dict[str, Any] = {}
    if handle is not None:
        extra = handle.at_inference(input_ids=ids_BT, attention_mask=mask_BT, **(columns or {}))
    searching: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    generator: Any = model
    with evaluating(model), torch.no_grad(), _own_search(generator):
        encoder: Any = model.get_encoder()
        states = encoder(input_ids=ids_BT, attention_mask=mask_BT, **extra)
        try:
            generated = generator.generate(
                encoder_outputs=states,
                attention_mask=mask_BT,
                num_beams=beams,
                do_sample=False,
                max_new_tokens=max_length,
                use_cache=True,
                **(searching if beams > 1 else {}),
            )
        except (ValueError, IndexError) as error:
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(
                f"{model.name_or_path}: the model cannot generate ({line})", hint="look at its generation_config.json"
            ) from error
    end = model.config.eos_token_id
    rows = generated[:, 1:].tolist()  # without the start token
    return [row[: row.index(end)] if end in row else row for row in rows]
