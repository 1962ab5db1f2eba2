"""Moved to `treadle.engine.channel`."""

from treadle.engine.channel import Answer, Ask, Channel, ChannelClosed, Peer, Withdraw

__all__ = ["Answer", "Ask", "Channel", "ChannelClosed", "Peer", "Withdraw"]
