"""Stage ``probe-attack``: what does an attack do to attention?

Reads a model of a task or a guided model, and its data.  Writes probe@1: ``heads.parquet`` (one row for each head: its attention without
and under the attack), ``probe.json`` (by layer, with the share of units that an adversary switches off) and ``maps.png`` (the heads of one
layer on one example, without and under the attack).

Source: Wu et al. 2023, figures 1, 5 and 6; FreeLB and SMART as in `guidance.perturbations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine.command import Table
from pipelines.engine.stage import Run
from pipelines.probing.probe import Findings, probe
from pipelines.probing.sequences import SequencesConfig
from pipelines.stages.reading import ON_SEQUENCES
from pipelines.storage.artifacts import Artifact

if TYPE_CHECKING:
    from torch import Tensor

    from guidance.sites import Site

FIGURES: Mapping[str, str] = {
    "entropy": "mean entropy of rows, from 0, one key, to 1, all keys alike",
    "highest": "mean of the highest attention of each row",
    "special": "mean attention of a token on special tokens",
}


class Config(SequencesConfig):
    """Which attack, and on which examples."""

    by: Literal["plan", "freelb", "smart"] = Field(
        "plan",
        description="the attack: the adversary or random masks of the model's plan; or FreeLB or SMART on its task",
    )
    limit: int = Field(500, ge=0, description="maximum number of examples; 0 for all")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of what is random in the attack")
    steps: int = Field(3, ge=1, le=100, description="steps of FreeLB")
    rate: float | None = Field(None, gt=0, description="step size; by default 0.1 for FreeLB and 0.001 for SMART")
    start: float | None = Field(
        None, ge=0, description="size of the first perturbation; by default 0.02 for FreeLB and 0.00001 for SMART"
    )
    layer: int = Field(0, ge=0, description="the layer that maps.png shows, from 0")


def measure(run: Run[Config]) -> Findings:
    """The attention of every head without the attack and under it.

    Raises:
        InputError: the plan of the model attacks nothing; or for FreeLB and SMART the model has no head for a task.
    """
    import torch

    from guidance.probes.summary import Summary, summarise
    from pipelines.probing.heads import write_heads
    from pipelines.training.learner import name_of_model

    config = run.config
    passes, number, tokenizer, labels = _plan_passes(run) if config.by == "plan" else _perturbed_passes(run)
    special = torch.tensor(tokenizer.all_special_ids)
    sums: dict[tuple[str, Site], Tensor] = {}
    masked: dict[Site, Tensor] = {}
    shown: dict[str, Any] = {}
    examples = 0
    with run.progress.task("probe", total=number, unit="examples") as bar:
        for ids_BT, valid_BT, clean, attacked in passes:
            on_special = torch.isin(ids_BT, special.to(ids_BT.device)) & valid_BT
            wanted = (on_special[:, None, None, :] & valid_BT[:, None, :, None]).float()
            lengths_B = valid_BT.sum(-1).float()
            most_B = lengths_B.clamp(min=2).log()

            def receive(
                name: str,
                site: Site,
                attention: Tensor,
                wanted: Tensor = wanted,
                valid_BT: Tensor = valid_BT,
                lengths_B: Tensor = lengths_B,
                most_B: Tensor = most_B,
            ) -> None:
                found: Summary = summarise(attention, wanted, valid_BT)
                figures = (
                    found.entropy_BHQ.sum(-1) / (lengths_B * most_B)[:, None],
                    found.highest_BHQ.sum(-1) / lengths_B[:, None],
                    found.masses_BHP[..., 0],
                )
                total = torch.stack(figures, dim=-1).double().sum(0).cpu()
                sums[name, site] = sums.get((name, site), 0) + total
                if site.layer == config.layer and site.attention == "self" and name not in shown:
                    size = int(valid_BT[0].sum())
                    shown[name] = attention[0, :, :size, :size].float().cpu().numpy()

            clean(lambda site, attention: receive("clean", site, attention))
            for site, shares_B in attacked(lambda site, attention: receive("attacked", site, attention)).items():
                masked[site] = masked.get(site, 0) + shares_B.double().sum().cpu()
            if "labels" not in shown:
                shown["labels"] = labels(ids_BT[0][valid_BT[0]])
            examples += len(ids_BT)
            bar.advance(len(ids_BT))
    sites = [site for name, site in sums if name == "clean"]
    figures: dict[str, dict[Site, Tensor]] = {}
    units: dict[str, str] = {}
    for place, (name, unit) in enumerate(FIGURES.items()):
        for when, words in (("clean", ""), ("attacked", ", under the attack")):
            key = name if when == "clean" else f"{name}_attacked"
            figures[key] = {site: sums[when, site][:, place] / examples for site in sites}
            units[key] = unit + words
    table = write_heads(run, figures, units)
    by_layer = _by_layer(table, {site.layer: float(total) / examples for site, total in masked.items()})
    counts = {"examples": examples, "heads": len(table)}
    if "clean" in shown:
        run.out.write("maps.png", _picture(shown, config, name_of_model(run.inputs["model"])))
    return Findings(counts, {"by_layer": by_layer}, {"by": config.by})


Passes = Iterator[tuple[Any, Any, Callable[..., None], Callable[..., Mapping[Any, Any]]]]
"""Of each batch the ids, which tokens are valid, and two functions that show the attention of each site to a watcher: without an attack
and under it; the second gives for each site the share of units that is switched off, (B,)."""


def _plan_passes(run: Run) -> tuple[Passes, int, Any, Callable[..., list[str]]]:
    """The passes in which the plan of a guided model attacks."""
    import torch

    from guidance.inputs import guide_batch
    from guidance.models.canary import evaluating
    from guidance.patterns.features import is_feature
    from pipelines.probing.sequences import WatchedSequences, token_labels

    config = run.config
    watched = WatchedSequences(run.inputs, config)
    handle = watched.handle
    if not handle.attacks:
        raise InputError(
            "the plan of the model attacks nothing", hint="--by freelb or smart; or train with --plan preset:asa"
        )

    def passes() -> Passes:
        for batch in watched.batches(config.batch_size):
            inputs = watched.guide_inputs(batch)

            def attacked(watcher: Callable[..., object], inputs: Any = inputs, batch: Any = batch) -> Any:
                seeds_B = torch.tensor([(config.seed << 32) + n for n in batch.numbers]) % 2**62
                guidance = guide_batch(handle, inputs, measuring=False).attack(seeds_B)
                guidance.recorded, guidance.watcher = {}, watcher
                given = {name: value for name, value in inputs.items() if not is_feature(name)}
                with evaluating(watched.model), torch.no_grad():
                    watched.model(**given, guidance=guidance)
                return guidance.masked_shares_B()

            yield (
                batch.inputs["input_ids"],
                batch.valid_BT,
                lambda watcher, batch=batch: watched.watch(batch, watcher),
                attacked,
            )

    return passes(), watched.number, watched.tokenizer, _labels(watched.tokenizer, token_labels)


def _perturbed_passes(run: Run) -> tuple[Passes, int, Any, Callable[..., list[str]]]:
    """The passes in which the embeddings of a model of a task are perturbed."""
    import torch

    from guidance.perturbations import (
        freelb_ascend,
        freelb_start,
        perturbed,
        smart_distance,
        smart_start,
        smart_step,
    )
    from pipelines.probing.losses import HeldOut
    from pipelines.probing.sequences import token_labels
    from pipelines.training.adversarial import DEFAULTS

    config = run.config
    held_out = HeldOut(run.inputs, config, config.seed)
    model, handle = held_out.model, held_out.handle
    known = DEFAULTS[config.by]
    rate = float(known["rate"] if config.rate is None else config.rate)
    size = float(known["start"] if config.start is None else config.start)
    embeddings: Any = model.get_input_embeddings()
    width = embeddings.weight.shape[1]

    def perturbation(batch: Any, valid_BT: Any, seeds_B: Any) -> Any:
        if config.by == "smart":
            clean = held_out.outputs(batch).detach()
            delta = smart_start(seeds_B, valid_BT, width, size).requires_grad_(True)
            with perturbed(embeddings, delta):
                moved = held_out.outputs(batch)
            distance = smart_distance(clean, moved, regression=held_out.is_regression)
            (gradient,) = torch.autograd.grad(distance, delta)
            return smart_step(gradient, valid_BT, rate)
        delta = freelb_start(seeds_B, valid_BT, width, size)
        for _ in range(config.steps):
            delta = delta.detach().requires_grad_(True)
            with perturbed(embeddings, delta):
                loss = held_out.loss_of(held_out.outputs(batch), batch)
            (gradient,) = torch.autograd.grad(loss, delta)
            delta = freelb_ascend(delta.detach(), gradient, valid_BT, rate)
        return delta

    def passes() -> Passes:
        seen = 0
        for batch in held_out.task_batches():
            ids_BT = batch.inputs["input_ids"]
            valid_BT = batch.inputs["attention_mask"].bool()
            seeds_B = (torch.arange(seen, seen + len(ids_BT)) + (config.seed << 32)).to(ids_BT.device) % 2**62
            seen += len(ids_BT)
            inputs = {**batch.inputs, **batch.seen}

            def clean(watcher: Callable[..., object], inputs: Any = inputs) -> None:
                handle.watch(watcher, **inputs)

            def attacked(
                watcher: Callable[..., object],
                batch: Any = batch,
                inputs: Any = inputs,
                valid_BT: Any = valid_BT,
                seeds_B: Any = seeds_B,
            ) -> Mapping[Any, Any]:
                delta = perturbation(batch, valid_BT, seeds_B)
                with perturbed(embeddings, delta.detach()):
                    handle.watch(watcher, **inputs)
                return {}

            yield ids_BT, valid_BT, clean, attacked

    return passes(), held_out.number, held_out.tokenizer, _labels(held_out.tokenizer, token_labels)


def _labels(tokenizer: Any, name: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda ids: name(tokenizer, ids.cpu().numpy())


def _by_layer(table: list[dict[str, Any]], masked: Mapping[int, float]) -> list[dict[str, Any]]:
    names = [f"{name}{when}" for name in FIGURES for when in ("", "_attacked")]
    rows = []
    for layer in sorted({row["layer"] for row in table if row["attention"] == "self"}):
        own = [row for row in table if row["layer"] == layer and row["attention"] == "self"]
        means = {name: sum(row[name] for row in own) / len(own) for name in names}
        rows.append({"layer": layer, "masked": masked.get(layer), **means})
    return rows


def _picture(shown: Mapping[str, Any], config: Config, model: str) -> bytes:
    from pipelines.drawing import attention_grid

    rows = {
        words: {f"head {n}": found for n, found in enumerate(shown[name])}
        for name, words in (("clean", "no attack"), ("attacked", "attacked"))
    }
    return attention_grid(
        rows, shown["labels"], title=f"{model} without and under attack: layer {config.layer}, first example"
    )


def _table(artifact: Artifact, config: Config) -> Table:
    from pipelines.probing.tables import shares

    names = ("masked", "entropy", "entropy_attacked", "highest", "highest_attacked", "special", "special_attacked")
    rows = [(str(row["layer"]), *shares(row, names)) for row in artifact.counts["by_layer"]]
    return Table(("layer", "masked", "entropy", "attacked", "highest", "attacked", "special", "attacked"), rows)


STAGE = probe(
    "attack",
    1,
    Config,
    measure,
    takes=ON_SEQUENCES,
    table=_table,
    help="""Show what an attack does to attention: that of the model's plan, FreeLB or SMART.

    The table has, by layer, the share of query-key pairs that an adversary hides, and how spread attention is without and under the
    attack.
    """,
    examples=(
        "guide probe attack reviews-asa reviews",
        "guide probe attack reviews-model reviews --by freelb --limit 100",
    ),
)

run = STAGE.run
