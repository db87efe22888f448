"""The Hugging Face ``Trainer`` with a plan, for people who live in it.

    GuidedTrainer(model=model, args=args, plan="preset:ag", tokenizer=tokenizer, train_dataset=dataset).train()

Every loss is divided once, by its denominator in the whole step: the task's by the number of labels, a guide's by the
number of examples (or of mis-predictions) in all micro-batches and processes.  The model is therefore never told
``num_items_in_batch``, by which some heads divide and others do not, and a step does not depend on how it is cut up.

A plan that attacks makes a second forward pass over each micro-batch.  Its outputs are compared with the first pass's: as
distributions over classes, over the tokens that have labels, or as numbers in regression.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from guidance.batch import BatchGuidance
from guidance.checkpoint import model_files, read_progress, restore, tokenizer_files, write_folder
from guidance.collator import FeatureCollator
from guidance.errors import InputError, NumericalError
from guidance.installation import install
from guidance.mechanisms.attacks import Form, divergence
from guidance.mechanisms.base import not_decaying
from guidance.patterns.features import INPUTS, is_feature
from guidance.plan import Plan

_log = logging.getLogger("guide.trainer")  # below the logger that the command line shows

TASK = "loss/task"


class GuidedTrainer(Trainer):
    """A ``Trainer`` whose model follows a plan.

    Its log has the parts of the loss beside ``loss``: ``loss/task``; ``guidance/<label>`` for each guide, before its weight
    and schedule, but with its ``reference_length``; and for attacks ``adversary/divergence``, before its weight, and
    ``adversary/penalty``.  Evaluation measures the task alone.  Checkpoints and saved models are folders that `guidance.load` opens.

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
        columns: Iterable[str] | None = None,
        tables: Mapping[str, Any] | None = None,
        added_learning_rate: float | None = None,
        **options: Any,
    ) -> None:
        """Install the plan, then build the trainer.

        Args:
            plan: a plan, its file, or ``preset:ag`` and its like.
            tokenizer: for patterns that look for certain tokens; saved with the model.
            columns, tables: see `guidance.installation.install`.
            added_learning_rate: peak learning rate of the weights that the plan adds to the model, such as those of ``mix`` and
                ``gate``; by default that of ``args``.
            options: further arguments of ``Trainer``: datasets, collator, metrics, callbacks.  The default collator is
                `guidance.collator.FeatureCollator` if there is a tokenizer.

        Raises:
            InputError: the plan does not fit the model, or the arguments ask for a set-up in which guides would be lost.
        """
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        _check(plan, args, options)
        if added_learning_rate is not None and not 0 < added_learning_rate < math.inf:
            raise InputError(f"added_learning_rate = {added_learning_rate!r} is not a finite number above 0")
        self.handle = install(model, plan, tokenizer, columns=columns, tables=tables)
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            options.setdefault("data_collator", FeatureCollator(tokenizer))
        self._added_rate = added_learning_rate
        self._parts: dict[str, Tensor] = {}
        self._parts_since = 0
        self._has_best = False
        self._totals: dict[str, Tensor] = {}
        try:
            self._check_optimizer(options.get("optimizers", (None, None))[0])
            if args.remove_unused_columns and (needed := self.handle.needs()):
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

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The parameters that weight decay shrinks; those of gates are not among them."""
        steady = not_decaying(model)
        return [name for name in super().get_decay_parameter_names(model) if name not in steady]

    def _check_optimizer(self, given: torch.optim.Optimizer | None) -> None:
        """Raises InputError for an optimizer of the user's that would leave alone what the plan has added."""
        added = {weight for weight in self.handle.parameters() if weight.requires_grad}
        known = {weight for group in given.param_groups for weight in group["params"]} if given is not None else set()
        hint = "leave optimizers= out, or give optimizer_cls_and_kwargs="
        if given is not None and not added <= known:
            raise InputError(
                "the optimizer was made before the plan added its weights, so it would not train them", hint=hint
            )
        if given is not None and self._added_rate is not None:
            raise InputError("added_learning_rate is of optimizers that the trainer makes", hint=hint)
        if self._added_rate is not None and not added:
            _log.warning("added_learning_rate has no effect: the plan adds no weights to the model")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The optimizer, in which the weights that the plan has added may have a learning rate of their own."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if is_new and self._added_rate is not None:
            added = set(self.handle.parameters())
            for group in list(optimizer.param_groups):
                if own := [weight for weight in group["params"] if weight in added]:
                    group["params"] = [weight for weight in group["params"] if weight not in added]
                    optimizer.add_param_group({**group, "params": own, "lr": self._added_rate})
        return optimizer

    # one step

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The micro-batches of one step; what its losses are divided by is counted on the way."""
        samples, number = super().get_batch_samples(*args, **kwargs)
        self._advance()
        if not self._parts:
            self._parts_since = self.state.global_step
        counts = [self._counts(sample) for sample in samples]
        names = tuple(counts[0]) if counts else ()
        totals = torch.stack([torch.stack([c[name].float().cpu() for c in counts]).sum() for name in names])
        totals = totals.to(self.args.device)
        if self.args.world_size > 1:
            totals = self.accelerator.reduce(totals, reduction="sum")
        self._totals = dict(zip(names, totals, strict=True))
        # a function of the user's own divides by what Trainer counts
        return samples, self._totals["labels"] if self.compute_loss_func is None else number

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The task's loss, while training with the plan's: this micro-batch's share of the step's."""
        inputs = dict(inputs)
        batch = self._batch(inputs)
        self._advance()
        if not model.training:
            inputs |= self.handle.at_inference(**batch)
            return super().compute_loss(model, inputs, return_outputs=return_outputs)
        guidance = inputs["guidance"] = self._guidance(batch)
        counts = self._task_counts(inputs)
        num_items = num_items_in_batch if self.compute_loss_func is not None else None
        # a copy, because some losses take the labels out
        loss, outputs = super().compute_loss(model, {**inputs}, return_outputs=True, num_items_in_batch=num_items)
        if num_items is None:
            share = counts["labels"].to(loss) / self._totals["labels"].clamp(min=1) * self.args.world_size
            # the mean over no label is no number
            loss = loss * share if counts["labels"] else 0.0 * outputs["logits"].sum()
        self._note(TASK, loss)
        alphas = self.handle.alphas(self.state.global_step, self.state.max_steps)
        for label, loss_B in guidance.per_example().items():
            denominator = self._totals.get(label, self._totals["examples"])
            part = self._share((guidance.weights_B(label) * loss_B).sum(), denominator)
            self._note(f"guidance/{label}", part)
            loss = loss + alphas[label] * part
        if self.handle.attacks:
            if "logits" not in outputs:
                raise InputError(
                    f"{type(self.handle.model).__name__} has no logits of classes, tokens or numbers, "
                    "and an attack is measured by how far it moves them",
                    hint="remove the adversary or random_mask from the plan",
                )
            loss = loss + self._second_pass(model, inputs, guidance, outputs["logits"])
        return (loss, outputs) if return_outputs else loss

    def _share(self, total: Tensor, denominator: Tensor) -> Tensor:
        """This process's part of a mean over the whole step; gradients are averaged over processes."""
        return total / denominator.to(total.device).clamp(min=1) * self.args.world_size

    def _second_pass(self, model: Any, inputs: dict[str, Any], guidance: BatchGuidance, clean: Tensor) -> Tensor:
        """The divergence under attack and the adversary's penalty, of this micro-batch."""
        attack = guidance.attack()
        seen = {key: value for key, value in inputs.items() if key != "labels"}
        attacked = model(**{**seen, "guidance": attack})["logits"]
        labels = inputs.get("labels")
        examples = self._totals["examples"]
        if clean.dim() == 3 and labels is not None and labels.dim() == 2:
            if self._predicts_next:
                clean, attacked, labels = clean[:, :-1], attacked[:, :-1], labels[:, 1:]
            selected = labels != -100
            moved = divergence(clean, attacked, "token", selected) * selected.sum()
            divergence_part = self._share(moved, self._totals["labels"])
        else:
            is_number = clean.dim() == 1 or clean.shape[-1] == 1 or (labels is not None and labels.is_floating_point())
            form: Form = "regression" if is_number else "classification"
            divergence_part = self._share(divergence(clean, attacked, form) * len(clean), self._totals["rows"])
        penalty = self._share(attack.penalties_B().sum(), examples)
        self._note("adversary/divergence", divergence_part)
        self._note("adversary/penalty", penalty)
        alpha = self.handle.attack_alpha(self.state.global_step, self.state.max_steps)
        return alpha * divergence_part + penalty

    def _counts(self, sample: Mapping[str, Any]) -> dict[str, Tensor]:
        """The denominators of a micro-batch: of the task, and of losses on mis-predictions."""
        counts = self._task_counts(sample)
        plan = self.handle.plan
        rows = [label for label, guide in zip(plan.labels, plan.guides, strict=True) if guide.makes("row_losses")]
        if rows:
            denominators = self._guidance(self._batch(dict(sample))).denominators()
            counts |= {label: denominators[label] for label in rows if label in denominators}
        return counts

    @property
    def _predicts_next(self) -> bool:
        """The model's loss compares the outputs at a token with the label of the next one."""
        return self.handle.model.get_output_embeddings() is not None and self.handle.is_decoder

    def _task_counts(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The denominators of a batch: its labels that count, its rows, and the texts that guides see.

        A row of multiple choice, (choices, T), has several texts.  Rows and texts that are only padding do not count.
        """
        ids, mask, labels = (inputs.get(name) for name in ("input_ids", "attention_mask", "labels"))
        if mask is not None:
            filled = mask.bool().any(-1)
        else:
            first = next(value for value in inputs.values() if isinstance(value, Tensor))
            filled = torch.ones(first.shape[:1] if ids is None else ids.shape[:-1], dtype=torch.bool)
        rows = filled.reshape(len(filled), -1).any(-1).sum().float()
        counts = {"labels": rows, "rows": rows, "examples": filled.sum().float()}
        if labels is not None:
            counts["labels"] = (labels[:, 1:] if self._predicts_next else labels).ne(-100).sum().float()
        return counts

    def _batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What `Handle.guide` takes of the inputs, out of which the features that only patterns read are taken."""
        columns = {name: inputs.pop(name) for name in list(inputs) if is_feature(name)}
        model: Any = self.handle.model
        if not model.config.is_encoder_decoder:
            columns = {**_original(model, inputs), **columns}
        elif "decoder_input_ids" not in inputs and "labels" in inputs:
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])
            # the model needs no mask, since no token sees padding behind it, but guides must not take padding for text
            columns["decoder_attention_mask"] = _up_to_last(inputs["labels"].ne(-100))
        return columns | {name: inputs[name] for name in INPUTS if name in inputs}

    def _guidance(self, batch: Mapping[str, Any]) -> BatchGuidance:
        return self.handle.guide(**batch, step=self.state.global_step)

    def _advance(self) -> None:
        """Tell guides that fade how far training is; evaluation without any training leaves them as they are."""
        if self.state.max_steps > 0 and not self._has_best:
            self.handle.advance(self.state.global_step, self.state.max_steps)

    def _note(self, name: str, part: Tensor) -> None:
        part = part.detach().double()
        self._parts[name] = self._parts[name] + part if name in self._parts else part

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer`` does.

        Raises:
            GuidanceHadNoEffect: the pattern of a guide matched nothing in the whole run.
        """
        self._parts, self._has_best = {}, False
        output = super().train(*args, **kwargs)
        elsewhere: Counter[str] = Counter()
        if self.args.world_size > 1:
            everywhere: list[Any] = [None] * self.args.world_size
            torch.distributed.all_gather_object(everywhere, self.handle.matches())
            for matches in everywhere:
                elsewhere.update(matches)
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
            parts = dict(zip(names, values.tolist(), strict=True))
            for name, value in parts.items():
                if not math.isfinite(value):
                    raise NumericalError(f"{name} is {value} before step {self.state.global_step}")
            logs |= parts
            self._parts = {}
        super().log(logs, *args, **kwargs)

    # files

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write a folder that `guidance.load` opens; called in every process, and one of them writes."""
        if self.args.should_save:
            self._advance()
            files = model_files(self.handle.model, self.handle.plan)
            if self.processing_class is not None:
                files |= tokenizer_files(self.processing_class)
            write_folder(Path(str(output_dir or self.args.output_dir)), files, among=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        restore(self.handle.model, Path(resume_from_checkpoint), self.handle.plan)

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint))
        restore(self.handle.model, folder, self.handle.plan)
        if (progress := read_progress(folder)) is not None:
            self.handle.advance(*progress)
        self._has_best = True  # guides that fade stay as they were at the step of these weights


def _forbid_reentrance(args: TrainingArguments) -> None:
    """Checkpoint activations, if at all, in the form that keeps the gradients of guides."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):  # the old name and the new one
        if getattr(args, name, None):
            settings = getattr(args, f"{name}_kwargs") or {}
            if settings.get("use_reentrant"):
                _log.warning("use_reentrant is off: it would cut guides off from their gradients")
            setattr(args, f"{name}_kwargs", {**settings, "use_reentrant": False})


def _check(plan: Plan, args: TrainingArguments, options: Mapping[str, Any]) -> None:
    """Raises InputError for what would train without the plan, or with half of it."""
    if options.get("model_init") is not None:
        raise InputError("a plan is installed in one model; model_init makes many", hint="give model=")
    if args.deepspeed or args.fsdp:
        raise InputError("guides are not carried through DeepSpeed or FSDP", hint="torchrun without them uses DDP")


def _up_to_last(known_BT: Tensor) -> Tensor:
    """A mask of the tokens up to the last known one of each row, (B, T); at least the first one."""
    mask_BT = known_BT.flip(-1).cummax(-1).values.flip(-1)
    mask_BT[:, 0] = True
    return mask_BT.long()


def _original(model: Any, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The feature ``original`` of a language model's batch: its labels are the tokens that the text has where they were masked."""
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    if ids is None or labels is None or ids.shape != labels.shape or model.get_output_embeddings() is None:
        return {}
    return {"original": torch.where(labels == -100, ids, labels)}
