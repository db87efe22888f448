"""A generator beside a model: who fills in what is masked, for a model that judges it, or that is guided where it is wrong.

A transformer is trained for it beside the model, in a pass of its own over all micro-batches, so that what it gets wrong in
the whole batch is known when the model's turn comes.  It is an ELECTRA whatever family the model is of: that one needs
nothing of the model but its vocabulary, and whole tokens of a padded batch mean the same to every family.  The unigram
distribution needs no training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from guidance.checkpoint import CONFIG_FILE, load_model
from guidance.errors import InputError, PlanError
from guidance.forward import Guidance
from guidance.objectives.masked_lm import Masker, masked_lm_loss
from guidance.objectives.replaced_token import draw
from guidance.objectives.selection import logits_at, put_at
from guidance.plan import Guide, Plan
from pipelines.storage.artifacts import Artifact
from pipelines.training.models import check_lengths, check_same_tokenizer, configuration
from pipelines.training.objectives import Given
from pipelines.training.objectives.guided import Guided, Inputs
from pipelines.training.objectives.masked_batches import FilledBatch

FOLDER = "generator/"
"""Where a model folder keeps its generator."""

Kind = Literal["none", "unigram", "transformer"]


def kind_of(plan: Plan, config: Any) -> Kind:
    """What fills in, with ``auto`` resolved: a transformer where the objective or a guide needs a generator."""
    if config.generator != "auto":
        kind: Kind = config.generator
        return kind
    needed = config.objective == "electra" or any(
        guide.enabled and (guide.part == "generator" or guide.acts.place == "scores") for guide in plan.guides
    )
    return "transformer" if needed else "none"


def check_guides(plan: Plan, config: Any, source: str) -> None:
    """Raises PlanError when a guide cannot work beside the generator that there is."""
    kind = kind_of(plan, config)
    for number, guide in enumerate(plan.guides, 1):
        if reason := _refusal(guide, config.objective, kind):
            hint = "--objective electra" if guide.part == "discriminator" else None
            hint = "--generator transformer, or unigram" if guide.acts.place == "scores" and kind == "none" else hint
            raise PlanError(f"{source}, guide {number} ({guide.label}) {reason}", hint=hint)


def _refusal(guide: Guide, objective: str, kind: Kind) -> str:
    """Why a guide cannot work; empty where it can."""
    if guide.part == "discriminator" and objective != "electra":
        return f"is for a discriminator, and {objective} trains none"
    if guide.part == "generator":
        if kind != "transformer":
            return f"is for a generator, and --generator {kind} has no heads"
        if guide.acts.place == "scores":
            return f"is for a generator, and {guide.mechanism} is about heads that read what it got wrong"
        if guide.acts.place == "attack":
            return f"is for a generator, and the second pass, in which {guide.mechanism} is at work, is the model's"
    if guide.acts.place == "scores":
        return f"acts where a generator mis-predicts, and --generator {kind} trains none" if kind == "none" else ""
    if guide.wish and "original" in guide.wish.needs:
        return f"would tell the model what it is asked: a {guide.mechanism} may not read the tokens of the text"
    return ""


def plan_of(plan: Plan, *parts: str) -> Plan:
    """The guides of some parts, as those of a model on its own; added heads are the model's."""
    guides = tuple(replace(guide, part="model") for guide in plan.guides if guide.part in parts)
    return Plan(guides, plan.pal if "model" in parts else None)


# the network


def build_generator(given: Given, model: Any, *, shares_embeddings: bool = False) -> Any:
    """A new generator for a model, or the one that lies in ``generator/`` beside the model to start from.

    Args:
        shares_embeddings: both have one matrix of token embeddings (Clark et al. 2020, section 3.2).

    Raises:
        InputError: the one that is there knows other tokens than the model, or is too short.
    """
    from transformers import AutoModelForMaskedLM

    generator = _continued(given, AutoModelForMaskedLM)
    vocab_size, width = model.get_input_embeddings().weight.shape
    if generator is None:
        sizes = generator_sizes(model.config, given.config.generator_size)
        own = {"vocab_size": vocab_size, "embedding_size": width if shares_embeddings else sizes[1]}
        # another stream of random numbers than the model's, whose first layers it would resemble
        torch.manual_seed(int(np.random.SeedSequence([given.config.seed, 1]).generate_state(1)[0]))
        config = configuration(given.config, "electra", given.tokenizer, given.max_length, sizes, **own)
        generator = AutoModelForMaskedLM.from_config(config)
    embeddings = generator.get_input_embeddings()
    if len(embeddings.weight) != vocab_size:
        raise InputError(
            f"the generator to start from knows {len(embeddings.weight)} tokens, the model {vocab_size}",
            hint="take its folder generator/ away, and a new one is made",
        )
    check_lengths(generator.config, {"train": given.train, "valid": given.valid}, given.sequences.reference)
    if shares_embeddings:
        if embeddings.weight.shape[1] != width:
            raise InputError(
                f"the generator to start from has embeddings of {embeddings.weight.shape[1]} numbers, the model of {width}",
                hint="take its folder generator/ away, and a new one is made",
            )
        generator.set_input_embeddings(model.get_input_embeddings())
        generator.tie_weights()
    return generator


def generator_sizes(config: Any, share: float) -> tuple[int, int, int, int]:
    """Layers, width, heads and feed-forward width of the generator of a model (Xing et al. 2020: a third of its size).

    As deep as the model, with ``share`` of its heads and, up to whole heads, of its width.

    Example:
        A third of 12 layers of 12 heads, 768 wide, are 12 layers of 4 heads, 256 wide, 1024 in between.
    """
    heads = max(1, round(share * config.num_attention_heads))
    width = heads * max(1, round(share * config.hidden_size / heads))
    return config.num_hidden_layers, width, heads, 4 * width


def _continued(given: Given, auto_class: Any) -> Any:
    """The generator beside a model to start from; None where there is none."""
    init = given.init
    if given.folder is None:
        return None
    folder = given.folder / FOLDER
    if not (folder / CONFIG_FILE).exists():
        return None
    check_same_tokenizer(folder, given.tokenizer)
    generator = load_model(folder, auto_class, plan_of(given.plan, "generator"))
    if isinstance(init, Artifact) and not init.in_place():
        raise InputError(f"{init.path} was built again while it was read", hint="run again")
    return generator


class Pair(nn.Module):
    """A model and its generator as one module, for data parallelism; a call is the model's unless it names its part."""

    def __init__(self, model: Any, generator: Any) -> None:
        super().__init__()
        self.model, self.generator = model, generator

    def forward(self, part: str = "model", **inputs: Any) -> Any:
        return getattr(self, part)(**inputs)

    def get_output_embeddings(self) -> Any:
        """Those of the model; see `guidance.objectives.selection.logits_at`."""
        return self.model.get_output_embeddings()

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """The tensors of each that are stored under another name; what both share is stored with each."""
        return {
            f"{part}.{name}": f"{part}.{other}"
            for part in ("model", "generator")
            for name, other in getattr(getattr(self, part), "all_tied_weights_keys", {}).items()
        }


# the pass


class Generator:
    """The pass in which a generator learns, and fills in; see `pipelines.training.loop.Pass`.

    Its loss is the mean over the masked tokens of the whole batch (Xing et al. 2020, equation 5).
    """

    LOSSES = ("generator", "accuracy/generator", "share/mispredicted")

    def __init__(
        self,
        given: Given,
        network: Any,
        masker: Masker,
        inputs: Callable[[FilledBatch], Inputs],
    ) -> None:
        """
        Args:
            inputs: what is masked in a batch; every one of these tokens is masked here.
        """
        self.network, self.mask_id, self.inputs = network, masker.mask_id, inputs
        plan, folder = plan_of(given.plan, "generator"), given.folder and given.folder / FOLDER
        self.guided = Guided(network, plan, given.tokenizer, given.tables, prefix=FOLDER, folder=folder)
        self.ordinary_W = torch.from_numpy(masker.ordinary)

    def counts(self, batch: FilledBatch) -> dict[str, float]:
        own = dict.fromkeys(self.LOSSES, batch.chosen)
        return {**own, **self.guided.counts(batch.examples, batch.chosen), "tokens": batch.tokens}

    def losses(self, model: nn.Module, batch: FilledBatch, step: int) -> dict[str, Tensor]:
        inputs = self._masked(batch)
        guidance = self._guide(inputs, step)
        return {**self._fill(model, batch, inputs, self.guided.forward(guidance)), **self.guided.losses(guidance)}

    def validate(self, model: nn.Module, batch: FilledBatch) -> dict[str, Tensor]:
        """Its own losses of a validation batch, which is filled in."""
        inputs = self._masked(batch)
        return self._fill(model, batch, inputs, self.guided.handle.at_inference(**inputs.model, **inputs.columns))

    def weights(self, step: int) -> dict[str, float]:
        """The factors of its losses."""
        return {"generator": 1.0, **self.guided.weights(step)}

    def _masked(self, batch: FilledBatch) -> Inputs:
        inputs = self.inputs(batch)
        ids_BT = put_at(inputs.model["input_ids"], inputs.places_N, self.mask_id)
        read = {"input_ids": ids_BT, "attention_mask": inputs.model["attention_mask"]}
        return replace(inputs, model=read)

    def _guide(self, inputs: Inputs, step: int) -> Guidance:
        return self.guided.handle.guide(**inputs.model, step=step, **inputs.columns)

    def _fill(
        self, model: nn.Module, batch: FilledBatch, inputs: Inputs, extra: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        logits_NV = logits_at(model, inputs.places_N, part="generator", **inputs.model, **extra).logits
        device, labels_N = logits_NV.device, inputs.labels_N
        drawn_N = draw(logits_NV, batch.uniform_N.to(device), self.ordinary_W.to(device))
        batch.fill(drawn_N)
        found = (
            masked_lm_loss(logits_NV, labels_N),
            (logits_NV.argmax(-1) == labels_N).sum().double(),
            (drawn_N != labels_N).sum().double(),
        )
        return dict(zip(self.LOSSES, found, strict=True))
