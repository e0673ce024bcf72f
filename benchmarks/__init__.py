"""Benchmarks beside peers; each prints its machine and its figures."""
