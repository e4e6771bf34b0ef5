"""What the README shows, runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from invariants.known import read_known

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/architecture.md")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_test_on_real_ranks_passes(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    (example,) = [block for block in blocks("README.md", "python") if "worlds(2, 4)" in block]
    pytester.makepyfile(example)
    pytester.runpytest_subprocess("-p", "invariants.plugin", timeout=120).assert_outcomes(passed=2)


def test_the_suite_the_invariant_and_the_hook_judge_the_example_trainer(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "tests/examples"))), prepend=os.pathsep)
    suite, invariant, hook, _ = blocks("README.md", "python")
    pytester.makepyfile(suite)
    pytester.makeconftest(invariant + hook)
    run = pytester.runpytest_subprocess("-p", "invariants.plugin", "--invariants-cases=2", "-v", timeout=300)
    run.assert_outcomes(passed=10, skipped=9)
    run.stdout.fnmatch_lines(["*test_my_trainer*loss.positive*PASSED*"])


def test_the_known_violation_is_read(tmp_path):
    (entry,) = blocks("README.md", "toml")
    path = tmp_path / "known.toml"
    path.write_text(entry)
    (known,) = read_known(path)
    assert known.invariant == "replicas.agree"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    found = re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text())
    assert found or page == "docs/architecture.md"
    for link in found:
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, link


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:invariants|impl|tests|ci)/[\w./-]+)[ `]", text)
    assert named
    for name in named:
        assert (ROOT / name).exists(), name
