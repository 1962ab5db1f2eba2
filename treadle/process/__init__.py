"""Processes that work for this one: one channel, one RPC, one launcher, one entry point, one supervisor.

    channel.py      framed channel over a socket, with an asyncio end and a blocking end
    codec.py        JSON and raw arrays, checked field by field: what a process that ran foreign code may send
    rpc.py          requests, notifications and cancellations over a channel
    launcher.py     starts a process and ends it; `Launcher` is what a cluster implements too
    child_main.py   the child: `python -m treadle.process`, which runs a `serve` function
    foreign.py      another interpreter, for code whose packages fight with ours; its calls, and what becomes of it
    foreign_main.py the child in another interpreter, standard library alone: objects by import path
    supervisor.py   restarts, with back-off, and giving up
    interrupt_watcher.py kills this process where code holds the interpreter and Ctrl-C is not heard
    tree.py         process trees: list, kill, adopt, end with the parent

A new kind of process is a `serve(parent, setup)` function in the folder of what it serves, and a `ProcessSpec` that
names it. Pickles travel from parent to child, and back only from processes that run our own code alone.
"""
