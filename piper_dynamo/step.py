"""A compiled step: what `torch.compile(model, backend="piper")` calls.

Programs are keyed by the concrete sizes of all inputs. State hangs on the Parameters given at the
call (see `state.py`).
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from piper_dynamo import _torch_compat as compat
from piper_dynamo.accumulation import put_off, settle
from piper_dynamo.adoption import adopt
from piper_dynamo.agreement import agree, announcement, compare, describe, leave_account
from piper_dynamo.binding import bind, executor_of
from piper_dynamo.captured import Call, CapturedStep
from piper_dynamo.costs import durations, tasks_run
from piper_dynamo.errors import PiperRuntimeError, PiperTimeoutError
from piper_dynamo.finite import agree_on_gradients, check_step, refuse_without_loss
from piper_dynamo.garbage import give_back
from piper_dynamo.ir.joint import Arg, ArgKind, Unjoined
from piper_dynamo.ir.program import RankProgram, Watch
from piper_dynamo.loss_scaling import Scaler
from piper_dynamo.loss_weights import loss_weights
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.lowering.emulate import emulated_chunk
from piper_dynamo.lowering.sums import passing
from piper_dynamo.on_device import recorder_of, streams_of
from piper_dynamo.options import Options
from piper_dynamo.passes.split import joined_spec
from piper_dynamo.pending import refuse_idle_init, refuse_meta
from piper_dynamo.planning import Plan
from piper_dynamo.restoring import Kept
from piper_dynamo.runtime.comm import Communicator
from piper_dynamo.runtime.executor import Executor, StepResults
from piper_dynamo.runtime.world import communicator
from piper_dynamo.state import (
    Record,
    StepState,
    absent_output,
    attach,
    attach_outputs,
    record_of,
    unjoined_output,
)
from piper_dynamo.stores import Effects

log = logging.getLogger("piper.step")


@dataclass(slots=True, kw_only=True)
class Session:
    """A call made to plan or prepare rather than to train.

    Attributes:
        world_size: Plan for this many ranks, touching no state; None prepares for the real ones.
        loss: Index among the graph's outputs of the one that the user named as the loss, once
            known.
        paths: The user's path of each graph output, once known.
        probe: Only look at the structure of the output.
        capture: Only capture the call, without a plan.
        steps: The compiled steps that the call reached.
        calls: What each was called with.
        plans: Their plans.
        options: Those of a call that is only looked at; None where the step has its own.
        made: The steps made of these, by what was captured.
        kept: What calls change of Python's objects, as it was.
    """

    world_size: int | None
    options: Options | None = None
    made: dict[object, "CompiledStep"] = field(default_factory=dict)
    kept: Kept = field(default_factory=Kept)
    loss: int | None = None
    probe: bool = False
    paths: dict[int, str] = field(default_factory=dict)
    capture: bool = False
    steps: list["CompiledStep"]
    calls: list[Call]
    plans: list[Plan]


_sessions = threading.local()


@contextmanager
def session(
    world_size: int | None, *, capture: bool = False, options: Options | None = None
) -> Iterator[Session]:
    """Calls of compiled steps inside plan or prepare, and return stand-ins for their outputs."""
    found = Session(
        world_size=world_size, options=options, capture=capture, steps=[], calls=[], plans=[]
    )
    outer, _sessions.now = current_session(), found
    try:
        yield found
    finally:
        _sessions.now = outer


def current_session() -> Session | None:
    """The session that a call belongs to; None where it trains."""
    found: Session | None = getattr(_sessions, "now", None)
    return found


@dataclass(slots=True, kw_only=True)
class Entry:
    """A program for one set of sizes, on this rank.

    Attributes:
        plan: The plan of all ranks.
        executor: Runs this rank's program.
        is_random: Whether a step draws, on whichever rank, and so takes a seed.
        announcement: What other ranks read; made once, since it hashes the whole strategy.
        is_later: Of each of the program's gradients, whether a later step reduces it.
        owners: The ranks that have each output, by its index.
        compared: Whether the ranks have found that they run the same plan.
        adopted: The state that belongs to this program's ranks and shards; None before a step.
    """

    plan: Plan
    executor: Executor
    is_random: bool
    announcement: str
    is_later: tuple[bool, ...]
    owners: dict[int, list[int]]
    compared: bool = False
    adopted: StepState | None = None


class CompiledStep(CapturedStep):
    """The callable that Dynamo's code runs with the graph's arguments."""

    def __init__(
        self,
        gm: fx.GraphModule,
        args: tuple[Arg, ...],
        options: Options,
        *,
        training: bool,
        effects: Effects,
    ) -> None:
        """`effects` is what the call does beside computing."""
        super().__init__(gm, args, options, training=training)
        self._effects = effects
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def __call__(self, *values: Any) -> Any:
        """Run the program for these sizes; in a session, only plan or prepare it."""
        compat.unmark_dynamic()
        now = current_session()
        if now is not None:
            return self._visit(now, values)
        refuse_meta(self._args, values)
        comm = communicator(self._options.timeout_s)
        self._recall_loss(values)
        entry = self._entry(values, comm)
        is_first = not entry.compared
        number = agree(entry.plan, entry.announcement, comm, values, known=entry.compared)
        entry.compared = True
        state = self._state(values, entry, comm)
        state.refuse_empty()
        try:
            return self._run(entry, state, values)
        except PiperTimeoutError as error:
            # A rank with another program waits elsewhere: say that, not where this one waits.
            if not error.is_cut_off:
                compare(entry.plan, entry.announcement, comm, number, time.monotonic())
            raise
        finally:
            if is_first:
                give_back()  # what planning and the whole parameters took

    # plans and programs

    def _sync(self, values: Sequence[Any]) -> bool:
        """Whether this call reduces the gradients that it may put off."""
        state = self._known_state(values)
        return not self._training or state is None or state.sync

    def _sizes(self, values: Sequence[Any]) -> tuple[Any, ...]:
        key: list[Any] = []
        for arg, value in zip(self._args, values, strict=True):
            if arg.kind is ArgKind.DATA:
                key.append(tuple(value.shape))
            elif arg.kind is ArgKind.NUMBER and arg.size_of is None:
                key.append(value)
        return (*key, self._loss, self._sync(values))

    def _plan(self, values: Sequence[Any], world_size: int) -> Plan:
        key = (*self._sizes(values), world_size)
        if key not in self._plans:
            made = self.planned(self.call_of(values), world_size, sync=self._sync(values))
            refuse_without_loss(
                made,
                scales=self._options.loss_scale is not None,
                looks=self._options.nan_check is not None,
            )
            self._plans[key] = made
        return self._plans[key]

    def _recall_loss(self, values: Sequence[Any]) -> None:
        """Find a loss named by its path again in another mode of a prepared model.

        The output structure is not visible here: with as many outputs, it is taken to be the same.
        """
        if self._loss is not None or self.strategy.loss is None:
            return
        state = self._known_state(values)
        if state is None or state.loss is None:
            return
        count, index = state.loss
        if len(compat.output_nodes(self._gm)) == count:
            self._loss = index

    def _known_state(self, values: Sequence[Any]) -> StepState | None:
        records = (record_of(values[a.position]) for a in self._args if a.kind is ArgKind.PARAMETER)
        return next((r.owner for r in records if r is not None), None)

    def _entry(self, values: Sequence[Any], comm: Communicator) -> Entry:
        key = self._sizes(values)
        # With the communicator: Dynamo keeps this object for the next job of the process too.
        entries = comm.programs.setdefault(self, {})
        if key not in entries:
            start = time.perf_counter()
            plan = self._plan(values, comm.world_size)
            comm.prepare_groups(plan.communicators())
            leave_account(plan, comm)
            entries[key] = self._made_entry(plan, values, comm)
            log.log(
                logging.DEBUG if comm.rank else logging.INFO,
                "program made in %.1f s: %s",
                time.perf_counter() - start,
                describe(plan),
            )
        found: Entry = entries[key]
        return found

    def _made_entry(self, plan: Plan, values: Sequence[Any], comm: Communicator) -> Entry:
        program = plan.programs[comm.rank]
        wanted = {name: plan.chunks[name] for name, _ in program.chunks}
        seconds: dict[str, float] = {}
        if self._options.compile == "emulate":
            assert self._options.costs is not None
            seconds = durations(tasks_run(plan.distinct), self._options.costs, plan.halves)
            functions = {name: emulated_chunk(chunk) for name, chunk in wanted.items()}
        else:
            functions = compile_chunks(
                wanted, self._options.compile_for(values), passing=passing(program)
            )
        layouts = plan.layouts(comm.rank)
        owners: dict[int, list[int]] = {}
        for one in plan.distinct:
            for index, _ in one.outputs:
                owners.setdefault(index, []).append(one.rank)
        return Entry(
            plan=plan,
            executor=executor_of(
                program,
                bind(program, wanted, functions),
                comm,
                seconds,
                looks=self._options.nan_check is not None and plan.dag.training,
                streams=streams_of(plan, comm, values, self._options),
                record=recorder_of(plan, comm, self._options),
            ),
            is_random=any(i.seed is not None for p in plan.distinct for i in p.instrs),
            announcement=announcement(
                plan, self._options.watched() + (" PIPER_DEBUG=comm" * comm.is_checked)
            ),
            is_later=tuple(p in layouts and not layouts[p].reduced for p, _ in program.grads),
            owners=owners,
        )

    # state

    def _state(self, values: Sequence[Any], entry: Entry, comm: Communicator) -> StepState:
        """What hangs on the Parameters, which is made, or given this program's shards, if needed.

        Raises:
            PiperError: Copies of a parameter differ, or one has no values and nothing makes them.
        """
        state = self._known_state(values)
        if state is None:
            refuse_idle_init(self._options.init_fn, values)
            state = StepState(
                rank=comm.rank,
                world_size=comm.world_size,
                comm=comm,
                init=self._options.init_fn,
                scaler=Scaler.of(self._options.loss_scale),
            )
        state.comm = comm
        if self._training and state.scaler.option != self._options.loss_scale:
            # The model was compiled before, with another one.
            state.scaler = Scaler.of(self._options.loss_scale)
        if entry.adopted is state:
            return state
        state.data_rank, state.data_world = entry.plan.replica(comm.rank)
        adopt(entry.plan, state, self._args, values, self._options)
        entry.adopted = state
        return state

    # running

    def _run(self, entry: Entry, state: StepState, values: Sequence[Any]) -> list[Any]:
        plan, program = entry.plan, entry.executor.program
        recorder = state.recorder
        seed = int(torch.empty((), dtype=torch.int64).random_()) if entry.is_random else 0
        state_values = [_held(values[p]) for _, p in program.state]
        if program.tangents:
            # The backward runs later, when buffers have their new values: it reads the old ones.
            changed = {position for position, _ in program.buffers}
            state_values = [
                value.clone() if position in changed else value
                for value, (_, position) in zip(state_values, program.state, strict=True)
            ]
        weights, scale = self._weights(entry, state, values)
        stops = state.stops(program) if state.stops is not None else frozenset()
        watch, dump = Watch(timed=recorder is not None, stops=stops), state.dump
        if dump is not None:
            watch = dump.watch(plan, program, watch)
        results = entry.executor.run(
            state_values,
            [values[p].detach().contiguous() for _, p in program.data],
            weights,
            seed=seed,
            first_microbatch=state.data_rank * plan.dag.num_microbatches,
            watch=watch,
            probe=dump,
        )
        if recorder is not None:
            recorder(entry.executor, plan.dag.chunks, plan.args)
        state.last = plan
        is_good = self._is_good(entry, state, weights, results)
        with torch.no_grad():
            if scale != 1.0 and results.loss is not None:
                results.loss.div_(scale)
            for (position, _), new in zip(program.buffers, results.buffers, strict=True):
                if is_good:
                    values[position].copy_(new)
        return self._outputs(entry, state, results, values, scale if is_good else None)

    def _weights(
        self, entry: Entry, state: StepState, values: Sequence[Any]
    ) -> tuple[list[Tensor], float]:
        """What each microbatch's loss counts, and the loss scale, by which these are multiplied."""
        plan, names = entry.plan, entry.executor.program.weights
        spec = plan.dag.outputs[plan.dag.loss].spec if plan.dag.loss is not None else None
        scale = state.scaler.factor if plan.dag.training else 1.0
        if spec is None:
            return [], scale
        numbers = loss_weights(plan, values, entry.executor.comm, needed=bool(names))
        index = {f"weight_{i}": i for i in range(len(numbers))} | {"weight": 0}
        weights = [numbers[index[name]] * scale for name in names]
        # Not torch.tensor, which copies from the host, and on CUDA waits for that.
        return [torch.full((), w, dtype=spec.dtype, device=spec.device) for w in weights], scale

    def _is_good(
        self, entry: Entry, state: StepState, weights: Sequence[Tensor], results: StepResults
    ) -> bool:
        """Whether a step's gradients are to be handed over; all ranks find the same.

        Raises:
            PiperRuntimeError: They are not finite, and this is to be an error.
        """
        plan, executor, scaler = entry.plan, entry.executor, state.scaler
        if not plan.dag.training:
            return True
        is_good = True
        if self._options.nan_check is not None:
            action = self._options.nan_check
            is_good = check_step(plan, executor, weights, results.grads, executor.comm, action)
        elif scaler.rule is not None:
            is_good = agree_on_gradients(results.grads, executor.comm)
        scaler.update(is_finite=is_good)
        return is_good

    def _outputs(
        self,
        entry: Entry,
        state: StepState,
        results: StepResults,
        values: Sequence[Any],
        scale: float | None,
    ) -> list[Any]:
        """What the call gives back; `scale` is in the gradients, None if nobody is to get these."""
        plan, program = entry.plan, entry.executor.program
        owned = {
            index: value for (index, _), value in zip(program.outputs, results.outputs, strict=True)
        }
        if results.backward is not None:
            owned |= self._differentiable_outputs(state, program, results, owned, values)
        found: list[Any] = []
        for index, output in enumerate(plan.dag.outputs):
            if index in self._effects.stores:  # the buffer, which has changed and is assigned
                found.append(values[self._effects.stores[index]])
            elif index == plan.dag.loss:
                found.append(self._loss_value(entry, state, results, values, scale))
            elif isinstance(output.value, Unjoined):
                found.append(unjoined_output(output.value, self._label(index)))
            elif output.node is None:
                found.append(output.value)
            elif index in owned:
                found.append(owned[index])
            else:
                assert output.spec is not None
                whole = joined_spec(output.spec, output.batch_dim, plan.dag.num_microbatches)
                owners = entry.owners.get(index, [])
                found.append(absent_output(whole, self._label(index), owners))
        return found

    def _label(self, index: int) -> str:
        """An output, as the user knows it."""
        path = self._paths.get(index)
        return f"output {index if path is None else repr(path)} of the model"

    def _differentiable_outputs(
        self,
        state: StepState,
        program: RankProgram,
        results: StepResults,
        owned: dict[int, Tensor],
        values: Sequence[Any],
    ) -> dict[int, Tensor]:
        """Outputs whose gradients start the backward, where no output is the loss."""
        backward = results.backward
        assert backward is not None
        indices = [index for index, _ in program.tangents]
        params = [values[position] for position, _ in program.grads]
        changed = {position for position, _ in program.buffers}
        read = [
            (name, values[p], values[p]._version)
            for name, p in (*program.state, *program.data)
            if p not in changed
        ]

        def run(incoming: Sequence[Tensor]) -> Sequence[Tensor]:
            moved = [name for name, value, version in read if value._version != version]
            if moved:
                raise PiperRuntimeError(
                    f"changed in place between the step and its backward: {', '.join(moved)}; "
                    "call backward before the optimizer's step, and do not change inputs"
                )
            return backward([g.contiguous() for g in incoming])

        attached = attach_outputs(state, [owned[i] for i in indices], params, run)
        return dict(zip(indices, attached, strict=True))

    def _loss_value(
        self,
        entry: Entry,
        state: StepState,
        results: StepResults,
        values: Sequence[Any],
        scale: float | None,
    ) -> Tensor:
        assert results.loss is not None
        if not entry.plan.dag.training:
            return results.loss
        targets = [values[position] for position, _ in entry.executor.program.grads]
        records = [record_of(target) for target in targets]
        taking = [
            record.stepped(target) if record is not None else target
            for target, record in zip(targets, records, strict=True)
        ]

        def deliver(grads: list[Tensor]) -> list[Tensor | None]:
            given = grads if scale is not None else [None] * len(grads)
            return _deliver(state, given, records, entry.is_later)

        return attach(state, results.loss, taking, list(results.grads), deliver, scale=scale or 1.0)

    # sessions

    def _visit(self, now: Session, values: Sequence[Any]) -> list[Any]:
        """Plan or prepare; stand-ins for the outputs show the structure of the model's output."""
        changed = (one() for one in self._effects.changed)
        now.kept.add(one for one in changed if one is not None)  # Dynamo's code does it after this
        now.steps.append(self)
        now.calls.append(self.call_of(values))
        if now.loss is not None:
            self._loss = now.loss
        self._paths = now.paths or self._paths
        outputs = compat.output_nodes(self._gm)
        if not now.probe and not now.capture:
            if now.world_size is not None:
                now.plans.append(self._plan(values, now.world_size))
            else:
                comm = communicator(self._options.timeout_s)
                entry = self._entry(values, comm)
                state = self._state(values, entry, comm)
                state.last = entry.plan
                if self._loss is not None:
                    state.loss = (len(outputs), self._loss)
                now.plans.append(entry.plan)
        found: list[Any] = []
        for index, node in enumerate(outputs):
            if isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), Tensor):
                found.append(torch.empty(0).as_subclass(StandIn))
                found[-1].place = index
            else:
                found.append(None)
        return found


def _deliver(
    state: StepState,
    grads: Sequence[Tensor | None],
    records: Sequence[Record | None],
    is_later: Sequence[bool],
) -> list[Tensor | None]:
    """What autograd gets: each gradient with what earlier steps put off, unless it is put off.

    Of a step that is skipped there are no gradients; what was put off before it is handed over.
    """
    settling = [
        r for r, later in zip(records, is_later, strict=True) if r is not None and not later
    ]
    earlier = settle(state, settling)
    found: list[Tensor | None] = []
    for grad, record, later in zip(grads, records, is_later, strict=True):
        if record is None:
            found.append(grad)
        elif later:
            if grad is not None:
                put_off(record, grad)
            found.append(None)
        else:
            total = earlier.get(record.name)
            if grad is not None:
                total = grad.add_(total) if total is not None else grad
            if total is not None and record.block is not None:
                total = record.block.gradient(total)
            found.append(total)
    return found


def _held(value: Tensor) -> Tensor:
    """A parameter or buffer as the program reads it."""
    record = record_of(value)
    if record is not None and record.block is not None:
        return record.block.value()
    return value.detach()


class StandIn(Tensor):
    """Stands for one output of a call that was only planned or prepared."""

    place: int
