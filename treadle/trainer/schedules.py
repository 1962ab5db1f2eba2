"""The schedules by the name that `trainer.mode` has for them. Knows nothing of what they do."""

from collections.abc import Awaitable, Callable, Mapping

from treadle.trainer.fully_async import train_fully_async
from treadle.trainer.one_step_off import train_one_step_off
from treadle.trainer.run import Run
from treadle.trainer.sync import train_sync

SCHEDULES: Mapping[str, Callable[[Run], Awaitable[None]]] = {
    "sync": train_sync,
    "one_step_off": train_one_step_off,
    "fully_async": train_fully_async,
}
