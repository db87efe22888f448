"""The Hugging Face ``Trainer`` with a plan, for people who live in it.

    GuidedTrainer(model=model, args=args, plan="preset:ag", tokenizer=tokenizer, train_dataset=dataset).train()

Every loss is divided once, by what it is a mean over in the whole step: the task's by the labels, a guide's by the
examples of all micro-batches and processes.  The model is therefore never told ``num_items_in_batch``, which some heads
divide by and others ignore, and a step does not depend on how it was cut up.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from guidance.checkpoint import model_files, restore, tokenizer_files, write_folder
from guidance.errors import InputError, NumericalError, PlanError
from guidance.forward import Guidance
from guidance.installation import install
from guidance.patterns.features import FEATURES, Vocabulary
from guidance.plan import Plan

_log = logging.getLogger("guide.trainer")  # below the logger that the command line shows

TASK = "loss/task"


class GuidedTrainer(Trainer):
    """A ``Trainer`` whose model follows a plan.

    Its log has the parts of the loss beside ``loss``: ``loss/task``, and ``guidance/<label>`` for each guide before its
    weight.  Evaluation measures the task alone.  Checkpoints and saved models are folders that `guidance.load` opens.

    Attributes:
        handle: the installed plan, see `guidance.installation.Handle`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        plan: Plan | str | Path,
        tokenizer: Any = None,
        tables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Install the plan, then build the trainer.

        Args:
            plan: a plan, its file, or ``preset:ag`` and its like.
            tokenizer: for patterns that look for certain tokens; saved with the model.
            tables: see `guidance.installation.install`.
            options: further arguments of ``Trainer``: datasets, collator, metrics, callbacks.

        Raises:
            InputError: the plan does not fit the model, needs two passes, or the arguments ask for a set-up in which
                guides would be lost.
        """
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        _check(plan, args, options)
        self.handle = install(model, plan, tokenizer, tables=tables)
        self._parts: dict[str, Tensor] = {}
        self._parts_since = 0
        self._totals: dict[str, Tensor] = {}
        try:
            if args.remove_unused_columns and (needed := self._columns_of_the_data()):
                _log.warning("remove_unused_columns is off: the plan needs %s", ", ".join(sorted(needed)))
                args.remove_unused_columns = False
            _forbid_reentrance(args)
            super().__init__(model=model, args=args, processing_class=tokenizer, **options)
            if self.args.n_gpu > 1:
                raise InputError(
                    "guides do not pass through DataParallel", hint="torchrun, or CUDA_VISIBLE_DEVICES=0 for one GPU"
                )
        except BaseException:
            self.handle.remove()
            raise
        # every step is counted here, whatever the model's head does with the number
        self.model_accepts_loss_kwargs = True

    def _columns_of_the_data(self) -> set[str]:
        """The features that patterns of the plan need and that do not follow from the ids."""
        return set(self.handle.plan.needs()) - set(Vocabulary.FEATURES)

    # one step

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The micro-batches of one step; what its losses are divided by is counted on the way."""
        samples, number = super().get_batch_samples(*args, **kwargs)
        if not self._parts:
            self._parts_since = self.state.global_step
        counts = [_counts(sample) for sample in samples]
        names = ("labels", "examples")
        totals = torch.stack([sum((c[name] for c in counts), torch.zeros(())) for name in names]).to(self.args.device)
        if self.args.world_size > 1:
            totals = self.accelerator.reduce(totals, reduction="sum")
        self._totals = dict(zip(names, totals, strict=True))
        # a function of the user's own divides by what Trainer counts
        return samples, self._totals["labels"] if self.compute_loss_func is None else number

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The task's loss, while training with the plan's: this micro-batch's share of the step's."""
        inputs = dict(inputs)
        guidance = inputs["guidance"] = replace(self._guidance(inputs), measuring=model.training)
        counts = _counts(inputs) if model.training else {}
        num_items = num_items_in_batch if model.training and self.compute_loss_func is not None else None
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items)
        if not model.training:
            return (loss, outputs) if return_outputs else loss
        if num_items is None:
            share = counts["labels"].to(loss) / self._totals["labels"].clamp(min=1) * self.args.world_size
            # the mean over no label is no number
            loss = loss * share if counts["labels"] else 0.0 * outputs["logits"].sum()
        self._note(TASK, loss)
        alphas = self.handle.alphas(self.state.global_step, self.state.max_steps)
        for label, loss_B in guidance.per_example().items():
            part = (guidance.weights_B(label) * loss_B).sum() / self._totals["examples"].clamp(min=1)
            part = part * self.args.world_size
            self._note(f"guidance/{label}", part)
            loss = loss + alphas[label] * part
        return (loss, outputs) if return_outputs else loss

    def _guidance(self, inputs: dict[str, Any]) -> Guidance:
        """The guidance of a batch, out of which the features that only patterns read are taken."""
        columns = {name: inputs.pop(name) for name in list(inputs) if name.removeprefix("decoder_") in FEATURES}
        model: Any = self.handle.model
        if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs and "labels" in inputs:
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])
        names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
        given = {name: inputs[name] for name in names if name in inputs}
        return self.handle.guide(**given, **columns, step=self.state.global_step)

    def _note(self, name: str, part: Tensor) -> None:
        part = part.detach().double()
        self._parts[name] = self._parts[name] + part if name in self._parts else part

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer`` does.

        Raises:
            GuidanceHadNoEffect: the pattern of a guide matched nothing in the whole run.
        """
        self._parts = {}
        output = super().train(*args, **kwargs)
        elsewhere: Counter[str] = Counter()
        if self.args.world_size > 1:
            everywhere: list[Any] = [None] * self.args.world_size
            torch.distributed.all_gather_object(everywhere, self.handle.matches())
            for found in everywhere:
                elsewhere.update(found)
        self.handle.check_matches(elsewhere)
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the parts of the training loss beside it: means over the steps since the last time.

        Raises:
            NumericalError: a part is not finite.
        """
        if "loss" in logs and self._parts:
            steps = max(1, self.state.global_step - self._parts_since)
            names = sorted(self._parts, key=lambda name: name != TASK)
            values = torch.stack([self._parts[name] for name in names]) / steps
            if self.args.world_size > 1:
                values = self.accelerator.reduce(values, reduction="mean")
            found = dict(zip(names, values.tolist(), strict=True))
            for name, value in found.items():
                if not math.isfinite(value):
                    raise NumericalError(f"{name} is {value} before step {self.state.global_step}")
            logs |= found
            self._parts = {}
        super().log(logs, *args, **kwargs)

    # files

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write a folder that `guidance.load` opens; called in every process, and one of them writes."""
        if self.args.should_save:
            files = model_files(self.handle.model, self.handle.plan)
            if self.processing_class is not None:
                files |= tokenizer_files(self.processing_class)
            write_folder(Path(str(output_dir or self.args.output_dir)), files, among=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        restore(self.handle.model, Path(resume_from_checkpoint), self.handle.plan)

    def _load_best_model(self) -> None:
        restore(self.handle.model, Path(str(self.state.best_model_checkpoint)), self.handle.plan)


_NOT_IN_ONE_PASS = {
    "attack": "needs a second pass",
    "scores": "needs to know first where predictions are wrong",
}
"""Places where mechanisms act for which a step of a Trainer is not enough, and why."""


def _forbid_reentrance(args: TrainingArguments) -> None:
    """Checkpoint activations, if at all, in the form that keeps the gradients of guides."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):  # the old name and the new one
        if getattr(args, name, None):
            given = getattr(args, f"{name}_kwargs") or {}
            if given.get("use_reentrant"):
                _log.warning("use_reentrant is off: it would cut guides off from their gradients")
            setattr(args, f"{name}_kwargs", {**given, "use_reentrant": False})


def _check(plan: Plan, args: TrainingArguments, options: Mapping[str, Any]) -> None:
    """Raises InputError for what would train without the plan, or with half of it."""
    for guide in plan.guides:
        if guide.enabled and guide.acts.place in _NOT_IN_ONE_PASS:
            raise PlanError(
                f"{guide.mechanism} {_NOT_IN_ONE_PASS[guide.acts.place]}, and a Trainer makes one pass over a batch",
                hint="write a loop of your own, as in examples/own_loop.py",
            )
    if options.get("model_init") is not None:
        raise InputError("a plan is installed in one model; model_init makes many", hint="give model=")
    if args.deepspeed or args.fsdp:
        raise InputError("guides are not carried through DeepSpeed or FSDP", hint="torchrun without them uses DDP")


def _counts(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the losses of a batch are means over: the labels that count, and the examples that are not all padding."""
    mask = inputs.get("attention_mask")
    examples = torch.tensor(float(len(inputs["input_ids"]))) if mask is None else mask.bool().any(-1).sum().float()
    labels = inputs.get("labels")
    return {"labels": examples if labels is None else labels.ne(-100).sum().float(), "examples": examples}
