"""Piper: a torch.compile backend that runs an ordinary model as a distributed program."""

__version__ = "0.1.0"
