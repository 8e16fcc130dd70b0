"""Ranks and messages: between processes, in asyncio, with bad objects, and with ranks that die."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy
import pytest
import streams
import warpwire
from conftest import PATIENCE

PROGRAM = str(Path(__file__).with_name("rank.py"))


@pytest.fixture
def pair(tmp_path):
    """Rank 0 here, and rank 1 as a process with a task."""
    started = []

    def start(task: str, **options) -> tuple[warpwire.Comm, subprocess.Popen]:
        address = f"file:{tmp_path}/meet"
        command = [sys.executable, PROGRAM, task, "1", "2", address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        comm = warpwire.Comm(0, 2, address, timeout=PATIENCE, **options)
        started.append(comm)
        return comm, process

    yield start
    for one in started:
        if isinstance(one, warpwire.Comm):
            one.close()
        else:
            one.kill()
            one.wait(PATIENCE)
            one.stdout.close()


@pytest.fixture
def alone():
    """A communicator of one rank, which sends to itself."""
    with warpwire.Comm(0, 1, "127.0.0.1:0") as comm:
        yield comm


def end(comm, process):
    comm.send(None, 1, timeout=PATIENCE)
    comm.finish(PATIENCE)
    assert comm.closed and process.wait(PATIENCE) == 0


@pytest.mark.parametrize("link", ["auto", "udp", "shm"])
def test_ranks_of_a_launcher(link):
    command = [str(warpwire.command()), "run", "-n", "3", "--link", link]
    ended = subprocess.run(
        [*command, "--", sys.executable, PROGRAM, "exchange"],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(3):
        assert f"rank {rank} of 3 done" in ended.stdout


def test_every_kind_of_object(pair):
    comm, process = pair("echo")
    assert (comm.rank, comm.size, comm.closed, comm.lost(1)) == (0, 2, False, None)
    assert comm.path(1) and "rank 0 of 2" in repr(comm)
    gpu = warpwire.alloc(100_000, "sim:0")
    gpu.write(bytes(range(250)) * 400)
    array = numpy.arange(25_000, dtype="f4")
    for sent, into in [
        (b"bytes are sent", bytearray(14)),
        (array, numpy.zeros_like(array)),
        (gpu, warpwire.alloc(100_000, "sim:0")),
        (warpwire.alloc(64), warpwire.alloc(64, "sim:0")),
        (memoryview(array)[:1], numpy.zeros(1, "f4")),
        ((array.ctypes.data, array.nbytes), numpy.zeros_like(array)),
        ((array.ctypes.data, 4096, "host"), numpy.zeros(4096, "u1")),
    ]:
        receive = comm.irecv(into, 1, 0)
        count = comm.send(sent, 1, timeout=PATIENCE)
        assert receive.wait(PATIENCE) == count == receive.nbytes
        assert receive.state == "done" and receive.done and receive.error is None
        read = into.read() if isinstance(into, warpwire.Buffer) else bytes(into)
        if isinstance(sent, tuple):
            assert read == array.tobytes()[: len(read)]
        else:
            assert read == (sent.read() if isinstance(sent, warpwire.Buffer) else bytes(sent))
    end(comm, process)


def test_objects_are_kept_until_the_end(pair):
    class Array(numpy.ndarray):
        """Accepts weak references."""

    comm, process = pair("echo")
    sent = numpy.full(2_000_000, 7, "u1").view(Array)
    into = numpy.zeros(2_000_000, "u1")
    gone = weakref.ref(sent)
    send, receive = comm.isend(sent, 1), comm.irecv(into, 1)
    del sent
    gc.collect()
    assert gone() is not None, "the request is in progress"
    assert receive.wait(PATIENCE) == send.wait(PATIENCE) == 2_000_000
    assert (into == 7).all()
    deadline = time.monotonic() + PATIENCE
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None
    end(comm, process)


def test_asyncio(pair):
    comm, process = pair("echo")

    async def main():
        into = [numpy.zeros(size, "u1") for size in (10, 20_000, 3, 1_000_000)]
        requests = [comm.irecv(array, 1) for array in into]
        sends = [comm.isend(numpy.full(array.size, 5, "u1"), 1) for array in into]
        lengths = [array.size for array in into]
        assert await asyncio.gather(*requests) == lengths
        assert await asyncio.gather(*sends) == lengths
        assert all((array == 5).all() for array in into)
        # Given up: the request stays.
        late = comm.irecv(into[0], 1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(later(late), 0.05)
        await comm.isend(b"x" * 10, 1)
        assert await late == 10 and await late == 10
        assert not comm._watches, "no reader is left behind"

    async def later(request):
        return await request

    before = threading.active_count()
    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert threading.active_count() == before, "no thread of Python"
    end(comm, process)


def test_a_dropped_receive_takes_no_message(alone):
    dropped, into = bytearray(8), bytearray(8)
    del_me = alone.irecv(dropped, 0)
    del del_me
    with pytest.raises(warpwire.Timeout) as caught:
        alone.recv(dropped, 0, timeout=0.05)
    assert isinstance(caught.value, TimeoutError) and caught.value.why
    alone.send(b"message!", 0)
    assert alone.recv(into, 0) == 8
    assert into == b"message!" and dropped == bytes(8)


@pytest.mark.parametrize(
    "object, why",
    [
        (b"read-only", "read-only"),
        (numpy.zeros(100, "u1")[::2], "not contiguous"),
        (numpy.zeros((10, 10), "u1")[:, :3], "not contiguous"),
        (bytearray(), "empty"),
    ],
)
def test_objects_that_cannot_receive(alone, object, why):
    with pytest.raises(warpwire.InvalidArgument) as caught:
        alone.irecv(object, 0)
    assert why in caught.value.why and caught.value.what


def test_wrong_arguments(alone, tmp_path):
    into = bytearray(4)
    with pytest.raises(TypeError):
        alone.irecv("text", 0)
    with pytest.raises(warpwire.InvalidArgument, match="1 ranks"):
        alone.isend(b"x", 1)
    with pytest.raises((OverflowError, TypeError)):
        alone.isend(b"x", -1)
    with pytest.raises(warpwire.InvalidArgument):
        alone.irecv(into, 0).wait(-1)
    alone.send(b"too long", 0, 9)
    request = alone.irecv(into, 0, 9)
    with pytest.raises(warpwire.OutOfRange, match="8 bytes, the buffer 4") as caught:
        request.wait(PATIENCE)
    assert request.state == "failed" and caught.value.fix
    assert isinstance(request.error, warpwire.OutOfRange)
    with pytest.raises(warpwire.InvalidArgument, match="no operation"):
        alone.all_reduce(numpy.zeros(1, "f4"), "product")
    with pytest.raises(warpwire.InvalidArgument, match="no operation"):
        alone.reduce_scatter(numpy.zeros(1, "f4"), "mean")
    with pytest.raises(warpwire.InvalidArgument, match="8 bytes to send, 4 to receive"):
        alone.all_to_all(bytearray(8), bytearray(4))
    with pytest.raises(warpwire.Error, match="read-only"):
        alone.all_gather(b"constant")
    with pytest.raises(warpwire.InvalidArgument, match="float16"):
        alone.all_reduce(numpy.zeros(1, "f2"))
    with pytest.raises(warpwire.InvalidArgument, match="no dtype"):
        alone.all_reduce(bytearray(8))
    alone.all_reduce(bytearray(8), "max", dtype="uint64")
    with pytest.raises(warpwire.InvalidArgument, match="None"):
        alone.broadcast(None)
    for wrong in [(0, 1), (0,), (None, None, "127.0.0.1:0"), (0, 1, "nowhere"), (3, 2, "h:1")]:
        with pytest.raises(warpwire.InvalidArgument):
            warpwire.Comm(*wrong)
    with pytest.raises(warpwire.Error, match="carrier pigeon"):
        warpwire.Comm(0, 1, "127.0.0.1:0", link="carrier pigeon")
    with pytest.raises(warpwire.Error, match="rank 1") as caught:
        warpwire.Comm(0, 2, f"file:{tmp_path}/alone", timeout=0.2)
    assert isinstance(caught.value, (TimeoutError, ConnectionError))


def test_a_closed_communicator(alone):
    request = alone.irecv(bytearray(4), 0)
    alone.close()
    alone.close()
    with pytest.raises(warpwire.Freed):
        alone.send(b"x", 0)
    with pytest.raises(warpwire.Freed):
        request.wait(PATIENCE)
    assert alone.closed and "closed" in repr(alone)


def test_a_rank_that_dies(pair):
    comm, process = pair("silent")
    assert process.stdout.readline() == "here\n"
    receive, later = comm.irecv(bytearray(4), 1, 1), comm.irecv(bytearray(4), 1, 2)
    assert receive.state == "in progress" and receive.nbytes is None
    with pytest.raises(warpwire.Timeout):
        receive.wait(0.05)

    async def main():
        threading.Timer(0.1, process.kill).start()
        with pytest.raises(warpwire.PeerLost) as caught:
            await later
        assert isinstance(caught.value, ConnectionError) and "rank 1" in caught.value.why

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    with pytest.raises(warpwire.PeerLost):
        receive.wait(PATIENCE)
    with pytest.raises(warpwire.PeerLost):
        comm.send(b"x", 1)
    with pytest.raises(warpwire.PeerLost):
        comm.barrier(PATIENCE)
    assert isinstance(comm.lost(1), warpwire.PeerLost)


def test_waits_release_the_gil_and_see_signals(pair):
    comm, process = pair("silent")

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for wait in [lambda: comm.recv(bytearray(4), 1), lambda: comm.barrier(PATIENCE)]:
            # Another thread runs meanwhile.
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGALRM)).start()
            with pytest.raises(KeyboardInterrupt):
                wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    process.kill()


def test_an_object_whose_destructor_sends(alone):
    """Its memory is freed when a request ends, or is dropped: not under the communicator's lock."""

    class Sends(numpy.ndarray):
        def __del__(self):
            if self.base is not None and self.base.size == 32:
                alone.isend(b"from a destructor", 0, 50)

    alone.isend(numpy.zeros(32, "u1").view(Sends), 0, 1)
    request = alone.irecv(numpy.zeros(32, "u1").view(Sends), 0, 2)
    del request
    alone.recv(bytearray(32), 0, 1, timeout=PATIENCE)
    gc.collect()
    assert alone.recv(bytearray(32), 0, 50, timeout=PATIENCE) == 17


@pytest.mark.parametrize("task", ["streams", "streams-by-handle"])
def test_streams_send_and_wait(pair, task):
    comm, process = pair(task, streams=True)
    streams.exchange(comm, task == "streams-by-handle")
    comm.finish(PATIENCE)
    assert process.wait(PATIENCE) == 0


def test_streams_that_wait_too_long(pair):
    comm, process = pair("stream-silent", streams=True)
    channel = comm.device_channel("sim:0", wait_timeout=2)
    assert process.stdout.readline() == "here\n"
    stream = warpwire.Stream("sim:0")
    memory = channel.register(warpwire.alloc(4096, "sim:0"))
    receive = channel.recv(memory, 1)
    assert not receive.done
    with pytest.raises(warpwire.Timeout, match="still in progress"):
        receive.wait(0.01)
    receive.wait_on_stream(stream)
    with pytest.raises(warpwire.Timeout, match="still busy"):
        stream.synchronize(0.01)
    stream.synchronize(PATIENCE)
    with pytest.raises(warpwire.Timeout):
        channel.check()
    before = time.monotonic()
    with pytest.raises(warpwire.Timeout, match="within 2.0s"):
        receive.wait(PATIENCE)
    assert time.monotonic() - before < PATIENCE / 2, "it has failed, and nobody waits for it"


def test_a_rank_that_dies_releases_streams(pair):
    comm, process = pair("stream-silent", streams=True)
    channel = comm.device_channel("sim:0")
    assert process.stdout.readline() == "here\n"
    stream = warpwire.Stream("sim:0")
    channel.recv(channel.register(warpwire.alloc(4096, "sim:0")), 1).wait_on_stream(stream)
    process.kill()
    stream.synchronize(PATIENCE)
    with pytest.raises(warpwire.PeerLost):
        channel.check()


def test_wrong_arguments_of_channels(alone):
    with pytest.raises(warpwire.InvalidArgument, match="without streams") as caught:
        alone.device_channel("sim:0")
    assert "streams=True" in caught.value.fix
    with warpwire.Comm(0, 1, "127.0.0.1:0", streams=True) as comm:
        with pytest.raises(warpwire.InvalidArgument, match="tpu:0"):
            comm.device_channel("tpu:0")
        with pytest.raises(warpwire.InvalidArgument):
            comm.device_channel("sim:0", wait_timeout=-1)
        channel = comm.device_channel("sim:0")
        stream = warpwire.Stream("sim:0")
        memory = channel.register(bytearray(100))
        assert len(memory[10:20]) == 10 and memory.nbytes == 100
        with pytest.raises(warpwire.InvalidArgument, match="step is 2"):
            memory[0:10:2]
        with pytest.raises(TypeError, match="range of bytes"):
            memory[3]
        with pytest.raises(warpwire.Unsupported, match="own rank"):
            channel.send(memory, 0, stream)
        with pytest.raises(warpwire.InvalidArgument, match="1 ranks"):
            channel.recv(memory, 1)
        with pytest.raises(TypeError):
            channel.send(bytearray(4), 0, stream)
        with pytest.raises(TypeError, match="is no stream"):
            channel.barrier("text")
        with pytest.raises(warpwire.InvalidArgument, match="no stream of this number"):
            channel.barrier((9999, "sim:0"))
        with pytest.raises(warpwire.Error, match="read-only"):
            channel.register(b"constant")
        with pytest.raises(warpwire.Unsupported, match="memory of the host"):
            stream.fill(warpwire.alloc(10), 1)
        with pytest.raises(warpwire.Error):
            stream.copy(warpwire.alloc(10, "sim:0"), warpwire.alloc(11, "sim:0"))
        with pytest.raises(warpwire.InvalidArgument, match="tpu:0"):
            warpwire.Stream("tpu:0")
        channel.barrier(stream)
        stream.synchronize(PATIENCE)
