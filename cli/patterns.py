"""``guide patterns``: list the patterns, and draw one on a text."""

from __future__ import annotations

import tomllib
from typing import Annotated, Any

from typer import Argument, Option

from cli.arguments import Ascii, Png
from cli.completion import patterns
from cli.options import Session, command
from cli.output import check_output_path
from cli.pictures import legend, square
from cli.tables import table
from guidance.errors import InputError


@command("patterns list", examples=["guide patterns list", "guide patterns list --json | jq '.patterns[].name'"])
def list_patterns(session: Session) -> None:
    """List all patterns with the data that they need, their options and their sources."""
    from guidance.options import declared
    from guidance.patterns import PATTERNS
    from guidance.plan import as_toml
    from guidance.registry import load_entry_points

    load_entry_points()
    rows: list[dict[str, Any]] = [
        {
            "name": pattern.name,
            "needs": [*pattern.needs, *pattern.tables],
            "options": declared(pattern.build),
            "weighted": pattern.weighted,
            "source": pattern.source,
            "summary": pattern.summary,
        }
        for pattern in PATTERNS.values()
    ]
    cells = [
        (
            row["name"],
            ", ".join(row["needs"]) or "-",
            ", ".join(f"{key} = {as_toml(value)}" for key, value in row["options"].items()) or "-",
            row["source"],
            row["summary"],
        )
        for row in rows
    ]
    session.answer({"patterns": rows}, table(("PATTERN", "NEEDS", "OPTIONS", "SOURCE", "SUMMARY"), cells))
    session.tell(
        "`guide patterns show NAME` draws one; they combine as { or = [...] }, { and = [...] }, { not = ... },"
        ' { queries = ... }, { sum = [...] }, { where = "a condition" }'
    )


@command(
    "patterns show",
    examples=[
        "guide patterns show next",
        'guide patterns show window --option size=5 --text "The dog ran. It was late."',
        'guide patterns show \'{ or = ["next", "previous"] }\' --png neighbours.png',
        "guide patterns show 'matching_token and not self and abs(distance) <= 5'",
        'guide patterns show dependency --text "It rained." --parser spacy:en_core_web_sm',
        'guide patterns show marked --text "a b c" --feature marked=0,1,0',
    ],
)
def show_pattern(
    session: Session,
    name: Annotated[
        str,
        Argument(
            metavar="NAME",
            help="A pattern, a combination as in plans, { or = [...] }, or a condition.",
            autocompletion=patterns,
        ),
    ],
    text: Annotated[str | None, Option(help="The text; by default a sample with a known parse.")] = None,
    option: Annotated[
        list[str] | None, Option(metavar="KEY=VALUE", help="An option of the pattern (repeatable).")
    ] = None,
    tokenizer: Annotated[
        str | None, Option(help="A folder with tokenizer.json, or a tokenizer artifact; by default tokens are words.")
    ] = None,
    parser: Annotated[
        str | None,
        Option(help="spacy:NAME_OR_FOLDER or stanza:LANG, for heads, relations, parts of speech and stop words."),
    ] = None,
    feature: Annotated[
        list[str] | None,
        Option(metavar="NAME=V1,V2,…", help="A feature, with one value per word or token (repeatable)."),
    ] = None,
    png: Png = None,
    only_ascii: Ascii = False,
) -> None:
    """Draw the keys that a pattern selects for each query of a text: queries go down, keys across."""
    from guidance.patterns.combinations import read_pattern
    from pipelines.probing.patterns import spec_of
    from pipelines.storage.files import write_file
    from pipelines.views import one_text

    options = {key: _value(value) for key, value in _pairs(option, "--option").items()}
    pattern = read_pattern(spec_of(name), options)
    check_output_path(png, "--png", ".png")
    features = _pairs(feature, "--feature")
    example = one_text.read(text, store=session.store, tokenizer=tokenizer, parser=parser, features=features)
    for note in example.notes:
        session.tell(note)
    if pattern.tables:
        session.tell("co-occurrence is counted in this text only; count it in a corpus with `guide build-cooccur`")
    weights = one_text.weights_of(pattern, example)
    if png is not None:
        from pipelines.drawing import pattern_picture

        write_file(png, pattern_picture(weights, example.labels, title=str(pattern), subtitle=pattern.summary))
    about = {"pattern": str(pattern), "summary": pattern.summary, "source": pattern.source}
    session.answer(
        {**about, "tokens": example.labels, "weights": weights.tolist(), "png": png},
        [
            str(pattern),
            f"{pattern.summary}  ({pattern.source})",
            "",
            *square(weights, example.labels, ascii=only_ascii),
            "",
            legend(weighted=bool(((weights > 0) & (weights < 1)).any()), ascii=only_ascii),
        ],
    )
    if png is not None:
        session.tell(f"drawn: {png}")


def _value(text: str) -> Any:
    """A value parsed as TOML; any other text is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _pairs(items: list[str] | None, flag: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items or ():
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise InputError(f"{flag} {item!r} is not NAME=VALUE")
        if key in pairs:
            raise InputError(f"{flag} {key} is given twice")
        pairs[key] = value
    return pairs
