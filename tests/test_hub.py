"""cleanrl_utils.hub: pushed models play the same when pulled; hostile ones are refused in one line.

The Hub is the one of tests/hub_server.py, the client is the real one.
"""

import hashlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import flax
import imageio.v3
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn as nn
from flax.serialization import to_bytes
from safetensors.numpy import save as save_numpy
from safetensors.torch import save as save_torch

from cleanrl_utils import enjoy, hub
from tests.harness import FILES, PPO, ROOT, only_run, read_checkpoint, same, scalars, train
from tests.hub_server import ENDPOINT, TOKEN, Hub
from tests.test_contract import Bomb

NAME = "me/CartPole-v1-ppo-seed1"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pushed")
    train(
        PPO,
        folder,
        "--num-envs",
        2,
        "--num-steps",
        64,
        "--total-timesteps",
        3000,
        "--num-minibatches",
        2,
    )
    return only_run(folder)


@pytest.fixture(scope="module")
def pushed(run):
    """The files of a repository on the Hub that was made of the run."""
    Hub.repos.pop(NAME, None)
    hub.push(run, "me", episodes=3)
    return dict(Hub.repos[NAME])


@pytest.fixture
def repo(pushed):
    """The same repository, to be damaged."""
    Hub.repos[NAME] = dict(pushed)
    return Hub.repos[NAME]


def actions_of(run_folder, **choices):
    torch.manual_seed(5)
    _, envs, policy = enjoy.make_agent(run_folder, enjoy.load_checkpoint(run_folder), **choices)
    returns, _ = enjoy.play(envs, policy, 5, 5)
    return returns


def test_what_is_pushed(run, pushed):
    assert sorted(pushed) == sorted(
        [
            "README.md",
            "curve.png",
            "eval.json",
            "events.out.tfevents.0000",
            "model.safetensors",
            "ppo.py",
            "replay.mp4",
            "run.json",
        ]
    )
    assert (
        pushed["ppo.py"] == PPO.read_bytes()
        and pushed["run.json"] == (run / "run.json").read_bytes()
    )
    assert not any(socket.gethostname() in name for name in pushed), (
        "the name of the machine stays here"
    )
    assert any(method == "PUT" and path.startswith("/lfs/") for method, path in Hub.log), (
        "large files take the large road"
    )


def test_the_weights_that_travel(run, pushed, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(pushed["model.safetensors"])
    travelled, checkpoint = enjoy.load_checkpoint(tmp_path), read_checkpoint(run)
    assert travelled.keys() == {"agent", "global_step"} and same(
        travelled["agent"], checkpoint["agent"]
    )
    assert int(travelled["global_step"]) == checkpoint["global_step"] == 2944
    assert len(pushed["model.safetensors"]) < (run / "checkpoint.pt").stat().st_size / 2


def test_model_card(run, pushed, tmp_path):
    from huggingface_hub import ModelCard

    evaluation = json.loads((run / "eval.json").read_text())
    (tmp_path / "README.md").write_bytes(pushed["README.md"])
    card = ModelCard.load(tmp_path / "README.md")
    (result,) = card.data.eval_results
    assert (
        result.metric_value == f"{evaluation['mean']:.2f} +/- {evaluation['std']:.2f}"
        and result.dataset_name == "CartPole-v1"
    )
    assert card.data.library_name == "cleanrl" and "reinforcement-learning" in card.data.tags
    assert (
        f"| 3 evaluation episodes, seed 1000 | {evaluation['mean']:.2f} ± {evaluation['std']:.2f} |"
        in card.text
    )
    last = np.array([value for _, value in scalars(run)["charts/episodic_return"]][-100:])
    assert f"training episodes | {last.mean():.2f} ± {last.std(ddof=1):.2f} |" in card.text
    flags = "--num-envs 2 --num-steps 64 --num-minibatches 2"
    assert f"python cleanrl/ppo.py --total-timesteps 3000 {flags}" in card.text
    assert (
        "![return of each training episode](curve.png)" in card.text
        and "[replay.mp4](replay.mp4)" in card.text
    )
    assert f"| torch | {version('torch')} |" in card.text and "| envpool |" not in card.text


def test_curve_and_video(run, pushed, tmp_path):
    curve = imageio.v3.imread(pushed["curve.png"])
    assert curve.shape == (440, 770, 3 if curve.shape[-1] == 3 else 4)
    blue = (abs(curve[..., :3].astype(int) - (31, 119, 180)).sum(-1) < 30).any(0).nonzero()[0]
    assert len(blue) > 300, "a line from the left to the right"
    (tmp_path / "replay.mp4").write_bytes(pushed["replay.mp4"])
    frames = imageio.v3.imread(tmp_path / "replay.mp4")
    length = json.loads((run / "eval.json").read_text())["lengths"][0]
    assert abs(len(frames) - length) <= 1 and frames.shape[1:] == (400, 600, 3), (
        "the first of the episodes, whole"
    )


def test_pulled_plays_the_same(run, repo, tmp_path):
    pulled = hub.pull(f"hf://{NAME}", tmp_path / "runs")
    assert re.fullmatch(r"me__CartPole-v1-ppo-seed1__[0-9a-f]{8}", pulled.name)
    assert (
        not list(pulled.glob("*.py")) and (pulled / "ppo.py.txt").read_bytes() == PPO.read_bytes()
    )
    assert actions_of(pulled) == actions_of(run)
    assert scalars(pulled)["charts/episodic_return"] == scalars(run)["charts/episodic_return"]
    (pulled / "mine.txt").touch()
    Hub.log.clear()
    assert hub.pull(NAME, tmp_path / "runs") == pulled and (pulled / "mine.txt").exists()
    assert len(Hub.log) == 1, "what is there is not fetched again"
    repo["run.json"] += b" "
    assert hub.pull(NAME, tmp_path / "runs") != pulled, "another commit, another folder"


def test_push_again_replaces_what_is_old(run, repo):
    repo |= {
        "events.out.tfevents.0007": b"old",
        "learning.mp4": b"old",
        "notes.md": b"someone's own",
    }
    before = (run / "eval.json").stat().st_mtime_ns
    hub.push(run, "me", episodes=3)
    assert (
        "events.out.tfevents.0007" not in repo
        and "learning.mp4" not in repo
        and repo["notes.md"] == b"someone's own"
    )
    assert (run / "eval.json").stat().st_mtime_ns == before, (
        "the last checkpoint was evaluated already"
    )


@pytest.mark.parametrize("choices", [{"env_id": "CartPole-v0"}, {"episodes": 2}, {"step": 64}])
def test_push_counts_only_the_models_own_evaluation(run, repo, choices):
    """Not one of another environment, number of episodes or checkpoint."""
    weights = enjoy.load_checkpoint(run)
    weights["global_step"] = choices.pop("step", weights["global_step"])
    enjoy.evaluate(run, weights, **{"episodes": 3} | choices, num_videos=1)
    hub.push(run, "me", episodes=3)
    evaluation = json.loads(repo["eval.json"])
    of = evaluation["env_id"], evaluation["global_step"], len(evaluation["returns"])
    assert of == ("CartPole-v1", 2944, 3)
    assert f"| 3 evaluation episodes, seed 1000 | {evaluation['mean']:.2f}" in (
        repo["README.md"].decode()
    )


@pytest.mark.slow
def test_jax_and_a_folder_that_was_pulled_can_be_pushed(tmp_path):
    file = FILES["dqn_jax"]
    train(file, tmp_path, "--total-timesteps", 500, "--learning-starts", 100, "--buffer-size", 200)
    first = only_run(tmp_path)
    hub.push(first, "me", episodes=1)
    pulled = hub.pull("me/CartPole-v1-dqn_jax-seed1", tmp_path)
    weights = enjoy.load_checkpoint(pulled)["agent"]
    assert weights.keys() == {"params"} and same(
        weights["params"], read_checkpoint(first)["agent"]["params"]
    )
    assert actions_of(pulled) == actions_of(first)
    hub.push(pulled, "you", episodes=1)
    again = Hub.repos["you/CartPole-v1-dqn_jax-seed1"]
    assert (
        again["model.safetensors"] == Hub.repos["me/CartPole-v1-dqn_jax-seed1"]["model.safetensors"]
    )


def test_push_without_a_picture(tmp_path):
    import tests.probes  # noqa: F401

    train(
        PPO,
        tmp_path,
        "--env-id",
        "Probe/ActionMatters-v0",
        "--num-envs",
        2,
        "--num-steps",
        32,
        "--total-timesteps",
        64,
    )
    hub.push(only_run(tmp_path), "me", episodes=2)
    card = Hub.repos["me/Probe-ActionMatters-v0-ppo-seed1"]["README.md"].decode()
    assert "There is no video." in card and "# ppo on Probe/ActionMatters-v0" in card
    assert "replay.mp4" not in Hub.repos["me/Probe-ActionMatters-v0-ppo-seed1"]


def test_the_file_that_trained_it(tmp_path):
    def git(*words):
        command = ["git", "-C", tmp_path, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    file, run = tmp_path / "my_ppo.py", tmp_path / "run"
    run.mkdir()
    file.write_text("first")
    git("init", "-q")
    git("add", "my_ppo.py")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "first")
    commit = git("rev-parse", "HEAD").strip()

    def told(text, **entries):
        about = {"file": "my_ppo.py", "sha256": hashlib.sha256(text.encode()).hexdigest()}
        return hub.trained_by(file, about | {"commit": commit} | entries, run)

    did = "is the file that trained the agent, "
    assert told("first") == ("first", f"{did}unchanged since the run began")
    file.write_text("second")
    of_commit = f"{did}as it was in the commit {commit[:8]} that the run began with"
    assert told("first") == ("first", of_commit)
    unknown = "is the current version: the source that trained the agent is unknown"
    assert told("first", commit="--help") == told("third") == ("second", unknown)
    assert told("first", sha256=None, start_time=2**40) == ("second", unknown)
    for name in ("my_ppo.py", "my_ppo.py.txt"):  # our own, and one that was pulled
        (run / name).write_text("third")
        assert told("third") == ("third", f"{did}from the copy in the run's folder")
        (run / name).write_text("edited later")
        assert told("third") == ("second", unknown)


@pytest.mark.parametrize(
    ("env_id", "name"),
    [
        ("CartPole-v1", "CartPole-v1-ppo-seed1"),
        ("ALE/Pong-v5", "ALE-Pong-v5-ppo-seed1"),
        ("my_envs:My/Env-v0", "my_envs-My-Env-v0-ppo-seed1"),
        ("../../etc", "etc-ppo-seed1"),
    ],
)
def test_repositories_are_named_as_the_public_ones(env_id, name):
    from huggingface_hub.utils import validate_repo_id

    assert hub.repo_name(env_id, "ppo", 1) == name
    assert validate_repo_id(f"me/{name}") is None


def pickled(thing):
    content = io.BytesIO()
    torch.save(thing, content)
    return content.getvalue()


def about(**entries):
    args = {"exp_name": "ppo", "env_id": "CartPole-v1", "seed": 1, **entries.pop("args", {})}
    return json.dumps({"file": "ppo.py", "args": args, **entries}).encode()


def weights(**tensors):
    return save_torch({f"agent/{name}": x for name, x in tensors.items()}, {"format": "pt"})


EVIL = b"from pathlib import Path\nPath('owned').touch()\n"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda: {"model.safetensors": None, "checkpoint.pt": pickled(Bomb())},
            "it has neither run.json",
        ),
        (
            lambda: {"model.safetensors": pickled({"agent": Bomb()})},
            "cannot load the checkpoint of me/",
        ),
        (lambda: {"model.safetensors": b"\xff" * 64}, "cannot load the checkpoint of me/"),
        (
            lambda: {"model.safetensors": None, "ppo.cleanrl_model": pickled(Bomb())},
            "ppo.cleanrl_model: UnpicklingError",
        ),
        (
            lambda: {"model.safetensors": None, "ppo.cleanrl_model": pickled([1, 2])},
            "ppo.cleanrl_model: AttributeError",
        ),
        (
            lambda: {"model.safetensors": None, "evil.cleanrl_model": pickled({})},
            "it should be called ENV_ID-evil-seedN",
        ),
        (
            lambda: {
                "model.safetensors": None,
                "ppo.cleanrl_model": pickled({"x": torch.zeros(1).expand(2**40)}),
            },
            "weights of 4398046511104 bytes",
        ),
        (lambda: {"../../owned": b"x"}, "it has a file named '../../owned'"),
        (lambda: {"..\\owned": b"x"}, "it has a file named"),
        (lambda: {"/tmp/owned": b"x"}, "it has a file named '/tmp/owned'"),
        (lambda: {"a\x1b[2Jb": b"x"}, "it has a file named 'a\\x1b[2Jb'"),
        (lambda: {f"events.out.tfevents.{i}": b"x" for i in range(200)}, "are too many"),
        (lambda: {"run.json": b"[" * 100_000}, "maximum recursion depth"),
        (lambda: {"run.json": b"{}"}, "run.json: KeyError"),
        # these come as far as a player
        (
            lambda: {"model.safetensors": weights(**{"actor.0.weight": torch.zeros(3, 3)})},
            "cannot rebuild the agent",
        ),
        (
            lambda: {"model.safetensors": save_numpy({"agent": np.zeros(3)})},
            "cannot rebuild the agent",
        ),
        (lambda: {"run.json": about(file="evil.py"), "evil.py": EVIL}, "with --file"),
        (lambda: {"run.json": about(file="../evil.py"), "evil.py": EVIL}, "with --file"),
        (
            lambda: {"run.json": about(args={"env_id": "evil:CartPole-v1"}), "evil.py": EVIL},
            "--env-id evil:CartPole-v1",
        ),
        (
            lambda: {"run.json": about(args={"env_id": "x:$(touch owned)"})},
            "add --env-id 'x:$(touch owned)'",
        ),
        (lambda: {"run.json": about(args={"env_id": "NoSuchEnv-v0"})}, "cannot rebuild the agent"),
        (lambda: {"run.json": about(args={"no_such_flag": 1})}, "no_such_flag"),
        (lambda: {"run.json": about(args={"env_id": ["CartPole-v1"]})}, "cannot rebuild the agent"),
        # flags of other types do not
        (lambda: {"run.json": about(args={"env_id": {"id": "CartPole-v1"}})}, "unknown type"),
        (lambda: {"run.json": about(args={"x; touch owned": 1})}, "is not the name of a flag"),
        (lambda: {"run.json": about(args={"exp_name": "a\x1b[2J"})}, "is not plain text"),
        (lambda: {"run.json": json.dumps({"file": "ppo.py", "args": [[1, 2]]}).encode()}, "Type"),
        (
            lambda: {"model.safetensors": save_numpy({"global_step": np.zeros(3)})},
            "cannot read the global_step of me/",
        ),
    ],
)
def test_hostile_repositories(repo, tmp_path, monkeypatch, damage, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, content in damage().items():
        repo.pop(name, None)
        repo |= {name: content} if content is not None else {}
    monkeypatch.setattr(sys, "argv", ["enjoy", f"hf://{NAME}", "--episodes", "1"])
    with pytest.raises(SystemExit) as refusal:
        enjoy.main()
    assert words in refusal.value.code and "\n" not in refusal.value.code
    assert not list(tmp_path.rglob("owned")) and not list(tmp_path.rglob("*.py"))
    assert not Path("/tmp/owned").exists() and not list(tmp_path.rglob(".pull-*")), (
        "nothing half-made stays"
    )


def test_training_file_of_a_stranger_is_not_run(repo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    repo |= {"ppo.py": EVIL}
    pulled = hub.pull(NAME)
    assert len(actions_of(pulled)) == 5 and not Path("owned").exists()
    assert (pulled / "ppo.py.txt").read_bytes() == EVIL


def test_huge_files_are_not_fetched(repo, tmp_path, monkeypatch):
    for name in ("model.safetensors", "replay.mp4"):
        monkeypatch.setattr(Hub, "lies", {(NAME, name): 2**40})
        Hub.log.clear()
        with pytest.raises(
            SystemExit, match=f"refused {NAME}: {name} has 1099511627776 bytes, more than 256 MiB"
        ):
            hub.pull(NAME, tmp_path)
        assert len(Hub.log) == 1 and not list(tmp_path.iterdir())
    monkeypatch.setattr(Hub, "lies", {(NAME, "dataset.bin"): 2**40})
    repo["dataset.bin"] = b"not ours"
    assert not (hub.pull(NAME, tmp_path) / "dataset.bin").exists(), "what is not ours is left there"


def test_huge_files_are_not_pushed(run, repo, monkeypatch, capsys):
    (run / "videos" / "learning.mp4").write_bytes(bytes(2**18))
    monkeypatch.setattr(hub, "LIMIT", 2**17)
    hub.push(run, "me", episodes=3)
    assert (
        "left out, since it has more than 0 MiB: learning.mp4" in capsys.readouterr().out
        and "learning.mp4" not in repo
    )
    (run / "videos" / "learning.mp4").unlink()
    monkeypatch.setattr(hub, "LIMIT", 2**10)
    with pytest.raises(SystemExit, match="its weights have more than"):
        hub.push(run, "me", episodes=3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda patch: patch.setenv("HF_TOKEN", "hf_wrong"),
            f"cannot push to {NAME}: the Hub denied access: log in with `hf auth login`",
        ),
        (
            lambda patch: patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"),
            "cannot reach http://127.0.0.1:9: ",
        ),
    ],
)
def test_push_that_fails(run, monkeypatch, change, words):
    before = dict(Hub.repos)
    change(monkeypatch)
    with pytest.raises(SystemExit) as refusal:
        hub.push(run, "me", episodes=3)
    assert refusal.value.code.startswith(words)
    assert "\n" not in refusal.value.code and Hub.repos == before


def test_entities_and_repositories_that_are_not_there(run, tmp_path):
    with pytest.raises(
        SystemExit,
        match="cannot push to other/CartPole-v1-ppo-seed1: the Hub denied access",
    ):
        hub.push(run, "other", episodes=3)
    with pytest.raises(SystemExit, match="cannot find me/nothing: the Hub has no such repository"):
        hub.pull("me/nothing", tmp_path)
    for name in ("nothing", "a/b/c", "hf://", "../..", "me/no such"):
        with pytest.raises(
            SystemExit, match=r"entity/repository|cannot find \.\./\.\.: Repo id must"
        ):
            hub.pull(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_push_and_pull_of_bad_input(run, repo, tmp_path):
    """One line, and nothing is written."""
    evaluation, before = (run / "eval.json").read_text(), dict(repo)
    with pytest.raises(SystemExit, match=r"^--episodes must be at least 1, not 0$"):
        hub.push(run, "me", episodes=0)
    assert (run / "eval.json").read_text() == evaluation
    (run / "eval.json").write_text(json.dumps(json.loads(evaluation) | {"videos": [5]}))
    with pytest.raises(SystemExit, match=r"^cannot read .*/eval.json: TypeError: .*"):
        hub.push(run, "me", episodes=3)
    (run / "eval.json").write_text(evaluation)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"^cannot write to .*/file: File exists"):
        hub.pull(NAME, tmp_path / "file")
    assert dict(repo) == before and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_a_network(tmp_path, monkeypatch):
    """No model is said to be missing."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SystemExit, match=r"^cannot reach http://127.0.0.1:9: .*no network"):
        hub.pull(NAME, tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match=r"^cannot reach http://127.0.0.1:9: .*no network"):
        hub.pull(NAME, tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for use in (lambda: hub.push(run, "me"), lambda: hub.pull(NAME, tmp_path)):
        with pytest.raises(
            SystemExit, match=r"safetensors is not installed: pip install .*-hub\.txt"
        ):
            use()


def test_a_file_that_vanishes_leaves_nothing(repo, tmp_path, monkeypatch):
    real = Hub.of_repo

    def gone(self, kind, repo, rest):
        is_gone = rest[-1:] == ["run.json"]
        return self.answer(404) if is_gone else real(self, kind, repo, rest)

    monkeypatch.setattr(Hub, "of_repo", gone)
    repo["run.json"] += b"\n\n"  # a commit that the client has not seen
    with pytest.raises(SystemExit, match=f"cannot fetch run.json of {NAME}: "):
        hub.pull(NAME, tmp_path)
    assert not list(tmp_path.iterdir())


# Models of CleanRL v1 (upstream): networks under the names of its files, with random weights.


def public_q_network(obs_dim, outputs):
    layers = (
        nn.Linear(obs_dim, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, outputs),
    )
    return nn.ModuleDict({"network": nn.Sequential(*layers)})


def public_atari_network(outputs):
    convs = (
        nn.Conv2d(4, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
    )
    rest = nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, outputs)
    return nn.ModuleDict({"network": nn.Sequential(*convs, *rest)})


def publish(name, exp_name, content):
    files = {
        "README.md": b"# theirs",
        f"{exp_name}.py": EVIL,
        "pyproject.toml": b"",
        "poetry.lock": b"",
        "videos/a.mp4": b"x",
    }
    Hub.repos[f"cleanrl/{name}"] = {
        **files,
        "replay.mp4": b"x",
        f"{exp_name}.cleanrl_model": content,
    }


def policy_of(name, tmp_path):
    pulled = hub.pull(f"cleanrl/{name}", tmp_path / "runs")
    _, _, policy = enjoy.make_agent(pulled, enjoy.load_checkpoint(pulled))
    return lambda obs: policy(obs, np.zeros(len(obs), dtype=bool))


@pytest.mark.parametrize("exp_name", ["dqn", "dqn_atari", "c51", "c51_atari"])
def test_public_value_networks(exp_name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    is_atari, num_atoms = "atari" in exp_name, 51 if "c51" in exp_name else 1
    num_actions, env_id = (6, "PongNoFrameskip-v4") if is_atari else (2, "CartPole-v1")
    network = (
        public_atari_network(6 * num_atoms) if is_atari else public_q_network(4, 2 * num_atoms)
    )
    nn.init.zeros_(network["network"][-1].bias)  # so that no action is always the best
    state, atoms = network.state_dict(), torch.linspace(-10, 10, 51)
    args = {
        "v_min": -10,
        "v_max": 10,
        "n_atoms": 51,
        "env_id": env_id,
        "track": False,
        "wandb_entity": None,
    }
    content = {"model_weights": {"atoms": atoms, **state}, "args": args} if num_atoms > 1 else state
    publish(f"{env_id}-{exp_name}-seed1", exp_name, pickled(content))
    policy = policy_of(f"{env_id}-{exp_name}-seed1", tmp_path)
    obs = (
        torch.randint(256, (50, 4, 84, 84), dtype=torch.uint8) if is_atari else torch.randn(500, 4)
    )
    with torch.no_grad():
        outputs = network["network"](obs / 255 if is_atari else obs)
    if num_atoms > 1:
        outputs = (outputs.view(-1, num_actions, 51).softmax(-1) * atoms).sum(-1)
    assert np.array_equal(policy(obs.numpy()), outputs.argmax(1)) and (
        is_atari or len(set(policy(obs.numpy()))) > 1
    )
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("exp_name", ["ddpg_continuous_action", "td3_continuous_action"])
def test_public_actors(exp_name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    actor = nn.ModuleDict(
        {"fc1": nn.Linear(3, 256), "fc2": nn.Linear(256, 256), "fc_mu": nn.Linear(256, 1)}
    )
    actor.register_buffer("action_scale", torch.tensor([2.0]))
    actor.register_buffer("action_bias", torch.tensor([0.0]))
    critics = [nn.Linear(4, 1).state_dict() for _ in range(2 if "td3" in exp_name else 1)]
    publish(f"Pendulum-v1-{exp_name}-seed2", exp_name, pickled((actor.state_dict(), *critics)))
    policy, obs = policy_of(f"Pendulum-v1-{exp_name}-seed2", tmp_path), torch.randn(20, 3)
    with torch.no_grad():
        actions = actor["fc_mu"](actor["fc2"](actor["fc1"](obs).relu()).relu()).tanh() * 2
    assert np.allclose(policy(obs.numpy()), actions, atol=1e-6)


def dense(key, *sizes):
    keys = jax.random.split(key, len(sizes))
    layers = {}
    for i, (before, after) in enumerate(pairwise(sizes)):
        layers[f"Dense_{i}"] = {
            "kernel": jax.random.normal(keys[i], (before, after)) / before**0.5,
            "bias": jnp.full(after, 0.1),
        }
    return {"params": layers}


def forward(params, obs):
    *hidden, last = params["params"].values()
    for layer in hidden:
        obs = jax.nn.relu(obs @ layer["kernel"] + layer["bias"])
    return obs @ last["kernel"] + last["bias"]


@pytest.mark.parametrize(
    "exp_name", ["dqn_jax", "c51_jax", "ddpg_continuous_action_jax", "td3_continuous_action_jax"]
)
def test_public_jax_models(exp_name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    key, obs = jax.random.key(1), np.asarray(jax.random.normal(jax.random.key(2), (50, 4)))
    if exp_name.startswith(("ddpg", "td3")):
        params, obs = dense(key, 3, 256, 256, 1), obs[:, :3]
        content, wanted = (
            (params, *[dense(key, 4, 8, 1)] * (1 + ("td3" in exp_name))),
            2 * jnp.tanh(forward(params, obs)),
        )
    elif exp_name == "dqn_jax":
        content = params = dense(key, 4, 120, 84, 2)
        wanted = forward(params, obs).argmax(1)
    else:
        params = dense(key, 4, 120, 84, 2 * 21)
        content = {
            "model_weights": params,
            "args": {"v_min": -5, "v_max": 15, "n_atoms": 21, "seed": 1},
        }
        pmfs = jax.nn.softmax(forward(params, obs).reshape(-1, 2, 21))
        wanted = (pmfs * jnp.linspace(-5, 15, 21)).sum(-1).argmax(1)
    env_id = "Pendulum-v1" if obs.shape[1] == 3 else "CartPole-v1"
    publish(f"{env_id}-{exp_name}-seed1", exp_name, to_bytes(content))
    actions = policy_of(f"{env_id}-{exp_name}-seed1", tmp_path)(obs)
    assert np.allclose(actions, wanted, atol=1e-5) and len(np.unique(actions)) > 1


def test_public_jax_models_of_atari(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Public(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            x = jnp.transpose(x, (0, 2, 3, 1)) / 255
            for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                x = flax.linen.relu(
                    flax.linen.Conv(channels, (size, size), (stride, stride), padding="VALID")(x)
                )
            x = flax.linen.relu(flax.linen.Dense(512)(x.reshape((len(x), -1))))
            return flax.linen.Dense(6)(x)

    obs = np.random.default_rng(1).integers(256, size=(20, 4, 84, 84), dtype=np.uint8)
    params = Public().init(jax.random.key(1), obs)
    publish("PongNoFrameskip-v4-dqn_atari_jax-seed1", "dqn_atari_jax", to_bytes(params))
    actions = policy_of("PongNoFrameskip-v4-dqn_atari_jax-seed1", tmp_path)(obs)
    assert np.array_equal(actions, Public().apply(params, obs).argmax(1))


def test_public_ppo_has_our_names(run, tmp_path):
    publish(
        "CartPole-v1-ppo-seed1",
        "ppo",
        (tmp_path / "x").write_bytes(b"") or pickled(read_checkpoint(run)["agent"]),
    )
    pulled = hub.pull("cleanrl/CartPole-v1-ppo-seed1", tmp_path)
    told = json.loads((pulled / "run.json").read_text())
    assert (
        told["args"] == {"exp_name": "ppo", "env_id": "CartPole-v1", "seed": 1}
        and told["file"] == "ppo.py"
    )
    assert actions_of(pulled) == actions_of(run) and not list(pulled.glob("*.cleanrl_model"))


@pytest.mark.parametrize(
    ("exp_name", "words"),
    [
        ("ppo_continuous_action", "come without their observation normalizer"),
        ("ppo_atari_envpool_xla_jax_scan", "no file has the networks"),
        ("qdagger_dqn_atari_impalacnn", "no file has the networks"),
    ],
)
def test_public_models_that_cannot_be_played(exp_name, words, tmp_path):
    publish(f"HalfCheetah-v4-{exp_name}-seed1", exp_name, pickled({}))
    with pytest.raises(
        SystemExit, match=f"cannot play cleanrl/HalfCheetah-v4-{exp_name}-seed1: .*{words}"
    ):
        hub.pull(f"cleanrl/HalfCheetah-v4-{exp_name}-seed1", tmp_path / "runs")


def test_public_networks_of_another_shape(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publish("CartPole-v1-dqn-seed1", "dqn", pickled(public_q_network(7, 2).state_dict()))
    pulled = hub.pull("cleanrl/CartPole-v1-dqn-seed1")
    with pytest.raises(
        SystemExit,
        match=r"cannot rebuild the agent of .*size mismatch for hidden1.weight: .*\[120, 7\]",
    ):
        enjoy.make_agent(pulled, enjoy.load_checkpoint(pulled))


def test_public_jax_networks_of_another_shape(tmp_path, monkeypatch):
    """JAX looks at the shapes when the agent acts."""
    monkeypatch.chdir(tmp_path)
    params = dense(jax.random.key(1), 7, 120, 84, 2)
    publish("CartPole-v1-dqn_jax-seed1", "dqn_jax", to_bytes(params))
    pulled = hub.pull("cleanrl/CartPole-v1-dqn_jax-seed1")
    checkpoint = enjoy.load_checkpoint(pulled)
    for play in (
        lambda: enjoy.evaluate(pulled, checkpoint, 1),
        lambda: enjoy.make_grid([(pulled, pulled / "model.safetensors")], tmp_path / "x.mp4"),
    ):
        with pytest.raises(SystemExit, match=r"^cannot act: .*shape \(7, 120\)") as refusal:
            play()
        assert "\n" not in refusal.value.code


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.M | re.S)


def test_loading_a_model_as_the_docs_say(run, repo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    for snippet, word, num_envs in zip(
        snippets("hub.md"), ("return", "actions"), (1, 4), strict=True
    ):
        names = {}
        exec(snippet, names)
        assert names["actions"].shape == (num_envs,) and set(names["actions"]) <= {0, 1}
        assert capsys.readouterr().out.splitlines()[-1].startswith(word)
    assert same(names["agent"], read_checkpoint(run)["agent"])


@pytest.mark.slow
def test_commands_of_the_docs(run, tmp_path):
    """Those of docs/hub.md and the ones of docs/enjoy.md that need a Hub, as a user types them."""
    torch.manual_seed(1)
    Hub.repos.pop(NAME, None)
    publish("CartPole-v1-dqn-seed1", "dqn", pickled(public_q_network(4, 2).state_dict()))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / run.name).symlink_to(run)
    settings = {"PYTHONPATH": str(ROOT), "HF_TOKEN": TOKEN, "HF_ENDPOINT": ENDPOINT}
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("hub.md", "enjoy.md"))
    lines = "".join(re.findall(r"^```bash\n(.*?)^```$", pages, re.M | re.S)).splitlines()
    commands = [
        line for line in dict.fromkeys(lines) if re.search(r"utils\.hub |hf://|--exp-name", line)
    ]
    assert len(commands) == 7
    for command in commands:
        words = command.replace("<run>", run.name).split()
        done = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=tmp_path,
            env=os.environ | settings,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        last = done.stdout.splitlines()[-1]
        assert last.startswith(
            ("pushed ", "run folder: runs/", "mean return over 10 episodes: ")
        ), last
        assert "Traceback" not in done.stderr
