"""What residency decides, event by event: no processes, no clock, no files."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from localllm.daemon.decisions import Effect, Grant, LoadPlan, Refuse, Request, Requeue, Retune, StartLoad, Stay, Stop
from localllm.daemon.entry import Status
from localllm.daemon.residency import PATIENCE_SECONDS, Residency
from localllm.errors import LoadFailed, LoadOutOfMemory
from localllm.types import LoadOptions, LoadWishes, RunnerInfo

# Bytes of weights by model name; every model takes one more byte per slot and 1024 tokens of its window.
WEIGHTS = {"small": 10, "other": 10, "big": 60, "huge": 1000}
CAPACITY = 100
NUM_CTX_TRAIN = 65536
NO_WISHES = LoadWishes()


class World:
    """Residency with a simple planner, a clock to turn, and a record of who holds and who was refused what."""

    def __init__(
        self,
        *,
        num_parallel: int = 2,
        capacity: int = CAPACITY,
        keep_alive: float | None = 300.0,
        pinned: Collection[object] = (),
        **settings: Any,
    ) -> None:
        self.now = 1000.0
        self.num_parallel = num_parallel
        self.granted: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.errors: dict[str, Any] = {}
        self.loads: dict[int, StartLoad] = {}
        self.stops: list[tuple[str, str]] = []
        self.forced: list[str] = []
        self.threads: dict[int, int] = {}
        self.num_requests = 0
        self.residency = Residency(
            self.plan,
            shrink=self.shrink,
            stay=lambda model: Stay(None if model in pinned else keep_alive, model in pinned),
            **{"max_models": 3, "max_queue": 512, "load_timeout": 60.0, **settings},
        )
        self.residency.on_capacity(capacity)

    def plan(self, model: object, wishes: Sequence[LoadWishes], _free_bytes: int) -> LoadPlan:
        num_ctx = min(max(w.num_ctx or 4096 for w in wishes), NUM_CTX_TRAIN)
        threads = next((w.num_thread for w in wishes if w.num_thread), 4)
        is_fixed = any(w.num_thread for w in wishes)
        options = LoadOptions(num_ctx, self.num_parallel, threads, threads, has_fixed_threads=is_fixed)
        size = WEIGHTS[cast(str, model)] + num_ctx * self.num_parallel // 1024
        return LoadPlan(options, size, NUM_CTX_TRAIN)

    def shrink(self, _model: object, plan: LoadPlan) -> LoadPlan | None:
        """One slot, then half of the window."""
        options = plan.options
        if options.num_parallel > 1:
            return replace(plan, options=msgspec.structs.replace(options, num_parallel=1))
        if options.num_ctx > 512:
            return replace(plan, options=msgspec.structs.replace(options, num_ctx=options.num_ctx // 2))
        return None

    def apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Grant):
                assert effect.request_id not in self.granted
                self.granted[effect.request_id] = effect.runner
            elif isinstance(effect, Refuse):
                assert effect.request_id not in self.refused
                self.refused[effect.request_id] = effect.error.code
                self.errors[effect.request_id] = effect.error
            elif isinstance(effect, Requeue):
                del self.granted[effect.request_id]
            elif isinstance(effect, StartLoad):
                self.loads[effect.runner] = effect
            elif isinstance(effect, Retune):
                self.threads[effect.runner] = effect.num_threads
            else:
                self.note_stop(effect)
        self.residency.check_integrity()

    def note_stop(self, effect: Stop) -> None:
        name = self.loads[effect.runner].name
        self.stops.append((name, effect.reason))
        if effect.is_forced:
            self.forced.append(name)

    def ask(
        self,
        name: str,
        wishes: LoadWishes = NO_WISHES,
        keep_alive: float | msgspec.UnsetType | None = msgspec.UNSET,
        priority: int = 0,
    ) -> str:
        self.num_requests += 1
        id = f"{name}#{self.num_requests}"
        request = Request(id, name, name, cast(Any, name), wishes, keep_alive, self.now, priority)
        self.apply(self.residency.on_request(request, self.now))
        return id

    def runner(self, name: str) -> int:
        return max(number for number, load in self.loads.items() if load.name == name)

    def loaded(self, name: str, *, num_gpu_layers: int = 99) -> None:
        number = self.runner(name)
        options = self.loads[number].options
        known = RunnerInfo(
            num_slots=options.num_parallel,
            num_ctx=options.num_ctx,
            num_ctx_train=NUM_CTX_TRAIN,
            num_threads=options.num_threads,
            num_threads_batch=options.num_threads_batch,
            num_gpu_layers=num_gpu_layers,
        )
        self.apply(self.residency.on_loaded(number, known, self.now))

    def exited(self, name: str, words: str = "ended with status 0", untouched: Collection[str] = ()) -> None:
        self.apply(self.residency.on_exited(self.runner(name), words, self.now, untouched))

    def starved(self, name: str) -> None:
        """The runner has found too little memory, and ends."""
        error = LoadOutOfMemory("no memory").info()
        self.apply(self.residency.on_load_failed(self.runner(name), error, self.now))
        self.exited(name, "ended with status 1")

    def release(self, id: str) -> None:
        self.apply(self.residency.on_released(id, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.residency.on_tick(self.now))

    def bring_in(self, name: str, **settings: Any) -> None:
        """Load a model and let it go idle."""
        id = self.ask(name, **settings)
        self.loaded(name)
        self.release(id)

    def status(self, name: str) -> Status:
        return next((e.status for e in self.residency.entries() if e.key == name), Status.ABSENT)


class TestLoading:
    def test_first_request_loads_and_is_granted_when_loaded(self) -> None:
        world = World()
        id = world.ask("small")
        assert world.status("small") is Status.LOADING
        assert id not in world.granted
        world.loaded("small")
        assert world.granted[id] == world.runner("small")

    def test_requests_for_one_model_share_one_load(self) -> None:
        world = World()
        ids = [world.ask("small") for _ in range(5)]
        assert len(world.loads) == 1
        world.loaded("small")
        assert set(world.granted) == set(ids)

    def test_a_loaded_model_answers_while_another_loads(self) -> None:
        world = World()
        world.bring_in("small")
        world.ask("big")
        assert world.ask("small") in world.granted

    def test_several_loads_run_at_once_when_memory_allows(self) -> None:
        world = World()
        world.ask("small")
        world.ask("other")
        assert {load.name for load in world.loads.values()} == {"small", "other"}

    def test_a_failed_load_refuses_all_that_waited_and_is_tried_again_for_the_next(self) -> None:
        world = World()
        first, second = world.ask("small"), world.ask("small")
        error = LoadFailed("bad weights").info()
        world.apply(world.residency.on_load_failed(world.runner("small"), error, world.now))
        assert world.refused == {first: "load_failed", second: "load_failed"}
        world.exited("small")
        world.ask("small")
        assert len(world.loads) == 2

    @pytest.mark.parametrize(("num_parallel", "expected"), [(4, (1, 4096)), (1, (1, 2048))])
    def test_a_load_without_memory_is_tried_smaller_and_says_so(
        self, num_parallel: int, expected: tuple[int, int]
    ) -> None:
        world = World(num_parallel=num_parallel)
        id = world.ask("small")
        world.starved("small")
        load = world.loads[world.runner("small")]
        assert (load.options.num_parallel, load.options.num_ctx) == expected
        assert f"with {num_parallel} × 4096 tokens it could not be loaded: no memory" in load.reason
        world.loaded("small")
        assert id in world.granted
        assert world.ask("small") in world.granted

    def test_a_death_while_loading_counts_as_a_lack_of_memory(self) -> None:
        world = World()
        id = world.ask("small")
        world.exited("small", "was killed by SIGKILL")
        assert world.loads[world.runner("small")].options.num_parallel == 1
        world.loaded("small")
        assert id in world.granted

    def test_it_is_tried_smaller_only_once(self) -> None:
        world = World()
        id = world.ask("small")
        world.starved("small")
        world.starved("small")
        assert len(world.loads) == 2
        assert world.refused == {id: "load_out_of_memory"}

    def test_who_insists_on_a_window_is_not_given_a_smaller_one(self) -> None:
        world = World(num_parallel=1)
        exact, any_size = world.ask("small", LoadWishes(num_ctx=4096)), world.ask("small")
        world.starved("small")
        assert world.refused == {exact: "load_out_of_memory"}
        world.loaded("small")
        assert any_size in world.granted
        assert world.status("small") is Status.READY

    def test_a_damaged_file_is_not_tried_again(self) -> None:
        world = World()
        world.ask("small")
        error = LoadFailed("these are no weights").info()
        world.apply(world.residency.on_load_failed(world.runner("small"), error, world.now))
        world.exited("small", "ended with status 1")
        assert len(world.loads) == 1

    def test_a_load_that_stalls_is_given_up(self) -> None:
        world = World(load_timeout=60.0)
        id = world.ask("small")
        world.wait(50)
        world.residency.on_progress(world.runner("small"), 0.5, world.now)
        world.wait(59)
        assert not world.refused
        assert world.residency.wake_at(world.now) == world.now + 1
        world.wait(1)
        assert world.refused[id] == "load_failed"
        assert world.forced == ["small"]

    def test_the_last_client_to_leave_stops_the_load(self) -> None:
        world = World()
        first, second = world.ask("small"), world.ask("small")
        world.release(first)
        assert not world.stops
        world.release(second)
        assert world.stops == [("small", "nobody waits for it any more")]


class TestOptions:
    @pytest.mark.parametrize(
        ("loaded", "wanted", "is_reloaded"),
        [
            (LoadWishes(num_ctx=8192), LoadWishes(num_ctx=2048), False),
            (LoadWishes(num_ctx=8192), LoadWishes(), False),
            (LoadWishes(num_ctx=2048), LoadWishes(), False),
            (LoadWishes(num_ctx=2048), LoadWishes(num_ctx=2049), True),
            (LoadWishes(num_ctx=NUM_CTX_TRAIN), LoadWishes(num_ctx=1 << 20), False),
            (LoadWishes(), LoadWishes(num_batch=64, use_mmap=False), False),
            (LoadWishes(), LoadWishes(num_thread=4), False),
            (LoadWishes(), LoadWishes(num_thread=2), True),
            (LoadWishes(), LoadWishes(num_thread=0), False),
            (LoadWishes(), LoadWishes(kv_cache_type="f16"), False),
            (LoadWishes(), LoadWishes(kv_cache_type="q8_0"), True),
            (LoadWishes(), LoadWishes(num_gpu=-1), False),
            (LoadWishes(), LoadWishes(num_gpu=99), False),
            (LoadWishes(), LoadWishes(num_gpu=0), True),
            (LoadWishes(), LoadWishes(main_gpu=0), False),
            (LoadWishes(), LoadWishes(main_gpu=1), True),
        ],
    )
    def test_only_a_real_need_reloads(self, loaded: LoadWishes, wanted: LoadWishes, is_reloaded: bool) -> None:
        world = World(num_parallel=1)
        world.bring_in("small", wishes=loaded)
        id = world.ask("small", wanted)
        assert (id not in world.granted) == is_reloaded
        assert bool(world.stops) == is_reloaded

    def test_runners_follow_the_cores_unless_a_number_was_asked_for(self) -> None:
        world = World()
        world.bring_in("small")
        world.bring_in("other", wishes=LoadWishes(num_thread=3))
        world.apply(world.residency.on_threads(2))
        (runner,) = world.threads
        assert (world.loads[runner].name, world.threads[runner]) == ("small", 2)
        assert [e.plan.options.num_threads for e in world.residency.entries()] == [2, 3]
        world.threads.clear()
        world.apply(world.residency.on_threads(2))
        assert not world.threads

    def test_wishes_about_a_gpu_mean_nothing_without_one(self) -> None:
        world = World()
        world.ask("small")
        world.loaded("small", num_gpu_layers=0)
        assert world.ask("small", LoadWishes(num_gpu=0)) in world.granted

    def test_a_reload_serves_what_was_served_before(self) -> None:
        world = World()
        world.bring_in("small", wishes=LoadWishes(num_ctx=8192))
        world.ask("small", LoadWishes(num_ctx=2048, num_thread=1))
        world.exited("small")
        options = world.loads[world.runner("small")].options
        assert (options.num_ctx, options.num_threads) == (8192, 1)

    def test_a_reload_waits_for_running_requests_and_says_why(self) -> None:
        world = World()
        running = world.ask("small")
        world.loaded("small")
        larger = world.ask("small", LoadWishes(num_ctx=8192))
        assert not world.stops
        world.release(running)
        assert world.stops == [("small", "num_ctx 8192 is more than the loaded 4096")]
        world.exited("small")
        assert world.loads[world.runner("small")].reason == "num_ctx 8192 is more than the loaded 4096"
        world.loaded("small")
        assert larger in world.granted

    def test_requests_that_fit_pass_one_that_needs_a_reload_for_a_while_only(self) -> None:
        world = World()
        world.ask("small")
        world.loaded("small")
        larger = world.ask("small", LoadWishes(num_ctx=8192))
        assert world.ask("small") in world.granted
        world.wait(PATIENCE_SECONDS)
        held_back = world.ask("small")
        assert held_back not in world.granted
        for id in list(world.granted):
            world.release(id)
        world.exited("small")
        world.loaded("small")
        assert {larger, held_back} <= set(world.granted)

    def test_all_that_wait_are_served_by_one_load(self) -> None:
        world = World(max_models=1)
        blocker = world.ask("other")
        world.loaded("other")
        ids = [world.ask("small", LoadWishes(num_ctx=n)) for n in (2048, 16384, 4096)]
        world.release(blocker)
        world.exited("other")
        world.loaded("small")
        assert set(ids) <= set(world.granted)

    def test_a_wish_too_large_for_the_others_does_not_spoil_them(self) -> None:
        world = World(num_parallel=1, capacity=40)
        world.bring_in("small", wishes=LoadWishes(num_ctx=16384))
        world.ask("small", LoadWishes(num_ctx=32768))
        world.residency.on_capacity(30)
        world.exited("small")
        assert list(world.refused.values()) == ["model_too_large"]


class TestQueue:
    @pytest.mark.parametrize(("num_parallel", "max_queue"), [(1, 1), (2, 3), (4, 0)])
    def test_a_loaded_model_takes_slots_plus_queue_and_no_more(self, num_parallel: int, max_queue: int) -> None:
        world = World(num_parallel=num_parallel, max_queue=max_queue)
        world.bring_in("small")
        ids = [world.ask("small") for _ in range(num_parallel + max_queue + 2)]
        assert [id in world.refused for id in ids] == [False] * (num_parallel + max_queue) + [True] * 2

    def test_the_same_limit_holds_while_it_loads(self) -> None:
        world = World(num_parallel=2, max_queue=1)
        ids = [world.ask("small") for _ in range(5)]
        assert [id in world.refused for id in ids] == [False] * 3 + [True] * 2

    def test_the_refusal_says_what_clients_look_for(self) -> None:
        world = World(num_parallel=1, max_queue=0)
        world.ask("small")
        error = world.errors[world.ask("small")]
        assert "server busy, please try again.  maximum pending requests exceeded" in error.message
        assert error.code == "queue_full"
        assert error.details["retry_after"] >= 1

    def test_retry_after_follows_how_long_requests_take(self) -> None:
        world = World(num_parallel=1, max_queue=0)
        world.bring_in("small")
        for _ in range(30):
            id = world.ask("small")
            world.now += 20
            world.release(id)
        world.ask("small")
        assert 15 <= world.errors[world.ask("small")].details["retry_after"] <= 21

    def test_a_place_is_free_again_after_a_release(self) -> None:
        world = World(num_parallel=1, max_queue=0)
        world.bring_in("small")
        world.release(world.ask("small"))
        assert world.ask("small") in world.granted

    def test_lower_priority_numbers_come_first(self) -> None:
        world = World(max_models=1)
        running = world.ask("small")
        world.loaded("small")
        world.ask("other", priority=1)
        world.now += 1
        world.ask("big", priority=0)
        world.release(running)
        world.exited("small")
        assert world.status("big") is Status.LOADING
        assert world.status("other") is Status.ABSENT


class TestKeepAlive:
    @pytest.mark.parametrize(
        ("default", "asked", "alive_for"),
        [
            (300.0, [msgspec.UNSET], 300.0),
            (300.0, [10.0], 10.0),
            (300.0, [10.0, msgspec.UNSET], 10.0),
            (300.0, [None, msgspec.UNSET], math.inf),
            (300.0, [None, 20.0], 20.0),
            (None, [msgspec.UNSET], math.inf),
            (300.0, [0.0], 0.0),
            (0.0, [msgspec.UNSET], 0.0),
        ],
    )
    def test_the_last_explicit_value_holds(self, default: float | None, asked: list[Any], alive_for: float) -> None:
        world = World(keep_alive=default)
        for keep_alive in asked:
            id = world.ask("small", keep_alive=keep_alive)
            if len(world.granted) == 0:
                world.loaded("small")
            world.release(id)
        if alive_for > 0:
            world.wait(min(alive_for, 1e9) - 1)
            assert not world.stops
            world.wait(1)
        assert bool(world.stops) == (alive_for < math.inf)

    def test_the_timer_starts_at_the_last_release(self) -> None:
        world = World(keep_alive=10.0)
        first, second = world.ask("small"), world.ask("small")
        world.loaded("small")
        world.wait(100)
        world.release(first)
        world.wait(100)
        assert not world.stops
        world.release(second)
        assert world.residency.wake_at(world.now) == world.now + 10
        world.wait(9)
        world.ask("small")
        world.wait(9)
        assert not world.stops

    def test_a_new_load_starts_from_the_default_but_a_crash_does_not_forget(self) -> None:
        world = World(keep_alive=300.0)
        world.bring_in("small", keep_alive=None)
        world.exited("small", "was killed by SIGKILL")
        world.bring_in("small")
        world.wait(1e6)
        assert not world.stops
        world.apply(world.residency.on_unload("small", world.now)[1])
        world.exited("small")
        world.bring_in("small")
        world.wait(300)
        assert [reason for _, reason in world.stops] == ["it was told to", "its keep-alive is over"]


class TestUnload:
    def test_an_absent_model_cannot_be_unloaded(self) -> None:
        assert World().residency.on_unload("small", 0.0) == (False, [])

    def test_an_idle_model_goes_at_once(self) -> None:
        world = World()
        world.bring_in("small")
        was_loaded, effects = world.residency.on_unload("small", world.now)
        world.apply(effects)
        assert was_loaded
        assert world.status("small") is Status.STOPPING
        world.exited("small")
        assert world.residency.entries() == []

    def test_a_busy_model_finishes_first_and_newcomers_get_a_fresh_one(self) -> None:
        world = World()
        running = world.ask("small")
        world.loaded("small")
        world.apply(world.residency.on_unload("small", world.now)[1])
        assert not world.stops
        newcomer = world.ask("small")
        assert newcomer not in world.granted
        world.release(running)
        world.exited("small")
        world.loaded("small")
        assert newcomer in world.granted

    def test_a_loading_model_serves_those_who_wait_and_then_goes(self) -> None:
        world = World()
        id = world.ask("small")
        world.apply(world.residency.on_unload("small", world.now)[1])
        world.loaded("small")
        assert id in world.granted
        world.release(id)
        assert world.status("small") is Status.STOPPING


class TestRoom:
    def test_what_can_never_fit_is_refused_at_once_with_the_numbers(self) -> None:
        world = World()
        world.bring_in("small")
        error = world.errors[world.ask("huge")]
        assert error.code == "model_too_large"
        assert error.details["required_bytes"] == 1008
        assert error.details["available_bytes"] == CAPACITY
        assert not world.stops

    def test_too_many_models_evict_the_idle_one_that_would_go_first(self) -> None:
        world = World(max_models=2)
        world.bring_in("small", keep_alive=500.0)
        world.bring_in("other", keep_alive=100.0)
        world.ask("big")
        assert world.stops == [("other", "room is needed for big")]
        assert world.status("big") is Status.ABSENT
        world.exited("other")
        assert world.status("big") is Status.LOADING

    def test_memory_evicts_only_as_much_as_is_needed(self) -> None:
        world = World(max_models=9)
        world.bring_in("small")
        world.bring_in("big")
        world.ask("other", LoadWishes(num_ctx=16384))
        assert world.stops == [("big", "room is needed for other")]

    def test_a_busy_model_is_waited_for_and_its_clients_pass_for_a_while_only(self) -> None:
        world = World(max_models=1)
        running = world.ask("small")
        world.loaded("small")
        waiting = world.ask("other")
        passing = world.ask("small")
        assert passing in world.granted
        assert not world.stops
        world.wait(PATIENCE_SECONDS)
        late = world.ask("small")
        assert late not in world.granted
        world.release(running)
        world.release(passing)
        assert world.stops == [("small", "room is needed for other")]
        world.exited("small")
        world.loaded("other")
        assert waiting in world.granted
        world.release(waiting)
        world.exited("other")
        world.loaded("small")
        assert late in world.granted

    def test_the_passing_goes_on_when_whoever_waited_has_left(self) -> None:
        world = World(max_models=1)
        world.ask("small")
        world.loaded("small")
        waiting = world.ask("other")
        world.wait(PATIENCE_SECONDS)
        late = world.ask("small")
        assert late not in world.granted
        world.release(waiting)
        assert late in world.granted

    def test_something_small_may_load_before_something_that_has_to_wait(self) -> None:
        world = World()
        world.ask("big")
        world.loaded("big")
        blocked = world.ask("other", LoadWishes(num_ctx=16384))
        world.ask("small")
        assert world.status("small") is Status.LOADING
        assert blocked not in world.refused

    def test_nothing_takes_the_room_of_somebody_who_has_waited_too_long(self) -> None:
        world = World()
        world.ask("big")
        world.loaded("big")
        world.ask("other", LoadWishes(num_ctx=40960))
        world.wait(PATIENCE_SECONDS)
        world.ask("small")
        assert world.status("small") is Status.ABSENT

    def test_a_model_on_its_way_out_is_not_asked_to_make_room_twice(self) -> None:
        world = World(max_models=2)
        world.bring_in("small", keep_alive=100.0)
        world.bring_in("other", keep_alive=500.0)
        world.ask("big")
        world.wait(1)
        assert world.stops == [("small", "room is needed for big")]


class TestPins:
    def test_a_pinned_model_never_makes_room_and_never_expires(self) -> None:
        world = World(max_models=2, pinned=["small"])
        world.bring_in("small", keep_alive=1.0)
        world.bring_in("other")
        world.wait(250)
        world.ask("big")
        assert world.stops == [("other", "room is needed for big")]
        world.exited("other")
        world.loaded("big")
        world.wait(1e6)
        assert world.status("small") is Status.READY

    def test_what_could_only_fit_without_it_is_refused_at_once(self) -> None:
        world = World(pinned=["big"])
        world.bring_in("big")
        error = world.errors[world.ask("other", LoadWishes(num_ctx=16384))]
        assert error.code == "model_too_large"
        assert error.details["available_bytes"] == CAPACITY - 68

    def test_so_is_what_finds_all_places_pinned(self) -> None:
        world = World(max_models=1, pinned=["small"])
        world.bring_in("small")
        assert "pinned" in world.errors[world.ask("other")].message

    def test_it_can_be_reloaded_and_stopped(self) -> None:
        world = World(pinned=["small"])
        world.bring_in("small")
        world.ask("small", LoadWishes(num_ctx=8192))
        assert world.status("small") is Status.STOPPING
        world.exited("small")
        world.loaded("small")
        for id in list(world.granted):
            world.release(id)
        world.apply(world.residency.on_unload("small", world.now)[1])
        assert world.status("small") is Status.STOPPING


class TestDeath:
    def test_a_crash_ends_its_requests_and_the_next_reloads(self) -> None:
        world = World()
        ids = [world.ask("small"), world.ask("small")]
        world.loaded("small")
        world.exited("small", "was killed by SIGSEGV (last words: ouch)")
        assert world.refused == dict.fromkeys(ids, "runner_crashed")
        assert "SIGSEGV (last words: ouch)" in world.errors[ids[0]].message
        again = world.ask("small")
        world.loaded("small")
        assert again in world.granted
        assert world.loads[world.runner("small")].reason == "its last runner died"

    @pytest.mark.parametrize("is_hung", [False, True])
    def test_who_has_heard_nothing_yet_is_tried_once_more(self, is_hung: bool) -> None:
        world = World()
        heard, untouched = world.ask("small"), world.ask("small")
        world.loaded("small")
        if is_hung:
            world.apply(world.residency.on_hung(world.runner("small"), 180.0, world.now, {untouched}))
        world.exited("small", "was killed by SIGSEGV", {untouched})
        assert world.refused == {heard: "runner_crashed"}
        world.loaded("small")
        assert world.granted[untouched] == 2
        world.exited("small", "was killed by SIGSEGV", {untouched})
        assert world.refused[untouched] == "runner_crashed"

    def test_after_several_deaths_nobody_is_made_to_wait(self) -> None:
        world = World()
        for _ in range(4):
            world.ask("small")
            world.wait(10)
            world.loaded("small")
            world.exited("small", "was killed by SIGSEGV")
        id = world.ask("small")
        world.wait(10)
        world.loaded("small")
        world.exited("small", "was killed by SIGSEGV", {id})
        assert world.refused[id] == "runner_crashed"

    def test_a_daemon_that_stops_tries_nothing_again(self) -> None:
        world = World()
        id = world.ask("small")
        world.loaded("small")
        world.apply(world.residency.on_drain(world.now))
        world.exited("small", "was killed by SIGSEGV", {id})
        assert world.refused == {id: "runner_crashed"}

    def test_a_death_while_loading_refuses_those_who_wait_in_the_end(self) -> None:
        world = World()
        id = world.ask("small")
        world.exited("small", "was killed by SIGABRT")
        world.exited("small", "was killed by SIGABRT")
        assert world.refused[id] == "load_failed"
        assert "SIGABRT" in world.errors[id].message

    def test_a_crash_loop_backs_off_and_is_told_about(self) -> None:
        world = World()
        starts: list[float] = []
        for _ in range(5):
            id = world.ask("small")
            assert id not in world.refused
            started = world.now
            while len(world.loads) == len(starts):
                world.wait(world.residency.wake_at(world.now) - world.now)
            starts.append(world.now - started)
            world.loaded("small")
            world.exited("small", "was killed by SIGSEGV")
        assert starts == [0, 0, 1, 2, 4]
        error = world.errors[world.ask("small")]
        assert error.code == "overloaded"
        assert error.details["retry_after"] == 8
        assert "5 times" in error.message and "SIGSEGV" in error.message

    def test_crashes_are_forgotten_in_time(self) -> None:
        world = World()
        for _ in range(4):
            world.ask("small")
            world.wait(10)
            world.loaded("small")
            world.exited("small", "was killed by SIGSEGV")
        world.wait(300)
        world.ask("small")
        assert world.status("small") is Status.LOADING

    def test_a_hung_runner_is_killed_and_its_requests_are_told(self) -> None:
        world = World()
        id = world.ask("small")
        world.loaded("small")
        world.apply(world.residency.on_hung(world.runner("small"), 180.0, world.now))
        assert world.refused[id] == "runner_crashed"
        assert world.forced == ["small"]
        world.exited("small", "was killed by SIGKILL")
        world.ask("small")
        assert world.status("small") is Status.LOADING

    def test_the_death_of_a_stopped_runner_is_no_crash(self) -> None:
        world = World(keep_alive=0.0)
        for _ in range(5):
            world.bring_in("small")
            world.exited("small", "was killed by SIGTERM")
        assert not world.refused


class TestDrain:
    def test_waiting_and_new_requests_are_refused_and_running_ones_finish(self) -> None:
        world = World()
        running = world.ask("small")
        world.loaded("small")
        waiting = world.ask("big")
        world.apply(world.residency.on_drain(world.now))
        late = world.ask("small")
        assert world.refused == {waiting: "shutting_down", late: "shutting_down"}
        assert world.stops == [("big", "the daemon stops")]
        world.release(running)
        assert world.status("small") is Status.STOPPING

    def test_what_still_runs_in_the_end_is_refused_and_killed(self) -> None:
        world = World()
        running = world.ask("small")
        world.loaded("small")
        world.apply(world.residency.on_drain(world.now))
        world.apply(world.residency.on_kill(world.now))
        assert world.refused == {running: "shutting_down"}
        assert world.forced == ["small"]


@pytest.mark.parametrize("seed", range(8))
def test_every_request_ends_and_nothing_is_left(seed: int) -> None:
    """Random events; then everybody is served, and the state is as it was before the first request."""
    dice = random.Random(seed)
    world = World(max_models=2, max_queue=4, keep_alive=20.0, capacity=90)
    ids: list[str] = []
    for _ in range(300):
        step(world, dice, ids)
    settle(world)
    assert set(ids) == set(world.granted) | set(world.refused)
    world.wait(1000)
    settle(world)
    world.wait(1000)
    assert world.residency.entries() == []
    assert world.residency.wake_at(world.now) == math.inf


def step(world: World, dice: random.Random, ids: list[str]) -> None:
    wishes = LoadWishes(num_ctx=dice.choice([None, 2048, 8192, 16384]), num_thread=dice.choice([None, None, 1, 2]))
    event = dice.random()
    if event < 0.35:
        id = world.ask(dice.choice(["small", "other", "big"]), wishes, priority=dice.choice([0, 0, 1]))
        ids.append(id)
    elif event < 0.6 and ids:
        id = dice.choice(ids)
        if id not in world.granted and id not in world.refused:
            world.refused[id] = "left"
        world.release(id)
    elif event < 0.7:
        world.wait(dice.choice([0.1, 5, 40]))
    elif event < 0.72:
        world.apply(world.residency.on_unload(dice.choice(["small", "other", "big"]), world.now)[1])
    else:
        advance(world, dice.random() < 0.1)


def advance(world: World, is_crash: bool) -> None:
    """Let one runner do its next thing: die, or finish what it is about."""
    for entry in world.residency.entries():
        if is_crash or entry.status is Status.STOPPING:
            untouched = {id for index, id in enumerate(entry.in_flight) if index % 2}
            return world.exited(entry.name, "was killed by SIGSEGV", untouched)
        if entry.status is Status.LOADING:
            return world.loaded(entry.name)
    return None


def settle(world: World) -> None:
    """Let everything go its way until nothing moves any more."""
    for _ in range(500):
        for entry in world.residency.entries():
            for id in list(entry.in_flight):
                world.release(id)
        advance(world, is_crash=False)
        world.wait(1)
