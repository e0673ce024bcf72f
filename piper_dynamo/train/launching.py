"""How `piper train` starts its ranks, checked before any process starts."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from piper_dynamo.errors import PiperStrategyError, join_faults
from piper_dynamo.train.config import Config

ENGINES = ("local", "torchrun", "ray")
# Of torchrun's own options those that say where ranks are.
HOSTS = ("nnodes", "nproc_per_node", "node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
# What a restart cannot change: then it would be another run.
_FIXED = ("out", "resume", "seed", "steps", "save_every", "keep_last", "compare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """Options that say how ranks are started; `piper train --help` explains them."""

    engine: str = "local"
    max_restarts: int = 0
    fallback: tuple[str, ...] = ()
    address: str | None = None
    hosts: Mapping[str, Any]

    def configs(self, config: Config) -> tuple[Config, ...]:
        """The job, and what a restart takes instead, in order.

        Raises:
            PiperStrategyError: Lists every fault, also those that make the job impossible.
        """
        faults: list[str] = []
        found = [config]
        for text in self.fallback:
            try:
                found.append(replace(config, ranks=None, **_changes(text)))
            except PiperStrategyError as error:
                faults.append(f"--fallback {text}\n{error}")
        faults += self._faults(found)
        if faults:
            raise PiperStrategyError(join_faults("this job cannot be started", faults))
        return tuple(found)

    def _faults(self, configs: Sequence[Config]) -> list[str]:
        config, faults = configs[0], []
        if not 0 <= self.max_restarts <= 1000:
            faults.append(f"--max-restarts is {self.max_restarts}; give 0 to 1000")
        if self.max_restarts and not config.save_every:
            faults.append(
                f"--max-restarts {self.max_restarts} goes on from the last checkpoint, and there "
                "is none without --save-every"
            )
        given = [name for name in HOSTS if self.hosts[name] is not None]
        if self.engine != "torchrun" and given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            faults.append(f"{flags}: these are torchrun's; give --engine torchrun")
        if self.engine != "ray" and self.address is not None:
            faults.append(f"--address {self.address} is of a Ray cluster; give --engine ray")
        worlds = [one.world for one in configs]
        alike = {one.world: one for one in configs}
        if any(one != replace(alike[one.world], ranks=one.ranks) for one in configs):
            faults.append(
                f"--fallback: two jobs of {', '.join(map(str, worlds))} ranks are unlike, though "
                "they have as many; the ranks that there are say which one runs"
            )
        # Or those of torchrun, which started this process.
        restarts = self.max_restarts or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if len(configs) > 1 and not restarts:
            faults.append("--fallback is about restarts; give --max-restarts")
        if self.engine == "ray" and _is_member():
            faults.append("--engine ray: torchrun has started this process as one of its ranks")
        is_shared = _is_member() or self._many_hosts()
        if config.out is None and config.save_every and restarts and is_shared:
            faults.append(
                "a restart has to find the run folder: name it with --out, on all hosts alike"
            )
        return faults

    def _many_hosts(self) -> bool:
        return str(self.hosts["nnodes"] or "1") != "1"

    def run(self, config: Config, others: Sequence[Config]) -> list[Any]:
        """Start the ranks, or be one of those that torchrun has started."""
        # These import torch, which takes seconds.
        from piper_dynamo.runtime import launch_torchrun
        from piper_dynamo.runtime.launch import launch
        from piper_dynamo.train.job import run_rank

        job = functools.partial(run_rank, config, tuple(others))
        ranks = [one.world for one in (config, *others)]
        if self.engine == "torchrun" and not _is_member():
            asked = {name: value for name, value in self.hosts.items() if value is not None}
            return launch_torchrun.run(
                job,
                ranks,
                timeout_s=config.timeout_s,
                max_restarts=self.max_restarts,
                logs=None,
                hosts=launch_torchrun.Hosts(**({"rdzv_endpoint": launch_torchrun.HERE} | asked)),
            )
        return launch(
            job,
            ranks,
            engine="torchrun" if _is_member() else self.engine,
            timeout_s=config.timeout_s,
            max_restarts=self.max_restarts,
            address=self.address,
        )

    def claims_folder(self) -> bool:
        """Whether this process names the run folder; else the first rank does."""
        return not _is_member() and not self._many_hosts()


def _is_member() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _changes(text: str) -> dict[str, Any]:
    """The options of a fallback: `dp=1,zero=0`.

    Raises:
        PiperStrategyError: There is no such option, or it is not one that may change.
    """
    known = {one.name: one.default for one in fields(Config) if one.name not in _FIXED}
    found: dict[str, Any] = {}
    for pair in text.split(","):
        name, is_given, value = pair.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if name not in known or not is_given:
            raise PiperStrategyError(
                f"{pair!r} is no option that a restart may change; write it as dp=1,zero=0"
            )
        kind: Any = str if known[name] is None else type(known[name])
        try:
            found[name] = _FLAGS[value] if kind is bool else kind(value)
        except (ValueError, KeyError) as error:
            raise PiperStrategyError(
                f"a restart cannot change {name} to {value!r}; give it as {kind.__name__}"
            ) from error
    return found


_FLAGS = {"true": True, "false": False}
