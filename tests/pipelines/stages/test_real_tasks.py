"""Every row of the table of tasks, from real files to metrics: one `build-dataset`, one `finetune`, one `evaluate`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shared import shared
from tests.trainings import one_thread  # noqa: F401

TINY = ("--layers", 1, "--hidden", 16, "--heads", 2, "--ffn", 32, "--steps", 2, "--batch-size", 4)
LINES = 120

TASKS: dict[str, tuple[str, str, str, tuple[object, ...], str]] = {
    # training file, test file or fraction, format, further flags, metric
    "cls-cr": ("custrev.all", "", "label-text", ("--encoding", "latin-1"), "accuracy"),
    "cls-mpqa": ("mpqa.shared.all", "", "label-text", ("--encoding", "latin-1"), "accuracy"),
    "cls-mr": ("rt-polarity.all", "", "label-text", ("--encoding", "latin-1"), "accuracy"),
    "cls-sst": ("trees/train.txt", "trees/dev.txt", "sst", (), "accuracy"),
    "cls-subj": ("subj.all", "", "label-text", ("--encoding", "latin-1"), "accuracy"),
    "cls-trec": ("raw/TREC.train", "raw/TREC.test", "trec", (), "accuracy"),
    "cls-masakhanews": ("orm/train.tsv.gz", "orm/dev.tsv.gz", "masakhanews", (), "f1_macro"),
    "glue-cola": ("in_domain_train.tsv", "in_domain_dev.tsv", "glue-cola", (), "matthews"),
    "glue-mnli": ("kshot-16-13/train.tsv", "kshot-16-13/dev_matched.tsv", "glue-mnli", (), "accuracy"),
    "glue-mrpc": ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "glue-mrpc", (), "f1"),
    "glue-qnli": ("train.json", "dev.json", "json", ("--text-column", "text_a", "--pair-column", "text_b"), "accuracy"),
    "glue-qqp": ("kshot-16-13/train.tsv", "kshot-16-13/dev.tsv", "glue-qqp", (), "f1"),
    "glue-rte": ("train.tsv", "dev.tsv", "glue-rte", (), "accuracy"),
    "nli-sick": ("SICK_train.txt", "SICK_trial.txt", "sick", (), "accuracy"),
    "glue-stsb": ("sts-train.csv", "sts-test.csv", "glue-stsb", (), "spearman"),
    "nli-sick, relatedness": ("SICK_train.txt", "SICK_trial.txt", "sick-relatedness", (), "pearson"),
    "ner-wnut17": ("wnut17train.conll", "emerging.test.annotated", "conll", (), "token_f1"),
    "ner-masakhaner": ("hau/train.txt", "hau/test.txt", "conll", (), "token_f1"),
    "mrc-dream": ("dev.json", "test.json", "dream", (), "accuracy"),
    "mrc-hellaswag": ("val_0000-1999.txt.gz", "val_5000-5699.txt.gz", "hellaswag", (), "accuracy"),
    "mrc-arc": ("ARC-C_dev.csv", "ARC-C_test.csv", "arc", (), "accuracy"),
    "robust-paws-qqp": ("dev_and_test.tsv", "", "paws", (), "f1"),
    "robust-americasnli": ("dev.tsv", "", "americasnli", (), "accuracy"),
    "sum-scitldr": ("dev.jsonl", "test.jsonl", "scitldr", (), "rouge1"),
    "sum-cnndm-sample": ("cnndm_sample.train.0.json", "", "presumm", (), "rouge2"),
    "sum-qmsum": ("Committee.val.jsonl", "Committee.test.jsonl", "qmsum", (), "rougeLsum"),
    "sum-scisummnet": (".", "", "scisummnet", (), "rouge1_blocked"),
    "seg-choi": ("1/3-5", "", "choi", (), "f1"),
    "seg-wiki300": ("docs", "", "choi", (), "pk"),
    "seg-clinical": (".", "", "choi", (), "window_diff"),
    "seg-manifesto": ("61320_200411.txt", "61620_200411.txt", "choi", (), "f1"),
}


def slice_of(source: Path, folder: Path) -> str:
    """A small part of a file, or of the files of a folder, as a new file or folder."""
    if source.is_dir():
        kept = sorted(path for path in source.rglob("*") if path.is_file() and path.suffix not in (".md", ".json"))
        stems = list(dict.fromkeys(path.name.partition(".")[0] for path in kept))[:10]
        for path in kept:
            if path.name.partition(".")[0] in stems:
                (folder / path.name).write_bytes(path.read_bytes())
        return str(folder)
    data = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
    target = folder / source.name.removesuffix(".gz")
    if source.suffix == ".json":
        try:
            found: Any = json.loads(data)
            some = dict(list(found.items())[:LINES]) if isinstance(found, dict) else found[:LINES]
            target.write_text(json.dumps(some))
        except json.JSONDecodeError:
            target.write_bytes(data)
    else:
        lines = data.splitlines(keepends=True)
        # files with all examples of one class before those of the next
        every = len(lines) // LINES if source.suffix == ".all" else 1
        target.write_bytes(b"".join(lines[::every][:LINES]))
    return str(target)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", TASKS)
def test_files_become_metrics(guide: Callable[..., Any], tmp_path: Path, name: str) -> None:
    train, test, form, flags, metric = TASKS[name]
    root = shared("data") / name.partition(",")[0]
    given: list[object] = ["--format", form, "--name", "data", *flags]
    for flag, file in (("--train", train), ("--test", test)):
        if file:
            folder = tmp_path / flag.strip("-")
            folder.mkdir()
            given += [flag, slice_of(root / file, folder)]
    if not test:
        given += ["--test-fraction", 0.4]
    done = guide("build-dataset", *given)
    assert done.code == 0, done.err
    length = 512 if name.startswith("sum") else 64
    done = guide("finetune", "data", *TINY, "--max-length", length, "--name", "model", "--valid-sequences", 4)
    assert done.code == 0, done.err
    done = guide("evaluate", "model", "data", "--limit", 40, "--json")
    assert done.code == 0, done.err
    counts = json.loads(done.out)["counts"]
    assert metric in counts["metrics"]
    assert counts["metrics"].keys() <= counts["signatures"].keys(), "it says how each metric is computed"
