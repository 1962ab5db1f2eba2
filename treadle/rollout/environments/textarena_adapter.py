"""TextArena adapter: a game, `textarena:GuessTheNumber-v0`; standard library alone.

`environment_kwargs`: `seed`, `num_players` (1 unless given), and whatever the game's class takes. What the game says to
a player since its last turn is a message of the user; each player's reward comes at the end. TextArena draws from
Python's global random numbers: the draw of a game is by its seed, later draws of games that run side by side are not.
"""

from __future__ import annotations

import threading
from difflib import get_close_matches
from typing import Any

_RESETTING = threading.Lock()
"""Games seed the interpreter's random numbers, and draw from them until `reset` returns."""


def check(name: str) -> None:
    """LookupError where there is no such game."""
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        near = get_close_matches(name, list(ENV_REGISTRY), 3)
        hint = f"nearest: {', '.join(near)}" if near else f"it has {len(ENV_REGISTRY)}, such as GuessTheNumber-v0"
        raise LookupError(f"textarena has no game {name!r}; {hint}")


class TextArenaGame:
    """One game: of one player, or of several, who each have a seat."""

    def __init__(self, name: str, seed: int | None = None, num_players: int = 1, **kwargs: Any) -> None:
        import textarena

        self._name, self._seed, self._players = name, seed, num_players
        self._game = textarena.make(name, **kwargs)
        self._inner = self._game
        while hasattr(self._inner, "env"):  # wrappers repeat the whole game in every observation
            self._inner = self._inner.env

    def reset(self, task: Any) -> Any:
        with _RESETTING:
            try:
                self._game.reset(num_players=self._players, seed=self._seed)
            except AssertionError as error:
                players = "player" if self._players == 1 else "players"
                problem = f"textarena:{self._name} is no game of {self._players} {players}: {error}"
                raise ValueError(f"{problem}; set environment_kwargs.num_players") from error
        player, text = self._observe()
        if self._players == 1:
            return {"messages": text}
        return [{"messages": text, "first": True} if at == player else {} for at in range(self._players)]

    def step(self, action: Any) -> dict[str, Any]:
        done, _ = self._game.step(action=action.text)
        if not done:
            player, text = self._observe()
            return {"messages": text} if self._players == 1 else {"messages": text, "seat": player}
        rewards, info = self._game.close()
        missing = [at for at in range(self._players) if (rewards or {}).get(at) is None]
        if missing:
            raise RuntimeError(f"textarena:{self._name} ended without a reward for player {missing[0]}")
        notes = (info or {}).get(action.seat) or {}
        kept = {name: notes[name] for name in ("reason", "turn_count", "invalid_move") if name in notes}
        if self._players == 1:
            return {"done": True, "reward": float(rewards[0]), "info": kept}
        return {"done": True, "rewards": [float(rewards[at]) for at in range(self._players)], "info": kept}

    def _observe(self) -> tuple[int, str]:
        """The player whose turn it is, and what the game has told it since its last one, without its own words."""
        player, news = self._inner.get_observation()
        if isinstance(news, str):
            return player, news
        said = [text for sender, text, _ in news if sender != player]
        return player, "\n".join(said) or "Go on."
