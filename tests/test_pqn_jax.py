"""cleanrl/pqn_jax.py. test_pqn_N guards detail N of docs/rl-algorithms/pqn.md.

tests/mutations shows that each test can fail. Compiling takes longer than everything else here: so
tests share a program, which is made once for each file.
"""

import functools
import runpy
import shutil

import gymnax
import jax
import numpy as np
import pytest
import torch

import tests.gymnax_probes  # noqa: F401  registers them
from tests import harness, test_ppo_jax
from tests.harness import about, only_run, read_checkpoint, same, scalars
from tests.test_dqn_jax import leaves, play, tensors, train, without_speed
from tests.test_ppo_jax import FEW, begin, halfway, orders_of, runs_of

# an iteration once more: environments and targets step by step, PyTorch's autograd and RAdam


def q_values_of(params, obs):
    """What pqn.py's network returns of an observation."""
    x, params = torch.tensor(np.asarray(obs)), params["params"]
    for n in (0, 1):
        x = x @ params[f"Dense_{n}"]["kernel"] + params[f"Dense_{n}"]["bias"]
        scale, shift = params[f"LayerNorm_{n}"]["scale"], params[f"LayerNorm_{n}"]["bias"]
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], scale, shift).relu()
    return x @ params["Dense_2"]["kernel"] + params["Dense_2"]["bias"]


def epsilons_of(args, first_step):
    """Of each step of all environments in a rollout."""
    steps = first_step + args.num_envs * np.arange(args.num_steps)
    until = args.exploration_fraction * args.total_timesteps
    return np.interp(steps, (0, until), (args.start_e, args.end_e))


def follow(args, run):
    """The rollout of a run's next iteration, the world after it, and the orders of the epochs.

    By gymnax's own step, with the random numbers that the program draws."""
    env, env_params = gymnax.make(args.env_id)
    _, chance_key, choice_key, env_key, order_key = jax.random.split(run["key"], 5)
    shape, size = (args.num_steps, args.num_envs), args.num_steps * args.num_envs
    chances = np.asarray(jax.random.uniform(chance_key, shape))
    choices = np.asarray(jax.random.randint(choice_key, shape, 0, env.num_actions))
    epsilons = epsilons_of(args, int(run["global_step"]))
    step_keys, reset_keys = jax.random.split(env_key, (2, size))
    fresh = jax.device_get(jax.jit(jax.vmap(env.reset_env, (0, None)))(reset_keys, env_params))
    step, is_cut = jax.jit(env.step_env), jax.jit(env.is_truncated)
    params, world, rollout = tensors(run["agent"]["params"]), run["world"], []
    for t in range(args.num_steps):
        best_actions, row, new = q_values_of(params, world["obs"]).argmax(1).tolist(), [], []
        for e in range(args.num_envs):
            i = t * args.num_envs + e
            is_random = chances[t, e] < epsilons[t]
            action = int(choices[t, e]) if is_random else best_actions[e]
            state = jax.tree.map(lambda x, e=e: x[e], world["env_state"])
            answers = jax.device_get(step(step_keys[i], state, action, env_params))
            next_obs, next_state, reward, terminated, _ = answers
            truncated = bool(is_cut(next_state, env_params))
            total = world["episode_return"][e] + reward
            length = world["episode_length"][e] + 1
            columns = world["obs"][e], action, reward, bool(terminated), next_obs, truncated
            row.append((*columns, total, length, is_random))
            is_over = terminated or truncated
            begins = jax.tree.map(lambda x, i=i: x[i], fresh)
            obs, next_state = begins if is_over else (next_obs, next_state)
            sums = dict(episode_return=total * (not is_over), episode_length=length * (not is_over))
            new.append(dict(env_state=next_state, obs=obs) | sums)
        world = jax.tree.map(lambda *x: np.float32(np.stack(x)), *new)
        rollout.append([np.stack(column) for column in zip(*row, strict=True)])
    columns = [np.stack(column) for column in zip(*rollout, strict=True)]
    return columns, world, orders_of(args, order_key, size)


def targets_of(args, next_values, rewards, terminated, is_over):
    """By n-step returns, each episode by itself."""
    targets = np.zeros_like(rewards)
    for t, e in np.ndindex(rewards.shape):
        n_step_returns, rewarded, discount = [], 0.0, 1.0
        for k in range(t, args.num_steps):
            rewarded += discount * rewards[k, e]
            discount *= args.gamma
            n_step_returns.append(rewarded + discount * next_values[k, e] * (not terminated[k, e]))
            if is_over[k, e]:
                break
        *weights, _ = args.q_lambda ** np.arange(len(n_step_returns) + 1)
        weights[:-1] = (1 - args.q_lambda) * np.array(weights[:-1])
        targets[t, e] = np.dot(weights, n_step_returns)
    return targets


def learn(args, run, radam, params, rollout, orders):
    """The metrics of an iteration in which RAdam changes params as in pqn.py; clipped gradients."""
    obs, actions, rewards, terminated, next_obs, truncated, *_ = rollout
    next_values = q_values_of(params, next_obs).amax(-1).detach().numpy()
    targets = targets_of(args, next_values, rewards, terminated, terminated | truncated)
    total = args.total_timesteps // targets.size
    done = int(run["global_step"]) // targets.size if args.anneal_lr else 0
    radam.param_groups[0]["lr"] = rate = args.learning_rate * (1 - done / total)
    columns = [x.reshape(targets.size, *x.shape[2:]) for x in (obs, actions, targets)]
    clipped = 0
    for order in orders:
        for mb in order.reshape(args.num_minibatches, -1):
            b_obs, b_actions, b_targets = (torch.tensor(x[mb]) for x in columns)
            q_values = q_values_of(params, b_obs)[range(len(mb)), b_actions]
            td_loss = ((q_values - b_targets) ** 2).mean()
            radam.zero_grad()
            td_loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(jax.tree.leaves(params), args.max_grad_norm)
            radam.step()
            clipped += int(norm > args.max_grad_norm)
    epsilon = epsilons_of(args, int(run["global_step"]))[-1]
    metrics = {"losses/td_loss": td_loss.item(), "losses/q_values": q_values.mean().item()}
    return metrics | {"charts/learning_rate": rate, "charts/epsilon": epsilon}, clipped


WATCHED = "--env-id GymnaxProbe/RandomEnds-v0 --num-envs 3 --num-steps 32 --num-minibatches 4"
WATCHED += " --update-epochs 3 --total-timesteps 384 --learning-rate 0.004 --gamma 0.9"
WATCHED += " --q-lambda 0.7 --start-e 0.9 --end-e 0.2 --max-grad-norm 3"
WATCHED = WATCHED.split()


@functools.cache
def watch(file, *flags):
    """The states of a run before, between and after two iterations, and what each logged."""
    args, run, program = begin(file, *WATCHED, *flags)
    states, logs = [run], []
    for _ in range(2):
        run, log = program(run)
        states.append(run)
        logs.append(log)
    return args, states, logs


def test_pqn_1_pqn_4_episodes_run_on_across_rollouts(file, tmp_path):
    """The world after an iteration, and every end in it, are those of gymnax, step by step.

    That depends on each action, random or the best one."""
    args, states, logs = watch(file)
    for before, after, (_, episodes) in zip(states[:-1], states[1:], logs, strict=True):
        (*_, truncated, total, length, is_random), world, _ = rollout = follow(args, before)
        terminated, (is_over, returns, lengths) = rollout[0][3], episodes
        assert (terminated & ~truncated).sum() > 5 and (truncated & ~terminated).sum() > 5
        assert 10 < is_random.sum() < 86, "some actions are random, the others are not"
        np.testing.assert_array_equal(is_over, terminated | truncated)
        np.testing.assert_allclose(returns[is_over], total[is_over], atol=1e-5)
        np.testing.assert_array_equal(lengths[is_over], length[is_over])
        for got, wanted in zip(leaves(after["world"]), leaves(world), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert after["world"]["episode_length"].max() > 0, "some are under way"


def test_pqn_2_pqn_3_layers(file, tmp_path):
    """Orthogonal weights, zero biases, and two normalizations, whose effect is seen below."""
    _, (run, *_), _ = watch(file)
    params = run["agent"]["params"]["params"]
    assert {*params} == {"Dense_0", "LayerNorm_0", "Dense_1", "LayerNorm_1", "Dense_2"}
    for layer in (params["Dense_0"], params["Dense_1"], params["Dense_2"]):
        weight = layer["kernel"] if np.subtract(*layer["kernel"].shape) <= 0 else layer["kernel"].T
        np.testing.assert_allclose(weight @ weight.T, 2 * np.eye(len(weight)), atol=1e-5)
        assert np.abs(layer["bias"]).max() == 0


@pytest.mark.parametrize("flags", [(), ("--no-anneal-lr", "--q-lambda", "0")])
def test_pqn_2_to_9_an_iteration_is_that_of_pqn(file, tmp_path, flags):
    """Layers, targets, order of rows, loss, gradients and RAdam's steps in two iterations."""
    args, states, logs = watch(file, *flags)
    params = tensors(states[0]["agent"]["params"])
    radam = torch.optim.RAdam(jax.tree.leaves(params))
    for before, after, (metrics, _) in zip(states[:-1], states[1:], logs, strict=True):
        its_params = leaves(before["agent"]["params"])
        with torch.no_grad():  # from where the program was, so that rounding does not add up
            for mine, its in zip(jax.tree.leaves(params), its_params, strict=True):
                mine.copy_(torch.tensor(its))
        rollout, _, orders = follow(args, before)
        assert len({tuple(order) for order in [*orders, range(96)]}) == 4, "a new order each epoch"
        expected, clipped = learn(args, before, radam, params, rollout, orders)
        assert clipped > 2, "the clip must matter"
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=2e-5), name
        its_params = leaves(after["agent"]["params"])
        for got, wanted in zip(its_params, jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(got, wanted.detach().numpy(), atol=1e-4)
    assert expected["charts/learning_rate"] == pytest.approx(0.004 if flags else 0.003)


# known answers

PROBE_FLAGS = "--total-timesteps 2560 --num-envs 8 --num-steps 16 --learning-rate 0.2 --gamma 0.5"
PROBE_FLAGS = (*PROBE_FLAGS.split(), "--end-e", 0.3)


@pytest.mark.parametrize(
    ("probe", "values"),
    [
        pytest.param("ConstantValue", {0: [1, 1]}, marks=pytest.mark.slow),
        pytest.param("Discounting", {0: [0.5, 0.5], 1: [1, 1]}, marks=pytest.mark.slow),
        pytest.param("TruncatedEveryStep", {0: [2, 2]}, marks=pytest.mark.slow),
        ("TwoEnds", {-1: [1, 1], 1: [2, 2]}),
        pytest.param("ActionMatters", {0: [-1, 1]}, marks=pytest.mark.slow),
    ],
)
def test_values_of_probes(file, tmp_path, probe, values):
    env_id = f"tests.gymnax_probes:GymnaxProbe/{probe}-v0"
    names = train(file, tmp_path, "--env-id", env_id, *PROBE_FLAGS)
    params = tensors(jax.tree.map(lambda x: x[0], jax.device_get(names["runs"]["agent"]["params"])))
    learned = q_values_of(params, np.float32([[float(obs)] for obs in values]))
    expected = torch.tensor(list(values.values())).float()
    torch.testing.assert_close(learned.detach(), expected, atol=0.1, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["ActionMatters", "ActionAndObsMatter"])
def test_actions_of_probes(file, tmp_path, probe):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    env_id = f"tests.gymnax_probes:GymnaxProbe/{probe}-v0"
    names = train(file, tmp_path, "--env-id", env_id, *PROBE_FLAGS)
    assert np.min(play(names, only_run(tmp_path), 80)) == 1


@pytest.mark.slow
def test_learns_cartpole_four_times_at_once(file, tmp_path):
    harness.train(file, tmp_path, *FAST_CARTPOLE, "--num-seeds", 4)
    curves = [scalars(run)["charts/episodic_return"] for run in runs_of(tmp_path)]
    means = [np.mean([value for _, value in curve][-2:]) for curve in curves]
    assert len(means) == 4 and min(means) >= 300, means


FAST_CARTPOLE = (
    "--total-timesteps 100000 --num-envs 16 --num-steps 32 --learning-rate 0.001 --q-lambda 0.9 "
    "--exploration-fraction 0.3 --end-e 0.01 --num-minibatches 8"
).split()


@pytest.mark.slow
def test_images_are_convolved(file, tmp_path):
    """MinAtar's: patches times matrix are a convolution, and its channels are normalized."""
    network = runpy.run_path(str(file))["QNetwork"](5)
    obs = np.random.default_rng(1).random((2, 10, 9, 4), np.float32)
    params = network.init(jax.random.key(1), obs)
    weights = params["params"]
    kernel = torch.tensor(np.asarray(weights["Dense_0"]["kernel"])).view(3, 3, 4, 16)
    images = torch.tensor(obs).permute(0, 3, 1, 2)
    hidden = torch.nn.functional.conv2d(images, kernel.permute(3, 2, 0, 1)).permute(0, 2, 3, 1)
    hidden = torch.nn.functional.layer_norm(hidden, (16,)).relu().flatten(1)
    hidden = hidden @ torch.tensor(np.asarray(weights["Dense_1"]["kernel"]))
    hidden = torch.nn.functional.layer_norm(hidden, (128,)).relu()
    q_values = hidden @ torch.tensor(np.asarray(weights["Dense_2"]["kernel"]))
    np.testing.assert_allclose(network.apply(params, obs), q_values, atol=1e-4)


# many runs at once


@pytest.mark.slow
def test_runs_side_by_side(file, tmp_path):
    """Each has its seed, its values and its folder; --resume of one continues all, bit for bit."""
    sweep = ("--sweep", "q_lambda=0.3,0.9", "--num-seeds", 2, "--seed", 4)
    whole, part = halfway(file, tmp_path, *FEW, *sweep)
    told = [about(run)["args"] for run in runs_of(whole)]
    values = [(x["q_lambda"], x["seed"]) for x in told]
    assert values == [(0.3, 4), (0.3, 5), (0.9, 4), (0.9, 5)]
    for run, (q_lambda, seed) in zip(runs_of(whole), values, strict=True):
        assert run.name.startswith(f"CartPole-v1__pqn_jax-q_lambda={q_lambda:g}__{seed}__")
    final = [leaves(read_checkpoint(run)["agent"]["params"]) for run in runs_of(whole)]
    assert len({content[1].tobytes() for content in final}) == 4, "no two are alike"
    for a, b in zip(runs_of(whole), runs_of(part), strict=True):
        shutil.copy(next(a.glob("events*")), b)  # curves beyond the checkpoint are hidden
    train(file, part, "--resume", runs_of(part)[-1])
    for a, b in zip(runs_of(whole), runs_of(part), strict=True):
        assert a.name == b.name and same(read_checkpoint(a), read_checkpoint(b))
        assert without_speed(a) == without_speed(b) and without_speed(b)


@pytest.mark.slow
def test_what_surrounds_the_runs_is_that_of_ppo_jax(file, tmp_path, monkeypatch):
    test_ppo_jax.test_only_runs_of_one_program_at_one_step_are_resumed(file, tmp_path / "program")
    test_ppo_jax.test_the_first_signal_saves_all_runs(file, tmp_path / "signal", monkeypatch)
    test_ppo_jax.test_all_calls_have_one_length(file, tmp_path / "length", 9, 3)


@pytest.mark.slow
def test_a_run_that_diverges_is_named(file, tmp_path):
    """The line on stderr says which of many runs it was, and the last good checkpoint stays."""
    sweep = ("--sweep", "learning_rate=1e-3,1e30")
    with pytest.raises(SystemExit, match=r"td_loss of .*learning_rate=1e.30.* at step 128: nan"):
        train(file, tmp_path, *FEW, *sweep, "--checkpoint-interval", 1)
    assert not (runs_of(tmp_path)[1] / "checkpoint.msgpack").exists()
