"""Two processes: one writes into an array of the other, and tells it when the data is there."""

import multiprocessing

import numpy
import warpwire


def receiver(pipe):
    with warpwire.Agent("bob") as bob:
        target = numpy.zeros(1 << 20, "u1")
        memory = bob.register(target)
        pipe.send(bob.metadata)  # bytes: any store, socket or file carries them
        sender, what = bob.wait_notification(timeout=30)
        print(f"bob: {sender} wrote {what.decode()}: {numpy.count_nonzero(target == 7)} bytes")
        pipe.recv()  # alice needs this process no more
        memory.deregister()


def main():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=receiver, args=(there,))
    process.start()
    with warpwire.Agent("alice") as alice:
        source = alice.register(numpy.full(1 << 20, 7, "u1"))
        peer = alice.add_peer(here.recv())
        alice.write(peer, source, peer.memory[0], notify=b"block 7").wait(timeout=30)
        print(f"alice: done, by {peer.path[0].split()[0]}")  # path says more
        here.send("done")
        process.join()
    raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
