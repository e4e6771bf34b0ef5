"""A compact reference implementation of pipeline, data parallelism and ZeRO-1."""
