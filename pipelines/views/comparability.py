"""Whether runs can be compared: errors where they cannot, and notes on what a reader of the comparison must know."""

from __future__ import annotations

from collections.abc import Sequence

from guidance.errors import InputError
from pipelines.storage.store import Store
from pipelines.training.plan_inputs import inputs_of
from pipelines.views.curves import CIRCUMSTANCES, Curve


def check_comparable(curves: Sequence[Curve], store: Store, *, chosen: bool) -> list[str]:
    """Check that runs can be compared with the first of them; returns notes for the reader.

    Args:
        chosen: the user named the loss, so runs with different objectives may be compared.

    Raises:
        InputError: the objectives, the losses or the training data differ.
    """
    base, notes = curves[0], []
    for curve in curves[1:]:
        if curve.loss != base.loss:
            raise InputError(
                f"{base.label} is trained on the loss {base.loss}, {curve.label} on {curve.loss}",
                hint="compare runs that learned the same; --loss NAME names a loss that both have",
            )
        ours, theirs = (origin.settings.get("objective") for origin in (base.origin, curve.origin))
        if ours != theirs and not chosen:
            raise InputError(
                f"{base.label} has the objective {ours}, {curve.label} has {theirs}",
                hint=f"to compare their {base.loss} loss anyway, add --loss {base.loss}",
            )
        if ours != theirs:
            notes.append(f"the objectives differ: {ours} for {base.label}, {theirs} for {curve.label}")
        notes += _check_data(base, curve, store)
        smoothed = (("label_smoothing", "losses are"),) if base.loss == "translation" else ()
        for key, what in (("mask_probability", "losses are"), ("valid_sequences", "validation losses are"), *smoothed):
            before, now = (origin.settings.get(key) for origin in (base.origin, curve.origin))
            if before != now:
                notes.append(f"{what} not comparable: {key} is {before} for {base.label}, {now} for {curve.label}")
    return notes


def _check_data(base: Curve, curve: Curve, store: Store) -> list[str]:
    """Raises InputError unless two runs were trained on the same sequences; notes if only validation data differ."""
    ours, theirs = (inputs_of("sequences", origin.inputs) for origin in (base.origin, curve.origin))
    if ours == theirs:
        return []
    files = {artifact.content: artifact.files for artifact in store.artifacts() if artifact.kind == "sequences"}
    trained = [
        [{n: entry["sha256"] for n, entry in files[content].items() if n != "valid.parquet"} for content in contents]
        for contents in (ours, theirs)
        if all(content in files for content in contents)
    ]
    if len(trained) == 2 and trained[0] == trained[1]:
        return [f"{curve.label} and {base.label} have different validation data"]
    raise InputError(
        f"{base.label} and {curve.label} were trained on different sequences ({_short(ours)} and {_short(theirs)})",
        hint="losses are comparable only on the same sequences; see `guide lineage` for what a run was made from",
    )


def _short(contents: Sequence[str]) -> str:
    return " with ".join(content[:12] for content in contents) or "none"


def run_notes(curves: Sequence[Curve]) -> list[str]:
    """Notes on unfinished runs, and on differences that make speeds incomparable."""
    notes = []
    for curve in curves:
        if not curve.origin.finished:
            settings = curve.origin.settings
            planned = settings.get("steps") if settings.get("epochs") is None else None
            of = f" of {planned:,}" if planned else ""
            notes.append(f"{curve.label} is unfinished, at step {len(curve.losses):,}{of}")
    for key in CIRCUMSTANCES:
        values = {str(curve.origin.circumstances[key]) for curve in curves if key in curve.origin.circumstances}
        if len(values) > 1:
            notes.append(f"speeds are not comparable: {key} differs ({', '.join(sorted(values))})")
    return notes


def repeated_runs(curves: Sequence[Curve]) -> list[str]:
    """Notes on runs that were given twice."""
    first: dict[str, Curve] = {}
    pairs = [(curve, first.setdefault(curve.origin.reference, curve)) for curve in curves]
    return [f"{curve.label} is the same run as {other.label}" for curve, other in pairs if other is not curve]
