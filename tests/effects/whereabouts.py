"""An environment that says which process it is in; without treadle, so that any interpreter can import it."""

import sys


class Whereabouts:
    def reset(self, task):
        return {"messages": "Where?"}

    def step(self, action):
        return {"done": True, "reward": 1.0, "info": {"is_foreign": "foreign_main" in sys.argv[0]}}
