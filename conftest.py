"""Tests of this project use its own plugin, installed or not."""

from hypothesis import settings

pytest_plugins = ("invariants.plugin", "pytester")

# Machines that test this are slow and loaded, and there are hundreds of properties.
settings.register_profile("tests", deadline=None, max_examples=30)
settings.load_profile("tests")
