"""Pseudo-log-likelihood: how likely a masked language model finds a text, one masked token after the other.

Source: Salazar et al. 2020, equation 3; Kauf & Ivanova 2023, section 3, for words of several tokens (within words from left to
right).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import guidance
from guidance.errors import InputError
from guidance.objectives.selection import logits_at
from guidance.plan import Plan
from guidance.probes.importance import switched_off
from guidance.statistics.roles import COLUMNS
from pipelines.probing.watched import with_random_weights
from pipelines.training.batches import pad
from pipelines.training.live_text import Filler
from pipelines.training.opening import Unguided

Masking = Literal["token", "word"]


@dataclass(frozen=True)
class Likelihood:
    """What a model says of a text.

    Attributes:
        ids: of its tokens, without special ones; scores: the log-probability of each, in nats.
    """

    ids: np.ndarray
    scores: np.ndarray

    @property
    def total(self) -> float:
        """The pseudo-log-likelihood."""
        return float(self.scores.sum())


class Scorer(Filler):
    """A masked language model that scores texts.

    Args:
        random_seed: of random weights for the same shape; None for the model's own.
        guided: whether its plan is at work; a plan that only has losses is not, in any case.
    """

    command = "guide probe blimp"

    def __init__(
        self, folder: Path, *, device: str = "auto", random_seed: int | None = None, guided: bool = True
    ) -> None:
        super().__init__(folder, device)
        if self.special["mask"] is None:
            raise InputError(f"{folder}: its tokenizer has no mask token")
        if random_seed is not None:
            self.model = with_random_weights(self.model, random_seed)
            self.handle = Unguided(self.model)
        elif not guided and not isinstance(self.handle, Unguided):
            self.handle.remove()
            self.handle = Unguided(self.model)

    def likelihoods(self, texts: Sequence[str], masking: Masking, batch_size: int) -> list[Likelihood]:
        """The likelihood of each text.

        Args:
            masking: ``token``: one token is masked at a time; ``word``: also the later tokens of its word, so that they do not
                give it away.
            batch_size: masked copies of texts per batch.
        """
        batch = self.read(texts)
        rows = [ids[:length] for ids, length in zip(*self._lists(batch), strict=True)]
        chosen = [self._masked(row, encoding, masking) for row, encoding in zip(rows, batch.encodings, strict=True)]
        copies = [(text, place, hidden) for text, places in enumerate(chosen) for place, hidden in places]
        scores = [np.zeros(len(places)) for places in chosen]
        order = sorted(range(len(copies)), key=lambda n: len(rows[copies[n][0]]))
        numbers = {(text, place): n for text, places in enumerate(chosen) for n, (place, _) in enumerate(places)}
        for start in range(0, len(order), batch_size):
            some = [copies[n] for n in order[start : start + batch_size]]
            for (text, place, _), score in zip(some, self._scores(some, rows, batch), strict=True):
                scores[text][numbers[text, place]] = score
        return [
            Likelihood(np.array([rows[n][place] for place, _ in places], np.int64), scores[n])
            for n, places in enumerate(chosen)
        ]

    @staticmethod
    def _lists(batch: Any) -> tuple[list[np.ndarray], list[int]]:
        ids = batch.inputs["input_ids"].cpu().numpy()
        return list(ids), batch.inputs["attention_mask"].sum(-1).tolist()

    @staticmethod
    def _masked(row: np.ndarray, encoding: Any, masking: Masking) -> list[tuple[int, list[int]]]:
        """Each token that is scored, with the places that are masked meanwhile."""
        words, parts = encoding.word_ids, encoding.sequence_ids
        places = [place for place in range(len(row)) if parts[place] is not None]
        if masking == "token":
            return [(place, [place]) for place in places]
        return [(place, [p for p in places if p >= place and words[p] == words[place]]) for place in places]

    def _scores(self, some: Sequence[tuple[int, int, list[int]]], rows: Sequence[np.ndarray], batch: Any) -> np.ndarray:
        device = next(self.model.parameters()).device
        length = max(len(rows[text]) for text, _, _ in some)
        seen = []
        for text, _, hidden in some:
            ids = rows[text].copy()
            ids[hidden] = self.special["mask"]
            seen.append(ids)
        inputs = {
            "input_ids": pad(seen, self.pad_id, length, device),
            "attention_mask": pad([np.ones(len(ids), np.int64) for ids in seen], 0, length, device),
        }
        columns = {
            name: pad(
                [values[text].cpu().numpy()[: len(rows[text])] for text, _, _ in some],
                COLUMNS[name].fill,
                length,
                device,
            )
            for name, values in batch.columns.items()
        }
        at = torch.tensor([n * length + place for n, (_, place, _) in enumerate(some)], device=device)
        wanted = torch.tensor([rows[text][place] for text, place, _ in some], device=device)
        with torch.no_grad():
            extra = self.handle.at_inference(**inputs, **columns)
            logits = logits_at(self.model, at, **inputs, **extra).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found: np.ndarray = -torch.nn.functional.cross_entropy(logits, wanted, reduction="none").double().cpu().numpy()
        return found

    def heads(self) -> list[tuple[Any, int, Any]]:
        """Every head: its attention module, its number, and its site."""
        return [(module, head, own[0]) for module, own in self._sites().items() for head in range(own[0].num_heads)]

    @contextmanager
    def without(self, heads: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Within the context some heads of the model's own, by layer and number, contribute nothing.

        Raises:
            InputError: the model has no such head.
        """
        known = {(site.layer, head): (module, head) for module, head, site in self.heads() if site.attention == "self"}
        chosen = []
        for head in heads:
            if head not in known:
                last_layer, last_head = (max(each) for each in zip(*known, strict=True))
                raise InputError(
                    f"there is no head {head[0]}-{head[1]}: the model has layers 0 to {last_layer} with heads 0 to {last_head}"
                )
            chosen.append(known[head])
        with switched_off(self.model, self._sites(), chosen):
            yield

    def _sites(self) -> Any:
        if isinstance(self.handle, Unguided):
            self.handle = guidance.install(self.model, Plan())
        return self.handle.sites
