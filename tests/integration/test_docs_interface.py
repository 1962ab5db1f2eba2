"""docs/python.md, the README's first lines and the examples of docstrings run as they stand."""

import doctest
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import treadle
from tests.smollm2 import smollm2_directory
from treadle import errors
from treadle.api import calls, research, results
from treadle.inspect import run_records
from treadle.rollout import agent_loop, environment
from treadle.rollout.tools import function

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_page_runs_from_top_to_bottom(capsys, monkeypatch):
    page = ModuleType("docs_python")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    for block in blocks("docs/python.md"):
        exec(compile(block, "docs/python.md", "exec"), page.__dict__)
    printed = capsys.readouterr().out
    quoted = re.findall(
        r"^    (step: .*?got int\n.*?)$", (ROOT / "docs/python.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert quoted[0].replace("\n    ", "\n") in printed, "what the page says is printed"
    assert page.__dict__["run"].steps == 3
    assert {path.name for path in Path("my-policy").iterdir()} >= {"config.json", "tokenizer.json", "training"}


def run_readme(*smaller: tuple[str, str]) -> treadle.Run:
    """The lines of the README, with what is too large for a test replaced."""
    (code,) = [block for block in blocks("README.md") if "treadle.train" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    for word, other in (*smaller, ("run.show()", "")):
        assert word in code
        code = code.replace(word, other)
    namespace: dict[str, object] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), namespace)
    assert isinstance(namespace["run"], treadle.Run)
    return namespace["run"]


def test_the_first_lines_of_the_readme_run_with_the_bundled_model():
    model = '{"path": "treadle/tiny-calculator", "describe_tools": False}'
    run = run_readme(('"HuggingFaceTB/SmolLM2-135M-Instruct"', model), ("steps=50", "steps=1"))
    assert run.steps == 1


def test_the_first_lines_of_the_readme_run_with_the_model_they_name(tmp_path_factory):
    """SmolLM2 itself, on a CPU: a step of few and short samples, its tool described in the prompt."""
    run = run_readme(
        ("HuggingFaceTB/SmolLM2-135M-Instruct", str(smollm2_directory(tmp_path_factory))),
        ("range(20) for b in range(20)", "(3,) for b in (4, 5)"),
        ("steps=50", "steps=1"),
        ('rollout={"n": 8}', 'rollout={"n": 2, "response_length": 16}'),
    )
    assert run.steps == 1
    samples = run.trajectories(step=1)
    assert len(samples) == 4
    assert all(len(sample.rows[0].prompt_ids) > 100 for sample in samples), "the tool is described in the prompt"
    assert all(sum(sample.rows[0].mask) > 0 for sample in samples)


EXAMPLES = (calls, results, research, errors, agent_loop, environment, function, run_records)


@pytest.mark.parametrize("module", EXAMPLES, ids=lambda module: module.__name__)
def test_examples_of_docstrings_run(module):
    done = doctest.testmod(module, extraglobs={"torch": torch})
    assert done.attempted > 0
    assert done.failed == 0
