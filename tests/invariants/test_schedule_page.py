"""The pages about the command: what it shows is what is printed, what it lists exists, its links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from invariants.commands.schedule_sources import FORMS, costs
from invariants.schedule.families import FAMILIES
from invariants.schedule.lowering import LOWERINGS
from invariants.schedule.transports import TRANSPORTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "schedules.md"
TEXT = PAGE.read_text()
README = (ROOT / "README.md").read_text()
SHOWN = re.findall(r"^```console\n\$ ([^\n]*)\n(.*?)^```", README + TEXT, re.MULTILINE | re.DOTALL)
FILES = re.findall(r"^`(\w+\.csv)`:\n\n```\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command for command, _ in SHOWN])
def test_what_is_shown_is_what_is_printed(tmp_path, command, printed):
    for name, content in FILES:
        (tmp_path / name).write_text(content)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "COLUMNS": "100"}
    run = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout == printed
    assert run.stderr == ""


def test_each_name_is_told():
    for name in (*FAMILIES, *TRANSPORTS, *LOWERINGS, *(f".{form}" for form in FORMS)):
        assert f"`{name}`" in TEXT, name


def test_each_cost_that_is_told_is_one():
    table = TEXT[TEXT.index("| key | what |") :]
    keys = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))
    assert {"F", "I", "W", "FB", "activations", "latency", "messages", "bandwidth", "overlap"} == set(keys)
    assert costs(",".join(f"{key}={'no' if key == 'overlap' else 1}" for key in keys))


def test_links_and_names_of_files_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)", TEXT):
        assert link.startswith("https:") or (PAGE.parent / link).exists(), link
    for name in re.findall(r"`(invariants/[\w./]+)`", TEXT):
        assert (ROOT / name).exists(), name
