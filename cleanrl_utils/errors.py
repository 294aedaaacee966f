"""Errors of the tools as one line on stderr, and the command that installs what is missing.

    with explain(f"read {path}"):
        run = json.loads(path.read_text())

prints `cannot read runs/x/run.json: Expecting value: line 1 column 1 (char 0)` and exits with 1.
CLEANRL_TRACEBACK=1 shows the traceback instead.
"""

import importlib.util
import os
import re
from contextlib import contextmanager
from pathlib import Path

BASE = (
    "filelock gymnasium moviepy numpy psutil pydantic rich tensorboard torch tqdm tyro wandb yaml"
)
JAX = "chex flax gymnax jax jaxlib optax six"
EXTRAS = {  # extra of pyproject.toml: modules that it installs
    "atari": "ale_py cv2",
    "envpool": "envpool",
    "procgen": "envpool",
    "mujoco": "mujoco",
    "dm_control": "dm_control shimmy",
    "pettingzoo": "ale_py cv2 multi_agent_ale_py pettingzoo",
    "minigrid": "minigrid",
    "jax": JAX,
    "brax": f"{JAX} brax mujoco mujoco_playground",
    "jaxtari": f"{JAX} jaxtari",
    "craftax": f"{JAX} craftax",
    "marl": f"{JAX} jaxmarl jaxtyping",
    "docs": "jinja2 matplotlib mkdocs scipy",
    "optuna": "matplotlib optuna psycopg sqlalchemy",
    "cluster": "boto3 botocore ray",
    "trackio": "trackio",
    "hub": "huggingface_hub matplotlib safetensors",
    "export": "onnx onnxruntime onnxscript safetensors",
    "dev": "pytest",
}
# errors whose message is meaningless without their name
SAY_LITTLE = LookupError | AssertionError | ImportError | TypeError | AttributeError


@contextmanager
def explain(attempt):
    """Report an error inside as one line, `cannot <attempt>: <reason>`."""
    try:
        yield
    except Exception as error:
        if os.environ.get("CLEANRL_TRACEBACK"):
            raise
        raise SystemExit(printable(f"cannot {attempt}: {one_line(error)}")) from None


def one_line(error):
    """The message of an error, on one line."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return missing(error.name)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    message = shorten(str(error))
    if message and not isinstance(error, SAY_LITTLE):
        return message
    return f"{type(error).__name__}: {message}".removesuffix(": ")


def printable(text):
    """Text with ? for line ends, cursor movement and bidirectional marks."""
    return "".join(character if character.isprintable() else "?" for character in text)


def plain(value, most=120):
    """A value on one line, without control characters and not longer than most."""
    text = printable(str(value)[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"


def shorten(text, length=400):
    """Text on one line. Where it is too long, the middle is left out: the value is at an end."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 105]} ... {text[-100:]}"


def need(*modules):
    """End with the install command of the first of these modules that is missing."""
    for name in modules:
        if not importlib.util.find_spec(name):
            raise SystemExit(missing(name))


def missing(module, file=None):
    """One line on a module that cannot be imported, by an algorithm file if that is known."""
    name = module.partition(".")[0]
    command = install_command(name, file)
    return f"{name} is not installed: {command}" if command else f"there is no module {name}"


def install_command(module, file=None):
    """The command that installs a module, with all that the file needs; "" if it is not ours."""
    candidates = [extra for extra, modules in EXTRAS.items() if module in modules.split()]
    imported, stem = set(), ""
    if file is not None and Path(file).is_file():
        text = Path(file).read_text(errors="replace")
        imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.M))
        stem = Path(file).stem

    def fit(extra):
        return len(imported & set(EXTRAS[extra].split())), extra in stem

    if not candidates and module not in BASE.split():
        return ""
    extra = f"-{max(candidates, key=fit)}" if candidates else ""
    return f"pip install -r requirements/requirements{extra}.txt"
