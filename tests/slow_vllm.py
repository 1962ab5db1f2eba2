"""A vLLM worker that takes its time, so that a test can interrupt it. Only vLLM's own processes import this."""

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

STEP_S = 0.02


class SlowWorker(CPUWorker):
    def execute_model(self, *arguments: Any, **named: Any) -> Any:
        time.sleep(STEP_S)
        return super().execute_model(*arguments, **named)
