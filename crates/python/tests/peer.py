"""An agent that registers memory, prints its metadata, and does what its standard input says.

    peer.py NAME [host|numpy|sim:0] [LINK] [BYTES]
"""

import sys

import numpy
import warpwire

name, kind, link, size, *_ = [*sys.argv[1:], *["numpy", "auto", "1048576"][len(sys.argv) - 2 :]]
agent = warpwire.Agent(name, link=link)
if kind == "numpy":
    memory = numpy.zeros(int(size), "u1")
else:
    memory = warpwire.alloc(int(size), kind)
registered = agent.register(memory)
view = memory.window().view if kind.startswith("sim") else memoryview(memory)
print(agent.metadata.hex(), flush=True)
for line in sys.stdin:
    match line.split():
        case ["fill", value]:
            view[:] = bytes([int(value)]) * len(view)
            answer = "filled"
        case ["bytes", start, end]:
            answer = bytes(view[int(start) : int(end)]).hex()
        case ["notification"]:
            arrived = agent.wait_notification(30)
            answer = f"{arrived.sender} {arrived.data.hex()}" if arrived else "none"
        case ["add", metadata]:
            agent.add_peer(bytes.fromhex(metadata))
            answer = "added"
        case ["notify", peer, data]:
            agent.notify(agent.peer(peer), data.encode()).wait(30)
            answer = "notified"
        case ["deregister"]:
            registered.deregister()
            answer = "deregistered"
        case other:
            answer = f"unknown: {other}"
    print(answer, flush=True)
