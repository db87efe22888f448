"""What a training step costs with each preset, over the same model without it, side by side.

    python -m benchmarks.step_cost [--device cuda] [--rounds 9] [--only ag,asa] [--lengths 128] [--json FILE]
    python -m benchmarks.step_cost --beside CHECKOUT   # also the ratio to another checkout of this project
    OMP_NUM_THREADS=1 python -m benchmarks.step_cost --device cpu --processor-time   # on a machine that others use too

A small RoBERTa (4 layers x 256, 8 heads) that predicts 15 % of the tokens of a batch, the same for all; forward, backward
and update in turn.  What is compared with is ``plain``, the same step without a plan:

    whole      no guide; logits of all tokens and the loss that the model itself computes, as Hugging Face's Trainer does
    ag         half of the heads pulled to next, previous and first
    kl         the same by Kullback-Leibler divergence
    roles      five heads of eight masked, with made-up syntax and rarity; ``unparsed``: three, without syntax
    neighbours two heads of eight fixed to the next and the previous token
    patterns   two masked and two fixed heads of eight; sentences of 16 tokens
    pal        the same patterns in extra heads beside the layer's own
    asa        all heads attacked in a second pass, which predicts 15 % of the tokens, with divergence and penalty
    fix        all heads fixed: what attention that is written down costs
    mix        the stream mixed with the next and the previous token in all layers; ``mix-values``: the values
    gaussian   the heads of the preset hard-coded
    random     all heads attacked by random masks in a second pass
    explicit   as whole, with `output_attentions` and the loss of ag written out, as one would by hand
    mcmisp     an ELECTRA of that size with a generator of a third: with conflicts at mis-predictions, over without

Times are medians over rounds, in each of which all take their turn in a random order; ratios are medians of the ratios
within a round; with ``--processor-time`` these are seconds of the processor, not of the clock.  Memory is the peak of one step above what was allocated before it (CUDA), or the bytes that autograd keeps
for the backward pass (CPU).  With ``--beside`` two processes, one for each checkout, take turns within every round; the
last columns are the time and the memory of this checkout over those of the other one.  The parts of a step (first forward pass, second, losses, backward, update) are medians too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

import guidance
from guidance import Guide, Plan, install
from guidance.objectives.selection import logits_at, places_of

VOCABULARY, SENTENCE = 4000, 16
FIX = Plan((Guide("next", "fix", heads=("first 4",)), Guide("previous", "fix", heads=("last 4",))))
MIX, MIX_VALUES = (
    Plan(tuple(Guide(pattern, "mix", options={"of": (of,)}) for pattern in ("next", "previous")))
    for of in ("stream", "value")
)
OWN = {"fix": FIX, "mix": MIX, "mix-values": MIX_VALUES}
Clock = Callable[[str], None]


class Size(NamedTuple):
    """The shape of a model."""

    layers: int
    width: int
    heads: int


SMALL = Size(layers=4, width=256, heads=8)


class Words:
    """As much of a tokenizer as the features of a vocabulary need."""

    cls_token_id, sep_token_id, bos_token_id, eos_token_id = 0, 2, None, None

    def __len__(self) -> int:
        return VOCABULARY

    def get_vocab(self) -> dict[str, int]:
        return {".": 5, ",": 6, **{f"w{n}": n for n in range(7, VOCABULARY)}}


def sizes(length: int, dropout: float, size: Size) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.width,
        "max_position_embeddings": length + 2,
        "attention_probs_dropout_prob": dropout,
        "hidden_dropout_prob": dropout,
    }


def made_up_features(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A word a token, a sentence every `SENTENCE` tokens, every word's head its neighbour, a few relations."""
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return {
        "word": place,
        "segment": place // SENTENCE,
        "idf": (ids % 97).float() / 10,
        "head": (place - 1).clamp(min=0),
        "relation": ids % 60,
    }


class Step:
    """One training step; calling it gives the seconds of its parts."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self, kind: str, length: int, batch: int, dropout: float, device: str, size: Size = SMALL, bf16: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.kind, self.device = kind, device
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=bf16)
        attention = "eager" if kind == "explicit" else "sdpa"
        config = RobertaConfig(**sizes(length, dropout, size))
        self.model: PreTrainedModel = RobertaForMaskedLM._from_config(config, attn_implementation=attention).to(device)
        self.ids = torch.randint(7, VOCABULARY, (batch, length), device=device)
        chosen = torch.rand(self.ids.shape, device=device) < 0.15
        self.places, self.labels = places_of(chosen), self.ids.where(chosen, -100)
        plan = plan_of(kind)
        self.handle: Any = install(self.model, plan, Words()) if plan else None
        self.columns = made_up_features(self.ids)
        self.finish()

    def finish(self) -> None:
        self.model.train()
        moving = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(moving, lr=1e-4)

    def loss(self, clock: Clock) -> torch.Tensor:
        handle, ids = self.handle, self.ids
        guidance = handle.guide(ids, **self.columns) if handle else None
        extra: dict[str, Any] = {"guidance": guidance} if guidance else {}
        if self.kind in ("whole", "explicit"):
            output = self.model(input_ids=ids, labels=self.labels, output_attentions=self.kind == "explicit")
            loss = output.loss
        else:
            output = logits_at(self.model, self.places, input_ids=ids, **extra)
            loss = torch.nn.functional.cross_entropy(output.logits, ids.flatten()[self.places])
        clock("forward")
        if guidance and handle and handle.attacks:
            attack = guidance.attack()
            attacked = logits_at(self.model, self.places, input_ids=ids, guidance=attack)
            clock("second pass")
            loss = loss + attack.adversarial_loss(output.logits, attacked.logits)
        if guidance:
            loss = loss + guidance.loss()
        if self.kind == "explicit":
            loss = loss + by_hand(output.attentions)
        clock("losses")
        return loss  # type: ignore[no-any-return]

    def __call__(self) -> dict[str, float]:
        parts: dict[str, float] = {}
        last = self._now()

        def clock(part: str) -> None:
            nonlocal last
            now = self._now()
            parts[part] = now - last
            last = now

        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = self.loss(clock)
        loss.backward()
        clock("backward")
        self.optimizer.step()
        clock("update")
        return parts

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return self.clock()


class ElectraStep(Step):
    """Generator and discriminator; ``mcmisp`` guides the discriminator at mis-predictions."""

    def __init__(
        self, kind: str, length: int, batch: int, dropout: float, device: str, size: Size = SMALL, bf16: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.kind, self.device = kind, device
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=bf16)
        own = sizes(length, dropout, size)
        small = sizes(length, dropout, Size(size.layers, size.width // 4, size.heads // 4))
        self.model = torch.nn.ModuleDict(  # type: ignore[assignment]
            {
                "generator": ElectraForMaskedLM(ElectraConfig(**small, embedding_size=size.width)),
                "discriminator": ElectraForPreTraining(ElectraConfig(**own, embedding_size=size.width)),
            }
        ).to(device)
        self.ids = torch.randint(7, VOCABULARY, (batch, length), device=device)
        self.chosen = torch.rand(self.ids.shape, device=device) < 0.15
        rows = torch.arange(VOCABULARY).where(torch.arange(VOCABULARY) >= 7, -1)
        table = guidance.Cooccurrence(rows, torch.rand(VOCABULARY, VOCABULARY).half())
        plan = Plan((Guide("conflict", "logit_loss", heads=("first 5",)),))
        given = {"tokenizer": Words(), "tables": {"cooccurrence": table}}
        self.handle = install(self.model["discriminator"], plan, **given) if kind == "mcmisp" else None  # type: ignore[index, arg-type]
        self.finish()

    def loss(self, clock: Clock) -> torch.Tensor:
        model: Any = self.model
        ids, chosen = self.ids, self.chosen
        places = places_of(chosen)
        logits = logits_at(model["generator"], places, input_ids=ids.masked_fill(chosen, 4)).logits
        generator_loss = torch.nn.functional.cross_entropy(logits, ids[chosen])
        with torch.no_grad():
            seen = ids.clone()
            seen[chosen] = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        wrong = seen != ids
        clock("generator")
        guidance = self.handle.guide(seen, mispredicted=wrong) if self.handle else None
        extra: dict[str, Any] = {"guidance": guidance} if guidance else {}
        loss = generator_loss + 50 * model["discriminator"](input_ids=seen, labels=wrong.long(), **extra).loss
        clock("forward")
        loss = loss + guidance.loss() if guidance else loss
        clock("losses")
        return loss  # type: ignore[no-any-return]


def plan_of(kind: str) -> Plan | None:
    """The plan of a row of the table; none for the baselines."""
    presets = {"ag": "ag", "roles": "roles", "patterns": "patterns", "pal": "pal-patterns", "asa": "asa"}
    presets |= {
        "gaussian": "gaussian",
        "random": "random-mask",
        "unparsed": "roles-unparsed",
        "neighbours": "neighbours-fixed",
    }
    if kind == "kl":
        return Plan(tuple(replace(guide, options={"distance": "kl"}) for guide in Plan.load("preset:ag").guides))
    return Plan.load(f"preset:{presets[kind]}") if kind in presets else OWN.get(kind)


def by_hand(attentions: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The loss of `ag` as one would write it: mean squared error against whole matrices."""
    length = attentions[0].shape[-1]
    whole = torch.eye(length, device=attentions[0].device)
    flat, first = torch.full_like(whole[:1], 1 / length), torch.zeros_like(whole)
    first[:, 0] = 1
    targets = [(0, torch.cat((whole[1:], flat))), (1, torch.cat((flat, whole[:-1]))), (2, first), (3, first)]
    square = torch.nn.functional.mse_loss
    losses = [square(layer[:, h], target.expand_as(layer[:, h])) for layer in attentions for h, target in targets]
    return 25 * torch.stack(losses).sum()


BASELINES = {"mcmisp": "electra"}
KINDS = (
    *("whole", "ag", "kl", "roles", "unparsed", "neighbours", "patterns", "pal"),
    *("asa", "fix", "mix", "mix-values", "gaussian", "random", "explicit", "mcmisp"),
)


def make(kind: str, *shape: Any) -> Step:
    return (ElectraStep if kind in ("electra", "mcmisp") else Step)(kind, *shape)


def kept_bytes(step: Step) -> int:
    """Peak memory of a step (CUDA), or what autograd keeps between forward and backward (CPU)."""
    step()
    if step.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would keep its own graph, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with step.autocast:
            held = step.loss(lambda part: None)
    del held
    return sum(kept.values())


class Checkout:
    """The steps of one checkout of this project, in a process of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, "-P", __file__, "--worker", *flags]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, *request: Any) -> Any:
        """Send a request to `work` and wait for its answer."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the process of a checkout has ended; see its message above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def work() -> None:
    """Answer requests on stdin: make steps of some kinds, tell the memory of a step, take one."""
    steps: dict[str, Step] = {}
    for line in sys.stdin:
        request, *given = json.loads(line)
        if request == "make":
            names, shape = given
            steps = {name: make(name, *shape) for name in names}
            answer: Any = guidance.__file__
        else:
            answer = kept_bytes(steps[given[0]]) if request == "memory" else steps[given[0]]()
        print(json.dumps(answer), flush=True)


def measure(checkouts: list[Checkout], kinds: tuple[str, ...], rounds: int, *shape: Any) -> dict[str, dict[str, Any]]:
    """By kind: seconds, ratio and memory ratio to its baseline, and the seconds of its parts.

    With a second checkout also ``before``, the ratio of the first one's time to the second one's, and ``memory_before``.
    """
    names = tuple(dict.fromkeys([*(BASELINES.get(kind, "plain") for kind in kinds), *kinds]))
    for checkout in checkouts:
        checkout.ask("make", names, shape)
    memory = [{name: checkout.ask("memory", name) for name in names} for checkout in checkouts]
    # what runs before a step leaves its mark on caches and on the allocator, so each round has an order of its own
    shuffled = random.Random(0)
    timings: list[list[dict[str, dict[str, float]]]] = [[] for _ in checkouts]
    for _ in range(rounds):
        turns = [(name, number) for name in names for number in range(len(checkouts))]
        found: list[dict[str, dict[str, float]]] = [{} for _ in checkouts]
        for name, number in shuffled.sample(turns, len(turns)):
            found[number][name] = checkouts[number].ask("step", name)
        for number, timing in enumerate(found):
            timings[number].append({name: timing[name] for name in names})
    totals = [[{name: sum(parts.values()) for name, parts in one.items()} for one in mine] for mine in timings]
    rows = {}
    for name in names:
        base = BASELINES.get(name, name if name in BASELINES.values() else "plain")
        rows[name] = {
            "seconds": statistics.median(one[name] for one in totals[0]),
            "ratio": statistics.median(one[name] / one[base] for one in totals[0]),
            "mib": memory[0][name] / 2**20,
            "memory_ratio": memory[0][name] / memory[0][base],
            "parts": {part: statistics.median(one[name][part] for one in timings[0]) for part in timings[0][0][name]},
        }
        if len(checkouts) > 1:
            pairs = zip(*totals, strict=True)
            rows[name]["before"] = statistics.median(now[name] / before[name] for now, before in pairs)
            rows[name]["memory_before"] = memory[0][name] / memory[1][name]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default=",".join(KINDS), help="rows of the table, parted by commas")
    parser.add_argument("--lengths", default="128,512", help="of the sequences, parted by commas")
    parser.add_argument("--dropouts", default="0.1,0.0", help="of hidden states and attention, parted by commas")
    parser.add_argument("--beside", type=Path, help="another checkout of this project")
    parser.add_argument("--processor-time", action="store_true", help="count seconds of the processor (CPU only)")
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    flags = ("--processor-time",) if arguments.processor_time else ()
    if flags:
        Step.clock = staticmethod(time.process_time)
    if arguments.worker:
        work()
        return
    device, results = arguments.device, []
    here = Path(__file__).resolve().parent.parent
    checkouts = [Checkout(folder.resolve(), *flags) for folder in (here, arguments.beside) if folder]
    print(f"device {device}, torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    for length in map(int, arguments.lengths.split(",")):
        batch = 4096 // length
        for dropout in map(float, arguments.dropouts.split(",")):
            rows = measure(
                checkouts, tuple(arguments.only.split(",")), arguments.rounds, length, batch, dropout, device
            )
            print(f"\nlength {length}, batch {batch}, dropout {dropout}")
            for name, row in rows.items():
                parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in row["parts"].items())
                beside = f"{row['before']:6.2f} {row['memory_before']:5.2f}   " if "before" in row else ""
                print(
                    f"{name:>9} {row['seconds']:7.3f} s {row['ratio']:6.2f}   {row['mib']:6.0f} MiB"
                    f" {row['memory_ratio']:5.2f}   {beside}{parts}",
                    flush=True,
                )
            results.append({"length": length, "batch": batch, "dropout": dropout, "rows": rows})
    for checkout in checkouts:
        checkout.close()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            clock = {"clock": "processor"} if flags else {}
            json.dump({"device": device, "torch": torch.__version__, **clock, "results": results}, file, indent=2)


if __name__ == "__main__":
    main()
