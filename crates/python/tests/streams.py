"""Messages of streams between two ranks, on the simulated GPU: for the tests and for rank.py."""

import warpwire

LEN = 100_000
ROUNDS = 20


def exchange(comm: warpwire.Comm, by_handle: bool) -> None:
    """In each round the stream fills memory, sends it, overwrites it, and copies what arrived."""
    peer = 1 - comm.rank
    channel = comm.device_channel("sim:0")
    assert channel.device == "sim:0"
    out, into, seen = (warpwire.alloc(LEN, "sim:0") for _ in range(3))
    own = warpwire.Stream("sim:0")
    stream = (own.number, "sim:0") if by_handle else own
    sent, received = channel.register(out), channel.register(into)
    for number in range(1, ROUNDS + 1):
        receive = channel.recv(received, peer)
        own.fill(out, number + comm.rank)
        send = channel.send(sent[: LEN // 2], peer, stream)
        send.wait_on_stream(stream)
        receive.wait_on_stream(stream)
        own.fill(out, 255)
        own.copy(seen, into)
        channel.ready(peer, stream)
        channel.wait_ready(peer, stream)
        channel.barrier(stream)
        own.synchronize(30)
        assert seen.read(LEN // 2) == bytes([number + peer]) * (LEN // 2)
        assert not any(seen.read(LEN // 2, LEN // 2))
        assert receive.done and receive.wait(0) == LEN // 2 and send.done
    channel.check()
    assert own.idle
    comm.barrier(30)
