"""Opens a model for probes: it reads words, and shows the attention between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from guidance.probes.words import Mode, word_attention
from guidance.sites import Site
from pipelines.engine.stage import Run
from pipelines.training.learner import folder_of
from pipelines.training.live_text import LiveModel
from pipelines.training.opening import two_stacks, watched
from pipelines.training.plan_inputs import read_tables
from pipelines.training.text_words import TextWords

Seen = TypeVar("Seen")


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
    def row_of(self) -> dict[int, int]:
        """From words of the text to their numbers, by which rows of attention are counted; words that were cut off are missing."""
        return {word: number for number, word in enumerate(self.words) if word is not None}


class WatchedModel(LiveModel):
    """A trained model, or one of its shape with random weights, with its heads in view.

    Attributes:
        is_causal: whether tokens see no later ones.

    Args:
        length: of texts, in tokens; longer ones are cut.
        random_seed: of random weights, which show what its shape alone can do; None for its own.
        words: finds the words that its plan reads; by default rules do.
    """

    takes_masks = "probes of sequences, such as `guide probe relevance`, read"

    def __init__(
        self,
        folder: Path,
        *,
        length: int,
        device: str = "auto",
        random_seed: int | None = None,
        words: TextWords | None = None,
    ) -> None:
        super().__init__(folder, device, random_seed, words=words)
        self.handle = watched(self.handle, folder)
        self.is_causal = self.handle.is_decoder
        self.tokenizer.enable_truncation(min(length, self.longest or length))

    @classmethod
    def of(cls, run: Run[Any], length: int | None = None) -> WatchedModel:
        """The model of a probe, with what its plan looks up; ``length`` is by default the longest text of a `ReadingConfig`."""
        return cls(
            folder_of(run.inputs["model"]),
            length=length or run.config.max_length,
            device=run.config.device,
            random_seed=run.config.random,
            words=TextWords(tables=read_tables(run.inputs)),
        )

    def check(self, folder: Path, config: Any) -> None:
        if config.is_encoder_decoder:
            raise two_stacks(folder)

    def look(self, words: Sequence[str], mode: Mode = "mean") -> tuple[Read, dict[Site, Tensor]]:
        """Read words, separated by spaces: how they are read, and of each site the attention between them, (H, W, W).

        Special tokens are words, and words that were cut off are missing; the result says which is which.
        """
        return self.look_at_all([words], lambda number, read, attention: attention, mode)[0]

    def look_at_all(
        self, texts: Sequence[Sequence[str]], see: Callable[[int, Read, Tensor], Seen], mode: Mode = "mean"
    ) -> list[tuple[Read, dict[Site, Seen]]]:
        """Read several texts in one batch; see `look`.

        Args:
            see: gives what is kept of the number of a text, how it was read, and the attention of a site.
        """
        batch = self.read([" ".join(words) for words in texts])
        seen: list[tuple[Read, dict[Site, Seen]]] = [
            (_read(words, encoding), {}) for words, encoding in zip(texts, batch.encodings, strict=True)
        ]

        def watch(site: Site, attention_BHTT: Tensor) -> None:
            for number, ((read, by_site), attention_HTT) in enumerate(zip(seen, attention_BHTT, strict=True)):
                length = len(read.numbers)
                attention_HWW = word_attention(attention_HTT[:, :length, :length].float(), read.numbers, mode)
                by_site[site] = see(number, read, attention_HWW)

        self.handle.watch(watch, **batch.inputs, **batch.columns)
        return seen

    def has_whole_words(self, words: Sequence[str], asked: Sequence[int] | None = None) -> bool:
        """Whether all words fit, and each of them, or each of those that are asked about, is one token."""
        read = _read(words, self.tokenizer.encode(" ".join(words)))
        if len(read.row_of) < len(words):
            return False
        return all(read.numbers.count(read.row_of[word]) == 1 for word in asked or range(len(words)))

    def fitting(self, words: Sequence[str]) -> int:
        """How many of these words can be read at once, at least one."""
        encoding = self.tokenizer.encode(" ".join(words))
        whole = len(_read(words, encoding).row_of)
        return max(1, whole - 1) if encoding.overflowing else len(words)  # the last word may be cut


def _read(words: Sequence[str], encoding: Any) -> Read:
    ends = np.cumsum([len(word) + 1 for word in words])  # a token may begin with the space before its word
    numbers: list[int] = []
    words_read: list[int | None] = []
    for (_, end), part in zip(encoding.offsets, encoding.sequence_ids, strict=True):
        word = None if part is None else int(np.searchsorted(ends, end - 1, side="right"))
        if not numbers or word is None or word != words_read[-1]:
            words_read.append(word)
        numbers.append(len(words_read) - 1)
    return Read(numbers, words_read)
