"""Installing a plan in a model, and taking it out again.

`install` gives a model our attention function, a table of its sites and the parameters that a plan adds, and proves with a
canary that all of it is reached.  `Handle.guide` makes the guidance of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.attention.backends import HeadPath, choose_backends
from guidance.attention.function import NAME, guided_attention
from guidance.attention.mixing import Mixing, guidance_of
from guidance.batch import BatchGuidance
from guidance.calls import BeforeCall, guide_batch, keep_prefix, keep_source, tokens_of
from guidance.errors import InputError, PlanError, UnsupportedModel
from guidance.generation import generate
from guidance.guided_model import PLAN_KEY, PROGRESS_KEY, GuidedModel, installed_in, leading
from guidance.models.adapters import adapt, switch
from guidance.models.added_heads import ProjectedHeads, add_pending, add_to_output, place_of
from guidance.models.canary import evaluating, send, used_parameters
from guidance.models.families import supported
from guidance.models.methods import drop_marker, refuse_implementation, replace_forward, save_pretrained
from guidance.patterns.features import FEATURES, INPUTS, TABLES, Vocabulary, is_feature
from guidance.patterns.predicates import AttentionScope, Pairs, Predicate
from guidance.plan import Plan
from guidance.site_plans import HeadAssignment
from guidance.sites import EXTRA, Site, is_added


class Handle(GuidedModel):
    """A plan installed in a model: what `install` returns.

    Attributes:
        forward: ``model.forward(...)`` follows the plan as ``model(...)`` does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        *,
        backend: str | Mapping[HeadPath, str] = "auto",
        forward: bool = False,
        **more: Any,
    ) -> None:
        """Resolve the plan, with the arguments of `GuidedModel`; `install` also puts it into the model."""
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedModel(
                f"{type(model).__name__} is not a model of transformers",
                hint="give the model that it wraps: ddp.module, or peft_model.get_base_model()",
            )
        super().__init__(model, plan, **more)
        self.backends = choose_backends(backend, self.site_plans.values())
        self.forward = forward
        # functions of modules and bound methods, so that a model can be copied and pickled with its plan
        self._undo: list[Any] = []

    def guide(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        step: int = 0,
        **columns: Tensor,
    ) -> BatchGuidance:
        """The guidance of one batch.

        Args:
            input_ids: (B, T), what the model sees.
            attention_mask: (B, T), 0 at padding; all ones by default.
            decoder_input_ids, decoder_attention_mask: the same for a decoder whose heads are guided.
            step: optimizer steps so far, for masks that follow a schedule.
            columns: further token features, each (B, T); for the decoder with ``decoder_`` before their name.  Other inputs
                of the model, such as ``token_type_ids`` and ``labels``, may be among them and are left alone.  A plan that
                reads no ids takes ``inputs_embeds`` in place of them.

        Raises:
            InputError: the plan was removed; or a feature that the plan needs is not given, does not exist, or has another
                shape or type.
        """
        values = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask)
        return guide_batch(self, {**dict(zip(INPUTS, values, strict=False)), **columns}, step=step)

    def at_inference(self, **batch: Tensor) -> dict[str, BatchGuidance]:
        """The further argument of a model that is evaluated: ``guidance`` that measures no loss.

        It is empty if no guide shapes outputs, so that the model stays untouched.

        Args:
            batch: what `guide` takes.  Features that only losses read need not be given.
        """
        return {"guidance": guide_batch(self, batch, measuring=False)} if self.plan.shapes_outputs else {}

    def probabilities(self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> dict[Site, Tensor]:
        """Where the heads look: per site, (B, H, Q, K), as in evaluation.

        Args:
            more: further arguments of `guide`, and of the model: ``token_type_ids``, the inputs of a decoder.
        """
        maps: dict[Site, Tensor] = {}
        self.watch(maps.__setitem__, input_ids, attention_mask, **more)
        return maps

    def watch(
        self,
        watcher: Callable[[Site, Tensor], object],
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **more: Any,
    ) -> None:
        """Show a function where the heads look, one site after the other, so that only the maps of one are in memory.

        Args:
            watcher: called with each site and its probabilities, (B, H, Q, K), as in evaluation.
            more: further arguments of `guide`, and of the model: ``token_type_ids``, the inputs of a decoder.
        """
        step = more.pop("step", 0)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **more}
        guidance = guide_batch(self, batch, step=step, measuring=False)
        guidance.recorded, guidance.watcher = {}, watcher
        inputs = {name: value for name, value in batch.items() if not is_feature(name)}
        with evaluating(self.model), torch.no_grad():
            self.model(**inputs, guidance=guidance)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that the plan added to the model, for optimizer groups of their own."""
        for name, parameter in self.model.named_parameters():
            if is_added(name):
                yield parameter

    def install(self, head_widths: Mapping[nn.Module, int] | None = None) -> None:
        """Put the plan into the model; `guidance.install` has done so already.

        Args:
            head_widths: the width of the heads of each attention module.  Given them, it makes no forward pass, since a model may
                have no weights yet: the canary is not sent, and no parameters are frozen.

        Raises:
            PlanError: another plan shapes the outputs of this model already, or has added parameters of the same name.
            UnsupportedModel: guidance does not reach every site.
        """
        if self.is_installed:
            raise InputError("this plan is installed already", hint="handle.remove() takes it out")
        if self.shaping and any("guide_required" in module.__dict__ for module in self.model.modules()):
            raise PlanError(
                "another plan shapes the outputs of this model already",
                hint="remove that plan first, or put the rows of both into one plan",
            )
        if self.model.config._attn_implementation == NAME and not installed_in(self.model):
            raise InputError(
                "this model shares its configuration object with a guided one, whose plan stands in it",
                hint="build each model from an object of its own: copy.deepcopy(config)",
            )
        self.is_installed = True
        try:
            self._undo.append(adapt(self.model, guided_attention))
            self._undo.append(switch(self.model, NAME))
            for module, sites in self.sites.items():
                self._mark(module, "guide_sites", sites)
            if head_widths is None:
                canary = send(self.model, self.sites)
                self._refuse_shared_keys(canary.shared_keys)
            self._add_heads()
            self._add_parameters(canary.head_widths if head_widths is None else head_widths)
            if head_widths is None:
                self._freeze()
            self._require()
            self.model.__dict__.setdefault("guide_handles", []).append(self)
            self._undo.append(self._leave)
            _carry(self.model)
        except Exception:
            self.remove()
            raise

    def _refuse_shared_keys(self, heads_per_key: Mapping[nn.Module, int]) -> None:
        """Raises PlanError if a guide changes the keys of single heads where several heads share each key."""
        for module, count in heads_per_key.items():
            for site in self.sites[module]:
                for assignment in self.site_plans[site].assignments if site in self.site_plans else ():
                    if "key" in assignment.mechanism.places:
                        raise PlanError(
                            f"guide {assignment.number + 1} ({self.plan.labels[assignment.number]}) mixes keys of single"
                            f" heads, and {count} heads share each key at {site.name}",
                            hint='of = ["query"], or ["value"]: there every head mixes what it reads',
                        )

    def _leave(self) -> None:
        installed = installed_in(self.model)
        installed.pop()
        if not installed:
            del self.model.__dict__["guide_handles"]
        _carry(self.model)

    def _mark(self, module: nn.Module, name: str, value: Any) -> None:
        # another plan that was installed before this one still needs its marks
        if name not in module.__dict__:
            module.__dict__[name] = value
            self._undo.append(partial(_forget, module, name))

    def _add_heads(self) -> None:
        """Extra heads, as the plan's ``[pal]`` says."""
        for module, sites in self.added.items():
            pal = self.plan.pal
            assert pal is not None
            joined, is_after = place_of(self.model, module, pal.placement)
            added = ProjectedHeads(pal, _width(module))
            self._attach(module, "pal", added)
            self.sites[added] = added.guide_sites = sites
            self._undo.append(partial(_leave_out, self, added))
            # in a tuple, so that it does not count as a second child module, and is copied with the model
            self._mark(joined, "guide_pal", (added,))
            if is_after:
                self._hook(joined.register_forward_hook(add_to_output))
            else:
                self._hook(joined.register_forward_pre_hook(add_pending))

    def _add_parameters(self, head_widths: Mapping[nn.Module, int]) -> None:
        """The parameters of mechanisms, and the hooks that show what layers read to mechanisms and to added heads.

        Args:
            head_widths: by module; added heads are not there.
        """
        for module, sites in list(self.sites.items()):
            mine = [a for site in sites if site in self.site_plans for a in self._in_order_of_drawing(site)]
            for assignment in dict.fromkeys(mine):
                number, heads = assignment.number, assignment.heads
                added = assignment.mechanism.site_module(len(heads), _width(module), head_widths.get(module, 0))
                if added is None:
                    continue
                if assignment.mechanism.per_call and len(sites) > 1:
                    if self.parameters_of(module, assignment.key) is not None:
                        continue  # those of all calls were added with the first
                    added = self._for_each_call(sites, number, _width(module), head_widths.get(module, 0))
                elif any(other.number == number and other.heads != heads for other in mine):
                    raise PlanError(
                        f"guide {number + 1}: layers {sites[0].layer} to {sites[-1].layer} share their module, and with"
                        f" it the parameters of {self.plan.guides[number].mechanism}",
                        hint="select the same heads in all of them",
                    )
                added.__dict__["guide_decays"] = assignment.mechanism.decays
                self._attach(module, assignment.key, added)
            if module in self.added:
                self._hook(module.register_forward_pre_hook(_run_added_heads, with_kwargs=True))
            if places := {place for assignment in mine for place in assignment.mechanism.places}:
                for handle in Mixing(self.model, module, sites[0].name, places).hooks():
                    self._hook(handle)
            if any(assignment.mechanism.needs_layer_input for assignment in mine):
                self._hook(module.register_forward_pre_hook(_show_layer_input, with_kwargs=True))

    def _for_each_call(self, sites: Sequence[Site], number: int, width: int, head_width: int) -> nn.ModuleList:
        """What a guide adds to each call of a shared module; an empty module for calls in which it does not act."""
        modules = []
        for site in sites:
            plan = self.site_plans.get(site)
            own = next((a for a in plan.assignments if a.number == number), None) if plan else None
            added = own.mechanism.site_module(len(own.heads), width, head_width) if own else None
            modules.append(nn.Module() if added is None else added)
        return nn.ModuleList(modules)

    def _in_order_of_drawing(self, site: Site) -> list[HeadAssignment]:
        """The assignments of a site in the order in which their parameters are drawn: attacks first."""
        plan = self.site_plans[site]
        return sorted(plan.assignments, key=lambda a: "attack" not in a.mechanism.contributes)

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
        """Freeze the parameters that the plan leaves unused: data parallelism waits for a gradient of all others."""
        whole = any(
            sum(len(a.heads) for a in plan.making("replace") if a.number not in plan.fading) == plan.num_heads
            for plan in self.site_plans.values()
        )
        if whole:
            own = {module: sites for module, sites in self.sites.items() if sites[0].attention != "pal"}
            plain = used_parameters(self.model, own)
            for parameter in plain - used_parameters(self.model, own, partial(_EveryKey, self)):
                parameter.requires_grad_(False)
                self._undo.append(partial(_train, parameter))

    def _require(self) -> None:
        """Give guidance to calls without it, and refuse calls and methods that would lose it."""
        model: Any = self.model
        for module in self.shaped_modules():
            self._mark(module, "guide_required", True)
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                self._mark(part, "save_pretrained", partial(save_pretrained, model, part))
                self._mark(part, "set_attn_implementation", partial(refuse_implementation, part))
        if hasattr(model, "generate"):
            self._mark(model, "generate", partial(generate, model))
        if self.shaping and self.forward:
            self._undo.append(replace_forward(model))
        self._hook(model.register_load_state_dict_pre_hook(drop_marker))
        for entry in {model, *([model.get_encoder()] if model.config.is_encoder_decoder else [])}:
            self._hook(entry.register_forward_pre_hook(BeforeCall(self, entry), with_kwargs=True, prepend=True))
            if entry is model and self.reads_prefix:
                self._hook(entry.register_forward_hook(keep_prefix, with_kwargs=True))
            if entry is not model and self.shapes("decoder", "cross"):
                self._hook(entry.register_forward_hook(keep_source, with_kwargs=True))

    def _hook(self, hook: Any) -> None:
        self._undo.append(hook.remove)

    def remove(self) -> None:
        """Give the model its own attention back, and take away what the plan added, also in the configuration.

        Raises:
            InputError: another plan was installed after this one.
        """
        installed = installed_in(self.model)
        if self in installed and installed[-1] is not self:
            raise InputError("another plan was installed after this one", hint="remove that one first")
        while self._undo:
            self._undo.pop()()
        self.is_installed = False


class _EveryKey(BatchGuidance):
    """Guidance whose patterns name every key, to see which parameters a plan uses whatever the batch."""

    def __init__(self, handle: Handle, batch: Mapping[str, Any]) -> None:
        nowhere = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        inputs = {key: value for key, value in batch.items() if key != "use_cache"}
        inputs |= {"mispredicted": nowhere, "decoder_mispredicted": nowhere}
        super().__init__(handle, tokens_of(handle, inputs), strengths=dict.fromkeys(handle.fading, torch.tensor(0.5)))

    def predicate(self, number: int, site: Site, scope: AttentionScope) -> Predicate:
        return Pairs(scope.allowed_BQK, torch.ones_like(scope.allowed_BQK[:, 0]))

    def _count(self, number: int, matches: Tensor) -> None:
        """Nothing: these matches say nothing of a batch that the model is given."""


def _carry(model: PreTrainedModel) -> None:
    """Put the text of the leading plan into the configuration, which every way of saving a model saves too."""
    handle = leading(model)
    if handle is None or handle.progress is None:
        model.config.__dict__.pop(PROGRESS_KEY, None)
    else:
        setattr(model.config, PROGRESS_KEY, list(handle.progress))
    if handle is not None and (text := handle.plan.dumps()):
        setattr(model.config, PLAN_KEY, text)
    else:
        model.config.__dict__.pop(PLAN_KEY, None)


def _leave_out(handle: Handle, module: nn.Module) -> None:
    # a function of the handle, and no method of its dictionary, so that a copied handle changes its own
    del handle.sites[module]


def _forget(module: nn.Module, name: str) -> None:
    module.__dict__.pop(name, None)


def _train(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(True)


def _width(module: nn.Module) -> int:
    """The width of the hidden states that an attention module reads."""
    if isinstance(width := getattr(getattr(module, "config", None), "hidden_size", None), int):
        return width
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            return int(layer.in_features)
    raise UnsupportedModel(
        f"{type(module).__name__}: its projections are no torch.nn.Linear", hint=f"supported: {supported()}"
    )


def _run_added_heads(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Before an attention module runs, let the extra heads beside it compute what they will add."""
    guidance = guidance_of(module, kwargs)
    if guidance is None:
        return
    mask, added = guidance.padding("encoder"), getattr(module, EXTRA)["pal"]

    def attend(site: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        return guided_attention(site, query, key, value, mask, dropout, guidance=guidance)[0]

    added.pending = added(args[0] if args else kwargs["hidden_states"], attend)


def _show_layer_input(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Before an attention module runs, pass its input on to the attention function."""
    if guidance_of(module, kwargs) is None or "guidance" not in kwargs:
        return None  # DeBERTa's adapter passes it on by itself
    return args, {**kwargs, "layer_input": args[0] if args else kwargs["hidden_states"]}


def install(
    model: PreTrainedModel,
    plan: Plan,
    tokenizer: Any = None,
    *,
    decoder_tokenizer: Any = None,
    part: str = "model",
    columns: Iterable[str] | None = None,
    tables: Mapping[str, Any] | None = None,
    training: bool = True,
    backend: str | Mapping[HeadPath, str] = "auto",
    progress: tuple[int, int] | None = None,
    forward: bool = False,
) -> Handle:
    """Make a Hugging Face model follow a plan.

    `Handle.remove` undoes it.  ``state_dict`` keeps its keys unless the plan adds parameters.

    Args:
        tokenizer: a Hugging Face tokenizer, for patterns that look for certain tokens.
        decoder_tokenizer: the same for a decoder with a vocabulary of its own.
        part: the part of the plan that is about this model; guides of other parts are left out.
        columns: the names of the features that every batch will have, those of the decoder with ``decoder_`` before them.
            Other names are ignored.  With it, a feature that the plan needs and no batch will have is an error here instead
            of with the first batch.  `GuidedModel.needs` says what a plan needs.
        tables: what patterns and rules look up, by name; see `GuidedModel`.
        training: the losses of the plan will be asked for.  If not, what only they read need not be given.
        backend: what computes heads: ``auto``, or a name in `guidance.attention.backends.BACKENDS`; or such a name for each of some
            paths, ``{"plain": "varlen"}``.  A backend that cannot compute a head of the plan is refused.
        progress: how far training is, for guides that fade: see `GuidedModel.advance`.
        forward: the model will be called as ``model.forward(...)``, which passes hooks by, as sentence-transformers calls it.

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
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r} is no plan", hint='guidance.Plan.load("preset:ag"), or guidance.Plan((guide,))')
    vocabulary, decoder_vocabulary = (
        Vocabulary.from_tokenizer(own) if own is not None else None for own in (tokenizer, decoder_tokenizer)
    )
    handle = Handle(
        model,
        plan,
        vocabulary=vocabulary,
        decoder_vocabulary=decoder_vocabulary,
        part=part,
        tables=tables,
        backend=backend,
        forward=forward,
    )
    if progress is not None:
        handle.advance(*progress)
    known = None if columns is None else {columns} if isinstance(columns, str) else set(columns)
    _check_given(handle, training, known)
    handle.install()
    return handle


def _check_given(handle: Handle, training: bool, columns: Collection[str] | None) -> None:
    """Raises PlanError for a table that was not given, and for a feature that is not among the columns, if these are known."""
    for number, guide in handle.guides.items():
        if guide.enabled and (training or not (guide.is_loss or number in handle.over)):
            for name in guide.tables:
                if name not in handle.tables:
                    label = handle.plan.labels[number]
                    raise PlanError(f"guide {label!r} needs the table {name}", hint=TABLES.get(name))
    for name, label in handle.needs(training=training).items():
        feature = name.removeprefix("decoder_")
        if columns is None and feature in Vocabulary.FEATURES:
            declare = f"; if every batch has it, say so by columns=[{name!r}]"
            raise PlanError(f"guide {label!r} needs the feature {name}", hint=FEATURES[feature].source + declare)
        if columns is not None and name not in columns:
            reason = f"guide {label!r} needs the feature {name}, which is not among the columns"
            raise PlanError(reason, hint=FEATURES[feature].source)
