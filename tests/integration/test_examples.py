"""Every example runs as its own first lines say."""

import json
import sys
from pathlib import Path

import pytest

from tests.fake_endpoint import FakeEndpoint
from treadle.cli.main import main

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/rollout.yaml"))


def run(monkeypatch, capsys, tmp_path: Path, name: str, *words: str) -> dict:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["treadle"])
    with pytest.raises(SystemExit) as left:
        main(["rollout", f"examples/{name}/rollout.yaml", f"logging.run_dir={tmp_path}", "--json", *words])
    printed = capsys.readouterr()
    assert left.value.code == 0, printed.err
    return json.loads(printed.out)


def test_the_index_names_every_example():
    index = (ROOT / "examples" / "README.md").read_text()
    assert all(f"examples/{name}/rollout.yaml" in index for name in EXAMPLES)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "endpoint"])
def test_an_example_runs_and_scores(monkeypatch, capsys, tmp_path, name):
    summary = run(monkeypatch, capsys, tmp_path, name)
    assert summary["num_failed"] == 0
    assert summary["sources"][0]["reward_mean"] > 0


def test_the_endpoint_example_evaluates_a_server(monkeypatch, capsys, tmp_path):
    with FakeEndpoint() as endpoint:
        summary = run(monkeypatch, capsys, tmp_path, "endpoint", f"rollout.openai.base_url={endpoint.base_url}")
    assert (summary["num_trajectories"], summary["num_failed"]) == (40, 0)
