"""Laptop configs: a migrated config with the bundled model on a few small sums, to see it run before it has GPUs.

Keeps what decides how is learned: estimator, losses, sampling, rewards of the script, schedule. Replaces model, tasks
and sizes; leaves out machines, engines' own arguments and what names files of another machine.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import yaml

from treadle.config import loads

_HEADER = """\
# train.yaml with the bundled model, a few small sums and no GPU: to see that rewards and settings work. That model
# cannot add without a calculator, and has one here.
#   treadle train laptop.yaml
"""

_LEFT_OUT = {
    "data": ("train_max_samples", "val_max_samples", "train_weights", "prompt_key", "reward_fn_key", "system_prompt"),
    "rollout": (
        *("engine_kwargs", "gpu_memory_utilization", "max_model_len", "enforce_eager", "max_num_seqs", "dtype"),
        *("tensor_model_parallel_size", "replicas_per_node", "n_gpus_per_node", "max_num_batched_tokens"),
        *("free_cache_engine", "enable_prefix_caching", "enable_chunked_prefill", "limits", "overlong_prompts"),
        "overlap_weight_updates",
    ),
    "actor": ("_target_", "fsdp_config", "ppo_max_token_len_per_gpu"),
    "ref": ("_target_", "fsdp_config", "log_prob_max_token_len_per_gpu"),
    "critic": ("_target_", "fsdp_config", "ppo_max_token_len_per_gpu"),
    "trainer": ("nnodes", "n_gpus_per_node", "weights", "total_epochs", "test_freq"),
    "reward": ("num_workers", "judges", "classifiers"),
    "model": ("apply_chat_template_kwargs", "tokenizer_path", "custom_chat_template", "override_config"),
}
"""Keys that name machines, memory or files."""

_SIZE = 4


def laptop_config(text: str, *, own_rewards: bool) -> str:
    """The laptop's YAML for a migrated one; ConfigError where it cannot be. `own_rewards`: keep its functions."""
    tree: dict[str, Any] = yaml.safe_load(text)
    for section, names in _LEFT_OUT.items():
        for name in names:
            tree.get(section, {}).pop(name, None)
    for section in ("cluster", "checkpoint", "logging"):
        tree.pop(section, None)
    data, rollout, actor = (tree.setdefault(name, {}) for name in ("data", "rollout", "actor"))
    tree["model"] = {"path": "treadle/tiny-calculator", "describe_tools": False, "enable_gradient_checkpointing": False}
    several = data.get("train_batch_size", 1) > actor.get("ppo_mini_batch_size", data.get("train_batch_size", 1))
    size = 2 * _SIZE if several else _SIZE
    data |= {"train_files": "tasks.jsonl", "val_files": "val.jsonl", "val_max_samples": 16, "train_batch_size": size}
    actor |= {"ppo_mini_batch_size": _SIZE, "dtype": "fp32"}
    asynchronous = tree.setdefault("trainer", {}).get("mode", "sync") != "sync"
    rollout |= {"name": "native", "nnodes": int(asynchronous), "n": min(rollout.get("n", 4), 8)}
    rollout |= {"prompt_length": 128, "response_length": 96}
    _replace_agent(rollout)
    tree["trainer"]["total_training_steps"] = 10
    reward = tree.setdefault("reward", {})
    if not own_rewards or not reward.get("functions"):
        reward["functions"] = {"answer": {"path": "reward:score"}}
    tree["logging"] = {"experiment_name": "laptop"}
    written = _HEADER + yaml.safe_dump(_known(tree), sort_keys=False, allow_unicode=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself gives them
        loads(written, "laptop.yaml")
    return written


def _replace_agent(rollout: dict[str, Any]) -> None:
    """Tools that the script does not define become the calculator of tools.py; loops and environments go."""
    multi_turn, agent = rollout.setdefault("multi_turn", {}), rollout.setdefault("agent", {})
    tools = multi_turn.get("tools")
    own = isinstance(tools, list) and all(str(name).startswith("tools:") for name in tools)
    for name in ("environment", "environment_kwargs", "mcp_servers"):
        multi_turn.pop(name, None)
    if not own:
        multi_turn["tools"] = "tools:calculate"
    for name in ("loops", "num_workers"):
        agent.pop(name, None)
    agent["default_agent_loop"] = "tool_agent"


def _known(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Without values that the migration could not tell, and without sections that are empty then."""
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        inner = _known(value) if isinstance(value, Mapping) else value
        if inner != "???" and inner != {}:
            kept[name] = inner
    return kept
