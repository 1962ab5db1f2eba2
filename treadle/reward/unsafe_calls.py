"""Reward functions that may run a model's text: uses of exec, eval, a shell and the like that they reach, found unrun.

Owns the default of `reward.functions.NAME.sandbox`: on where such a use is found and workers run, else as the key says;
and the words for both. What counts is in `source_scan`, which reads sources; serialized functions are read by
`pickle_scan`, and neither is imported. A hint, and no proof: text may reach code in many other ways.
"""

import sys
from collections.abc import Iterator

from treadle.config import RewardConfig
from treadle.config.plugin import source_file
from treadle.config.reward import RewardFunctionConfig
from treadle.reward.pickle_scan import find_in_pickle
from treadle.reward.source_scan import SourceScan, runs_text


def find_text_run(function: RewardFunctionConfig) -> str | None:
    """The first use that may run text which a function reaches, in words; None for a built-in."""
    module, colon, name = function.path.rpartition(":")
    if not colon or module.startswith("treadle."):
        return None
    if module.endswith(".pkl"):
        file = source_file(module)
        return None if file is None else find_in_pickle(file)
    if runner := runs_text(f"{module}.{name}"):
        return f"{runner} runs text"
    found = SourceScan().find(module, name)
    return None if found is None else str(found)


def fenced_by_default(reward: RewardConfig, function: RewardFunctionConfig) -> str | None:
    """The use for which a function is sandboxed though its key does not say so; None where it is not."""
    if function.sandbox is not None or function.python is not None:
        return None
    if reward.num_workers == 0 or sys.platform != "linux":
        return None
    return find_text_run(function)


def find_fenced(reward: RewardConfig) -> Iterator[str]:
    """A line for each function that is sandboxed by default: why, and the key that turns it off, if there is one."""
    for name, function in reward.functions.items():
        if found := fenced_by_default(reward, function):
            yield f"{name} is sandboxed, since {found}; reward.functions.{name}.sandbox=false turns that off"
    for name, judge in reward.judges.items():
        parser = judge.parser_function()
        if parser is not None and (found := fenced_by_default(reward, parser)):
            yield f"the parser of judge {name} is sandboxed, since {found}"


def find_unsafe_calls(reward: RewardConfig) -> Iterator[str]:
    """A warning for each function of the user's that has such a use and no sandbox."""
    for name, function in reward.functions.items():
        if function.sandbox or fenced_by_default(reward, function) is not None:
            continue
        found = find_text_run(function)
        if found is not None and function.python is not None:
            yield (
                f"reward.functions.{name}: {found}: answers that reach it run as you, with your files and network: a "
                "function with python has no sandbox: leave python out, or run programs by the built-in code_tests"
            )
        elif found is not None:
            yield (
                f"reward.functions.{name}: {found}: answers that reach it run as you, with your files and network: "
                f"set reward.functions.{name}.sandbox=true, and run programs by treadle.reward.sandbox.run_python or "
                "the built-in code_tests, where they cannot decide their own score"
            )
    for name, judge in reward.judges.items():
        parser = judge.parser_function()
        if parser is None or fenced_by_default(reward, parser) is not None or (found := find_text_run(parser)) is None:
            continue
        fix = "set reward.num_workers to 1 or more"
        yield f"reward.judges.{name}.parser: {found}: answers that reach it run as you: {fix}"
