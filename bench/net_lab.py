"""The namespaces of tools/net-lab, for the programs of this folder."""
import importlib.machinery
import importlib.util
import pathlib
import sys


def load():
    sys.dont_write_bytecode = True
    path = pathlib.Path(__file__).resolve().parent.parent / "tools" / "net-lab"
    loader = importlib.machinery.SourceFileLoader("net_lab_tool", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module
