"""Ray cluster: the parts of a run there, placed, watched and restarted by Ray, around the classes that run in process.

    driver                                             actors, each in a process of its own
    ──────                                             ────────────────────────────────────
    Dispatcher ─► RemoteAgentWorker ══ socket ═════►   ProcessActor   agent loops and tools: `serve_worker`
               └► RemoteScorer ═══════ socket ═════►   ProcessActor   reward functions: `serve_scorer`
    Router ─────► RayReplica ═════════ socket ═════►   ProcessActor   an engine: `serve_engine`             ◄─┐ weights
    train_step ─► RemoteRanks ──────── Ray calls ──►   RankActor      policy, reference model, critic ────────┘

Ray decides where an actor runs, keeps it in its bundle, tells of its death and, unless told otherwise, carries
weights (`RankSender`).
What happens thousands of times a second, requests and their answers, goes over one socket for each actor, with the
messages that worker processes speak: a Ray call costs more processor time than a whole turn may.
"""

from importlib.util import find_spec

from treadle.config import ClusterConfig
from treadle.errors import ConfigError, Mistake


def require_ray(cluster: ClusterConfig) -> None:
    """Refuse a config that asks for Ray where Ray is not installed."""
    if find_spec("ray") is None:
        problem = "Ray is not installed"
        fix = "install it with `pip install 'ray>=2.49'`, or use cluster.backend=local"
        origin = cluster.origin("backend")
        raise ConfigError([Mistake("cluster.backend", problem, cluster.backend, origin, fix, "package")])
