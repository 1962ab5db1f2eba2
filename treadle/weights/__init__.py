"""New weights on their way to the engines, and the proof that they arrived."""

from treadle.weights.sync import PolicySender, PushReport, Transport, WeightSender, WeightSync

__all__ = ["PolicySender", "PushReport", "Transport", "WeightSender", "WeightSync"]
