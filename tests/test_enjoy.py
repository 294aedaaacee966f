"""cleanrl_utils.enjoy: the one way in which trained agents are evaluated."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from flax.serialization import msgpack_serialize

from cleanrl_utils import enjoy
from tests.harness import PPO, ROOT, about, only_run, probe, read_checkpoint, scalars, train
from tests.test_contract import FILES, Bomb, edit, has_replay, iteration, small
from tests.test_ppo import PROBE_FLAGS


@pytest.fixture
def run(tmp_path):
    """A run on a probe that was learned: the right action pays 1, the wrong one costs 1."""
    train(PPO, tmp_path, "--env-id", "Probe/ActionMatters-v0", *PROBE_FLAGS)
    return only_run(tmp_path)


@pytest.fixture
def cartpole(tmp_path):
    train(PPO, tmp_path, "--num-envs", 2, "--num-steps", 32, "--total-timesteps", 64)
    return only_run(tmp_path)


def watch(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["enjoy", *map(str, words)])
    enjoy.main()


def test_enjoy_plays_what_was_trained(run, monkeypatch, capsys):
    watch(monkeypatch, run, "--episodes", 50)
    evaluation = json.loads((run / "eval.json").read_text())
    assert len(evaluation["returns"]) == 50 and evaluation["mean"] > 0.9 and set(evaluation["lengths"]) == {1}
    assert evaluation["mean"] == pytest.approx(np.mean(evaluation["returns"]))
    assert evaluation["std"] == pytest.approx(np.std(evaluation["returns"]))
    assert evaluation["global_step"] == 5120 and evaluation["env_id"] == "Probe/ActionMatters-v0"
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("episode ") for line in printed) == 50
    assert printed[-1] == f"mean return over 50 episodes: {evaluation['mean']:.2f} ± {evaluation['std']:.2f}"
    logged = scalars(run)
    assert logged["eval/episodic_return"] == list(enumerate(evaluation["returns"]))
    assert len(logged["losses/value_loss"]) == 40, "the training's curves stay"


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_enjoy_works_on_every_file(file, tmp_path, monkeypatch):
    """PPO's policy, and SAC's if actions are discrete, sample from two actions; the others take the better one, and the
    other one when they are swapped."""
    samples = not has_replay(file) or file.stem == "sac_atari"
    flags = small(file, "--total-timesteps", iteration(file), "--env-id", probe(file, "ActionMatters"))
    train(file, tmp_path, *flags, *(("--learning-starts", 1000) if "_action_jax" in file.stem else ()))  # compiles nothing
    returns, run = [], only_run(tmp_path)
    for _ in range(1 if samples else 2):
        watch(monkeypatch, run, "--episodes", 20)
        evaluation = json.loads((run / "eval.json").read_text())
        returns.append(set(evaluation["returns"]))
        assert set(evaluation["lengths"]) == {1}
        checkpoint = read_checkpoint(run)
        if "_action_jax" in file.stem:  # an actor that has not learned yet does nothing
            checkpoint["agent"]["actor"]["params"]["Dense_2"]["bias"] = np.ones(1, np.float32)
            (run / "checkpoint.msgpack").write_bytes(msgpack_serialize(checkpoint))
            continue
        if "_jax" in file.stem:  # the last layer, a half of which is for each action
            layers = checkpoint["agent"]["params"]["params"]
            layers[max(layers)] = {name: np.roll(x, x.shape[-1] // 2, -1) for name, x in layers[max(layers)].items()}
            (run / "checkpoint.msgpack").write_bytes(msgpack_serialize(checkpoint))
            continue
        for name in [name for name in checkpoint.get("actor", ()) if name.startswith(("actions.", "mean."))]:
            checkpoint["actor"][name] *= -1
        for name in list(checkpoint.get("q_network", ()))[-2:]:
            checkpoint["q_network"][name] = torch.cat(checkpoint["q_network"][name].chunk(2)[::-1])
        torch.save(checkpoint, run / "checkpoint.pt")
    assert returns == [{-1.0, 1.0}] if samples else returns in ([{-1.0}, {1.0}], [{1.0}, {-1.0}])


def test_enjoy_reads_the_weights(run, monkeypatch):
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    checkpoint["agent"]["actor.4.bias"] = torch.tensor([50.0, -50.0])  # an agent that always takes the wrong action
    torch.save(checkpoint, run / "checkpoint.pt")
    watch(monkeypatch, run, "--episodes", 5)
    assert json.loads((run / "eval.json").read_text())["returns"] == [-1.0] * 5


def test_enjoy_repeats_itself(cartpole, monkeypatch):
    evaluations = []
    for seed in (3, 3, 4):
        watch(monkeypatch, cartpole, "--episodes", 4, "--seed", seed)
        evaluations.append(json.loads((cartpole / "eval.json").read_text())["returns"])
    assert evaluations[0] == evaluations[1] != evaluations[2]


def test_enjoy_as_a_command_with_video(cartpole):
    command = [sys.executable, "-m", "cleanrl_utils.enjoy", str(cartpole), "--episodes", "2", "--video"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "mean return over 2 episodes" in done.stdout, done.stderr
    videos = sorted((cartpole / "videos").iterdir())
    assert [video.name for video in videos] == ["eval-seed-1000-episode-0.mp4", "eval-seed-1000-episode-1.mp4"]
    assert all(video.stat().st_size > 1000 for video in videos)


def test_enjoy_takes_a_renamed_experiment(tmp_path, monkeypatch):
    train(PPO, tmp_path, "--num-envs", 2, "--num-steps", 32, "--total-timesteps", 64, "--exp-name", "my-idea")
    watch(monkeypatch, only_run(tmp_path), "--episodes", 1)
    assert (only_run(tmp_path) / "eval.json").exists()


def remove(run, name):
    (run / name).unlink()


def tell(run, **entries):
    (run / "run.json").write_text(json.dumps(about(run) | entries))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: remove(run, "run.json"), "is not the folder of a run"),
        (lambda run: (run / "run.json").write_text("[]"), "is not the folder of a run"),
        (lambda run: (run / "run.json").write_text("[" * 100_000), "RecursionError"),
        (lambda run: remove(run, "checkpoint.pt"), "cannot load the checkpoint"),
        (lambda run: (run / "checkpoint.pt").write_bytes(b"no"), "cannot load the checkpoint"),
        (lambda run: torch.save({"agent": Bomb()}, run / "checkpoint.pt"), "UnpicklingError"),
        (lambda run: edit(run, env_id="NoSuchEnv-v0"), "cannot rebuild the agent"),
        (lambda run: edit(run, env_id="Acrobot-v1"), "cannot rebuild the agent"),
        (lambda run: edit(run, env_id="evil:CartPole-v1"), "--env-id evil:CartPole-v1"),
        (lambda run: edit(run, no_such_flag=1), "no_such_flag"),
        (lambda run: tell(run, file="no_such.py"), "--file"),
        (lambda run: tell(run, file=str(run / "evil.py")), "--file"),
        (lambda run: tell(run, file="../evil.py"), "--file"),
    ],
)
def test_enjoy_of_damaged_or_hostile_runs(cartpole, monkeypatch, damage, words):
    for folder in (cartpole, cartpole.parent):
        (folder / "evil.py").write_text("from pathlib import Path\nPath('owned').touch()\n")
    monkeypatch.chdir(cartpole.parent)
    monkeypatch.syspath_prepend(str(cartpole))
    damage(cartpole)
    with pytest.raises(SystemExit) as refusal:
        watch(monkeypatch, cartpole)
    assert words in refusal.value.code and "\n" not in refusal.value.code
    assert not (cartpole.parent / "owned").exists() and not (cartpole / "eval.json").exists()


def test_enjoy_bad_flags(cartpole, monkeypatch):
    for flags in (("--episodes", 0), ("--seed", -1), ("--seed", 2**64)):
        with pytest.raises(SystemExit, match="--episodes must be at least 1, and --seed"):
            watch(monkeypatch, cartpole, *flags)


def test_enjoy_without_a_picture(run, monkeypatch):
    with pytest.raises(SystemExit, match="does not render rgb_array"):
        watch(monkeypatch, run, "--video")
    assert not (run / "videos").exists()


def test_enjoy_does_not_write_through_links(cartpole, monkeypatch):
    (cartpole.parent / "precious").write_text("mine")
    for name in ("eval.json", "eval.tmp"):
        (cartpole / name).symlink_to(cartpole.parent / "precious")
    watch(monkeypatch, cartpole, "--episodes", 1)
    assert (cartpole.parent / "precious").read_text() == "mine" and not (cartpole / "eval.json").is_symlink()
