"""Where runs come from: their lineage as a picture, and what they cost."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from guidance.errors import counted
from pipelines.drawing import figure_of, letters_of_all_scripts, printed
from pipelines.report.blocks import Block, Grid, Picture, Prose, Section
from pipelines.report.given import Runs, is_made_by_search, plan_of, seconds_of
from pipelines.storage.manifest import digest
from pipelines.training.plan_inputs import model_folders
from pipelines.views.comparison import common_labels
from pipelines.views.comparison_tables import Table

BOX, MOST_BOXES = 1.8, 5
"""The width of a box in inches, and how many stand beside each other; further ones go below."""


# lineage


@dataclass(frozen=True)
class Node:
    """One box: artifacts that differ only in their seeds, or files.

    Attributes:
        parents: the keys of the boxes that it was made from.
    """

    title: str
    lines: Sequence[str]
    parents: Sequence[str]


def nodes_of(runs: Runs) -> dict[str, Node]:
    """The boxes of the lineage, each after those that it was made from."""
    key_of: dict[str, str] = {}
    members: dict[str, list[dict[str, Any]]] = {}
    parents: dict[str, list[str]] = {}
    nodes: dict[str, Node] = {}
    for recipe, manifest in runs.manifests.items():
        own = []
        folders = model_folders(manifest)
        for role, source in manifest.get("inputs", {}).items():
            of_model = role == "tokenizer" and "tokenizer.json" in source.get("first", ())
            if is_made_by_search(manifest, role) or source.get("kind") in ("plan", "packages") or of_model:
                continue
            own.append(key_of.get(source.get("recipe", ""), "") or _files(source, nodes, folders.get(role, "")))
        config = {name: value for name, value in manifest.get("config", {}).items() if name not in ("seed", "name")}
        plan = manifest.get("inputs", {}).get("plan", {}).get("content")
        key = key_of[recipe] = digest([manifest["stage"], config, plan, sorted(set(own))])
        members.setdefault(key, []).append(manifest)
        parents.setdefault(key, list(dict.fromkeys(own)))
    for key, made in members.items():
        names = [runs.name_of(manifest) for manifest in made]
        title = common_labels([names])[0] if len(names) > 1 else names[0]
        nodes[key] = Node(title, _lines(made), parents[key])
    # files come first, as each box does before those that were made from it
    nodes = {key: nodes[key] for key in sorted(nodes, key=lambda key: bool(nodes[key].parents))}
    all_parents = {key: node.parents for key, node in nodes.items()}
    above = {key: _ancestors(key, all_parents) for key in nodes}
    return {key: replace(node, parents=_direct(node.parents, above)) for key, node in nodes.items()}


def _direct(parents: Sequence[str], above: Mapping[str, set[str]]) -> list[str]:
    """The parents that no other parent was made from."""
    return [parent for parent in parents if not any(parent in above[other] for other in parents)]


def _files(source: Mapping[str, Any], nodes: dict[str, Node], folder: str = "") -> str:
    """The key of the box of an input that is no artifact of this store, such as the folder of a model."""
    key = digest(dict(source))
    names = ", ".join(str(name) for name in source.get("first", [])[:3])
    more = f" and {source['count'] - 3:,} more" if source.get("count", 0) > 3 else ""
    gone = f"{str(source['recipe'])[:16]}, not in this store" if "recipe" in source else ""
    about = ("model", [folder]) if folder else (str(source.get("kind", "input")), [names + more or gone])
    nodes.setdefault(key, Node(*about, []))
    return key


_COUNTED = ("step", "parameter", "document", "sentence", "token")


def _lines(made: Sequence[Mapping[str, Any]]) -> list[str]:
    seeds = [str(manifest["config"]["seed"]) for manifest in made if manifest["config"].get("seed") is not None]
    several = f", seeds {', '.join(seeds)}" if seeds else f", {len(made)} of them"
    lines = [str(made[0]["stage"]) + (several if len(made) > 1 else "")]
    config, counts = made[0].get("config", {}), made[0].get("counts", {})
    if plan := plan_of(config):
        lines.append(f"plan {plan}")
    known = [counted(counts[name + "s"], name) for name in _COUNTED if type(counts.get(name + "s")) is int]
    if type(counts.get("vocabulary")) is int:
        known.append(f"vocabulary {counts['vocabulary']:,}")
    return [*lines, *known[:2]]


def lineage_picture(runs: Runs) -> Picture:
    """What was made from what, from the files at the top to the runs at the bottom."""
    nodes = nodes_of(runs)
    rows = _rows(nodes)
    texts = {key: _text(node) for key, node in nodes.items()}
    heights = [0.28 + 0.145 * max(texts[key].count("\n") + 1 for key in row) for row in rows]
    gap, wide = 0.4, max(map(len, rows))
    width, height = wide * (BOX + 0.2), sum(heights) + gap * (len(rows) - 1) + 0.1
    drawn = [_drawn(rows, nodes, texts, heights, gap, width, height, form) for form in ("svg", "pdf")]
    caption = "What was made from what. Runs that differ only in their seed share a box; an arrow is left out where others lead the same way."
    ends = [node.title for key, node in nodes.items() if not any(key in other.parents for other in nodes.values())]
    says = f"{caption} At the end: {', '.join(ends)}."
    return Picture("lineage", caption, says, drawn[0], drawn[1])


def _rows(nodes: Mapping[str, Node]) -> list[list[str]]:
    """The boxes of each row: every box just above the first one that needs it, or below what it was made from."""
    height: dict[str, int] = {}
    for key in reversed(list(nodes)):  # each after those that were made from it
        height[key] = 1 + max((height[other] for other in height if key in nodes[other].parents), default=-1)
    for key, node in nodes.items():
        if node.parents and not height[key]:  # runs at the end stand below what they were made from, beside each other
            height[key] = min(height[parent] for parent in node.parents) - 1
    rows: list[list[str]] = []
    place: dict[str, float] = {}
    for number in range(max(height.values()), -1, -1):
        keys = [key for key in nodes if height[key] == number]
        keys.sort(key=lambda key: sum(place[p] for p in nodes[key].parents) / max(1, len(nodes[key].parents)))
        for start in range(0, len(keys), MOST_BOXES):
            row = keys[start : start + MOST_BOXES]
            rows.append(row)
            place |= {key: (position + 0.5) / len(row) for position, key in enumerate(row)}
    return rows


def _ancestors(key: str, parents: Mapping[str, Sequence[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(parents[key])
    while waiting:
        if (each := waiting.pop()) not in found:
            found.add(each)
            waiting += parents[each]
    return found


def _text(node: Node) -> str:
    lines = [line for text in (node.title, *node.lines) if text for line in textwrap.wrap(text, 26)]
    return "\n".join(lines)


def _drawn(
    rows: Sequence[Sequence[str]],
    nodes: Mapping[str, Node],
    texts: Mapping[str, str],
    heights: Sequence[float],
    gap: float,
    width: float,
    height: float,
    form: str,
) -> bytes:
    from matplotlib.patches import Rectangle

    with letters_of_all_scripts():
        figure, ((axes,),) = figure_of(width, height)
        figure.set_layout_engine("none")
        axes.set_position((0, 0, 1, 1))
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.set_axis_off()
        place: dict[str, tuple[float, float, float]] = {}
        top = 0.05
        for row, tall in zip(rows, heights, strict=True):
            step = width / len(row)
            for number, key in enumerate(row):
                place[key] = (step * (number + 0.5), top, tall)
            top += tall + gap
        for key, node in nodes.items():
            for parent in node.parents:
                (x, y, tall), (to_x, to_y, _) = place[parent], place[key]
                arrow = {"arrowstyle": "-|>", "color": "#7a7a7a", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
                axes.annotate("", (to_x, to_y), (x, y + tall), arrowprops=arrow)
        for key, (x, y, tall) in place.items():
            face = "#e8eef8" if nodes[key].parents else "#f4f4f4"
            axes.add_patch(Rectangle((x - BOX / 2, y), BOX, tall, facecolor=face, edgecolor="#4a4a4a", linewidth=0.8))
            axes.text(x, y + tall / 2, texts[key], ha="center", va="center", fontsize=7.5, parse_math=False)
        return printed(figure, form)


def lineage(runs: Runs) -> Section:
    """What was run on what."""
    cells = []
    for each in runs.given:
        config, counts = each.config, each.artifact.counts
        what = str(config.get("objective") or config.get("task") or counts.get("task") or counts.get("probe") or "")
        seed = config.get("seed")
        about = [
            each.artifact.manifest["stage"],
            what,
            runs.data_of(each.artifact.manifest),
            runs.plan_of(each.artifact.manifest) or "–",
            "–" if seed is None else str(seed),
        ]
        cells.append([each.label, each.artifact.reference, *map(str, about)])
    titles = ["run", "artifact", "stage", "of", "data", "plan", "seed"]
    blocks: list[Block] = [Grid("runs", Table("the runs of this report", titles, cells)), lineage_picture(runs)]
    sources = dict.fromkeys(
        f"{' '.join(str(entry.get('source') or 'unnamed source').split())} ({entry.get('license') or 'licence not stated'})"
        for each in runs.given
        for entry in each.artifact.provenance
    )
    if sources:
        blocks.append(Prose(f"Sources of data and weights: {'; '.join(sources)}."))
    return Section("runs", "What was run on what", blocks)


# cost


def cost(runs: Runs) -> Section:
    """Seconds, device and size of every run, and the seconds of all that they were made from."""
    cells = []
    seconds = {recipe: seconds_of(manifest, runs.store) for recipe, manifest in runs.manifests.items()}
    for each in runs.given:
        counts, spent = each.artifact.counts, sum(seconds[each.artifact.recipe].values())
        memory = counts.get("memory_bytes")
        facts = [
            "–" if math.isnan(spent) else f"{spent:,.1f}",
            *(f"{counts[name]:,}" if type(counts.get(name)) is int else "–" for name in ("steps", "parameters")),
            *(str(counts.get(name, "–")) for name in ("device", "precision", "processes")),
            f"{memory / 2**20:,.0f}" if memory else "–",
            f"{each.artifact.size / 1e6:,.1f}",
        ]
        cells.append([each.label, *facts])
    titles = ["run", "seconds", "steps", "parameters", "device", "precision", "processes", "memory, MiB", "on disk, MB"]
    by_recipe = {recipe: spent for each in seconds.values() for recipe, spent in each.items() if not math.isnan(spent)}
    own = {recipe for each in runs.given for recipe in seconds[each.artifact.recipe]}
    before = sum(spent for recipe, spent in by_recipe.items() if recipe not in own)
    said = (
        f"All of it took {sum(by_recipe.values()):,.1f} seconds, {before:,.1f} of them to make what these runs read. Seconds are those of "
        "the machine that made them, whatever else it did. Those of a search include the runs that it made. Of a training that was "
        "interrupted, all steps count, but validations and saving only since it went on for the last time. Memory is the peak of "
        "the first process since a training began or went on: of the tensors on a GPU, else of the process with all its libraries."
    )
    versions = {
        name: version for each in runs.given for name, version in each.artifact.manifest.get("packages", {}).items()
    }
    used = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    blocks: list[Block] = [Grid("cost", Table("cost of each run", titles, cells)), Prose(said)]
    return Section("cost", "Cost", [*blocks, *([Prose(f"Packages: {used}.")] if used else [])])
