"""A page that is served in this process, on models with known heads."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipelines.explorer.server import serving
from pipelines.explorer.workspace import Workspace
from pipelines.stages import discover_score
from pipelines.storage.store import Store
from tests import trainings
from tests.pipelines.stages.test_probes import matching, saved, written

HOSTILE = "<script>document.title='taken'</script>"
TEXT = "anna saw anna . the dog saw the man . she fed it .\n" * 30


@dataclass(frozen=True)
class Page:
    """A page that is served.

    Attributes:
        address: with the token.
    """

    address: str
    workspace: Workspace
    store: Store

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.address.split(":")[2].split("/")[0])

    @property
    def token(self) -> str:
        """The secret of the address."""
        return self.address.partition("#token=")[2]

    @functools.cached_property
    def cookie(self) -> str:
        """What a browser that has given the token sends."""
        return self.visit()

    def visit(self) -> str:
        """The cookie of a new browser."""
        sent = json.dumps({"token": self.token}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/session", sent, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(response.headers["Set-Cookie"]).partition(";")[0]


def model_folder(folder: Path, *, heads: int = 6, layers: int = 2, strength: float = 1.0) -> str:
    """A model whose last head of layer 0 looks at tokens like its own, with a tokenizer that knows a hostile word.

    Args:
        strength: the factor of the scores of that head.
    """
    model = matching(layers, heads)
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight.mul_(strength)
    made = saved(folder, model)
    words = [
        *trainings.SPECIAL,
        *["anna", "saw", "the", "dog", ".", "she", "fed", "it", "was", "glad", "her", "man"],
        HOSTILE,
        "looooooooooooong",
    ]
    for name, data in trainings.tokenizer_files(words).items():
        (folder / name).write_bytes(data)
    return made


@contextlib.contextmanager
def served(
    folder: Path, models: Sequence[str], text: str = TEXT, *, wait: bool = True, **settings: Any
) -> Iterator[Page]:
    """Serve models on a text; by default until their heads are known."""
    store = Store(folder / "artifacts")
    data = written(folder, "text.txt", text)
    config = discover_score.Config(**{"sequence_length": 32, "limit": 40, **settings})
    sides = {Path(name).name: name for name in models}
    workspace = Workspace(
        sides, data, config, store, title="text.txt", can_accept=True, store_flag=f" --store {store.root}"
    )
    with serving(workspace) as (address, serve):
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        workspace.start()
        if wait:
            workspace.wait()
        yield Page(address, workspace, store)
    thread.join(timeout=10)
    workspace.close()
