"""Tests of this project use its own plugin, installed or not."""

pytest_plugins = ("invariants.plugin", "pytester")
