"""An event loop in a thread, so that one engine can outlive the tests that use it."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

PATIENCE_S = 300.0


class Loop:
    """Started by its constructor; `close` ends it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
