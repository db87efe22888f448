"""Commands for the store: list, inspect, verify, remove, rename, export and import artifacts."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from cli import completion
from cli.options import Session, command
from cli.output import escape, human_size
from cli.tables import nested, plain, table
from guidance.errors import InputError, MachineError, UnknownName, counted
from pipelines.progress import log
from pipelines.storage import removal
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactAmbiguous, ArtifactDamaged, ArtifactMisplaced, ArtifactMissing
from pipelines.storage.store import Store

if TYPE_CHECKING:
    from pipelines.engine.declaration import Table

Reference = Annotated[
    str, Argument(metavar="REF", help="A name, name@n, an id, or a path.", autocompletion=completion.artifacts())
]


@command("ls", group="Store", examples=["guide ls", "guide ls --kind corpus", "guide ls --json | jq .artifacts"])
def list_artifacts(
    session: Session,
    kind: Annotated[
        str | None,
        Option(
            help="Only kind to list, such as corpus, sequences, masks, model or probe.", autocompletion=completion.kinds
        ),
    ] = None,
) -> None:
    """List artifacts, oldest first, and unfinished work."""
    from pipelines.views.unfinished import state_of, unfinished

    store = session.store
    if kind and kind not in (known := {folder.parent.name for folder in (*store.folders(), *store.unfinished())}):
        from pipelines.stages import kinds as made_kinds

        if kind not in (known := known | made_kinds()):
            raise UnknownName("kind", kind, known)
    names: defaultdict[Path, list[str]] = defaultdict(list)
    for name in store.names():
        names[store.folder(name.kind, name.recipe)].append(str(name))
    rows = [row for folder in store.folders(kind) if (row := _row(store, folder, names[folder]))]
    rows.sort(key=lambda row: (row["created"] is None, str(row["created"]), row["artifact"]))
    works = [unfinished(folder, store) for folder in store.unfinished() if kind in (None, folder.parent.name)]
    cells = []
    for row in rows:
        about = (human_size(row["bytes"]), row["created"] or "-", row["stage"] or row["state"])
        cells.append((row["artifact"], ",".join(row["names"]) or "-", *about))
    for work in works:
        about = (human_size(work["bytes"]), "-", state_of(work))
        cells.append((f"{work['kind']}/{work['id']}", work["name"] or "-", *about))
    titles = ("ARTIFACT", "NAMES", "SIZE", "CREATED", "STAGE")
    brief = [{key: value for key, value in work.items() if key not in ("config", "inputs")} for work in works]
    session.answer(
        {"artifacts": rows, "unfinished": brief}, table(titles, cells, whole=("ARTIFACT", "NAMES")) if cells else ()
    )
    if not cells:
        kinds = sorted({folder.parent.name for folder in (*store.folders(), *store.unfinished())})
        others = f"; there are: {', '.join(kinds)}" if kind and kinds else ""
        session.tell(f"nothing {f'of kind {kind!r} ' if others else ''}in {store.root}{others}")


def _row(store: Store, folder: Path, names: list[str]) -> dict[str, Any] | None:
    """What is known of an artifact; None if it has just been removed."""
    from pipelines.views.unfinished import folder_size

    row: dict[str, Any] = {
        "artifact": f"{folder.parent.name}/{folder.name}",
        "kind": folder.parent.name,
        "names": names,
    }
    row |= {"stage": None, "created": None, "counts": {}, "path": os.fspath(folder)}
    try:
        with store.open(folder) as artifact:
            made = {key: artifact.manifest.get(key) for key in ("stage", "created")}
            return row | made | {"bytes": artifact.size, "counts": artifact.counts, "state": "ok"}
    except ArtifactMissing:
        if not folder.exists():
            return None
        state = "damaged"
    except ArtifactMisplaced:
        state = "misplaced"
    except InputError:
        state = "damaged"
    except MachineError:
        state = "unreadable"
    return row | {"bytes": folder_size(folder), "state": state}


@command("show", group="Store", examples=["guide show wiki", "guide show wiki@1 --json | jq .config"])
def show(
    session: Session,
    reference: Annotated[
        str,
        Argument(
            metavar="REF",
            help="A name, name@n, an id, or a path.",
            autocompletion=completion.artifacts(unfinished=True),
        ),
    ],
) -> None:
    """Show what an artifact holds and how it was made, or how far unfinished work is."""
    folder = _unfinished(session.store, reference)
    if folder is not None:
        _show_unfinished(session, folder)
        return
    from pipelines.views.findings import findings_of

    with session.store.load(reference, verify=False) as artifact:
        unlisted, missing = artifact.unlisted_files(), artifact.missing_files()
        findings = [] if session.json else findings_of(artifact)
    names = [str(n) for n in session.store.names() if (n.kind, n.recipe) == (artifact.kind, artifact.recipe)]
    about = {"artifact": artifact.reference, "path": os.fspath(artifact.path), "names": names}
    session.answer(about | artifact.manifest, _shown(artifact, names, findings))
    for name in missing:
        log.warning("%s: missing", artifact.path / name)
    for name in unlisted:
        log.warning("%s: not in the manifest", artifact.path / name)


def _shown(artifact: Artifact, names: Sequence[str], findings: Sequence[Table]) -> Iterator[str]:
    manifest = artifact.manifest
    head = {"artifact": artifact.reference, "names": ", ".join(names) or "-", "path": artifact.path}
    keys = ("stage", "stage_version", "created", "seconds", "guide", "git", "seed", "content")
    head |= {key: manifest[key] for key in keys if manifest.get(key) is not None}
    if artifact.kind == "search":  # its runs took the time, and each has its own
        head.pop("seconds", None)
    yield from (f"{key:<10} {value}" for key, value in head.items())
    for found in findings:
        yield from (*table(found.titles, found.rows), *found.notes)
    inputs = manifest.get("inputs", {})

    def rows(entry: dict[str, Any]) -> str:
        return f", {counted(entry['rows'], 'row')}" if isinstance(entry.get("rows"), int) else ""

    yield from _sections(
        {  # the most useful first
            "warnings": dict(enumerate(manifest.get("warnings", []), 1)),
            # with findings only plain numbers, since tables show the rest
            "counts": {
                name: count
                for name, count in manifest.get("counts", {}).items()
                if not findings or isinstance(count, int | float | str)
            },
            "inputs": {role: f"{each.get('kind')} {str(each.get('content'))[:16]}" for role, each in inputs.items()},
            "config": manifest.get("config", {}),
            "files": {name: human_size(entry["bytes"]) + rows(entry) for name, entry in artifact.files.items()},
            "provenance": dict(enumerate(manifest.get("provenance", []), 1)),
            "packages": manifest.get("packages", {}),
        }
    )


def _show_unfinished(session: Session, folder: Path) -> None:
    from pipelines.views.unfinished import state_of, unfinished

    work = unfinished(folder, session.store)
    reference, size = f"{work['kind']}/{work['id']}", human_size(work["bytes"])
    head = {"artifact": reference, "name": work["name"] or "-", "path": folder, "state": state_of(work), "size": size}
    inputs = {role: str(content)[:16] for role, content in work["inputs"].items()}
    lines = [f"{key:<10} {value}" for key, value in head.items()]
    session.answer(
        {"artifact": reference, "state": "unfinished", **work},
        [*lines, *_sections({"inputs": inputs, "config": work["config"]})],
    )
    session.tell("the command that began it continues it")


def _sections(sections: Mapping[str, Mapping[Any, Any]]) -> Iterator[str]:
    """Titles, each with its entries below.

    In a file or a pipe every entry is one line, nested values as JSON; on a terminal nested values are spread over lines.
    """
    wide = sys.stdout.isatty()
    for title, entries in sections.items():
        if entries:
            yield title
            for key, value in entries.items():
                yield from (f"  {line}" for line in (nested(str(key), value) if wide else [f"{key}: {plain(value)}"]))


@command("lineage", group="Store", examples=["guide lineage wiki-128", "guide lineage model/3f2a --json"])
def lineage(session: Session, reference: Reference) -> None:
    """Show what an artifact was made from, down to the raw inputs."""
    from pipelines.views.lineage import draw, family

    with session.store.load(reference, verify=False) as artifact:
        tree = family(session.store, artifact.manifest, seen=frozenset())
    session.answer(tree, draw(tree))


@command("verify", group="Store", examples=["guide verify", "guide verify wiki@2 model/3f2a"])
def verify(
    session: Session,
    references: Annotated[
        list[str] | None,
        Argument(metavar="[REF]...", help="Artifacts; by default all of them.", autocompletion=completion.artifacts()),
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
    facts = {"verified": checked, "damaged": damaged, "strangers": unlisted}
    session.answer(facts, [f"{len(checked)} verified, {len(damaged)} damaged"])
    if damaged:
        raise ArtifactDamaged(
            f"{len(damaged)} of {len(folders)} damaged", hint="\n".join(escape(entry["message"]) for entry in damaged)
        )


@command("rm", group="Store", examples=["guide rm wiki@1", "guide rm corpus/3f2a9c --force"])
def remove(
    session: Session,
    references: Annotated[
        list[str],
        Argument(
            metavar="REF...",
            help="Artifacts, or unfinished work by its name or kind/id.",
            autocompletion=completion.artifacts(unfinished=True),
        ),
    ],
    force: Annotated[bool, Option("--force", help="Remove it even if other artifacts were made from it.")] = False,
) -> None:
    """Remove artifacts, with all their names, or unfinished work."""
    store = session.store
    unfinished, folders = [], []
    for reference in references:
        if work := _unfinished(store, reference):
            unfinished.append(work)
        else:
            folder = store.find(reference)
            folders.append(store.root / folder.parent.name / folder.name if store.holds(folder) else folder)
    if not force:
        _refuse_if_needed(store, folders)
    for folder in dict.fromkeys(folders):
        if names := removal.remove(store, folder):
            session.tell(f"{folder.parent.name}/{folder.name} had the names {', '.join(map(str, names))}")
    for folder in dict.fromkeys(unfinished):
        removal.remove_unfinished(store, folder)
    removed = [f"{folder.parent.name}/{folder.name}" for folder in dict.fromkeys([*folders, *unfinished])]
    session.answer({"removed": removed}, removed)


def _unfinished(store: Store, reference: str) -> Path | None:
    """The folder of unfinished work, if no artifact has this reference; with ``.partial/`` in front, also if one has."""
    name = reference.removeprefix(".partial/")
    if name == reference:
        try:
            store.find(reference)
            return None
        except ArtifactAmbiguous:
            raise
        except ArtifactMissing:
            pass
    return store.find_unfinished(None, name)


def _refuse_if_needed(store: Store, folders: Sequence[Path]) -> None:
    """Raises InputError if other artifacts than these were made from one of them."""
    removing: dict[str, str] = {}
    for folder in folders:
        with contextlib.suppress(InputError), Artifact(folder) as artifact:  # a damaged one must be built again anyway
            removing[artifact.recipe] = artifact.reference
    users = {folder: used for folder, used in removal.users(store, *removing).items() if folder not in folders}
    for recipe, reference in removing.items():
        needed_by = [f"{user.parent.name}/{user.name}" for user, used in users.items() if recipe in used]
        if needed_by:
            left = len(needed_by) - 5
            more = (
                f" and {counted(left, 'more was', 'more were')}" if left > 0 else " were" if needed_by[1:] else " was"
            )
            raise InputError(
                f"{', '.join(needed_by[:5])}{more} made from {reference}", hint="to remove it anyway, add --force"
            )


@command("rename", group="Store", examples=["guide rename wiki wiki-2025"])
def rename(
    session: Session,
    old: Annotated[str, Argument(metavar="OLD", help="A name.", autocompletion=completion.names)],
    new: Annotated[str, Argument(metavar="NEW", help="A new name.")],
) -> None:
    """Rename all versions of a name."""
    session.store.rename(old, new)
    session.answer({"old": old, "new": new}, [new])


@command("gc", group="Store", examples=["guide gc", "guide gc --unnamed --dry-run"])
def collect(
    session: Session,
    unnamed: Annotated[
        bool, Option("--unnamed", help="Also delete artifacts without a name that no named artifact was made from.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only list what would be deleted.")] = False,
) -> None:
    """Delete leftovers of crashed runs; keep unfinished work and artifacts in use."""
    started = time.monotonic()
    if not session.store.root.is_dir():
        raise ArtifactMissing(f"no store at {str(session.store.root)!r}")
    removed = removal.collect(session.store, unnamed=unnamed, dry_run=dry_run)
    paths = [os.fspath(path) for path in removed]
    session.answer({"dry_run": dry_run, "removed": paths}, paths)
    session.tell(f"{len(removed)} {'would be removed' if dry_run else 'removed'} in {time.monotonic() - started:.1f} s")


@command(
    "export",
    group="Store",
    examples=["guide export wiki-model ./for-a-colleague", "guide export wiki-model ./for-everyone --standalone"],
)
def export(
    session: Session,
    reference: Reference,
    folder: Annotated[Path, Argument(metavar="FOLDER", help="A folder that does not exist yet.")],
    standalone: Annotated[
        bool,
        Option(
            "--standalone",
            help="Write a guided model that transformers opens with trust_remote_code=True, without this package: its weights, its "
            "tokenizer and the code of its plan. REF may be a model folder.",
        ),
    ] = False,
) -> None:
    """Copy an artifact to a plain folder, or write a guided model that anyone can open.

    With --standalone, what the plan does to heads stays as it was when the model was saved, and its losses and attacks are left out. A
    plan that reads more than the tokens of a batch, such as the trees of a parser or a table, is refused by name.
    """
    if standalone:
        _export_standalone(session, reference, folder)
        return
    from pipelines.storage import transfer

    with session.store.load(reference, verify=False) as artifact:
        transfer.export(artifact, folder, progress=session.progress)
    session.answer({"artifact": artifact.reference, "path": os.fspath(folder)}, [folder])


def _export_standalone(session: Session, reference: str, folder: Path) -> None:
    from pipelines.standalone.folder import export_standalone

    done = export_standalone(reference, session.store, folder)
    path = os.fspath(folder)
    if done.left_out:
        session.tell(f"left out, since they do nothing at inference: {', '.join(done.left_out)}")
    session.tell(f"done: {path}, with {done.lines:,} lines of code; README.md says how to open and to publish it")
    session.suggest(f"guide plan show {shlex.quote(path)}")
    facts = {
        "model": reference,
        "path": path,
        "auto_class": done.auto_class,
        "lines": done.lines,
        "left_out": done.left_out,
    }
    session.answer(facts, [folder])


@command("import", group="Store", examples=["guide import ./from-a-colleague --name wiki"])
def import_artifact(
    session: Session,
    folder: Annotated[Path, Argument(metavar="FOLDER", help="A folder made by `guide export`.")],
    name: Annotated[str | None, Option(help="Name of which the artifact also becomes a new version.")] = None,
) -> None:
    """Check an exported artifact and copy it into the store."""
    from pipelines.storage import transfer

    artifact, reused = transfer.import_folder(session.store, folder, name=name, progress=session.progress)
    session.tell(f"{'up to date' if reused else 'done'}: {artifact.path}")
    facts = {"artifact": artifact.reference, "kind": artifact.kind, "reused": reused, "name": name}
    session.answer(facts, [artifact.reference])
