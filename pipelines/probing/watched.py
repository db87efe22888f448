"""Opens a model for probes: it reads words, and a function is shown the attention between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import guidance
from guidance.errors import InputError
from guidance.plan import Plan
from guidance.probes.words import Mode, word_attention
from guidance.sites import Site
from pipelines.training.live_text import LiveModel
from pipelines.training.opening import Unguided


@dataclass(frozen=True)
class Read:
    """Words as a model reads them.

    Attributes:
        numbers: of each token the number of its word, as `guidance.probes.words.word_attention` takes them.
        words: of each such number the word of the text, from 0; None for a special token.
    """

    numbers: Sequence[int]
    words: Sequence[int | None]

    @cached_property
    def place(self) -> dict[int, int]:
        """From words of the text to their numbers; words that were cut off are missing."""
        return {word: number for number, word in enumerate(self.words) if word is not None}


def with_random_weights(model: Any, seed: int) -> Any:
    """A model of the same shape with random weights, without a plan."""
    torch.manual_seed(seed)
    return type(model)(model.config).to(next(model.parameters()).device).eval()


class WatchedModel(LiveModel):
    """A trained model, or one of its shape with random weights, with the heads of its encoder in view.

    Args:
        length: of texts, in tokens; longer ones are cut.
        random_seed: of random weights, which show what its shape alone can do; None for its own.
    """

    def __init__(self, folder: Path, *, length: int, device: str = "auto", random_seed: int | None = None) -> None:
        super().__init__(folder, device)
        if random_seed is not None:
            self.model = with_random_weights(self.model, random_seed)
        if random_seed is not None or isinstance(self.handle, Unguided):
            self.handle = guidance.install(self.model, Plan())
        self.tokenizer.enable_truncation(min(length, self.longest or length))

    def check(self, folder: Path, config: Any) -> None:
        if config.is_encoder_decoder:
            raise InputError(f"{folder}: an encoder-decoder; probes read encoders")

    def look(self, words: Sequence[str], watcher: Callable[[Site, torch.Tensor], object], mode: Mode = "mean") -> Read:
        """Read words, separated by spaces; the watcher gets each site with the attention between words, (H, W, W).

        Special tokens are words, and words that were cut off are missing; the result says which is which.
        """
        return self.look_at_all([words], lambda _, __, site, attention: watcher(site, attention), mode)[0]

    def look_at_all(
        self,
        texts: Sequence[Sequence[str]],
        watcher: Callable[[int, Read, Site, torch.Tensor], object],
        mode: Mode = "mean",
    ) -> list[Read]:
        """Read several texts in one batch; see `look`.  The watcher also gets the number of the text, and how it was read."""
        batch = self.read([" ".join(words) for words in texts])
        found = [_read(words, encoding) for words, encoding in zip(texts, batch.encodings, strict=True)]

        def watch(site: Site, attention_BHTT: torch.Tensor) -> None:
            for number, (read, attention_HTT) in enumerate(zip(found, attention_BHTT, strict=True)):
                length = len(read.numbers)
                watcher(
                    number, read, site, word_attention(attention_HTT[:, :length, :length].float(), read.numbers, mode)
                )

        self.handle.watch(watch, **batch.inputs, **batch.columns)
        return found

    def has_whole_words(self, words: Sequence[str], places: Sequence[int] | None = None) -> bool:
        """Whether all words fit, and each of them, or each at one of some places, is one token."""
        read = _read(words, self.tokenizer.encode(" ".join(words)))
        if len(read.place) < len(words):
            return False
        return all(read.numbers.count(read.place[word]) == 1 for word in places or range(len(words)))

    def fitting(self, words: Sequence[str]) -> int:
        """How many of these words can be read at once, at least one."""
        encoding = self.tokenizer.encode(" ".join(words))
        whole = len(_read(words, encoding).place)
        return max(1, whole - 1) if encoding.overflowing else len(words)  # the last word may be cut


def _read(words: Sequence[str], encoding: Any) -> Read:
    ends = np.cumsum([len(word) + 1 for word in words])  # a token may begin with the space before its word
    numbers: list[int] = []
    found: list[int | None] = []
    for (_, end), part in zip(encoding.offsets, encoding.sequence_ids, strict=True):
        word = None if part is None else int(np.searchsorted(ends, end - 1, side="right"))
        if not numbers or word is None or word != found[-1]:
            found.append(word)
        numbers.append(len(found) - 1)
    return Read(numbers, found)
