"""Transfers and notifications in asyncio."""

import asyncio
import select
import threading

import pytest
import warpwire
from conftest import PATIENCE


@pytest.fixture
def pair(agents):
    alice, bob = agents("alice"), agents("bob")
    source, target = bytearray(b"x" * 4096), bytearray(4096)
    registered = alice.register(source), bob.register(target)
    return alice, bob, registered, target, alice.add_peer(bob.metadata)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def test_transfers_are_awaitable(pair):
    alice, bob, (memory, _), target, peer = pair
    there = peer.memory[0]

    async def main():
        await alice.write(peer, memory, there, notify=b"1")
        assert target == b"x" * 4096
        many = [alice.write(peer, memory[at : at + 1], there[at : at + 1]) for at in range(300)]
        assert await asyncio.gather(*many) == [None] * 300
        assert (await bob.notification()).data == b"1"
        done = alice.read(peer, memory[0:8], there[0:8])
        await done
        await done
        assert not alice._watches and not bob._watches, "no reader is left behind"

    before = threading.active_count()
    run(main())
    assert threading.active_count() == before, "no thread of Python"


def test_failures_are_raised_by_await(pair, agents):
    alice, bob, (memory, registered), _, peer = pair
    there = peer.memory[0]

    async def main():
        await alice.write(peer, memory, there)
        registered.deregister()
        with pytest.raises(warpwire.Error):
            await alice.write(peer, memory, there)
        waiting = asyncio.ensure_future(alice.notification())
        await asyncio.sleep(0.05)
        await asyncio.gather(bob.notify(bob.add_peer(alice.metadata), b"good"))
        assert (await waiting) == ("bob", b"good")

    run(main())


def test_a_cancelled_task_takes_no_notification(pair):
    alice, bob, _, _, peer = pair

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bob.notification(), 0.05)
        first = asyncio.ensure_future(bob.notification())
        second = asyncio.ensure_future(bob.notification())
        await asyncio.sleep(0.05)
        first.cancel()
        await alice.notify(peer, b"for the second")
        assert (await second).data == b"for the second"
        assert first.cancelled() and not bob._watches

    run(main())


def test_two_loops_wait_for_one_agent(pair):
    alice, bob, (memory, _), _, peer = pair
    there = peer.memory[0]
    failures = []

    async def work():
        for _ in range(200):
            await alice.write(peer, memory[0:64], there[0:64])

    def thread():
        try:
            run(work())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=thread) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(2 * PATIENCE)
    assert not failures


def test_an_agent_that_is_closed_meanwhile(pair, agents):
    alice, bob, _, _, _ = pair

    async def main():
        waiting = asyncio.ensure_future(bob.notification())
        await asyncio.sleep(0.05)
        bob.close()
        with pytest.raises(warpwire.Freed):
            await waiting

    run(main())


def test_the_descriptor_works_with_select(pair):
    alice, bob, _, _, peer = pair
    bob.clear_events()
    assert select.select([bob], [], [], 0)[0] == []
    alice.notify(peer, b"wake").wait(PATIENCE)
    assert select.select([bob], [], [], PATIENCE)[0] == [bob]
    assert bob.clear_events() and not bob.clear_events()
    assert bob.notifications() == [("alice", b"wake")]
