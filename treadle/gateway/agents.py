"""Agent loops for agents we did not write: a program, or a function, that talks to the gateway as to any API.

    program_agent    starts a program for each session, with the gateway's address and key in its environment
    function_agent   calls a Python function with them; a number that it returns is the reward

Owns what a session's agent is given, how it is ended, and what becomes of its exit status. An agent has a directory of
its own and an environment of its own: nothing of this process's environment but what is named in `inherit_env`.
Waits: for the agent, until the session's deadline or a limit ends it; a program gets TERM, and KILL `TERM_S` later.
"""

import asyncio
import inspect
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

from treadle.aio import as_result, cancel_and_wait
from treadle.config import RolloutConfig
from treadle.config.plugin import load_object
from treadle.errors import ConfigError, LoopFailure, Mistake, blame
from treadle.gateway.agent_program import (
    TERM_S,
    AgentDirectory,
    AgentProgram,
    GraderProgram,
    default_environment,
    fill,
    template_problems,
    template_values,
    write_files,
)
from treadle.gateway.boxed_agent import BoxedAgent
from treadle.gateway.conversation import Conversation
from treadle.gateway.request import POLICY_MODEL
from treadle.gateway.server import GatewayServer, GatewaySession
from treadle.gateway.session_tree import TurnNode
from treadle.rollout.agent_loop import AgentLoopBase
from treadle.rollout.session import Session
from treadle.sandbox.providers import check_provider
from treadle.types import StopReason

log = logging.getLogger(__name__)

MAX_EXTRA_CHARS = 1_000_000
"""Of what a function returns, as JSON."""


class GatewayAgentLoop(AgentLoopBase):
    """What both loops share: a server for the worker, and a conversation for the session."""

    @classmethod
    async def open_worker(cls, rollout: RolloutConfig) -> GatewayServer:
        """ConfigError where programs are to run in boxes that cannot be had here, or do not reach the gateway."""
        if rollout.boxes_agents():
            await asyncio.to_thread(check_provider, "rollout.sandbox", rollout.sandbox, bridged=True)
        server = await GatewayServer.start(rollout.gateway)
        _warn_of_few_files(rollout, server.max_connections)
        return server

    async def run(self, session: Session) -> None:
        server = self.worker_part
        assert isinstance(server, GatewayServer), "workers open it before the first session"
        rollout = self.rollout
        conversation = Conversation(
            session,
            train=rollout.gateway.train,
            max_turns=rollout.multi_turn.max_assistant_turns,
            retries=rollout.failures.request_retries,
        )
        opened = server.open(conversation)
        agent = asyncio.ensure_future(self._run_agent(session, opened, server.url))
        over = asyncio.ensure_future(conversation.over.wait())
        try:
            with session.at("agent", "started"):
                await asyncio.wait({agent, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            await cancel_and_wait(agent, give_up_s=2 * TERM_S)
            server.close_session(opened)
            last = await conversation.close()
        if conversation.failure is not None:
            raise conversation.failure
        reward = None if agent.cancelled() or not agent.done() else self._result(agent, session, conversation)
        self._settle(session, opened, last, reward)

    def _result(
        self, agent: "asyncio.Task[float | None]", session: Session, conversation: Conversation
    ) -> float | None:
        """What the agent returned, or the failure it ended with: an engine's first, whatever the agent made of that."""
        failure = conversation.open_failure()
        if failure is not None:
            raise failure
        if agent.exception() is not None and conversation.has_run_out:
            session.end(StopReason.LENGTH)
        if session.ended is not None:  # a limit has ended it: how it took that says nothing
            return None if agent.exception() is not None else agent.result()
        return agent.result()

    def _settle(self, session: Session, opened: GatewaySession, last: TurnNode | None, reward: float | None) -> None:
        if last is None:
            raise LoopFailure(f"the agent asked for no turn of the model {POLICY_MODEL!r} that trains")
        if opened.notes:
            session.extra["notes"] = opened.notes
        reward = opened.reward if reward is None else reward
        last.session.score_turn(reward, last.mark)

    async def _run_agent(self, session: Session, opened: GatewaySession, url: str) -> float | None:
        raise NotImplementedError


def _warn_of_few_files(rollout: RolloutConfig, max_connections: int) -> None:
    """One line where more sessions may be open in a worker than it can hold connections for."""
    engines = rollout.replicas_per_node * max(1, rollout.nnodes)
    sessions = -(-rollout.num_places(engines) // (rollout.agent.num_workers or 1))
    if sessions > max_connections:
        log.warning(
            "%d sessions may be open in this agent worker, and its limit of open files leaves %d connections: agents "
            "beyond those meet closed connections. Raise the hard limit (ulimit -Hn), set rollout.agent.num_workers "
            "to %d or more, or lower rollout.agent.max_concurrent_sessions",
            sessions,
            max_connections,
            -(-rollout.num_places(engines) // max_connections),
        )


class CoroutineThread:
    """One coroutine of an agent in a thread, with an event loop of its own: one that blocks holds up itself alone.

    Invariant: it is cancelled with whoever awaits it, and has `TERM_S` to clean up; then it is left alone, with a line
    in the log. Its thread does not keep the process from ending.
    """

    def __init__(self, begin: Callable[[], Awaitable[Any]]) -> None:
        self._begin = begin
        self._ours = asyncio.get_running_loop()
        self._ended = self._ours.create_future()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._is_cancelled = False

    async def run(self) -> Any:
        """What the coroutine returns or raises."""
        threading.Thread(target=copy_context().run, args=(self._serve,), name="treadle-agent", daemon=True).start()
        try:
            await asyncio.wait({self._ended})
        except asyncio.CancelledError:
            self._cancel()
            await asyncio.wait({self._ended}, timeout=TERM_S)
            if not self._ended.done():
                log.warning("an agent function did not end within %g s of its session, and was left alone", TERM_S)
            raise
        value, error = self._ended.result()
        if error is not None:
            raise error
        return value

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._running is not None:
            loop, task = self._running
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)

    def _serve(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._report(runner.run(as_result(self._work())))  # before the threads that the agent has left
        except BaseException as error:  # noqa: BLE001  it is raised where the agent is awaited
            self._report((None, error))

    def _report(self, ended: tuple[Any, BaseException | None]) -> None:
        """The first report counts: closing the loop may raise behind it."""

        def report() -> None:
            if not self._ended.done():
                self._ended.set_result(ended)

        with suppress(RuntimeError):  # the worker has ended meanwhile
            self._ours.call_soon_threadsafe(report)

    async def _work(self) -> Any:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._running = asyncio.get_running_loop(), task
        if self._is_cancelled:
            raise asyncio.CancelledError
        return await self._begin()


class FunctionAgentLoop(GatewayAgentLoop):
    """Calls `agent(base_url, api_key, task)`, async or plain. It returns a reward, a dict of notes, or nothing.

    A coroutine runs in a thread, too, with a loop of its own: the loop of this worker serves what it asks for.
    """

    def __init__(self, rollout: RolloutConfig, function: str, kwargs: Mapping[str, Any] | None = None) -> None:
        super().__init__(rollout)
        found = load_object(function, "rollout.agent.loops.function_agent.kwargs.function")
        if not callable(found):
            problem = f"{function} is not a function"
            raise ConfigError([Mistake("rollout.agent.loops.function_agent.kwargs.function", problem, function)])
        self._function: Callable[..., Any] = partial(found, **(kwargs or {}))

    async def _run_agent(self, session: Session, opened: GatewaySession, url: str) -> float | None:
        call = partial(self._function, base_url=f"{url}/v1", api_key=opened.key, task=session.task)
        with blame(LoopFailure):
            if inspect.iscoroutinefunction(self._function):
                value = await CoroutineThread(call).run()
            else:
                value = await session.in_thread(call, self.rollout.limits.session_timeout_s)
                value = await CoroutineThread(lambda: value).run() if inspect.isawaitable(value) else value
        return self._read_value(value, session)

    def _read_value(self, value: Any, session: Session) -> float | None:
        """A number is the reward; a dict is kept with the trajectory, its `reward` apart."""
        if isinstance(value, Mapping):
            notes = dict(value)
            value = notes.pop("reward", None)
            try:
                written = json.dumps(notes)
            except (TypeError, ValueError) as error:
                raise LoopFailure(f"the agent returned a dict that is not plain JSON: {error}") from None
            if len(written) > MAX_EXTRA_CHARS:
                raise LoopFailure(f"the agent returned {len(written)} characters; {MAX_EXTRA_CHARS} are kept")
            if notes:
                session.extra["notes"] = json.loads(written)
        if value is None:
            return None
        if isinstance(value, bool | int | float) and math.isfinite(value):
            return float(value)
        raise LoopFailure(
            f"the agent returned {type(value).__name__} {str(value)[:80]!r}: not a number, a dict or None"
        )


_PROGRAM_KEY = "rollout.agent.loops.program_agent.kwargs"


def _text_mistakes(templates: Mapping[str, Sequence[str]], paths: Mapping[str, Sequence[str]]) -> Iterator[Mistake]:
    """What is wrong with texts of a program's arguments, by the argument's name."""
    for name in ("argv", "grader"):
        if isinstance(templates[name], str) or (name == "argv" and not templates[name]):
            problem = "must be a list: the program and its arguments"
            yield Mistake(f"{_PROGRAM_KEY}.{name}", problem, templates[name])
    for name, texts in templates.items():
        problems = (problem for text in list(texts) for problem in template_problems(str(text)))
        yield from (Mistake(f"{_PROGRAM_KEY}.{name}", problem) for problem in problems)
    for name, listed in paths.items():
        for path in listed:
            if Path(path).is_absolute() or ".." in Path(path).parts:
                problem = f"{path!r} is not a path inside the session's directory"
                yield Mistake(f"{_PROGRAM_KEY}.{name}", problem, path)


class ProgramAgentLoop(GatewayAgentLoop):
    """Runs a program in a directory of its own. `argv`, `env` and `files` may hold `{{name}}`: see `TEMPLATE_NAMES`."""

    def __init__(
        self,
        rollout: RolloutConfig,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        inherit_env: Sequence[str] = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE"),
        ok_statuses: Sequence[int] = (0,),
        keep_directory: bool = False,
        sandbox: bool = False,
        artifacts: Sequence[str] = (),
        grader: Sequence[str] = (),
    ) -> None:
        super().__init__(rollout)
        templates = {"argv": argv, "env": [*(env or {}).values()], "files": [*(files or {}).values()], "grader": grader}
        paths = {"files": [*(files or {})], "artifacts": artifacts if grader else ()}
        mistakes = [*_text_mistakes(templates, paths)]
        if sandbox and keep_directory:
            problem = "a box's files are lost: name artifacts instead"
            mistakes.append(Mistake(f"{_PROGRAM_KEY}.keep_directory", problem, True))
        if artifacts and not sandbox:
            problem = "are files of a box: set sandbox: true, too"
            mistakes.append(Mistake(f"{_PROGRAM_KEY}.artifacts", problem, artifacts))
        if grader and sandbox and not artifacts:
            fix = "name the files that it grades in artifacts"
            mistakes.append(Mistake(f"{_PROGRAM_KEY}.grader", "cannot look into a box", grader, fix=fix))
        if mistakes:
            raise ConfigError(mistakes)
        self._argv = [str(word) for word in argv]
        self._env = {name: str(value) for name, value in (env or {}).items()}
        self._files = dict(files or {})
        self._inherited = {name: os.environ[name] for name in inherit_env if name in os.environ}
        self._ok_statuses = frozenset(ok_statuses)
        self._keep_directory = keep_directory
        self._sandbox = sandbox
        self._artifacts = tuple(artifacts)
        self._grader = GraderProgram(grader, self._inherited) if grader else None

    def missing(self) -> Sequence[Mistake]:
        """The program, where it is not found as its session would find it."""
        program = self._argv[0]
        if self._sandbox or program == "python" or "{{" in program or ("/" in program and program[0] != "/"):
            return ()  # of a box, this interpreter, known with a task only, or in the session's directory
        path = self._env.get("PATH", self._inherited.get("PATH", os.defpath))
        if shutil.which(program, path=path):
            return ()
        problem = f"there is no program {program!r} in the PATH of its sessions ({path})"
        fix = "install it, give its whole path, or name its directory in env.PATH"
        return [Mistake(f"{_PROGRAM_KEY}.argv", problem, program, fix=fix, missing="program")]

    async def _run_agent(self, session: Session, opened: GatewaySession, url: str) -> float | None:
        if self._sandbox:
            boxed = BoxedAgent(self._argv, self._env, self._files, self._inherited, self._artifacts)
            result = await boxed.run(session, opened.key, url, self.rollout)
            self._note_end(session, result.code, boxed.stdout, boxed.stderr, boxed.explain(result.code))
            if self._grader is not None:
                await self._grader.run_on_files(session, opened, url, boxed.files)
            return None
        made = await asyncio.to_thread(AgentDirectory.make, session.task.uid, session.sample, keep=self._keep_directory)
        directory = made.path
        try:
            values = template_values(session.task, url, opened.key, directory)
            await asyncio.to_thread(write_files, directory, {k: fill(v, values) for k, v in self._files.items()})
            environment = {
                **self._inherited,
                **default_environment(url, opened.key, directory),
                **{name: fill(value, values) for name, value in self._env.items()},
            }
            argv = [fill(word, values) for word in self.argv_of(session)]
            program = AgentProgram(argv, environment, directory, made.lock)
            status = await program.run()
            reward = await asyncio.to_thread(self.read_result, directory, session)
            self._note_end(session, status, program.stdout, program.stderr, program.explain(status))
            if self._grader is not None:
                await self._grader.run(session, opened, url, directory)
        finally:
            if self._keep_directory:
                session.extra["agent_directory"] = str(directory)
            else:
                await asyncio.to_thread(made.remove)
        return reward

    def argv_of(self, session: Session) -> Sequence[str]:
        """The program and its arguments, as templates."""
        return self._argv

    def read_result(self, directory: Path, session: Session) -> float | None:
        """The reward that the program has left in its directory; read when it has ended."""
        return None

    def _note_end(self, session: Session, status: int, stdout: str, stderr: str, problem: str) -> None:
        """Keep what the program said; a LoopFailure where its status is none of those that are fine."""
        session.extra["agent"] = {"status": status, "stdout": stdout, "stderr": stderr}
        if status not in self._ok_statuses and session.ended is None:
            raise LoopFailure(problem)
