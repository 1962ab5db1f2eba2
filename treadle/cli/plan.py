"""`treadle plan`: what a config would do, before it does it."""

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from treadle.cli.parser import Arguments, Commands, add_command, add_words, load_words
from treadle.terminal import say

if TYPE_CHECKING:
    from treadle.config import Config, Plan, SFTRunConfig
    from treadle.config.placement import RewardPlacement
    from treadle.config.plan import BatchPlan


def register(commands: Commands) -> None:
    examples = """
    examples:
      treadle plan calculator
      treadle plan my.yaml cluster.backend=ray trainer.nnodes=8 trainer.n_gpus_per_node=8 --machines 8x8
      treadle plan my.yaml cluster.backend=ray cluster.address=10.0.0.1:6379    for the machines of that cluster
    """
    command = add_command(commands, "plan", plan, examples)
    add_words(command)
    described = "plan for these instead of this machine, as 8x4 for eight with four GPUs each; may be repeated"
    command.add_argument("--machines", action="append", metavar="COUNTxGPUS", help=described)
    command.add_argument("--json", action="store_true", help="print the plan as JSON")


def plan(arguments: Arguments) -> None:
    """Print the placement, how batches divide and how stale samples get; starts nothing."""
    from treadle.cli.environment import described_machines, find_machines
    from treadle.config import make_plan

    config = load_words(arguments.words)
    machines = described_machines(arguments.machines) if arguments.machines else find_machines(config.cluster)
    made = make_plan(config, machines)
    say(json.dumps(asdict(made), indent=2) if arguments.json else describe_plan(config, made))


def describe_plan(config: "Config", plan: "Plan") -> str:
    """A plan in words."""
    from treadle.config import SFTRunConfig, TrainConfig
    from treadle.config.transport import describe_transport

    if isinstance(config, SFTRunConfig):
        return _describe_sft_plan(config, plan)
    rows = [("mode", "rollout that stands alone" if plan.mode == "rollout" else plan.mode)]
    rows += [("where" if at == 0 else "", str(placement)) for at, placement in enumerate(plan.placements)]
    devices = f"{_count(plan.gpus_per_replica, 'GPU')} each" if plan.gpus_per_replica else "on CPU"
    sharing = ", sharing the trainer's devices" if plan.shares_devices else ""
    if plan.weights == "own" and plan.batches and plan.batches.ranks > 1 and plan.gpus_per_replica:
        sharing = " of the trainer's: the others wait while it samples; rollout.name=vllm samples on all of them"
    rows.append(("engines", f"{plan.replicas} × {config.rollout.name}, {devices}{sharing}"))
    at_once = f"the engines decode {plan.replicas * config.rollout.max_num_seqs:,} sequences at once"
    rows.append(("sessions", f"{plan.places:,} open at most; {at_once}"))
    if plan.mode not in ("sync", "rollout"):
        rows += _validation_rows(config, plan)
    if plan.rewards is not None:
        rows += _reward_rows(plan.rewards)
    if plan.unused_gpus:
        section = "trainer" if plan.batches else "rollout"
        more = f"raise {section}.n_gpus_per_node or {section}.nnodes to use more"
        rows.append(("unused", f"{_count(plan.unused_gpus, 'GPU')}: {more}"))
    if isinstance(config, TrainConfig):
        rows.append(("weights", describe_transport(config)))
    rows += _sandbox_rows(config)
    rows += _batch_rows(plan.batches) if plan.batches else [("samples", f"{config.rollout.n} per task")]
    if plan.batches:
        rows.append(("", _describe_prefixes(config)))
    if plan.staleness:
        rows.append(("staleness", f"{plan.staleness} policy version{'' if str(plan.staleness) == '1' else 's'}"))
    return "\n".join(f"{name:10} {text}" for name, text in rows)


def _sandbox_rows(config: "Config") -> list[tuple[str, str]]:
    """Which provider runs what models write, and what it does not protect from; it is tried, with a box that ends."""
    from treadle.reward.unsafe_calls import find_fenced
    from treadle.sandbox.providers import check_provider

    rows: list[tuple[str, str]] = []
    for key, section, used, bridged in (
        ("rollout.sandbox", config.rollout.sandbox, config.rollout.uses_sandbox(), config.rollout.boxes_agents()),
        ("reward.sandbox", config.reward.sandbox, config.reward.uses_sandbox(), False),
    ):
        if used:
            first, *more = check_provider(key, section, bridged).describe()
            rows += [("boxes" if not rows else "", f"{key}: {first}"), *(("", text) for text in more)]
    return rows + [
        ("" if rows or at else "boxes", f"reward {text}") for at, text in enumerate(find_fenced(config.reward))
    ]


def _describe_sft_plan(config: "SFTRunConfig", plan: "Plan") -> str:
    rows = [("mode", "supervised fine-tuning")]
    rows += [("where" if at == 0 else "", str(placement)) for at, placement in enumerate(plan.placements)]
    budget = config.actor.ppo_max_token_len_per_gpu
    ranks = _count(config.trainer.num_ranks(), "rank")
    rows.append(("batch", f"{config.data.train_batch_size} rows → 1 optimizer step, over {ranks}"))
    rows.append(("", f"→ on each micro batches of up to {budget:,} tokens"))
    return "\n".join(f"{name:10} {text}" for name, text in rows)


def _reward_rows(rewards: "RewardPlacement") -> list[tuple[str, str]]:
    shared = f", shared with {rewards.shared_with}" if rewards.shared_with else ""
    texts = [f"{name}: {replace(rewards.placement, gpus=gpus).place()}{shared}" for name, gpus in rewards.gpus.items()]
    return [("rewards" if at == 0 else "", text) for at, text in enumerate(texts)]


def _validation_rows(config: "Config", plan: "Plan") -> list[tuple[str, str]]:
    """Where validation between steps happens, and what waits for it."""
    from treadle.config import TrainConfig
    from treadle.config.placement import reward_gpu_requests
    from treadle.config.plan import validates_beside

    if not isinstance(config, TrainConfig) or not validates_beside(config):
        return []
    if plan.validation is not None:
        return [("validation", f"beside training: 1 × {config.rollout.name}, {plan.validation.place()}")]
    full = any(wish.share > 0.5 for wish in reward_gpu_requests(config))
    why = "its reward models leave no room for more of them" if full else "no GPU is left for one of its own"
    return [
        ("validation", f"beside training, on the rollout's engines: {why}"),
        ("", "sampling and training go on; the next push of weights waits until all validation tasks are done"),
    ]


def _describe_prefixes(config: "Config") -> str:
    """Whether rows share their prefixes, and by which key."""
    if config.model.shared_prefix == "off":
        return "→ every row computed by itself (model.shared_prefix=off)"
    if not config.model.parity_check:
        return "→ every row computed by itself: model.parity_check=false leaves shared prefixes untried"
    return "→ a prefix that rows share counts and computes once, if the parity check finds it the same"


def _batch_rows(batches: "BatchPlan") -> list[tuple[str, str]]:
    steps = _count(batches.optimizer_steps, "optimizer step")
    ranks = _count(batches.ranks, "rank")
    micro = _count(batches.max_micro_batches, "micro batch", "micro batches")
    return [
        ("batch", f"{batches.tasks} tasks × {batches.samples} samples = {batches.trajectories} trajectories"),
        ("", f"→ {steps} of {batches.trajectories // batches.mini_batches} trajectories, over {ranks}"),
        ("", f"→ on each at most {micro} of up to {batches.tokens_per_micro_batch:,} tokens"),
    ]


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
