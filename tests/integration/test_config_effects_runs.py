"""Keys whose effect shows in training, in whole runs or in processes: see `tests/unit/test_config_effects.py`."""

import pytest

from tests.unit.test_config_effects import INTEGRATION, check_effect


@pytest.mark.parametrize("key", sorted(INTEGRATION))
def test_another_value_gives_another_result(key, tmp_path):
    check_effect(key, tmp_path)
