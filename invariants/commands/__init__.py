"""The commands of `invariants`, one file each; `invariants.cli` reads their arguments."""
