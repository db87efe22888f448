"""What objectives with a generator ask of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from guidance.errors import PlanError

if TYPE_CHECKING:
    from guidance.guide import Guide
    from guidance.plan import Plan

GENERATOR_FOLDER = "generator/"
"""The folder of the generator inside a model folder."""

GENERATOR_CARD = {
    GENERATOR_FOLDER: "`generator/` holds the masked language model that filled in masked tokens while this model learned. "
    "Open it with `AutoModelForMaskedLM`; only further training of the same kind needs it.\n",
}
"""What a model card says about the generator beside the model."""

GeneratorKind = Literal["none", "unigram", "transformer"]


def generator_kind(plan: Plan, config: Any, *, always: bool = False) -> GeneratorKind:
    """What fills in the masked tokens, with ``--generator auto`` resolved.

    Args:
        always: the objective needs a generator with any plan.
    """
    if config.generator != "auto":
        kind: GeneratorKind = config.generator
        return kind
    needed = always or any(
        guide.enabled and (guide.part == "generator" or guide.makes("row_losses")) for guide in plan.guides
    )
    return "transformer" if needed else "none"


def check_generator_guides(plan: Plan, config: Any, source: str, *, always: bool = False) -> None:
    """Raises PlanError when a guide cannot work with the generator of the run.

    Args:
        always: the objective needs a generator with any plan, and trains a discriminator beside it.
    """
    kind = generator_kind(plan, config, always=always)
    for number, guide in enumerate(plan.guides, 1):
        if guide.part == "discriminator" and not always:
            reason, hint = f"is for a discriminator, and {config.objective} trains none", "--objective electra"
        else:
            reason = _refusal(guide, kind)
            hint = "--generator transformer, or unigram" if guide.makes("row_losses") and kind == "none" else ""
        if reason:
            raise PlanError(f"{source}, guide {number} ({guide.label}) {reason}", hint=hint or None)


def _refusal(guide: Guide, kind: GeneratorKind) -> str:
    """Why a guide cannot work with a generator of this kind; empty if it can."""
    if guide.part == "generator":
        if kind != "transformer":
            return f"is for a generator, and --generator {kind} has no heads"
        if guide.makes("row_losses"):
            return f"is for a generator, but {guide.mechanism} is for heads of the model that reads its mistakes"
        if guide.makes("attack"):
            return f"is for a generator, but {guide.mechanism} needs a second pass, which only the model makes"
    if guide.makes("row_losses"):
        return f"acts where a generator mis-predicts, and --generator {kind} trains none" if kind == "none" else ""
    if guide.bound_pattern and "original" in guide.bound_pattern.needs:
        return f"would show the model the answers: a {guide.mechanism} may not read the tokens of the original text"
    return ""
