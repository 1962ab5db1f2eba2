"""Migration rules: the vocabulary of the tables (same, to, fixed, none), and conversions of values.

    "actor_rollout_ref.rollout.n": to("rollout.n"),
    "algorithm.kl_penalty": same(kl_in_reward),
    "actor_rollout_ref.rollout.mode": fixed("async", note="the rollout is always asynchronous"),
    "actor_rollout_ref.rollout.profiler.**": none("There is no profiler section; …"),

A key that ends in `.**` is a rule for itself and for everything below it, unless there is one for a longer key. A
conversion gets the old value and a way to look at other old keys. Knows no key, neither old nor new.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import Any, Protocol

BELOW = ".**"
"""The ending of a rule for a whole subtree."""


class RuleKind(StrEnum):
    """The three things that can become of an old key."""

    MAPPED = "mapped"
    SAME = "same"
    NONE = "none"


class LookUp(Protocol):
    """The value another old key has, all layers considered; `default` where it is not given."""

    def __call__(self, old: str, default: Any = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class Converted:
    """A value that can be written, values of further keys that follow from it, and a word about the difference."""

    value: Any
    note: str = ""
    also: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """Nothing needs to be written, and why."""

    note: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The value cannot be written here, and why."""

    reason: str


Conversion = Converted | NotNeeded | Refused
Convert = Callable[[Any, LookUp], Conversion]


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of one old key. Without `convert` the value is written as it is."""

    kind: RuleKind
    targets: tuple[str, ...] = ()
    convert: Convert | None = None
    reason: str = ""


Rules = dict[str, Rule]


def to(*targets: str, convert: Convert | None = None) -> Rule:
    """The key moved. With several targets, `convert` says which get a value."""
    return Rule(RuleKind.MAPPED, targets, convert)


def same(convert: Convert | None = None) -> Rule:
    """The key is spelled alike here; its values may not be."""
    return Rule(RuleKind.SAME, (), convert)


def none(reason: str) -> Rule:
    """The key has no counterpart: why, and what to do instead."""
    return Rule(RuleKind.NONE, (), None, reason)


def fixed(*values: Any, note: str, otherwise: str | None = None) -> Rule:
    """No key is needed for `values`, which is how things always are here. Other values are refused."""

    def convert(value: Any, look: LookUp) -> Conversion:
        return (
            NotNeeded(note) if value in values else Refused(otherwise or f"Only {_list(values)} is possible: {note}.")
        )

    return asked(convert)


def ignored(note: str) -> Rule:
    """No key is needed, whatever the value: it changes nothing that could be observed here."""
    return asked(lambda value, look: NotNeeded(note))


def asked(convert: Convert) -> Rule:
    """No key of its own: `convert` says why nothing needs writing, or refuses."""
    return Rule(RuleKind.MAPPED, (), convert)


def _list(values: tuple[Any, ...]) -> str:
    words = {True: "true", False: "false", None: "null"}
    return " or ".join(words[item] if item is None or isinstance(item, bool) else str(item) for item in values)


def under(prefix: str, rules: Rules) -> Rules:
    """The rules of one old section, written without its prefix."""
    return {f"{prefix}.{name}": rule for name, rule in rules.items()}


def moved(old: str, new: str, names: str, convert: Convert | None = None) -> Rules:
    """Keys that moved from one section to another and kept their names."""
    return {f"{old}.{name}": to(f"{new}.{name}", convert=convert) for name in names.split()}


def kept(section: str, names: str) -> Rules:
    """Keys that are spelled alike."""
    return {f"{section}.{name}": same() for name in names.split()}


def nones(prefix: str, names: str, reason: str) -> Rules:
    """Keys that have no counterpart, all for one reason."""
    return {f"{prefix}.{name}": none(reason) for name in names.split()}


def classes(prefix: str, names: str = "") -> Rules:
    """`_target_` of sections whose class needs no saying; `.` stands for the section itself."""
    paths = [prefix if name == "." else f"{prefix}.{name}" for name in (names or ".").split()]
    return {f"{path}._target_": class_of_verl for path in paths}


def _check_class(value: Any, look: LookUp) -> Conversion:
    if value is None or str(value).startswith("verl."):
        return NotNeeded("a section has its class by itself")
    return Refused("Only classes of treadle.config may be named in _target_.")


class_of_verl = asked(_check_class)
"""The rule of one such `_target_`."""


PROMPT, RESPONSE = 512, 512
"""The lengths verl assumes where none are given."""


def by_table(table: Mapping[Any, Any], otherwise: str) -> Convert:
    """Values by name; an Conversion in the table is given as it is, and a value that is not there is refused."""

    def convert(value: Any, look: LookUp) -> Conversion:
        if isinstance(value, list | dict) or value not in table:
            return Refused(otherwise)
        found = table[value]
        if isinstance(found, Converted | NotNeeded | Refused):
            return found
        return Converted(found, "" if found == value else f"{_show(value)} is written {_show(found)}")

    return convert


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def unless_null(note: str) -> Convert:
    """The value as it is; null means that it is not set."""
    return lambda value, look: NotNeeded(note) if value is None else Converted(value)


NO_KL = "There is no such estimator: use k1 (kl), k2 (mse) or k3 (low_var_kl)."
_SAME_IN_BOTH = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "k2+": Converted("k2", "k2+ is the same as k2"),
    "mse+": Converted("k2", "mse+ is the same as k2"),
    "abs": Refused("The absolute difference estimates no KL divergence: use k1, k2 or k3."),
    "full": Refused("verl does not implement it either: use k1, k2 or k3."),
}
_PLUS = {"kl+": "k1+", "k1+": "k1+", "low_var_kl+": "k3+", "k3+": "k3+"}
_NO_GRADIENT = "a reward has no gradient, so the plus changes nothing"

kl_in_loss = by_table(_SAME_IN_BOTH | _PLUS, NO_KL)
"""Estimators in the loss: a plus keeps the value and takes the gradient of k2, there as here."""
kl_in_reward = by_table(
    _SAME_IN_BOTH | {old: Converted(new.removesuffix("+"), _NO_GRADIENT) for old, new in _PLUS.items()}, NO_KL
)

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
aggregation = by_table(
    {name: name for name in AGGREGATIONS}, f"Token losses are not summed: use one of {', '.join(AGGREGATIONS)}."
)

dtype = by_table(
    {"fp32": "fp32", "float32": "fp32", "float": "fp32", "bf16": "bf16", "bfloat16": "bf16"},
    "Networks train and compute in fp32 or bf16.",
)

schedule = by_table(
    {"constant": "constant", "linear": "linear", "cosine": "cosine", None: NotNeeded("not given")},
    "After warm-up the learning rate is constant, linear, a cosine, or wsd.",
)


def warmup_steps(value: Any, look: LookUp) -> Conversion:
    """verl reads null, 0 and negative numbers as: use the ratio."""
    if value is None or (isinstance(value, int) and value <= 0):
        return NotNeeded("the ratio counts")
    return Converted(value)


def frequency(value: Any, look: LookUp) -> Conversion:
    """verl never acts on a frequency of zero or less."""
    if (isinstance(value, int) and value < -1) or value == 0:
        return Converted(-1, f"{value} is written -1")
    return Converted(value)


def sequences_to_tokens(dynamic: str) -> Convert:
    """A micro batch counted in sequences becomes a token budget: that many sequences of full length.

    `dynamic` is the switch that makes verl read the token budget and leave this number alone.
    """

    def convert(value: Any, look: LookUp) -> Conversion:
        if value is None:
            return NotNeeded("not given")
        if is_dynamic(look, dynamic):
            return NotNeeded("verl does not read it while use_dynamic_bsz is true; the token budget counts")
        prompt, response = lengths(look)
        if not all(isinstance(item, int) for item in (value, prompt, response)):
            return Refused("A micro batch is a number of tokens here, and this is no number of sequences.")
        return Converted(value * (prompt + response), f"{value} sequences of {prompt} + {response} tokens")

    return convert


def token_budget(dynamic: str, sequences: str, parallel: Sequence[str] = ()) -> Convert:
    """A token budget, which verl reads only while `dynamic` is true; else it counts `sequences`.

    `parallel` are the keys of sequence parallelism: verl gives as many GPUs one micro batch of that many budgets.
    """

    def convert(value: Any, look: LookUp) -> Conversion:
        if not is_dynamic(look, dynamic) and look(sequences) is not None:
            return NotNeeded(f"verl does not read it while use_dynamic_bsz is false; {sequences} counts")
        sizes = [size for size in map(look, parallel) if isinstance(size, int) and size > 1]
        if sizes and isinstance(value, int):
            return Converted(value * sizes[0], f"{sizes[0]} GPUs share a micro batch in verl; here each GPU has one")
        return Converted(value)

    return convert


def is_dynamic(look: LookUp, switch: str) -> bool:
    return bool(look(switch, look("actor_rollout_ref.actor.use_dynamic_bsz", False)))


def lengths(look: LookUp) -> tuple[Any, Any]:
    """The longest prompt and response, whichever of verl's two spellings gives them."""
    prompt = look("data.max_prompt_length", look("actor_rollout_ref.rollout.prompt_length", PROMPT))
    response = look("data.max_response_length", look("actor_rollout_ref.rollout.response_length", RESPONSE))
    return prompt, response


def greedy(temperature: str) -> Convert:
    """Not sampling is a temperature of zero, unless a temperature is given: verl's engines read only that."""

    def convert(value: Any, look: LookUp) -> Conversion:
        if value is not False:
            return NotNeeded("the temperature says whether and how to sample")
        if look(temperature) is not None:
            return NotNeeded(f"verl's engines read {temperature} instead")
        return Converted(0.0, "not sampling is a temperature of 0")

    return convert


def versions_behind(value: Any, look: LookUp) -> Conversion:
    """A share of samples that may be stale when weights are handed over, as policy versions of which each step has one.

    Between two hand-overs verl trains several steps on samples of the same weights, and a share of further ones.
    """
    steps = look("async_training.trigger_parameter_sync_step", 4)
    if not isinstance(value, int | float) or isinstance(value, bool) or not isinstance(steps, int):
        return Refused("The bound on staleness is a number of policy versions.")
    behind = ceil(steps * (1 + value)) - 1
    note = f"weights are handed over every {steps} steps, and a share of {value} of the samples may be stale there"
    return Converted(behind, f"{note}; here no sample is more than {behind} versions behind")


def equal_to(other: str, note: str, otherwise: str, default: Any = None) -> Convert:
    """A copy of another old key: nothing to write while the two agree."""

    def convert(value: Any, look: LookUp) -> Conversion:
        return NotNeeded(note) if value is None or value == look(other, default) else Refused(otherwise)

    return convert


def section_class(name: str) -> Convert:
    """The sharded class of a section, from verl's strategy or from its class."""
    sharded = f"treadle.config.FSDP{name}Config"
    other = "There is no Megatron, VeOmni or TorchTitan backend: networks train on one device or with FSDP2."

    def convert(value: Any, look: LookUp) -> Conversion:
        text = str(value)
        if text in ("fsdp", "fsdp2"):
            return Converted(sharded, f"{text} is the class FSDP{name}Config")
        if text.startswith("verl."):
            last = text.rpartition(".")[2]
            if last.startswith("FSDP"):
                return Converted(sharded)
            return (
                NotNeeded("the strategy says which class")
                if last in ("ActorConfig", "CriticConfig")
                else Refused(other)
            )
        return Refused(other)

    return convert
