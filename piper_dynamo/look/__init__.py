"""The commands that look at a plan: `piper plan`, `check`, `plot`, `compare` and `explain`."""
