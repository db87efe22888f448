"""What a plan reads apart from sequences: token features and tables; and the model to start from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from guidance.errors import InputError, PlanError
from pipelines.engine.declaration import roles
from pipelines.engine.stage import Files
from pipelines.statistics.codes import check_codes
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import where_known
from pipelines.storage.manifest import ArtifactMismatch, ArtifactMissing
from pipelines.storage.store import Store
from pipelines.text.parsers import SYNTAX
from pipelines.training.learner import folder_of
from pipelines.training.objectives import OBJECTIVES
from pipelines.training.packages import family_owner, owners_of, packages_input

if TYPE_CHECKING:
    from guidance.plan import Plan


def inputs_of(name: str, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The inputs of one kind, in their order; see `roles`."""
    return tuple(given for role, given in inputs.items() if role == name or role.startswith(f"{name}-"))


def load_inputs(config: Any, corpora: Sequence[Artifact], store: Store) -> dict[str, Any]:
    """The inputs that ``--masks`` and ``--scores`` name, checked against the sequences.

    Raises:
        ArtifactMismatch: masks of other sequences.
        InputError: there are not as many masks as sequences.
    """
    inputs: dict[str, Any] = {}
    references = [config.masks] if isinstance(config.masks, str) and config.masks else list(config.masks)
    if references and len(references) != len(corpora):
        raise InputError(
            f"{len(references)} masks for {len(corpora)} sequences", hint="one --masks for each, in their order"
        )
    for role, reference, data in zip(roles("masks", len(references)), references, corpora, strict=False):
        inputs[role] = masks = store.load(reference, kind="masks")
        with where_known():
            _check_masks(masks, data)
    if config.scores:
        path = Path(config.scores)
        inputs["scores"] = Files.of([path], [path.name])
    return inputs


def _check_masks(masks: Artifact, data: Artifact) -> None:
    """Raises ArtifactMismatch if masks were made of other sequences, or with other codes than those of today."""
    check_codes(masks)
    made_of = masks.manifest["inputs"]["sequences"]
    if made_of["content"] != data.content:
        raise ArtifactMismatch(
            f"{masks.reference} is of sequences/{made_of['recipe'][:16]} ({made_of['content'][:12]}), not of "
            f"{data.reference} ({data.content[:12]})",
            hint=f"guide build-masks {data.reference}",
        )


_ENDINGS = (".json", ".safetensors", ".bin", ".toml", ".model", ".spm")
_WEIGHTS = (".safetensors", ".bin")
_VOCABULARIES = ("vocab.txt", "merges.txt", "dict.txt", "bpe.codes", "prophetnet.tokenizer")
"""Files that decide what a model folder computes: configuration, weights, plan, and what tokenizers of transformers read."""


WEIGHTS_OF = "weights of "
"""How the provenance of what a model folder made begins, before the name of the folder."""


def model_input(reference: str, store: Store) -> Artifact | Files:
    """A trained model with the other models beside it: an artifact, or any Hugging Face model folder."""
    try:
        return store.load(reference, kind="model")
    except ArtifactMissing:
        folder = Path(reference)
        refuse_file(reference)
        if not folder.is_dir():
            raise
        from guidance.checkpoint import TARGET_FOLDER  # imports torch

        others = {path for objective in OBJECTIVES.values() for path in objective.card.folders}
        parts = ("", TARGET_FOLDER, *sorted(others))
        files = sorted(p for part in parts if (folder / part).is_dir() for p in (folder / part).iterdir())
        paths = [p for p in files if (p.suffix in _ENDINGS or p.name in _VOCABULARIES) and p.is_file()]
        if folder / "config.json" not in paths:
            raise InputError(f"{reference}: not a model folder (no config.json)") from None
        given = Files.of(paths, (p.relative_to(folder).as_posix() for p in paths))
        name = os.path.basename(os.path.abspath(folder))
        return replace(given, provenance=[_origin_of_weights(folder, given)], folder=name)


def refuse_file(reference: str) -> None:
    """Raises InputError if what should name a model is a file, such as the text that it is to read."""
    if Path(reference).is_file():
        raise InputError(
            f"{reference!r}: a file, not a model",
            hint="a model is an artifact of `guide pretrain` or `guide finetune`, or a folder with config.json",
        )


def model_folders(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The names of the model folders that a run has read, by role; models of the store are not among them.

    A manifest that has no names of folders is of an older version; then that of the first origin of weights is taken.
    """
    sources = (str(origin.get("source")) for origin in manifest.get("provenance", ()))
    first = next((each.removeprefix(WEIGHTS_OF) for each in sources if each.startswith(WEIGHTS_OF)), "model")
    inputs = manifest.get("inputs", {})
    return {
        role: each.get("folder") or first for role, each in inputs.items() if "config.json" in each.get("first", ())
    }


def _origin_of_weights(folder: Path, files: Files) -> dict[str, Any]:
    """What an artifact records of the model folder that it was made from: its name, the licence of its model card, and the sha256
    of each file of weights.  A folder that is given by a link has the name of the link."""
    digests = {name: sha for name, sha in zip(files.names, files.digests, strict=True) if name.endswith(_WEIGHTS)}
    return {
        "source": f"{WEIGHTS_OF}{os.path.basename(os.path.abspath(folder))}",
        "license": licence_of(folder),
        "sha256": digests,
    }


def licence_of(folder: Path) -> str | None:
    """The licence that the metadata of the model card states, ``README.md`` of the folder; None if it states none."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        metadata = metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, YAMLError):
        return None
    licence = metadata.get("license")
    if licence == "other":  # the hub has no identifier for it, so its name stands beside it
        licence = metadata.get("license_name")
    return " and ".join(map(str, licence)) if isinstance(licence, list) else licence and str(licence)


def model_inputs(reference: str, store: Store, patterns: Iterable[str | Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A trained model as it computes with its plan, and the packages of others whose code it runs.

    Args:
        patterns: further patterns that are measured, as a plan describes them.
    """
    from guidance.checkpoint import find_plan

    given = model_input(reference, store)
    folder = folder_of(given)
    plan = find_plan(folder)
    owners = {*(plan.packages.values() if plan else ()), *owners_of(patterns), *family_owner(folder)}
    return {"model": given, **packages_input(owners)}


def features(plan: Plan, *, training: bool = True) -> tuple[str, ...]:
    """The token features that a plan reads from data; ``idf`` also needs ``segment``, since rarity is relative to a sentence."""
    from guidance.patterns.features import OF_OBJECTIVES, Vocabulary

    needs = plan.needs(training=training)
    more = ("segment",) if "idf" in needs else ()
    known = (*Vocabulary.FEATURES, *OF_OBJECTIVES)
    return tuple(dict.fromkeys((*(need for need in needs if need not in known), *more)))


def check_needs(plan: Plan, source: str, inputs: Mapping[str, Any], *, training: bool = True) -> None:
    """Raises PlanError when a plan reads features or tables that no input has.

    Args:
        training: whether the losses of the plan are computed; else only what acts at inference reads anything.
    """
    with where_known():
        _check_features(plan, source, inputs, training)
    check_counts(plan, source, "cooccur" in inputs, training=training)


def check_counts(plan: Plan, source: str, are_given: bool, *, training: bool = True) -> None:
    """Raises PlanError when a plan looks co-occurrence counts up, and there are none; see `check_needs`."""
    reader = plan.tables(training=training).get("cooccurrence")
    if reader is not None and not are_given:
        raise PlanError(
            f"{source}: guide {reader!r} needs the table cooccurrence",
            hint="guide build-cooccur CORPUS TOKENIZER, with the tokenizer of the sequences; give it with --cooccur"
            if training
            else "that of its training is found by the name of the model in the store where it was trained",
        )


def _check_features(plan: Plan, source: str, inputs: Mapping[str, Any], training: bool) -> None:
    for masks in inputs_of("masks", inputs) or (None,):
        known = masks.counts["columns"] if masks else ("segment",)
        wanted = features(plan, training=training)
        missing = [need for need in wanted if need not in known]
        if not missing:
            continue
        need, label = missing[0], plan.needs()[missing[0]]
        reason = masks.counts.get("missing", {}).get(need) if masks else None
        if reason and source == "preset:roles" and need in ("head", "relation"):
            reason += "; for a language without a parser preset:roles-unparsed"
        raise PlanError(
            f"{source}: it needs the features {', '.join(missing)} (guide {label!r} needs {need})"
            + (f", which {masks.reference} does not have" if masks else ""),
            hint=f"{need}: {reason}" if reason else _source_of(need, wanted),
        )
    if training and (given := inputs_of("masks", inputs)):
        for need in features(plan):
            if not any(masks.counts["splits"].get("train", {}).get(f"with_{need}", 1) for masks in given):
                raise PlanError(
                    f"{source}: guide {plan.needs()[need]!r} matches nothing in the training text: in {given[0].reference} no token "
                    f"has the feature {need}",
                    hint="look at the warnings of build-masks and build-deps, or leave the guide out of the plan",
                )


def trained_tables(model: Artifact | Files, store: Store) -> dict[str, Artifact]:
    """The co-occurrence counts that a trained model looks up when it is used, by role: those that it learned with.  Raises
    ArtifactMissing if they are gone."""
    if not isinstance(model, Artifact) or "cooccur" not in model.manifest["inputs"]:
        return {}
    from guidance.checkpoint import find_plan  # imports torch

    plan = find_plan(folder_of(model))
    if plan is None or "cooccurrence" not in plan.tables(training=False):
        return {}
    return {"cooccur": store.load_input(model, "cooccur")}


def read_tables(inputs: Mapping[str, Any], totals: Literal["pairs", "tokens"] | None = None) -> dict[str, Any]:
    """The tables that patterns and head rules look up, by name.

    Args:
        totals: see `cooccurrence_table.load_table`; by default those with which the model was trained.
    """
    from guidance.mechanisms.random_mask import PROPORTIONS
    from pipelines.statistics.cooccurrence_table import load_table
    from pipelines.statistics.head_scores import read_scores
    from pipelines.training.masking import read_proportions

    tables: dict[str, Any] = {}
    if "cooccur" in inputs:
        model = inputs.get("model")
        known: Any = model.manifest["config"].get("totals", "pairs") if isinstance(model, Artifact) else "pairs"
        tables["cooccurrence"] = load_table(inputs["cooccur"], totals=totals or known)
    if "masking" in inputs:
        tables[PROPORTIONS] = read_proportions(inputs["masking"])
    if "scores" in inputs:
        tables["importance"] = read_scores(inputs["scores"].paths[0])
    return tables


def _source_of(need: str, wanted: Sequence[str]) -> str:
    """Where a feature comes from, and whether a run of ``guide pretrain`` can have it; ``wanted`` are all features of the plan."""
    from guidance.patterns.features import FEATURES

    source = FEATURES[need].source if need in FEATURES else "it is a feature of the pattern's own"
    if "guide build-masks" in source:
        flags = " --idf IDF" * ("idf" in wanted) + " --deps DEPS" * any(name in SYNTAX for name in wanted)
        return f"`guide build-masks SEQUENCES{flags}` writes it; give the result with --masks"
    return f"{source}; the command line has no such input, so train in your own code"
