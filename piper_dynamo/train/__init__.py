"""The training run behind `piper train`: model, data, loop and run folder."""
