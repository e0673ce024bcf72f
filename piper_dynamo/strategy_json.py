"""Strategies as JSON text, and the published system's schedule files."""
