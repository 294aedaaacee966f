"""cleanrl/pqn_atari_envpool_lstm.py. The details of PQN and of the LSTM, where they meet."""

import copy

import numpy as np
import pytest
import torch

from tests.harness import FILES, flat_grad, only_run, probe, scalars, train
from tests.test_dqn import play
from tests.test_ppo_atari_envpool import envpool, make_envs
from tests.test_pqn_atari_envpool import (  # noqa: F401
    LONG_ROLLOUT,
    PROBE_FLAGS,
    SMALL,
    StripedPool,
    check_targets,
    disturb,
    features_by_hand,
    random_ends,
    test_pqn_3_orthogonal_weights_and_zero_biases,
    test_pqn_7_pqn_9_rectified_adam_of_clipped_gradients,
)
from tests.test_pqn_atari_envpool import test_actions_of_probes as check_actions

TWO = ("--total-timesteps", 64, "--num-minibatches", 1)  # iterations of one update


def one_by_one(network, obs, is_last, state):
    """Values of all actions and the last state, by one environment and one step at a time."""
    cell = torch.nn.LSTMCell(512, 128)
    cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh = network.lstm.parameters()
    columns, states = [], []
    for e in range(is_last.shape[1]):
        (h, c), hidden = state[:, 0, e], []
        for t in range(len(is_last)):
            h, c = cell(network.network(obs[t, e, None] / 255)[0], (h, c))
            hidden.append(h)
            h, c = (x * (not is_last[t, e]) for x in (h, c))
        columns.append(network.q_values(torch.stack(hidden)))
        states.append(torch.stack([h, c]))
    return torch.stack(columns, 1), torch.stack(states, 1)[:, None]


def test_pqn_2_layers_are_normalized(file, tmp_path):
    """Those before the LSTM, against the formula, with pixels between 0 and 1."""
    network = random_ends(file, tmp_path)["q_network"]
    disturb(network)
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    ends = np.ones((1, 3), dtype=bool)
    with torch.no_grad():
        values, _ = network(obs[None], ends, None)
        hidden, _ = network.run_lstm(features_by_hand(network, obs)[None], ends, None)
        expected = hidden @ network.q_values.weight.T + network.q_values.bias
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-3)


def test_pqn_4_epsilon_falls_linearly(file, tmp_path, monkeypatch):
    """At a chance of 0.5, actions are not the best while epsilon is more, and then they are."""
    seen = []

    def look(names):
        steps = 32 * len(seen) + 4 * np.arange(8)
        epsilons = np.maximum(0.2, 0.9 - 0.7 * steps / 48)
        acted = names["obs"][:-1], names["is_last"][:-1], names["first_state"]
        best = one_by_one(names["q_network"], *acted)[0].argmax(2)
        is_random = torch.from_numpy(epsilons > 0.5)[:, None]
        assert torch.equal(names["actions"], torch.where(is_random, 1 - best, best))
        seen.append((32 * len(seen) + 32, epsilons[-1]))

    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 0.5))
    monkeypatch.setattr(torch, "randint_like", lambda x, high: high - 1 - x)
    flags = "--exploration-fraction 0.75 --start-e 0.9 --end-e 0.2".split()
    random_ends(file, tmp_path, *TWO, *flags, on_update=torch.no_grad()(look))
    logged = scalars(only_run(tmp_path))["charts/epsilon"]
    np.testing.assert_allclose(logged, seen, rtol=1e-6)


def test_pqn_5_targets_and_lstm_3_state_is_zeroed_at_every_end(file, tmp_path):
    """Values and states are those of a slow reference, for both kinds of end."""
    seen = []

    def look(names):
        network, is_last = names["q_network"], names["is_last"]
        obs, first_state = names["obs"], names["first_state"]
        q_values, state = one_by_one(network, obs[:-1], is_last[:-1], first_state)
        torch.testing.assert_close(names["state"], state, atol=1e-5, rtol=1e-4)
        last_q_values, _ = one_by_one(network, obs[-1:], is_last[-1:], state)
        values = torch.cat([q_values, last_q_values]).amax(2)
        torch.testing.assert_close(names["values"], values, atol=1e-5, rtol=1e-4)
        rollout = names["rewards"], values.numpy(), names["terminated"], is_last
        check_targets(*rollout, names["targets"].numpy())
        seen.append((first_state.abs().max(), first_state.shape))

    flags = (*LONG_ROLLOUT, "--total-timesteps", 256, "--q-lambda", 0.7)
    random_ends(file, tmp_path, *flags, on_update=torch.no_grad()(look))
    assert len(seen) == 2 and seen[0] == (0, (2, 1, 4, 128)), "zeros at the start [lstm 2]"
    assert seen[1][0] > 0, "a rollout continues from where the last one was"


def test_lstm_1_orthogonal_weights_and_zero_biases(file, tmp_path):
    built = []

    def look(names):
        built.append(copy.deepcopy(names["q_network"].lstm))

    random_ends(file, tmp_path, on_update=look)
    for name, parameter in built[0].named_parameters():
        if "bias" in name:
            assert parameter.abs().max() == 0
        else:
            identity = torch.eye(parameter.shape[1])
            torch.testing.assert_close(parameter.T @ parameter, identity, atol=1e-5, rtol=0)


def test_lstm_3_many_steps_at_once_are_one_by_one(file, tmp_path):
    names = random_ends(file, tmp_path)
    obs, state = names["obs"], torch.randn(2, 1, 4, 128)
    for ends in (names["is_last"], np.zeros_like(names["is_last"]), np.ones_like(names["is_last"])):
        with torch.no_grad():
            expected, expected_state = one_by_one(names["q_network"], obs, ends, state)
            found, found_state = names["q_network"](obs, ends, tuple(state))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(torch.stack(found_state), expected_state, atol=1e-5, rtol=1e-4)


def test_lstm_4_minibatches_are_whole_sequences(file, tmp_path):
    minibatches = []

    def look(names):
        minibatches.append(names["columns"].tolist())

    flags = ("--num-envs", 5, "--num-pools", 1, "--update-epochs", 3, "--total-timesteps", 40)
    random_ends(file, tmp_path, *flags, on_update=look)
    assert [len(columns) for columns in minibatches] == [3, 2] * 3
    epochs = [tuple(minibatches[i] + minibatches[i + 1]) for i in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({*epochs, tuple(range(5))}) == 4, "a new order in each epoch"


def test_lstm_5_and_pqn_6_loss_of_real_steps_from_the_rollouts_first_state(file, tmp_path):
    """The gradient is that of the textbook loss, by the slow reference; so are the metrics."""
    seen = []

    def look(names):
        network, columns = copy.deepcopy(names["q_network"]), names["columns"]
        is_last = names["is_last"][:-1, columns]
        obs, first_state = names["obs"][:-1, columns], names["first_state"][:, :, columns]
        q_values, _ = one_by_one(network, obs, is_last, first_state)
        q_values = q_values.gather(2, names["actions"][:, columns, None])[~is_last, 0]
        loss = (q_values - names["targets"][:, columns][~is_last]).square().mean()
        expected = torch.autograd.grad(loss, list(network.parameters()))
        expected = torch.cat([g.flatten() for g in expected])
        torch.testing.assert_close(flat_grad(names["q_network"]), expected, atol=1e-4, rtol=1e-3)
        seen.append((loss.item(), q_values.mean().item(), first_state.abs().max(), is_last.sum()))

    flags = ("--total-timesteps", 64, "--max-grad-norm", 1e9)
    random_ends(file, tmp_path, *flags, on_update=look)
    assert len(seen) == 4 and seen[-1][2] > 0 and sum(reset_rows for *_, reset_rows in seen) > 4
    logged = scalars(only_run(tmp_path))
    assert logged["losses/td_loss"][-1] == (64, pytest.approx(seen[-1][0], rel=1e-3))
    assert logged["losses/q_values"][-1] == (64, pytest.approx(seen[-1][1], rel=1e-3))


def test_pqn_8_learning_rate_falls_linearly(file, tmp_path):
    used = []

    def look(names):
        used.append(names["optimizer"].param_groups[0]["lr"])

    random_ends(file, tmp_path, *TWO, "--learning-rate", 0.002, on_update=look)
    assert used == pytest.approx([0.002, 0.001])
    logged = scalars(only_run(tmp_path))["charts/learning_rate"]
    assert logged == [(32, pytest.approx(0.002)), (64, pytest.approx(0.001))]


def test_one_frame_at_a_time(file, tmp_path):
    """Without a stack of frames, what moves where is in the memory alone."""
    envs = make_envs(file, "Breakout-v5", num_envs=1)
    assert envs.single_observation_space.shape == (1, 84, 84)
    assert not envs.env.config["reward_clip"] and envs.env.config["episodic_life"]
    sticky = make_envs(file, "Breakout-v5", num_envs=1, sticky=True).env.config
    assert sticky["repeat_action_probability"] == 0.25 and not sticky["episodic_life"]


def test_pools_are_not_mixed_up(file, tmp_path, monkeypatch):
    """Every row holds its own environment's observation, action, reward and value."""
    made, looked = [], []

    def make_numbered(num_envs, **settings):
        made.append(StripedPool(num_envs, len(made) % 2))  # two to look at, two to train with
        return made[-1]

    def look(names):
        looked.append(True)
        first = torch.tensor([0, 20, 50, 70])
        assert torch.equal(names["obs"][:, :, 0, 0, 0], first + torch.arange(9)[:, None])
        actions = np.concatenate([np.stack(pool.sent) for pool in made[2:]], axis=1)
        np.testing.assert_array_equal(names["actions"], actions)
        np.testing.assert_array_equal(names["rewards"], 2 * actions - 1)
        assert all(len({*row.tolist()}) == 2 for row in actions.T), "both actions in each"
        acted = names["obs"], names["is_last"], torch.zeros(2, 1, 4, 128)
        values = one_by_one(names["q_network"], *acted)[0].amax(2)
        torch.testing.assert_close(names["values"], values, atol=1e-5, rtol=1e-4)
        assert names["values"].std(1).min() > 1e-4, "the values must differ"

    monkeypatch.setattr(envpool, "make_gymnasium", make_numbered)
    flags = (*SMALL, "--num-pools", 2, "--num-minibatches", 1, "--end-e", 1)
    train(file, tmp_path, *flags, on_update=torch.no_grad()(look))
    assert looked and len(made) == 4


# memory


def test_loaded_policy_remembers_until_the_end(file, tmp_path):
    """With larger weights, so that memory decides on some actions."""
    names = random_ends(file, tmp_path)
    obs, is_last, network = names["obs"], names["is_last"], names["q_network"]
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    checkpoint["q_network"]["lstm.weight_hh_l0"].mul_(10)
    network.load_state_dict(checkpoint["q_network"])
    with torch.no_grad():
        state = torch.zeros(2, 1, 4, 128)
        expected = one_by_one(network, obs, is_last, state)[0].argmax(2).numpy()
        forgetful = one_by_one(network, obs, is_last | True, state)[0].argmax(2).numpy()
    assert (expected != forgetful).any(), "memory must matter"
    for _ in range(2):  # a policy loaded later knows nothing of what an earlier one saw
        policy = names["load_policy"](checkpoint, names["pools"][0])
        found = [policy(x, ends) for x, ends in zip(obs.numpy(), is_last, strict=True)]
        np.testing.assert_array_equal(found, expected)


def test_values_of_probes(file, tmp_path):
    """Reward 1 at the second step."""
    names = train(file, tmp_path, "--env-id", probe(file, "Discounting"), *PROBE_FLAGS)
    images = torch.tensor([127, 255], dtype=torch.uint8)[:, None, None, None, None]
    images = images.expand(2, 1, names["obs"].shape[2], 84, 84)
    with torch.no_grad():
        learned, _ = names["q_network"](images, np.zeros((2, 1), dtype=bool), None)
    expected = torch.tensor([[[0.5, 0.5]], [[1.0, 1.0]]])
    torch.testing.assert_close(learned, expected, atol=0.25, rtol=0)


@pytest.mark.slow
def test_actions_of_probes(file, tmp_path):
    check_actions(file, tmp_path)


@pytest.mark.slow
def test_remembers_what_others_forget(file, tmp_path):
    """The first observation tells which action pays at the third step."""
    flags = "--total-timesteps 4096 --num-envs 32 --num-steps 8 --learning-rate 0.003 --gamma 0.9"
    flags = (*flags.split(), *"--exploration-fraction 0.5 --end-e 0.05".split())
    names = train(file, tmp_path / "with", "--env-id", probe(file, "ShortRecall"), *flags)
    assert np.mean(play(names, only_run(tmp_path / "with"))) > 0.9
    names = train(FILES["pqn"], tmp_path / "without", "--env-id", "Probe/ShortRecall-v0", *flags)
    assert np.mean(play(names, only_run(tmp_path / "without"))) < 0.4
