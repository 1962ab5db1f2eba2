"""Adapters against the real packages, in an interpreter of their own: `make test-environments` builds it.

Every episode is played by a scripted model through the foreign interpreter; the adapters' code is the same in this one.
"""

import asyncio
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_foreign_environment import played, wait_until, working
from tests.integration.test_reward_sandbox import is_running
from tests.rollouts import rollout, turns_of
from treadle.config import RolloutConfig
from treadle.errors import ConfigError
from treadle.rollout.environments.schemes import ForeignEnvironments
from treadle.types import Trajectory

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ENVIRONMENTS_PYTHON", ROOT / ".venv-environments" / "bin" / "python")).absolute()

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make test-environments builds .venv-environments")


def configured(environment: str, **fields: Any) -> RolloutConfig:
    given = {"environment_python": str(PYTHON), "max_assistant_turns": 6, **fields}
    sizes = {"prompt_length": 4000, "response_length": 4000}
    return rollout(default_agent_loop="environment_agent", environment=environment, **given, **sizes)


def play(environment: str, *answers: Any, **kwargs: Any) -> Trajectory:
    return played(configured(environment), *answers, **kwargs)


def rewards(trajectory: Trajectory) -> list[float | None]:
    return [turn.reward for turn in trajectory.rows[0].turns]


def test_a_textarena_game_is_played_to_its_reward():
    guesses = [str(number) for number in range(1, 21)]
    config = configured("textarena:GuessTheNumber-v0", max_assistant_turns=30)
    games = [played(config, *guesses, seed=seed) for seed in (3, 3, 8)]
    for one in games:
        assert one.outcome.ok, one.outcome.detail
        assert "Guess The Number" in one.messages[0]["content"] and "higher" in one.messages[2]["content"]
        assert "Guess The Number" not in one.messages[2]["content"]  # what is new alone
        assert rewards(one)[:-1] == [None] * (len(rewards(one)) - 1) and rewards(one)[-1] is not None
        assert one.extra["environment"]["reason"]
    assert games[0].messages == games[1].messages


def test_a_textarena_game_of_two_has_a_seat_for_each_and_says_so_where_it_has_one():
    alone = play("textarena:TicTacToe-v0", "[4]", seed=1).outcome
    assert alone.boundary == "environment" and "is no game of 1 player" in alone.detail
    assert "environment_kwargs.num_players" in alone.detail
    moves = {0: ["[0]", "[1]", "[2]"], 1: ["[3]", "[4]"]}
    game = play(
        *("textarena:TicTacToe-v0", lambda request, rng: moves[request.row][turns_of(request)]), seed=1, num_players=2
    )
    assert game.outcome.ok and game.seats == (0, 1), game.outcome
    first, second = (sum(turn.reward or 0.0 for turn in row.turns) for row in game.rows)
    assert first > second, "the first player has three in a row"


def test_a_gem_environment_gives_a_reward_every_turn():
    found = [play("gem:game:GuessTheNumber-v0-easy", r"\boxed{5}", r"\boxed{2}", seed=seed) for seed in (3, 3)]
    for one in found:
        assert one.outcome.ok, one.outcome.detail
        assert r"\boxed{}" in one.messages[0]["content"] and "Enter your next guess." in one.messages[2]["content"]
        assert None not in rewards(one)
    assert found[0].messages == found[1].messages and rewards(found[0]) == rewards(found[1])


def test_a_skyrl_environment_has_the_tasks_prompt_and_answer():
    one = play("skyrl_gym:gsm8k_multi_turn", "#### 5", "#### truth", max_turns=3)
    assert one.outcome.ok, one.outcome.detail
    assert one.messages[0]["content"] == "one" and "#### ANSWER" in one.messages[2]["content"]
    assert len(rewards(one)) == 3 and rewards(one)[0] == pytest.approx(0.2 / 3)
    assert one.extra["environment"] == {"steps": 3}


def test_a_gymnasium_environment_is_drawn_and_steered_by_words():
    kwargs = {"render_mode": "ansi", "is_slippery": False, "actions": ["left", "down", "right", "up"]}
    moves = ("I go down", "support me", "down", "right", "right", "down", "right")
    one = played(configured("gymnasium:FrozenLake-v1", max_assistant_turns=9), *moves, seed=1, **kwargs)
    assert one.outcome.ok, one.outcome.detail
    assert (
        one.messages[0]["content"].startswith("Actions: left, down, right, up.\n")
        and "[S]FFF" in one.messages[0]["content"]
    )
    assert one.messages[4]["content"].startswith("There is no such action.")
    assert rewards(one) == [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_a_gymnasium_environment_of_numbers_is_written_and_one_of_arrays_refused():
    one = play("gymnasium:Blackjack-v1", "1", "0", seed=3)
    assert one.outcome.ok and one.messages[0]["content"].startswith("Actions: 0 to 1.\n")
    outcome = play("gymnasium:CartPole-v1", "1", seed=3).outcome
    assert outcome.boundary == "environment" and "which is no text" in outcome.detail


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("textarena:GuessNumber-v0", "nearest: GuessTheNumber-v0"),
        ("gem:game:Sudoku-v0-eazy", "nearest: game:Sudoku-v0-easy"),
        ("skyrl_gym:gsm8", "nearest: gsm8k"),
        ("gymnasium:FrozenLake-v9", "nearest: FrozenLake-v1"),
        ("openenv:localhost", "write openenv:http://host:port"),
        ("openenv:http://127.0.0.1:9", "no OpenEnv server answers at http://127.0.0.1:9/health"),
    ],
)
def test_an_unknown_name_is_a_mistake_that_names_the_nearest(environment, words):
    async def main() -> None:
        await (await ForeignEnvironments.start(configured(environment))).close()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(main())
    assert words in str(caught.value)


@pytest.fixture
def server() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """An OpenEnv server with two sessions at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([PYTHON, "-E", str(script), str(port), "2"])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        yield url, process
    finally:
        process.kill()
        process.wait()


def test_an_openenv_server_is_played_and_sessions_wait_for_their_turn(server):
    url, _ = server

    async def main() -> list[Trajectory]:
        async with working(configured(f"openenv:{url}"), "3", "7") as (play, _):
            return await asyncio.gather(*(play(f"t{at}", seed=7) for at in range(6)))

    for one in asyncio.run(main()):
        assert one.outcome.ok, one.outcome.detail
        assert [m["content"] for m in one.messages] == ["Which number?", "3", "closed", "7"]
        assert rewards(one) == [-0.25, 1.0]


HOLD = """
import sys
from openenv import GenericEnvClient
clients = [GenericEnvClient(base_url=sys.argv[1]).sync() for _ in range(2)]
for client in clients:
    client.connect()
    client.reset()
print("held", flush=True)
sys.stdin.read()
"""


def test_an_openenv_server_that_stays_full_is_a_failure_that_says_so(server):
    url, _ = server
    holder = subprocess.Popen([PYTHON, "-E", "-c", HOLD, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        outcome = play(f"openenv:{url}", "7", seed=7, capacity_timeout_s=0.5).outcome
    finally:
        holder.communicate(timeout=60)
    assert outcome.boundary == "environment"
    assert "all sessions of" in outcome.detail and "capacity_timeout_s" in outcome.detail


def test_an_error_of_the_server_and_its_death_are_failures_and_no_zeros(server):
    url, process = server

    async def main() -> list[Trajectory]:
        async with working(configured(f"openenv:{url}"), "word") as (play, _):
            broken = await play("a", seed=7)
            process.kill()
            process.wait()
            return [broken, await play("b", seed=7)]

    broken, dead = asyncio.run(main())
    for one in (broken, dead):
        assert one.outcome.boundary == "environment" and not one.extra.get("turn_rewards")
    assert "no number: word" in broken.outcome.detail


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An OpenEnv package, as `openenv init` lays it out, in the working directory."""
    server = tmp_path / "safe_env" / "server"
    server.mkdir(parents=True)
    for folder in (server.parent, server):
        (folder / "__init__.py").touch()
    (server / "safe.py").write_text(Path(__file__).with_name("openenv_server.py").read_text())
    (server / "app.py").write_text(
        "import os\nfrom .safe import *\napp = create_fastapi_app(Safe, Guess, Hint, max_concurrent_envs=4)\n"
        "open('pids', 'a').write(f'{os.getpid()}\\n')\n"
    )
    (server / "broken.py").write_text("raise RuntimeError('no such game')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["safe_env", "safe_env.server.app:app"])
def test_the_server_of_a_package_is_started_once_and_ends_with_the_worker(name, package):
    async def main() -> list[Trajectory]:
        async with working(configured(f"openenv:{name}"), "3", "7") as (play, _):
            found = await asyncio.gather(*(play(str(at), seed=7) for at in range(3)))
            (first,) = (package / "pids").read_text().split()
            os.kill(int(first), signal.SIGKILL)
            return [*found, await play("again", seed=7)]

    for one in asyncio.run(main()):
        assert one.outcome.ok and rewards(one) == [-0.25, 1.0], one.outcome
    pids = (package / "pids").read_text().split()
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids))


def test_the_server_of_a_package_ends_with_a_process_that_is_killed(package):
    async def main() -> None:
        async with working(configured("openenv:safe_env"), "7") as (play, interpreter):
            assert (await play("a", seed=7)).outcome.ok
            os.kill(interpreter.pid, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: not is_running(int((package / "pids").read_text())))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("safe_env.server.broken:app", "ended with status 1: "),
        ("safe_env.server.broken:app", "RuntimeError: no such game"),
        ("other_env", "no package here has other_env.server.app:app"),
    ],
)
def test_a_package_whose_server_does_not_start_is_a_mistake(name, words, package):
    async def main() -> None:
        await (await ForeignEnvironments.start(configured(f"openenv:{name}"))).close()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(main())
    assert words in str(caught.value)
