"""`treadle check`: what can be known without a run is known before it, all in one report."""

import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

import treadle
from tests.policies import make_policy, save_tiny_model
from treadle.cli.main import main
from treadle.config import load, loads
from treadle.config.load import recipe_names
from treadle.model.tokenizer import resolve_model_path
from treadle.preflight import memory
from treadle.preflight.checks import run_preflight
from treadle.preflight.report import PreflightReport

EXAMPLES = Path(treadle.__file__).parents[1] / "examples"
CONFIG = """
model: {path: treadle/tiny-calculator}
data: {train_files: [tasks.jsonl], train_batch_size: 2}
rollout: {n: 2, prompt_length: 24, response_length: 8}
reward: {functions: {right: {path: "scores:right"}}}
actor: {ppo_mini_batch_size: 2}
trainer: {total_training_steps: 1}
"""
SCORES = """
def right(response, ground_truth):
    if ground_truth == "broken":
        raise KeyError("no such answer")
    return float(response == ground_truth)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "scores.py").write_text(SCORES)
    (tmp_path / "my.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys):
    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_a_config_that_works_is_shown_with_its_first_prompt_its_rewards_and_its_step(here, run):
    status, out, err = run("check", "my.yaml")
    assert (status, err) == (0, "")
    assert "2 tasks for training" in out
    assert "against its own forward, in nats: policy" in out and ", engine " in out
    assert "tasks.jsonl:1 with its ground truth: 1 (right 1)" in out
    assert "tasks.jsonl:1 with an empty answer: 0 (right 0)" in out
    assert "tokens:\n  | <|im_start|>user\n  | 1+1=<|im_end|>\n  | <|im_start|>assistant" in out
    assert "batch      2 tasks × 2 samples = 4 trajectories" in out
    assert out.endswith("fine: nothing is wrong as far as can be known without running it\n")
    assert not (here / "runs").exists(), "a check leaves nothing behind"


def test_all_mistakes_come_in_one_report(here, run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [
            "data.val_files=[missing.jsonl]",
            "reward.functions.right.path=scores:wrong",
            "rollout.multi_turn.tools=[no_such_module:tool]",
            "rollout.agent.default_agent_loop=no_loops:Loop",
            "algorithm.adv_estimator=no_estimators:mine",
            f"logging.prometheus_port={taken.getsockname()[1]}",
            "logging.logger=[mlflow]",
            "trainer.n_gpus_per_node=1",
        ]
        status, _, err = run("check", "my.yaml", *words)
    assert status == 2
    for key in (
        "missing.jsonl",
        "reward.functions.right.path: scores has no 'wrong'",
        "rollout.multi_turn.tools",
        "rollout.agent.default_agent_loop",
        "algorithm.adv_estimator",
        "logging.prometheus_port",
        "logging.logger",
        "trainer.n_gpus_per_node",
    ):
        assert key in err
    assert "nothing was started" in err


def test_a_missing_model_is_named_beside_everything_else(here, run):
    status, out, err = run("check", "my.yaml", "model.path=nowhere/at-all", "data.train_files=[missing.jsonl]")
    assert status == 3 and "model.path: no model directory" in err and "missing.jsonl" in err
    assert "not checked: prompts, their lengths and the chat template, because the model's tokenizer could not" in out
    assert "not checked: scores of the first task, because no task could be read" in out
    assert "batch      2 tasks × 2 samples = 4 trajectories" in out, "the plan needs neither"


def test_what_is_wrong_and_what_is_missing_come_apart(here, run):
    missing = ["model.path=nowhere/at-all", "data.val_files=[a.jsonl,b.jsonl]", "logging.logger=[mlflow]"]
    missing += [
        "trainer.n_gpus_per_node=4",
        "actor._target_=treadle.config.FSDPActorConfig",
        "rollout.multi_turn.tools=[gone:tool]",
    ]
    status, out, err = run("check", "my.yaml", *missing)
    assert status == 3 and "wrong in the config" not in err
    assert err.startswith("missing on this machine:\n")
    end = "2 files (a.jsonl, b.jsonl), 1 model (nowhere/at-all), 1 Python module (gone), 1 package (mlflow), 4 GPUs."
    (last,) = err.splitlines()[-1:]
    assert last.startswith("The config is right, as far as it could be checked here; missing on this machine: ")
    assert sorted(last.rpartition("machine: ")[2].rstrip(".").split("), ")) == sorted(end.rstrip(".").split("), "))
    assert "the plan below is for machines as the config asks for them" in out and "over 4 ranks" in out
    assert "tasks.jsonl:1 with its ground truth: 1 (right 1)" in out, "rewards need no model"

    status, _, err = run("check", "my.yaml", *missing, "reward.functions.right.path=scores:wrong")
    wrong, _, lacking = err.partition("\n\nmissing on this machine:\n")
    assert status == 2 and wrong.startswith("wrong in the config:\nreward.functions.right.path: scores has no 'wrong'")
    assert "nowhere/at-all" not in wrong and "scores:wrong" not in lacking
    assert err.splitlines()[-1].startswith("1 mistake; missing on this machine: 2 files (a.jsonl, b.jsonl)")


def test_with_one_file_missing_the_tasks_of_the_others_are_looked_at(here, run):
    status, out, err = run("check", "my.yaml", "data.train_files=[missing.jsonl, tasks.jsonl, gone.jsonl]")
    assert status == 3 and "2 files (missing.jsonl, gone.jsonl)" in err
    assert "2 tasks for training" in out and "prompts    at most" in out and "with its ground truth: 1" in out


def test_findings_as_json(here, run):
    status, out, err = run("check", "my.yaml", "model.path=nowhere/at-all", "--json")
    found = json.loads(out)
    assert (status, found["status"], err) == (3, 3, "") and "1 model (nowhere/at-all)" in found["conclusion"]
    (missing,) = [item for item in found["findings"] if item["kind"] == "missing"]
    assert missing["key"] == "model.path" and missing["fix"].startswith("download it first")
    kinds = {item["kind"] for item in found["findings"]}
    assert kinds == {"missing", "unchecked", "ok"} and found["plan"]["batches"]["trajectories"] == 4
    status, out, _ = run("check", "my.yaml", "trainer.no_such_key=1", "--json")
    (wrong,) = json.loads(out)["findings"]
    assert status == 2 and wrong["kind"] == "wrong" and wrong["key"] == "trainer.no_such_key"
    status, out, _ = run("check", "my.yaml", "--json")
    assert status == 0 and "1+1=" in json.loads(out)["first_prompt"]


def test_reward_models_that_are_not_here_are_missing(here, run):
    words = "reward.classifiers={good: {path: nowhere/reward}}"
    status, _, err = run("check", "my.yaml", words)
    assert status == 3 and "reward.classifiers.good.path: no model directory" in err, err


def test_a_kind_of_model_that_is_not_computed_right_is_refused_before_a_run(here, run):
    model = here / "model"
    shutil.copytree(resolve_model_path("treadle/tiny-calculator"), model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "bert", "architectures": ["BertLMHeadModel"]}
    (model / "config.json").write_text(json.dumps(config))
    status, _, err = run("check", "my.yaml", f"model.path={model}")
    assert status == 2 and "model.path: " in err and "model.parity_check=false" in err
    status, out, err = run("check", "my.yaml", f"model.path={model}", "model.parity_check=false")
    assert status == 0 and "nothing shows that the model is computed as its authors wrote it" in out, err


def test_quantized_weights_and_a_balancing_loss_are_found_before_a_run(here, run):
    model = here / "experts"
    shutil.copytree(resolve_model_path("treadle/tiny-calculator"), model)
    file = model / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"router_aux_loss_coef": 0.001}))
    status, out, err = run("check", "my.yaml", f"model.path={model}")
    assert status == 0 and "router_aux_loss_coef 0.001 of the model is not used" in out + err
    status, out, err = run("check", "my.yaml", f"model.path={model}", "model.override_config={router_aux_loss_coef: 0}")
    assert "is not used" not in out + err
    file.write_text(json.dumps(values | {"quantization_config": {"quant_method": "gptq"}}))
    config = load(here / "my.yaml", (f"model.path={model}",))
    mistakes = run_preflight(config, os.environ, thorough=False).mistakes
    assert [mistake.problem for mistake in mistakes if "are quantized (gptq)" in mistake.problem]


TEACHER = ("algorithm.distill_coef=1", "ref.prompt_template='{{ prompt }} {{ answer }} {{ hint }}'")
ROOMY = "rollout.max_model_len=64"


def test_a_privileged_prompt_is_tried_on_every_row_before_a_run(here):
    def check(*words: str) -> tuple[list[str], PreflightReport]:
        report = run_preflight(load(here / "my.yaml", (*TEACHER, *words)), os.environ, thorough=False)
        return [item.problem for item in report.mistakes if item.key == "ref.prompt_template"], report

    assert check()[0] == [
        "cannot be filled for task tasks.jsonl:1: 'hint' is undefined; it has prompt, answer, data_source"
    ]
    write_rows(*({"prompt": f"{n}+1=", "answer": str(n + 1), "hint": "add " * (n % 3)} for n in range(300)))
    problems, report = check(ROOMY)
    assert not problems and any(subject == "teacher" and "(tasks.jsonl:" in text for subject, text in report.facts)
    (problem,), _ = check("rollout.response_length=40", ROOMY)
    assert "with a response of rollout.response_length, and the reference is loaded for 64" in problem
    (problem,), _ = check(ROOMY, "ref.prompt_template='{{ prompt'")
    assert problem.startswith("is not a Jinja template")
    (here / "adding.py").write_text('def add(a: int, b: int) -> int:\n    """Add two numbers."""\n    return a + b\n')
    tools = ("rollout.multi_turn.tools=['adding:add']", "rollout.agent.default_agent_loop=tool_agent")
    (problem,), _ = check("rollout.prompt_length=600", "rollout.max_model_len=700", *tools)
    assert "tasks.jsonl" in problem and "shows tools" in problem
    hidden, _ = check("rollout.prompt_length=600", "rollout.max_model_len=700", *tools, "model.describe_tools=false")
    assert not hidden
    loops = "rollout.agent={default_agent_loop: mine, loops: {mine: {path: function_agent, kwargs: {function: a:b}}}}"
    assert "prompts of mine are the agent's own, and cannot be written anew" in check(ROOMY, loops)[0]
    problems, _ = check(ROOMY, "rollout.prompt_length=8", "rollout.overlong_prompts=truncate_left")
    assert ["cut, it cannot be written anew" in problem for problem in problems] == [True]
    _, report = check(ROOMY, "rollout.agent.default_agent_loop=elsewhere:Loop")
    assert any("a step ends with an error where elsewhere:Loop writes prompts" in item for item in report.warnings)


def test_validation_tasks_need_no_privileged_prompt(here):
    write_rows({"prompt": "1+1=", "answer": "2", "hint": "two"})
    (here / "val.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = load(here / "my.yaml", (*TEACHER, ROOMY, "data.val_files=[val.jsonl]"))
    assert "ref.prompt_template" not in {item.key for item in run_preflight(config, {}, thorough=False).mistakes}


def test_every_prompt_is_rendered_and_counted(here, run):
    rows = [{"prompt": "1+1=", "answer": "2"}] * 300 + [{"prompt": "+".join("1" * 40), "answer": "40", "uid": "long"}]
    (here / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, err = run("check", "my.yaml")
    assert status == 2
    assert "rollout.prompt_length: 1 of 301 prompts are longer than 24 tokens: long has " in err
    status, out, err = run("check", "my.yaml", "rollout.overlong_prompts=drop")
    assert status == 0 and "1 of 301 prompts are too long and are dropped: long is the longest" in out


def test_the_quick_part_counts_every_prompt_that_is_too_long(here):
    rows = [{"prompt": "+".join("1" * 40), "answer": "40"}] * 260 + [{"prompt": "1+1=", "answer": "2"}] * 300
    (here / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run_preflight(loads(CONFIG, "test", ["rollout.overlong_prompts=drop"]), {}, thorough=False)
    assert any("260 of 560 prompts are too long and are dropped" in warning for warning in report.warnings)


def test_a_reward_function_that_fails_on_a_row_is_told_with_its_reason(here, run):
    (here / "tasks.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "broken"}) + "\n")
    status, out, err = run("check", "my.yaml")
    assert status == 2
    assert "reward.functions.right: tasks.jsonl:1 with its ground truth cannot be scored:" in err
    assert "no such answer" in err
    assert "data.train_batch_size 2 is more than there are tasks: 1 repeat in a batch" in out


@pytest.mark.parametrize(
    ("module", "body", "reason"),
    [
        (
            "raises",
            "return ground_truth in response",
            "TypeError: 'in <string>' requires string as left operand, not int",
        ),
        ("forgets", "return None", "returned NoneType None instead of a number"),
        ("divides", "return float('nan')", "returned nan"),
    ],
)
def test_a_reward_that_cannot_score_is_found_before_anything_is_sampled(here, run, module, body, reason):
    (here / "tasks.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": 2}) + "\n")
    (here / f"{module}.py").write_text(f"def right(response, ground_truth):\n    {body}\n")
    status, _, err = run("train", "my.yaml", f"reward.functions.right.path={module}:right")
    assert status == 2 and "nothing was started" in err
    assert "reward.functions.right: tasks.jsonl:1 with its ground truth cannot be scored:" in err and reason in err
    assert not (here / "runs").exists()


def test_a_reward_that_reads_sampled_tokens_may_fail_on_the_stand_in(here):
    (here / "lengths.py").write_text("def right(trajectory):\n    return len(trajectory.rows[0].ids)\n")
    words = ["reward.functions.right.path=lengths:right"]
    report = run_preflight(loads(CONFIG, "test", words), {}, thorough=False)
    assert not report.mistakes
    assert any("IndexError" in text and "it takes trajectory" in text for text in report.warnings)


def write_rows(*rows: object) -> None:
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("path", ["math", "number_match", "exact_match", "by_source", "scores:right"])
def test_rows_without_a_ground_truth_are_refused_with_the_column_that_may_hold_it(here, path):
    write_rows(*[{"prompt": "1+1=", "solution": "2"}] * 3)
    words = [f"reward.functions.right.path={path}"]
    (found,) = run_preflight(loads(CONFIG, "test", words), {}, thorough=False).mistakes
    assert found.key == "tasks.jsonl"
    assert found.problem.startswith("rows have no 'answer'; they have prompt, solution; reward function 'right' takes")
    assert found.fix is not None and found.fix.startswith("set data.answer_key: solution")
    assert ("such as answer=None" in found.fix) == (":" in path), "a function of one's own may do without"
    if path != "by_source":
        named = run_preflight(loads(CONFIG, "test", [*words, "data.answer_key=solution"]), {}, thorough=False)
        assert not named.mistakes


def test_some_rows_without_a_ground_truth_are_counted(here):
    write_rows({"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2="}, {"prompt": "3+3=", "answer": None})
    (found,) = run_preflight(loads(CONFIG, "test"), {}, thorough=False).mistakes
    assert re.match(
        r"2 of 3 rows have no 'answer', such as tasks\.jsonl:[23]; it has prompt; reward function", found.problem
    )
    assert found.fix is not None and found.fix.startswith("give every row one")


def test_a_function_that_may_do_without_the_ground_truth_is_not_given_none_as_one(here, run):
    write_rows({"prompt": "1+1="})
    (here / "polite.py").write_text("def right(response, answer=None):\n    return float('None' in response)\n")
    status, out, err = run("check", "my.yaml", "reward.functions.right.path=polite:right")
    assert status == 0, err
    assert "its ground truth" not in out and "with an empty answer: 0 (right 0)" in out
    assert "not checked: the score of the ground truth, because tasks.jsonl:1 has none" in out


def test_columns_that_a_function_takes_are_in_every_row_or_named(here):
    (here / "columns.py").write_text(
        "def right(response, solution, level=0):\n    return float(response == solution)\n"
    )
    words = ["reward.functions.right.path=columns:right"]
    write_rows({"prompt": "1+1=", "solution": "2", "level": 3}, {"prompt": "2+2=", "solution": "4"})
    report = run_preflight(loads(CONFIG, "test", words), {}, thorough=False)
    assert not report.mistakes and ("rewards", "right takes columns of the row: solution, level") in report.facts
    write_rows({"prompt": "1+1=", "solutions": "2"}, {"prompt": "2+2=", "solutions": "4"})
    (found,) = run_preflight(loads(CONFIG, "test", words), {}, thorough=False).mistakes
    assert found.problem == "rows have no 'solution'; they have prompt, solutions; reward function 'right' takes it"
    assert found.fix == "did you mean 'solutions'?"


@pytest.mark.parametrize(
    ("body", "warned"),
    [
        ("return 0.5", True),
        ("return float(answer == 'never')", True),
        ("return float('\\\\boxed{%s}' % answer in response)", False),
        ("return float(response.startswith('<answer>'))", False),
    ],
)
def test_a_right_answer_that_scores_as_an_empty_one_is_worth_a_warning(here, body, warned):
    (here / f"alike_{abs(hash(body))}.py").write_text(f"def right(response, answer):\n    {body}\n")
    words = [f"reward.functions.right.path=alike_{abs(hash(body))}:right"]
    report = run_preflight(loads(CONFIG, "test", words), {}, thorough=False)
    assert not report.mistakes
    alike = [text for text in report.warnings if "the ground truth and an empty answer score alike" in text]
    assert len(alike) == warned


@pytest.mark.parametrize("command", ["train", "rollout"])
def test_runs_begin_with_the_quick_part(here, run, command):
    words = ["data.train_files=[missing.jsonl]", "model.path=nowhere/at-all", "rollout.multi_turn.tools=[nothing:here]"]
    words.append("reward.functions.right.path=scores:wrong")
    status, _, err = run(command, "my.yaml", *words)
    assert status == 2
    assert "missing.jsonl" in err and "model.path" in err and "rollout.multi_turn.tools" in err
    assert "reward.functions.right.path: scores has no 'wrong'" in err
    assert not (here / "runs").exists()


def test_a_key_for_an_endpoint_elsewhere_must_be_there():
    text = "model: {path: treadle/tiny-calculator}\ndata: {train_files: [tasks.jsonl]}\n"
    text += "rollout: {name: openai, openai: {base_url: 'https://api.example.com/v1'}}\n"
    found = {item.key for item in run_preflight(loads(text), {}, thorough=False).mistakes}
    assert "rollout.openai.api_key_env" in found
    there = run_preflight(loads(text), {"OPENAI_API_KEY": "k"}, thorough=False).mistakes
    assert "rollout.openai.api_key_env" not in {item.key for item in there}
    local = run_preflight(loads(text.replace("https://api.example.com", "http://10.0.0.7:8000")), {}, thorough=False)
    assert "rollout.openai.api_key_env" not in {item.key for item in local.mistakes}


def test_weights_that_cannot_fit_are_refused_with_the_sum():
    config = load("calculator")
    needs = memory.weight_bytes(config, memory.ModelSize(8_000_000_000))
    (found,) = memory.check_memory(config, needs, 64 << 30, "the container")
    assert found.key == "model.path"
    assert "its weights need 119.2 GiB (policy 119.2 GiB); the container has 64.0 GiB" in found.problem
    assert not list(
        memory.check_memory(config, memory.weight_bytes(config, memory.ModelSize(800_000)), 64 << 30, "this machine")
    )
    assert list(memory.check_disk(config, memory.ModelSize(8_000_000_000), 1 << 30))
    assert not list(memory.check_disk(config, memory.ModelSize(800_000), 1 << 30))
    assert list(memory.check_gpu_memory(config, needs, 80 << 30))


def test_adapters_need_a_fraction_of_the_memory_and_no_reference(tmp_path):
    save_tiny_model(tmp_path)
    words = (
        "actor.lora.r=4",
        "actor.lora.target_modules=[q_proj, down_proj]",
        "actor.use_kl_loss=true",
        "ref.dtype=fp32",
    )
    config = load("calculator", words)
    found = memory.measure_model(tmp_path, config.actor.lora)
    policy = make_policy(tmp_path, lora=config.actor.lora)
    assert found is not None
    assert found.parameters == sum(tensor.numel() for tensor in policy.tensors().values())
    assert found.adapters == sum(tensor.numel() for tensor in policy._optimizer.weights.full.values())
    assert found.adapted == 2 * (16 * 16 + 16 * 32)
    size = memory.ModelSize(8_000_000_000, 40_000_000, 7_000_000_000)
    assert memory.weight_bytes(config, size) == {"policy": 60_000_000_000, "adapters": 640_000_000}
    assert memory.checkpoint_bytes(config, size) == 480_000_000


LOOP = "{default_agent_loop: %s, loops: {%s: {kwargs: %s}}}"


@pytest.mark.parametrize(
    ("loop", "kwargs", "status", "said"),
    [
        ("function_agent", '{function: "nosuch.module:solve"}', 3, "there is no module 'nosuch'"),
        ("function_agent", '{function: "scores:wrong"}', 2, "scores has no 'wrong'"),
        ("program_agent", "{argv: [no-such-program]}", 3, "there is no program 'no-such-program'"),
        ("program_agent", "{argv: [/no/such/program]}", 3, "there is no program '/no/such/program'"),
        ("program_agent", '{argv: [sh, -c, "{{nonsense}}"]}', 2, "{{nonsense}} is unknown"),
        ("program_agent", "{argv: [sh]}", 0, ""),
        ("program_agent", "{argv: [python]}", 0, ""),
        ("program_agent", "{argv: [mine], env: {PATH: HERE}}", 0, ""),
    ],
)
def test_an_agent_that_is_not_there_is_found_before_the_run(here, run, loop, kwargs, status, said):
    (here / "mine").write_text("#!/bin/sh\n")
    (here / "mine").chmod(0o755)
    (here / "agent.yaml").write_text(
        CONFIG.replace("{n: 2,", "{n: 2, agent: " + LOOP % (loop, loop, kwargs) + ",").replace("HERE", str(here))
    )
    found, _, err = run("check", "agent.yaml")
    assert found == status and said in err, err


def test_an_agent_program_that_another_node_may_have_is_a_warning_on_ray(here):
    agent = LOOP % ("program_agent", "program_agent", "{argv: [no-such-program]}")
    text = CONFIG.replace("{n: 2,", "{n: 2, agent: " + agent + ",") + "cluster: {backend: ray}\n"
    report = run_preflight(loads(text, "x", ()), {}, thorough=False)
    assert any("no-such-program" in warning for warning in report.warnings)
    assert not any("no-such-program" in mistake.problem for mistake in report.mistakes)


def test_modules_that_cannot_have_an_adapter_are_found_before_a_run(run):
    status, _, err = run("check", "calculator", "actor.lora.r=4", "actor.lora.target_modules=[q_prj]")
    assert status != 0 and "actor.lora.target_modules" in err and "q_proj" in err


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_passes_but_for_a_model_or_a_game_that_is_not_here(run, name):
    status, _, err = run("check", name)
    assert status in (0, 3), err
    lacks = err.splitlines()[-1].rpartition("machine: ")[2] if status else ""
    assert not status or "model" in lacks or "GPU" in lacks or "package (gymnasium" in lacks, err


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("rollout.yaml")), ids=lambda path: path.parent.name)
def test_every_example_passes(run, path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    status, _, err = run("check", str(path))
    assert status == 0, err


def test_the_model_is_proven_and_its_length_is_a_limit(here, run):
    status, out, _ = run("check", "my.yaml")
    assert status == 0 and "of a small llama against its own forward, in nats: policy" in out
    status, _, err = run("check", "my.yaml", "rollout.response_length=2000")
    assert status == 2 and "LlamaConfig is made for 1,024" in err
    status, out, _ = run("check", "my.yaml", "model.parity_check=false")
    assert status == 0 and "model.parity_check is off" in out
