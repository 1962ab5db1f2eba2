"""Hubs: tasks of environments that other projects keep, listed by an interpreter that has them.

Owns `verifiers:NAME` and how its interpreter is asked. A task is a key of the taskset; its prompt here is for readers.
The agent loop `verifiers_agent` plays it: prompt, tools, harness and reward are the taskset's own.
Waits: for the interpreter, `LIST_TIMEOUT_S` at most.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError, Mistake
from treadle.types import Task

VERIFIERS_PREFIX = "verifiers:"
VERIFIERS_SHIM = Path(__file__).with_name("verifiers_shim.py")
VERIFIERS_LOOP = "verifiers_agent"

LIST_TIMEOUT_S = 600.0
"""Tasksets may download their data when they are listed."""

_LOCAL: Mapping[str, Any] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""verifiers' agent where nothing else is asked for: a chat loop on this machine."""


def verifiers_env(name: str, env: Mapping[str, Any]) -> str:
    """verifiers' env config as JSON: the taskset by name, and what is asked for beside that."""
    taskset = {"id": name, **env.get("taskset", {})}
    return json.dumps({"agent": _LOCAL, **env, "taskset": taskset}, sort_keys=True)


def list_verifiers_tasks(source: str, options: Mapping[str, Any], key: str) -> Iterator[Task]:
    """The tasks of a taskset; a ConfigError says why there are none."""
    name = source.removeprefix(VERIFIERS_PREFIX)
    where = f"data.source_kwargs.{name}"
    python, env, unknown = options.get("python"), options.get("env", {}), options.keys() - {"python", "env"}
    if unknown:
        raise ConfigError([Mistake(where, f"takes python and env, not {', '.join(sorted(unknown))}")])
    if not isinstance(python, str) or not Path(python).is_file():
        fix = "give the interpreter of an environment with verifiers: {python: /opt/verifiers/bin/python}"
        raise ConfigError([Mistake(f"{where}.python", "must be an interpreter that has verifiers", python, fix=fix)])
    if not isinstance(env, Mapping):
        raise ConfigError([Mistake(f"{where}.env", "must be a map: verifiers' env config", env)])
    command = [python, str(VERIFIERS_SHIM), "tasks", verifiers_env(name, env)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIST_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError([Mistake(key, f"verifiers took over {LIST_TIMEOUT_S:.0f} s to list it", source)]) from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        problem = f"verifiers cannot list it: {said[-1][:400] if said else f'status {done.returncode}'}"
        raise ConfigError([Mistake(key, problem, source, fix=f"install its package where {python} finds it")])
    for row in json.loads(done.stdout.strip().splitlines()[-1])["tasks"]:
        extra = {"verifiers": {"taskset": name, "key": row["key"]}}
        messages = ({"role": "user", "content": row["prompt"]},)
        yield Task(f"{source}:{row['key'][:32]}", messages, data_source=source, agent=VERIFIERS_LOOP, extra=extra)
