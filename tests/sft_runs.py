"""Small runs of supervised fine-tuning on the bundled model, for tests."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treadle.cluster.sft import SFTResult, fine_tune
from treadle.cluster.signals import StopSignals
from treadle.config import SFTRunConfig, loads

MODEL = "treadle/tiny-calculator"


def write_rows(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(file)


def sums(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Sums with answers of different lengths, in both forms that rows may have."""
    rows: list[dict[str, Any]] = []
    for at in range(start, start + count):
        prompt, answer = f"{at * 37}+1=", f"#### {at * 37 + 1}"
        if at % 2:
            rows.append({"prompt": prompt, "response": answer})
        else:
            said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            rows.append({"messages": said})
    return rows


def sft_config(directory: Path, *words: str, rows: list[dict[str, Any]] | None = None) -> SFTRunConfig:
    """Twelve rows, four in a step, six steps."""
    directory.mkdir(parents=True, exist_ok=True)
    train = write_rows(directory / "train.jsonl", sums(12) if rows is None else rows)
    held_out = write_rows(directory / "held_out.jsonl", sums(4, 40))
    text = f"""
model: {{path: {MODEL}}}
data: {{train_files: [{train}], val_files: [{held_out}], train_batch_size: 4}}
actor: {{dtype: fp32, ppo_max_token_len_per_gpu: 64, optim: {{lr: 1.0e-3, lr_scheduler_type: cosine}}}}
trainer: {{total_epochs: 2}}
checkpoint: {{save_every_s: null}}
logging: {{logger: [], run_dir: {directory / "run"}}}
sft: {{}}
"""
    config = loads(text, "sft.yaml", words)
    assert isinstance(config, SFTRunConfig)
    return config


class Steps:
    """A view that keeps the losses, and asks for a stop after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.losses: dict[int, float] = {}
        self.validations: dict[int, float] = {}
        self.resumed: int | None = None
        self.total = 0
        self._stop_after = stop_after
        self.signals: StopSignals | None = None

    def watch(self, phase: Callable[[], str]) -> None: ...

    def begin(self, total_steps: int) -> None:
        self.total = total_steps

    def resume(self, step: int) -> None:
        self.resumed = step

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.losses[step] = metrics["sft/loss"]
        if step == self._stop_after:
            assert self.signals is not None
            self.signals.request()

    def on_validation(self, step: int, success: float) -> None: ...

    def on_validation_loss(self, step: int, loss: float) -> None:
        self.validations[step] = loss


def run_sft(config: SFTRunConfig, view: Steps | None = None, **options: Any) -> SFTResult:
    shown = view or Steps()

    def keep(signals: StopSignals) -> None:
        shown.signals = signals

    return asyncio.run(fine_tune(config, shown, on_signals=keep, **options))
