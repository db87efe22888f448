"""The plan of a training run: what ``--plan`` names, and what the model of ``--init`` keeps of its own plan."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guidance.errors import PlanError
from pipelines.progress import log
from pipelines.storage.dry import NotYet
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
from pipelines.training.config import MODEL, NONE, is_text
from pipelines.training.objective import Objective

if TYPE_CHECKING:
    from guidance.plan import Plan


def read_plan(name: str, store: Store) -> Plan:
    """The plan that is a preset or a TOML file, or that `guide discover accept` made.

    Raises:
        UnknownName: no preset of that name.
        PlanError: there is none of these, or the plan cannot be read.
        ArtifactDamaged: the findings are not what was written.
    """
    from guidance.checkpoint import PLAN_FILE
    from guidance.plan import Plan

    if not name.startswith("preset:") and not Path(name).is_file():
        with suppress(ArtifactMissing), store.load(name) as findings:
            if findings.kind != "findings":
                raise PlanError(
                    f"{name!r} is an artifact of kind {findings.kind}, which is no plan",
                    hint="`guide discover accept` makes plans; `guide ls --kind findings` lists them",
                )
            return Plan.parse(findings.read(PLAN_FILE).decode(), source=name)
    return Plan.load(name)


def load_plan(config: Any, objective: type[Objective], store: Store) -> Plan:
    """The plan of a run: the rows of every ``--plan``, in their order.

    Without ``--plan`` it is what the model of ``--init`` keeps of its own plan: rows that act at inference, at the strength that
    they have there.  A model of random weights (``--random-init``) keeps nothing unless ``--plan model`` says so.

    Raises:
        PlanError: a plan has no guides, two plans do not go together, or a guide cannot work in this objective.
    """
    from guidance.plan import Plan

    names = list(config.plan)
    if MODEL in names and not config.init:
        raise PlanError("--plan model means the plan of --init, and no model is given", hint="--init MODEL")
    if NONE in names and len(names) > 1:
        raise PlanError("--plan none leaves out every plan", hint="leave out either none or the other plans")
    own = _own(config, objective, store) if config.init else Plan()
    if not names and not getattr(config, "random_init", False):
        plan = own
        if plan.shapes_outputs:
            log.info(
                "plan: %s of %s, since it shapes that model; --plan none leaves it out", _listed(plan), config.init
            )
    else:
        plan = Plan.joined([_load(name, own, config, store) for name in names if name != NONE])
        if MODEL in names:
            log.info("plan: %s of %s, which --plan model takes over", _listed(own), config.init)
        _tell_of_loss(own.without_rows_of(plan), config)
    try:
        objective.check_plan(plan, config, config.plan_name)
    except PlanError as error:
        if not names:
            error.hint = "--plan none trains without the plan of the model"
        raise
    return plan


def check_files(config: Any, store: Store) -> None:
    """Check that every preset, file and artifact of ``--plan`` can be read, in a dry run that cannot know the task yet.  Raises PlanError if
    one cannot."""
    from guidance.plan import Plan

    for name in config.plan:
        if name not in (MODEL, NONE):
            _load(name, Plan(), config, store)


def _own(config: Any, objective: type[Objective], store: Store) -> Plan:
    """See `kept_plan`; a plan that cannot be read, or not yet, is no obstacle to a run that does not want it."""
    from guidance.plan import Plan

    try:
        return kept_plan(config.init, objective, store)
    except NotYet:
        if not config.plan or MODEL in config.plan:
            raise
        return Plan()
    except PlanError as error:
        if not config.plan or MODEL in config.plan:
            error.hint = "; ".join(filter(None, (error.hint, "--plan none starts without it")))
            raise
        log.warning("%s", error.message)
        return Plan()


def kept_plan(init: str, objective: type[Objective], store: Store) -> Plan:
    """What a model that starts from another one keeps of its plan, and of that of the generator beside it."""
    from guidance.checkpoint import find_plan, read_progress
    from guidance.plan import Plan
    from pipelines.training.plan_checks import GENERATOR_FOLDER

    folder = _folder(init, store)
    parts = {"model": folder}
    if objective.trains_generator and (folder / GENERATOR_FOLDER).is_dir():
        parts["generator"] = folder / GENERATOR_FOLDER
    kept = []
    for part, place in parts.items():
        plan = (find_plan(place) or Plan()).inherited(read_progress(place))
        kept.append(plan if part == "model" else plan.as_part(part))
    return Plan.joined(kept)


def _folder(init: str, store: Store) -> Path:
    """The folder of a model, which is verified when it becomes an input of the run."""
    try:
        with store.load(init, kind="model", verify=False) as artifact:
            return artifact.path
    except ArtifactMissing:
        if not Path(init).is_dir():
            raise
        return Path(init)


def _load(name: str, own: Plan, config: Any, store: Store) -> Plan:
    from guidance.plan import Plan

    if name == MODEL:
        if not own.shapes_outputs:
            raise PlanError(
                f"--plan model: {config.init} has no plan that shapes it", hint="losses and attacks are not taken over"
            )
        return own
    plan = Plan.parse(name, source=config.called(name)) if is_text(name) else read_plan(name, store)
    if not plan.guides and plan.pal is None:
        raise PlanError(f"{name}: the plan has no guides", hint="leave --plan out to train without guides")
    return plan


def _tell_of_loss(lost: Plan, config: Any) -> None:
    """Warn of what shaped the model of ``--init`` and is left out, and of what that had learned."""
    if not lost.shapes_outputs:
        return
    learned = [guide.label for guide in lost.guides if guide.learns] + (["[pal]"] if lost.pal else [])
    log.warning(
        "%s was trained with %s, which %s leaves out%s; --plan model keeps %s",
        config.init,
        _listed(lost),
        "--plan " + " --plan ".join(map(_given, config.plan)) if config.plan else "--random-init",
        f"; what {' and '.join(learned)} had learned is lost" if learned else "",
        "them" if len(lost.guides) + (lost.pal is not None) > 1 else "it",
    )


def _given(name: str) -> str:
    """A plan as the user gave it, or ``TOML`` for the text of one."""
    return "TOML" if is_text(name) else name


def _listed(plan: Plan) -> str:
    """The rows of a plan in a few words, such as ``fix next, fix previous``."""
    rows = [" ".join(dict.fromkeys((guide.mechanism, guide.label))) for guide in plan.guides]
    return ", ".join(["[pal]"] * (plan.pal is not None) + list(dict.fromkeys(rows)))
