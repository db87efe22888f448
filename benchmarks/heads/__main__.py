"""The command, and the pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchmarks.heads
from benchmarks import pages, published
from benchmarks.heads.measured import MEASURED, PUBLISHED, SENTENCE, Models, models_of, tuned_on_sst
from benchmarks.heads.page import page
from benchmarks.pages import machine, save
from pipelines.drawing import PAGE_WIDTH, PALETTE, attention_grid, figure_of, printed
from pipelines.probing.one_text import look
from pipelines.storage.store import Store

SHOWN = (
    {(0, 2): "previous token", (3, 1): "them → keys", (4, 5): "rests on [CLS]"},
    {(0, 2): "free", (2, 9): "guided: previous", (4, 5): "guided: next"},
)
"""The heads of the picture of one sentence: those of the model, and those of the guided one."""

GUIDED_PART = "guided"
"""What is measured of the heads of the published model by their numbers, and of no other model."""


def all_heads(known: Mapping[str, Any]) -> bytes:
    """What every head does, as PNG: a map of layers and heads for each question, below it that of random weights."""
    columns = {
        "on the previous token": [known["patterns"][key]["previous"] for key in ("heads", "random_heads")],
        "on the next token": [known["patterns"][key]["next"] for key in ("heads", "random_heads")],
        "on special tokens": [known["sinks"][key] for key in ("heads", "random_heads")],
        "GAP, right": [known["GAP"][key] for key in ("heads", "random_heads")],
    }
    figure, grid = figure_of(PAGE_WIDTH, 2.9, 2, len(columns))
    for column, (title, maps) in enumerate(columns.items()):
        for row, (values, name) in enumerate(zip(maps, (known["model"], "random weights"), strict=True)):
            axes = grid[row][column]
            image = axes.imshow(
                [[100 * value for value in line] for line in values], cmap=PALETTE, vmin=0, vmax=100, aspect="auto"
            )
            axes.set_xticks(range(0, len(values[0]), 2))
            axes.set_yticks(range(len(values)))
            axes.tick_params(labelsize=6, length=0)
            axes.set_title(title if row == 0 else "", fontsize=8)
            axes.set_ylabel(f"{name}\nlayer" if column == 0 else "", fontsize=7)
            axes.set_xlabel("head" if row else "", fontsize=7)
    figure.colorbar(image, ax=grid, shrink=0.8, aspect=20).ax.tick_params(labelsize=6)
    figure.suptitle("% of attention, and of GAP's pronouns", fontsize=9)
    return printed(figure, "png")


def one_sentence(models: Models) -> bytes:
    """Heads of the model and of the guided one on one sentence, as PNG."""
    looked = [look(folder, SENTENCE) for folder in (models.trained, tuned_on_sst(models, guided=True).path)]
    rows = {
        label: {f"{layer}-{head}: {what}": maps.map(layer, head) for (layer, head), what in heads.items()}
        for label, heads, maps in zip(("as published", "guided"), SHOWN, looked, strict=True)
    }
    return attention_grid(
        rows,
        looked[0].labels,
        title=f"One sentence in {models.trained.name}",
        width=PAGE_WIDTH,
    )


def main() -> None:
    parser = pages.command(benchmarks.heads.__doc__)
    parser.add_argument("--model", type=Path, help="folder of an encoder; by default that of the extra `models`")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure only what has TEXT in its name")
    arguments = parser.parse_args()
    folder, name = (arguments.model, arguments.model.name) if arguments.model else (published(), PUBLISHED)
    models, path = models_of(folder, name, Store(arguments.store)), arguments.out / "heads.json"
    known = {"model": models.trained.name, **pages.known(path)}
    if known["model"] != models.trained.name:
        raise SystemExit(f"{path} is about {known['model']}: name another folder with --out")
    wanted = {part: measure for part, measure in MEASURED.items() if part != GUIDED_PART or not arguments.model}
    for part, measure in wanted.items():
        if arguments.only in part and part not in known:
            known[part] = measure(models)
            known |= machine()
            save(path, known)
            print(f"{part}: done", flush=True)
    if known.keys() >= wanted.keys():
        (arguments.out / "heads.png").write_bytes(all_heads(known))
        if GUIDED_PART in wanted:
            (arguments.out / "heads-sentence.png").write_bytes(one_sentence(models))
        path.with_suffix(".md").write_text(page(known), encoding="utf-8")


if __name__ == "__main__":
    main()
