"""A pattern: a name for which keys each query should look at, with its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from guidance.errors import GuideError, PlanError
from guidance.options import declared, read_options
from guidance.patterns.features import Tokens
from guidance.patterns.predicates import Pairs, Predicate, Rule, Weights

OptionFacts = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Pattern:
    """One row of `guidance.patterns.PATTERNS`, or a combination of rows that a plan describes.

    Attributes:
        build: from the features of a batch to the predicate; call `on`, which checks what it returns.
        source: paper, section, equation.
        needs: the features that it reads besides ids and padding.
        tables: the tables in which it looks things up.
        positional: True if a missing target is a matter of the sequence's boundary, not of its tokens.
        weighted: True if it gives weights to keys instead of naming them.
        same_keys: True if the keys do not depend on the query, so that the query may belong to another sequence.
        looks_ahead: True if later tokens can decide which earlier keys a query may see.
        option_facts: how given options change the attributes above; called with the options by name.
        options: the options that a plan gives, by name.
        package: the package that registers it; empty for ours.
    """

    name: str
    build: Callable[[Tokens], Predicate | Tensor]
    source: str
    needs: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    positional: bool = False
    weighted: bool = False
    same_keys: bool = False
    looks_ahead: bool = False
    option_facts: OptionFacts | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    package: str = ""

    def on(self, tokens: Tokens) -> Predicate:
        """What it says about a batch.

        A function from elsewhere may return a tensor (B, Q, K) instead of a predicate: bool, or numbers if the pattern is
        ``weighted``.

        Raises:
            PlanError: the function returns something else, or comes from another package and fails.
        """
        predicate = self._named(self.build)(tokens) if self.package else self.build(tokens)
        if self.package and isinstance(predicate, Rule):
            predicate = replace(predicate, function=self._named(predicate.function))
        return predicate if isinstance(predicate, Predicate) else self._written_out(predicate, tokens)

    def _named(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of another package, whose errors say of which pattern it is a part."""

        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except (GuideError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise PlanError(
                    f"the pattern {self.name!r} of the package {self.package!r} fails: {type(error).__name__}: {error}",
                    hint="mend the pattern, or leave it out of the plan; --debug shows where it fails",
                ) from error

        return call

    def _written_out(self, matrix: Any, tokens: Tokens) -> Predicate:
        shape = (*tokens.valid_BT.shape, tokens.valid_BT.shape[1])
        if not isinstance(matrix, Tensor) or tuple(matrix.shape) != shape:
            what = f"a tensor {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else f"a {type(matrix).__name__}"
            raise PlanError(
                f"the pattern {self.name!r} returns {what}, not a predicate",
                hint=f"one of guidance.patterns: Shift, Columns, Rule, Pairs, Weights; or a tensor (B, Q, K), here {shape}",
            )
        if matrix.dtype == torch.bool:
            return Pairs(matrix, tokens.valid_BT)
        if not self.weighted:
            raise PlanError(
                f"the pattern {self.name!r} returns weights ({matrix.dtype}) and is registered without them",
                hint="register_pattern(..., weighted=True), or return a tensor of bool",
            )
        return Weights(matrix, tokens.valid_BT)

    def is_only_ahead(self) -> bool:
        """True if it reads places alone, and names none but later tokens."""
        if not self.positional or self.needs:
            return False
        with torch.device("cpu"):  # transformers opens models on "meta", where tensors have no values
            tokens = Tokens(torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool))
            named_BQK = self.on(tokens).dense() > 0
        return bool(named_BQK.any()) and not named_BQK.tril().any()

    @property
    def _function(self) -> Callable[..., Predicate | Tensor]:
        return self.build.func if isinstance(self.build, partial) else self.build

    @property
    def summary(self) -> str:
        """The first line of its function's docstring."""
        return (self._function.__doc__ or "").strip().partition("\n")[0]

    @property
    def option_names(self) -> tuple[str, ...]:
        """The options that a plan may give."""
        return tuple(declared(self._function))

    def bound(self, options: Mapping[str, Any]) -> Pattern:
        """The pattern with options.

        Raises:
            UnknownName: an option that it does not have.
            PlanError: a value of another type or out of range.
        """
        chosen = read_options(self._function, options, f"pattern {self.name!r}")
        if not chosen:
            return self
        changes = self.option_facts(chosen) if self.option_facts else {}
        return replace(self, build=partial(self._function, **chosen), options=chosen, **changes)

    def __str__(self) -> str:
        """Its name with the options that a plan gives."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name
