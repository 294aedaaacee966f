"""cleanrl/ppo_continuous_action_isaacgym.py.

test_isaac_N guards detail N of docs/rl-algorithms/ppo-isaacgym.md.
"""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter

import gymnasium as gym
import imageio.v3
import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from cleanrl_utils import enjoy
from tests import isaac_probes
from tests.harness import (
    ROOT,
    about,
    only_run,
    read_checkpoint,
    same,
    scalars,
    train,
    weights,
)
from tests.test_packaging import UV

SMALL = "--num-envs 3 --num-steps 32 --num-minibatches 2 --update-epochs 2 --gamma 0.9".split()
PROBE_FLAGS = (
    "--total-timesteps 4096 --num-envs 16 --num-steps 8 --num-minibatches 2 --gamma 0.5"
).split()


# the details of environments that speak tensors


READS = {"item", "tolist", "cpu", "numpy", "nonzero"}
READS |= {"__bool__", "__float__", "__int__", "__index__", "__array__"}


class Reads(TorchFunctionMode):
    """Counts what an algorithm file asks a tensor to tell, for which it would have to wait."""

    def __init__(self, file):
        super().__init__()
        self.file, self.seen = str(file), Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, frame = getattr(function, "__name__", ""), sys._getframe(1)
        if name in READS:
            while "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame.f_code.co_name != "require":  # which looks at a checkpoint
                self.seen[name] += frame.f_code.co_filename == self.file
        return function(*args, **(kwargs or {}))


def test_isaac_1_an_iteration_waits_once(file, tmp_path):
    """However many steps it has, and however many episodes end in it."""
    for num_steps in (4, 12):
        with Reads(file) as reads:
            flags = (*SMALL, "--num-steps", num_steps, "--total-timesteps", 3 * num_steps * 3)
            train(file, tmp_path / str(num_steps), "--env-id", "TellingProbe/RandomEnds-v0", *flags)
        assert +reads.seen == {"tolist": 3, "cpu": 3, "numpy": 3}
        assert (
            len(scalars(only_run(tmp_path / str(num_steps)))["charts/episodic_return"])
            >= num_steps / 2
        )


@pytest.mark.parametrize(
    ("kind", "values"), [("TellingProbe", {-1: 1.5, 1: 1}), ("IsaacProbe", {-1: 2, 1: 1})]
)
def test_isaac_2_a_cut_episode_is_worth_what_is_known_of_its_end(file, tmp_path, kind, values):
    names = train(file, tmp_path, "--env-id", f"{kind}/LastIsKnown-v0", *PROBE_FLAGS)
    assert learned_values(names, values) == pytest.approx(list(values.values()), abs=0.1)


def learned_values(names, observations):
    with torch.no_grad():
        obs = names["agent"].normalize(torch.tensor([[float(obs)] for obs in observations]))
        return names["agent"].value(obs).tolist()


def test_isaac_3_rewards_are_scaled_by_a_constant(file, tmp_path):
    """What is learned from, not what is reported."""
    names = train(
        file,
        tmp_path,
        "--env-id",
        "IsaacProbe/MarkedLast-v0",
        *SMALL,
        "--total-timesteps",
        96,
        "--reward-scaler",
        0.25,
    )
    assert names["rewards"].unique().tolist() == [0.25]
    assert {value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]} == {3.0}


def test_isaac_4_networks_of_256_tanh_units(file, tmp_path):
    agent = train(
        file, tmp_path, "--env-id", "IsaacProbe/RandomEnds-v0", *SMALL, "--total-timesteps", 96
    )["agent"]
    for network, out in ((agent.actor, 1), (agent.critic, 1)):
        assert [type(layer).__name__ for layer in network] == [
            "Linear",
            "Tanh",
            "Linear",
            "Tanh",
            "Linear",
        ]
        assert [layer.weight.shape for layer in network[::2]] == [(256, 3), (256, 256), (out, 256)]


def test_isaac_5_brax_hands_its_arrays_over_where_they_are(file, tmp_path):
    """No copy in either direction, true ends, and episodes that start from states drawn anew."""
    from tests import brax_probes  # noqa: F401  registers them

    names, pointer = runpy.run_path(str(file)), lambda array: array.unsafe_buffer_pointer()
    envs, given, taken = (
        names["TensorEnvs"](names["BraxEnvs"]("RandomEnds", 64, torch.device("cpu"), 5), None),
        [],
        [],
    )
    advance, from_dlpack = envs.env.advance, envs.env.from_dlpack
    envs.env.from_dlpack = lambda actions: given.append(from_dlpack(actions)) or given[-1]
    envs.env.advance = lambda *args: taken.append(advance(*args)) or taken[-1]
    obs, _ = envs.reset(seed=1)
    starts, lengths, returns, seen = (
        [*map(tuple, obs.tolist())],
        np.zeros(64),
        np.zeros(64),
        Counter(),
    )
    for _ in range(48):
        obs, rewards, terminated, truncated, infos = envs.step(3 * torch.ones(64, 2))
        assert envs.sent.data_ptr() == pointer(given[-1]) and envs.sent.max() == 1
        answers = zip(
            (obs, rewards, terminated, truncated, infos["final_obs"]), taken[-1][1], strict=True
        )
        assert all(tensor.data_ptr() == pointer(array) for tensor, array in answers)
        is_broken = ~infos["final_obs"].isfinite().all(1)
        assert (
            terminated[is_broken].all() and (rewards[is_broken] == 0).all() and obs.isfinite().all()
        )
        lengths, returns, is_over = (
            lengths + 1,
            returns + rewards.numpy(),
            (terminated | truncated).numpy(),
        )
        assert np.array_equal(truncated.numpy(), (lengths == 5) & ~terminated.numpy())
        assert np.array_equal(infos["_episode"], is_over) and np.array_equal(
            infos["episode"]["l"], lengths
        )
        np.testing.assert_allclose(infos["episode"]["r"], returns, rtol=1e-4, atol=1e-4)
        assert torch.equal(obs[~is_over], infos["final_obs"][~is_over])
        starts += map(tuple, obs[is_over].tolist())
        seen += Counter(
            cut=int(truncated.sum()), end=int(terminated.sum()), broken=int(is_broken.sum())
        )
        lengths, returns = lengths * ~is_over, returns * ~is_over
    assert min(seen["cut"], seen["end"] - seen["broken"], seen["broken"]) > 10
    assert len(set(starts)) > 64 * 3 and advance._cache_size() == 1, (
        "three more pools of states, and one compilation"
    )


def test_forces_are_added_up_in_a_fixed_order(file, tmp_path, monkeypatch):
    """As in ppo_continuous_action_jax.py, whose tests compare the sums and the compiled program."""
    from brax.spring import collisions, joints

    for module in (collisions, joints):  # as if nobody had made an environment yet
        monkeypatch.setattr(module, "segment_sum", lambda *_: np.zeros(3))
    runpy.run_path(str(file))["BraxEnvs"]("ant", 2, torch.device("cpu"))
    forces, links = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([1, -1, 1, 0])
    for module in (collisions, joints):
        assert module.segment_sum(forces, links, 3).tolist() == [[9, 10, 11], [6, 8, 10], [0, 0, 0]]


@pytest.mark.slow
def test_a_run_on_brax(file, tmp_path):
    train(
        file,
        tmp_path,
        "--env-id",
        "tests.brax_probes:brax/MarkedLast",
        *SMALL,
        "--total-timesteps",
        192,
    )
    episodes = scalars(only_run(tmp_path))["charts/episodic_return"]
    assert [step for step, _ in episodes] == [
        3 * t + e + 1 for t in range(2, 64, 3) for e in range(3)
    ]
    assert {value for _, value in episodes} == {3.0}


def test_isaac_6_a_time_limit_of_the_task_is_an_end(file, tmp_path):
    names = train(
        file, tmp_path, "--env-id", "IsaacProbe/FiniteHorizon-v0", *SMALL, "--total-timesteps", 96
    )
    assert names["is_over"].any() and torch.equal(names["terminated"], names["is_over"])


# the details that it shares, in tensors


@pytest.mark.parametrize("kind", ["TellingProbe", "IsaacProbe"])
def test_core_5_advantages_against_a_slow_reference(file, tmp_path, kind):
    names = train(
        file,
        tmp_path,
        "--env-id",
        f"{kind}/RandomEnds-v0",
        *SMALL,
        "--gae-lambda",
        0.7,
        "--total-timesteps",
        192,
    )
    obs, last_obs, values, rewards, is_over = (
        names[x] for x in ("obs", "last_obs", "values", "rewards", "is_over")
    )
    terminated = names["terminated"]
    assert terminated.any() and (is_over & ~terminated).any() and not is_over.all(), (
        "the rollout must hold every case"
    )
    assert torch.equal(last_obs, obs[:-1]) == (kind == "IsaacProbe"), (
        "what stands in is what was seen before"
    )
    for e in range(3):
        for t in range(32):
            expected, weight, k = 0.0, 1.0, t
            while True:
                following = names["last_values"][k, e] if is_over[k, e] else values[k + 1, e]
                following = 0 if terminated[k, e] else following
                expected += weight * float(rewards[k, e] + 0.9 * following - values[k, e])
                if is_over[k, e] or k == 31:
                    break
                weight, k = weight * 0.9 * 0.7, k + 1
            assert float(names["advantages"][t, e]) == pytest.approx(expected, abs=1e-5)


def test_continuous_5_the_environment_gets_clipped_actions(file, tmp_path):
    """The probe refuses all others; what is learned from is what was drawn."""
    names = train(
        file, tmp_path, "--env-id", "IsaacProbe/ActionMatters-v0", *SMALL, "--total-timesteps", 96
    )
    assert names["actions"].abs().max() > 1 and names["envs"].sent.abs().max() <= 1
    names = train(
        file,
        tmp_path / "free",
        "--env-id",
        "IsaacProbe/PointMass-v0",
        *SMALL,
        "--total-timesteps",
        96,
    )
    assert torch.equal(names["envs"].sent, names["actions"][-1]), (
        "where there are no bounds, nothing is clipped"
    )


def test_continuous_6_and_7_observations_are_normalized(file, tmp_path):
    """By the moments of all rows so far, on the device; also where mjlab calls the group actor."""
    shown, rollouts = [], []

    def look(names):
        if len(rollouts) <= names["iteration"]:
            rollouts.append(names["obs"].clone())

    register = isaac_probes.IsaacProbe.observe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            isaac_probes.IsaacProbe,
            "observe",
            lambda env, obs: shown.append(np.float64(obs)) or register(env, obs),
        )
        flags = ("--env-id", "IsaacProbe/FarAndWide-v0", *SMALL, "--total-timesteps", 192)
        agent = train(file, tmp_path, *flags, on_update=look)["agent"]
    rows = np.concatenate(shown)
    assert agent.obs_moments.count == len(rows) == 3 * (1 + 64)
    np.testing.assert_allclose(agent.obs_moments.mean, rows.mean(0), rtol=1e-9)
    np.testing.assert_allclose(agent.obs_moments.var, rows.var(0), rtol=1e-6)
    for iteration, obs in enumerate(rollouts):
        for t in range(33):
            before = np.concatenate(shown[: 32 * iteration + t + 1])
            expected = (shown[32 * iteration + t] - before.mean(0)) / np.sqrt(before.var(0) + 1e-8)
            np.testing.assert_allclose(obs[t], expected.clip(-10, 10), atol=1e-3)
    assert agent.normalize(torch.tensor([[1e9], [-1e9]])).tolist() == [[10.0], [-10.0]]


@pytest.mark.parametrize("size", [2e4, 1e7, 1e20])
def test_a_simulation_that_has_blown_up_is_over(file, tmp_path, size):
    """Its finite, but huge last observation is in no moments, and its reward counts for nothing."""
    import brax.envs
    import jax.numpy as jnp

    from tests import brax_probes

    class BlowsUp(brax_probes.Endless):
        def observe(self, key, time):
            return jnp.where(time == 3, -size, time / 3)[None]

    brax.envs.register_environment("BlowsUp", BlowsUp)
    flags = ("--env-id", "brax/BlowsUp", *SMALL, "--total-timesteps", 96)
    names = train(file, tmp_path, *flags)
    moments = names["agent"].obs_moments
    assert moments.mean.item() == pytest.approx(1 / 3, abs=0.1) and moments.var.item() < 0.1
    assert names["terminated"].any() and torch.equal(names["terminated"], names["is_over"])
    assert {value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]} == {2.0}


@pytest.mark.parametrize("size", [1e7, 1e20, np.nan])
def test_huge_observations_of_other_simulators_end_the_run(file, tmp_path, monkeypatch, size):
    """They begin new episodes on their own; the last checkpoint is from before."""
    shown, observe = [], isaac_probes.IsaacProbe.observe

    def blow_up(env, obs):
        shown.append(obs)
        is_last = len(shown) == 1 + 3 * 32  # of the third rollout
        return observe(env, [x + size if is_last else x for x in obs])

    monkeypatch.setattr(isaac_probes.IsaacProbe, "observe", blow_up)
    flags = ("--env-id", "IsaacProbe/RandomEnds-v0", *SMALL, "--checkpoint-interval", 1)
    words = f"observation of IsaacProbe/RandomEnds-v0 at step 288: {size:g}"
    with pytest.raises(SystemExit, match=re.escape(words)):
        train(file, tmp_path, *flags, "--total-timesteps", 384)
    checkpoint = read_checkpoint(only_run(tmp_path))
    assert checkpoint["global_step"] == 192 and checkpoint["agent"]["obs_moments.var"].max() < 100


# learning, and what was learned


def test_learns_point_mass(file, tmp_path):
    """The default settings but for the number of environments. The highest return is 10."""
    train(
        file,
        tmp_path,
        "--env-id",
        "IsaacProbe/PointMass-v0",
        "--num-envs",
        64,
        "--total-timesteps",
        1024 * 30,
    )
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[:50]) < 2 and np.mean(returns[-50:]) > 6.5


def test_evaluation_normalizes_and_leaves_the_normalizer_alone(file, tmp_path):
    names = train(
        file, tmp_path, "--env-id", "IsaacProbe/FarAndWide-v0", *SMALL, "--total-timesteps", 96
    )
    agent, obs = names["agent"], torch.tensor([[900.0], [1000.0], [1100.0]])
    policy, answers = names["load_policy"](read_checkpoint(only_run(tmp_path)), names["envs"]), []
    for _ in range(2):
        torch.manual_seed(0)
        answers.append(policy(obs, np.zeros(3, bool)))
        policy(1e6 * obs, np.zeros(3, bool))
    torch.manual_seed(0)
    with torch.no_grad():
        expected = names["sample"](agent.policy(agent.normalize(obs)), agent.log_std)
    assert torch.equal(answers[0], expected) and torch.equal(answers[1], expected)


def test_enjoy_plays_whole_episodes(file, tmp_path, monkeypatch, capsys):
    """Where every step tells of an episode, but only some that it is over."""
    train(file, tmp_path, "--env-id", "IsaacProbe/MarkedLast-v0", *SMALL, "--total-timesteps", 96)
    monkeypatch.setattr(sys, "argv", ["enjoy", str(only_run(tmp_path)), "--episodes", "3"])
    enjoy.main()
    evaluation = json.loads((only_run(tmp_path) / "eval.json").read_text())
    assert evaluation["lengths"] == [3, 3, 3] and evaluation["returns"] == [3.0, 3.0, 3.0]
    assert "mean return over 3 episodes: 3.00" in capsys.readouterr().out


def test_same_seed_same_bits(file, tmp_path):
    flags = ("--env-id", "TellingProbe/RandomEnds-v0", *SMALL, "--total-timesteps", 192)
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        train(file, tmp_path / name, *flags, "--seed", seed)
    a, b, c = (weights(only_run(tmp_path / name)) for name in "abc")
    assert same(a, b) and not same(a, c)


def test_videos_and_metrics_of_a_run(file, tmp_path):
    flags = (
        *SMALL,
        "--num-envs",
        2,
        "--total-timesteps",
        2 * 32 * 5,
        "--capture-video",
        "--record-video-step-frequency",
        100,
    )
    train(file, tmp_path, "--env-id", "IsaacProbe/ConstantValue-v0", *flags)
    videos = {
        path.name: len(imageio.v3.imread(path))
        for path in (only_run(tmp_path) / "videos").glob("*.mp4")
    }
    assert videos == {"step-0-step-0.mp4": 100, "step-0-step-100.mp4": 60}
    logged = scalars(only_run(tmp_path))
    assert logged["charts/consecutive_successes"] == [(64 * i, 1.0) for i in range(1, 6)]
    names = (
        "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance".split()
    )
    assert {f"losses/{name}" for name in names} | {"charts/SPS", "charts/learning_rate"} <= set(
        logged
    )


# packages that only some environments need


def test_packages_are_imported_when_an_environment_needs_them(file):
    imported = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    modules = {alias.name for node in imported for alias in node.names} | {
        getattr(node, "module", "") for node in imported
    }
    assert "torch" in modules and not {
        name for name in modules if name and name.split(".")[0] in ("jax", "brax", "mjlab")
    }


@pytest.mark.parametrize(
    ("env_id", "package", "answer"),
    [
        ("brax/ant", "brax.envs", "pip install -r requirements/requirements-brax.txt"),
        ("Mjlab-Cartpole-Balance", "mjlab", "pip install -r requirements/mjlab.in"),
        ("Isaac-Ant-v0", "isaaclab", "install Isaac Lab as NVIDIA's instructions say"),
    ],
)
def test_a_missing_package_gets_one_line(file, tmp_path, monkeypatch, env_id, package, answer):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    with pytest.raises(SystemExit) as refusal:
        train(file, tmp_path, "--env-id", env_id)
    assert refusal.value.code.startswith(f"cannot train on {env_id}: ")
    assert refusal.value.code.endswith(answer) and not list(tmp_path.iterdir())


# the real ones


@pytest.mark.slow
def test_learns_inverted_pendulum_of_brax(file, tmp_path):
    """Over DLPack; 1000 is the most there is."""
    train(
        file,
        tmp_path,
        "--env-id",
        "brax/inverted_pendulum",
        "--num-envs",
        256,
        "--total-timesteps",
        4096 * 130,
    )
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[:100]) < 30 and np.mean(returns[-100:]) > 500


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_mjlab_cartpole(file, tmp_path):
    """In an environment of its own, since it needs another MuJoCo: trained and resumed."""
    if not UV:
        pytest.skip("needs uv")
    venv = tmp_path / "venv"
    environment = os.environ | {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    install = [
        UV,
        "pip",
        "install",
        "--quiet",
        "--python",
        venv,
        "--constraints",
        ROOT / "requirements/constraints-mjlab.txt",
    ]
    install += ["--requirements", ROOT / "requirements/mjlab.in"]
    for command in ([UV, "venv", "--quiet", "--python", sys.executable, venv], install):
        made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if made.returncode != 0:
            pytest.skip(f"cannot make an environment with mjlab: {made.stderr.splitlines()[-1]}")
    python = shutil.which("python", path=venv / "bin") or venv / "Scripts" / "python"

    def run(*words):
        done = subprocess.run(
            [python, *map(str, words)], cwd=tmp_path, env=os.environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    flags = (
        "--env-id Mjlab-Cartpole-Balance --num-envs 8 --num-steps 8 --checkpoint-interval 1"
    ).split()
    run(file, *flags, "--total-timesteps", 64 * 3)
    folder = only_run(tmp_path)
    told = about(folder)
    assert (
        told["packages"]["mujoco"].startswith("3.11")
        and told["args"]["env_id"] == "Mjlab-Cartpole-Balance"
    )
    told["args"]["total_timesteps"] = 64 * 6
    (folder / "run.json").write_text(json.dumps(told))
    run(file, "--resume", folder)
    checkpoint, logged = read_checkpoint(folder), scalars(folder)
    assert int(checkpoint["global_step"]) == 64 * 6 and checkpoint["agent"][
        "actor.0.weight"
    ].shape == (256, 5)
    assert [step for step, _ in logged["losses/value_loss"]] == [64 * i for i in range(1, 7)]
    assert all(np.isfinite([value for _, value in points]).all() for points in logged.values())
    assert (
        checkpoint["agent"]["obs_moments.count"] == 8 * (2 + 48)
        and checkpoint["agent"]["obs_moments.var"].min() > 0
    )


def test_ids_of_isaac_lab_are_taken_as_registered(file, tmp_path):
    """Its configuration is told the number, seed and device, and asked for last observations."""
    names = train(
        file,
        tmp_path,
        "--env-id",
        "IsaacProbe/FiniteHorizon-v0",
        *SMALL,
        "--total-timesteps",
        96,
        "--seed",
        7,
    )
    cfg = names["envs"].env.cfg
    assert type(cfg).__name__ == "FiniteCfg" and isinstance(
        gym.spec("IsaacProbe/RandomEnds-v0").kwargs["env_cfg_entry_point"], str
    )
    assert (cfg.scene.num_envs, cfg.sim.device, cfg.seed, cfg.compute_final_obs) == (
        3,
        "cpu",
        7,
        True,
    )
