"""Fixtures of the host shim's own tests."""

import pytest
from host_device import missing_tools


@pytest.fixture(autouse=True, scope="session")
def _tools():
    if reason := missing_tools():
        pytest.skip(reason)
