"""Estimates and load options from headers, settings and a described machine."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fixtures.daemons import create_header

from localllm.config import Config
from localllm.daemon.machine import Machine
from localllm.daemon.memory import (
    PROCESS_BYTES,
    choose_load_options,
    estimate_bytes,
    kv_bytes_per_slot,
    plan_load,
)
from localllm.types import LoadOptions, LoadWishes

MIB = 1 << 20
GIB = 1 << 30
ROOMY = Machine(64 * GIB, 4)


def choose(wishes: LoadWishes | None = None, machine: Machine = ROOMY, **settings: Any) -> LoadOptions:
    return choose_load_options(create_header(), wishes or LoadWishes(), Config(**settings), machine)


class TestEstimate:
    @pytest.mark.parametrize(("kind", "bytes_per_32"), [("f16", 64), ("q8_0", 34), ("q4_0", 18)])
    def test_kv_memory_is_keys_and_values_of_each_layer_and_cell(self, kind: Any, bytes_per_32: int) -> None:
        header = create_header(block_count=3, attention__head_count_kv=2, embedding_length=128, attention__head_count=4)
        options = LoadOptions(num_ctx=1024, num_parallel=1, num_threads=1, num_threads_batch=1, kv_cache_type=kind)
        # 3 layers, 2 heads of 32 keys and 32 values, 1024 cells.
        assert kv_bytes_per_slot(header, options) == 3 * 2 * (32 + 32) * 1024 * bytes_per_32 // 32

    def test_cells_come_in_blocks(self) -> None:
        few, many = (LoadOptions(num_ctx=n, num_parallel=1, num_threads=1, num_threads_batch=1) for n in (1, 256))
        assert kv_bytes_per_slot(create_header(), few) == kv_bytes_per_slot(create_header(), many)

    def test_key_and_value_sizes_of_the_file_are_used(self) -> None:
        options = LoadOptions(num_ctx=256, num_parallel=1, num_threads=1, num_threads_batch=1)
        header = create_header(attention__key_length=192, attention__value_length=128)
        assert kv_bytes_per_slot(header, options) == 2 * 2 * (192 + 128) * 256 * 2

    def test_layers_without_attention_cost_no_kv_memory(self) -> None:
        options = LoadOptions(num_ctx=256, num_parallel=1, num_threads=1, num_threads_batch=1)
        hybrid = create_header(block_count=4, attention__head_count_kv=[0, 0, 0, 2])
        assert kv_bytes_per_slot(hybrid, options) * 4 == kv_bytes_per_slot(create_header(block_count=4), options)

    def test_a_model_without_causal_attention_has_no_kv_memory(self) -> None:
        options = LoadOptions(num_ctx=256, num_parallel=1, num_threads=1, num_threads_batch=1)
        assert kv_bytes_per_slot(create_header(attention__causal=False), options) == 0

    def test_the_sum_grows_with_slots_and_window(self) -> None:
        def size(num_ctx: int, num_parallel: int) -> int:
            options = LoadOptions(num_ctx, num_parallel, num_threads=1, num_threads_batch=1)
            return estimate_bytes(create_header(), options)

        assert PROCESS_BYTES < size(1024, 1) < size(1024, 2) < size(2048, 2)


class TestWindow:
    @pytest.mark.parametrize(
        ("train", "wish", "setting", "chosen"),
        [
            (8192, None, 0, 4096),
            (2048, None, 0, 2048),
            (0, None, 0, 4096),
            (8192, None, 6000, 6000),
            (8192, None, 100_000, 8192),
            (8192, 7000, 6000, 7000),
            (8192, 100_000, 0, 8192),
            (0, 100_000, 0, 100_000),
            (8192, 1, 0, 4),
        ],
    )
    def test_wish_then_setting_then_default_within_what_the_model_knows(
        self, train: int, wish: int | None, setting: int, chosen: int
    ) -> None:
        header = create_header(context_length=train)
        options = choose_load_options(header, LoadWishes(num_ctx=wish), Config(context_length=setting), ROOMY)
        assert options.num_ctx == chosen

    def test_a_plan_for_several_takes_the_widest_and_the_first_word_on_the_rest(self) -> None:
        wishes = [LoadWishes(num_thread=3), LoadWishes(num_ctx=512, num_thread=1), LoadWishes(num_ctx=5000, num_gpu=1)]
        plan = plan_load(create_header(), wishes, Config(), ROOMY)
        assert (plan.options.num_ctx, plan.options.num_threads, plan.options.num_gpu_layers) == (5000, 3, 1)
        assert plan.num_ctx_max == 8192

    def test_who_names_no_window_gets_the_default_also_beside_a_small_one(self) -> None:
        plan = plan_load(create_header(), [LoadWishes(num_ctx=512), LoadWishes()], Config(), ROOMY)
        assert plan.options.num_ctx == 4096


class TestSlots:
    @pytest.mark.parametrize(("cores", "chosen"), [(1, 4), (2, 8), (4, 16), (64, 16)])
    def test_cores_bound_the_number(self, cores: int, chosen: int) -> None:
        assert choose(machine=Machine(64 * GIB, cores)).num_parallel == chosen

    def test_they_take_a_quarter_of_the_memory_at_most(self) -> None:
        header = create_header(block_count=32, attention__head_count_kv=32, attention__key_length=128)
        available = 32 * GIB
        options = choose_load_options(header, LoadWishes(), Config(), Machine(available, 16))
        assert 1 < options.num_parallel < 16
        used = options.num_parallel * kv_bytes_per_slot(header, options)
        assert used <= available / 4 < used + 2 * kv_bytes_per_slot(header, options)

    def test_there_is_one_at_least(self) -> None:
        assert choose(machine=Machine(0, 4)).num_parallel == 1

    def test_all_fits_together_when_one_does(self) -> None:
        for mib in (110, 120, 150, 200, 400):
            machine = Machine(mib * MIB, 16)
            size = plan_load(create_header(), [LoadWishes()], Config(), machine).size_bytes
            smallest = plan_load(create_header(), [LoadWishes()], Config(num_parallel=1), machine).size_bytes
            assert size <= max(mib * MIB, smallest)

    def test_the_setting_is_obeyed(self) -> None:
        assert choose(num_parallel=3, machine=Machine(0, 1)).num_parallel == 3

    def test_a_batch_has_room_for_all(self) -> None:
        options = choose(LoadWishes(num_batch=8), num_parallel=16)
        assert options.num_batch == 16

    def test_embedding_models_have_one_and_take_their_input_whole(self) -> None:
        header = create_header(pooling_type=1, context_length=512)
        options = choose_load_options(header, LoadWishes(), Config(num_parallel=8), ROOMY)
        assert (options.num_parallel, options.num_ctx, options.num_batch, options.num_ubatch) == (1, 512, 512, 512)


@pytest.mark.parametrize(
    ("wish", "setting", "cores", "chosen"), [(None, 0, 6, 6), (None, 3, 6, 3), (2, 3, 6, 2), (0, 3, 6, 3)]
)
def test_threads_are_wish_then_setting_then_cores(wish: int | None, setting: int, cores: int, chosen: int) -> None:
    options = choose(LoadWishes(num_thread=wish), Machine(GIB, cores), num_threads=setting)
    assert (options.num_threads, options.num_threads_batch) == (chosen, chosen)


@pytest.mark.parametrize(("wish", "chosen"), [(None, -1), (-1, -1), (0, 0), (1, 1), (2, 2), (99, -1)])
def test_gpu_layers_are_all_unless_fewer_were_asked_for(wish: int | None, chosen: int) -> None:
    assert choose(LoadWishes(num_gpu=wish)).num_gpu_layers == chosen


def test_settings_reach_the_runner() -> None:
    options = choose(LoadWishes(use_mmap=False), kv_cache_type="q8_0", flash_attention="off", target_itl=0.25)
    assert (options.kv_cache_type, options.flash_attention, options.target_itl_ms) == ("q8_0", "off", 250.0)
    assert not options.use_mmap
    assert choose(target_itl=None).target_itl_ms == 0.0
