"""Training schedules: sync, one step off, fully async. `trainer.mode` names one.

sync: rollout and training take turns, so every token comes from the weights it trains.

tasks ──► rollout ──► step ──► push ──┐
  ▲                                   │
  └───────────────────────────────────┘
rollout  waits for the engine's confirmation of the weights
step     waits for every group of the batch
push     waits for the optimizer

one_step_off: the next batch is sampled while this one trains, so every token is one policy version old.

         batch N                batch N+1              batch N+2
rollout  ├─ sample with v(N-1) ─┼─ sample with v(N) ───┼─ ...
trainer  ├─ train batch N-1 ────┼─ train batch N ──────┼─ ...
                                ▲ push: both have ended, so no session sees two weights
rollout  waits for the push
step     waits for every group of its batch, sampled during the step before
push     waits for the step and for the batch; nothing is being sampled then

fully_async: rollout and training go on side by side, and no token is trained that is older than the bound.

tasks ──admit──► sessions ──► ready groups ──► step ──► push ─┐
          ▲                                                   │
          └───────────── batches the new weights allow ◄──────┘
admission  waits for weights that are at most `trainer.max_staleness` versions older than those its batch will train
step       waits for as many groups as a batch has, among them all that would be too old for the next
push       waits for the step; open sessions go on with the new weights, or as `trainer.on_weight_update` says
With a bound of 0 a batch is admitted when its own weights have arrived: that is the synchronous schedule.
"""

from collections.abc import Awaitable, Callable, Mapping

from treadle.trainer.trainer import Trainer


async def train_sync(run: Trainer) -> None:
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


async def train_one_step_off(run: Trainer) -> None:
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


async def train_fully_async(run: Trainer) -> None:
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


SCHEDULES: Mapping[str, Callable[[Trainer], Awaitable[None]]] = {
    "sync": train_sync,
    "one_step_off": train_one_step_off,
    "fully_async": train_fully_async,
}
