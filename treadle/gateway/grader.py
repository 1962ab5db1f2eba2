"""Grader program: gives the reward of an agent program, after that has ended, with the session's second key.

Owns what a grader is given: the task, the directory that the agent worked in, and the address and key for rewards and
notes, in `TREADLE_NOTES_URL` and `TREADLE_NOTES_KEY`. Its home and its working directory are its own and empty: nothing
that the agent has written is run or imported by accident. Any status but 0 is a failure of the reward.
Waits: for the program, until the session's deadline ends it.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from treadle.errors import RewardFailure
from treadle.gateway.agent_program import AgentProgram, fill, template_values
from treadle.gateway.server import NOTES, GatewaySession
from treadle.rollout.session import Session


class GraderProgram:
    """One grader, for all sessions of a loop."""

    def __init__(self, argv: Sequence[str], inherited: Mapping[str, str]) -> None:
        self._argv = [str(word) for word in argv]
        self._inherited = inherited

    async def run(self, session: Session, opened: GatewaySession, url: str, directory: Path) -> None:
        """Grade what an agent has left in its directory; what it posts is in `opened` then."""
        values = template_values(session.task, url, "", directory)
        home = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="treadle-grader-")
        environment = {
            **self._inherited,
            "HOME": home.name,
            "TMPDIR": home.name,
            "PYTHONUNBUFFERED": "1",
            "TREADLE_NOTES_URL": f"{url}{NOTES}",
            "TREADLE_NOTES_KEY": opened.notes_key,
        }
        program = AgentProgram([fill(word, values) for word in self._argv], environment, Path(home.name))
        try:
            status = await program.run()
        finally:
            await asyncio.to_thread(home.cleanup)
        if status != 0:
            raise RewardFailure(f"the grader: {program.explain(status)}")
