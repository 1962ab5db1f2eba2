"""Training schedules: sync, one step off, fully async. `trainer.mode` names one.

A schedule decides what waits for what, and trains until the run's steps are done; the work is the trainer's.
"""

from collections.abc import Awaitable, Callable, Mapping

from treadle.trainer.trainer import Trainer


async def train_sync(trainer: Trainer) -> None:
    """Rollout and training take turns, so every token comes from the weights it trains.

    tasks ──► rollout ──► step ──► push ──┐
      ▲                                   │
      └───────────────────────────────────┘
    rollout  waits for the engine's confirmation of the weights
    step     waits for every group of the batch
    push     waits for the optimizer
    """
    await trainer.start()
    async with trainer.working():
        while trainer.step < trainer.total_steps:
            trainer.allow(trainer.step + 1)
            with trainer.spans("rollout"):
                batch = await trainer.take()
            with trainer.spans("train"):
                report = await trainer.train(batch)
            with trainer.spans("weights"):
                await trainer.push()
            await trainer.end_step(report, batch)
        await trainer.finish()


async def train_one_step_off(trainer: Trainer) -> None:
    """The next batch is sampled while this one trains, so every token is one policy version old.

             batch N                batch N+1              batch N+2
    rollout  ├─ sample with v(N-1) ─┼─ sample with v(N) ───┼─ ...
    trainer  ├─ train batch N-1 ────┼─ train batch N ──────┼─ ...
                                    ▲ push: both have ended, so no session sees two weights
    rollout  waits for the push
    step     waits for every group of its batch, sampled during the step before
    push     waits for the step and for the batch; nothing is being sampled then
    """
    await trainer.start()
    async with trainer.working():
        trainer.allow(trainer.step + 1)
        while trainer.step < trainer.total_steps:
            with trainer.spans("rollout"):
                batch = await trainer.take()
            with trainer.spans("weights"):
                await trainer.push()
            trainer.allow(trainer.step + 2)
            with trainer.spans("train"):
                report = await trainer.train(batch)
            await trainer.end_step(report, batch)
        await trainer.finish()


async def train_fully_async(trainer: Trainer) -> None:
    """Rollout and training run side by side, and no token is trained that is older than the bound.

    tasks ──admit──► sessions ──► ready groups ──► step ──► push ─┐
              ▲                                                   │
              └───────────── batches the new weights allow ◄──────┘
    admission  waits for weights that are at most `trainer.max_staleness` versions older than those its batch will train
    step       waits for as many groups as a batch has, among them all that would be too old for the next
    push       waits for the step; open sessions go on with the new weights, or as `trainer.on_weight_update` says
    With a bound of 0 a batch is admitted when its own weights have arrived: that is the synchronous schedule.
    """
    await trainer.start()
    async with trainer.working():
        trainer.allow(trainer.step + 1 + trainer.staleness_bound)
        while trainer.step < trainer.total_steps:
            with trainer.spans("rollout"):
                batch = await trainer.take()
            with trainer.spans("train"):
                report = await trainer.train(batch)
            if trainer.push_is_due:
                with trainer.spans("weights"):
                    await trainer.push()
                trainer.allow(trainer.step + 2 + trainer.staleness_bound)
            await trainer.end_step(report, batch)
        await trainer.finish()


SCHEDULES: Mapping[str, Callable[[Trainer], Awaitable[None]]] = {
    "sync": train_sync,
    "one_step_off": train_one_step_off,
    "fully_async": train_fully_async,
}
