"""Agents between processes: writes, reads, notifications, and peers that die."""

import pickle
import random
import signal
import threading
import time

import numpy
import pytest
import warpwire
from conftest import PATIENCE

KINDS = [("numpy", "auto"), ("host", "auto"), ("sim:0", "auto"), ("numpy", "udp"), ("host", "shm")]


@pytest.mark.parametrize("kind, link", KINDS)
def test_write_read_and_notify_between_processes(agents, process, kind, link):
    other, alice = process("bob", kind, link), agents("alice", link=link)
    here = numpy.random.default_rng(7).integers(0, 256, 1 << 20, "u1")
    sent = here.copy()
    memory = alice.register(here)
    peer = alice.add_peer(other.metadata)
    (there,) = peer.memory
    assert (peer.name, len(there), there.kind) == ("bob", 1 << 20, kind.replace("numpy", "host"))
    transfer = alice.write(peer, memory, there, notify=b"all", timeout=PATIENCE)
    transfer.wait(PATIENCE)
    assert transfer.state == "done" and transfer.done and transfer.error is None
    assert other.ask("notification") == f"alice {b'all'.hex()}"
    assert bytes.fromhex(other.ask("bytes", 0, 1 << 20)) == sent.tobytes()
    assert peer.connected and peer.path

    assert other.ask("fill", 9) == "filled"
    read = alice.read(peer, [memory[16:32], memory[100:101]], [there[0:16], there[7:8]])
    read.wait(PATIENCE)
    expected = sent.copy()
    expected[16:32] = 9
    expected[100] = 9
    assert (here == expected).all(), "the ranges, and nothing else"

    assert other.ask("add", alice.metadata.hex()) == "added"
    assert other.ask("notify", "alice", "back") == "notified"
    arrived = alice.wait_notification(PATIENCE)
    assert arrived == ("bob", b"back") == (arrived.sender, arrived.data)
    assert alice.notifications() == [] and alice.wait_notification(0) is None


def test_lists_of_ranges_in_all_forms(agents, process):
    other, alice = process("bob"), agents("alice")
    here = numpy.arange(4096, dtype="u1")
    memory = alice.register(here)
    peer = alice.add_peer(other.metadata)
    there = peer.memory[0]
    pairs = [(0, 100, 5), (200, 3000, 50), (900, 8000, 1)]
    local = [(memory.address + a, n) for a, _, n in pairs]
    remote = [(there.address + b, n) for _, b, n in pairs]
    forms = [
        (local, remote),
        (tuple(memory[a : a + n] for a, _, n in pairs), [there[b : b + n] for _, b, n in pairs]),
        (numpy.array(local, "u8"), numpy.array(remote, "u8")),
    ]
    for lists in forms:
        assert other.ask("fill", 0) == "filled"
        prepared = alice.prepare(peer, *lists)
        assert (prepared.nbytes, prepared.work_requests) == (56, 3)
        for _ in range(3):
            alice.write(prepared).wait(PATIENCE)
        for a, b, n in pairs:
            assert other.ask("bytes", b, b + n) == here[a : a + n].tobytes().hex()
    with pytest.raises(warpwire.InvalidArgument, match="2 local ranges for 3"):
        alice.prepare(peer, local[:2], remote)
    with pytest.raises(warpwire.InvalidArgument, match="range 1 has 50 bytes here and 51"):
        alice.prepare(peer, local, [remote[0], (remote[1][0], 51), remote[2]])
    with pytest.raises(warpwire.OutOfRange, match="range 0"):
        alice.write(peer, (memory.address + 4000, 97), there[0:97])
    with pytest.raises(IndexError, match="5:4097 is not within its 4096 bytes"):
        memory[5:4097]
    for wrong in ["text", 5, None, [memory, 5], numpy.zeros((2, 3), "u8"), numpy.zeros((2, 2))]:
        with pytest.raises(TypeError):
            alice.prepare(peer, wrong, remote)
    with pytest.raises(TypeError):
        memory[5]


@pytest.mark.parametrize("by_handle", [False, True])
def test_transfers_in_the_order_of_a_stream(agents, process, by_handle):
    other, alice = process("bob"), agents("alice")
    buffer, own = warpwire.alloc(4096, "sim:0"), warpwire.Stream("sim:0")
    stream = (own.number, "sim:0") if by_handle else own
    memory = alice.register(buffer)
    peer = alice.add_peer(other.metadata)
    prepared = alice.prepare(peer, memory, peer.memory[0][:4096])
    for number in range(1, 10):
        own.fill(buffer, number)
        written = alice.write(prepared, stream=stream, timeout=PATIENCE)
        written.wait_on_stream(stream)
        own.fill(buffer, 255)
        own.synchronize(PATIENCE)
        assert written.done
        assert bytes.fromhex(other.ask("bytes", 0, 4096)) == bytes([number]) * 4096


def test_streams_that_are_none(agents, process):
    other, alice = process("bob"), agents("alice")
    memory = alice.register(numpy.ones(4096, "u1"))
    peer = alice.add_peer(other.metadata)
    prepared = alice.prepare(peer, memory, peer.memory[0][:4096])

    class Protocol:
        def __cuda_stream__(self):
            return 0, 5

    class Torch:
        cuda_stream, device_index = 5, 0

    # There is no GPU behind these.
    for stream in [(9999, "sim:0"), (0, "sim:0")]:
        with pytest.raises(warpwire.InvalidArgument, match="no stream of this number"):
            alice.write(prepared, stream=stream)
    with pytest.raises(warpwire.InvalidArgument, match="tpu:0"):
        alice.write(prepared, stream=(5, "tpu:0"))
    if not warpwire_has_cuda():
        for stream in [5, Protocol(), Torch()]:
            with pytest.raises(warpwire.Error, match="CUDA|cuda"):
                alice.write(prepared, stream=stream)
    for stream in ["text", object(), -1, (5, 0)]:
        with pytest.raises(TypeError, match="is no stream"):
            alice.write(prepared, stream=stream)
    transfer = alice.write(prepared)
    with pytest.raises(TypeError, match="is no stream"):
        transfer.wait_on_stream("text")
    transfer.wait(PATIENCE)


def warpwire_has_cuda():
    try:
        warpwire.alloc(4096, "cuda:0")
    except warpwire.Error:
        return False
    return True


def test_a_hundred_thousand_ranges(agents, process):
    count, each = 100_000, 8
    other, alice = process("bob", "host", "auto", str(count * each)), agents("alice")
    here = numpy.random.default_rng(1).integers(0, 256, count * each, "u1")
    memory = alice.register(here)
    peer = alice.add_peer(other.metadata)
    at = numpy.arange(count, dtype="u8") * each
    order = numpy.random.default_rng(2).permutation(count)
    lengths = numpy.full(count, each, "u8")
    local = numpy.stack([memory.address + at[order], lengths], axis=1)
    remote = numpy.stack([peer.memory[0].address + at, lengths], axis=1)
    alice.write(peer, local, remote, notify=b"").wait(PATIENCE)
    assert other.ask("notification") == "alice"
    expected = here.reshape(count, each)[order].tobytes()
    assert bytes.fromhex(other.ask("bytes", 0, count * each)) == expected


def test_metadata_that_is_none(agents, process):
    alice, chance = agents("alice"), random.Random(3)
    good = process("bob").metadata.rstrip()  # it is text, and complete without its newline
    cut = [good[:end] for end in range(0, len(good), 7)]
    noise = [chance.randbytes(chance.randrange(300)) for _ in range(200)]
    flipped = [good[:at] + b"\xff" + good[at + 1 :] for at in range(0, len(good), 5)]
    for metadata in [*cut, *noise, *flipped]:
        with pytest.raises(warpwire.Error) as caught:
            alice.add_peer(metadata)
        assert caught.value.kind in ("Malformed", "Unsupported", "InvalidArgument"), metadata
        assert caught.value.what and caught.value.why
    with pytest.raises(ValueError):
        alice.add_peer(b"")
    assert alice.peer("bob") is None
    alice.add_peer(good)
    assert alice.peer("bob").name == "bob"


def test_metadata_of_memory_that_is_gone(agents, process):
    other, alice = process("bob"), agents("alice")
    memory = alice.register(bytearray(64))
    peer = alice.add_peer(other.metadata)
    alice.write(peer, memory, peer.memory[0][0:64]).wait(PATIENCE)
    assert other.ask("deregister") == "deregistered"
    transfer = alice.write(peer, memory, peer.memory[0][0:64])
    with pytest.raises(warpwire.Error) as caught:
        transfer.wait(PATIENCE)
    assert caught.value.kind != "Timeout" and transfer.state == "failed"
    assert type(transfer.error) is type(caught.value)
    alice.notify(peer, b"still here").wait(PATIENCE)
    assert other.ask("notification") == f"alice {b'still here'.hex()}"


def test_a_peer_that_is_killed(agents, process):
    other, alice = process("bob"), agents("alice")
    memory = alice.register(bytearray(1 << 20))
    peer = alice.add_peer(other.metadata)
    alice.write(peer, memory, peer.memory[0]).wait(PATIENCE)
    other.stop()
    transfer = alice.write(peer, memory, peer.memory[0], notify=b"never")
    other.kill()
    with pytest.raises(ConnectionError) as caught:
        transfer.wait(PATIENCE)
    assert caught.value.kind == "PeerLost", caught.value
    again = process("bob")
    replaced = alice.add_peer(again.metadata)
    alice.write(replaced, memory, replaced.memory[0], notify=b"new").wait(PATIENCE)
    assert again.ask("notification") == f"alice {b'new'.hex()}"
    with pytest.raises(warpwire.Stale):
        alice.write(peer, memory, peer.memory[0])


def test_timeouts_and_cancellation(agents, process):
    other, alice = process("bob", "numpy", "udp"), agents("alice", link="udp")
    memory = alice.register(bytearray(1 << 20))
    peer = alice.add_peer(other.metadata)
    alice.write(peer, memory, peer.memory[0]).wait(PATIENCE)
    other.stop()
    try:
        transfer = alice.write(peer, memory, peer.memory[0])
        with pytest.raises(TimeoutError) as caught:
            transfer.wait(0.05)
        assert caught.value.fix == "wait longer, or cancel it"
        assert transfer.state == "in progress" and not transfer.done
        transfer.cancel()
        with pytest.raises(warpwire.Error) as caught:
            transfer.wait(PATIENCE)
        assert caught.value.kind in ("Cancelled", "PeerLost"), caught.value
    finally:
        other.go_on()
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError):
            alice.wait_notification(wrong)


def test_waits_release_the_gil(agents):
    alice, counted = agents("alice"), 0
    waiting = threading.Event()

    def wait():
        waiting.set()
        assert alice.wait_notification(2) is None

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    start = time.monotonic()
    while thread.is_alive():
        counted += 1
        assert time.monotonic() - start < PATIENCE
    assert counted > 1000, "this thread ran while the other one waited"


def test_signals_interrupt_waits(agents):
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    alice, before = agents("alice"), signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        start = time.monotonic()
        with pytest.raises(Alarm):
            alice.wait_notification(PATIENCE)
        assert time.monotonic() - start < PATIENCE / 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_closed_agent(agents, process):
    other = process("bob")
    with warpwire.Agent("alice") as alice:
        memory = alice.register(bytearray(64))
        peer = alice.add_peer(other.metadata)
        waiter = threading.Timer(0.3, alice.close)
        waiter.start()
        with pytest.raises(warpwire.Freed, match="it was closed"):
            alice.wait_notification(PATIENCE)
        waiter.join()
    assert alice.closed and "closed" in repr(alice)
    for call in (
        lambda: alice.metadata,
        lambda: alice.register(bytearray(8)),
        lambda: alice.write(peer, memory, peer.memory[0][0:64]),
        lambda: alice.fileno(),
    ):
        with pytest.raises(warpwire.Freed):
            call()
    alice.close()


def test_options_that_are_wrong():
    for name, options in [
        ("", {}),
        ("x" * 257, {}),
        ("alice", {"link": "pigeon"}),
        ("alice", {"address": "nowhere"}),
        ("alice", {"queue_pairs": 0}),
        ("alice", {"queue_pairs": 17}),
    ]:
        with pytest.raises(ValueError) as caught:
            warpwire.Agent(name, **options)
        assert isinstance(caught.value, warpwire.Error) and caught.value.why
    with pytest.raises(warpwire.Error):
        warpwire.Agent("alice", address="192.0.2.1")


def test_errors_are_also_builtin_ones():
    builtin = {"Timeout": TimeoutError, "PeerLost": ConnectionError, "OutOfMemory": MemoryError,
               "PermissionDenied": PermissionError, "SystemCallFailed": OSError,
               "InvalidArgument": ValueError, "OutOfRange": IndexError}
    for name, base in builtin.items():
        error = getattr(warpwire, name)("cannot a: b; c", "a", "b", "c")
        assert isinstance(error, base) and isinstance(error, warpwire.Error)
        copy = pickle.loads(pickle.dumps(error))
        for one in (error, copy):
            assert (str(one), one.what, one.why, one.fix) == ("cannot a: b; c", "a", "b", "c")
    with pytest.raises(warpwire.InvalidArgument) as caught:
        warpwire.alloc(64, "sim:99")
    assert caught.value.kind == "InvalidArgument" and "simulator has" in caught.value.why
