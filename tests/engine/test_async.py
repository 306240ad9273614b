from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvoffload.engine import Engine, EngineStopped, SamplingParams, Token, TokenStream
from tests.engine.copying_plugin import CopyingPlugin
from tests.engine.tiny import assert_idle, assert_same, run, tiny_config, tiny_engine, tokens
from tests.simulate.loop import SimLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class CountingLoop(SimLoop):
    turns = 0

    def _run_once(self) -> None:
        self.turns += 1
        super()._run_once()


def in_virtual_time(story: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        with asyncio.Runner(loop_factory=CountingLoop) as runner:
            runner.run(story())

    return test


def engine_in_loop(plugin: CopyingPlugin | None = None) -> Engine:
    return Engine(tiny_config(), plugin)


@in_virtual_time
async def test_concurrent_streams_give_the_same_tokens_as_single_ones() -> None:
    async with engine_in_loop() as engine:
        streams = [engine.submit(tokens(10 + seed, seed), SamplingParams(5)) for seed in range(6)]
        found = await asyncio.gather(*(_collect(stream) for stream in streams))
        assert_idle(engine)
    for seed, answer in enumerate(found):
        assert_same(answer, run(tiny_engine(), tokens(10 + seed, seed), 5))


async def _collect(stream: TokenStream) -> list[Token]:
    return [token async for token in stream]


@in_virtual_time
async def test_an_idle_engine_polls_nothing_and_wakes_for_work() -> None:
    async with engine_in_loop() as engine:
        await _collect(engine.submit(tokens(5)))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        turns, steps = loop.turns, engine.statistics().steps
        await asyncio.sleep(600)
        assert engine.statistics().steps == steps
        assert loop.turns - turns < 10
        assert len(await _collect(engine.submit(tokens(5)))) == 16


@in_virtual_time
async def test_the_engine_polls_twice_per_millisecond_while_only_a_load_is_open() -> None:
    plugin = CopyingPlugin()
    async with engine_in_loop(plugin) as engine:
        await _collect(engine.submit(tokens(40), SamplingParams(2)))
        plugin.keep(tokens(40))
        plugin.scheduler.hold_loads = True
        stream = engine.submit(tokens(40), SamplingParams(2))
        before = engine.statistics().steps
        await asyncio.sleep(0.1)
        assert 190 <= engine.statistics().steps - before <= 210
        plugin.scheduler.hold_loads = False
        assert len(await _collect(stream)) == 2
        assert stream.stats.first_token_s is not None
        assert 0.1 <= stream.stats.first_token_s - stream.stats.arrived_s < 0.11


@in_virtual_time
async def test_closing_a_stream_aborts_its_request() -> None:
    async with engine_in_loop() as engine:
        answer = engine.submit(tokens(10), SamplingParams(50))
        async for _ in answer:
            break
        assert engine.statistics().running == 1
        await answer.aclose()
        assert_idle(engine)


def test_cancelling_the_reader_aborts_the_request_in_any_state() -> None:
    async def story(turns: int) -> bool:
        async with engine_in_loop() as engine:
            stream = engine.submit(tokens(10), SamplingParams(4))
            task = asyncio.create_task(_collect(stream))
            for _ in range(turns):
                await asyncio.sleep(0)
            was_done = task.done()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() != was_done
            assert_idle(engine)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            return was_done

    for turns in range(1, 30):  # with 0 turns, the task would not yet have started
        with asyncio.Runner(loop_factory=CountingLoop) as runner:
            if runner.run(story(turns)):
                return
    raise AssertionError("the request was never done in time")


@in_virtual_time
async def test_stopping_fails_open_requests_and_refuses_new_ones() -> None:
    engine = engine_in_loop()
    async with engine:
        stream = engine.submit(tokens(10), SamplingParams(50))
        await anext(stream)
    with pytest.raises(EngineStopped):
        await _collect(stream)
    with pytest.raises(EngineStopped):
        engine.submit(tokens(10))
    assert_idle(engine)


@in_virtual_time
async def test_stopping_waits_until_open_loads_have_ended() -> None:
    plugin = CopyingPlugin()
    async with engine_in_loop(plugin) as engine:
        await _collect(engine.submit(tokens(40), SamplingParams(2)))
        plugin.keep(tokens(40))
        plugin.scheduler.hold_loads = True
        engine.submit(tokens(40))
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(1, setattr, plugin.scheduler, "hold_loads", False)
        started = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - started >= 1
    assert plugin.scheduler.is_drained
    assert plugin.scheduler.counts["shutdown"] == 1
    assert_idle(engine)


@in_virtual_time
async def test_an_error_in_the_engine_is_raised_in_every_stream_and_when_stopping() -> None:
    plugin = CopyingPlugin()
    engine = engine_in_loop(plugin)
    plugin.scheduler.plan = None  # type: ignore[assignment, method-assign]
    await engine.__aenter__()
    with pytest.raises(EngineStopped, match="not callable"):
        await _collect(engine.submit(tokens(10)))
    with pytest.raises(TypeError, match="not callable"):
        await engine.stop()
    assert plugin.scheduler.counts["shutdown"] == 1
