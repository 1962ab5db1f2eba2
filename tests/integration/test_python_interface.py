"""treadle.train and treadle.rollout as people call them: scripts, running loops, Ctrl-C, and the YAML that repeats."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import treadle
from treadle.errors import ConfigError
from treadle.types import Trajectory

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 6) for b in (3, 4)]
SMALL = {
    "rollout.n": 2,
    "rollout.prompt_length": 32,
    "rollout.response_length": 24,
    "model.describe_tools": False,
    "rollout.multi_turn.max_assistant_turns": 2,
}
SCRIPT = """
    import treadle

    bonus = 0.25

    def calculate(expression: str) -> str:
        \"\"\"Work out a sum.\"\"\"
        return str(eval(expression))

    run = treadle.train(
        model="treadle/tiny-calculator",
        tasks=[{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 6) for b in (3, 4)],
        reward=lambda response, answer: float(answer in response) + bonus,
        tools=[calculate], steps=STEPS, run_dir="runs/script", **SMALL)
    print(run.steps, run.success, run.model_dir.name)
"""


def script(steps: int) -> str:
    return textwrap.dedent(SCRIPT).replace("STEPS", str(steps)).replace("SMALL", repr(SMALL))


def run_script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    Path("script.py").write_text(code)
    return run([sys.executable, "script.py", *arguments])


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    root = str(Path(treadle.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


def tokens(trajectories: Sequence[Trajectory]) -> list[object]:
    return [(item.uid, item.sample, [row.ids for row in item.rows], item.reward) for item in trajectories]


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_script_trains_and_the_command_repeats_it_from_its_yaml():
    done = run_script(script(steps=2))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[::2] == ["2", "0001-step-2"]
    assert "2 steps, 2 of them now; everything is in runs/script\n" in done.stderr
    assert "try next:  treadle view runs/script " in done.stderr, "as the last lines of the command"
    again = run([sys.executable, "-m", "treadle", "train", "runs/script/train.yaml", "logging.run_dir=runs/again"])
    assert again.returncode == 0, again.stderr
    first, second = treadle.Run("runs/script"), treadle.Run("runs/again")
    for step in (1, 2):
        assert tokens(first.trajectories(step)) == tokens(second.trajectories(step))
        assert len(first.trajectories(step)) == 16
    with pytest.raises(ConfigError, match=r"step: 3: there is no such training step\n    the last are 1, 2"):
        first.trajectories(3)
    assert first.metrics["reward/mean"] == second.metrics["reward/mean"]
    rewards = {item.reward.value for item in first.trajectories() if item.reward}
    assert rewards <= {0.25, 1.25}, "the closure came along"


def test_functions_beside_a_script_of_another_directory_are_found_by_the_command_that_is_written():
    Path("code").mkdir()
    Path("code/rewards_beside.py").write_text("def score(response, answer):\n    return float(answer in response)\n")
    code = f"""
        import treadle
        from rewards_beside import score

        treadle.to_yaml(
            model="treadle/tiny-calculator", tasks={ROWS}, reward=score, run_dir="runs/beside", steps=1, **{SMALL})
    """
    Path("code/script.py").write_text(textwrap.dedent(code))
    assert run([sys.executable, "code/script.py"]).returncode == 0
    head = Path("runs/beside/train.yaml").read_text().splitlines()[0]
    assert head == "# again:  PYTHONPATH=code treadle train runs/beside/train.yaml"
    checked = [sys.executable, "-m", "treadle", "check", "runs/beside/train.yaml"]
    alone = run(checked)
    assert alone.returncode == 3 and "rewards_beside" in alone.stderr
    environment = {**os.environ, "PYTHONPATH": f"{Path(treadle.__file__).parents[1]}:code"}
    found = subprocess.run(checked, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert found.returncode == 0, found.stderr


def test_the_same_script_goes_on_and_another_function_is_refused():
    assert run_script(script(steps=1)).returncode == 0
    done = run_script(script(steps=2))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "2"
    assert len(list(Path("runs/script/inputs").glob("*.pkl"))) == 2, "the same functions, in the same files"
    changed = run_script(script(steps=3).replace("bonus = 0.25", "bonus = 0.5"))
    assert "ConfigError" in changed.stderr
    assert "reward.functions.reward.path" in changed.stderr
    assert "fresh=True sets runs/script aside" in changed.stderr
    assert "total_training_steps: 2" in Path("runs/script/train.yaml").read_text(), "a refused call changes nothing"


def wait_for_a_step(run_dir: str) -> None:
    metrics, deadline = Path(run_dir, "metrics.jsonl"), time.monotonic() + 300
    while time.monotonic() < deadline and not (metrics.exists() and '"reward/mean"' in metrics.read_text()):
        time.sleep(0.05)


def test_ctrl_c_saves_and_says_how_to_go_on():
    Path("script.py").write_text(script(steps=200))
    root = str(Path(treadle.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "script.py"], stderr=subprocess.PIPE, text=True, env=environment) as process:
        wait_for_a_step("runs/script")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, "as a command that was interrupted"
    assert "Traceback" not in errors
    assert "KeyboardInterrupt: stopped after step " in errors
    assert "and saved in runs/script: the same call with run_dir='runs/script', or" in errors
    run = treadle.Run("runs/script")
    assert run.steps >= 1
    assert run.model_dir.name.endswith(f"step-{run.steps}")


def sum_up(response: str, answer: str) -> float:
    return float(answer in response)


def test_a_running_loop_may_wait_or_await():
    async def main() -> tuple[treadle.Run, treadle.Run]:
        given = {"model": "treadle/tiny-calculator", "tasks": ROWS, "reward": sum_up, "steps": 1, **SMALL}
        blocking = treadle.train(run_dir="runs/blocking", **given)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        awaited = await treadle.train_async(run_dir="runs/awaited", **given)
        ticking.cancel()
        assert ticks > 10, "the loop went on"
        return blocking, awaited

    blocking, awaited = asyncio.run(main())
    assert tokens(blocking.trajectories(1)) == tokens(awaited.trajectories(1))


def test_a_cancelled_run_is_saved():
    async def main() -> None:
        work = asyncio.create_task(
            treadle.train_async(
                model="treadle/tiny-calculator", tasks=ROWS, reward=sum_up, steps=500, run_dir="runs/it", **SMALL
            )
        )
        await asyncio.to_thread(wait_for_a_step, "runs/it")
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(main())
    run = treadle.Run("runs/it")
    assert 1 <= run.steps < 500
    assert run.model_dir.name.endswith(f"step-{run.steps}")


def test_a_rollout_evaluates_by_data_source():
    rows = [{**row, "data_source": "even" if int(row["answer"]) % 2 == 0 else "odd"} for row in ROWS]
    found = treadle.rollout(
        model="treadle/tiny-calculator", tasks=rows, reward={"right": "number_match"}, run_dir="runs/it", **SMALL
    )
    assert found.by_source.keys() == {"even", "odd"}
    assert found.success == pytest.approx(sum(found.by_source.values()) / 2)
    assert len(found.trajectories()) == 16
    assert "even" in found.table and "odd" in str(found)
    assert "16 trajectories" in repr(found)
    assert Path("runs/it/rollout.yaml").exists()
    sampled = tokens(found.trajectories())
    again = asyncio.run(
        treadle.rollout_async(
            model="treadle/tiny-calculator",
            tasks=rows,
            reward={"right": "number_match"},
            run_dir="runs/it",
            fresh=True,
            **SMALL,
        )
    )
    assert Path("runs/it.1/rollout.yaml").exists(), "the first is set aside"
    assert tokens(again.trajectories()) == sampled


def test_a_config_that_is_refused_late_leaves_no_directory():
    with pytest.raises(ConfigError, match=r"tasks, row 1: no field 'prompt'; the row has uid, question"):
        treadle.rollout(model="treadle/tiny-calculator", tasks=[{"question": "1+1="}], run_dir="runs/it", **SMALL)
    with pytest.raises(ConfigError, match="rows have no 'respons'"):
        treadle.rollout(
            model="treadle/tiny-calculator", tasks=ROWS, reward=lambda respons: 1.0, run_dir="runs/it", **SMALL
        )
    assert not Path("runs/it").exists()


def test_results_are_read_and_continued_after_a_change_of_directory(tmp_path, monkeypatch):
    call = {"model": "treadle/tiny-calculator", "tasks": ROWS[:2], "reward": "number_match", **SMALL}
    found = treadle.rollout(**call, run_dir="runs/evaluation")
    run = treadle.train(**call, steps=1, run_dir="runs/it")
    assert repr(run).startswith("Run('runs/it': ") and repr(found).startswith("Evaluation('runs/evaluation': ")
    assert repr(treadle.Run("latest")) == repr(run)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert run.steps == 1 and run.metrics["reward/mean"] and run.model_dir.is_dir() and "steps" in run.config_yaml
    assert len(run.trajectories()) == len(found.trajectories()) == 4
    assert repr(run).startswith(f"Run('{tmp_path}/runs/it': ")
    with pytest.raises(ConfigError, match="latest: there are no runs below runs/"):
        treadle.Run("latest")


def test_a_fresh_call_that_is_refused_late_leaves_the_earlier_run_where_it_was(capsys):
    call = {"model": "treadle/tiny-calculator", "tasks": ROWS[:2], "run_dir": "runs/it"}
    treadle.rollout(**call, reward=lambda response: 1.0, **SMALL)
    before = {path.name for path in Path("runs/it/inputs").iterdir()}
    with pytest.raises(ConfigError, match="rows have no 'respons'"):
        treadle.rollout(**call, reward=lambda respons: 1.0, fresh=True, **SMALL)
    assert not Path("runs/it.1").exists()
    assert {path.name for path in Path("runs/it/inputs").iterdir()} == before
    assert "runs/it again" in capsys.readouterr().err
    again = treadle.rollout(**call, reward=lambda response: 1.0, **SMALL)
    assert again.summary.num_trajectories == 4


def test_a_run_begins_anew_from_its_own_yaml_by_command_and_by_call():
    assert run_script(script(steps=1)).returncode == 0
    first = tokens(treadle.Run("runs/script").trajectories())
    fresh = [
        sys.executable,
        "-m",
        "treadle",
        "train",
        "runs/script/train.yaml",
        "logging.run_dir=runs/script",
        "--fresh",
    ]
    done = run(fresh)
    assert done.returncode == 0, done.stderr
    assert "the earlier run is in runs/script.1 now" in done.stderr
    assert tokens(treadle.Run("runs/script").trajectories()) == first
    assert tokens(treadle.Run("runs/script.1").trajectories()) == first
    again = treadle.train("runs/script/train.yaml", run_dir="runs/script", fresh=True)
    assert tokens(again.trajectories()) == first and Path("runs/script.2").exists()
    with pytest.raises(
        ConfigError, match=r"model.path: lies in the run directory runs/script, which fresh=True renames"
    ):
        treadle.train("runs/script/train.yaml", run_dir="runs/script", model="runs/script", fresh=True)


def test_a_repl_has_no_file_and_trains_all_the_same():
    code = script(steps=1).replace("    return str(eval(expression))\n", "    return str(eval(expression))\n\n")
    root = str(Path(treadle.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-i", "-q"]
    done = subprocess.run(
        command, input=code, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert "1 " in done.stdout and "0001-step-1" in done.stdout, done.stderr
