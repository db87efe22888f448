"""Plans for display: their rows, the heads of a model that they select, the data that they need, and differences."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError
from pipelines.storage.manifest import ArtifactMismatch, ArtifactMissing
from pipelines.storage.store import Store
from pipelines.text.readers import read_small

if TYPE_CHECKING:
    from guidance.guide import Guide
    from guidance.plan import Plan
    from guidance.sites import Site

Reach = dict[int, dict["Site", tuple[int, ...]]]
"""For each guide, by its number from 0: the heads that it selects, by site."""

_SHAPE = re.compile(r"([a-z0-9][a-z0-9_-]*):(\d{1,3})x(\d{1,3})")
_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layers",
    "n_layer",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
_HEADS = (
    *("num_attention_heads", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"),
    *("num_key_value_heads", "n_head"),
)
_WIDTHS = ("hidden_size", "dim", "d_model", "n_embd")
_HEAD_WIDTH = 64


# the rows of a plan


_COLUMNS = ("pattern", "mechanism", "stack", "attention", "layers", "heads", "weight", "schedule", "hold_steps", "name")
"""The keys of a guide that have columns of their own."""


def rows_of(plan: Plan) -> list[dict[str, Any]]:
    """One row per guide, in order, as text; ``rest`` holds the non-default keys that have no other column."""
    return [
        {"number": number, "label": label, **_row(guide)}
        for number, (label, guide) in enumerate(zip(plan.labels, plan.guides, strict=True), 1)
    ]


def _row(guide: Guide) -> dict[str, str]:
    from guidance.plan import written_keys

    own = guide.bound_pattern.options if guide.bound_pattern else {}
    rest = {key: text for key, text in written_keys(guide).items() if key not in (*_COLUMNS, *own)}
    hold = f", hold {guide.hold_steps}" if guide.hold_steps else ""
    return {
        "pattern": str(guide.bound_pattern or "-"),
        "mechanism": guide.mechanism,
        "place": f"{guide.stack} {guide.attention}",
        "layers": ", ".join(map(str, guide.layers)),
        "heads": ", ".join(map(str, guide.heads)),
        "weight": weight_text(guide.weight) if guide.is_loss else "-",
        "schedule": f"{guide.schedule}{hold}" if guide.is_loss or guide.fades else "-",
        "rest": ", ".join(f"{key} = {text}" for key, text in rest.items()) or "-",
    }


def weight_text(weight: float | tuple[tuple[int, float], ...]) -> str:
    """``100``, or ``100; 10 from 12 layers on``."""
    if not isinstance(weight, tuple):
        return f"{weight:g}"
    (_, first), *others = weight
    return "; ".join([f"{first:g}", *(f"{value:g} from {least} layers on" for least, value in others)])


def preset_summaries() -> dict[str, str]:
    """The presets by name, each with its title: the first line of its file, a comment."""
    from guidance.plan import presets

    return {name: text.partition("\n")[0].removeprefix("# ") for name, text in sorted(presets().items())}


# a plan and a model


def plan_of(reference: str, store: Store) -> Plan:
    """The plan that is a preset or a TOML file, that `guide discover accept` made, or that a model carries; one without guides if
    the model carries none.

    Raises:
        PlanError: there is none of these, or the plan cannot be read.
    """
    from guidance.checkpoint import CONFIG_FILE, find_plan
    from guidance.plan import Plan
    from pipelines.training.plans import read_plan

    if not reference.startswith("preset:") and not Path(reference).is_file():
        folder = Path(reference)
        with suppress(ArtifactMissing, ArtifactMismatch), store.load(reference, kind="model", verify=False) as artifact:
            folder = artifact.path
        if (folder / CONFIG_FILE).is_file():
            return find_plan(folder) or Plan()
    return read_plan(reference, store)


@dataclass(frozen=True)
class Shape:
    """A model without weights: its sites, and the module on the meta device."""

    sites: tuple[Site, ...]
    model: Any


def read_shape(reference: str, store: Store) -> Shape:
    """The attention modules of a model; no weights are read.

    Args:
        reference: a model folder, a ``config.json``, a model artifact, or a family with layers and heads:
            ``roberta:12x12``.

    Raises:
        InputError: there is no such model, or its configuration cannot be read.
        UnsupportedModel: its attention cannot be guided.
    """
    import torch
    from transformers import AutoModel
    from transformers.utils import logging as transformers_logging

    from guidance.models.families import find_sites

    transformers_logging.set_verbosity_error()
    config = _configuration(reference, store)
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except Exception as error:  # each family checks its configuration differently
        raise InputError(f"{reference}: transformers cannot build this model ({str(error)[:160]})") from error
    return Shape(tuple(site for sites in find_sites(model).values() for site in sites), model)


def _configuration(reference: str, store: Store) -> Any:
    from guidance.checkpoint import read_config

    path = Path(reference)
    if not path.exists() and (match := _SHAPE.fullmatch(reference)):
        return _family_of_size(match[1], int(match[2]), int(match[3]))
    if path.is_file():
        return read_config(read_small(path), reference)
    if (path / "config.json").is_file() and not (path / "artifact.json").exists():
        return read_config(read_small(path / "config.json"), f"{reference}/config.json")
    if path.is_dir() and not (path / "artifact.json").exists():
        raise InputError(f"{reference}: not a model folder (no config.json)", hint=_MODELS)
    try:
        with store.load(reference, kind="model", verify=False) as artifact:
            artifact.verify("config.json")  # the weights are not needed
            return read_config(artifact.read("config.json"), reference)
    except ArtifactMissing as error:
        raise InputError(f"{reference}: no such model", hint=_MODELS) from error


_MODELS = "give a model folder, a config.json, a model artifact, or a family with layers and heads: roberta:12x12"


def _family_of_size(family: str, layers: int, heads: int) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from guidance.errors import UnknownName
    from guidance.models.families import FAMILIES, model_type_of

    known = [model_type_of(name) for name in FAMILIES]
    names = {name.replace("_", "-"): kind for own, kind in zip(FAMILIES, known, strict=True) for name in (own, kind)}
    if family.replace("_", "-") not in names:
        raise UnknownName("family of models", family, known)
    if not layers or not heads:
        raise InputError(f"{family}:{layers}x{heads} has no heads", hint="give at least 1x1")
    kind = names[family.replace("_", "-")]
    keys = CONFIG_MAPPING[kind]().to_dict()
    sizes = {_LAYERS: layers, _HEADS: heads, _WIDTHS: heads * _HEAD_WIDTH}
    return AutoConfig.for_model(kind, **{key: size for names, size in sizes.items() for key in names if key in keys})


def reach_of(plan: Plan, shape: Shape, scores: Mapping[tuple[int, int], float] | None = None) -> Reach:
    """The heads of a model that each guide selects; disabled guides select none.

    Raises:
        PlanError: a guide names a layer or head that the model lacks, selects no head, or conflicts with another guide.
    """
    from guidance.site_plans import plan_sites

    sites = (*shape.sites, *_added_sites(plan, shape))
    reach: Reach = {number: {} for number in range(len(plan.guides))}
    for part in dict.fromkeys(guide.part for guide in plan.guides):
        for site, site_plan in plan_sites(plan, sites, part, scores).items():
            for assignment in site_plan.assignments:
                reach[assignment.number][site] = assignment.heads
    order = sorted(sites, key=lambda site: (site.stack != "encoder", site.attention != "self", site.layer))
    return {number: {site: heads[site] for site in order if site in heads} for number, heads in reach.items()}


def _added_sites(plan: Plan, shape: Shape) -> Iterator[Site]:
    """The sites of heads that the plan adds to the model."""
    from guidance.models.added_heads import added_sites, place_of
    from guidance.models.families import find_sites

    if plan.pal is None:
        return
    for module, sites in added_sites(plan.pal, find_sites(shape.model)).items():
        place_of(shape.model, module, plan.pal.placement)
        yield from sites


def runs(numbers: Sequence[int]) -> str:
    """Numbers as ranges: ``0-3, 5``."""
    parts = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]))
    return ", ".join(parts) or "none"


def heads_text(selected: Mapping[Site, tuple[int, ...]]) -> tuple[str, str]:
    """Layers and heads of a guide as text; if the heads differ between layers, they are listed per layer."""
    by_heads: dict[tuple[int, ...], list[int]] = {}
    for site, heads in selected.items():
        by_heads.setdefault(heads, []).append(site.layer)
    layers = runs([site.layer for site in selected])
    added = "added " if any(site.attention == "pal" for site in selected) else ""
    if len(by_heads) < 2:
        return layers, added + runs(next(iter(by_heads), ()))
    return layers, "; ".join(f"layer {runs(layers)}: {added}{runs(heads)}" for heads, layers in by_heads.items())


def grids(plan: Plan, shape: Shape, reach: Reach) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """For each kind of attention that any guide reaches: its name, titles, and a row per layer with the guides on each head.

    ``1+2`` means guides 1 and 2.  Those that belong to no head have a column of their own.
    """
    sites = (*shape.sites, *_added_sites(plan, shape))
    of_layers = {number for number, guide in enumerate(plan.guides) if guide.bound_mechanism.of_whole_layers}
    kinds = dict.fromkeys((site.stack, site.attention) for selected in reach.values() for site in selected)
    for stack, attention in sorted(kinds, key=lambda kind: (kind[0] != "encoder", kind[1] != "self")):
        mine = sorted((s for s in sites if (s.stack, s.attention) == (stack, attention)), key=lambda s: s.layer)
        has_layers = any(site in reach[number] for number in of_layers for site in mine)
        titles = ["LAYER", *["whole"] * has_layers, *(f"h{head}" for head in range(mine[0].num_heads))]
        table = []
        for site in mine:
            whole = [[n + 1 for n in sorted(of_layers) if site in reach[n]]] * has_layers
            acting = [
                [n + 1 for n, selected in reach.items() if n not in of_layers and head in selected.get(site, ())]
                for head in range(site.num_heads)
            ]
            table.append([str(site.layer), *("+".join(map(str, numbers)) or "." for numbers in (*whole, *acting))])
        yield f"{stack}, {'added heads' if attention == 'pal' else f'{attention}-attention'}", titles, table


def needs_of(plan: Plan) -> list[dict[str, Any]]:
    """The features and tables that the guides of a plan read, except what can be computed from token ids.

    Each entry has the ``number`` and ``label`` of the guide, the ``name`` of what it reads, and ``source``: where to get it.
    """
    from guidance.patterns.features import FEATURES, TABLES, Vocabulary

    needs = []
    for number, (label, guide) in enumerate(zip(plan.labels, plan.guides, strict=True), 1):
        sources: dict[str, str] = {}
        if guide.enabled:
            names = [*(guide.bound_pattern.needs if guide.bound_pattern else ())]
            names += ["mispredicted"] if guide.makes("row_losses") else []
            sources = {name: FEATURES[name].source for name in names if name in {*FEATURES} - {*Vocabulary.FEATURES}}
            sources |= {name: TABLES[name] for name in guide.tables if name in TABLES}
        if any(" important " in str(selector) for selector in guide.heads):
            sources["scores of heads"] = "--scores FILE here; `install` takes tables={'importance': ...}"
        needs += [{"number": number, "label": label, "name": name, "source": each} for name, each in sources.items()]
    return needs


# two plans


def differences(first: Plan, second: Plan) -> list[dict[str, Any]]:
    """The differences between two plans, row by row; rows are matched by label.

    Each entry has ``row`` (a label, ``[pal]`` or ``order``), ``change`` (``removed``, ``added`` or ``changed``) and
    ``keys``: for each differing key the values in both plans as TOML, None for a default.
    """
    from guidance.plan import written_keys

    ours, theirs = (dict(zip(plan.labels, map(written_keys, plan.guides), strict=True)) for plan in (first, second))
    common = [[label for label in labels if label in ours and label in theirs] for labels in (ours, theirs)]
    for rows, added in ((ours, pal_keys(first)), (theirs, pal_keys(second))):
        rows |= {"[pal]": added} if added else {}
    changes = []
    for label in dict.fromkeys((*ours, *theirs)):
        change = "changed" if label in ours and label in theirs else "removed" if label in ours else "added"
        if keys := _changed_keys(ours.get(label, {}), theirs.get(label, {})):
            changes.append({"row": label, "change": change, "keys": keys})
    if common[0] != common[1]:
        orders = {"rows": [", ".join(labels) for labels in common]}
        changes.append({"row": "order", "change": "changed", "keys": orders})
    return changes


def _changed_keys(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, list[str | None]]:
    keys = dict.fromkeys((*ours, *theirs))
    return {key: [ours.get(key), theirs.get(key)] for key in keys if ours.get(key) != theirs.get(key)}


def pal_keys(plan: Plan) -> dict[str, str] | None:
    """The keys of ``[pal]``, defaults included; None if the plan adds no heads."""
    from guidance.plan import as_toml

    if plan.pal is None:
        return None
    return {item.name: as_toml(getattr(plan.pal, item.name)) for item in fields(plan.pal)}
