"""New weights on their way to the engines, and the proof that they arrived."""

from treadle.weights.push import PushReport, send
from treadle.weights.sender import PolicySender, Sender, Transport

__all__ = ["PolicySender", "PushReport", "Sender", "Transport", "send"]
