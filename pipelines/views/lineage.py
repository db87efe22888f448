"""What artifacts were made from, down to the raw inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from guidance.errors import InputError
from pipelines.storage.manifest import ArtifactMisplaced
from pipelines.storage.store import Store


def family(store: Store, manifest: dict[str, Any], *, seen: frozenset[str]) -> dict[str, Any]:
    """An artifact and, as a tree, everything that it was made from."""
    recipe = str(manifest["recipe"])
    node: dict[str, Any] = {"artifact": f"{manifest['kind']}/{recipe[:16]}", "stage": manifest.get("stage")}
    node["content"] = manifest["content"]
    node["inputs"] = {}
    for role, source in sorted(manifest.get("inputs", {}).items()):
        if "recipe" not in source or str(source["recipe"]) in seen | {recipe}:
            node["inputs"][role] = dict(source)
            continue
        entry = {"artifact": f"{source.get('kind')}/{str(source['recipe'])[:16]}", "content": source.get("content")}
        try:
            with store.open(store.folder(str(source.get("kind")), str(source["recipe"]))) as parent:
                entry = family(store, parent.manifest, seen=seen | {recipe})
            if parent.content != source.get("content"):
                entry["note"] = "built again since: other content"
        except ArtifactMisplaced:
            entry["note"] = "its folder holds another artifact"
        except InputError:
            entry["note"] = "not in this store"
        node["inputs"][role] = entry
    return node


def draw(node: dict[str, Any], indent: str = "", role: str = "") -> Iterator[str]:
    """A tree as lines of text."""
    if "artifact" in node:
        text = f"{node['artifact']}  {node.get('stage') or ''}".rstrip()
    else:
        first = ", ".join(str(name) for name in node.get("first", [])[:3])
        text = f"{node.get('kind', 'input')}  {node.get('count', '')} {first}".rstrip()
    note = f"  ({node['note']})" if node.get("note") else ""
    yield f"{indent}{role + ': ' if role else ''}{text}{note}"
    for child_role, child in node.get("inputs", {}).items():
        yield from draw(child, indent + "  ", child_role)
