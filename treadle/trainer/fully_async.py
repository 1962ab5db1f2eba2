"""Fully asynchronous: rollout and training go on side by side, and no token is trained that is older than the bound.

tasks ──admit──► sessions ──► ready groups ──► step ──► push ─┐
          ▲                                                   │
          └───────────── batches the new weights allow ◄──────┘
admission  waits for weights that are at most `trainer.max_staleness` versions older than those its batch will train
step       waits for as many groups as a batch has, among them all that would be too old for the next
push       waits for the step; sessions that are open go on with the new weights, or as `trainer.on_weight_update` says
With a bound of 0 a batch is admitted when its own weights have arrived: that is the synchronous schedule.
"""

from treadle.trainer.run import Run


async def train_fully_async(run: Run) -> None:
    """Train until the run's steps are done."""
    await run.start()
    async with run.working():
        run.allow(run.step + 1 + run.lag)
        while run.step < run.total_steps:
            with run.spans("rollout"):
                batch = await run.take()
            with run.spans("train"):
                report = await run.train(batch)
            if run.push_is_due:
                with run.spans("weights"):
                    await run.push()
                run.allow(run.step + 2 + run.lag)
            await run.end_step(report, batch)
        await run.finish()
