"""Tags by module path: `regions={"layers.[0-3]": {"PP": 0}}`, the model's source untouched.

A node is in every module of its `nn_module_stack`; the deepest module that a pattern matches
decides (submodules inherit), and of several patterns for one module the longest. A tag that
`piper.annotate` wrote stays: it is nearer to the code.
"""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import fx

from piper_dynamo.errors import PiperCaptureError, format_error
from piper_dynamo.ir.joint import ENTRY, PREFIX
from piper_dynamo.ir.spec import module_paths
from piper_dynamo.ir.tags import nodes_of

_MOST_SHOWN = 12


def tag_by_path(gm: fx.GraphModule, regions: Mapping[str, Mapping[str, int]]) -> None:
    """Write the tags of matching module paths into Dynamo's graph, nested graphs included.

    Args:
        gm: Dynamo's graph.
        regions: Tags by fnmatch pattern over module paths, e.g. `layers.0.attention`.

    Raises:
        PiperCaptureError: A pattern matches no module of the call; near misses are listed.
    """
    paths: set[str] = set()
    used: set[str] = set()
    for node in nodes_of(gm):
        stack = module_paths(node)
        paths.update(stack)
        tags: dict[str, int] = {}
        for path in stack:  # outermost first: deeper modules overwrite
            matching = [p for p in regions if fnmatchcase(path, p)]
            used.update(matching)
            if matching:
                tags = dict(regions[max(matching, key=len)])
        if not tags:
            continue
        custom = dict(node.meta.get("custom") or {})
        for tag, index in tags.items():
            if PREFIX + tag + ENTRY not in custom:
                custom.setdefault(PREFIX + tag, index)
        node.meta["custom"] = custom
    missing = [p for p in regions if p not in used]
    if missing:
        near = {p: difflib.get_close_matches(p, sorted(paths), n=3, cutoff=0.5) for p in missing}
        there = sorted({path.split(".")[0] for path in paths if path})
        more = f" and {len(there) - _MOST_SHOWN} more" if len(there) > _MOST_SHOWN else ""
        raise PiperCaptureError(
            format_error(
                "a pattern of regions= matches no module that the call runs",
                {repr(p): f"close: {', '.join(near[p]) or 'nothing'}" for p in missing}
                | {"modules that run": (", ".join(there[:_MOST_SHOWN]) or "none") + more},
                hint="patterns are fnmatch patterns over module paths, as in "
                "model.named_modules(); of modules that the call does not run nothing is captured",
            )
        )


@contextmanager
def tagged(gm: fx.GraphModule, regions: Mapping[str, Mapping[str, int]] | None) -> Iterator[None]:
    """While a graph is looked at, it has the tags of `regions`, as `tag_by_path` writes them."""
    nodes = list(nodes_of(gm)) if regions else []
    before = [node.meta.get("custom") for node in nodes]
    try:
        if regions:
            tag_by_path(gm, regions)
        yield
    finally:
        for node, tags in zip(nodes, before, strict=True):
            if tags is None:
                node.meta.pop("custom", None)
            else:
                node.meta["custom"] = tags
