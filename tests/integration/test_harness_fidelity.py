"""The script behind the harness-fidelity table measures what its page says, one agent at a time."""

import asyncio

from bench.harness_fidelity import function, measure
from tests.gateway_agents import openai_sync


def test_a_cell_of_the_table_is_measured() -> None:
    found = asyncio.run(measure("hermes", "", function(openai_sync)))
    assert (found.turns, found.broken, found.rows, found.ours_broken) == (3, 2, 1, 0)
    assert found.num_sampled == 3 and 0 < found.lost < found.sampled and found.echoes == "exact 2"
