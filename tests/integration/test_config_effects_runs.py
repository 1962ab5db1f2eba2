"""Keys whose effect shows in networks that train, or in a whole run: see `tests/unit/test_config_effects.py`."""

import pytest

from tests.unit.test_config_effects import WHOLE_RUNS, check_effect


@pytest.mark.parametrize("key", sorted(key for module in WHOLE_RUNS for key in module.EFFECTS))
def test_another_value_gives_another_result(key, tmp_path):
    check_effect(key, tmp_path)
