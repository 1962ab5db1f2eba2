"""Environment of a command: the machines to plan for, the API keys that a config names by variable, and a grader's key.

Machines are this one, those of a Ray cluster, or those given as `8x4`. Keys are read from the environment here and
nowhere else.
"""

import os
import re
import stat
import sys
from typing import TYPE_CHECKING

from treadle.errors import ConfigError, Mistake

if TYPE_CHECKING:
    from treadle.config import ClusterConfig, Config, Machine


def find_machines(cluster: "ClusterConfig") -> list["Machine"]:
    """Machines of the cluster whose address is given, or this one."""
    if cluster.backend == "local" or cluster.address is None:
        from treadle.engine.gpus import this_machine

        return [this_machine()]
    from treadle.cluster.ray import require_ray

    require_ray(cluster)
    from treadle.cluster.ray import connection

    return connection.find_machines(cluster)


def described_machines(words: list[str]) -> list["Machine"]:
    """Machines from words such as `8x4`: eight of them, with four GPUs each."""
    from treadle.config import Machine

    machines: list[Machine] = []
    for word in words:
        found = re.fullmatch(r"(\d{1,5})x(\d{1,3})", word)
        if not found or int(found.group(1)) == 0:
            raise ConfigError(
                [Mistake("--machines", f"{word!r} is not COUNTxGPUS", fix="write 8x4 for 8 with 4 GPUs each")]
            )
        machines += [Machine(f"node{len(machines) + at}", int(found.group(2))) for at in range(int(found.group(1)))]
    return machines


NOTES_KEY = "TREADLE_NOTES_KEY"
"""Variable of the key for rewards and notes."""


def read_notes_key(given: str | None, path: str | None) -> str | None:
    """The key for rewards and notes: as given, of a file, of standard input (`-`), or of the environment; None of none.

    A command line is read by every user of the machine, so a file that others can read is refused, too.
    """
    if path is None:
        return given or os.environ.get(NOTES_KEY) or None
    option = "--notes-key-file"
    if given is not None:
        raise ConfigError([Mistake(option, "is a second key beside --notes-key", path, fix="give one of the two")])
    try:
        if path == "-":
            key = sys.stdin.readline().strip()
        else:
            with open(path, encoding="utf-8") as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise ConfigError([Mistake(option, "others can read it", path, fix=f"chmod 600 {path}")])
                key = file.readline().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError([Mistake(option, f"cannot be read: {error}", path)]) from error
    if not key:
        raise ConfigError([Mistake(option, "is empty", path, fix="its first line is the key")])
    return key


def read_api_keys(config: "Config") -> dict[str, str]:
    """API keys that are set, by variable."""
    variables = (config.rollout.openai.api_key_env, *config.reward.api_key_variables())
    return {name: os.environ[name] for name in variables if os.environ.get(name)}
