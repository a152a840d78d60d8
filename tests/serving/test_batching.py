"""Who waits for whom: large requests, short ones, and clients that ask for more than others."""

import asyncio
import time

import numpy as np
import pytest

from favour.serving.batching import Batcher, by_turns
from favour.serving.limits import Capacity, Overloaded


def rows(count, value=1.0):
    return [np.full((count, 1), value)]


def conversation(talk, seconds_per_row=0.0005, **options):
    """What `talk(batcher, calls)` returns; the model takes so long for each row, and writes down what it was asked."""
    calls = []

    def run(arrays):
        calls.append(arrays[0].ravel().tolist())
        time.sleep(seconds_per_row * len(arrays[0]))
        return {"y": 2 * arrays[0]}

    async def main():
        batcher = Batcher(run, [True], max_wait=0.0, **options)
        batcher.start()
        try:
            return await talk(batcher, calls)
        finally:
            await batcher.stop()

    return asyncio.run(main())


def test_short_requests_wait_for_a_piece_of_a_large_one_only():
    async def talk(batcher, calls):
        done = []

        async def ask(count, name):
            answer = await batcher(rows(count, count), count)
            done.append(name)
            return answer

        large = asyncio.ensure_future(ask(250, "large"))
        for _ in range(3):
            await ask(1, "short")
        answer = await large
        np.testing.assert_array_equal(answer["y"], 2 * rows(250, 250)[0])
        return done, calls

    done, calls = conversation(talk)
    assert done == ["short"] * 3 + ["large"]
    pieces = [len(call) for call in calls if 250 in call]
    assert sum(pieces) == 250 and len(pieces) >= 4 and all(len(set(call)) == 1 for call in calls)


def test_short_requests_without_end_do_not_keep_a_large_one_out():
    async def talk(batcher, calls):
        over = False

        async def ask_on():
            while not over:
                await batcher(rows(1), 1)

        others = [asyncio.ensure_future(ask_on()) for _ in range(6)]
        answer = await asyncio.wait_for(batcher(rows(100, 3.0), 100), 30)
        over = True
        await asyncio.gather(*others)
        return len(answer["y"])

    assert conversation(talk) == 100


def test_calls_grow_where_rows_cost_little():
    async def talk(batcher, calls):
        for _ in range(12):
            await batcher(rows(256), 256)
        return calls

    assert len(conversation(talk, seconds_per_row=1e-6)[-1]) == 256


def test_clients_take_turns():
    async def talk(batcher, calls):
        flood = [asyncio.ensure_future(batcher(rows(1, 0.0), 1, "flood")) for _ in range(200)]
        await asyncio.sleep(0.01)
        await batcher(rows(1, 7.0), 1, "other")
        behind = sum(not task.done() for task in flood)
        await asyncio.gather(*flood)
        return behind

    assert conversation(talk, max_rows=8) >= 150
    items = [type("Item", (), {"client": c, "n": n})() for c, n in (("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1))]
    assert [(i.client, i.n) for i in by_turns(items)] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]


def test_a_full_queue_refuses_whoever_fills_it():
    async def talk(batcher, calls):
        flood = [asyncio.ensure_future(batcher(rows(1), 1, "flood")) for _ in range(20)]
        await asyncio.sleep(0)
        answer = await batcher(rows(1), 1, "other")
        refused = await asyncio.gather(*flood, return_exceptions=True)
        return len(answer["y"]), sum(isinstance(r, Overloaded) for r in refused)

    served, refused = conversation(talk, max_rows=1, max_queue=4, seconds_per_row=0.01)
    assert served == 1 and refused == 17


def test_small_requests_are_held_where_large_ones_hold_all():
    capacity = Capacity(1000, "values", 10)
    with capacity.hold() as large, capacity.hold() as small, capacity.hold() as other:
        large.add(1000)
        small.add(10)
        with pytest.raises(Overloaded):
            other.add(11)
