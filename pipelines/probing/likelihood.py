"""How likely a language model finds a text.

A causal model gives the log-likelihood, in which each token is predicted from those before it.  A masked model gives the
pseudo-log-likelihood, in which each token is masked in turn and predicted from all others.

Source of the pseudo-log-likelihood: Salazar et al. 2020, equation 3; Kauf & Ivanova 2023, section 3, for words of several tokens
(within words from left to right).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tokenizers import processors

import guidance
from guidance.checkpoint import config_of
from guidance.errors import InputError
from guidance.objectives.selection import logits_at, places_of
from guidance.plan import Plan
from guidance.probes.importance import switched_off
from pipelines.probing.heads import no_such_head
from pipelines.training.batches import ids_and_mask, pad, pad_features
from pipelines.training.learners.word_scores import nll_of
from pipelines.training.live_text import Filler, TextBatch
from pipelines.training.objectives.next_token import CausalLanguageModelling
from pipelines.training.opening import Unguided
from pipelines.training.text_words import TextWords

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
        """The log-likelihood; the pseudo-log-likelihood if the model is a masked one."""
        return float(self.scores.sum())


class _Copy(NamedTuple):
    """A text by its number, of which one token is scored while some are hidden."""

    text: int
    token: int
    hidden: list[int]


def _masked(encoding: Any, masking: Masking) -> Iterator[tuple[int, list[int]]]:
    """Each token of a text that is scored, with those that are masked meanwhile."""
    words, ordinary = encoding.word_ids, [n for n, part in enumerate(encoding.sequence_ids) if part is not None]
    for token in ordinary:
        same_word = [n for n in ordinary if n >= token and words[n] == words[token]]
        yield token, [token] if masking == "token" else same_word


class Scorer(Filler):
    """A masked language model that scores texts.

    Args:
        random_seed: of random weights for the same shape; None for the model's own.
        guided: whether its plan is at work; a plan that only has losses is not, in any case.
        words: finds the words that its plan reads, and has the tables that it looks up; by default rules, and none.
    """

    command = "guide probe blimp"

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "auto",
        random_seed: int | None = None,
        guided: bool = True,
        words: TextWords | None = None,
    ) -> None:
        super().__init__(folder, device, random_seed, words=words)
        if self.spells_masks and self.special["mask"] is None:
            raise InputError(f"{folder}: its tokenizer has no mask token")
        if not guided and not isinstance(self.handle, Unguided):
            self.handle.remove()
            self.handle = Unguided(self.model)

    def likelihoods(self, texts: Sequence[str], masking: Masking, batch_size: int) -> list[Likelihood]:
        """The likelihood of each text, of which so many masked copies are read at once.  One token is masked at a time, or also the
        later tokens of its ``word``, so that they do not give it away."""
        batch = self.read(texts)
        lengths = batch.inputs["attention_mask"].sum(-1).tolist()
        rows = [ids[:length] for ids, length in zip(batch.inputs["input_ids"].cpu().numpy(), lengths, strict=True)]
        copies = [
            _Copy(number, *masked)
            for number, encoding in enumerate(batch.encodings)
            for masked in _masked(encoding, masking)
        ]
        copies.sort(key=lambda copy: len(rows[copy.text]))
        scores: list[dict[int, float]] = [{} for _ in texts]
        for start in range(0, len(copies), batch_size):
            some = copies[start : start + batch_size]
            for copy, score in zip(some, self._scores(some, rows, batch), strict=True):
                scores[copy.text][copy.token] = score
        order = [sorted(own) for own in scores]
        return [
            Likelihood(row[tokens], np.array([own[token] for token in tokens]))
            for row, own, tokens in zip(rows, scores, order, strict=True)
        ]

    def _scores(self, copies: Sequence[_Copy], rows: Sequence[np.ndarray], batch: TextBatch) -> list[float]:
        """The log-probability of the token of each copy."""
        device, masked = self.model.device, []
        for copy in copies:
            masked.append(rows[copy.text].copy())
            masked[-1][copy.hidden] = self.special["mask"]
        inputs = ids_and_mask(masked, self.pad_id, device)
        length = inputs["input_ids"].shape[1]
        own = {
            name: [values[copy.text].cpu().numpy()[: len(rows[copy.text])] for copy in copies]
            for name, values in batch.columns.items()
        }
        originals = pad([rows[copy.text] for copy in copies], self.pad_id, length, device)
        columns = {"original": originals, **pad_features(own, length, device)}
        at_N = torch.tensor([n * length + copy.token for n, copy in enumerate(copies)], device=device)
        wanted_N = torch.tensor([rows[copy.text][copy.token] for copy in copies], device=device)
        with torch.no_grad():
            extra = self.handle.at_inference(**inputs, **columns)
            logits_NV = logits_at(self.model, at_N, **inputs, **extra).logits
        scores: list[float] = (-nll_of(logits_NV, wanted_N)).tolist()
        return scores

    def heads(self) -> list[tuple[Any, int, Any]]:
        """Every head: its attention module, its number, and its site."""
        return [(module, head, own[0]) for module, own in self._sites().items() for head in range(own[0].num_heads)]

    @contextmanager
    def without(self, heads: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Within the context some heads of the model's own, by layer and number, contribute nothing.  Raises InputError
        if the model has no such head."""
        known = {(site.layer, head): (module, head) for module, head, site in self.heads() if site.attention == "self"}
        chosen = list(heads)
        for head in chosen:
            if head not in known:
                raise no_such_head(*head, known)
        with switched_off(self.model, self._sites(), [known[head] for head in chosen]):
            yield

    def _sites(self) -> Any:
        if isinstance(self.handle, Unguided):
            self.handle = guidance.install(self.model, Plan())
        return self.handle.sites


class CausalScorer(Scorer):
    """A causal language model that scores texts.  It reads each text after the token that begins sequences."""

    spells_masks = False

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        begin = self.special["cls"]
        if begin is None:
            raise InputError(f"{folder}: its tokenizer has no token to begin a text with (bos, cls)")
        name = self.tokenizer.id_to_token(begin)
        self.tokenizer.post_processor = processors.TemplateProcessing(
            single=[name, "$A"], special_tokens=[(name, begin)]
        )

    def check(self, folder: Path, config: Any) -> None:
        """Checks nothing, since `open_scorer` has looked at the configuration."""

    def likelihoods(self, texts: Sequence[str], masking: Masking, batch_size: int) -> list[Likelihood]:
        """The likelihood of each text, of which so many are read at once.  ``masking`` means nothing here."""
        found: list[Likelihood] = []
        for start in range(0, len(texts), batch_size):
            batch = self.read(texts[start : start + batch_size])
            ids_BT, valid_BT = batch.inputs["input_ids"], batch.inputs["attention_mask"].bool()
            follows_BT = valid_BT[:, 1:]
            is_before_BT = torch.nn.functional.pad(follows_BT, (0, 1))  # the last token is before none
            places_N, labels_N = places_of(is_before_BT.cpu()).to(ids_BT.device), ids_BT[:, 1:][follows_BT]
            with torch.no_grad():
                extra = self.handle.at_inference(**batch.inputs, **batch.columns)
                logits_NV = logits_at(self.model, places_N, **batch.inputs, **extra, use_cache=False).logits
            ends = np.cumsum(follows_BT.sum(-1).cpu().numpy())[:-1]
            parts = (np.split(part, ends) for part in (labels_N.cpu().numpy(), -nll_of(logits_NV, labels_N)))
            found += map(Likelihood, *parts)
        return found


def open_scorer(folder: Path, **options: Any) -> Scorer:
    """The scorer of a masked or a causal language model, with the arguments of `Scorer`.  Raises InputError if it is neither."""
    is_causal = CausalLanguageModelling.measures(config_of(folder), None)
    return (CausalScorer if is_causal else Scorer)(folder, **options)
