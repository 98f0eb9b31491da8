"""Who is next among the keys: in the check of inputs, and in the start of lines."""

from __future__ import annotations

import asyncio

from batch_services import Service, echo, line

from plait.runtime.server.batches import batch_run, batch_service
from plait.runtime.server.batches.slots import Slots

KEYS = {name: str(number) * 64 for number, name in enumerate("abc")}


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


def test_inputs_of_one_key_are_checked_one_at_a_time_and_delay_no_other(tmp_path, monkeypatch) -> None:
    real, may_end, begun = batch_run.check_input, asyncio.Event(), []

    async def check(path, *arguments):
        is_large = path.stat().st_size > 500
        begun.append("a" if is_large else "b")
        if is_large:
            await may_end.wait()
        return await real(path, *arguments)

    async def main() -> None:
        monkeypatch.setattr(batch_run, "check_input", check)
        async with Service(tmp_path, api_keys=KEYS) as service:
            many = [await service.create([line(str(i)) for i in range(9)], tenant="a") for _ in range(30)]
            await until(lambda: begun)
            other = await service.end_of(await service.create([line("x")], tenant="b"))
            assert other.status == "completed" and begun == ["a", "b"]
            for record in reversed(many):  # else the next one begins
                await service.service.cancel("a", record.id)
                await service.end_of(record)
            assert {record.status for record in many} == {"cancelled"} and begun == ["a", "b"]
            assert (
                service.service._checks._value == batch_service.MAX_CHECKS
                and service.service.files._num_files["a"] == 30
            )
            may_end.set()
            last = await service.end_of(await service.create([line(str(i)) for i in range(9)], tenant="a"))
            assert last.status == "completed" and begun == ["a", "b", "a"]

    asyncio.run(main())


def test_a_batch_that_is_cancelled_while_it_is_checked_ends_at_once(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def check(*arguments):
            begun.set()
            await asyncio.sleep(3600)

        with monkeypatch.context() as patch:
            patch.setattr(batch_run, "check_input", check)
            async with Service(tmp_path) as service:
                record = await service.create([line("a")])
                await begun.wait()
                await service.service.cancel("", record.id)
                await service.end_of(record)
                assert (record.status, record.request_counts.total, service.results(record)) == ("cancelled", 0, {})
                left = await service.create([line("b")])
        async with Service(tmp_path) as service:
            assert service.service.get("", record.id).status == "cancelled"
            assert (await service.end_of(service.service.get("", left.id))).status == "completed"

    asyncio.run(main())


def test_a_free_place_goes_to_the_key_that_holds_fewest_for_its_weight() -> None:
    async def main() -> None:
        slots, granted = Slots(4, lambda: True, {"b": 2.0}), []

        async def take(tenant):
            slot = await slots.acquire(tenant)
            slot.set_calls(1)
            granted.append((tenant, slot))

        tasks = [asyncio.create_task(take("a")) for _ in range(8)]
        await until(lambda: len(granted) == 4)
        tasks += [asyncio.create_task(take(tenant)) for tenant in "bbbc"]
        await asyncio.sleep(0)
        tasks[7].cancel()  # which waits
        slots.wake()  # before it knows
        for number in range(4):
            granted[number][1].release()
            await until(lambda size=4 + number: len(granted) > size)
        assert sorted(tenant for tenant, _ in granted[4:]) == ["a", "b", "b", "c"]
        for number in range(4, 11):
            await until(lambda size=number: len(granted) > size)
            granted[number][1].release()
            granted[number][1].release()
        await asyncio.wait(tasks)
        assert slots.shares.holders() == [] and (slots.num_calls, len(slots._waiting)) == (0, 0)

    asyncio.run(main())


def test_a_place_is_not_given_to_a_line_that_was_just_cancelled() -> None:
    async def main() -> None:
        slots = Slots(1, lambda: True, {})
        first = await slots.acquire("a")
        first.set_calls(1)
        cancelled, waiting = (asyncio.create_task(slots.acquire("a")) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        first.release()
        (await waiting).release()
        assert cancelled.cancelled() and (slots.num_calls, slots.shares.holders()) == (0, [])

    asyncio.run(main())


def test_a_line_with_many_calls_stops_no_other_key() -> None:
    async def main() -> None:
        slots = Slots(4, lambda: True, {})
        many = await slots.acquire("a")
        many.set_calls(6912)
        own, other, another = (asyncio.create_task(slots.acquire(tenant)) for tenant in "abb")
        await until(other.done)
        other.result().set_calls(1)
        for _ in range(9):
            await asyncio.sleep(0)
        assert not own.done() and not another.done()
        many.release()
        for task in (own, another):
            (await task).release()
        other.result().release()
        assert slots.num_calls == 0

    asyncio.run(main())


def test_lines_of_a_key_with_one_batch_run_beside_those_of_a_key_with_many(tmp_path) -> None:
    async def main() -> None:
        asked = []

        async def ask(path, body, tenant, label, set_calls):
            asked.append(tenant)
            return await echo(path, body, tenant, label, set_calls)

        async with Service(tmp_path, ask, max_batch_calls=2, api_keys=KEYS) as service:
            many = [await service.create([line(str(i)) for i in range(40)], tenant="a") for _ in range(5)]
            await until(lambda: len(asked) > 8)
            other = await service.end_of(await service.create([line(str(i)) for i in range(10)], tenant="b"))
            beside = asked[asked.index("b") : len(asked) - asked[::-1].index("b")]  # while b has lines that wait
            assert other.request_counts.completed == 10 and beside.count("a") <= 30, beside
            for record in many:
                assert (await service.end_of(record)).request_counts.completed == 40

    asyncio.run(main())
