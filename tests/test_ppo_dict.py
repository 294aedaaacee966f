"""cleanrl/ppo_dict.py. test_dict_N guards detail N of docs/rl-algorithms/ppo-dict.md.

The tests of ppo.py's details run here, too, on the same environments with their observation in a
dictionary.
"""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests import test_ppo
from tests.harness import flat_grad, only_run, probe, read_checkpoint, scalars, train
from tests.probes import ValueFromDict

SMALL = "--num-envs 3 --num-steps 16 --num-minibatches 2 --update-epochs 2 --total-timesteps 96"
SMALL = SMALL.split()
SIGNS = [tuple(np.sign(np.array(bits) - 0.5).astype(int)) for bits in np.ndindex(2, 2, 2, 2)]


def words(file, folder):
    """The names of the file, and its wrapper of an environment with a text."""
    names = train(file, folder, "--env-id", "Probe/ValueFromDict-v0", *SMALL)
    return names, names["TokenizeTexts"](ValueFromDict())


def batch(names, signs):
    """Observations of ValueFromDict as the network gets them."""
    wrapper = names["TokenizeTexts"](ValueFromDict())
    rows = [wrapper.observation(ValueFromDict.show(*each)) for each in signs]
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


# the details


def test_dict_1_texts_become_tokens(file, tmp_path):
    names, wrapper = words(file, tmp_path)
    vocabulary, num_tokens = names["VOCABULARY"], names["NUM_TOKENS"]
    assert len(set(vocabulary)) == len(vocabulary)
    space = wrapper.observation_space["text"]
    assert space == gym.spaces.MultiDiscrete([1 + len(vocabulary)] * num_tokens)
    tokens = wrapper.tokenize("Go to the grey box, then left")
    told = [vocabulary[token - 1] for token in tokens if token > 0]
    assert told == ["go", "to", "the", "grey", "box", "then", "left"]
    assert tokens in space and not tokens[7:].any()
    with pytest.raises(ValueError, match=f"NUM_TOKENS is {num_tokens}"):
        wrapper.tokenize("go " * (num_tokens + 1))


def test_dict_1_unknown_words_get_one_line(file, tmp_path):
    error = None
    try:
        train(file, tmp_path, "--env-id", "Probe/UnknownWord-v0", *SMALL)
    except (SystemExit, ValueError) as caught:
        error = caught
    assert str(error) == "cannot train on Probe/UnknownWord-v0: VOCABULARY has no xyzzy"
    assert list(tmp_path.iterdir()) == []


def test_dict_1_every_mission_of_minigrid_is_known(file, tmp_path):
    """Of those that are short enough, and those that are not are few."""
    pytest.importorskip("minigrid")
    _, wrapper = words(file, tmp_path)
    ids = "GoToObject-8x8-N2 Fetch-8x8-N3 PutNear-8x8-N3 LockedRoom RedBlueDoors-8x8 MemoryS7"
    for env_id in [f"minigrid:MiniGrid-{name}-v0" for name in ids.split()]:
        env = gym.make(env_id)
        for seed in range(5):
            assert wrapper.tokenize(env.reset(seed=seed)[0]["mission"]).any()


def test_dict_2_an_encoder_for_each_kind_of_entry(file, tmp_path):
    """The features of each, by hand: choices and words have learned vectors."""
    names, _ = words(file, tmp_path)
    encoders, obs = names["agent"].encoders, batch(names, SIGNS)
    text, choice = (encoders[name].embedding.weight for name in ("text", "choice"))
    assert text.shape == (1 + len(names["VOCABULARY"]), 16) and choice.shape == (2, 16)
    inputs = {
        "choice": choice[obs["choice"] - 3],
        "text": torch.cat([text[column] for column in obs["text"].T], 1),
        "vector": obs["vector"],
        "image": encoders["image"].cnn(obs["image"].movedim(3, 1) / 255),
    }
    for name, x in inputs.items():
        layer = encoders[name].layer
        expected = (x @ layer.weight.T + layer.bias).tanh()
        torch.testing.assert_close(encoders[name](obs[name]), expected)


def test_dict_2_bytes_of_vectors_are_scaled_too(file, tmp_path):
    names, _ = words(file, tmp_path)
    memory = gym.spaces.Box(0, 255, (128,), np.uint8)
    encoder, entry = names["Encoder"](memory), torch.randint(256, (3, 128), dtype=torch.uint8)
    expected = (entry / 255 @ encoder.layer.weight.T + encoder.layer.bias).tanh()
    torch.testing.assert_close(encoder(entry), expected)


def test_dict_2_large_images_have_the_cnn_of_atari(file, tmp_path):
    names, _ = words(file, tmp_path)
    sizes = {}
    for size in (7, 84):
        space = gym.spaces.Box(0, 255, (size, size, 3), np.uint8)
        cnn = names["Encoder"](space).cnn
        sizes[size] = [tuple(layer.weight.shape) for layer in cnn if hasattr(layer, "weight")]
    assert sizes[84] == [(32, 3, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    assert sizes[7] == [(16, 3, 3, 3), (32, 16, 3, 3)]


def test_dict_3_all_entries_and_their_products_reach_both_heads(file, tmp_path):
    names, _ = words(file, tmp_path)
    agent, obs = names["agent"], batch(names, SIGNS)
    c, i, t, v = (agent.encoders[name](obs[name]) for name in sorted(obs))
    features = torch.cat([c, i, t, v, c * i, c * t, c * v, i * t, i * v, t * v], 1)
    log_probs, value = agent(obs)
    torch.testing.assert_close(log_probs, agent.actor(features).log_softmax(-1))
    torch.testing.assert_close(value, agent.critic(features)[:, 0])


def test_dict_4_the_rollout_has_an_array_for_each_entry(file, tmp_path):
    """By its name, and of its kind; learned from is what was seen, row by row."""

    last = {}

    def look(names):
        real = ~names["is_last"][:-1]
        for name, entry in names["obs"].items():
            begins = (name, names["iteration"]) in last
            assert not begins or np.array_equal(entry[0], last[name, names["iteration"]])
            last[name, names["iteration"] + 1] = entry[-1].copy()
            assert torch.equal(names["b_obs"][name], torch.from_numpy(entry[:-1][real]))
            assert torch.equal(names["mb_obs"][name], names["b_obs"][name][names["mb"]])

    flags = ("--env-id", "Probe/ValueFromDict-v0", *SMALL)
    names = train(file, tmp_path, *flags, on_update=look)
    kinds = {name: (entry.shape[2:], entry.dtype.name) for name, entry in names["obs"].items()}
    assert kinds == {
        "choice": ((), "int64"),
        "image": ((4, 3, 2), "uint8"),
        "text": ((names["NUM_TOKENS"],), "int64"),
        "vector": ((2,), "float32"),
    }
    assert names["iteration"] == 1
    env = names["envs"].unwrapped.envs[0].unwrapped
    last = {name: entry[-1, 0] for name, entry in names["obs"].items()}
    assert np.sign(last["vector"][1]) == env.signs[1] and last["choice"] == 3 + (env.signs[2] > 0)


def test_dict_5_keys_choose_entries(file, tmp_path):
    flags = ("--env-id", "Probe/ValueFromDict-v0", "--keys", "vector", "image")
    names = train(file, tmp_path, *flags, *SMALL)
    assert set(names["obs"]) == {"image", "vector"}
    checkpoint = read_checkpoint(only_run(tmp_path))
    assert not [name for name in checkpoint["agent"] if "text" in name or "choice" in name]
    policy = names["load_policy"](checkpoint, names["envs"])
    obs, _ = names["envs"].reset()
    assert len(policy(obs, np.zeros(3, bool))) == 3
    with pytest.raises(SystemExit, match=r"^cannot train on Probe/ValueFromDict-v0: .*sound"):
        train(file, tmp_path / "none", *flags[:3], "sound", *SMALL)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPole-v1", "Dict observations are needed"),
        ("Probe/NestedDict-v0", "inner is not Box, Discrete or Text"),
    ],
)
def test_other_observations_are_refused(file, tmp_path, env_id, message):
    with pytest.raises(SystemExit, match=message):
        train(file, tmp_path, "--env-id", env_id, *SMALL)


# the details of ppo.py


def as_ppo(file, folder, *flags, **kwargs):
    """Train as test_ppo.py does, with the observation in a dictionary, and ppo.py's defaults."""
    flags = [str(flag).replace("Probe/", "DictProbe/") for flag in flags]
    flags = ["Probe/SameStep-v0" if "SameStep" in flag else flag for flag in flags]
    defaults = ("--env-id", "DictProbe/CartPole-v0", "--learning-rate", 2.5e-4)
    return train(file, folder, *defaults, *flags, **kwargs)


@pytest.mark.parametrize(
    "name",
    [
        "test_core_3_adam_epsilon",
        "test_core_4_learning_rate_falls_linearly",
        "test_core_5_advantages",
        "test_core_7_advantages_are_normalized_by_minibatch",
        "test_core_7_can_be_turned_off",
        "test_core_8_clipped_surrogate",
        "test_core_9_clipped_value_loss",
        "test_core_11_gradient_norm_is_clipped",
        "test_core_12_debug_variables",
        "test_target_kl_stops_the_epochs",
        "test_sampled_actions_follow_the_policy",
        "test_same_seed_same_bits",
    ],
)
def test_as_in_ppo(file, tmp_path, monkeypatch, name):
    monkeypatch.setattr(test_ppo, "train", as_ppo)
    getattr(test_ppo, name)(file, tmp_path)


def test_core_6_every_epoch_shuffles_and_covers_the_rollout(file, tmp_path):
    minibatches = []

    def look(names):
        minibatches.append(names["mb"].tolist())

    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 48)
    rows = len(train(file, tmp_path, *flags, on_update=look)["b_actions"])
    epochs = [minibatches[i] + minibatches[i + 1] for i in (0, 2)]
    assert len(minibatches) == 4 and all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(rows)]}) == 3, "a new order each time"


def test_core_10_one_loss_for_policy_value_and_entropy(file, tmp_path):
    """The gradient that reaches the optimizer is that of the textbook loss, left to autograd."""

    def look(names):
        agent, mb = copy.deepcopy(names["agent"]), names["mb"]
        obs = {name: torch.stack([x[row] for row in mb]) for name, x in names["b_obs"].items()}
        log_probs, value = agent(obs)
        policy = torch.distributions.Categorical(logits=log_probs)
        ratio = torch.exp(policy.log_prob(names["b_actions"][mb]) - names["b_log_probs"][mb])
        gain = torch.minimum(ratio * names["adv"], torch.clip(ratio, 0.8, 1.2) * names["adv"])
        error = (value - names["b_returns"][mb]) ** 2
        loss = -gain.mean() + 0.7 * error.mean() / 2 - 0.3 * policy.entropy().mean()
        expected = torch.autograd.grad(loss, list(agent.parameters()))
        expected = torch.cat([gradient.flatten() for gradient in expected])
        torch.testing.assert_close(flat_grad(names["agent"]), expected, atol=1e-5, rtol=1e-3)

    flags = "--vf-coef 0.7 --ent-coef 0.3 --no-clip-vloss --max-grad-norm 1e9".split()
    flags = ("--env-id", "Probe/ValueFromDict-v0", *SMALL, *flags)
    train(file, tmp_path, *flags, on_update=look)


def test_reset_rows_are_not_learned_from(file, tmp_path):
    seen = set()

    def look(names):
        seen.update(names["mb_obs"]["obs"].flatten().tolist())

    train(file, tmp_path, "--env-id", probe(file, "MarkedLast"), *SMALL, on_update=look)
    assert seen == {float(np.float32(t / 3)) for t in range(3)}


# known answers


PROBE_FLAGS = "--total-timesteps 3072 --num-envs 16 --num-steps 16 --learning-rate 0.01 --gamma 0.5"
PROBE_FLAGS = (*PROBE_FLAGS.split(), *"--num-minibatches 4 --ent-coef 0 --no-clip-vloss".split())


@pytest.mark.parametrize(
    ("name", "values"), [("TruncatedEveryStep", {0: 2}), ("TwoEnds", {-1: 1, 1: 2})]
)
def test_values_of_probes(file, tmp_path, name, values):
    agent = train(file, tmp_path, "--env-id", probe(file, name), *PROBE_FLAGS)["agent"]
    obs = torch.tensor([[float(obs)] for obs in values])
    with torch.no_grad():
        _, learned = agent({"obs": obs, "same": torch.ones(len(obs)).long()})
    assert learned.tolist() == pytest.approx(list(values.values()), abs=0.1)


def test_values_of_every_entry(file, tmp_path):
    """Each of the four entries has a share of the reward."""
    flags = ("--env-id", "Probe/ValueFromDict-v0", *PROBE_FLAGS)
    names = train(file, tmp_path, *flags)
    with torch.no_grad():
        _, learned = names["agent"](batch(names, SIGNS))
    image, vector, choice, text = np.transpose(SIGNS)
    expected = image + 0.5 * vector + 0.25 * choice + 0.125 * text
    np.testing.assert_allclose(learned, expected, atol=0.1)


@pytest.mark.parametrize("name", ["ActionAndDictMatter", "ShiftedDictActions"])
def test_actions_of_probes(file, tmp_path, monkeypatch, name):
    """An image and a text say together which action is right."""

    def on_dicts(file, folder, *flags):
        few = ("--total-timesteps", 1536) if "Shifted" in name else ()
        return train(file, folder, *flags[:2], *PROBE_FLAGS, *few)

    monkeypatch.setattr(test_ppo, "train", on_dicts)
    test_ppo.test_actions_of_probes(file, tmp_path, name)


def test_without_the_text_it_is_a_guess(file, tmp_path):
    flags = ("--env-id", "Probe/ActionAndDictMatter-v0", *PROBE_FLAGS)
    train(file, tmp_path, *flags, "--keys", "choice", "image", "vector")
    assert abs(test_ppo.last_hundred(only_run(tmp_path))) < 0.3


# minigrid


def test_minigrids_tiles_are_one_hot(file, tmp_path):
    pytest.importorskip("minigrid")
    names = train(file, tmp_path, "--env-id", "MiniGrid-Fetch-5x5-N2-v0", *SMALL)
    images = names["obs"]["image"]
    assert images.shape == (17, 3, 7, 7, 20) and set(names["obs"]) >= {"direction", "mission"}
    parts = np.split(images, [11, 17], -1)
    assert all((part.sum(-1) == 1).all() and set(np.unique(part)) == {0, 1} for part in parts)
    env = names["envs"].unwrapped.envs[0].unwrapped
    codes = env.gen_obs()["image"]
    for number, part in enumerate(parts):
        assert np.array_equal(part[-1, 0].argmax(-1), codes[..., number])
    tokens = names["obs"]["mission"][-1, 0]
    mission = [names["VOCABULARY"][token - 1] for token in tokens if token > 0]
    assert " ".join(mission) == env.mission


@pytest.mark.slow
def test_the_mission_says_which_door(file, tmp_path):
    """Six colors in an image of tiles and in a mission: without it, the door is a guess."""
    flags = ("--env-id", "Probe/DoorOfAColor-v0", "--total-timesteps", 40_960)
    train(file, tmp_path / "with", *flags)
    train(file, tmp_path / "without", *flags, "--keys", "image")
    returns = []
    for name in ("with", "without"):
        logged = scalars(only_run(tmp_path / name))["charts/episodic_return"]
        returns.append(np.mean([value for _, value in logged[-2000:]]))
    assert returns[0] > 0.36 and returns[1] < 0.28
