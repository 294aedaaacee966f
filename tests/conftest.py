import atexit
import functools
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

# before PyTorch is imported anywhere: one thread for each of pytest's workers, and none of their
# windows or sounds
os.environ.update(
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy"
)
os.environ.setdefault("WANDB_MODE", "offline")
# a shell lets what it starts in the background ignore Ctrl+C, and so would what tests start
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # what all workers compile they compile once
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption(
        "--file", help="test this copy instead: pytest tests/test_ppo.py --file my_ppo.py"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Importing all tests makes a million objects that stay: none is garbage to look for."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def group(nodeid):
    """Tests that one worker runs one after the other, because they share fixtures or programs."""
    module, _, test = nodeid.partition("::")
    if "test_mutations" in module:
        return f"{module}::{test.split(':')[0]}"  # those of one file
    return "JAX" if "_jax" in module else module  # what JAX compiles is compiled once


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = group
    return scheduler


def pytest_collection_modifyitems(items):
    """Where a test module is that of two files, a new file runs the tests of its PARENT only."""
    for item in list(items):
        module, parent = item.module.__name__, getattr(item.module, "PARENT", None)
        parameters = item.callspec.params if parent and hasattr(item, "callspec") else {}
        if parameters.get("file") and parameters["file"].stem != parent:
            items.remove(item)
        elif parameters.get("file"):
            parameters["file"] = copy_new_file(module, parent)


@functools.cache
def copy_new_file(module, parent):
    """What suits a file, such as its probes, goes by its name: a new file is called as its parent,
    in a folder of its own."""
    folder = tempfile.mkdtemp(prefix="copy-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(shutil.copy(path_of(module), Path(folder, f"{parent}.py")))


def path_of(module):
    name = module.rpartition(".")[2].removeprefix("test_")
    return Path(__file__).resolve().parent.parent / "cleanrl" / f"{name}.py"


@pytest.fixture
def file(request):
    """The algorithm file that a test module is named after, or the copy given with --file."""
    if path := request.config.getoption("file"):
        return Path(path).resolve()
    module, parent = request.module.__name__, getattr(request.module, "PARENT", None)
    return copy_new_file(module, parent) if parent else path_of(module)
