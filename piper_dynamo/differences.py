"""What a program is made of, as a text that ranks leave for others, and where two of them part.

The fingerprints of two programs say that they differ; their *accounts* say in which directive, task
or order first. A task's operators are those by which its chunk is hashed, so that none is missed.

Signature: plan -> account; two accounts -> the first difference.
"""

import base64
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from piper_dynamo.ir.chunk import Chunk, structural_lines
from piper_dynamo.ir.graph import task_of
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.spec import user_line
from piper_dynamo.planning import Plan
from piper_dynamo.strategy import Order

NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two programs part first.

    Attributes:
        place: The directive, task or order.
        mine: What this rank has there.
        theirs: What the other rank has there.
    """

    place: str
    mine: str
    theirs: str


def account(plan: Plan) -> str:
    """What a plan is made of, packed."""
    tasks = []
    operators: dict[str, list[str]] = {}  # by the key of their chunk
    for node in plan.dag.tasks():
        name = task_of(node).name
        if name is None or name.mb or node.op != "call_module":  # microbatches are alike
            continue
        chunk = plan.chunks[str(node.target)]
        tasks.append([str(replace(name, mb=None)), chunk.key])
        operators.setdefault(chunk.key, list(_operators(chunk)))
    found = {
        "directives": [repr(d) for d in plan.strategy.directives if not isinstance(d, Order)],
        "tasks": tasks,
        "operators": operators,
        "orders": [
            [program.rank, [i.task for i in program.instrs if i.op is Op.RUN]]
            for program in plan.distinct
        ],
    }
    return base64.b85encode(zlib.compress(json.dumps(found).encode(), 1)).decode()


def _operators(chunk: Chunk) -> Iterator[str]:
    """A line for each, with the user's; folders differ between ranks that run the same code."""
    for node, line in zip(chunk.graph.nodes, structural_lines(chunk.graph), strict=True):
        where = os.path.basename(user_line(node))
        shown = line.removeprefix("call_function ").removesuffix(" {} (None, None)")
        if node.op == "output":
            yield f"the end, with {node.args[0]}"
        else:
            yield f"{shown}  [{where}]" if where and node.op == "call_function" else shown


def first_difference(mine: str, theirs: str) -> Difference | None:
    """Where two accounts part; None where it is in how ranks share and send what they compute."""
    here, there = (json.loads(zlib.decompress(base64.b85decode(text))) for text in (mine, theirs))
    found = _first(here["directives"], there["directives"])
    if found is not None:
        return Difference(place="a directive", mine=found[1], theirs=found[2])
    for (name, key), (other, other_key) in zip_longest(
        here["tasks"], there["tasks"], fillvalue=(NOTHING, NOTHING)
    ):
        if name != other:
            return Difference(place="the tasks there are", mine=name, theirs=other)
        found = _first(here["operators"][key], there["operators"][other_key])
        if found is not None:
            return Difference(place=name, mine=found[1], theirs=found[2])
    for (rank, tasks), (_, others) in zip(here["orders"], there["orders"], strict=False):
        found = _first(tasks, others)
        if found is not None:
            place = f"the order of rank {rank}'s tasks, from the {found[0] + 1}. on"
            return Difference(place=place, mine=found[1], theirs=found[2])
    return None


def _first(mine: Sequence[str], theirs: Sequence[str]) -> tuple[int, str, str] | None:
    """The place of the first entry that is not equal, with both."""
    pairs = enumerate(zip_longest(mine, theirs, fillvalue=NOTHING))
    return next(((at, one, two) for at, (one, two) in pairs if one != two), None)
