"""One interpreter process a test session."""

from collections.abc import Iterator

import pytest

from tests.ops.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    pytest.importorskip("triton")
    running = Interpreter()
    yield running
    running.close()
