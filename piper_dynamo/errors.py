"""The errors users see. Every refusal is a `PiperError`; each says what, where, why and what to do.

`format_error` lays the parts out the same way everywhere, so that messages can be searched for and
tested.
"""

from collections.abc import Mapping


class PiperError(Exception):
    """Base of every error raised on purpose by Piper.

    Attributes:
        where: The user's `file:line`, where the text is not the place to look for it.
        is_echo: Whether it only follows from another rank's failure.
        blames: The rank that was waited for in vain, if that is known; else -1.
    """

    where = ""
    is_echo = False
    blames = -1


class PiperStrategyError(PiperError, ValueError):
    """A directive or strategy is malformed, or two directives contradict each other."""


class PiperCaptureError(PiperError):
    """The model cannot be captured as one graph of one microbatch."""


class PiperPlanError(PiperError, ValueError):
    """A plan is unsafe or impossible; the message lists every fault found."""


class PiperRuntimeError(PiperError):
    """A running step failed; names rank, stage, microbatch and the user's source line."""


class PiperTimeoutError(PiperRuntimeError):
    """A wait ran past its deadline; names what was waited for and from which rank.

    Attributes:
        is_cut_off: Whether the other ranks could not be asked either.
    """

    is_echo = True
    is_cut_off = False


class PiperAbsentError(PiperError):
    """A tensor that this rank does not hold was touched."""


class PiperSyntaxError(PiperError):
    """A text is not in the grammar of task names, programs or strategy files."""


def format_error(title: str, details: Mapping[str, object] | None = None, *, hint: str = "") -> str:
    """The common layout: a fixed title, then one `key  value` line per detail, then the hint.

    Args:
        title: What is wrong, in one line.
        details: Where and why; values of several lines are indented under their key.
        hint: What to do about it.

    Returns:
        The message text.
    """
    rows = [(key, str(value)) for key, value in (details or {}).items()]
    if hint:
        rows.append(("hint", hint))
    width = max((len(key) for key, _ in rows), default=0)
    lines = [title]
    for key, value in rows:
        first, *rest = value.splitlines() or [""]
        lines.append(f"  {key:<{width}}  {first}")
        lines += [f"  {'':<{width}}  {line}" for line in rest]
    return "\n".join(lines)


def join_faults(title: str, faults: list[str], *, hint: str = "") -> str:
    """One message for all faults of a check: the title, a block per fault, the hint."""
    blocks = ["\n".join("  " + line for line in fault.splitlines()) for fault in faults]
    tail = [f"  hint  {hint}"] if hint else []
    return "\n".join([title, *blocks, *tail])
