"""The Python code blocks of docs/python.md, each as a program of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
