"""cleanrl_utils.errors: one line for each error, with its value, and the right install command."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from cleanrl_utils import errors
from tests.harness import FILES, ROOT


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        (lambda: json.loads("{"), "cannot do it: Expecting property name"),
        (lambda: {}["seed"], "cannot do it: KeyError: 'seed'"),
        (lambda: Path("/no/such").read_text(), "cannot do it: No such file or directory: /no/such"),
        (lambda: int("x\ny"), r"cannot do it: invalid literal for int() with base 10: 'x\ny'"),
        (lambda: __import__("boto9"), "cannot do it: there is no module boto9"),
    ],
)
def test_an_error_is_one_line_with_its_value(raises, message):
    with pytest.raises(SystemExit) as stopped, errors.explain("do it"):
        raises()
    assert str(stopped.value).startswith(message) and "\n" not in str(stopped.value)


def test_a_long_error_keeps_its_value():
    text = errors.shorten("validation failed:\n" + "x" * 5000 + "\n  input_value='ten'")
    assert len(text) <= 400
    assert text.startswith("validation failed: xx") and text.endswith("input_value='ten'")


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("CLEANRL_TRACEBACK", "1")
    with pytest.raises(KeyError), errors.explain("do it"):
        {}["seed"]


@pytest.mark.parametrize(
    ("module", "file", "extra"),
    [
        ("torch", "ppo", ""),
        ("flax", "dqn_jax", "-jax"),
        ("jax", "ppo_continuous_action_jax", "-brax"),
        ("brax", "ppo_continuous_action_jax", "-brax"),
        ("jaxtari", "ppo_jaxtari_jax", "-jaxtari"),
        ("craftax", "ppo_jax", "-craftax"),
        ("jax", "ppo_jaxtari_jax", "-jaxtari"),
        ("jaxmarl", "ippo_jax", "-marl"),
        ("flax", "mappo_rnn_jax", "-marl"),
        ("envpool", "ppo_procgen", "-procgen"),
        ("envpool", "ppg_procgen", "-procgen"),
        ("envpool", "ppo_atari_envpool", "-envpool"),
        ("cv2", "dqn_atari", "-atari"),
        ("cv2", "ppo_pettingzoo_ma_atari", "-pettingzoo"),
        ("mujoco", "ddpg_continuous_action", "-mujoco"),
        ("ray", None, "-cluster"),
        ("matplotlib", None, "-docs"),
        ("scipy", None, "-docs"),
    ],
)
def test_the_right_extra(module, file, extra):
    command = errors.install_command(module, file and FILES[file])
    assert command == f"pip install -r requirements/requirements{extra}.txt"
    assert (ROOT / command.split()[-1]).is_file()


def test_every_import_of_an_algorithm_file_is_in_the_extra_that_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(errors.EXTRAS) <= set(project["optional-dependencies"])
    ours = {module for modules in errors.EXTRAS.values() for module in modules.split()}
    for file in FILES.values():
        imported = set(re.findall(r"^(?:import|from) (\w+)", file.read_text(), re.M))
        unknown = imported - set(sys.stdlib_module_names) - ours - {*errors.BASE.split()}
        assert not unknown, f"{file.name}: which extra installs {unknown}?"


def test_one_style_of_install_command():
    """Only requirements/ has the tested versions; `cleanrl` on PyPI is another project."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for path in [*pages, *ROOT.glob("cleanrl/*.py"), *ROOT.glob("cleanrl_utils/**/*.py")]:
        other = re.findall(r".*pip install (?:-e|['\"]?cleanrl).*", path.read_text())
        assert not other, f"{path.name}: {other}"
