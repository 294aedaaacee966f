"""cleanrl/ppo_multidiscrete.py: actions of several parts, and masks for those that are invalid."""

import copy
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.harness import FILES, flat_grad, only_run, scalars, train

SMALL = ("--num-envs", 2, "--num-steps", 32, "--num-minibatches", 2, "--update-epochs", 3)
PROBE_FLAGS = (
    "--total-timesteps",
    5120,
    "--num-envs",
    8,
    "--num-steps",
    16,
    "--learning-rate",
    0.01,
    "--gamma",
    0.5,
)
PROBE_FLAGS = (
    *PROBE_FLAGS,
    "--ent-coef",
    0,
    "--no-clip-vloss",
)  # clipped, the value moves too slowly for a short test
both_masks = pytest.mark.parametrize(
    "env_id", ["Probe/MaskedActions-v0", "Probe/MaskedActionsInParts-v0"]
)


@pytest.fixture
def file():
    return FILES["ppo_multidiscrete"]


def episodic_returns(folder):
    return [value for _, value in scalars(only_run(folder))["charts/episodic_return"]]


def joint_distribution(logits, sizes):
    """One distribution over all combinations of the parts' values, in the order of itertools.product."""
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
        if updates % 6 == 0:  # the policy that acted
            torch.testing.assert_close(
                policy.log_prob(numbers), names["b_logprobs"], atol=1e-5, rtol=1e-4
            )
        updates += 1
        logratio = policy.log_prob(numbers)[mb] - names["b_logprobs"][mb]
        torch.testing.assert_close(names["logratio"], logratio, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            names["entropy"], policy.entropy()[mb].mean(), atol=1e-5, rtol=1e-4
        )

    flags = (
        "--env-id",
        f"Probe/{probe}-v0",
        *SMALL,
        "--total-timesteps",
        128,
        "--learning-rate",
        0.02,
    )
    train(file, tmp_path, *flags, on_update=torch.no_grad()(look))
    assert updates == 12


def test_core_10_one_loss_for_policy_value_and_entropy(file, tmp_path):
    """The gradient that reaches the optimizer is that of the textbook loss over the valid actions, left to autograd."""

    def look(names):
        agent, mb = copy.deepcopy(names["agent"]), names["mb"]
        obs, mask = names["b_obs"][mb].split([1, 5], 1)
        logits = agent.actor(obs).masked_fill(mask == 0, -torch.inf)
        parts = [torch.distributions.Categorical(logits=part) for part in logits.split([3, 2], 1)]
        log_prob = sum(
            part.log_prob(actions)
            for part, actions in zip(parts, names["b_actions"][mb].T, strict=True)
        )
        ratio = torch.exp(log_prob - names["b_logprobs"][mb])
        gain = torch.minimum(
            ratio * names["mb_advantages"], torch.clip(ratio, 0.8, 1.2) * names["mb_advantages"]
        )
        error = (agent.critic(obs)[:, 0] - names["b_returns"][mb]) ** 2
        loss = (
            -gain.mean()
            + 0.7 * error.mean() / 2
            - 0.3 * sum(part.entropy() for part in parts).mean()
        )
        expected = torch.autograd.grad(loss, list(agent.parameters()))
        torch.testing.assert_close(
            flat_grad(names["agent"]),
            torch.cat([g.flatten() for g in expected]),
            atol=1e-5,
            rtol=1e-3,
        )

    flags = (
        "--vf-coef",
        0.7,
        "--ent-coef",
        0.3,
        "--no-clip-vloss",
        "--max-grad-norm",
        1e9,
        "--learning-rate",
        0.01,
    )
    train(
        file,
        tmp_path,
        "--env-id",
        "Probe/MaskedActions-v0",
        *SMALL,
        "--total-timesteps",
        256,
        *flags,
        on_update=look,
    )


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
    policy = names["load_policy"](
        torch.load(only_run(folder) / "checkpoint.pt", weights_only=True), envs
    )
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
    with torch.no_grad():
        learned = (
            names["agent"].value(torch.tensor([[float(obs), 1.0, 1.0] for obs in values])).tolist()
        )
    assert learned == pytest.approx(list(values.values()), abs=0.1)


def test_discrete_observations_are_one_hot(file, tmp_path):
    names = train(
        file, tmp_path, "--env-id", "Probe/DiscreteObs-v0", *SMALL, "--total-timesteps", 64
    )
    envs, seen = names["make_envs"](names["args"], 1), set()
    for seed in range(20):
        (obs,), _ = envs.reset(seed=seed)
        seen.add(number := int(envs.unwrapped.envs[0].unwrapped.obs))
        assert obs.tolist() == [number == 5, number == 6, number == 7, 1, 1, 1]
    assert seen == {5, 6, 7} and {tuple(row) for row in names["b_obs"][:, :3].tolist()} == {
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
    }


# masks


@both_masks
def test_invalid_actions_are_never_tried(file, tmp_path, env_id):
    def look(names):
        is_valid = names["b_obs"][:, 1:].bool().split([3, 2], 1)
        assert all(
            valid.gather(1, names["b_actions"][:, [i]]).all() for i, valid in enumerate(is_valid)
        )
        assert not all(valid.all() for valid in is_valid)

    train(file, tmp_path, "--env-id", env_id, *SMALL, "--total-timesteps", 320, on_update=look)
    returns = episodic_returns(tmp_path)
    assert len(returns) > 50 and set(returns) == {4}, "one invalid action ends the game"


@both_masks
def test_no_mask_lets_every_action_through(file, tmp_path, env_id):
    flags = ("--env-id", env_id, *SMALL, "--total-timesteps", 320, "--no-mask")
    train(
        file,
        tmp_path,
        *flags,
        on_update=lambda names: np.testing.assert_array_equal(names["obs"][..., 1:], 1),
    )
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
        mask, entropies = names["b_obs"][names["mb"], 1:], []
        chances = torch.cat(names["log_probs"], 1).exp()
        assert (chances[mask == 0] == 0).all() and (chances[mask > 0] > 0).all()
        assert mask[:, :3].any(1).all() and mask[:, 3:].any(1).all(), (
            "the end of a game, with no valid action, is in there"
        )
        for row, valid in zip(
            names["agent"].actor(names["b_obs"][names["mb"], :1]), mask, strict=True
        ):
            parts = row[:3][valid[:3] > 0], row[3:][valid[3:] > 0]
            entropies.append(
                sum(torch.distributions.Categorical(logits=part).entropy() for part in parts)
            )
        torch.testing.assert_close(
            names["entropy"], torch.stack(entropies).mean(), atol=1e-6, rtol=1e-4
        )
        if len(updates) % 6 == 0:
            torch.testing.assert_close(
                names["ratio"], torch.ones_like(names["ratio"]), atol=1e-5, rtol=0
            )
        assert torch.isfinite(flat_grad(names["agent"])).all()
        updates.append(names["is_last"].any())

    flags = (
        "--env-id",
        "Probe/MaskedActions-v0",
        *SMALL,
        "--total-timesteps",
        192,
        "--learning-rate",
        0.02,
    )
    train(file, tmp_path, *flags, on_update=look)
    assert len(updates) == 18 and all(updates)


def some_agent(file, folder):
    """An agent for parts of 3 and 2 values, with a policy that is far from uniform."""
    agent = train(
        file, folder, "--env-id", "Probe/MaskedActions-v0", *SMALL, "--total-timesteps", 64
    )["agent"]
    torch.nn.init.normal_(agent.actor[-1].weight)
    agent.zero_grad()
    return agent


def test_masked_values_have_no_probability_and_no_gradient(file, tmp_path):
    agent = some_agent(file, tmp_path)
    first, second = agent.policy(torch.tensor([[0.7, 1, 0, 1, 0, 1]]))
    (
        first[0, 0] + second[0, 1] + (first.exp() * first).sum() + (second.exp() * second).sum()
    ).backward()
    assert (
        first.exp()[0, 1] == 0
        and first.exp().sum().item() == pytest.approx(1)
        and second.exp().tolist() == [[0, 1]]
    )
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


def test_masks_of_taxi(file, tmp_path):
    """Every observation comes with the mask of its state, and every action keeps to it."""
    taxi, ruled_out = gym.make("Taxi-v4").unwrapped, []

    def look(names):
        states, masks = names["b_obs"][:, :500], names["b_obs"][:, 500:]
        assert (states.sum(1) == 1).all() and (states.max(1).values == 1).all()
        assert masks.tolist() == [
            taxi.action_mask(state).tolist() for state in states.argmax(1).tolist()
        ]
        assert masks.gather(1, names["b_actions"]).all()
        ruled_out.append(float(1 - masks.mean()))

    train(file, tmp_path, *SMALL, "--total-timesteps", 640, on_update=look)
    assert min(ruled_out) > 0.2
