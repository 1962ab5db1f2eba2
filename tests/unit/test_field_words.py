"""Field words: a reader who knows the field finds a thing by the name it has there, in one place only.

`WORDS` are words of reinforcement learning and of inference engines. Each is in the name of the file that does it, or
in the first line of its docstring.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "treadle"

WORDS = {
    "advantage estimator": "algorithm/estimators.py",
    "policy loss": "algorithm/policy_losses.py",
    "importance weights": "algorithm/rollout_correction.py",
    "rollout correction": "algorithm/rollout_correction.py",
    "KL divergence": "algorithm/kl.py",
    "fused head": "algorithm/fused_head.py",
    "micro batch": "algorithm/micro_batch.py",
    "checkpoint": "checkpoint/store.py",
    "plan": "config/plan.py",
    "chat template": "data/chat_template.py",
    "incremental rendering": "data/incremental.py",
    "router": "engine/router.py",
    "session affinity": "engine/router.py",
    "in-flight requests": "engine/in_flight.py",
    "replica set": "engine/replica_set.py",
    "replica supervisor": "engine/replica_supervisor.py",
    "RNG": "engine/rng.py",
    "continuous batching": "engine/native/scheduler.py",
    "preemption": "engine/native/scheduler.py",
    "chunked prefill": "engine/native/chunked_prefill.py",
    "paged KV cache": "engine/native/kv_cache.py",
    "block manager": "engine/native/kv_cache_manager.py",
    "prefix cache": "engine/native/prefix_cache.py",
    "paged attention": "engine/native/paged_attention.py",
    "CUDA graphs": "engine/native/cuda_graphs.py",
    "sleep mode": "engine/native/cuda_memory.py",
    "model runner": "engine/native/model_runner.py",
    "audit": "inspect/audit.py",
    "replay": "inspect/replay.py",
    "timeline": "inspect/timeline.py",
    "journal": "journal/journal.py",
    "migration": "migrate/migration.py",
    "experiment tracker": "observe/trackers.py",
    "watchdog": "observe/watchdog.py",
    "FSDP": "policy/fsdp.py",
    "shards": "policy/shards.py",
    "data-parallel": "policy/update.py",
    "rendezvous": "policy/rendezvous.py",
    "packed inputs": "policy/packed_inputs.py",
    "master weights": "policy/optimizer.py",
    "reference policy": "policy/reference.py",
    "RPC": "process/rpc.py",
    "launcher": "process/launcher.py",
    "supervisor": "process/supervisor.py",
    "reward model": "reward/reward_models.py",
    "judge": "reward/judge.py",
    "classifier": "reward/classifier/classifier.py",
    "rate limit": "reward/rate_limit.py",
    "sandbox": "reward/sandbox/__init__.py",
    "agent loop": "rollout/agent_loop.py",
    "session": "rollout/session.py",
    "dispatcher": "rollout/dispatch.py",
    "tool-call parser": "rollout/parsers/base.py",
    "MCP": "rollout/tools/mcp_tools.py",
    "simulation": "simulate/simulation.py",
    "rollout buffer": "trainer/buffer.py",
    "admission control": "trainer/buffer.py",
    "staleness": "trainer/buffer.py",
    "schedules": "trainer/schedules.py",
    "resume": "trainer/resume.py",
    "validation": "trainer/validation.py",
    "weight sync": "weights/sync.py",
    "broadcast": "weights/collective.py",
    "shared memory": "weights/shared_memory.py",
    "CUDA IPC": "weights/cuda_ipc.py",
}


def spoken(text: str) -> str:
    """Letters and digits only, apart by single blanks: `KV-cache`, `kv_cache` and `KV cache` are one word."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def test_a_field_word_leads_to_the_file_that_does_it():
    offenders = []
    for word, name in WORDS.items():
        file = PACKAGE / name
        if not file.is_file():
            offenders.append(f"{word}: no file treadle/{name}")
            continue
        first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        if spoken(word) not in spoken(f"{name.removesuffix('.py')} | {first}"):
            offenders.append(f"{word}: neither the name of treadle/{name} nor its first line, {first!r}, has it")
    assert offenders == []


def test_no_class_name_is_used_twice():
    places = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
