"""Field words: a reader who knows the field finds a thing by the name it has there, in one place only.

`WORDS` are words of reinforcement learning and of inference engines. Each is in the name of the file that does it, or
in the first line of its docstring; `docs/glossary.md` says of each what it is here.
"""

import ast
import builtins
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

from tests.package_source import FILES, PACKAGE, nodes, tree

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"

WORDS = {
    "advantage estimator": "algorithm/estimators.py",
    "policy loss": "algorithm/policy_losses.py",
    "importance sampling": "algorithm/rollout_correction.py",
    "rollout correction": "algorithm/rollout_correction.py",
    "KL controller": "algorithm/kl.py",
    "fused head": "algorithm/fused_head.py",
    "micro batch": "algorithm/micro_batch.py",
    "dynamic sampling": "algorithm/advantage_inputs.py",
    "checkpoint": "checkpoint/store.py",
    "placement plan": "config/plan.py",
    "chat template": "data/chat_template.py",
    "incremental rendering": "data/incremental.py",
    "router": "engine/router.py",
    "in-flight requests": "engine/in_flight.py",
    "pause gate": "engine/in_flight.py",
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
    "audit": "inspect/audit.py",
    "replay": "inspect/replay.py",
    "journal": "journal/journal.py",
    "renderer": "data/renderer.py",
    "validation": "trainer/validation.py",
    "session tree": "gateway/session_tree.py",
    "child process entry point": "process/child_main.py",
    "migration": "migrate/migration.py",
    "parity check": "model/parity.py",
    "checksum": "model/checksum.py",
    "experiment tracker": "observe/trackers.py",
    "watchdog": "observe/watchdog.py",
    "FSDP": "policy/fsdp.py",
    "shards": "policy/shard_files.py",
    "data-parallel group": "policy/rank_group.py",
    "rendezvous": "policy/rendezvous.py",
    "sequence packing": "policy/packed_inputs.py",
    "LoRA": "model/lora.py",
    "master weights": "policy/optimizer.py",
    "reference policy": "policy/reference.py",
    "critic": "policy/critic.py",
    "RPC": "process/rpc.py",
    "launcher": "process/launcher.py",
    "restart policy": "process/supervisor.py",
    "reward model": "reward/reward_models.py",
    "judge": "reward/judge.py",
    "classifier": "reward/classifier/classifier.py",
    "rate limit": "reward/rate_limit.py",
    "sandbox": "sandbox/__init__.py",
    "agent loop": "rollout/agent_loop.py",
    "agent worker": "rollout/worker.py",
    "session": "rollout/session.py",
    "dispatcher": "rollout/dispatch.py",
    "tool-call parser": "rollout/parsers/registry.py",
    "MCP": "rollout/tools/mcp_tools.py",
    "simulator": "simulate/simulation.py",
    "rollout buffer": "trainer/buffer.py",
    "admission control": "trainer/buffer.py",
    "back-pressure": "trainer/buffer.py",
    "staleness": "trainer/buffer.py",
    "schedule": "trainer/schedules.py",
    "resume": "trainer/resume.py",
    "weight sync": "weights/sync.py",
    "broadcast group": "weights/collective.py",
    "shared memory": "weights/shared_memory.py",
    "CUDA IPC": "weights/cuda_ipc.py",
    "entropy bonus": "algorithm/loss.py",
    "value head": "policy/critic.py",
    "reference model": "policy/reference.py",
    "off-policy": "algorithm/rollout_correction.py",
    "one step off": "trainer/schedules.py",
    "single controller": "cluster/training.py",
    "overlong": "reward/builtin/soft_overlong.py",
    "length penalty": "reward/builtin/length_penalty.py",
    "mini batch": "policy/packed_inputs.py",
    "special tokens": "data/encoder.py",
    "abort": "engine/in_flight.py",
    "truncation": "rollout/trajectory_builder.py",
    "tool call": "rollout/tools/invoke.py",
    "errors": "errors.py",
}

IN_THE_GLOSSARY = (
    *("reward manager", "resource pool", "clip higher", "advantage whitening", "context parallelism", "Ulysses"),
    *(
        "block table",
        "reasoning",
        "profiler",
        "determinism",
        "benchmark",
        "colocated, hybrid engine",
        "Megatron",
        "FP8",
    ),
    *("callbacks", "dual clip", "GRPO", "learning rate schedule", "response mask", "sequence balancing", "seed"),
    *("tensor parallelism", "sequence parallelism", "speculative decoding", "SGLang", "worker group", "reward model"),
    *("action mask", "AdamW", "batch size", "beam search", "clip ratio", "DAPO", "dataloader"),
    *("discount factor", "Dr. GRPO", "dry run", "early stopping", "EOS, stop token", "epoch", "format reward"),
    *("GPU memory utilization", "gradient norm", "ground truth", "group size", "GSPO"),
    *("guided decoding, structured output", "hyperparameters", "KL penalty", "loss mask", "metrics"),
    *("multi-node", "partial rollout", "PPO", "process reward", "prompt length", "response length"),
    *("reward shaping", "system prompt", "temperature", "throughput", "tokenizer", "torch.compile"),
    *("value loss", "weight decay"),
)
"""Words of the field for what has another name here, is elsewhere, or is not here at all: a row says which."""


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
        first = (ast.get_docstring(tree(file)) or "").partition("\n")[0]
        if spoken(word) not in spoken(f"{name.removesuffix('.py')} | {first}"):
            offenders.append(f"{word}: neither the name of treadle/{name} nor its first line, {first!r}, has it")
    assert offenders == []


def test_the_glossary_has_every_field_word_with_its_file():
    table = GLOSSARY.read_text(encoding="utf-8").partition("|---|---|---|\n")[2]
    rows = re.findall(r"^\| (.+?) \| .+ \| (.+) \|$", table, re.MULTILINE)
    files = {spoken(word): re.findall(r"`([^`]+)`", files) for word, files in rows}
    assert [word for word, name in WORDS.items() if f"treadle/{name}" not in files.get(spoken(word), ())] == []
    assert [word for word in IN_THE_GLOSSARY if not files.get(spoken(word))] == []
    assert [name for names in files.values() for name in names if not (ROOT / name).exists()] == []
    assert list(files) == sorted(files), "in alphabetical order"


def test_no_class_name_is_used_twice():
    places = defaultdict(list)
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


ELLIPTIC = re.compile(r"(Of |Those |The same[,.:] |The same (for|of) |See the module)")


def test_a_docstring_can_be_read_alone():
    """The site of the API prints each by itself: `Of the process that runs.` says nothing there."""
    offenders = []
    for file in FILES:
        for node in nodes(file):
            named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if named and ELLIPTIC.match(ast.get_docstring(node) or ""):
                offenders.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert offenders == []


PERSON = re.compile(r"\b(nobody|somebody|whoever|any(body|one)|every(body|one)|someone|who may)\b", re.IGNORECASE)
USERS = ("api", "gateway", "tinker", "sandbox")


def test_no_person_stands_for_a_process():
    """Folders whose callers are people, such as the gateway's, may speak of them."""
    offenders = []
    for file in FILES:
        if file.relative_to(PACKAGE).parts[0] in USERS:
            continue
        texts = [
            (node.value, node.lineno)
            for node in nodes(file)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        for text, line in [*texts, *comments(file)]:
            if said := PERSON.search(text):
                offenders.append(f"{file.relative_to(ROOT)}:{line} {said[0]}")
    assert offenders == []


def comments(file: Path) -> list[tuple[str, int]]:
    """Every comment of a file, with its line."""
    lines = io.StringIO(file.read_text(encoding="utf-8")).readline
    found = (token for token in tokenize.generate_tokens(lines) if token.type == tokenize.COMMENT)
    return [(token.string, token.start[0]) for token in found]


CLASS = re.compile(r"(?<![\w./-])_?[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+\b")
PICTURE = re.compile("[─═►▼│]")


def test_a_picture_names_classes_that_are_there():
    """In the docstring of a module that draws its parts, every class is one that the package has or uses."""
    known = {node.name for file in FILES for node in nodes(file) if isinstance(node, ast.ClassDef)} | set(dir(builtins))
    imported = {
        name.name for file in FILES for node in nodes(file) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    drawn = {file: doc for file in FILES if PICTURE.search(doc := ast.get_docstring(tree(file)) or "")}
    assert drawn
    offenders = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, doc in drawn.items()
        for name in sorted({*CLASS.findall(doc)} - known - imported)
    ]
    assert offenders == []
