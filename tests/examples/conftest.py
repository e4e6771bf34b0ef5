"""Examples are projects of their own; `tests/invariants/test_example_plugin.py` installs and runs them."""

collect_ignore = ["invariants-example-plugin"]
