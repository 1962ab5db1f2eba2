"""The `cluster` section: where processes run."""

from typing import Literal

from treadle.config.section import Options, Section, key


class ClusterConfig(Section):
    """This machine, or Ray."""

    backend: Literal["local", "ray"] = key("local", "local runs on this machine; ray on a Ray cluster")
    address: str | None = key(None, "address of a running Ray cluster; null starts one here")
    ray_init: Options = key({}, "further arguments for ray.init")
