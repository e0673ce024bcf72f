"""A rank's model and its optimizers, as a save or load sees them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from piper_dynamo.access import held, known_state, module_of
from piper_dynamo.checkpoint import optimizers as optim
from piper_dynamo.checkpoint.optimizers import Optimizer
from piper_dynamo.errors import PiperError, join_faults
from piper_dynamo.runtime.comm import Communicator
from piper_dynamo.runtime.world import communicator
from piper_dynamo.state import Record, StepState

TIMEOUT_S = 300.0  # of a model that no step was prepared of
# Keys of what is no tensor of the model or the optimizer.
GROUPS, EXTRA, RANDOM, SCHEDULER = "optim.param_groups", "extra", "rng", "scheduler"
SCALE = "loss_scale"  # of a dynamic one: its factor, and good steps in a row
Optimizers = Optimizer | Sequence[Optimizer] | None


def free_communicator(step: Any) -> Communicator:
    """The way to the other ranks, when the last save in the background has ended.

    Raises:
        PiperError: That save failed.
    """
    state = known_state(step)
    comm: Communicator = state.comm if state is not None else communicator(TIMEOUT_S)
    if comm.saving is not None:
        comm.saving.wait()
    return comm


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A rank's model and its optimizers, as a save or load sees them.

    Attributes:
        module: The user's module.
        state: What is known of its parameters on this rank.
        params: What this rank's optimizers step, by name.
        named: Their names, by identity.
        optimizers: None, one or several.
        scheduler: The learning rate's.
    """

    module: nn.Module
    state: StepState
    params: dict[str, tuple[nn.Parameter, Record | None]]
    named: dict[int, str]
    optimizers: list[Optimizer] = field(default_factory=list)
    scheduler: Any = None

    @classmethod
    def of(cls, step: Any, opt: Optimizers = None, scheduler: Any = None) -> "Job":
        """Look at a step.

        Raises:
            PiperError: The optimizers do not step what this rank holds.
        """
        state = known_state(step)
        if state is None:
            comm = communicator(TIMEOUT_S)
            state = StepState(rank=comm.rank, world_size=comm.world_size, comm=comm)
        params = {name: (param, record) for name, param, record in held(step, state)}
        job = cls(
            module=module_of(step),
            state=state,
            params=params,
            named={id(param): name for name, (param, _) in params.items()},
            optimizers=optim.listed(opt),
            scheduler=scheduler,
        )
        optim.check_parameters(job.optimizers, job.named, state.anchor)
        owner = getattr(scheduler, "optimizer", None)
        if scheduler is not None and not any(owner is one for one in job.optimizers):
            raise PiperError("scheduler= is not a scheduler of the optimizer that was given")
        return job

    def tensors(self) -> dict[str, Tensor]:
        """The model's state dict, without touching what is in it.

        Raises:
            PiperError: It holds what is no tensor.
        """
        found = self.module.state_dict(keep_vars=True)
        odd = [name for name, value in found.items() if not isinstance(value, Tensor)]
        if odd:
            raise PiperError(
                f"the model's state dict holds what is no tensor ({', '.join(odd)}): checkpoints "
                "have no place for it; keep it in `extra`"
            )
        return found

    def ties(self) -> dict[str, str]:
        """Each further name of a tensor, and its first."""
        first: dict[int, str] = {}
        names = {name: first.setdefault(id(value), name) for name, value in self.tensors().items()}
        # A parameter goes by its name among the module's parameters.
        own = {id(p): name for name, p in self.module.named_parameters()}
        return {
            name: known
            for name, value in self.tensors().items()
            if (known := own.get(id(value), names[name])) != name
        }


def refuse_meta(job: Job) -> None:
    """Values must be there.

    Raises:
        PiperError: Parameters are on the meta device.
    """
    bare = [name for name, (param, _) in job.params.items() if param.is_meta]
    if bare:
        raise PiperError(
            f"parameters without values cannot be saved or loaded: {', '.join(bare[:8])}; prepare "
            "the step first"
        )


def check_names(
    here: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """A saved model fits this one.

    Args:
        here: The shapes of the model's parameters and buffers.
        saved: Those that were saved.
        where: What they come from.

    Raises:
        PiperError: It does not; lists every fault.
    """
    faults = [f"{name} is not in it" for name in here if name not in saved]
    faults += [f"{name} is in it and not in the model" for name in saved if name not in here]
    faults += [
        f"{name} is {saved[name]} in it and {shape} in the model"
        for name, shape in here.items()
        if name in saved and saved[name] != shape
    ]
    if faults:
        more = [f"and {len(faults) - 12} more"] if len(faults) > 12 else []
        raise PiperError(
            join_faults(
                f"{where} is of another model",
                [*faults[:12], *more],
                hint="build the model as it was when it was saved; nothing was loaded",
            )
        )
