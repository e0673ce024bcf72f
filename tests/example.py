"""The files of examples/, as modules and as subjects.

Each defines `model()`, `inputs()` and `strategy()`; its imports say which libraries it needs.
"""

import ast
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import zoo
from tests.source_tree import ROOT

NAMES = tuple(sorted(path.stem for path in (ROOT / "examples").glob("*.py")))


def source(name: str) -> str:
    """The text of an example."""
    return (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")


@cache
def libraries(name: str) -> tuple[str, ...]:
    """What an example imports beside torch and Piper."""
    found = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return tuple(sorted(found - sys.stdlib_module_names - {"torch", "piper_dynamo"}))


def param(name: str, *marks: Any) -> Any:
    """An example as a parameter of a test, which is skipped where a library is missing."""
    missing = [one for one in libraries(name) if importlib.util.find_spec(one) is None]
    reason = f"needs {', '.join(missing)}, of the extra 'models': make test-models"
    return pytest.param(name, marks=[pytest.mark.skipif(bool(missing), reason=reason), *marks])


@cache
def load(name: str) -> ModuleType:
    """An example as a module; what it starts under `if __name__ == "__main__"` does not run."""
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", ROOT / "examples" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo looks for the globals of its functions there
    spec.loader.exec_module(module)
    return module


def subject(name: str) -> zoo.Subject:
    """An example's model in float64, without dropout, on its data."""
    module = load(name)

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = module.model()
        for one in model.modules():
            if isinstance(one, nn.Dropout):
                one.p = 0.0
        return model.double().train()

    def batch(step: int, replica: int) -> Any:
        torch.manual_seed(100 + 10 * step + replica)
        return zoo.doubled(module.inputs())

    return zoo.Subject(build=build, batch=batch, loss_of=loss_of)


def regions(name: str) -> dict[str, dict[str, int]]:
    """The stages of an example."""
    return dict(load(name).strategy().regions)


def loss_of(output: Any) -> Tensor:
    """The loss in an example's output: a tensor, a dict, or a library's own output."""
    found = output["loss"] if isinstance(output, dict) else getattr(output, "loss", output)
    assert isinstance(found, Tensor)
    return found


def tolerance(name: str) -> float:
    """transformers has norms, softmax and losses in float32 even in a model of float64."""
    return 1e-6 if libraries(name) else 1e-12
