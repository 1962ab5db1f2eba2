"""How values of old keys read here: words that are spelled otherwise, and numbers that are counted otherwise.

Each function fits `Convert`: it gets the old value and a way to look at other old keys.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from treadle.config.legacy.rule import Answer, Convert, Look, Nothing, Refused, Said

PROMPT, RESPONSE = 512, 512
"""The lengths verl assumes where nobody gives them."""


def words(table: Mapping[Any, Any], otherwise: str) -> Convert:
    """Values by name; an Answer in the table is given as it is, and a value that is not there is refused."""

    def convert(value: Any, look: Look) -> Answer:
        if isinstance(value, list | dict) or value not in table:
            return Refused(otherwise)
        found = table[value]
        if isinstance(found, Said | Nothing | Refused):
            return found
        return Said(found, "" if found == value else f"{_show(value)} is written {_show(found)}")

    return convert


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def unless_null(note: str) -> Convert:
    """The value as it is; null means that nobody set it."""
    return lambda value, look: Nothing(note) if value is None else Said(value)


NO_KL = "There is no such estimator: use k1 (kl), k2 (mse) or k3 (low_var_kl)."
_SAME_IN_BOTH = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "k2+": Said("k2", "k2+ is the same as k2"),
    "mse+": Said("k2", "mse+ is the same as k2"),
    "abs": Refused("The absolute difference estimates no KL divergence: use k1, k2 or k3."),
    "full": Refused("verl does not implement it either: use k1, k2 or k3."),
}
_PLUS = {"kl+": "k1+", "k1+": "k1+", "low_var_kl+": "k3+", "k3+": "k3+"}
_NO_GRADIENT = "a reward has no gradient, so the plus changes nothing"

kl_in_loss = words(_SAME_IN_BOTH | _PLUS, NO_KL)
"""Estimators in the loss: a plus keeps the value and takes the gradient of k2, there as here."""
kl_in_reward = words(
    _SAME_IN_BOTH | {old: Said(new.removesuffix("+"), _NO_GRADIENT) for old, new in _PLUS.items()}, NO_KL
)

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
aggregation = words(
    {name: name for name in AGGREGATIONS}, f"Token losses are not summed: use one of {', '.join(AGGREGATIONS)}."
)

number_format = words(
    {"fp32": "fp32", "float32": "fp32", "float": "fp32", "bf16": "bf16", "bfloat16": "bf16"},
    "Networks train and compute in fp32 or bf16.",
)

schedule = words(
    {"constant": "constant", "linear": "linear", "cosine": "cosine", None: Nothing("not given")},
    "After warm-up the learning rate is constant, linear, a cosine, or wsd.",
)


def warmup_steps(value: Any, look: Look) -> Answer:
    """verl reads null, 0 and negative numbers as: use the ratio."""
    if value is None or (isinstance(value, int) and value <= 0):
        return Nothing("the ratio counts")
    return Said(value)


def frequency(value: Any, look: Look) -> Answer:
    """verl never acts on a frequency of zero or less."""
    if (isinstance(value, int) and value < -1) or value == 0:
        return Said(-1, f"{value} is written -1")
    return Said(value)


def sequences_to_tokens(dynamic: str) -> Convert:
    """A micro batch counted in sequences becomes a token budget: that many sequences of full length.

    `dynamic` is the switch that makes verl read the token budget and leave this number alone.
    """

    def convert(value: Any, look: Look) -> Answer:
        if value is None:
            return Nothing("not given")
        if is_dynamic(look, dynamic):
            return Nothing("verl does not read it while use_dynamic_bsz is true; the token budget counts")
        prompt, response = lengths(look)
        if not all(isinstance(item, int) for item in (value, prompt, response)):
            return Refused("A micro batch is a number of tokens here, and this is no number of sequences.")
        return Said(value * (prompt + response), f"{value} sequences of {prompt} + {response} tokens")

    return convert


def token_budget(dynamic: str, sequences: str, parallel: Sequence[str] = ()) -> Convert:
    """A token budget, which verl reads only while `dynamic` is true; else it counts `sequences`.

    `parallel` are the keys of sequence parallelism: verl gives as many GPUs one micro batch of that many budgets.
    """

    def convert(value: Any, look: Look) -> Answer:
        if not is_dynamic(look, dynamic) and look(sequences) is not None:
            return Nothing(f"verl does not read it while use_dynamic_bsz is false; {sequences} counts")
        sizes = [size for size in map(look, parallel) if isinstance(size, int) and size > 1]
        if sizes and isinstance(value, int):
            return Said(value * sizes[0], f"{sizes[0]} GPUs share a micro batch in verl; here each GPU has one")
        return Said(value)

    return convert


def is_dynamic(look: Look, switch: str) -> bool:
    return bool(look(switch, look("actor_rollout_ref.actor.use_dynamic_bsz", False)))


def lengths(look: Look) -> tuple[Any, Any]:
    """The longest prompt and response, whichever of verl's two spellings gives them."""
    prompt = look("data.max_prompt_length", look("actor_rollout_ref.rollout.prompt_length", PROMPT))
    response = look("data.max_response_length", look("actor_rollout_ref.rollout.response_length", RESPONSE))
    return prompt, response


def greedy(temperature: str) -> Convert:
    """Not sampling is a temperature of zero, unless a temperature is given: verl's engines read only that."""

    def convert(value: Any, look: Look) -> Answer:
        if value is not False:
            return Nothing("the temperature says whether and how to sample")
        if look(temperature) is not None:
            return Nothing(f"verl's engines read {temperature} instead")
        return Said(0.0, "not sampling is a temperature of 0")

    return convert


def versions_behind(value: Any, look: Look) -> Answer:
    """A share of samples that may be stale when weights are handed over, as policy versions of which each step has one.

    Between two hand-overs verl trains several steps on samples of the same weights, and a share of further ones.
    """
    steps = look("async_training.trigger_parameter_sync_step", 4)
    if not isinstance(value, int | float) or isinstance(value, bool) or not isinstance(steps, int):
        return Refused("The bound on staleness is a number of policy versions.")
    behind = ceil(steps * (1 + value)) - 1
    note = f"weights are handed over every {steps} steps, and a share of {value} of the samples may be stale there"
    return Said(behind, f"{note}; here no sample is more than {behind} versions behind")


def equal_to(other: str, note: str, otherwise: str, default: Any = None) -> Convert:
    """A copy of another old key: nothing to write while the two agree."""

    def convert(value: Any, look: Look) -> Answer:
        return Nothing(note) if value is None or value == look(other, default) else Refused(otherwise)

    return convert


def section_class(name: str) -> Convert:
    """The sharded class of a section, from verl's strategy or from its class."""
    sharded = f"treadle.config.FSDP{name}Config"
    other = "There is no Megatron, VeOmni or TorchTitan backend: networks train on one device or with FSDP2."

    def convert(value: Any, look: Look) -> Answer:
        text = str(value)
        if text in ("fsdp", "fsdp2"):
            return Said(sharded, f"{text} is the class FSDP{name}Config")
        if text.startswith("verl."):
            last = text.rpartition(".")[2]
            if last.startswith("FSDP"):
                return Said(sharded)
            return (
                Nothing("the strategy says which class") if last in ("ActorConfig", "CriticConfig") else Refused(other)
            )
        return Refused(other)

    return convert
