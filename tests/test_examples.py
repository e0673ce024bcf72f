"""The examples: models of transformers and peft, which train as in one process.

They need the extra `models` (`make test-models`); without it they are skipped, and pytest says so.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests import zoo
from tests.source_tree import ROOT

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
# transformers computes norms, softmax and losses in float32 even in a model of float64.
ROUNDED = 1e-6

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="needs the extra 'models': make test-models",
    ),
    pytest.mark.filterwarnings("ignore:.*deprecated and will be removed:FutureWarning"),  # in peft
]


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


def subject_of(module: ModuleType) -> zoo.Subject:
    """The example's model in float64, without dropout, on its data."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = module.model()
        return model.double().eval()

    def batch(step: int, replica: int) -> Any:
        torch.manual_seed(100 + 10 * step + replica)
        return zoo.doubled(module.inputs())

    return zoo.Subject(build=build, batch=batch, loss_of=lambda output: output.loss)


@pytest.mark.parametrize("name", EXAMPLES)
def test_trains_as_one_process(name: str) -> None:
    module = load(name)
    zoo.check(subject_of(module), module.strategy(), tolerance=ROUNDED)
