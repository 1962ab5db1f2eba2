"""The learning rate at each training step. Pure arithmetic: the step's number is the whole state.

Steps are training steps, counted from 1. Warm-up rises in equal parts and reaches the peak at its last step, so the
first step is not wasted. What falls starts after it (`wsd`: so that the given fraction of all steps is left), and would
touch its lowest point one step after the last.
"""

from math import cos, pi

from treadle.config.actor import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of training step `step`, from 1 to `total_steps`."""
    assert step >= 1, "training steps are counted from 1"
    warmup = warmup_steps(optim, total_steps)
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    start = warmup
    if optim.lr_scheduler_type == "wsd":
        start = max(warmup, total_steps - round(optim.wsd_decay_ratio * total_steps))
    done = min(1.0, max(0, step - 1 - start) / max(1, total_steps - start))
    height = (1 + cos(pi * 2 * optim.num_cycles * done)) / 2 if optim.lr_scheduler_type == "cosine" else 1 - done
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * height)


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """How many steps warm up: as many as are given, or else the given fraction of all."""
    return optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)
