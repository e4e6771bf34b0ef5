"""Process groups for tests: a pool of rank processes, forked from a server that has only imported torch."""
