"""Each built-in invariant has a page that says all that a page must, and names faults that exist."""

import re
from pathlib import Path

import pytest

from impl.target import target as impl
from invariants.catalog import BUILT_IN
from invariants.targets.torch_native import target as torch

PAGES = Path(__file__).parents[3] / "docs" / "invariants"
SECTIONS = ["Promise", "Formula", "Tolerance", "Planted faults", "Harmless variants", "Blind spots"]
FAULTS = {"impl": impl.faults(), "torch": torch.faults()}
ids = pytest.mark.parametrize("name", [invariant.id for invariant in BUILT_IN])


def sections(name):
    """Title, and text of each section by its heading."""
    title, *parts = re.split(r"^## ", (PAGES / f"{name}.md").read_text(), flags=re.MULTILINE)
    return title.strip(), {heading.strip(): text for heading, _, text in (part.partition("\n") for part in parts)}


def named(text):
    """(target, fault) of what is written as "`one`, `two` (impl)"."""
    for names, where in re.findall(r"((?:`[\w-]+`,? )+)\((impl|torch)\)", " ".join(text.split())):
        yield from ((where, name) for name in re.findall(r"`([\w-]+)`", names))


def all_named(section):
    return {fault for invariant in BUILT_IN for fault in named(sections(invariant.id)[1][section])}


@ids
def test_a_page_has_all_sections_and_none_is_empty(name):
    title, texts = sections(name)
    assert title == f"# `{name}`"
    assert list(texts) == SECTIONS
    assert all(text.strip() for text in texts.values())


@ids
def test_a_page_names_faults_that_exist_as_what_they_are(name):
    _, texts = sections(name)
    for section, harmless in (("Planted faults", False), ("Harmless variants", True)):
        found = list(named(texts[section]))
        assert found
        for where, fault in found:
            assert FAULTS[where][fault].harmless is harmless, fault


@ids
def test_a_page_names_no_fault_without_its_target(name):
    """So that no name escapes the test above."""
    _, texts = sections(name)
    for text in texts.values():
        assert all(fault in FAULTS[where] for where, fault in named(text))
    marked = {fault for text in texts.values() for _, fault in named(text)}
    listed = " ".join(texts[section] for section in SECTIONS[3:5])
    assert set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", listed)) <= marked


@pytest.mark.parametrize(
    ("section", "harmless"), [("Planted faults", False), ("Harmless variants", True)], ids=["faults", "variants"]
)
def test_every_fault_and_variant_is_on_some_page(section, harmless):
    wanted = {
        (where, name)
        for where, faults in FAULTS.items()
        for name, fault in faults.items()
        if fault.harmless is harmless
    }
    assert wanted - all_named(section) == set()


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_links_files_and_invariants_that_are_named_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert link.startswith("https://") or (page.parent / link.partition("#")[0]).exists(), link
    for file in re.findall(r"`((?:invariants|impl)/[\w/.]+)`", text):
        assert (PAGES.parents[1] / file).exists(), file
    families = "|".join({invariant.id.partition(".")[0] for invariant in BUILT_IN})
    assert set(re.findall(rf"`((?:{families})\.[a-z-]+)`", text)) <= {invariant.id for invariant in BUILT_IN}


def test_the_index_lists_each_page_in_the_order_of_the_catalogue():
    rows = re.findall(r"^\| \[`([^`]+)`\]\(([^)]+)\)", (PAGES / "README.md").read_text(), re.MULTILINE)
    assert rows == [(invariant.id, f"{invariant.id}.md") for invariant in BUILT_IN]
    assert {page.name for page in PAGES.glob("*.md")} == {
        "README.md",
        *(f"{invariant.id}.md" for invariant in BUILT_IN),
    }
