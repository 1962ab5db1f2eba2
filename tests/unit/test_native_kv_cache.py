"""Where tokens lie: free pages, what stays in them, what rows said, and weights side by side."""

import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import tiny
from tests.unit.test_native_determinism import ROLLOUT, Stand, Talk, alone
from treadle.config import ModelConfig, RolloutConfig
from treadle.engine.native.input_batch import OutputRing
from treadle.engine.native.kv_cache import KVCacheShape, PagedKVCache, SavedPages
from treadle.engine.native.merged_linear import MergedLinear
from treadle.engine.native.page_pool import FreeList, PagePool
from treadle.engine.native.prefix_cache import PrefixCache, SwapSpace
from treadle.engine.native.sequence import SequenceState
from treadle.errors import ConfigError
from treadle.model.causal_lm import prepare_module
from treadle.model.load import load_causal_model
from treadle.types import SamplingParams


def test_the_lowest_number_is_next_and_none_is_given_twice() -> None:
    free = FreeList(3)
    for _ in range(200):
        free.remove(1)
        free.add(1)
    assert [free.take() for _ in range(3)] == [0, 1, 2] and not free
    free.add(2)
    free.add(0)
    assert 2 in free and 1 not in free and free.below(2) == [0] and free.take() == 0


def test_a_shared_page_is_free_when_the_last_one_lets_go() -> None:
    pages = PagePool(4)
    first = pages.take(2)
    pages.share(first[:1])
    pages.release(first)
    assert first == [0, 1] and len(pages.free) == 3 and pages.users(0) == 1
    pages.release(first[:1])
    assert len(pages.free) == 4


PAGE = 16


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cache_grows_in_place_up_to_its_budget_and_shrinks_when_it_is_released(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    shape = KVCacheShape(layers=3, kv_heads=2, head_dim=64)
    cache = PagedKVCache(shape, 4, 64, PAGE, 5, torch.float32, torch.device(device), max_pages=4000)
    cache.kv[:, :, :5] = 7.0
    numbers = [0, 1, 2, 3, 4]
    while new := cache.grow():
        numbers += new
        assert cache.kv[:, :, new.start : new.stop].eq(0).all(), "what attention masks is still multiplied by zero"
    assert cache.null_page == 5 and 5 not in numbers and numbers == sorted(set(numbers))
    assert len(numbers) == cache.num_pages == 4000 and numbers[-1] < cache.kv.shape[2]
    assert cache.kv[:, :, :5].eq(7.0).all(), "what was there stays"
    cache.release()
    cache.acquire()
    assert cache.num_pages == 5 and cache.grow().start == 6
    cache.close()


class FullMemory:
    """GPU memory that has no room, and counts how often it was asked."""

    mapped = 0
    asked = 0
    has_room = False

    def grow(self, num_bytes: int) -> bool:
        self.asked += 1
        return self.has_room

    def release(self) -> None: ...


def test_a_cache_whose_gpu_is_full_asks_for_more_ever_less_often() -> None:
    shape, memory = KVCacheShape(layers=1, kv_heads=1, head_dim=8), FullMemory()
    cache = PagedKVCache(shape, 4, 64, PAGE, 5, torch.float32, torch.device("cpu"), max_pages=4000)
    cache._memory, cache._page_step = memory, 1  # type: ignore[assignment]
    assert not any(cache.grow() for _ in range(1000))
    assert memory.asked <= 6, "each costs the driver a look at everything that torch has cached"
    cache.release()
    assert not cache.grow() and memory.asked <= 7, "after a release it is worth a try at once"
    memory.has_room = True
    tries = next(count for count in range(100) if cache.grow())
    assert tries <= 16, "memory that has come free is found"
    assert cache.grow(), "and from then on every call asks"


def kept_pages(count: int = 12, parked_bytes: int = 1 << 20) -> tuple[PagedKVCache, PagePool, PrefixCache]:
    rollout = RolloutConfig(prompt_length=40, response_length=40, max_num_seqs=4)
    module = prepare_module(tiny())
    size = KVCacheShape.of(module).elements_per_token() * PAGE * 4
    cache = PagedKVCache.create(rollout, module, torch.device("cpu"), 4, page=PAGE, budget=(count + 1) * size)
    cache.kv.copy_(torch.randn(cache.kv.shape, generator=torch.Generator().manual_seed(0)))
    pages = PagePool(cache.num_pages)
    return cache, pages, PrefixCache(cache, pages, SwapSpace(parked_bytes), enabled=True)


def test_a_cache_on_cpu_takes_memory_for_the_pages_that_are_written_alone() -> None:
    """A GiB for many sequences costs a laptop nothing while few are decoded."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    shape = KVCacheShape(layers=2, kv_heads=2, head_dim=64)
    pages = (1 << 30) // (shape.elements_per_token() * PAGE * 4)
    before = resident()
    cache = PagedKVCache(shape, pages, PAGE, PAGE, pages, torch.float32, torch.device("cpu"))
    cache.kv[:, :, 0] = 1.0
    assert cache.kv.nbytes >= 1 << 30
    assert resident() - before < 1 << 28
    assert cache.kv[:, :, 1].eq(0).all()


def ids(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def test_a_session_is_found_in_its_own_pages_and_parked_when_others_need_them() -> None:
    cache, pages, kept = kept_pages()
    kept.add_row(("a", 0), ids(20), pages.take(4))
    assert len(pages.free) == 10, "what lies behind the tokens is free"
    found = kept.find(("a", 0), ids(25))
    assert found is not None and found.own and found.cached is not None and found.tokens == 20
    before = cache.kv[:, :, found.cached.pages].clone()
    assert kept.evict() and not kept.evict() and len(pages.free) == 12
    cache.kv.zero_()
    found = kept.find(("a", 0), ids(25))
    assert found is not None and found.swapped is not None
    cache.restore([7, 3], found.swapped.kv)
    assert torch.equal(cache.kv[:, :, [7, 3]], before)


def test_the_least_recently_used_gives_way_if_that_frees_a_page() -> None:
    _, pages, kept = kept_pages()
    running = pages.take(2)
    kept.add_prompt(ids(20), running)
    for session in "abc":
        kept.add_row((session, 0), ids(3), pages.take(1))
    assert kept.find(("a", 0), ids(3)) is not None
    kept.evict()
    where = {session: kept.find((session, 0), ids(3)) for session in "abc"}
    assert [found.cached is None for found in where.values() if found] == [False, True, False]
    found = kept.find(("d", 0), ids(20))
    assert found is not None and found.cached is not None, "a row has these pages: to park them frees nothing"
    pages.release(running)
    assert [kept.evict() for _ in range(4)] == [True, True, True, False] and len(pages.free) == 12


def test_a_session_and_its_prompt_that_share_pages_can_both_give_way() -> None:
    _, pages, kept = kept_pages()
    taken = pages.take(1)
    kept.add_prompt(ids(5), taken)
    pages.share(taken)
    kept.add_row(("a", 0), ids(9), taken)
    pages.release(taken)
    assert kept.evict() and len(pages.free) == 12, "one of them alone frees nothing"
    assert kept.counters.evicted_rows == kept.counters.evicted_prompts == 1 and not kept.evict()


def test_an_eviction_frees_a_page_and_leaves_a_prompt_that_a_session_shares() -> None:
    _, pages, kept = kept_pages()
    taken = pages.take(4)
    kept.add_prompt(ids(20), taken)  # the older entry: two pages, both of them the session's too
    kept.add_row(("a", 0), ids(60), taken)
    free = len(pages.free)
    assert kept.evict() and len(pages.free) == free + 2, "the two pages behind the prompt"
    assert (kept.counters.evicted_rows, kept.counters.evicted_prompts) == (1, 0)
    found = kept.find(("b", 0), ids(20))
    assert found is not None and found.cached is not None


def test_rows_of_a_session_have_entries_of_their_own_and_a_fork_begins_with_anothers() -> None:
    _, pages, kept = kept_pages()
    kept.add_row(("a", 0), ids(20), pages.take(2))
    kept.add_row(("a", 1), ids(30, 100), pages.take(2))
    main, second = kept.find(("a", 0), ids(25)), kept.find(("a", 1), ids(35, 100))
    assert main is not None and second is not None
    assert (main.tokens, main.own, second.tokens, second.own) == (20, True, 30, True)
    fork = kept.find(("a", 2), ids(25))
    assert fork is not None and fork.tokens == 20 and not fork.own
    assert kept.find(("b", 0), ids(25)) is None, "other sessions share whole prompts alone"
    kept.evict()
    fork = kept.find(("a", 2), ids(35, 100))
    assert fork is not None and fork.tokens == 30
    kept.forget_session("a")
    assert len(pages.free) == 12 and not kept._rows and kept.find(("a", 2), ids(25)) is None


def test_rows_that_swap_space_has_no_room_for_are_not_remembered() -> None:
    _, pages, kept = kept_pages(parked_bytes=1)
    for session in "abc":
        kept.add_row((session, 0), ids(3), pages.take(1))
    while kept.evict():
        pass
    assert not kept._rows and len(pages.free) == 12


def test_only_whole_prompts_are_shared() -> None:
    _, pages, kept = kept_pages()
    kept.add_prompt(ids(20), pages.take(2))
    assert kept.find(("b", 0), ids(20)) is not None
    assert kept.find(("b", 0), ids(21)) is None, "pieces depend on the request alone"


def test_nothing_outlives_the_weights_or_a_session_that_is_over() -> None:
    _, pages, kept = kept_pages()
    kept.add_row(("a", 0), ids(2), pages.take(1))
    kept.add_row(("b", 0), ids(3), pages.take(1))
    kept.add_prompt(ids(1), [1])
    kept.forget_session("a")
    assert kept.find(("a", 0), ids(2)) is None and kept.find(("b", 0), ids(3)) is not None
    kept.clear()
    assert kept.find(("b", 0), ids(3)) is None and len(pages.free) == 12


def test_a_cache_for_less_than_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        kept_pages(count=4)


def test_turns_of_a_session_copy_nothing_while_there_are_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = PagedKVCache.save

    def watch(cache: PagedKVCache, pages: Sequence[int], tokens: int) -> SavedPages:
        saved.append(tokens)
        return save(cache, pages, tokens)

    monkeypatch.setattr(PagedKVCache, "save", watch)
    Stand().run([Talk(task, 0, (0, 2, 2)) for task in range(4)])
    assert not saved
    narrow = RolloutConfig(**{**ROLLOUT.values(), "max_num_seqs": 2})
    crowd = [Talk(task, 0, (0, 2, 2)) for task in range(4)]
    Stand(rollout=narrow).run(crowd)
    assert saved, "on a CPU as many sequences are kept as there are rows"
    for talk in crowd:
        assert talk.heard == alone(talk.task, 0, 3, talk.sampling, 32)


def say(output_ring: OutputRing, said: list[int], ended: list[int]) -> list[int]:
    flags = np.array([row in ended for row in range(len(said))], np.int32)
    return output_ring.append(np.array(said, np.int32), -np.array(said, np.float32), flags)


def test_history_tells_what_each_row_said_from_its_start_to_its_end() -> None:
    output_ring = OutputRing(rows=3, longest=4)
    output_ring.start([0, 1], step=0)
    assert say(output_ring, [10, 20, 0], ended=[]) == []
    output_ring.start([2], step=1)
    assert say(output_ring, [11, 21, 30], ended=[1]) == [1]
    say(output_ring, [12, 99, 31], ended=[])
    first, second, third = output_ring.read([0, 1, 2])
    assert (first.ids, second.ids, third.ids) == ((10, 11, 12), (20, 21), (30, 31))
    assert first.logprobs == (-10, -11, -12)


def test_history_goes_round_and_moves_with_rows() -> None:
    output_ring = OutputRing(rows=2, longest=4)
    for step in range(25):
        if step % 4 == 0:
            output_ring.start([1], step)
        say(output_ring, [0, step], ended=[])
    output_ring.move([1], [0])
    assert output_ring.read([0])[0].ids == (24,)
    output_ring.start([1], 25)
    assert output_ring.read([1])[0].ids == ()


def linears(bias: bool = True) -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [torch.nn.Linear(6, rows, bias=bias) for rows in (4, 2, 2)]


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_follows_whoever_trains_the_parts(bias: bool) -> None:
    modules, x = linears(bias), torch.randn(3, 6)
    known = [(module.weight, module.weight.clone()) for module in modules]
    joint = MergedLinear(*modules)
    for module, (parameter, numbers) in zip(modules, known, strict=True):
        assert module.weight is parameter and torch.equal(parameter, numbers)
    optimizer = torch.optim.AdamW([weight for module in modules for weight in module.parameters()], lr=0.1)
    sum(module(x).square().sum() for module in modules).backward()
    optimizer.step()
    assert torch.allclose(joint(x), torch.cat([module(x) for module in modules], dim=1), atol=1e-6)
    assert not joint.merge()


def test_weights_that_were_replaced_are_found_and_those_of_another_engine_left() -> None:
    modules, x = linears(), torch.randn(3, 6)
    joint, other = MergedLinear(*modules), MergedLinear(*modules)
    assert not joint.merge() and not other.merge(), "the second one found them side by side"
    modules[1].weight.data = torch.randn(2, 6)
    assert joint.merge() and other.merge()
    for projection in (joint, other):
        assert torch.allclose(projection(x), torch.cat([module(x) for module in modules], dim=1), atol=1e-6)


def test_weights_side_by_side_are_saved_as_ever(tmp_path: Path) -> None:
    module = tiny()
    for layer in module.model.layers:
        MergedLinear(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        MergedLinear(layer.mlp.gate_proj, layer.mlp.up_proj)
    module.save_pretrained(tmp_path)

    loaded = load_causal_model(ModelConfig(path=str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, module.get_parameter(name)), name


def test_a_cache_is_given_back_only_while_nobody_needs_it() -> None:
    stand, talk = Stand(), Talk(3, 0, (0,), sampling=SamplingParams(6))
    assert stand.scheduler.release()
    stand.scheduler.add(SequenceState(talk.ask(6), lambda answer: None, stand.room))
    assert not stand.scheduler.release()
    stand.scheduler.step()
    assert not stand.scheduler.release()
    stand.scheduler.abort(lambda sequence: True)
    assert stand.scheduler.release()
    stand.answers.clear()
    stand.run([talk])
    assert talk.heard == alone(3, 0, 1, talk.sampling, 32)
