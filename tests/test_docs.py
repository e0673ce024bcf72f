"""The documents are true: their Python runs, their commands exist, the files they name are there.

A document's ```python blocks are one script, run from top to bottom in an empty folder. A block is
left out only if the line above it is a comment that says why. Commands may need a file of the page:

    <!-- test: skip needs two GPUs -->
    <!-- test: file table.csv -->
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.source_tree import ROOT, source_files

DOCUMENTS = [path.as_posix() for path in source_files(".md")]

_BLOCK = re.compile(
    r"(?:^<!--[ ]test:[ ](?P<note>[^\n]*?)[ ]?-->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)
_INLINE = re.compile(r"`([^`\n]+)`")
_WORDS = r"[a-z][a-z0-9-]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a document; `line` is where its code starts."""

    language: str
    code: str
    note: str | None
    line: int


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    return [
        Block(
            language=found["language"],
            code=found["code"],
            note=found["note"],
            line=text.count("\n", 0, found.start("code")) + 1,
        )
        for found in _BLOCK.finditer(text)
    ]


def script(text: str) -> str:
    """The document's Python with its line numbers, so that a traceback points into the document."""
    lines: list[str] = []
    for block in blocks(text):
        if block.language == "python" and block.note is None:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.code.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def command_lines(text: str) -> list[str]:
    """Every shell command of a document: the lines of its shell blocks, and its inline code."""
    lines = [
        line.removeprefix("$ ").strip()
        for block in blocks(text)
        if block.language in ("sh", "bash", "console", "shell")
        for line in block.code.replace("\\\n", " ").splitlines()
    ]
    lines += _INLINE.findall(_BLOCK.sub("", text))
    return lines


def make_targets_named(text: str) -> set[str]:
    calls = (re.match(rf"(?:\w+=\S+ )*make ({_WORDS})\b", line) for line in command_lines(text))
    return {found[1] for found in calls if found}


def piper_commands_named(text: str) -> list[list[str]]:
    """The words after `piper` in each command that calls it."""
    found = (
        re.match(r"(?:\w+=\S+ )*(?:piper|python -m piper_dynamo) (.+)", line)
        for line in command_lines(text)
    )
    return [match[1].split() for match in found if match]


def make_targets() -> set[str]:
    return set(re.findall(rf"^({_WORDS}):(?!=)", read("Makefile"), flags=re.MULTILINE))


# Whose blocks, or commands, start several jobs or go through many plans.
LONG_BLOCKS = {
    f"docs/{n}.md"
    for n in (
        "cuda",
        "debugging",
        "experts",
        "initial-values",
        "launch",
        "loss",
        "memory",
        "models",
        "numerics",
        "prediction",
        "state",
        "zero",
    )
}
LONG_COMMANDS = {f"docs/{name}.md" for name in ("interop", "memory", "prediction")}


def quick_but(long: set[str], documents: list[str]) -> list[Any]:
    """The documents as cases, those of `long` among the slow tests."""
    return [pytest.param(d, marks=[pytest.mark.slow] * (d in long)) for d in documents]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "document", quick_but(LONG_BLOCKS, [d for d in DOCUMENTS if script(read(d))])
)
def test_python_blocks_run(document: str, tmp_path: Path):
    # The document's own name, so that a traceback reads README.md:41. Processes that the script
    # starts import it again by that path.
    # Not the bare name: cuda.py would be found in the place of a package that torch looks for.
    path = tmp_path / f"{Path(document).stem}_md.py"
    path.write_text(script(read(document)), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, path.name], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{document}\n{done.stdout}\n{done.stderr}"
    if document == "README.md":  # a job of two processes that ends well adds nothing of its own
        assert not done.stderr, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_notes_say_why(document: str):
    for block in blocks(read(document)):
        if block.note is not None:
            is_known = re.fullmatch(r"skip \w+.*\w+.*|file [\w.]+", block.note)
            assert is_known, f"{document}:{block.line - 2}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str):
    assert make_targets_named(read(document)) <= make_targets()


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if piper_commands_named(read(d))])
def test_piper_commands_exist(document: str):
    from benchmarks import suites
    from piper_dynamo.cli import main

    assert isinstance(main, click.Group)
    for name, *words in piper_commands_named(read(document)):
        assert name in main.commands, f"piper {name}"
        asked = (
            suites.main if name == "bench" else main.commands[name]
        )  # which hands over the words
        options = {o for parameter in asked.params for o in parameter.opts}
        for word in words:
            if word.startswith("-"):
                assert word.partition("=")[0] in options | {"--help"}, f"piper {name} {word}"


LOOKING = ("plan", "check", "plot", "compare", "explain", "profile", "search", "convert")


def looking_commands(text: str) -> list[list[str]]:
    """The commands in a document's shell blocks that look at plans, as their words."""
    lines = [
        line
        for block in blocks(text)
        if block.language == "sh" and block.note is None
        for line in block.code.splitlines()
    ]
    calls = (re.match(r"(?:piper|python -m piper_dynamo) (.+)", line) for line in lines)
    found = [shlex.split(call[1], comments=True) for call in calls if call]
    return [words for words in found if words[0] in LOOKING]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "document", quick_but(LONG_COMMANDS, [d for d in DOCUMENTS if looking_commands(read(d))])
)
def test_looking_commands_run(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the document's Python as the file that it calls `example.py`."""
    from piper_dynamo.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPER_VERIFY", "1")
    (tmp_path / "example.py").write_text(script(read(document)), encoding="utf-8")
    for block in blocks(read(document)):
        kind, _, name = (block.note or "").partition(" ")
        if kind == "file":
            (tmp_path / name).write_text(block.code, encoding="utf-8")
    for words in looking_commands(read(document)):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, f"piper {' '.join(words)}\n{done.output}\n{done.exception}"


def files_named(text: str) -> list[str]:
    """Inline code that reads as a file or folder of this repository; `<name>.py` does not."""
    path = re.compile(r"(?:[\w.-]+/)+[\w.-]*|[a-z_][\w-]*\.(?:py|md|txt|toml)")
    codes = (code for code in _INLINE.findall(_BLOCK.sub("", text)) if path.fullmatch(code))
    return [code for code in codes if not code.startswith("runs/")]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_exist(document: str):
    """A path counts from the root or the package; a bare file name may lie anywhere."""
    names = {path.name for path in source_files()}
    missing = [
        code
        for code in files_named(read(document))
        if not (ROOT / code).exists() and not (ROOT / "piper_dynamo" / code).exists()
        if "/" in code or code not in names
    ]
    assert not missing, f"{document} names {missing}"


EXAMPLE = """\
Text with `make test` and `piper train --steps 3`.

```python
a = 1
```

<!-- test: skip it needs two GPUs -->
```python
raise SystemExit
```

```sh
PYTHON=python make train
piper plan --json
```

```python
print(a)
```
"""


def test_blocks_of_a_document():
    assert script(EXAMPLE) == "\n" * 3 + "a = 1\n" + "\n" * 13 + "print(a)\n"
    assert [b.note for b in blocks(EXAMPLE)] == [None, "skip it needs two GPUs", None, None]
    assert make_targets_named(EXAMPLE) == {"test", "train"}
    assert sorted(piper_commands_named(EXAMPLE)) == [["plan", "--json"], ["train", "--steps", "3"]]


def test_each_form_of_elsewhere_is_converted_as_a_module():
    """In both directions where there are two; these lines are run with the page's others."""
    lines = [
        line.split("#")[0].split()
        for block in blocks(read("docs/interop.md"))
        for line in block.code.splitlines()
        if line.startswith("python -m piper_dynamo convert")
    ]
    assert [[Path(name).suffix for name in words[4:]] for words in lines] == [
        [".py", ".csv"],
        [".csv", ".json"],
        [".json", ".json"],
    ]
    assert all(words[3:] in looking_commands(read("docs/interop.md")) for words in lines)


def test_readme_names_the_main_commands():
    first_screen = "\n".join(read("README.md").splitlines()[:30])
    assert {"train", "test"} <= make_targets_named(first_screen)
    targets = {"help", "env", "train", "test", "test-slow", "test-torch", "test-models"}
    targets |= {"bench-pipeline", "bench-zero", "bench-experts", "bench-plan", "bench-init"}
    targets |= {"bench", "bench-counts", "bench-predict"}
    targets |= {"bench-state", "bench-launch"}
    targets |= {"fuzz", "fuzz-train", "soak", "docs", "lint", "format", "clean"}
    assert targets == make_targets()
