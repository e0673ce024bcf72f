"""Mixtures of experts: the vocabulary that `piper.Shard` understands, and a layer made of it."""

from piper_dynamo.moe.capacity import dropped
from piper_dynamo.moe.layer import MoELayer, Routed
from piper_dynamo.moe.routing import Routing, combine, dispatch, grouped_mm

__all__ = ["MoELayer", "Routed", "Routing", "combine", "dispatch", "dropped", "grouped_mm"]
