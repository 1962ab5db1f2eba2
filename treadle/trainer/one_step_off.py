"""One step off: the next batch is sampled while this one trains, so every token is one policy version old.

         batch N                batch N+1              batch N+2
rollout  ├─ sample with v(N-1) ─┼─ sample with v(N) ───┼─ ...
trainer  ├─ train batch N-1 ────┼─ train batch N ──────┼─ ...
                                ▲ push: both have ended, so no session sees two weights
rollout  waits for the push
step     waits for every group of its batch, sampled during the step before
push     waits for the step and for the batch; nothing is being sampled then. Where an engine was started again, and the
         batch may wait for its weights, the push waits for the step alone
"""

from treadle.trainer.run import Run


async def train_one_step_off(run: Run) -> None:
    """Train until the run's steps are done."""
    await run.start()
    async with run.working():
        run.allow(run.step + 1)
        while run.step < run.total_steps:
            with run.spans("rollout"):
                batch = await run.take()
            with run.spans("weights"):
                await run.push()
            run.allow(run.step + 2)
            with run.spans("train"):
                report = await run.train(batch)
            await run.end_step(report, batch)
        await run.finish()
