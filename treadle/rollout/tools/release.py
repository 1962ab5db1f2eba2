"""Cleanup that must finish: shielded from cancellation, and bounded by a deadline.

Owns nothing else. Invariant: a caller who is cancelled meanwhile still gets the cancellation, after the cleanup.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from treadle.aio import abandon, returned

log = logging.getLogger(__name__)


async def see_through(work: Coroutine[Any, Any, None], deadline_s: float, what: str) -> None:
    """Run `work` to its end, or to the deadline, whatever happens to the caller. A failure is logged, not raised."""
    task = asyncio.create_task(returned(work), name=what)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and loop.time() < deadline:
        try:
            await asyncio.wait({task}, timeout=deadline - loop.time())
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.done():
        abandon(task)
        task.cancel()
        log.warning("%s did not finish within %g s and was abandoned", what, deadline_s)
    elif task.cancelled():
        log.warning("%s cancelled its own task", what)
    elif (failed := task.result()[1]) is not None:
        log.warning("%s failed", what, exc_info=failed)
    if cancelled is not None:
        raise cancelled
