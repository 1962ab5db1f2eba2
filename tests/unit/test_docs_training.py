"""The commands of docs/training.md are real: each is a command we have, and each config they name loads."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from treadle.cli.main import build_parser
from treadle.cli.parser import load_words, parse
from treadle.config import TrainConfig
from treadle.config.training import GROUP_ESTIMATORS, OTHER_ESTIMATORS, POLICY_LOSSES, Aggregation, KLLossType

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (treadle .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_the_page_is_understood(command):
    arguments = parse(build_parser(), shlex.split(command)[1:])
    if command.startswith("treadle train"):
        assert isinstance(load_words(arguments.words), TrainConfig)


def test_the_page_trains_the_calculator_in_every_mode():
    trained = [shlex.split(command) for command in COMMANDS if command.startswith("treadle train calculator")]
    modes = {load_words(words[2:]).trainer.mode for words in trained}
    assert modes == {"sync", "one_step_off", "fully_async"}


def test_the_page_has_every_estimator_loss_aggregation_and_kl():
    names = [*GROUP_ESTIMATORS, *OTHER_ESTIMATORS, *POLICY_LOSSES, *get_args(Aggregation), *get_args(KLLossType)]
    assert [name for name in names if not re.search(rf"^\| `{re.escape(name)}`.* \|$", PAGE, re.MULTILINE)] == []
