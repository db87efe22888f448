"""A report as one HTML page: nothing is loaded from anywhere, no script is needed, and it prints on A4.

All texts go through `text`, which escapes them; nothing else makes HTML of what users have written.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

from pipelines.report.blocks import Block, Grid, Items, Picture, Prose, Report, Section, data_uri
from pipelines.views.comparison_tables import Table, numeric_columns

STYLE = """\
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #595959; --line: #d0d0d0; --paper: #ffffff; --tint: #f3f5f8; --link: #2d55a8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --soft: #b0b0b0; --line: #4a4a4a; --paper: #17191c; --tint: #22262b; --link: #9dbcf5 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", "Noto Sans", sans-serif }
.page { max-width: 72rem; margin: 0 auto; padding: 2rem 1.5rem 4rem }
header p, main > section > p, main > section > ul, .note { max-width: 46rem }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1.35rem; margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line) }
a { color: var(--link) }
nav ul { list-style: none; padding: 0; margin: 1rem 0; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem }
.note { border-left: 4px solid #e0a030; background: var(--tint); padding: .4rem .8rem; margin: .6rem 0; font-size: .95em }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap }
th:first-child, td:first-child { padding-left: 0 }
td.words, th.words { text-align: left }
td.long { white-space: normal; min-width: 14rem }
thead th { border-bottom: 2px solid var(--ink); font-weight: 600; vertical-align: bottom; white-space: normal; max-width: 11rem; overflow-wrap: break-word }
tbody tr { border-bottom: 1px solid var(--line) }
tr.marked { background: var(--tint); font-weight: 600 }
figure { margin: 1rem 0 1.5rem }
figure img { display: block; max-width: 100%; height: auto; background: #ffffff }
figcaption { color: var(--soft); font-size: .9rem; margin: .3rem 0; max-width: 60rem }
pre { background: var(--tint); padding: .8rem 1rem; overflow-x: auto; font: .82rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace }
footer { margin-top: 3rem; border-top: 1px solid var(--line); color: var(--soft); font-size: .9rem }
@media (min-width: 100rem) {
  .page { max-width: 96rem; display: grid; grid-template-columns: 14rem minmax(0, 1fr); column-gap: 3rem }
  header, main, footer { grid-column: 2 }
  nav { grid-column: 1; grid-row: 1 / span 3; position: sticky; top: 2rem; align-self: start }
  nav ul { flex-direction: column }
}
@page { size: A4; margin: 16mm 15mm }
@media print {
  :root { color-scheme: light; --ink: #000000; --soft: #404040; --line: #b0b0b0; --paper: #ffffff; --tint: #f3f3f3; --link: #000000 }
  body { font-size: 10pt }
  .page { max-width: none; padding: 0; display: block }
  nav { display: none }
  .wide, pre { overflow: visible }
  figure img { max-height: 235mm }
  table { font-size: 7.5pt; width: auto }
  th, td { padding: .15rem .35rem; white-space: normal }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 7.5pt }
  h2, figure:not(.short) > figcaption { break-after: avoid }
  .short, tr, .note { break-inside: avoid }
  thead { display: table-header-group }
  a { text-decoration: none }
}
"""


def as_html(report: Report) -> str:
    """The page of a report."""
    links = "".join(f'<li><a href="#{text(s.name)}">{text(s.title)}</a></li>\n' for s in report.sections)
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(report.title)}</title>
<style>
{STYLE}</style>
</head>
<body>
<div class="page">
<header>
<h1>{text(report.title)}</h1>
<p>{text(report.lead)}</p>
</header>
<nav aria-label="Sections">
<ul>
{links}</ul>
</nav>
<main>
{"".join(map(_section, report.sections))}</main>
</div>
</body>
</html>
"""


def text(words: str) -> str:
    """A text as HTML, escaped so that nothing in it is read as markup; control characters are left out."""
    return html.escape("".join(c for c in words if c.isprintable() or c == "\n"))


def _section(section: Section) -> str:
    blocks = "".join(map(_block, section.blocks))
    return f'<section id="{text(section.name)}">\n<h2>{text(section.title)}</h2>\n{blocks}</section>\n'


def _block(block: Block) -> str:
    if isinstance(block, Prose):
        kind = ' class="note"' if block.note else ""
        return f"<p{kind}>{text(block.text)}</p>\n"
    if isinstance(block, Items):
        items = "".join(f"<li>{text(item)}</li>\n" for item in block.items)
        return f"<p>{text(block.text)}</p>\n<ul>\n{items}</ul>\n"
    if isinstance(block, Grid):
        return _table(block.table, block.marked)
    if isinstance(block, Picture):
        image = f'<img src="{data_uri(block.svg)}" alt="{text(block.says)}">'
        return f'<figure class="short">\n{image}\n<figcaption>{text(block.caption)}</figcaption>\n</figure>\n'
    return f"<pre><code>{text(block.text)}</code></pre>\n"


LONG = 40
"""A cell of more characters is wrapped."""

SHORT = 16
"""A table of no more rows stays on one page when it is printed."""


def _table(table: Table, marked: Collection[int]) -> str:
    numeric = numeric_columns(table)

    def row(tag: str, cells: Sequence[str], kind: str = "") -> str:
        made = []
        for cell, of_numbers in zip(cells, numeric, strict=True):
            kinds = ["words"] * (not of_numbers) + ["long"] * (tag == "td" and len(cell) > LONG)
            named = f' class="{" ".join(kinds)}"' if kinds else ""
            heading = ' scope="col"' if tag == "th" else ""
            made.append(f"<{tag}{heading}{named}>{text(cell)}</{tag}>")
        return f"<tr{kind}>{''.join(made)}</tr>\n"

    body = "".join(
        row("td", cells, ' class="marked"' if number in marked else "") for number, cells in enumerate(table.cells)
    )
    head = row("th", table.titles)
    caption = f"<figcaption>{text(table.caption)}</figcaption>\n" if table.caption else ""
    whole = f"<table>\n<thead>\n{head}</thead>\n<tbody>\n{body}</tbody>\n</table>"
    kind = ' class="short"' if len(table.cells) <= SHORT else ""
    return f'<figure{kind}>\n{caption}<div class="wide">{whole}</div>\n</figure>\n'
