"""cleanrl/ppo_continuous_lstm.py. tests/test_ppo_atari_lstm.py runs most of these tests, too."""

import copy

import numpy as np
import pytest
import torch

from tests.harness import FILES, flat_grad, only_run, probe, scalars, train
from tests.test_ppo_continuous_action import (  # noqa: F401  the imported test runs on this file
    test_other_actions_are_refused,
)

SMALL = "--num-envs 4 --num-steps 12 --num-minibatches 2 --update-epochs 2".split()
WHOLE = "--num-envs 4 --num-steps 12 --num-minibatches 1 --update-epochs 1".split()  # in one update
ROLLOUT = {"actions": "actions", "log_probs": "old_log_probs", "values": "values"} | {
    "advantages": "advantages",
    "returns": "returns",
}  # what is learned from, and the array of the rollout that it comes from


def one_by_one(agent, obs, is_last, state):
    """What agent's forward should return, by one environment and one step at a time."""
    cell = torch.nn.LSTMCell(agent.lstm.input_size, agent.lstm.hidden_size)
    cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh = agent.lstm.parameters()
    hidden, states = torch.zeros(*is_last.shape, cell.hidden_size), []
    for e in range(is_last.shape[1]):
        h, c = (x[0, e] for x in state)
        for t in range(len(is_last)):
            frame = obs[t, e] if obs.ndim == 3 else obs[t, e] / 255
            h, c = cell(agent.network(frame[None])[0], (h, c))
            hidden = hidden.index_put((torch.tensor(t), torch.tensor(e)), h)
            if is_last[t, e]:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
        states.append((h, c))
    output, value = agent.actor(hidden), agent.critic(hidden)[..., 0]
    state = tuple(torch.stack(part)[None] for part in zip(*states, strict=True))
    return output if hasattr(agent, "log_std") else output.log_softmax(-1), value, state


def distribution(agent, output):
    if hasattr(agent, "log_std"):
        normal = torch.distributions.Normal(output, agent.log_std.exp())
        return torch.distributions.Independent(normal, 1)
    return torch.distributions.Categorical(logits=output)


def random_ends(file, folder, *flags, **kwargs):
    """Train where episodes end at random moments and in both ways, for two iterations."""
    flags = ["--env-id", probe(file, "RandomEnds"), "--total-timesteps", 96, *flags]
    return train(file, folder, *flags, **kwargs)


def agent_as_built(file, folder):
    built = []

    def look(names):
        built.append(copy.deepcopy(names["agent"]))

    random_ends(file, folder, *WHOLE, on_update=look)
    return built[0]


def last_hundred(run):
    return np.mean([value for _, value in scalars(run)["charts/episodic_return"]][-100:])


# the details of the LSTM


def test_lstm_1_orthogonal_weights_and_zero_biases(file, tmp_path):
    for name, parameter in agent_as_built(file, tmp_path).lstm.named_parameters():
        if "bias" in name:
            assert parameter.abs().max() == 0
        else:
            identity = torch.eye(parameter.shape[1])
            torch.testing.assert_close(parameter.T @ parameter, identity, atol=1e-5, rtol=0)


def test_core_2_orthogonal_weights_and_zero_biases(file, tmp_path):
    agent = agent_as_built(file, tmp_path)
    heads = {agent.actor: 0.01, agent.critic: 1.0}
    for layer in (*heads, *(layer for layer in agent.network if hasattr(layer, "weight"))):
        is_wide = len(layer.weight) <= layer.weight[0].numel()
        weight = layer.weight.flatten(1) if is_wide else layer.weight.T
        expected = heads.get(layer, 2**0.5) ** 2 * torch.eye(len(weight))
        torch.testing.assert_close(weight @ weight.T, expected, atol=1e-5, rtol=0)
        assert layer.bias.abs().max() == 0


def test_lstm_2_zero_state_at_the_start(file, tmp_path):
    states = []
    random_ends(file, tmp_path, *WHOLE, on_update=lambda names: states.append(names["first_state"]))
    assert [tuple(part.shape) for part in states[0]] == [(1, 4, 128)] * 2
    assert all(part.abs().max() == 0 for part in states[0])
    assert all(part.abs().max() > 0 for part in states[1]), (
        "a rollout continues from where the last one was"
    )


def test_lstm_3_state_is_zeroed_at_every_end(file, tmp_path):
    """The state while acting is that of a slow reference, for both kinds of end."""
    kinds = set()

    def look(names):
        agent, is_last, first_state = (names[x] for x in ("agent", "is_last", "first_state"))
        ends = is_last[1:] & ~is_last[:-1]
        kinds.update(names["terminated"][ends].tolist())
        obs = torch.from_numpy(names["obs"])
        _, value, state = one_by_one(agent, obs[:-1], is_last[:-1], first_state)
        torch.testing.assert_close(state, names["state"], atol=1e-5, rtol=1e-4)
        _, last_value, _ = one_by_one(agent, obs[-1:], is_last[-1:], state)
        found = torch.from_numpy(names["values"])
        torch.testing.assert_close(torch.cat([value, last_value]), found, atol=1e-5, rtol=1e-4)
        _, forgetful, _ = one_by_one(agent, obs[:-1], np.ones_like(is_last[:-1]), first_state)
        assert (value - forgetful)[is_last[:-1]].abs().max() > 1e-3, (
            "the last value must depend on the state"
        )

    random_ends(file, tmp_path, *WHOLE, "--learning-rate", 0.003, on_update=torch.no_grad()(look))
    assert kinds == {True, False}


def test_lstm_3_nothing_leaks_across_an_end(file, tmp_path):
    """By its gradient, an output depends on the observations of its own episode so far."""
    names = random_ends(file, tmp_path, *WHOLE)
    obs = torch.from_numpy(names["obs"][:6, :3]).float().requires_grad_()
    is_last = np.zeros((6, 3), dtype=bool)
    is_last[[2, 1, 4, 5], [0, 1, 1, 2]] = True
    episode = np.cumsum(is_last, 0) - is_last
    output, value, state = names["agent"](obs, is_last, None)
    for t, e in np.ndindex(6, 3):
        for scalar in (output[t, e].flatten()[0], value[t, e]):
            (grad,) = torch.autograd.grad(scalar, obs, retain_graph=True)
            found = (grad.abs().flatten(2).amax(2) > 0).numpy()
            expected = np.zeros((6, 3), dtype=bool)
            expected[: t + 1, e] = episode[: t + 1, e] == episode[t, e]
            assert (found == expected).all(), f"step {t} of environment {e}"
    assert all(part[0, 2].abs().max() == 0 and part[0, 0].abs().max() > 0 for part in state), (
        "the next step starts anew"
    )


def test_lstm_3_many_steps_at_once_are_one_by_one(file, tmp_path):
    names = random_ends(file, tmp_path, *WHOLE)
    obs, state = torch.from_numpy(names["obs"]), tuple(torch.randn(2, 1, 4, 128))
    for ends in (names["is_last"], np.zeros_like(names["is_last"]), np.ones_like(names["is_last"])):
        with torch.no_grad():
            expected = one_by_one(names["agent"], obs, ends, state)
            found = names["agent"](obs, ends, state)
        for a, b in zip(expected[:2] + expected[2], found[:2] + found[2], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_lstm_4_minibatches_are_whole_sequences(file, tmp_path):
    minibatches = []

    def look(names):
        columns, is_last = names["columns"].tolist(), names["is_last"]
        minibatches.append(columns)
        real = [step for step in np.ndindex(12, 5) if not is_last[step]]
        steps = [(t, e) for t in range(12) for e in columns if not is_last[t, e]]
        assert names["mb"].tolist() == [real.index(step) for step in steps]
        for name, array in ROLLOUT.items():
            expected = torch.from_numpy(np.array([names[array][step] for step in steps]))
            assert torch.equal(names[f"b_{name}"][names["mb"]], expected)
        assert len(names["ratio"]) == len(names["value"]) == len(steps)

    flags = "--num-envs 5 --num-steps 12 --num-minibatches 2 --update-epochs 3"
    random_ends(file, tmp_path, *flags.split(), "--total-timesteps", 60, on_update=look)
    assert [len(columns) for columns in minibatches] == [3, 2] * 3
    epochs = [tuple(minibatches[i] + minibatches[i + 1]) for i in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({*epochs, tuple(range(5))}) == 4, "a new order in each epoch"


def test_lstm_5_states_are_rebuilt_from_the_rollouts_start(file, tmp_path):
    """Before an iteration's first update, learning sees the policy and values that acted."""
    largest = []

    def look(names):
        ratio, value, b_values = names["ratio"], names["value"], names["b_values"][names["mb"]]
        largest.append(max(part.abs().max() for part in names["first_state"]))
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
        torch.testing.assert_close(value, b_values, atol=1e-5, rtol=1e-4)

    flags = [*WHOLE, "--total-timesteps", 144, "--learning-rate", 0.003]
    random_ends(file, tmp_path, *flags, on_update=look)
    assert largest[0] == 0 and min(largest[1:]) > 0.01 and len(largest) == 3


def test_lstm_5_states_are_rebuilt_for_the_environments_of_a_minibatch(file, tmp_path):
    def look(names):
        for part, whole in zip(names["mb_state"], names["first_state"], strict=True):
            assert torch.equal(part, whole[:, names["columns"]])

    random_ends(file, tmp_path, *SMALL, on_update=look)


# the details of ppo.py that look different here


def test_core_5_advantages(file, tmp_path):
    """Against a slow reference that walks each episode by itself."""
    flags = "--num-envs 3 --num-steps 32 --num-minibatches 1 --update-epochs 1 --gamma 0.9"
    flags = [*flags.split(), "--gae-lambda", 0.7, "--total-timesteps", 192]
    names = random_ends(file, tmp_path, *flags)
    values, terminated, is_last = (names[name] for name in ("values", "terminated", "is_last"))
    rewards = names["scaled_rewards"] if "scaled_rewards" in names else np.sign(names["rewards"])
    ends = is_last[1:] & ~is_last[:-1]
    assert terminated.any() and (ends & ~terminated).any() and is_last[:-1].any(), (
        "the rollout must hold every case"
    )
    for t, e in zip(*np.nonzero(~is_last[:-1]), strict=True):
        expected, weight, k = 0.0, 1.0, t
        while True:
            following = 0.0 if terminated[k, e] else float(values[k + 1, e])
            expected += weight * (float(rewards[k, e]) + 0.9 * following - float(values[k, e]))
            if is_last[k + 1, e] or k == 31:
                break
            weight, k = weight * 0.9 * 0.7, k + 1
        assert names["advantages"][t, e] == pytest.approx(expected, abs=1e-5)
        assert names["returns"][t, e] == pytest.approx(expected + values[t, e], abs=1e-5)


def test_core_10_one_loss_for_policy_value_and_entropy(file, tmp_path):
    """The gradient is that of the textbook loss, of real steps only, by the slow reference."""

    def look(names):
        agent, mb, adv = copy.deepcopy(names["agent"]), names["mb"], names["adv"]
        columns, clip = names["columns"], names["args"].clip_coef
        is_last = names["is_last"][:-1, columns]
        real = torch.from_numpy(~is_last)
        obs = torch.from_numpy(names["obs"][:-1, columns])
        state = tuple(part[:, columns] for part in names["first_state"])
        output, value, _ = one_by_one(agent, obs, is_last, state)
        policy = distribution(agent, output[real])
        ratio = torch.exp(policy.log_prob(names["b_actions"][mb]) - names["b_log_probs"][mb])
        gain = torch.minimum(ratio * adv, torch.clip(ratio, 1 - clip, 1 + clip) * adv)
        error = (value[real] - names["b_returns"][mb]) ** 2
        loss = -gain.mean() + 0.7 * error.mean() / 2 - 0.3 * policy.entropy().mean()
        expected = torch.autograd.grad(loss, list(agent.parameters()))
        expected = torch.cat([gradient.flatten() for gradient in expected])
        torch.testing.assert_close(flat_grad(names["agent"]), expected, atol=1e-5, rtol=1e-3)

    flags = "--vf-coef 0.7 --ent-coef 0.3 --no-clip-vloss --max-grad-norm 1e9 --learning-rate 0.003"
    random_ends(file, tmp_path, *SMALL, *flags.split(), on_update=look)


def test_reset_rows_are_not_learned_from(file, tmp_path):
    """MarkedLast takes three steps and a reset."""
    seen = []

    def look(names):
        real = [step for step in np.ndindex(12, 4) if step[0] % 4 < 3]
        for name, array in ROLLOUT.items():
            expected = torch.from_numpy(np.array([names[array][step] for step in real]))
            assert torch.equal(names[f"b_{name}"], expected)
        seen.extend(names["mb"].tolist())

    flags = ["--env-id", probe(file, "MarkedLast"), *SMALL, "--total-timesteps", 48]
    train(file, tmp_path, *flags, on_update=look)
    assert sorted(seen) == sorted(2 * list(range(36))), "all the others, in each of the two epochs"


# memory


def test_loaded_policy_remembers_until_the_end(file, tmp_path):
    names = random_ends(file, tmp_path, *WHOLE)
    agent, is_last = names["agent"], names["is_last"]
    envs = names["make_envs"](names["args"], 4)
    seen = [envs.reset()[0] for _ in is_last]
    obs = [agent.normalize(x) if hasattr(agent, "normalize") else x for x in seen]
    obs = torch.from_numpy(np.stack(obs))
    expected, _, _ = one_by_one(agent, obs, is_last, torch.zeros(2, 1, 4, 128))

    def no_sample(output, *_):
        return output  # look at the distributions, not at samples

    names["load_policy"].__globals__["sample"] = no_sample
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    for _ in range(2):  # a policy loaded later knows nothing of what an earlier one saw
        policy = names["load_policy"](checkpoint, envs)
        found = [policy(x, ends) for x, ends in zip(seen, is_last, strict=True)]
        found = torch.from_numpy(np.stack(found)).float()
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_loaded_policy_keeps_to_the_bounds(file, tmp_path):
    """The probe refuses actions beyond 1; while learning, there are others."""
    flags = ["--env-id", "ContinuousProbe/ActionMatters-v0", *SMALL, "--total-timesteps", 96]
    names = train(file, tmp_path, *flags)
    assert np.abs(names["actions"]).max() > 1
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    policy = names["load_policy"](checkpoint, names["envs"])
    actions = [policy(np.zeros((4, 1)), np.ones(4, bool)) for _ in range(20)]
    assert np.abs(actions).max() == 1 and np.abs(actions).min() < 0.5


def test_scalar_actions(file, tmp_path):
    """An action without a shape has a log-density, too."""
    flags = ["--env-id", "Probe/ScalarActions-v0", *SMALL, "--total-timesteps", 96]
    names = train(file, tmp_path, *flags)
    assert names["actions"].shape == (12, 4) and names["agent"].log_std.shape == ()
    assert names["log_ratio"].shape == names["mb"].shape
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    policy = names["load_policy"](checkpoint, names["envs"])
    assert policy(np.zeros((4, 1)), np.ones(4, bool)).shape == (4,)


def test_remembers_what_others_forget(file, tmp_path):
    flags = "--total-timesteps 6000 --num-envs 16 --num-steps 30 --learning-rate 0.005 --gamma 0.9"
    flags = [*flags.split(), "--update-epochs", 4, "--num-minibatches", 2, "--no-clip-vloss"]
    flags = ["--env-id", "ContinuousProbe/Recall-v0", *flags]
    train(file, tmp_path / "with", *flags)
    train(FILES["ppo_continuous_action"], tmp_path / "without", *flags)
    assert last_hundred(only_run(tmp_path / "with")) > 0.8
    assert last_hundred(only_run(tmp_path / "without")) < 0.3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_swings_up_a_pendulum_without_seeing_its_velocity(file, tmp_path):
    flags = "--total-timesteps 300000 --num-envs 16 --num-steps 64 --learning-rate 0.001"
    flags = [*flags.split(), "--gamma", 0.9, "--update-epochs", 10, "--num-minibatches", 4]
    flags = ["--env-id", "Probe/PendulumWithoutVelocity-v0", *flags]
    train(file, tmp_path / "with", *flags)
    train(FILES["ppo_continuous_action"], tmp_path / "without", *flags)
    assert last_hundred(only_run(tmp_path / "with")) > -400
    assert last_hundred(only_run(tmp_path / "without")) < -700
