"""The rank program: what one rank does in one step, as a flat tuple of instructions.

Terms: a *register* holds one value; a *handle* is a register for a message that has been posted and
not yet waited for; a *channel* is the ordered messages from one rank to another; a *bundle* is the
list of values kept for a later phase.

A program knows nothing of strategies. It is what the verifier proves, the simulator times, and the
runtime runs. The text form of an instruction is strict: `Instr.parse(str(i)) == i`.
"""

import json
import re
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import torch

from piper_dynamo.errors import PiperSyntaxError
from piper_dynamo.ir.spec import TensorSpec


class Op(StrEnum):
    """What an instruction does."""

    RUN = "run"  # one chunk: primals, bundle, tangents -> results, bundle
    SLICE = "slice"  # one microbatch of an input
    POST = "post"  # start to receive message `message` of the channel from `peer`
    WAIT = "wait"  # the value of a handle
    SEND = "send"  # start to send; the value must stay until the drain
    DRAIN = "drain"  # wait until a sent value has left
    ACCUMULATE = "accumulate"  # add a partial gradient into a sum that this rank owns
    CAST = "cast"  # a new value: the input in the dtype of `spec`; of a gradient: begins a sum
    ADD = "add"  # a new value: the sum of the inputs in order
    LOSS = "loss"  # losses and weights, interleaved -> their weighted sum
    CONCAT = "concat"  # join along `dim`, or stack where it is None
    FREE = "free"  # forget registers
    ALL_REDUCE = "all_reduce"  # start to sum over `group`, in place -> handle
    REDUCE_SCATTER = "reduce_scatter"  # the same, keeping one block of rows -> handle
    ALL_GATHER = "all_gather"  # start to join the group's blocks of rows -> handle
    ALL_TO_ALL = "all_to_all"  # start to exchange equal blocks of rows -> handle
    EXCHANGE_COUNTS = "exchange_counts"  # start to tell how many rows come -> handle
    EXCHANGE = "exchange"  # start to send rows to their experts -> handle
    UNEXCHANGE = "unexchange"  # start to send rows back -> handle


ROW_EXCHANGES = frozenset({Op.EXCHANGE, Op.UNEXCHANGE})
EXCHANGES = ROW_EXCHANGES | {Op.EXCHANGE_COUNTS}
COLLECTIVES = EXCHANGES | {Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL}
REDUCTIONS = frozenset({Op.ALL_REDUCE, Op.REDUCE_SCATTER})
Group = tuple[str, tuple[int, ...]]  # a communicator: a stream, and the ranks on it
Groups = tuple[tuple[int, ...], ...]  # a rank takes part in the group that names it


def mix_seed(seed: int, *parts: int) -> int:
    """A seed that depends on all of these; seeds next to each other become unlike ones."""
    for part in (0, *parts):
        seed = (seed ^ (part + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & (2**63 - 1)
        seed ^= seed >> 31
    return seed


def copy_groups(shard_groups: Groups) -> Groups:
    """The ranks that hold the same block, for each block; none where there is one copy.

    Args:
        shard_groups: The ranks that hold the blocks of one copy, in row order, for each copy.
    """
    return tuple(zip(*shard_groups, strict=True)) if len(shard_groups) > 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instr:
    """One instruction.

    Attributes:
        op: What it does.
        task: The task it belongs to, e.g. `F.PP0.MB3`; a message's task is the one that makes
            the value.
        outputs: Registers it writes.
        inputs: Registers it reads. RUN: primals then tangents. ACCUMULATE: the sum (if it
            exists), then the part.
        target: RUN: name of the chunk.
        adds: RUN: which outputs are added into sums; these registers exist before.
        bundle_in: RUN: register of the bundle it takes and empties.
        bundle_out: RUN: register of the bundle it leaves.
        num_primals: RUN: how many of the inputs come before the bundle.
        seed: RUN of a chunk that draws random numbers: microbatch, and the number of its region's
            first draw among the model's.
        peer: POST, SEND, DRAIN: the other rank.
        message: POST, WAIT, SEND, DRAIN: position in the channel.
        group: Collectives: the ranks, in order.
        dim: SLICE, CONCAT.
        part: SLICE: which of `parts`.
        parts: SLICE: into how many.
        spec: POST, CAST: the result. SEND: the value. ACCUMULATE: the sum, where its dtype is not
            the part's.
        specs: Collectives: the results, one per input; they travel as one.
        nbytes: Memory each output takes anew (0 for views).
        stream: The logical stream.
        where: The user's source line.
    """

    op: Op
    task: str = ""
    outputs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    target: str = ""
    adds: tuple[int, ...] = ()
    bundle_in: str = ""
    bundle_out: str = ""
    num_primals: int = 0
    seed: tuple[int, int] | None = None
    peer: int = -1
    message: int = -1
    group: tuple[int, ...] = ()
    dim: int | None = None
    part: int = 0
    parts: int = 0
    spec: TensorSpec | None = None
    specs: tuple[TensorSpec, ...] = ()
    nbytes: tuple[int, ...] = ()
    stream: str = "compute"
    where: str = ""

    @property
    def communicator(self) -> Group:
        """Of a collective: concurrent streams never share one."""
        return (self.stream, self.group)

    @property
    def sums(self) -> tuple[str, ...]:
        """Registers whose value it adds to."""
        if self.op is Op.ACCUMULATE:
            return self.inputs[:-1]
        return tuple(self.outputs[i] for i in self.adds)

    def reads(self) -> tuple[str, ...]:
        """Every register it reads, its bundle and sums included."""
        sums = self.sums if self.op is Op.RUN else ()
        return (*self.inputs, *((self.bundle_in,) if self.bundle_in else ()), *sums)

    def writes(self) -> tuple[str, ...]:
        """Every register it writes, its bundle included."""
        return (*self.outputs, self.bundle_out) if self.bundle_out else self.outputs

    def __str__(self) -> str:
        left = f"{', '.join(self.outputs)} = " if self.outputs else ""
        extra = {
            f.name: _plain(value)
            for f in fields(self)
            if f.name not in ("op", "outputs", "inputs")
            and (value := getattr(self, f.name)) != f.default
        }
        return f"{left}{self.op}({', '.join(self.inputs)}) {json.dumps(extra)}"

    @classmethod
    def parse(cls, text: str) -> "Instr":
        """The instruction that `text` is the text form of.

        Raises:
            PiperSyntaxError: It is not exactly one instruction's text form.
        """
        try:
            head, brace, tail = text.partition(" {")
            left, equals, call = head.rpartition(" = ")
            op, paren, inside = call.partition("(")
            if not brace or not paren or not inside.endswith(")"):
                raise ValueError("expected 'outputs = op(inputs) {...}'")
            extra = {k: _rich(k, v) for k, v in json.loads("{" + tail).items()}
            outputs = tuple(left.split(", ")) if equals else ()
            inputs = tuple(inside[:-1].split(", ")) if inside != ")" else ()
            wrong = [reg for reg in (*outputs, *inputs) if not _REGISTER.fullmatch(reg)]
            if wrong:
                raise ValueError(f"{wrong[0]!r} is no register")
            instr = cls(op=Op(op), outputs=outputs, inputs=inputs, **extra)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PiperSyntaxError(f"not an instruction: {text!r} ({error})") from error
        if str(instr) != text:
            raise PiperSyntaxError(f"not an instruction: {text!r}; it is written {str(instr)!r}")
        return instr


def _plain(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        dtype = str(value.dtype).removeprefix("torch.")
        return [list(value.shape), dtype, list(value.stride), value.device]
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


_REGISTER = re.compile(r"\w+")
_NUMBERS = ("num_primals", "peer", "message", "part", "parts", "dim")
_LISTS = ("group", "nbytes", "seed", "adds")


def _rich(key: str, value: Any) -> Any:
    """A field's value from JSON; the types are exactly those that printing gives."""
    if key == "specs":
        return tuple(_rich("spec", one) for one in value)
    if key == "spec":
        shape, dtype, stride, device = value
        found = getattr(torch, dtype)
        if not isinstance(found, torch.dtype) or not isinstance(device, str):
            raise ValueError(f"{value!r} is no spec")
        return TensorSpec(shape=_ints(shape), dtype=found, stride=_ints(stride), device=device)
    if key in _NUMBERS:
        return _ints([value])[0]
    if key in _LISTS:
        found = _ints(value)
        if key == "seed" and len(found) != 2:
            raise ValueError(f"{value!r} is no seed: a microbatch and a draw")
        return found
    if not isinstance(value, str):
        raise TypeError(f"{key} is a text, not {value!r}")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int for v in values):
        raise TypeError(f"{values!r} is no list of whole numbers")
    return tuple(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """One rank's step.

    Attributes:
        rank: Which rank.
        world_size: Of how many.
        instrs: The instructions, in host order.
        state: Register of each parameter and buffer it needs, with the argument's position.
        data: Register of each data argument it needs, with the argument's position.
        weights: Registers of the loss weights it needs, one per microbatch or one for all.
        tangents: Output index and register of each gradient the caller gives between forward and
            backward, where no output is the loss.
        loss: Register of the loss; empty where the model has none.
        outputs: Index and register of each other output this rank owns.
        grads: Argument position and register of each gradient this rank ends with.
        buffers: Argument position and register of each buffer's new value.
        contributors: Argument position of each gradient that is not this rank's parts alone, and
            the ranks whose parts it is the sum of.
        shards: Argument position of each parameter of which this rank holds a block of rows, and
            the ranks that hold the others, in row order; it is gathered where it is used.
        experts: The same for parameters of which this rank computes with its block alone; where
            they are in `shards`, too, it holds a block of that block.
        chunks: Structural key of each chunk name.
        peak_bytes: Predicted peak of what the step allocates, without parameters and gradients
            held before it.
    """

    rank: int
    world_size: int
    instrs: tuple[Instr, ...]
    state: tuple[tuple[str, int], ...]
    data: tuple[tuple[str, int], ...]
    weights: tuple[str, ...]
    tangents: tuple[tuple[int, str], ...]
    loss: str
    outputs: tuple[tuple[int, str], ...]
    grads: tuple[tuple[int, str], ...]
    buffers: tuple[tuple[int, str], ...]
    chunks: tuple[tuple[str, str], ...]
    contributors: tuple[tuple[int, tuple[int, ...]], ...] = ()
    shards: tuple[tuple[int, tuple[int, ...]], ...] = ()
    experts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    peak_bytes: int = 0

    def results(self) -> set[str]:
        """Registers that outlive the program."""
        kept = {reg for _, reg in (*self.outputs, *self.grads, *self.buffers)}
        return kept | {self.loss} if self.loss else kept

    def sources(self) -> set[str]:
        """Registers that are there before the program."""
        given = {reg for reg, _ in (*self.state, *self.data)} | set(self.weights)
        return given | {reg for _, reg in self.tangents}

    def pause(self) -> int | None:
        """Before which instruction a program without a loss stops for the caller's gradients."""
        if not self.tangents:
            return None
        given = {reg for _, reg in self.tangents}
        waiting = (i for i, instr in enumerate(self.instrs) if given & set(instr.reads()))
        return next(waiting, len(self.instrs))

    def text(self) -> str:
        """One instruction per line; two ranks' plans are the same job iff their texts are."""
        head = replace(self, instrs=())
        return "\n".join([repr(head), *map(str, self.instrs)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is looked at while a program runs; its code is emitted for that.

    Attributes:
        timed: Note when each instruction ended.
        probed: Indices of the RUN instructions whose inputs and outputs a probe is shown.
        stops: Indices of the instructions before which the debugger is entered.
        named: Say of which task each message and collective is (`runtime/headers.py`).
        faults: Indices of the instructions at which something fails on purpose
            (`runtime/faults.py`).
        ranged: Show each instruction to profilers, by the name of its task.
    """

    timed: bool = False
    probed: frozenset[int] = frozenset()
    stops: frozenset[int] = frozenset()
    named: bool = False
    faults: frozenset[int] = frozenset()
    ranged: bool = False


UNWATCHED = Watch()


def where(program: RankProgram, index: int) -> str:
    """An instruction for a message: rank, position, task, stream, the user's line."""
    instr = program.instrs[index]
    stream = f" on stream {instr.stream!r}" if instr.stream != "compute" else ""
    line = f" [{instr.where}]" if instr.where else ""
    task = f" {instr.task}" if instr.task else ""
    return f"rank {program.rank} #{index} {instr.op}{task}{stream}{line}"


_SHOWN = {
    Op.RUN: "{task}",
    Op.SEND: "send {task} to rank {peer}",
    Op.WAIT: "wait for {task}",
    Op.DRAIN: "wait for rank {peer} to take {task}",
} | {op: f"{op.value} {{task}}" for op in COLLECTIVES}
_AROUND = 4  # instructions shown on each side of one


def around(program: RankProgram, index: int) -> str:
    """An instruction among those of its rank that compute or communicate, one a line."""
    shown = [k for k, i in enumerate(program.instrs) if i.op in _SHOWN or k == index]
    at = shown.index(index)
    lines = []
    for k in shown[max(at - _AROUND, 0) : at + _AROUND + 1]:
        instr = program.instrs[k]
        text = _SHOWN.get(instr.op, f"{instr.op} {{task}}")
        text = text.format(task=instr.task or "a value", peer=instr.peer)
        lines.append(("-> " if k == index else "   ") + text)
    return "\n".join(lines)
