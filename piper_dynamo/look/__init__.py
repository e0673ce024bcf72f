"""The commands that look at a plan: `piper plan`, `check`, `plot`, `compare` and `explain`.

Beside them `convert`, which writes strategies in other forms, and `debug`, which compares runs.
"""
