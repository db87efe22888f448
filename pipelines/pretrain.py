"""Stage ``pretrain``: from sequences, and a plan, to a model folder that every Hugging Face tool opens.

Reads sequences@1.  Writes model@1: ``config.json``, ``model.safetensors`` (the last step), tokenizer, ``plan.toml``,
``metrics.jsonl`` and ``metrics.parquet`` (one row a step), ``README.md`` (the model card), ``best/`` (the weights of the
lowest validation loss) and ``snapshots/step-N/`` where asked for.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from guidance.errors import InputError, Interrupted, UnknownName
from pipelines import stage
from pipelines.artifacts import Artifact
from pipelines.files import machine_errors, remove_tree, write_file
from pipelines.manifest import ID_LENGTH, MANIFEST, ArtifactMissing, digest
from pipelines.progress import Progress, log
from pipelines.stage import Files, Result, Run, Stage, internal, is_knob, knob, recipe_of, run_stage
from pipelines.store import Store

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.batches import Examples
    from pipelines.training import Cluster, Outcome

OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")
"""Model types that count positions from their padding id on."""

Architecture = Literal["roberta", "bert", "electra", "modernbert"]

SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "tiny": (2, 128, 2, 512),
    "mini": (4, 256, 4, 1024),
    "small": (4, 512, 8, 2048),
    "base": (12, 768, 12, 3072),
}
"""Layers, width, heads and feed-forward width of each size (Turc et al. 2019, table 1)."""


class Config(stage.Config):
    """Settings of a pre-training run."""

    objective: Literal["mlm"] = Field("mlm", description="What the model learns: masked language modelling.")
    architecture: Architecture = Field("roberta", description="Family of the model, when it starts from nothing.")
    size: Literal["tiny", "mini", "small", "base"] = Field("mini", description="Preset of layers, width and heads.")
    layers: int | None = Field(None, ge=1, description="Number of layers, instead of the preset's.")
    hidden: int | None = Field(None, ge=1, description="Width, instead of the preset's.")
    heads: int | None = Field(None, ge=1, description="Attention heads per layer, instead of the preset's.")
    ffn: int | None = Field(None, ge=1, description="Width of the feed-forward layers, instead of the preset's.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of hidden states.")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of attention probabilities.")
    steps: int = Field(1000, ge=1, description="Optimizer steps.")
    epochs: float | None = Field(None, gt=0, description="Passes over the training sequences, instead of steps.")
    batch_size: int = Field(32, ge=1, description="Sequences per step, over all processes and micro-batches.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["linear", "cosine", "constant"] = Field("linear", description="How the rate falls after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises from zero.")
    weight_decay: float = Field(
        0.01, ge=0, description="Decoupled weight decay of matrices; biases and norms have none."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Epsilon of AdamW.")
    clip: float = Field(1.0, ge=0, description="Largest norm of the gradient; 0 does not clip.")
    mask_probability: float = Field(0.15, gt=0, lt=1, description="Share of tokens that are predicted.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of weights, order, masking and dropout.")
    precision: Literal["auto", "fp32", "bf16", "fp64"] = Field(
        "auto", description="Arithmetic; auto is bf16 autocast on devices that have it, else fp32."
    )
    evaluate_every: int = Field(500, ge=1, description="Steps between validations; the last step is always one.")
    valid_sequences: int = Field(512, ge=0, description="Validation sequences at most; 0 for all of them.")
    snapshots: list[int] = Field([], description="Steps whose weights are kept in the artifact (repeatable).")
    continued_from: str = internal("The run that this one continues with other settings (--resume, --allow-change).")
    plan: str = knob("", "Plan of guides: preset:ag or a TOML file; its content decides the recipe.")
    init: str = knob("", "Model folder or artifact to start from; its content decides the recipe.")
    micro_batches: int = knob(1, "Parts into which each process cuts its share of a batch, to save memory.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "Where to train; auto takes a GPU where there is one.")
    save_every: int = knob(500, "Steps between checkpoints, from which an interrupted run continues.", ge=1)
    max_time: float | None = knob(None, "Minutes after which to save and stop; the same command continues.", gt=0)
    report_to: list[str] = knob(
        [], "Tracker that follows the run: tensorboard, wandb, …; files go to STORE/trackers (repeatable)."
    )


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
    sequences: str,
    config: Config,
    *,
    store: Store,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
    name: str | None = None,
    force: bool = False,
    wait: bool = True,
    progress: Progress | None = None,
) -> Result | None:
    """Pre-train a model; under ``torchrun`` every process calls this, and all but the first get None.

    Args:
        sequences: reference of a sequences artifact.
        resume: an unfinished run that this must be, ``model/<id>``.
        allow_change: settings that may differ from those of ``resume``.

    Raises:
        InputError: a setting differs from the run to resume; data, plan or model do not fit each other.
        NumericalError: see `pipelines.training.train`.
        Interrupted: the run was asked to end; the same call continues it.
    """
    from guidance.plan import Plan

    if resume and force:
        raise InputError("--resume continues a run, --force forgets it", hint="leave one of them out")
    plan = Plan.load(config.plan) if config.plan else Plan()
    with store.load(sequences, kind="sequences") as data:
        inputs: dict[str, Any] = {"sequences": data, "plan": PlanText(plan.dumps())}
        if config.init:
            inputs["init"] = _init_input(config.init, store)
        begun = None
        if resume:
            config, begun = _resumed(resume, tuple(allow_change), config, inputs, store)
        recipe = recipe_of(STAGE, config, inputs)
        partial = store.partial("model", recipe)
        if int(os.environ.get("RANK", "0")) > 0:
            _follow(config, inputs, partial)
            return None
        told = _Announcement(config)
        build_it = functools.partial(build, told=told, afresh=force, begun=begun)
        announced = Stage(STAGE.name, STAGE.kind, STAGE.version, STAGE.config, build_it)
        try:
            result = run_stage(
                announced, config, inputs, store=store, name=name, force=force, wait=wait, progress=progress
            )
        except Interrupted as error:
            if force:
                error.hint = "the same command without --force continues it"
            raise
        finally:
            told.send(go=False)
        _remove_unfinished(store, recipe, partial)
        return result


def _remove_unfinished(store: Store, recipe: str, partial: Path) -> None:
    """Remove the checkpoints of a finished run, unless somebody is making it again."""
    lock = store.lock(STAGE.kind, recipe)
    try:
        if lock.acquire(wait=False):
            remove_tree(partial)
    finally:
        lock.release()


def build(
    run: Run, told: _Announcement | None = None, afresh: bool = False, begun: tuple[Artifact, Path] | None = None
) -> None:
    """Train, then write the model folder.  The caller holds the lock of the recipe, and so the unfinished work.

    Args:
        told: the other processes wait for word of this one.
        afresh: forget what an earlier run left.
        begun: the checkpoint to start from, and the unfinished run that it belongs to.
    """
    from pipelines import model_card
    from pipelines.training import Cluster

    try:
        cluster = Cluster(run.config.device, run.config.precision)
    except BaseException:
        if told:
            told.sent = True  # the other processes fail in the same way
        raise
    _Prepared.check(run.config, run.inputs)
    if afresh:
        remove_tree(run.partial)
    with machine_errors(f"cannot write to {run.partial}"):
        run.partial.mkdir(parents=True, exist_ok=True)
    if begun:
        _seed_partial(*begun, run.partial)
    about = {"config": run.config.recipe(), "inputs": {role: given.content for role, given in run.inputs.items()}}
    write_file(run.partial / "run.json", json.dumps(about).encode())
    if told:
        told.send(go=True, cluster=cluster)
    prepared, outcome = _train(run.config, run.inputs, cluster, run.partial, run.progress)
    _write_model(run, prepared, outcome)
    architecture = prepared.objective.model.config.model_type
    run.out.write("README.md", model_card.card(run, prepared.plan, outcome, architecture).encode())


class _Announcement:
    """Tells the other processes of a ``torchrun`` job once whether there is anything to train."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.sent = int(os.environ.get("WORLD_SIZE", "1")) == 1

    def send(self, *, go: bool, cluster: Cluster | None = None) -> None:
        from pipelines.training import Cluster

        if not self.sent:
            self.sent = True
            cluster = cluster or Cluster(self.config.device, self.config.precision)
            cluster.broadcast(float(go))


def _follow(config: Config, inputs: Mapping[str, Any], partial: Path) -> None:
    """What every process but the first does: train along, silently, if there is something to train."""
    from pipelines.training import Cluster

    cluster = Cluster(config.device, config.precision)
    if cluster.broadcast(0.0):
        _train(config, inputs, cluster, partial, Progress())


def _train(
    config: Config, inputs: Mapping[str, Any], cluster: Cluster, partial: Path, progress: Progress
) -> tuple[_Prepared, Outcome]:
    from pipelines.masked_lm import check_matches
    from pipelines.training import Settings, train

    prepared = _Prepared.of(config, inputs)
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
        prepared.objective, settings, cluster, partial, progress=progress, title="pre-training", trackers=trackers
    )
    check_matches(outcome.tallies)
    return prepared, outcome


@dataclass
class _Prepared:
    """Data, model and objective of a run, checked against each other."""

    plan: Plan
    objective: Any
    tokenizer: Any
    steps: int

    @staticmethod
    def check(config: Config, inputs: Mapping[str, Any]) -> None:
        """What can be refused before anything is computed.

        Raises:
            InputError: the model is shorter than the sequences, or the sizes do not fit each other.
        """
        _, hidden, heads, _ = dimensions(config)
        if not config.init and hidden % heads:
            raise InputError(f"the width {hidden} cannot be shared by {heads} heads", hint="--hidden or --heads")
        if not inputs["sequences"].files.get("train.parquet", {}).get("rows"):
            raise InputError(f"{inputs['sequences'].reference} has no training sequences")

    @classmethod
    def of(cls, config: Config, inputs: Mapping[str, Any]) -> _Prepared:
        from guidance.plan import Plan
        from pipelines.batches import Examples
        from pipelines.masked_lm import MaskedLM

        data = inputs["sequences"]
        tokenizer = read_tokenizer(data)
        train_split = Examples.read(data, "train", len(tokenizer))
        valid = Examples.read(data, "valid", len(tokenizer))
        plan = Plan.parse(inputs["plan"].text)
        model = build_model(config, tokenizer, int(data.manifest["config"]["max_length"]), inputs.get("init"))
        _check_lengths(model.config, {"train": train_split, "valid": valid}, data.reference)
        objective = MaskedLM(
            model,
            tokenizer,
            train_split,
            valid,
            plan,
            seed=config.seed,
            probability=config.mask_probability,
            valid_limit=config.valid_sequences,
        )
        steps = config.steps
        if config.epochs is not None:
            steps = max(1, round(config.epochs * len(train_split) / config.batch_size))
        objective.total_steps = steps
        outside = [step for step in config.snapshots if not 0 <= step <= steps]
        if outside:
            raise InputError(f"no snapshot after step {outside[0]} can be made: the run has {steps} steps")
        return cls(plan, objective, tokenizer, steps)


def dimensions(config: Config) -> tuple[int, int, int, int]:
    """Layers, width, heads and feed-forward width: the preset's, unless given one by one."""
    given = (config.layers, config.hidden, config.heads, config.ffn)
    layers, hidden, heads, ffn = (g or preset for g, preset in zip(given, SIZES[config.size], strict=True))
    return layers, hidden, heads, ffn if config.ffn or not config.hidden else 4 * hidden


def read_tokenizer(sequences: Artifact) -> Any:
    """The tokenizer that made a sequences artifact."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = json.loads(sequences.read("tokenizer/special_tokens_map.json"))
    tokenizer = Tokenizer.from_str(sequences.read("tokenizer/tokenizer.json").decode())
    names = {k: v["content"] if isinstance(v, dict) else v for k, v in special.items() if k.endswith("_token")}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    if wrapped.mask_token_id is None or wrapped.pad_token_id is None:
        raise InputError("the tokenizer has no mask token or no padding token; masked language modelling needs both")
    return wrapped


def build_model(config: Config, tokenizer: Any, max_length: int, init: Any) -> Any:
    """A new model of the configured size, or the one to start from, able to hold the sequences.

    Raises:
        InputError: the model to start from is too short, or has another vocabulary.
    """
    import torch
    from transformers import AutoConfig, AutoModelForMaskedLM
    from transformers.utils import logging as transformers_logging

    from guidance.checkpoint import load_model

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if init is not None:
        folder = init.path if isinstance(init, Artifact) else init.paths[0].parent
        model = load_model(folder, AutoModelForMaskedLM)
        _check_init(model, folder, tokenizer)
        return model
    layers, hidden, heads, ffn = dimensions(config)
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        "eos_token_id": tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
    }
    sizes = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": max_length
        + (tokenizer.pad_token_id + 1 if config.architecture in OFFSET_POSITIONS else 0),
    }
    if config.architecture == "modernbert":
        drop = {
            "attention_dropout": config.attention_dropout,
            "embedding_dropout": config.dropout,
            "mlp_dropout": config.dropout,
            "cls_token_id": tokenizer.cls_token_id,
            "sep_token_id": tokenizer.sep_token_id,
        }
    else:
        drop = {"attention_probs_dropout_prob": config.attention_dropout, "hidden_dropout_prob": config.dropout}
    if config.architecture == "electra":
        drop["embedding_size"] = hidden
    torch.manual_seed(config.seed)
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model(config.architecture, **sizes, **special, **drop))


def _check_lengths(found: Any, splits: Mapping[str, Examples], reference: str) -> None:
    """Raises InputError when a sequence has more tokens than the model has positions for."""
    room = getattr(found, "max_position_embeddings", None)
    if room is None:
        return
    if found.model_type in OFFSET_POSITIONS:
        room -= found.pad_token_id + 1
    import numpy as np

    lengths = np.concatenate([np.diff(split.bounds) for split in splits.values()])
    if (longer := int((lengths > room).sum())) > 0:
        raise InputError(
            f"the model holds {room} tokens; {longer} sequences of {reference} are longer, the longest has {lengths.max()}",
            hint=f"guide build-sequences ... --max-length {room}",
        )


def _check_init(model: Any, folder: Path, tokenizer: Any) -> None:
    found = model.config
    if found.model_type in OFFSET_POSITIONS and found.pad_token_id != tokenizer.pad_token_id:
        raise InputError(
            f"{folder}: its padding has id {found.pad_token_id}, that of the sequences {tokenizer.pad_token_id}"
        )
    if found.vocab_size < len(tokenizer):
        raise InputError(f"{folder}: knows {found.vocab_size} tokens, the sequences use {len(tokenizer)}")
    own = folder / "tokenizer.json"
    if (
        own.exists()
        and json.loads(own.read_bytes())["model"] != json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ):
        raise InputError(
            f"{folder}: its tokenizer is not the one that made the sequences",
            hint=f"guide build-sequences CORPUS {folder}",
        )


def _init_input(reference: str, store: Store) -> Any:
    """A model to start from: an artifact, or any folder of a Hugging Face model."""
    try:
        return store.load(reference, kind="model")
    except ArtifactMissing:
        folder = Path(reference)
        if not folder.is_dir():
            raise
        names = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".bin") and p.is_file())
        if not any(p.name == "config.json" for p in names):
            raise InputError(f"{reference}: not a model folder (no config.json)") from None
        origin = {"source": f"weights of {folder.resolve().name}", "license": None}
        return Files.of(names, (p.name for p in names), [origin])


def _resumed(
    reference: str, allowed: tuple[str, ...], config: Config, inputs: Mapping[str, Any], store: Store
) -> tuple[Config, tuple[Artifact, Path] | None]:
    """The configuration with which to continue another run; where it differs, also the checkpoint from which to.

    Raises:
        ArtifactMissing: there is no such run.
        InputError: a setting or an input differs and is not allowed to; each is listed with both values.
    """
    unknown = set(allowed) - set(config.recipe()) - set(inputs) - {"init"}
    if unknown:
        raise UnknownName("setting", min(unknown), [*config.recipe(), "plan", "init", "sequences"])
    folder, about = _begun(reference, store)
    was, now = about["config"], config.recipe()
    own = {"continued_from"}
    changed = {key: (was.get(key), now.get(key)) for key in {*was, *now} - own if was.get(key) != now.get(key)}
    for role in {*about["inputs"], *inputs}:
        before, here = about["inputs"].get(role), inputs[role].content if role in inputs else None
        if before != here:
            changed[role] = (before and before[:12], here and here[:12])
    refused = {key: values for key, values in changed.items() if key not in allowed}
    if refused:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in sorted(refused.items()))
        raise InputError(
            f"{reference} was begun with other settings: {listed}",
            hint="take the old ones, start another run without --resume, or --allow-change "
            + " --allow-change ".join(sorted(refused)),
        )
    if not changed:
        same = config.model_copy(update={"continued_from": was.get("continued_from", "")})
        if recipe_of(STAGE, same, inputs)[:ID_LENGTH] != folder.name:
            raise InputError(f"{reference} was begun by another version of guide", hint="start another run")
        return same, None
    from pipelines.checkpoints import Checkpoints

    newest = Checkpoints(folder).newest("checkpoint")
    if newest is None:
        raise ArtifactMissing(
            f"{reference} has no checkpoint", hint="--init continues from the weights of a finished run"
        )
    if newest.counts["step"] >= config.steps and config.epochs is None:
        raise InputError(f"{reference} is at step {newest.counts['step']} already", hint="--steps")
    continued = config.model_copy(update={"continued_from": f"{folder.name}@{newest.counts['step']}"})
    return continued, (newest, folder)


def _begun(reference: str, store: Store) -> tuple[Path, dict[str, Any]]:
    """The folder of an unfinished run, or the finished artifact; its configuration and the contents of its inputs."""
    prefix = reference.removeprefix(f"{STAGE.kind}/")
    if not re.fullmatch(r"[0-9a-f]{4,64}", prefix):
        raise InputError(f"--resume {reference!r}: a run is called {STAGE.kind}/ID, with 4 digits of its id at least")
    for parent in (store.root / ".partial" / STAGE.kind, store.root / STAGE.kind):
        found = sorted(parent.glob(f"{prefix[:ID_LENGTH]}*"))
        if len(found) > 1:
            raise ArtifactMissing(f"{reference!r} could be any of {', '.join(p.name for p in found)}")
        if found and (found[0] / "run.json").exists():
            return found[0], stage.read_json(found[0] / "run.json")
        if found and (found[0] / MANIFEST).exists():
            with Artifact(found[0]) as artifact:
                manifest = artifact.manifest
            fields = Config.model_fields
            settings = {k: v for k, v in manifest["config"].items() if k not in fields or not is_knob(fields[k])}
            return found[0], {
                "config": settings,
                "inputs": {role: given.get("content") for role, given in manifest["inputs"].items()},
            }
    raise ArtifactMissing(
        f"no unfinished run {reference!r} in {store.root}", hint="`guide ls` lists unfinished work too"
    )


def _seed_partial(checkpoint: Artifact, old: Path, new: Path) -> None:
    """Give a continued run the checkpoint and the metrics it continues from, the checkpoint last."""
    from pipelines.checkpoints import Checkpoints

    checkpoints, step = Checkpoints(new), int(checkpoint.counts["step"])
    if checkpoints.newest("checkpoint") is not None:
        return
    checkpoints.prepare()
    write_file(new / "metrics.jsonl", (old / "metrics.jsonl").read_bytes())
    for name in ("best", "snapshot"):
        for artifact in Checkpoints(old).all(name):
            if artifact.counts["step"] <= step:
                _copy(artifact, checkpoints, name)
    _copy(checkpoint, checkpoints, "checkpoint")


def _copy(artifact: Artifact, target: Any, name: str) -> None:
    def write(builder: Any) -> None:
        for file in artifact.files:
            builder.write(file, artifact.read(file))

    target.save(name, int(artifact.counts["step"]), write, keep=None)


def _write_model(run: Run, prepared: _Prepared, outcome: Outcome) -> None:
    import pyarrow as pa

    from guidance.checkpoint import model_files
    from pipelines.checkpoints import Checkpoints

    data, out = run.inputs["sequences"], run.out
    prepared.objective.handle.remove()
    files = model_files(prepared.objective.model, prepared.plan)
    tokenizer = {
        name.removeprefix("tokenizer/"): data.read(name) for name in data.files if name.startswith("tokenizer/")
    }
    for name, content in {**files, **tokenizer}.items():
        out.write(name, content)
    checkpoints = Checkpoints(run.partial)
    kept = {f"snapshots/step-{a.counts['step']}": a for a in checkpoints.all("snapshot")}
    if (best := checkpoints.newest("best")) is not None:
        kept["best"] = best
    for folder, artifact in kept.items():
        out.write(f"{folder}/model.safetensors", artifact.read("model.safetensors"))
        for name in ("config.json", "plan.toml", *tokenizer):
            out.write(f"{folder}/{name}", {**tokenizer, **files}[name])
    out.write("metrics.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in outcome.rows).encode())
    keys = list(dict.fromkeys(key for row in outcome.rows for key in row))
    table = pa.table(
        {k: pa.array([r.get(k) for r in outcome.rows], pa.int64() if k == "step" else pa.float64()) for k in keys}
    )
    with out.parquet("metrics.parquet", table.schema) as writer:
        writer.write_table(table)
    last = outcome.rows[-1]
    out.counts |= {
        "steps": prepared.steps,
        "parameters": sum(p.numel() for p in prepared.objective.model.parameters()),
        "final": {key: last[key] for key in last if key.startswith(("loss/", "valid/"))},
        "best_step": outcome.best_step,
        "best_valid_loss": outcome.best_loss,
        "matches": {label: int(found) for label, found in outcome.tallies.items()},
        "processes": outcome.facts["world"],
        "device": outcome.facts["device"],
        "precision": outcome.facts["precision"],
    }


STAGE = Stage("pretrain", "model", 1, Config, build)
