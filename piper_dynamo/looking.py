"""Calls that are only looked at: captured once, and planned under any strategy.

What Dynamo has traced it takes again where its guards hold and the backend's options are equal. A
look's options say nothing of the strategy, which the session has; they say what `seen` finds, and
whether batch sizes had to be made symbols. So a model that has changed is traced again, and another
strategy is not a reason to.

Signature: Dynamo's graph of a call -> what hands it to the session, as a step of its strategy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from piper_dynamo import _torch_compat as compat
from piper_dynamo.backend import is_training, make_batch_symbolic, read_call
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.passes.split import data_dims
from piper_dynamo.planning import split_of
from piper_dynamo.seen import seen
from piper_dynamo.step import CompiledStep, Session, current_session
from piper_dynamo.stores import Effects
from piper_dynamo.strategy import Split, Strategy
from piper_dynamo.tagging import tagged


class NotSymbolicError(Exception):
    """A call was captured with a number in the place of a batch size that is to be split."""


def to_look_at(model: nn.Module, split: Split | None) -> Any:
    """A model whose calls are handed to the session.

    Args:
        model: The single-device model.
        split: Whose batch dims are to be symbols; None: they are where nothing fixes them, which
            serves most strategies.
    """
    sliced = None if split is None else tuple(sorted((split.inputs or {}).items()))
    options: dict[str, Any] = {"seen": seen(model), "sliced": sliced}
    return torch.compile(model, backend=_backend, fullgraph=True, options=options)


def _backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any]
) -> Callable[..., Any]:
    args, effects = read_call(gm, example_inputs)
    is_symbolic = options["sliced"] is not None
    if is_symbolic:
        dims = data_dims(args, split_of(_looking()[1]))
        make_batch_symbolic(gm, args, example_inputs, dims)
    return _Looked(gm, args, effects, is_symbolic=is_symbolic)


def _looking() -> tuple[Session, Strategy]:
    """The session in which a call is looked at, and the strategy under which."""
    now = current_session()
    assert now is not None, "a call that is only looked at needs a session"
    assert now.options is not None, "a session that looks at calls has options"
    assert now.options.strategy is not None
    return now, now.options.strategy


class _Looked:
    """What Dynamo's code of a call runs: a step of the session's strategy, made of the graph."""

    def __init__(
        self,
        gm: fx.GraphModule,
        args: tuple[Arg, ...],
        effects: Effects,
        *,
        is_symbolic: bool,
    ) -> None:
        self._gm, self._args, self._effects = gm, args, effects
        self._training = is_training(args)
        self._fixed: set[tuple[int, int]] = set() if is_symbolic else _fixed_dims(gm, args)

    def __call__(self, *values: Any) -> Any:
        """Plan it, or only keep it.

        Raises:
            NotSymbolicError: The strategy slices a dim whose size is a number in the graph.
            PiperError: The strategy is refused.
        """
        compat.unmark_dynamic()
        now, strategy = _looking()
        with tagged(self._gm, strategy.regions):
            if self not in now.made:
                now.made[self] = self._step(now, strategy, values)
            return now.made[self](*values)

    def _step(self, now: Session, strategy: Strategy, values: Sequence[Any]) -> CompiledStep:
        assert now.options is not None
        step = CompiledStep(
            self._gm, self._args, now.options, training=self._training, effects=self._effects
        )
        split = split_of(strategy)
        dims = data_dims(step.call_of(values).args, split)
        if split.num_microbatches > 1 and not self._fixed.isdisjoint(dims.items()):
            raise NotSymbolicError
        return step


def _fixed_dims(gm: fx.GraphModule, args: Sequence[Arg]) -> set[tuple[int, int]]:
    """Position and dim of the data whose sizes are numbers in Dynamo's graph."""
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    return {
        (arg.position, dim)
        for arg in args
        if arg.kind is ArgKind.DATA
        for dim, size in enumerate(placeholders[arg.position].meta["example_value"].shape)
        if compat.fixed_size(size) is not None
    }
