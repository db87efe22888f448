"""The contract between a mechanism and the attention path.

A mechanism is a frozen dataclass of its options.  It says what it needs, which parameters it adds to a layer, and what it
contributes to attention.  Each kind of contribution is one method of `Mechanism`, and a class overrides those that it
makes; `CONTRIBUTIONS` says what each of them means for the paths of heads and for plans.

A new kind of contribution is a method and a row here, the mechanism that makes it, and the step of
`guidance.attention.reference` that applies it.  The steps of attention themselves can be edited without a new kind:
`Mechanism.edit_scores`, `edit_probabilities` and `edit_output`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from guidance.mechanisms.targets import Target
from guidance.patterns.features import Tokens
from guidance.patterns.pattern import Pattern
from guidance.patterns.predicates import AttentionScope, Predicate

Path = Literal["any", "masked", "explicit", "replaced"]
"""What a head's path has to offer: anything will do; a mask; scores and probabilities; the attention is not computed."""

Phase = Literal["always", "measuring", "attacking"]
"""When something is contributed: in every forward pass; where losses are wanted; in the second pass of an attack."""


@dataclass(frozen=True)
class Contribution:
    """What one kind of contribution means for the path of a head, and for plans.

    Attributes:
        path: what it asks of the path of its heads.
        phase: in which forward passes it is made.
        plural: what messages say that two guides do with a head.
        alone: no other guide may act on its heads.
        once: one guide per head may make it.
        one_sequence: it compares queries and keys of one sequence, so cross-attention is refused.
        own_heads: it works on heads of the model, not on heads that a plan adds.
        fades: it can be made in part, so that a schedule may take it away.
    """

    path: Path
    phase: Phase
    plural: str
    alone: bool = False
    once: bool = False
    one_sequence: bool = False
    own_heads: bool = False
    fades: bool = True

    @property
    def does(self) -> str:
        """What messages say that one guide does with a head."""
        verb, _, object_ = self.plural.partition(" ")
        return f"{verb}s {object_}".strip()

    @property
    def is_loss(self) -> bool:
        """It is a term of the objective: it has a weight and a schedule, and does nothing at inference."""
        return self.phase != "always"


CONTRIBUTIONS: Mapping[str, Contribution] = {
    "keys": Contribution("masked", "always", "mask", fades=False),
    "edit_scores": Contribution("explicit", "always", "change the scores of"),
    "edit_probabilities": Contribution("explicit", "always", "change the probabilities of"),
    "edit_output": Contribution("any", "always", "change the output of", once=True, own_heads=True),
    "mix": Contribution("any", "always", "blend states of", one_sequence=True, own_heads=True),
    "replace": Contribution("replaced", "always", "replace the attention of", alone=True),
    "target": Contribution("explicit", "measuring", "pull the probabilities of"),
    "row_losses": Contribution("any", "measuring", "measure the scores of", one_sequence=True, own_heads=True),
    "attack": Contribution("explicit", "attacking", "attack", once=True, one_sequence=True, own_heads=True),
}
"""The methods of `Mechanism` that contribute to attention, by name."""


@dataclass(frozen=True)
class PatternInputs:
    """A pattern on one batch, in one scope of attention.

    Attributes:
        pattern, predicate: None for mechanisms without a pattern.
        scope: what queries may see at all.
        queries, keys: the tokens that ask, and those that are looked at.
        row_sizes_BQ: float32, the number of keys that each query may see; 0 at padding.
    """

    pattern: Pattern | None
    predicate: Predicate | None
    scope: AttentionScope
    queries: Tokens
    keys: Tokens

    def within(self, allowed_BQK: Tensor) -> PatternInputs:
        """The same where a mask leaves queries less than the scope does."""
        scope = replace(self.scope, allowed_BQK=allowed_BQK, hides_padding_only=False)
        predicate = None if self.predicate is None else self.predicate.restricted(allowed_BQK)
        return replace(self, scope=scope, predicate=predicate)

    @property
    def row_sizes_BQ(self) -> Tensor:
        if self.scope.hides_padding_only:
            return self.keys.lengths_B[:, None] * self.queries.valid_BT.float()
        return (self.scope.allowed_BQK & self.queries.valid_BT[:, :, None]).sum(-1).float()


@dataclass(frozen=True)
class HeadInputs:
    """What a mechanism gets at one site of one forward pass.

    Attributes:
        heads: those that it acts on.
        num_guided: the number of heads that its guide acts on in all layers.
        prepared: what `Mechanism.prepare` returned for this batch and scope.
        parameters: what `Mechanism.module` made for this site.
        layer_input_BTd: the hidden states that the attention module reads, if `Mechanism.needs_layer_input`.
        seeds_B: int64, one for each example, from which everything random is drawn; only in the second pass.
        step: optimizer steps so far.
        layer: of the site, counted from 0.
        tables: what was given to `guidance.install` as ``tables``.
    """

    heads: tuple[int, ...]
    num_guided: int
    pattern: PatternInputs
    prepared: Any
    parameters: nn.Module | None
    layer_input_BTd: Tensor | None
    seeds_B: Tensor | None
    step: int
    layer: int
    tables: Mapping[str, Any]

    @property
    def scope(self) -> AttentionScope:
        """What queries may see at all."""
        return self.pattern.scope


OFF = 10_000.0
"""What is subtracted from the score of a key that an attack switches off."""


@dataclass(frozen=True)
class Attack:
    """What an attack does to one layer.  A unit is one (query, key).

    Attributes:
        scores: what is added to the scores: (B, 1 or heads, Q, K).
        kept_B: the number of units between valid tokens that it leaves on; a mean over heads that have masks of their own.
        units_B: the number of units between valid tokens.
    """

    scores: Tensor
    kept_B: Tensor
    units_B: Tensor

    @classmethod
    def of(cls, keep: Tensor, inputs: HeadInputs) -> Attack:
        """The attack that leaves some units on, (B, 1 or heads, Q, K), 1 or 0.  A row without any is not attacked."""
        allowed_B1QK, queries_BQ = inputs.scope.allowed_BQK[:, None], inputs.pattern.queries.valid_BT
        # the shift gives such a row the softmax, and the gradient, that it has with -10000 everywhere
        empty = ~((keep > 0) & allowed_B1QK).any(-1, keepdim=True)
        scores = (keep - 1) * OFF + OFF * empty
        units = allowed_B1QK & queries_BQ[:, None, :, None]
        return cls(scores, (keep * units).sum((2, 3)).mean(1), units.sum((1, 2, 3)))

    @property
    def keep(self) -> Tensor:
        """The units that it leaves on, bool (B, 1 or heads, Q, K); rows that are not attacked are True throughout."""
        return self.scores.detach() > -OFF / 2


class Mechanism:
    """How a pattern acts on a head.  Subclasses are frozen dataclasses of their options.

    Attributes:
        summary: what it does, in one line.
        source: paper, section, equation.
        takes_pattern: a guide of it has a pattern; without one it must have none.
        takes_weights: the pattern may give weights to keys instead of naming them.
        needs: the features that it reads besides those of its pattern.
        needs_layer_input: it reads the hidden states that the attention module reads.
        reads_keys: it reads keys or values, so it needs the whole prefix and no cache of it.
        decays: weight decay shrinks the parameters that it adds, as it does those of the model.
        per_call: where layers share a module, each of them has parameters of its own.
        contributes: the names of the contributions that the class makes; derived from the methods that it overrides.
    """

    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    takes_pattern: ClassVar[bool] = True
    takes_weights: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ()
    needs_layer_input: ClassVar[bool] = False
    reads_keys: ClassVar[bool] = True
    decays: ClassVar[bool] = True
    per_call: ClassVar[bool] = False
    contributes: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.contributes = frozenset(n for n in CONTRIBUTIONS if getattr(cls, n) is not getattr(Mechanism, n))

    @classmethod
    def contributions(cls) -> tuple[Contribution, ...]:
        """The rows of `CONTRIBUTIONS` that belong to the class."""
        return tuple(CONTRIBUTIONS[name] for name in CONTRIBUTIONS if name in cls.contributes)

    @classmethod
    def is_loss(cls) -> bool:
        """True for a term of the objective, which has a weight and a schedule, and does nothing at inference."""
        return all(contribution.is_loss for contribution in cls.contributions())

    @classmethod
    def changes_attention(cls) -> bool:
        """It decides or changes, at inference too, where its heads look."""
        return any(c.phase == "always" and c.path != "any" for c in cls.contributions())

    @classmethod
    def fades(cls) -> bool:
        """True if a schedule may take away what it does to a head."""
        return all(contribution.fades for contribution in cls.contributions())

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The keys that its guides may have."""
        return tuple(item.name for item in fields(cls))  # type: ignore[arg-type]

    # what it needs

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that it looks up, by the names of `guidance.patterns.features.TABLES`."""
        return ()

    @property
    def one_sequence_because(self) -> str:
        """What in its options compares positions of queries and keys, which rules out cross-attention; empty if nothing."""
        return ""

    @property
    def heeds_masks(self) -> bool:
        """What it prepares depends on the masks that other guides put on its heads."""
        return False

    def refuses_reference_length(self) -> str:
        """Why a guide of it cannot have a ``reference_length``; empty if it can."""
        return "reference_length belongs to attention_loss, not to {mechanism}"

    def is_idle(self, pattern: Pattern | None) -> bool:
        """True if it would change nothing with this pattern; the plan then leaves it out."""
        return False

    @property
    def needs_scores(self) -> bool:
        """It acts on queries, keys or scores, which heads whose attention is replaced do not have."""
        return True

    @property
    def of_whole_layers(self) -> str:
        """What in its options belongs to whole layers, so that its guides select no heads; empty if nothing."""
        return ""

    @property
    def places(self) -> tuple[str, ...]:
        """For `mix`: what it changes, by the names of `guidance.mechanisms.mix.Place`."""
        return ()

    def module(self, num_heads: int, width: int) -> nn.Module | None:
        """The parameters that it adds to a site.

        Args:
            num_heads: on which it acts there.
            width: of the hidden states.
        """
        return None

    def site_module(self, num_heads: int, width: int, head_width: int) -> nn.Module | None:
        """The same for mechanisms that ask how wide a head is; by default `module`."""
        return self.module(num_heads, width)

    @property
    def learns(self) -> bool:
        """It adds parameters."""
        own, base = type(self), Mechanism
        return own.module is not base.module or own.site_module is not base.site_module

    @property
    def explanation(self) -> str:
        """What its options make of it, in one line for people who look at a plan; empty if its summary says all."""
        return ""

    # once for each batch and scope

    def seen(self, tokens: Tokens) -> Tokens:
        """The tokens from which its pattern is built."""
        return tokens

    def prepare(self, inputs: PatternInputs) -> Any:
        """What all layers with the same scope share; computed once for each batch."""
        return None

    def num_matches(self, inputs: PatternInputs, prepared: Any) -> Tensor | None:
        """The number of keys that the pattern names in this batch; None to count nothing here."""
        return None if inputs.predicate is None else inputs.predicate.counts().sum()

    def denominator(self, tokens: Tokens, pattern: Predicate | None) -> Tensor:
        """What the sum of its loss over the examples of a batch is divided by: the examples that are not only padding."""
        return (tokens.lengths_B > 0).sum()

    # contributions

    def query_factor(self, num_heads: int) -> float:
        """A factor for the queries of its heads, in a layer of that many heads."""
        return 1.0

    def keys(self, prepared: Any) -> Tensor:
        """A mask: the keys that its heads may see, bool (B, Q, K)."""
        raise AssertionError

    def edit_scores(self, scores_BhQK: Tensor, inputs: HeadInputs) -> Tensor:
        """The scores of its heads, changed; masks are applied later."""
        raise AssertionError

    def edit_probabilities(self, attention_BhQK: Tensor, inputs: HeadInputs) -> Tensor:
        """The probabilities of its heads, changed, before dropout."""
        raise AssertionError

    def edit_output(self, output_BQhD: Tensor, inputs: HeadInputs) -> Tensor:
        """The output of its heads, changed."""
        raise AssertionError

    def mix(self, place: str, inputs: HeadInputs) -> Tensor:
        """The weights with which states are mixed along the matrix that `prepare` has made: (h, D) of its heads, or (d,) of the
        layer; or one for all channels, (h, 1) or (1,).

        Args:
            place: one of `places`.
        """
        raise AssertionError

    def replace(self, value_BhKD: Tensor, inputs: HeadInputs, dropout: float) -> Tensor:
        """The output of its heads without queries, keys and softmax: (B, h, Q, D)."""
        raise AssertionError

    def replaced_attention(self, inputs: HeadInputs) -> Tensor:
        """For `replace`: the weights that it stands for, float32 (B, h or 1, Q, K)."""
        raise AssertionError

    def target(self, prepared: Any) -> Target:
        """A loss on probabilities: what it wants of every row."""
        raise AssertionError

    def reduce(self, distances_BhQ: Tensor, target: Target) -> Tensor:
        """For `target`: one loss for each example, (B,), from the distances of the rows at one site."""
        raise AssertionError

    def row_losses(self, query_BhQD: Tensor, key_BhKD: Tensor, scale: float, inputs: HeadInputs) -> Tensor:
        """A loss on raw scores: one for each example, (B,)."""
        raise AssertionError

    def attack(self, scores_BhQK: Tensor, inputs: HeadInputs) -> Attack:
        """What it switches off in a second forward pass.

        Args:
            scores_BhQK: of its heads, before masks, biases and other edits.
        """
        raise AssertionError


def not_decaying(model: nn.Module) -> set[str]:
    """The names of the parameters that mechanisms have added to a model and that weight decay leaves alone."""
    return {
        f"{name}.{own}"
        for name, module in model.named_modules()
        if not getattr(module, "guide_decays", True)
        for own, _ in module.named_parameters()
    }
