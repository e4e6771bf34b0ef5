"""`pytest --help` stays instant: loading the plugin imports neither torch nor hypothesis."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import pytest
status = pytest.main(json.loads(sys.argv[1]))
heavy = [name for name in ("torch", "numpy", "cloudpickle", "hypothesis") if name in sys.modules]
print("LOADED", json.dumps([int(status), "invariants.plugin" in sys.modules, heavy]))
"""


@pytest.mark.parametrize("option", ["--version", "-VV", "--help"])
def test_the_plugin_loads_without_torch_and_hypothesis(option, tmp_path):
    # Other plugins of this environment, Hypothesis's own among them, are not what is judged.
    arguments = ["-p", "invariants.plugin", "-p", "no:hypothesispytest", option]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
    )
    report = next(line for line in done.stdout.splitlines() if line.startswith("LOADED"))
    status, loaded, heavy = json.loads(report.removeprefix("LOADED"))
    assert status == 0
    assert heavy == []
    if option != "--version":  # for a single --version pytest loads no plugin at all
        assert loaded
    if option == "--help":
        assert "--world-deadline" in done.stdout
