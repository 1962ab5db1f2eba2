"""The command: real processes for exit statuses, pipes and interrupts; in process for what is printed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import treadle
from tests.configs import ROLLOUT, TRAINING
from treadle.cli.main import main
from treadle.cli.parser import load_words
from treadle.cli.recipes import read_card, sparkline
from treadle.config import SFTRunConfig, load, loads
from treadle.config.load import recipe_names

COMMAND = [sys.executable, "-c", "from treadle.cli.main import main; main()"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a config in it."""
    (tmp_path / "my.yaml").write_text(ROLLOUT + "rollout: {n: 2}\n")
    (tmp_path / "train.yaml").write_text(TRAINING + "actor: {_target_: treadle.config.FSDPActorConfig}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys):
    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def process(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        ([], 0),
        (["config", "check", "my.yaml"], 0),
        (["config", "check", "my.yaml", "rollout.nn=1", "rollout.n=x"], 2),
        (["config", "check", "nowhere.yaml"], 2),
        (["config", "diff", "my.yaml", "train.yaml"], 1),
        (["config", "nonsense"], 2),
        (["plan", "train.yaml", "trainer.n_gpus_per_node=64"], 2),
    ],
)
def test_a_process_ends_with_the_right_status_and_no_traceback(here, words, status):
    done = process(*words)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == (status != 0)


def test_the_installed_command_is_this_one(here):
    found = subprocess.run(
        [os.path.join(os.path.dirname(sys.executable), "treadle"), "config", "check", "my.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stdout) == (0, "fine: a rollout that stands alone\n")


@pytest.mark.parametrize("words", [["config", "show", "my.yaml"], ["config", "check", "my.yaml"], ["config", "schema"]])
def test_a_reader_that_goes_away_causes_no_traceback(here, words):
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [*COMMAND, *words], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, env=buffered
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_said_so(here):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "config", "show", "my.yaml"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("cannot write: No space left")


def test_ctrl_c_ends_with_its_own_status(here):
    os.mkfifo(here / "slow.yaml")
    started = subprocess.Popen([*COMMAND, "config", "check", "slow.yaml"], stderr=subprocess.PIPE, text=True)
    writer = open_when_read(here / "slow.yaml")
    while Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.01)  # until it reads; an interrupt between opening and reading can be lost in the interpreter
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=30)
    os.close(writer)
    assert (started.returncode, said) == (130, "interrupted\n")


def open_when_read(path, deadline_s: float = 30) -> int:
    """A pipe's writing end, which opens once somebody reads the other."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < until, "nobody read it"
            time.sleep(0.01)


def test_output_is_utf8_whatever_the_locale_says(here):
    done = subprocess.run(
        [*COMMAND, "config", "show", "my.yaml", "model.path=模型"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert done.returncode == 0
    assert loads(done.stdout.decode("utf-8")).model.path == "模型"


def test_an_argument_that_is_no_text_is_refused(here):
    done = subprocess.run([*COMMAND, "config", "check", "my.yaml", b"model.path=\xff"], capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"is not UTF-8 text" in done.stderr
    assert b"Traceback" not in done.stderr


def test_help_names_every_command(run):
    status, out, _ = run("--help")
    assert status == 0
    for word in ("plan", "config", "CONFIG is a YAML file or a shipped recipe"):
        assert word in out


@pytest.mark.parametrize("command", ["show", "explain", "check", "diff", "schema", "migrate"])
def test_every_config_command_has_help_with_an_example(run, command):
    status, out, _ = run("config", command, "--help")
    assert status == 0
    assert f"example: treadle config {command}" in out


def test_check_says_what_kind_of_config_is_fine(run, here):
    assert run("config", "check", "my.yaml") == (0, "fine: a rollout that stands alone\n", "")
    assert run("config", "check", "calculator") == (0, "fine: a training run\n", "")


def test_check_lists_every_mistake_and_counts_them(run, here):
    status, out, said = run("config", "check", "my.yaml", "rollout.temperatur=1", "rollout.name=vlm")
    assert (status, out) == (2, "")
    assert said == (
        "rollout.temperatur: no such key (given whole number 1)\n"
        "    from command line (rollout.temperatur=1)\n"
        "    did you mean 'rollout.temperature'?\n"
        "rollout.name: must be one of native, vllm, openai, scripted, got string 'vlm'\n"
        "    from command line (rollout.name=vlm)\n"
        "    did you mean 'vllm'?\n"
        "\n"
        "2 mistakes; nothing was started\n"
    )


def test_show_prints_yaml_that_loads_again(run, here):
    status, out, _ = run("config", "show", "my.yaml", "rollout.seed=7", "rollout.n=3")
    assert status == 0
    assert loads(out) == load("my.yaml", ["rollout.seed=7", "rollout.n=3"])


def test_options_may_stand_between_words(run, here):
    for words in (
        ["my.yaml", "--origins", "rollout.n=3"],
        ["--origins", "my.yaml", "rollout.n=3"],
        ["my.yaml", "rollout.n=3", "--origins"],
    ):
        status, out, _ = run("config", "show", *words)
        assert status == 0
        assert "n: 3  # command line (rollout.n=3)" in out


def test_words_come_in_any_order_and_values_win(run, here):
    (here / "over.yaml").write_text("rollout: {n: 5, seed: 6}\n")
    _, out, _ = run("config", "show", "rollout.n=7", "my.yaml", "over.yaml")
    config = loads(out)
    assert (config.rollout.n, config.rollout.seed) == (7, 6)


def test_a_path_may_hold_an_equals_sign(here):
    folder = here / "lr=1e-4"
    folder.mkdir()
    (folder / "config.yaml").write_text(ROLLOUT)
    assert load_words(["lr=1e-4/config.yaml", "rollout.n=3"]).rollout.n == 3


def test_a_double_dash_may_stand_before_words(run, here):
    assert run("config", "check", "--", "my.yaml", "rollout.n=3")[0] == 0


@pytest.mark.parametrize(
    "words", [["config", "show", "my.yaml", "--orgins"], ["config", "diff", "a", "b", "c"], ["-x"]]
)
def test_an_unknown_option_shows_how_the_command_is_used(run, here, words):
    status, _, said = run(*words)
    assert status == 2
    assert said.startswith("usage: treadle")


def test_explain_a_key_and_a_section(run, here):
    status, out, _ = run("config", "explain", "my.yaml", "rollout.n", "rollout.n=4")
    assert status == 0
    assert "origin    command line (rollout.n=4)\n  overrode  2 from my.yaml:2\n" in out
    status, out, _ = run("config", "explain", "my.yaml", "rollout.limits")
    assert status == 0
    assert "stall_report_s = 60.0  # default (LimitsConfig.stall_report_s)" in out
    status, _, said = run("config", "explain", "my.yaml", "rollout.nn")
    assert status == 2
    assert "did you mean 'rollout.n'?" in said


def test_diff_prints_what_differs_and_says_so_by_status(run, here):
    assert run("config", "diff", "my.yaml", "my.yaml") == (0, "", "0 keys differ\n")
    (here / "other.yaml").write_text(ROLLOUT + "rollout: {n: 3}\n")
    assert run("config", "diff", "my.yaml", "other.yaml") == (1, "rollout.n: 2 → 3\n", "1 key differs\n")


def test_schema_is_json(run):
    status, out, _ = run("config", "schema")
    assert status == 0
    assert "rollout" in json.loads(out)["properties"]


def test_recipes_are_listed_with_command_needs_and_curve(run):
    status, out, _ = run("recipes")
    assert status == 0
    for name in recipe_names():
        card = read_card(name)
        assert f"{name}: {card.about}\n  {card.command}\n  needs {card.needs}; {card.minutes}\n" in out
    assert "validation/success  0.352 ▁▆███ 0.977  step 40" in out


def test_a_recipe_is_shown_in_full_and_as_json(run):
    status, out, _ = run("recipes", "calculator")
    assert status == 0
    assert "measured  treadle train calculator" in out
    assert "0.352 → 0.977 at step 40" in out
    assert "prepare   pip install 'treadle[reasoning-gym]'" in run("recipes", "running_sum")[1]
    cards = json.loads(run("recipes", "--json")[1])
    assert [card["name"] for card in cards] == recipe_names()
    one = json.loads(run("recipes", "calculator", "--json")[1])
    assert one in cards
    assert one["measured"]["curves"]["reward/mean"][0] == [1, 0.4336]


def test_a_command_that_is_nearly_one_is_answered_with_it(run):
    status, _, err = run("trian", "calculator")
    assert status == 2
    assert "did you mean 'train'?" in err
    assert "did you mean" not in run("xyzzy")[2]


def test_the_version_is_told(run):
    assert run("--version") == (0, f"treadle {treadle.__version__}\n", "")


def test_a_recipe_that_is_not_there_is_named(run):
    status, _, err = run("recipes", "gsm")
    assert status == 2
    assert "did you mean 'gsm8k'?" in err


@pytest.mark.parametrize("name", recipe_names())
def test_measured_curves_are_of_the_recipe_as_shipped(name):
    """A curve goes on for the steps of the config beside it, or its command says what was changed."""
    measured = read_card(name).measured
    if measured is None:
        return
    config, words = load(name), measured.command.split()
    assert words[:3] == ["treadle", "sft" if isinstance(config, SFTRunConfig) else "train", name]
    (validation,) = [curve for metric, curve in measured.curves.items() if metric.startswith("validation/")]
    assert validation[0][0] == 0
    steps = {curve[-1][0] for curve in measured.curves.values()}
    assert steps == {config.trainer.total_training_steps} or "total_training_steps" in measured.command


@pytest.mark.parametrize("name", recipe_names())
def test_a_card_says_how_long_the_measured_run_took_or_that_there_is_none(name):
    card = read_card(name)
    if card.measured is not None:
        assert f"{card.measured.minutes:.0f} minutes" in card.minutes
    else:
        assert card.minutes == "not measured yet"


def test_the_page_has_the_points_of_chain_sum_that_its_card_draws():
    page = (Path(__file__).parents[2] / "docs/performance.md").read_text(encoding="utf-8")
    measured = read_card("chain_sum").measured
    assert measured is not None and f"    {measured.command}\n" in page
    table = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]*) ?\| ([\d.]*) ?\|$", page, re.MULTILINE)
    assert measured.curves == {
        "validation/success": [(int(step), float(success)) for _, step, _, success in table if success],
        "reward/mean": [(int(step), float(reward)) for _, step, reward, _ in table if reward],
    }
    assert f"{int(table[-1][0]) / 60:.1f}" == f"{measured.minutes:.1f}"


def test_the_page_of_fine_tuning_has_the_loss_that_its_card_draws():
    page = (Path(__file__).parents[2] / "docs/sft.md").read_text(encoding="utf-8")
    measured = read_card("calculator_sft").measured
    assert measured is not None and f"({measured.minutes:.0f} minutes" in page
    (_, first), *_, (steps, last) = measured.curves["validation/loss"]
    assert f"| random weights | 0 | {first:.2f} | |" in page
    assert f"{steps} steps | 51,200 | {last:.3f} |" in page


def test_the_page_has_the_curve_of_the_running_sum_as_it_was_measured():
    page = (Path(__file__).parents[2] / "docs/performance.md").read_text(encoding="utf-8")
    measured = read_card("running_sum").measured
    assert measured is not None and f"in {measured.minutes:g} minutes" in page
    values = [f"{value:.3f}" for _, value in measured.curves["validation/success"]]
    assert f"| success | {' | '.join(values)} |" in page


def test_a_sparkline_is_of_the_whole_curve():
    assert sparkline([(0, 0.0), (1, 0.5), (2, 1.0)]) == "▁▅█"
    assert sparkline([(step, float(step >= 50)) for step in range(100)]) == "▁" * 20 + "█" * 20
    assert sparkline([(0, 0.5), (1, 0.5)]) == "▁▁"


def test_plan_is_printed_in_words_and_as_json(run, here):
    words = ["plan", "train.yaml", "--machines", "1x8", "trainer.n_gpus_per_node=8", "rollout.name=vllm"]
    status, out, _ = run(*words)
    assert status == 0
    assert "trainer + rollout node 0: node0, GPU 0–7" in out
    assert "64 tasks × 8 samples = 512 trajectories" in out
    status, out, _ = run(*words, "--json")
    plan = json.loads(out)
    assert (plan["replicas"], plan["batches"]["trajectories"], plan["batches"]["ranks"]) == (8, 512, 8)


def test_plan_of_a_stand_alone_rollout(run, here):
    status, out, _ = run("plan", "my.yaml")
    assert status == 0
    assert "rollout that stands alone" in out
    assert "2 per task" in out


def test_plan_looks_at_the_visible_devices(run, here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert run("plan", "train.yaml", "trainer.n_gpus_per_node=2")[0] == 0
    assert run("plan", "train.yaml", "trainer.n_gpus_per_node=4")[0] == 2
    assert (
        "unused     1 GPU: raise trainer.n_gpus_per_node" in run("plan", "train.yaml", "trainer.n_gpus_per_node=1")[1]
    )
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert run("plan", "train.yaml", "trainer.n_gpus_per_node=1")[0] == 2


def test_plan_says_where_reward_models_compute(run, here):
    words = ["plan", "train.yaml", "trainer.n_gpus_per_node=2", "reward.classifiers.helpful.path=there"]
    words += ["reward.classifiers.helpful.device=cuda"]
    assert "rewards    helpful: node0, GPU 2\n" in run(*words, "--machines", "1x4")[1]
    shared = "rewards    helpful: node0, GPU 0, shared with trainer + rollout\n"
    assert shared in run(*words, "--machines", "1x2")[1]


def test_plan_says_where_validation_happens(run, here):
    words = ["plan", "train.yaml", "trainer.mode=fully_async", "algorithm.rollout_correction.rollout_is=token"]
    words += ["rollout.nnodes=1", "trainer.test_freq=5", "data.val_files=[held_out.jsonl]"]
    assert "validation beside training: 1 × native, " in run(*words)[1]
    words += ["trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=4"]
    for backend in ("local", "ray"):
        said = run(*words, f"cluster.backend={backend}", "--machines", "1x8")[1]
        assert "validation beside training, on the rollout's engines: no GPU is left for one of its own\n" in said
        assert "the next push of weights waits until all validation tasks are done\n" in said
        said = run(*words, f"cluster.backend={backend}", "--machines", "1x9")[1]
        assert "validation beside training: 1 × native, node0, GPU 8" in said


@pytest.mark.parametrize("machines", ["0x8", "8", "x", "8x", "-1x8", "1x8x2", "999999999x8"])
def test_machines_that_make_no_sense_are_refused(run, here, machines):
    status, _, said = run("plan", "train.yaml", f"--machines={machines}")
    assert status == 2
    assert "is not COUNTxGPUS" in said


def test_several_kinds_of_machines_can_be_described(run, here):
    words = ["trainer.mode=one_step_off", "algorithm.rollout_correction.rollout_is=token", "rollout.nnodes=2"]
    words += [
        "cluster.backend=ray",
        "rollout.n_gpus_per_node=4",
        "trainer.n_gpus_per_node=8",
        "--machines",
        "1x8",
        "--machines",
        "2x4",
    ]
    status, out, _ = run("plan", "train.yaml", *words)
    assert status == 0
    assert "trainer node 0: node0, GPU 0–7" in out
    assert "rollout node 1: node2, GPU 0–3" in out
