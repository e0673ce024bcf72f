"""What other systems' parallelism arguments mean here: see `reading.py` for the terms."""

from piper_dynamo.foreign.deep_speed import deepspeed
from piper_dynamo.foreign.megatron_lm import megatron
from piper_dynamo.foreign.reading import Arguments, Meaning
from piper_dynamo.foreign.titan import torchtitan

__all__ = ["Arguments", "Meaning", "deepspeed", "megatron", "torchtitan"]
