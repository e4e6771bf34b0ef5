"""The project's own judge: every invariant on the reference implementation."""

import impl.target
import invariants

test_impl = invariants.suite(impl.target.target)
