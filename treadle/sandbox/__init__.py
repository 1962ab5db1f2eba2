"""Sandboxes: boxes in which commands that a model wrote run, on this machine.

    protocol.py        Sandbox, ExecResult, the settings of a box
    providers.py       which provider a config gets, and what that does not protect from
    bubblewrap.py      namespaces, without privileges; the default
    landlock.py        fences around a directory of this machine; landlock_init.py is its process
    container.py       podman and docker
    box.py             the host's side of all of them; init/ runs the commands, inside
    bridge.py          one service of this machine, reached from a box without a network; forwarder.py is its inner end
    egress.py          the proxy that leads to the hosts of a list, and counts what it refuses
    pool.py            boxes that wait, started
    cgroup.py          memory and processes, counted over a box
    confine.py         the kernel's calls: seccomp, Landlock, an empty network

What is protected from whom: SECURITY.md, docs/sandbox.md.
"""
