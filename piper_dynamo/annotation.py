"""Tagging regions of a model.

A tag travels in `node.meta["custom"]` from Dynamo through AOTAutograd into forward and backward
nodes. The keys written there are private to Piper (`piper:PP`), so annotations of other tools pass
through untouched.

An annotation without an index is numbered in order of entry: each entry takes a fresh number at
trace time, and capture turns the numbers it finds, in rising order, into 0, 1, 2, ...
"""

import itertools
from contextlib import AbstractContextManager
from typing import Any, cast

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperStrategyError
from piper_dynamo.ir.joint import ENTRY, PREFIX
from piper_dynamo.ir.task import is_tag_name

_entries = itertools.count()


@compat.assume_constant_result
def _fresh_entry() -> int:
    return next(_entries)


@compat.assume_constant_result
def _check(name: Any, index: Any) -> bool:
    if not isinstance(name, str) or not is_tag_name(name):
        raise PiperStrategyError(
            f"piper.annotate({name!r}, ...): a tag is an identifier that does not end in a digit, "
            "and is not 'v', 'MB' or 'PASS'; e.g. 'PP', 'EP', 'tower'"
        )
    if index is not None and (isinstance(index, bool) or not isinstance(index, int) or index < 0):
        raise PiperStrategyError(
            f"piper.annotate({name!r}, {index!r}): the index is an int >= 0, or left out to be "
            "numbered in order of entry"
        )
    return True


def annotate(name: str, index: int | None = None) -> AbstractContextManager[None]:
    """Tag what is computed inside the `with` block; nested tags add up.

    Args:
        name: The tag, e.g. `"PP"` for pipeline stages or `"EP"` for experts.
        index: Its index; None numbers the blocks of this name 0, 1, 2, ... in order of entry.

    Returns:
        A context manager; outside of a captured call it does nothing.

    Raises:
        PiperStrategyError: The name or index cannot be a tag.
    """
    _check(name, index)
    key = PREFIX + name
    if index is None:
        return cast(AbstractContextManager[None], compat.annotate({key + ENTRY: _fresh_entry()}))
    return cast(AbstractContextManager[None], compat.annotate({key: index}))
