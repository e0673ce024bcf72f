"""The loss scale: gradients of float16 chunks kept above what underflows.

The scale is folded into what the backward starts from, since scaling afterwards cannot bring back
what was lost; gradients are divided by it before they are handed over, so that clipping and
optimizers see them as they are.
"""

from dataclasses import dataclass
from math import isfinite
from typing import TypeAlias

from piper_dynamo.errors import PiperStrategyError
from piper_dynamo.values import is_whole

NAN_CHECKS = ("raise", "skip")  # what becomes of a step with values that are not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """A scale that finds its own size; the defaults are those of `torch.amp.GradScaler`.

    A step with a gradient that is not finite, on any rank, hands over none and makes the scale
    smaller; after `interval` steps without one it grows.

    Attributes:
        init: The first scale.
        growth: What it is multiplied by after `interval` good steps in a row.
        backoff: What it is multiplied by after a bad one.
        interval: In steps.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        """Refuse what is no scale.

        Raises:
            PiperStrategyError: Names the field.
        """
        for name, is_right, must in (
            ("init", is_scale(self.init), "a number above 0"),
            ("growth", is_scale(self.growth) and self.growth >= 1, "a number of at least 1"),
            ("backoff", is_scale(self.backoff) and self.backoff < 1, "between 0 and 1"),
            ("interval", is_whole(self.interval) and self.interval >= 1, "steps, at least 1"),
        ):
            if not is_right:
                raise PiperStrategyError(
                    f"piper.LossScale({name}={getattr(self, name)!r}): must be {must}"
                )


Option: TypeAlias = float | str | LossScale | None


def is_scale(value: object) -> bool:
    """Whether a number can be a factor of a loss."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isfinite(value) and value > 0


@dataclass(slots=True, kw_only=True)
class Scaler:
    """A loss scale in use; alike on all ranks, since all see the same steps.

    Attributes:
        option: The option `loss_scale` that it was made of.
        rule: How it changes; None: it does not.
        factor: The scale of the next step.
        good: Steps in a row that were finite at this scale.
    """

    option: Option = None
    rule: LossScale | None = None
    factor: float = 1.0
    good: int = 0

    @classmethod
    def of(cls, option: Option) -> "Scaler":
        """As the option `loss_scale` asks for."""
        rule = LossScale() if option == "dynamic" else option
        if isinstance(rule, LossScale):
            return cls(option=option, rule=rule, factor=rule.init)
        assert not isinstance(rule, str)
        return cls(option=option, factor=1.0 if rule is None else float(rule))

    def update(self, *, is_finite: bool) -> None:
        """Take note of a step."""
        if self.rule is None:
            return
        if not is_finite:
            self.factor, self.good = self.factor * self.rule.backoff, 0
            return
        self.good += 1
        if self.good == self.rule.interval:
            grown = self.factor * self.rule.growth
            self.factor, self.good = grown if isfinite(grown) else self.factor, 0
