"""The advantage estimators by name. Knows no formula."""

from collections.abc import Mapping

from treadle.algorithm.advantage import AdvantageEstimator, AdvantageInputs, Advantages
from treadle.algorithm.baselines import dr_grpo, gdpo, grpo, grpo_passk, opo, remax, rloo
from treadle.algorithm.choice import choose
from treadle.algorithm.token_baseline import optimal_token_baseline
from treadle.algorithm.whitened import gae, reinforce_plus_plus, reinforce_plus_plus_baseline
from treadle.config.algorithm import AlgorithmConfig

ESTIMATORS: Mapping[str, AdvantageEstimator] = {
    "grpo": grpo,
    "gdpo": gdpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "optimal_token_baseline": optimal_token_baseline,
    "gae": gae,
}


def find_estimator(adv_estimator: str) -> AdvantageEstimator:
    """The estimator of that name, or at that import path."""
    return choose(adv_estimator, ESTIMATORS, "algorithm.adv_estimator")


def compute_advantages(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """The advantages of a batch, by the configured estimator."""
    return find_estimator(algorithm.adv_estimator)(inputs, algorithm)
