"""The wheel: what it ships, and what it says of itself."""

from __future__ import annotations

import email
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, so that building leaves nothing beside them."""
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "conftest.py"):
        shutil.copy(ROOT / name, copy)
    for name in ("invariants", "impl", "tests", "ci", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, copy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture
def told(wheel):
    """The metadata of the wheel."""
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_ships_invariants_alone(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"invariants"}
    assert len(tops) == 2


def test_the_wheel_ships_all_of_invariants(wheel):
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "invariants").rglob("*.py")}
    shipped = {name for name in wheel.namelist() if name.startswith("invariants/")}
    assert sources | {"invariants/py.typed"} <= shipped


def test_metadata(told):
    assert told["Name"] == "pytest-invariants"
    assert told["Requires-Python"] == ">=3.10"
    assert told["License-Expression"] == "Apache-2.0"
    assert "Framework :: Pytest" in told.get_all("Classifier")
    needed = {line.split(">")[0] for line in told.get_all("Requires-Dist") if "extra" not in line}
    assert {"pytest", "hypothesis", "torch"} <= needed
    assert not needed & {"ruff", "mypy", "coverage[toml]", "pytest-xdist"}


def test_the_readme_is_the_description(told):
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload().startswith("# pytest-invariants")


def test_entry_points(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    found = importlib.metadata.EntryPoints._from_text(wheel.read(name).decode())
    values = {(each.group, each.name): each.value for each in found}
    assert values["pytest11", "invariants.plugin"] == "invariants.plugin"
    assert values["console_scripts", "invariants"] == "invariants.cli:main"
    assert values["hypothesis", "invariants"] == "invariants.profiles:register"


def test_the_licence_is_shipped_whole(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    text = wheel.read(name).decode()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
