"""Saving a training run under one layout and resuming it under any other.

A checkpoint says everything by the user's names: parameters and buffers, optimizer state and
settings. Each element of a parameter is written once, by the rank that counts it in norms; a rank
that loads reads the blocks that overlap its own.

    files.py       the folder, what makes it whole or not, reading without unpickling
    optimizers.py  optimizers and schedulers by parameter names
    job.py         a rank's model and optimizers, as a save or load sees them
    save.py, load.py
    state_dicts.py plain state dicts, out of and into any layout

`piper_dynamo/meeting.py` is how ranks agree.
"""
