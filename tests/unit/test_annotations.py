"""Annotations: the trainer's side of each token, recorded without changing training, read back on the right tokens."""

from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.policies import make_groups, save_tiny_model
from tests.unit.test_step import fail, make_parts
from tests.view_runs import CONFIG, made, sampled
from treadle.algorithm.advantage_inputs import rows_of
from treadle.cli.main import main
from treadle.config.root import LoggingConfig
from treadle.config.training import POLICY_LOSSES, AlgorithmConfig, PolicyLossConfig, RolloutCorrectionConfig
from treadle.inspect import replay
from treadle.journal import Journal, RowAnnotation
from treadle.model.checksum import checksum
from treadle.observe.step_metrics import Spans
from treadle.trainer.annotations import _is_in_share
from treadle.trainer.recorder import RunRecorder
from treadle.trainer.step import train_step
from treadle.types import Group
from treadle.view.run_pages import RunPages
from treadle.view.trajectory_pages import TrajectoryPages


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def floats(blob: bytes | None, count: int) -> list[float]:
    assert blob is not None
    found = array("f", blob).tolist()
    return found * count if len(found) == 1 else found


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_weights_do_not_depend_on_what_is_recorded(directory, loss):
    keys = {"policy_loss": PolicyLossConfig(loss_mode=loss), "ppo_mini_batch_size": 2, "ppo_epochs": 2}
    found = []
    for share in (0.0, 1.0):
        parts = replace(make_parts(directory, **keys), annotations=share)
        report = train_step(parts, make_groups(3), step=1)
        found.append(checksum(dict(parts.policy.tensors())))
        assert bool(report.annotations) == bool(share)
    assert found[0] == found[1]


def test_every_value_is_of_its_token(directory):
    algorithm = AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(rollout_is="token"))
    parts = replace(make_parts(directory, algorithm, use_kl_loss=True), annotations=1.0)
    groups = make_groups(5, forks=2)
    before_T = parts.policy.logprobs(rows_of(groups))
    reference_T = parts.reference.logprobs(rows_of(groups))
    report = train_step(parts, groups, step=1)
    trained = [(item, at, row) for group in groups for item in group.survivors for at, row in enumerate(item.rows)]
    assert [(note.uid, note.sample, note.position) for note in report.annotations] == [
        (item.uid, item.sample, at) for item, at, _ in trained
    ]
    start = 0
    for note, (_, _, row) in zip(report.annotations, trained, strict=True):
        mask = torch.tensor(row.mask, dtype=torch.bool)
        count, here = int(mask.sum()), slice(start, start + len(row.mask))
        assert floats(note.trainer, count) == pytest.approx(before_T[here][mask].tolist(), abs=1e-5)
        assert floats(note.reference, count) == pytest.approx(reference_T[here][mask].tolist(), abs=1e-5)
        assert note.old is None  # one optimizer step: the old policy is the current one
        assert len(set(floats(note.advantage, count))) == 1
        assert all(value > 0 for value in floats(note.entropy, count))
        start = here.stop


def test_several_optimizer_steps_tell_old_and_current_apart(directory):
    parts = replace(make_parts(directory, ppo_mini_batch_size=1), annotations=1.0)
    groups = make_groups(5)
    before_T = parts.policy.logprobs(rows_of(groups))
    last = train_step(parts, groups, step=1).annotations[-1]
    row = rows_of(groups)[-1]
    old = floats(last.old, row.num_sampled)
    mask = torch.tensor(row.mask, dtype=torch.bool)
    assert old == pytest.approx(before_T[-len(row.mask) :][mask].tolist(), abs=1e-6)
    assert floats(last.trainer, row.num_sampled) != old


def test_a_share_of_groups_is_kept_and_all_with_failures(directory):
    groups = make_groups(7, num_groups=12)
    broken = Group(groups[0].task, (fail(groups[0].trajectories[0]), *groups[0].trajectories[1:]))
    groups = [broken, *groups[1:]]
    parts = replace(make_parts(directory), annotations=1e-9)
    kept = {note.uid for note in train_step(parts, groups, step=1).annotations}
    assert broken.task.uid in kept
    assert len(kept) <= 4  # that one, and three extremes
    assert sum(_is_in_share(f"task {at}", 0.25) for at in range(2000)) == pytest.approx(500, abs=80)
    assert not _is_in_share("any", 0.0) and _is_in_share("any", 1.0)


def note(uid: str, values: list[float], **changes) -> RowAnnotation:
    packed = array("f", values).tobytes()
    fields = dict.fromkeys(("old", "reference", "entropy", "weight", "flags"))
    return RowAnnotation(
        uid, 0, 0, 0, 1, trainer=packed, advantage=array("f", [1.5]).tobytes(), **{**fields, **changes}
    )


def test_the_viewer_shows_them_on_the_tokens_that_were_sampled(tmp_path):
    row = sampled((20, 21, 22, 23, 24))  # three sampled, two not
    with Journal.open(tmp_path / "run", max_mb=50, config_yaml=CONFIG) as journal:
        journal.add(made("a", 0, 1.0, rows=(row,)))
        journal.add_annotations([note("a", [-0.5, -1.0, -2.0], flags=bytes([0, 1, 2])), note("gone", [0.0])])
    pages = TrajectoryPages(RunPages("run", tmp_path / "run"))
    window = pages.tokens(1, 0)
    assert window["trainer"] == [None, None, None, -0.5, -1.0, -2.0, None, None]
    assert window["advantage"] == [None, None, None, 1.5, 1.5, 1.5, None, None]
    assert window["flags"] == [0, 0, 0, 0, 1, 2, 0, 0]
    assert window["weight"] is None
    cut = pages.tokens(1, 0, 4, 2)
    assert (cut["trainer"], cut["flags"]) == ([-1.0, -2.0], [1, 2])
    assert pages.trajectory(1)["annotated"] == [0]
    assert pages.strip(1, 0)["bins"][2]["gap"] == pytest.approx(1.5)


def test_a_later_annotation_replaces_the_first(tmp_path):
    with Journal.open(tmp_path / "run", max_mb=50, config_yaml=CONFIG) as journal:
        journal.add(made("a", 0, 1.0, rows=(sampled((20, 21, 22, 23, 24)),)))
        journal.add_annotations([note("a", [-0.5, -1.0, -2.0])])
        journal.add_annotations([note("a", [-3.0, -3.0, -4.0])])
    window = TrajectoryPages(RunPages("run", tmp_path / "run")).tokens(1, 0)
    assert window["trainer"][3:6] == [-3.0, -3.0, -4.0]


def test_they_are_dropped_with_the_tokens_they_are_of(tmp_path):
    many = tuple(range(20_000))
    with Journal.open(tmp_path / "run", max_mb=1, config_yaml=CONFIG) as journal:
        for at in range(12):
            journal.add(made(f"t{at}", 0, 1.0, rows=(sampled(many),)))
            journal.add_annotations([note(f"t{at}", [float(-at)] * (len(many) - 2))])
            journal.flush_blocking()
    pages = RunPages("run", tmp_path / "run")
    with pages.query() as query:
        oldest = query.one("SELECT min(trajectory) FROM texts")[0]
        assert oldest > 1
        assert query.one("SELECT min(trajectory) FROM annotations")[0] >= oldest


def test_annotations_are_committed_a_few_rows_at_a_time(monkeypatch):
    """So that the write-ahead log of a large step stays small; a row that is larger than a batch is one."""
    monkeypatch.setattr(replay, "_BATCH_BYTES", 200)
    rows = [note(f"t{at}", [0.0] * length) for at, length in enumerate((20, 20, 20, 100, 1, 1))]
    batches = list(replay._batches(rows))
    assert [[row.uid for row in batch] for batch in batches] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
    assert list(replay._batches([])) == []


def test_annotating_what_cannot_be_replayed_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["annotate", str(tmp_path)])
    assert ended.value.code == 2
    assert "no run directory" in capsys.readouterr().err


def test_findings_of_a_run_reach_its_trackers():
    logged = []
    trackers = SimpleNamespace(log=lambda step, metrics: logged.append((step, dict(metrics))))
    recorder = RunRecorder(None, trackers, None, LoggingConfig(), Spans(), overlaps=False)
    recorder.write_findings(7, {})
    recorder.write_findings(7, {"findings/no_signal": 3.0})
    assert logged == [(7, {"findings/no_signal": 3.0})]
