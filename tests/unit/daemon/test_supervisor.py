"""The supervisor with fake runners that are real processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import struct
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import psutil
import pytest
from tests.fixtures.daemons import StartDaemon, create_header, create_model

from localllm.config import ModelSettings
from localllm.daemon.contention import CpuTimes
from localllm.daemon.supervisor import Granted
from localllm.errors import (
    InvalidModelFile,
    InvalidRequest,
    LoadFailed,
    ModelTooLarge,
    QueueFull,
    RunnerCrashed,
    ShuttingDown,
    Unsupported,
)
from localllm.protocol.messages import Prefill
from localllm.types import ChatRequest, Delta, EmbedRequest, Finished, LoadWishes


class TestAnswers:
    async def test_a_stream_has_its_items_in_order(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        items = [item async for item in daemon.stream("say", num_predict=2)]
        assert [type(item) for item in items] == [Granted, Prefill, Delta, Delta, Finished]
        granted, *_, finished = items
        assert isinstance(granted, Granted) and granted.load_ns > 0
        assert isinstance(finished, Finished) and finished.usage.num_output_tokens == 2

    async def test_many_at_once_each_get_their_own(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        texts = await asyncio.gather(*(daemon.ask(f"echo this is {i}") for i in range(30)))
        assert texts == [f"this is {i}" for i in range(30)]
        assert len(daemon.supervisor.resident()) == 1

    async def test_two_names_of_the_same_weights_share_a_runner(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        await daemon.ask("say", model=create_model("one"))
        await daemon.ask("say", model=create_model("other", model_path=create_model("one").model_path))
        assert len(daemon.supervisor.resident()) == 1

    async def test_a_typed_error_of_the_runner_reaches_the_caller_alone(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        other = await daemon.granted("slow", num_predict=5)
        with pytest.raises(InvalidRequest, match="told to fail") as caught:
            await daemon.ask("fail")
        assert caught.value.hint == "Do not tell it to."
        assert isinstance([item async for item in other][-1], Finished)

    async def test_vectors_come_back_whole_or_not_at_all(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        request = EmbedRequest("e1", ("a", "bcd"))
        granted, embeddings = await daemon.supervisor.embed(create_model(), request, LoadWishes(), 300.0)
        assert granted.load_ns > 0
        assert [struct.unpack("<2f", vector) for vector in embeddings.vectors] == [(1.0, 1.0), (3.0, 1.0)]
        with pytest.raises(InvalidRequest, match="told to fail"):
            await daemon.supervisor.embed(create_model(), EmbedRequest("e2", ("fail",)), LoadWishes(), 300.0)
        assert [model.num_in_flight for model in daemon.supervisor.resident()] == [0]

    async def test_the_same_id_twice_at_a_time_is_refused(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        first = await daemon.granted("quiet")
        request = ChatRequest(id="r1", prompt="say")
        with pytest.raises(InvalidRequest, match="r1"):
            await anext(daemon.supervisor.generate(create_model(), request, LoadWishes(), 300.0))
        await first.aclose()


class TestThreads:
    async def test_a_runner_leaves_cores_to_whoever_else_computes(self, start_daemon: StartDaemon) -> None:
        now = 0.0

        def cpu_times(pid: int) -> CpuTimes:
            """Of two CPUs, another program keeps one busy, and the runner the other."""
            nonlocal now
            now += 1.0
            return CpuTimes(at=now, num_cpus=2, everybody=2 * now, runner=now)

        daemon = await start_daemon(cpu_times=cpu_times)
        counts = []
        for _ in range(4):
            await daemon.ask("say")
            (resident,) = daemon.supervisor.resident()
            counts.append(resident.options.num_threads)
        assert counts == [2, 2, 1, 1]

    async def test_threads_that_were_asked_for_stay(self, start_daemon: StartDaemon) -> None:
        moments = itertools.count(1.0)
        daemon = await start_daemon(cpu_times=lambda pid: CpuTimes(at := next(moments), 2, 2 * at, at))
        for _ in range(4):
            await daemon.ask("say", wishes=LoadWishes(num_thread=2))
        (resident,) = daemon.supervisor.resident()
        assert resident.options.num_threads == 2


class TestLoading:
    async def test_load_makes_resident_and_unload_ends(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        await daemon.supervisor.load(create_model(), LoadWishes(num_ctx=2048), None)
        (resident,) = daemon.supervisor.resident()
        assert (resident.state, resident.num_in_flight, resident.num_queued) == ("ready", 0, 0)
        assert resident.expires_at is None
        assert resident.info is not None and resident.info.num_ctx == 2048
        assert resident.pid is not None
        assert await daemon.supervisor.unload(create_model())
        assert daemon.supervisor.resident() == []
        assert not psutil.pid_exists(resident.pid)
        assert not await daemon.supervisor.unload(create_model())

    async def test_settings_of_a_single_model_count_for_it_alone(self, start_daemon: StartDaemon) -> None:
        mine = {"context_length": 1024, "num_parallel": 1, "pin": True, "speculate": False, "kv_cache_type": "q8_0"}
        daemon = await start_daemon(of_models=(ModelSettings("tiny", mine, {}),), keep_alive=0.05)
        await daemon.ask("say", keep_alive=0.0)
        await daemon.ask("say", model=create_model("other"))
        await daemon.until(lambda: len(daemon.supervisor.resident()) == 1)
        (tiny,) = daemon.supervisor.resident()
        assert (tiny.model.name.model, tiny.is_pinned, tiny.expires_at) == ("tiny", True, None)
        options = tiny.options
        assert (options.num_ctx, options.num_parallel, options.speculate, options.kv_cache_type) == (
            1024,
            1,
            False,
            "q8_0",
        )

    async def test_keep_alive_of_zero_ends_the_runner_after_the_answer(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        assert await daemon.ask("say", keep_alive=0.0) == "w0 w1 w2"
        await daemon.until(lambda: daemon.supervisor.resident() == [])

    async def test_an_idle_runner_ends_by_itself(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        await daemon.ask("say", keep_alive=0.05)
        await daemon.until(lambda: daemon.supervisor.resident() == [])

    async def test_expiry_is_told(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        await daemon.ask("say", keep_alive=100.0)
        (resident,) = daemon.supervisor.resident()
        assert resident.expires_at is not None
        remaining = resident.expires_at - datetime.now(timezone.utc)
        assert timedelta(seconds=95) < remaining <= timedelta(seconds=100)

    async def test_a_load_shows_how_far_it_is(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon("--load-seconds", "0.4", "--load-steps", "4")
        load = asyncio.create_task(daemon.supervisor.load(create_model(), LoadWishes(), None))
        await daemon.until(lambda: any(0 < r.fraction < 1 for r in daemon.supervisor.resident()))
        (resident,) = daemon.supervisor.resident()
        assert (resident.state, resident.info, resident.num_queued) == ("loading", None, 1)
        await load

    async def test_the_time_of_a_load_is_told_to_whoever_waited(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon("--load-seconds", "0.2")
        cold, warm = [await anext(daemon.stream("say")) for _ in range(2)]
        assert isinstance(cold, Granted) and isinstance(warm, Granted)
        assert cold.load_ns > 0.2e9
        assert 0 < warm.load_ns < 0.1e9

    @pytest.mark.parametrize(
        ("kind", "words"), [("fail", "these are no weights"), ("crash", "SIGABRT.*the weights bit me")]
    )
    async def test_a_load_that_fails_says_why(self, start_daemon: StartDaemon, kind: str, words: str) -> None:
        daemon = await start_daemon("--load", kind)
        with pytest.raises(LoadFailed, match=words):
            await daemon.ask("say")

    async def test_a_load_without_memory_is_tried_with_fewer_slots(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon("--load", "tight", num_parallel=4)
        assert await daemon.ask("say") == "w0 w1 w2"
        (resident,) = daemon.supervisor.resident()
        assert resident.info is not None and resident.info.num_slots == 1
        assert resident.reason.startswith(
            "1 × 4096 tokens, because with 4 × 4096 tokens it could not be loaded: no room"
        )

    async def test_a_load_that_stalls_is_given_up(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon("--load", "stall", load_timeout=0.3)
        with pytest.raises(LoadFailed, match="no progress"):
            await daemon.ask("say")

    async def test_a_runner_that_cannot_be_started_is_a_failed_load(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        daemon.supervisor._command = ("/does/not/exist",)
        with pytest.raises(LoadFailed, match="could not be started"):
            await daemon.ask("say")

    async def test_a_program_that_is_no_runner_is_a_failed_load(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        babble = "import os, sys, time; os.write(int(sys.argv[2]), b'x' * 4096); time.sleep(60)"
        daemon.supervisor._command = (sys.executable, "-c", babble)
        with pytest.raises(LoadFailed, match="nonsense"):
            await daemon.ask("say")

    async def test_what_cannot_fit_is_refused_with_the_numbers(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        monster = create_model("monster", create_header(block_count=1000, attention__head_count_kv=4096))
        with pytest.raises(ModelTooLarge, match=r"\d GiB of memory.*4\.0 GiB"):
            await daemon.ask("say", model=monster)

    async def test_a_damaged_model_file_is_told_before_any_process_starts(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        model = create_model("gone")
        del model.__dict__["header"]
        with pytest.raises(InvalidModelFile, match="missing"):
            await daemon.ask("say", model=model)
        assert daemon.supervisor.resident() == []

    async def test_adapters_are_refused_not_ignored(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        with pytest.raises(Unsupported, match="adapters"):
            await daemon.ask("say", model=create_model(adapter_paths=(Path("/models/a.gguf"),)))

    async def test_a_second_model_loads_while_the_first_answers(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        first = await daemon.granted("quiet")
        assert await daemon.ask("say", model=create_model("second")) == "w0 w1 w2"
        assert len(daemon.supervisor.resident()) == 2
        await first.aclose()

    async def test_with_room_for_one_the_second_waits_for_the_first(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon(max_loaded_models=1)
        first = daemon.ask("slow", num_predict=5)
        second = daemon.ask("say", model=create_model("second"))
        assert list(await asyncio.gather(first, second)) == ["w0 w1 w2 w3 w4", "w0 w1 w2"]
        assert [r.model.name.model for r in daemon.supervisor.resident()] == ["second"]


class TestQueue:
    async def test_more_than_slots_and_queue_are_refused_at_once(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon(num_parallel=1, max_queue=1)
        streams = [await daemon.granted("quiet") for _ in range(2)]
        (resident,) = daemon.supervisor.resident()
        assert (resident.num_in_flight, resident.num_queued) == (1, 1)
        with pytest.raises(QueueFull) as caught:
            await daemon.ask("say")
        assert caught.value.details["retry_after"]
        for stream in streams:
            await stream.aclose()
        assert await daemon.ask("say") == "w0 w1 w2"


class TestCancel:
    async def test_leaving_in_the_middle_stops_the_runner_and_frees_the_place(
        self, start_daemon: StartDaemon, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        daemon = await start_daemon(num_parallel=1, max_queue=0)
        stream = await daemon.granted("quiet")
        await stream.aclose()
        assert daemon.supervisor.resident()[0].num_in_flight == 0
        assert await daemon.ask("say") == "w0 w1 w2"
        await daemon.until(lambda: "cancelled r1" in caplog.text)

    async def test_a_cancelled_task_frees_its_place_too(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon(num_parallel=1, max_queue=0)
        await daemon.supervisor.load(create_model(), LoadWishes(), None)
        task = asyncio.create_task(daemon.ask("quiet"))
        await daemon.until(lambda: daemon.supervisor.resident()[0].num_in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await daemon.ask("say") == "w0 w1 w2"

    async def test_leaving_during_a_load_ends_the_load(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon("--load", "stall")
        task = asyncio.create_task(daemon.ask("say"))
        await daemon.until(lambda: any(r.pid for r in daemon.supervisor.resident()))
        pid = daemon.pid()
        task.cancel()
        await daemon.until(lambda: daemon.supervisor.resident() == [])
        assert not psutil.pid_exists(pid)

    async def test_whoever_leaves_while_waiting_for_room_loads_nothing(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon(max_loaded_models=1)
        first = await daemon.granted("quiet")
        task = asyncio.create_task(daemon.ask("say", model=create_model("second")))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        await first.aclose()
        assert [r.model.name.model for r in daemon.supervisor.resident()] == ["tiny"]


class TestDeath:
    async def test_a_crash_is_an_error_with_the_last_words_and_the_next_request_reloads(
        self, start_daemon: StartDaemon
    ) -> None:
        daemon = await start_daemon()
        bystander = daemon.stream("slow", num_predict=1000)
        while not isinstance(await anext(bystander), Delta):
            pass
        with pytest.raises(RunnerCrashed, match=r"SIGABRT.*told to crash"):
            await daemon.ask("crash")
        with pytest.raises(RunnerCrashed):
            async for _ in bystander:
                pass
        assert await daemon.ask("say") == "w0 w1 w2"

    async def test_who_has_heard_nothing_gets_the_answer_of_another_runner(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        stream = await daemon.granted("quiet")
        pid = daemon.pid()
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await anext(stream), Granted)
        assert daemon.pid() != pid
        os.kill(daemon.pid(), signal.SIGKILL)
        with pytest.raises(RunnerCrashed, match="SIGKILL"):
            await anext(stream)
        assert b'request_retries_total{model="tiny:latest"} 1.0' in daemon.supervisor.metrics.render([], 0)

    async def test_who_leaves_while_it_waits_for_the_next_runner_leaves_nothing(
        self, start_daemon: StartDaemon
    ) -> None:
        daemon = await start_daemon("--load-seconds", "0.3")
        stream = await daemon.granted("quiet")
        os.kill(daemon.pid(), signal.SIGKILL)
        await daemon.until(lambda: any(r.state == "loading" for r in daemon.supervisor.resident()))
        await stream.aclose()
        await daemon.until(lambda: daemon.supervisor.resident() == [])
        assert daemon.supervisor.standings() == []

    async def test_a_killed_runner_is_noticed_in_the_middle_of_an_answer(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        stream = daemon.stream("slow", num_predict=1000)
        while not isinstance(await anext(stream), Delta):
            pass
        os.kill(daemon.pid(), signal.SIGKILL)
        with pytest.raises(RunnerCrashed, match="SIGKILL"):
            async for _ in stream:
                pass
        assert await daemon.ask("say") == "w0 w1 w2"

    async def test_a_runner_that_dies_idle_is_replaced_without_an_error(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        await daemon.ask("say")
        os.kill(daemon.pid(), signal.SIGKILL)
        await daemon.until(lambda: daemon.supervisor.resident() == [])
        assert await daemon.ask("say") == "w0 w1 w2"

    async def test_a_hung_runner_is_killed_and_replaced(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon(stall_seconds=0.4)
        with pytest.raises(RunnerCrashed, match="no sign of life"):
            await daemon.ask("hang")
        assert await daemon.ask("say") == "w0 w1 w2"

    async def test_the_age_of_the_last_step_grows_while_a_busy_runner_is_silent(
        self, start_daemon: StartDaemon
    ) -> None:
        daemon = await start_daemon()
        await daemon.ask("say")
        (idle,) = daemon.supervisor.resident()
        assert idle.step_age is None
        stream = await daemon.granted("hang")
        await asyncio.sleep(0.2)
        (busy,) = daemon.supervisor.resident()
        assert busy.step_age is not None and busy.step_age >= 0.1
        await stream.aclose()

    async def test_a_slow_runner_is_not_taken_for_a_hung_one(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon(stall_seconds=0.4)
        assert len((await daemon.ask("slow", num_predict=40)).split()) == 40

    async def test_silence_without_work_is_no_hang(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon(stall_seconds=0.1)
        await daemon.ask("say")
        pid = daemon.pid()
        await asyncio.sleep(0.3)
        assert daemon.pid() == pid

    async def test_a_runner_that_does_not_obey_is_killed(
        self, start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("localllm.daemon.runner_process.HANG_UP_SECONDS", 0.1)
        monkeypatch.setattr("localllm.daemon.runner_process.TERMINATE_SECONDS", 0.1)
        daemon = await start_daemon("--ignore-hang-up")
        await daemon.ask("say")
        pid = daemon.pid()
        assert await daemon.supervisor.unload(create_model())
        assert not psutil.pid_exists(pid)


class TestDrain:
    async def test_running_requests_finish_and_new_ones_are_refused(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        stream = await daemon.granted("slow", num_predict=10)
        drain = asyncio.create_task(daemon.supervisor.drain(None))
        await asyncio.sleep(0)
        assert daemon.supervisor.is_draining
        with pytest.raises(ShuttingDown):
            await daemon.ask("say")
        items = [item async for item in stream]
        assert isinstance(items[-1], Finished)
        await drain
        assert daemon.supervisor.resident() == []

    async def test_what_takes_too_long_is_cut_with_an_error(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        stream = await daemon.granted("quiet")
        await daemon.supervisor.drain(0.05)
        with pytest.raises(ShuttingDown):
            await anext(stream)
        assert daemon.supervisor.resident() == []

    async def test_a_second_drain_without_patience_ends_the_first(self, start_daemon: StartDaemon) -> None:
        daemon = await start_daemon()
        stream = await daemon.granted("quiet")
        patient = asyncio.create_task(daemon.supervisor.drain(None))
        await asyncio.sleep(0)
        await daemon.supervisor.drain(0)
        await asyncio.wait_for(patient, 1)
        with pytest.raises(ShuttingDown):
            await anext(stream)
