"""A transformer generator beside a model: it fills in masked tokens, and is trained with the model.

The model then judges the filled-in tokens (ELECTRA), or is guided where the generator mis-predicts (McMisP).  The generator
has its own pass over all micro-batches before the model's pass, because the model's losses are divided by the number of
mis-predictions in the whole batch.  It is an ELECTRA generator for every family of models, since it shares only the
vocabulary and the padded token ids with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guidance.checkpoint import CONFIG_FILE, load_model
from guidance.errors import InputError
from guidance.objectives.masked_lm import Masker, cross_entropy
from guidance.objectives.replaced_token import draw
from guidance.objectives.selection import logits_at, put_at
from pipelines.storage.artifacts import Artifact
from pipelines.training.learner import Setup
from pipelines.training.learners.guided import Guides, Inputs
from pipelines.training.learners.masked_batches import FilledBatch
from pipelines.training.model_checks import check_lengths, check_same_tokenizer
from pipelines.training.models import configuration
from pipelines.training.plan_checks import GENERATOR_FOLDER

# the network


def build_generator(setup: Setup, model: Any, *, shares_embeddings: bool = False) -> Any:
    """A new generator for a model, or the one in the folder ``generator/`` of the model to start from.

    Args:
        shares_embeddings: model and generator share one matrix of token embeddings (Clark et al. 2020, section 3.2).

    Raises:
        InputError: the existing generator has another vocabulary than the model, or too few positions.
    """
    from transformers import AutoModelForMaskedLM

    generator = _continued(setup, AutoModelForMaskedLM)
    vocab_size, width = model.get_input_embeddings().weight.shape
    if generator is None:
        sizes = generator_sizes(model.config, setup.config.generator_size)
        own = {"vocab_size": vocab_size, "embedding_size": width if shares_embeddings else sizes[1]}
        # a seed of its own, or its first layers would start with the weights of the model's
        torch.manual_seed(int(np.random.SeedSequence([setup.config.seed, 1]).generate_state(1)[0]))
        config = configuration(setup.config, "electra", setup.tokenizer, setup.max_length, sizes, **own)
        generator = AutoModelForMaskedLM.from_config(config)
    embeddings = generator.get_input_embeddings()
    if len(embeddings.weight) != vocab_size:
        raise InputError(
            f"the generator to start from has {len(embeddings.weight)} tokens, the model has {vocab_size}",
            hint="remove its folder generator/, and a new generator is made",
        )
    check_lengths(generator.config, {"train": setup.train, "valid": setup.valid}, setup.sequences.reference)
    if shares_embeddings:
        if embeddings.weight.shape[1] != width:
            raise InputError(
                f"the generator to start from has embeddings of width {embeddings.weight.shape[1]}, the model of width {width}",
                hint="remove its folder generator/, and a new generator is made",
            )
        generator.set_input_embeddings(model.get_input_embeddings())
        generator.tie_weights()
    return generator


def generator_sizes(config: Any, share: float) -> tuple[int, int, int, int]:
    """Layers, width, heads and feed-forward width of the generator of a model (Xing et al. 2020: a third of its size).

    As deep as the model, with ``share`` of its heads and of its width, rounded to whole heads.

    Example:
        A third of a model of 12 layers, 12 heads and width 768 has 12 layers, 4 heads, width 256 and feed-forward width 1024.
    """
    heads = max(1, round(share * config.num_attention_heads))
    width = heads * max(1, round(share * config.hidden_size / heads))
    return config.num_hidden_layers, width, heads, 4 * width


def _continued(setup: Setup, auto_class: Any) -> Any:
    """The generator of the model to start from; None if it has none."""
    init = setup.init
    if setup.folder is None:
        return None
    folder = setup.folder / GENERATOR_FOLDER
    if not (folder / CONFIG_FILE).exists():
        return None
    check_same_tokenizer(folder, setup.tokenizer)
    generator = load_model(folder, auto_class, setup.plan.for_part("generator"))
    if isinstance(init, Artifact) and not init.in_place():
        raise InputError(f"{init.path} was rebuilt while it was being read", hint="run again")
    return generator


class Pair(nn.Module):
    """A model and its generator as one module, for data parallelism; ``part`` says which one a call is for."""

    def __init__(self, model: Any, generator: Any) -> None:
        super().__init__()
        self.model, self.generator = model, generator

    def forward(self, part: str = "model", **inputs: Any) -> Any:
        return getattr(self, part)(**inputs)

    def get_output_embeddings(self) -> Any:
        """The output embeddings of the model; `guidance.objectives.selection.logits_at` asks for them."""
        return self.model.get_output_embeddings()

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """Tied tensors that are stored under another name; tensors that model and generator share are stored with both."""
        return {
            f"{part}.{name}": f"{part}.{other}"
            for part in ("model", "generator")
            for name, other in getattr(getattr(self, part), "all_tied_weights_keys", {}).items()
        }


# the pass


class Generator:
    """The pass in which the generator learns and fills in masked tokens; see `pipelines.training.learner.Pass`.

    Its loss is the mean over the masked tokens of the whole batch (Xing et al. 2020, equation 5).
    """

    LOSSES = ("generator", "accuracy/generator", "share/mispredicted")

    def __init__(
        self,
        setup: Setup,
        network: Any,
        masker: Masker,
        inputs: Callable[[FilledBatch], Inputs],
    ) -> None:
        """
        Args:
            inputs: gives the chosen tokens of a batch; the generator reads a mask token in place of every one of them.
        """
        self.network, self.mask_id, self.inputs = network, masker.mask_id, inputs
        self.guided = Guides(network, setup, setup.plan.for_part("generator"), prefix=GENERATOR_FOLDER)
        self.ordinary_W = torch.from_numpy(masker.ordinary)

    def counts(self, batch: FilledBatch) -> dict[str, float]:
        own = dict.fromkeys(self.LOSSES, batch.chosen)
        return {**own, **self.guided.counts(batch.examples, {}), "tokens": batch.tokens}

    def losses(self, model: nn.Module, batch: FilledBatch, step: int) -> dict[str, Tensor]:
        inputs = self._masked(batch)
        guidance = self.guided.handle.guide(**inputs.seen, step=step)
        return {**self._fill(model, batch, inputs, self.guided.forward(guidance)), **self.guided.losses(guidance)}

    def validate(self, model: nn.Module, batch: FilledBatch) -> dict[str, Tensor]:
        """Fill in a validation batch; gives the sums of the generator's losses."""
        inputs = self._masked(batch)
        return self._fill(model, batch, inputs, self.guided.handle.at_inference(**inputs.seen))

    def weights(self, step: int) -> dict[str, float]:
        """The factors of the generator's losses."""
        return {"generator": 1.0, **self.guided.weights(step)}

    def _masked(self, batch: FilledBatch) -> Inputs:
        inputs = self.inputs(batch)
        ids_BT = put_at(inputs.model["input_ids"], inputs.places_N, self.mask_id)
        read = {"input_ids": ids_BT, "attention_mask": inputs.model["attention_mask"]}
        return replace(inputs, model=read)

    def _fill(
        self, model: nn.Module, batch: FilledBatch, inputs: Inputs, extra: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        read, places_N = self.guided.read(inputs, extra)
        logits_NV = logits_at(model, places_N, part="generator", **read).logits
        device, labels_N = logits_NV.device, inputs.labels_N
        drawn_N = draw(logits_NV, batch.uniform_N.to(device), self.ordinary_W.to(device))
        batch.fill(drawn_N)
        values = (
            cross_entropy(logits_NV, labels_N),
            (logits_NV.argmax(-1) == labels_N).sum().double(),
            (drawn_N != labels_N).sum().double(),
        )
        return dict(zip(self.LOSSES, values, strict=True))
