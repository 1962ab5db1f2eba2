"""Sandbox of reward functions: processes that are limited, fenced off, and killed.

    process.py    the parent's side: start a worker, ask it, watch it, kill it
    worker.py     the process itself; a sandboxed function runs in a child of it, one for each score
    protocol.py   setup, report, requests and replies
    limits.py     CPU and memory
    (kernel fences: treadle.sandbox.confine)
    code.py       `run_python`, for rewards that run the code a model wrote

What is protected from whom: SECURITY.md.
"""

from treadle.reward.sandbox.code import CodeResult, run_python

__all__ = ["CodeResult", "run_python"]
