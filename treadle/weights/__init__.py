"""New weights on their way to the engines, and the proof that they arrived."""

from treadle.weights.push import PushReport, push

__all__ = ["PushReport", "push"]
