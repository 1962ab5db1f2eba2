"""Which families of decoders are computed as their authors wrote them: a table of all that transformers has.

    python bench/architectures.py [family ...] [--out docs/models.md]

Each family's own default config, and the configs of `tests/small_models.py` for features that defaults leave out, go
through the parity that `treadle` runs before it loads a model. Prints one line for each: the largest difference of a
logprob in the policy, of a gradient, through fused layers and in the embedded engine, and the verdict. With `--out` the
table is written into a page, between its two marks. A family takes a second or two on a free core.
"""

import argparse
import logging
import warnings
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.small_models import CONFIGS, make_config
from treadle.engine.native.parity import ModelParity, check_parity

MARKS = ("<!-- families -->", "<!-- end of families -->")
HEAD = "| family | policy, nats | gradients | fused, nats | engine, nats | verdict |\n|---|---|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="those to try; all, if none is given")
    parser.add_argument("--out", type=Path, help="the page to write the table into")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = arguments.families or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *CONFIGS})
    lines = []
    print(HEAD, flush=True)
    for name in names:
        line = describe(name)
        if line is not None:
            lines.append(line)
            print(line, flush=True)
    right = [line for line in lines if line.endswith("| policy and engine |")]
    total = f"{len(right)} of {len(lines)} run in policy and engine"
    print(total)
    if arguments.out is not None:
        page = arguments.out.read_text(encoding="utf-8")
        before, rest = page.split(MARKS[0])
        table = "\n".join([MARKS[0], "", HEAD, *lines, "", f"{total}.", MARKS[1]])
        arguments.out.write_text(before + table + rest.split(MARKS[1])[1], encoding="utf-8")


def describe(name: str) -> str | None:
    """A line of the table; None for what is no text decoder by itself, or has no config by default."""
    try:
        config: PreTrainedConfig = make_config(name)
    except Exception:  # noqa: BLE001 - a config of several parts, which has no default
        return None
    if getattr(config, "text_config", None) is not None:
        return None
    found = check_parity(config)
    policy, engine = found.policy, found.engine
    differences = (policy.logprobs, policy.gradients, policy.fused, None if engine is None else engine.logprobs)
    cells = ["" if value is None else f"{value:.0e}" for value in differences]
    return f"| {name} | {' | '.join(cells)} | {verdict(found)} |"


def verdict(found: ModelParity) -> str:
    if found.policy.problem is not None:
        return f"refused: {found.policy.problem}".replace("|", "/")
    if found.problem is not None:
        return f"policy only; {found.problem}".replace("|", "/")
    return "policy and engine"


if __name__ == "__main__":
    main()
