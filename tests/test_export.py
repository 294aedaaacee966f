"""cleanrl_utils.export: what is exported acts as load_policy does, over a thousand observations."""

import functools
import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from cleanrl_utils import enjoy, export
from tests.harness import FILES, ROOT, only_run, train
from tests.test_contract import TORCH, iteration, small

pytest.importorskip("onnxruntime", reason="needs the extra export")
FAMILIES = ["ppo", "ppo_continuous_lstm", "td3_continuous_action", "c51"]  # one of each
NOT_EXPORTED = {"ppo_trxl": "a Transformer-XL memory", "ppo_dict": "Dict observations"}
OBSERVATIONS = 1000


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Each export reads all of ONNX's operators anew, which takes most of its time: here, once.
    What the export compares itself, in the tool for 1,000 steps, is compared again below."""
    from torch.onnx._internal.exporter._registration import onnxscript_apis

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            onnxscript_apis, "get_torchlib_ops", functools.cache(onnxscript_apis.get_torchlib_ops)
        )
        patch.setattr(export, "STEPS", 50)
        yield


def run_export(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["export", *map(str, words)])
    export.main()


def make_run(file, folder):
    """A short run whose weights are then doubled, so that its outputs are far from equal."""
    train(file, folder, *small(file, "--total-timesteps", iteration(file)))
    run = only_run(folder)
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    for name in export.NETWORKS:
        for parameter, x in checkpoint.get(name, {}).items():
            if "moments" not in parameter and parameter not in ("atoms", "taus", "sizes"):
                checkpoint[name][parameter] = 2 * x
    torch.save(checkpoint, run / "checkpoint.pt")
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each file that is asked for, made once: runs("ppo")."""
    made = {}

    def run_of(stem):
        if stem not in made:
            made[stem] = make_run(FILES[stem], tmp_path_factory.mktemp(stem))
        return made[stem]

    return run_of


def observations(space, rng):
    """A thousand of them, of the environment's shape and type."""
    shape = (OBSERVATIONS, *space.shape)
    if space.dtype == np.uint8:
        return rng.integers(256, size=shape, dtype=np.uint8)
    return rng.normal(size=shape).astype(space.dtype)


def load(run):
    """The policy of a run, and the list of what it last gave to its file's sample()."""
    told = enjoy.read_run(run)
    algorithm = runpy.run_path(str(FILES[told["file"].removesuffix(".py")]))
    envs = algorithm["make_envs"](algorithm["Args"](**told["args"]), 2)
    policy = algorithm["load_policy"](enjoy.load_checkpoint(run), envs)
    function, given = inspect.unwrap(policy), []
    sample = function.__globals__.get("sample")

    def remember(*parameters):
        given[:] = parameters
        return sample(*parameters)

    function.__globals__["sample"] = remember
    return envs, policy, inspect.getclosurevars(function).nonlocals, given


def truth(policy, networks, given, envs, obs, is_last):
    """The action distribution or the Q-values behind the actions that load_policy's function takes,
    and the actions themselves where it does not sample."""
    given.clear()
    actions = policy(torch.from_numpy(obs) if hasattr(envs, "device") else obs, is_last)
    if given and isinstance(given[0], list):
        return {"log_probs": torch.cat(given[0], -1)}
    if len(given) == 2:
        return {"mean": given[0], "log_std": given[1].expand_as(given[0])}
    if given:
        return {"log_probs": given[0].log_softmax(-1)}
    expected = {"action": torch.from_numpy(actions)}
    if hasattr(networks.get("q_network"), "lstm"):
        return expected  # its state is that after this step by now
    if "q_network" in networks:
        network, x = networks["q_network"], torch.from_numpy(obs)
        x = x if x.dtype == torch.uint8 else x.float()
        is_distributional = hasattr(network, "atoms") or hasattr(network, "taus")
        return expected | {"q_values": network.q_values(x) if is_distributional else network(x)}
    output = networks["actor"](torch.from_numpy(obs).float())
    if isinstance(output, tuple):
        expected |= {"mean": output[0], "log_std": output[1]}
    return expected


def greedy(outputs, envs):
    """The action that follows from the distribution."""
    space = envs.single_action_space
    if hasattr(space, "nvec"):
        parts = np.split(outputs["log_probs"], np.cumsum(space.nvec)[:-1], -1)
        return np.stack([part.argmax(-1) for part in parts], -1) + space.start.flatten()
    if "mean" in outputs:
        return outputs["mean"].clip(space.low, space.high)
    scores = outputs["q_values" if "q_values" in outputs else "log_probs"]
    return scores.argmax(-1) + space.start


def check_outputs(expected, outputs, envs):
    expected = {name: x.detach().numpy() for name, x in expected.items()}
    for name, x in expected.items():
        assert outputs[name].dtype == x.dtype and outputs[name].shape == x.shape
        np.testing.assert_allclose(outputs[name], x, rtol=1e-4, atol=1e-4, err_msg=name)
    if "action" not in expected:  # load_policy samples
        assert np.array_equal(outputs["action"], greedy(outputs, envs))


@pytest.mark.parametrize(
    "stem",
    [
        pytest.param(x, marks=[] if x in FAMILIES else [pytest.mark.slow])
        for x in TORCH
        if x not in NOT_EXPORTED
    ],
)
def test_onnx_is_load_policy(stem, runs, monkeypatch, capsys):
    """ONNX Runtime and load_policy agree on the distribution and on the greedy action."""
    from onnxruntime import InferenceSession

    run, rng = runs(stem), np.random.default_rng(0)
    path = run.parent / "policy.onnx"
    run_export(monkeypatch, run, path)
    assert {x.name for x in path.parent.iterdir() if x.is_file()} == {"policy.onnx"}
    envs, policy, networks, given = load(run)
    session = InferenceSession(path)
    names = [x.name for x in session.get_outputs()]
    assert f"outputs: {', '.join(names)}\n" in capsys.readouterr().out
    about = session.get_modelmeta().custom_metadata_map
    assert about["file"] == f"{stem}.py" and about["action_space"] == str(envs.single_action_space)

    obs = observations(envs.single_observation_space, rng)
    if len(session.get_inputs()) == 1:
        outputs = dict(zip(names, session.run(None, {"obs": obs}), strict=True))
        is_last = np.zeros(OBSERVATIONS, dtype=bool)
        check_outputs(truth(policy, networks, given, envs, obs, is_last), outputs, envs)
        return
    hidden = cell = np.zeros((1, 2, 128), np.float32)  # a recurrent policy in two environments
    for pair in obs.reshape(-1, 2, *obs.shape[1:]):
        is_last = rng.random(2) < 0.05
        values = session.run(None, {"obs": pair, "hidden": hidden, "cell": cell})
        outputs = dict(zip(names, values, strict=True))
        check_outputs(truth(policy, networks, given, envs, pair, is_last), outputs, envs)
        hidden, cell = (outputs[x] * ~is_last[:, None] for x in ("next_hidden", "next_cell"))


@pytest.mark.parametrize(
    "stem",
    [
        "ppo_continuous_action",
        "c51",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("ppo", "qrdqn", "td3_continuous_action")
        ),
    ],
)
def test_json_and_safetensors_hold_the_same_policy(stem, runs, tmp_path, monkeypatch):
    from safetensors import safe_open

    run = runs(stem)
    run_export(monkeypatch, run, tmp_path / "policy.json")
    run_export(monkeypatch, run, tmp_path / "policy.safetensors")
    envs, policy, networks, given = load(run)
    obs = observations(envs.single_observation_space, np.random.default_rng(0))
    expected = truth(policy, networks, given, envs, obs, np.zeros(OBSERVATIONS, dtype=bool))
    expected = {name: x.detach().numpy() for name, x in expected.items()}
    action = export.run_json(tmp_path / "policy.json")(obs)["action"]
    greedy_action = expected["action"] if "action" in expected else greedy(expected, envs)
    np.testing.assert_allclose(action, greedy_action, rtol=1e-4, atol=1e-4)
    (network,) = (networks[name] for name in export.NETWORKS if name in networks)
    weights = network.state_dict()
    with safe_open(tmp_path / "policy.safetensors", "numpy") as file:
        assert file.metadata()["file"] == f"{stem}.py"
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    own = {"low", "high", "start"}
    assert not any(name.startswith("critic") for name in tensors)
    for name in tensors.keys() - own:
        assert np.array_equal(tensors[name], weights[name])
    layers = json.loads((tmp_path / "policy.json").read_text())["layers"]
    for layer in layers:  # every number, without loss
        weight = np.float32(layer["weight"])
        assert any(np.array_equal(weight, x) for x in tensors.values())


def changed_copy(folder, stem, old, new):
    source = FILES[stem].read_text()
    assert source.count(old) == 1
    path = folder / f"{stem}.py"
    path.write_text(source.replace(old, new))
    return path


def test_a_policy_that_acts_otherwise_is_refused(runs, tmp_path, monkeypatch, capsys):
    """Nothing is written when load_policy does something that the graph does not."""
    copy = changed_copy(
        tmp_path, "ppo_continuous_action", "normalized.clip(-10, 10)", "normalized.clip(-0.1, 0.1)"
    )
    run = runs("ppo_continuous_action")
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^action differs from load_policy's by .* cannot be exp"):
        run_export(monkeypatch, run, tmp_path / "policy.json", "--file", copy)
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]
    warning = "warning: ppo_continuous_action.py has changed since this run started\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize("name", ["action", "log_probs"])
def test_what_is_not_a_number_differs(name):
    expected = {"log_probs": np.log([[0.2, 0.8]]), "action": np.array([[0.5]])}
    outputs = expected | {name: np.full_like(expected[name], np.nan)}
    assert export.largest_difference(expected, dict(expected)) == (0, "")
    difference, worst = export.largest_difference(expected, outputs)
    assert np.isnan(difference) and worst == name


def test_a_runs_own_copy_is_not_executed(runs, tmp_path, monkeypatch, capsys):
    run = runs("ppo")
    capsys.readouterr()
    (run / "ppo.py").write_text("raise RuntimeError('executed')")
    run_export(monkeypatch, run, tmp_path / "policy.json")
    assert capsys.readouterr().err == "" and (tmp_path / "policy.json").exists()


def test_bad_input_gets_one_line(runs, tmp_path, monkeypatch):
    run = runs("ppo")
    (tmp_path / "folder.onnx").mkdir()
    for words, line in {
        (run, "policy.pt"): r"policy.pt does not end in \.onnx, \.safetensors, \.json",
        (run, tmp_path / "none" / "policy.onnx"): "there is no folder",
        (run, tmp_path / "folder.onnx"): "folder.onnx is a folder",
        (tmp_path, "policy.onnx"): "/run.json: No such file",
        (run, tmp_path / "x.json", "--file", tmp_path / "none.py"): "there is no .*none.py",
        (runs("ppo_continuous_lstm"), tmp_path / "x.json"): "multilayer perceptrons only",
    }.items():
        with pytest.raises(SystemExit, match=line) as error:
            run_export(monkeypatch, *words)
        assert len(str(error.value).splitlines()) == 1
    (tmp_path / "run.json").write_text(json.dumps({"file": "ppo_jax.py", "args": {}}))
    (tmp_path / "checkpoint.msgpack").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"a run of ppo_jax\.py: JAX files cannot be exported"):
        run_export(monkeypatch, tmp_path, tmp_path / "x.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SystemExit, match=r"onnxruntime is not installed: .*requirements-export"):
        run_export(monkeypatch, run, tmp_path / "x.onnx")
    assert not list(tmp_path.glob("*x.*"))


@pytest.mark.parametrize("stem", NOT_EXPORTED)
def test_other_policies_get_one_line(stem, runs, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=f"{NOT_EXPORTED[stem]} cannot be exported"):
        run_export(monkeypatch, runs(stem), tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


def test_deployed_without_our_code(runs, tmp_path, monkeypatch):
    """The programs of docs/export.md, in a folder with the exported file and nothing else."""
    page = (ROOT / "docs" / "export.md").read_text()
    plain, recurrent, from_json = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len([line for line in plain.splitlines() if line]) <= 15
    for stem, output, code in (
        ("ppo", "policy.onnx", plain),
        ("ppo_continuous_lstm", "policy.onnx", recurrent),
        ("ppo", "policy.json", from_json),
    ):
        exported = runs(stem).parent / output  # by a test above, if it ran
        if not exported.exists():
            run_export(monkeypatch, runs(stem), exported)
        shutil.copy(exported, tmp_path)
        code += "import sys\nassert not {'torch', 'cleanrl', 'cleanrl_utils'} & {*sys.modules}\n"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        what, value = done.stdout.split()
        assert what == "return" or value in ("0", "1")
        if what == "return":  # the page's policies are greedy, so that episodes can be repeated
            assert float(value) == pytest.approx(greedy_return(runs(stem)), rel=1e-3)


def greedy_return(run):
    """Of the episode from seed 1, by load_policy."""
    _, envs, policy = enjoy.make_agent(run, enjoy.load_checkpoint(run), deterministic=True)
    obs, _ = envs.reset(seed=1)
    is_last, infos = np.zeros(1, dtype=bool), {}
    while "episode" not in infos:
        obs, _, terminated, truncated, infos = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
    return infos["episode"]["r"][0]
