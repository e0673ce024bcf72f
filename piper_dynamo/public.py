"""The public names, which `piper_dynamo` has from here.

None is the name of one of its files, which Python would put in its place.
"""

from piper_dynamo import debug, moe, schedules, strategies
from piper_dynamo.access import (
    clip_grad_norm_,
    data_rank,
    data_world,
    explain,
    loss_scale,
    named_parameters,
    parameters,
    record,
)
from piper_dynamo.accumulation import no_sync
from piper_dynamo.annotation import annotate
from piper_dynamo.api import compile, plan, prepare
from piper_dynamo.checkpoint.load import load_checkpoint
from piper_dynamo.checkpoint.save import save_checkpoint, save_checkpoint_async
from piper_dynamo.checkpoint.state_dicts import export_checkpoint, state_dict
from piper_dynamo.costs import Costs
from piper_dynamo.deferred import deferred_init
from piper_dynamo.errors import (
    PiperAbsentError,
    PiperCaptureError,
    PiperError,
    PiperPlanError,
    PiperRuntimeError,
    PiperStrategyError,
    PiperSyntaxError,
    PiperTimeoutError,
)
from piper_dynamo.examination import doctor
from piper_dynamo.loss_scaling import LossScale
from piper_dynamo.mesh import Mesh
from piper_dynamo.pending import materialize
from piper_dynamo.planning import Plan
from piper_dynamo.predict.measuring import profile
from piper_dynamo.predict.profile import Profile
from piper_dynamo.predict.search import search
from piper_dynamo.predict.stages import auto_stages
from piper_dynamo.runtime.launch import launch
from piper_dynamo.runtime.world import rank, world_size
from piper_dynamo.strategy import (
    Kernel,
    Order,
    Place,
    Precision,
    Recompute,
    Replicate,
    Shard,
    Split,
    Strategy,
)
from piper_dynamo.weights import load_state_dict

__all__ = [
    "Costs",
    "Kernel",
    "LossScale",
    "Mesh",
    "Order",
    "PiperAbsentError",
    "PiperCaptureError",
    "PiperError",
    "PiperPlanError",
    "PiperRuntimeError",
    "PiperStrategyError",
    "PiperSyntaxError",
    "PiperTimeoutError",
    "Place",
    "Plan",
    "Precision",
    "Profile",
    "Recompute",
    "Replicate",
    "Shard",
    "Split",
    "Strategy",
    "annotate",
    "auto_stages",
    "clip_grad_norm_",
    "compile",
    "data_rank",
    "data_world",
    "debug",
    "deferred_init",
    "doctor",
    "explain",
    "export_checkpoint",
    "launch",
    "load_checkpoint",
    "load_state_dict",
    "loss_scale",
    "materialize",
    "moe",
    "named_parameters",
    "no_sync",
    "parameters",
    "plan",
    "prepare",
    "profile",
    "rank",
    "record",
    "save_checkpoint",
    "save_checkpoint_async",
    "schedules",
    "search",
    "state_dict",
    "strategies",
    "world_size",
]
