"""Pipeline schedules as data: no torch, no processes."""
