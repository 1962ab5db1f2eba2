"""Secrets of a config are written nowhere."""

from treadle.config import loads, to_yaml
from treadle.config.secrets import HIDDEN, hide_in_words, hide_secret
from treadle.config.show import flatten

CONFIG = """
model: {path: unused}
rollout:
  multi_turn:
    mcp_servers:
      search: {command: [python, server.py], env: {SEARCH_TOKEN: s3cret, MODE: deep}}
  openai: {base_url: "http://me:s3cret@host:8000/v1", extra_body: {api_key: s3cret, max_tokens: 7}}
"""


def test_the_config_of_a_run_directory_has_no_secret_and_still_loads():
    config = loads(CONFIG)
    text = to_yaml(config, origins=True, secrets=False)
    assert "s3cret" not in text and "deep" not in text and text.count(HIDDEN) == 4
    assert "max_tokens: 7" in text and "api_key_env: OPENAI_API_KEY" in text
    assert loads(text).rollout.multi_turn.mcp_servers["search"].command == ("python", "server.py")
    assert "s3cret" in to_yaml(config), "where it is asked for, a config is shown whole"


def test_trackers_and_command_lines_have_none_either():
    shown = {name: hide_secret(name, value) for name, value in flatten(loads(CONFIG)).items()}
    assert "s3cret" not in str(shown)
    words = ["rollout.multi_turn.mcp_servers.search.env.KEY=s3cret", "rollout.openai.extra_body.api_key=s3cret"]
    assert "s3cret" not in str(hide_in_words(words))
    assert hide_in_words(["rollout.openai.api_key_env=MY_KEY", "rollout.n=4", "my.yaml"]) == [
        "rollout.openai.api_key_env=MY_KEY",
        "rollout.n=4",
        "my.yaml",
    ]


def test_a_secret_that_changed_can_be_told():
    one, two = (hide_secret("x.env", {"A": value}, digest=True) for value in ("one", "two"))
    assert one != two and "one" not in str(one)
