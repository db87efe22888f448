"""Stage ``probe-coref``: does a mention look most at one of its antecedents?

Reads a model and files with coreference.  Writes probe@1: ``heads.parquet`` (one row for each head, with its accuracy),
``probe.json`` (the best head, rules to compare with, counts) and ``heads.png``.

Source: Clark et al. 2019; paper A, table 8; `guidance.probes.coreference`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from guidance.errors import InputError, counted
from pipelines.engine.declaration import Table
from pipelines.engine.stage import Run
from pipelines.inputs import Model, TextFiles
from pipelines.probing.heads import best, head_columns, head_name, share, shares, write_heads
from pipelines.probing.probe import Findings, ReadingConfig, probe
from pipelines.storage.artifacts import Artifact
from pipelines.text.readers import known_extension, without_gzip

if TYPE_CHECKING:
    from torch import Tensor

    from guidance.probes.coreference import Mention, Tally
    from guidance.sites import Site
    from pipelines.probing.watched import Read, WatchedModel
    from pipelines.text.coreference_files import Text


class Config(ReadingConfig):
    """What is asked, and what is right."""

    format: Literal["conll-2012", "gum", "gap", "winobias"] | None = Field(
        None, description="Format of the files; by default told by their first line.  gum is also for OntoGUM."
    )
    encoding: str = Field("utf-8", description="Encoding of the files; invalid bytes are an error.")
    candidates: Literal["words", "preceding_words", "preceding_mentions"] = Field(
        "words",
        description="Words that a mention may look at: all other words, those before it, or the heads of mentions before it; a pronoun of GAP "
        "or WinoBias chooses between its candidates.",
    )
    target: Literal["head", "span"] = Field(
        "head", description="Right answer: the head word of an antecedent, or any word of it."
    )
    unit: Literal["mention", "pair"] = Field(
        "mention",
        description="Unit that is counted: mentions, with any antecedent right, or pairs of a mention and an antecedent.",
    )
    scope: Literal["document", "windows", "sentences"] = Field(
        "document",
        description="Text that the model reads at once: a document, cut after --max-length; windows, one after the other, of as many "
        "sentences as fit; or each sentence alone.",
    )


def _may_be_read(name: str) -> bool:
    return known_extension(name) or without_gzip(name).endswith((".conll", "_conll"))


UNITS: Mapping[str, str] = {
    "accuracy": "share of questions answered right",
    "pronominal": "share among pronouns; null if there are none",
    "proper": "share among names; null if there are none",
    "nominal": "share among other mentions; null if there are none",
    "half_0": "share in the first, third, … document",
    "half_1": "share in the second, fourth, … document",
    "any_word": "share of pronouns of GAP or WinoBias that look at the antecedent more than at any other word; null if there are none",
    "pro": "share in sentences of WinoBias that agree with stereotypes; null if there are none",
    "anti": "share in sentences of WinoBias that contradict them; null if there are none",
}
"""Figures of a head, with their units."""

KINDS = ("pronominal", "proper", "nominal")
ANY_WORD = "any_word"

Tallies = Mapping[str, "Tally"]
"""The answers of a site or of a rule: to all questions (""), to those of `STEREOTYPES`, and to those about `ANY_WORD`."""


def measure(run: Run[Config]) -> Findings:
    """What every head finds.  Raises InputError if a file is in no known format, or no mention has an antecedent."""
    import torch

    from guidance.probes.coreference import BASELINES, among_all_words, answers, baseline, queries
    from pipelines.probing.watched import WatchedModel
    from pipelines.text.blocks import Notes
    from pipelines.text.coreference_files import STEREOTYPES, read_coreference

    config, notes, files = run.config, Notes(), run.inputs["texts"]
    # before the model is opened, so that a wrong file fails at once
    for path, name in zip(files.paths, files.names, strict=True):
        next(read_coreference([path], [name], config.format, config.encoding, Notes()), None)
    model = WatchedModel.of(run)
    tallies: dict[Site, Tallies] = {}
    rules: dict[str, Tallies] = {name: _tallies() for name in BASELINES}
    counts = dict.fromkeys(
        ("documents", "texts", "mentions", "cut_off_mentions", "questions", "without_antecedent", "with_rivals"), 0
    )
    counts["tokens_read"] = min(config.max_length, model.longest or config.max_length)
    may_read_more = counts["tokens_read"] == config.max_length
    texts = read_coreference(files.paths, files.names, config.format, config.encoding, notes)
    contexts = ((n, text, *context) for n, text in enumerate(texts) for context in _contexts(text, config.scope, model))
    with run.progress.task("probe", total=config.limit or None, unit="texts") as bar:
        for number, text, words, mentions in itertools.islice(contexts, config.limit or None):
            read, attention = model.look(words, config.words)
            kept = _read_mentions(mentions, read)
            asked = queries(
                kept,
                [word is not None for word in read.words],
                candidates=config.candidates,
                target=config.target,
                unit=config.unit,
                is_causal=model.is_causal,
            )
            counts["documents"] = number + 1
            counts["texts"] += 1
            counts["mentions"] += len(mentions)
            counts["cut_off_mentions"] += len(mentions) - len(kept)
            counts["questions"] += len(asked)
            counts["with_rivals"] += sum(any(o.entity != q.mention.entity for o in q.candidates) for q in asked)
            whole = len(kept) == len(mentions)
            counts["without_antecedent"] += whole and not asked and any(mention.asks for mention in mentions)
            bar.advance(1)
            if not asked:
                continue
            # two sentences of WinoBias that follow each other are alike but for their antecedents
            half = (number // 2 if text.stereotype else number) % 2
            everywhere = among_all_words(asked)
            for site, attention_HWW in attention.items():
                own = tallies.setdefault(site, _tallies())
                for part in {"", text.stereotype}:
                    own[part].add(answers(attention_HWW, asked), asked, half)
                own[ANY_WORD].add(answers(attention_HWW, everywhere), everywhere, half)
            shown = ["" if word is None else words[word] for word in read.words]
            for name, own in rules.items():
                for part in {"", text.stereotype}:
                    own[part].add(torch.tensor([baseline(shown, asked, BASELINES[name])]), asked, half)
    if not counts["questions"]:
        ways = {"a larger --max-length": may_read_more, "--scope windows": config.scope == "document"}
        raise InputError(
            f"no mention has an antecedent in the first {counts['tokens_read']} tokens",
            hint=", or ".join(way for way, helps in ways.items() if helps) or None,
        )
    rows = write_heads(
        run,
        {name: {site: _figure(own, name).expand(site.num_heads) for site, own in tallies.items()} for name in UNITS},
        UNITS,
        "accuracy",
        title=f"Antecedents found by each head\n{counts['questions']:,} questions",
        label="% of questions",
    )
    first = next(iter(tallies.values()))
    summary: dict[str, Any] = {
        "best": best(rows, "accuracy"),
        "split_half": _split_half(rows),
        "best_by": {name: best(rows, name) for name in (*KINDS, ANY_WORD, *STEREOTYPES)},
        "asked": {name: _number_of(first, name) for name in ("accuracy", *KINDS, ANY_WORD, *STEREOTYPES)},
        "is_causal": model.is_causal,
        # where no candidate is wrong, every rule is right
        "baselines": {
            name: {key: _number(_figure(own, key)) for key in ("accuracy", *KINDS, *STEREOTYPES)}
            for name, own in (rules if counts["with_rivals"] else {}).items()
        },
    }
    if model.cut:
        cut = counted(model.cut, "text was", "texts were")
        notes.warn(f"{cut} longer than {counts['tokens_read']} tokens and cut", files.names[0])
    run.warn(*notes.lines())
    return Findings(counts, summary)


def _tallies() -> Tallies:
    from guidance.probes.coreference import Tally
    from pipelines.text.coreference_files import STEREOTYPES

    return {part: Tally() for part in ("", *STEREOTYPES, ANY_WORD)}


def _contexts(text: Text, scope: str, model: WatchedModel) -> Iterator[tuple[Sequence[str], list[Mention]]]:
    """What the model reads at once, with the mentions inside."""
    if scope == "document":
        yield text.words, list(text.mentions)
        return
    starts = text.sentences if scope == "sentences" else _windows(text, model)
    for start, end in zip(starts, [*starts[1:], len(text.words)], strict=True):
        inside = [mention for mention in text.mentions if start <= mention.start and mention.end <= end]
        moved = [replace(m, start=m.start - start, end=m.end - start, head=m.head - start) for m in inside]
        yield text.words[start:end], moved


def _windows(text: Text, model: WatchedModel) -> list[int]:
    """The first word of each window: as many sentences as can be read at once, or part of a sentence that is longer."""
    starts = [0]
    while (end := starts[-1] + model.fitting(text.words[starts[-1] :])) < len(text.words):
        starts.append(max((s for s in text.sentences if starts[-1] < s <= end), default=end))
    return starts


def _read_mentions(mentions: Sequence[Mention], read: Read) -> list[Mention]:
    """The mentions whose head word the model has read, by the numbers of the words that it has read."""
    kept = []
    for mention in mentions:
        rows = [read.row_of[word] for word in range(mention.start, mention.end) if word in read.row_of]
        if mention.head in read.row_of:
            kept.append(replace(mention, start=rows[0], end=rows[-1] + 1, head=read.row_of[mention.head]))
    return kept


def _part(name: str) -> tuple[str, tuple[Any, ...]]:
    """Which of the `Tallies` one of `UNITS` is about, and which kinds of mentions."""
    return (name if name in (ANY_WORD, "pro", "anti") else ""), ((name,) if name in KINDS else ())


def _figure(tallies: Tallies, name: str) -> Tensor:
    """One of `UNITS` of each head, (H,), or NaN, (1,), without questions."""
    part, kinds = _part(name)
    return tallies[part].accuracy(*kinds, half=int(name[-1]) if name.startswith("half_") else None)


def _number_of(tallies: Tallies, name: str) -> int:
    """How many questions one of `UNITS` is about."""
    part, kinds = _part(name)
    return tallies[part].number(*kinds)


def _number(figure_1: Tensor) -> float | None:
    return None if figure_1.isnan() else float(figure_1)


def _split_half(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The accuracy of the head that is best in one half of the documents, on the other half; the mean of both ways."""
    chosen = [(best(rows, one), other) for one, other in (("half_0", "half_1"), ("half_1", "half_0"))]
    accuracies = [row[other] for row, other in chosen if row is not None and row[other] is not None]
    return sum(accuracies) / 2 if len(accuracies) == 2 else None


KINDS_OF_MENTIONS = {"pronominal": "pronouns", "proper": "names", "nominal": "others"}
RULES = {"nearest": "nearest mention", "head match": "nearest with the same head word", "rules": "rules in order"}


def _table(artifact: Artifact, config: Config) -> Table:
    counts = artifact.counts
    number, questions = counts["asked"], counts["questions"]
    # a column that is about all questions says no more than the first
    parts = {name: title for name, title in KINDS_OF_MENTIONS.items() if 0 < number[name] < questions}
    parts |= {name: name for name in ("pro", "anti") if 0 < number[name] < questions}
    titles = {"accuracy": "all", **parts, **({"any_word": "any word"} if number["any_word"] else {})}
    difference = all(name in parts for name in ("pro", "anti"))

    def row(label: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
        points = _points(figures.get("pro"), figures.get("anti"))
        return label, *shares(figures, list(titles)), *((points,) if difference else ())

    empty = ("",) * (len(titles) + difference)
    rows = [("questions", *(f"{number[name]:,}" for name in titles), *(("",) if difference else ()))]
    best: dict[str, tuple[list[str], Any]] = {head_name(counts["best"]): (["all"], counts["best"])}
    for name, title in list(titles.items())[1:]:
        head = counts["best_by"][name]
        best.setdefault(head_name(head), ([], head))[0].append(title)
    rows += [row(f"head {name}, best on {' and '.join(of)}", head) for name, (of, head) in best.items()]
    rows.insert(2, ("split halves", share(counts["split_half"]), *empty[1:]))
    # a pronoun that chooses between the candidates of GAP or WinoBias has the head word of none
    idle = {"head match"} if number["any_word"] == questions else set()
    rows += [row(RULES[name], scores) for name, scores in counts["baselines"].items() if name not in idle]
    return Table(("", *titles.values(), *(("pro - anti",) if difference else ())), rows, _notes(artifact))


def _points(one: float | None, other: float | None) -> str:
    return "–" if one is None or other is None else f"{100 * (one - other):+.1f}"


def _notes(artifact: Artifact) -> tuple[str, ...]:
    counts, config = artifact.counts, artifact.manifest["config"]
    notes = [f"{counted(counts['questions'], 'question')} in {counted(counts['documents'], 'document')}"]
    if counts["without_antecedent"]:
        have = counted(counts["without_antecedent"], "pronoun has", "pronouns have")
        before = " before it, or no other one" if counts.get("is_causal") else ""
        notes.append(f"{have} no antecedent among the candidates{before}")
    if counts["cut_off_mentions"]:
        read = counts.get("tokens_read", config["max_length"])
        hint = (
            "; a larger --max-length reads more" if read == config["max_length"] else f"; the model reads {read} tokens"
        )
        if counts["asked"]["any_word"] < counts["questions"]:
            hint = "; --scope windows reads whole documents" if config["scope"] == "document" else ""
        were = counted(counts["cut_off_mentions"], "was", "were", of=f"{counts['mentions']:,} mentions")
        notes.append(f"{were} cut off{hint}")
    lines = ["; ".join(notes)]
    if counts["asked"]["any_word"]:
        lines.append('a pronoun chooses between its candidates; under "any word" all words of the text compete')
    if not counts["baselines"]:
        lines.append("no rules to compare with: the files mark no mention that would be wrong, so every rule is right")
    return tuple(lines)


STAGE = probe(
    "coref",
    2,
    Config,
    measure,
    takes={
        "model": Model(),
        "texts": TextFiles("Files or folders with coreference.", argument="files", in_folders=_may_be_read),
    },
    table=_table,
    writes={"heads.parquet of coref": head_columns(UNITS)},
    help="""Find heads by which a mention looks most at one of its antecedents.

    The query is the head word of each mention that has an antecedent in the text; it is right if no other word has as much
    attention as the head word of an antecedent.  A pronoun of GAP or WinoBias chooses between its candidates, on either side of it; in a causal model, between those before it.
    The best head is chosen on the same texts that it is measured on; the
    split-half figure chooses it on half of the documents and measures it on the others.  The table also has rules: the nearest
    mention, the nearest one with the same head word, and a cascade of string match, head match, agreement, and any mention.
    """,
    examples=(
        "guide probe coref guided litbank/conll/",
        "guide probe coref ./bert-base gum/ontogum/ --candidates preceding_mentions",
        "guide probe coref guided litbank/conll/ --random 0   # the same shape with random weights",
        "guide probe coref guided gap-validation.tsv --json | jq .counts.best",
        "guide probe coref guided pro_stereotyped_type1.txt.dev anti_stereotyped_type1.txt.dev",
    ),
)

run = STAGE.run
