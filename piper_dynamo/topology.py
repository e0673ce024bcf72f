"""Which ranks sit on which host, and what a step sends between hosts.

Hosts have ranks that follow each other; a `Mesh` with an order decides which those are. A
collective counts as what its ranks send each other where each sums or gives out an equal part.

Signature: all ranks' programs, the host of each rank -> text.
"""

from collections.abc import Mapping, Sequence

from piper_dynamo.errors import PiperError
from piper_dynamo.ir.program import COLLECTIVES, REDUCTIONS, Instr, Op, RankProgram
from piper_dynamo.ir.spec import show_bytes
from piper_dynamo.ir.task import RegionId, TaskName
from piper_dynamo.summary import listed, moved_bytes
from piper_dynamo.tables import table

KINDS = ("messages", "exchanges", "gathers", "reductions")


def in_blocks(world_size: int, num_hosts: int) -> list[str]:
    """The host of each rank, where all hosts have as many: h0, h1, ...

    Raises:
        PiperError: The ranks do not divide among the hosts.
    """
    if num_hosts < 1 or world_size % num_hosts:
        raise PiperError(
            f"{world_size} ranks do not divide among {num_hosts} hosts; give a divisor, or the "
            "name of each rank's host"
        )
    return [f"h{rank * num_hosts // world_size}" for rank in range(world_size)]


def describe(programs: Sequence[RankProgram] | None, hosts: Sequence[str]) -> str:
    """The hosts with their ranks and regions, and the bytes of a step within and between them.

    Args:
        programs: All ranks' in rank order; None: only hosts and ranks are told.
        hosts: The name of each rank's host.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    many = f"{len(ranks)} host" + "s" * (len(ranks) > 1)
    if programs is None or len(ranks) == 1:
        told = "; ".join(f"{host}: ranks {listed(mine)}" for host, mine in ranks.items())
        return f"topology: {many}; {told}"
    within, between = traffic(programs, hosts)
    rows = [
        [host, listed(mine), ", ".join(_regions([programs[rank] for rank in mine]))]
        for host, mine in ranks.items()
    ]
    kinds = [kind for kind in KINDS if within[kind] or between[kind]]
    flows = [[kind, show_bytes(within[kind]), show_bytes(between[kind])] for kind in kinds]
    return "\n".join(
        [
            f"topology: {many}",
            *table(["host", "ranks", "regions"], rows, left=("host", "ranks", "regions")),
            "what ranks send each other in a step",
            *table(["", "within hosts", "between hosts"], flows, left=("",)),
        ]
    )


def traffic(
    programs: Sequence[RankProgram], hosts: Sequence[str]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Bytes that ranks send each other in a step, by kind: within hosts, and between them."""
    within, between = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for program in programs:
        here = hosts[program.rank]
        for instr in program.instrs:
            kind, each, peers = _sent(instr, program.rank)
            for peer in peers:
                (within if hosts[peer] == here else between)[kind] += each
    return within, between


def _sent(instr: Instr, rank: int) -> tuple[str, int, Sequence[int]]:
    """What a rank sends in an instruction: of which kind, how many bytes to each, and to whom."""
    if instr.op is Op.SEND:
        return "messages", moved_bytes(instr), (instr.peer,)
    if instr.op not in COLLECTIVES:
        return "messages", 0, ()
    peers = [peer for peer in instr.group if peer != rank]
    share = moved_bytes(instr) // len(instr.group)
    if instr.op in REDUCTIONS:
        return "reductions", share * (2 if instr.op is Op.ALL_REDUCE else 1), peers
    return ("gathers" if instr.op is Op.ALL_GATHER else "exchanges"), share, peers


def _regions(programs: Sequence[RankProgram]) -> list[str]:
    """The regions that some ranks run."""
    found = {
        TaskName.parse(instr.task).region
        for program in programs
        for instr in program.instrs
        if instr.op is Op.RUN
    }
    return list(dict.fromkeys(str(RegionId(tags=one.tags)) for one in sorted(found, key=_place)))


def _place(region: RegionId) -> tuple[tuple[tuple[str, int], ...], int]:
    return region.tags, region.visit
