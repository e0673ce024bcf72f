"""Programs that tests use and that pip does not install: a browser, graphviz.

Where they are not, what needs them is skipped, unless PIPER_TEST_PROGRAMS=1 says that they must be.
"""

import os

import pytest

VARIABLE = "PIPER_TEST_PROGRAMS"


def need(**paths: str | None) -> None:
    """Skip a test, or fail it, where a program is not here.

    Args:
        paths: What `shutil.which` found, by the package that has it.
    """
    missing = [name.replace("_", "-") for name, path in paths.items() if path is None]
    if not missing:
        return
    why = f"not here: {', '.join(missing)} (Debian's packages of these names have it)"
    if os.environ.get(VARIABLE) == "1":
        pytest.fail(f"{why}, though {VARIABLE}=1", pytrace=False)
    pytest.skip(why)
