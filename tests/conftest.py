"""What every test shares: one thread, fixed seeds, one cache of compiled chunks, strict checks.

Environment variables are set before torch is imported and are inherited by the processes that
tests start. Each can be set from outside; a PIPER_CACHE_DIR of your own is kept after the run.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PIPER_VERIFY", "3")
_OWN_CACHE = None if "PIPER_CACHE_DIR" in os.environ else tempfile.mkdtemp(prefix="piper-tests-")
if _OWN_CACHE is not None:
    os.environ["PIPER_CACHE_DIR"] = _OWN_CACHE

import torch  # noqa: E402  (reads OMP_NUM_THREADS when it is imported)

from piper_dynamo.lowering.launches import in_launch_order  # noqa: E402
from piper_dynamo.planning import Plan  # noqa: E402
from piper_dynamo.programs import prove_on_streams  # noqa: E402
from tests.pool import Pool  # noqa: E402

torch.set_num_threads(1)

# Choose with --hypothesis-profile=fuzz. No deadlines: a first example may compile something.
settings.register_profile(
    "ci",
    max_examples=15,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fuzz", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def seeds() -> int:
    """Every test starts from the same random state, whichever tests ran before it."""
    seed = 0
    random.seed(seed)
    torch.manual_seed(seed)
    return seed


MOST_INSTRS = 4000  # of a plan that is proved twice


@pytest.fixture(scope="session", autouse=True)
def proved_on_streams() -> Iterator[None]:
    """Every plan that is proved in a test is also proved as CUDA would run it."""
    proves = Plan.verify

    def both(plan: Plan) -> None:
        proves(plan)
        small = isinstance(plan.programs, tuple)  # not lowered replica by replica
        if small and sum(len(program.instrs) for program in plan.programs) <= MOST_INSTRS:
            prove_on_streams(in_launch_order(plan.programs), plan.chunks)

    Plan.verify = both  # type: ignore[method-assign]
    yield
    Plan.verify = proves  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two processes, started by the first test that asks for them."""
    made = Pool(2)
    yield made
    made.close()


def _count(marker: pytest.Mark, least: int) -> int:
    """The number in `gpu(n)` or `dist(n)`; a marker without one is a mistake in the test."""
    if len(marker.args) != 1 or marker.kwargs or not isinstance(marker.args[0], int):
        raise pytest.UsageError(f"write @pytest.mark.{marker.name}(n) with one whole number")
    if marker.args[0] < least:
        raise pytest.UsageError(f"{marker.name}({marker.args[0]}): at least {least}")
    return marker.args[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs more CUDA devices than there are; checks the markers' arguments."""
    devices = torch.cuda.device_count()
    for item in items:
        for marker in item.iter_markers("dist"):
            _count(marker, least=2)
        needed = max((_count(m, least=1) for m in item.iter_markers("gpu")), default=0)
        if needed > devices:
            reason = f"needs {needed} CUDA devices, this machine has {devices}"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_unconfigure() -> None:
    """Removes the cache that this run made for itself."""
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)
