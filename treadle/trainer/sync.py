"""The synchronous schedule: rollout and training take turns, so every token comes from the weights it trains.

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
    async with run.working():
        while run.step < run.total_steps:
            run.allow(run.step + 1)
            with run.spans("rollout"):
                batch = await run.take()
            with run.spans("train"):
                report = await run.train(batch)
            with run.spans("weights"):
                await run.push()
            await run.end_step(report, batch)
        await run.finish()
