"""Backends of attention: functions of one signature that compute heads of a call.

``reference`` computes scores and probabilities and is the definition of correct; ``blocks`` does the same without keeping
them; ``sdpa`` is PyTorch's fast kernel, which ``sparse`` gives only the keys that masks leave, and off which ``logsumexp`` reads losses.
``flex`` and ``varlen`` are for CUDA devices; ``auto`` takes neither, since they have not been measured there.  A new backend is one file and one call of
`register_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from guidance.attention import blocks, flex, logsumexp, reference, sdpa, sparse, varlen
from guidance.attention.call import AttentionCall
from guidance.errors import PlanError
from guidance.registry import Registry
from guidance.site_plans import SitePlan

HeadPath = Literal["plain", "masked", "explicit"]
"""What heads ask of a backend; see `guidance.site_plans.HeadPaths`."""

PATHS: tuple[HeadPath, ...] = ("plain", "masked", "explicit")


Attend = Callable[[AttentionCall, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Backend:
    """A way to compute heads.

    Attributes:
        attend: from a call and some of its heads to their output, (B, Q, heads, D).
        paths: the paths that it can compute.
    """

    name: str
    attend: Attend
    paths: frozenset[HeadPath]


BACKENDS: Registry[Backend] = Registry("backend")
"""Every backend by name."""

AUTO: dict[HeadPath, str] = {"plain": "sdpa", "masked": "sparse", "explicit": "logsumexp"}
"""What ``auto`` takes for each path."""


def register_backend(name: str, attend: Attend, paths: Iterable[HeadPath], *, package: str = "") -> Backend:
    """Add a backend, which `guidance.install` then takes as ``backend=``.

    Args:
        attend, paths: see `Backend`.
        package: the package that registers it; by default the one that defines ``attend``.

    Raises:
        PlanError: the name is taken, or there is no such path.
    """
    backend = Backend(name, attend, frozenset(paths))
    if name == "auto" or not backend.paths or backend.paths - set(PATHS):
        raise PlanError(f"backend {name!r} of paths {sorted(backend.paths)}", hint=f"paths: {', '.join(PATHS)}")
    return BACKENDS.add(name, backend, package or attend.__module__)


def choose_backends(names: str | Mapping[HeadPath, str], site_plans: Iterable[SitePlan]) -> dict[str, Attend]:
    """The function that computes the heads of each path.

    Args:
        names: of one backend for all paths, ``auto``, or of a backend for some paths.
    """
    wanted: dict[HeadPath, str] = dict.fromkeys(PATHS, names) if isinstance(names, str) else dict(names)
    if unknown := sorted(map(str, wanted.keys() - set(PATHS))):
        raise PlanError(f"there is no path {unknown[0]!r} of heads", hint=f"paths: {', '.join(PATHS)}")
    chosen = {path: BACKENDS.find(name) for path, name in wanted.items() if name != "auto"}
    for site_plan in site_plans:
        for path in site_plan.paths_taken():
            if path in chosen and path not in chosen[path].paths:
                raise PlanError(
                    f"the backend {chosen[path].name!r} cannot compute heads on the path {path!r}, which this plan takes",
                    hint='backend="auto" takes a backend for each path',
                )
    # recorded probabilities and soft caps need the explicit path also where a plan does not
    able = {path: backend for path, backend in chosen.items() if path in backend.paths}
    return {path: able.get(path, BACKENDS[AUTO[path]]).attend for path in PATHS}


for _name, _backend in {
    "reference": Backend("reference", reference.attend, frozenset(PATHS)),
    "sdpa": Backend("sdpa", sdpa.attend, frozenset({"plain", "masked"})),
    "sparse": Backend("sparse", sparse.attend, frozenset({"masked"})),
    "blocks": Backend("blocks", blocks.attend, frozenset(PATHS)),
    "logsumexp": Backend("logsumexp", logsumexp.attend, frozenset(PATHS)),
    "flex": Backend("flex", flex.attend, frozenset(PATHS)),
    "varlen": Backend("varlen", varlen.attend, frozenset({"plain"})),
}.items():
    BACKENDS.add(_name, _backend)
