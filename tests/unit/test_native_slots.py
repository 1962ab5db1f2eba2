"""Where tokens lie: free slots, what stays in them, what rows said, and weights side by side."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import tiny
from tests.unit.test_native_determinism import ROLLOUT, Stand, Talk, alone
from treadle.config import ModelConfig, RolloutConfig
from treadle.engine.native.cache import Move, SlotCache
from treadle.engine.native.history import History
from treadle.engine.native.parking import Parking
from treadle.engine.native.projection import Projection
from treadle.engine.native.residents import Residents
from treadle.engine.native.slots import FreeSlots
from treadle.engine.native.ticket import Ticket
from treadle.model.causal import load_causal_model, prepare_module
from treadle.types import SamplingParams


def test_the_lowest_slot_is_next_and_rather_an_empty_one_nearby() -> None:
    free = FreeSlots(range(4))
    assert [free.take(near=4) for _ in range(4)] == [0, 1, 2, 3]
    free.add(2, held=False)
    free.add(0, held=True)
    free.add(3, held=False)
    assert free.take(near=3) == 2, "empty and close enough"
    assert free.take(near=3) == 0, "3 is empty, but far from the others"
    assert free.take(near=3) == 3 and len(free) == 0


def test_a_slot_that_was_taken_by_name_is_not_given_twice() -> None:
    free = FreeSlots(range(3))
    for _ in range(200):
        free.remove(1)
        free.add(1, held=True)
    assert sorted(free.take(near=9) for _ in range(3)) == [0, 1, 2]


def residents(slots: int = 4) -> tuple[SlotCache, Residents]:
    rollout = RolloutConfig(prompt_length=8, response_length=8, max_num_seqs=slots)
    cache = SlotCache.create(rollout, prepare_module(tiny()), torch.device("cpu"), slots)
    cache.kv.copy_(torch.randn(cache.kv.shape, generator=torch.Generator().manual_seed(0)))
    return cache, Residents(cache, Parking(1 << 20), enabled=True)


def test_a_session_is_found_in_its_own_slot_and_parked_when_another_needs_that() -> None:
    cache, kept = residents()
    kept.stay(2, "a", (5, 6, 7))
    found = kept.find("a", (5, 6, 7, 8))
    assert found is not None and found.own and (found.slot, found.tokens) == (2, 3)
    before = cache.kv[:, :, 2, :, :3].clone()
    kept.vacate(2)
    cache.kv[:, :, 2] = 0
    found = kept.find("a", (5, 6, 7, 8))
    assert found is not None and found.parked is not None and torch.equal(found.parked.kv, before)


def test_a_prompt_is_found_where_a_sibling_runs_and_moves_with_it() -> None:
    _, kept = residents()
    kept.offer(1, (5, 6))
    kept.move([Move(1, 0, 2)])
    found = kept.find("b", (5, 6))
    assert found is not None and not found.own and (found.slot, found.tokens) == (0, 2)
    assert kept.find("b", (5, 6, 7)) is None, "only whole prompts are shared: pieces depend on the request alone"


def test_a_session_that_goes_back_behind_its_prompt_takes_the_prompt_away() -> None:
    _, kept = residents()
    kept.offer(1, (5, 6, 7))
    kept.stay(1, "a", (5, 6, 7, 8))
    kept.wake(1, tokens=2)
    assert kept.find("b", (5, 6, 7)) is None


def test_nothing_outlives_the_weights_or_a_session_that_is_over() -> None:
    _, kept = residents()
    kept.stay(1, "a", (5, 6))
    kept.stay(2, "b", (6, 7))
    kept.offer(2, (6,))
    kept.forget("a")
    assert kept.find("a", (5, 6)) is None and not kept.holds(1) and kept.holds(2)
    kept.clear()
    assert kept.find("b", (6, 7)) is None and not kept.holds(2)


def test_turns_of_a_session_copy_nothing_while_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = SlotCache.take

    def watch(cache: SlotCache, slot: int, tokens: int) -> torch.Tensor:
        taken.append(slot)
        return take(cache, slot, tokens)

    monkeypatch.setattr(SlotCache, "take", watch)
    Stand().run([Talk(task, 0, (0, 2, 2)) for task in range(4)])
    assert not taken
    narrow = RolloutConfig(**{**ROLLOUT.values(), "max_num_seqs": 2})
    crowd = [Talk(task, 0, (0, 2, 2)) for task in range(4)]
    Stand(rollout=narrow).run(crowd)
    assert taken
    for talk in crowd:
        assert talk.heard == alone(talk.task, 0, 3, talk.sampling, 32)


def say(history: History, ids: list[int], ended: list[int]) -> list[int]:
    flags = np.array([slot in ended for slot in range(len(ids))], np.int32)
    return history.note(np.array(ids, np.int32), -np.array(ids, np.float32), flags)


def test_history_tells_what_each_row_said_from_its_start_to_its_end() -> None:
    history = History(slots=3, longest=4)
    history.start([0, 1], step=0)
    assert say(history, [10, 20, 0], ended=[]) == []
    history.start([2], step=1)
    assert say(history, [11, 21, 30], ended=[1]) == [1]
    say(history, [12, 99, 31], ended=[])
    first, second, third = history.read([0, 1, 2])
    assert (first.ids, second.ids, third.ids) == ((10, 11, 12), (20, 21), (30, 31))
    assert first.logprobs == (-10, -11, -12)


def test_history_goes_round_and_moves_with_rows() -> None:
    history = History(slots=2, longest=4)
    for step in range(25):
        if step % 4 == 0:
            history.start([1], step)
        say(history, [0, step], ended=[])
    history.move([Move(1, 0, 4)])
    assert history.read([0])[0].ids == (24,)
    history.start([1], 25)
    assert history.read([1])[0].ids == ()


def linears(bias: bool = True) -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [torch.nn.Linear(6, rows, bias=bias) for rows in (4, 2, 2)]


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_follows_whoever_trains_the_parts(bias: bool) -> None:
    modules, x = linears(bias), torch.randn(3, 6)
    known = [(module.weight, module.weight.clone()) for module in modules]
    joint = Projection(*modules)
    for module, (parameter, numbers) in zip(modules, known, strict=True):
        assert module.weight is parameter and torch.equal(parameter, numbers)
    optimizer = torch.optim.AdamW([weight for module in modules for weight in module.parameters()], lr=0.1)
    sum(module(x).square().sum() for module in modules).backward()
    optimizer.step()
    assert torch.allclose(joint(x), torch.cat([module(x) for module in modules], dim=1), atol=1e-6)
    assert not joint.tie()


def test_weights_that_were_replaced_are_found_and_those_of_another_engine_left() -> None:
    modules, x = linears(), torch.randn(3, 6)
    joint, other = Projection(*modules), Projection(*modules)
    assert not joint.tie() and not other.tie(), "the second one found them side by side"
    modules[1].weight.data = torch.randn(2, 6)
    assert joint.tie() and other.tie()
    for projection in (joint, other):
        assert torch.allclose(projection(x), torch.cat([module(x) for module in modules], dim=1), atol=1e-6)


def test_weights_side_by_side_are_saved_as_ever(tmp_path: Path) -> None:
    module = tiny()
    for layer in module.model.layers:
        Projection(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        Projection(layer.mlp.gate_proj, layer.mlp.up_proj)
    module.save_pretrained(tmp_path)

    loaded = load_causal_model(ModelConfig(path=str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, module.get_parameter(name)), name


def test_a_cache_is_given_back_only_while_nobody_needs_it() -> None:
    stand, talk = Stand(), Talk(3, 0, (0,), sampling=SamplingParams(6))
    assert stand.scheduler.release()
    stand.scheduler.add(Ticket(talk.ask(6), lambda answer: None, stand.room))
    assert not stand.scheduler.release()
    stand.scheduler.turn()
    assert not stand.scheduler.release()
    stand.scheduler.abort(lambda ticket: True)
    assert stand.scheduler.release()
    stand.answers.clear()
    stand.run([talk])
    assert talk.heard == alone(3, 0, 1, talk.sampling, 32)
