"""cleanrl/sac_atari.py. test_sac_N guards detail N of docs/rl-algorithms/sac.md, test_td3_N and test_ddpg_N that of td3.md and
ddpg.md, test_dqn_N and test_frames_N of dqn.md, test_atari_N of ppo.md; some are those of the files where that comes from."""

import copy
import math
import runpy
from collections import Counter
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.harness import (
    FILES,
    flat_grad,
    only_run,
    probe,
    read_checkpoint,
    same,
    scalars,
    train,
    weights,
)
from tests.test_ddpg_continuous_action import learner, vector
from tests.test_dqn_atari import (  # noqa: F401  the imported tests run here on this file
    BREAKOUT,
    PONG,
    images_of,
    make_network,
    play,
    test_atari_8_the_nature_cnn,
    test_atari_9_pixels_are_scaled_to_0_and_1,
    test_dqn_2_every_transition_is_as_likely,
    test_frames_2_stacks_are_rebuilt,
    transitions,
    watch,
)

SMALL = (
    "--num-envs",
    2,
    "--learning-starts",
    40,
    "--update-frequency",
    8,
    "--batch-size",
    8,
    "--buffer-size",
    100,
)
SMALL = (*SMALL, "--target-network-frequency", 16, "--total-timesteps", 80, "--gamma", 0.9)


@pytest.fixture
def file():
    return FILES["sac_atari"]


def log_probs_of(logits):
    """In plain code: of each action its logarithm, from the logits of one observation."""
    return [logit - math.log(sum(math.exp(other) for other in logits)) for logit in logits]


# what is seen, and the networks


@pytest.mark.parametrize(("env_id", "max_steps"), [(BREAKOUT, 27_000), (PONG, 60)])
def test_frames_2_what_is_drawn_was_seen(file, tmp_path, monkeypatch, env_id, max_steps):
    """On the emulator, bit for bit, with lost lives, games that are cut, and a ring that has gone round."""
    happened = watch(file, monkeypatch, max_num_frames_per_episode=4 * max_steps)
    flags = ("--env-id", env_id, "--num-envs", 3, "--total-timesteps", 540, "--buffer-size", 390)
    names = train(file, tmp_path, *flags)  # random play
    drawn = dict(
        zip(
            ("b_stacks", "b_actions", "b_rewards", "b_terminated"),
            names["buffer"].sample(2000),
            strict=True,
        )
    )
    drawn = set(transitions(drawn))
    assert drawn <= happened.keys() and len(drawn) > 150
    ends, cuts = sum(terminated for *_, terminated in drawn), sum(happened[step] for step in drawn)
    assert ends > 5 if env_id == BREAKOUT else cuts > 3


def test_atari_6_rewards_are_clipped_to_their_sign_for_learning_only(file, tmp_path):
    flags = (*SMALL, "--learning-starts", 1000, "--total-timesteps", 200, "--buffer-size", 200)
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags)
    rewards = names["buffer"].rewards
    assert set(rewards.tolist()) == {-1, 0, 1} and 0 < (rewards == 0).float().mean() < 0.5, (
        "0 where they only reset"
    )
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert len(returns) > 20 and all(value != round(value) for value in returns), (
        "what is reported is not clipped"
    )


def test_kaiming_initialization(file, tmp_path):
    """Gaussian weights, whose variance is 2 over the number of inputs, and no biases."""
    torch.manual_seed(1)
    for layer in [layer for layer in make_network(file).modules() if hasattr(layer, "weight")]:
        inputs, count = layer.weight[0].numel(), layer.weight.numel()
        values = layer.weight.detach().flatten() * (inputs / 2) ** 0.5
        assert (
            values.mean().abs() < 5 / count**0.5
            and (values.square().mean() - 1).abs() < 5 * (2 / count) ** 0.5
        )
        assert ((values.abs() < 1).float().mean() - 0.683).abs() < 3 / count**0.5, (
            "as often as a Gaussian's"
        )
        assert not layer.bias.any()


def test_td3_1_two_networks_that_differ(file, tmp_path):
    """A value of each for every action; the targets start where they start."""
    names = train(
        file, tmp_path, "--env-id", probe(file, "ConstantValue"), *SMALL, "--total-timesteps", 2
    )
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    values, (one, other) = names["q_networks"](obs), names["q_networks"].networks
    assert values.shape == (2, 3, 2) and torch.equal(values, torch.stack([one(obs), other(obs)]))
    assert not torch.equal(one.conv1.weight, other.conv1.weight) and not torch.equal(
        values[0], values[1]
    )
    assert torch.equal(vector(names["q_networks"]), vector(names["target_q_networks"]))


# acting


def start_with(monkeypatch, *logits):
    """Has a file start with networks that give these numbers, whatever is seen."""
    start = lambda bias: bias.data.copy_(torch.tensor(logits if len(bias) == len(logits) else 0.0))  # noqa: E731
    monkeypatch.setattr(torch.nn.init, "kaiming_normal_", lambda weight: weight.data.zero_())
    monkeypatch.setattr(torch.nn.init, "zeros_", start)


@pytest.mark.parametrize("logit", [math.log(3), 99.0])
def test_ddpg_3_random_actions_come_first_and_then_the_policys(file, tmp_path, monkeypatch, logit):
    """Even ones; from the first step after learning_starts on they are drawn with the actor's probabilities."""
    start_with(monkeypatch, 0.0, logit)
    flags = (
        "--num-envs",
        4,
        "--learning-starts",
        600,
        "--buffer-size",
        1400,
        "--total-timesteps",
        1400,
        "--batch-size",
        2,
    )
    flags = (*flags, "--update-frequency", 200, "--policy-lr", 1e-9)
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags)
    actions, share = names["buffer"].actions.reshape(-1, 4).double(), 1 / (1 + math.exp(-logit))
    for part, expected in ((actions[:150], 0.5), (actions[150:], share)):
        assert part.mean().item() == pytest.approx(
            expected, abs=4 * (expected * (1 - expected) / part.numel()) ** 0.5 + 1e-9
        )
        if expected < 0.9:
            both = torch.cat(
                [part[:-1], part[1:]], 1
            )  # of the four environments, and of one step after the other
            assert both.T.corrcoef().fill_diagonal_(0).abs().max() < 0.35


def test_whoever_loads_the_policy_gets_samples(file, tmp_path):
    """Actions with the actor's probabilities, counted as the environment counts them."""
    spaces = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6, start=3)
    envs = SimpleNamespace(single_observation_space=spaces[0], single_action_space=spaces[1])
    actor = make_network(file)
    torch.nn.init.zeros_(actor.actions.weight)
    actor.actions.bias.data.copy_(torch.arange(1, 7).log())
    policy = runpy.run_path(str(file))["load_policy"]({"actor": actor.state_dict()}, envs)
    torch.manual_seed(1)
    drawn = Counter(
        np.concatenate(
            [
                policy(np.zeros((70, *spaces[0].shape), np.uint8), np.zeros(70, bool))
                for _ in range(6)
            ]
        )
    )
    assert drawn.keys() == set(range(3, 9))
    assert [drawn[action] for action in range(3, 9)] == pytest.approx(
        [20 * n for n in range(1, 7)], abs=40
    )


# learning


def test_sac_6_one_update_by_the_book(file, tmp_path, monkeypatch):
    """From the transitions, which did happen, and the networks as they were before it: the gradients that reach the optimizers
    are those of the losses with all actions written out, row by row, and left to autograd."""
    happened, ends, before = watch(file, monkeypatch), [], {}

    def expect(loss, network, gradients):
        expected = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))]
        ).float()
        torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-3)

    def look(names):
        steps, obs, next_obs = (
            transitions(names),
            names["b_stacks"][:, :4].double(),
            names["b_stacks"][:, 1:].double(),
        )
        if learner(names) == "q":
            assert set(steps) <= happened.keys()
            ends.extend((terminated, happened[step]) for step in steps for terminated in step[-1:])
            parts = "actor", "q_networks", "target_q_networks", "temperature"
            before.update({name: copy.deepcopy(names[name]).double() for name in parts})
            alpha = math.exp(before["temperature"]["log_alpha"].item())
            logits, (q1, q2) = (
                before["actor"](next_obs).tolist(),
                before["target_q_networks"](next_obs).tolist(),
            )
            values, errors = before["q_networks"](obs), []
            for row, (_, action, reward, _, terminated) in enumerate(steps):
                log_probs, target = log_probs_of(logits[row]), reward
                if not terminated:
                    for a in (0, 1):
                        target += (
                            0.9
                            * math.exp(log_probs[a])
                            * (min(q1[row][a], q2[row][a]) - alpha * log_probs[a])
                        )
                errors += [(values[network, row, action] - target) ** 2 for network in (0, 1)]
            before["values"], before["alpha"] = values.tolist(), alpha
            expect(sum(errors) / len(steps), before["q_networks"], flat_grad(names["q_networks"]))
        if learner(names) == "actor":
            (q1, q2), logits, loss = before["values"], before["actor"](obs), 0
            for row in range(len(steps)):
                probs = logits[row].exp() / logits[row].exp().sum()
                for a in (0, 1):
                    loss += (
                        probs[a]
                        * (before["alpha"] * probs[a].log() - min(q1[row][a], q2[row][a]))
                        / len(steps)
                    )
            expect(loss, before["actor"], flat_grad(names["actor"]))
            assert names["actor_loss"].item() == pytest.approx(loss.item(), rel=1e-3)
        if learner(names) == "alpha":
            entropies = [
                -sum(math.exp(x) * x for x in log_probs_of(row))
                for row in before["actor"](obs).tolist()
            ]
            expected = before["alpha"] * (np.mean(entropies) - 0.89 * math.log(2))
            assert names["temperature"]["log_alpha"].grad.item() == pytest.approx(
                expected, rel=1e-3, abs=1e-5
            )

    flags = (*SMALL, "--policy-lr", 0.001, "--q-lr", 0.01)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    assert len(ends) == 6 * 8 and set(ends) == {(True, False), (False, True), (False, False)}, (
        "ends of both kinds"
    )


@pytest.mark.parametrize(("logit", "direction"), [(0.0, -1), (2.0, 1)])
def test_sac_5_the_temperature_follows_the_entropy(file, tmp_path, monkeypatch, logit, direction):
    """Of log(2), where actions are even, and 0.37: the temperature falls above target_entropy_scale * log(2), 0.62."""
    start_with(monkeypatch, 0.0, logit)
    seen = []
    look = lambda names: seen.append(names["temperature"]["log_alpha"].item())  # noqa: E731
    flags = (
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        "--policy-lr",
        1e-9,
        "--q-lr",
        0.01,
        "--batch-size",
        2,
    )
    names = train(
        file,
        tmp_path,
        *flags,
        on_update=lambda names: look(names) if learner(names) == "alpha" else None,
    )
    assert seen[0] == 0 and len(seen) == 6 and (direction * np.diff(seen) > 0.005).all()
    assert (
        read_checkpoint(only_run(tmp_path))["temperature"]["log_alpha"]
        == names["temperature"]["log_alpha"]
        != seen[-1]
    )


@pytest.mark.parametrize("autotune", [True, False])
def test_metrics(file, tmp_path, autotune):
    """Of the last update before they are logged; without tuning, the temperature stays."""
    seen = []

    def look(names):
        qf1_loss, qf2_loss = names["qf_losses"].tolist()
        qf1_values, qf2_values = names["taken"].mean(1).tolist()
        seen.append(
            {"qf1_loss": qf1_loss, "qf2_loss": qf2_loss, "qf_loss": (qf1_loss + qf2_loss) / 2}
        )
        seen[-1] |= {"qf1_values": qf1_values, "qf2_values": qf2_values}
        seen[-1] |= {
            name: names[name].item()
            for name in ("actor_loss", "alpha", *["alpha_loss"] * autotune)
            if name in names
        }

    flags = (
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        "--update-frequency",
        1,
        "--learning-starts",
        97,
    )
    flags = (
        *flags,
        "--total-timesteps",
        100,
        "--alpha",
        0.3,
        "--autotune" if autotune else "--no-autotune",
    )
    names, logged = train(file, tmp_path, *flags, on_update=look), scalars(only_run(tmp_path))
    charts = {f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS")}
    assert logged.keys() == charts | {f"losses/{name}" for name in seen[-1]} and len(seen) == 4 * (
        3 if autotune else 2
    )
    for name, value in seen[-1].items():
        assert logged[f"losses/{name}"] == [(100, pytest.approx(value, rel=1e-4))]
    if not autotune:
        kept = read_checkpoint(only_run(tmp_path))["temperature"]["log_alpha"]
        assert names["temperature"]["log_alpha"] == kept == pytest.approx(math.log(0.3))
        assert logged["losses/alpha"] == [(100, pytest.approx(0.3))]


@pytest.mark.parametrize(
    ("num_envs", "update_frequency", "learning_starts"), [(1, 4, 20), (2, 5, 20), (8, 3, 32)]
)
def test_dqn_5_updates_are_counted_in_environment_steps(
    file, tmp_path, num_envs, update_frequency, learning_starts
):
    """One of all parts every update_frequency steps; where the environments make more steps at once, several in a row."""
    seen = []
    flags = (
        *SMALL,
        "--env-id",
        probe(file, "ConstantValue"),
        "--num-envs",
        num_envs,
        "--total-timesteps",
        41,
    )
    flags = (
        *flags,
        "--batch-size",
        1,
        "--update-frequency",
        update_frequency,
        "--learning-starts",
        learning_starts,
    )
    train(
        file,
        tmp_path,
        *flags,
        on_update=lambda names: seen.append((names["global_step"], learner(names))),
    )
    expected = []
    for step in range(1, 41 - 41 % num_envs + 1):
        now = step + -step % num_envs  # when the environments have all made their steps
        if step % update_frequency == 0 and now >= learning_starts:
            expected += [(now, part) for part in ("q", "actor", "alpha")]
    assert seen == expected and len(seen) >= 9


@pytest.mark.parametrize(("num_envs", "every", "tau"), [(1, 6, 1), (2, 7, 1), (2, 6, 0.3)])
def test_dqn_6_the_target_networks_are_frozen_copies(file, tmp_path, num_envs, every, tau):
    """They move every so many environment steps, as far as tau says, and not in between."""
    before, moves, differs = [], 0, 0

    def look(names):
        nonlocal moves, differs
        if learner(names) != "q":
            return
        step, network, target = (
            names["global_step"],
            vector(names["q_networks"]),
            vector(names["target_q_networks"]),
        )
        expected = before[1] if before else network
        for then in range(
            before[0] if before else step, step, num_envs
        ):  # after the updates of these steps
            if then // every > (then - num_envs) // every:
                expected, moves = tau * network + (1 - tau) * expected, moves + 1
        torch.testing.assert_close(target, expected, rtol=0, atol=0 if tau == 1 else 1e-6)
        differs += not torch.equal(network, target)
        before[:] = step, target

    flags = (
        "--num-envs",
        num_envs,
        "--update-frequency",
        4,
        "--batch-size",
        1,
        "--target-network-frequency",
        every,
    )
    flags = (*flags, "--learning-starts", 20, "--total-timesteps", 40, "--tau", tau)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, on_update=look)
    assert moves == 3 and differs >= 2


# known answers


PROBE_FLAGS = (
    "--num-envs",
    4,
    "--learning-starts",
    32,
    "--update-frequency",
    4,
    "--q-lr",
    5e-4,
    "--policy-lr",
    3e-4,
)
PROBE_FLAGS = (
    *PROBE_FLAGS,
    "--gamma",
    0.5,
    "--batch-size",
    8,
    "--target-network-frequency",
    16,
    "--buffer-size",
    800,
)
PROBE_FLAGS = (*PROBE_FLAGS, "--no-autotune")


def learned(names, obs):
    """What the first Q-network thinks of each action, and the actor's probabilities."""
    with torch.no_grad():
        return names["q_networks"](obs)[0], names["actor"](obs).softmax(1)


def test_sac_3_a_free_choice_is_worth_its_entropy(file, tmp_path):
    """The reward, 1, comes at the second step, whatever is done, and is worth half of it at the first; so is the entropy that
    the policy has at the second, times the temperature. That is no part of the first step's own value."""
    names = train(
        file,
        tmp_path,
        "--env-id",
        probe(file, "Discounting"),
        *PROBE_FLAGS,
        "--alpha",
        1,
        "--total-timesteps",
        320,
    )
    values, probs = learned(names, images_of([0, (0, 1)]))
    entropies = -(probs * probs.log()).sum(1)
    torch.testing.assert_close(entropies, torch.full((2,), math.log(2)), atol=0.1, rtol=0)
    expected = torch.tensor([[0.5 + 0.5 * math.log(2)] * 2, [1, 1]])
    torch.testing.assert_close(values, expected, atol=0.2, rtol=0)


def test_actions_of_probes(file, tmp_path):
    """Values of 1 and -1, which at a temperature of 0.5 make the better action exp(4) times as likely; acting through
    load_policy in fresh environments, as every evaluation does."""
    flags = (*PROBE_FLAGS, "--alpha", 0.5, "--total-timesteps", 320)
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *flags)
    values, probs = learned(names, images_of([-1, 1]))
    torch.testing.assert_close(values, torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), atol=0.25, rtol=0)
    torch.testing.assert_close(probs, torch.tensor([[0.98, 0.02], [0.02, 0.98]]), atol=0.05, rtol=0)
    assert np.mean(play(names, only_run(tmp_path), games=40)) > 0.8


# the same seed, the same run


def test_same_seed_same_bits(file, tmp_path):
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        train(file, tmp_path / name, *SMALL, "--total-timesteps", 60, "--seed", seed)
    a, b, c = (read_checkpoint(only_run(tmp_path / name)) for name in "abc")
    assert (
        same(a, b)
        and not same(weights(only_run(tmp_path / "a")), c["actor"])
        and a["global_step"] == 60
    )
