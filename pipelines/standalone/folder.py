"""Guided models as folders that plain transformers opens: weights, configuration, tokenizer, code and model card."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError, PlanError
from pipelines.storage.files import new_folder, write_file
from pipelines.storage.store import Store
from pipelines.text.tokenizer_files import settings_file
from pipelines.tools.convert import COPIED
from pipelines.training.opening import find_folder

if TYPE_CHECKING:
    from guidance.installation import Handle
    from guidance.plan import Plan

_TOKENIZER = tuple(name for name in COPIED if name not in ("config.json", "generation_config.json", "README.md"))
"""The files of tokenizers and licences that are copied."""

_MODULES, _OF_SENTENCES = "modules.json", ("sentence_bert_config.json", "config_sentence_transformers.json")
"""What sentence-transformers reads: the modules of an encoder, each but the first with a folder of its own, and their settings."""

_PLAIN = (".json", ".safetensors")
"""Files that run no code when they are opened."""


@dataclass(frozen=True)
class Exported:
    """A standalone model.

    Attributes:
        auto_class: the class of transformers that opens it as it was saved.
        lines: of its code.
        left_out: the labels of the rows of its plan that do nothing at inference.
    """

    path: Path
    auto_class: str
    lines: int
    left_out: tuple[str, ...]


def export_standalone(reference: str, store: Store, folder: Path) -> Exported:
    """Write a guided model to a new folder that transformers opens with ``trust_remote_code=True``, without `guidance`.

    What its plan does to heads is kept as it was when the model was saved.  Losses and attacks are left out.

    Raises:
        InputError: the folder exists; the model cannot be opened, or no plan shapes it.
        PlanError: the plan reads what does not follow from the tokens of a batch.
    """
    from transformers import modeling_layers
    from transformers.utils import logging as transformers_logging

    from guidance.standalone import CODE
    from pipelines.standalone.code import classes_of, code_of

    if os.path.lexists(folder):
        raise InputError(f"{str(folder)!r} exists already", hint="choose a new folder")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    source = find_folder(reference, store)
    plan, numbers = _frozen(source, reference)
    handle = _opened(source, plan, numbers)
    # these open what is below them by an auto class, and do not allow it to run code
    heads = ("SequenceClassification", "TokenClassification", "QuestionAnswering")
    if isinstance(handle.model, tuple(getattr(modeling_layers, f"GenericFor{head}") for head in heads)):
        raise InputError(
            f"{reference}: a {type(handle.model).__name__} asks transformers for the model inside it, which then refuses the code of a"
            " folder",
            hint="guidance.load opens such a model",
        )
    classes = classes_of(handle.model)
    code = code_of(handle, classes.values())
    auto_class = _opened_by(handle.model, classes)
    with new_folder(folder) as temporary:
        for name, data in {**_model(handle, classes), **_tokenizer(source), **_sentence_encoder(source)}.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            write_file(temporary / name, data)
        write_file(temporary / f"{CODE}.py", code.encode())
        write_file(temporary / "README.md", _card(reference, source, plan, handle, auto_class).encode())
    given = _plan_of(source).labels
    return Exported(
        folder, auto_class, code.count("\n"), tuple(label for n, label in enumerate(given) if n not in numbers)
    )


# the plan


def _plan_of(source: Path) -> Plan:
    from guidance.checkpoint import find_plan
    from guidance.plan import Plan

    return find_plan(source) or Plan()


def _frozen(source: Path, reference: str) -> tuple[Plan, list[int]]:
    """What the plan of a model does at inference, and the numbers of its rows in the plan that was given."""
    from guidance.checkpoint import read_progress
    from guidance.checkpoint.layout import ADAPTER_FILE, CONFIG_FILE
    from guidance.checkpoint.opening import open_model
    from guidance.plan import Plan

    if (source / ADAPTER_FILE).exists():
        raise InputError(
            f"{reference}: an adapter of PEFT, whose weights are apart from those of its model",
            hint="merge it first: model, _ = guidance.load(FOLDER); model.merge_and_unload().save_pretrained(NEW_FOLDER)",
        )
    if not (source / CONFIG_FILE).exists():
        raise InputError(f"{reference}: not a model folder (no {CONFIG_FILE})")
    given, progress = _plan_of(source), read_progress(source)
    _refuse(given, progress, reference)
    rows = {
        n: kept for n, guide in enumerate(given.guides) if (kept := guide.inherited(progress)) and kept.part == "model"
    }
    plan = Plan(tuple(rows.values()), given.pal)
    if not plan.shapes_outputs:
        open_model(source, None, "auto")  # a folder that is damaged is refused as that
        raise InputError(
            f"{reference}: no plan shapes this model" + (", only its training" if given.guides else ""),
            hint=f"transformers opens it as it is: the folder {source}",
        )
    return plan, list(rows)


def _refuse(plan: Plan, progress: tuple[int, int] | None, reference: str) -> None:
    """Raises PlanError for a plan that needs more than the tokens of a batch, or is at an unknown place of its schedule."""
    from guidance.patterns.features import FEATURES, TABLES, Vocabulary

    for label, guide in zip(plan.labels, plan.guides, strict=True):
        if not guide.shapes:
            continue
        where = f"{reference}, guide {label!r}"
        pattern = guide.bound_pattern.needs if guide.bound_pattern else ()
        for need in (*pattern, *guide.bound_mechanism.needs):
            if need not in Vocabulary.FEATURES:
                raise PlanError(
                    f"{where}: it reads the feature {need}, which transformers cannot make of the tokens of a batch",
                    hint=f"{need}: {FEATURES[need].summary}\nguidance.load opens such a model, and handle.guide takes the feature",
                )
        for table in guide.tables:
            raise PlanError(
                f"{where}: it reads the table {table}, which a standalone model does not have",
                hint=f"{TABLES.get(table, table)}\nguidance.load(..., tables=...) opens such a model",
            )
        if any("important" in str(selector) for selector in guide.heads):
            raise PlanError(
                f"{where}: its heads are selected by a table of scores",
                hint="write their numbers into the plan: `guide plan show REF --model MODEL --scores FILE` lists them",
            )
        if guide.fades and progress is None:
            raise PlanError(
                f"{where}: it fades in the course of training, and the folder does not say how far that was",
                hint="handle.advance(step, total_steps) before the model is saved",
            )
    for name, package in plan.packages.items():
        raise PlanError(
            f"{reference}: {name!r} is code of the package {package!r}, and only that of attention-guide is written",
            hint="publish the model as it is, and name the package that opens it",
        )


# the model


def _opened(source: Path, plan: Plan, numbers: list[int]) -> Handle:
    """The model of a folder, which follows a part of its plan: the rows of the given numbers."""
    import torch

    from guidance.checkpoint import TARGET_FOLDER
    from guidance.checkpoint.opening import open_model, read_extra, read_tokenizer
    from guidance.installation import install
    from guidance.sites import is_added

    given = _plan_of(source)
    model, _ = open_model(source, None, "auto")
    tokenizer, target = read_tokenizer(source), read_tokenizer(source / TARGET_FOLDER)
    handle = install(model, plan, tokenizer, decoder_tokenizer=target, training=False)
    keys = {given.key_of(number): plan.key_of(new) for new, number in enumerate(numbers)} | {"pal": "pal"}
    learned = {}
    for name, tensor in read_extra(source).items():
        before, _, rest = name.rpartition("guided.")
        key, _, parameter = rest.partition(".")
        if key in keys:
            learned[f"{before}guided.{keys[key]}.{parameter}"] = tensor
    own = {name: tensor for name, tensor in model.state_dict().items() if is_added(name)}
    for name in sorted(own.keys() ^ learned.keys()):
        raise InputError(f"{source}: {'lacks' if name in own else 'has'} {name}, and its plan says otherwise")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(learned[name])
    model.eval()
    return handle


def _model(handle: Handle, classes: Mapping[str, type]) -> dict[str, bytes]:
    """The configuration and the weights, by the name of their file."""
    import safetensors.torch
    import torch

    from guidance.checkpoint import CONFIG_FILE, MARKER, config_file, weights
    from guidance.checkpoint.layout import PLAN_KEY, PROGRESS_KEY, WEIGHTS_FILE
    from guidance.plan import Plan
    from guidance.standalone import CLASS_PREFIX, CODE, FACTS_KEY, TYPE_PREFIX, facts_of

    model = handle.model
    config = json.loads(config_file(model, Plan()))
    config.pop(PROGRESS_KEY, None)
    names = {"AutoConfig": type(model.config), **classes}
    config |= {
        "architectures": [CLASS_PREFIX + type(model).__name__],
        "auto_map": {name: f"{CODE}.{CLASS_PREFIX}{kind.__name__}" for name, kind in names.items()},
        "model_type": TYPE_PREFIX + model.config.model_type,
        PLAN_KEY: handle.plan.dumps(),
        FACTS_KEY: facts_of(handle),
    }
    tensors = {**weights(model), MARKER: torch.zeros(1, dtype=torch.uint8)}
    files = {
        CONFIG_FILE: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
        WEIGHTS_FILE: safetensors.torch.save(tensors, metadata={"format": "pt"}),
    }
    if model.can_generate() and model.generation_config is not None:
        files["generation_config.json"] = model.generation_config.to_json_string().encode()
    return files


def _tokenizer(source: Path) -> dict[str, bytes]:
    """The files of the tokenizers of a model folder; the names of code in them are left out."""
    from guidance.checkpoint import TARGET_FOLDER

    places = [*_TOKENIZER, *(f"{TARGET_FOLDER}/{name}" for name in _TOKENIZER)]
    files = {place: (source / place).read_bytes() for place in places if (source / place).is_file()}
    for place in [place for place in files if place.endswith("tokenizer_config.json")]:
        settings = json.loads(files[place])
        settings.pop("auto_map", None)
        files[place] = settings_file(settings)
    return files


def _sentence_encoder(source: Path) -> dict[str, bytes]:
    """What sentence-transformers reads beside the model, such as how tokens are pooled; nothing if a part is code of others."""
    modules = source / _MODULES
    if not modules.is_file():
        return {}
    rows = json.loads(modules.read_bytes())
    if not all(str(row["type"]).startswith("sentence_transformers.") for row in rows):
        return {}
    folders = [Path(row["path"]).name for row in rows if row["path"]]
    found = [path for folder in folders for path in sorted((source / folder).glob("*")) if path.suffix in _PLAIN]
    found += [source / name for name in (_MODULES, *_OF_SENTENCES) if (source / name).is_file()]
    return {str(path.relative_to(source)): path.read_bytes() for path in found}


# the card


def _opened_by(model: Any, classes: Mapping[str, type]) -> str:
    """The auto class that opens a model as it was saved."""
    own = sorted(
        (name for name, kind in classes.items() if kind is type(model)), key=lambda name: "PreTraining" in name
    )
    if not own:
        raise InputError(f"no auto class of transformers opens a {type(model).__name__}")
    return own[0]


def _card(reference: str, source: Path, plan: Plan, handle: Handle, auto_class: str) -> str:
    """The model card in Markdown, with the metadata block that model hubs read."""
    licence = _licence(source)
    about = (
        f"{licence}, as the card of that model says. " if licence else "not stated; whoever trained the model decides. "
    )
    if not licence and (start := _listed(source, "Weights")):
        about = f"not stated for all that went into them. They started from these:\n\n{start}\n\n"
    return f"""---
library_name: transformers
license: {json.dumps(licence or "other")}
tags: [attention-guidance, custom_code]
---

# A guided {type(handle.model).__name__}

{chr(10).join(_sentences(handle))}

Without these rows the model computes something else. They are in `config.json` (`guide_plan`), and `modeling_guided.py` is the code
that follows them. It imports nothing but Python's standard library, torch and transformers.

## Open it

```python
from transformers import AutoTokenizer, {auto_class}

model = {auto_class}.from_pretrained("FOLDER", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
```

`pipeline(..., trust_remote_code=True)` and `SentenceTransformer(..., trust_remote_code=True)` open it too. Without
`trust_remote_code`, transformers refuses it. `guidance.load("FOLDER")` opens it by its plan and weights and runs none of its code.

## Publish it

```sh
hf upload USER/NAME FOLDER
```

Those who open it from a hub may pin what they have read: `revision="COMMIT"`.

## Where it comes from

Written by

```sh
guide export {shlex.quote(reference)} FOLDER --standalone
```

{_data(source)}The licence of the weights: {about}The code in `modeling_guided.py` is under the Apache License, Version 2.0. What the plan says as a
file:

```toml
{plan.dumps().strip()}
```
"""


def _sentences(handle: Handle) -> Iterator[str]:
    """One sentence for each row of a plan, and one for the heads that it adds."""
    from guidance.mechanisms import MECHANISMS
    from pipelines.views.plans import pal_keys, rows_of

    plan = handle.plan
    for row, guide in zip(rows_of(plan), plan.guides, strict=True):
        pattern = guide.bound_pattern
        meaning = (
            f" ({pattern.summary.rstrip('.')})"
            if pattern and pattern.summary and not _is_combination(guide.pattern)
            else ""
        )
        of = f" with the pattern `{pattern}`{meaning}" if pattern else ""
        at = f"layers {row['layers']}, heads {row['heads']} of the {handle.stack_of(guide)} {guide.attention}-attention"
        more = f" {guide.bound_mechanism.explanation}." if guide.bound_mechanism.explanation else ""
        share = f" at a strength of {guide.strength:g}" if guide.strength < 1 else ""
        yield f"- `{guide.mechanism}`{of}, {at}: {MECHANISMS[guide.mechanism].summary}{share}.{more}"
    if keys := pal_keys(plan):
        yield f"- Heads are added beside its own: {', '.join(f'{key} = {text}' for key, text in keys.items())}."


def _is_combination(pattern: Any) -> bool:
    return isinstance(pattern, Mapping) and "name" not in pattern


def _text_of_card(source: Path) -> str:
    card = source / "README.md"
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""


def _data(source: Path) -> str:
    """What a card that guide has written says about the data that a model was trained on."""
    found = _listed(source, "Data")
    return f"The data that the model was trained on, and their licences:\n\n{found}\n\n" if found else ""


def _listed(source: Path, title: str) -> str:
    """The list in a section of a card that guide has written; empty if there is none."""
    found = re.search(rf"^## {title}\n\n(- .*?)\n\n", _text_of_card(source), re.S | re.M)
    return found[1] if found else ""


def _licence(source: Path) -> str | None:
    """The licence that the model card of a folder states in its metadata block."""
    block = re.match(r"---\n(.*?)\n---\n", _text_of_card(source), re.S)
    found = re.search(r"^license: *[\"']?([\w.+-]+)[\"']? *$", block[1], re.M) if block else None
    return found[1] if found and found[1] != "other" else None
