"""Packaging of piper-dynamo. Tool settings: pyproject.toml; tested versions: constraints.txt."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """The one place that states the version is piper_dynamo/version.py."""
    text = (ROOT / "piper_dynamo" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError('piper_dynamo/version.py has no line `__version__ = "..."`')
    return found[1]


setup(
    name="piper-dynamo",
    version=read_version(),
    description="A torch.compile backend: a model plus directives becomes a distributed program",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The Piper developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    # Listed one by one: passes, lowering and runtime are links to root folders, which package
    # discovery would either skip or ship a second time as top-level packages.
    packages=[
        "piper_dynamo",
        "piper_dynamo.checkpoint",
        "piper_dynamo.debug",
        "piper_dynamo.foreign",
        "piper_dynamo.ir",
        "piper_dynamo.kernels",
        "piper_dynamo.look",
        "piper_dynamo.lowering",
        "piper_dynamo.moe",
        "piper_dynamo.passes",
        "piper_dynamo.pictures",
        "piper_dynamo.predict",
        "piper_dynamo.runtime",
        "piper_dynamo.train",
    ],
    package_data={"piper_dynamo": ["py.typed"], "piper_dynamo.pictures": ["page.html"]},
    zip_safe=False,
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11,<2.15",
        "numpy",
        "click",
        "filelock",
        "matplotlib",
        "tqdm",
    ],
    extras_require={
        "test": [
            "expecttest",
            "hypothesis",
            "mypy",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ray",
            "ruff",
            "safetensors",
            "setuptools",  # torch imports it in places, and a test builds the wheel
            'triton; platform_system == "Linux"',  # kernels are interpreted, and compiled
        ],
        "models": ["peft", "transformers"],  # what examples/ train
        "bench": ["deepspeed"],  # a peer of the benchmarks
        "triton": ["triton"],
        "safetensors": ["safetensors"],
        "ray": ["ray"],
    },
    entry_points={
        "torch_dynamo_backends": ["piper = piper_dynamo.backend:piper"],
        "console_scripts": ["piper = piper_dynamo.cli:main"],
    },
    classifiers=[
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
