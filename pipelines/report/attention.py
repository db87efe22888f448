"""Where heads look before and after training, on one text."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from guidance.errors import GuideError, InputError
from pipelines.lazy import np, pq
from pipelines.report.blocks import Block, Picture, Prose, Section, file_name
from pipelines.report.given import Given, Runs, grouped, without_seed
from pipelines.storage.artifacts import Artifact
from pipelines.training.plan_inputs import model_folders

if TYPE_CHECKING:
    from pipelines.probing.one_text import TextAttention

TOKENS = 20
"""How much of the text is drawn; the labels of more tokens could not be read."""

MOST_MODELS, MOST_HEADS = 4, 5
"""How many models are drawn, and how many heads of each."""

TOKENIZER = "tokenizer/tokenizer.json"


def section(runs: Runs, text: str | None, notes: list[str]) -> Section | None:
    """The heads of one run of every group that changed most; None if no model can be shown.

    Args:
        text: what the models read; by default the beginning of their validation text.
    """
    blocks: list[Block] = []
    groups = grouped(runs.of("model"), lambda each: without_seed(each.artifact.manifest))
    for each in [group[0] for group in groups.values()][:MOST_MODELS]:
        try:
            blocks.append(_picture(runs, each, text or _beginning(each.artifact, runs)))
        except GuideError as error:
            notes.append(f"the attention of {each.label} is not shown: {error.message}")
    if not blocks:
        return None
    said = (
        "Each figure shows, for one run of a group, the heads whose attention changed most: before training above, after it below. "
        "With each head stands the pattern that it follows most, and the share of its attention on it."
    )
    left = len(groups) - MOST_MODELS
    more = [Prose(f"{left} more groups of runs are not shown.")] if left > 0 else []
    return Section("attention", "Attention before and after", [Prose(said), *blocks, *more])


def _beginning(model: Artifact, runs: Runs) -> str:
    """The beginning of the first validation sequence of a model, or of its first training sequence."""
    from tokenizers import Tokenizer

    with runs.store.load_input(model, "sequences", verify=False) as data:
        split = next((name for name in ("valid.parquet", "train.parquet") if name in data.files), None)
        if split is None or TOKENIZER not in data.files:
            raise InputError(f"{data.reference} has no text to show", hint="give one with --text")
        with data.open(split) as file:
            first = next(pq.ParquetFile(file).iter_batches(batch_size=1, columns=["id"])).column("id")[0].as_py()
        decoded: str = Tokenizer.from_str(data.read(TOKENIZER).decode()).decode(list(first), skip_special_tokens=True)
    return decoded


def _picture(runs: Runs, each: Given, text: str) -> Picture:
    from pipelines.drawing import PAGE_WIDTH, attention_grid
    from pipelines.probing.one_text import look

    after = look(each.artifact.path, text, length=TOKENS)
    folder, moment = _before(runs, each)
    seed = None if folder else int(each.config.get("seed") or 0)
    before = look(folder or each.artifact.path, text, length=TOKENS, random_seed=seed)
    heads = _changed(before, after)
    rows = {
        when: {_head(layer, head, looked): looked.map(layer, head) for layer, head in heads}
        for when, looked in (("before", before), ("after", after))
    }
    title = f"Attention of {each.label}: before ({moment}) and after training"
    named = ", ".join(f"{layer}-{head}" for layer, head in heads)
    caption = f"{title}, heads {named}, on the text: {' '.join(text.split())[:200]}"
    drawn = [attention_grid(rows, after.labels, title=title, width=PAGE_WIDTH, kind=kind) for kind in ("svg", "pdf")]
    return Picture(f"attention-{file_name(each.label)}", caption, caption, drawn[0], drawn[1])


def _before(runs: Runs, each: Given) -> tuple[Path | None, str]:
    """The model folder from before training, and what it is; without one, random weights are taken.

    Raises:
        InputError: it started from a folder that is not where it was.
    """
    model = runs.input_of(each.artifact.manifest, "init")
    if model is not None:
        with contextlib.suppress(InputError), runs.store.load_input(each.artifact, "init", verify=False) as artifact:
            return artifact.path, f"the model {runs.name_of(model)} that it started from"
    if (name := model_folders(each.artifact.manifest).get("init")) is not None:
        folder = Path(str(each.config.get("init")))
        if not (folder / "config.json").is_file():
            raise InputError(f"the folder of {name}, from which it started, is not here")
        return folder, f"the model {name} that it started from"
    snapshots = sorted(
        int(name.split("/")[1].removeprefix("step-"))
        for name in each.artifact.files
        if name.startswith("snapshots/step-") and name.count("/") == 2 and name.endswith("/config.json")
    )
    if snapshots:
        return each.artifact.path / "snapshots" / f"step-{snapshots[0]}", f"step {snapshots[0]:,}"
    return None, "random weights"


def _changed(before: TextAttention, after: TextAttention) -> Sequence[tuple[int, int]]:
    """The heads, by layer and number, whose attention changed most: by the mean over queries of the sum of differences."""
    changes: dict[tuple[int, int], float] = {}
    for one in after.heads:
        if one.kind == "self":
            first, last = (looked.map(one.layer, one.head) for looked in (before, after))
            if first.shape == last.shape:
                changes[one.layer, one.head] = float(np.abs(last - first).sum(-1).mean())
    if not changes:
        raise InputError("the model from before training reads the text as other tokens")
    most = sorted(changes, key=lambda head: (-changes[head], head))[:MOST_HEADS]
    return sorted(most)


def _head(layer: int, head: int, looked: TextAttention) -> str:
    """A head and the pattern that it follows most."""
    one = next(one for one in looked.heads if (one.layer, one.head, one.kind) == (layer, head, "self"))
    closest: Mapping[str, float] = {name: share for name, share, _ in one.closest[:1]}
    return f"{layer}-{head}" + "".join(f"\n{name} {100 * share:.0f} %" for name, share in closest.items())
