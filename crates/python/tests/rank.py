"""A rank of a test: joins by the environment, or by `rank.py TASK RANK SIZE ADDRESS`."""

import sys
import time

import numpy
import streams
import warpwire

task, *place = sys.argv[1:]
if place:
    own = task.startswith("stream")
    comm = warpwire.Comm(int(place[0]), int(place[1]), place[2], timeout=30, streams=own)
else:
    comm = warpwire.Comm.from_env(timeout=30)


def fill(rank: int, size: int) -> numpy.ndarray:
    return numpy.random.default_rng(rank).integers(0, 256, size, "u1")


match task:
    case "exchange":
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        for tag, size in enumerate([1, 8192, 8193, 3_000_000]):
            into = numpy.zeros(size + 5, "u1")
            receive = comm.irecv(into, before, tag)
            assert comm.send(fill(comm.rank, size), after, tag, timeout=30) == size
            assert receive.wait(30) == size and receive.tag == tag
            assert (into[:size] == fill(before, size)).all() and not into[size:].any()
        everyone = numpy.full(1000, comm.rank + 1, "i8")
        comm.all_reduce(everyone, timeout=30)
        assert (everyone == comm.size * (comm.size + 1) // 2).all()
        counts = numpy.full((comm.size, 500), comm.rank + 1, "i8")
        comm.reduce_scatter(counts, timeout=30)
        assert (counts[comm.rank] == comm.size * (comm.size + 1) // 2).all()
        comm.all_gather(counts, timeout=30)
        assert (counts == comm.size * (comm.size + 1) // 2).all()
        parts = numpy.arange(comm.size, dtype="u4") + 100 * comm.rank
        got = numpy.zeros_like(parts)
        comm.all_to_all(parts, got, timeout=30)
        assert (got == 100 * numpy.arange(comm.size) + comm.rank).all()
        shared = fill(comm.rank, 100_000)
        comm.broadcast(shared, root=comm.size - 1, timeout=30)
        assert (shared == fill(comm.size - 1, 100_000)).all()
        comm.barrier(30)
        comm.finish(30)
        print(f"rank {comm.rank} of {comm.size} done", flush=True)
    case "echo":
        # Sends back what rank 0 sends, until that is empty.
        into = bytearray(4 << 20)
        while count := comm.recv(into, 0, timeout=60):
            comm.send(memoryview(into)[:count], 0, timeout=60)
        comm.finish(30)
    case "streams" | "streams-by-handle":
        streams.exchange(comm, task == "streams-by-handle")
        comm.finish(30)
    case "stream-silent":
        comm.device_channel("sim:0")
        print("here", flush=True)
        time.sleep(60)
    case "silent":
        print("here", flush=True)
        time.sleep(60)
