"""Commands for the store: list, inspect, verify, remove, rename, export and import artifacts."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import Session, command
from cli.output import escape, human_size, say, say_json
from cli.tables import nested, plain, say_table
from guidance.errors import GuideError, InputError, MachineError
from pipelines.progress import log
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactAmbiguous, ArtifactDamaged, ArtifactMisplaced, ArtifactMissing
from pipelines.storage.store import Store

if TYPE_CHECKING:
    from pipelines.engine.command import Table
    from pipelines.views.unfinished import Unfinished

Reference = Annotated[str, typer.Argument(metavar="REF", help="A name, name@n, an id, or a path.", show_default=False)]


@command("ls", group="Store", examples=["guide ls", "guide ls --kind corpus", "guide ls --json | jq .artifacts"])
def list_artifacts(
    session: Session,
    kind: Annotated[
        str | None,
        typer.Option(help="List only artifacts of this kind, such as corpus, sequences, masks, model or probe."),
    ] = None,
) -> None:
    """List artifacts, oldest first, and unfinished work."""
    from pipelines.views.unfinished import Unfinished

    store = session.store
    names: defaultdict[Path, list[str]] = defaultdict(list)
    for name in store.names():
        names[store.folder(name.kind, name.recipe)].append(str(name))
    rows = [row for folder in store.folders(kind) if (row := _row(store, folder, names[folder]))]
    rows.sort(key=lambda row: (row["created"] is None, str(row["created"]), row["artifact"]))
    unfinished = [Unfinished.of(folder, store) for folder in store.unfinished() if kind in (None, folder.parent.name)]
    if session.json:
        say_json({"schema": 1, "artifacts": rows, "unfinished": [_as_json(work) for work in unfinished]})
        return
    table = [
        (
            r["artifact"],
            ",".join(r["names"]) or "-",
            human_size(r["bytes"]),
            r["created"] or "-",
            r["stage"] or r["state"],
        )
        for r in rows
    ]
    table += [
        (work.reference, work.name or "-", human_size(folder_size(work.folder)), "-", _state(work))
        for work in unfinished
    ]
    if table:
        say_table(("ARTIFACT", "NAMES", "SIZE", "CREATED", "STAGE"), table, whole=("ARTIFACT", "NAMES"))
        return
    kinds = sorted({folder.parent.name for folder in (*store.folders(), *store.unfinished())})
    if kind and kinds:
        session.tell(f"nothing of kind {escape(repr(kind))} in {escape(store.root)}; there are: {', '.join(kinds)}")
    else:
        session.tell(f"nothing in {escape(store.root)}")


def _row(store: Store, folder: Path, names: list[str]) -> dict[str, Any] | None:
    row = {"artifact": f"{folder.parent.name}/{folder.name}", "kind": folder.parent.name, "names": names}
    try:
        with store.open(folder) as artifact:
            made = {key: artifact.manifest.get(key) for key in ("stage", "created")}
            size = artifact.size
        return row | made | {"bytes": size, "counts": artifact.counts, "path": os.fspath(folder), "state": "ok"}
    except ArtifactMissing:
        if not folder.exists():  # it has just been removed
            return None
        state = "damaged"
    except ArtifactMisplaced:
        state = "misplaced"
    except InputError:
        state = "damaged"
    except MachineError:
        state = "unreadable"
    made = {"stage": None, "created": None, "counts": {}}
    return row | made | {"bytes": folder_size(folder), "path": os.fspath(folder), "state": state}


def _state(work: Unfinished) -> str:
    return ", ".join(filter(None, ["unfinished", work.progress]))


def _as_json(work: Unfinished) -> dict[str, Any]:
    kind, _, id = work.reference.partition("/")
    about = {"kind": kind, "id": id, "bytes": folder_size(work.folder), "path": os.fspath(work.folder)}
    return about | {"name": work.name, "step": work.step, "steps": work.steps, "parts": work.parts}


@command("show", group="Store", examples=["guide show wiki", "guide show wiki@1 --json | jq .config"])
def show(session: Session, reference: Reference) -> None:
    """Show what an artifact holds and how it was made, or how far unfinished work is."""
    work = _unfinished(session.store, reference)
    if work is not None:
        _show_unfinished(session, work)
        return
    with session.store.load(reference, verify=False) as artifact:
        manifest = artifact.manifest
        unlisted = artifact.unlisted_files()
        found = None if session.json else _found(artifact)
    names = [str(n) for n in session.store.names() if (n.kind, n.recipe) == (artifact.kind, artifact.recipe)]
    if session.json:
        say_json(
            {"schema": 1, "artifact": artifact.reference, "path": os.fspath(artifact.path), "names": names} | manifest
        )
        return
    say(f"artifact   {artifact.reference}")
    say(f"names      {', '.join(names) or '-'}")
    say(f"path       {escape(artifact.path)}")
    for key in ("stage", "stage_version", "created", "seconds", "guide", "git", "seed", "content"):
        if manifest.get(key) is not None:
            say(f"{key:<10} {escape(manifest[key])}")
    if found is not None:
        say_table(found.titles, found.rows)
        for note in found.notes:
            say(escape(note))
    _say_sections(
        {  # the most useful first
            "warnings": dict(enumerate(manifest.get("warnings", []), 1)),
            "counts": {} if found is not None else manifest.get("counts", {}),
            "inputs": {
                role: f"{i.get('kind')} {str(i.get('content'))[:16]}" for role, i in manifest.get("inputs", {}).items()
            },
            "config": manifest.get("config", {}),
            "files": {n: f"{human_size(e['bytes'])}{_rows(e)}" for n, e in artifact.files.items()},
            "provenance": dict(enumerate(manifest.get("provenance", []), 1)),
            "packages": manifest.get("packages", {}),
        }
    )
    for name in unlisted:
        log.warning("%s: not in the manifest", artifact.path / name)


def _found(artifact: Artifact) -> Table | None:
    """What a probe found; None of other artifacts, and of probes that are damaged or of another version."""
    from pipelines.stages import find

    if artifact.kind == "probe":
        with contextlib.suppress(GuideError, OSError, LookupError, ValueError):
            stage = find(artifact.manifest["stage"])
            return stage.command.show(artifact, stage.config()) if stage else None
    return None


def _show_unfinished(session: Session, folder: Path) -> None:
    from pipelines.views.unfinished import Unfinished

    work = Unfinished.of(folder, session.store)
    if session.json:
        about = {"config": dict(work.settings), "inputs": dict(work.inputs)}
        say_json({"schema": 1, "artifact": work.reference, "state": "unfinished"} | _as_json(work) | about)
        return
    say(f"artifact   {work.reference}")
    say(f"name       {work.name or '-'}")
    say(f"path       {escape(work.folder)}")
    say(f"state      {_state(work)}")
    say(f"size       {human_size(folder_size(work.folder))}")
    _say_sections(
        {"inputs": {role: str(content)[:16] for role, content in work.inputs.items()}, "config": work.settings}
    )
    session.tell("the command that began it continues it")


def _say_sections(sections: Mapping[str, Mapping[Any, Any]]) -> None:
    """Print titles, each with its entries below.

    In a file or a pipe every entry is one line, nested values as JSON; on a terminal nested values are spread over lines.
    """
    wide = sys.stdout.isatty()
    for title, entries in sections.items():
        if entries:
            say(title)
            for key, value in entries.items():
                for line in nested(str(key), value) if wide else [f"{key}: {plain(value)}"]:
                    say(f"  {escape(line)}")


def _rows(entry: dict[str, Any]) -> str:
    return f", {entry['rows']:,} rows" if isinstance(entry.get("rows"), int) else ""


@command("lineage", group="Store", examples=["guide lineage wiki-128", "guide lineage model/3f2a --json"])
def lineage(session: Session, reference: Reference) -> None:
    """Show what an artifact was made from, down to the raw inputs."""
    with session.store.load(reference, verify=False) as artifact:
        tree = family(session.store, artifact.manifest, seen=frozenset())
    if session.json:
        say_json({"schema": 1} | tree)
    else:
        for line in draw(tree):
            say(line)


def family(store: Store, manifest: dict[str, Any], *, seen: frozenset[str]) -> dict[str, Any]:
    """An artifact and, as a tree, everything that it was made from."""
    recipe = str(manifest["recipe"])
    node: dict[str, Any] = {"artifact": f"{manifest['kind']}/{recipe[:16]}", "stage": manifest.get("stage")}
    node["content"] = manifest["content"]
    node["inputs"] = {}
    for role, given in sorted(manifest.get("inputs", {}).items()):
        if "recipe" not in given or str(given["recipe"]) in seen | {recipe}:
            node["inputs"][role] = dict(given)
            continue
        entry = {"artifact": f"{given.get('kind')}/{str(given['recipe'])[:16]}", "content": given.get("content")}
        try:
            with store.open(store.folder(str(given.get("kind")), str(given["recipe"]))) as parent:
                entry = family(store, parent.manifest, seen=seen | {recipe})
            if parent.content != given.get("content"):
                entry["note"] = "built again since: other content"
        except ArtifactMisplaced:
            entry["note"] = "its folder holds another artifact"
        except InputError:
            entry["note"] = "not in this store"
        node["inputs"][role] = entry
    return node


def draw(node: dict[str, Any], indent: str = "", role: str = "") -> Iterable[str]:
    """A tree as lines of text."""
    if "artifact" in node:
        text = f"{node['artifact']}  {node.get('stage') or ''}".rstrip()
    else:
        first = ", ".join(str(name) for name in node.get("first", [])[:3])
        text = f"{node.get('kind', 'input')}  {node.get('count', '')} {first}".rstrip()
    note = f"  ({node['note']})" if node.get("note") else ""
    yield escape(f"{indent}{role + ': ' if role else ''}{text}{note}")
    for child_role, child in node.get("inputs", {}).items():
        yield from draw(child, indent + "  ", child_role)


@command("verify", group="Store", examples=["guide verify", "guide verify wiki@2 model/3f2a"])
def verify(
    session: Session,
    references: Annotated[
        list[str] | None, typer.Argument(metavar="[REF]...", help="By default, all artifacts.")
    ] = None,
) -> None:
    """Check that the files of artifacts are unchanged, and that each folder holds the artifact that its name says."""
    store = session.store
    folders = [store.find(reference) for reference in references] if references else store.folders()
    checked, damaged, unlisted = [], [], []
    with session.progress.task("Verifying", total=len(folders), unit="artifacts") as task:
        for folder in folders:
            reference = f"{folder.parent.name}/{folder.name}"
            try:
                with store.open(folder) as artifact:
                    artifact.verify()
                    unlisted += [os.fspath(folder / name) for name in artifact.unlisted_files()]
                checked.append(reference)
            except (InputError, MachineError) as error:
                message = f"{error.message}; {error.hint}" if error.hint else error.message
                damaged.append({"artifact": reference, "message": message})
            task.advance()
    for path in unlisted:
        log.warning("%s: not in the manifest", path)
    if session.json:
        say_json({"schema": 1, "verified": checked, "damaged": damaged, "strangers": unlisted})
    else:
        say(f"{len(checked)} verified, {len(damaged)} damaged")
    if damaged:
        raise ArtifactDamaged(
            f"{len(damaged)} of {len(folders)} damaged", hint="\n".join(escape(entry["message"]) for entry in damaged)
        )


@command("rm", group="Store", examples=["guide rm wiki@1", "guide rm corpus/3f2a9c --force"])
def remove(
    session: Session,
    references: Annotated[
        list[str], typer.Argument(metavar="REF...", help="Artifacts, or unfinished work by its name or kind/id.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Remove it even if other artifacts were made from it.")
    ] = False,
) -> None:
    """Remove artifacts, with all their names, or unfinished work."""
    store = session.store
    unfinished, folders = [], []
    for reference in references:
        work = _unfinished(store, reference)
        if work is not None:
            unfinished.append(work)
        else:
            folder = store.find(reference)
            folders.append(store.root / folder.parent.name / folder.name if store.holds(folder) else folder)
    if not force:
        _refuse_if_needed(store, folders)
    for folder in dict.fromkeys(folders):
        store.remove(folder)
    for folder in dict.fromkeys(unfinished):
        store.remove_unfinished(folder)
    removed = [f"{folder.parent.name}/{folder.name}" for folder in dict.fromkeys([*folders, *unfinished])]
    if session.json:
        say_json({"schema": 1, "removed": removed})
    else:
        for reference in removed:
            say(reference)


def _unfinished(store: Store, reference: str) -> Path | None:
    """The folder of unfinished work, if no artifact has this reference; with ``.partial/`` in front, also if one has."""
    given = reference.removeprefix(".partial/")
    if given == reference:
        try:
            store.find(reference)
            return None
        except ArtifactAmbiguous:
            raise
        except ArtifactMissing:
            pass
    return store.find_unfinished(None, given)


def _refuse_if_needed(store: Store, folders: Sequence[Path]) -> None:
    """Raises InputError if other artifacts than these were made from one of them."""
    removing: dict[str, str] = {}
    for folder in folders:
        with contextlib.suppress(InputError), Artifact(folder) as artifact:  # a damaged one must be built again anyway
            removing[artifact.recipe] = artifact.reference
    users = {folder: used for folder, used in store.users(*removing).items() if folder not in folders}
    for recipe, reference in removing.items():
        needed_by = [f"{user.parent.name}/{user.name}" for user, used in users.items() if recipe in used]
        if needed_by:
            more = (
                f" and {len(needed_by) - 5:,} more were" if len(needed_by) > 5 else " were" if needed_by[1:] else " was"
            )
            raise InputError(
                f"{', '.join(needed_by[:5])}{more} made from {reference}",
                hint="to remove it anyway, add --force",
            )


@command("rename", group="Store", examples=["guide rename wiki wiki-2025"])
def rename(
    session: Session,
    old: Annotated[str, typer.Argument(metavar="OLD", help="A name.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="A new name.", show_default=False)],
) -> None:
    """Rename all versions of a name."""
    session.store.rename(old, new)
    if session.json:
        say_json({"schema": 1, "old": old, "new": new})
    else:
        say(new)


@command("gc", group="Store", examples=["guide gc", "guide gc --unnamed --dry-run"])
def collect(
    session: Session,
    unnamed: Annotated[
        bool,
        typer.Option("--unnamed", help="Also delete artifacts without a name that no named artifact was made from."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
) -> None:
    """Delete leftovers of crashed runs; keep unfinished work and artifacts in use."""
    started = time.monotonic()
    if not session.store.root.is_dir():
        raise ArtifactMissing(f"no store at {str(session.store.root)!r}")
    removed = session.store.collect(unnamed=unnamed, dry_run=dry_run)
    paths = [os.fspath(path) for path in removed]
    if session.json:
        say_json({"schema": 1, "dry_run": dry_run, "removed": paths})
    else:
        for path in paths:
            say(escape(path))
    session.tell(f"{len(removed)} {'would be removed' if dry_run else 'removed'} in {time.monotonic() - started:.1f} s")


@command("export", group="Store", examples=["guide export wiki-model ./for-a-colleague"])
def export(
    session: Session,
    reference: Reference,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder that does not exist yet.", show_default=False)
    ],
) -> None:
    """Copy an artifact to a plain folder."""
    from pipelines.storage import transfer

    with session.store.load(reference, verify=False) as artifact:
        transfer.export(artifact, folder, progress=session.progress)
    if session.json:
        say_json({"schema": 1, "artifact": artifact.reference, "path": os.fspath(folder)})
    else:
        say(escape(folder))


@command("import", group="Store", examples=["guide import ./from-a-colleague --name wiki"])
def import_artifact(
    session: Session,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder made by `guide export`.", show_default=False)
    ],
    name: Annotated[str | None, typer.Option(help="Also give the artifact a new version of this name.")] = None,
) -> None:
    """Check an exported artifact and copy it into the store."""
    from pipelines.storage import transfer

    artifact, reused = transfer.import_folder(session.store, folder, name=name, progress=session.progress)
    session.tell(escape(f"{'up to date' if reused else 'done'}: {artifact.path}"))
    if session.json:
        say_json({"schema": 1, "artifact": artifact.reference, "kind": artifact.kind, "reused": reused, "name": name})
    else:
        say(artifact.reference)


def folder_size(folder: Path) -> int:
    """Total bytes of all files below a folder; files that vanish meanwhile count as 0."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except OSError:
            continue
    return total
