"""Cells of a real notebook kernel: training blocks or is awaited, shows its progress there, and can be interrupted."""

import os
import time
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

import treadle

SETUP = """
import treadle
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 6) for b in (3, 4)]
small = {"model": "treadle/tiny-calculator", "tasks": rows, "rollout.n": 2, "rollout.prompt_length": 32,
         "rollout.response_length": 16}
bonus = 0.5
"""
BLOCKING = """
def reward(response, answer):
    return float(answer in response) + bonus

run = treadle.train(reward=reward, steps=2, run_dir="runs/blocking", **small)
run
"""
AWAITED = """
again = await treadle.train_async(reward=reward, steps=2, run_dir="runs/awaited", **small)
assert again.metrics["reward/mean"] == run.metrics["reward/mean"]
"""
EVALUATED = """
found = treadle.rollout(reward="exact_match", run_dir="runs/evaluated", **small)
found
"""


@pytest.fixture(autouse=True)
def _kernels_find_treadle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(treadle.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.filterwarnings("default")
def test_cells_train_await_and_evaluate(tmp_path):
    sources = [SETUP, BLOCKING, AWAITED, EVALUATED]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, blocking, awaited, evaluated = (cell.outputs for cell in notebook.cells)
    for outputs in (blocking, awaited):
        errors = "".join(output.text for output in outputs if output.get("name") == "stderr")
        lines = [line for line in errors.splitlines() if "tqdm" not in line and "same reward" not in line]
        assert lines == [], "what is no warning is not red"
        (shown,) = [output for output in outputs if output.output_type == "display_data"]
        assert "2 of 2" in shown.data["text/plain"], "the same block, drawn anew to the end"
        assert "<pre" in shown.data["text/html"] and "reward" in shown.data["text/html"]
    (result,) = [output for output in blocking if output.output_type == "execute_result"]
    assert "Run(&#x27;runs/blocking&#x27;: 2 steps" in result.data["text/html"]
    (bar,) = [output for output in evaluated if output.output_type == "display_data"]
    assert "16/16 done" in bar.data["text/plain"]
    (table,) = [output for output in evaluated if output.output_type == "execute_result"]
    assert "pass@1" in table.data["text/html"]


@pytest.mark.filterwarnings("default")
def test_an_interrupted_cell_is_saved(tmp_path):
    kernel: KernelManager
    kernel, client = start_new_kernel(env=dict(os.environ), cwd=str(tmp_path))
    try:
        call = 'treadle.train(reward="exact_match", steps=500, run_dir="runs/it", **small)'
        client.execute_interactive(SETUP, timeout=120, output_hook=lambda message: None)
        asked = client.execute(call)
        metrics, deadline = Path("runs/it/metrics.jsonl"), time.monotonic() + 300
        while time.monotonic() < deadline and not (metrics.exists() and '"reward/mean"' in metrics.read_text()):
            time.sleep(0.05)
        kernel.interrupt_kernel()
        reply = client.get_shell_msg(timeout=120)
        while reply["parent_header"].get("msg_id") != asked:
            reply = client.get_shell_msg(timeout=120)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "error"
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert "and saved in runs/it" in reply["content"]["evalue"]
    run = treadle.Run("runs/it")
    assert run.model_dir.name.endswith(f"step-{run.steps}")


@pytest.mark.filterwarnings("default")
def test_the_notebooks_of_the_examples_run_one_after_the_other(tmp_path):
    folder = Path(treadle.__file__).parents[1] / "examples/notebooks"
    for name in ("train", "inspect", "evaluate"):
        notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        assert not [cell for cell in notebook.cells if cell.get("outputs")], "notebooks are kept without outputs"
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
