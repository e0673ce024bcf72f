"""The verifier on collectives: programs by hand, whose order among ranks is right or wrong."""

from dataclasses import replace

import pytest
import torch

from piper_dynamo.costs import Costs
from piper_dynamo.errors import PiperError
from piper_dynamo.ir.program import Instr, Op, RankProgram
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering.simulate import simulate
from tests.test_verify import Programs, refused


def collective(
    rank: int, number: int, group: tuple[int, ...], op: Op = Op.ALL_REDUCE
) -> list[Instr]:
    """One collective and its wait, of a register of its own."""
    spec = TensorSpec(shape=(4,), dtype=torch.float16, stride=(1,))
    start = Instr(
        op=op,
        task=f"c{number}",
        inputs=(f"w{number}",),
        outputs=(f"h{number}",),
        group=group,
        specs=(spec,),
    )
    wait = Instr(op=Op.WAIT, task=f"c{number}", inputs=(f"h{number}",), outputs=(f"r{number}",))
    return [start, wait]


def by_hand(*ranks: list[Instr]) -> Programs:
    return [
        RankProgram(
            rank=rank,
            world_size=len(ranks),
            instrs=tuple(instrs),
            state=(("w", 0), *((f"w{i}", i + 1) for i in range(4))),
            data=(),
            weights=(),
            tangents=(),
            loss="",
            outputs=tuple(
                (i, reg)
                for i, reg in enumerate(r for one in instrs for r in one.outputs if r[0] in "rx")
            ),
            grads=(),
            buffers=(),
            chunks=(),
        )
        for rank, instrs in enumerate(ranks)
    ]


def test_collectives_in_one_order_are_safe():
    both = (0, 1)
    ranks = [[*collective(r, 0, both), *collective(r, 1, both)] for r in both]
    verify(by_hand(*ranks))
    simulate(by_hand(*ranks), Costs(), {})


def test_collectives_in_two_orders_are_refused():
    both = (0, 1)
    one = [*collective(0, 0, both), *collective(0, 1, both)]
    other = [*collective(1, 1, both), *collective(1, 0, both)]
    text = refused(by_hand(one, other))
    assert (
        "group (0, 1) on stream 'compute': collective 0 differs between rank 0 (all_reduce c0) "
        "and rank 1 (all_reduce c1)" in text
    )


def test_a_collective_that_a_member_leaves_out_is_refused():
    both = (0, 1)
    text = refused(
        by_hand([*collective(0, 0, both), *collective(0, 1, both)], collective(1, 0, both))
    )
    assert "collective 1 differs between rank 0 (all_reduce c1) and rank 1 (none left)" in text


@pytest.mark.parametrize("part", ["op", "shape"])
def test_unlike_collectives_are_refused(part: str):
    both = (0, 1)
    start, wait = collective(1, 0, both, Op.ALL_GATHER if part == "op" else Op.ALL_REDUCE)
    if part == "shape":
        start = replace(start, specs=(replace(start.specs[0], shape=(5,)),))
    assert "collective 0 differs" in refused(by_hand(collective(0, 0, both), [start, wait]))


def test_a_collective_of_others_is_refused():
    text = refused(
        by_hand(collective(0, 0, (0, 1)), collective(1, 0, (0, 1)), collective(2, 0, (0, 1)))
    )
    assert "rank 2 #0 all_reduce c0: is not in its group (0, 1)" in text


def test_a_collective_with_a_rank_that_is_not_there_is_refused():
    text = refused(by_hand(collective(0, 0, (0, 5)), collective(1, 0, (0, 1))))
    assert "rank 0 #0 all_reduce c0: its group has no rank 5" in text


def test_collectives_of_two_groups_that_cross_deadlock():
    """Rank 0 waits for the one of (0, 1) first, rank 1 for the one of (1, 2), rank 2 of (0, 2)."""
    a, b, c = (0, 1), (1, 2), (0, 2)
    ranks = [
        [*collective(0, 0, a), *collective(0, 2, c)],
        [*collective(1, 1, b), *collective(1, 0, a)],
        [*collective(2, 2, c), *collective(2, 1, b)],
    ]
    text = refused(by_hand(*ranks))
    assert text.startswith("the plan deadlocks: rank 0, rank 1, rank 2 wait for one another")
    with pytest.raises(PiperError, match="deadlocks in simulation"):
        simulate(by_hand(*ranks), Costs(), {})
    ranks[0] = [*collective(0, 2, c), *collective(0, 0, a)]
    verify(by_hand(*ranks))
    simulate(by_hand(*ranks), Costs(), {})


def test_a_collective_and_a_message_that_cross_deadlock():
    spec = TensorSpec(shape=(4,), dtype=torch.float16, stride=(1,))
    send = Instr(op=Op.SEND, task="m", inputs=("w",), peer=1, message=0, spec=spec)
    drain = replace(send, op=Op.DRAIN)
    post = Instr(op=Op.POST, task="m", outputs=("h",), peer=0, message=0, spec=spec)
    wait = Instr(op=Op.WAIT, task="m", inputs=("h",), outputs=("x",), peer=0, message=0)
    both = (0, 1)
    crossing = by_hand(
        [*collective(0, 0, both), send, drain], [post, wait, *collective(1, 0, both)]
    )
    assert refused(crossing).startswith("the plan deadlocks: rank 0, rank 1 wait")
    verify(by_hand([send, *collective(0, 0, both), drain], [post, wait, *collective(1, 0, both)]))
