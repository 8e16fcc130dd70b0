"""The Python code blocks of docs/python.md, each as a program of its own, and the examples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

START = Path(__file__).parents[3] / "docs" / "start.md"
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
PAGE = Path(__file__).parents[3] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_has_blocks():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block(number):
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKS[number]], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, f"{BLOCKS[number]}\n{ended.stderr}"


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path):
    # Without buffers, a line and its end are two writes, and those of two processes mix.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        [sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    # The page shows what it prints; two processes print in any order.
    command = re.escape(f"$ python3 crates/python/examples/{path.name}")
    shown = re.search(rf"^{command}\n(.*?)^```$", START.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert shown, f"docs/start.md does not show {path.name}"
    assert sorted(ended.stdout.splitlines()) == sorted(shown[1].splitlines())
