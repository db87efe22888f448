"""Stage ``probe-reflexive``: does ``himself`` look most at what it refers to?

Reads a model and, if given, a file of sentences; otherwise sentences of a grammar.  Writes probe@1: ``heads.parquet`` (one
row for each head), ``probe.json`` and ``heads.png``.

Source: Lin et al. 2019; paper A, sections 5.5 and 5.6; `guidance.probes.reflexives`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from guidance.errors import InputError, counted
from pipelines.engine.declaration import Table
from pipelines.engine.stage import Run, knob
from pipelines.inputs import Model, TextFiles
from pipelines.probing.heads import best, head_columns, head_name, share, write_heads
from pipelines.probing.probe import Findings, ReadingConfig, probe
from pipelines.storage.artifacts import Artifact

if TYPE_CHECKING:
    from torch import Tensor

    from guidance.probes.reflexives import Reflexive
    from guidance.sites import Site
    from pipelines.probing.watched import Read

UNITS: Mapping[str, str] = {"accuracy": "share of reflexives that look most at their determiner or noun"}


class Config(ReadingConfig):
    """Which sentences are asked about."""

    sentences: int = Field(10_000, ge=1, le=20_000, description="Number of sentences to draw from the grammar.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the sentences and distractors.")
    distractor: Literal["before", "after", "none"] = Field(
        "before",
        description="Place of other words: before each sentence, as in the published code, or after it, as the paper says.",
    )
    batch_size: int = knob(64, "Sentences per batch.", ge=1)


def measure(run: Run[Config]) -> Findings:
    """How often every head looks most at the antecedent.

    Raises:
        InputError: a line of the file has not its columns; or the tokenizer splits a word of every sentence.
    """
    from guidance.probes.reflexives import with_distractors
    from pipelines.probing.watched import WatchedModel

    config = run.config
    # before the model is opened, so that a wrong file fails at once
    sentences = list(itertools.islice(_sentences(run), config.limit or None))
    model = WatchedModel.of(run)
    if model.is_causal and config.distractor == "after":
        raise InputError(
            "--distractor after has no effect in a causal model, which does not see what follows a reflexive",
            hint="--distractor before",
        )
    whole = [one for one in sentences if model.has_whole_words(one.words)]
    if config.distractor != "none":
        beside = with_distractors(whole, before=config.distractor == "before", seed=config.seed)
        # a distractor may be split, but not what is asked about, whose tokens may depend on what stands before
        whole = [one for one in beside if model.has_whole_words(one.words, (*one.antecedent, one.place))]
    if not whole:
        raise InputError(
            "every sentence has a word that the tokenizer splits",
            hint="a tokenizer with a larger vocabulary, or other sentences",
        )
    right: dict[Site, Tensor] = {}
    bits: dict[Site, Tensor] = {}
    with run.progress.task("probe", total=len(whole), unit="sentences") as bar:
        for start in range(0, len(whole), config.batch_size):
            some = whole[start : start + config.batch_size]
            texts = [one.words for one in some]
            for _, by_site in model.look_at_all(texts, functools.partial(_answers, some), config.words):
                for site, (right_H, own_bits) in by_site.items():
                    right[site], bits[site] = right.get(site, 0) + right_H, bits.get(site, 0) + own_bits
            bar.advance(len(some))
    table = write_heads(
        run,
        {"accuracy": {site: count.double() / len(whole) for site, count in right.items()}},
        UNITS,
        "accuracy",
        title=f"Reflexives that look at their antecedent\n{len(whole):,} sentences",
        label="% of sentences",
    )
    counts = {"sentences": len(whole), "split_sentences": len(sentences) - len(whole)}
    if counts["split_sentences"]:
        verbs = "has a word that the tokenizer splits, and is", "have a word that the tokenizer splits, and are"
        run.warn(f"{counted(counts['split_sentences'], *verbs, of=f'{len(sentences):,} sentences')} left out")
    mean = sum(row["accuracy"] for row in table) / len(table)
    return Findings(
        counts,
        {
            "best": best(table, "accuracy"),
            "mean": mean,
            "confusion": _confusion(whole, bits, is_causal=model.is_causal),
        },
    )


def _answers(sentences: Sequence[Reflexive], number: int, read: Read, attention_HWW: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each head looks most at the antecedent in a sentence, (H,), and the confusion of the layer in bits."""
    import torch

    from guidance.probes.reflexives import confusion

    one = sentences[number]
    row_HW = attention_HWW[:, read.row_of[one.place]]
    targets = [read.row_of[word] for word in one.antecedent]
    rivals = [[read.row_of[word] for word in words] for words in one.others]
    bits = confusion(row_HW, targets, rivals) if rivals else torch.zeros((), dtype=torch.float64)
    others = [word for word in range(row_HW.shape[-1]) if word not in targets]
    right_H = row_HW[:, targets].amax(-1) > row_HW[:, others].amax(-1)
    return right_H.long().cpu(), bits.cpu()


def _confusion(whole: Sequence[Reflexive], bits: Mapping[Site, Tensor], *, is_causal: bool) -> dict[str, Any] | None:
    """The mean confusion of each layer, and that of even attention; None if no sentence has another noun phrase.

    In a causal model even attention is that to the words up to the reflexive.
    """
    import torch

    from guidance.probes.reflexives import confusion

    asked = [one for one in whole if one.others]
    if not asked:
        return None
    layers = {site.layer: float(total) / len(asked) for site, total in bits.items() if site.attention == "self"}
    even = []
    for one in asked:
        last = one.place if is_causal else len(one.words) - 1
        seen_1W = (torch.arange(len(one.words)) <= last)[None].float()
        even.append(float(confusion(seen_1W, one.antecedent, one.others)))
    return {
        "sentences": len(asked),
        "layers": [layers[layer] for layer in sorted(layers)],
        "even": sum(even) / len(even),
    }


def _sentences(run: Run) -> Iterator[Reflexive]:
    """The sentences of the file, or of the grammar."""
    from guidance.probes.reflexives import Reflexive, places_of, sentences
    from pipelines.text.blocks import Notes
    from pipelines.text.readers import open_lines, whole_number

    given = run.inputs.get("sentences")
    if given is None:
        yield from sentences(run.config.sentences, run.config.seed)
        return
    for path, name in zip(given.paths, given.names, strict=True):
        for number, line in open_lines(path, name, "utf-8", Notes()):
            if not line.strip():
                continue
            cells = line.rstrip("\r\n").split("\t")
            words, reflexive = tuple(cells[0].split()), whole_number(cells[1].strip()) if len(cells) > 1 else None
            antecedent, *others = (places_of(cell.split(), words) for cell in cells[2:] or [""])
            if reflexive is None or reflexive >= len(words) or len(antecedent) != 2 or not all(others):
                raise InputError(
                    f"{name!r}, line {number}: not a sentence, the number of its reflexive, and its determiner and noun",
                    hint="three columns with tabs between, such as: the man can see himself, 4, the man; in further columns other noun "
                    "phrases of the sentence",
                )
            yield Reflexive(words, reflexive, (antecedent[0], antecedent[1]), tuple(others))


def _table(artifact: Artifact, config: Config) -> Table:
    counts = artifact.counts
    best = (f"head {head_name(counts['best'])}", share(counts["best"]["accuracy"]))
    notes = [counted(counts["sentences"], "sentence")]
    if confusion := counts["confusion"]:
        layers = confusion["layers"]
        notes.append(
            f"confusion with other noun phrases: {min(layers):.2f} bits in layer {layers.index(min(layers))}, where it is lowest, and "
            f"{sum(layers) / len(layers):.2f} on average; {confusion['even']:.2f} if all words were looked at alike "
            f"({counted(confusion['sentences'], 'sentence')})"
        )
    return Table(("", "right"), [best, ("mean of all heads", share(counts["mean"]))], tuple(notes))


STAGE = probe(
    "reflexive",
    2,
    Config,
    measure,
    takes={
        "model": Model(),
        "sentences": TextFiles(
            "Tab-separated lines: a sentence, the position of its reflexive from 0, what it refers to, such as: the man, and "
            "other noun phrases, if there are any.",
            optional=True,
            many=False,
            argument="file",
        ),
    },
    table=_table,
    writes={"heads.parquet of reflexive": head_columns(UNITS)},
    help="""Find heads by which himself and herself look most at what they refer to.

    Without a file, 10,000 sentences are drawn from a grammar: "the man who can laugh would hurt himself".  The answer is right if
    no other token, special ones included, has as much attention as the determiner or the noun.  Confusion says for a layer how
    little of its attention to noun phrases goes to the right one.
    """,
    examples=(
        "guide probe reflexive guided",
        "guide probe reflexive ./bert-base --distractor none",
        "guide probe reflexive guided sentences.tsv --random 0",
    ),
)

run = STAGE.run
