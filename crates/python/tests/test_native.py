"""The native files of the wheel: there, loadable, and the ones that programs look for."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warpwire

LIBRARIES = ["gdrapi", "ibverbs", "rdmacm", "ibpaths", "nccl_plugin"]


@pytest.fixture
def has_native():
    if not Path(warpwire.__file__).with_name("native").exists():
        if "python" in os.environ.get("WARPWIRE_REQUIRE", "").split(","):
            pytest.fail("the installed package has no native files")
        pytest.skip("skipped: this package was not built by tools/wheel")


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_can_be_loaded(has_native, name):
    path = getattr(warpwire, name)()
    program = f"import ctypes; ctypes.CDLL({path!r})"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_libraries_have_their_functions(has_native):
    names = {"gdrapi": "gdr_open", "ibverbs": "ibv_open_device", "nccl_plugin": "ncclNetPlugin_v8"}
    for name, function in names.items():
        assert getattr(ctypes.CDLL(getattr(warpwire, name)()), function)


def test_the_command_runs(has_native):
    for command in ([warpwire.command()], [sys.executable, "-m", "warpwire"]):
        ended = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0 and warpwire.__version__ in ended.stdout, ended
    ended = subprocess.run([*command, "no-such-command"], capture_output=True, timeout=60)
    assert ended.returncode != 0


def test_doctor():
    text, usable = warpwire.doctor()
    assert usable and "simulated GPU" in text
    ended = subprocess.run(
        [sys.executable, "-m", "warpwire", "doctor"], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0 and "simulated GPU" in ended.stdout


def test_files_that_are_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(warpwire._native, "_FOLDER", tmp_path)
    for name in [*LIBRARIES, "command"]:
        with pytest.raises(warpwire.Unavailable, match="tools/wheel") as caught:
            getattr(warpwire, name)()
        assert caught.value.why.endswith("does not exist")
