"""Agents of the tests use the loopback address. Peers are other processes: `peer` runs peer.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

os.environ["WARPWIRE_ADDRESS"] = "127.0.0.1"

import warpwire  # noqa: E402  (after the address is set)

#: Long enough for a busy machine; nothing waits so long when it works.
PATIENCE = 30


class Process:
    """An agent in another process, which does what it is told, line by line."""

    def __init__(self, name: str, *arguments: str) -> None:
        program = Path(__file__).with_name("peer.py")
        command = [sys.executable, str(program), name, *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.metadata = bytes.fromhex(self.line())

    def line(self) -> str:
        line = self.process.stdout.readline()
        assert line, f"the peer has ended with {self.process.wait(PATIENCE)}"
        return line.strip()

    def ask(self, *words: object) -> str:
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.line()

    def stop(self) -> None:
        """Stops it; returns when all its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        deadline = time.monotonic() + PATIENCE
        while any(" T " not in (task / "stat").read_text() for task in tasks.iterdir()):
            assert time.monotonic() < deadline, "it does not stop"

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)


@pytest.fixture
def process():
    """Starts peers, and ends them after the test."""
    started: list[Process] = []

    def start(name: str, *arguments: str) -> Process:
        started.append(Process(name, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(PATIENCE)
        one.process.stdin.close()
        one.process.stdout.close()


@pytest.fixture
def agents():
    """Opens agents, and closes them after the test."""
    opened: list[warpwire.Agent] = []

    def open_agent(name: str, **options: object) -> warpwire.Agent:
        opened.append(warpwire.Agent(name, **options))
        return opened[-1]

    yield open_agent
    for agent in opened:
        agent.close()
