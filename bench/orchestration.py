"""CPU cost of everything between trainer and engine, per assistant turn, when engine and tool take no time.

    python bench/orchestration.py --tokenizer DIR [--peer 'python bench_verl.py --n 1024' ...]

N tasks × 4 assistant turns: three hermes tool calls and a final answer, with sampled ids, masks, logprobs, versions and
records as in a real run. Beside it, from the same run: a hand-written loop that does the least work for the same
tokens (the floor), and any peer's command that prints a JSON line with `cpu_ms_per_turn`. Ratios are to the floor.
"""

import argparse
import asyncio
import gc
import json
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from treadle.config import AgentConfig, ModelConfig, MultiTurnConfig, RolloutConfig, ScriptedConfig
from treadle.data.renderer import Renderer
from treadle.journal import Journal
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.service import RolloutParts
from treadle.types import Request, Task

TURNS = 4
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
QUESTION = "Problem {:05d}: use the add tool three times on 1 and 2, then answer."
FINAL = "The sum of the two numbers after three calls to the tool is 3."


async def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def script(request: Request, rng: object) -> str:
    """Three calls, then the answer."""
    turns = sum(message["role"] == "assistant" for message in request.messages)
    return CALL if turns < TURNS - 1 else FINAL


def tasks_of(count: int) -> list[Task]:
    return [Task(f"{at}", ({"role": "user", "content": QUESTION.format(at)},)) for at in range(count)]


def rollout_of(count: int, workers: int) -> RolloutConfig:
    return RolloutConfig(
        name="scripted",
        prompt_length=1024,
        response_length=1024,
        scripted=ScriptedConfig(script="bench.orchestration:script"),
        agent=AgentConfig(default_agent_loop="tool_agent", num_workers=workers, max_concurrent_sessions=count),
        multi_turn=MultiTurnConfig(tools=("bench.orchestration:add",)),
    )


def cpu_seconds() -> float:
    """User and system time of this process and of the children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def live_children_seconds() -> float:
    """User and system time of children that still run, from /proc."""
    total, tick = 0.0, 100.0
    for child in Path("/proc/self/task").glob("*/children"):
        for pid in child.read_text().split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / tick
    return total


def measure(work: Callable[[], int], repeats: int) -> float:
    """Median CPU milliseconds per turn; `work` returns the turns it made. The first run warms up."""
    work()
    figures = []
    for _ in range(repeats):
        gc.collect()
        before = cpu_seconds() + live_children_seconds()
        turns = work()
        figures.append(1e3 * (cpu_seconds() + live_children_seconds() - before) / turns)
    return statistics.median(figures)


def bench_treadle(model: ModelConfig, count: int, workers: int, journal: bool, repeats: int) -> float:
    tasks = tasks_of(count)
    with tempfile.TemporaryDirectory() as folder:
        opened = Journal.open(Path(folder), max_mb=4096) if journal else None
        with AgentLoopManager.create_blocking(
            rollout=rollout_of(count, workers), model=model, parts=RolloutParts(journal=opened)
        ) as manager:

            def work() -> int:
                batch = manager.generate_sequences_blocking(tasks)
                if opened is not None:
                    opened.flush_blocking()
                turns = sum(trajectory.num_turns for trajectory in batch.trajectories)
                assert turns == TURNS * count, f"{turns} turns, {TURNS * count} expected"
                return turns

            figure = measure(work, repeats)
        if opened is not None:
            opened.close_blocking()
    return figure


def bench_floor(renderer: Renderer, model: ModelConfig, count: int, repeats: int) -> float:
    """The least work that yields the same tokens: no framework, one coroutine a trajectory."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model.path, local_files_only=True)
    stop = renderer.stop_token_ids[0]
    call, final = [*renderer.encode(CALL), stop], [*renderer.encode(FINAL), stop]
    pattern = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
    schema = [_schema()]

    async def trajectory(at: int) -> None:
        messages = list(tasks_of(1)[0].messages)
        messages[0] = {
            "role": "user",
            "content": f"Problem {at:05d}: use the add tool three times on 1 and 2, then answer.",
        }
        ids = tokenizer.apply_chat_template(
            messages, tools=schema, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        mask, logprobs = [], []
        for turn in range(TURNS):
            await asyncio.sleep(0)
            said = list(call if turn < TURNS - 1 else final)
            ids += said
            mask += [1] * len(said)
            logprobs += [0.0] * len(said)
            found = pattern.search(tokenizer.decode(said))
            if found is None:
                return
            result = await add(**json.loads(found[1])["arguments"])
            text = f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            seen = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += seen
            mask += [0] * len(seen)
            logprobs += [0.0] * len(seen)

    async def all_of_them() -> None:
        await asyncio.gather(*(trajectory(at) for at in range(count)))

    def work() -> int:
        asyncio.run(all_of_them())
        return TURNS * count

    return measure(work, repeats)


def _schema() -> dict[str, Any]:
    numbers = {name: {"type": "integer", "description": f"{name} number"} for name in ("a", "b")}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    return {
        "type": "function",
        "function": {"name": "add", "description": "Add two integers.", "parameters": parameters},
    }


def bench_peer(command: str) -> tuple[str, float]:
    """A peer's own script, run here and now; its last JSON line counts."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        print(f"{command} failed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return command, float("nan")
    line = json.loads([row for row in done.stdout.splitlines() if row.startswith("{")][-1])
    return line.get("peer", command), float(line["cpu_ms_per_turn"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="directory of a tokenizer with a hermes tools template")
    parser.add_argument("--n", type=int, default=1024, help="trajectories at once")
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[], help="further numbers of trajectories, for flatness"
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the multi-process figure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", action="append", default=[], help="command that prints a JSON line; may be repeated")
    options = parser.parse_args(arguments)

    model = ModelConfig(path=options.tokenizer)
    renderer = Renderer.create(model)

    def ours(count: int, workers: int, journal: bool) -> float:
        return bench_treadle(model, count, workers, journal, options.repeats)

    rows = {"treadle, journal off": ours(options.n, 0, False)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows["treadle, journal on"] = ours(options.n, 0, True)
    for size in options.sizes:
        rows[f"treadle, journal off, {size} at once"] = ours(size, 0, False)
    if options.workers > 1:
        rows[f"treadle, {options.workers} worker processes"] = ours(options.n, options.workers, False)
    rows["floor"] = bench_floor(renderer, model, options.n, options.repeats)
    rows.update(bench_peer(command) for command in options.peer)
    print(f"CPU ms per turn, {options.n} trajectories × {TURNS} turns; peak memory of the first row {peak:.0f} MiB")
    for name, figure in rows.items():
        print(f"{name:44} {figure:8.3f}   {figure / rows['floor']:6.2f} × floor")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bench.orchestration import main as run  # so that the script and the tool are importable by name

    run()
