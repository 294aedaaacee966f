"""cleanrl/ippo_jax.py. test_team_N guards detail N of docs/rl-algorithms/ippo-jax.md, the others
those of ppo.md; tests/mutations shows that each test can fail.

Compiling takes longer than everything else here: so tests share a program, which is made once for
each file."""

import functools
import runpy
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import jaxmarl
import numpy as np
import pytest
import torch
from jaxmarl.environments.smax import map_name_to_scenario

from cleanrl_utils import enjoy
from tests import jaxmarl_probes
from tests.harness import about, only_run, read_checkpoint, same, scalars
from tests.test_contract import refuse
from tests.test_dqn_jax import compiled_quickly, leaves, tensors, train, without_speed
from tests.test_ppo_jax import (
    FEW,
    LAST_STEPS,
    LAYERS,
    advantages_of,
    halfway,
    orders_of,
    policy_of,
    runs_of,
    step_of,
    value_of,
)


def probe(name):
    return ("--env-id", f"tests.jaxmarl_probes:{name}")


def load(file, *flags):
    """The names of a file, the arguments of a run and its environment."""
    names = runpy.run_path(str(file))
    with mock.patch.object(sys, "argv", [str(file), *map(str, flags)]):
        args = names["tyro"].cli(names["Args"])
    return names, args, names["make_env"](args)


def begin(file, *flags):
    """The arguments of a run, the run at its start, and a function that trains one iteration."""
    names, args, env = load(file, *flags)
    init, train = names["make_program"](args, env)
    run = compiled_quickly(lambda: jax.device_get(jax.jit(init)(jax.random.PRNGKey(args.seed))))
    program = jax.jit(lambda run: train(run, 1))

    def iterate(run):
        answers = compiled_quickly(lambda: jax.device_get(program(run)))
        run, metrics, checked, (is_last, told) = answers
        assert all(map(np.isfinite, checked.values()))
        return run, (metrics, is_last[0], {name: x[0] for name, x in told.items()})

    return args, run, iterate


# an iteration once more: one game, step and agent at a time, PyTorch's autograd and Adam


def masked_policy(params, obs, available):
    """Log-probabilities of all actions, without probability for those that cannot be taken."""
    logits = policy_of(params, obs).masked_fill(~torch.tensor(available), -torch.inf)
    return logits.log_softmax(-1)


def follow(args, run):
    """The rollout of a run's next iteration, the world after it, and the orders of the epochs.

    By the probe's own step, with the random numbers that the program draws."""
    env = getattr(jaxmarl_probes, args.env_id.split(":")[1])()
    _, noise_key, env_key, order_key = jax.random.split(run["key"], 4)
    T, N, A = args.num_steps, args.num_envs, 2
    noise = np.asarray(jax.random.gumbel(noise_key, (T, N, A, 2)))
    step_keys, reset_keys = jax.random.split(env_key, (2, T * N))
    fresh = jax.device_get(jax.jit(jax.vmap(env.reset))(reset_keys))
    step = jax.jit(env.step_env)
    shaping = max(0, 1 - int(run["global_step"]) / args.rew_shaping_horizon)
    params, world, rollout = tensors(run["agent"]["params"]), run["world"], []
    for t in range(T):
        row, new = [], []
        for e in range(N):
            state = jax.tree.map(lambda x, e=e: x[e], world["env_state"])
            obs, is_alive = world["obs"][e], ~world["is_dead"][e]
            available = np.stack(list(env.get_avail_actions(state).values())) > 0
            log_probs = masked_policy(params, obs, available).detach().numpy()
            actions = (log_probs + noise[t, e]).argmax(-1)
            moves = dict(zip(env.agents, jnp.asarray(actions), strict=True))
            _, state, rewards, dones, infos = jax.device_get(
                step(step_keys[t * N + e], state, moves)
            )
            is_over, terminated = bool(dones["__all__"]), bool(state.is_end)
            rewards = np.stack(list(rewards.values()))
            shaped = np.stack(list(infos["shaped_reward"].values()))
            next_obs = np.array(state.obs)[:, None]
            total, length = world["episode_return"][e] + rewards, world["episode_length"][e] + 1
            row.append(
                dict(
                    obs=obs,
                    available=available,
                    actions=actions,
                    log_probs=log_probs[[0, 1], actions],
                    is_alive=is_alive,
                    rewards=rewards + shaping * shaped,
                    terminated=terminated,
                    truncated=is_over and not terminated,
                    next_obs=next_obs,
                    total=total,
                    length=length,
                )
            )
            dead = np.stack([dones[agent] for agent in env.agents])
            begins, fresh_state = jax.tree.map(lambda x, i=t * N + e: x[i], fresh)
            begins = np.stack(list(begins.values()))
            new.append(
                dict(
                    env_state=fresh_state if is_over else state,
                    obs=begins if is_over else next_obs,
                    is_dead=dead & (not is_over),
                    episode_return=total * (not is_over),
                    episode_length=np.float32(length * (not is_over)),
                )
            )
        world = jax.tree.map(lambda *x: np.stack(x), *new)
        rollout.append(jax.tree.map(lambda *x: np.stack(x), *row))
    rollout = jax.tree.map(lambda *x: np.stack(x), *rollout)
    return SimpleNamespace(**rollout), world, orders_of(args, order_key, T * N * A)


def learn(args, run, adam, params, rollout, orders):
    """The metrics of an iteration in which Adam changes params, and what clips and masks did."""
    columns = SimpleNamespace(num_envs=2 * args.num_envs, num_steps=args.num_steps)
    columns.gamma, columns.gae_lambda = args.gamma, args.gae_lambda
    flat = args.num_steps, columns.num_envs
    values, next_values = (
        value_of(params, x).detach().numpy().reshape(flat) for x in (rollout.obs, rollout.next_obs)
    )
    terminated = rollout.terminated.repeat(2, 1)
    is_over = terminated | rollout.truncated.repeat(2, 1)
    rewards = rollout.rewards.reshape(flat)
    advantages = advantages_of(columns, values, next_values, rewards, terminated, is_over)
    returns = advantages + values
    total = args.total_timesteps // (args.num_steps * args.num_envs)
    done = int(run["global_step"]) // (args.num_steps * args.num_envs)
    rate = args.learning_rate * (1 - args.anneal_lr * done / total)
    adam.param_groups[0]["lr"] = rate
    names = ("obs", "available", "actions", "log_probs", "is_alive")
    rows = [getattr(rollout, name) for name in names]
    rows = [x.reshape(advantages.size, *x.shape[3:]) for x in rows]
    rows += [x.ravel() for x in (values, advantages, returns)]
    clipfracs, did = [], dict(ratio=0, value=0, norm=0, dead=0, masked=0)
    for order in orders:
        for mb in order.reshape(args.num_minibatches, -1):
            b_obs, b_available, b_actions, b_logprobs, b_alive, *rest = (x[mb] for x in rows)
            b_values, b_advantages, b_returns = map(torch.tensor, rest)
            alive = torch.tensor(np.flatnonzero(b_alive))  # who has acted
            log_probs, value = masked_policy(params, b_obs, b_available), value_of(params, b_obs)
            ratio = log_probs[range(len(mb)), b_actions] - torch.tensor(b_logprobs)
            ratio, adv = ratio[alive].exp(), b_advantages[alive]
            if args.norm_adv:
                adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
            near = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            gain = torch.minimum(ratio * adv, near * adv)
            near_value = b_values + (value - b_values).clamp(-args.clip_coef, args.clip_coef)
            error = (value - b_returns) ** 2
            worse = torch.maximum(error, (near_value - b_returns) ** 2)
            worse = worse if args.clip_vloss else error
            entropy = torch.distributions.Categorical(probs=log_probs[alive].exp()).entropy()
            policy_loss, value_loss, entropy = -gain.mean(), worse.mean() / 2, entropy.mean()
            adam.zero_grad()
            (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
            norm = torch.nn.utils.clip_grad_norm_(jax.tree.leaves(params), args.max_grad_norm)
            adam.step()
            clipfracs.append(float(((ratio - 1).abs() > args.clip_coef).float().mean()))
            did["ratio"] += int((gain < ratio * adv).sum())
            did["value"] += int((worse > error).sum())
            did["norm"] += int(norm > args.max_grad_norm)
            did["dead"] += len(mb) - len(alive)
            did["masked"] += int((~b_available).sum())
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


WATCHED = "--num-envs 3 --num-steps 32 --num-minibatches 4 --update-epochs 3 --total-timesteps 384"
WATCHED += " --learning-rate 0.004 --gamma 0.9 --gae-lambda 0.7 --clip-coef 0.05 --vf-coef 0.7"
WATCHED += " --ent-coef 0.3 --max-grad-norm 0.2 --rew-shaping-horizon 200"
WATCHED = (*probe("RandomEnds"), *WATCHED.split())


@functools.cache
def watch(file, *flags):
    """The states of a run before, between and after two iterations, and what each logged."""
    args, run, program = begin(file, *WATCHED, *flags)
    states, logs = [run], []
    for _ in range(2):
        run, log = program(run)
        states.append(run)
        logs.append(log)
    rollouts = compiled_quickly(lambda: [follow(args, run) for run in states[:-1]])
    return args, states, logs, rollouts


def test_team_3_and_core_1_games_run_on_across_rollouts(file, tmp_path):
    """The world after an iteration, who is dead in it, and every end are those of single games."""
    _, states, logs, rollouts = watch(file)
    for after, (_, is_over, told), (rollout, world, _) in zip(
        states[1:], logs, rollouts, strict=True
    ):
        assert rollout.terminated.sum() > 5 and rollout.truncated.sum() > 5, "both ends"
        assert (~rollout.is_alive).sum() > 20
        np.testing.assert_array_equal(is_over, rollout.terminated | rollout.truncated)
        for name, wanted in {
            "return": rollout.total.mean(2),
            "return-agent_0": rollout.total[..., 0],
            "return-agent_1": rollout.total[..., 1],
            "length": rollout.length,
        }.items():
            got = told[f"charts/episodic_{name}"]
            np.testing.assert_allclose(got[is_over], wanted[is_over], atol=1e-5)
        assert len(told) == 4, "no win rate where nothing is won"
        for got, wanted in zip(leaves(after["world"]), leaves(world), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert after["world"]["episode_length"].max() > 0, "some are under way"


def test_team_1_and_core_2_one_network_for_all_agents(file, tmp_path):
    """With orthogonal weights and zero biases; one for the policy and one for the values."""
    _, (run, *_), *_ = watch(file)
    assert {*run["agent"]["params"]["params"]} == {"actor", "critic"}
    for name, out_dim, head_std in (("actor", 2, 0.01), ("critic", 1, 1.0)):
        layers = run["agent"]["params"]["params"][name]
        shapes = [layers[layer]["kernel"].shape for layer in LAYERS]
        assert shapes == [(1, 64), (64, 64), (64, out_dim)], "no axis for agents"
        for layer, std in zip(LAYERS, (2**0.5, 2**0.5, head_std), strict=True):
            weight = layers[layer]["kernel"]
            weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
            np.testing.assert_allclose(weight @ weight.T, std**2 * np.eye(len(weight)), atol=1e-5)
            assert np.abs(layers[layer]["bias"]).max() == 0


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(
            ("--no-norm-adv", "--no-clip-vloss", "--no-anneal-lr"), marks=pytest.mark.slow
        ),
    ],
)
def test_team_2_3_5_6_and_core_3_to_12_an_iteration_is_that_of_a_slow_reference(
    file, tmp_path, flags
):
    """Masks, deaths, shaped rewards, advantages, order of rows, losses and Adam's steps."""
    args, states, logs, rollouts = watch(file, *flags)
    params = tensors(states[0]["agent"]["params"])
    adam = torch.optim.Adam(jax.tree.leaves(params), eps=1e-5)
    for before, after, (metrics, *_), (rollout, _, orders) in zip(
        states[:-1], states[1:], logs, rollouts, strict=True
    ):
        its_params = leaves(before["agent"]["params"])
        with torch.no_grad():  # from where the program was, so that rounding does not add up
            for mine, its in zip(jax.tree.leaves(params), its_params, strict=True):
                mine.copy_(torch.tensor(its))
        assert len({tuple(order) for order in [*orders, range(192)]}) == 4, "a new order each epoch"
        expected, did = learn(args, before, adam, params, rollout, orders)
        assert did["ratio"] > 20 and did["norm"] > 2 and (did["value"] > 20) == args.clip_vloss, did
        assert did["dead"] > 60 and did["masked"] > 60, did
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=5e-4, abs=2e-5), name
        its_params = leaves(after["agent"]["params"])
        for got, wanted in zip(its_params, jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(got, wanted.detach().numpy(), atol=1e-5)
    assert expected["charts/learning_rate"] == pytest.approx(0.004 if flags else 0.003)


# JaxMARL's games

GAMES = {
    "MPE_simple_spread_v3": (lambda: jaxmarl.make("MPE_simple_spread_v3"), 26),
    "overcooked-coord_ring": (
        lambda: jaxmarl.make(
            "overcooked",
            layout=jaxmarl.environments.overcooked.overcooked_layouts["coord_ring"],
        ),
        400,
    ),
    "HeuristicEnemySMAX-2s3z": (
        lambda: jaxmarl.make("HeuristicEnemySMAX", scenario=map_name_to_scenario("2s3z")),
        None,
    ),
}


@functools.cache
def play_at_random(file, env_id):
    """A game and its steps, by the file and by JaxMARL's own step, which resets by itself."""
    names, _, env = load(file, "--env-id", env_id)
    start, step, find_actions = names["make_game"](env)
    theirs = GAMES[env_id][0]()
    key, rng, steps = jax.random.PRNGKey(1), np.random.default_rng(1), []
    start, step, find_actions = map(jax.jit, (start, step, find_actions))
    _, state = start(key)
    their_obs, their_state = theirs.reset(key)
    while not steps or not steps[-1]["is_last"]:
        assert len(steps) < 500
        available = np.asarray(find_actions(state))
        choices = [int(rng.choice(np.flatnonzero(mask))) for mask in available]
        key, step_key = jax.random.split(key)
        state, mine = jax.device_get(step(jax.random.split(step_key)[0], state, jnp.int32(choices)))
        moves = dict(zip(theirs.agents, jnp.int32(choices), strict=True))
        their_obs, their_state, rewards, dones, infos = theirs.step(step_key, their_state, moves)
        told = dict(obs=their_obs, rewards=rewards, dones=dones, infos=infos)
        steps.append(mine | {"theirs": jax.device_get(told), "available": available})
    return env, steps, jax.device_get(state)


GAME = pytest.mark.parametrize(
    "env_id",
    ["MPE_simple_spread_v3", *(pytest.param(x, marks=pytest.mark.slow) for x in [*GAMES][1:])],
)


@GAME
def test_team_4_steps_are_those_of_jaxmarl(file, tmp_path, env_id):
    """Observations, except for the last one, which JaxMARL drops, deaths and ends."""
    env, steps, _ = compiled_quickly(lambda: play_at_random(file, env_id))
    for row in steps:
        theirs = row["theirs"]
        wanted = np.stack([theirs["obs"][agent] for agent in env.agents])
        assert np.allclose(row["next_obs"], wanted, atol=1e-5) != row["is_last"]
        assert row["is_last"] == theirs["dones"]["__all__"]
        dead = [theirs["dones"][agent] for agent in env.agents]
        np.testing.assert_array_equal(row["is_dead"], dead)
    limit = GAMES[env_id][1]
    assert limit is None or len(steps) == limit
    assert bool(steps[-1]["terminated"]) == (limit is None), "who loses a battle has terminated it"


@GAME
def test_team_5_rewards_are_those_of_jaxmarl(file, tmp_path, env_id):
    """In MPE each agent has its own, who collides loses 0.5; in the others all get the same."""
    env, steps, _ = compiled_quickly(lambda: play_at_random(file, env_id))
    for row in steps:
        theirs = row["theirs"]["rewards"], row["theirs"]["infos"].get("shaped_reward")
        wanted = [theirs[0][agent] for agent in env.agents]
        np.testing.assert_allclose(row["rewards"], wanted, atol=1e-5)
        shaped = theirs[1] or dict.fromkeys(env.agents, 0.0)
        np.testing.assert_array_equal(row["shaped_rewards"], [shaped[x] for x in env.agents])
        assert ("won" in row) == ("SMAX" in env_id) and not row.get("won")
    rewards = np.stack([row["rewards"] for row in steps])
    differ = np.ptp(rewards, axis=1).max()
    assert differ == pytest.approx(0.5) if env_id.startswith("MPE") else differ < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alive", "won", "truncated"),
    [("both", False, True), ("allies", True, False), ("enemies", False, False)],
)
def test_team_4_a_battle_that_ends_at_the_limit(file, tmp_path, alive, won, truncated):
    """It is truncated, unless one of the armies falls in that very step."""
    names, _, env = load(file, "--env-id", "HeuristicEnemySMAX-2s3z")
    _, env_state = env.reset(jax.random.PRNGKey(1))
    units = env_state.state
    health = np.array(units.unit_health)
    health[5:] *= alive != "allies"
    health[:5] *= alive != "enemies"
    env_state = env_state.replace(state=units.replace(unit_health=health, step=jnp.int32(100)))
    stay = jnp.full(5, 4)
    step = jax.jit(names["make_game"](env)[1])
    answers = compiled_quickly(lambda: step(jax.random.PRNGKey(1), env_state, stay)[1])
    assert answers["is_last"] and answers["terminated"] != truncated
    assert bool(answers["won"]) == won


# known answers

PROBE_FLAGS = "--total-timesteps 10240 --num-envs 8 --num-steps 16 --learning-rate 0.01 --gamma 0.5"
PROBE_FLAGS = (*PROBE_FLAGS.split(), "--ent-coef", 0, "--no-clip-vloss")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        pytest.param("ConstantValue", {0: 1}, marks=pytest.mark.slow),
        pytest.param("Discounting", {0: 0.5, 1: 1}, marks=pytest.mark.slow),
        pytest.param("TruncatedEveryStep", {0: 2}, marks=pytest.mark.slow),
        pytest.param("TwoEnds", {-1: 1, 1: 2}, marks=pytest.mark.slow),
        pytest.param("EachItsOwn", {-1: 1, 1: 3}, marks=pytest.mark.slow),
        pytest.param("Sacrifice", {0.5: 1.5, -1: 1.5, 1: 1, 0: 1}, marks=pytest.mark.slow),
    ],
)
def test_values_of_probes(file, tmp_path, name, values):
    names = train(file, tmp_path, *probe(name), *PROBE_FLAGS)
    params = tensors(jax.tree.map(lambda x: x[0], jax.device_get(names["runs"]["agent"]["params"])))
    learned = value_of(params, np.float32([[obs] for obs in values])).tolist()
    assert learned == pytest.approx(list(values.values()), abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("horizon", "value"), [(10**6, 1), (1280, 0), (0, 0)])
def test_team_6_shaped_rewards_fade_out(file, tmp_path, horizon, value):
    """At first they count, later no more; episodes are logged without them."""
    names = train(file, tmp_path, *probe("Shaped"), *PROBE_FLAGS, "--rew-shaping-horizon", horizon)
    params = jax.tree.map(lambda x: x[0], jax.device_get(names["runs"]["agent"]["params"]))
    learned = value_of(tensors(params), np.zeros((1, 1), np.float32)).item()
    assert learned == pytest.approx(value, abs=0.1)
    logged = scalars(only_run(tmp_path))["charts/episodic_return"]
    assert {total for _, total in logged} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ActionMatters", "ActionAndObsMatter", "Masked"])
def test_actions_of_probes(file, tmp_path, name):
    """Acting through load_policy in a fresh game, as every evaluation does."""
    train(file, tmp_path, *probe(name), *PROBE_FLAGS)
    run, env_id = only_run(tmp_path), probe(name)[1]
    returns = enjoy.evaluate(run, enjoy.load_checkpoint(run), 60, env_id=env_id)["returns"]
    if name == "Masked":  # half of the time there is no choice
        assert set(returns) <= {0, 1} and 0.3 < np.mean(returns) < 0.7
        logged = [value for _, value in scalars(run)["charts/episodic_return"]]
        assert min(logged) >= 0, "never, not even while it learned"
        best = enjoy.evaluate(
            run, enjoy.load_checkpoint(run), 20, env_id=env_id, deterministic=True
        )
        assert set(best["returns"]) <= {0, 1}
    else:
        assert np.mean(returns) > 0.9


SPREAD = "--num-envs 32 --num-steps 26 --total-timesteps 66560 --learning-rate 0.003 --gamma 0.9"
SPREAD = (*SPREAD.split(), "--num-minibatches", 2, "--no-clip-vloss")


def test_learns_to_spread(file, tmp_path):
    """Random play returns -27.7."""
    train(file, tmp_path, *SPREAD)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-300:]) > -22.5


# what is written


def test_no_episode_is_lost(file, tmp_path):
    """All games end together, each at its own step; evaluation plays whole games."""
    flags = (*probe("MarkedLast"), "--num-envs", 5, "--num-steps", 10, "--num-minibatches", 1)
    flags = (*flags, "--update-epochs", 1, "--log-interval", 1)
    train(file, tmp_path, *flags, "--total-timesteps", 100, "--seed", 7)
    run = only_run(tmp_path)
    logged, told = scalars(run), about(run)
    assert told["file"] == file.name and told["packages"]["jaxmarl"]
    ends = [(t - 1) * 5 + game + 1 for t in range(3, 20, 3) for game in range(5)]
    for metric, value in {
        "return": 4.5,
        "return-agent_0": 3,
        "return-agent_1": 6,
        "length": 3,
    }.items():
        assert logged[f"charts/episodic_{metric}"] == [(step, value) for step in ends]
    assert [step for step, _ in logged["losses/value_loss"]] == [50, 100] and logged["charts/SPS"]
    evaluation = enjoy.evaluate(run, enjoy.load_checkpoint(run), 3, env_id=flags[1])
    assert evaluation["returns"] == [3, 3, 3] and evaluation["lengths"] == [3, 3, 3]


@pytest.mark.slow
def test_runs_side_by_side_and_after_an_interruption(file, tmp_path):
    """Each is the run that it would be alone; --resume of one continues all, bit for bit."""
    flags = (*FEW, *probe("RandomEnds"))
    whole, part = halfway(file, tmp_path / "many", *flags, "--seed", 4, "--num-seeds", 2)
    alone, alone_part = halfway(file, tmp_path / "alone", *flags, "--seed", 5)
    first, twin = runs_of(whole)
    mine, its = read_checkpoint(only_run(alone)), read_checkpoint(twin)
    assert same(mine["key"], its["key"])
    assert step_of(only_run(alone)) == step_of(twin) == 8 * 64
    params = leaves(mine["agent"]["params"]), leaves(its["agent"]["params"])
    for got, wanted in zip(*params, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)  # XLA adds up many in another order
    assert not same(read_checkpoint(first)["agent"], its["agent"])
    for metric in ("charts/episodic_return", "charts/episodic_return-agent_1"):
        games = scalars(only_run(alone))[metric]
        calls = [[x for step, x in games if last - 128 < step <= last] for last in LAST_STEPS]
        means = [(last, np.mean(x)) for last, x in zip(LAST_STEPS, calls, strict=True)]
        logged = scalars(twin)[metric]
        assert len(games) > 40 and [step for step, _ in logged] == [*LAST_STEPS]
        for (_, got), (_, wanted) in zip(logged, means, strict=True):
            assert got == pytest.approx(wanted, abs=1e-4)
    for done, cut in ((whole, part), (alone, alone_part)):
        assert {step_of(run) for run in runs_of(cut)} == {4 * 64}
        for a, b in zip(runs_of(done), runs_of(cut), strict=True):
            b.joinpath(next(a.glob("events*")).name).write_bytes(
                next(a.glob("events*")).read_bytes()
            )
        train(file, tmp_path, "--resume", runs_of(cut)[-1])
        for a, b in zip(runs_of(done), runs_of(cut), strict=True):
            assert a.name == b.name and same(read_checkpoint(a), read_checkpoint(b))
            assert without_speed(a) == without_speed(b) and without_speed(b)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--env-id", "overcooked-nowhere"), "cannot train on overcooked-nowhere: choose from"),
        (("--env-id", "MPE_simple_spread_v3-x"), "MPE_simple_spread_v3 has no maps"),
        (("--env-id", "MPE_simple_tag_v3"), "its agents differ in their spaces"),
        (("--env-id", "hanabi"), "cannot train on hanabi: Box observations are needed"),
        (("--env-id", "storm"), "cannot train on storm: Box observations are needed"),
        (("--env-id", "jaxnav"), "cannot train on jaxnav: Discrete actions are needed"),
        (("--env-id", "MPE_simple_spread_v3x"), "is not in registered jaxmarl environments"),
        ((*probe("MarkedLast"), "--capture-video"), "no rgb_array render mode"),
        (("--rew-shaping-horizon", -1), "rew_shaping_horizon must not be negative"),
        (("--num-envs", 3, "--num-steps", 5), "num_minibatches must divide 15"),
    ],
)
def test_what_cannot_work_gets_one_line(file, tmp_path, flags, line):
    assert line in refuse(file, tmp_path, *flags)


# films


@pytest.mark.parametrize(
    "env_id",
    ["MPE_simple_spread_v3", *(pytest.param(x, marks=pytest.mark.slow) for x in [*GAMES][1:])],
)
def test_a_team_is_drawn(file, tmp_path, env_id):
    """Every game that it is made for, with as many colors as it has kinds of things."""
    names, args, _ = load(file, "--env-id", env_id)
    envs = names["make_envs"](args, 1, "rgb_array")
    obs, _ = compiled_quickly(lambda: envs.reset(seed=1))
    assert obs.shape == (envs.num_envs, *envs.single_observation_space.shape)
    frames = [envs.render()[0]]
    for _ in range(4):
        choices = np.where(envs.available, [*range(1, envs.available.shape[1] + 1)], 0).argmax(1)
        compiled_quickly(lambda choices=choices: envs.step(choices))
        frames.append(envs.render()[0])
    for frame in frames:
        assert frame.dtype == np.uint8 and frame.shape[2] == 3 and min(frame.shape[:2]) >= 300
        assert len(np.unique(frame.reshape(-1, 3), axis=0)) >= 3
    assert (frames[0] != frames[-1]).any(), "they move"


@pytest.mark.slow
def test_a_film_of_a_trained_team(file, tmp_path):
    """During training, and by enjoy afterwards."""
    flags = ("--num-envs", 2, "--num-steps", 32, "--total-timesteps", 64, "--capture-video")
    train(file, tmp_path, *flags)
    run = only_run(tmp_path)
    assert [path.name for path in (run / "videos").iterdir()] == ["step-64-episode-0.mp4"]
    evaluation = enjoy.evaluate(run, enjoy.load_checkpoint(run), 2, num_videos=1)
    assert evaluation["lengths"] == [26, 26]
    assert (run / "videos" / evaluation["videos"][0]).stat().st_size > 1000
