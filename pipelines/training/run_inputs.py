"""The inputs of a training run, checked against each other before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError
from pipelines.progress import log
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import where_known
from pipelines.storage.manifest import ArtifactMismatch, digest
from pipelines.storage.store import Store
from pipelines.text.tokenizer_files import TOKENIZER_FILES, named_tokens, text_digest
from pipelines.training.plan_inputs import load_inputs

if TYPE_CHECKING:
    from guidance.plan import Plan


@dataclass(frozen=True)
class PlanText:
    """A plan as an input; equal plans have equal contents, however their files are written."""

    text: str
    provenance: list[dict[str, Any]] = field(default_factory=list)

    @property
    def content(self) -> str:
        return digest(self.text)

    def describe(self) -> dict[str, Any]:
        return {"kind": "plan", "content": self.content}


def is_guided(manifest: Mapping[str, Any]) -> bool:
    """Whether a model was trained with a plan, its own or that of the model that it started from."""
    return manifest["inputs"].get("plan", {}).get("content") not in (None, PlanText("").content)


def check_corpora(config: Any, corpora: Sequence[Artifact]) -> None:
    """Raises InputError when these sequences cannot train one model, or not with these settings."""
    if config.sampling and len(config.sampling) != len(corpora):
        raise InputError(
            f"{len(config.sampling)} shares for {len(corpora)} sequences",
            hint="one --sampling for each, in their order",
        )
    first = corpora[0]
    for other in corpora[1:]:
        if _tokenizers(other) != _tokenizers(first):
            raise ArtifactMismatch(
                f"{other.reference} was made with another tokenizer than {first.reference}",
                hint="guide build-sequences with the tokenizer of the first",
            )


def _tokenizers(data: Artifact) -> dict[str, str]:
    """The digests of what the tokenizer files of a sequences artifact say about texts and special tokens."""
    known: dict[str, str] = {}
    for name in data.files:
        folder, _, file = name.rpartition("/")
        if folder.endswith("tokenizer") and file == TOKENIZER_FILES[0]:
            known[name] = text_digest(data.read(name))
        elif folder.endswith("tokenizer"):
            known[name] = digest(named_tokens({file: data.read(name)}))
    return known


def load_tables(config: Any, plan: Plan, corpora: Sequence[Artifact], store: Store) -> dict[str, Any]:
    """The inputs that ``--masks``, ``--cooccur``, ``--masking-run`` and ``--scores`` name, checked against the sequences.

    Raises:
        ArtifactMismatch: masks of other sequences, or counts of another tokenizer.
        InputError: there is a masking run but no guide follows it, or a guide follows one and there is none.
    """
    from pipelines.statistics.cooccurrence_table import check_tokenizer
    from pipelines.training.masking import check_masking

    inputs = load_inputs(config, corpora, store)
    check_masking(plan, config.plan_name, config.masking)
    if config.cooccur:
        inputs["cooccur"] = counts = store.load(config.cooccur, kind="cooccur")
        with where_known():
            check_tokenizer(counts, corpora[0])
        if "cooccurrence" not in plan.tables():
            log.warning("--cooccur %s: no guide of the plan reads it", config.cooccur)
    if config.scores and not plan.selects_by_score():
        log.warning("--scores %s: no guide of the plan selects heads by them", config.scores)
    if config.masking:
        inputs["masking"] = store.load(config.masking, kind="model")
    return inputs
