"""What a row means: the configured keys, treadle's own fields, and the places verl's rows keep the same things."""

from typing import Any

import pytest

from treadle.config.root import DataConfig
from treadle.data.file_formats import TaskRow
from treadle.data.task_files import to_task
from treadle.data.tasks import load_tasks
from treadle.errors import ConfigError
from treadle.types import Task


def read(fields: dict[str, Any], **data: Any) -> Task:
    return to_task(TaskRow("train.jsonl:17", "train.jsonl:17", fields), DataConfig(**data))


def test_a_text_prompt_is_one_user_message() -> None:
    task = read({"question": "2 + 2?", "answer": "#### 4"}, prompt_key="question")
    messages = ({"role": "user", "content": "2 + 2?"},)
    assert task == Task("train.jsonl:17", messages, "#### 4", renamed={"question": "prompt"})


def test_messages_are_kept_as_they_are_but_for_nulls() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}]
    prompt = [
        {"role": "system", "content": "Be brief.", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    assert read({"prompt": prompt}).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": calls},
    )


def test_own_fields_are_understood_and_others_kept() -> None:
    fields = {
        "prompt": "x",
        "uid": 5,
        "data_source": "sums",
        "agent": "tool_agent",
        "n": 3,
        "tools": ["add"],
        "tool_kwargs": {"add": {"base": 10}},
        "environment_kwargs": {"level": 2},
        "difficulty": "hard",
    }
    assert read(fields) == Task(
        "5",
        ({"role": "user", "content": "x"},),
        data_source="sums",
        agent="tool_agent",
        n=3,
        tools=("add",),
        tool_kwargs={"add": {"base": 10}},
        environment_kwargs={"level": 2},
        extra={"difficulty": "hard"},
    )


def test_rows_of_verl_are_understood() -> None:
    extra_info = {
        "index": 3,
        "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "4"}, "execute_kwargs": None}, "other": None},
        "interaction_kwargs": {"name": "gsm8k"},
    }
    reward_model = {"style": "rule", "ground_truth": "4"}
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "agent_name": "tool_agent"}
    task = read({**row, "data_source": "gsm8k", "reward_model": reward_model, "extra_info": extra_info})
    assert (task.ground_truth, task.data_source, task.agent) == ("4", "gsm8k", "tool_agent")
    assert task.tool_kwargs == {"calc": {"ground_truth": "4"}}
    assert task.environment_kwargs == {"name": "gsm8k"}
    assert task.extra == {"reward_model": reward_model, "extra_info": extra_info}


def test_the_answer_key_comes_before_verls_place() -> None:
    assert read({"prompt": "x", "answer": 1, "reward_model": {"ground_truth": 2}}).ground_truth == 1
    assert read({"prompt": "x", "answer": None, "reward_model": {"ground_truth": 2}}).ground_truth is None


def test_no_answer_is_fine_unless_its_key_was_asked_for() -> None:
    assert read({"prompt": "x"}).ground_truth is None
    with pytest.raises(ConfigError, match=r"no field 'solution'; the row has prompt, solutions\n.*'solutions'"):
        read({"prompt": "x", "solutions": 4}, answer_key="solution")


def test_null_means_absent_for_optional_fields() -> None:
    names = (
        "uid",
        "agent",
        "agent_name",
        "n",
        "tools",
        "tool_kwargs",
        "environment_kwargs",
        "extra_info",
        "data_source",
    )
    task = read({"prompt": "x", **dict.fromkeys(names)})
    assert task == Task("train.jsonl:17", ({"role": "user", "content": "x"},), extra={"extra_info": None})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt": 3}, "prompt must be a text or a list of chat messages, not empty, got int '3'"),
        ({"prompt": ""}, "prompt must be a text"),
        ({"prompt": []}, "prompt must be a text"),
        ({"prompt": ["hi"]}, "prompt[0] must be a message with a role, got 'hi'"),
        ({"prompt": [{"content": "hi"}]}, "prompt[0] must be a message with a role"),
        (
            {"prompt": [{"role": "user", "text": "hi"}]},
            "prompt[0].content must be a text or a list of parts; the message has role, text",
        ),
        ({"prompt": "x", "n": 0}, "n must be a whole number ≥ 1, got int '0'"),
        ({"prompt": "x", "n": 100_000_000}, "n is 100000000, more than data.max_n = 1024"),
        ({"prompt": "x", "n": True}, "n must be a whole number ≥ 1"),
        ({"prompt": "x", "uid": ""}, "uid must be a text or a whole number"),
        ({"prompt": "x", "uid": 1.5}, "uid must be a text or a whole number"),
        ({"prompt": "x", "uid": "a\ud800"}, "uid must be text without halves of surrogate pairs"),
        ({"prompt": "x", "agent": 1}, "agent must be a text"),
        ({"prompt": "x", "agent": "a", "agent_name": "b"}, "agent is 'a' and agent_name is 'b'"),
        ({"prompt": "x", "tools": "add"}, "tools must be a list of tool names"),
        ({"prompt": "x", "tools": [{"name": "add"}]}, "tools must be a list of tool names"),
        ({"prompt": "x", "tool_kwargs": ["add"]}, "tool_kwargs must be a map"),
        ({"prompt": "x", "tool_kwargs": {"add": 3}}, "tool_kwargs.add must be a map of arguments, got 3"),
        ({"prompt": "x", "environment_kwargs": 3}, "environment_kwargs must be a map"),
        ({"prompt": "x", "extra_info": "none"}, "extra_info must be a map"),
        ({"prompt": "x", "extra_info": {"tools_kwargs": 3}}, "extra_info.tools_kwargs must be a map"),
        ({"prompt": "x", "extra_info": {"interaction_kwargs": 3}}, "extra_info.interaction_kwargs must be a map"),
        ({"prompt": "x", "reward_model": "rule"}, "reward_model must be a map"),
        ({"prompt": "x", "data_source": 3}, "data_source must be a text"),
        ({"promt": "x"}, "no field 'prompt'; the row has promt"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(fields)
    (mistake,) = caught.value.mistakes
    assert mistake.key == "train.jsonl:17"
    assert problem in mistake.problem


def test_a_system_prompt_comes_before_every_prompt() -> None:
    system = {"role": "system", "content": "Be brief."}
    asked = {"role": "user", "content": "2 + 2?"}
    assert read({"prompt": "2 + 2?"}, system_prompt="Be brief.").messages == (system, asked)
    assert read({"prompt": [asked]}, system_prompt="Be brief.").messages == (system, asked)
    with pytest.raises(ConfigError, match=r"train\.jsonl:17: prompt has a system message of its own.*\n.*leave data"):
        read({"prompt": [system, asked]}, system_prompt="Other.")


def test_a_template_makes_the_prompt_of_the_fields_of_a_row() -> None:
    template = "Question: {{ question }}\n{% for hint in hints %}- {{ hint }}\n{% endfor %}Answer in \\boxed{}."
    task = read({"question": "2 + 2?", "hints": ["add"], "answer": "4"}, prompt_template=template)
    assert task.messages == ({"role": "user", "content": "Question: 2 + 2?\n- add\nAnswer in \\boxed{}."},)
    assert (task.ground_truth, task.extra) == ("4", {"question": "2 + 2?", "hints": ["add"]})


@pytest.mark.parametrize(
    ("template", "fields", "problem"),
    [
        ("{{ questoin }}", {"question": "x"}, "'questoin' is undefined; the row has question"),
        ("{{ prompt }}", {"prompt": [{"role": "user", "content": "x"}]}, "prompt holds chat messages"),
        ("{{ a + b }}", {"a": 1, "b": "x"}, "cannot be filled with this row: unsupported operand"),
        (" {{ a }} ", {"a": ""}, "gives an empty text for this row"),
        ("{{ ''.__class__.__mro__ }}", {"a": ""}, "is unsafe"),
    ],
)
def test_a_row_that_does_not_fill_the_template_is_named(template: str, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(fields, prompt_template=template)
    (mistake,) = caught.value.mistakes
    assert mistake.key == "train.jsonl:17" and problem in mistake.problem


def test_a_template_that_is_no_jinja_is_a_mistake_of_the_config() -> None:
    with pytest.raises(ConfigError, match=r"data\.prompt_template: is not a Jinja template: .* in its line 2"):
        read({"prompt": "x"}, prompt_template="one\n{{ prompt ")


def test_generators_take_system_prompt_and_template_too() -> None:
    data = DataConfig(
        source_kwargs={"chain_sum": {"size": 1}},
        train_files=("reasoning_gym:chain_sum",),
        system_prompt="S",
        prompt_template="Q: {{ question }}",
    )
    (task,) = load_tasks(data.train_files, data, -1)
    entry = task.extra["entry"]
    assert [message["content"] for message in task.messages] == ["S", f"Q: {entry['question']}"]
    assert task.ground_truth == entry["answer"]


def test_a_row_with_arguments_for_an_environment_may_have_no_prompt() -> None:
    assert read({"environment_kwargs": {"level": 3}}).messages == ()
