"""The page of what was measured, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.heads.measured import GUIDED, TUNING
from benchmarks.pages import table
from pipelines import papers
from pipelines.probing.heads import head_name, share

KINDS = ("accuracy", "pronominal", "proper", "nominal")


def of_paper(row: str, data: str = "CoNLL-2012") -> dict[str, float]:
    """Shares of mentions whose antecedent the best head finds, or rules, in table 8 of paper A; 26.6 stands there among fractions."""
    found = {
        number.metric.rpartition(", ")[2].lower().replace("all", "accuracy"): number.number
        / (100 if number.number > 1 else 1)
        for number in papers.table("a-table8").numbers
        if number.row.startswith(row) and number.column == data and number.number is not None
    }
    return {kind: found[kind] for kind in KINDS if kind in found}


PUBLISHED = {
    "BERT-base, head 5-4 (Clark et al. 2019)": {"accuracy": 0.65},
    "BERT-base, best head (paper A, table 8)": of_paper("BERTBASE"),
    "random weights, best head (paper A, table 8)": of_paper("Randomly"),
    "nearest mention (Clark et al. 2019)": {"accuracy": 0.27},
    "nearest with the same head word (Clark et al. 2019)": {"accuracy": 0.52},
    "rules in order (Clark et al. 2019)": {"accuracy": 0.69, "pronominal": 0.70, "proper": 0.77, "nominal": 0.60},
    "rules in order (paper A, table 8)": of_paper("Rule-Based"),
}
"""Shares of mentions of CoNLL-2012 whose antecedent is found."""
PUBLISHED_REFLEXIVES = {
    f"{name}, best head": of_paper(row, "Synthetic")["accuracy"]
    for name, row in (("BERT-base", "BERTBASE"), ("random weights", "Randomly"))
}
"""Of paper A, table 8, on 10,000 sentences of the same grammar."""


def named(row: Mapping[str, Any], figure: str = "accuracy") -> str:
    return f"{share(row[figure])} ({head_name(row)})"


def of_candidates(known: Mapping[str, Any]) -> str:
    """Pronouns that choose between two candidates."""
    rows = []
    for name, chosen in (("GAP", "accuracy"), ("GAP", "any_word"), ("WinoBias", "accuracy"), ("WinoBias", "pro")):
        part = known[name]
        best, other = (
            part[which]["best"] if chosen == "accuracy" else part[which]["best_by"][chosen]
            for which in ("trained", "random")
        )
        title = {"any_word": ", all words compete", "pro": ", best for stereotypes"}.get(chosen, "")
        figure = "accuracy" if chosen == "pro" else chosen
        rule = "–" if chosen == "any_word" else share(part["rules"]["nearest"]["accuracy"])
        half = share(part["trained"]["split_half"]) if chosen == "accuracy" else "–"
        sides = f"{share(best['pro'])}, {share(best['anti'])}" if name == "WinoBias" else "–"
        rows.append(
            (
                f"{name}{title}",
                f"{part['asked']['accuracy']:,}",
                named(best, figure),
                half,
                named(other, figure),
                rule,
                sides,
            )
        )
    titles = ("", "pronouns", "best head", "split halves", "random weights", "nearest candidate", "pro, anti")
    return table(titles, rows)


def of_mentions(known: Mapping[str, Any]) -> str:
    """Mentions that look for an antecedent among all words, beside what was published of other data."""
    rows = []
    for name in ("GUM", "LitBank"):
        part = known[name]
        kinds = [part["asked"][kind] for kind in KINDS]
        rows.append((f"**{name}**: mentions", *(f"{number:,}" for number in kinds)))
        rows.append(
            (f"best head on each ({head_name(part['trained']['best'])} on all)", *best_of_kinds(part["trained"]))
        )
        rows.append(("split halves", share(part["trained"]["split_half"]), "", "", ""))
        rows.append(("random weights, best head on each", *best_of_kinds(part["random"])))
        rules = {
            "nearest": "nearest mention",
            "head match": "nearest with the same head word",
            "rules": "rules in order",
        }
        rows += [(title, *(share(part["rules"][rule][kind]) for kind in KINDS)) for rule, title in rules.items()]
    rows.append(("**CoNLL-2012, published**", "", "", "", ""))
    rows += [(title, *(share(figures.get(kind)) for kind in KINDS)) for title, figures in PUBLISHED.items()]
    return table(("", "all", "pronouns", "names", "others"), rows)


def best_of_kinds(found: Mapping[str, Any]) -> list[str]:
    return [share((found["best"] if kind == "accuracy" else found["best_by"][kind])[kind]) for kind in KINDS]


def of_relations(part: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            f"{row['best']['words']:,}",
            f"{named(row['best'])} {row['best']['direction'].replace('towards_', 'to the ')}",
            share(row["random"]["accuracy"]),
            f"{share(row['offset_accuracy'])} ({row['offset']:+d})",
        )
        for name, row in part["relations"].items()
    ]
    whole = part["all"]
    found = (whole["attachment_of_best_heads"], whole["random"], whole["attachment_of_best_offsets"])
    rows.append(("all words, by the best of each relation", f"{part['words']:,}", *map(share, found)))
    return table(("relation", "words", "best head", "random weights", "best distance"), rows)


def of_patterns(part: Mapping[str, Any]) -> str:
    rows = [
        (
            f"`{name}`",
            f"{share(row['share'])} ({row['best']})",
            share(row["mean"]),
            share(row["random"]),
            share(row["by_chance"]),
        )
        for name, row in part["patterns"].items()
    ]
    return table(("pattern", "best head", "mean of all heads", "random weights, best head", "even attention"), rows)


def of_sinks(part: Mapping[str, Any]) -> str:
    names = ("special", "first", "itself", "ordinary", "entropy")
    rows = [
        (f"{label}layer {row['layer']}", *(share(row[name]) for name in names))
        for which, label in (("trained", ""), ("random", "random weights, "))
        for row in (part[which]["by_layer"] if which == "trained" else part[which]["by_layer"][:1])
    ]
    return table(("", "special tokens", "first token", "itself", "other tokens", "entropy of rows"), rows)


def of_importance(part: Mapping[str, Any]) -> str:
    rows = []
    for which, label in (("trained", "the model"), ("random", "new weights")):
        found = part[which]
        ranked = {
            by: sorted(
                ((value, f"{layer}-{head}") for layer, row in enumerate(found[by]) for head, value in enumerate(row)),
                reverse=True,
            )
            for by in ("gradient", "off")
        }
        tops = [", ".join(name for _, name in ranked[by][:4]) for by in ("gradient", "off")]
        highest = ranked["off"][0][0]
        rows.append(
            (
                label,
                share(found["accuracy"]),
                f"{found['loss']:.3f}",
                tops[0],
                f"{tops[1]} (+{highest:.3f})",
                f"{found['correlation']:.2f}",
            )
        )
    titles = (
        f"after {TUNING['steps']} steps of SST, from",
        "accuracy",
        "loss",
        "most important by gradient",
        "by switching off",
        "rank correlation",
    )
    return table(titles, rows)


def of_distances(part: Mapping[str, Any]) -> str:
    nearest, mean = part["nearest"], part["mean"]
    rows = [
        ("from the nearest other head", *(f"{nearest[which]:.3f}" for which in ("trained", "random"))),
        ("from all other heads, mean", *(f"{mean[which]:.3f}" for which in ("trained", "random"))),
        ("from itself after fine-tuning on SST", f"{part['moved']:.3f}", "–"),
        *((f"in layer {layer}", f"{moved:.3f}", "–") for layer, moved in enumerate(part["moved_by_layer"])),
    ]
    return table(("Jensen-Shannon divergence in nats", "the model", "random weights"), rows)


def of_guidance(part: Mapping[str, Any]) -> list[str]:
    before, after = (part["share"][when] for when in ("before", "after"))
    patterns = {f"{layer}-{head}": pattern for (layer, head), pattern in GUIDED.items()}
    rows = [(f"{name} on `{patterns[name]}`", share(before[name]), share(after[name])) for name in before]
    return [
        f"{part['steps']} steps of {part['batch']} sentences of SST with a loss on two heads. On the sentence of the picture:",
        table(("attention of", "before", "after"), rows),
        "![Three heads of the model, and three of the guided one, on one sentence](heads-sentence.png)",
    ]


def page(known: Mapping[str, Any]) -> str:
    """The page, of what was measured."""
    reflexive, parts = known["reflexives"], [f"# What the heads of {known['model']} do", "`python -m benchmarks.heads`"]
    parts.append(
        f"torch {known['torch']}, {known['threads']} thread. Random weights are a model of the same shape with new weights of seed 0. The best "
        "head is the best of all on the examples that it is measured on; *split halves* chooses it on one half and measures on the other. "
        "Published figures are of other data, so they stand beside and are not compared. Heads are named layer-head, from 0."
    )
    parts.append(f"![Maps of all heads, of {known['model']} and of random weights](heads.png)")
    parts += ["## Pronouns with two candidates", of_candidates(known)]
    parts += [
        "## Antecedents among all words",
        "Each document is cut at the length of its tokenizer, which is 128 tokens in all-MiniLM-L6-v2.",
        of_mentions(known),
    ]
    parts += ["## Reflexives", f"{reflexive['trained']['sentences']:,} sentences of the grammar, all tokens compete."]
    published = {title: share(value) for title, value in PUBLISHED_REFLEXIVES.items()}
    own = (named(reflexive["trained"]["best"]), named(reflexive["random"]["best"]))
    parts.append(
        table(
            ("", "best head", "mean of all heads"),
            [
                ("the model", own[0], share(reflexive["trained"]["mean"])),
                ("random weights", own[1], share(reflexive["random"]["mean"])),
                *(
                    (f"published, other sentences: {title} (paper A, table 8)", value, "–")
                    for title, value in published.items()
                ),
            ],
        )
    )
    relations = known["dependencies"]
    parts += [
        "## Relations of syntax",
        f"{relations['sentences']:,} sentences of EWT, development split.",
        of_relations(relations),
    ]
    parts += [
        "## Patterns",
        f"{known['patterns']['sequences']:,} sequences of 128 tokens of a novel.",
        of_patterns(known["patterns"]),
    ]
    parts += [
        "## Where attention rests",
        "The same sequences; means of the heads of a layer.",
        of_sinks(known["sinks"]),
    ]
    examples = known["importance"]["trained"]["examples"]
    about = (
        f"{examples['gradient']} validation sentences for the gradient, {examples['off']} for heads that are switched off; accuracy on "
        "the development split."
    )
    parts += ["## Importance for a task", about, of_importance(known["importance"])]
    parts += [
        "## Distances",
        f"{known['distances']['sequences']} sequences of the novel.",
        of_distances(known["distances"]),
    ]
    if "guided" in known:
        parts += ["## Two heads under guidance", *of_guidance(known["guided"])]
    return "\n\n".join(parts) + "\n"
