"""Piper: a torch.compile backend that runs an ordinary model as a distributed program.

Tag regions of the model with `piper.annotate("PP", 0)`, state what goes where and in which order in
a `piper.Strategy`, and train what `piper.compile` returns in the ordinary loop. See README.md.
"""

import importlib
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from piper_dynamo.version import __version__ as __version__

if TYPE_CHECKING:
    from piper_dynamo.public import *  # noqa: F403
    from piper_dynamo.public import __all__ as __all__
else:
    # The names come with torch, whose import takes seconds, at the first use of one: the command
    # line shows its version, its help and completions without.
    def __getattr__(name: str) -> Any:
        if name != "__all__":
            if name.startswith("_"):
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            here = PathFinder.find_spec(f"{__name__}.{name}", __path__)  # noqa: F405
            if here is not None:
                return importlib.import_module(f"{__name__}.{name}")
        public = importlib.import_module(f"{__name__}.public")
        globals().update({one: getattr(public, one) for one in (*public.__all__, "__all__")})
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
