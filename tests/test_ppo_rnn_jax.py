"""cleanrl/ppo_rnn_jax.py. test_rnn_N guards detail N of docs/rl-algorithms/ppo-rnn-jax.md, the
others those of ppo.md; tests/mutations shows that each test bites.

Compiling takes longer than everything else here: so tests share a program, which is made once for
each file."""

import functools
import runpy
from types import SimpleNamespace

import gymnasium as gym
import gymnax
import jax
import numpy as np
import pytest
import torch

import tests.gymnax_probes  # noqa: F401  registers them
from cleanrl_utils import enjoy
from tests.harness import FILES, about, only_run, read_checkpoint, same, scalars
from tests.test_dqn_jax import compiled_quickly, leaves, tensors, train, without_speed
from tests.test_ppo_jax import FEW, advantages_of, begin, halfway, orders_of, runs_of

# an iteration once more: environments and agent step by step, PyTorch's GRU, autograd and Adam

CELL = torch.nn.GRUCell(64, 128)


def remember(params, obs, state):
    """What is remembered after an observation of each environment."""
    network, gru = params["params"]["network"]["Dense_0"], params["params"]["gru"]
    features = (torch.tensor(obs) @ network["kernel"] + network["bias"]).tanh()
    weights = {"weight_ih": torch.cat([gru[name]["kernel"].T for name in ("ir", "iz", "in")])}
    weights |= {"weight_hh": torch.cat([gru[name]["kernel"].T for name in ("hr", "hz", "hn")])}
    weights |= {"bias_ih": torch.cat([gru[name]["bias"] for name in ("ir", "iz", "in")])}
    weights |= {
        "bias_hh": torch.cat([torch.zeros(256), gru["hn"]["bias"]])
    }  # two biases that are added would be one too many
    return torch.func.functional_call(
        CELL, weights, (features, state if torch.is_tensor(state) else torch.tensor(state))
    )


def heads(params, hidden):
    """Policy and value of what is remembered."""
    actor, critic = params["params"]["actor"], params["params"]["critic"]
    value = hidden @ critic["kernel"] + critic["bias"]
    return (hidden @ actor["kernel"] + actor["bias"]).log_softmax(-1), value.squeeze(-1)


def unroll(params, obs, is_over, state):
    """Policy, value and the state at the end, by one step and one environment at a time."""
    hidden, states = [], []
    for e in range(is_over.shape[1]):
        mine = torch.tensor(np.asarray(state[e : e + 1]))
        for t in range(len(is_over)):
            mine = remember(params, obs[t, e : e + 1], mine)
            hidden.append(mine[0])
            mine = torch.zeros(1, 128) if is_over[t, e] else mine
        states.append(mine[0])
    hidden = torch.stack(hidden).unflatten(0, is_over.shape[::-1]).transpose(0, 1)
    return *heads(params, hidden), torch.stack(states)


@torch.no_grad()
def follow(args, run):
    """The rollout of a run's next iteration, by gymnax's own step with the random numbers that the
    program draws, what the world is after it, and the order of environments in each epoch."""
    env, env_params = gymnax.make(args.env_id)
    _, noise_key, env_key, order_key = jax.random.split(run["key"], 4)
    rows, size = (args.num_steps, args.num_envs), args.num_steps * args.num_envs
    noise = np.asarray(jax.random.gumbel(noise_key, (*rows, env.num_actions)))
    step_keys, reset_keys = jax.random.split(env_key, (2, size))
    step_keys = step_keys.reshape(*rows, -1)
    fresh = jax.device_get(jax.jit(jax.vmap(env.reset_env, (0, None)))(reset_keys, env_params))
    step, is_cut = jax.jit(env.step_env), jax.jit(env.is_truncated)
    params, world, rollout = tensors(run["agent"]["params"]), run["world"], []
    for t in range(args.num_steps):
        row, new = [], []
        for e in range(args.num_envs):
            hidden = remember(params, world["obs"][e : e + 1], world["state"][e : e + 1])
            (log_probs,), (value,) = (x.numpy() for x in heads(params, hidden))
            action, state = (
                int((log_probs + noise[t, e]).argmax()),
                jax.tree.map(lambda x, e=e: x[e], world["env_state"]),
            )
            answers = jax.device_get(step(step_keys[t, e], state, action, env_params))
            next_obs, next_state, reward, terminated, _ = answers
            truncated = bool(is_cut(next_state, env_params))
            next_value = heads(params, remember(params, next_obs[None], hidden))[1].numpy()[0]
            total, length = world["episode_return"][e] + reward, world["episode_length"][e] + 1
            columns = (
                world["obs"][e],
                action,
                log_probs[action],
                value,
                reward,
                bool(terminated),
                truncated,
                next_value,
            )
            row.append((*columns, total, length))
            is_over = terminated or truncated
            begins = jax.tree.map(lambda x, at=t * args.num_envs + e: x[at], fresh)
            obs, next_state = begins if is_over else (next_obs, next_state)
            kept = dict(
                episode_return=np.float32(total * (not is_over)),
                episode_length=np.float32(length * (not is_over)),
            )
            new.append(
                kept | dict(env_state=next_state, obs=obs, state=hidden[0].numpy() * (not is_over))
            )
        world = jax.tree.map(lambda *x: np.stack(x), *new)
        rollout.append([np.stack(column) for column in zip(*row, strict=True)])
    orders = orders_of(args, order_key, args.num_envs)
    return [np.stack(column) for column in zip(*rollout, strict=True)], world, orders


def learn(args, run, adam, params, rollout, orders):
    """The metrics of an iteration in which PyTorch's Adam changes params; how much the clips
    did."""
    obs, actions, logprobs, values, rewards, terminated, truncated, next_values, _, _ = rollout
    is_over = terminated | truncated
    advantages = advantages_of(args, values, next_values, rewards, terminated, is_over)
    returns, total = advantages + values, args.total_timesteps // advantages.size
    rate = args.learning_rate * (
        1 - args.anneal_lr * (int(run["global_step"]) // advantages.size) / total
    )
    adam.param_groups[0]["lr"] = rate
    clipfracs, did = [], dict(ratio=0, value=0, norm=0)
    for order in orders:
        for mb in order.reshape(args.num_minibatches, -1):
            mb_columns = [x[:, mb] for x in (actions, logprobs, values, advantages, returns)]
            b_actions, b_logprobs, b_values, b_advantages, b_returns = map(torch.tensor, mb_columns)
            log_probs, value, _ = unroll(
                params, obs[:, mb], is_over[:, mb], run["world"]["state"][mb]
            )
            ratio = (log_probs.gather(2, b_actions[..., None])[..., 0] - b_logprobs).exp()
            if args.norm_adv:
                b_advantages = (b_advantages - b_advantages.mean()) / (
                    b_advantages.std(correction=0) + 1e-8
                )
            near = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            gain = torch.minimum(ratio * b_advantages, near * b_advantages)
            error, near_value = (
                (value - b_returns) ** 2,
                b_values + (value - b_values).clamp(-args.clip_coef, args.clip_coef),
            )
            worse = (
                torch.maximum(error, (near_value - b_returns) ** 2) if args.clip_vloss else error
            )
            entropy = torch.distributions.Categorical(logits=log_probs).entropy().mean()
            policy_loss, value_loss = -gain.mean(), worse.mean() / 2
            adam.zero_grad()
            (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
            norm = torch.nn.utils.clip_grad_norm_(jax.tree.leaves(params), args.max_grad_norm)
            adam.step()
            clipfracs.append(float(((ratio - 1).abs() > args.clip_coef).float().mean()))
            did["ratio"] += int((gain < ratio * b_advantages).sum())
            did["value"] += int((worse > error).sum())
            did["norm"] += int(norm > args.max_grad_norm)
    metrics = {
        "value_loss": value_loss,
        "policy_loss": policy_loss,
        "entropy": entropy,
        "clipfrac": np.mean(clipfracs),
    }
    metrics |= {"old_approx_kl": -ratio.log().mean(), "approx_kl": (ratio - 1 - ratio.log()).mean()}
    metrics |= {"explained_variance": 1 - advantages.var() / returns.var()}
    metrics = {f"losses/{name}": float(torch.as_tensor(x).detach()) for name, x in metrics.items()}
    return metrics | {"charts/learning_rate": rate}, did


WATCHED = "--env-id GymnaxProbe/RandomEnds-v0 --num-envs 6 --num-steps 16 --num-minibatches 2"
WATCHED += " --update-epochs 3 --total-timesteps 384 --learning-rate 0.004 --gamma 0.9"
WATCHED += " --gae-lambda 0.7 --clip-coef 0.05 --vf-coef 0.7 --ent-coef 0.3 --max-grad-norm 0.3"
WATCHED = WATCHED.split()


@functools.cache
def watch(file, *flags):
    """The states of a run before, between and after two iterations, what each iteration logged, and
    how it is to be."""
    args, run, program = begin(file, *WATCHED, *flags)
    states, logs = [run], []
    for _ in range(2):
        run, log = program(run)
        states.append(run)
        logs.append(log)
    return args, states, logs, compiled_quickly(lambda: [follow(args, run) for run in states[:-1]])


def test_core_1_and_lstm_3_episodes_and_what_is_remembered_of_them(file, tmp_path):
    """The world after an iteration, its memories, and every end in it, are those of agent and
    environments, stepped one by one from the world before."""
    _, states, logs, followed = watch(file)
    for after, (_, (is_over, returns, lengths)), (rollout, world, _) in zip(
        states[1:], logs, followed, strict=True
    ):
        terminated, truncated, total, length = (rollout[i] for i in (5, 6, 8, 9))
        assert (terminated & ~truncated).sum() > 5 and (truncated & ~terminated).sum() > 5, (
            "both ends"
        )
        np.testing.assert_array_equal(is_over, terminated | truncated)
        np.testing.assert_allclose(returns[is_over], total[is_over], atol=1e-5)
        np.testing.assert_array_equal(lengths[is_over], length[is_over])
        for got, wanted in zip(leaves(after["world"]), leaves(world), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
        is_forgotten = is_over[-1]
        assert is_forgotten.any() and not is_forgotten.all(), "there must be both"
        assert (np.abs(after["world"]["state"]).max(1) > 0.01).tolist() == (~is_forgotten).tolist()
    assert after["world"]["episode_length"].max() > 0, "some are under way"


def test_core_2_and_lstm_1_orthogonal_weights_and_zero_biases(file, tmp_path):
    _, states, _, _ = watch(file)
    params = states[0]["agent"]["params"]["params"]
    layers = [
        (params["network"]["Dense_0"], 2**0.5),
        (params["actor"], 0.01),
        (params["critic"], 1.0),
    ]
    for layer, gain in layers + [(layer, 1.0) for layer in params["gru"].values()]:
        weight = layer["kernel"] if np.subtract(*layer["kernel"].shape) <= 0 else layer["kernel"].T
        np.testing.assert_allclose(weight @ weight.T, gain**2 * np.eye(len(weight)), atol=1e-5)
        assert np.abs(layer.get("bias", np.zeros(1))).max() == 0
    assert sorted(params["gru"]) == ["hn", "hr", "hz", "in", "ir", "iz"]


def test_lstm_2_zero_state_at_the_start(file, tmp_path):
    _, states, _, _ = watch(file)
    assert (
        states[0]["world"]["state"].shape == (6, 128)
        and np.abs(states[0]["world"]["state"]).max() == 0
    )
    assert np.abs(states[1]["world"]["state"]).max() > 0, (
        "a rollout goes on from where the last one was"
    )


OTHER_FLAGS = pytest.param(
    ("--no-norm-adv", "--no-clip-vloss", "--no-anneal-lr"), marks=pytest.mark.slow
)


@pytest.mark.parametrize("flags", [(), OTHER_FLAGS])
def test_core_3_to_12_and_lstm_4_to_5_an_iteration_is_that_of_a_slow_reference(
    file, tmp_path, flags
):
    """Advantages, minibatches of whole environments, states rebuilt from the rollout's start,
    losses, gradients and Adam's steps, in two iterations."""
    args, states, logs, followed = watch(file, *flags)
    params = tensors(states[0]["agent"]["params"])
    adam = torch.optim.Adam(jax.tree.leaves(params), eps=1e-5)
    for before, after, (metrics, _), (rollout, _, orders) in zip(
        states[:-1], states[1:], logs, followed, strict=True
    ):
        with (
            torch.no_grad()
        ):  # each iteration from where the program was, so that rounding does not add up
            for mine, its in zip(
                jax.tree.leaves(params), leaves(before["agent"]["params"]), strict=True
            ):
                mine.copy_(torch.tensor(its))
        assert len({tuple(order) for order in [*orders, range(6)]}) == 4, (
            "a new order in each epoch"
        )
        expected, did = learn(args, before, adam, params, rollout, orders)
        assert did["ratio"] > 10 and did["norm"] > 2 and (did["value"] > 20) == args.clip_vloss, (
            "the clips must matter"
        )
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
        for got, wanted in zip(
            leaves(after["agent"]["params"]), jax.tree.leaves(params), strict=True
        ):
            np.testing.assert_allclose(got, wanted.detach().numpy(), atol=1e-5)
    assert expected["charts/learning_rate"] == pytest.approx(0.004 if flags else 0.003)
    assert np.abs(before["world"]["state"]).max() > 0.01, (
        "the second iteration begins with memories"
    )


# the agent by itself


def agent_of(file):
    """The file's agent, and weights for it."""
    agent = runpy.run_path(str(file))["Agent"](2)
    inputs = np.zeros((1, 1), np.float32), np.zeros((1, 128), np.float32)
    init = jax.jit(lambda: agent.init(jax.random.key(1), *inputs, method="step"))
    return agent, compiled_quickly(lambda: jax.device_get(init()))


def test_lstm_3_many_steps_at_once_are_one_by_one(file, tmp_path):
    agent, params = agent_of(file)
    rng = np.random.default_rng(1)
    obs = rng.standard_normal((12, 4, 1)).astype(np.float32)
    state = rng.standard_normal((4, 128)).astype(np.float32)
    apply = jax.jit(agent.apply)
    for ends in (rng.random((12, 4)) < 0.3, np.zeros((12, 4), bool), np.ones((12, 4), bool)):
        *expected, _ = unroll(tensors(params), obs, ends, state)
        got = compiled_quickly(lambda ends=ends: apply(params, obs, ends, state))
        for x, wanted in zip(got, expected, strict=True):
            np.testing.assert_allclose(x, wanted.detach().numpy(), atol=1e-5)
    expected = unroll(tensors(params), obs[:1], np.zeros((1, 4), bool), state)
    step = compiled_quickly(lambda: agent.apply(params, obs[0], state, method="step"))
    for x, wanted in zip(step, expected, strict=True):
        np.testing.assert_allclose(x, wanted.detach().numpy().reshape(x.shape), atol=1e-5)


def test_lstm_3_nothing_leaks_across_an_end(file, tmp_path):
    """The gradient tells what an output depends on: on the observations of its episode so far, and
    on nothing else."""
    agent, params = agent_of(file)
    is_last = np.zeros((6, 3), dtype=bool)
    is_last[[2, 1, 4, 5], [0, 1, 1, 2]] = True
    episode = np.cumsum(is_last, 0) - is_last
    obs = np.random.default_rng(1).standard_normal((6, 3, 1)).astype(np.float32)
    zeros = np.zeros((3, 128), np.float32)
    jacobian = jax.jit(jax.jacrev(lambda obs: agent.apply(params, obs, is_last, zeros)))
    log_probs, values = compiled_quickly(lambda: jax.device_get(jacobian(obs)))
    for t, e in np.ndindex(6, 3):
        depends = np.zeros((6, 3), dtype=bool)
        depends[: t + 1, e] = episode[: t + 1, e] == episode[t, e]
        for grad in (log_probs[t, e, 0], values[t, e]):
            assert ((np.abs(grad[..., 0]) > 0) == depends).all(), f"step {t} of environment {e}"


def test_rnn_1_images_are_remembered_too(file, tmp_path):
    """The network for images is shared too, and of a size that fits; only shapes are computed
    here."""
    agent, obs = runpy.run_path(str(file))["Agent"](6), np.zeros((5, 3, 10, 10, 4), bool)
    is_last, state = np.zeros((5, 3), bool), np.zeros((3, 128), np.float32)

    def shapes():
        params = agent.init(jax.random.key(1), obs[0], state, method="step")
        return agent.apply(params, obs, is_last, state), params

    (log_probs, value), params = jax.eval_shape(shapes)
    assert (log_probs.shape, value.shape) == ((5, 3, 6), (5, 3))
    assert {*params["params"]} == {"network", "gru", "actor", "critic"}
    assert params["params"]["gru"]["in"]["kernel"].shape == (128, 128)
    assert params["params"]["network"]["Dense_0"]["kernel"].shape == (3 * 3 * 4, 16)


def test_loaded_policy_remembers_until_the_end(file, tmp_path):
    names, (_, states, _, _) = runpy.run_path(str(file)), watch(file)
    params = jax.tree.map(np.array, states[0]["agent"]["params"])
    params["params"]["actor"]["kernel"] *= 1e6  # so that samples are the most likely actions
    rng = np.random.default_rng(1)
    obs, is_last = rng.standard_normal((40, 4, 1)).astype(np.float32), rng.random((40, 4)) < 0.2
    likely, _, _ = unroll(tensors(params), obs, is_last, np.zeros((4, 128), np.float32))
    forgetful, _, _ = unroll(
        tensors(params), obs, np.ones_like(is_last), np.zeros((4, 128), np.float32)
    )
    expected = likely.argmax(-1).numpy() + 3
    assert (forgetful.argmax(-1).numpy() + 3 != expected).mean() > 0.05, "memory must matter"
    envs = SimpleNamespace(num_envs=4, single_observation_space=gym.spaces.Box(-1, 1, (1,)))
    envs.single_action_space = gym.spaces.Discrete(2, start=3)
    for _ in range(2):  # a policy loaded later knows nothing of what an earlier one saw
        policy = names["load_policy"]({"agent": {"params": params}}, envs)
        np.testing.assert_array_equal(
            [policy(x, ends) for x, ends in zip(obs, is_last, strict=True)], expected
        )


# known answers

PROBE_FLAGS = "--num-envs 16 --num-steps 16 --learning-rate 0.003 --ent-coef 0 --no-clip-vloss"
PROBE_FLAGS = PROBE_FLAGS.split()


def last_hundred(run):
    return np.mean([value for _, value in scalars(run)["charts/episodic_return"]][-100:])


RECALL = "--env-id tests.gymnax_probes:GymnaxProbe/Recall-v0 --total-timesteps 10240 --gamma 0.9"
RECALL = (*RECALL.split(), *PROBE_FLAGS)


def test_remembers_the_first_observation(file, tmp_path):
    """For five steps. Who does not gets 0 on average, whatever he does."""
    train(file, tmp_path, *RECALL)
    assert last_hundred(only_run(tmp_path)) > 0.8


@pytest.mark.slow
def test_without_memory_it_is_not_learned(file, tmp_path):
    train(FILES["ppo_jax"], tmp_path, *RECALL)
    assert abs(last_hundred(only_run(tmp_path))) < 0.3


@pytest.mark.slow
def test_rnn_2_a_cut_is_bootstrapped_by_one_who_remembers(file, tmp_path):
    """Without the memory, the last observation of a cut episode would be worth 0, and the first
    half as much."""
    flags = ("--env-id", "tests.gymnax_probes:GymnaxProbe/RecallAcrossACut-v0", *PROBE_FLAGS)
    flags = (*flags, "--total-timesteps", 40_960)
    names = train(file, tmp_path, *flags, "--gamma", 0.5)
    params = tensors(jax.tree.map(lambda x: x[0], jax.device_get(names["runs"]["agent"]["params"])))
    obs = np.float32([[[1, 0], [-1, 0]], [[0, 1], [0, 1]]])
    _, values, _ = unroll(params, obs, np.zeros((2, 2), bool), np.zeros((2, 128), np.float32))
    np.testing.assert_allclose(values.detach().numpy(), [[0.5, -0.5], [1, -1]], atol=0.1)


@pytest.mark.slow
def test_values_of_a_probe(file, tmp_path):
    flags = ("--env-id", "tests.gymnax_probes:GymnaxProbe/Discounting-v0", *PROBE_FLAGS)
    flags = (*flags, "--total-timesteps", 20_480)
    names = train(file, tmp_path, *flags, "--gamma", 0.5)
    params = tensors(jax.tree.map(lambda x: x[0], jax.device_get(names["runs"]["agent"]["params"])))
    _, values, _ = unroll(
        params, np.float32([[[0]], [[1]]]), np.zeros((2, 1), bool), np.zeros((1, 128), np.float32)
    )
    assert values.flatten().tolist() == pytest.approx([0.5, 1], abs=0.1)


@pytest.mark.slow
def test_learns_a_memory_chain(file, tmp_path):
    """The bit of the first steps is asked for at the sixth: 1 for who remembers it, -1 for who does
    not, 0 for a guess."""
    train(file, tmp_path, "--num-seeds", 4, "--total-timesteps", 65_536)
    assert len(runs_of(tmp_path)) == 4 and min(map(last_hundred, runs_of(tmp_path))) >= 0.95
    run = runs_of(tmp_path)[0]
    assert enjoy.evaluate(run, enjoy.load_checkpoint(run), 50)["mean"] >= 0.8, "as it is watched"


# what is written


@pytest.mark.slow
def test_rnn_3_memories_go_on_after_an_interruption(file, tmp_path):
    """It is in the checkpoint: runs side by side and a run that was alone resume bit for bit."""
    flags = (*FEW, "--env-id", "MemoryChain-bsuite")
    for few in (("--num-seeds", 2), ()):
        whole, part = halfway(file, tmp_path / f"{len(few)}", *flags, *few)
        assert len(runs_of(whole)) == (2 if few else 1)
        for a, b in zip(runs_of(whole), runs_of(part), strict=True):
            assert about(a)["args"]["seed"] == about(b)["args"]["seed"]
            checkpoint = read_checkpoint(b)
            assert checkpoint["global_step"] == 4 * 64
            assert np.abs(checkpoint["world"]["state"]).max() > 0
        train(file, tmp_path, "--resume", runs_of(part)[0])
        for a, b in zip(runs_of(whole), runs_of(part), strict=True):
            assert a.name == b.name and same(read_checkpoint(a), read_checkpoint(b))
            assert without_speed(a) == without_speed(b) and without_speed(b)
