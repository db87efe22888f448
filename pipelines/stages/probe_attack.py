"""Stage ``probe-attack``: what does an attack do to attention?

Reads a model of a task or a guided model, and its data.  Writes probe@1: ``heads.parquet`` (one row for each head: its attention without
and under the attack), ``probe.json`` (by layer, with the share of units that an adversary switches off) and ``maps.png`` (the heads of one
layer on one example, without and under the attack).

Source: Wu et al. 2023, figures 1, 5 and 6; FreeLB and SMART as in `guidance.perturbations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine.declaration import Table
from pipelines.engine.stage import Run
from pipelines.probing.heads import no_such_head, shares, write_heads
from pipelines.probing.probe import Findings, SequencesConfig, probe, refuse_unread
from pipelines.stages.reading import ON_SEQUENCES
from pipelines.storage.artifacts import Artifact
from pipelines.training.learner import name_of_model

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from guidance.sites import Site
    from pipelines.probing.losses import TaskBatch
    from pipelines.probing.sequences import SequenceBatch

FIGURES: Mapping[str, str] = {
    "entropy": "mean entropy of rows, from 0, one key, to 1, all keys alike",
    "highest": "mean of the highest attention of each row",
    "special": "mean attention of a token on special tokens",
}


class Config(SequencesConfig):
    """Which attack, and on which examples."""

    by: Literal["plan", "freelb", "smart"] = Field(
        "plan",
        description="The attack: the adversary or random masks of the model's plan; or FreeLB or SMART on its task.",
    )
    limit: int = Field(500, ge=0, description="Maximum number of examples; 0 for all.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of what is random in the attack.")
    steps: int = Field(3, ge=1, le=100, description="Steps of FreeLB.")
    rate: float | None = Field(None, gt=0, description="Step size; by default 0.1 for FreeLB and 0.001 for SMART.")
    start: float | None = Field(
        None, ge=0, description="Size of the first perturbation; by default 0.02 for FreeLB and 0.00001 for SMART."
    )
    layer: int = Field(0, ge=0, description="The layer that maps.png shows, from 0.")


def _check_settings(config: Config, references: Mapping[str, Any]) -> None:
    """Raises InputError for a setting of another attack."""
    if config.by == "plan":
        refuse_unread(config, ("steps", "rate", "start"), "it is for --by freelb and smart")
    elif config.by == "smart":
        refuse_unread(config, ("steps",), "SMART takes one step; it is for --by freelb")


def measure(run: Run[Config]) -> Findings:
    """The attention of every head without the attack and under it.

    Raises:
        InputError: the plan of the model attacks nothing; for FreeLB and SMART the model has no head for a task; or it has no such
            layer.
    """
    import torch

    from pipelines.probing.sequences import Means, token_labels

    config = run.config
    attack: PlanAttack | EmbeddingAttack = PlanAttack(run) if config.by == "plan" else EmbeddingAttack(run)
    known = [
        (site.layer, site.num_heads - 1)
        for own in attack.handle.sites.values()
        for site in own
        if site.attention == "self"
    ]
    if config.layer not in dict(known):
        raise no_such_head(config.layer, None, known)
    is_causal = attack.handle.is_decoder
    special = torch.tensor(attack.tokenizer.all_special_ids)
    means, masked, shown = {"": Means(), "_attacked": Means()}, Means(), None
    with run.progress.task("probe", total=attack.number, unit="examples") as bar:
        batch: Any
        for batch in attack.batches():
            ids_BT, valid_BT = batch.inputs["input_ids"], batch.valid_BT
            special_BT = torch.isin(ids_BT, special.to(ids_BT.device)) & valid_BT
            clean, attacked = (Watcher(special_BT, valid_BT, config.layer, is_causal) for _ in means)
            attack.clean(batch, clean)
            hidden = attack.attacked(batch, attacked)
            for mean, watcher in zip(means.values(), (clean, attacked), strict=True):
                mean.add(watcher.figures)
            if hidden:
                masked.add({site: shares_B[:, None, None] for site, shares_B in hidden.items()})
            if shown is None:
                shown = (
                    clean.maps,
                    attacked.maps,
                    token_labels(attack.tokenizer, ids_BT[0][valid_BT[0]].cpu().numpy()),
                )
            bar.advance(len(ids_BT))
    figures: dict[str, dict[Site, Tensor]] = {}
    units: dict[str, str] = {}
    for number, (name, unit) in enumerate(FIGURES.items()):
        for when, words in (("", ""), ("_attacked", ", under the attack")):
            figures[name + when], units[name + when] = means[when].column(number), unit + words
    table = write_heads(run, figures, units)
    by_layer = _by_layer(table, {site.layer: float(share) for site, share in masked.column(0).items()})
    if shown:
        run.out.write("maps.png", _picture(*shown, config, name_of_model(run.inputs["model"])))
    return Findings({"examples": means[""].examples, "heads": len(table)}, {"by_layer": by_layer}, {"by": config.by})


class Watcher:
    """Sees the attention of each site in a pass over a batch.

    Attributes:
        figures: `FIGURES` of each site, (B, H, 3).
        maps: those of the shown layer on the first example; None without such a layer.
    """

    def __init__(self, special_BT: Tensor, valid_BT: Tensor, layer: int, is_causal: bool) -> None:
        from guidance.probes.relevance import highest_entropy

        self.figures: dict[Site, Tensor] = {}
        self.maps: np.ndarray | None = None
        self._valid_BT, self._layer = valid_BT, layer
        self._wanted = (special_BT[:, None, None, :] & valid_BT[:, None, :, None]).float()
        self._lengths_B1 = valid_BT.sum(-1, keepdim=True).float()
        self._most_B1 = highest_entropy(valid_BT, is_causal=is_causal)[:, None]

    def __call__(self, site: Site, attention: Tensor) -> None:
        import torch

        from guidance.probes.summary import summarise

        summary = summarise(attention, self._wanted, self._valid_BT)
        entropy_BH = summary.entropy_BHQ.sum(-1) / (self._lengths_B1 * self._most_B1)
        highest_BH = summary.highest_BHQ.sum(-1) / self._lengths_B1
        self.figures[site] = torch.stack([entropy_BH, highest_BH, summary.masses_BHP[..., 0]], dim=-1)
        if site.layer == self._layer and site.attention == "self":
            size = int(self._valid_BT[0].sum())
            self.maps = attention[0, :, :size, :size].float().cpu().numpy()


class PlanAttack:
    """The plan of a guided model attacks.  Raises InputError if it attacks nothing."""

    def __init__(self, run: Run[Config]) -> None:
        from pipelines.probing.sequences import WatchedSequences

        self._config, self._watched = run.config, WatchedSequences(run.inputs, run.config)
        self.number, self.tokenizer, self.handle = self._watched.number, self._watched.tokenizer, self._watched.handle
        if not self._watched.handle.attacks:
            raise InputError(
                "the plan of the model attacks nothing", hint="--by freelb or smart; or train with --plan preset:asa"
            )

    def batches(self) -> Iterator[SequenceBatch]:
        """The sequences in their order."""
        return self._watched.batches(self._config.batch_size)

    def clean(self, batch: SequenceBatch, watcher: Watcher) -> None:
        """Show the attention without the attack."""
        self._watched.handle.watch(watcher, **self._watched.guide_inputs(batch))

    def attacked(self, batch: SequenceBatch, watcher: Watcher) -> Mapping[Site, Tensor]:
        """Show the attention under the attack; gives for each site the share of units that is switched off, (B,)."""
        import torch

        from guidance.calls import guide_batch
        from guidance.models.canary import evaluating
        from guidance.patterns.features import is_feature

        inputs = self._watched.guide_inputs(batch)
        seeds_B = torch.tensor(_seeds(self._config.seed, batch.numbers))
        guidance = guide_batch(self._watched.handle, inputs, measuring=False).attack(seeds_B)
        guidance.recorded, guidance.watcher = {}, watcher
        with evaluating(self._watched.model), torch.no_grad():
            given = {name: value for name, value in inputs.items() if not is_feature(name)}
            self._watched.model(**given, guidance=guidance)
        masked: Mapping[Site, Tensor] = guidance.masked_shares_B()
        return masked


class EmbeddingAttack:
    """The embeddings of a model of a task are perturbed, by FreeLB or by SMART."""

    def __init__(self, run: Run[Config]) -> None:
        from pipelines.probing.losses import HeldOut
        from pipelines.training.adversarial import DEFAULTS

        self._config, self._held_out = run.config, HeldOut(run.inputs, run.config, run.config.seed)
        self.number, self.tokenizer, self.handle = (
            self._held_out.number,
            self._held_out.tokenizer,
            self._held_out.handle,
        )
        self._embeddings: Any = self._held_out.model.get_input_embeddings()
        known, rate, start = DEFAULTS[run.config.by], run.config.rate, run.config.start
        self._rate = float(known["rate"] if rate is None else rate)
        self._start = float(known["start"] if start is None else start)

    def batches(self) -> Iterator[TaskBatch]:
        """The examples in their order."""
        return self._held_out.task_batches()

    def clean(self, batch: TaskBatch, watcher: Watcher) -> None:
        """Show the attention without the attack."""
        self._held_out.handle.watch(watcher, **{**batch.inputs, **batch.seen})

    def attacked(self, batch: TaskBatch, watcher: Watcher) -> Mapping[Site, Tensor]:
        """Show the attention under the attack, which switches no units off."""
        from guidance.perturbations import perturbed

        with perturbed(self._embeddings, self._perturbation(batch).detach()):
            self.clean(batch, watcher)
        return {}

    def _perturbation(self, batch: TaskBatch) -> Tensor:
        import torch

        from guidance.perturbations import (
            freelb_ascend,
            freelb_start,
            perturbed,
            smart_distance,
            smart_start,
            smart_step,
        )

        held_out, width = self._held_out, self._embeddings.weight.shape[1]
        valid_BT = batch.valid_BT
        seeds_B = torch.tensor(_seeds(self._config.seed, batch.numbers), device=valid_BT.device)
        if self._config.by == "smart":
            clean = held_out.outputs(batch).detach()
            delta = smart_start(seeds_B, valid_BT, width, self._start).requires_grad_(True)
            with perturbed(self._embeddings, delta):
                moved = held_out.outputs(batch)
            distance = smart_distance(clean, moved, regression=held_out.is_regression)
            (gradient,) = torch.autograd.grad(distance, delta)
            return smart_step(gradient, valid_BT, self._rate)
        delta = freelb_start(seeds_B, valid_BT, width, self._start)
        for _ in range(self._config.steps):
            delta = delta.detach().requires_grad_(True)
            with perturbed(self._embeddings, delta):
                loss = held_out.loss_of(held_out.outputs(batch), batch)
            (gradient,) = torch.autograd.grad(loss, delta)
            delta = freelb_ascend(delta.detach(), gradient, valid_BT, self._rate)
        return delta


def _seeds(seed: int, numbers: Iterable[int]) -> list[int]:
    """A seed for each example."""
    return [((seed << 32) + int(number)) % 2**62 for number in numbers]


def _by_layer(table: list[dict[str, Any]], masked: Mapping[int, float]) -> list[dict[str, Any]]:
    names = [f"{name}{when}" for name in FIGURES for when in ("", "_attacked")]
    rows = []
    for layer in sorted({row["layer"] for row in table if row["attention"] == "self"}):
        own = [row for row in table if row["layer"] == layer and row["attention"] == "self"]
        means = {name: sum(row[name] for row in own) / len(own) for name in names}
        rows.append({"layer": layer, "masked": masked.get(layer), **means})
    return rows


def _picture(clean: Any, attacked: Any, labels: list[str], config: Config, model: str) -> bytes:
    from pipelines.drawing import attention_grid

    rows = {
        words: {f"head {n}": each for n, each in enumerate(maps)}
        for words, maps in (("no attack", clean), ("attacked", attacked))
    }
    return attention_grid(rows, labels, title=f"{model} without and under attack: layer {config.layer}, first example")


def _table(artifact: Artifact, config: Config) -> Table:
    names = ("masked", "entropy", "entropy_attacked", "highest", "highest_attacked", "special", "special_attacked")
    rows = [(str(row["layer"]), *shares(row, names)) for row in artifact.counts["by_layer"]]
    titles = ("masked", *(f"{name}, {when}" for name in FIGURES for when in ("clean", "attacked")))
    notes = (
        "masked: share of query-key pairs that the attack hides; entropy: of the most that rows can have; highest: attention on the key "
        "with the most; special: attention on special tokens; means over rows and heads",
    )
    return Table(("layer", *titles), rows, notes)


STAGE = probe(
    "attack",
    2,
    Config,
    measure,
    takes=ON_SEQUENCES,
    table=_table,
    writes={},
    check=_check_settings,
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
