"""Every page with code is run by a test, or is listed here with the reason why not; every command on a page parses."""

import re
import shlex
from pathlib import Path

import pytest

from treadle.cli.main import build_parser
from treadle.cli.parser import parse

ROOT = Path(__file__).parents[2]
PAGES = {page.name: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}

EXECUTED = {
    "README.md": "integration/test_docs_interface.py",
    "agents.md": "unit/test_docs_agents.py",
    "asynchronous.md": "integration/test_docs_pages.py",
    "config.md": "unit/test_docs_config.py",
    "data.md": "integration/test_docs_data.py",
    "environments.md": "unit/test_docs_environments.py",
    "evaluate.md": "integration/test_docs_pages.py",
    "index.md": "integration/test_docs_pages.py",
    "lora.md": "integration/test_docs_pages.py",
    "migrating.md": "integration/test_docs_guides.py",
    "prime-rl.md": "integration/test_docs_guides.py",
    "projects.md": "integration/test_init_projects.py",
    "python.md": "integration/test_docs_interface.py",
    "results.md": "integration/test_results_commands.py",
    "rollout.md": "integration/test_docs_pages.py",
    "sandbox.md": "integration/test_docs_pages.py",
    "sft.md": "integration/test_docs_pages.py",
    "simulating.md": "unit/test_simulate_command.py",
    "training.md": "integration/test_docs_pages.py",
    "trl.md": "integration/test_docs_guides.py",
    "write.md": "integration/test_docs_pages.py",
    "your-model.md": "integration/test_docs_guides.py",
}
"""Pages whose blocks run, and the test that runs them."""

PARSED_ONLY = {
    "distillation.md": "its models are not on the machine of the tests; test_distillation.py runs the same keys",
    "gateway.md": "fragments of servers and clients; test_gateway_agents.py and test_serve_command.py run such",
    "models.md": "a fragment of a config",
    "performance.md": "benchmarks, many of them for a GPU",
    "scaling.md": "commands for vLLM and Ray, which make test-cluster runs",
    "tinker.md": "needs the tinker package, which make test-tinker installs and runs",
    "view.md": "opens a browser; test_view_browser.py has one",
}
"""Pages whose Python, YAML and commands are parsed and not run, and why."""

_CODE = re.compile(r"^```(?:python|console|bash|sh|yaml)|^    (?:treadle|make|pip) ", re.MULTILINE)
_COMMAND = re.compile(r"^(?:    |\$ )(treadle .*)$", re.MULTILINE)


def test_every_page_with_code_is_run_or_listed_with_a_reason():
    with_code = {name for name, page in PAGES.items() if _CODE.search(page.read_text(encoding="utf-8"))}
    assert with_code == EXECUTED.keys() | PARSED_ONLY.keys()
    assert not EXECUTED.keys() & PARSED_ONLY.keys()
    for page, test in EXECUTED.items():
        assert page in (ROOT / "tests" / test).read_text(encoding="utf-8"), f"{test} does not read {page}"
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = {name for reason in PARSED_ONLY.values() for name in re.findall(r"test_\w+\.py", reason)}
    assert named <= tests


def test_every_command_on_a_page_is_one_that_the_parser_takes(capsys):
    refused, count = [], 0
    for name, page in PAGES.items():
        for command in _COMMAND.findall(page.read_text(encoding="utf-8").replace("\\\n", " ")):
            words = shlex.split(re.split(r"\s{2,}|\s+[>|#]\s|\s&&\s", command)[0], comments=True)[1:]
            count += 1
            try:
                parse(build_parser(), words)
            except SystemExit as ended:
                if ended.code:
                    refused.append(f"{name}: {command}: {capsys.readouterr().err.splitlines()[-1]}")
    assert refused == [] and count > 40


def test_the_readme_installs_what_make_dist_builds_whatever_its_version():
    readme = PAGES["README.md"].read_text(encoding="utf-8")
    assert "pip install dist/treadle-*.whl" in readme and not re.search(r"treadle-\d", readme)


@pytest.mark.parametrize("words", [["shwo", "run"], ["show", "run", "--worts"]])
def test_a_command_that_is_wrong_would_be_found(words):
    with pytest.raises(SystemExit):
        parse(build_parser(), words)
