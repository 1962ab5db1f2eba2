"""verifiers, as its own interpreter runs it: the tasks of a taskset, and one episode of one of them.

    python verifiers_shim.py tasks ENV                        its last line: {"tasks": [{"key": …, "prompt": …}, …]}
    python verifiers_shim.py play ENV KEY BASE_URL MODEL OUT  writes {"ok": …, "reward": …, "errors": […], …} to OUT

Run by its path, in an environment that has verifiers and not treadle; imports neither at the top. ENV is the JSON of
verifiers' env config, `{"taskset": {"id": NAME}, …}`; the key of the API is in OPENAI_API_KEY.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


def load(env: str) -> Any:
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # type: ignore[import-not-found]

    return load_environment(resolve_env_config(json.loads(env)))


def describe(prompt: Any) -> str:
    """A prompt as text: it is for readers, verifiers shows the model its own."""
    if isinstance(prompt, list):
        return "\n\n".join(str(getattr(message, "content", message)) for message in prompt)
    return "" if prompt is None else str(prompt)


def list_tasks(env: str) -> None:
    tasks = [{"key": task.key, "prompt": describe(task.data.prompt)} for task in load(env).taskset.load()]
    sys.stdout.write("\n" + json.dumps({"tasks": tasks}) + "\n")


async def play(env: str, key: str, base_url: str, model: str) -> dict[str, Any]:
    import verifiers.v1 as vf  # type: ignore[import-not-found]

    loaded = load(env)
    found = next((task for task in loaded.taskset.load() if task.key == key), None)
    if found is None:
        raise SystemExit(f"the taskset has no task {key}")
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with loaded.serving():
        episode = await loaded.run_episode(found, vf.ModelContext(model=model, client=client))
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return {
        "ok": episode.ok,
        "reward": sum(trace.reward for trace in trained) / len(trained) if trained else None,
        "errors": [{"type": error.type, "message": error.message[:2000]} for error in errors],
        "stops": [trace.stop_condition for trace in trained],
        "metrics": {name: value for trace in trained for name, value in trace.metrics.items()},
    }


if __name__ == "__main__":
    if sys.argv[1] == "tasks":
        list_tasks(sys.argv[2])
    else:
        result = asyncio.run(play(*sys.argv[2:6]))
        Path(sys.argv[6]).write_text(json.dumps(result), encoding="utf-8")
