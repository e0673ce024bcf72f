"""The distributed DAG as a drawing: text for graphviz, and SVG where graphviz is installed.

A box per task, in the colour it has in a timeline, in a frame per device group; an edge is a value,
a dashed one an order. What only moves, sums or slices a value is an ellipse.

Signature: DAG -> dot text.
"""

import shutil
import subprocess
from pathlib import Path

from torch.fx.node import Node

from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.ir.graph import Dag, is_pick, producer, task_of
from piper_dynamo.ir.spec import show_bytes
from piper_dynamo.ir.task import COLLECTIVE_KINDS, Kind
from piper_dynamo.pictures.looks import LOOKS, MESSAGE

MOST_NODES = 400  # more, and neither graphviz nor a reader gets through
_LOOK_OF = {Kind.SEND: "send", Kind.RECV: "recv"}
_TIMEOUT_S = 120


def draw_graph(dag: Dag, path: str | Path) -> None:
    """Draw a small DAG.

    Args:
        dag: The DAG.
        path: .dot for graphviz's text, .svg for the picture.

    Raises:
        PiperError: The DAG is large, the suffix is another, or graphviz is needed and not there.
    """
    path = Path(path)
    tasks = sum(1 for node in dag.graph.nodes if "task" in node.meta)
    if tasks > MOST_NODES:
        raise PiperError(
            format_error(
                "this graph is too large to be drawn",
                {"nodes": tasks, "most": MOST_NODES},
                hint="draw a plan of fewer microbatches; plan.graph is the graph as text",
            )
        )
    suffix = path.suffix.lower()
    if suffix not in (".dot", ".svg"):
        raise PiperError(f"a graph is drawn as .dot or .svg, by the path's suffix; got '{path}'")
    if suffix == ".svg" and shutil.which("dot") is None:
        raise PiperError(
            format_error(
                "drawing a graph as SVG needs graphviz, whose program 'dot' is not here",
                {"path": path},
                hint="install graphviz, or write the text, which other programs draw: "
                f"{path.with_suffix('.dot')}",
            )
        )
    text = dot_of(dag)
    if suffix == ".svg":
        done = subprocess.run(
            ["dot", "-Tsvg"], input=text, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        if done.returncode:
            raise PiperError(f"graphviz could not draw the graph: {done.stderr.strip()}")
        text = done.stdout
    path.write_text(text, encoding="utf-8")


def dot_of(dag: Dag) -> str:
    """The text for graphviz."""
    frames: dict[tuple[int, ...], list[Node]] = {}
    for node in dag.graph.nodes:
        if "task" in node.meta:
            frames.setdefault(task_of(node).devices, []).append(node)
    lines = [
        "digraph plan {",
        "  rankdir=LR; newrank=true; fontname=sans;",
        "  node [fontname=sans fontsize=10 style=filled fillcolor=white];",
        "  edge [fontname=sans fontsize=8 color=gray30];",
    ]
    for devices, nodes in frames.items():
        name = "_".join(map(str, devices)) or "any"
        ranks = ", ".join(map(str, devices))
        label = f"rank{'s' if len(devices) > 1 else ''} {ranks}" if devices else "not placed"
        lines.append(f'  subgraph cluster_{name} {{ label="{label}"; color=gray70;')
        lines += [f"    {_node(node)}" for node in nodes]
        lines.append("  }")
    lines += _edges(dag)
    return "\n".join([*lines, "}", ""])


def _node(node: Node) -> str:
    task = task_of(node)
    if task.kind is Kind.COMPUTE:
        assert task.name is not None
        color = LOOKS[task.name.which.value][0]
        return f'{node.name} [label="{task}" shape=box fillcolor="{color}" tooltip="{task.where}"];'
    look = "reduce" if task.kind in COLLECTIVE_KINDS else _LOOK_OF.get(task.kind)
    color = LOOKS[look][0] if look else "white"
    label = task.kind.value.replace("_", " ")
    return f'{node.name} [label="{label}" shape=ellipse fillcolor="{color}" tooltip="{task}"];'


def _edges(dag: Dag) -> list[str]:
    """One edge per pair of tasks, with the bytes of all values between them."""
    values: dict[tuple[Node, Node], int] = {}
    for node in dag.graph.nodes:
        if "task" not in node.meta:
            continue
        for given in node.all_input_nodes:
            source = producer(given)
            if "task" in source.meta:
                spec = given.meta.get("spec") if is_pick(given) or given is source else None
                nbytes = spec.nbytes if spec is not None else 0
                values[source, node] = values.get((source, node), 0) + nbytes
    lines = []
    for (source, target), nbytes in values.items():
        is_moved = Kind.SEND in (task_of(source).kind, task_of(target).kind)
        style = f' color="{MESSAGE}"' if is_moved else ""
        label = f'label="{show_bytes(nbytes)}"' if nbytes else 'label=""'
        lines.append(f"  {source.name} -> {target.name} [{label}{style}];")
    for before, after, _ in dag.orders:
        lines.append(f"  {before.name} -> {after.name} [style=dashed constraint=false];")
    return lines
