"""The files of this repository, for the tests that check the repository itself."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def source_files(*suffixes: str) -> list[Path]:
    """Files of the repository, relative to its root: tracked ones and new ones not ignored.

    Args:
        *suffixes: Only files that end so, e.g. ".py"; none: all files.
    """
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = {Path(line) for line in listed.stdout.splitlines()}
    else:  # an unpacked archive
        names = {path.relative_to(ROOT) for path in ROOT.rglob("*")}
    wanted = (n for n in names if not suffixes or n.suffix in suffixes)
    return sorted(n for n in wanted if (ROOT / n).is_file())
