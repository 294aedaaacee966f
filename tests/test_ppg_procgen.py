"""cleanrl/ppg_procgen.py. test_ppg_N guards detail N of docs/rl-algorithms/ppg.md.

tests/mutations shows that each test can fail.
"""

import copy
import runpy
from functools import partial

import pytest
import torch
from tqdm import tqdm

from tests.harness import only_run, probe, read_checkpoint, same, scalars, train
from tests.test_ppo_procgen import JUMPER, agent_by_hand, hidden_by_hand, make_envs, mean_of_last

envpool = pytest.importorskip("envpool")
SMALL = "--num-envs 4 --num-steps 4 --num-minibatches 1 --n-iteration 2 --e-auxiliary 1".split()


def make_agent(file):
    torch.manual_seed(1)
    return runpy.run_path(str(file))["Agent"](make_envs(file, "starpilot"))


def phases(file, folder, *flags, env_id="RandomEnds", policy=None, auxiliary=None):
    """Train, and look at the names at each update; an iteration begins with its policy updates."""
    done = {}

    def look(names):
        done[names["iteration"]] = done.get(names["iteration"], 0) + 1
        of_policy = names["args"].num_minibatches * max(
            names["args"].e_policy, names["args"].v_value
        )
        watch = policy if done[names["iteration"]] <= of_policy else auxiliary
        if watch:
            watch(names)

    return train(file, folder, "--env-id", probe(file, env_id), *SMALL, *flags, on_update=look)


# the networks


def test_ppg_1_the_value_does_not_move_the_shared_network(file, tmp_path):
    agent = make_agent(file)
    obs = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    agent(obs)[1].sum().backward()
    assert {name for name, p in agent.named_parameters() if p.grad is not None} == {
        "critic.weight",
        "critic.bias",
    }
    expected = agent_by_hand(agent, obs)
    torch.testing.assert_close(agent(obs)[0], expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(agent(obs)[1], expected[1], atol=1e-5, rtol=1e-4)


def test_ppg_2_the_auxiliary_value_does(file, tmp_path):
    agent = make_agent(file)
    obs = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    value = agent(obs)[2]
    expected = hidden_by_hand(agent, obs) @ agent.aux_critic.weight[0] + agent.aux_critic.bias
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4)
    value.sum().backward()
    moved = {
        name.split(".")[0]
        for name, p in agent.named_parameters()
        if p.grad is not None and p.grad.abs().max() > 0
    }
    assert moved == {"network", "aux_critic"}


# the policy phase


def test_ppg_3_an_adam_for_each_kind_of_phase(file, tmp_path):
    """With moments of its own, which the other phase does not change, and restored on resume."""
    steps = {"policy": [], "auxiliary": []}

    def count(kind, names):
        state = names["optimizer"].state[names["agent"].actor.bias]
        steps[kind].append(int(state["step"]) if state else 0)

    watch = {kind: partial(count, kind) for kind in steps}
    names = phases(file, tmp_path, "--total-timesteps", 64, "--num-aux-rollouts", 4, **watch)
    assert steps == {"policy": [0, 1, 2, 3], "auxiliary": [0, 1, 2, 3]}
    for optimizer in (names["optimizer"], names["aux_optimizer"]):
        assert optimizer.param_groups[0]["eps"] == 1e-8
    saved = read_checkpoint(only_run(tmp_path))
    assert same(saved["aux_optimizer"], names["aux_optimizer"].state_dict())


def test_both_learning_rates_are_annealed(file, tmp_path):
    used = []
    flags = ("--anneal-lr", "--learning-rate", 0.004, "--total-timesteps", 64)
    phases(
        file,
        tmp_path,
        *flags,
        policy=lambda names: used.append(names["optimizer"].param_groups[0]["lr"]),
        auxiliary=lambda names: used.append(-names["optimizer"].param_groups[0]["lr"]),
    )
    expected = [0.004, 0.003, *[-0.003] * 2, 0.002, 0.001, *[-0.001] * 2]
    assert used == pytest.approx(expected)


def test_only_the_policy_phase_clips_gradients(file, tmp_path):
    norms = {"policy": [], "auxiliary": []}

    def look(kind, names):
        grads = [p.grad.flatten() for p in names["agent"].parameters() if p.grad is not None]
        norms[kind].append(float(torch.cat(grads).norm()))

    watch = {kind: partial(look, kind) for kind in norms}
    phases(file, tmp_path, "--max-grad-norm", 0.01, "--total-timesteps", 32, **watch)
    assert norms["policy"] == pytest.approx([0.01] * 2, rel=1e-3)
    assert min(norms["auxiliary"]) > 0.05


@pytest.mark.parametrize("normalized", [True, False])
def test_ppg_4_advantages_are_normalized_by_rollout(file, tmp_path, normalized):
    """Those of its real rows all at once, though the minibatches are four."""
    seen = []

    def look(names):
        real, raw = (
            ~names["is_last"][:-1].flatten(),
            torch.from_numpy(names["advantages"]).flatten(),
        )
        expected = (
            (raw - raw[real].mean()) / (raw[real].std(correction=0) + 1e-8) if normalized else raw
        )
        torch.testing.assert_close(
            names["b_advantages"][real], expected[real], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(names["adv"], names["b_advantages"][names["mb"]])
        seen.append(real.sum().item())

    flags = ("--num-minibatches", 4, "--total-timesteps", 16) + (
        () if normalized else ("--no-adv-norm-fullbatch",)
    )
    phases(file, tmp_path, *flags, policy=look)
    assert len(seen) == 4 and seen[0] < 16, "a row must be left out"


@pytest.mark.parametrize(("e_policy", "v_value"), [(1, 3), (2, 1)])
def test_ppg_5_policy_and_value_have_their_own_epochs(file, tmp_path, e_policy, v_value):
    moved = []

    def look(names):
        parts = {
            name.split(".")[0]
            for name, p in names["agent"].named_parameters()
            if p.grad is not None
        }
        moved.append((parts >= {"network", "actor"}, "critic" in parts))
        assert "aux_critic" not in parts

    phases(
        file,
        tmp_path,
        "--e-policy",
        e_policy,
        "--v-value",
        v_value,
        "--total-timesteps",
        16,
        policy=look,
    )
    assert moved == [(i < e_policy, i < v_value) for i in range(max(e_policy, v_value))]


def test_gradient_of_the_policy_phase(file, tmp_path):
    """That of the textbook loss over the rows of real steps, by autograd.

    The gradient of the value loss ends at its head.
    """
    compared = []

    def look(names):
        agent, real = (
            copy.deepcopy(names["agent"]),
            names["mb"][names["b_is_real"][names["mb"]] > 0],
        )
        log_probs, value = agent_by_hand(agent, names["b_obs"][real])
        policy = torch.distributions.Categorical(logits=log_probs)
        ratio = torch.exp(policy.log_prob(names["b_actions"][real]) - names["b_log_probs"][real])
        advantages = names["b_advantages"][real]
        gain = torch.minimum(ratio * advantages, torch.clip(ratio, 0.8, 1.2) * advantages)
        policy_loss = -gain.mean() - 0.3 * policy.entropy().mean()
        near = names["b_values"][real] + torch.clip(value - names["b_values"][real], -0.2, 0.2)
        error = torch.maximum(
            (value - names["b_returns"][real]) ** 2, (near - names["b_returns"][real]) ** 2
        )
        for name, loss in (
            ("actor", policy_loss),
            ("network", policy_loss),
            ("critic", 0.7 * error.mean()),
        ):
            expected = torch.autograd.grad(
                loss, list(getattr(agent, name).parameters()), retain_graph=True
            )
            for p, grad in zip(getattr(names["agent"], name).parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, grad, atol=1e-4, rtol=1e-3)
        compared.append(len(real))

    flags = "--vf-coef 0.7 --ent-coef 0.3 --max-grad-norm 1e9 --e-policy 2 --v-value 2".split()
    phases(file, tmp_path, *flags, "--learning-rate", 0.002, "--total-timesteps", 16, policy=look)
    assert len(compared) == 2 and compared[0] < 16


# the auxiliary phase


def test_ppg_6_all_rollouts_of_a_phase_and_their_targets_are_distilled(file, tmp_path):
    """Each epoch sees each rollout of both iterations once, with the returns computed then."""
    rollouts, seen, when = [], [], []

    def keep(names):
        if names["iteration"] == len(rollouts) // 4:
            for e in range(4):
                kept = (
                    names["obs"][:-1, e],
                    torch.from_numpy(names["returns"][:, e]),
                    ~names["is_last"][:-1, e],
                )
                rollouts.append([torch.as_tensor(x).clone() for x in kept])

    def look(names):
        when.append(names["iteration"])
        first = names["iteration"] // 2 * 8
        assert len(rollouts) == first + 8, "the policy phase is over"
        for place, row in enumerate(names["rows"].tolist()):
            obs, returns, is_real = rollouts[first + row]
            assert torch.equal(names["aux_obs"][row], obs) and torch.equal(
                names["aux_is_real"][row] > 0, is_real
            )
            torch.testing.assert_close(names["targets"].view(-1, 4)[place], returns)
            assert (names["weights"].view(-1, 4)[place] > 0).tolist() == is_real.tolist()
        seen.append(names["rows"].tolist())

    flags = ("--e-auxiliary", 2, "--num-aux-rollouts", 2, "--total-timesteps", 80)
    names = phases(file, tmp_path, *flags, policy=keep, auxiliary=look)
    assert when == [1] * 8 + [3] * 8, "after every second of five iterations"
    for i in range(0, 16, 4):
        assert sorted(row for rows in seen[i : i + 4] for row in rows) == list(range(8))
    assert seen[:4] != seen[4:8] and len({tuple(rows) for rows in seen}) > 8, (
        "in another order each time"
    )
    assert (~torch.stack([is_real for _, _, is_real in rollouts])).any() and names[
        "global_step"
    ] == 80
    logged = scalars(only_run(tmp_path))
    for name in ("aux_value_loss", "real_value_loss", "kl_loss"):
        assert [step for step, _ in logged[f"losses/aux/{name}"]] == [32, 64]


KL_BOUND = 0.005  # mean divergence of the policies before and after an auxiliary phase


def test_ppg_7_the_auxiliary_phase_improves_the_values_and_keeps_the_policy(file, tmp_path):
    """From a policy that is sure of what it does, which is easily disturbed."""
    before = {}

    def sharpen(names):
        if names["iteration"] == 0:
            names["agent"].actor.weight.data *= 100

    def look(names):
        before.setdefault("agent", copy.deepcopy(names["agent"]))

    flags = (
        "--num-steps 8 --e-auxiliary 8 --num-aux-rollouts 2 --learning-rate 0.002 --gamma 0.5"
    ).split()
    names = phases(
        file,
        tmp_path,
        *flags,
        "--total-timesteps",
        64,
        env_id="ValueFromObs",
        policy=sharpen,
        auxiliary=look,
    )
    with torch.no_grad():
        old, new = (
            before["agent"](names["aux_obs"].flatten(0, 1)),
            names["agent"](names["aux_obs"].flatten(0, 1)),
        )
    real = names["aux_is_real"].flatten() > 0
    divergence = (
        torch.nn.functional.kl_div(new[0], old[0], log_target=True, reduction="none")
        .sum(1)[real]
        .mean()
        .item()
    )
    errors = [
        [((x - names["aux_returns"].flatten())[real] ** 2).mean().item() for x in values[1:]]
        for values in (old, new)
    ]

    assert old[0][real].exp().max(1).values.mean() > 0.6, "a policy that is sure"
    assert 0 < divergence < KL_BOUND
    assert errors[1][0] < 0.2 * errors[0][0] and errors[1][1] < 0.2 * errors[0][1]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_ppg_8_minibatches_are_whole_rollouts(file, tmp_path, accumulated):
    """The gradient is that of the mean loss of the accumulated minibatches over their real rows."""
    minibatches, compared = [], []

    def look(names):
        minibatches.append(names["rows"])
        agent, loss, order = copy.deepcopy(names["agent"]), 0, []
        if (
            accumulated == 2
        ):  # the rows of the one before are not in sight: it holds the other rollouts
            other = torch.tensor([row for row in range(8) if row not in names["rows"].tolist()])
            order = [other]
        for rows in [*order, names["rows"]]:
            obs, real = (
                names["aux_obs"][rows].flatten(0, 1),
                names["aux_is_real"][rows].flatten() > 0,
            )
            hidden, old = (
                hidden_by_hand(agent, obs)[real],
                names["aux_log_probs"][rows].flatten(0, 1)[real],
            )
            log_probs, targets = (
                agent.actor(hidden).log_softmax(1),
                names["aux_returns"][rows].flatten()[real],
            )
            errors = [
                (head(x)[:, 0] - targets) ** 2
                for head, x in ((agent.aux_critic, hidden), (agent.critic, hidden.detach()))
            ]
            kl = torch.distributions.kl_divergence(
                *(torch.distributions.Categorical(logits=x) for x in (old, log_probs))
            )
            loss = loss + ((errors[0] + errors[1]).mean() / 2 + 3 * kl.mean()) / accumulated
        loss.backward()
        for (name, p), expected in zip(
            names["agent"].named_parameters(), agent.parameters(), strict=True
        ):
            torch.testing.assert_close(
                p.grad,
                expected.grad,
                atol=1e-4,
                rtol=1e-3,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        compared.append(float(names["kl_loss"].detach()))

    flags = (
        "--beta-clone",
        3,
        "--num-aux-rollouts",
        4,
        "--n-aux-grad-accum",
        accumulated,
        "--max-grad-norm",
        1e9,
    )
    phases(
        file,
        tmp_path,
        *flags,
        "--e-auxiliary",
        2,
        "--total-timesteps",
        32,
        "--learning-rate",
        0.002,
        auxiliary=look,
    )
    assert len(minibatches) == 4 // accumulated and all(len(rows) == 4 for rows in minibatches)
    assert compared[0] == pytest.approx(0, abs=1e-6) and compared[-1] > 1e-7


# what a phase holds in memory, and what of it survives


def test_ppg_9_images_are_kept_as_bytes(file, tmp_path):
    names = phases(file, tmp_path, "--total-timesteps", 16)
    assert names["aux_obs"].nbytes == names["aux_bytes"] == 2 * 4 * 4 * 3 * 64 * 64
    with pytest.raises(SystemExit) as refusal:
        train(file, tmp_path / "refused", "--n-iteration", 100_000)
    assert "20132.9 GB of memory needed" in refusal.value.code
    assert not list((tmp_path / "refused").iterdir())


@pytest.mark.parametrize("stop_at", [3, 4])
def test_a_resumed_run_repeats_the_phase_it_was_in(file, tmp_path, stop_at):
    """Stopped in the second policy phase, or after it and before its auxiliary phase."""
    flags = (
        "--env-id",
        probe(file, "TruncatedEveryStep"),
        *SMALL,
        "--total-timesteps",
        80,
        "--anneal-lr",
    )
    train(file, tmp_path / "whole", *flags)
    update = tqdm.update

    def stop(progress, steps):
        update(progress, steps)
        if progress.n == stop_at * 16:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tqdm, "update", stop)
        train(file, tmp_path / "cut", *flags)
    run = only_run(tmp_path / "cut")
    assert read_checkpoint(run)["global_step"] == 32 and set(read_checkpoint(run)) == {
        *("agent", "return_moments", "optimizer", "aux_optimizer"),
        *("rng", "cuda_rng", "global_step", "args"),
    }
    train(file, tmp_path / "cut", "--resume", run)
    whole, cut = read_checkpoint(only_run(tmp_path / "whole")), read_checkpoint(run)
    assert {name: same(whole[name], cut[name]) for name in whole} == dict.fromkeys(
        whole, True
    ) and cut["global_step"] == 80
    curves = [
        repr({**scalars(run), "charts/SPS": None}) for run in (run, only_run(tmp_path / "whole"))
    ]  # not all numbers
    assert curves[0] == curves[1]


def test_a_longer_run_begins_a_new_phase(file, tmp_path):
    """The last checkpoint of the shorter run does not hold the rollouts of its unfinished phase."""
    train(file, tmp_path, "--env-id", probe(file, "ConstantValue"), *SMALL, "--total-timesteps", 48)
    run = only_run(tmp_path)
    train(file, tmp_path, "--resume", run, "--total-timesteps", 112)
    assert read_checkpoint(run)["global_step"] == 112
    assert [step for step, _ in scalars(run)["losses/aux/kl_loss"]] == [32, 80, 112]


@pytest.mark.parametrize(("stop_at", "saved"), [(1, None), (2, 32), (3, 32)])
def test_an_interrupt_saves_only_between_phases(file, tmp_path, stop_at, saved):
    def look(names):
        if names["iteration"] == stop_at - 1:
            names["interrupted"].set()

    flags = ("--total-timesteps", 64)
    with pytest.raises(SystemExit, match="interrupted"):
        phases(file, tmp_path, *flags, policy=look)
    run = only_run(tmp_path)
    assert (run / "checkpoint.pt").exists() == (saved is not None)
    assert saved is None or read_checkpoint(run)["global_step"] == saved
    train(file, tmp_path, "--resume", run)
    assert read_checkpoint(run)["global_step"] == 64


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num-steps", 1), "num_steps must be at least 2"),
        (("--n-iteration", 0), "n_iteration must be positive"),
        (("--e-policy", 0), "e_policy must be positive"),
        (("--v-value", 0), "v_value must be positive"),
        (("--e-auxiliary", 0), "e_auxiliary must be positive"),
        (("--beta-clone", "nan"), "beta_clone is nan"),
        (("--beta-clone", -1), "beta_clone must not be negative"),
        (
            ("--num-aux-rollouts", 3),
            "num_aux_rollouts * n_aux_grad_accum must divide the 2048 rollouts of a phase",
        ),
        (
            ("--n-aux-grad-accum", 5),
            "num_aux_rollouts * n_aux_grad_accum must divide the 2048 rollouts of a phase",
        ),
    ],
)
def test_bad_commands_get_one_line(file, tmp_path, flags, words):
    with pytest.raises(SystemExit) as refusal:
        train(file, tmp_path, *flags)
    assert (
        words in refusal.value.code
        and "\n" not in refusal.value.code
        and not list(tmp_path.iterdir())
    )


# learning


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_learns_a_level_of_jumper(file, tmp_path):
    """The first level, where the carrot lies a step to the left.

    Random play has a mean of 6.75 (3260 episodes); with seed 1, all of the last hundred episodes
    had 10.
    """
    flags = "--num-envs 16 --num-steps 16 --num-minibatches 2 --e-policy 2 --v-value 2".split()
    train(
        file,
        tmp_path,
        *JUMPER,
        *flags,
        "--n-iteration",
        4,
        "--e-auxiliary",
        2,
        "--total-timesteps",
        2048,
    )
    assert mean_of_last(tmp_path, 100) > 9.5
