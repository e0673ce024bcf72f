"""What a step holds beside what its plan says, and what saving costs.

make bench-state
make bench-state ARGS="--only activations --json results.json"

`activations`: `kept.py`. `saving`, `beside`: `saving.py`.
"""

from benchmarks import command
from benchmarks.kept import activations
from benchmarks.saving import PAIRS, beside, saving

SECTIONS: dict[str, command.Section] = {
    "activations": activations,
    "saving": saving,
    "beside": command.Fewer(PAIRS, beside),
}


if __name__ == "__main__":
    command.of_sections(SECTIONS)()
