"""Action tables of `torch.distributed.pipelining` as CSV, read into Orders and written from them.

Terms: a *table* has a row per rank; a *cell* is an action, or empty where the rank idles. An action
is `[stage][kind][microbatch]`: `0F3`. Those that compute are F, B (a whole backward), I and W (its
input and weight gradients), and `(0F3;1B0)OVERLAP_F_B`, several of which the rank may interleave. A
table that *communicates* also has SEND_F, RECV_F, SEND_B, RECV_B (a stage's activations and
gradients), UNSHARD and RESHARD (its parameters made whole and dropped), and REDUCE_GRAD.

Piper derives communication. Where a table has messages, these are checked to be exactly those that
its computation needs, each where it may be; so are UNSHARD with RESHARD, and REDUCE_GRAD (which
torch adds to tables without messages, too). Then they are left out: *when* ranks communicate, and
what stays whole, is Piper's to say, by Replicate.

Signature: CSV -> Orders, one per row; Orders -> CSV.
"""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from piper_dynamo.directives import Order
from piper_dynamo.errors import PiperError, PiperStrategyError, PiperSyntaxError, join_faults
from piper_dynamo.files import read_text
from piper_dynamo.filters import Filter
from piper_dynamo.values import is_whole, shown

COMPUTE = {"F": "F", "B": "B", "I": "BI", "W": "BW"}  # torch's kinds, and Piper's passes
_KINDS = {which: kind for kind, which in COMPUTE.items()}
_MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_OF_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
_PAIR = "OVERLAP_F_B"
_ONE = re.compile(rf"(\d+)(?:({'|'.join((*COMPUTE, *_MESSAGES))})(\d+)|({'|'.join(_OF_STAGE)}))")
_SEVERAL = re.compile(rf"\((.+;.+)\){_PAIR}")
_MOST = 20  # faults that are listed


@dataclass(frozen=True, slots=True)
class Action:
    """One action.

    Attributes:
        stage: Whose.
        kind: As torch calls it.
        micro: Which microbatch; -1 where the kind has none.
    """

    stage: int
    kind: str
    micro: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" + (str(self.micro) if self.micro >= 0 else "")


Cell = tuple[Action, ...]  # several in one overlap
Table = list[list[Cell]]


def from_csv(source: str | Path) -> list[Order]:
    """The orders of an action table of `torch.distributed.pipelining`.

    rewrite:   row `0F0,0F1,,0B0,0B1`  ->  Order(F.PP0.MB0, F.PP0.MB1, B.PP0.MB0, B.PP0.MB1)
    requires:  every stage on one row, with a forward and a backward of every microbatch, in an
               order that can be run; where it has messages, all that this needs and nothing else,
               each send after its value is made and each receive before it is used
    keeps:     the order of computation, and which actions may overlap; empty cells and
               communication are left out, since Piper derives both

    Args:
        source: The table, or the path of a file with it: a `Path`, or a text that ends in `.csv`.
            Either of torch's forms, `compute_only` or `compute_comms`.

    Returns:
        One Order per row. `piper.strategies.from_orders` makes a strategy of them.

    Raises:
        PiperError: The file cannot be read.
        PiperSyntaxError: A cell is no action; lists all that are not.
        PiperStrategyError: The table is no schedule that can be run; lists every fault.
    """
    table = _parse(_text(source))
    _check(table)
    return [
        Order([[_task(one) for one in cell] for cell in row if cell[0].kind in COMPUTE])
        for row in table
    ]


def to_csv(orders: Sequence[Order], *, comms: bool = False) -> str:
    """An action table for `torch.distributed.pipelining`, one row per Order.

    Args:
        orders: One per rank, in the order of ranks, e.g. of `piper.schedules`. Each names single
            tasks by PP, MB and PASS.
        comms: With the communication that torch's runtime needs (its form `compute_comms`); else
            the form `compute_only`, of which torch derives it.

    Returns:
        The text, which `_PipelineScheduleRuntime._load_csv` reads from a file.

    Raises:
        PiperStrategyError: The orders say what a table cannot, or cannot be run; lists every fault.
    """
    faults: list[str] = []
    table = [
        [
            tuple(_action(one, f"orders[{rank}], group {at}", faults) for one in group)
            for at, group in enumerate(order.groups)
        ]
        for rank, order in enumerate(orders)
    ]
    _refuse(faults, "these orders cannot be written as a table of actions")
    _check(table)
    if comms:
        table = _with_communication(table)
    text = io.StringIO()
    csv.writer(text).writerows([[_shown(cell) for cell in row] for row in table])
    return text.getvalue()


def _text(source: str | Path) -> str:
    if isinstance(source, str) and not source.endswith(".csv"):
        return source
    try:
        return read_text(Path(source))
    except (OSError, UnicodeDecodeError) as error:
        raise PiperError(f"the table of actions {source} cannot be read: {error}") from error


def _parse(text: str) -> Table:
    """The cells of a table that are not empty."""
    faults: list[str] = []
    table: Table = []
    for rank, row in enumerate(csv.reader(io.StringIO(text, newline=""))):
        cells: list[Cell] = []
        for column, written in enumerate(row):
            cell = written.strip()
            if cell:
                found = _cell(cell)
                if found is None:
                    faults.append(f"row {rank}, column {column}: {shown(cell)}")
                else:
                    cells.append(found)
        table.append(cells)
    if faults:
        raise PiperSyntaxError(
            join_faults(
                "this is no table of actions",
                faults[:_MOST],
                hint=f"a cell is empty, or e.g. 0F3, 1B0, 2I1, 2W1, (0F3;1B0){_PAIR}, 1SEND_F0, "
                "0UNSHARD",
            )
        )
    return table


def _cell(text: str) -> Cell | None:
    several = _SEVERAL.fullmatch(text)
    found = [_one(part) for part in several[1].split(";")] if several else [_one(text)]
    cell = tuple(one for one in found if one is not None)
    is_mixed = len(cell) > 1 and any(one.kind not in COMPUTE for one in cell)
    return cell if len(cell) == len(found) and not is_mixed else None


def _one(text: str) -> Action | None:
    match = _ONE.fullmatch(text)
    if match is None:
        return None
    return Action(int(match[1]), match[2] or match[4], int(match[3]) if match[3] else -1)


def _task(action: Action) -> dict[str, int | str]:
    return {"PP": action.stage, "MB": action.micro, "PASS": COMPUTE[action.kind]}


def _action(task: Filter, where: str, faults: list[str]) -> Action:
    """The action of a filter that names one task."""
    tags = task.tags
    stage, micro, which = tags.get("PP"), tags.get("MB"), tags.get("PASS")
    if set(tags) == {"PP", "MB", "PASS"} and is_whole(stage) and is_whole(micro):
        kind = _KINDS.get(str(which))
        if kind is not None:
            return Action(stage, kind, micro)
    faults.append(f"{where}: {task!r} names no single task by PP, MB and PASS alone")
    return Action(0, "F", 0)


def _shown(cell: Cell) -> str:
    if len(cell) == 1:
        return str(cell[0])
    return f"({';'.join(map(str, cell))}){_PAIR}"


# ---- what a table must have ---------------------------------------------------------------------


def _check(table: Table) -> None:
    """Refuse a table that cannot be run, or communicates otherwise than its computation needs."""
    faults = [f"row {rank} has no actions" for rank, row in enumerate(table) if not row]
    if not table:
        faults.append("it is empty")
    of_rank: dict[int, int] = {}
    for rank, action in _actions(table):
        if of_rank.setdefault(action.stage, rank) != rank:
            faults.append(
                f"row {rank}: {action}: stage {action.stage} is on row {of_rank[action.stage]}, "
                "too; a table has each stage once"
            )
    if not faults and set(of_rank) != set(range(len(of_rank))):
        faults.append(f"its stages are {sorted(of_rank)}; they must be 0 to {len(of_rank) - 1}")
    _refuse(faults)
    _check_tasks(table, len(of_rank), faults)
    _refuse(faults)
    if any(one.kind in _MESSAGES for _, one in _actions(table)):
        _check_messages(table, of_rank, faults)
    _check_stages(table, faults)
    _refuse(faults)
    _simulated([[c for c in row if c[0].kind in COMPUTE] for row in table], of_rank)


def _refuse(faults: Sequence[str], title: str = "this table of actions cannot be run") -> None:
    if faults:
        more = [f"... and {len(faults) - _MOST} more"] if len(faults) > _MOST else []
        raise PiperStrategyError(join_faults(title, [*faults[:_MOST], *more]))


def _actions(table: Table) -> Iterator[tuple[int, Action]]:
    return ((rank, one) for rank, row in enumerate(table) for cell in row for one in cell)


def _check_tasks(table: Table, num_stages: int, faults: list[str]) -> None:
    """Every stage has every microbatch once, forward before backward, I before W."""
    at: dict[Action, int] = {}
    for number, (rank, one) in enumerate(_actions(table)):
        if one.kind in COMPUTE or one.kind in _MESSAGES:
            if one in at:
                faults.append(f"row {rank}: {one} comes twice")
            at.setdefault(one, number)
    micro = {one.micro for one in at if one.kind in COMPUTE}
    if micro != set(range(len(micro))):
        faults.append(
            f"its microbatches are {sorted(micro)[:_MOST]}; they must be 0 to {len(micro) - 1}"
        )
        return
    for stage in range(num_stages):
        for mb in range(len(micro)):
            forward, whole, halves = (
                [Action(stage, kind, mb) for kind in kinds if Action(stage, kind, mb) in at]
                for kinds in ("F", "B", "IW")
            )
            if not forward:
                faults.append(f"{Action(stage, 'F', mb)} is missing")
            if len(whole) * 2 + len(halves) != 2 or len(halves) == 1:
                faults.append(
                    f"stage {stage} needs of microbatch {mb} either {stage}B{mb}, or {stage}I{mb} "
                    f"and {stage}W{mb}; it has {', '.join(map(str, whole + halves)) or 'neither'}"
                )
            inside = [at[one] for one in (*forward, *whole, *halves)]
            if inside != sorted(inside):
                order = sorted((*forward, *whole, *halves), key=at.__getitem__)
                faults.append(f"{' before '.join(map(str, order))} cannot be")


def _messages(action: Action, of_rank: Mapping[int, int]) -> tuple[Action, Action] | None:
    """The send after an action that computes, and its receive on the other rank, if any."""
    away = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
    other = action.stage + away
    if not away or other not in of_rank or of_rank[other] == of_rank[action.stage]:
        return None
    way = "F" if away > 0 else "B"
    return (
        Action(action.stage, f"SEND_{way}", action.micro),
        Action(other, f"RECV_{way}", action.micro),
    )


def _check_messages(table: Table, of_rank: Mapping[int, int], faults: list[str]) -> None:
    """Every message that the computation needs is sent after it is made, and taken before use."""
    at = {one: number for number, (_, one) in enumerate(_actions(table))}
    wanted: dict[Action, None] = {}
    for _, one in _actions(table):
        pair = _messages(one, of_rank)
        if pair is None:
            continue
        send, receive = pair
        wanted |= {send: None, receive: None}
        users = ("F",) if one.kind == "F" else ("B", "I")
        uses = [at[u] for k in users if (u := Action(receive.stage, k, one.micro)) in at]
        for needed in pair:
            if needed not in at:
                faults.append(f"{needed} is missing, though {one} makes what it moves")
        if send in at and at[send] < at[one]:
            faults.append(f"{send} comes before {one}, which makes its value")
        if receive in at and at[receive] > min(uses):
            faults.append(f"{receive} comes after the action that needs it")
    for rank, one in _actions(table):
        if one.kind in _MESSAGES and one not in wanted:
            faults.append(f"row {rank}: {one} moves nothing: no other rank needs it")


def _check_stages(table: Table, faults: list[str]) -> None:
    """Stages compute while they are whole; gradients are reduced once, after all are there."""
    found = {one.kind for _, one in _actions(table)}
    for rank, row in enumerate(table):
        whole: set[int] = set()
        reduced: dict[int, int] = defaultdict(int)
        for one in (one for cell in row for one in cell):
            is_whole_now = one.stage in whole
            if one.kind == "UNSHARD":
                if is_whole_now:
                    faults.append(f"row {rank}: {one} of a stage that is whole already")
                whole.add(one.stage)
            elif one.kind == "RESHARD":
                if not is_whole_now:
                    faults.append(f"row {rank}: {one} of a stage that is not whole")
                whole.discard(one.stage)
            elif one.kind == "REDUCE_GRAD":
                reduced[one.stage] += 1
            elif one.kind in COMPUTE:
                if "UNSHARD" in found and not is_whole_now:
                    faults.append(f"row {rank}: {one} runs while stage {one.stage} is not whole")
                if reduced[one.stage] and one.kind in "BW":
                    faults.append(f"row {rank}: {one} comes after {one.stage}REDUCE_GRAD")
        faults += [f"row {rank}: {stage}RESHARD is missing at the end" for stage in sorted(whole)]
        if "REDUCE_GRAD" in found:
            for stage in sorted({one.stage for cell in row for one in cell}):
                if reduced[stage] != 1:
                    times = f"{reduced[stage]} times"
                    faults.append(f"row {rank}: {stage}REDUCE_GRAD comes {times}, not once")


def _value(action: Action) -> Action | None:
    """What another stage may need of an action: its activations, or its gradients as of a B."""
    if action.kind == "W":
        return None
    return Action(action.stage, "F" if action.kind == "F" else "B", action.micro)


def _needs(action: Action, of_rank: Mapping[int, int]) -> list[Action]:
    """The values that an action needs of others."""
    stage, micro = action.stage, action.micro
    if action.kind == "F":
        return [Action(stage - 1, "F", micro)] if stage else []
    if action.kind == "W" or stage + 1 not in of_rank:
        return []
    return [Action(stage + 1, "B", micro)]


def _simulated(table: Table, of_rank: Mapping[int, int]) -> Table:
    """Run a table that only computes; the same with each message, sent and received once made.

    Raises:
        PiperStrategyError: Ranks wait for one another.
    """
    made: set[Action | None] = set()
    rows: Table = [[] for _ in table]
    following, progress = [0] * len(table), True
    while progress:
        progress = False
        for rank, row in enumerate(table):
            while following[rank] < len(row):
                cell = row[following[rank]]
                own = {_value(one) for one in cell}
                if any(v not in made | own for one in cell for v in _needs(one, of_rank)):
                    break
                made |= own
                following[rank] += 1
                progress = True
                rows[rank].append(cell)
                for one in cell:
                    pair = _messages(one, of_rank)
                    if pair is not None:
                        rows[rank].append((pair[0],))
                        rows[of_rank[pair[1].stage]].append((pair[1],))
    stuck = [
        f"row {rank} waits at {_shown(row[at])}"
        for rank, (row, at) in enumerate(zip(table, following, strict=True))
        if at < len(row)
    ]
    _refuse(stuck, "this table of actions deadlocks: its ranks wait for one another")
    return rows


def _with_communication(table: Table) -> Table:
    """The table as torch's runtime runs it: each stage whole from its first action to its last."""
    rows = _simulated(table, {one.stage: rank for rank, one in _actions(table)})
    return [_with_stages(row) for row in rows]


def _with_stages(row: list[Cell]) -> list[Cell]:
    """A row that makes its stages whole and drops them, and reduces their gradients."""
    last: dict[int, int] = {}
    last_gradient: dict[int, int] = {}
    for at, cell in enumerate(row):
        for one in cell:
            if one.kind in COMPUTE:
                last[one.stage] = at
            if one.kind in ("B", "W"):
                last_gradient[one.stage] = at
    made: list[Cell] = []
    whole: set[int] = set()
    for at, cell in enumerate(row):
        stages = list(dict.fromkeys(one.stage for one in cell if one.kind in COMPUTE))
        made += [(Action(stage, "UNSHARD"),) for stage in stages if stage not in whole]
        whole.update(stages)
        made.append(cell)
        made += [(Action(s, "REDUCE_GRAD"),) for s in stages if last_gradient[s] == at]
        made += [(Action(s, "RESHARD"),) for s in stages if last[s] == at]
    return made
