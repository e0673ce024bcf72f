"""The captured call: the joint graph of one microbatch and what its ends are.

Terms: an *argument* is a placeholder of Dynamo's graph (parameter, buffer, data or number); a
*microbatch* is one of the equal slices of the data arguments along their batch dims.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from piper_dynamo.ir.spec import TensorSpec

PREFIX = "piper:"  # of the keys that annotations write into a node's meta["custom"]
ENTRY = "#entry"  # suffix of the key that holds the fresh number of an annotation without an index
OUTPUT_COPY = "piper:output"  # marks the copies that `_detach_outputs` adds


class ArgKind(StrEnum):
    """What an argument of the captured call is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    DATA = "data"
    NUMBER = "number"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """One argument of the captured call.

    Attributes:
        kind: Parameter, buffer (any other tensor of the module), data, or number.
        name: The user's name: a parameter's path, an argument's name with its path inside.
        position: Its place among the arguments of Dynamo's graph.
        spec: Shape, dtype, device as given at the call (whole batch); None for numbers.
        requires_grad: Whether a gradient is asked for it.
        size_of: For a number that is a size of a tensor argument: that argument's name and dim.
    """

    kind: ArgKind
    name: str
    position: int
    spec: TensorSpec | None = None
    requires_grad: bool = False
    size_of: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unjoined:
    """Stands for an output of which microbatches make parts that are not parts of the batch's.

    Attributes:
        spec: What the whole batch would give.
        part: What a microbatch gives.
    """

    spec: TensorSpec
    part: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output of the captured call: a node of the graph, or a constant.

    Attributes:
        node: The node's name; None for a constant.
        value: The constant (None, int, ...).
        spec: The tensor of one microbatch; None for constants.
        batch_dim: The dim that grows with the batch; None where no dim does.
    """

    node: str | None
    value: Any = None
    spec: TensorSpec | None = None
    batch_dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The joint (or forward) graph of one microbatch and what its ends are.

    Attributes:
        graph: Placeholders are those of `args` in order, then tangents; the output
            node is an empty tuple's.
        args: The arguments, in order of position.
        placeholders: Placeholder name of each argument that the graph takes, by position.
        tangents: Name of the placeholder of an output's gradient, by the output's index: the loss
            alone, or every differentiable output where none is the loss; none in a forward graph.
        loss: Index into `outputs` of the loss, or None.
        outputs: The call's tensor and constant outputs in order.
        buffers: Name of the node with a buffer's new value, by the position of the buffer.
        grads: Name of the node with an argument's gradient, by position.
        mode: The fake mode the values in `meta["val"]` belong to.
        computed: By position, the dtype in which the graph takes a parameter, where it is not the
            one that it is held in.
    """

    graph: fx.Graph
    args: tuple[Arg, ...]
    placeholders: dict[int, str]
    tangents: dict[int, str]
    loss: int | None
    outputs: tuple[Output, ...]
    buffers: dict[int, str]
    grads: dict[int, str]
    mode: Any
    computed: Mapping[int, torch.dtype] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What recomputation saves and costs in one microbatch of a region.

    Attributes:
        kept_bytes: What the forward keeps for the backward.
        kept_without: What it would keep if nothing were asked.
        flops: Of what the backward computes again.
        matmuls: How many matrix products and convolutions are among it.
    """

    kept_bytes: int
    kept_without: int
    flops: int
    matmuls: int
