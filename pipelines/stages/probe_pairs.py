"""Stage ``probe-blimp``: does a language model find the good sentence of a minimal pair more likely than the bad one?

Reads a model and files of minimal pairs, and sequences for n-gram floors if they are given.  Writes probe@1: ``pairs.parquet`` (one
row for each pair), ``paradigms.parquet`` (one row for each paradigm), ``probe.json``, and with ``--each-head`` ``heads.parquet`` and
``heads.png``: the accuracy without each head.

Source: Warstadt et al. 2020 (BLiMP); Salazar et al. 2020, equation 3; `pipelines.probing.likelihood`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from guidance.errors import InputError, counted
from pipelines.engine import stage
from pipelines.engine.declaration import Opening, Table
from pipelines.engine.stage import Device, Run, knob
from pipelines.inputs import Model, TextFiles
from pipelines.lazy import np
from pipelines.probing.heads import head_columns, head_name, share, shares, write_heads
from pipelines.probing.probe import Findings, probe, random_weights
from pipelines.storage.artifacts import Artifact
from pipelines.storage.tables import Columns
from pipelines.text.records import check_unicode
from pipelines.training.learner import folder_of

if TYPE_CHECKING:
    from pipelines.probing.likelihood import Scorer

PAIRS, PARADIGMS = "pairs.parquet", "paradigms.parquet"
FLOORS = ("unigram", "ngrams")

UNITS: Mapping[str, str] = {
    "accuracy": "share of pairs whose good sentence is the more likely one, without the head",
    "rise": "that share minus the one of the whole model",
}


class Config(stage.Config):
    """How sentences are scored."""

    masking: Literal["token", "word"] = Field(
        "token",
        description="Tokens hidden while a token is scored: the token; or also the later tokens of its word, so that they do "
        "not give it away. In causal models nothing is hidden but what follows.",
    )
    limit: int = Field(0, ge=0, description="Maximum number of pairs of each paradigm; 0 for all.")
    floors: str = Field(
        "", description="Sequences whose n-grams are counted, to compare with: usually those of the training."
    )
    random: int | None = random_weights()
    plan: bool = Field(True, description="Let the plan of the model act, if it acts at inference.")
    off: list[str] = Field([], description="Head to switch off: LAYER-HEAD, such as 2-5 (repeatable).")
    each_head: bool = Field(False, description="Also measure the accuracy without each head, one after the other.")
    encoding: str = Field("utf-8", description="Encoding of the files; invalid bytes are an error.")
    batch_size: int = knob(128, "Masked sentences per batch.", ge=1)
    device: Device = "auto"


class Pair(NamedTuple):
    """A good sentence and a bad one."""

    paradigm: str
    good: str
    bad: str


def head_of(text: str) -> tuple[int, int]:
    """The layer and the number of a head.  Raises InputError if it is not written as LAYER-HEAD."""
    match = re.fullmatch(r"(\d{1,4})-(\d{1,4})", text.strip())
    if match is None:
        raise InputError(f"--off {text!r} is not LAYER-HEAD", hint="for example: --off 2-5")
    return int(match[1]), int(match[2])


OF_PAIRS: Columns = {
    "paradigm": ("string", "UID of the pair, or the name of its file"),
    "good": ("string", "the good sentence"),
    "bad": ("string", "the bad one"),
    "good_score": ("float64", "log-likelihood of the good sentence, in nats; pseudo-log-likelihood by masked models"),
    "bad_score": ("float64", "that of the bad one, in nats"),
    "right": ("bool", "whether the good one is higher; equal scores are wrong"),
}
"""Columns of ``pairs.parquet``."""


OF_PARADIGMS: Columns = {
    "paradigm": ("string", "UID of the pairs, or the name of their file"),
    "pairs": ("int64", "count"),
    "accuracy": ("float64", "share of pairs whose good sentence is the more likely one"),
    "equal": ("int64", "pairs whose sentences have equal scores"),
    "unigram": ("float64", "accuracy of the unigram floor; null without floors"),
    "ngrams": ("float64", "accuracy of the n-gram floor; null without floors"),
}
"""Columns of ``paradigms.parquet``."""


def check(config: Config, references: Mapping[str, Any]) -> None:
    """Raises InputError if ``off`` names no head."""
    for text in config.off:
        head_of(text)


def prepare(opening: Opening[Config]) -> None:
    """Open the sequences whose n-grams are counted."""
    if opening.config.floors:
        opening.stage = replace(opening.stage, version=2)  # since version 2 of the floors
        opening.inputs["sequences"] = opening.load(opening.config.floors, kind="sequences")


def measure(run: Run[Config]) -> Findings:
    """Which sentence of each pair the model finds more likely.

    Raises:
        InputError: a line of a file is no pair; or the model predicts no words; or it has no head that ``off`` names; or it is
            causal, and ``masking`` is ``word``.
    """
    from pipelines.probing.likelihood import CausalScorer, open_scorer
    from pipelines.training.plan_inputs import read_tables
    from pipelines.training.text_words import TextWords

    config = run.config
    pairs = list(_pairs(run))
    folder = folder_of(run.inputs["model"])
    words = TextWords(tables=read_tables(run.inputs))
    scorer = open_scorer(folder, device=config.device, random_seed=config.random, guided=config.plan, words=words)
    if isinstance(scorer, CausalScorer) and config.masking == "word":
        raise InputError(f"--masking word: {folder} is a causal language model, in which nothing is masked")
    passes = 1 + (len(scorer.heads()) if config.each_head else 0)
    summary: dict[str, Any] = {}
    with run.progress.task("probe", total=passes * len(pairs), unit="pairs") as bar:
        with scorer.without(map(head_of, config.off)):
            scores, ids = _scores(scorer, pairs, config, bar)
            floors = _floors(run, scorer, ids) if config.floors else {}
            right = scores[:, 0] > scores[:, 1]
            if config.each_head:
                summary["heads"] = _without_each_head(run, scorer, pairs, float(right.mean()), bar)
    rows = [
        {**pair._asdict(), "good_score": float(good), "bad_score": float(bad), "right": bool(good > bad)}
        for pair, (good, bad) in zip(pairs, scores, strict=True)
    ]
    run.out.write_rows(PAIRS, OF_PAIRS, rows)
    paradigms = _paradigms(pairs, scores, floors)
    run.out.write_rows(PARADIGMS, OF_PARADIGMS, paradigms, may_be_null=FLOORS)
    mean = {name: sum(row[name] for row in paradigms) / len(paradigms) for name in ("accuracy", *floors)}
    if scorer.cut:
        run.warn(f"{counted(scorer.cut, 'sentence was', 'sentences were')} longer than the model reads, and cut")
    counts = {"pairs": len(pairs), "cut_sentences": scorer.cut}
    return Findings(counts, {"accuracy": mean.pop("accuracy"), "floors": mean, "paradigms": paradigms, **summary})


CHUNK = 64
"""Pairs that are scored at once."""


def _scores(scorer: Scorer, pairs: Sequence[Pair], config: Config, bar: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """The scores of both sentences of each pair, (pairs, 2), and the ids of all sentences."""
    scored: list[Any] = []
    for start in range(0, len(pairs), CHUNK):
        some = pairs[start : start + CHUNK]
        texts = [text for pair in some for text in (pair.good, pair.bad)]
        scored += scorer.likelihoods(texts, config.masking, config.batch_size)
        bar.advance(len(some))
    return np.array([each.total for each in scored]).reshape(-1, 2), [each.ids for each in scored]


def _floors(run: Run, scorer: Scorer, ids: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """By floor, the scores of both sentences of each pair, (pairs, 2): sums of the log-probabilities of tokens, given their
    neighbours on both sides, or for causal models given the tokens before them."""
    from guidance.objectives.causal_lm import words_of
    from guidance.statistics.ngrams import Places
    from pipelines.probing.likelihood import CausalScorer
    from pipelines.statistics.floors import Counted
    from pipelines.training.batches import Examples
    from pipelines.training.model_checks import check_model
    from pipelines.training.models import masker_of, read_tokenizer

    data = run.inputs["sequences"]
    is_causal = isinstance(scorer, CausalScorer)
    tokenizer = read_tokenizer(data, masked=not is_causal, padded=not is_causal)
    check_model(scorer.model, scorer.folder, tokenizer)
    train, size = Examples.read(data, "train", len(tokenizer)), len(tokenizer)
    if is_causal:
        counted = Counted.before(train, words_of(tokenizer), tokenizer.sep_token_id, size)
    else:
        counted = Counted.of(train, masker_of(tokenizer, 0.15))
    if not len(counted.places):
        raise InputError(f"{data.reference}: no training text to count")
    # each sentence between the special tokens that training sequences have
    begin, end = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
    framed = np.concatenate([part for one in ids for part in (begin, one, end)])
    is_text = np.concatenate([part for one in ids for part in ([False], np.ones(len(one), bool), [False])])
    places = Places.of(framed, framed, np.cumsum([0, *(len(one) + 2 for one in ids)]), is_text, size)
    bounds, estimates = np.cumsum([0, *map(len, ids)]), counted.estimates(places)
    assert len(places) == bounds[-1]
    floors = {}
    for name in FLOORS:
        sums = np.add.reduceat(np.append(np.log(estimates[name]), 0.0), bounds[:-1])
        floors[name] = np.where(np.diff(bounds) > 0, sums, 0.0).reshape(-1, 2)
    return floors


def _paradigms(pairs: Sequence[Pair], scores: np.ndarray, floors: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    names = np.array([pair.paradigm for pair in pairs])
    rows = []
    for name in dict.fromkeys(names.tolist()):
        own = names == name
        row: dict[str, Any] = {"paradigm": name, "pairs": int(own.sum()), "accuracy": _accuracy(scores[own])}
        row |= {"equal": int((scores[own, 0] == scores[own, 1]).sum())}
        rows.append(row | {floor: _accuracy(floors[floor][own]) if floors else None for floor in FLOORS})
    return rows


def _accuracy(scores: np.ndarray) -> float:
    """The share of pairs whose good sentence has the higher score."""
    return float((scores[:, 0] > scores[:, 1]).mean())


def _without_each_head(
    run: Run[Config], scorer: Scorer, pairs: Sequence[Pair], whole: float, bar: Any
) -> dict[str, Any]:
    """Write the accuracy without each head."""
    import torch

    from guidance.probes.importance import switched_off

    by_head: dict[Any, list[float]] = {}
    for module, head, site in scorer.heads():
        with switched_off(scorer.model, scorer.handle.sites, [(module, head)]):
            by_head.setdefault(site, []).append(_accuracy(_scores(scorer, pairs, run.config, bar)[0]))
    accuracy = {site: torch.tensor(values, dtype=torch.float64) for site, values in by_head.items()}
    table = write_heads(
        run,
        {"accuracy": accuracy, "rise": {site: values - whole for site, values in accuracy.items()}},
        UNITS,
        "accuracy",
        title="Minimal pairs that are right without the head",
        label="% of pairs",
    )
    return {"most_needed": min(table, key=lambda row: float(row["rise"])), "pairs_right": whole}


def _pairs(run: Run) -> Iterator[Pair]:
    """The pairs of all files.  Raises InputError if a line is no pair, or there is none."""
    from pipelines.text.blocks import Notes
    from pipelines.text.readers import open_lines

    files, limit = run.inputs["pairs"], run.config.limit
    counts: Counter[str] = Counter()
    for path, name in zip(files.paths, files.names, strict=True):
        paradigm = PurePosixPath(name).name.partition(".")[0]
        for number, line in open_lines(path, name, run.config.encoding, Notes()):
            if line.strip():
                pair = _pair(line.rstrip("\r\n"), paradigm, f"{name!r}, line {number}")
                counts[pair.paradigm] += 1
                if not limit or counts[pair.paradigm] <= limit:
                    yield pair
    if not counts:
        raise InputError("there are no minimal pairs in these files")


def _pair(line: str, paradigm: str, where: str) -> Pair:
    if line.lstrip().startswith("{"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = {}
        good, bad = row.get("sentence_good", row.get("good")), row.get("sentence_bad", row.get("bad"))
        name = row.get("UID", paradigm)
    else:
        good, bad, *_ = [*line.split("\t"), None, None]
        name = paradigm
    if not (isinstance(good, str) and isinstance(bad, str) and good.strip() and bad.strip() and isinstance(name, str)):
        raise InputError(
            f"{where}: not a minimal pair",
            hint='JSON lines with "sentence_good" and "sentence_bad", or a good sentence, a tab and a bad one',
        )
    for text in (name, good, bad):
        check_unicode(text, "a text", where)
    return Pair(name, good.strip(), bad.strip())


def _table(artifact: Artifact, config: Config) -> Table:
    counts = artifact.counts
    names = ("accuracy", *counts["floors"])
    rows = [(row["paradigm"], f"{row['pairs']:,}", *shares(row, names)) for row in counts["paradigms"]]
    rows.append(("mean", "", share(counts["accuracy"]), *shares(counts["floors"], names[1:])))
    notes: tuple[str, ...] = ()
    if "heads" in counts:
        worst, usual = counts["heads"]["most_needed"], share(counts["heads"]["pairs_right"])
        without = f"without head {head_name(worst)}, the one most needed, {share(worst['accuracy'])}"
        notes = (f"of all pairs, the model is right about {usual}; {without}; heads.parquet has every head",)
    return Table(("paradigm", "pairs", "right", *names[1:]), rows, notes)


STAGE = probe(
    "blimp",
    1,
    Config,
    measure,
    takes={
        "model": Model(),
        "pairs": TextFiles(
            "JSON lines with sentence_good and sentence_bad, or lines of a good sentence, a tab and a bad one.",
            argument="files",
        ),
    },
    check=check,
    prepare=prepare,
    table=_table,
    writes={"heads.parquet of minimal pairs": head_columns(UNITS), PAIRS: OF_PAIRS, PARADIGMS: OF_PARADIGMS},
    help="""Ask whether a language model finds the good sentence of minimal pairs more likely than the bad one.

    The likelihood of a sentence is the sum of the log-probabilities of its tokens.  A masked model predicts each token with only
    that token masked, a causal one from the tokens before it.  Equal scores count as wrong.  The mean is over paradigms.
    """,
    examples=(
        "guide probe blimp guided blimp/*.jsonl",
        "guide probe blimp guided pairs.tsv --masking word --floors wiki-128",
        "guide probe blimp guided blimp/ --limit 50 --each-head",
    ),
)

run = STAGE.run
