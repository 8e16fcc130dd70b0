"""1 MiB from one process to another with warpwire.Agent."""

import numpy
import warpwire
from sides import LEN, TIMEOUT, pattern, run, verify


def target(channel):
    memory = numpy.zeros(LEN, "u1")
    with warpwire.Agent("target") as agent, agent.register(memory):
        channel.send_bytes(agent.metadata)
        if agent.wait_notification(timeout=TIMEOUT) is None:
            raise TimeoutError("no notification of the initiator")
        verify(memory)


def initiator(channel):
    with warpwire.Agent("initiator") as agent, agent.register(pattern()) as memory:
        peer = agent.add_peer(channel.recv_bytes())
        agent.write(peer, memory, peer.memory[0], notify=b"written").wait(timeout=TIMEOUT)


run(target, initiator)
