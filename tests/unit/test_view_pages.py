"""Pages of the viewer: every screen's data by SQL, bounded, exact, and a sentence where a journal cannot be read."""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.view_runs import annotated, made, sampled, trained, write_run
from treadle.errors import RunError, ToolFailure
from treadle.journal import Journal, schema
from treadle.types import Outcome, StopReason
from treadle.view import row_index, run_pages, trajectory_pages
from treadle.view.difference import RowPlace, compare_rows, locate
from treadle.view.find import Indexes, find
from treadle.view.run_pages import RunPages
from treadle.view.text_index import read_question
from treadle.view.token_text import TokenText, decoded
from treadle.view.trajectory_pages import TrajectoryPages


@pytest.fixture
def index(pages: RunPages) -> Iterator[Indexes]:
    index = Indexes.of(pages)
    yield index
    index.texts.close()


@pytest.fixture
def pages(tmp_path: Path) -> RunPages:
    return RunPages("run", write_run(tmp_path / "run"))


def test_the_overview_counts_how_every_attempt_ended(pages):
    about = pages.overview()
    assert (about["steps"], about["validations"], about["trajectories"]) == ([1, 2], [0, 2], 7)
    ends = {(end["status"], end["reason"], end["boundary"]): end["count"] for end in pages.ends()["ends"]}
    assert ends == {("completed", "stop", None): 6, ("failed", "failure", "tool"): 1}
    assert [event["kind"] for event in about["events"]] == ["stall"]


def test_counts_go_on_where_the_last_answer_ended(pages, monkeypatch):
    monkeypatch.setattr(run_pages, "COUNTED", 3)
    assert [pages.ends()["counted"] for _ in range(3)] == [3, 6, 7]
    assert sum(end["count"] for end in pages.ends()["ends"]) == pages.overview()["trajectories"] == 7


def test_a_step_lists_its_groups_page_by_page(pages, monkeypatch):
    first = pages.groups(step=1)
    assert [(group["uid"], group["mean"], group["spread"]) for group in first["groups"]] == [("a", 0.5, 0.5)]
    assert first["groups"][0]["asked"] == "question of a" and first["next"] is None
    monkeypatch.setattr(run_pages, "GROUPS", 1)
    page = pages.groups()
    assert ([group["uid"] for group in page["groups"]], page["next"]) == (["a"], "a")
    assert [group["uid"] for group in pages.groups(after="a")["groups"]] == ["b"]
    assert [group["uid"] for group in pages.groups(validation=2)["groups"]] == ["validation-2/v"]
    with pytest.raises(RunError, match="no training step 9"):
        pages.groups(step=9)


def test_a_group_has_its_samples_side_by_side(pages):
    group = pages.group("b")
    assert (group["step"], [item["reward"] for item in group["samples"]]) == (2, [0.25, 0.75, None])
    assert group["samples"][2]["boundary"] == "tool" and group["samples"][2]["detail"] == "the tool broke"
    assert pages.group("a")["task"]["ground_truth"] == "4"
    (elsewhere,) = pages.group("validation-0/v")["elsewhere"]
    assert elsewhere == {"uid": "validation-2/v", "id": 7, "sample": 0, "validation": 2, "step": None}


def test_a_task_is_found_at_every_step_that_trained_on_it_and_in_validations(pages):
    """Epochs after the first name it UID@1 and so on; a task whose own name begins alike is another."""
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        trained(journal, 3, made("a@1", 0, 1.0), made("a@x", 0, 1.0), made("ab", 0, 1.0))
        journal.add(made("validation-3/a", 0, 1.0))
        journal.add_metrics(3, {"validation/success": 1.0})
        trained(journal, 4, made("a@2", 0, 1.0))
    found = [(item["uid"], item["step"], item["validation"]) for item in pages.group("a")["elsewhere"]]
    assert found == [("a@1", 3, None), ("validation-3/a", None, 3), ("a@2", 4, None)]
    assert [item["uid"] for item in pages.group("a@1")["elsewhere"]] == ["a", "validation-3/a", "a@2"]
    one, other = pages.group("a")["samples"][0]["id"], pages.group("a@2")["samples"][0]["id"]
    shown = TrajectoryPages(pages)
    assert compare_rows(RowPlace(shown, one), RowPlace(shown, other))["same"]


def test_what_a_resume_undid_is_not_shown_also_in_an_open_viewer(pages):
    assert [step["step"] for step in pages.steps()["steps"]] == [2, 1]
    assert pages.metrics(["reward/mean"])["curves"]["reward/mean"] == [(1, 0.5), (2, 0.5)]
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        journal.add_event("resume", step=1, position=0, open=[])
        journal.rewind(1)
        trained(journal, 2, made("c", 0, 1.0))
    assert pages.groups(step=2)["groups"][0]["uid"] == "c"
    assert pages.metrics(["reward/mean"])["curves"]["reward/mean"] == [(1, 0.5), (2, 1.0)]
    assert pages.group("b")["step"] is None


def test_what_a_step_in_force_did_not_train_on_is_not_said_to_be_trained(pages, index):
    """Step 2 is undone and runs again: its task is sampled anew under the same names, and once more for a failure."""
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        journal.add_event("resume", step=1, position=0, open=[])
        journal.rewind(1)
        journal.add(made("b", 2, None, attempt=1, outcome=Outcome.failed(ToolFailure("again"))))
        trained(journal, 2, made("b", 0, 0.5), made("b", 1, 1.0), made("b", 2, 1.0, attempt=2))
    found = {item["id"]: (item["step"], item["replaced"]) for item in find(pages, index, {"uid": "b"})["samples"]}
    old, new = (4, 5, 6, 8), (9, 10, 11)
    assert found == dict.fromkeys(old, (None, True)) | dict.fromkeys(new, (2, False))
    assert sorted(item["id"] for item in find(pages, index, {"step": "2"})["samples"]) == list(new)
    shown = TrajectoryPages(pages)
    one, other = shown.trajectory(4), shown.trajectory(9)
    assert (one["step"], one["rows_shown"][0]["why"]) == (
        None,
        "not trained: undone, or replaced by a later attempt",
    )
    assert (other["step"], other["rows_shown"][0]["trained"]) == (2, True)
    lines = compare_rows(RowPlace(shown, 4), RowPlace(shown, 9))["lines"]
    assert [(line["step"], line["replaced"]) for line in lines] == [(None, True), (2, False)]
    assert [item["id"] for item in pages.group("b")["samples"]] == list(new)


def test_a_run_is_read_while_it_is_written(pages):
    before = pages.pulse()
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        journal.add(made("live", 0, 1.0))
        journal.flush_blocking()
        assert pages.pulse() != before
        assert pages.overview()["status"] == "running"
        assert pages.samples("1", (), None)["samples"][0]["uid"] == "live"


def test_a_killed_run_is_not_shown_as_live(pages):
    """Its run.json and its lock are as the kill left them; a lock of another host may be held."""
    write = (
        "import sys; from pathlib import Path; from treadle.journal import Journal; "
        "Journal.open(Path(sys.argv[1]), max_mb=50); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", write, str(pages.run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"open\n"
        assert pages.pulse()["status"] == "running"
        run.kill()
    about = pages.overview()
    assert pages.pulse()["status"] == about["status"] == about["starts"][-1]["status"] == "crashed"
    assert about["cause"] == about["starts"][-1]["cause"] == "it died without a word"
    lock = pages.run_dir / "lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": "another"}))
    assert pages.pulse()["status"] == "running"
    with Journal.open(pages.run_dir, max_mb=50):
        assert pages.pulse()["status"] == "running"
    assert pages.pulse()["status"] == "finished"


def test_curves_are_thinned_and_keep_their_ends():
    steps, values = list(range(5000)), [float(at) for at in range(5000)]
    thin = run_pages._thin(steps, values, 100)
    assert len(thin) <= 101 and thin[0] == (0, 0.0) and thin[-1] == (4999, 4999.0)


def test_tokens_come_with_text_mask_logprobs_and_versions(pages):
    shown = TrajectoryPages(pages)
    window = shown.tokens(2, 0)  # a/0
    assert window["ids"] == [5, 6, 7, 20, 30, 31, 32, 33, 40, 41]
    assert window["mask"] == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert window["logprobs"] == [None, None, None, 0.0, -0.25, -0.5, -0.75, -1.0, None, None]
    assert window["versions"] == [-1, -1, -1, 0, 0, 0, 0, 0, -1, -1]
    assert (window["prompt"], window["total"], window["problem"]) == (3, 10, None)
    assert "".join(window["texts"][:3]) == "#$%"
    assert window["trainer"] is None


def test_any_window_of_a_row_is_a_cut_of_the_whole(pages):
    shown = TrajectoryPages(pages)
    whole = shown.tokens(2, 0)
    for start in range(10):
        for count in (1, 3, 20):
            window = shown.tokens(2, 0, start, count)
            for key in ("ids", "mask", "logprobs", "versions", "texts"):
                assert window[key] == whole[key][start : start + count], (key, start, count)


def test_tokens_whose_text_would_be_other_tokens_are_marked():
    """As a trainer would have them that is given text: "ab" sampled as a and b comes back as one token."""

    class Tokenizer:
        from tokenizers import Tokenizer as _Core
        from tokenizers.models import BPE as _Model

        backend_tokenizer = _Core(_Model({"a": 0, "b": 1, "ab": 2, "c": 3}, [("a", "b")]))
        added_tokens_decoder = {}  # noqa: RUF012

    text = TokenText(Tokenizer())
    assert text.encode_again([3, 0, 1, 3]) == [None, [2], [], None]
    assert text.encode_again([3, 2, 3]) == [None, None, None]
    assert text.encode_again([]) == []


def test_a_broken_byte_leaves_drift_beside_it_seen():
    """Each stretch of whole characters is encoded by itself."""

    class Tokenizer:
        from tokenizers import Tokenizer as _Core
        from tokenizers.models import BPE as _Model

        backend_tokenizer = _Core(
            _Model({"a": 0, "b": 1, "ab": 2, "<0xE2>": 3, "<0x98>": 4, "<0x92>": 5}, [("a", "b")])
        )
        added_tokens_decoder = {}  # noqa: RUF012

    text = TokenText(Tokenizer())
    assert text.encode_again([0, 1, 3, 2, 0, 1]) == [[2], [], [], None, [2], []]
    assert text.encode_again([3, 4, 0, 1, 4]) == [[], [], [2], [], []]
    assert text.encode_again([3, 3]) == [[], []]


@pytest.mark.parametrize("way", ["always", "first", "normalizer"])
def test_a_space_that_a_tokenizer_puts_before_a_text_is_no_drift(way):
    """Nor the one that some put behind every special token."""
    from tokenizers import Tokenizer as Core
    from tokenizers import models, normalizers, pre_tokenizers

    words = ["<unk>", "▁", "H", "i", "▁H", "▁Hi", "Hi", "y", "▁▁", "<0x0A>", "▁y", "yo", "o", "▁yo", "</s>"]
    vocabulary = {word: at for at, word in enumerate(words)}
    merges = [("▁", "▁"), ("H", "i"), ("▁", "Hi"), ("y", "o"), ("▁", "yo")]
    core = Core(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    if way == "normalizer":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=way)
    core.add_special_tokens(["</s>"])

    class Tokenizer:
        backend_tokenizer = core
        added_tokens_decoder = {vocabulary["</s>"]: "</s>"}  # noqa: RUF012

    text = TokenText(Tokenizer())
    text._spaces = True
    again = lambda *said: text.encode_again([vocabulary[word] for word in said])  # noqa: E731
    assert again("Hi", "▁yo") == [None, None]
    assert again("▁Hi", "▁yo") == [None, None]
    assert again("<0x0A>", "Hi", "▁yo") == [None, None, None]
    assert again("Hi", "</s>", "▁Hi", "</s>", "Hi", "▁yo") == [None] * 6
    assert again("▁Hi", "▁y", "o", "<0x0A>") == [None, [vocabulary["▁yo"]], [], None]
    assert again("H", "i", "▁yo") == [[vocabulary["Hi"]], [], None]


def test_drift_is_the_same_in_every_window(pages):
    """A word that the edge of a window cuts is read whole."""
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        row = sampled((69, 67, 78, 69) * 20 + (9, 8), prompt=(69, 67, 78))
        journal.add(made("letters", 0, 1.0, rows=(row,)))
    last, shown = pages.group("letters")["samples"][0]["id"], TrajectoryPages(pages)
    whole = shown.tokens(last, 0)
    assert whole["drift"][3:11] == [1, 1, 1, 0, 1, 1, 1, 0]
    for start in range(len(whole["ids"])):
        for count in (1, 2, 5):
            window = shown.tokens(last, 0, start, count)
            assert window["drift"] == whole["drift"][start : start + count], (start, count)
            assert window["again"] == {
                at - start: found for at, found in whole["again"].items() if start <= at < start + count
            }


def test_drift_is_told_for_sampled_tokens_alone(pages):
    """The bundled tokenizer has "cal" as one token; in the prompt nothing was sampled letter by letter."""
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        row = sampled((69, 67, 78, 69, 69, 67, 78), prompt=(69, 67, 78), answer=3)
        journal.add(made("letters", 0, 1.0, rows=(row,)))

    last = pages.group("letters")["samples"][0]["id"]
    window = TrajectoryPages(pages).tokens(last, 0)
    assert window["drift"] == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    (whole,) = window["again"].pop(3)
    assert whole[1] == "cal" and window["again"] == {4: [], 5: []}


def test_half_a_character_is_shown_as_its_bytes():
    class Tokenizer:
        from tokenizers import Tokenizer as _Core
        from tokenizers.decoders import ByteLevel as _Decoder
        from tokenizers.models import BPE as _Model

        backend_tokenizer = _Core(_Model({"â": 0, "ĺĴ": 1, "Ġa": 2}, []))
        backend_tokenizer.decoder = _Decoder()
        added_tokens_decoder = {7: "<|end|>"}  # noqa: RUF012

    text = TokenText(Tokenizer())
    assert text.bytes_of(0) + text.bytes_of(1) == "☒".encode()
    assert [decoded(text.bytes_of(id)) for id in (0, 1, 2, 7, 99)] == [
        None,
        None,
        " a",
        "<|end|>",
        "",
    ]


def test_ids_are_shown_where_the_tokenizer_is_gone(tmp_path):
    run_dir = write_run(tmp_path / "run")
    (run_dir / "config.yaml").write_text("model:\n  path: gone/away\n")
    window = TrajectoryPages(RunPages("run", run_dir)).tokens(2, 0)
    assert window["ids"][:3] == [5, 6, 7] and window["texts"] == []
    assert "gone/away" in window["problem"]


def test_a_tokenizer_that_is_code_is_not_run(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text("{}")
    (model / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}')
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    run_dir = write_run(tmp_path / "run")
    (run_dir / "config.yaml").write_text(f"model:\n  path: {model}\n  trust_remote_code: true\n")
    window = TrajectoryPages(RunPages("run", run_dir)).tokens(2, 0)
    assert "trust_remote_code" in window["problem"] and window["ids"][:3] == [5, 6, 7]
    assert not (tmp_path / "ran").exists()


def test_two_samples_part_at_their_first_different_token(pages):
    shown = TrajectoryPages(pages)
    found = compare_rows(RowPlace(shown, 2), RowPlace(shown, 3))
    assert (found["first"], found["shared"], found["same"], found["starts"]) == ([3, 3], 3, False, [0, 0])
    assert compare_rows(RowPlace(shown, 2), RowPlace(shown, 2))["same"]


def test_any_two_rows_are_compared(pages):
    """A fork and the main row, another task, another step, a validation: each by trajectory and row."""
    shown = TrajectoryPages(pages)
    fork = compare_rows(RowPlace(shown, 3), RowPlace(shown, 3, 1))
    assert (fork["shared"], fork["same_prompt"]) == (3, False)
    assert [line["row"] for line in fork["lines"]] == [0, 1]
    other = compare_rows(RowPlace(shown, 3, 1), RowPlace(shown, 1))
    assert [(line["step"], line["validation"]) for line in other["lines"]] == [(1, None), (None, 0)]
    assert other["lines"][0]["siblings"] == [2, 3]
    with pytest.raises(RunError, match="no row 7: its rows are 0 to 1"):
        compare_rows(RowPlace(shown, 3, 7), RowPlace(shown, 1))


def test_responses_are_compared_without_their_prompts(pages):
    shown = TrajectoryPages(pages)
    found = compare_rows(RowPlace(shown, 3), RowPlace(shown, 3, 1), responses=True)
    assert (found["shared"], found["first"], found["starts"]) == (0, [3, 5], [3, 5])
    later = compare_rows(RowPlace(shown, 2), RowPlace(shown, 3), skip=4)
    assert (later["starts"], later["sides"][0]["start"], later["more"]) == ([4, 4], 4, False)


@pytest.mark.parametrize(
    ("name", "id"), [("3", 3), ("a/1", 3), ("a", 2), ("validation-2/v/0", 7), ("validation-2/v", 7)]
)
def test_a_trajectory_is_named_by_its_number_or_its_task(pages, name, id):
    assert locate(TrajectoryPages(pages), name) == {"id": id}


@pytest.mark.parametrize("name", ["a/9", "nobody", "99"])
def test_a_trajectory_that_is_not_there_is_a_sentence(pages, name):
    with pytest.raises(RunError, match=f"no trajectory .*{name}"):
        locate(TrajectoryPages(pages), name)


def test_the_tree_tells_forks_and_what_trained(pages):
    rows = TrajectoryPages(pages).trajectory(3)["rows_shown"]
    assert [(row["position"], row["parent"], row["shared"], row["trained"]) for row in rows] == [
        (0, None, 0, True),
        (1, 0, 3, True),
    ]
    assert TrajectoryPages(pages).trajectory(1)["rows_shown"][0]["why"] == "not trained: a validation"
    assert "failed at tool" in TrajectoryPages(pages).trajectory(6)["rows_shown"][0]["why"]


def test_a_hundred_thousand_tokens_are_read_by_the_window(tmp_path):
    long = made("long", 0, 1.0, rows=(sampled(tuple(at % 300 for at in range(100_000))),))
    shown = TrajectoryPages(RunPages("run", write_run(tmp_path / "run", long)))
    window = shown.tokens(8, 0, 60_000)
    assert len(window["ids"]) == trajectory_pages.WINDOW and window["total"] == 100_003
    assert window["ids"][0] == (60_000 - 3) % 300
    strip = shown.strip(8, 0)
    assert len(strip["bins"]) <= trajectory_pages.BINS and strip["response"] == 100_000
    assert len(json.dumps(window)) < 300_000


def test_filters_narrow_and_refuse_what_they_cannot_read(pages, index):
    uids = lambda **given: [f"{item['uid']}/{item['sample']}" for item in find(pages, index, given)["samples"]]  # noqa: E731
    assert uids(boundary="tool") == ["b/2"]
    assert uids(max_reward="0", validation="no") == ["a/0"]
    assert uids(part="answer>=0.75") == ["validation-2/v/0", "b/1", "a/1"]
    assert uids(min_rows="2") == ["a/1"]
    assert uids(version="0", tool="calculate", uid="b") == ["b/2", "b/1", "b/0"]
    assert uids(version="1") == [] and uids(tool="other") == []
    assert uids(order="best")[:2] == ["a/1", "validation-2/v/0"] and uids(order="best")[-1] == "b/2"
    assert uids(order="worst")[:2] == ["validation-0/v/0", "a/0"] and uids(order="worst")[-1] == "b/2"
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        journal.add(made("c", 0, 1.0, extra={"gateway": {"requests": 3, "echoes": {"exact": 2, "edited": 1}}}))
    assert uids(echo="edited") == uids(echo="exact") == ["c/0"]
    assert uids(echo="reduced") == []
    for given in ({"min_reward": "much"}, {"part": "answer"}, {"order": "odd"}, {"version": "x"}, {"echo": "'"}):
        with pytest.raises(RunError):
            find(pages, index, given)


class Clock:
    """A clock on which 0.3 s pass from one look to the next: a question has time for one batch."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 0.3
        return self._now


def test_copies_of_turns_are_looked_for_newest_first_and_in_parts(pages, index, monkeypatch):
    """An answer reads no more extras than it has time for, says how far it came, and the next one goes on."""
    back = {"gateway": {"echoes": {"exact": 2, "edited": 0, "reduced": True}}}
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        for sample in range(6):
            extra = back if sample in (1, 4) else {"gateway": {"echoes": 3}, "note": sample}
            journal.add(made("c", sample, 1.0, extra=extra))
    monkeypatch.setattr(row_index, "_BATCH", 5)
    monkeypatch.setattr(row_index, "time", Clock())
    answers = [find(pages, index, {"echo": "exact"}) for _ in range(3)]
    assert [[item["sample"] for item in found["samples"]] for found in answers] == [[4, 1], [4, 1], [4, 1]]
    assert [round(found["indexed"], 2) for found in answers] == [0.38, 0.77, 1.0]
    assert find(pages, index, {"echo": "edited"})["samples"] == find(pages, index, {"echo": "reduced"})["samples"] == []
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        journal.add(made("d", 0, 1.0, extra=back))
    assert [item["uid"] for item in find(pages, index, {"echo": "exact"})["samples"]] == ["d", "c", "c"]


def test_words_are_found_newest_first_as_the_run_goes_on(pages, index):
    assert [item["uid"] for item in find(pages, index, {"q": "three"})["samples"]] == ["a"]
    assert find(pages, index, {"q": "three"})["indexed"] == 1.0
    assert [item["uid"] for item in find(pages, index, {"q": '"the tool" AND broke'})["samples"]] == ["b"]
    assert find(pages, index, {"q": 'odd" syntax (('})["samples"] == []
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        journal.add(made("later", 0, 1.0, "three again"))
    assert [item["uid"] for item in find(pages, index, {"q": "three"})["samples"]] == ["later", "a"]


def test_config_lines_have_keys_values_and_origins(pages):
    assert pages.config()[0] == {
        "key": "model.path",
        "value": "treadle/tiny-calculator",
        "origin": "recipe calculator:4",
    }


def test_a_journal_of_another_version_is_a_sentence(pages):
    with sqlite3.connect(pages.run_dir / schema.FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(RunError, match="newer treadle"):
        pages.pulse()


def test_a_truncated_journal_is_a_sentence(pages):
    path = pages.run_dir / schema.FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(RunError, match="cannot read the journal"):
        [(pages.overview(), pages.ends()) for _ in range(2)]
        pages.samples("1", (), None)


def test_a_locked_journal_is_a_sentence(pages, monkeypatch):
    monkeypatch.setattr(schema, "_BUSY_TIMEOUT_S", 0.05)
    holder = sqlite3.connect(pages.run_dir / schema.FILE_NAME, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN IMMEDIATE")
    holder.execute("DELETE FROM parts")
    try:
        with pytest.raises(RunError, match="locked"):
            pages.pulse()
    finally:
        holder.close()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        *(("answ", ["w"]), ("ANSWERS", ["w"]), ("nswers", []), ('"answ"', []), ("####", ["w"]), ("#####", [])),
        *(("北京", ["c"]), ("京北", []), ("os._exit", ["w"]), ("exit(0)", ["w"]), ("_exit NOT 北", ["w"])),
        *(("北京 OR ####", ["c", "w"]), ("a_b", ["w"]), ("🎉", ["c"]), ('say "#### 42"', ["w"]), ("42", ["w"])),
    ],
)
def test_words_symbols_and_letters_without_spaces_are_found(pages, index, asked, found):
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        journal.add(made("w", 0, 1.0, "Answers: say #### 42, os._exit(0), a_b"))
        journal.add(made("c", 0, 1.0, "我爱北京天安门 🎉"))
    samples = [item for item in find(pages, index, {"q": asked})["samples"] if item["uid"] in ("w", "c")]
    assert [item["uid"] for item in samples] == found
    for item in samples:
        assert item["hit"]["message"] in (0, 1) and item["hit"]["match"]


def test_a_hit_is_told_with_its_place(pages, index):
    (item,) = find(pages, index, {"q": "three"})["samples"]
    assert item["hit"] == {
        **{"message": 1, "field": "content", "start": 0, "end": 5},
        **{"before": "", "match": "three", "after": ""},
    }
    with pytest.raises(RunError, match="needs a word that is to be found"):
        read_question("NOT this")


def test_trajectories_are_found_by_gap_and_by_step(pages, index):
    one, other = made("g", 0, 1.0), made("g", 1, 0.0)
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        trained(journal, 7, one, other)
        journal.add_annotations([annotated(one, (0.0, -0.25, -0.5, -1.0, -1.0), step=7)])
        journal.add_annotations([annotated(other, (0.0, -0.25, -2.5, -0.75, -1.0), step=7)])
    found = find(pages, index, {"order": "gap"})["samples"]
    assert [(item["sample"], item["gap"]) for item in found] == [
        (1, {"gap": -2.0, "row": 0, "position": 5}),
        (0, {"gap": -0.25, "row": 0, "position": 6}),
    ]
    assert [item["sample"] for item in find(pages, index, {"min_gap": "1"})["samples"]] == [1]
    assert {item["uid"] for item in find(pages, index, {"step": "7"})["samples"]} == {"g"}
    with Journal.open(pages.run_dir, max_mb=50) as journal:  # annotated anew: what was known is replaced
        journal.add_annotations([annotated(one, (0.0, -0.25, -0.5, -0.75, -5.0), step=7)])
    assert [item["sample"] for item in find(pages, index, {"order": "gap"})["samples"]] == [0, 1]


def rows_of(pages: RunPages, uid: str) -> list[tuple[int | None, bool, str]]:
    """Parent of each row of a task's first sample, whether it trained, and why."""
    id = pages.group(uid)["samples"][0]["id"]
    return [(row["parent"], row["trained"], row["why"]) for row in TrajectoryPages(pages).trajectory(id)["rows_shown"]]


def test_a_fork_holds_its_parents_prompt_and_everything_else_begins_on_its_own(pages):
    """Every chat begins alike: two system prompts share their first tokens and are no fork."""
    main = sampled((50, 51, 52, 53), prompt=(1, 10, 11, 12))
    agent = sampled((60, 61, 62, 63), prompt=(1, 10, 30, 31))
    fork = sampled((70, 71, 72, 73), prompt=(1, 10, 11, 12, 50, 51, 9))
    deeper = sampled((80, 81, 82, 83), prompt=(1, 10, 11, 12, 50, 51, 9, 70, 71))
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        trained(journal, 7, made("tree", 0, 1.0, rows=(main, agent, fork, deeper)))
    id = pages.group("tree")["samples"][0]["id"]
    shown = TrajectoryPages(pages).trajectory(id)["rows_shown"]
    assert [(row["parent"], row["shared"]) for row in shown] == [(None, 0), (None, 0), (0, 6), (2, 9)]


def test_the_tree_says_what_was_left_out_of_training_and_why(pages):
    cut = Outcome.ended(StopReason.LENGTH)
    flat, masked = made("flat", 0, 1.0), made("masked", 0, 1.0)
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        trained(journal, 7, made("cut", 0, 0.0, outcome=cut), flat, masked, made("plain", 0, 1.0))
        notes = [annotated(item, (0.0,) * 5, step=7) for item in (flat, masked)]
        zero = bytes(4)
        journal.add_annotations([notes[0]._replace(advantage=zero), notes[1]._replace(flags=bytes((0, 2, 2, 0, 0)))])
    assert rows_of(pages, "plain") == [(None, True, "in step 7; whether tokens were masked is not recorded")]
    assert rows_of(pages, "flat") == [(None, False, "in step 7 with advantage 0: it taught nothing")]
    assert rows_of(pages, "masked") == [(None, True, "trained at step 7, 2 of 5 tokens left out of the loss")]
    assert rows_of(pages, "cut")[0][1]
    (pages.run_dir / "config.yaml").write_text(
        "algorithm:\n  mask_truncated: true  # file\ntrainer:\n  critic_warmup: 1\n"
    )
    assert rows_of(pages, "cut") == [
        (None, False, "in step 7, and left out of the loss: cut off (algorithm.mask_truncated)")
    ]
    assert rows_of(pages, "a")[0] == (None, False, "step 1 trained the critic alone (trainer.critic_warmup)")


def test_waits_are_averaged_over_all_steps(pages):
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        journal.add_metrics(2, {"seconds/validation": 3.0})
    assert pages.waits() == {"spans": {"train": 1.0, "validation": 1.5}, "steps": 2}


def test_a_drawn_timeline_is_shown_once_the_run_has_ended(pages):
    (pages.run_dir / "timeline.svg").write_text("<svg/>")
    assert pages.drawn_timeline() == b"<svg/>"
    with Journal.open(pages.run_dir, max_mb=50):
        assert pages.drawn_timeline() is None


def test_a_viewer_that_read_leaves_the_writer_free(pages, index):
    """After any answer the log can be folded back into the file: no reader holds a snapshot."""
    shown = TrajectoryPages(pages)
    with Journal.open(pages.run_dir, max_mb=50) as journal:
        journal.add(made("more", 0, 1.0))
        journal.flush_blocking()
        pages.overview(), pages.ends(), pages.groups(), shown.trajectory(2), shown.tokens(2, 0), find(pages, index, {})
        with sqlite3.connect(pages.run_dir / schema.FILE_NAME) as connection:
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        assert busy == 0
