"""The script behind the harness-fidelity table measures what its page says, one agent at a time."""

import asyncio

import pytest

from bench.fidelity_writers import ScriptedModel, cells
from bench.harness_fidelity import function, measure
from tests.gateway_agents import openai_sync


@pytest.mark.parametrize(
    ("model", "broken"),
    [(ScriptedModel("qwen2_5", "serializer", False), 0), (ScriptedModel("qwen2_5", "model", False), 2)],
)
def test_a_cell_of_the_table_is_measured(model: ScriptedModel, broken: int) -> None:
    found = asyncio.run(measure(model, function(openai_sync)))
    assert (found.turns, found.broken, found.rows, found.ours_broken) == (3, broken, 1, 0)
    assert found.num_sampled == 3 and bool(found.lost) is bool(broken) and found.echoes == "exact 2"


@pytest.mark.parametrize("model", cells(), ids=str)
def test_every_model_of_the_table_calls_twice_and_answers(model: ScriptedModel) -> None:
    found = asyncio.run(measure(model, function(openai_sync)))
    assert (found.turns, found.ours_broken, found.unmarked) == (3, 0, 0)
