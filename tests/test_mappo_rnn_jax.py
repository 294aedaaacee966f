"""cleanrl/mappo_rnn_jax.py. test_mappo_N guards detail N of docs/rl-algorithms/mappo-rnn-jax.md.

The other numbers are those of ippo-jax.md, ppo.md and ppo-atari-lstm.md; tests/mutations shows that
each test can fail.

Compiling takes longer than everything else here: so tests share a program, which is made once for
each file."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from cleanrl_utils import enjoy
from tests import harness, jaxmarl_probes
from tests.harness import only_run, read_checkpoint, same, scalars
from tests.test_contract import refuse
from tests.test_dqn_jax import compiled_quickly, leaves, tensors, train, without_speed
from tests.test_ippo_jax import begin, load, probe
from tests.test_ppo_jax import FEW, advantages_of, halfway, orders_of, runs_of, step_of

# an iteration once more: one game, step and agent at a time, PyTorch's GRU, autograd and Adam

CELL = torch.nn.GRUCell(128, 128)


def remember(params, inputs, state):
    """What a network remembers after some rows of inputs."""
    encoder, gru = params["params"]["encoder"], params["params"]["gru"]
    features = (inputs @ encoder["kernel"] + encoder["bias"]).relu()
    weights = {"weight_ih": torch.cat([gru[name]["kernel"].T for name in ("ir", "iz", "in")])}
    weights |= {"weight_hh": torch.cat([gru[name]["kernel"].T for name in ("hr", "hz", "hn")])}
    weights |= {"bias_ih": torch.cat([gru[name]["bias"] for name in ("ir", "iz", "in")])}
    weights |= {"bias_hh": torch.cat([torch.zeros(256), gru["hn"]["bias"]])}
    return torch.func.functional_call(CELL, weights, (features, state))


def answer(params, hidden):
    decoder, head = params["params"]["decoder"], params["params"]["head"]
    hidden = (hidden @ decoder["kernel"] + decoder["bias"]).relu()
    return hidden @ head["kernel"] + head["bias"]


def unroll(params, inputs, is_over, state):
    """A network's answers at all steps of some rows, whose states are those before them."""
    answers, state = [], torch.tensor(state)
    for t in range(len(inputs)):
        state = remember(params, torch.tensor(inputs[t]), state)
        answers.append(answer(params, state))
        state = state * ~torch.tensor(is_over[t])[:, None]
    return torch.stack(answers)


def masked(logits, available):
    return logits.masked_fill(~torch.tensor(available), -torch.inf).log_softmax(-1)


def view_of(obs, is_dead):
    """What the critic sees for each agent: all observations, or none, and which agent it is."""
    worlds = np.stack([obs.ravel() * (not dead) for dead in is_dead])
    return np.concatenate([worlds, np.eye(len(obs))], 1).astype(np.float32)


@torch.no_grad()
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
    params, world, rollout = tensors(run["agent"]["params"]), run["world"], []
    for t in range(T):
        row, new = [], []
        for e in range(N):
            state = jax.tree.map(lambda x, e=e: x[e], world["env_state"])
            obs, views, is_alive = world["obs"][e], world["views"][e], ~world["is_dead"][e]
            available = np.stack(list(env.get_avail_actions(state).values())) > 0
            states = (torch.tensor(world[name][e]) for name in ("actor_state", "critic_state"))
            seen = torch.tensor(obs), torch.tensor(views)
            names = ("actor", "critic")
            hidden = [
                remember(params[x], y, z) for x, y, z in zip(names, seen, states, strict=True)
            ]
            log_probs = masked(answer(params["actor"], hidden[0]), available).numpy()
            values = answer(params["critic"], hidden[1])[:, 0].numpy()
            actions = (log_probs + noise[t, e]).argmax(-1)
            moves = dict(zip(env.agents, jnp.asarray(actions), strict=True))
            stepped = jax.device_get(step(step_keys[t * N + e], state, moves))
            _, state, rewards, dones, infos = stepped
            is_over, terminated = bool(dones["__all__"]), bool(state.is_end)
            rewards = np.stack(list(rewards.values()))
            next_obs = np.array(state.obs)[:, None]
            told = np.stack([dones[agent] for agent in env.agents])
            next_views = view_of(next_obs, told & ~(is_over & told.all()))
            last = remember(params["critic"], torch.tensor(next_views), hidden[1])
            total, length = world["episode_return"][e] + rewards, world["episode_length"][e] + 1
            shaping = max(0, 1 - int(run["global_step"]) / args.rew_shaping_horizon)
            shaped = np.stack(list(infos["shaped_reward"].values()))
            row.append(
                dict(
                    obs=obs,
                    views=views,
                    available=available,
                    actions=actions,
                    log_probs=log_probs[[0, 1], actions],
                    values=values,
                    is_alive=is_alive,
                    rewards=rewards + shaping * shaped,
                    terminated=np.full(2, terminated),
                    is_over=np.full(2, is_over),
                    next_values=answer(params["critic"], last)[:, 0].numpy(),
                    total=total,
                    length=length,
                )
            )
            begins, fresh_state = jax.tree.map(lambda x, i=t * N + e: x[i], fresh)
            begins = np.stack(list(begins.values()))
            new.append(
                dict(
                    env_state=fresh_state if is_over else state,
                    obs=begins if is_over else next_obs,
                    views=view_of(begins, [False] * 2) if is_over else next_views,
                    actor_state=hidden[0].numpy() * (not is_over),
                    critic_state=hidden[1].numpy() * (not is_over),
                    is_dead=told & (not is_over),
                    episode_return=total * (not is_over),
                    episode_length=np.float32(length * (not is_over)),
                )
            )
        world = jax.tree.map(lambda *x: np.stack(x), *new)
        rollout.append(jax.tree.map(lambda *x: np.stack(x), *row))
    rollout = jax.tree.map(lambda *x: np.stack(x), *rollout)
    return SimpleNamespace(**rollout), world, orders_of(args, order_key, N * A)


def learn(args, run, adams, params, rollout, orders):
    """The metrics of an iteration in which two Adams change params; what clips and masks did."""
    R, T = 2 * args.num_envs, args.num_steps
    columns = SimpleNamespace(num_envs=R, num_steps=T)
    columns.gamma, columns.gae_lambda = args.gamma, args.gae_lambda
    rows = {name: x.reshape(T, R, *x.shape[3:]) for name, x in vars(rollout).items() if x.ndim > 2}
    names = ("values", "next_values", "rewards", "terminated", "is_over")
    rows["advantages"] = advantages_of(columns, *(rows[name] for name in names))
    rows["returns"] = rows["advantages"] + rows["values"]
    done = int(run["global_step"]) // (T * args.num_envs)
    rate = args.learning_rate * (
        1 - args.anneal_lr * done / (args.total_timesteps // (T * args.num_envs))
    )
    states = [run["world"][name].reshape(R, -1) for name in ("actor_state", "critic_state")]
    clipfracs, did = [], dict(ratio=0, value=0, actor=0, critic=0, dead=0)
    for order in orders:
        for mb in order.reshape(args.num_minibatches, -1):
            b = SimpleNamespace(**{name: x[:, mb] for name, x in rows.items()})
            alive = torch.tensor(b.is_alive)
            logits = unroll(params["actor"], b.obs, b.is_over, states[0][mb])
            value = unroll(params["critic"], b.views, b.is_over, states[1][mb])[..., 0]
            log_probs = masked(logits, b.available)
            ratio = log_probs.gather(2, torch.tensor(b.actions)[..., None])[..., 0]
            ratio = (ratio - torch.tensor(b.log_probs))[alive].exp()
            adv = torch.tensor(b.advantages)[alive]
            adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
            near = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            gain = torch.minimum(ratio * adv, near * adv)
            old, returns = torch.tensor(b.values), torch.tensor(b.returns)
            error = (value - returns) ** 2
            near_value = old + (value - old).clamp(-args.clip_coef, args.clip_coef)
            worse = torch.maximum(error, (near_value - returns) ** 2)
            entropy = torch.distributions.Categorical(probs=log_probs[alive].exp()).entropy()
            policy_loss, value_loss, entropy = -gain.mean(), worse.mean() / 2, entropy.mean()
            for adam in adams.values():
                adam.param_groups[0]["lr"] = rate
                adam.zero_grad()
            (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
            for name, adam in adams.items():
                mine = jax.tree.leaves(params[name])
                norm = torch.nn.utils.clip_grad_norm_(mine, args.max_grad_norm)
                did[name] += int(norm > args.max_grad_norm)
                adam.step()
            clipfracs.append(float(((ratio - 1).abs() > args.clip_coef).float().mean()))
            did["ratio"] += int((gain < ratio * adv).sum())
            did["value"] += int((worse > error).sum())
            did["dead"] += int((~alive).sum())
    advantages, returns = rows["advantages"], rows["returns"]
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


WATCHED = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 3 --total-timesteps 256"
WATCHED += " --learning-rate 0.002 --gamma 0.9 --gae-lambda 0.7 --clip-coef 0.05 --vf-coef 0.7"
WATCHED += " --ent-coef 0.3 --max-grad-norm 0.1 --rew-shaping-horizon 200"
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


def test_mappo_1_to_3_and_lstm_3_games_run_on_across_rollouts(file, tmp_path):
    """The world after an iteration, what the critic sees of it and both memories are those of
    single games, in which the dead are seen as nothing."""
    _, states, logs, rollouts = watch(file)
    for after, (_, is_over, told), (rollout, world, _) in zip(
        states[1:], logs, rollouts, strict=True
    ):
        np.testing.assert_array_equal(is_over, rollout.is_over[..., 0])
        got = told["charts/episodic_return-agent_1"]
        np.testing.assert_allclose(got[is_over], rollout.total[..., 1][is_over], atol=1e-5)
        for got, wanted in zip(leaves(after["world"]), leaves(world), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
        dead = rollout.views[~rollout.is_alive]
        assert len(dead) > 10 and (dead[:, :2] == 0).all() and (dead[:, 2:].sum(1) == 1).all()
        assert (np.abs(rollout.views[rollout.is_alive][:, :2]).sum(1) > 0).mean() > 0.9
    assert after["world"]["episode_length"].max() > 0, "some are under way"


def test_mappo_2_each_agent_has_its_own_value(file, tmp_path):
    """The critic is told whose value is asked for."""
    _, states, _, rollouts = watch(file)
    for rollout, _, _ in rollouts:
        ids = rollout.views[..., 2:]
        np.testing.assert_array_equal(ids, np.broadcast_to(np.eye(2), ids.shape))
    for run in states:
        assert (run["world"]["views"][..., 2:] == np.eye(2)).all()


def test_mappo_3_the_dead_are_seen_as_nothing(file, tmp_path):
    """But for their id, until the next episode begins."""
    _, states, _, _ = watch(file)
    for run in states[1:]:
        views, is_dead = run["world"]["views"], run["world"]["is_dead"]
        assert is_dead.any() and (views[is_dead][:, :2] == 0).all()
        seen = views[~is_dead][:, :2]
        assert np.abs(seen).sum() > 0.1
        wanted = np.repeat(run["world"]["obs"].reshape(-1, 1, 2), 2, 1)[~is_dead]
        np.testing.assert_array_equal(seen, wanted)


def test_mappo_4_and_core_2_policy_and_critic_have_nothing_in_common(file, tmp_path):
    """Weights, memories and optimizers of their own, shared by all agents."""
    _, (run, *_), *_ = watch(file)
    assert {*run["agent"]["params"]} == {*run["agent"]["opt_state"]} == {"actor", "critic"}
    for name, in_dim, out_dim, head_std in (("actor", 1, 2, 0.01), ("critic", 4, 1, 1.0)):
        layers = run["agent"]["params"][name]["params"]
        shapes = [layers[x]["kernel"].shape for x in ("encoder", "decoder", "head")]
        assert shapes == [(in_dim, 128), (128, 128), (128, out_dim)]
        for layer, std in zip(
            ("encoder", "decoder", "head"), (2**0.5, 2**0.5, head_std), strict=True
        ):
            weight = layers[layer]["kernel"]
            weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
            np.testing.assert_allclose(weight @ weight.T, std**2 * np.eye(len(weight)), atol=1e-4)
            assert np.abs(layers[layer]["bias"]).max() == 0


def test_core_3_to_12_and_lstm_4_to_5_an_iteration_is_that_of_a_slow_reference(file, tmp_path):
    """Masks, deaths, advantages, order of rows, losses, each network's gradients and Adam."""
    args, states, logs, rollouts = watch(file)
    params = tensors(states[0]["agent"]["params"])
    adams = {x: torch.optim.Adam(jax.tree.leaves(params[x]), eps=1e-5) for x in params}
    for before, after, (metrics, *_), (rollout, _, orders) in zip(
        states[:-1], states[1:], logs, rollouts, strict=True
    ):
        its_params = leaves(before["agent"]["params"])
        with torch.no_grad():  # from where the program was, so that rounding does not add up
            for mine, its in zip(jax.tree.leaves(params), its_params, strict=True):
                mine.copy_(torch.tensor(its))
        assert len({tuple(order) for order in [*orders, range(8)]}) == 4, "a new order each epoch"
        expected, did = learn(args, before, adams, params, rollout, orders)
        assert min(did["ratio"], did["value"], did["dead"]) > 10, did
        assert did["actor"] > 1 and did["critic"] > 1, did
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=2e-5), name
        its_params = leaves(after["agent"]["params"])
        for got, wanted in zip(its_params, jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(got, wanted.detach().numpy(), atol=2e-5)
    assert expected["charts/learning_rate"] == pytest.approx(0.0015)


@pytest.mark.slow
def test_mappo_1_the_world_is_what_smax_tells_of_it(file, tmp_path):
    names, _, env = load(file)
    start, step, _ = names["make_game"](env)
    key = jax.random.PRNGKey(1)
    (obs, views), state = compiled_quickly(lambda: jax.jit(start)(key))
    theirs, _ = env.reset(key)
    size = len(theirs["world_state"])
    assert views.shape == (5, size + 5) and obs.shape == (5, *env.observation_space("ally_0").shape)
    np.testing.assert_array_equal(views[:, :size], np.tile(theirs["world_state"], (5, 1)))
    np.testing.assert_array_equal(views[:, size:], np.eye(5))
    health = jnp.asarray(state.state.unit_health).at[2].set(0)
    state = state.replace(state=state.state.replace(unit_health=health))
    stepped = compiled_quickly(lambda: jax.jit(step)(key, state, jnp.full(5, 4)))
    views, world = np.asarray(stepped[1]["next_views"]), env.get_world_state(stepped[0])
    alive = np.arange(5) != 2
    np.testing.assert_allclose(views[alive, :size], np.tile(world, (4, 1)), atol=1e-6)
    assert (views[2, :size] == 0).all() and views[2, size + 2] == 1


# known answers

PROBE_FLAGS = "--total-timesteps 10240 --num-envs 8 --num-steps 16 --learning-rate 0.003"
PROBE_FLAGS = (*PROBE_FLAGS.split(), "--gamma", 0.5, "--no-clip-vloss", "--max-grad-norm", 5)


def value_of(names, views, steps=1):
    """The critic's values of a view that is seen again and again."""
    params = jax.tree.map(lambda x: x[0], names["runs"]["agent"]["params"]["critic"])
    views = np.broadcast_to(np.float32(views), (steps, len(views), 4))
    is_last, state = np.zeros(views.shape[:2], bool), np.zeros((views.shape[1], 128))
    return np.asarray(names["Recurrent"](1, 1.0).apply(params, views, is_last, state))[-1, :, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "views", "values"),
    [
        ("ConstantValue", {(0, 0, 1, 0): 1}, [1]),
        ("RandomCuts", {(0, 0, 1, 0): 2, (0, 0, 0, 1): 2}, [2, 2]),
        ("EachItsOwn", {(-1, 1, 1, 0): 1, (-1, 1, 0, 1): 3}, [1, 3]),
        ("Sacrifice", {(0.5, -1, 1, 0): 1.5, (0.5, -1, 0, 1): 1.5}, [1.5, 1.5]),
    ],
)
def test_values_of_probes(file, tmp_path, name, views, values):
    names = train(file, tmp_path, *probe(name), *PROBE_FLAGS)
    assert value_of(names, [*views]) == pytest.approx(values, abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ActionAndObsMatter", "Masked", "RecallTogether"])
def test_actions_of_probes(file, tmp_path, name):
    """Acting through load_policy in a fresh game, with memory, and without the critic."""
    train(file, tmp_path, *probe(name), *PROBE_FLAGS, "--total-timesteps", 40960)
    run, env_id = only_run(tmp_path), probe(name)[1]
    checkpoint = enjoy.load_checkpoint(run)
    checkpoint["agent"]["params"].pop("critic")
    returns = enjoy.evaluate(run, checkpoint, 60, env_id=env_id)["returns"]
    if name == "Masked":  # half of the time there is no choice
        assert set(returns) <= {0, 1} and 0.3 < np.mean(returns) < 0.7
    else:
        assert np.mean(returns) > 0.9


SPREAD = "--env-id MPE_simple_spread_v3 --num-envs 32 --num-steps 26 --total-timesteps 19968"
SPREAD = (*SPREAD.split(), "--gamma", 0.9, "--no-clip-vloss", "--ent-coef", 0.01)


@pytest.mark.slow
def test_learns_to_spread(file, tmp_path):
    """Random play returns -27.7."""
    harness.train(file, tmp_path, *SPREAD)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-100:]) > -24


@pytest.mark.slow
def test_learns_to_win_battles(file, tmp_path):
    """Of two stalkers and three zealots against as many."""
    harness.train(file, tmp_path, "--num-envs", 32, "--total-timesteps", 299_008)
    won = [value for _, value in scalars(only_run(tmp_path))["charts/win_rate"]]
    assert np.mean(won[:1000]) < 0.05 and np.mean(won[-400:]) > 0.75


# what is written


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
        np.testing.assert_allclose(got, wanted, atol=1e-3)  # XLA adds up many in another order
    assert not same(read_checkpoint(first)["agent"], its["agent"])
    for done, cut in ((whole, part), (alone, alone_part)):
        assert {step_of(run) for run in runs_of(cut)} == {4 * 64}
        for a, b in zip(runs_of(done), runs_of(cut), strict=True):
            events = next(a.glob("events*"))
            (b / events.name).write_bytes(events.read_bytes())
        train(file, tmp_path, "--resume", runs_of(cut)[-1])
        for a, b in zip(runs_of(done), runs_of(cut), strict=True):
            assert a.name == b.name and same(read_checkpoint(a), read_checkpoint(b))
            assert without_speed(a) == without_speed(b) and without_speed(b)


def test_what_cannot_work_gets_one_line(file, tmp_path):
    line = refuse(file, tmp_path, "--num-envs", 6)
    assert line.endswith("num_minibatches must divide num_envs")
