"""Installing a plan in a model, and taking it out again.

`install` gives a model our attention function, a registry of its sites and the parameters that a plan adds, and proves by
a canary that all of it is reached.  `Handle.guide` makes the guidance of one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.attention.function import NAME, guided_attention
from guidance.compilation import compile_plan
from guidance.errors import GuidanceHadNoEffect, InputError, PlanError
from guidance.forward import Guidance, key_of
from guidance.mechanisms.adversary import PROPORTIONS
from guidance.mechanisms.fixed import Room
from guidance.models.adapters import adapt, switch
from guidance.models.added_heads import ProjectedAttention, add_pending, added_sites, place_of
from guidance.models.canary import evaluating, send, used_parameters
from guidance.patterns.catalogue import Pairs, Predicate
from guidance.patterns.features import FEATURES, TABLES, Cooccurrence, Tokens, Vocabulary
from guidance.plan import Guide, Plan
from guidance.sites import EXTRA, Site, find_sites


class Handle:
    """A plan installed in a model.

    Attributes:
        plan: the plan, as given.
        sites: the attention modules of the model, and the extra heads of the plan.
        work: what is to be done where; empty when every guide is off.
        tables: what patterns and rules look up beside tokens: ``cooccurrence``, ``importance``, ``masking_proportion``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        *,
        vocabulary: Vocabulary | None = None,
        decoder_vocabulary: Vocabulary | None = None,
        part: str = "model",
        tables: Mapping[str, Any] | None = None,
    ):
        self.model, self.plan, self.part = model, plan, part
        self.vocabulary, self.tables = vocabulary, dict(tables or {})
        self._decoder_vocabulary = decoder_vocabulary or vocabulary
        self.sites = find_sites(model)
        self.added = self._added_sites()
        self._matches: dict[int, Tensor] = {}
        self._undo: list[Any] = []
        self._check_tables()
        every = [site for sites in self.sites.values() for site in sites]
        added = [site for sites in self.added.values() for site in sites]
        self.work = compile_plan(plan, [*every, *added], part, self.tables.get("importance"))
        self.attacks = [(number, site) for site, work in self.work.items() for number, _ in work.attack]

    def _check_tables(self) -> None:
        """Raises InputError when a table is of another kind, or of another model."""
        for name, kinds in _TABLE_KINDS.items():
            if name in self.tables and not isinstance(self.tables[name], kinds):
                found = type(self.tables[name]).__name__
                raise InputError(f"the table {name} is a {found}", hint=f"{name}: {TABLES[name]}")
        for number, guide in enumerate(self.plan.guides):
            if PROPORTIONS in self.tables and guide.enabled and guide.part == self.part and PROPORTIONS in guide.tables:
                shape, layers = tuple(torch.as_tensor(self.tables[PROPORTIONS]).shape), self.layers_of(number)
                if len(shape) != 2 or not shape[0] or shape[1] != layers:
                    raise InputError(
                        f"the table {PROPORTIONS} is {shape}, not (steps, {layers}) as this model's layers",
                        hint="it comes from a run of a model with as many layers",
                    )

    def _added_sites(self) -> dict[nn.Module, tuple[Site, ...]]:
        """The heads that the plan adds; see `added_sites`."""
        if self.plan.pal is None or self.part != "model":
            return {}
        return added_sites(self.plan.pal, self.sites)

    @property
    def num_layers(self) -> int:
        """Layers of the stack that has most."""
        return max((site.layer for sites in self.sites.values() for site in sites), default=-1) + 1

    def layers_of(self, number: int) -> int:
        """Layers of the stack that a guide is about."""
        guide = self.plan.guides[number]
        kind = (guide.stack, guide.attention)
        return sum((site.stack, site.attention) == kind for sites in self.sites.values() for site in sites)

    def num_guided(self, number: int) -> int:
        """How many heads a guide is at work on, in all layers."""
        return sum(len(heads) for work in self.work.values() for n, heads in work.shares() if n == number)

    def learns(self, site: Site, number: int | None = None) -> bool:
        """The module of a site is in training and has parameters that move; those that a guide has added, if it is given."""
        module = next(module for module, sites in self.sites.items() if site in sites)
        owner = module if number is None else getattr(module, EXTRA)[key_of(self.plan, number)]
        return module.training and any(p.requires_grad for p in owner.parameters())

    def guide(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        step: int = 0,
        **columns: Tensor,
    ) -> Guidance:
        """The guidance of one batch.

        Args:
            input_ids: (B, T), what the model sees.
            attention_mask: (B, T), 0 at padding; all ones by default.
            decoder_input_ids, decoder_attention_mask: the same for a decoder whose heads are guided.
            step: optimizer steps so far, for masks that follow a schedule.
            columns: further token features, each (B, T); for the decoder with ``decoder_`` before their name.

        Raises:
            InputError: a feature of another shape or type, or one that does not exist.  One that the plan needs and the
                batch lacks is missed in the forward pass, where the message says which command builds it.
        """
        tokens: dict[str, Tokens] = {}
        mine = {name: column for name, column in columns.items() if not name.startswith("decoder_")}
        theirs = {name.removeprefix("decoder_"): column for name, column in columns.items() if name not in mine}
        for name, column in (*mine.items(), *theirs.items()):
            if name not in FEATURES:
                raise InputError(f"there is no feature {name!r}", hint=f"known: {', '.join(sorted(FEATURES))}")
            if not isinstance(column, Tensor):
                raise InputError(f"the feature {name!r} is a {type(column).__name__}, not a tensor (B, T)")
        if input_ids is not None:
            tokens["encoder"] = self._tokens(input_ids, attention_mask, mine, self.vocabulary)
        if decoder_input_ids is not None:
            tokens["decoder"] = self._tokens(
                decoder_input_ids, decoder_attention_mask, theirs, self._decoder_vocabulary
            )
        if not tokens:
            raise InputError(
                "there is no batch to guide", hint="give input_ids, and decoder_input_ids where a decoder is guided"
            )
        return Guidance(self, tokens, step)

    def at_inference(self, **batch: Tensor) -> dict[str, Guidance]:
        """The further argument of a model that is not trained: ``guidance`` that measures no loss, of a batch as `guide`
        takes it.  None where no guide shapes outputs, which leaves the model untouched."""
        if not self.plan.shapes_outputs:
            return {}
        return {"guidance": replace(self.guide(**batch, step=0), measuring=False)}

    def _tokens(
        self, ids_BT: Tensor, mask_BT: Tensor | None, columns: Mapping[str, Tensor], vocabulary: Vocabulary | None
    ) -> Tokens:
        if ids_BT.dim() not in (2, 3) or ids_BT.is_floating_point():
            raise InputError(
                f"input_ids are {ids_BT.dtype} {tuple(ids_BT.shape)}, not whole numbers (B, T)",
                hint="give the batch that the model gets",
            )
        if ids_BT.dim() == 3:  # (B, choices, T), which models of multiple choice flatten too
            ids_BT, mask_BT = ids_BT.flatten(0, 1), None if mask_BT is None else mask_BT.flatten(0, 1)
            columns = {name: column.flatten(0, 1) for name, column in columns.items()}
        valid_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT.bool()
        known = vocabulary.columns(ids_BT) if vocabulary else {}
        return Tokens(ids_BT, valid_BT, {**known, **columns}, self.tables)

    def probabilities(self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> dict[Site, Tensor]:
        """Where the heads look: per site, (B, H, Q, K), as in evaluation.

        Args:
            more: further arguments of `guide`; a decoder's inputs go to the model too.
        """
        guidance = self.guide(input_ids, attention_mask, **more)
        guidance.kept = {}
        inputs = {key: value for key, value in more.items() if key in ("decoder_input_ids", "decoder_attention_mask")}
        with evaluating(self.model), torch.no_grad():
            self.model(input_ids=input_ids, attention_mask=attention_mask, guidance=guidance, **inputs)
        return guidance.kept

    def alphas(self, step: int, total_steps: int) -> dict[str, float]:
        """The weight of each loss on heads that is at work, by label, after ``step`` of ``total_steps`` steps."""
        at_work = {n for work in self.work.values() for n, _ in (*work.probabilities, *work.scores)}
        return {
            label: guide.weight_for(self.layers_of(number)) * guide.factor(step, total_steps)
            for number, (label, guide) in enumerate(zip(self.plan.labels, self.plan.guides, strict=True))
            if number in at_work
        }

    def attack_alpha(self, step: int, total_steps: int) -> float:
        """The weight of the divergence after ``step`` of ``total_steps`` optimizer steps."""
        number = min(number for number, _ in self.attacks)
        guide = self.plan.guides[number]
        return guide.weight_for(self.layers_of(number)) * guide.factor(step, total_steps)

    def proportion(self, number: int, site: Site, step: int) -> float:
        """The share of units that a random mask switches off at a site."""
        guide = self.plan.guides[number]
        if PROPORTIONS not in guide.tables:
            return float(guide.how.proportion)
        table = torch.as_tensor(self.tables[PROPORTIONS])
        return float(table[min(step, len(table) - 1), site.layer])

    def count_matches(self, number: int, found: Tensor) -> None:
        """Remember how often a guide's pattern pointed somewhere; no synchronisation with the device."""
        found = found.detach().ceil().long()
        self._matches[number] = self._matches[number] + found if number in self._matches else found

    def vocabulary_of(self, guide: Guide) -> Vocabulary | None:
        """Where the pattern of a guide looks: cross-attention at the encoder's tokens."""
        own = guide.stack == "decoder" and guide.attention == "self"
        return self._decoder_vocabulary if own else self.vocabulary

    def matches(self) -> dict[str, int]:
        """How many keys each guide's pattern has named so far, by label."""
        return {self.plan.labels[number]: int(found) for number, found in self._matches.items()}

    def check_matches(self, earlier: Mapping[str, int] | None = None) -> None:
        """See `check_matches`, of this handle's with those of elsewhere."""
        check_matches({label: found + (earlier or {}).get(label, 0) for label, found in self.matches().items()})

    # installing and removing

    def install(self) -> None:
        """Make the model follow the plan; see `install`."""
        if self._shaping() and any("guide_required" in module.__dict__ for module in self.model.modules()):
            raise PlanError(
                "another plan shapes the outputs of this model already",
                hint="remove that plan first, or put the rows of both into one plan",
            )
        try:
            self._undo.append(adapt(self.model, guided_attention))
            self._undo.append(switch(self.model, NAME))
            for module, sites in self.sites.items():
                self._mark(module, sites)
            send(self.model, self.sites)
            self._add_heads()
            self._add_parameters()
            self._freeze()
            self._require()
            self.model.__dict__.setdefault("guide_handles", []).append(self)
            self._undo.append(self._forget)
        except Exception:
            self.remove()
            raise

    def _forget(self) -> None:
        installed: list[Handle] = self.model.__dict__["guide_handles"]
        installed.pop()
        if not installed:
            del self.model.__dict__["guide_handles"]

    def _mark(self, module: nn.Module, sites: tuple[Site, ...]) -> None:
        # another plan that was installed before this one still needs its sites
        if "guide_sites" not in module.__dict__:
            module.guide_sites = sites  # type: ignore[assignment]
            self._undo.append(partial(module.__dict__.pop, "guide_sites", None))

    def _add_heads(self) -> None:
        """Extra heads, as the plan's ``[pal]`` says."""
        for module, sites in self.added.items():
            pal = self.plan.pal
            assert pal is not None
            normalisation = place_of(self.model, module, pal.placement)
            added = ProjectedAttention(pal, _width(module))
            self._attach(module, "pal", added)
            self.sites[added] = added.guide_sites = sites
            # in a tuple, so that it is no second child, and a copy of the model has its own
            normalisation.__dict__["guide_pal"] = (added,)
            self._undo.append(partial(normalisation.__dict__.pop, "guide_pal", None))
            self._hook(normalisation.register_forward_pre_hook(add_pending))

    def _add_parameters(self) -> None:
        """The parameters of adversaries and gates, and the hooks that show layers to adversaries and added heads."""
        for module, sites in list(self.sites.items()):
            at_work = [self.work[site] for site in sites if site in self.work]
            for number, heads in dict.fromkeys(share for work in at_work for share in (*work.attack, *work.output)):
                how = self.plan.guides[number].how
                if hasattr(how, "module"):
                    if any(n == number and other != heads for w in at_work for n, other in (*w.attack, *w.output)):
                        raise PlanError(
                            f"guide {number + 1}: layers {sites[0].layer} to {sites[-1].layer} share their module, and with"
                            f" it the parameters of {self.plan.guides[number].mechanism}",
                            hint="select the same heads in all of them",
                        )
                    self._attach(module, key_of(self.plan, number), how.module(len(heads), _width(module)))
            if any(work.attack for work in at_work) or module in self.added:
                self._hook(module.register_forward_pre_hook(_tap, with_kwargs=True))

    def _attach(self, module: nn.Module, key: str, added: nn.Module) -> None:
        like = next(module.parameters())
        extra: nn.ModuleDict | None = getattr(module, EXTRA, None)
        if extra is None:
            extra = nn.ModuleDict()
            module.add_module(EXTRA, extra)
            self._undo.append(partial(delattr, module, EXTRA))
        if key in extra:
            raise PlanError("the model has the parameters of another plan already", hint="remove that plan first")
        extra[key] = added.to(like.device, like.dtype)
        added.train(module.training)
        self._undo.append(partial(extra.pop, key))

    def _freeze(self) -> None:
        """Freeze what the plan leaves without any use; data parallelism wants a gradient for all that can have one."""
        whole = any(
            sum(len(heads) for _, heads in self.work[site].replacement) == site.num_heads
            for sites in self.sites.values()
            for site in sites
            if site in self.work
        )
        if whole:
            own = {module: sites for module, sites in self.sites.items() if sites[0].attention != "pal"}
            plain = used_parameters(self.model, own)
            for parameter in plain - used_parameters(self.model, own, partial(_Outline, self)):
                parameter.requires_grad_(False)
                self._undo.append(partial(parameter.requires_grad_, True))

    def _require(self) -> None:
        """Where the plan shapes outputs, a call without guidance gets its own, and one that cannot is refused."""
        shaping = self._shaping()
        for module in shaping:
            module.guide_required = True  # type: ignore[assignment]
            self._undo.append(partial(module.__dict__.pop, "guide_required", None))
        if shaping:
            entries = {self.model, *([self.model.get_encoder()] if self.model.config.is_encoder_decoder else [])}
            for entry in entries:
                self._hook(entry.register_forward_pre_hook(self._supply, with_kwargs=True, prepend=True))

    def _shaping(self) -> list[nn.Module]:
        """The modules whose outputs the plan shapes."""
        return [
            module
            for module, sites in self.sites.items()
            if any(site in self.work and self.work[site].shapes_output for site in sites) or module in self.added
        ]

    def _supply(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if (guidance := kwargs.get("guidance")) is not None:
            if isinstance(guidance, Guidance) and guidance.handle.plan != self.plan:
                raise InputError(
                    "the guidance is of another plan than the one that shapes this model's outputs",
                    hint="make it by the handle of that plan, or remove that plan",
                )
            return None
        ids = kwargs.get("input_ids", args[0] if args else None)
        decoder_ids = kwargs.get("decoder_input_ids")
        if decoder_ids is None and module is self.model and kwargs.get("labels") is not None and self.shapes("decoder"):
            decoder_ids = self.model.prepare_decoder_input_ids_from_labels(labels=kwargs["labels"])  # type: ignore[operator]
        if ids is None and decoder_ids is None:
            raise InputError(
                "this model's plan shapes its outputs, and there are no input_ids to make its guidance from",
                hint="pass guidance=handle.guide(...)",
            )
        if ids is None and not self.shapes("decoder"):
            return None
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        guidance = self.guide(ids, mask if ids is not None else None, decoder_ids, kwargs.get("decoder_attention_mask"))
        return args, {**kwargs, "guidance": replace(guidance, measuring=False)}

    def shapes(self, stack: str) -> bool:
        """The plan shapes the outputs of heads of this stack, at inference too."""
        return any(site.stack == stack and work.shapes_output for site, work in self.work.items())

    def _hook(self, hook: Any) -> None:
        self._undo.append(hook.remove)

    def remove(self) -> None:
        """Give the model its own attention back, and take away what the plan added.

        Raises:
            InputError: another plan was installed after this one.
        """
        installed = self.model.__dict__.get("guide_handles", [])
        if self in installed and installed[-1] is not self:
            raise InputError("another plan was installed after this one", hint="remove that one first")
        while self._undo:
            self._undo.pop()()


_TABLE_KINDS: Mapping[str, tuple[type, ...]] = {
    "cooccurrence": (Cooccurrence,),
    "importance": (Tensor, Mapping),
}


class _Outline(Guidance):
    """A plan at work on a batch of which every pattern names all: to see which parameters the plan uses."""

    def __init__(self, handle: Handle, batch: Mapping[str, Any]) -> None:
        nowhere = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        given = {key: value for key, value in batch.items() if key != "use_cache"}
        super().__init__(handle, handle.guide(**given, mispredicted=nowhere, decoder_mispredicted=nowhere).tokens)

    def predicate(self, number: int, site: Site, room: Room) -> Predicate:
        return Pairs(room.allowed_BQK, torch.ones_like(room.allowed_BQK[:, 0]))


def check_matches(matches: Mapping[str, float]) -> None:
    """Raises GuidanceHadNoEffect when the pattern of a guide has matched nothing in the whole run.

    Args:
        matches: how many keys each guide's pattern has named, by label.
    """
    for label, found in matches.items():
        if not found:
            raise GuidanceHadNoEffect(
                f"the pattern of guide {label!r} matched no token in the whole run",
                hint="look at the text and the tokenizer, or leave the guide out of the plan",
            )


def _width(module: nn.Module) -> int:
    """The width of the hidden states that an attention module reads."""
    return next(int(m.in_features) for m in module.modules() if isinstance(m, nn.Linear))


def _tap(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before an attention module runs: show what it reads to its extra heads and to its adversary."""
    guidance = kwargs.get("guidance", getattr(module, "guidance", None))
    if not isinstance(guidance, Guidance):
        return args, kwargs
    states = args[0] if args else kwargs["hidden_states"]
    extra: Mapping[str, Any] = getattr(module, EXTRA, {})
    if "pal" in extra:
        mask = guidance.padding("encoder")

        def attend(site: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
            return guided_attention(site, query, key, value, mask, dropout, guidance=guidance)[0]

        extra["pal"].pending = extra["pal"](states, attend)
    if guidance.attacking and "guidance" in kwargs:
        kwargs = {**kwargs, "layer_input": states}
    return args, kwargs


def install(
    model: PreTrainedModel,
    plan: Plan,
    tokenizer: Any = None,
    *,
    decoder_tokenizer: Any = None,
    part: str = "model",
    tables: Mapping[str, Any] | None = None,
    training: bool = True,
) -> Handle:
    """Make a Hugging Face model follow a plan.  Reversible; without learned extras, ``state_dict`` keeps its keys.

    Args:
        tokenizer: a Hugging Face tokenizer, for patterns that look for certain tokens.
        decoder_tokenizer: the same for a decoder with a vocabulary of its own.
        part: the guides of this part of the plan are installed.
        tables: what patterns and rules look up, by name; see `Handle`.
        training: the losses of the plan will be asked for; without, what only they read need not be given.

    Raises:
        UnsupportedModel: the attention of this model cannot be guided.
        PlanError: a guide names a layer or head that the model lacks, selects none, or contradicts another one; or
            something it needs is not given.  The guide is numbered.

    Example:
        >>> handle = install(model, Plan.load("preset:ag"), tokenizer)
        >>> guidance = handle.guide(batch["input_ids"], batch["attention_mask"])
        >>> output = model(**batch, guidance=guidance)
        >>> (output.loss + guidance.loss(step, total_steps)).backward()
    """
    vocabulary, decoder_vocabulary = (
        Vocabulary.from_tokenizer(given) if given is not None else None for given in (tokenizer, decoder_tokenizer)
    )
    handle = Handle(model, plan, vocabulary=vocabulary, decoder_vocabulary=decoder_vocabulary, part=part, tables=tables)
    for label, what, name in _missing(handle, training):
        hint = FEATURES[name].source if what == "feature" else TABLES.get(name)
        raise PlanError(f"guide {label!r} needs the {what} {name}", hint=hint)
    handle.install()
    return handle


def _missing(handle: Handle, training: bool) -> Iterator[tuple[str, str, str]]:
    """Tables that were not given, and features of the vocabulary where there is no tokenizer."""
    for label, guide in zip(handle.plan.labels, handle.plan.guides, strict=True):
        if guide.part != handle.part or not guide.enabled or (guide.acts.is_loss and not training):
            continue
        for name in guide.tables:
            if name not in handle.tables:
                yield label, "table", name
        for name in guide.wish.needs if guide.wish else ():
            if name in Vocabulary.FEATURES and handle.vocabulary_of(guide) is None:
                yield label, "feature", name
