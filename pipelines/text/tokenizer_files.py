"""The files of a tokenizer: reading them from an artifact or a folder, opening them, and cleaning them for publication."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from guidance.errors import InputError, reason_of
from guidance.special_tokens import SPECIAL_TOKENS, usual_tokens
from pipelines.engine.stage import Files
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import DryArtifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
HIGHEST_ID = 10_000_000
"""Of a token; ids may have gaps, but tables and embeddings have a row for each number up to the highest."""

_SIZE_LIMIT = 256 << 20


def open_tokenizer(reference: str, store: Store, stack: contextlib.ExitStack) -> Artifact | Files:
    """A tokenizer as an input of a stage: an artifact, or that of a model or of a Hugging Face folder."""
    folder = Path(reference)
    called = os.path.basename(os.path.abspath(folder))
    if not (folder / "tokenizer.json").is_file() or (folder / "artifact.json").exists():
        with store.open(store.find(reference)) as artifact:
            if artifact.kind == "model" and isinstance(artifact, DryArtifact):
                return artifact
            if artifact.kind != "model":
                return stack.enter_context(store.load(reference, kind="tokenizer"))
            folder, called = artifact.path, artifact.reference
    return replace(folder_files(folder), folder=called)


def folder_files(folder: Path) -> Files:
    """The tokenizer's files in a folder."""
    names = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    return Files.of((folder / name for name in names), names)


def tokenizer_files(tokenizer: Artifact | Files) -> dict[str, bytes]:
    """The bytes of the tokenizer's files, by name; other files of the folder are ignored."""
    if isinstance(tokenizer, Files):
        for path in tokenizer.paths:
            if path.stat().st_size > _SIZE_LIMIT:
                raise InputError(f"{str(path)!r}: larger than {_SIZE_LIMIT >> 20} MiB, too large for a tokenizer file")
        return {name: path.read_bytes() for name, path in zip(tokenizer.names, tokenizer.paths, strict=True)}
    return {name: tokenizer.read(name) for name in TOKENIZER_FILES if name in tokenizer.files}


def load_tokenizer(files: Mapping[str, bytes]) -> Any:
    """A ``tokenizers.Tokenizer`` without truncation or padding, which does not turn text into special tokens."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"tokenizer.json: damaged or of an unknown kind ({str(error)[:160]!r})") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    highest = max(vocabulary, key=lambda token: vocabulary[token], default="")
    if vocabulary.get(highest, 0) > HIGHEST_ID:
        raise InputError(
            f"tokenizer.json: the id of {highest!r} is {vocabulary[highest]}; the highest possible id is {HIGHEST_ID:,}"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def named_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """The special tokens in a tokenizer's configuration files, by key: ``cls_token`` and the like."""
    named: dict[str, str] = {}
    for name in TOKENIZER_FILES[1:]:
        for key, value in _json_object(files.get(name, b"{}"), name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                named[key] = text
    return named


def special_ids(files: Mapping[str, bytes], tokenizer: Any, *, begins: bool = True) -> dict[str, int | None]:
    """The token ids of ``cls``, ``sep``, ``pad``, ``mask`` and ``unk``; ``bos`` and ``eos`` serve as ``cls`` and ``sep``.

    Args:
        begins: whether sequences must begin with a token.

    Raises:
        InputError: no token can end a sequence, or begin one that must.
    """
    named = named_tokens(files)
    named |= usual_tokens(named, lambda text: tokenizer.token_to_id(text) is not None)
    roles: dict[str, int | None] = {}
    for role, (first, second, *_) in SPECIAL_TOKENS.items():
        ids = [tokenizer.token_to_id(named[key]) for key in (first, second) if key in named]
        roles[role] = next((id_ for id_ in ids if id_ is not None), None)
    for role, what in (("cls", "begin"), ("sep", "end")):
        if roles[role] is None and (begins or role != "cls"):
            raise InputError(f"the tokenizer has no token to {what} a sequence with (cls/bos, sep/eos)")
    return roles


def plain_tokenizer(files: Mapping[str, bytes], tokenizer: Any) -> dict[str, bytes]:
    """The tokenizer's files for publication: configuration files keep only special tokens and the longest input.

    A foreign tokenizer can name code, classes and templates, which must not go into an artifact.  The tokens of
    `special_ids` are written out, so that other programs use the same ones.
    """
    ids = special_ids(files, tokenizer)
    roles = {f"{role}_token": tokenizer.id_to_token(id_) for role, id_ in ids.items() if id_ is not None}
    kept = dict(files)
    for name in TOKENIZER_FILES[1:]:
        is_main = name == "tokenizer_config.json"
        if name in files or is_main:
            settings = _json_object(files.get(name, b"{}"), name)
            plain = {
                key: value for key, value in settings.items() if key.endswith("_token") or key == "model_max_length"
            }
            named = named_tokens({name: files.get(name, b"{}")})
            plain |= {role: text for role, text in roles.items() if named.get(role) != text}
            if is_main:
                plain["tokenizer_class"] = "PreTrainedTokenizerFast"
            kept[name] = settings_file(plain)
    return kept


def text_digest(data: bytes) -> str:
    """sha256 of a ``tokenizer.json``, without what it does around texts: two tokenizers that find the same tokens in texts and number
    them alike have the same one."""
    settings = _json_object(data, "tokenizer.json")
    return digest(
        {key: value for key, value in settings.items() if key not in ("post_processor", "truncation", "padding")}
    )


def for_model(
    files: Mapping[str, bytes], *, segments: bool, longest: int | None, pad_id: int | None
) -> dict[str, bytes]:
    """The files of a tokenizer, changed so that ``AutoTokenizer`` reads texts as a model takes them.

    Args:
        segments: whether it gives ``token_type_ids``: 0 in the first text of a pair, 1 in the second.
        longest: how many tokens the model reads; None if there is no limit.
        pad_id: the token that pads if the tokenizer names none; None for none.
    """
    name = "tokenizer_config.json"
    settings = _json_object(files[name], name)
    changed = dict(files)
    if segments:
        changed = laid_out(files, types=True)
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if longest is not None:
        settings["model_max_length"] = min(longest, settings.get("model_max_length") or longest)
    if pad_id is not None and "pad_token" not in named_tokens(files):
        settings["pad_token"] = load_tokenizer(files).id_to_token(pad_id)  # None for an id of no token
    return {**changed, name: settings_file(settings)}


def separators_between(tokenizer: Any) -> int:
    """How many separators a tokenizer puts between two texts: RoBERTa's template is ``<s> A </s></s> B </s>``."""
    return 2 if tokenizer.num_special_tokens_to_add(True) == 4 else 1


def laid_out(files: Mapping[str, bytes], *, ends: bool = True, types: bool = False) -> dict[str, bytes]:
    """The files of a tokenizer, changed if it puts other special tokens around texts than sequences have.

    Args:
        ends: whether a text that stands alone has a separator behind it.
        types: whether the tokens of the second text of a pair must have the type 1.
    """
    from tokenizers import processors

    tokenizer = load_tokenizer(files)
    ids = special_ids(files, tokenizer)
    begin, end = (tokenizer.id_to_token(ids[role]) for role in ("cls", "sep"))
    single = [begin, "$A", *[end] * ends]
    pair = [begin, "$A", *[end] * separators_between(tokenizer), "$B:1", f"{end}:1"]
    names = list(dict.fromkeys((begin, end)))
    around = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(name, tokenizer.token_to_id(name)) for name in names]
    )
    settings = json.loads(files["tokenizer.json"])
    own = settings["post_processor"]
    before = _layouts(tokenizer)
    tokenizer.post_processor = around
    after = _layouts(tokenizer)
    if all(
        theirs.ids == ours.ids and (not types or theirs.type_ids == ours.type_ids)
        for theirs, ours in zip(before, after, strict=True)
    ):
        return dict(files)
    steps = own["processors"] if own and own["type"] == "Sequence" else [own]
    # what shortens the offsets of tokens stays
    trims = [
        step.get("trim_offsets", False) for step in steps if step and step["type"] in ("ByteLevel", "RobertaProcessing")
    ]
    if any(trims):
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), around])
    settings["post_processor"] = json.loads(tokenizer.to_str())["post_processor"]
    return {**files, "tokenizer.json": json.dumps(settings, indent=2, ensure_ascii=False).encode()}


def _layouts(tokenizer: Any) -> list[Any]:
    """What a tokenizer puts around one text, and two: encodings of empty texts, which need no token of its vocabulary."""
    return [tokenizer.encode(""), tokenizer.encode("", "")]


def settings_file(settings: Mapping[str, Any]) -> bytes:
    """A configuration file of a tokenizer."""
    return (json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _json_object(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON ({reason_of(error)[:80]!r})") from error
    if not isinstance(value, dict):
        raise InputError(f"{name}: expected a JSON object, found {type(value).__name__}")
    return value
