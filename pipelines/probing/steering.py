"""Prompts with marked parts and expected answers, and how a causal model answers them while heads of it are steered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.objectives.selection import logits_at, places_of
from guidance.plan import Plan
from guidance.probes.steering import Answers
from guidance.prompts import Prompt, prompt_length
from guidance.sites import Site
from pipelines.text.blocks import Notes
from pipelines.text.readers import open_lines
from pipelines.text.records import check_unicode, json_objects
from pipelines.training.learners.word_scores import nll_of
from pipelines.training.steering import Writer

EXAMPLE = '{"prompt": "The capital of <<France>> is", "answer": "Paris"}'
"""A line of a file, for messages."""


@dataclass(frozen=True)
class Question:
    """A prompt and the answer that is expected.

    Attributes:
        where: file and line, for messages.
    """

    prompt: Prompt
    answer: str
    where: str


def read_questions(path: Path, name: str) -> Iterator[Question]:
    """The questions of a file of JSON lines.  Raises InputError if a line is no prompt with a marked part and its answer."""
    for _, where, row in json_objects(open_lines(path, name, "utf-8", Notes()), name):
        prompt, answer = row.get("prompt"), row.get("answer")
        if not (isinstance(prompt, str) and isinstance(answer, str) and prompt.strip() and answer.strip()):
            raise InputError(f'{where}: no "prompt" and "answer", which are texts', hint=EXAMPLE)
        for text in (prompt, answer):
            check_unicode(text, "a text", where)
        try:
            read = Prompt.parse(prompt)
        except InputError as error:
            error.message = f"{where}: {error.message}"
            raise
        if not read.marked:
            raise InputError(f"{where}: nothing is marked in the prompt", hint=EXAMPLE)
        yield Question(read, answer, where)


@dataclass(frozen=True)
class _Texts:
    """Some prompts with their answers.

    Attributes:
        inputs: what the model reads; columns: what only its plan reads.
        labels_N: the tokens of all answers; places_N: those before them.
        lengths: tokens of each answer.
    """

    inputs: dict[str, Tensor]
    columns: dict[str, Tensor]
    labels_N: Tensor
    places_N: Tensor
    lengths: list[int]


class Answering(Writer):
    """A causal language model that answers the questions of some tasks while heads of it are steered.

    Args:
        folder, plan, device, called: see `Writer`.
        tasks: the questions of each task.
        delimiter: what stands between a prompt and its answer.
        batch_size: texts that are read at once.

    Raises:
        InputError: a prompt and its answer are too long for the model, or share a token; or no token of the prompt is marked.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        tasks: Sequence[Sequence[Question]],
        *,
        delimiter: str,
        batch_size: int,
        device: str = "auto",
        called: str = "plan",
    ) -> None:
        super().__init__(folder, plan, device=device, called=called)
        questions = [question for task in tasks for question in task]
        self._sizes = [len(task) for task in tasks]
        self._batches = [
            self._texts(questions[start : start + batch_size], delimiter)
            for start in range(0, len(questions), batch_size)
        ]

    def heads(self) -> list[tuple[Site, int]]:
        """Every head: its site, and its number there."""
        return [(site, head) for own in self.handle.sites.values() for site in own for head in range(site.num_heads)]

    def answers(self, plan: Plan) -> list[Answers]:
        """What the model answers to each task while it follows these rows; an empty plan leaves it as it is.

        An answer is right if each of its tokens is the likeliest one after those before it: a greedy search would write it.
        """
        self.steer(plan)
        right, nats = (np.concatenate(each) for each in zip(*map(self._scores, self._batches), strict=True))
        ends = np.cumsum(self._sizes)[:-1]
        return [Answers(*own) for own in zip(np.split(right, ends), np.split(nats, ends), strict=True)]

    def _scores(self, texts: _Texts) -> tuple[np.ndarray, np.ndarray]:
        """Of each text, whether its answer is right, and the log-probability of the answer."""
        with torch.no_grad():
            extra = self.handle.at_inference(**texts.inputs, **texts.columns)
            logits_NV = logits_at(self.model, texts.places_N, **texts.inputs, **extra, use_cache=False).logits
        starts = np.cumsum([0, *texts.lengths[:-1]])
        hits_N = (logits_NV.argmax(-1) == texts.labels_N).cpu().numpy()
        nats_N = -np.asarray(nll_of(logits_NV, texts.labels_N), np.float64)
        return np.logical_and.reduceat(hits_N, starts), np.add.reduceat(nats_N, starts)

    def _texts(self, questions: Sequence[Question], delimiter: str) -> _Texts:
        """Prompts with their answers as a batch."""
        read = self.read([f"{question.prompt.text}{delimiter}{question.answer}" for question in questions])
        ids_BT = read.inputs["input_ids"]
        marked_BT, is_answer_BT = (torch.zeros(ids_BT.shape, dtype=torch.bool) for _ in range(2))
        for row, (question, encoding) in enumerate(zip(questions, read.encodings, strict=True)):
            length, end = prompt_length(encoding), len(question.prompt.text)
            if self.longest is not None and length > self.longest:
                raise InputError(
                    f"{question.where}: prompt and answer have {length} tokens, and the model reads {self.longest}",
                    hint="cut the prompt",
                )
            offsets = encoding.offsets[:length]  # of special tokens (0, 0)
            begin = end + len(delimiter.rstrip(" "))  # spaces before a word are a part of it, as tokenizers have it
            first = next((token for token, (_, stop) in enumerate(offsets) if stop > begin), length)
            if not 0 < first < length or offsets[first][0] < end:
                raise InputError(
                    f"{question.where}: no token of the model begins with the answer",
                    hint="--delimiter says what stands between prompt and answer; by default a space",
                )
            is_answer_BT[row, first:length] = True
            marked_BT[row, :length] = torch.tensor(self._marked(question, offsets))
        places_N = places_of(torch.nn.functional.pad(is_answer_BT[:, 1:], (0, 1)))  # the tokens before the answer's
        own = {"marked": marked_BT, "written": is_answer_BT}
        columns = {**read.columns, **{name: values.to(ids_BT.device) for name, values in own.items()}}
        labels_N, lengths = ids_BT[is_answer_BT.to(ids_BT.device)], is_answer_BT.sum(-1).tolist()
        return _Texts(dict(read.inputs), columns, labels_N, places_N.to(ids_BT.device), lengths)

    def _marked(self, question: Question, offsets: Sequence[tuple[int, int]]) -> list[bool]:
        try:
            return self.marked_tokens(question.prompt, offsets)
        except InputError as error:
            error.message = f"{question.where}: {error.message}"
            raise
