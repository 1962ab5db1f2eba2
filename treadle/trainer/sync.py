"""The synchronous schedule: rollout and training take turns, so every sample comes from the weights it trains.

tasks ──► rollout ──► step ──► push ──┐
  ▲                                   │
  └───────────────────────────────────┘
rollout  waits for the engine's confirmation of the weights
step     waits for every group of the batch
push     waits for the optimizer
"""

from treadle.trainer.run import Run


async def train_sync(run: Run) -> None:
    """Train until the run's steps are done."""
    await run.start()
    while run.step < run.total_steps:
        with run.spans("rollout"):
            groups = await run.collect()
        with run.spans("train"):
            report = await run.train(groups)
        with run.spans("weights"):
            await run.push(report.version)
        await run.end_step(report, groups)
    await run.finish()
