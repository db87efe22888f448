"""Transformers' own tests of every family: without a plan, and with plans that must change nothing.  Not part of CI.

    python -m tests.transformers_contract.common_tests [--families llama,gemma2] [--sdist FILE]

The source package of transformers has the tests that all its models share.  pip fetches it, in the version that is installed here.
Tiny models of each family run them as they are, with an empty plan, and with a plan that biases all heads by nothing.  Prints a line
for each family, and exits with 1 if a test has another outcome with a plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import transformers

from tests.guidance.models import DECODERS, FAMILIES, RELATED, SEQ2SEQ

ROOT = Path(__file__).parents[2]
ALL = (*DECODERS, *FAMILIES, *SEQ2SEQ, *RELATED)
PLANS = ("", "empty", "neutral")
LEFT_OUT = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
"""What the shared tests import and the source package lacks: tests of export and of generation."""

NOT_RUN = ("test_generation_tester_mixin_inheritance", "test_attention_outputs")
"""A test that asks for what is left out, and one that sets ``config.output_attentions``, which transformers refuses unless a model has
eager attention, and a model with a plan has ours."""


def class_name(family: str) -> str:
    """The class that has the tests of a family."""
    return f"{family.title().replace('-', '').replace('_', '')}ModelTest"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", default=",".join(ALL), help="with commas between them")
    parser.add_argument("--sdist", type=Path, help="the source package of transformers")
    parser.add_argument("--out", type=Path, help="a JSON file for the outcomes")
    options = parser.parse_args(arguments)
    families = options.families.split(",")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), options.sdist)
        found = {plan: run(Path(folder), families, plan) for plan in PLANS}
    figures = {family: compare({plan: outcomes[family] for plan, outcomes in found.items()}) for family in families}
    for family, figure in figures.items():
        others = "".join(f"; {test}: {what}" for test, what in figure["other"].items())
        sys.stdout.write(f"{family:20}{figure['passed']:4} passed, {len(figure['failed'])} failed{others}\n")
    if options.out:
        version = {"transformers": transformers.__version__}
        options.out.write_text(json.dumps({**version, "families": figures}, indent=1) + "\n")
    return int(any(figure["other"] for figure in figures.values()))


def prepare(folder: Path, sdist: Path | None) -> None:
    """Make the package ``common`` of the shared tests in a folder, with what it imports."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--target", folder, "parameterized"], check=True)
    if sdist is None:
        only = ["--no-deps", "--no-binary", "transformers", "--dest", str(folder)]
        subprocess.run([*pip, "download", *only, f"transformers=={transformers.__version__}"], check=True)
        (sdist,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tests,) = folder.glob("transformers-*/tests")
    common = tests.rename(folder / "common")
    for name, content in {"__init__.py": "", **LEFT_OUT}.items():
        (common / name).parent.mkdir(exist_ok=True)
        (common / name).write_text(content)
    (folder / "pytest.ini").write_text("[pytest]\n")


def run(folder: Path, families: Sequence[str], plan: str) -> dict[str, dict[str, str]]:
    """The outcome of each test of each family."""
    report = folder / f"report-{plan}.xml"
    options = ["-q", "--noconftest", "--disable-warnings", "--tb=line", "-p", "no:cacheprovider"]
    options += ["-k", " and ".join(f"not {test}" for test in NOT_RUN)]
    options += ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), f"--junitxml={report}"]
    here = {"TRANSFORMERS_TESTS": str(folder), "GUIDE_FAMILIES": ",".join(families), "GUIDE_PLAN": plan}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name("common_models.py"))]
    ended = subprocess.run(command, env={**os.environ, **here, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, check=False)
    assert ended.returncode in (0, 1), f"pytest ended with {ended.returncode}"  # 1: some tests failed
    suite = ElementTree.parse(report).getroot()
    guided = next(int(each.attrib["value"]) for each in suite.iter("property") if each.attrib["name"] == "guided")
    assert bool(guided) == bool(plan), f"{guided} models had the plan {plan!r}"
    found: dict[str, dict[str, str]] = {family: {} for family in families}
    names = {class_name(family): family for family in families}
    for case in suite.iter("testcase"):
        family, test = names[case.attrib["classname"].rpartition(".")[2]], case.attrib["name"]
        outcome = next((each.tag for each in case if each.tag in ("failure", "error", "skipped")), "passed")
        known = found[family].get(test, "passed")  # subtests have the name of their test
        found[family][test] = outcome if known in ("passed", "skipped") else known
    return found


def compare(outcomes: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """How many tests ended how without a plan, and those that ended in another way with one."""
    plain = outcomes[""]
    other = {
        f"{test}, {plan} plan": f"{plain.get(test)} without, {found.get(test)} with"
        for plan, found in outcomes.items()
        for test in sorted(plain.keys() | found.keys())
        if found.get(test) != plain.get(test)
    }
    count = Counter(plain.values())
    return {
        **{name: count[name] for name in ("passed", "skipped")},
        "failed": sorted(test for test, outcome in plain.items() if outcome not in ("passed", "skipped")),
        "other": other,
    }


if __name__ == "__main__":
    sys.exit(main())
