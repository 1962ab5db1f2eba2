"""Benchmarks run as their first lines say: what changes around them must not break them unseen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
ELSEWHERE = {"ray_overhead", "trl_cpu_step", "trl_grpo_step", "trl_lora_step", "trl_loss", "trl_sft_step"}
"""Scripts for an interpreter with Ray or TRL."""

IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, "bench")  # as for a script: they import one another by name
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
SMALL = {
    "shared_prefix": "--samples 2 --shares 0.5 --length 48 --groups 1 --turns 1 --hidden 64 --layers 1",
    "schedules": "--help",
    "sft_step": "--hidden 128 --layers 1 --rows 4 --tokens 32 --steps 2 --turns 1",
}


def run(*words: str) -> str:
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=BENCH.parent,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_benchmark_imports_what_there_is() -> None:
    names = sorted(path.stem for path in BENCH.glob("*.py") if path.stem not in ELSEWHERE)
    assert names
    run("-c", IMPORT_ALL, *names)


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_its_table(name: str) -> None:
    assert run(f"bench/{name}.py", *SMALL[name].split())


def test_turns_of_sessions_are_compared_with_a_peer_as_well(tmp_path: Path) -> None:
    """In seconds for all of them; a peer's figure for other work, or for another number, is left out."""
    peers = tmp_path / "peers.jsonl"
    peers.write_text(
        "warming up\n"
        '{"peer": "other", "concurrent": 2, "seconds": 3600}\n'
        '{"peer": "wide", "concurrent": 9, "seconds": 3600}\n'
        '{"peer": "even", "concurrent": 2, "tokens_per_s": 1}\n'
    )
    words = "--device cpu --work turns --concurrent 2 --turns 2 --given 8 --sampled 4 --repeats 1 --peer"
    shown = run("bench/engine.py", *words.split(), str(peers))
    assert "2 sessions:" in shown and "× other (3,600 s)" in shown
    assert "wide" not in shown and "even" not in shown
