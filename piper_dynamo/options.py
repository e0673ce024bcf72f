"""What `torch.compile(model, backend="piper", options={...})` takes."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from piper_dynamo.costs import Costs
from piper_dynamo.errors import PiperStrategyError, format_error
from piper_dynamo.loss_scaling import NAN_CHECKS, LossScale, is_scale
from piper_dynamo.strategy import Strategy

STARTS = ("equal", "broadcast")
TUNED = "max-autotune"
FUSED = ("inductor", TUNED)  # what Inductor compiles
COMPILE_MODES = ("aten", *FUSED, "emulate")


class OptionsByLine(dict[str, Any]):
    """Options whose strategies are equal only where they were written on the same lines.

    Dynamo takes the code that it has where options are equal, and with it the strategy that this
    code was made for: errors would name the lines of that one. `torch.compile` copies what it is
    given into a plain dict, so this holds for steps of `piper.compile` and `piper.prepare`, which
    put these in its place.
    """

    def __eq__(self, other: object) -> bool:
        return dict.__eq__(self, other) is True and _lines(self) == _lines(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # as of any dict


def _lines(options: Any) -> tuple[str, ...]:
    """Where the parts of the strategy among these options were written."""
    strategy = options.get("strategy")
    if not isinstance(strategy, Strategy):
        return ()
    return tuple(one.where for one in (*strategy.directives, *strategy.kernels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the backend.

    Attributes:
        strategy: How the step is distributed; None compiles for one device.
        compile: How chunks run: "aten" (operator by operator), "inductor" (fused) or "max-autotune"
            (fused, with kernels chosen by measuring, which takes long once); None is aten on CPU,
            inductor on CUDA. "emulate" computes nothing: every chunk is a wait of
            its modelled duration and gives zeros, so loss and gradients are zeros; messages are
            real.
        costs: What tasks, messages and collectives take: what Orders leave open is filled so that
            the step is short at these costs. With "emulate", where they are needed, in seconds:
            there, tasks take them, while messages are real. Equal on all ranks: what each
            measures itself must be agreed on first. Costs without `comm` and `bandwidth` say that
            links take no time, so nothing is put beside exchanges of rows.
        timeout_s: Seconds that any wait for another rank may take.
        outputs: Where the outputs other than the loss come back: on the ranks that own them
            ("owner") or "everywhere".
        start: What becomes of ranks that hold the same parameter with different values before the
            first step: "equal" refuses them, "broadcast" gives all of them the first one's.
        init_fn: Gives the parameters and buffers of a model on the meta device their values, on
            the ranks that hold them: `init_fn(name, tensor)` changes the tensor, which is whole,
            in place. Random numbers in it depend on the seed and the name alone.
        nan_check: What becomes of a step in which a value of a task or a gradient is not finite, on
            any rank: all ranks "raise", or "skip" it (no gradient is handed over, no buffer
            changes), naming the first such task and parameter. None does not look.
        loss_scale: What the loss is multiplied by where the backward starts; gradients are divided
            by it again. A number, a `piper.LossScale` that finds its own size, or "dynamic" for
            one with the defaults.
        graph: On CUDA, record a step once, with its communication, and replay it. Refused where the
            host decides something in each step, as where experts take as many rows as come.
    """

    strategy: Strategy | None = None
    compile: str | None = None
    costs: Costs | None = None
    timeout_s: float = 300.0
    outputs: str = "owner"
    start: str = "equal"
    init_fn: Callable[[str, torch.Tensor], Any] | None = None
    nan_check: str | None = None
    loss_scale: float | str | LossScale | None = None
    graph: bool = False

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.strategy is not None and not isinstance(self.strategy, Strategy):
            raise PiperStrategyError(
                f"option 'strategy' is a {type(self.strategy).__name__}; pass a piper.Strategy"
            )
        if self.compile not in (None, *COMPILE_MODES):
            raise PiperStrategyError(
                f"option 'compile' is {self.compile!r}; choose one of {', '.join(COMPILE_MODES)}"
            )
        self._check_costs()
        number = isinstance(self.timeout_s, int | float) and not isinstance(self.timeout_s, bool)
        if not number or not self.timeout_s > 0:
            raise PiperStrategyError(f"option 'timeout_s' is {self.timeout_s!r}; give seconds > 0")
        if self.outputs not in ("owner", "everywhere"):
            raise PiperStrategyError(
                f"option 'outputs' is {self.outputs!r}; choose 'owner' or 'everywhere'"
            )
        if self.start not in STARTS:
            raise PiperStrategyError(
                f"option 'start' is {self.start!r}; choose 'equal' or 'broadcast'"
            )
        if self.init_fn is not None and not callable(self.init_fn):
            raise PiperStrategyError(
                f"option 'init_fn' is a {type(self.init_fn).__name__}; pass a function of a name "
                "and a tensor"
            )

        if not isinstance(self.graph, bool):
            raise PiperStrategyError(f"option 'graph' is {self.graph!r}; give True or False")
        self._check_numbers()

    def _check_numbers(self) -> None:
        """What is said of values that are not finite."""
        if self.nan_check not in (None, *NAN_CHECKS):
            raise PiperStrategyError(
                f"option 'nan_check' is {self.nan_check!r}; choose 'raise', 'skip' or None"
            )
        scale = self.loss_scale
        if scale is None or scale == "dynamic":
            is_dynamic = scale is not None
        else:
            is_dynamic = isinstance(scale, LossScale)
            if not is_dynamic and not is_scale(scale):
                raise PiperStrategyError(
                    f"option 'loss_scale' is {scale!r}; give a number above 0, a piper.LossScale, "
                    "or 'dynamic'"
                )
        if is_dynamic and self.nan_check == "raise":
            raise PiperStrategyError(
                "a dynamic loss_scale finds its size by steps whose gradients are not finite, at "
                "which nan_check='raise' stops; use nan_check='skip', or a fixed loss_scale"
            )

    def watched(self) -> str:
        """The options by which ranks meet after a step, as text."""
        names = ("nan_check", "loss_scale")
        given = {name: getattr(self, name) for name in names}
        return "".join(f" {name}={value!r}" for name, value in given.items() if value is not None)

    def _check_costs(self) -> None:
        """Emulated devices need a model of time."""
        if self.costs is not None and not isinstance(self.costs, Costs):
            raise PiperStrategyError(
                f"option 'costs' is a {type(self.costs).__name__}; pass a piper.Costs"
            )
        if self.compile != "emulate":
            if self.costs is not None and self.strategy is None:
                raise PiperStrategyError(
                    "option 'costs' says what tasks take, but there is no strategy to schedule"
                )
            return
        if self.costs is None:
            raise PiperStrategyError(
                "option 'compile' is 'emulate', so chunks are waits, but nothing says how long; "
                "pass costs=piper.Costs(F=0.005, BI=0.005, BW=0.005), in seconds"
            )
        if self.strategy is None:
            raise PiperStrategyError(
                "option 'compile' is 'emulate' without a strategy: there are no devices to emulate"
            )

    def compile_for(self, inputs: Iterable[Any]) -> str:
        """How chunks run on the device of these inputs."""
        if self.compile is not None:
            return self.compile
        devices = {i.device.type for i in inputs if isinstance(i, torch.Tensor)}
        return "inductor" if "cuda" in devices else "aten"

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> "Options":
        """Options from torch.compile's mapping.

        Raises:
            PiperStrategyError: A name is unknown (near misses are listed) or a value means nothing.
        """
        known = [f.name for f in fields(cls)]
        faults = []
        for name in given or {}:
            if name not in known:
                near = difflib.get_close_matches(str(name), known)
                faults.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        if faults:
            raise PiperStrategyError(
                format_error(f"unknown option: {', '.join(faults)}", {"known": ", ".join(known)})
            )
        return cls(**(given or {}))
