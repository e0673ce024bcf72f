"""What the commands look at: a model, inputs and a strategy.

Terms: a *target* is a Python file that defines `model()`, `inputs()` and `strategy()`, a strategy
as JSON, for a model of `piper train`, a run folder of it, or that job's options alone.

Signature: a path, options -> a target.
"""

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from piper_dynamo.api import plan as make_plan
from piper_dynamo.errors import PiperError, PiperStrategyError, PiperSyntaxError, format_error
from piper_dynamo.files import read_text
from piper_dynamo.planning import Plan
from piper_dynamo.strategy import Place, Strategy
from piper_dynamo.train.config import Config
from piper_dynamo.train.data import read_corpus
from piper_dynamo.train.model import build

MODEL_OPTIONS = (
    *("model", "dim", "layers", "heads", "kv_heads", "seq", "batch", "experts", "top_k"),
    *("tied_head", "dtype", "seed"),
)
STRATEGY_OPTIONS = (
    *(
        "pp",
        "dp",
        "ep",
        "order",
        "zero",
        "bucket_mb",
        "prefetch",
        "keep",
        "microbatches",
        "schedule",
    ),
    *("capacity", "recompute", "precision"),
)
DEFINED = ("model", "inputs", "strategy")


class Misuse(PiperError):
    """The command was asked wrongly: there is no plan to speak of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model, inputs and a strategy.

    Attributes:
        name: What it was called on the command line.
        strategy: How the step is distributed.
        model: Makes the model; every call gives equal values.
        inputs: Makes the example inputs of one replica: a tuple, or a dict by name.
        batches: Makes a replica's inputs of a step: from the step, the replica, and of how many.
        is_meta: Whether `model` may be called under torch's meta device.
        folder: The run folder it is.
        compile: How chunks run; None: the default.
    """

    name: str
    strategy: Strategy
    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    batches: Callable[[int, int, int], Any]
    is_meta: bool
    folder: Path | None = None
    compile: str | None = None

    def plan(self, ranks: int | None = None) -> Plan:
        """The target's plan.

        Args:
            ranks: For how many; None: as many as the strategy places something on.

        Raises:
            PiperError: It is refused.
        """
        mesh = self.strategy.mesh
        world = ranks if ranks is not None or mesh is None else mesh.size
        return make_plan(
            self.looked_at(), self.strategy, self.inputs(), world, compile=self.compile
        )

    def looked_at(self) -> nn.Module:
        """The model, on the meta device where it may be."""
        if not self.is_meta:
            return self.model()
        with torch.device("meta"):
            return self.model()


def load_target(
    path: str | None,
    options: Mapping[str, Any],
    given: set[str],
    *,
    is_meta: bool,
    needs_strategy: bool | None = True,
) -> Target:
    """The target that a command line names.

    Args:
        path: A file or folder; None or "-": the options say it all.
        options: The values of all options of the training job.
        given: The names of those that were written on the command line.
        is_meta: Whether a Python file's model is built on torch's meta device.
        needs_strategy: Whether a Python file must define one; None: it may, and else has none.

    Raises:
        Misuse: There is no such target, or options do not go with it.
        PiperError: The strategy is refused.
    """
    if path is None or path == "-":
        stages = None if needs_strategy else 0
        return _of_config(config_of(options), "the options", stages=stages)
    found = Path(path)
    if not found.exists():
        raise Misuse(
            format_error(
                "there is no such file or folder",
                {"target": path},
                hint="name a Python file, a strategy as JSON or a run folder of piper train",
            )
        )
    if not needs_strategy and found.suffix != ".py":
        raise Misuse(f"{path} says a strategy, which is looked for here: give a Python file")
    if found.is_dir():
        _refuse_options(given - {"compile"}, "a run folder's config.json says what it ran")
        return _of_folder(found)
    if found.suffix == ".py":
        _refuse_options(given - {"compile"}, "a Python file defines its own model and strategy")
        mode = options["compile"] if "compile" in given else None
        return _of_file(found, mode, is_meta=is_meta, needs_strategy=needs_strategy)
    if found.suffix == ".json":
        _refuse_options(given & set(STRATEGY_OPTIONS), "the strategy says it")
        return _of_json(found, options)
    raise Misuse(
        format_error(
            "this is no target",
            {"target": path, "known": "*.py, *.json, or a run folder of piper train"},
        )
    )


def config_of(options: Mapping[str, Any]) -> Config:
    """The job of these options."""
    known = {one.name for one in fields(Config)}
    try:
        return Config(**{name: value for name, value in options.items() if name in known})
    except PiperStrategyError as error:
        raise Misuse(str(error)) from error


def _refuse_options(given: set[str], why: str) -> None:
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in sorted(given))
        raise Misuse(format_error("these options do not go with this target", {flags: why}))


def _of_config(
    config: Config, name: str, *, strategy: Strategy | None = None, stages: int | None = None
) -> Target:
    """A model of the training job, under its own strategy or another."""
    chosen = config.strategy() if strategy is None else strategy
    replicas = max((len(place.devices) for place in chosen.of(Place)), default=1)
    if config.batch % replicas:
        raise Misuse(f"--batch {config.batch} does not divide among {replicas} replicas")

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        shape = (config.batch // replicas, config.seq)
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)

    def batches(step: int, replica: int, replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
        return read_corpus().batch(
            "train",
            step,
            seed=config.seed,
            rows=config.batch,
            seq=config.seq,
            data_rank=replica,
            data_world=replicas,
        )

    return Target(
        name=name,
        strategy=chosen,
        model=lambda: build(config, stages),
        inputs=inputs,
        batches=batches,
        is_meta=True,
        compile=config.compile,
    )


def _of_folder(folder: Path) -> Target:
    try:
        asked = json.loads(read_text(folder / "config.json"))["options"]
        config = Config(**asked)
    except (OSError, ValueError, KeyError, TypeError, PiperStrategyError) as error:
        raise Misuse(
            format_error(
                "this folder is no run of piper train",
                {"folder": folder, "why": f"config.json: {error}"},
            )
        ) from error
    found = _of_config(config, str(folder))
    return replace(found, folder=folder)


def load_strategy(path: Path) -> Strategy:
    """The strategy of a JSON file, or of a Python file that defines `strategy()`.

    Raises:
        Misuse: There is none in it.
        PiperError: It is refused.
    """
    if path.suffix == ".py":
        return _of_module(path, _imported(path), ("strategy",))
    try:
        return Strategy.from_json(read_text(path))
    except (OSError, UnicodeDecodeError, PiperSyntaxError) as error:
        raise Misuse(format_error("this is no strategy", {"file": path, "why": error})) from error


def _of_json(path: Path, options: Mapping[str, Any]) -> Target:
    strategy = load_strategy(path)
    model = {name: options[name] for name in (*MODEL_OPTIONS, "compile")}
    # As a job of one rank: what the strategy says of the rest is checked by the plan.
    alone = {"pp": 1, "microbatches": 1, "schedule": "gpipe"}
    config = config_of({**model, **alone})
    stages = 1 + max(
        (index for place in strategy.of(Place) for index in _indices(place.filter.tags.get("PP"))),
        default=0,
    )
    if config.layers < stages:
        raise Misuse(
            f"--layers is {config.layers}, fewer than the {stages} stages of {path}; add layers"
        )
    return _of_config(config, str(path), strategy=strategy, stages=stages)


def _indices(value: object) -> list[int]:
    values = value if isinstance(value, tuple) else (value,)
    return [one for one in values if isinstance(one, int)]


def _of_file(
    path: Path, compile_mode: str | None, *, is_meta: bool, needs_strategy: bool | None
) -> Target:
    module = _imported(path)
    if needs_strategy is False or (needs_strategy is None and not hasattr(module, "strategy")):
        setattr(module, "strategy", Strategy())  # noqa: B010  (mypy knows no attributes of modules)
    strategy = _of_module(path, module, DEFINED)

    def model() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = _called(path, "model", module, nn.Module, "a torch.nn.Module")
        return made

    def inputs(step: int = 0, replica: int = 0, replicas: int = 1) -> Any:
        torch.manual_seed(1 + step * replicas + replica)
        return _called(path, "inputs", module, (tuple, list, Mapping), "a tuple or a dict")

    return Target(
        name=str(path),
        strategy=strategy,
        model=model,
        inputs=inputs,
        batches=inputs,
        is_meta=is_meta,
        compile=compile_mode,
    )


def _of_module(path: Path, module: ModuleType, needed: tuple[str, ...]) -> Strategy:
    """The strategy of a Python file that defines what is needed."""
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        raise Misuse(
            format_error(
                f"{path} does not define what is looked at",
                {"missing": ", ".join(f"{name}()" for name in missing)},
                hint="define model(), which makes the model, inputs(), which makes the example "
                "inputs of one replica, and strategy(), which makes the piper.Strategy",
            )
        )
    if isinstance(module.strategy, Strategy):
        return module.strategy
    made: Strategy = _called(path, "strategy", module, Strategy, "a piper.Strategy")
    return made


def _imported(path: Path) -> ModuleType:
    """The file as a module; what it starts under `if __name__ == "__main__"` does not run."""
    name = f"piper_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    except PiperError:
        raise  # a strategy that is refused
    except Exception as error:
        raise Misuse(_user_error(path, "the file cannot be run", error)) from error
    finally:
        sys.path.remove(folder)
    return module


def _called(path: Path, name: str, module: ModuleType, kind: Any, what: str) -> Any:
    """What a function of the file returns, checked."""
    function = getattr(module, name)
    if not callable(function):
        raise Misuse(f"{path}: {name} is a {type(function).__name__}; make it a function")
    try:
        made = function()
    except PiperError:
        raise
    except Exception as error:
        raise Misuse(_user_error(path, f"{name}() failed", error)) from error
    if not isinstance(made, kind):
        raise Misuse(f"{path}: {name}() returned a {type(made).__name__}; return {what}")
    return made


def _user_error(path: Path, title: str, error: Exception) -> str:
    """Where in the file it happened, and what."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(path.name)]
    line = f":{own[-1].lineno}" if own else ""
    if isinstance(error, SyntaxError):
        line = f":{error.lineno}"
    return format_error(
        title, {"where": f"{path}{line}", "why": f"{type(error).__name__}: {error}"}
    )


def doubled(value: Any) -> Any:
    """Floating-point tensors, or a model, in float64."""
    if isinstance(value, nn.Module):
        return value.double()
    return tree_map(
        lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, value
    )
