"""Preflight checks: data, prompts, imports, tools, rewards, model, memory, disk, ports and keys, before a run.

Owns what is checked and in which order. Starts no engine and trains nothing. The quick part reads files, imports what
the config names, and scores the first task with reward functions in a worker process as they will be; the thorough part
also renders every prompt, starts MCP servers, reads the prompts of judges, and checks the model's parity.
Invariant: a check that finds mistakes does not keep the next one from running; what could not be checked is reported.
"""

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from treadle.aio import run_to_end
from treadle.cluster import missing_packages
from treadle.config import Config, DataConfig, RolloutConfig, SFTRunConfig, TrainConfig
from treadle.config.plugin import load_object
from treadle.data.renderer import Renderer
from treadle.data.rendering_parity import IGNORES_TOOLS
from treadle.data.task_feed import load_feed
from treadle.data.tasks import load_tasks
from treadle.engine.gpus import visible_gpus
from treadle.errors import ConfigError, Failure, Mistake, RunError
from treadle.exit_status import memory_limit
from treadle.model.config_file import describe_balancing_loss, refuse_quantized
from treadle.model.tokenizer import require_same_vocabulary, resolve_model_path
from treadle.observe.trackers import HOST, TRACKERS
from treadle.preflight import memory
from treadle.preflight.report import PreflightReport
from treadle.preflight.rewards import check_reward_models, check_rewards
from treadle.preflight.teacher import Schemas, check_teacher_prompts
from treadle.rollout.agent_loop import LoopFactory
from treadle.rollout.environments.schemes import ForeignEnvironments, find_environment
from treadle.rollout.startup_checks import check_promptless
from treadle.rollout.tools import Toolbox
from treadle.sandbox.providers import check_provider
from treadle.types import Task

QUICK_PROMPTS = 200
"""Prompts that fit, one after another from the longest text on, after which the quick part renders no more."""


def run_preflight(config: Config, environment: Mapping[str, str], *, thorough: bool) -> PreflightReport:
    """Everything that can be known about a run before it starts. `environment`: the variables it will see."""
    report = PreflightReport()
    if isinstance(config, SFTRunConfig):
        return _check_sft(config.without_sampling(), environment, report, thorough=thorough)
    report.add(missing_packages(config))
    sets = _check_data(config, report)
    tasks = [task for found in sets.values() for task in found]
    with report.gather():
        _check_imports(config)
    with report.gather():
        _check_loops(config, report)
    with report.gather():
        _check_environment(config, report, thorough=thorough)
    renderer: Renderer | None = None
    with report.gather():
        renderer = Renderer.create(config.model)
    schemas = run_to_end(_check_tools(config, tasks, report, thorough=thorough))
    if renderer is not None and tasks and schemas is not None:
        _check_prompts(config, renderer, tasks, schemas, report, thorough=thorough)
    else:
        report.skip("prompts, their lengths and the chat template", _why_unread(renderer, tasks))
    if renderer is not None and isinstance(config, TrainConfig):
        most = None if thorough else QUICK_PROMPTS
        with report.gather():
            check_teacher_prompts(config, renderer, _for_training(config, sets), schemas, report, most=most)
    _check_model(config, report, thorough=thorough)
    _check_context(config, environment, report)
    run_to_end(check_rewards(config, sets, report))
    if thorough:
        run_to_end(check_reward_models(config, renderer, environment, report))
        if config.reward.functions and not tasks:
            report.skip("scores of the first task", "no task could be read")
    return report


def _check_sft(
    config: SFTRunConfig, environment: Mapping[str, str], report: PreflightReport, *, thorough: bool
) -> PreflightReport:
    """Supervised fine-tuning: model, memory, disk, ports and keys; the thorough part also lays out every row."""
    if thorough:
        from treadle.cluster.sft import SFTData

        with report.gather():
            data = run_to_end(SFTData.load(config))
            for line in data.describe():
                subject, _, text = line.partition(" ")
                report.note(subject, text.strip())
            steps = config.total_steps(len(data.training.source))
            report.note("steps", f"{steps:,} of {config.data.train_batch_size} rows")
            report.warnings += [text for text in [data.describe_repeats(config.data.train_batch_size)] if text]
            first = next(iter(data.training.rows.values()))
            ids = (*first.prompt_ids, *first.ids)
            report.first_prompt, report.first_prompt_tokens = Renderer.create(config.model).decode(ids), len(ids)
    _check_model(config, report, thorough=thorough)
    _check_context(config, environment, report)
    return report


def _why_unread(renderer: Renderer | None, tasks: Sequence[Task]) -> str:
    if renderer is None:
        return "the model's tokenizer could not be loaded"
    return "its tools could not be loaded" if tasks else "no task could be read"


def _check_data(config: Config, report: PreflightReport) -> dict[str, list[Task]]:
    """Every row of every file, by the file or the key of several. Training tasks come first."""
    data, tasks = config.data, dict[str, list[Task]]()
    trains = isinstance(config, TrainConfig)
    for validation in (False, True):
        files = data.val_files if validation else data.train_files
        if not files and (validation or data.val_files):
            continue
        found = _read_tasks(files, data, report, validation=validation, weighted=trains)
        if found:
            sources = sorted({task.data_source for task in found if task.data_source})
            named = f", data sources: {', '.join(sources[:5])}{' …' if len(sources) > 5 else ''}" if sources else ""
            report.note("data", f"{len(found):,} tasks for {'validation' if validation else 'training'}{named}")
            _check_batch(config, len(found), validation, report)
            place = f"data.{'val' if validation else 'train'}_files" if len(files) > 1 else files[0]
            tasks[place] = tasks.get(place, []) + found
    source = report.tasks.training
    if trains and data.sampler is not None and source is not None:
        with report.gather():
            load_feed(source, data)
            report.note("sampler", data.sampler)
    return tasks


def _for_training(config: Config, sets: Mapping[str, Sequence[Task]]) -> list[Task]:
    """The tasks of files that are trained on."""
    places = {"data.train_files", *config.data.train_files}
    return [task for place, tasks in sets.items() if place in places for task in tasks]


def _read_tasks(
    files: Sequence[str], data: DataConfig, report: PreflightReport, *, validation: bool, weighted: bool
) -> list[Task]:
    """The tasks of all files, as they first come; with mistakes, those of each file that has none."""
    most = data.val_max_samples if validation else data.train_max_samples
    weights = data.train_weights if weighted and not validation else ()
    with report.gather():
        source = load_tasks(files, data, most, validation=validation, weights=weights)
        report.tasks = replace(report.tasks, **{"validation" if validation else "training": source})
        return [task for tasks in source.first_passes() for task in tasks]
    tasks: list[Task] = []
    for file in files if len(files) > 1 else ():
        with suppress(ConfigError):  # it is in the report
            tasks += load_tasks([file], data, most, validation=validation)
    return tasks


def _check_batch(config: Config, count: int, validation: bool, report: PreflightReport) -> None:
    batch = config.data.train_batch_size
    if isinstance(config, TrainConfig) and not validation and count < batch:
        report.warnings.append(f"data.train_batch_size {batch} is more than there are tasks: {count} repeat in a batch")


def _check_imports(config: Config) -> None:
    """The scripted engine's script, estimators and losses: what the config names by path beside loops."""
    mistakes: list[Mistake] = []
    named = [
        ("rollout.scripted.script", config.rollout.scripted.script if config.rollout.name == "scripted" else None),
    ]
    if isinstance(config, TrainConfig):
        named.append(("algorithm.adv_estimator", config.algorithm.adv_estimator))
        named.append(("actor.policy_loss.loss_mode", config.actor.policy_loss.loss_mode))
    for key, path in named:
        if path is not None and ":" in path:
            mistakes += _mistakes_of(load_object, path, key)
    if mistakes:
        raise ConfigError(mistakes)


def _check_loops(config: Config, report: PreflightReport) -> None:
    """Agent loops: found, built with their arguments, and able to run; on Ray, sessions may be on another machine."""
    found = LoopFactory(config.rollout).check()
    elsewhere = [mistake for mistake in found if mistake.missing and config.cluster.backend == "ray"]
    report.warnings += [f"{mistake.key}: {mistake.problem}, on this node" for mistake in elsewhere]
    report.add([mistake for mistake in found if mistake not in elsewhere])


def _check_environment(config: Config, report: PreflightReport, *, thorough: bool) -> None:
    """The environment: here, or in its own interpreter, which is started by the thorough part alone."""
    turns = config.rollout.multi_turn
    if turns.environment is None:
        return
    if turns.environment_python is None:
        find_environment(turns.environment)
    elif not thorough:
        report.skip("the environment", "its interpreter is started by `treadle check` and by the run only")
    else:
        run_to_end(_check_foreign_environment(config.rollout))


async def _check_foreign_environment(rollout: RolloutConfig) -> None:
    environments = await ForeignEnvironments.start(rollout)
    await environments.close()


def _mistakes_of(call: Any, *arguments: Any) -> Sequence[Mistake]:
    try:
        call(*arguments)
    except ConfigError as error:
        return error.mistakes
    return ()


async def _check_tools(
    config: Config, tasks: Sequence[Task], report: PreflightReport, *, thorough: bool
) -> Schemas | None:
    """The schemas of each set of tools that a task names; without MCP servers in the quick part."""
    multi_turn = config.rollout.multi_turn
    servers = multi_turn.mcp_servers
    if servers and not thorough:
        report.skip("tools of MCP servers", "they are started by `treadle check` and by the run only")
        return None
    try:
        if config.rollout.boxes_agents():
            await asyncio.to_thread(check_provider, "rollout.sandbox", config.rollout.sandbox, bridged=True)
        async with await Toolbox.create(multi_turn, config.rollout.sandbox) as toolbox:
            if toolbox.names:
                report.note("tools", ", ".join(toolbox.names))
            return {names: toolbox.schemas(names) for names in {task.tools for task in tasks}}
    except ConfigError as error:
        report.add(error.mistakes)
    except RunError as error:
        fix = "start it, install its command, or look at what it wrote"
        report.add([Mistake("rollout.multi_turn.mcp_servers", str(error), fix=fix, missing="MCP server")])
    except Failure as error:
        report.add([Mistake("rollout.multi_turn.tools", str(error))])
    return None


def _prompted(config: Config, tasks: Sequence[Task], report: PreflightReport) -> list[Task]:
    """The tasks that have a prompt; the others need an environment that writes one."""
    prompted = [task for task in tasks if task.messages]
    for task in tasks:
        report.add([] if task.messages else check_promptless(task, config.rollout)[:1])
    if not prompted:
        report.note("prompts", f"written by {config.rollout.multi_turn.environment or 'the agent loop'}")
    return prompted


def _check_prompts(
    config: Config,
    renderer: Renderer,
    tasks: Sequence[Task],
    schemas: Schemas,
    report: PreflightReport,
    *,
    thorough: bool,
) -> None:
    """How many tokens prompts have, and that the template takes them."""
    rollout, tasks = config.rollout, _prompted(config, tasks, report)
    if not tasks:
        return
    looked = list(tasks)
    if not thorough:
        looked.sort(key=lambda task: -sum(len(str(item.get("content"))) for item in task.messages))
    counts: dict[str, int] = {}
    fitting = 0
    for task in looked:
        try:
            ids = renderer.prompt(task.messages, schemas[task.tools])
        except Failure as failure:
            report.add([Mistake(task.uid, f"its prompt cannot be rendered: {failure}")])
            return
        counts[task.uid] = len(ids)
        fitting = 0 if len(ids) > rollout.prompt_length else fitting + 1
        if not thorough and fitting == QUICK_PROMPTS:
            break
    longest = max(counts, key=counts.__getitem__)
    room = f"rollout.prompt_length is {rollout.prompt_length:,}"
    report.note("prompts", f"at most {counts[longest]:,} tokens ({longest}); {room}")
    first = renderer.prompt(tasks[0].messages, schemas[tasks[0].tools])
    report.first_prompt, report.first_prompt_tokens = renderer.decode(first), len(first)
    if thorough and any(schemas.values()) and not renderer.parity.shows_tools:  # a run notes it itself
        report.warnings.append(IGNORES_TOOLS)
    late = sum(count > rollout.prompt_length for count in counts.values())
    if late and rollout.overlong_prompts == "error":
        problem = f"{late} of {len(tasks)} prompts are longer than {rollout.prompt_length} tokens: {longest} has "
        fix = f"raise it to {counts[longest]}, or set rollout.overlong_prompts to drop or truncate_left"
        key = "rollout.prompt_length"
        problem += f"{counts[longest]}"
        report.add([Mistake(key, problem, rollout.prompt_length, config.origin(key), fix)])
    elif late:
        what = "dropped" if rollout.overlong_prompts == "drop" else "cut"
        report.warnings.append(f"{late} of {len(tasks)} prompts are too long and are {what}: {longest} is the longest")


def _check_model(config: Config, report: PreflightReport, *, thorough: bool) -> None:
    """Weights that are there and fit, on a model that is computed as its authors wrote it."""
    if config.rollout.name in ("openai", "scripted") and not isinstance(config, TrainConfig):
        return
    model, directory = config.model, None
    with report.gather():
        directory = resolve_model_path(model.path, origin=model.origin("path"))
    if directory is None:
        skipped = "memory, disk and the model's parity" if thorough else "memory and disk"
        report.skip(skipped, f"there is no {model.path} here")
        return
    if isinstance(config, TrainConfig) and config.ref.path is not None:
        with report.gather():
            require_same_vocabulary(model, config.ref.path, "ref.path", config.origin("ref.path"))
    if isinstance(config, TrainConfig) or config.rollout.name == "native":
        with report.gather():
            refuse_quantized(model, directory)
    if isinstance(config, TrainConfig) and (balancing := describe_balancing_loss(model, directory)) is not None:
        report.warnings.append(f"model.path: {balancing}")
    size = memory.measure_model(directory, config.actor.lora if isinstance(config, TrainConfig) else None)
    if size is None:
        report.warnings.append(f"{directory} has no safetensors files: its size is not known")
    else:
        adapters = f", and {size.adapters / 1e6:,.2f} million in adapters, which alone train" if size.adapters else ""
        report.note("model", f"{size.parameters / 1e6:,.1f} million parameters{adapters}")
        _check_room(config, size, report, thorough=thorough)
    if thorough:
        with report.gather():
            _prove_model(config, directory, report)
        with report.gather():
            _check_lora_targets(config)


def _check_room(config: Config, size: memory.ModelSize, report: PreflightReport, *, thorough: bool) -> None:
    needs = memory.weight_bytes(config, size)
    parts = ", ".join(f"{name} {memory.describe_bytes(need)}" for name, need in needs.items())
    on_gpu = config.rollout.n_gpus_per_node or (isinstance(config, TrainConfig) and config.trainer.n_gpus_per_node)
    if not on_gpu:
        limit, whose = memory_limit()
        report.note("memory", f"weights: {parts}; {whose} has {memory.describe_bytes(limit)}")
        report.add(memory.check_memory(config, needs, limit, whose))
    elif thorough and visible_gpus():
        import torch

        total = int(torch.cuda.get_device_properties(0).total_memory)
        report.note("memory", f"weights, on each device: {parts}; a GPU has {memory.describe_bytes(total)}")
        report.add(memory.check_gpu_memory(config, needs, total))
    elif thorough:
        report.skip("memory of the GPUs", "none is visible here")
    if isinstance(config, TrainConfig):
        free = memory.free_bytes(Path(config.logging.directory()).absolute())
        one = memory.describe_bytes(memory.checkpoint_bytes(config, size))
        report.note("disk", f"{memory.describe_bytes(free)} free; a checkpoint has about {one}")
        report.add(memory.check_disk(config, size, free))


def _prove_model(config: Config, directory: Path, report: PreflightReport) -> None:
    """The parity check that a run makes as it loads the model."""
    from treadle.engine.native.parity import check_parity
    from treadle.model.load import check_length, load_model_config

    model, longest, native = config.model, config.rollout.sequence_length(), config.rollout.name == "native"
    found = load_model_config(model, directory)
    check_length(found, longest)
    if not native and not isinstance(config, TrainConfig):
        return
    if not model.parity_check:
        report.warnings.append(
            "model.parity_check is off: nothing shows that the model is computed as its authors wrote it"
        )
        return
    parity = check_parity(found, longest=longest, engine=native)
    if parity.problem is not None:
        fix = "see docs/models.md; model.parity_check=false runs it unchecked"
        raise ConfigError([Mistake("model.path", parity.problem, model.path, model.origin("path"), fix)])
    findings = {"policy": parity.policy, "engine": parity.engine}
    told = [f"{name} {part.logprobs:.0e}" for name, part in findings.items() if part and part.logprobs is not None]
    report.note("parity", f"logprobs of a small {parity.family} against its own forward, in nats: {', '.join(told)}")


def _check_lora_targets(config: Config) -> None:
    """The modules that get adapters, asked of the model itself, with no memory behind its weights."""
    if not isinstance(config, TrainConfig) or config.actor.lora.r is None or config.model.adapter is not None:
        return
    import torch

    from treadle.model.lora import find_targets
    from treadle.policy.hf_model import build_meta_model

    find_targets(build_meta_model(config.model, torch.float32), config.actor.lora)


def _check_context(config: Config, environment: Mapping[str, str], report: PreflightReport) -> None:
    """Trackers, ports and keys."""
    report.add(_missing_trackers(config))
    report.add(_taken_port(config))
    report.add(_missing_keys(config, environment))


def _missing_trackers(config: Config) -> Iterator[Mistake]:
    for name in config.logging.logger:
        if name in TRACKERS and find_spec(name) is None:
            origin, fix = config.origin("logging.logger"), f"pip install 'treadle[{name}]'"
            yield Mistake("logging.logger", f"{name} is not installed", name, origin, fix, "package")


def _taken_port(config: Config) -> Iterator[Mistake]:
    port, key = config.logging.prometheus_port, "logging.prometheus_port"
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            problem = f"cannot listen on {HOST}: {error.strerror}"
            yield Mistake(key, problem, port, config.origin(key), "choose another port", "free port")


def _missing_keys(config: Config, environment: Mapping[str, str]) -> Iterator[Mistake]:
    """Keys of endpoints beyond this network that no variable holds."""
    endpoints = []
    if config.rollout.name == "openai":
        endpoints.append(("rollout.openai", config.rollout.openai))
    for name, classifier in config.reward.classifiers.items():
        if classifier.placement == "endpoint":
            endpoints.append((f"reward.classifiers.{name}.endpoint", classifier.endpoint))
    for name, judge in config.reward.judges.items():
        if judge.engine.name == "openai":
            endpoints.append((f"reward.judges.{name}.engine.openai", judge.engine.openai))
    for key, openai in endpoints:
        if _is_public(openai.base_url) and not environment.get(openai.api_key_env):
            problem = f"the environment variable {openai.api_key_env} is not set, and {openai.base_url} wants a key"
            variable = openai.api_key_env
            yield Mistake(f"{key}.api_key_env", problem, variable, None, f"export {variable}=…", "API key")


def _is_public(url: str | None) -> bool:
    host = urlsplit(url or "").hostname or "localhost"
    try:
        return ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith((".local", ".internal", ".localhost", ".svc"))
