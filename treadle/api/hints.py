"""Argument hints: what to write instead, for arguments of TRL, models in memory, texts as tasks, and what was left out.

Owns words alone: whether something is a mistake is decided where the argument is read.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError, Mistake

_TRL_ARGUMENTS: Mapping[str, str] = {
    "train_dataset": "tasks=…",
    "eval_dataset": "validation_tasks=…",
    "reward_funcs": "reward=…",
    "max_steps": "steps=…, which counts batches of samples",
    "args": "keyword arguments: each argument of GRPOConfig is a key, such as **{'rollout.n': 8}",
    "peft_config": "actor={'lora': {'r': 8, 'alpha': 16}}",
    "processing_class": "model={'path': …, 'tokenizer_path': …}",
    "per_device_train_batch_size": "**{'data.train_batch_size': …}, in tasks and not in completions",
    "beta": "actor={'use_kl_loss': True, 'kl_loss_coef': …}",
}
"""Arguments of TRL's trainer and config that are no single key with the same value."""

_LEFT_OUT: Mapping[str, tuple[str, str]] = {
    "model.path": ("model", "model='HuggingFaceTB/SmolLM2-135M-Instruct', or a directory"),
    "data.train_files": ("tasks", "tasks=[{'prompt': …, 'answer': …}, …], a file, a datasets.Dataset or a function"),
    "data.val_files": ("validation_tasks", "validation_tasks=…, in the forms that tasks has"),
    "reward.functions": ("reward", "reward=… : a function of response and answer, or a name such as 'number_match'"),
}
"""Keys that a call sets by an argument: the argument, and how it is written."""


def explain_trl_argument(name: str, value: object) -> str | None:
    """What an argument of TRL is called here; None for one that TRL does not have."""
    if name in _TRL_ARGUMENTS:
        return f"TRL's {name} is {_TRL_ARGUMENTS[name]} here"
    from treadle.migrate.trl_arguments import DIRECT, TABLES

    key = DIRECT.get(name) or (TABLES[name][0] if name in TABLES else None)
    if key is None:
        return None
    shown = repr(value) if name in DIRECT and isinstance(value, bool | int | float | str) else "…"
    return f"TRL's {name} is the key {key} here: write **{{'{key}': {shown}}}"


def refuse_trl_reward(function: Callable[..., Any], argument: str) -> Mistake | None:
    """The mistake of a reward that wants a batch of completions, as TRL gives it; None for any other function."""
    try:
        parameter = inspect.signature(function).parameters.get("completions")
    except (TypeError, ValueError):
        return None
    if parameter is None or parameter.default is not parameter.empty:
        return None
    name = getattr(function, "__name__", "reward")
    problem = f"{name!r} takes completions, as TRL's rewards do: here a function scores one answer"
    fix = (
        f"write `def {name}(response, answer)` that returns a number, or take responses for a list of all samples of a "
        "task; `treadle init --from trl SCRIPT` writes functions around TRL's"
    )
    return Mistake(argument, problem, fix=fix)


def refuse_model_object(model: object) -> Mistake | None:
    """The mistake of a model that is in memory already; None for what may be a path or keys."""
    if isinstance(model, str | os.PathLike | Mapping) or not callable(getattr(model, "state_dict", None)):
        return None
    fix = "write model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR), and give model=DIR"
    return Mistake("model", f"must be a directory or a name, got a {type(model).__name__} in memory", fix=fix)


def refuse_texts(sources: Iterable[str], argument: str) -> None:
    """A ConfigError where a text that should name a file looks like a prompt."""
    for at, source in enumerate(sources):
        looks_named = any(sign in source for sign in "./:") and not any(sign in source for sign in " \n?")
        if not looks_named and not Path(source).expanduser().exists():
            problem = f"{source[:60]!r} is a text, and a text names a file here"
            fix = "write rows: tasks=[{'prompt': …, 'answer': …}]"
            raise ConfigError([Mistake(f"{argument}[{at}]", problem, fix=fix)])


def name_left_out(error: ConfigError, given: Mapping[str, object]) -> ConfigError:
    """The same mistakes; for a key that an argument sets, and that was not given, with that argument."""

    def name(mistake: Mistake) -> Mistake:
        argument, form = _LEFT_OUT.get(mistake.key, ("", ""))
        if not argument or given.get(argument) is not None:
            return mistake
        return replace(
            mistake, key=argument, problem=f"{mistake.problem} ({mistake.key})", origin=None, fix=f"give {form}"
        )

    return ConfigError([name(mistake) for mistake in error.mistakes])
