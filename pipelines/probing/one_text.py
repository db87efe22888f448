"""Where a trained model looks on one text, and which patterns its heads come closest to there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from guidance.errors import InputError
from guidance.patterns.features import Tokens, Vocabulary
from guidance.probes.relevance import highest_entropy, keys_of, masses, uniform
from guidance.sites import Site
from pipelines.probing.heads import no_such_head
from pipelines.probing.patterns import measurable
from pipelines.probing.sequences import token_labels
from pipelines.probing.watched import WatchedModel
from pipelines.training.text_words import TextWords

BARELY = 0.9
"""A pattern that covers so much of what every token may look at tells nothing of a head."""


@dataclass(frozen=True)
class HeadOnText:
    """One head on a text.

    Attributes:
        entropy: the mean over rows, from 0, one key, to 1, all keys alike.
        closest: patterns, each with the share of attention on it, and that divided by the share of even attention; the highest
            quotient first.
    """

    layer: int
    head: int
    kind: str
    entropy: float
    closest: Sequence[tuple[str, float, float]]


@dataclass(frozen=True)
class TextAttention:
    """A text, as a model reads it.

    Attributes:
        labels: of its tokens.
        maps: of each site (H, T, T), float32.
        heads: in the order of layers.
        cut: whether the text was too long and was cut.
    """

    labels: Sequence[str]
    maps: Mapping[Site, np.ndarray]
    heads: Sequence[HeadOnText]
    cut: bool

    def map(self, layer: int, head: int, kind: str = "self") -> np.ndarray:
        """The attention of one head, (T, T).  Raises InputError if the model has no such head."""
        for site, maps in self.maps.items():
            if site.layer == layer and site.attention == kind and 0 <= head < site.num_heads:
                attention_TT: np.ndarray = maps[head]
                return attention_TT
        raise no_such_head(layer, head, [(site.layer, site.num_heads - 1) for site in self.maps])


def look(
    folder: Path,
    text: str,
    *,
    length: int = 512,
    device: str = "auto",
    random_seed: int | None = None,
    words: TextWords | None = None,
) -> TextAttention:
    """The attention of a model on a text.

    Args:
        length: how many tokens are read at most.
        random_seed: of random weights for a model of the same shape without a plan; None for the model itself with its plan at
            work.
        words: finds the words of the text, and what the plan and patterns read of them; by default rules do.

    Raises:
        InputError: the text is empty, or the model an encoder-decoder.
        PlanError: the plan needs more than text.
    """
    if not text.strip():
        raise InputError("the text is empty", hint='for example: --text "The dog saw the man, and it barked."')
    words = words or TextWords()
    model = WatchedModel(folder, length=length, device=device, random_seed=random_seed, words=words)
    model.needed = tuple(dict.fromkeys((*model.needed, *words.names)))
    batch = model.read([text])
    ids_BT, valid_BT = batch.inputs["input_ids"], batch.inputs["attention_mask"].bool()
    wrapped = model.wrapped_tokenizer()
    columns = {**Vocabulary.from_tokenizer(wrapped).columns(ids_BT), **batch.columns}
    tokens = Tokens(ids_BT, valid_BT, columns, {})
    patterns, _ = measurable([], words.names)
    wanted = torch.stack([keys_of(pattern, tokens) for pattern in patterns.values()], dim=1)
    even = uniform(wanted, valid_BT, is_causal=model.is_causal)[0].tolist()
    most = float(highest_entropy(valid_BT, is_causal=model.is_causal))
    maps: dict[Site, np.ndarray] = {}
    heads: list[HeadOnText] = []

    def watch(site: Site, attention_BHTT: torch.Tensor) -> None:
        maps[site] = attention_BHTT[0].float().cpu().numpy()
        found_HP = masses(attention_BHTT, wanted, valid_BT)[0].tolist()
        entropy_H = -torch.special.xlogy(attention_BHTT[0].float(), attention_BHTT[0].float()).sum(-1).mean(-1)
        for head in range(site.num_heads):
            rows = zip(patterns, found_HP[head], even, strict=True)
            closest = [(name, share, share / chance) for name, share, chance in rows if 0 < chance < BARELY]
            closest.sort(key=lambda row: -row[2])
            spread = float(entropy_H[head]) / most
            heads.append(HeadOnText(site.layer, head, site.attention, spread, closest))

    model.handle.watch(watch, **batch.inputs, **batch.columns)
    heads.sort(key=lambda head: (head.kind != "self", head.layer, head.head))
    return TextAttention(token_labels(wrapped, ids_BT[0].cpu().numpy()), maps, heads, bool(model.cut))
