"""What the code of a standalone model leaves out, although it is named: functions that this model never calls, or calls for nothing.

A function keeps its name, and one line stands for its docstring and its statements.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from guidance.guided_model import GuidedModel

Cuts = Mapping[tuple[str, str], str]
"""By function, as (module, name) or (module, class.name), the line that stands for its body."""

_NEVER = 'raise AssertionError("left out of this folder, whose plan does not need it")'

_OF_DOCUMENTS = ("of", "shape", "is_packed", "apart", "together", "at", "inputs", "padding")

_PREDICATES = ("Predicate", "Shift", "Columns")
_OF_LOSSES = ("mass", "add_mass_gradient")
_OF_TARGETS = (
    ("Target", "of_probabilities"),
    ("Target", "part"),
    ("SquaredTarget", "distances"),
    ("SquaredTarget", "of_probabilities"),
    ("SquaredTarget", "from_squares"),
    ("GuidedSoftmax", "forward"),
    ("GuidedSoftmax", "backward"),
)

ALWAYS: Cuts = {
    # names of other packages are not looked up
    ("guidance.registry", "load_entry_points"): "return None",
    ("guidance.registry", "missing_package"): "return None",
    # plan and model were checked when the folder was written
    ("guidance.guide", "Guide._check"): "return None",
    ("guidance.options", "check_digits"): "return None",
    ("guidance.options", "Within.check"): "return None",
    ("guidance.site_plans", "_check_head"): "return None",
    ("guidance.sites", "check_selector"): "return None",
    ("guidance.guide", "selectors_of"): "return tuple(value) if isinstance(value, list | tuple) else (value,)",
    ("guidance.site_plans", "_check_attacks"): "return None",
    ("guidance.site_plans", "_compares_positions"): 'return ""',
    ("guidance.installation", "Handle._refuse_shared_keys"): "return None",
    ("guidance.installation", "Handle._freeze"): "return None",
    # there are no tables
    ("guidance.guided_model", "GuidedModel._check_tables"): "return None",
    ("guidance.sites", "_score_table"): _NEVER,
    ("guidance.sites", "_ranked"): _NEVER,
    # nobody asks it what its patterns have matched, or what its plan has added
    ("guidance.batch_patterns", "BatchPatterns._count"): "return None",
    ("guidance.installation", "Handle.parameters"): _NEVER,
    # losses and attacks are left out
    ("guidance.guide", "Guide.weight_for"): "return 1.0",
    ("guidance.site_plans", "_spare_replaced_heads"): "return None",
    ("guidance.batch", "BatchGuidance.attack"): _NEVER,
    ("guidance.attention.logsumexp", "fitting"): "return ()",
    ("guidance.attention.logsumexp", "takes_plain"): "return False",
    ("guidance.attention.logsumexp", "_attend"): _NEVER,
    ("guidance.attention.reference", "measurements"): "return []",
    ("guidance.attention.reference", "_softmax"): (
        "return torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)), []"
    ),
    ("guidance.attention.reference", "note"): "return None",
    **{("guidance.patterns.predicates", f"{kind}.{name}"): _NEVER for kind in _PREDICATES for name in _OF_LOSSES},
    **{("guidance.mechanisms.targets", f"{kind}.{name}"): _NEVER for kind, name in _OF_TARGETS},
    # masked heads take the public kernel with a mask: the same numbers, and no operator that another torch may lack
    ("guidance.attention.sparse", "fitting"): "return {}",
    ("guidance.attention.sparse", "_attend"): _NEVER,
    # its texts are never packed
    ("guidance.batch", "BatchGuidance.packed"): _NEVER,
    ("guidance.attention.function", "_packed_attention"): _NEVER,
    **{("guidance.packing", f"Documents.{name}"): _NEVER for name in _OF_DOCUMENTS},
}
"""What no standalone model needs."""

ADDED_HEADS: Cuts = {
    ("guidance.models.added_heads", "added_sites"): _NEVER,
    ("guidance.installation", "Handle._add_heads"): "return None",
    ("guidance.installation", "_run_added_heads"): _NEVER,
}
"""What only plans with added heads need."""

MIXING: Cuts = {
    ("guidance.attention.mixing", "Mixing.__init__"): _NEVER,
    ("guidance.attention.mixing", "Mixing.hooks"): _NEVER,
}
"""What only plans with ``mix`` need."""

CONDITIONS: Cuts = {("guidance.patterns.expressions", "names_in"): _NEVER}
"""What only patterns with ``where`` need."""

CACHES: Cuts = {
    ("guidance.calls", "BeforeCall._prefix"): _NEVER,
    ("guidance.calls", "BeforeCall._with_cache"): _NEVER,
    ("guidance.calls", "keep_prefix"): _NEVER,
    ("guidance.prefix", "Prefix.before"): _NEVER,
    ("guidance.prefix", "States.followed_by"): _NEVER,
}
"""What only decoders need whose plan reads earlier tokens, so that a cache has to keep them."""

DEBERTA: Cuts = {
    ("guidance.models.adapters", "_is_deberta"): "return False",
    ("guidance.models.adapters", "adapt"): "return partial(tuple)",
}
"""What only DeBERTa needs, which does not ask the interface of transformers for its attention function."""


def cuts_of(guided: GuidedModel, rows: Mapping[str, Collection[str]]) -> Cuts:
    """What the code of a model leaves out, given the names of the rows of tables that it needs."""
    mechanisms, combinations, families = (rows[kind] for kind in ("mechanisms", "combinations", "families"))
    needless = {
        **({} if guided.plan.pal else ADDED_HEADS),
        **({} if "mix" in mechanisms else MIXING),
        **({} if "where" in combinations else CONDITIONS),
        **({} if guided.reads_prefix else CACHES),
        **({} if "deberta_v2" in families else DEBERTA),
    }
    return {**ALWAYS, **needless}
