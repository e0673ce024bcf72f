"""What a step holds beside what its plan says, and what saving costs.

make bench-state
make bench-state ARGS="--only activations --json results.json"

`activations`: `kept.py`. `saving`, `beside`: `saving.py`.
"""

from collections.abc import Callable, Iterator

from benchmarks import command
from benchmarks.kept import activations
from benchmarks.report import Row
from benchmarks.saving import beside, saving

SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "activations": activations,
    "saving": saving,
    "beside": beside,
}


if __name__ == "__main__":
    command.of_sections(SECTIONS)()
