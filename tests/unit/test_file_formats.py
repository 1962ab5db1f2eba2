"""Files as people have them: JSON arrays, CSV, directories of `datasets`, and the hub's cache, with mistakes named."""

import gzip
import json
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pytest
from huggingface_hub import constants
from pyarrow import ipc, parquet

from treadle.config.root import DataConfig
from treadle.data.file_formats import read_records
from treadle.data.tasks import load_tasks
from treadle.errors import ConfigError
from treadle.types import Task

SAVED = Path(__file__).parents[1] / "golden" / "saved_dataset"
"""Written by `DatasetDict.save_to_disk` of datasets 5.2.0: train has three rows in two files, test has one."""


def tasks_of(source: object, **keys: object) -> list[Task]:
    return list(load_tasks([str(source)], DataConfig(shuffle=False, **keys), -1))


def refusal(source: object, **keys: object) -> str:
    with pytest.raises(ConfigError) as caught:
        tasks_of(source, **keys)
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_json_array_has_a_task_for_each_object(tmp_path):
    rows = [{"prompt": "one", "answer": 1}, {"prompt": "two", "uid": "mine"}]
    for text in (json.dumps(rows), "\ufeff \n" + json.dumps(rows, indent=2)):
        found = tasks_of(write(tmp_path / "tasks.json", text))
        assert [(task.uid, task.ground_truth) for task in found] == [("tasks.json:1", 1), ("mine", None)]


def test_text_files_may_be_gzipped(tmp_path):
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(3)]
    texts = {
        "a.jsonl.gz": "".join(json.dumps(row) + "\n" for row in rows),
        "a.json.gz": json.dumps(rows),
        "lines.json.gz": "".join(json.dumps(row) + "\n" for row in rows),
        "a.csv.gz": "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in rows),
        "a.tsv.gz": "prompt\tanswer\n" + "".join(f"{row['prompt']}\t{row['answer']}\n" for row in rows),
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        found = list(read_records(str(tmp_path / name), name, "data.train_files"))
        assert [row.fields for row in found] == rows, name
        assert found[0].uid == f"{name}:{2 if 'sv.' in name else 1}"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl.gz", b'{"prompt": "a"}\n', "a.jsonl.gz: is not a whole gzip file: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9],
            "is not a whole gzip file: Compressed file ended",
        ),
        (
            "a.csv.gz",
            gzip.compress(b"prompt,answer\n1,2\n", mtime=0)[:-9],
            "is not a whole gzip file: Compressed file ended",
        ),
        ("a.parquet.gz", b"", "is not one of .jsonl, .ndjson"),
    ],
)
def test_a_gzip_file_that_cannot_be_read_is_named(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        list(read_records(str(tmp_path / name), name, "data.train_files"))
    assert told in str(caught.value)


def test_a_json_file_may_have_one_object_a_line(tmp_path):
    assert len(tasks_of(write(tmp_path / "tasks.json", '{"prompt": "one"}\n{"prompt": "two"}\n'))) == 2
    assert len(tasks_of(write(tmp_path / "tasks.json", '{"prompt": "one"}'))) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"prompt": "x"},]', "tasks.json: is not JSON: Expecting value at line 1, column 18"),
        ('[{"prompt": "x"}, 7]', "tasks.json:2: row 2 must be an object with named fields, it is int '7'"),
        ('{\n"train": [{"prompt": "x"}]\n}', "write the list under 'train' to a file of its own"),
        ('{\n"prompt": "x"\n}', "write [ and ] around it"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"prompt": ' + "9" * 5000 + "}]", "a whole number has more than 4,300 digits"),
        ("[]", "the file holds no rows"),
        ('[{"promt": "x"}]', "tasks.json:1: no field 'prompt'; the row has promt"),
    ],
)
def test_a_json_file_that_cannot_be_read_says_where_and_what_to_do(tmp_path, text, told):
    assert told in refusal(write(tmp_path / "tasks.json", text))


def test_csv_rows_have_the_names_of_the_first_line(tmp_path):
    text = '\ufeffprompt,answer,n,extra\r\n"a, b\nand ""c""",4,2,x\r\nplain,,,\r\n'
    first, second = tasks_of(write(tmp_path / "tasks.csv", text))
    assert first.messages[0]["content"] == 'a, b\nand "c"'
    assert (first.uid, first.ground_truth, first.n, first.extra) == ("tasks.csv:2", "4", 2, {"extra": "x"})
    assert (second.uid, second.ground_truth, second.n) == ("tasks.csv:4", None, None), "named by the line it begins in"
    (row,) = tasks_of(write(tmp_path / "tasks.tsv", 'prompt\ttools\nhi, you\t["add"]\n'))
    assert (row.messages[0]["content"], row.tools) == ("hi, you", ("add",))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prompt,answer\nx\n", "tasks.csv:2: the line has 1 cells, the first line names 2 columns"),
        ("prompt,answer\nx,1\n\ny,2\n", "tasks.csv:3: the line is blank"),
        ("prompt,prompt\nx,y\n", "names the column 'prompt' twice"),
        ('prompt,answer\n"x,1\n', "is not CSV: unexpected end of data"),
        ("prompt,n\nx,two\n", "tasks.csv:2: the column 'n' must hold JSON, it holds 'two'"),
        ("question,answer\nx,1\n", "tasks.csv:2: no field 'prompt'; the row has question, answer"),
        ("prompt,answer\n", "the file holds no rows"),
        ("", "the file holds no rows"),
    ],
)
def test_a_csv_file_that_cannot_be_read_says_where(tmp_path, text, told):
    assert told in refusal(write(tmp_path / "tasks.csv", text))


def test_bytes_of_a_csv_that_are_no_utf8_are_named(tmp_path):
    (tmp_path / "tasks.csv").write_bytes(b"prompt\n\xff\n")
    assert "is not UTF-8" in refusal(tmp_path / "tasks.csv")


def test_a_data_set_that_datasets_saved_is_read_in_its_order():
    found = tasks_of(SAVED / "train", prompt_key="messages")
    assert [task.uid for task in found] == ["train:1", "train:2", "train:3"]
    assert [task.ground_truth for task in found] == ["10", "2", "6"]
    assert all(task.messages[0]["content"] == task.extra["question"] for task in found)


def test_a_dictionary_of_data_sets_is_refused_with_its_splits(tmp_path):
    told = refusal(SAVED)
    assert "holds several splits" in told and f"{SAVED}/train, {SAVED}/test" in told


def test_other_directories_are_refused_with_the_files_in_them(tmp_path):
    write(tmp_path / "a.jsonl", "{}")
    assert "give the files in it: a.jsonl" in refusal(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "a directory of datasets.save_to_disk" in refusal(tmp_path / "empty")
    write(tmp_path / "state.json", json.dumps({"_data_files": [{"filename": "a.jsonl"}]}))
    assert "is not an Arrow file" in refusal(tmp_path)
    write(tmp_path / "state.json", json.dumps({"_data_files": [], "_indices_data_files": [{"filename": "x"}]}))
    assert "flatten_indices() first" in refusal(tmp_path)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache as `hf download` leaves it: files of a revision, and which one `main` is."""
    snapshot = tmp_path / "hub" / "datasets--openai--gsm8k" / "snapshots" / ("a" * 40)
    for split, questions in (("main/train", ["1?", "2?"]), ("main/test", ["3?"]), ("socratic/train", ["4?"])):
        path = snapshot / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"question": questions, "answer": ["#### 4"] * len(questions)}), path)
    write(snapshot / "README.md", "card")
    (snapshot.parents[1] / "refs").mkdir()
    write(snapshot.parents[1] / "refs" / "main", "a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = huggingface_hub.try_to_load_from_cache(
        "openai/gsm8k", "main/test-00000-of-00001.parquet", cache_dir=tmp_path / "hub", repo_type="dataset"
    )
    assert isinstance(found, str), "this is the layout that the hub's own package knows"
    return snapshot


def test_a_data_set_of_the_hub_is_read_from_the_local_cache(cache):
    found = tasks_of("hub:openai/gsm8k/main/train", prompt_key="question")
    assert [(task.uid, task.messages[0]["content"]) for task in found] == [
        ("openai/gsm8k/main/train:1", "1?"),
        ("openai/gsm8k/main/train:2", "2?"),
    ]
    assert len(tasks_of("hub:openai/gsm8k/main/test-00000-of-00001.parquet", prompt_key="question")) == 1


def test_several_files_of_a_split_are_read_in_order(cache):
    for at in (1, 2):
        text = f'{{"question": "{at}"}}\n'
        write(cache / f"part-{at:05d}-of-00002.jsonl", text)
    found = tasks_of("hub:openai/gsm8k/part", prompt_key="question")
    assert [task.uid for task in found] == [
        "openai/gsm8k/part/part-00001-of-00002.jsonl:1",
        "openai/gsm8k/part/part-00002-of-00002.jsonl:1",
    ]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("openai/gsm8k", "a data set of the hub is hub:openai/gsm8k/PREFIX"),
        ("hub:openai/gsm8k", "has several files"),
        ("hub:openai/gsm8k", "there are hub:openai/gsm8k/main/test, hub:openai/gsm8k/main/train"),
        ("hub:openai/gsm8k/main/trian", "did you mean 'hub:openai/gsm8k/main/train'"),
        ("hub:openai/gsm8k/main/tr", "no files that begin with 'main/tr'"),
        ("hub:openai/math", "hf download --repo-type dataset openai/math"),
        ("hub:gsm8k", "write hub:OWNER/NAME/PREFIX"),
    ],
)
def test_what_the_cache_has_not_is_named_with_what_it_has(cache, source, told):
    assert told in refusal(source)


def test_an_arrow_stream_that_ends_early_is_named(tmp_path):
    table = pa.table({"prompt": ["x"] * 1000})
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file, ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    content = (tmp_path / "data.arrow").read_bytes()
    (tmp_path / "data.arrow").write_bytes(content[: len(content) // 2])
    write(tmp_path / "state.json", json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    assert "is not an Arrow file" in refusal(tmp_path)
