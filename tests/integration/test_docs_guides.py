"""your-model.md, trl.md, migrating.md and prime-rl.md tell the truth: their files load, their blocks and commands run.

Models that are not on this machine are replaced by the bundled one, and nothing else is.
"""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest
from pyarrow import Table, parquet

import treadle
from tests.serving import serving
from treadle.cli.main import main
from treadle.config import load, loads
from treadle.migrate.migration import migrate

DOCS = Path(treadle.__file__).parents[1] / "docs"
BLOCK = re.compile(r"(?:<!-- (?:file: )?(\S+)[^\n]*-->\n)?```(\w+)\n(.*?)```", re.DOTALL)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """The word above a block, its language and its text."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def write_files(page: str) -> None:
    for name, _, text in blocks(page):
        if "." in name:
            Path(name).write_text(text, encoding="utf-8")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("reward", None)


def run(command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as ended:
        main(shlex.split(command)[1:])
    assert ended.value.code == 0, out.getvalue()
    return out.getvalue()


def fits(shown: str, printed: str) -> bool:
    lines = ["(?:.*\n)*?" if line == "…" else f"{re.escape(line).replace('…', '.*')}\n" for line in shown.splitlines()]
    return re.fullmatch("".join(lines), printed) is not None


def test_your_model_your_data_your_reward_from_top_to_bottom(here, capsys):
    """Every block in its order; the last one talks to a server of its own."""
    write_files("your-model.md")
    page = ModuleType("page")
    for name, language, text in blocks("your-model.md"):
        if language == "console":
            command, _, shown = text.removeprefix("$ ").partition("\n")
            printed = run(command)
            assert fits(shown, printed), f"{command}\n{printed}"
        elif language == "python" and not name and "OpenAI" not in text:
            exec(compile(text, "docs/your-model.md", "exec"), page.__dict__)
    assert page.__dict__["run"].steps == 1
    (client,) = [text for _, _, text in blocks("your-model.md") if "OpenAI" in text]
    with serving("my-model", "--key", "secret", cwd=here) as (url, key):
        assert key == "secret"
        exec(compile(client.replace("http://127.0.0.1:8000/v1", url), "docs/your-model.md", "exec"), page.__dict__)
    assert page.__dict__["reply"].usage.completion_tokens > 0


def test_the_quick_start_of_trl_is_as_long_as_the_page_says_and_runs_here(here):
    code = {name: text for name, language, text in blocks("trl.md") if language == "python"}
    assert list(code) == ["trl", "treadle", "trl-math", "treadle-math"]
    told = re.findall(r"^(TRL|treadle), (\d+) lines:$", (DOCS / "trl.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [(name.lower(), int(count)) for name, count in told] == [
        (name.removesuffix("-math"), len([line for line in text.splitlines() if line.strip()]))
        for name, text in code.items()
    ]
    long = "1+" * 300 + "1="
    tasks = [{"prompt": prompt, "answer": "1"} for prompt in ("1+1=", long)]
    ours = code["treadle"]
    model = {"path": "treadle/tiny-calculator", "override_config": {"max_position_embeddings": 2048}}
    for word, smaller in (
        ('"Qwen/Qwen2.5-0.5B-Instruct"', repr(model)),
        ('"hub:trl-lib/tldr/data/train"', repr(tasks)),
        ('rollout={"prompt_length": 1024}', "rollout={'prompt_length': 1024, 'n': 2, 'response_length': 16}"),
        ("steps=500", "steps=1"),
    ):
        assert word in ours
        ours = ours.replace(word, smaller)
    page: dict[str, object] = {"__name__": "page"}
    exec(compile(ours, "docs/trl.md", "exec"), page)
    run = page["run"]
    assert isinstance(run, treadle.Run)
    assert max(len(one.rows[0].prompt_ids) for one in run.trajectories()) > 512, "longer than the default allows"
    assert run.metrics["reward/mean"][0][1] > 1, "letters are counted"


def test_the_math_example_of_trl_runs_on_rows_of_its_shape(here):
    (ours,) = [text for name, _, text in blocks("trl.md") if name == "treadle-math"]
    solutions = {"1+1=": "$2$", "Half of 1 is": r"$\frac{1}{2}$"}
    rows = [{"prompt": [{"role": "user", "content": asked}], "solution": told} for asked, told in solutions.items()]
    for word, smaller in (
        ('"Qwen/Qwen2.5-0.5B-Instruct"', '"treadle/tiny-calculator"'),
        ('"hub:trl-lib/DeepMath-103K/data/train"', "rows"),
        ("steps=500", "steps=1, rollout={'n': 2, 'response_length': 16, 'prompt_length': 64}"),
    ):
        assert word in ours
        ours = ours.replace(word, smaller)
    page: dict[str, object] = {"__name__": "page", "rows": rows}
    exec(compile(ours, "docs/trl.md", "exec"), page)
    run = page["run"]
    assert isinstance(run, treadle.Run)
    samples = run.trajectories(step=1)
    assert len(samples) == 4 and all(sample.reward is not None for sample in samples)
    with pytest.raises(treadle.ConfigError, match=r"tasks: rows have no 'answer'; they have prompt, solution"):
        exec(compile(ours.replace('    data={"answer_key": "solution"},\n', ""), "docs/trl.md", "exec"), page)


def test_a_script_for_trl_that_is_shown_is_understood(here):
    (script,) = [text for name, _, text in blocks("trl.md") if name == "trl"]
    Path("train_grpo.py").write_text(script, encoding="utf-8")
    (shown,) = [text for _, language, text in blocks("trl.md") if language == "console"]
    command, _, last = shown.removeprefix("$ ").partition("\n")
    printed = run(command)
    assert fits(last, printed), printed
    config = load("from-trl/train.yaml")
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert "distinct_letters" in Path("from-trl/reward.py").read_text()


def test_the_example_of_prime_rl_is_as_long_as_the_page_says_and_checks(here):
    write_files("prime-rl.md")
    text = (DOCS / "prime-rl.md").read_text(encoding="utf-8")
    theirs, ours = (int(count) for count in re.findall(r"\b(\d+) lines", text))
    (toml,) = [block for _, language, block in blocks("prime-rl.md") if language == "toml"]
    assert theirs == len([line for line in toml.splitlines() if line.strip()])
    assert ours == len(Path("reverse.yaml").read_text().splitlines())
    bundled = ["model.path=treadle/tiny-calculator", "trainer.n_gpus_per_node=0", "actor.dtype=fp32"]
    printed = run(
        shlex.join(
            ["treadle", "check", "reverse.yaml", *bundled, "data.train_batch_size=2", "actor.ppo_mini_batch_size=2"]
        )
    )
    assert "with its ground truth: 1 (alike 1)" in printed


def test_the_launch_of_verl_is_as_long_as_the_page_says_and_means_the_same_here(here):
    """Every key that the script gives has the value that `migrate` finds: in our YAML, and in that of the call."""
    write_files("migrating.md")
    text = (DOCS / "migrating.md").read_text(encoding="utf-8")
    theirs, ours = (int(count) for count in re.findall(r"\b(\d+) lines", text)[:2])
    assert (theirs, ours) == tuple(
        len(Path(name).read_text(encoding="utf-8").splitlines()) for name in ("run_gsm8k.sh", "grpo.yaml")
    )
    (command, *_) = [text for name, language, text in blocks("migrating.md") if language == "console"]
    assert "rollout:" in run(command.removeprefix("$ ").partition(" > ")[0])
    found = migrate(Path("run_gsm8k.sh"))
    assert {entry.kind for entry in found.entries} == {"mapped", "same"}
    given = {key: entry.after for entry in found.entries for key in entry.new}
    assert len(given) >= 18
    (call,) = [text for name, _, text in blocks("migrating.md") if name == "python"]
    Path("gsm8k").mkdir()
    rows = [
        {
            "prompt": [{"role": "user", "content": "1+1?"}],
            "reward_model": {"ground_truth": "2"},
            "data_source": "openai/gsm8k",
        }
    ]
    for name in ("train", "test"):
        parquet.write_table(Table.from_pylist(rows), f"gsm8k/{name}.parquet")
    page: dict[str, object] = {}
    exec(compile(call.replace("run = treadle.train(", "text = treadle.to_yaml("), "docs/migrating.md", "exec"), page)
    for config in (load("grpo.yaml"), loads(str(page["text"]))):
        assert {key: value_of(config, key) for key in given} == given


def value_of(config, key: str) -> object:
    """The value of a key, as YAML has it."""
    value = reduce(
        lambda held, name: held[name] if isinstance(held, Mapping) else getattr(held, name), key.split("."), config
    )
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    return value
