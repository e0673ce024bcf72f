"""The layout keeps its promises: import direction, file sizes, packaging, names.

Terms: a *layer* is a part of the package that may import only some others. The IR knows nothing
of the passes, the passes nothing of lowering, the runtime only the program it executes.
"""

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.source_tree import ROOT, source_files

LINKED = ("lowering", "passes", "runtime")
MAX_LINES = 600

# Modules that join the parts; everything else must be usable without them.
FACADE = frozenset(
    {
        *(
            "",
            "__main__",
            "access",
            "accumulation",
            "adoption",
            "agreement",
            "api",
            "backend",
            "binding",
        ),
        *(
            "captured",
            "checkpoint",
            "cli",
            "debug",
            "differences",
            "examination",
            "finite",
            "look",
            "looking",
            "loss_weights",
            "measure",
            "meeting",
            "on_device",
            "planning",
            "records",
            "predict",
            "programs",
            "public",
            "step",
            "survey",
            "train",
            "weights",
        ),
    }
)
# Modules that import no other part: every layer may use them.
COMMON = frozenset(
    {
        "errors",
        "version",
        "_torch_compat",
        "_torch_dynamo",
        "_torch_inductor",
        "blocks",
        "kernels.launching",
        "kernels.pack",
    }
)


def module_name(path: Path) -> str:
    """`passes/split.py` is `piper_dynamo.passes.split`."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "piper_dynamo" else ("piper_dynamo", *parts))


PACKAGE_FILES = {
    module_name(path): path
    for path in source_files(".py")
    if path.parts[0] in ("piper_dynamo", *LINKED)
}


def imported_modules(module: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import statement, also those inside functions."""
    path = ROOT / PACKAGE_FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in PACKAGE_FILES else base


def layer_of(module: str) -> str:
    """The part that a module of the package belongs to."""
    part = module.removeprefix("piper_dynamo").removeprefix(".").partition(".")[0]
    if part in FACADE:
        return "facade"
    return part if part in ("ir", *LINKED) else "base"


def may_import(module: str, other: str) -> bool:
    """Whether the import direction lets `module` import `other`, both of this package."""
    name = other.removeprefix("piper_dynamo.")
    layer, target = layer_of(module), layer_of(other)
    match layer:
        case "facade":
            return True
        case "ir":
            return target == "ir" or name in COMMON
        case "passes":
            return target in ("passes", "ir", "base")
        case "lowering":
            return target in ("lowering", "passes", "ir", "base")
        case "runtime":
            return target == "runtime" or name in COMMON or name in ("ir.program", "ir.streams")
        case _:
            return target in ("base", "ir")


def test_imports_go_one_way():
    wrong = [
        f"{PACKAGE_FILES[module]}:{line} imports {other}"
        for module in PACKAGE_FILES
        for line, other in imported_modules(module)
        if other.partition(".")[0] == "piper_dynamo" and not may_import(module, other)
    ]
    assert not wrong, "ir <- passes <- lowering; runtime: only programs\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "other", "allowed"),
    [
        ("piper_dynamo.ir.graph", "piper_dynamo.errors", True),
        ("piper_dynamo.ir.graph", "piper_dynamo.passes.split", False),
        ("piper_dynamo.passes.split", "piper_dynamo.ir.graph", True),
        ("piper_dynamo.passes.split", "piper_dynamo.lowering.emit", False),
        ("piper_dynamo.lowering.emit", "piper_dynamo.passes.split", True),
        ("piper_dynamo.lowering.emit", "piper_dynamo.runtime.executor", False),
        ("piper_dynamo.runtime.executor", "piper_dynamo.ir.program", True),
        ("piper_dynamo.runtime.executor", "piper_dynamo.ir.graph", False),
        ("piper_dynamo.strategy", "piper_dynamo.passes.split", False),
        ("piper_dynamo.capture", "piper_dynamo", False),
        ("piper_dynamo.train.loop", "piper_dynamo", True),
        ("piper_dynamo.backend", "piper_dynamo.runtime.executor", True),
    ],
)
def test_import_rule(module: str, other: str, allowed: bool):
    assert may_import(module, other) is allowed


@pytest.mark.parametrize(
    ("words", "completed", "shown"),
    [
        (["--version"], "", "0."),
        (["train", "--help"], "", "--schedule"),
        (["bench", "--help"], "", "SUITES"),
        ([], "piper --vers", "--version"),
    ],
)
def test_the_command_line_starts_without_torch(words: list[str], completed: str, shown: str):
    """Importing torch takes seconds."""
    code = (
        "import sys, atexit; from piper_dynamo.cli import main\n"
        "def check():\n    print('torch' in sys.modules)\n"
        f"atexit.register(check); main({words!r}, prog_name='piper')"
    )
    environment = dict(os.environ)
    if completed:
        environment |= {"_PIPER_COMPLETE": "bash_complete", "COMP_WORDS": completed}
        environment["COMP_CWORD"] = str(len(completed.split()) - 1)
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown in found.stdout
    assert found.stdout.splitlines()[-1] == "False"


def test_public_names_are_no_files():
    """Python puts a module that is imported in the place of what else had its name."""
    names = set(importlib.import_module("piper_dynamo").__all__)
    modules = {"debug", "moe", "schedules", "strategies"}
    assert {n for n in names if f"piper_dynamo.{n}" in PACKAGE_FILES} == modules


@pytest.mark.slow
def test_public_names_come_at_their_first_use():
    code = (
        "import piper_dynamo.moe.layer, piper_dynamo as piper; from piper_dynamo import debug; "
        "assert 'Place' in dir(piper); piper.annotate('PP', 0); "
        "from piper_dynamo import *; annotate('PP', 1); assert Place is piper.Place; "
        "assert piper.schedules.gpipe and not hasattr(piper, 'plane')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def setup_arguments() -> dict[str, Any]:
    """The literal arguments of `setup(...)`."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    call = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "setup"
    )
    literal = (ast.List, ast.Dict)
    found = {
        k.arg: ast.literal_eval(k.value) for k in call.keywords if isinstance(k.value, literal)
    }
    return {key: value for key, value in found.items() if key is not None}


def distribution(requirement: str) -> str:
    """`torch>=2.11` is torch; names compare as the packaging rules say."""
    return re.split(r"[<>=!~ ;\[]", requirement)[0].lower().replace("_", "-")


def test_runtime_needs_only_torch():
    allowed = {"torch", "piper_dynamo"} | set(sys.stdlib_module_names)
    wrong = [
        f"{PACKAGE_FILES[module]}:{line} imports {other}"
        for module in PACKAGE_FILES
        if layer_of(module) == "runtime"
        for line, other in imported_modules(module)
        if other.partition(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_requirements_are_the_imports():
    used = {
        other.partition(".")[0] for module in PACKAGE_FILES for _, other in imported_modules(module)
    } - (set(sys.stdlib_module_names) | {"piper_dynamo", "functorch"})  # functorch is in torch
    arguments = setup_arguments()
    always = {distribution(r) for r in arguments["install_requires"]}
    extras = {distribution(arguments["extras_require"][e][0]) for e in ("triton", "ray")}
    assert always - used == set(), "required but not imported"
    assert used - always - extras == set(), "imported but not required"


def test_every_requirement_is_pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    arguments = setup_arguments()
    asked = {distribution(r) for r in arguments["install_requires"]}
    asked |= {distribution(r) for r in arguments["extras_require"]["test"]}
    assert asked <= {distribution(pin) for pin in pins}


def test_files_are_short():
    counts = {p: len((ROOT / p).read_bytes().splitlines()) for p in source_files(".py")}
    long = [f"{path}: {n} lines" for path, n in counts.items() if n > MAX_LINES]
    assert not long, f"over {MAX_LINES} lines, so it holds two concepts:\n" + "\n".join(long)


def test_packages_are_the_folders():
    folders = {m for m, path in PACKAGE_FILES.items() if path.name == "__init__.py"}
    loose = {m.rpartition(".")[0] for m in PACKAGE_FILES} - {""} - folders
    assert not loose, "folders without __init__.py"
    assert sorted(setup_arguments()["packages"]) == sorted(folders)


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative(name: str):
    assert os.readlink(ROOT / "piper_dynamo" / name) == os.path.join("..", name)


@pytest.mark.parametrize("name", LINKED)
def test_root_packages_refuse_other_names(name: str):
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: this package is piper_dynamo.{name}, not '{name}'" in done.stderr


def test_entry_points_are_registered():
    assert setup_arguments()["entry_points"] == {
        "torch_dynamo_backends": ["piper = piper_dynamo.backend:piper"],
        "console_scripts": ["piper = piper_dynamo.cli:main"],
    }
    try:
        entry_points = importlib.metadata.distribution("piper-dynamo").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("a bare checkout: piper-dynamo is not installed here")
    (backend,) = entry_points.select(group="torch_dynamo_backends", name="piper")
    (command,) = entry_points.select(group="console_scripts", name="piper")
    assert callable(backend.load())
    assert callable(command.load())


def test_torch_finds_the_backend_by_itself():
    try:
        importlib.metadata.distribution("piper-dynamo")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("a bare checkout: piper-dynamo is not installed here")
    code = (
        "import sys, torch\n"
        "assert 'piper_dynamo' not in sys.modules\n"
        "double = torch.compile(lambda x: x * 2, backend='piper')\n"
        "assert double(torch.ones(3)).tolist() == [2, 2, 2]\n"
        "assert 'piper_dynamo' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_wheel_holds_real_packages(tmp_path: Path):
    source, built, installed = tmp_path / "source", tmp_path / "built", tmp_path / "installed"
    # A copy, so that the checkout gets no build folder; the links stay links.
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("piper_dynamo", *LINKED):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(built)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = built.glob("piper_dynamo-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(installed)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"piper_dynamo"}
    files = {
        p if p.parts[0] == "piper_dynamo" else "piper_dynamo" / p for p in PACKAGE_FILES.values()
    }
    assert {name for name in names if name.endswith(".py")} == {p.as_posix() for p in files}
    assert {"piper_dynamo/py.typed", "piper_dynamo/pictures/page.html"} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    check = (
        "import piper_dynamo, piper_dynamo.lowering, piper_dynamo.passes, piper_dynamo.runtime\n"
        f"assert piper_dynamo.__file__.startswith({str(installed)!r}), piper_dynamo.__file__\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
