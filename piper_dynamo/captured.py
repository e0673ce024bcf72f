"""A captured call: Dynamo's graph of it, planned under one strategy or another.

Signature: graph, arguments, options -> template, plan.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from piper_dynamo import _torch_compat as compat
from piper_dynamo.budgets import budgets_of
from piper_dynamo.errors import PiperCaptureError, format_error
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.options import Options
from piper_dynamo.passes.split import data_dims
from piper_dynamo.pending import spec_of
from piper_dynamo.planning import Plan, Template, make_plan, split_of, template_of
from piper_dynamo.precision import rules_of
from piper_dynamo.records import capacities_of, cuts_of
from piper_dynamo.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a plan depends on of a call's values.

    Attributes:
        args: The graph's arguments, with the sizes of the whole batch.
        numbers: Values of those that are numbers, by position.
        compile_mode: How chunks run on the device of the values.
    """

    args: tuple[Arg, ...]
    numbers: dict[int, Any]
    compile_mode: str


class CapturedStep:
    """A call that Dynamo has captured, with a strategy."""

    def __init__(
        self, gm: fx.GraphModule, args: tuple[Arg, ...], options: Options, *, training: bool
    ) -> None:
        """`gm` is Dynamo's graph, and `args` say what its placeholders are."""
        self._gm = gm
        self._args = args
        self._options = options
        self._training = training
        self._key = graph_key(gm, args)
        self._loss: int | None = None
        self._paths: dict[int, str] = {}

    @property
    def strategy(self) -> Strategy:
        """The strategy it runs."""
        assert self._options.strategy is not None
        return self._options.strategy

    def call_of(self, values: Sequence[Any]) -> Call:
        """What a plan depends on of the graph's arguments."""
        pairs = list(zip(self._args, values, strict=True))
        return Call(
            args=tuple(
                replace(arg, spec=spec_of(value)) if arg.spec is not None else arg
                for arg, value in pairs
            ),
            numbers={arg.position: v for arg, v in pairs if arg.kind is ArgKind.NUMBER},
            compile_mode=self._options.compile_for(values),
        )

    def template(self, call: Call) -> Template:
        """The captured microbatch of a call, cut and partitioned as the strategy wants it."""
        split = split_of(self.strategy)
        return template_of(
            self._key,
            self._gm,
            call.args,
            call.numbers,
            data_dims(call.args, split),
            split.num_microbatches,
            loss=self._loss_index(),
            training=self._training,
            paths=self._paths,
            cuts=cuts_of(self.strategy, call.compile_mode),
            capacities=capacities_of(self.strategy),
            budgets=budgets_of(self.strategy),
            rules=rules_of(self.strategy),
        )

    def planned(self, call: Call, world_size: int, *, sync: bool = True) -> Plan:
        """The plan of a call, made anew."""
        return make_plan(
            self.template(call),
            self.strategy,
            world_size,
            data_dims(call.args, split_of(self.strategy)),
            compile_mode=call.compile_mode,
            costs=self._options.costs,
            outputs_everywhere=self._options.outputs == "everywhere",
            sync=sync,
        )

    def under(self, strategy: Strategy) -> "CapturedStep":
        """The same call under another strategy; the graph's tags are as they are at this moment."""
        options = replace(self._options, strategy=strategy)
        other = CapturedStep(self._gm, self._args, options, training=self._training)
        other._loss, other._paths = self._loss, self._paths
        return other

    @property
    def graph(self) -> fx.GraphModule:
        """Dynamo's graph of the call."""
        return self._gm

    def _loss_index(self) -> int | None:
        strategy = self.strategy
        if strategy.loss is None or self._loss is not None:
            return self._loss
        raise PiperCaptureError(
            format_error(
                f"the loss is named as output {strategy.loss!r}, "
                "which a plain first call cannot resolve: it does not see the outputs' structure",
                hint="call piper.prepare(step, *example_inputs) first, or use piper.compile",
            )
        )


def graph_key(gm: fx.GraphModule, args: tuple[Arg, ...]) -> str | None:
    """A text equal for equal graphs, or None where the graph holds tensors of its own."""
    lines = [repr([(a.kind.value, a.name, a.requires_grad) for a in args])]
    lines.append(compat.trace_settings())
    for name, module in gm.named_modules():  # the graph itself, and those nested in it
        if not isinstance(module, fx.GraphModule):
            continue
        lines.append(name)
        entries: dict[tuple[str, int], int] = {}
        for node in module.graph.nodes:
            if node.op == "get_attr" and isinstance(
                getattr(module, str(node.target), None), Tensor
            ):
                return None
            custom = {}
            for key, value in (node.meta.get("custom") or {}).items():
                if key.endswith("#entry"):
                    value = entries.setdefault((key, value), len(entries))
                custom[key] = value
            target = (
                node.target if isinstance(node.target, str) else compat.target_name(node.target)
            )
            lines.append(
                f"{node.op} {node.name} {target} {node.args} {node.kwargs} {custom} "
                f"{node.stack_trace}"
            )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
