"""Opens trained models to use them: guided ones with their plans, and ordinary ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError
from guidance.plan import Plan
from pipelines.storage.store import Store
from pipelines.training.learner import folder_of
from pipelines.training.plan_inputs import model_input

if TYPE_CHECKING:
    from guidance.site_plans import SitePlan
    from guidance.sites import Site


@dataclass(frozen=True)
class Unguided:
    """Stands for the handle of a model that has no plan; see `guidance.installation.Handle`."""

    model: Any
    plan: Plan = field(default_factory=Plan)
    attacks: tuple[()] = ()
    site_plans: Mapping[Site, SitePlan] = field(default_factory=dict)
    num_guided: tuple[()] = ()

    def at_inference(self, **batch: Any) -> dict[str, Any]:
        """Nothing: the model stays untouched."""
        return {}

    def alphas(self, step: int, total: int) -> dict[str, float]:
        """No guide has a loss."""
        return {}


def find_folder(reference: str, store: Store) -> Path:
    """The folder of a model: of an artifact that verifies, or any Hugging Face folder.

    Raises:
        InputError: there is no such artifact, and no such model folder.
    """
    return folder_of(model_input(reference, store))


def open_trained(
    folder: Path, tables: Mapping[str, Any] | None = None, device: str = "auto", auto_class: str | None = None
) -> tuple[Any, Any]:
    """A model and its handle, or `Unguided`, in evaluation mode on a device.

    Args:
        auto_class: the class of transformers that opens it, by default the one that was saved.

    Raises:
        InputError: the folder cannot be opened.
        MachineError: the device is not available.
    """
    import transformers
    from transformers.utils import logging as transformers_logging

    from guidance.checkpoint import find_plan, load, load_model
    from pipelines.training.cluster import Cluster

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    place, opened_by = Cluster(device, "fp32").device, getattr(transformers, auto_class) if auto_class else None
    if find_plan(folder) is not None:
        model, handle = load(folder, opened_by, tables=tables)
        model.to(place)  # type: ignore[arg-type]
        return model, handle
    plain: Any = load_model(folder, opened_by).eval()
    return plain.to(place), Unguided(plain)


def two_stacks(folder: Path) -> InputError:
    """What to raise of an encoder-decoder where models with one stack are read."""
    return InputError(f"{folder}: an encoder-decoder; probes read models with one stack")


def open_watched(
    folder: Path, tables: Mapping[str, Any] | None = None, device: str = "auto", auto_class: str | None = None
) -> tuple[Any, Any]:
    """A model and a handle that shows its heads, with its plan or without one; see `open_trained` and `watched`."""
    model, handle = open_trained(folder, tables, device, auto_class)
    return model, watched(handle, folder)


def watched(handle: Any, folder: Path) -> Any:
    """The handle that shows the heads of a model that was opened with this one.

    Raises:
        InputError: the model has no heads.
    """
    import guidance

    found = guidance.install(handle.model, Plan()) if isinstance(handle, Unguided) else handle
    if not found.sites:
        raise InputError(f"{folder}: a {handle.model.config.model_type}, which has no attention heads")
    return found
