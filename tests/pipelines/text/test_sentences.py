"""The ways to find sentences: which one a name means, and what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from guidance.errors import InputError
from pipelines.text.sentences import check_spec, model_files, splitter


def test_the_rules_of_spacy_split_as_they_always_did() -> None:
    text = "Dr. Who ran.  Was it “late”? Yes!"
    found = {spec: [text[a:b] for a, b in splitter(spec)([text])[0]] for spec in ("rules", "spacy-rules")}
    assert found == {
        "rules": ["Dr. Who ran.", "Was it “late”?", "Yes!"],
        "spacy-rules": ["Dr.", "Who ran.", "Was it “late”?", "Yes!"],
    }


def test_rules_need_no_files_of_a_model() -> None:
    assert model_files("rules") is model_files("spacy-rules") is model_files("line") is None


@pytest.mark.parametrize("spec", ["", "rule", "spacy", "spacy:", "spacy-rules:", "stanza:"])
def test_an_unknown_splitter_is_refused_with_those_that_exist(spec: str) -> None:
    with pytest.raises(InputError) as caught:
        check_spec(spec)
    assert repr(spec) in str(caught.value) and "rules, line, spacy-rules, " in (caught.value.hint or "")


def test_a_corpus_is_built_without_importing_a_parser_or_torch(tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("One here. Two there.\n")
    script = """
import sys
from cli.main import run
print(run(["build-corpus", "two.txt", "--store", "store"]), {"spacy", "stanza", "torch"} & set(sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == "0 set()", found.stderr
