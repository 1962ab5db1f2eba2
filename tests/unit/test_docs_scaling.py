"""What docs/scaling.md says of restarts is what their policies say."""

import ast
from pathlib import Path

import treadle
from treadle.process.supervisor import RestartPolicy

ROOT = Path(treadle.__file__).parent
PAGE = " ".join((ROOT.parent / "docs" / "scaling.md").read_text(encoding="utf-8").split())
POLICIES = {
    "process/supervisor.py": "that of an engine or a classifier",  # the default, of a replica supervisor
    "reward/classifier/process.py": "that of an engine or a classifier",
    "rollout/remote_worker.py": "that of an agent worker, of the scorer on Ray or of another interpreter",
    "cluster/ray/scorer.py": "that of an agent worker, of the scorer on Ray or of another interpreter",
    "process/foreign.py": "that of an agent worker, of the scorer on Ray or of another interpreter",
    "reward/worker_pool.py": "That of a reward worker is not",
}
"""The words of the page for the policy that each file has."""


def test_the_page_has_the_waits_of_every_restart_policy():
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == RestartPolicy.__name__:
                numbers = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
                found[file.relative_to(ROOT).as_posix()] = RestartPolicy(**numbers)
    assert set(found) == set(POLICIES), "a restart policy that the page does not know"
    missing = [words for name, words in POLICIES.items() if _say(words, found[name]) not in PAGE]
    assert missing == []


def _say(words: str, policy: RestartPolicy) -> str:
    waits = [f"{policy.wait_s(attempt):g}" for attempt in range(2, policy.attempts + 1)]
    return f"{words} after {' and '.join(waits)} s" if waits else words
