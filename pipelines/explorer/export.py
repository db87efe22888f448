"""The page and what it shows as one HTML file, which opens without a server and asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from pipelines.explorer.workspace import Workspace, as_json

MODULES = (
    "dom", "colours", "api", "state", "page", "vector", "grid", "matrix", "lines", "figure", "panels", "heads", "head", "saving", "work", "app",
)  # fmt: skip
"""The scripts of the page, those first that others import."""


def one_file(workspace: Workspace, examples: int) -> bytes:
    """The page of a workspace that is ready, with the maps of all heads on its first examples."""
    page = files("pipelines.explorer") / "page"
    # the names in the modules are distinct, so imports and exports are left out
    modules = (
        re.sub(r"^import [^;]*;\n", "", (page / f"{name}.js").read_text("utf-8"), flags=re.M) for name in MODULES
    )
    script = "\n".join(re.sub(r"^export ", "", module, flags=re.M) for module in modules)
    style = (page / "style.css").read_text("utf-8")
    data = as_json(_answers(workspace, examples)).decode()
    # inside of a script element only "</script" and "<!--" mean anything, and JSON may write "<" otherwise
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    html = (page / "index.html").read_text("utf-8")
    html = html.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    html = html.replace('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>", 1)
    html = html.replace('<script type="module" src="app.js"></script>', "", 1)
    html = html.replace(
        "</body>",
        f'<script type="application/json" id="guide-data">{data}</script>\n<script type="module">{script}</script>\n</body>',
        1,
    )
    return html.encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _answers(workspace: Workspace, examples: int) -> dict[str, Any]:
    """What the page would ask for, by the path that it asks."""
    answers: dict[str, Any] = {"api/overview": {**workspace.overview(), "can_accept": False, "accepted": None}}
    for n, side in enumerate(workspace.sides):
        heads, number = side.heads(), min(examples, side.num_examples)
        answers["api/overview"]["models"][n] |= {"examples": number, "all_examples": side.num_examples}
        answers[f"api/heads?model={n}"] = heads
        answers[f"api/tiles?model={n}"] = _raw(side.tiles(None))
        for example in range(number):
            answers[f"api/example?model={n}&example={example}"] = side.example(example)
            answers[f"api/tiles?model={n}&example={example}"] = _raw(side.tiles(example))
        for row in heads["heads"]:
            head = (row["layer"], row["head"], row["kind"])
            asked = f"layer={row['layer']}&head={row['head']}&kind={row['kind']}"
            answers[f"api/average?model={n}&{asked}"] = _raw(side.average(*head))
            for example in range(number):
                answers[f"api/map?model={n}&example={example}&{asked}"] = _raw(side.map(example, *head))
        for name in heads["patterns"]:
            for example in range(number):
                key = f"api/preview?model={n}&example={example}&pattern={quote(name, safe='')}"
                answers[key] = _raw(side.preview(example, name))
    return answers


def _raw(value: bytes) -> str:
    return base64.b64encode(value).decode()
