"""Config rules: what must hold between keys, beyond each key's own type; all checked after loading.

Each rule is a generator of mistakes and names the two values that clash. Rules read devices from no machine; the plan
does that.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from treadle.config.reward import (
    foreign_functions_can_run,
    group_rewards_are_whole,
    reward_models_are_whole,
    scores_are_bounded,
)
from treadle.config.rollout import AGENT_LOOPS
from treadle.config.root import SAMPLERS, Config, DataConfig, SFTRunConfig, TrainConfig
from treadle.config.sandbox import box_is_whole
from treadle.config.section import TARGET, Section
from treadle.config.show import flatten
from treadle.config.training_rules import SFT_RULES, TRAINING_CAUTIONS, TRAINING_RULES
from treadle.config.validate import Bounds, Clashes
from treadle.errors import Mistake, nearest


class UnknownValueRead(Exception):
    """A rule read a value that is unknown, since it has a mistake of its own."""


class _Unknown:
    """Placeholder of a value that has a mistake of its own: any use of it ends the rule."""

    def _stop(self, *_: object) -> NoReturn:
        raise UnknownValueRead

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __str__ = __format__ = _stop
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __floordiv__ = _stop
    __rfloordiv__ = __iter__ = __len__ = __contains__ = __getattr__ = _stop


UNKNOWN: Any = _Unknown()


def check_rules(config: Config) -> list[Mistake]:
    """Every clash between the values of a config."""
    training: tuple[Callable[..., Clashes], ...] = TRAINING_RULES if isinstance(config, TrainConfig) else ()
    rules = [*ROLLOUT_RULES, *(SFT_RULES if isinstance(config, SFTRunConfig) else training)]
    return [_mistake(config, *clash) for rule in rules for clash in _known(rule(config))]


def check_cautions(config: Config) -> list[Mistake]:
    """What works and is perhaps not meant: a warning each, and never a reason to stop."""
    samples = isinstance(config, TrainConfig) and not isinstance(config, SFTRunConfig)
    rules: list[Callable[..., Clashes]] = list(TRAINING_CAUTIONS if samples else ())
    return [_mistake(config, *clash) for rule in rules for clash in _known(rule(config))]


def _known(clashes: Clashes) -> Clashes:
    try:
        yield from clashes
    except UnknownValueRead:
        return


def _mistake(config: Config, name: str, problem: str, fix: str | None) -> Mistake:
    value: object = config
    for part in name.split("."):
        if part == TARGET:
            value = type(value).__name__
        else:
            value = getattr(value, part) if isinstance(value, Section) else value[part]  # type: ignore[index]
    return Mistake(name, problem, value, config.origin(name), fix)


def sequence_fits(config: Config) -> Clashes:
    rollout = config.rollout
    needed = rollout.trajectory_length()
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        problem = f"{rollout.max_model_len} is less than prompt_length + response_length = {needed}"
        yield "rollout.max_model_len", problem, f"raise it to {needed}, or leave it null"
    longest, at_once = rollout.sequence_length(), rollout.max_num_batched_tokens
    if not rollout.enable_chunked_prefill and at_once < longest:
        problem = f"{at_once} holds no sequence of {longest} tokens, and enable_chunked_prefill is false"
        yield "rollout.max_num_batched_tokens", problem, f"raise it to {longest}, or split prompts"


def engine_takes_arguments(config: Config) -> Clashes:
    given = {"rollout.engine_kwargs": config.rollout.engine_kwargs}
    given |= {
        f"reward.judges.{name}.engine.engine_kwargs": it.engine.engine_kwargs
        for name, it in config.reward.judges.items()
    }
    for place, by_engine in given.items():
        for engine in by_engine:
            if engine != "vllm":
                problem = f"{engine} takes no further arguments: vllm alone does"
                yield place, problem, "write {vllm: {name: value}}, or leave it out"


def engine_has_its_devices(config: Config) -> Clashes:
    rollout = config.rollout
    shares = isinstance(config, TrainConfig) and rollout.nnodes == 0
    if shares and rollout.n_gpus_per_node:
        problem = f"{rollout.n_gpus_per_node}, but rollout.nnodes is 0, so the rollout shares the trainer's devices"
        yield "rollout.n_gpus_per_node", problem, "set rollout.nnodes for devices of its own, or leave this 0"
    elif rollout.n_gpus_per_node and not rollout.uses_gpus():
        yield "rollout.n_gpus_per_node", f"{rollout.n_gpus_per_node}, but {rollout.name} uses no GPU", "leave it 0"
    else:
        yield from _engine_is_split_evenly(config, shares)


def _engine_is_split_evenly(config: Config, shares: bool) -> Clashes:
    rollout = config.rollout
    devices = config.trainer if shares and isinstance(config, TrainConfig) else rollout
    gpus = devices.n_gpus_per_node if rollout.uses_gpus() else 0
    split, where = rollout.tensor_model_parallel_size, "trainer" if shares else "rollout"
    if split > 1 and (gpus % split or not gpus):
        problem = f"{split} does not divide {where}.n_gpus_per_node {devices.n_gpus_per_node}"
        fix = "an engine lives on one node" if gpus > split else f"{gpus} GPUs hold no engine of {split}"
        yield "rollout.tensor_model_parallel_size", problem, fix
    if split > 1 and rollout.name == "native":
        problem = f"{split}, but an engine of rollout.name native runs on one GPU"
        yield "rollout.tensor_model_parallel_size", problem, "leave it 1, or set rollout.name=vllm"
    if gpus and rollout.replicas_per_node > 1:
        problem = f"{rollout.replicas_per_node}, but with {gpus} GPUs a node has {gpus // split}"
        yield "rollout.replicas_per_node", problem, "leave it 1: it counts engines that use no GPU"
    elif shares and config.cluster.backend == "local" and rollout.replicas_per_node > 1:
        problem = f"{rollout.replicas_per_node}, but one engine shares the trainer's devices (rollout.nnodes is 0)"
        yield "rollout.replicas_per_node", problem, "leave it 1, or set rollout.nnodes=1 for engines of their own"


def endpoint_is_named(config: Config) -> Clashes:
    if config.rollout.name == "openai" and not config.rollout.openai.base_url:
        fix = "give the endpoint, as http://host:port/v1"
        yield "rollout.openai.base_url", "is needed by rollout.name: openai", fix


def faults_are_fractions(config: Config) -> Clashes:
    scripted = config.rollout.scripted
    if scripted.failure_rate + scripted.hang_rate > 1:
        problem = f"{scripted.hang_rate:g}, and failure_rate {scripted.failure_rate:g}, are together more than 1"
        yield "rollout.scripted.hang_rate", problem, "lower one of them"


def agent_loop_exists(config: Config) -> Clashes:
    agent, multi_turn = config.rollout.agent, config.rollout.multi_turn
    name, known = agent.default_agent_loop, [*AGENT_LOOPS, *agent.loops]
    if name not in known and Bounds(names=()).problem(name):
        problem = f"no agent loop is called {name!r}; there are {', '.join(known)}"
        fix = nearest(name, known) or "or give an import path (package.module:Class)"
        yield "rollout.agent.default_agent_loop", problem, fix
    if name == "environment_agent" and name not in agent.loops and not multi_turn.environment:
        fix = "give the import path of an environment (package.module:Class)"
        yield "rollout.multi_turn.environment", "is needed by the agent loop environment_agent", fix
    if multi_turn.environment_python is not None and multi_turn.environment is None:
        fix = "set rollout.multi_turn.environment, or leave it out"
        yield "rollout.multi_turn.environment_python", "is an interpreter for an environment, and there is none", fix
    for at, loop in agent.loops.items():
        if loop.path is None and at not in AGENT_LOOPS:
            fix = nearest(at, AGENT_LOOPS) or "give the import path of a class, as package.module:Class"
            yield f"rollout.agent.loops.{at}.path", f"is needed: no loop called {at!r} comes with treadle", fix
    needed = {"program_agent": "argv", "function_agent": "function", "verifiers_agent": "python"}.get(name)
    if needed and name not in agent.loops:
        fix = f"set rollout.agent.loops.{name}.kwargs.{needed}"
        yield "rollout.agent.default_agent_loop", f"{name} needs to know what to run", fix


def opponents_can_play(config: Config) -> Clashes:
    rollout = config.rollout
    if not rollout.multi_turn.opponents:
        if rollout.multi_turn.opponent_share != 1.0:
            problem = f"{rollout.multi_turn.opponent_share:g}, but there are no rollout.multi_turn.opponents"
            yield "rollout.multi_turn.opponent_share", problem, "name some, or leave it out"
        return
    if rollout.multi_turn.environment is None:
        problem = "play in an environment of several agents, and there is no environment"
        yield "rollout.multi_turn.opponents", problem, "set rollout.multi_turn.environment"
    if rollout.name == "openai":
        problem = "are engines of their own, and rollout.name is openai"
        yield "rollout.multi_turn.opponents", problem, "use rollout.name: native or vllm"
    if config.cluster.backend == "ray":
        problem = "play on the machine of the driver, and the rollout runs on Ray"
        yield "rollout.multi_turn.opponents", problem, "use cluster.backend: local"


def gateway_has_an_address(config: Config) -> Clashes:
    gateway = config.rollout.gateway
    if gateway.host in ("0.0.0.0", "::", "") and "{host}" in gateway.url:
        problem = f"{gateway.host!r} listens on every address of this machine, and is none that an agent could be given"
        fix = "set rollout.gateway.url to the address that agents see, such as http://172.17.0.1:{port}"
        yield "rollout.gateway.host", problem, fix
    try:
        gateway.url.format(host="h", port=1)
    except (KeyError, IndexError, ValueError):
        yield "rollout.gateway.url", "is a template of {host} and {port}", "write braces that are meant as such twice"


def every_worker_has_sessions(config: Config) -> Clashes:
    agent = config.rollout.agent
    places = agent.max_concurrent_sessions
    if places is not None and places < (agent.num_workers or 1):
        problem = f"{places} is less than rollout.agent.num_workers {agent.num_workers}"
        yield "rollout.agent.max_concurrent_sessions", problem, "every worker needs at least one"


def mcp_servers_have_command_or_url(config: Config) -> Clashes:
    for name, server in config.rollout.multi_turn.mcp_servers.items():
        if bool(server.command) == bool(server.url):
            given = "both are set" if server.url else "neither is set"
            yield f"rollout.multi_turn.mcp_servers.{name}.url", f"give command or url: {given}", None


def groups_can_be_complete(config: Config) -> Clashes:
    n, least = config.rollout.n, config.rollout.failures.min_group_size
    if least > n:
        problem = f"{least} is more than rollout.n {n}: no group could have enough"
        yield "rollout.failures.min_group_size", problem, f"at most {n}"


def cluster_is_asked_for(config: Config) -> Clashes:
    cluster = config.cluster
    if cluster.backend != "ray":
        for name, value in (("address", cluster.address), ("ray_init", cluster.ray_init)):
            if value:
                yield (
                    f"cluster.{name}",
                    f"is given, but cluster.backend is {cluster.backend}",
                    "set cluster.backend=ray",
                )


def several_nodes_need_ray(config: Config) -> Clashes:
    nodes = {"rollout.nnodes": config.rollout.nnodes}
    if isinstance(config, TrainConfig):
        nodes["trainer.nnodes"] = config.trainer.nnodes
    for name, count in nodes.items():
        if count > 1 and config.cluster.backend == "local":
            problem = f"{count}, but cluster.backend local is this machine alone"
            yield name, problem, "set cluster.backend=ray, or ask for one node"


def reward_models_can_score(config: Config) -> Clashes:
    yield from scores_are_bounded(config.reward)
    yield from reward_models_are_whole(config.reward)
    yield from foreign_functions_can_run(config.reward)
    yield from group_rewards_are_whole(config.reward)


def every_file_has_a_weight(config: Config) -> Clashes:
    """`data.train_weights` has one number for each entry of `data.train_files`, in their order."""
    files, weights = config.data.train_files, config.data.train_weights
    if weights and len(weights) != len(files):
        problem = f"{len(weights)} weights for {len(files)} entries of data.train_files"
        yield "data.train_weights", problem, "give one number for each entry, in the same order"


def sampler_has_its_settings(config: Config) -> Clashes:
    """Settings of a task sampler that is not the one chosen would be ignored in silence."""
    data = config.data
    if data.success_band.low > data.success_band.high:
        problem = f"{data.success_band.low} is more than data.success_band.high {data.success_band.high}"
        yield "data.success_band.low", problem, None
    if data.sampler_kwargs and (data.sampler is None or data.sampler in SAMPLERS):
        fix = "they are for an import path in data.sampler; built-in samplers have sections of their own"
        yield "data.sampler_kwargs", f"are not used by data.sampler {data.sampler or 'null'}", fix
    unset, settings = flatten(DataConfig()), flatten(data)
    for name in SAMPLERS:
        for key in (key for key in settings if key.startswith(f"{name}.") and data.sampler != name):
            if settings[key] != unset[key]:
                problem = f"is not used by data.sampler {data.sampler or 'null'}"
                yield f"data.{key}", problem, f"set data.sampler={name}, or leave it out"


def boxes_are_whole(config: Config) -> Clashes:
    yield from box_is_whole("rollout.sandbox", config.rollout.sandbox)
    yield from box_is_whole("reward.sandbox", config.reward.sandbox)


def engines_take_an_adapter(config: Config) -> Clashes:
    """Engines that load the weights themselves merge no adapter; in training they are sent merged weights."""
    name, adapter = config.rollout.name, config.model.adapter
    if adapter is None or name == "native" or (name == "vllm" and isinstance(config, TrainConfig)):
        return
    if name == "vllm":
        problem = "vLLM reads the weights of model.path by itself: the adapter would not be in them"
        fix = "merge it first (treadle export RUN DIR of the run that trained it), or set rollout.name=native"
    else:
        problem, fix = f"has no effect: rollout.name {name} reads no weights from here", "leave it out"
    yield "model.adapter", problem, fix


ROLLOUT_RULES: tuple[Callable[[Config], Clashes], ...] = (
    sequence_fits,
    engine_takes_arguments,
    engine_has_its_devices,
    endpoint_is_named,
    faults_are_fractions,
    agent_loop_exists,
    opponents_can_play,
    gateway_has_an_address,
    every_worker_has_sessions,
    mcp_servers_have_command_or_url,
    groups_can_be_complete,
    cluster_is_asked_for,
    several_nodes_need_ray,
    reward_models_can_score,
    every_file_has_a_weight,
    sampler_has_its_settings,
    boxes_are_whole,
    engines_take_an_adapter,
)
