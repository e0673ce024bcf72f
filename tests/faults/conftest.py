"""What passes keep is checked by other tests at the highest level; here programs are run."""

import pytest


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structure only between passes; the proof of programs always runs."""
    monkeypatch.setenv("PIPER_VERIFY", "1")
