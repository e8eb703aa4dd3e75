"""The simulated object store fails as it is told, and the same way each time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from quiver.buffer.objects import Fetched, Objects, Version
from quiver.errors import Conflict, ObjectNotFound, ObjectsUnavailable
from quiver.testing.objects import Fault, Faults, Kind, ObjectCall, SimulatedObjects
from quiver.testing.virtual_time import EPOCH_MS, run

PATH = "ingest/manifest"


def simulated(
    *, seed: int = 1, faults: Faults | Mapping[Kind, Faults] | None = None
) -> SimulatedObjects:
    return SimulatedObjects(
        random.Random(seed), latency=(0.1, 0.2), slow=(20.0, 30.0), faults=faults or Faults()
    )


def loop_time() -> float:
    return asyncio.get_running_loop().time()


# --- One fault at a time ----------------------------------------------------------------------


def test_a_call_takes_its_time_there_and_back() -> None:
    async def main() -> tuple[float, float]:
        objects = simulated()
        await objects.put(PATH, b"x")
        return objects.calls[0].at, loop_time()

    arrived, answered = run(main())
    assert 0.1 <= arrived <= 0.2
    assert 0.1 <= answered - arrived <= 0.2


def test_a_lost_write_never_happens() -> None:
    async def main() -> None:
        objects = simulated()
        objects.order(Fault.LOST)
        with pytest.raises(ObjectsUnavailable):
            await objects.put_if(PATH, b"x", None)
        await asyncio.sleep(1000)
        assert objects.peek(PATH) is None
        assert [call.outcome for call in objects.calls] == ["never arrived"]

    run(main())


def test_an_unanswered_write_has_happened() -> None:
    async def main() -> None:
        objects = simulated()
        objects.order(Fault.UNANSWERED)
        with pytest.raises(ObjectsUnavailable):
            await objects.put_if(PATH, b"x", None)
        assert objects.peek(PATH) == b"x"

    run(main())


def test_a_repeated_write_meets_itself() -> None:
    async def main() -> None:
        objects = simulated()
        for expected in (None, Version("v1")):
            objects.order(Fault.REPEATED, "put_if")
            data = b"first" if expected is None else b"second"
            with pytest.raises(Conflict):
                await objects.put_if(PATH, data, expected)
            assert objects.peek(PATH) == data
        assert [call.outcome for call in objects.calls] == ["done", "Conflict"] * 2
        objects.order(Fault.REPEATED, "put")
        assert await objects.put(PATH, b"third") == "v4"

    run(main())


def test_a_late_write_happens_long_after_its_error() -> None:
    async def main() -> None:
        objects = simulated()
        objects.order(Fault.LATE)
        with pytest.raises(ObjectsUnavailable):
            await objects.put(PATH, b"x")
        assert loop_time() < 1
        assert objects.peek(PATH) is None
        await asyncio.sleep(40)
        assert objects.peek(PATH) == b"x"

    run(main())


def test_a_slow_call_is_slow_on_one_way() -> None:
    async def main(seed: int) -> bool:
        objects = simulated(seed=seed)
        objects.order(Fault.SLOW)
        await objects.put(PATH, b"x")
        assert 20 < loop_time() < 31
        return objects.calls[0].at > 20

    assert {run(main(seed)) for seed in range(10)} == {True, False}


def test_a_write_arrives_though_its_caller_has_stopped_waiting() -> None:
    async def main(seed: int) -> None:
        objects = simulated(seed=seed)
        objects.order(Fault.SLOW)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await objects.put(PATH, b"x")
        assert loop_time() == 5
        await asyncio.sleep(40)
        assert objects.peek(PATH) == b"x"

    for seed in range(10):
        run(main(seed))


def test_an_order_waits_for_its_call() -> None:
    async def main() -> None:
        objects = simulated()
        objects.order(Fault.LOST, "get", PATH)
        version = await objects.put(PATH, b"x")
        with pytest.raises(ObjectNotFound):
            await objects.get("other")
        with pytest.raises(ObjectsUnavailable):
            await objects.get(PATH)
        assert await objects.get(PATH) == Fetched(b"x", version, 1)

    run(main())


# --- What a test can do -----------------------------------------------------------------------


def test_somebody_else_comes_in_between() -> None:
    async def main() -> None:
        objects = simulated()
        version = await objects.put(PATH, b"mine")

        def interfere(call: ObjectCall) -> None:
            if call.kind == "put_if":
                objects.on_arrival = None
                assert call.outcome == "arrives"
                assert call.at == loop_time()
                objects.plant(PATH, b"theirs")
                objects.remove("ingest/other")

        objects.plant("ingest/other", b"")
        objects.on_arrival = interfere
        with pytest.raises(Conflict):
            await objects.put_if(PATH, b"mine again", version)
        assert objects.peek(PATH) == b"theirs"
        assert objects.paths() == [PATH]

    run(main())


@pytest.mark.parametrize("error", [ObjectsUnavailable("down"), LookupError("a bug in the test")])
def test_the_hook_may_refuse(error: Exception) -> None:
    async def main() -> None:
        objects = simulated()

        def refuse(_call: ObjectCall) -> None:
            raise error

        objects.on_arrival = refuse
        with pytest.raises(type(error), match=str(error)):
            await objects.put(PATH, b"x")
        assert objects.paths() == []

    run(main())


def test_the_log_can_be_read() -> None:
    async def main() -> list[str]:
        objects = SimulatedObjects(random.Random(1), latency=(0.25, 0.25))
        await objects.put(PATH, b"x")
        objects.order(Fault.UNANSWERED)
        with pytest.raises(ObjectsUnavailable):
            await objects.delete([PATH])
        assert (await objects.list_children("ingest")) == []
        return [str(call) for call in objects.calls]

    assert run(main()) == [
        "0.250 put ingest/manifest: done",
        "0.750 delete ingest/manifest: done (unanswered)",
        "1.250 list_children ingest: done",
    ]


def test_objects_are_as_old_as_the_loop_says() -> None:
    async def main() -> None:
        objects = simulated()
        await asyncio.sleep(60)
        objects.plant("ingest/a", b"x")
        assert [info.modified_ms for info in await objects.list_children("ingest")] == [
            EPOCH_MS + 60_000
        ]

    run(main())


# --- Many at once -----------------------------------------------------------------------------

EVERYTHING = Faults(lost=0.1, unanswered=0.1, repeated=0.1, late=0.1, slow=0.1)


async def append_until_seen(objects: Objects, name: bytes, random_: random.Random) -> None:
    """What a careful writer does: it looks for its own name before it appends again."""
    while True:
        await asyncio.sleep(random_.uniform(0, 1))
        try:
            async with asyncio.timeout(10):
                fetched = await objects.get(PATH)
                assert fetched is not None
                if name in fetched.data.split():
                    return
                await objects.put_if(PATH, fetched.data + b" " + name, fetched.version)
        except (Conflict, ObjectsUnavailable, TimeoutError):
            continue


def history(seed: int, *, shuffle: bool = False) -> tuple[bytes, list[ObjectCall]]:
    async def main() -> tuple[bytes, list[ObjectCall]]:
        generator = random.Random(seed)
        objects = SimulatedObjects(generator, faults=EVERYTHING)
        objects.plant(PATH, b"")
        names = [b"%d" % number for number in range(6)]
        await asyncio.gather(*(append_until_seen(objects, name, generator) for name in names))
        await asyncio.sleep(1000)  # what is late arrives, and finds another version
        return objects.peek(PATH) or b"", objects.calls

    return run(main(), seed=seed, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", [False, True])
def test_compare_and_swap_holds_under_all_faults(shuffle: bool) -> None:
    for seed in range(40):
        content, calls = history(seed, shuffle=shuffle)
        assert sorted(content.split()) == [b"%d" % number for number in range(6)], seed
        assert len(calls) > 12


def test_the_same_seed_is_the_same_history() -> None:
    for shuffle in (False, True):
        assert history(7, shuffle=shuffle) == history(7, shuffle=shuffle)
    assert history(7)[1] != history(8)[1]


def test_faults_come_as_often_as_they_should_and_where_they_should() -> None:
    async def main() -> Counter[Fault | None]:
        objects = simulated(faults={"put": EVERYTHING})
        results = await asyncio.gather(
            *(objects.put(f"a/{number}", b"") for number in range(1000)), return_exceptions=True
        )
        assert 200 < sum(isinstance(result, ObjectsUnavailable) for result in results) < 400
        await objects.list_children("a")
        await asyncio.sleep(100)
        assert {call.fault for call in objects.calls if call.kind != "put"} == {None}
        return Counter(call.fault for call in dict.fromkeys(objects.calls))

    counted = run(main())
    for fault in Fault:
        assert 60 <= counted[fault] / (2 if fault is Fault.REPEATED else 1) <= 140, counted


@pytest.mark.parametrize("chances", [{"lost": -0.1}, {"lost": 0.6, "late": 0.6}])
def test_chances_are_probabilities(chances: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no probabilities"):
        Faults(**chances)


def test_a_draw_is_one_of_them_or_none() -> None:
    generator = random.Random(1)
    drawn = [Faults(lost=0.5, slow=0.5).draw(generator) for _ in range(50)]
    assert set(drawn) == {Fault.LOST, Fault.SLOW}
    assert {Faults().draw(generator) for _ in itertools.repeat(None, 50)} == {None}
