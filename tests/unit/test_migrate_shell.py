"""Launch scripts are read as bash would read them, and never run."""

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from treadle.cli.main import build_parser
from treadle.cli.parser import parse as parse_command
from treadle.errors import ConfigError
from treadle.migrate.rules.trainer import DISTILLATION
from treadle.migrate.shell.parser import parse
from treadle.migrate.source import ELSEWHERE, Launch, read_launch
from treadle.migrate.trl_arguments import OTHER_TRAINERS

START = "python3 -m verl.trainer.main_ppo"


def launch(script: str) -> Launch:
    found = read_launch(script)
    assert found is not None
    return found


def words(script: str) -> list[str]:
    return [word.text for word in launch(script).words]


def unknown(script: str) -> list[str]:
    return [item for word in launch(script).words for item in word.unknown]


def test_words_go_on_over_continued_lines_and_end_at_a_pipe() -> None:
    script = f"set -x\n{START} \\\n    a=1 \\\n    b=2 2>&1 | tee c=3\nd=4\n"
    assert words(script) == ["a=1", "b=2"]
    assert [word.line for word in launch(script).words] == [3, 4]


@pytest.mark.parametrize("end", ["> log c=1", ">> log", "2> log", "&> log", "< in", "&& c=1", "; c=1", "&", "# c=1"])
def test_redirections_and_what_follows_are_no_words(end: str) -> None:
    assert "a=1" in words(f"{START} a=1 {end}")
    assert "log" not in words(f"{START} a=1 {end}")


def test_quotes_keep_words_together_and_single_quotes_keep_references() -> None:
    script = f"""X=v\n{START} a="b $X c" d='e $X' f="['g','h']" i='${{j.k}}' l=\\$X m=n"o"'p'"""
    assert words(script) == ["a=b v c", "d=e $X", "f=['g','h']", "i=${j.k}", "l=$X", "m=nop"]


def test_variables_of_the_script_are_filled_in() -> None:
    script = f"A=1\nexport B=two C='3 4'\nreadonly D=$A$B\n{START} a=$A b=${{B}} c=\"$C\" d=$D e=${{A}}x"
    assert words(script) == ["a=1", "b=two", "c=3 4", "d=1two", "e=1x"]


def test_a_default_is_taken_and_mentioned_when_the_variable_is_not_set() -> None:
    script = f"A=${{A:-1}}\nB=set\n{START} a=$A b=${{B:-no}} c=${{C-3}} d=${{D:=4}} e=$D f=${{1:-first}}"
    assert words(script) == ["a=1", "b=set", "c=3", "d=4", "e=4", "f=first"]
    assert [note for note in launch(script).notes if "$C is not set" in note and "'3'" in note]


def test_the_working_directory_is_where_our_paths_start() -> None:
    script = f'DIR=${{DIR:-"$PWD"}}\n{START} a=$DIR/data b=$(pwd)/x c=${{PWD:-/no}}'
    assert words(script) == ["a=./data", "b=./x", "c=."]
    assert unknown(f"cd /elsewhere\n{START} a=$PWD/data") == ["$PWD is not known after line 1 changes it"]


def test_a_value_that_the_script_demands_is_not_empty_later() -> None:
    script = f'M=${{M:-${{OTHER:-}}}}\n: "${{M:?set M}}"\n{START} a=$M'
    assert unknown(script) == ["$M has no value in the script"]
    assert words(f'M=m\n: "${{M:?set M}}"\n{START} a=$M') == ["a=m"]


def test_defaults_nest() -> None:
    script = f'HOMEDIR=${{HOMEDIR:-"${{ROOT:-/r}}/verl"}}\n{START} a="${{OUT:-"${{HOMEDIR}}/ckpts"}}"'
    assert words(script) == ["a=/r/verl/ckpts"]


def test_the_home_directory_is_written_as_a_tilde_where_that_means_the_same() -> None:
    script = f"X=$HOME/data\n{START} a=$HOME/m b=\"['$X/a','${{HOME}}/b']\""
    assert words(script) == ["a=~/m", "b=['~/data/a','~/b']"]
    assert unknown(f"{START} a=file:/$HOME/x") == ["$HOME has no value in the script"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1024 * 2", "2048"),
        ("(a + b) * 2 / 3", "2"),
        ("${a} - $b", "-1"),
        ("7 % 4", "3"),
        ("-7 / 2", "-3"),
        ("2 ** 3", "8"),
        ("9007199254740993 / 1", "9007199254740993"),
    ],
)
def test_arithmetic_is_worked_out(expression: str, value: str) -> None:
    assert words(f"a=1\nb=2\nx=$(({expression}))\n{START} y=$x") == [f"y={value}"]


def test_arrays_are_spliced_in_with_their_own_lines() -> None:
    script = f'V=7\nARGS=(\n  a=$V  # note\n  b="c d"\n)\nARGS+=(e=1)\n{START} "${{ARGS[@]}}" f=2'
    assert words(script) == ["a=7", "b=c d", "e=1", "f=2"]
    assert [word.line for word in launch(script).words] == [3, 4, 6, 7]


def test_a_list_in_a_variable_is_split_unless_quoted() -> None:
    assert words(f'ARGS="a=1 b=2"\n{START} $ARGS') == ["a=1", "b=2"]
    assert words(f'ARGS="a=1 b=2"\n{START} "$ARGS"') == ["a=1 b=2"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"{START} a=$NOBODY", "$NOBODY has no value"),
        (f"{START} a=$(date)", "$(date) would have to be run"),
        (f"{START} a=`date`", "$(date) would have to be run"),
        (f"x=$(nproc)\n{START} a=$((x * 2))", "$(nproc) would have to be run"),
        (f"if nvidia-smi; then X=1; fi\n{START} a=$X", "depends on a condition"),
        (f"X=1\nif [ -d /data ]; then\n X=2\nfi\n{START} a=$X", "depends on a condition"),
        (f"D=$(hostname)\ncase $D in a) X=1;; *) X=2;; esac\n{START} a=$X", "depends on a condition"),
        (f"for f in *.txt $(ls); do X=$f; done\n{START} a=$X", "depends on a condition"),
        (f"{START} a=${{X%.yaml}}", "is an expansion that is not read"),
        (f"{START} a=$((1 / 0))", "cannot be worked out"),
        (f"{START} a=$((9 ** 63 ** 63))", "cannot be worked out"),
        (f"{START} a=$((x.y))", "has no value"),
    ],
)
def test_what_the_script_does_not_tell_is_never_guessed(script: str, why: str) -> None:
    assert why in "; ".join(unknown(script))


def test_words_of_the_caller_are_mentioned() -> None:
    assert any("$@" in note for note in launch(f'{START} a=1 "$@"').notes)
    assert words(f"{START} a=1 $@") == ["a=1"]


@pytest.mark.parametrize(
    ("command", "recipe"),
    [
        ("python3 -m verl.trainer.main_ppo", "main_ppo"),
        ("PYTHONUNBUFFERED=1 python -u -m verl.trainer.main_ppo", "main_ppo"),
        ("ray job submit --no-wait -- python3 -m recipe.dapo.main_dapo", "main_ppo"),
        ("python verl/trainer/main_ppo.py", "main_ppo"),
        ("python -m verl.experimental.fully_async_policy.fully_async_main", "fully_async"),
        ("python -m recipe.fully_async_policy.fully_async_main", "fully_async"),
        ("python -m verl.experimental.one_step_off_policy.main_ppo", "one_step_off"),
        ("uv run python -m recipe.one_step_off_policy.async_main_ppo", "one_step_off"),
    ],
)
def test_the_program_says_which_schedule_runs(command: str, recipe: str) -> None:
    found = launch(f"{command} a=1")
    assert (found.recipe, found.problem) == (recipe, "")
    assert [word.text for word in found.words] == ["a=1"]


def test_what_is_said_in_place_of_a_program_names_commands_and_pages_that_there_are() -> None:
    said = " ".join([*(reason for _, reason in ELSEWHERE), *OTHER_TRAINERS.values(), DISTILLATION])
    root, commands = Path(treadle.__file__).parents[1], re.findall(r"`treadle (\w+)", said)
    assert len(commands) >= 3
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            parse_command(build_parser(), [command, "--help"])
        assert ended.value.code == 0
    assert [page for page in re.findall(r"docs/\w+\.md", said) if not (root / page).exists()] == []


def test_programs_without_counterpart_say_why() -> None:
    assert "treadle sft" in launch("torchrun -m verl.trainer.sft_trainer a=1").problem
    assert "treadle rollout" in launch("python -m verl.trainer.main_eval a=1").problem
    assert "treadle rollout" in launch("python -m verl.trainer.main_generation a=1").problem
    assert "trainer of its own" in launch("python -m recipe.prime.main_prime a=1").problem


def test_hydras_flags_are_kept_apart() -> None:
    found = launch(f"{START} --config-path=c --config-name 'my_config' a=1 --cfg job")
    assert {name: word.text for name, word in found.flags.items()} == {"config_path": "c", "config_name": "my_config"}
    assert any("--cfg" in note for note in found.notes)


def test_only_the_first_launch_is_read_and_the_others_are_mentioned() -> None:
    found = launch(f"{START} a=1\n{START} a=2\n")
    assert [word.text for word in found.words] == ["a=1"]
    assert any("line 2" in note and "again" in note for note in found.notes)


def test_a_script_that_launches_something_else_is_not_verls() -> None:
    assert read_launch("python train.py a=1\necho verl.trainer.main_ppo\n") is None


@given(st.text(alphabet="ab=$({})'\"\\\n #;|&`@[]X1+", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_can_be_read(text: str) -> None:
    assert isinstance(parse(text), list)
    read_launch(f"{text}\n{START} {text}")


def test_a_condition_on_the_machine_hides_only_what_it_sets() -> None:
    script = f'ARGS=(a=1)\nif nvidia-smi; then ARGS+=(b=2); else ARGS+=(c=3); fi\n{START} "${{ARGS[@]}}" d=4'
    found = {word.text: word.only_if for word in launch(script).words}
    assert found.pop("a=1") == found.pop("d=4") == ""
    assert all("line 2" in reason for reason in found.values()) and set(found) == {"b=2", "c=3"}


def test_both_ways_of_a_condition_that_agree_leave_nothing_open() -> None:
    assert words(f"if nvidia-smi; then X=1; else X=1; fi\n{START} a=$X") == ["a=1"]
    assert words(f"X=1\nif nvidia-smi; then echo; else X=2; exit 1; fi\n{START} a=$X") == ["a=1"]


def test_a_script_that_would_end_itself_is_read_on_and_says_so() -> None:
    script = f'if [ "$#" -lt 2 ]; then\n  echo usage\n  exit 1\nfi\n{START} a=1'
    assert words(script) == ["a=1"] and any("ends itself" in note for note in launch(script).notes)


def test_there_is_no_npu_here() -> None:
    detect = "D=${D:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}"
    script = f"{detect}\ncase $D in npu) N=16;; gpu) N=8;; esac\n{START} a=$N"
    assert words(script) == ["a=8"] and any("torch_npu" in note for note in launch(script).notes)
    assert [word.text for word in read_launch(script, {"D": "npu"}).words] == ["a=16"]  # type: ignore[union-attr]


def test_variables_of_the_caller_win_and_must_be_the_scripts() -> None:
    script = f"N=$(nproc)\n{START} a=$N b=${{M:-1}} c=$1"
    found = read_launch(script, {"N": "4", "M": "5", "1": "six"})
    assert found is not None and [word.text for word in found.words] == ["a=4", "b=5", "c=six"]
    with pytest.raises(ConfigError, match=r"--set MM: the script has no \$MM"):
        read_launch(script, {"MM": "1"})


def run_bash(script: str, folder: Path) -> list[str]:
    """The words that bash gives to the program."""
    stub = folder / "python3"
    stub.write_text('#!/bin/sh\nshift 2\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, check=True, timeout=20
    )
    return done.stdout.decode().split("\0")[:-1]


CONDITIONS = [
    'if [ "$X" = one ]; then A=yes; else A=no; fi',
    'if [[ $X == o* && -n "${Y:-}" ]]; then A=1; elif [[ -z $UNSET ]]; then A=2; fi',
    'case "$X" in two|three) A=23;; o?e) A=glob;; *) A=else;; esac',
    "if (( N % 2 == 0 && N > 3 )); then A=even; else A=odd; fi",
    "A=; A=${A:-replaced}; B=${A-kept}",
    "A=; B=${A-empty}; A=x$B",
    'E=(); for i in 1 2 3; do E+=(k$i=$((i * N))); done; A="${E[*]}"',
    'f() { A="$1-$2"; }; f "$X" b',
    '[ "$N" -ge 5 ] && A=big || A=small',
    '! [ "$X" = one ] || A=not',
    "A=$(echo $X)",
    "{ A=group; }; ( A=sub )",
    'if test "$X" != one -o "$N" = 4; then A=test; fi',
    "cat <<EOF > /dev/null\nA=document\nif [\nEOF\nA=${A:-after}",
    'while false; do A=never; done; A=${A:-loop}; : "${B:=given}"; A=$A$B',
]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("start", ["X=one\nN=4", "X=two\nN=5\nY=y", "X=\nN=0"])
def test_conditions_and_loops_go_as_bash_goes(tmp_path: Path, condition: str, start: str) -> None:
    script = f'{start}\n{condition}\n{START} a="${{A:-none}}" b="${{B:-none}}" "${{E[@]:-}}"'
    expected = [word for word in run_bash(script, tmp_path) if word]
    found = launch(script)
    assert [word.text for word in found.words] == expected
    assert not any(word.unknown or word.only_if for word in found.words)


VALUES = st.text(alphabet="abc XY_/.,:[]{}-", max_size=8)


@given(values=st.lists(VALUES, min_size=1, max_size=3), quote=st.sampled_from(["'", '"']))
@settings(max_examples=25, deadline=None)
def test_words_are_those_that_bash_passes_on(
    tmp_path_factory: pytest.TempPathFactory, values: list[str], quote: str
) -> None:
    lines = [f"V{at}={quote}{value}{quote}" for at, value in enumerate(values)]
    given_words = " ".join(f'k{at}="$V{at}"' for at in range(len(values)))
    script = "\n".join([*lines, f"{START} {given_words} 'end=1'"])
    assert words(script) == run_bash(script, tmp_path_factory.mktemp("bin"))
