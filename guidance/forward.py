"""A plan at work on one batch: what travels through a model as ``guidance=``, and gives the losses afterwards.

It holds the features of the batch, works each pattern out once for all layers that see the same, and keeps what the
attention function found.  Everything that is kept is assigned, never appended, because gradient checkpointing runs the
forward pass twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from guidance.compilation import NOTHING, Work
from guidance.errors import GuidanceHadNoEffect, InputError, PlanError, UnknownName
from guidance.mechanisms.adversary import Attack, Form, RandomMask, divergence
from guidance.mechanisms.attention_loss import Target
from guidance.mechanisms.fixed import Room
from guidance.mechanisms.logit_loss import Rows
from guidance.mechanisms.masks import joined
from guidance.patterns.catalogue import Predicate
from guidance.patterns.features import Tokens
from guidance.plan import Plan
from guidance.sites import EXTRA, Site

if TYPE_CHECKING:
    from guidance.installation import Handle

_REENTRANT = "gradient checkpointing needs use_reentrant=False; without gradients, ask under no_grad too"


def key_of(plan: Plan, number: int) -> str:
    """The name of the parameters of a guide."""
    return f"{plan.guides[number].mechanism}{number}"


def _keys_of(site: Site) -> str:
    return "encoder" if site.attention == "cross" else site.stack


@dataclass
class Guidance:
    """A plan at work on one batch; pass it to the model as ``guidance=``, then ask it for the losses.

    Attributes:
        tokens: the features of the batch, by stack; a stack that is not told has none.
        step: optimizer steps so far, for masks that follow a schedule.
        attacking: this is the second pass, in which the adversary is at work and losses on heads are not.
        seeds_B: int64, from which the attack on each example is drawn, where it is drawn at all.
        measuring: losses on heads are wanted; at inference nobody asks for them.
        distances: per (guide, site), the loss of each example, (B,); filled by the forward pass.
        attacks: per (guide, site), what the adversary did; filled by the forward pass.
        kept: None, or per site the probabilities of all its heads, (B, H, Q, K); filled by the forward pass.
    """

    handle: Handle
    tokens: Mapping[str, Tokens]
    step: int = 0
    attacking: bool = False
    seeds_B: Tensor | None = None
    measuring: bool = True
    distances: dict[tuple[int, Site], Tensor] = field(default_factory=dict)
    attacks: dict[tuple[int, Site], Attack] = field(default_factory=dict)
    kept: dict[Site, Tensor] | None = None
    _cache: dict[Any, Any] = field(default_factory=dict)
    _booleans: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _rooms: list[tuple[Tensor | None, Any, Room]] = field(default_factory=list)
    _calls: dict[str, int] = field(default_factory=dict)

    # losses

    def per_example(self) -> dict[str, Tensor]:
        """For each loss that is at work, by its guide's label: the loss of each example, (B,), summed over layers.

        Neither weight nor schedule nor `Guide.reference_length` is applied, nor the division by `denominators`.

        Raises:
            GuidanceHadNoEffect: the forward pass did not reach every site of the plan, or its gradients are cut off.
        """
        losses: dict[str, Tensor] = {}
        for site, work in self.handle.work.items():
            learns = self.handle.learns(site)
            for number, _ in (*work.probabilities, *work.scores):
                if (number, site) not in self.distances:
                    raise GuidanceHadNoEffect(
                        f"guide {number + 1} did not reach {site.name}",
                        hint="call the model with guidance=..., once, before asking for the losses",
                    )
                label = self.handle.plan.labels[number]
                loss = self.distances[number, site]
                if learns and torch.is_grad_enabled() and not loss.requires_grad:
                    raise GuidanceHadNoEffect(
                        f"guide {number + 1}: its loss at {site.name} has no gradient",
                        hint=_REENTRANT,
                    )
                losses[label] = losses[label] + loss if label in losses else loss
        return losses

    def weights_B(self, label: str) -> Tensor:
        """How much each example counts for a guide, (B,): 0 where there is only padding, else 1, or with a
        `Guide.reference_length` the example's length over it."""
        if label not in self.handle.plan.labels:
            raise UnknownName("guide", label, self.handle.plan.labels)
        guide = self.handle.plan.guides[self.handle.plan.labels.index(label)]
        lengths_B = self._stack(guide.stack).lengths_B.float()
        return lengths_B / guide.reference_length if guide.reference_length else (lengths_B > 0).float()

    def denominators(self) -> dict[str, Tensor]:
        """By what the sum over the examples of a batch is divided, by label: the number of examples that are not only
        padding; for ``logit_loss`` the number of mis-predictions.  It is known before the forward pass."""
        found: dict[str, Tensor] = {}
        for label in self.handle.alphas(0, 1):
            guide = self.handle.plan.guides[self.handle.plan.labels.index(label)]
            if guide.acts.place == "scores":
                in_vocabulary, every = self.mispredictions(label)
                found[label] = in_vocabulary if guide.how.rows == "in_vocabulary" else every
            else:
                found[label] = (self._stack(guide.stack).lengths_B > 0).sum()
        return found

    def mispredictions(self, label: str) -> tuple[Tensor, Tensor]:
        """How many mis-predictions the pattern of a ``logit_loss`` says anything about, and how many there are."""
        number = self.handle.plan.labels.index(label)
        stack = self.handle.plan.guides[number].stack
        rows = self._mispredicted(stack)
        return rows.in_vocabulary_BR(self._wish(number, stack)).sum(), rows.real_BR.sum()

    def loss(self, step: int = 0, total_steps: int = 1) -> Tensor:
        """The weighted sum of all losses on heads, averaged over this batch: a scalar to add to the task's loss after
        ``step`` of ``total_steps`` optimizer steps."""
        alphas, each = self.handle.alphas(step, total_steps), self.per_example()
        terms = [
            alphas[label] * (self.weights_B(label) * each[label]).sum() / count.clamp(min=1)
            for label, count in self.denominators().items()
        ]
        return torch.stack(terms).sum() if terms else torch.zeros((), device=self._device)

    @property
    def _num_examples(self) -> Tensor:
        return (next(iter(self.tokens.values())).lengths_B > 0).sum()

    @property
    def _device(self) -> torch.device:
        return next(iter(self.tokens.values())).ids_BT.device

    # the second pass

    def attack(self, seeds_B: Tensor | None = None) -> Guidance:
        """The guidance of a second forward pass over the same batch, in which adversaries and random masks attack.

        Args:
            seeds_B: int64, a number for each example: what is random in its attack depends on it alone, whatever else is in
                the batch.  They are drawn when not given.

        Raises:
            PlanError: the plan has none at work.
        """
        if not self.handle.attacks:
            raise PlanError("no guide of this plan attacks", hint='mechanism = "adversary"')
        if seeds_B is None:
            seeds_B = torch.randint(1 << 62, (len(next(iter(self.tokens.values())).ids_BT),))
        return Guidance(self.handle, self.tokens, self.step, attacking=True, seeds_B=seeds_B.to(self._device))

    def adversarial_loss(
        self,
        clean: Tensor,
        attacked: Tensor,
        form: Form = "classification",
        selected: Tensor | None = None,
        *,
        step: int = 0,
        total_steps: int = 1,
    ) -> Tensor:
        """What the second pass adds to the task's loss: the divergence of its outputs, and the adversary's penalty.

        The guide's weight and schedule are those of the divergence; the penalty has its own weight.

        Args:
            clean, attacked, form, selected: see `guidance.mechanisms.adversary.divergence`.
        """
        alpha = self.handle.attack_alpha(step, total_steps)
        return alpha * divergence(clean, attacked, form, selected) + self.penalty()

    def penalty(self) -> Tensor:
        """What the adversary pays for the units it leaves on: summed over layers, averaged over the examples.

        Raises:
            GuidanceHadNoEffect: the second pass has not been made.
        """
        return self.penalties_B().sum() / self._num_examples.clamp(min=1)

    def penalties_B(self) -> Tensor:
        """The penalty of each example, (B,), with its weight."""
        total = torch.zeros(len(next(iter(self.tokens.values())).ids_BT), device=self._device)
        for (number, site), attack in self._made_attacks():
            how = self.handle.plan.guides[number].how
            if not isinstance(how, RandomMask):
                if torch.is_grad_enabled() and not attack.kept_B.requires_grad and self.handle.learns(site, number):
                    raise GuidanceHadNoEffect(
                        f"guide {number + 1}: its penalty at {site.name} has no gradient", hint=_REENTRANT
                    )
                total = total + how.penalty * how.penalties_B(attack)
        return total

    def masking_proportions(self) -> dict[Site, float]:
        """For each attacked site, the share of units between valid tokens that the attack has switched off."""
        found: dict[Site, list[float]] = {}
        for (_, site), attack in self._made_attacks():
            found.setdefault(site, []).append(
                1 - float(attack.kept_B.detach().sum() / attack.units_B.sum().clamp(min=1))
            )
        return {site: sum(shares) / len(shares) for site, shares in found.items()}

    def masked_shares_B(self) -> dict[Site, Tensor]:
        """The same of each example, (B,), 0 for padding, without waiting for the device."""
        found: dict[Site, list[Tensor]] = {}
        for (_, site), attack in self._made_attacks():
            left_B = attack.units_B - attack.kept_B.detach()
            found.setdefault(site, []).append(left_B.double() / attack.units_B.clamp(min=1))
        return {site: torch.stack(shares).mean(0) for site, shares in found.items()}

    def _made_attacks(self) -> list[tuple[tuple[int, Site], Attack]]:
        for number, site in self.handle.attacks:
            if (number, site) not in self.attacks:
                raise GuidanceHadNoEffect(
                    f"guide {number + 1} did not attack {site.name}",
                    hint="call the model with guidance=guidance.attack(), once, before asking",
                )
        return list(self.attacks.items())

    # inside the forward pass

    def parameters(self, module: nn.Module, number: int) -> nn.Module:
        """What a guide has added to an attention module."""
        added: nn.Module = getattr(module, EXTRA)[key_of(self.handle.plan, number)]
        return added

    def works_at(self, module: nn.Module) -> bool:
        """Whether there is anything to do in this attention module."""
        sites: tuple[Site, ...] = getattr(module, "guide_sites", ())
        return self.kept is not None or any(self.work(site) for site in sites)

    def work(self, site: Site) -> Work | None:
        """What is to be done at a site in this pass, if anything."""
        work = self.handle.work.get(site)
        if work and not self.measuring:
            work = replace(work, probabilities=(), scores=())
        if self.kept is not None:
            return work or NOTHING
        return work if work and work.acts(attacking=self.attacking) else None

    def boolean(self, mask: Tensor) -> Tensor:
        """A mask of numbers as booleans; the same object for the same mask, which layers share."""
        for known, boolean in self._booleans:
            if known is mask:
                return boolean
        self._booleans.append((mask, mask.bool()))
        return self._booleans[-1][1]

    def site(self, module: nn.Module) -> Site | None:
        """The site of this call of a module; layers that share a module are told apart by their order."""
        sites: tuple[Site, ...] = getattr(module, "guide_sites", ())
        if len(sites) < 2:
            return sites[0] if sites else None
        call = self._calls.get(sites[0].name, 0)
        self._calls[sites[0].name] = call + 1
        return sites[call % len(sites)]

    def queries(self, site: Site) -> Tokens:
        """The tokens that ask at a site."""
        return self._stack(site.stack)

    def keys(self, site: Site) -> Tokens:
        """The tokens that are looked at."""
        return self._stack(_keys_of(site))

    def _stack(self, stack: str) -> Tokens:
        if stack not in self.tokens:
            name = "decoder_input_ids" if stack == "decoder" else "input_ids"
            raise InputError(
                f"the plan guides {stack} tokens, which the guidance has not seen", hint=f"give guide() {name}"
            )
        return self.tokens[stack]

    def predicate(self, number: int, site: Site, room: Room) -> Predicate:
        """The pattern of a guide on this batch, within what queries may see at all."""
        key = ("predicate", number, self._place(room))
        if key not in self._cache:
            predicate = self._wish(number, _keys_of(site))
            if site.attention == "cross":
                predicate = predicate.across(self.queries(site).valid_BT)
            elif not room.is_plain:
                predicate = predicate.restricted(room.allowed_BQK)
            self._cache[key] = predicate
            if self.handle.plan.guides[number].acts.place != "scores":  # its weights are not written out
                self.handle.count_matches(number, predicate.counts().sum())
        return self._cache[key]

    def _wish(self, number: int, stack: str) -> Predicate:
        """The pattern of a guide on this batch."""
        key = ("wish", number, stack)
        if key not in self._cache:
            guide, tokens = self.handle.plan.guides[number], self._stack(stack)
            assert guide.wish is not None
            # masks and biases may not know what a generator put where the model sees a mask
            if guide.acts.place == "scores" and "predicted" in tokens.columns:
                tokens = replace(tokens, ids_BT=tokens.column("predicted"))
            self._cache[key] = guide.wish.build(tokens)
        predicate: Predicate = self._cache[key]
        return predicate

    def target(self, number: int, site: Site, room: Room) -> Target:
        """What an ``attention_loss`` wants of the rows of a call."""
        key = ("target", number, self._place(room))
        if key not in self._cache:
            guide, queries = self.handle.plan.guides[number], self.queries(site)
            assert guide.wish is not None
            if room.is_plain:
                sizes_BQ = self.keys(site).lengths_B[:, None] * queries.valid_BT.float()
            else:
                sizes_BQ = (room.allowed_BQK & queries.valid_BT[:, :, None]).sum(-1).float()
            predicate = self.predicate(number, site, room)
            self._cache[key] = Target.of(guide.wish, predicate, guide.how, sizes_BQ, queries.valid_BT)
        return self._cache[key]

    def padding(self, stack: str) -> Tensor:
        """Which keys added heads may see, (B, 1, Q, K); the same object for all layers."""
        key = ("padding", stack)
        if key not in self._cache:
            valid_BT = self._stack(stack).valid_BT
            self._cache[key] = valid_BT[:, None, None].expand(-1, 1, valid_BT.shape[1], -1)
        mask: Tensor = self._cache[key]
        return mask

    def rows(self, number: int, site: Site, room: Room) -> tuple[Tensor, Tensor]:
        """The mis-predicted rows of the batch: their positions, (B, R), and the weights of their keys, (B, R, K)."""
        rows, key = self._mispredicted(site.stack), ("rows", number, self._place(room))
        if key not in self._cache:
            weights_BRK = self._cache[key] = rows.weights_BRK(self.predicate(number, site, room))
            self.handle.count_matches(number, (weights_BRK > 0).sum())
        return rows.places_BR, self._cache[key]

    def _mispredicted(self, stack: str) -> Rows:
        key = ("mispredicted", stack)
        if key not in self._cache:
            self._cache[key] = Rows.of(self._stack(stack))
        rows: Rows = self._cache[key]
        return rows

    def bias(self, number: int, site: Site, room: Room) -> Tensor:
        """What a bias adds to the scores: (B, Q, K)."""
        key = ("bias", number, self._place(room))
        if key not in self._cache:
            self._cache[key] = self.handle.plan.guides[number].how.scores(self.predicate(number, site, room))
        return self._cache[key]

    def room(self, module: nn.Module, mask_B1QK: Tensor | None, query: Tensor, key: Tensor, windowed: bool) -> Room:
        """What queries may see at all; the same object for all layers that share a mask."""
        # masks are told apart as objects; several have none at all
        is_causal = bool(getattr(module, "is_causal", False))
        shape = (query.shape[0], query.shape[2], key.shape[2])
        facts = (shape, is_causal, windowed)
        for mask, known, room in self._rooms:
            if mask is mask_B1QK and known == facts:
                return room
        sites: tuple[Site, ...] = getattr(module, "guide_sites", ())
        self._check_batch(sites[0], shape)
        if mask_B1QK is None:
            allowed = torch.ones(shape, dtype=torch.bool, device=query.device)
            allowed = allowed.tril() if is_causal else allowed
        elif mask_B1QK.dtype != torch.bool or mask_B1QK.shape[1] != 1:
            raise InputError(
                f"guided heads want a boolean mask (B, 1, Q, K), not {mask_B1QK.dtype} {tuple(mask_B1QK.shape)}",
                hint="give the model the attention mask of its tokenizer, (B, T)",
            )
        else:
            allowed = mask_B1QK[:, 0].expand(shape)
        room = Room(allowed, is_causal, not (is_causal or windowed))
        self._rooms.append((mask_B1QK, facts, room))
        return room

    def _place(self, room: Room) -> int:
        """Which of the rooms of this batch it is; compiled code cannot keep what `id` says."""
        return next(place for place, (_, _, known) in enumerate(self._rooms) if known is room)

    def _check_batch(self, site: Site, shape: tuple[int, int, int]) -> None:
        """Raises InputError when the model reads a batch of another shape than the guidance was made of."""
        for stack, read in ((site.stack, shape[:2]), (_keys_of(site), (shape[0], shape[2]))):
            if stack in self.tokens and (mine := tuple(self.tokens[stack].ids_BT.shape)) != tuple(read):
                raise InputError(
                    f"the guidance is of a batch {mine}, and the {stack} reads one of {tuple(read)}",
                    hint="make it anew for every batch: handle.guide(input_ids, attention_mask)",
                )

    def allowed(self, wishes: tuple[tuple[int, ...], ...], site: Site, room: Room) -> Tensor:
        """What heads may see, each masked by some guides: bool (B, heads, Q, K)."""
        key = ("allowed", wishes, self._place(room))
        if key not in self._cache:
            each = {numbers: [self.predicate(n, site, room).dense() for n in numbers] for numbers in set(wishes)}
            masks = {numbers: joined(dense, room.allowed_BQK) for numbers, dense in each.items()}
            self._cache[key] = torch.stack([masks[numbers] for numbers in wishes], dim=1)
        return self._cache[key]

    def empty(self, room: Room) -> Tensor:
        """Queries that may see nothing: (B, 1, Q, 1)."""
        key = ("empty", self._place(room))
        if key not in self._cache:
            self._cache[key] = ~room.allowed_BQK.any(-1)[:, None, :, None]
        return self._cache[key]
