"""1 MiB from one process to another with NIXL, by its backend UCX."""

import numpy
from nixl_cu12._api import nixl_agent
from sides import LEN, check_time, pattern, run, verify


def target(channel):
    memory = numpy.zeros(LEN, "u1")
    agent = nixl_agent("target")
    registered = agent.register_memory([(memory.ctypes.data, LEN, 0, "")], "DRAM")
    channel.send_bytes(agent.get_agent_metadata())
    channel.send_bytes(agent.get_serialized_descs(registered.trim()))
    while b"written" not in agent.get_new_notifs().get("initiator", []):
        check_time("receive the notification")
    verify(memory)
    agent.deregister_memory(registered)


def initiator(channel):
    memory = pattern()
    agent = nixl_agent("initiator")
    registered = agent.register_memory([(memory.ctypes.data, LEN, 0, "")], "DRAM")
    peer = agent.add_remote_agent(channel.recv_bytes())
    theirs = agent.deserialize_descs(channel.recv_bytes())
    transfer = agent.initialize_xfer("WRITE", registered.trim(), theirs, peer, b"written")
    state = agent.transfer(transfer)
    while state == "PROC":
        check_time("write")
        state = agent.check_xfer_state(transfer)
    if state != "DONE":
        raise RuntimeError(f"the transfer ended as {state}")
    agent.release_xfer_handle(transfer)
    agent.remove_remote_agent(peer)
    agent.deregister_memory(registered)


run(target, initiator)
