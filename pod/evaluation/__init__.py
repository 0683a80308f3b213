"""Benchmarks: their metrics, their tasks, and the runner that they share."""
