"""How a rank's program runs on its device: on streams, recorded, or as it is on the host.

Signature: plan, communicator, options -> streams, recorder.
"""

from collections.abc import Sequence
from typing import Any

import torch

from piper_dynamo.binding import OnStreams
from piper_dynamo.errors import PiperPlanError, format_error
from piper_dynamo.lowering.capturable import why_not_captured
from piper_dynamo.lowering.streams import has_streams, on_streams
from piper_dynamo.options import Options
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.comm import Communicator
from piper_dynamo.runtime.device import device_of
from piper_dynamo.runtime.graphs import Recorder, record_cuda
from piper_dynamo.runtime.local import LocalCommunicator
from piper_dynamo.runtime.on_streams import meeting_of

MOST_SHOWN = 8  # reasons of one refusal


def streams_of(
    plan: Plan, comm: Communicator, values: Sequence[Any], options: Options
) -> OnStreams | None:
    """How this rank runs on streams; None where its program is for one queue.

    Args:
        plan: The job's.
        comm: The way to the others.
        values: What the step is called with.
        options: The backend's.
    """
    program = plan.programs[comm.rank]
    if not plan.on_cuda or options.compile == "emulate" or not has_streams(program):
        return None
    (found,) = {v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda}
    device = device_of(comm, found)
    return OnStreams(
        program=on_streams(program, plan.chunks), device=device, meeting=meeting_of(comm, device)
    )


def recorder_of(plan: Plan, comm: Communicator, options: Options) -> Recorder | None:
    """What records steps, where that is asked for.

    Args:
        plan: The job's.
        comm: The way to the others.
        options: The backend's.

    Raises:
        PiperPlanError: The step cannot be recorded; lists why.
    """
    if not options.graph:
        return None
    in_process = isinstance(comm, LocalCommunicator) and comm.world_size > 1
    reasons = {
        "the model is not on CUDA": not plan.on_cuda,
        "compile='emulate' waits on the host": options.compile == "emulate",
        "the ranks are threads of one process, which wait on the host": in_process,
        "nan_check looks at values in each step": options.nan_check is not None,
    }
    found = [
        *(reason for reason, holds in reasons.items() if holds),
        *why_not_captured(plan.programs[comm.rank], plan.chunks),
    ]
    if not found:
        return record_cuda
    shown = found[:MOST_SHOWN]
    if len(found) > len(shown):
        shown.append(f"... and {len(found) - len(shown)} more")
    raise PiperPlanError(
        format_error(
            "the step cannot be recorded (graph=True)",
            {"why": "\n".join(shown)},
            hint="leave graph out, or change what is listed: experts with Shard(capacity=...) "
            "take a fixed number of rows",
        )
    )
