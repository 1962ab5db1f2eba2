"""What holds for every test.

Property tests have no clock, and in CI they draw the same examples every time. Ctrl-C can be tested wherever tests run:
a shell has it ignored in what it starts in the background, and children inherit that.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.loop import Loop

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    """For engines that outlive a test."""
    made = Loop()
    yield made
    made.close()
