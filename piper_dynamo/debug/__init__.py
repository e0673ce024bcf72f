"""Looking into steps: where a task comes from, what it computed, a debugger before it.

piper.debug.find(step, "F.PP0.MB1")                 modules and lines of the model
piper.debug.dump(step, {"PP": 1, "MB": 0}, "a")     the next step writes what these tasks saw
piper.debug.diff("a", "b")                          the first task at which two runs part
with piper.debug.stop_at(step, "F.PP0.MB1"): ...    pdb, before the task
"""

from piper_dynamo.debug.diff import Comparison, Parting, diff
from piper_dynamo.debug.dump import dump
from piper_dynamo.debug.find import Found, find
from piper_dynamo.debug.stop import stop_at

__all__ = ["Comparison", "Found", "Parting", "diff", "dump", "find", "stop_at"]
