"""cleanrl/ppo_multidiscrete.py: actions of several parts, and masks for those that are invalid."""

import copy
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.harness import flat_grad, only_run, scalars, train
from tests.probes import MaskedActions, Probe

SMALL = "--num-envs 2 --num-steps 32 --num-minibatches 2 --update-epochs 3".split()
PROBE_FLAGS = (
    "--total-timesteps 5120 --num-envs 8 --num-steps 16 --learning-rate 0.01 --gamma 0.5"
    " --ent-coef 0 --no-clip-vloss"  # clipped, the value moves too slowly for a short test
).split()
MASKED = ["--env-id", "Probe/MaskedActions-v0", *SMALL]
both_masks = pytest.mark.parametrize(
    "env_id", ["Probe/MaskedActions-v0", "Probe/MaskedActionsInParts-v0"]
)


class NoValidActions(MaskedActions):
    """MaskedActions whose masks rule out everything, at each step; nothing is punished."""

    def draw_mask(self, over):
        super().draw_mask(over=True)
        return {"action_mask": np.zeros(5, np.int8)}

    def step(self, action):
        return (*Probe.step(self, action)[:4], self.draw_mask(over=True))


gym.register("Probe/NoValidActions-v0", NoValidActions)


def episodic_returns(folder):
    return [value for _, value in scalars(only_run(folder))["charts/episodic_return"]]


def joint_distribution(logits, sizes):
    """One distribution over all combinations of values, in the order of itertools.product."""
    parts = [torch.softmax(part, 1) for part in torch.split(logits, sizes, 1)]
    chances = [
        torch.stack([part[:, value] for part, value in zip(parts, values, strict=True)]).prod(0)
        for values in itertools.product(*map(range, sizes))
    ]
    return torch.distributions.Categorical(probs=torch.stack(chances, 1))


# parts of an action


@pytest.mark.parametrize("probe", ["MultiDiscreteActions", "GridOfActions"])
def test_multidiscrete_1_parts_are_independent(file, tmp_path, probe):
    updates = 0

    def look(names):
        nonlocal updates
        mb, sizes = names["mb"], names["action_space"].nvec.flatten().tolist()
        numbers = torch.from_numpy(np.ravel_multi_index(names["b_actions"].T.numpy(), sizes))
        policy = joint_distribution(names["agent"].actor(names["b_obs"][:, :1]), sizes)
        log_probs, entropies = policy.log_prob(numbers), policy.entropy()
        close = dict(atol=1e-5, rtol=1e-4)
        if updates % 6 == 0:  # the policy that acted
            torch.testing.assert_close(log_probs, names["b_log_probs"], **close)
        log_ratio = log_probs[mb] - names["b_log_probs"][mb]
        torch.testing.assert_close(names["log_ratio"], log_ratio, **close)
        torch.testing.assert_close(names["entropy"], entropies[mb].mean(), **close)
        updates += 1

    flags = ["--env-id", f"Probe/{probe}-v0", *SMALL, "--learning-rate", 0.02]
    train(file, tmp_path, *flags, "--total-timesteps", 128, on_update=torch.no_grad()(look))
    assert updates == 12


def test_core_10_one_loss_for_policy_value_and_entropy(file, tmp_path):
    """The gradient is that of the textbook loss over the valid actions, left to autograd."""

    def look(names):
        agent, mb, adv = copy.deepcopy(names["agent"]), names["mb"], names["adv"]
        obs, mask = names["b_obs"][mb].split([1, 5], 1)
        logits = agent.actor(obs).masked_fill(mask == 0, -torch.inf)
        parts = [torch.distributions.Categorical(logits=part) for part in logits.split([3, 2], 1)]
        actions = zip(parts, names["b_actions"][mb].T, strict=True)
        log_prob = sum(part.log_prob(values) for part, values in actions)
        entropy = sum(part.entropy() for part in parts).mean()
        ratio = torch.exp(log_prob - names["b_log_probs"][mb])
        gain = torch.minimum(ratio * adv, torch.clip(ratio, 0.8, 1.2) * adv)
        error = (agent.critic(obs)[:, 0] - names["b_returns"][mb]) ** 2
        loss = -gain.mean() + 0.7 * error.mean() / 2 - 0.3 * entropy
        expected = torch.autograd.grad(loss, list(agent.parameters()))
        expected = torch.cat([gradient.flatten() for gradient in expected])
        torch.testing.assert_close(flat_grad(names["agent"]), expected, atol=1e-5, rtol=1e-3)

    flags = "--vf-coef 0.7 --ent-coef 0.3 --no-clip-vloss --max-grad-norm 1e9 --learning-rate 0.01"
    train(file, tmp_path, *MASKED, "--total-timesteps", 256, *flags.split(), on_update=look)


def test_sampled_actions_follow_the_policy(file, tmp_path):
    sample = train(file, tmp_path, *SMALL, "--total-timesteps", 64)["sample"]
    chances = [torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.9])]
    actions = sample([part.log().expand(100_000, -1) for part in chances])
    counts = torch.bincount(actions[:, 0] * 2 + actions[:, 1], minlength=8).view(4, 2) / 100_000
    torch.testing.assert_close(counts, torch.outer(*chances), atol=0.006, rtol=0)


@pytest.mark.parametrize(
    ("probe", "best"),
    [
        ("MultiDiscreteActions", 2),
        ("ShiftedMultiDiscrete", 2),
        ("GridOfActions", 4),
        ("ActionAndObsMatter", 1),
        ("ShiftedActions", 1),
        ("DiscreteObs", 1),
    ],
)
def test_actions_of_probes(file, tmp_path, probe, best):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    names = train(file, tmp_path, "--env-id", f"Probe/{probe}-v0", *PROBE_FLAGS)
    assert np.mean(play(names, tmp_path)) > 0.9 * best


def play(names, folder):
    envs = names["make_envs"](names["args"], 8)
    checkpoint = torch.load(only_run(folder) / "checkpoint.pt", weights_only=True)
    policy = names["load_policy"](checkpoint, envs)
    returns, is_last, (obs, _) = [], np.zeros(8, dtype=bool), envs.reset(seed=5)
    while len(returns) < 80:
        obs, _, terminated, truncated, infos = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
        returns += list(infos["episode"]["r"][infos["_episode"]]) if "episode" in infos else []
    return returns


@pytest.mark.parametrize(
    ("probe", "values"),
    [("ConstantValue", {0: 1}), ("TruncatedEveryStep", {0: 2}), ("TwoEnds", {-1: 1, 1: 2})],
)
def test_values_of_probes(file, tmp_path, probe, values):
    names = train(file, tmp_path, "--env-id", f"Probe/{probe}-v0", *PROBE_FLAGS)
    obs = torch.tensor([[float(obs), 1.0, 1.0] for obs in values])
    with torch.no_grad():
        learned = names["agent"].value(obs).tolist()
    assert learned == pytest.approx(list(values.values()), abs=0.1)


def test_discrete_observations_are_one_hot(file, tmp_path):
    flags = ["--env-id", "Probe/DiscreteObs-v0", *SMALL, "--total-timesteps", 64]
    names = train(file, tmp_path, *flags)
    envs, seen = names["make_envs"](names["args"], 1), set()
    for seed in range(20):
        (obs,), _ = envs.reset(seed=seed)
        seen.add(number := int(envs.unwrapped.envs[0].unwrapped.obs))
        assert obs.tolist() == [number == 5, number == 6, number == 7, 1, 1, 1]
    assert seen == {5, 6, 7}
    rows = {tuple(row) for row in names["b_obs"][:, :3].tolist()}
    assert rows == {(1, 0, 0), (0, 1, 0), (0, 0, 1)}


# masks


@both_masks
def test_invalid_actions_are_never_tried(file, tmp_path, env_id):
    def look(names):
        is_valid = names["b_obs"][:, 1:].bool().split([3, 2], 1)
        for i, valid in enumerate(is_valid):
            assert valid.gather(1, names["b_actions"][:, [i]]).all()
        assert not all(valid.all() for valid in is_valid)

    train(file, tmp_path, "--env-id", env_id, *SMALL, "--total-timesteps", 320, on_update=look)
    returns = episodic_returns(tmp_path)
    assert len(returns) > 50 and set(returns) == {4}, "one invalid action ends the game"


@both_masks
def test_no_mask_lets_every_action_through(file, tmp_path, env_id):

    def look(names):
        np.testing.assert_array_equal(names["obs"][..., 1:], 1)

    flags = ["--env-id", env_id, *SMALL, "--total-timesteps", 320, "--no-mask"]
    train(file, tmp_path, *flags, on_update=look)
    returns = episodic_returns(tmp_path)
    assert np.mean(np.array(returns) < 4) > 0.8


@both_masks
def test_loaded_policy_takes_no_invalid_action(file, tmp_path, env_id):
    names = train(file, tmp_path, "--env-id", env_id, *SMALL, "--total-timesteps", 128)
    assert set(play(names, tmp_path)) == {4}


@both_masks
def test_masks_are_those_of_the_observations(file, tmp_path, env_id):
    """Row by row, what the environment says at the step is what is kept for learning from it."""
    names = train(file, tmp_path, "--env-id", env_id, *SMALL, "--total-timesteps", 64)
    envs, told = names["make_envs"](names["args"], 1), []
    obs, _ = envs.reset(seed=1)
    for _ in range(30):
        assert obs[0, 1:].tolist() == np.hstack(envs.unwrapped.envs[0].unwrapped.valid).tolist()
        told.append(tuple(obs[0, 1:]))
        action = [obs[0, 1:4].argmax(), obs[0, 4:].argmax()]
        obs, *_ = envs.step(np.array([action]))
    assert len(set(told)) > 5 and (0,) * 5 in told, (
        "the masks must change, and the end of the game have one too"
    )


def test_learning_sees_the_masks_that_acting_saw(file, tmp_path):
    updates = []

    def look(names):
        mask, ratio = names["b_obs"][names["mb"], 1:], names["ratio"]
        probs = torch.cat(names["log_probs"], 1).exp()
        assert (probs[mask == 0] == 0).all() and (probs[mask > 0] > 0).all()
        assert mask[:, :3].any(1).all() and mask[:, 3:].any(1).all(), (
            "the end of a game, with no valid action, is in there"
        )
        entropies = []
        logits = names["agent"].actor(names["b_obs"][names["mb"], :1])
        for row, valid in zip(logits, mask, strict=True):
            parts = row[:3][valid[:3] > 0], row[3:][valid[3:] > 0]
            parts = [torch.distributions.Categorical(logits=part) for part in parts]
            entropies.append(sum(part.entropy() for part in parts))
        expected = torch.stack(entropies).mean()
        torch.testing.assert_close(names["entropy"], expected, atol=1e-6, rtol=1e-4)
        if len(updates) % 6 == 0:
            torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
        assert torch.isfinite(flat_grad(names["agent"])).all()
        updates.append(names["is_last"].any())

    flags = [*MASKED, "--total-timesteps", 192, "--learning-rate", 0.02]
    train(file, tmp_path, *flags, on_update=look)
    assert len(updates) == 18 and all(updates)


def some_agent(file, folder):
    """An agent for parts of 3 and 2 values, with a policy that is far from uniform."""
    agent = train(file, folder, *MASKED, "--total-timesteps", 64)["agent"]
    torch.nn.init.normal_(agent.actor[-1].weight)
    agent.zero_grad()
    return agent


def test_masked_values_have_no_probability_and_no_gradient(file, tmp_path):
    agent = some_agent(file, tmp_path)
    first, second = agent.policy(torch.tensor([[0.7, 1, 0, 1, 0, 1]]))
    entropies = [-(part.exp() * part).sum() for part in (first, second)]
    (first[0, 0] + second[0, 1] - sum(entropies)).backward()
    probs = first.exp()[0]
    assert probs[1] == 0 and probs.sum().item() == pytest.approx(1)
    assert second.exp().tolist() == [[0, 1]]
    for grad in (agent.actor[-1].bias.grad, agent.actor[-1].weight.grad.abs().sum(1)):
        assert grad[[1, 3, 4]].tolist() == [0, 0, 0], (
            "what is masked, or the only choice left, is not learned from"
        )
        assert (grad[[0, 2]] != 0).all()


def test_masks_change_no_odds_and_no_value(file, tmp_path):
    """Neither network sees the mask: it only rules out."""
    agent = some_agent(file, tmp_path)
    masks = torch.tensor([[1.0, 1, 1, 1, 1], [1, 0, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
    obs = torch.cat([torch.full((4, 1), 0.7), masks], 1)
    odds = (agent.policy(obs)[0][:, 0] - agent.policy(obs)[0][:, 2]).tolist()
    assert odds[:3] == pytest.approx([odds[0]] * 3, abs=1e-5) and abs(odds[0]) > 0.1
    assert len(set(agent.value(obs).tolist())) == 1


def test_a_part_without_any_valid_value_does_no_harm(file, tmp_path):
    agent = some_agent(file, tmp_path)
    log_probs = agent.policy(torch.tensor([[0.7, 0, 0, 0, 1, 1], [0.7, 0, 0, 0, 0, 0]]))
    assert log_probs[0].exp().tolist() == [pytest.approx([1 / 3] * 3)] * 2
    sum((part.exp() * part).sum() for part in log_probs).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in agent.actor.parameters())


def test_masks_without_any_valid_action_do_no_harm(file, tmp_path):
    """All actions are then equally likely, and none is learned from."""

    def look(names):
        assert (names["b_obs"][:, 1:] == 0).all()
        probs = [part.exp() for part in names["log_probs"]]
        assert ((probs[0] - 1 / 3).abs() < 1e-6).all() and ((probs[1] - 1 / 2).abs() < 1e-6).all()
        assert all(
            parameter.grad.abs().max() == 0 for parameter in names["agent"].actor.parameters()
        )

    flags = ["--env-id", "Probe/NoValidActions-v0", *SMALL, "--total-timesteps", 192]
    train(file, tmp_path, *flags, on_update=look)
    returns = episodic_returns(tmp_path)
    assert set(returns) == {4} and len(returns) > 30, "it plays on"


def test_masks_of_taxi(file, tmp_path):
    """Every observation comes with the mask of its state, and every action keeps to it."""
    taxi, ruled_out = gym.make("Taxi-v4").unwrapped, []

    def look(names):
        states, masks = names["b_obs"][:, :500], names["b_obs"][:, 500:]
        assert (states.sum(1) == 1).all() and (states.max(1).values == 1).all()
        numbers = states.argmax(1).tolist()
        assert masks.tolist() == [taxi.action_mask(number).tolist() for number in numbers]
        assert masks.gather(1, names["b_actions"]).all()
        ruled_out.append(float(1 - masks.mean()))

    train(file, tmp_path, *SMALL, "--total-timesteps", 640, on_update=look)
    assert min(ruled_out) > 0.2


# what it refuses


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Probe/UnevenActions-v0"])
def test_other_actions_are_refused(file, tmp_path, env_id):
    words = f"^cannot train on {env_id}: MultiDiscrete or Discrete actions are needed"
    with pytest.raises(SystemExit, match=words):
        train(file, tmp_path, "--env-id", env_id, *SMALL, "--total-timesteps", 64)
    assert not (tmp_path / "runs").exists()
