"""Trained models at work on lines of text: they translate, and fill in masked words.

The tokenizer of a model puts special tokens around texts; for a model of ours these are the ones that its sequences had.  Plans act
as they do at inference.  Words and sentences are found by rules, unless a parser is given; a plan that needs more of a text is refused
before the model is opened.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerFast

from guidance.checkpoint import TARGET_FOLDER, config_of, find_plan
from guidance.errors import InputError, NumericalError, PlanError
from guidance.guided_model import installed_in
from guidance.objectives.selection import logits_at
from guidance.objectives.translation import translate
from guidance.patterns.features import FEATURES
from guidance.plan import Plan
from pipelines.text.encoding import replace_special
from pipelines.text.records import check_utf8
from pipelines.text.tokenizer_files import (
    TOKENIZER_FILES,
    folder_files,
    laid_out,
    load_tokenizer,
    special_ids,
    tokenizer_files,
)
from pipelines.training.batches import ids_and_mask, pad_features
from pipelines.training.model_checks import longest_input
from pipelines.training.objective import has_head
from pipelines.training.opening import Unguided, open_trained
from pipelines.training.plan_inputs import check_counts, features
from pipelines.training.text_words import TextWords

LONGEST_LINE = 1 << 20
"""In bytes."""

MASKS = ("<mask>", "[MASK]")
"""How a mask may be spelled in any text, besides the model's own way."""

_LONGEST_TRANSLATION = 512
"""In tokens, for models that know no limit."""


def read_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """The lines of a stream, each as soon as it has arrived, without their ends.  Raises InputError if a line is not UTF-8, or
    longer than `LONGEST_LINE`; messages call the stream by its name."""
    for number in itertools.count(1):
        if not (raw := stream.readline(LONGEST_LINE + 1)):
            return
        if len(raw) > LONGEST_LINE:
            raise InputError(
                f"{name}, line {number}: longer than {LONGEST_LINE >> 20} MiB", hint="write one sentence to a line"
            )
        try:
            yield raw.decode().removeprefix("\ufeff" if number == 1 else "").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(f"{name}, line {number}: not UTF-8", hint="iconv -f latin1 -t utf8 converts it") from error


@dataclass(frozen=True)
class TextBatch:
    """Texts as tensors.

    Attributes:
        inputs: ``input_ids`` and ``attention_mask``, (B, T) each.
        columns: the features that the plan needs, (B, T) each.
        encodings: of each text, as ``tokenizers`` gives them.
    """

    inputs: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]
    encodings: Sequence[Any]


class LiveModel:
    """A trained model that reads texts.

    Attributes:
        cut: how many texts were longer than the model allows and were cut.
    """

    def __init__(
        self, folder: Path, device: str = "auto", random_seed: int | None = None, *, words: TextWords | None = None
    ) -> None:
        """Opens a model, or one of its shape with random weights of a seed, without a plan.  Raises InputError if the model
        cannot read live text, and PlanError if its plan needs what ``words``, by default rules, do not find in a text."""
        config = config_of(folder)
        self.check(folder, config)
        plan = find_plan(folder)
        self._words = words or TextWords()
        self.needed = check_bare_text(plan or Plan(), folder, self.takes_masks, self.given, self._words.names)
        check_counts(plan or Plan(), str(folder), "cooccurrence" in self._words.tables, training=False)
        self.tokenizer, self.special = _open_tokenizer(folder, self.spells_masks)
        self.longest = longest_input(config)
        added = [id_ for id_, token in self.tokenizer.get_added_tokens_decoder().items() if token.special]
        kept = {None, self.special["unk"], self.special["mask"] if self.spells_masks else None}
        self._never_text = {*added, *self.special.values()} - {None}
        self._forbidden = [id_ for id_ in self._never_text if id_ not in kept]
        if self.longest is not None:
            self.tokenizer.enable_truncation(self.longest)
        self.folder, self.cut = folder, 0
        self.model, self.handle = open_trained(folder, self._words.tables, device)
        if random_seed is not None:
            self.model = with_random_weights(self.model, random_seed)
            self.handle = Unguided(self.model)
        self.pad_id = next(i for i in (self.special["pad"], self.model.config.pad_token_id, 0) if i is not None)

    spells_masks = False
    """Whether the mask token in a text stands for a mask."""

    takes_masks = "`guide evaluate` reads"
    """What reads the features that a bare text lacks from ``--masks``."""

    given: tuple[str, ...] = ()
    """Names of the features that the caller gives with a text; all others must follow from the text itself."""

    def check(self, folder: Path, config: Any) -> None:
        """Raises InputError if a model with this configuration cannot do what this class is for."""

    def read(self, texts: Sequence[str]) -> TextBatch:
        """Texts as a batch on the device of the model.  Raises InputError if a text is not valid Unicode, spells a special token
        that cannot be replaced, or has a token outside of the vocabulary of the model."""
        for text in texts:
            check_utf8(text)
        encodings, device = self.tokenizer.encode_batch(list(texts)), self.model.device
        self.cut += sum(bool(encoding.overflowing) for encoding in encodings)
        rows = [self._ids(encoding) for encoding in encodings]
        size, highest = self.model.get_input_embeddings().weight.shape[0], max(int(row.max(initial=0)) for row in rows)
        if highest >= size:
            raise InputError(f"{self.folder}: its tokenizer has a token {highest}, and the model has {size} tokens")
        inputs, columns = ids_and_mask(rows, self.pad_id, device), dict[str, Tensor]()
        if self.needed:
            both = zip(texts, encodings, strict=True)
            known = [self._words.features(BatchEncoding(encoding=[one]), text) for text, one in both]
            values = {name: [features[name][0].numpy() for features in known] for name in self.needed}
            columns = pad_features(values, inputs["input_ids"].shape[1], device)
        return TextBatch(inputs, columns, encodings)

    def wrapped_tokenizer(self) -> Any:
        """The tokenizer as an object of transformers, with the names of its special tokens."""
        named = {
            f"{role}_token": self.tokenizer.id_to_token(id_) for role, id_ in self.special.items() if id_ is not None
        }
        return PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, **named)

    def _ids(self, encoding: Any) -> Any:
        """The ids of a text, as in training."""
        ids = np.array(encoding.ids, np.int64)
        is_text = np.array([part is not None for part in encoding.sequence_ids], bool)
        replace_special(ids, self._forbidden, self.special["unk"], is_text)
        return ids


class Translator(LiveModel):
    """A model that translates; see `guidance.objectives.translation.translate`."""

    def __init__(
        self,
        folder: Path,
        *,
        beams: int,
        length_penalty: float,
        max_length: int,
        device: str,
        words: TextWords | None = None,
    ) -> None:
        super().__init__(folder, device, words=words)
        most = self.longest or _LONGEST_TRANSLATION
        self._search: dict[str, Any] = {"beams": beams, "length_penalty": length_penalty}
        self._search["max_length"] = min(max_length or most, most)
        target = folder / TARGET_FOLDER
        self._decoder = _open_tokenizer(target)[0] if (target / TOKENIZER_FILES[0]).is_file() else self.tokenizer

    def check(self, folder: Path, config: Any) -> None:
        if not config.is_encoder_decoder:
            raise InputError(
                f"{folder}: a {config.model_type} model, which does not translate",
                hint="`guide translate` takes encoder-decoders, such as `guide pretrain --objective translation` trains",
            )

    def translate(self, texts: Sequence[str]) -> list[str]:
        """The translation of each text, in one line; an empty text has an empty one."""
        texts_at = {n: text for n, text in enumerate(texts) if text.strip()}
        translations = [""] * len(texts)
        if texts_at:
            batch = self.read(list(texts_at.values()))
            rows = translate(self.model, self.handle, batch.inputs, batch.columns, **self._search)
            for n, ids in zip(texts_at, rows, strict=True):
                translations[n] = " ".join(
                    without_controls(self._decoder.decode(ids, skip_special_tokens=True)).split()
                )
        return translations


@dataclass(frozen=True)
class Candidate:
    """A token for a mask.

    Attributes:
        token: its text; ``id``: its id.
        score: its probability, alone, whatever stands at other masks.
        text: the whole text with it.
    """

    token: str
    id: int
    score: float
    text: str


class Filler(LiveModel):
    """A masked language model that fills in masks.

    Attributes:
        command: the one that is at work, for messages.
    """

    spells_masks = True
    command = "guide fill"

    def check(self, folder: Path, config: Any) -> None:
        if not (has_head(config, "ForMaskedLM") or has_head(config, "BertForPreTraining")):
            name = next(iter(config.architectures or ()), f"a {config.model_type} model")
            beside = folder / "generator"
            raise InputError(
                f"{folder}: {name}, which predicts no masked words",
                hint=f"the generator beside it does: {self.command} {beside}"
                if beside.is_dir()
                else f"`{self.command}` takes masked language models, whose class ends in ForMaskedLM",
            )

    @property
    def mask(self) -> str:
        """The mask token of the model."""
        return str(self.tokenizer.id_to_token(self.special["mask"]))

    def fill(self, text: str, top: int) -> list[list[Candidate]]:
        """The most likely tokens of each mask of a text, the best first; special tokens are left out.  Raises
        InputError if the tokenizer has no mask token, the text has no mask, or is longer than the model allows, and
        NumericalError if a score is not finite."""
        if self.special["mask"] is None:
            raise InputError(f"{self.folder}: its tokenizer has no mask token")
        for other in MASKS:
            text = text.replace(other, self.mask)
        batch = self.read([text])
        if batch.encodings[0].overflowing:
            raise InputError(f"the text is longer than the {self.longest} tokens that the model allows", hint="cut it")
        masks_N = (batch.inputs["input_ids"][0] == self.special["mask"]).nonzero()[:, 0]
        if not len(masks_N):
            raise InputError(f"the text has no mask: {text[:80]!r}", hint=f"write {self.mask} for the word to fill in")
        with torch.no_grad():
            extra = self.handle.at_inference(**batch.inputs, **batch.columns)
            logits_NV = logits_at(self.model, masks_N, **batch.inputs, **extra).logits.float()
        if not torch.isfinite(logits_NV).all():
            raise NumericalError(f"{self.folder}: its scores are not finite")
        scores_NV, size = logits_NV.softmax(-1), self.tokenizer.get_vocab_size()
        scores_NV[:, [*self._never_text]] = scores_NV[:, size:] = -1.0
        best = scores_NV.topk(min(top, size - len(self._never_text)), dim=-1)
        spans = [_trimmed(text, *batch.encodings[0].offsets[token]) for token in masks_N.tolist()]
        return [
            [self._candidate(text, span, id_, score) for id_, score in zip(ids, scores, strict=True)]
            for span, ids, scores in zip(spans, best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _candidate(self, text: str, span: tuple[int, int], id_: int, score: float) -> Candidate:
        token = self.tokenizer.decode([id_]).strip() or self.tokenizer.id_to_token(id_)
        before, after = text[: span[0]], text[span[1] :]
        whole = before.rstrip() + token[2:] + after if token.startswith("##") else before + token + after
        return Candidate(token, id_, score, whole)


def with_random_weights(model: Any, seed: int) -> Any:
    """A model of the same shape with new weights and without the plans of this one, in evaluation mode on the same device."""
    plans: list[Any] = installed_in(model)
    for handle in reversed(plans):
        handle.remove()  # the configuration of both models has the plan
    torch.manual_seed(seed)
    return type(model)(model.config).to(model.device).eval()


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The span of a token without the white space before it, which some tokenizers count as a part of their mask token."""
    return end - len(text[start:end].lstrip()), end


def without_controls(text: str) -> str:
    """A text without control characters, which a terminal would obey; line ends and tabs stay."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")


def check_bare_text(
    plan: Any,
    folder: Path,
    takes_masks: str,
    given: Collection[str] = (),
    found: Collection[str] = TextWords().names,
) -> tuple[str, ...]:
    """The features of words that a plan needs at inference.  Raises PlanError if it needs one that a bare text does not have.

    Args:
        takes_masks: what reads them from ``--masks``, for the message.
        given: names of features that the caller gives with the text.
        found: names of features that are found in the text, by default by rules.
    """
    needed = tuple(need for need in features(plan, training=False) if need not in given)
    for need in needed:
        if need not in found:
            label = plan.needs(training=False).get(need, "")
            source = FEATURES[need].source if need in FEATURES else "it is a feature of the pattern's own"
            raise PlanError(
                f"{folder}: its plan needs the feature {need} (guide {label!r}), which a bare text does not have",
                hint=f"{need}: {source}\n{takes_masks} it from --masks; guidance.word_features gives it in Python",
            )
    return needed


def _open_tokenizer(folder: Path, spells_masks: bool = False) -> tuple[Any, dict[str, int | None]]:
    """The tokenizer of a folder and its special tokens.  One that puts none around texts gets those of sequences."""
    found = folder_files(folder)
    if TOKENIZER_FILES[0] not in found.names:
        raise InputError(
            f"{folder}: has no {TOKENIZER_FILES[0]}",
            hint="AutoTokenizer.from_pretrained(...).save_pretrained(folder) in Python writes one, if its tokenizer is fast",
        )
    files = tokenizer_files(found)
    tokenizer = load_tokenizer(files)
    if tokenizer.post_processor is None:
        tokenizer = load_tokenizer(laid_out(files))
    tokenizer.encode_special_tokens = not spells_masks
    return tokenizer, special_ids(files, tokenizer, begins=False)  # T5's texts begin with no token
