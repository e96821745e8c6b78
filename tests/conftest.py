"""Fixtures that every test file may use."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The gate must judge a change, not the draw of the day; elsewhere every run draws new examples.
settings.register_profile("gate", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("gate")

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repo() -> Path:
    """Root of the repository."""
    return REPO


@pytest.fixture(scope="session")
def shared() -> Path:
    """Recorded data beside the checkout, too large to copy; a plain clone skips the tests that use it."""
    folder = REPO.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared beside this checkout")
    return folder
