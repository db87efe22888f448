"""Stage ``pretrain``: from sequences, and a plan, to a model folder that every Hugging Face tool opens.

Reads sequences@1.  Writes model@1: ``config.json``, ``model.safetensors`` (the last step), tokenizer, ``plan.toml``,
``metrics.jsonl`` and ``metrics.parquet`` (one row a step), ``README.md`` (the model card), ``best/`` (the weights of the
lowest validation loss) and ``snapshots/step-N/`` where asked for.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import Field, field_validator, model_validator

from guidance.errors import InputError, Interrupted, PlanError
from pipelines.engine.progress import Progress, log
from pipelines.engine.stage import (
    Options,
    Result,
    Run,
    Stage,
    check_working_folder,
    internal,
    knob,
    recipe_of,
    run_stage,
)
from pipelines.storage.artifacts import Artifact, Builder
from pipelines.storage.files import machine_errors, remove_tree
from pipelines.storage.manifest import ArtifactMismatch, digest
from pipelines.storage.store import Store
from pipelines.training import resuming
from pipelines.training.metrics_log import METRICS_LOG
from pipelines.training.models import ModelConfig, dimensions, read_tokenizer
from pipelines.training.objectives import Given, ModelFolder, module_of
from pipelines.training.plan_inputs import (
    check_needs,
    features,
    inputs_of,
    load_inputs,
    model_input,
    read_tables,
    roles,
)

if TYPE_CHECKING:
    import numpy as np

    from guidance.plan import Plan
    from pipelines.training.cluster import Cluster
    from pipelines.training.loop import Outcome
    from pipelines.training.order import AnyOrder


METRICS_PART = 10_000
"""How many rows of metrics are held at once."""


class Config(ModelConfig):
    """Settings of a pre-training run."""

    objective: Literal["mlm", "mlm+nsp", "electra", "translation"] = Field(
        "mlm",
        description="What the model learns: masked words; also whether sentences follow each other; which words were "
        "replaced; or to translate.",
    )
    steps: int = Field(1000, ge=1, description="Optimizer steps.")
    epochs: float | None = Field(None, gt=0, description="Passes over the training sequences, instead of steps.")
    batch_size: int = Field(32, ge=1, description="Sequences per step, over all processes and micro-batches.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["linear", "cosine", "constant", "inverse-sqrt"] = Field(
        "linear", description="How the rate falls after warm-up; inverse-sqrt as 1 / √step."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises from zero.")
    weight_decay: float = Field(
        0.01, ge=0, description="Decoupled weight decay of matrices; biases and norms have none."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Epsilon of AdamW.")
    clip: float = Field(
        1.0, ge=0, description="Largest norm of the gradient, that of adversaries apart; 0 does not clip."
    )
    batch_tokens: int = Field(
        0, ge=0, description="Tokens per step, with padding, instead of --batch-size; similar lengths go together."
    )
    bucket: bool = Field(False, description="Put sequences of similar length together in batches of --batch-size.")
    sampling: list[Annotated[float, Field(gt=0)]] = Field(
        [],
        description="Of several sequences, how much of the batches each gives, counted in rows; else each gives all it has "
        "(repeatable: --sampling 0.8 --sampling 0.2, in their order).",
    )
    mask_probability: float = Field(0.15, gt=0, lt=1, description="Share of tokens that are predicted.")
    generator: Literal["auto", "none", "unigram", "transformer"] = Field(
        "auto",
        description="For electra, and for McMisP in mlm: who fills in the masked tokens; auto is a transformer where "
        "one is needed.",
    )
    generator_size: float = Field(
        1 / 3, gt=0, le=1, description="Width of a transformer generator as a part of the model's; it is as deep."
    )
    discriminator_weight: float = Field(
        50.0,
        ge=0,
        description="Factor of the discriminator's loss in electra; 50 is for the loss of a transformer beside it.",
    )
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="Label smoothing of translation.")
    decoder_layers: int | None = Field(None, ge=1, description="Layers of the decoder in translation, else --layers.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of weights, order, masking and dropout.")
    precision: Literal["auto", "fp32", "bf16", "fp64"] = Field(
        "auto", description="Arithmetic; auto is bf16 autocast on devices that have it, else fp32."
    )
    evaluate_every: int = Field(500, ge=1, description="Steps between validations; the last step is always one.")
    valid_sequences: int = Field(512, ge=0, description="Validation sequences at most; 0 for all of them.")
    snapshots: list[int] = Field([], description="Steps whose weights are kept in the artifact (repeatable).")
    continued_from: str = internal("The run that this one continues with other settings (--resume, --allow-change).")
    plan: str = knob("", "Plan of guides: preset:ag or a TOML file; its content decides the recipe.")
    masks: list[str] = knob(
        [],
        "What `guide build-masks` made of the sequences, for plans that read words, idf or trees; of several sequences, one "
        "for each, in their order (repeatable).",
    )
    cooccur: str = knob("", "What `guide build-cooccur` counted with the same tokenizer, for plans with `conflict`.")
    totals: Literal["pairs", "tokens"] = Field(
        "pairs", description="What the counts of --cooccur are divided by: the pairs of a token, or its occurrences."
    )
    masking: str = knob("", "An adversarial run whose masking proportions `random_mask` of kind `scheduled` follows.")
    scores: str = knob("", "Scores of heads, JSON, CSV or Parquet, for plans that choose heads by them.")
    init: str = knob("", "Model folder or artifact to start from; its content decides the recipe.")
    micro_batches: int = knob(1, "Parts into which each process cuts its share of a batch, to save memory.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "Where to train; auto takes a GPU where there is one.")
    save_every: int = knob(500, "Steps between checkpoints, from which an interrupted run continues.", ge=1)
    gradient_checkpointing: bool = knob(
        False, "Keep little for the backward pass and compute it again: less memory, a third more time."
    )
    compile: bool = knob(
        False,
        "Compile the model (torch.compile): minutes at the start; whether steps are faster depends on the machine.",
    )
    max_time: float | None = knob(None, "Minutes after which to save and stop; the same command continues.", gt=0)
    report_to: list[str] = knob(
        [], "Tracker that follows the run: tensorboard, wandb, …; files go to STORE/trackers (repeatable)."
    )

    @field_validator("masks", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return ([value] if value else []) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Config:
        for name, objectives in ONLY.items():
            if self.objective not in objectives and getattr(self, name) != type(self).model_fields[name].default:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} belongs to --objective {' or '.join(objectives)}, not to {self.objective}")
        if self.schedule == "inverse-sqrt" and not self.warmup_steps:
            raise ValueError("--schedule inverse-sqrt falls from the end of warm-up on: it needs --warmup-steps")
        if self.batch_tokens and self.bucket:
            raise ValueError("--batch-tokens puts similar lengths together by itself: leave --bucket out")
        if self.sampling and (self.batch_tokens or self.bucket):
            raise ValueError("--sampling draws sequences one by one: not with --batch-tokens or --bucket")
        return self


ONLY: Mapping[str, tuple[str, ...]] = {
    "mask_probability": ("mlm", "mlm+nsp", "electra"),
    "generator": ("mlm", "electra"),
    "generator_size": ("mlm", "electra"),
    "discriminator_weight": ("electra",),
    "label_smoothing": ("translation",),
    "decoder_layers": ("translation",),
}
"""Settings that mean something in some objectives only."""


@dataclass(frozen=True)
class PlanText:
    """A plan as an input: two plans that say the same have the same content."""

    text: str
    provenance: list[dict[str, Any]] = field(default_factory=list)

    @property
    def content(self) -> str:
        return digest(self.text)

    def describe(self) -> dict[str, Any]:
        return {"kind": "plan", "content": self.content}


def run(
    sequences: str | Sequence[str],
    config: Config,
    *,
    store: Store,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
    **options: Unpack[Options],
) -> Result | None:
    """Pre-train a model; under ``torchrun`` every process calls this, and all but the first get None.

    Args:
        sequences: reference of a sequences artifact; or of several, on all of which the model is trained.
        resume: an unfinished run that this must be, ``model/<id>``.
        allow_change: settings that may differ from those of ``resume``.

    Raises:
        InputError: a setting differs from the run to resume; data, plan or model do not fit each other.
        NumericalError: see `pipelines.training.loop.train`.
        Interrupted: the run was asked to end; the same call continues it.
    """
    check_working_folder()
    force = options.get("force", False)
    if resume and force:
        raise InputError("--resume continues a run, --force forgets it", hint="leave one of them out")
    references = [sequences] if isinstance(sequences, str) else sequences
    for reference in (*references, *config.masks, config.cooccur, config.masking):
        if reference:
            store.find(reference)  # what is not there is said before the seconds that importing torch takes

    from guidance.plan import Plan

    plan = Plan.load(config.plan) if config.plan else Plan()
    if config.plan:
        if not plan.guides and plan.pal is None:
            raise PlanError(f"{config.plan}: there is no guide in this plan", hint="leave --plan out for a plain model")
        module_of(config.objective).check_plan(plan, config, config.plan)
    with ExitStack() as opened:
        corpora = [opened.enter_context(store.load(reference, kind="sequences")) for reference in references]
        _check_corpora(config, corpora)
        inputs: dict[str, Any] = dict(zip(roles("sequences", len(corpora)), corpora, strict=True))
        inputs |= {"plan": PlanText(plan.dumps()), **_tables(config, plan, corpora, store)}
        if config.plan:
            check_needs(plan, config.plan, inputs)
        if config.init:
            inputs["init"] = model_input(config.init, store)
        begun = None
        if resume:
            config, begun = resuming.resumed(STAGE, resume, allow_change, config, inputs, store)
        recipe = recipe_of(STAGE, config, inputs)
        partial = store.partial("model", recipe)
        if int(os.environ.get("RANK", "0")) > 0:
            _follow(config, inputs, partial)
            return None
        told = _Announcement(config)
        build_it = functools.partial(build, told=told, afresh=force, begun=begun)
        try:
            result = run_stage(replace(STAGE, build=build_it), config, inputs, store=store, **options)
        except Interrupted as error:
            if force:
                error.hint = "the same command without --force continues it"
            raise
        finally:
            told.send(go=False)
        store.forget_unfinished(STAGE.kind, recipe)
        return result


def _check_corpora(config: Config, corpora: Sequence[Artifact]) -> None:
    """Raises InputError when several sequences cannot train one model, or not with these settings."""
    if config.sampling and len(config.sampling) != len(corpora):
        raise InputError(
            f"{len(config.sampling)} shares for {len(corpora)} sequences",
            hint="one --sampling for each, in their order",
        )
    first = corpora[0]
    for other in corpora[1:]:
        if _tokenizer_of(other) != _tokenizer_of(first):
            raise ArtifactMismatch(
                f"{other.reference} was made with another tokenizer than {first.reference}",
                hint="guide build-sequences with the tokenizer of the first",
            )


def _tokenizer_of(data: Artifact) -> dict[str, str]:
    """The digests of the files of its tokenizers."""
    return {name: entry["sha256"] for name, entry in data.files.items() if "tokenizer/" in name}


def _tables(config: Config, plan: Plan, corpora: Sequence[Artifact], store: Store) -> dict[str, Any]:
    """The inputs that ``--masks``, ``--cooccur``, ``--masking`` and ``--scores`` name, checked against the sequences.

    Raises:
        ArtifactMismatch: masks of other sequences, or counts of another tokenizer.
        InputError: a run whose masking no guide follows, or a guide that follows none.
    """
    from pipelines.statistics.cooccurrence_table import check_tokenizer
    from pipelines.training.masking import check_masking

    found = load_inputs(config, corpora, store)
    check_masking(plan, config.plan, config.masking)
    if config.cooccur:
        found["cooccur"] = counts = store.load(config.cooccur, kind="cooccur")
        check_tokenizer(counts, corpora[0])
        if "cooccurrence" not in plan.tables():
            log.warning("--cooccur %s: no guide of the plan reads it", config.cooccur)
    if config.masking:
        found["masking"] = store.load(config.masking, kind="model")
    return found


def build(
    run: Run, told: _Announcement | None = None, afresh: bool = False, begun: tuple[Artifact, Path] | None = None
) -> None:
    """Train, then write the model folder.  The caller holds the lock of the recipe, and so the unfinished work.

    Args:
        told: the other processes wait for word of this one.
        afresh: forget what an earlier run left.
        begun: the checkpoint to start from, and the unfinished run that it belongs to.
    """
    from pipelines.training import model_card
    from pipelines.training.cluster import Cluster

    try:
        cluster = Cluster(run.config.device, run.config.precision)
    except BaseException:
        if told:
            told.sent = True  # the other processes fail in the same way
        raise
    prepared = _Prepared.of(
        run.config, run.inputs
    )  # what is wrong with plan, data or model is said before a trace is left
    if afresh:
        remove_tree(run.partial)
    with machine_errors(f"cannot write to {run.partial}"):
        run.partial.mkdir(parents=True, exist_ok=True)
    if begun:
        resuming.seed_partial(*begun, run.partial)
    resuming.note(run.partial, run.config, run.inputs)
    run.warn(*_short_of_examples(prepared.order, inputs_of("sequences", run.inputs)))
    run.warn(
        *_without_effect(run.config, prepared.steps), *_short_of_masking(run.inputs.get("masking"), prepared.steps)
    )
    if told:
        told.send(go=True, cluster=cluster)
    outcome = _train(run.config, prepared, cluster, run.partial, run.progress)
    _write_model(run, prepared, outcome)
    card = model_card.card(run, prepared.plan, outcome, prepared.objective.folders())
    run.out.write("README.md", card.encode())


class _Announcement:
    """Tells the other processes of a ``torchrun`` job once whether there is anything to train."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.sent = int(os.environ.get("WORLD_SIZE", "1")) == 1

    def send(self, *, go: bool, cluster: Cluster | None = None) -> None:
        from pipelines.training.cluster import Cluster

        if not self.sent:
            self.sent = True
            cluster = cluster or Cluster(self.config.device, self.config.precision)
            cluster.broadcast(float(go))


def _follow(config: Config, inputs: Mapping[str, Any], partial: Path) -> None:
    """What every process but the first does: train along, silently, if there is something to train."""
    from pipelines.training.cluster import Cluster

    cluster = Cluster(config.device, config.precision)
    if cluster.broadcast(0.0):
        _train(config, _Prepared.of(config, inputs), cluster, partial, Progress())


def _train(config: Config, prepared: _Prepared, cluster: Cluster, partial: Path, progress: Progress) -> Outcome:
    from guidance.guided_model import check_matches
    from pipelines.training.loop import Settings, train

    settings = Settings(
        steps=prepared.steps,
        snapshots=tuple(config.snapshots),
        report_to=tuple(config.report_to),
        **{
            key: getattr(config, key)
            for key in Settings.__dataclass_fields__
            if key not in ("steps", "snapshots", "report_to")
        },
    )
    if cluster.leads:
        log.info(
            "training on %s, %s, %d process%s",
            cluster.device.type,
            cluster.precision,
            cluster.world,
            "es" if cluster.world > 1 else "",
        )
    trackers = partial.parents[2] / "trackers" / f"{partial.parent.name}-{partial.name}"
    outcome = train(
        prepared.objective,
        prepared.order,
        settings,
        cluster,
        partial,
        progress=progress,
        trackers=trackers,
    )
    check_matches(outcome.tallies)
    return outcome


@dataclass
class _Prepared:
    """Data, model and objective of a run, checked against each other."""

    plan: Plan
    objective: Any
    order: AnyOrder
    steps: int

    @staticmethod
    def check(config: Config, inputs: Mapping[str, Any]) -> None:
        """What can be refused before anything is computed.

        Raises:
            InputError: the sizes do not fit each other, or some sequences have none to train on.
        """
        _, hidden, heads, _ = dimensions(config)
        if not config.init and hidden % heads:
            raise InputError(f"the width {hidden} cannot be shared by {heads} heads", hint="--hidden or --heads")
        for data in inputs_of("sequences", inputs):
            if not data.files.get("train.parquet", {}).get("rows"):
                raise InputError(f"{data.reference} has no training sequences")

    @classmethod
    def of(cls, config: Config, inputs: Mapping[str, Any]) -> _Prepared:
        """Raises InputError when data, plan, model and settings do not fit each other."""
        cls.check(config, inputs)
        from guidance.plan import Plan
        from pipelines.training.batches import Examples
        from pipelines.training.loop import checkpoint_activations

        corpora = inputs_of("sequences", inputs)
        tokenizer = read_tokenizer(corpora[0], masked=config.objective != "translation")
        plan = Plan.parse(inputs["plan"].text)
        train_split, valid = (
            Examples.read_all(
                corpora,
                split,
                len(tokenizer),
                features=features(plan),
                masks=inputs_of("masks", inputs),
                limit=config.valid_sequences if split == "valid" else 0,
            )
            for split in ("train", "valid")
        )
        tables, init = read_tables(inputs, config.totals), inputs.get("init")
        given = Given(config, plan, corpora[0], tokenizer, train_split, valid, tables, init, corpora)
        objective = module_of(config.objective).prepare(given)
        if config.gradient_checkpointing:
            checkpoint_activations(folder.model for folder in objective.folders())
        rows = [data.files["train.parquet"]["rows"] for data in corpora]
        # an objective may make examples of its own
        order = _order(config, objective.lengths, getattr(objective, "sizes", rows))
        steps = config.steps if config.epochs is None else order.steps(config.epochs)
        outside = [step for step in config.snapshots if not 0 <= step <= steps]
        if outside:
            raise InputError(f"no snapshot after step {outside[0]} can be made: the run has {steps} steps")
        return cls(plan, objective, order, steps)


def _order(config: Config, lengths: np.ndarray, sizes: Sequence[int]) -> AnyOrder:
    """The order of examples of these lengths, of corpora of these sizes."""
    from pipelines.training.order import LengthOrder, MixedOrder, Order

    if config.batch_tokens:
        return LengthOrder(lengths, config.seed, batch_tokens=config.batch_tokens)
    if config.bucket:
        return LengthOrder(lengths, config.seed, batch_size=config.batch_size)
    if config.sampling:
        return MixedOrder(sizes, config.sampling, config.batch_size, config.seed)
    return Order(len(lengths), config.batch_size, config.seed)


def _short_of_examples(order: AnyOrder, corpora: Sequence[Artifact]) -> list[str]:
    """What to say where a batch has more places than there are examples for them."""
    from pipelines.training.order import BLOCK, MixedOrder, Order

    if isinstance(order, MixedOrder):
        places = [order.batch_size * quota / BLOCK for quota in order.quotas]
        found = list(zip((data.reference for data in corpora), order.sizes, places, strict=True))
    elif isinstance(order, Order):
        found = [(" and ".join(data.reference for data in corpora), order.num_examples, order.batch_size)]
    else:
        return []  # its batches end with the epoch
    return [
        f"{reference}: {size} training examples for {place:g} places in every batch, which repeats some"
        for reference, size, place in found
        if size < place
    ]


def _short_of_masking(followed: Artifact | None, steps: int) -> list[str]:
    """What to say where the run that a guide follows has fewer steps than this one."""
    last = followed.files["metrics.parquet"].get("rows", steps) if followed else steps
    return (
        [f"{followed.reference} ends at step {last}: its masking there is repeated"]
        if followed and last < steps
        else []
    )


def _without_effect(config: Config, steps: int) -> list[str]:
    """What to say of settings that cannot do what they are for."""
    found = []
    shape = ("architecture", "size", "layers", "hidden", "heads", "ffn")
    if config.init and (given := [n for n in shape if getattr(config, n) != Config.model_fields[n].default]):
        found.append(f"--{', --'.join(given)}: without effect, since the shape is that of --init")
    if config.epochs is not None and config.steps != Config.model_fields["steps"].default:
        found.append(f"--steps: without effect beside --epochs, which makes {steps} steps")
    if config.totals != "pairs" and not config.cooccur:
        found.append("--totals: without effect, since there are no counts (--cooccur)")
    if config.warmup_steps >= steps:
        found.append(f"warm-up takes {config.warmup_steps} of {steps} steps: the rate never gets to its peak")
    return found


def _write_model(run: Run, prepared: _Prepared, outcome: Outcome) -> None:
    import safetensors.torch

    from guidance.checkpoint import TARGET_FOLDER, model_files, weight_files
    from pipelines.training.checkpoints import Checkpoints

    data, out = run.inputs["sequences"], run.out
    folders = prepared.objective.folders()
    files = {folder.path: model_files(folder.model, folder.plan) for folder in folders}
    parameters = sum(p.numel() for p in prepared.objective.model.parameters())
    tokenizer = {
        name.removeprefix("tokenizer/"): data.read(name)
        for name in data.files
        if name.startswith(("tokenizer/", f"{TARGET_FOLDER}/"))
    }
    for folder in folders:
        for name, content in {**files[folder.path], **tokenizer}.items():
            out.write(folder.path + name, content)
    checkpoints = Checkpoints(run.partial)
    kept = {f"snapshots/step-{a.counts['step']}/": a for a in checkpoints.all("snapshot")}
    if (best := checkpoints.newest("best")) is not None:
        kept["best/"] = best
    for place, artifact in kept.items():
        tensors = safetensors.torch.load(artifact.read("model.safetensors"))
        for folder in folders:
            for name, content in weight_files(_tensors_of(folder, tensors), folder.plan).items():
                out.write(place + folder.path + name, content)
            for name, content in {**tokenizer, **files[folder.path]}.items():
                if not name.endswith(".safetensors"):
                    out.write(place + folder.path + name, content)
    _write_metrics(out, outcome.log)
    last = outcome.last
    out.counts |= {
        "steps": prepared.steps,
        "parameters": parameters,
        "final": {key: last[key] for key in last if key.startswith(("loss/", "valid/"))},
        "best_step": outcome.best_step,
        "best_valid_loss": outcome.best_loss,
        "matches": {label: int(found) for label, found in outcome.tallies.items()},
        "processes": outcome.facts["world"],
        "device": outcome.facts["device"],
        "precision": outcome.facts["precision"],
    }


def _write_metrics(out: Builder, log: Path) -> None:
    """The metrics of every step, as they were logged and as a table; a part at a time, since there may be millions."""
    import pyarrow as pa

    keys: dict[str, None] = {}
    with out.open(METRICS_LOG) as copy:
        for lines in _parts(log):
            copy.write(b"".join(lines))
            keys |= dict.fromkeys(key for line in lines for key in json.loads(line))
    schema = pa.schema([(key, pa.int64() if key == "step" else pa.float64()) for key in keys])
    with out.parquet("metrics.parquet", schema) as writer:
        for lines in _parts(log):
            writer.write_table(pa.Table.from_pylist([json.loads(line) for line in lines], schema))


def _parts(log: Path) -> Iterator[list[bytes]]:
    with open(log, "rb") as file:
        while lines := list(itertools.islice(file, METRICS_PART)):
            yield lines


def _tensors_of(folder: ModelFolder, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of one of the models of an objective, under the names that they have in it."""
    size = len(folder.prefix)
    return {name[size:]: tensor for name, tensor in tensors.items() if name.startswith(folder.prefix)}


STAGE = Stage("pretrain", "model", 3, Config, build)
