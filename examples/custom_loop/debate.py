"""An agent that must hold its answer against doubt. The session keeps the tokens; the loop only says what happens."""

from treadle.config import RolloutConfig
from treadle.rollout import AgentLoopBase, Session


class Debate(AgentLoopBase):
    """Ask, doubt, ask again; as many rounds as the config says."""

    def __init__(self, rollout: RolloutConfig, rounds: int) -> None:
        super().__init__(rollout)
        self.rounds = rounds

    async def run(self, session: Session) -> None:
        first = await session.generate()
        for _ in range(self.rounds):
            await session.observe("Are you sure? Answer yes or no to the question once more.")
            if session.done:
                return
            last = await session.generate()
            session.extra["changed_its_mind"] = last.text != first.text
