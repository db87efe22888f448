"""From heads that a person marked on the page to a plan, as artifacts."""

from __future__ import annotations

import getpass
import json
import shlex
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from guidance.errors import InputError
from guidance.patterns.catalogue import PATTERNS
from guidance.plan import Plan
from pipelines.probing.heads import TABLE, heads_of
from pipelines.probing.patterns import read_written
from pipelines.progress import Progress
from pipelines.stages import discover_accept, discover_score, find
from pipelines.stages.discover_score import PLAN
from pipelines.stages.missing import SYNTAX
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
from pipelines.training.plan_inputs import features


@dataclass(frozen=True)
class Marks:
    """Heads that a person marked, and how the plan takes them.

    Attributes:
        decisions: layer, head and pattern of each.
        settings: those of `discover_accept`, but for what the person saw.
    """

    decisions: list[tuple[int, int, str]]
    settings: discover_accept.Config

    @property
    def patterns(self) -> list[str]:
        """The patterns, each once."""
        return list(dict.fromkeys(pattern for _, _, pattern in self.decisions))


def read_marks(marked: Mapping[str, Any]) -> Marks:
    """Marks as the page sends them.

    Args:
        marked: ``decisions``, each with ``layer``, ``head``, ``kind`` and ``pattern``; ``into``, ``mechanism`` and ``pal`` as in
            `discover_accept.Config`.

    Raises:
        InputError: nothing is marked, a setting has no such value, or a head that the plan would replace is an added one.
        PlanError: there is no such pattern.
    """
    decisions = _decisions(marked)
    patterns = dict.fromkeys(pattern for _, _, pattern in decisions)
    for pattern in patterns:
        read_written(pattern)
    chosen = {name: marked[name] for name in ("into", "mechanism", "pal") if name in marked}
    if chosen.get("into") == "found":
        del chosen["into"]
        chosen["heads"] = [f"{layer}-{head}={pattern}" for layer, head, pattern in decisions]
    else:
        chosen["patterns"] = list(patterns)
    try:
        return Marks(decisions, discover_accept.Config(**chosen))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise InputError(f"{problem['loc'][0]}: {problem['msg']}, not {problem['input']!r}") from error


def accept(
    marks: Marks,
    seen: Mapping[str, Any],
    model: str,
    data: str,
    config: discover_score.Config,
    store: Store,
    progress: Progress,
) -> Mapping[str, Any]:
    """Score the heads, unless that was done, and write the plan: the reference of the findings, the plan as text, and a command
    that trains with it.  Raises what `discover_score.run` and `discover_accept.run` raise.

    Args:
        seen: what the person looked at.
    """
    # the catalogue is measured as it is, unless a pattern is the person's own
    patterns = [] if set(marks.patterns) <= set(PATTERNS) else marks.patterns
    scored = discover_score.run(
        model, data, config.model_copy(update={"patterns": patterns}), store=store, progress=progress
    )
    user = None
    with suppress(OSError, KeyError, ImportError):
        user = getpass.getuser()
    told = {"by": user, **seen, "marked": [list(each) for each in marks.decisions]}
    settings = marks.settings.model_copy(update={"seen": json.dumps(told, ensure_ascii=False, sort_keys=True)})
    made = discover_accept.run(scored.reference, settings, store=store, progress=progress).artifact
    plan = made.read(PLAN).decode()
    return {"reference": made.reference, "plan": plan, "command": command_for(made, store)}


def _decisions(marked: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    decisions = []
    rows = marked.get("decisions")
    for row in rows if isinstance(rows, list) else []:
        known = isinstance(row, dict) and all(type(row.get(name)) is int for name in ("layer", "head"))
        if not known or not isinstance(row.get("pattern"), str):
            raise InputError("a decision is a layer, a head and a pattern")
        if row.get("kind", "self") != "self" and marked.get("into") == "found":
            raise InputError(
                f"head {row['layer']}-{row['head']} is one that a plan added", hint="put its pattern into every layer"
            )
        decisions.append((int(row["layer"]), int(row["head"]), str(row["pattern"])))
    if not decisions:
        raise InputError("no head is marked")
    return decisions


SHAPE = ("architecture", "size", "layers", "heads", "hidden", "ffn", "tokenizer")
"""The settings of a new model, which one that starts from another does not have."""

TRAINING = ("objective", "learning_rate", "epochs", "steps", "batch_size", "max_length", "seed")

CHOICES = ("schedule", "weight_decay", "select", "patience", "negatives", "bucket")
"""Settings of a training that are written where they are not the default."""


def command_for(findings: Artifact, store: Store, plan: str | Path | None = None) -> str:
    """The command that trains a model like the one that was looked at, on the same data, with the plan of findings, or with
    another file that has the same plan.  What it needs and nobody has given stands there in capitals."""
    flags = {"plan": str(plan or store.name_of(findings.kind, findings.recipe))}
    with ExitStack() as opened, suppress(ArtifactMissing):
        scored = opened.enter_context(store.load_input(findings, "discovery", verify=False))
        asked = scored.manifest["config"]
        if "least important" in (findings.path / PLAN).read_text(encoding="utf-8"):
            flags["scores"] = str(scored.path / TABLE)
        data = opened.enter_context(store.load_input(scored, "sequences", verify=False))
        needed = {need for need in features(Plan.load(str(findings.path / PLAN))) if need != "segment"}
        is_dataset, read = "shape" in data.counts, data.reference
        masks = None
        if needed and "masks" in scored.manifest["inputs"]:
            masks = opened.enter_context(store.load_input(scored, "masks", verify=False))
        if masks is not None and needed <= set(masks.counts["columns"]):
            flags["masks"] = masks.reference
        elif is_dataset:
            read = opened.enter_context(store.load_input(data, "corpus", verify=False)).reference
            flags |= {"parser": asked["parser"] or "PARSER"} if needed & set(SYNTAX) else {}
        elif needed:
            flags["masks"] = "MASKS"
        stage = "finetune" if is_dataset else "pretrain"
        flags |= _like_the_model(scored, stage, store)
        written = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}")
            for name, value in flags.items()
        ]
        return " ".join([f"guide {stage}", read, *written])
    return f"guide finetune DATASET --init MODEL --plan {shlex.quote(flags['plan'])}"


def _like_the_model(discovery: Artifact, stage: str, store: Store) -> dict[str, Any]:
    """The settings with which a stage trains a model like the one that was scored: those of its own training, or else that model
    to start from."""
    is_causal = stage == "pretrain" and heads_of(discovery)[0]["stack"] == "decoder"
    objective = {"objective": "clm"} if is_causal else {}
    try:
        with store.load_input(discovery, "model", verify=False) as model:
            if model.manifest["stage"] != stage:
                return {"init": model.reference, **objective}
            settings = model.manifest["config"]
    except ArtifactMissing:  # it is a folder, or gone
        folder = discovery.manifest["config"].get("folder", "")
        return {"init": folder if (Path(folder) / "config.json").is_file() else "MODEL", **objective}
    names = ("init", *TRAINING) if settings.get("init") else (*SHAPE, *TRAINING)
    kept = {name: settings[name] for name in names if settings.get(name) not in (None, "", "auto", 0)}
    if "epochs" in kept:  # steps count only where no epochs are given
        kept.pop("steps", None)
    known = find(stage).config.model_fields
    return kept | {
        name: settings[name]
        for name in CHOICES
        if settings.get(name) not in (None, getattr(known.get(name), "default", None))
    }
