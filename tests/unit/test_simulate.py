"""Simulated runs: the real schedules take the time that arithmetic says, and equal comparisons have equal results."""

from dataclasses import replace

import pytest

from treadle.config import TrainConfig, loads
from treadle.errors import ConfigError
from treadle.simulate import simulation
from treadle.simulate.assumptions import Assumptions, check_assumptions
from treadle.simulate.forecast import Forecast, ScheduleSetup, choose_max_sessions, setup_of
from treadle.simulate.report import describe, settings
from treadle.simulate.simulation import Comparison, ComparisonSpec, choose_splits, compare
from treadle.simulate.workload import AssumedWorkload, TruncatedLogNormal, expected_work

BASE = """
model: {path: unused}
data: {train_files: unused, train_batch_size: 8}
reward: {functions: {answer: {path: exact_match}}}
rollout: {n: 4, prompt_length: 400, response_length: 1000, max_num_seqs: 64}
actor: {ppo_mini_batch_size: 8}
trainer: {}
"""

EVEN = Assumptions(
    response_tokens=100,
    length_tail=1.0,
    prompt_tokens=100,
    prefill_tokens_per_s=1e12,
    sequence_tokens_per_s=100,
    engine_tokens_per_s=1e12,
    train_tokens_per_s=1600,
    push_s=0.5,
    push_overlap=0,
)
"""Every answer takes 1 s, a step trains 6,400 tokens in 4 s of one GPU, a push takes half a second."""

SHARDED = "actor._target_=treadle.config.FSDPActorConfig"

TAIL = Assumptions(response_tokens=100, engine_tokens_per_s=1000, train_tokens_per_s=1000, push_s=0.1, push_overlap=0)


def config_of(*words: str) -> TrainConfig:
    config = loads(BASE, "test", words)
    assert isinstance(config, TrainConfig)
    return config


def simulate(
    config: TrainConfig, assumptions: Assumptions, setup: ScheduleSetup, *, steps: int, seed: int = 0
) -> Forecast:
    return simulation.simulate(config, assumptions, workload_of(config, assumptions, seed), setup, steps=steps)


def workload_of(config: TrainConfig, assumptions: Assumptions, seed: int = 0) -> AssumedWorkload:
    return AssumedWorkload(assumptions.fill(config.rollout), config.rollout, seed)


def test_sync_takes_generation_then_training_then_the_push():
    found = simulate(config_of(), EVEN, ScheduleSetup("sync", 4, 4, shared=True), steps=3)
    assert found.step_s == pytest.approx(1.0 + 1.0 + 0.5)
    assert (found.wait_s, found.train_s, found.push_s) == pytest.approx((1.0, 1.0, 0.5))
    assert (found.staleness_mean, found.staleness_max) == (0, 0)
    assert found.sampled_tokens == 3200 and found.trained_tokens == 6400
    assert found.bound_s == pytest.approx(found.generation_s + found.training_s)
    assert found.generation_s == pytest.approx(3200 / (4 * 64 * 100)) and found.training_s == pytest.approx(1.0)
    assert found.decoding == pytest.approx(1.0 / 2.5)
    assert found.idle == pytest.approx(1.0 / 2.5) and found.updating == pytest.approx(0.5 / 2.5)


@pytest.mark.parametrize(("train_gpus", "step_s"), [(2, 2.0 + 0.5), (8, 1.0 + 0.5)])
def test_one_step_off_takes_the_longer_of_both_and_the_push(train_gpus, step_s):
    found = simulate(config_of(), EVEN, ScheduleSetup("one_step_off", train_gpus, 4), steps=3)
    assert found.step_s == pytest.approx(step_s)
    assert (found.staleness_mean, found.staleness_max) == (1, 1)


def test_fully_async_hides_generation_behind_training():
    found = simulate(config_of(), EVEN, ScheduleSetup("fully_async", 2, 4, max_staleness=2), steps=4)
    assert found.step_s == pytest.approx(2.0 + 0.5)
    assert found.wait_s == pytest.approx(0.0)
    assert found.training == pytest.approx(0.8)
    assert found.staleness_max == 2


@pytest.mark.parametrize(
    ("words", "overlap"), [([], 1), (["rollout.overlap_weight_updates=false"], 0), (["rollout.name=vllm"], 0)]
)
def test_engines_go_on_during_a_push_where_the_config_has_them_overlap(words, overlap):
    given = replace(EVEN, push_overlap=None)
    assert given.fill(config_of(*words).rollout).push_overlap == overlap
    assert replace(EVEN, push_overlap=0.25).fill(config_of(*words).rollout).push_overlap == 0.25
    found = simulate(config_of(*words), given, ScheduleSetup("fully_async", 2, 4, max_staleness=2), steps=4)
    assert found.updating == pytest.approx(0.0 if overlap else 0.5 / 2.5)
    assert found.push_s == pytest.approx(0.5), "the trainer waits for the push in any case"


def test_sync_alone_needs_no_split():
    config = config_of()
    workload = workload_of(config, EVEN)
    found = compare(config, EVEN, workload, ComparisonSpec(gpus=1, modes=("sync",), steps=1))
    assert [str(item.setup) for item in found.forecasts] == ["sync on 1 shared"]
    with pytest.raises(ConfigError, match=r"1 GPUs cannot be split\n.*--modes sync"):
        compare(config, EVEN, workload, ComparisonSpec(gpus=1, steps=1))


def test_staleness_zero_is_the_synchronous_schedule():
    sync = simulate(config_of(), TAIL, ScheduleSetup("sync", 2, 4), steps=4)
    strict = simulate(config_of(), TAIL, ScheduleSetup("fully_async", 2, 4, max_staleness=0), steps=4)
    assert strict.step_s == pytest.approx(sync.step_s)
    assert strict.staleness_max == 0


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_no_token_is_older_than_the_bound_and_a_longer_tail_needs_a_larger_one(bound):
    found = simulate(config_of(), TAIL, ScheduleSetup("fully_async", 2, 4, max_staleness=bound), steps=6)
    assert 0 < found.staleness_mean <= found.staleness_max <= bound


@pytest.mark.parametrize(
    ("max_staleness", "window"), [(0, (2, 10, 10)), (1, (4, 12, 14)), (2, (6, 15, 18)), (4, (10, 20, 25))]
)
def test_whole_rounds_of_steps_are_measured_away_from_both_ends(max_staleness, window):
    found = simulation.MeasuredSteps.of(8, max_staleness)
    assert (found.first, found.last, found.total) == window


def test_steps_come_in_rounds_where_stragglers_reach_their_bound_together():
    found = simulate(config_of(), TAIL, ScheduleSetup("fully_async", 8, 4, max_staleness=3), steps=8)
    assert found.steps == 8
    assert found.min_step_s < found.step_s < found.max_step_s
    assert found.max_step_s > 1.5 * found.min_step_s


def test_a_long_tail_costs_sync_more_than_fully_async():
    sync = simulate(config_of(), TAIL, ScheduleSetup("sync", 6, 6, shared=True), steps=6)
    free = simulate(config_of(), TAIL, ScheduleSetup("fully_async", 2, 4, max_staleness=4), steps=6)
    assert free.step_s < 0.7 * sync.step_s
    assert free.of_bound > 0.8 > sync.of_bound


@pytest.mark.parametrize("running", ["continue", "recompute", "wait", "drop"])
def test_sessions_open_at_an_update_do_as_the_config_says(running):
    config = config_of(f"trainer.on_weight_update={running}")
    found = simulate(config, TAIL, ScheduleSetup("fully_async", 4, 4, max_staleness=2), steps=4)
    assert found.staleness_max <= 2
    if running in ("wait", "drop"):
        free = simulate(config_of(), TAIL, ScheduleSetup("fully_async", 4, 4, max_staleness=2), steps=4)
        assert found.step_s > free.step_s


def test_tools_take_their_time_and_add_to_the_context():
    with_tools = Assumptions(**{**_values(EVEN), "turns": 3, "tool_s": 2.0, "tool_tail": 1.0, "tool_tokens": 50})
    found = simulate(config_of(), with_tools, ScheduleSetup("sync", 4, 4, shared=True), steps=2)
    assert found.session_s == pytest.approx(1.0 + 2 * 2.0, rel=1e-3)
    assert found.tool_s == pytest.approx(4.0)
    assert found.trained_tokens == 32 * (100 + 100 + 2 * 50)


def test_groups_without_a_signal_are_sampled_in_vain():
    config = config_of("algorithm.filter_groups.enable=true", "rollout.max_num_seqs=8")
    dull = Assumptions(**{**_values(EVEN), "no_signal": 0.5})
    setup = ScheduleSetup("fully_async", 8, 1, max_staleness=2)
    with_signal, without = simulate(config, EVEN, setup, steps=8), simulate(config, dull, setup, steps=8)
    assert with_signal.step_s == pytest.approx(4.5, rel=0.05)
    assert without.step_s == pytest.approx(8.5, rel=0.25)


def test_sessions_that_would_miss_their_deadline_are_counted_and_named():
    config = config_of("rollout.limits.session_timeout_s=2")
    found = simulate(config, TAIL, ScheduleSetup("sync", 4, 4, shared=True), steps=4)
    assert 0 < found.late < 0.5
    spec = ComparisonSpec(4, modes=("sync",), steps=2)
    workload = workload_of(config, TAIL)
    compared = compare(config, TAIL, workload, spec)
    assert "session_timeout_s = 2" in describe(config, TAIL.fill(config.rollout), workload, compared, 8)


def test_the_same_seed_gives_the_same_answer_and_another_one_another():
    setup = ScheduleSetup("fully_async", 2, 4, max_staleness=1)
    first, again, other = (simulate(config_of(), TAIL, setup, steps=3, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


def test_the_long_tail_has_the_mean_and_the_bound_it_is_told():
    tail = TruncatedLogNormal.of(100.0, 1000.0)
    drawn = [tail.at((at + 0.5) / 20_000) for at in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(100.0, rel=0.01) == tail.mean()
    assert max(drawn) == 1000.0
    assert 0.001 < sum(value == 1000.0 for value in drawn) / len(drawn) < 0.005
    assert TruncatedLogNormal.of(5.0, 5.0).at(0.99) == pytest.approx(5.0)


def test_work_is_drawn_by_name_and_fits_the_response():
    config = config_of()
    tight = Assumptions(response_tokens=400, length_tail=10, turns=3, tool_tokens=100).fill(config.rollout)
    workload = AssumedWorkload(tight, config.rollout, seed=0)
    plans = [workload.plan_of(f"t{at}", 0) for at in range(500)]
    assert plans[7] == workload.plan_of("t7", 0) != workload.plan_of("t7", 1)
    assert max(plan.sampled_tokens for plan in plans) == 800
    assert all(plan.answers[-1].tool_s == 0 < plan.answers[0].tool_s for plan in plans)
    assert all(plan.context_tokens == 200 + 2 * 100 for plan in plans)


def test_what_nobody_gave_follows_from_the_config():
    alone = Assumptions().fill(config_of().rollout)
    assert (alone.turns, alone.tool_tokens, alone.response_tokens, alone.prompt_tokens) == (1, 0, 100, 200)
    words = ("rollout.multi_turn.tools=package.module:f", "rollout.multi_turn.max_assistant_turns=2")
    tools = Assumptions().fill(config_of(*words).rollout)
    assert (tools.turns, tools.tool_tokens, tools.response_tokens) == (2, 100, 90)
    with pytest.raises(ConfigError, match=r"no room in rollout\.response_length 1000"):
        Assumptions(turns=20, tool_tokens=100).fill(config_of().rollout)


def test_numbers_that_mean_nothing_are_refused_together():
    with pytest.raises(ConfigError) as caught:
        check_assumptions(Assumptions(length_tail=0.5, push_s=-1, push_overlap=1.5, no_signal=1.0))
    keys = [mistake.key for mistake in caught.value.mistakes]
    assert keys == ["--length-tail", "--push-s", "--push-overlap", "--no-signal"]
    assert "1.5 is more than 1" in str(caught.value)


def test_expected_work_is_what_a_simulation_finds():
    config, setup = (
        config_of("data.train_batch_size=64", "actor.ppo_mini_batch_size=64"),
        ScheduleSetup("sync", 4, 4, True),
    )
    found, work = simulate(config, TAIL, setup, steps=8), expected_work(workload_of(config, TAIL).mean, TAIL, config)
    assert found.generation_s * 4 == pytest.approx(work.generation, rel=0.1)
    assert found.training_s * 4 == pytest.approx(work.training, rel=0.1)


def test_sessions_get_as_many_places_as_keep_the_engines_full_unless_the_config_says_otherwise():
    setup, tools = (
        ScheduleSetup("sync", 2, 2, shared=True),
        {"turns": 3, "tool_s": 1.0, "tool_tail": 1.0, "tool_tokens": 0},
    )
    for assumptions, places in ((EVEN, 128), (Assumptions(**{**_values(EVEN), **tools}), 3 * 128)):
        mean = workload_of(config_of(), assumptions).mean
        assert choose_max_sessions(config_of().rollout, assumptions, mean, setup) == pytest.approx(places, abs=1)
        given = config_of("rollout.agent.max_concurrent_sessions=7")
        assert choose_max_sessions(given.rollout, assumptions, mean, setup) == 7


def test_a_session_that_is_begun_again_is_another_draw():
    config = config_of("trainer.stale_samples=drop")
    found = simulate(config, TAIL, ScheduleSetup("fully_async", 4, 4, max_staleness=1), steps=6)
    waits = simulate(config_of(), TAIL, ScheduleSetup("fully_async", 4, 4, max_staleness=1), steps=6)
    assert found.step_s < waits.step_s
    assert found.staleness_max <= 1


def test_splits_leave_whole_engines_and_need_not_divide_the_batch():
    words = (
        "rollout.name=vllm",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=8",
        "rollout.tensor_model_parallel_size=4",
    )
    for config, gpus in ((config_of(), 12), (config_of(*words), 12)):
        splits = choose_splits(config, TAIL, workload_of(config, TAIL).mean, gpus)
        size = config.rollout.tensor_model_parallel_size
        assert splits and all((gpus - count) % size == 0 for count in splits)
    with pytest.raises(ConfigError, match="cannot be split"):
        choose_splits(config_of(), TAIL, workload_of(config_of(), TAIL).mean, 1)


def test_splits_of_several_machines_keep_each_of_them_whole():
    mean = workload_of(config_of(), TAIL).mean
    assert all(count % 8 == 0 for count in choose_splits(config_of(), TAIL, mean, 40))
    assert all(
        count % 4 == 0 for count in choose_splits(config_of("trainer.n_gpus_per_node=4", SHARDED), TAIL, mean, 20)
    )


def test_the_best_is_the_fastest_or_as_fast_and_younger():
    spec = ComparisonSpec(6, splits=(2,), staleness=(1, 4, 8), steps=6)
    compared = compare(config_of(), TAIL, workload_of(config_of(), TAIL), spec)
    assert [found.setup.mode for found in compared.forecasts] == ["sync", "one_step_off", *["fully_async"] * 3]
    shortest = min(found.step_s for found in compared.forecasts)
    assert compared.best.setup.max_staleness in (4, 8) and compared.best.step_s <= 1.03 * shortest


def test_nearly_as_fast_and_younger_is_better():
    one = simulate(config_of(), EVEN, ScheduleSetup("sync", 4, 4, shared=True), steps=1)
    timed = (
        (100.0, ScheduleSetup("fully_async", 2, 2, max_staleness=4)),
        (102.0, ScheduleSetup("fully_async", 2, 2, max_staleness=2)),
    )
    found = [replace(one, step_s=step_s, setup=setup) for step_s, setup in (*timed, (110.0, one.setup))]
    assert Comparison(ComparisonSpec(4), tuple(found)).best is found[1]


def test_more_staleness_is_tried_where_fully_async_is_fastest():
    spec = ComparisonSpec(6, modes=("fully_async",), splits=(2, 4), steps=2)
    compared = compare(config_of(), TAIL, workload_of(config_of(), TAIL), spec)
    bounds = [(found.setup.train_gpus, found.setup.max_staleness) for found in compared.forecasts]
    assert len(bounds) == 4 and {bound for _, bound in bounds} == {1, 2, 4}
    assert len({gpus for gpus, bound in bounds if bound > 1}) == 1


def test_the_keys_of_a_setup_are_those_it_came_from():
    setup = ScheduleSetup("fully_async", 8, 24, max_staleness=3)
    words = list(settings(setup, 8))
    assert words == [
        "trainer.mode=fully_async",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=8",
        "rollout.nnodes=3",
        "rollout.n_gpus_per_node=8",
        "trainer.max_staleness=3",
        "cluster.backend=ray",
        SHARDED,
    ]
    assert setup_of(config_of(*words, "algorithm.rollout_correction.rollout_is=none")) == setup
    shared = ScheduleSetup("sync", 16, 16, shared=True, max_staleness=1)
    assert setup_of(config_of(*settings(shared, 8), "actor.ppo_mini_batch_size=8")) == shared


def _values(assumptions: Assumptions) -> dict[str, float]:
    return {name: getattr(assumptions, name) for name in Assumptions.__slots__}
