"""Whole strategies."""
