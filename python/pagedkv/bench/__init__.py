"""Benchmarks for people: `pagedkv bench`."""
