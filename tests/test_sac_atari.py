"""cleanrl/sac_atari.py. test_sac_N guards detail N of docs/rl-algorithms/sac-atari.md.

test_td3_N and test_ddpg_N guard those of td3.md and ddpg.md, test_dqn_N and test_frames_N of
dqn.md, test_atari_N of ppo.md; some are those of the files where that comes from.
"""

import copy
import math
import runpy
from collections import Counter
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.harness import flat_grad, only_run, probe, read_checkpoint, same, scalars, train
from tests.test_ddpg_continuous_action import learner, vector
from tests.test_dqn_atari import (  # noqa: F401  the imported tests run here on this file
    BREAKOUT,
    CPU,
    PONG,
    images_of,
    make_network,
    play,
    test_atari_8_the_nature_cnn,
    test_atari_9_pixels_are_scaled_to_0_and_1,
    test_dqn_2_every_transition_is_as_likely,
    test_dqn_2_few_transitions,
    test_frames_2_stacks_are_rebuilt,
    transitions,
    watch,
)

SMALL = (
    "--num-envs 2 --learning-starts 40 --update-frequency 8 --batch-size 8 --buffer-size 100 "
    "--target-network-frequency 16 --total-timesteps 80 --gamma 0.9"
).split()


def log_probs_of(logits):
    """In plain code: the logarithm of each action's probability, for one observation."""
    return [logit - math.log(sum(math.exp(other) for other in logits)) for logit in logits]


# what is seen, and the networks


@pytest.mark.parametrize(("env_id", "max_steps"), [(BREAKOUT, 27_000), (PONG, 60)])
def test_frames_2_what_is_drawn_was_seen(file, tmp_path, monkeypatch, env_id, max_steps):
    """On the emulator, bit for bit, with lost lives, cut games, and a ring that went round."""
    happened = watch(file, monkeypatch, max_num_frames_per_episode=4 * max_steps)
    flags = ("--env-id", env_id, "--num-envs", 3, "--total-timesteps", 540, "--buffer-size", 390)
    names = train(file, tmp_path, *flags)  # random play
    drawn = set(transitions({"b": names["buffer"].sample(2000, CPU)}))
    assert drawn <= happened.keys() and len(drawn) > 150
    ends, cuts = sum(terminated for *_, terminated in drawn), sum(happened[step] for step in drawn)
    assert ends > 5 if env_id == BREAKOUT else cuts > 3


def test_atari_6_rewards_are_clipped_to_their_sign_for_learning_only(file, tmp_path):
    flags = (*SMALL, "--learning-starts", 1000, "--total-timesteps", 200, "--buffer-size", 200)
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags)
    rewards = names["buffer"].rewards
    assert set(rewards.tolist()) == {-1, 0, 1}
    assert 0 < (rewards == 0).float().mean() < 0.5, "0 where they only reset"
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert len(returns) > 20
    assert all(value != round(value) for value in returns), "what is reported is not clipped"


def test_kaiming_initialization(file, tmp_path):
    """Gaussian weights with a variance of 2 over the number of inputs, and no biases."""
    torch.manual_seed(1)
    for layer in [layer for layer in make_network(file).modules() if hasattr(layer, "weight")]:
        inputs, count = layer.weight[0].numel(), layer.weight.numel()
        values = layer.weight.detach().flatten() * (inputs / 2) ** 0.5
        assert values.mean().abs() < 5 / count**0.5
        assert (values.square().mean() - 1).abs() < 5 * (2 / count) ** 0.5
        share_within_1 = (values.abs() < 1).float().mean()
        assert (share_within_1 - 0.683).abs() < 3 / count**0.5, "as a Gaussian's"
        assert not layer.bias.any()


def test_td3_1_two_networks_that_differ(file, tmp_path):
    """A value of each for every action; the targets start where they start."""
    flags = (*SMALL, "--total-timesteps", 2)
    names = train(file, tmp_path, "--env-id", probe(file, "ConstantValue"), *flags)
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    values, (one, other) = names["q_networks"](obs), names["q_networks"].networks
    assert values.shape == (2, 3, 2) and torch.equal(values, torch.stack([one(obs), other(obs)]))
    assert not torch.equal(one.conv1.weight, other.conv1.weight)
    assert not torch.equal(values[0], values[1])
    assert torch.equal(vector(names["q_networks"]), vector(names["target_q_networks"]))


# acting


def start_with(monkeypatch, *logits):
    """Make a file start with networks that return these numbers, whatever is seen."""

    def start(bias):
        bias.data.copy_(torch.tensor(logits if len(bias) == len(logits) else 0.0))

    monkeypatch.setattr(torch.nn.init, "kaiming_normal_", lambda weight: weight.data.zero_())
    monkeypatch.setattr(torch.nn.init, "zeros_", start)


@pytest.mark.parametrize("logit", [math.log(3), 99.0])
def test_ddpg_3_random_actions_come_first_and_then_the_policys(file, tmp_path, monkeypatch, logit):
    """Uniform ones until learning starts, then drawn with the actor's probabilities."""
    start_with(monkeypatch, 0.0, logit)
    flags = (
        "--num-envs 4 --learning-starts 600 --buffer-size 1400 --total-timesteps 1400 "
        "--batch-size 2 --update-frequency 200 --policy-lr 1e-9"
    ).split()
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags)
    actions, share = names["buffer"].actions.reshape(-1, 4).double(), 1 / (1 + math.exp(-logit))
    for part, expected in ((actions[:150], 0.5), (actions[150:], share)):
        usual = (expected * (1 - expected) / part.numel()) ** 0.5
        assert part.mean().item() == pytest.approx(expected, abs=4 * usual + 1e-9)
        if expected < 0.9:  # of the four environments, and of one step after the other
            both = torch.cat([part[:-1], part[1:]], 1)
            assert both.T.corrcoef().fill_diagonal_(0).abs().max() < 0.35


def test_ddpg_3_no_untrained_actor_acts_in_a_resumed_run(file, tmp_path, monkeypatch):
    """Without its buffer, random actions come first again, but not where the actor has learned."""
    start_with(monkeypatch, 0.0, 99.0)  # its action is 1
    flags = (
        "--num-envs 4 --learning-starts 600 --buffer-size 1400 --total-timesteps 400 "
        "--batch-size 2 --update-frequency 200 --policy-lr 1e-9"
    ).split()
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags)
    resume = ("--resume", only_run(tmp_path), "--total-timesteps")
    actions = train(file, tmp_path, *resume, 1200)["buffer"].actions[:800]  # the steps from 400 on
    assert actions[:600].double().mean().item() == pytest.approx(0.5, abs=0.09)
    assert (actions[600:] == 1).all()
    actions = train(file, tmp_path, *resume, 1400)["buffer"].actions[:200]  # from 1200 on
    assert (actions == 1).all()


def test_a_loaded_policy_samples_its_actions(file, tmp_path):
    """With the actor's probabilities, numbered as the environment's."""
    spaces = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6, start=3)
    envs = SimpleNamespace(single_observation_space=spaces[0], single_action_space=spaces[1])
    actor = make_network(file)
    torch.nn.init.zeros_(actor.actions.weight)
    actor.actions.bias.data.copy_(torch.arange(1, 7).log())
    policy = runpy.run_path(str(file))["load_policy"]({"actor": actor.state_dict()}, envs)
    torch.manual_seed(1)
    obs, is_last = np.zeros((70, 4, 84, 84), np.uint8), np.zeros(70, bool)
    drawn = Counter(np.concatenate([policy(obs, is_last) for _ in range(6)]))
    assert drawn.keys() == set(range(3, 9))
    expected = [20 * n for n in range(1, 7)]
    assert [drawn[action] for action in range(3, 9)] == pytest.approx(expected, abs=40)


# learning


def test_sac_6_one_update_by_the_book(file, tmp_path, monkeypatch):
    """From the transitions, which did happen, and the networks as they were before it.

    The gradients at the optimizers are those of the losses with all actions written out, row by
    row, by autograd.
    """
    happened, ends, before = watch(file, monkeypatch), [], {}

    def expect(loss, network, gradients):
        expected = torch.autograd.grad(loss, list(network.parameters()))
        expected = torch.cat([g.flatten() for g in expected]).float()
        torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-3)

    def check_q_networks(names, steps, obs, next_obs):
        assert set(steps) <= happened.keys()
        ends.extend((step[-1], happened[step]) for step in steps)
        for name in ("actor", "q_networks", "target_q_networks", "temperature"):
            before[name] = copy.deepcopy(names[name]).double()
        before["alpha"] = alpha = math.exp(before["temperature"]["log_alpha"].item())
        logits = before["actor"](next_obs).tolist()
        q1, q2 = before["target_q_networks"](next_obs).tolist()
        values, errors = before["q_networks"](obs), []
        for row, (_, action, reward, _, terminated) in enumerate(steps):
            log_probs, target = log_probs_of(logits[row]), reward
            for a in () if terminated else (0, 1):
                soft_value = min(q1[row][a], q2[row][a]) - alpha * log_probs[a]
                target += 0.9 * math.exp(log_probs[a]) * soft_value
            errors += [(values[network, row, action] - target) ** 2 for network in (0, 1)]
        before["values"] = values.tolist()
        expect(sum(errors) / len(steps), before["q_networks"], flat_grad(names["q_networks"]))

    def check_actor(names, obs):
        (q1, q2), logits, losses = before["values"], before["actor"](obs), []
        for row in range(len(obs)):
            probs = logits[row].exp() / logits[row].exp().sum()
            for a in (0, 1):
                gain = min(q1[row][a], q2[row][a]) - before["alpha"] * probs[a].log()
                losses.append(-probs[a] * gain)
        loss = sum(losses) / len(obs)
        expect(loss, before["actor"], flat_grad(names["actor"]))
        assert names["actor_loss"].item() == pytest.approx(loss.item(), rel=1e-3)

    def check_temperature(names, obs):
        entropies = []
        for row in before["actor"](obs).tolist():
            entropies.append(-sum(math.exp(x) * x for x in log_probs_of(row)))
        expected = before["alpha"] * (np.mean(entropies) - 0.89 * math.log(2))
        gradient = names["temperature"]["log_alpha"].grad.item()
        assert gradient == pytest.approx(expected, rel=1e-3, abs=1e-5)

    def look(names):
        obs, next_obs = names["b"]["obs"].double(), names["b"]["next_obs"].double()
        if learner(names) == "q":
            check_q_networks(names, transitions(names), obs, next_obs)
        if learner(names) == "actor":
            check_actor(names, obs)
        if learner(names) == "alpha":
            check_temperature(names, obs)

    flags = (*SMALL, "--policy-lr", 0.001, "--q-lr", 0.01)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    assert len(ends) == 6 * 8
    assert set(ends) == {(True, False), (False, True), (False, False)}, "ends of both kinds"


@pytest.mark.parametrize(("logit", "direction"), [(0.0, -1), (2.0, 1)])
def test_sac_5_the_temperature_follows_the_entropy(file, tmp_path, monkeypatch, logit, direction):
    """Of log(2), if actions are uniform, or 0.37: it falls above 0.89 * log(2), which is 0.62."""
    start_with(monkeypatch, 0.0, logit)
    seen = []

    def look(names):
        if learner(names) == "alpha":
            seen.append(names["temperature"]["log_alpha"].item())

    flags = (*SMALL, "--policy-lr", 1e-9, "--q-lr", 0.01, "--batch-size", 2)
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    assert seen[0] == 0 and len(seen) == 6 and (direction * np.diff(seen) > 0.005).all()
    kept = read_checkpoint(only_run(tmp_path))["temperature"]["log_alpha"]
    assert kept == names["temperature"]["log_alpha"] != seen[-1]


@pytest.mark.parametrize("autotune", [True, False])
def test_metrics(file, tmp_path, autotune):
    """Of the last update before they are logged; without tuning, the temperature stays."""
    seen = []

    def look(names):
        qf1_loss, qf2_loss = names["qf_losses"].tolist()
        qf1_values, qf2_values = names["taken"].mean(1).tolist()
        mean = (qf1_loss + qf2_loss) / 2
        seen.append({"qf1_loss": qf1_loss, "qf2_loss": qf2_loss, "qf_loss": mean})
        seen[-1] |= {"qf1_values": qf1_values, "qf2_values": qf2_values}
        for name in ("actor_loss", "alpha", "alpha_loss"):
            if name in names:
                seen[-1][name] = names[name].item()

    flags = (*SMALL, "--update-frequency", 1, "--learning-starts", 97, "--total-timesteps", 100)
    flags = (*flags, "--alpha", 0.3, "--autotune" if autotune else "--no-autotune")
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    logged = scalars(only_run(tmp_path))
    charts = {f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS")}
    assert ("alpha_loss" in seen[-1]) == autotune
    assert logged.keys() == charts | {f"losses/{name}" for name in seen[-1]}
    assert len(seen) == 4 * (3 if autotune else 2)
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
    """One of all parts every update_frequency steps: several in a row with more environments."""
    seen = []

    def look(names):
        seen.append((names["global_step"], learner(names)))

    flags = ("--num-envs", num_envs, "--update-frequency", update_frequency, "--batch-size", 1)
    flags = (*SMALL, *flags, "--learning-starts", learning_starts, "--total-timesteps", 41)
    train(file, tmp_path, "--env-id", probe(file, "ConstantValue"), *flags, on_update=look)
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
        step, network = names["global_step"], vector(names["q_networks"])
        target = vector(names["target_q_networks"])
        first, expected = before if before else (step, network)
        for then in range(first, step, num_envs):  # after the updates of these steps
            if then // every > (then - num_envs) // every:
                expected, moves = tau * network + (1 - tau) * expected, moves + 1
        torch.testing.assert_close(target, expected, rtol=0, atol=0 if tau == 1 else 1e-6)
        differs += not torch.equal(network, target)
        before[:] = step, target

    flags = "--update-frequency 4 --batch-size 1 --learning-starts 20 --total-timesteps 40".split()
    flags += ["--num-envs", num_envs, "--target-network-frequency", every, "--tau", tau]
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, *flags, on_update=look)
    assert moves == 3 and differs >= 2


# known answers


PROBE_FLAGS = (
    "--num-envs 4 --learning-starts 32 --update-frequency 4 --q-lr 5e-4 --policy-lr 3e-4 "
    "--gamma 0.5 --batch-size 8 --target-network-frequency 16 --buffer-size 800 --no-autotune"
).split()


def learned(names, obs):
    """The values of the first Q-network, and the actor's probabilities."""
    with torch.no_grad():
        return names["q_networks"](obs)[0], names["actor"](obs).softmax(1)


def test_sac_3_a_free_choice_is_worth_its_entropy(file, tmp_path):
    """The reward, 1, comes at the second step, whatever is done: half of it at the first.

    So does the entropy that the policy has at the second step, times the temperature. It is no part
    of the first step's own value.
    """
    flags = (*PROBE_FLAGS, "--alpha", 1, "--total-timesteps", 320)
    names = train(file, tmp_path, "--env-id", probe(file, "Discounting"), *flags)
    values, probs = learned(names, images_of([0, (0, 1)]))
    entropies = -(probs * probs.log()).sum(1)
    torch.testing.assert_close(entropies, torch.full((2,), math.log(2)), atol=0.1, rtol=0)
    expected = torch.tensor([[0.5 + 0.5 * math.log(2)] * 2, [1, 1]])
    torch.testing.assert_close(values, expected, atol=0.2, rtol=0)


def test_actions_of_probes(file, tmp_path):
    """Values of 1 and -1: at a temperature of 0.5 the better action is exp(4) times as likely.

    Acting through load_policy in fresh environments, as every evaluation does.
    """
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
    assert same(a, b) and not same(a["actor"], c["actor"]) and a["global_step"] == 60
