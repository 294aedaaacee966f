"""cleanrl/ppo_atari_multigpu.py.

test_multigpu_N guards detail N of docs/rl-algorithms/ppo-multigpu.md.
"""

import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from itertools import count
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch._dynamo  # what an optimizer imports at its first step: here, not in each process
import torch.distributed as dist

from tests import harness
from tests.harness import (
    FILES,
    about,
    flat_grad,
    only_run,
    probe,
    read_checkpoint,
    same,
    scalars,
    train,
)
from tests.probes import ImageProbes, RandomEnds
from tests.test_contract import edit, refuse
from tests.test_ppo_atari import PROBE_FLAGS, agent_by_hand, images_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
SMALL = (
    "--local-num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 32"
).split()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Numbered(RandomEnds):
    """RandomEnds whose seed is its number among all environments, whichever process has it.

    The first two have no negative rewards, so that advantages differ between processes.
    """

    def __init__(self, number):
        super().__init__()
        self.number, self.is_new = number, True

    def reset(self, *, seed=None, options=None):
        seed, self.is_new = self.number if self.is_new else None, False
        return super().reset(seed=seed)

    def step(self, action):
        obs, reward, *ends = super().step(action)
        return obs, abs(reward) if self.number < 2 else reward, *ends


def make_numbered(num_envs, **protocol):
    numbers = count(int(os.environ.get("RANK", 0)) * num_envs)
    return ImageProbes(lambda: Numbered(next(numbers)), num_envs, **protocol)


gym.register("NumberedProbe/Numbered-v0", vector_entry_point=make_numbered)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_all(
    file,
    folder,
    *flags,
    world_size=2,
    look=None,
    tell=None,
    prepare=None,
    own_flags=lambda rank: (),
):
    """Run the file in processes as torchrun would start them, but with the imports done already.

    Each has a folder of its own, as on a machine of its own. Returns for each process what `look`
    said of the names before each update, and `tell` of those at the end; or its last message.
    """
    port = free_port()

    def run(rank):
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
        )
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        seen, end = [], None
        try:
            if prepare:
                prepare(rank)
            hook = (lambda names: seen.append(look(names))) if look else None
            names = train(file, folder / str(rank), *flags, *own_flags(rank), on_update=hook)
            end = tell(names) if tell else None
        except SystemExit as refusal:
            end = refusal.code
        except BaseException:
            end = AssertionError(traceback.format_exc())
        torch.save((seen, end), folder / f"{rank}.result")

    folder.mkdir(parents=True, exist_ok=True)
    processes = [harness.start(run, rank) for rank in range(world_size)]
    for process in processes:
        process.join(120)
        process.kill()
    files = [folder / f"{rank}.result" for rank in range(world_size)]
    results = [
        torch.load(path, weights_only=False) if path.exists() else ([], "killed") for path in files
    ]
    for _, end in results:
        if isinstance(end, AssertionError):
            raise end
    return results


def batch(names):
    """The rows of a minibatch by their names, the gradient, the weights, and the losses."""
    rows = {
        name: names[f"b_{name}"][names["mb"]]
        for name in ("obs", "actions", "log_probs", "values", "advantages", "returns")
    }
    rows |= {"ratio": names["ratio"].detach(), "adv": names["adv"]}
    told = {
        name: names[name].item()
        for name in ("approx_kl", "old_approx_kl", "clipfrac", "entropy", "policy_loss")
    }
    return (
        rows,
        flat_grad(names["agent"]),
        torch.cat([p.detach().flatten() for p in names["agent"].parameters()]),
        told,
    )


def union(*rows):
    return {name: torch.cat([part[name] for part in rows]) for name in rows[0]}


# the details


def test_multigpu_1_environments_and_steps_are_those_of_all(file, tmp_path):
    def tell(names):
        return [names[name] for name in ("num_envs", "total", "num_iterations", "global_step")]

    results = run_all(
        file,
        tmp_path,
        *SMALL,
        "--env-id",
        probe(file, "RandomEnds"),
        "--total-timesteps",
        110,
        tell=tell,
    )
    assert [end for _, end in results] == [[4, 96, 3, 96]] * 2
    run = only_run(tmp_path / "0")
    assert read_checkpoint(run)["global_step"] == 96 and about(run)["world_size"] == 2
    rates = [
        (step, pytest.approx(rate))
        for step, rate in zip((32, 64, 96), 2.5e-4 * np.array([1, 2 / 3, 1 / 3]), strict=True)
    ]
    assert scalars(run)["charts/learning_rate"] == rates


def test_multigpu_2_all_have_the_weights_of_the_first(file, tmp_path):
    """Even if linear algebra rounds differently on another machine; they stay the same bits."""

    def prepare(rank):
        orthogonal = torch.nn.init.orthogonal_
        torch.nn.init.orthogonal_ = lambda weight, gain: orthogonal(
            weight, gain * (1 + rank / 1000)
        )

    flags = (*SMALL, "--total-timesteps", 64)
    (first, _), (second, _) = run_all(
        file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, look=batch, prepare=prepare
    )
    assert len(first) == len(second) == 4
    for (_, _, weights, _), (_, _, others, _) in zip(first, second, strict=True):
        assert torch.equal(weights, others)
    assert not torch.equal(first[0][2], first[-1][2])


def test_multigpu_3_each_has_random_numbers_of_its_own(file, tmp_path):
    look = lambda names: [names[name].copy() for name in ("obs", "actions")]  # noqa: E731
    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL)
    (first, draw), (second, other_draw) = run_all(
        file, tmp_path, *flags, look=look, tell=lambda names: torch.rand(5)
    )
    assert not np.array_equal(first[0][0], second[0][0]), "the environments"
    assert not np.array_equal(first[0][1], second[0][1]), "the actions"
    assert not torch.equal(draw, other_draw)
    again = run_all(file, tmp_path / "again", *flags, tell=lambda names: torch.rand(5))
    assert torch.equal(again[0][1], draw) and torch.equal(again[1][1], other_draw), (
        "the same seed, the same numbers"
    )


def test_multigpu_4_advantages_are_normalized_over_all(file, tmp_path):
    (first, _), (second, _) = run_all(
        file, tmp_path, *SMALL, "--env-id", "NumberedProbe/Numbered-v0", look=batch
    )
    for (rows, *_), (others, *_) in zip(first, second, strict=True):
        everything = union(rows, others)
        advantages = everything["advantages"]
        expected = (advantages - advantages.mean()) / advantages.std(correction=0)
        torch.testing.assert_close(everything["adv"], expected, atol=1e-5, rtol=1e-5)
    assert max(abs(rows["adv"].mean()) for rows, *_ in first) > 0.1, "alone they are not normalized"


def test_multigpu_5_half_the_environments_each_give_the_same_gradients(file, tmp_path):
    """As one process with all of them, to 1e-6, though the two have different numbers of rows."""

    def prepare(rank):  # who acts takes the likeliest action
        torch.Tensor.exponential_ = lambda noise: noise.fill_(1)

    flags = (
        "--env-id NumberedProbe/Numbered-v0 --num-steps 8 --num-minibatches 1 --update-epochs 2"
    ).split()
    flags = (*flags, "--max-grad-norm", 1e9, "--total-timesteps", 64, "--learning-rate", 1e-4)
    ((alone, _),) = run_all(
        file,
        tmp_path / "one",
        *flags,
        "--local-num-envs",
        4,
        world_size=1,
        look=batch,
        prepare=prepare,
    )
    (first, _), (second, _) = run_all(
        file, tmp_path / "two", *flags, "--local-num-envs", 2, look=batch, prepare=prepare
    )
    assert len(alone) == len(first) == len(second) == 4
    for all_rows, mine, others in zip(alone, first, second, strict=True):
        assert len(all_rows[0]["obs"]) == len(mine[0]["obs"]) + len(others[0]["obs"]) < 32
        assert torch.equal(mine[1], others[1]) and mine[1].abs().max() > 0.01
        torch.testing.assert_close(mine[1], all_rows[1], atol=1e-6, rtol=0)
        assert mine[3] == pytest.approx(all_rows[3], abs=1e-6)
    assert any(
        len(mine[0]["obs"]) != len(others[0]["obs"])
        for mine, others in zip(first, second, strict=True)
    )


def test_multigpu_5_a_minibatch_is_one_of_all_rows(file, tmp_path):
    """The gradient is that of the textbook loss over the rows of both, by autograd."""
    flags = ("--vf-coef", 0.7, "--ent-coef", 0.3, "--max-grad-norm", 1e9, "--update-epochs", 2)
    (first, _), (second, _) = run_all(
        file, tmp_path, *SMALL, *flags, "--env-id", "NumberedProbe/Numbered-v0", look=batch
    )
    spaces = {"single_observation_space": gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)}
    agent = runpy.run_path(str(file))["Agent"](
        type("Envs", (), spaces | {"single_action_space": gym.spaces.Discrete(2)})
    )
    assert len(first) == 4
    for (mine, grad, weights, _), (others, *_) in zip(first, second, strict=True):
        rows = union(mine, others)
        torch.nn.utils.vector_to_parameters(weights, agent.parameters())
        log_probs, value, _ = agent_by_hand(agent, rows["obs"])
        policy = torch.distributions.Categorical(logits=log_probs)
        ratio = torch.exp(policy.log_prob(rows["actions"]) - rows["log_probs"])
        advantages = rows["advantages"]
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
        gain = torch.minimum(ratio * advantages, torch.clip(ratio, 0.9, 1.1) * advantages)
        near = rows["values"] + torch.clip(value - rows["values"], -0.1, 0.1)
        error = torch.maximum((value - rows["returns"]) ** 2, (near - rows["returns"]) ** 2)
        loss = -gain.mean() + 0.7 * error.mean() / 2 - 0.3 * policy.entropy().mean()
        expected = torch.autograd.grad(loss, list(agent.parameters()))
        torch.testing.assert_close(
            grad, torch.cat([g.flatten() for g in expected]), atol=1e-4, rtol=1e-3
        )


def test_multigpu_6_one_sum_of_all_gradients_per_step(file, tmp_path):
    """Clipped afterwards, or the sum would be longer than what was asked for."""
    sizes = []

    def prepare(rank):
        all_reduce = dist.all_reduce
        dist.all_reduce = lambda x, **kwargs: sizes.append(x.numel()) or all_reduce(x, **kwargs)

    flags = (
        *SMALL,
        "--env-id",
        "NumberedProbe/Numbered-v0",
        "--max-grad-norm",
        0.01,
        "--update-epochs",
        2,
    )
    results = run_all(file, tmp_path, *flags, look=batch, tell=lambda names: sizes, prepare=prepare)
    for seen, sent in results:
        number = len(seen[0][1])
        assert number > 10**6 and len(seen) == 4, "parameters, updates"
        assert (
            len([size for size in sent if size >= number]) == 4
            and len([size for size in sent if size < number]) == 2
        )
        assert [grad.norm().item() for _, grad, *_ in seen] == pytest.approx([0.01] * 4, rel=1e-3)
    assert torch.equal(results[0][0][-1][1], results[1][0][-1][1])


def test_multigpu_7_all_stop_at_the_same_epoch(file, tmp_path):
    flags = (
        *SMALL,
        "--env-id",
        "NumberedProbe/Numbered-v0",
        "--update-epochs",
        3,
        "--learning-rate",
        0.001,
    )
    (first, _), (second, _) = run_all(file, tmp_path, *flags, look=batch)
    assert len(first) == 6
    for (rows, _, _, told), (others, _, _, others_told) in zip(first, second, strict=True):
        ratio = union(rows, others)["ratio"].double()
        assert told == others_told and told["approx_kl"] == pytest.approx(
            (ratio - 1 - ratio.log()).mean().item(), abs=1e-6
        )
        assert told["old_approx_kl"] == pytest.approx(-ratio.log().mean().item(), abs=1e-6)
        assert told["clipfrac"] == pytest.approx(
            ((ratio - 1).abs() > 0.1).double().mean().item(), abs=1e-6
        )
    own = [
        (ratio - 1 - ratio.log()).mean().item()
        for ratio in (first[1][0]["ratio"], second[1][0]["ratio"])
    ]
    target = sum(own) / 2  # one process alone would stop after the first epoch, the other would not
    assert abs(own[0] - own[1]) > 1e-6
    epochs = next((epoch for epoch in (1, 2) if first[2 * epoch - 1][3]["approx_kl"] > target), 3)
    results = run_all(file, tmp_path / "stopped", *flags, "--target-kl", target, look=batch)
    assert [len(seen) for seen, _ in results] == [2 * epochs] * 2


def test_multigpu_8_the_first_writes_and_no_episode_is_lost(file, tmp_path):
    """All environments of MarkedLast end together, each at a step of its own."""
    look = lambda names: (names["b_returns"].clone(), names["b_values"].clone())  # noqa: E731
    flags = (
        "--local-num-envs 3 --num-steps 10 --num-minibatches 1 --update-epochs 1 "
        "--total-timesteps 120"
    ).split()
    (first, _), (second, _) = run_all(
        file, tmp_path, *flags, "--env-id", probe(file, "MarkedLast"), look=look
    )
    logged, steps = (
        scalars(only_run(tmp_path / "0")),
        [(t - 1) * 6 + env + 1 for t in (3, 7, 11, 15, 19) for env in range(6)],
    )
    assert logged["charts/episodic_return"] == [(step, 3.0) for step in steps]
    assert logged["charts/episodic_length"] == [(step, 3.0) for step in steps]
    for (_, value), mine, others in zip(
        logged["losses/explained_variance"], first, second, strict=True
    ):
        returns, values = map(torch.cat, zip(mine, others, strict=True))
        assert value == pytest.approx(
            (1 - (returns - values).var() / returns.var()).item(), abs=1e-5
        )
    names = {path.name.split(".")[0] for path in only_run(tmp_path / "0").iterdir()}
    assert names == {"checkpoint", "events", "lock", "pid", "ppo_atari_multigpu", "run"}
    assert list((tmp_path / "1").iterdir()) == []


def test_multigpu_9_a_resumed_run_goes_on_in_all_processes(file, tmp_path):
    """Bit for bit, where each episode has one step and checkpoints fall between two of them.

    The other processes need not see the folder.
    """
    flags = (*SMALL, "--env-id", probe(file, "TruncatedEveryStep"), "--no-anneal-lr")
    run_all(file, tmp_path / "whole", *flags, "--total-timesteps", 64)
    run_all(file, tmp_path / "cut", *flags, "--total-timesteps", 32)
    run = only_run(tmp_path / "cut" / "0")
    whole = read_checkpoint(only_run(tmp_path / "whole" / "0"))
    states = read_checkpoint(run)["random_states"]["rng"]
    assert len(states) == 2 and not same(*states)
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    results = run_all(file, tmp_path / "cut", "--resume", run, "--total-timesteps", 64)
    assert [end for _, end in results] == [None, None]
    cut = read_checkpoint(run)
    assert {name: same(whole[name], cut[name]) for name in whole} == dict.fromkeys(whole, True)
    assert cut["global_step"] == 64

    # or with another number of processes, that share the same environments
    def tell(names):
        return names["N"], names["num_envs"], torch.rand(3).tolist()

    flags = ("--resume", copy, "--total-timesteps")
    ((_, alone),) = run_all(file, tmp_path / "one", *flags, 64, tell=tell, world_size=1)
    assert alone[:2] == (4, 4) and read_checkpoint(copy)["global_step"] == 64
    assert len(read_checkpoint(copy)["random_states"]["rng"]) == 1
    (_, first), (_, second) = run_all(file, tmp_path / "two", *flags, 96, tell=tell)
    assert first[:2] == second[:2] == (2, 4) and first[2] != second[2]
    assert read_checkpoint(copy)["global_step"] == 96
    assert len(read_checkpoint(copy)["random_states"]["rng"]) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        message = refuse(file, tmp_path, "--resume", copy)
    assert "3 processes cannot share 4 environments evenly" in message


def test_a_resumed_run_may_use_other_devices(file, tmp_path):
    run_all(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *SMALL, world_size=1)
    resume = ("--resume", only_run(tmp_path / "0"))
    place = ("--device-ids", 0, "--backend", "gloo")
    devices = "cannot run on these devices: device_ids must be below 0, the number of GPUs"
    assert refuse(file, tmp_path, *resume, *place, "--total-timesteps", 64) == devices
    assert "do not pass seed with --resume" in refuse(file, tmp_path, *place, *resume, "--seed", 2)


def test_an_interrupt_of_one_process_stops_all_after_a_checkpoint(file, tmp_path):
    def look(names):
        if names["rank"] == 1 and names["iteration"] == 1:
            names["interrupted"].set()

    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 96)
    (_, message), (_, other) = run_all(file, tmp_path, *flags, look=look)
    assert message.startswith("interrupted at step 64, continue with --resume") and other is None
    run = only_run(tmp_path / "0")
    assert read_checkpoint(run)["global_step"] == 64
    run_all(file, tmp_path / "again", "--resume", run)
    assert read_checkpoint(run)["global_step"] == 96


def test_multigpu_10_a_lost_process_ends_all_with_one_line(file, tmp_path):
    """Within seconds: its closed connection tells the others, not their patience."""

    def die(names):
        if names["rank"] == 1 and names["iteration"] == 2:
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    flags = ("--env-id", probe(file, "RandomEnds"), "--checkpoint-interval", 1)
    flags = (*SMALL, *flags, "--total-timesteps", 160)
    (_, message), (_, other) = run_all(file, tmp_path, *flags, look=die)
    ended, killed = (tmp_path / "0.result").stat(), (tmp_path / "killed").stat()
    assert ended.st_mtime - killed.st_mtime < 20 and other == "killed"
    assert message.startswith("\nprocess 0 has lost another process (")
    assert message.endswith("), continue with --resume")
    run = only_run(tmp_path / "0")
    assert message.count("\n") == 1 and read_checkpoint(run)["global_step"] == 64
    run_all(file, tmp_path / "again", "--resume", run)
    assert read_checkpoint(run)["global_step"] == 160
    assert [step for step, _ in scalars(run)["losses/value_loss"]] == [32, 64, 96, 128, 160]


@pytest.mark.slow
def test_multigpu_10_a_busy_process_is_not_a_lost_one(file, tmp_path):
    """The first one encodes a video for a minute, while the others wait for it."""

    def encode(names):
        if names["rank"] == 0 and names["iteration"] == 1 and not (tmp_path / "video").exists():
            time.sleep(60)
            (tmp_path / "video").touch()

    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL, "--total-timesteps", 96)
    results = run_all(file, tmp_path, *flags, look=encode)
    assert [end for _, end in results] == [None, None]
    assert read_checkpoint(only_run(tmp_path / "0"))["global_step"] == 96


# one process is ppo_atari.py


def test_alone_it_learns_as_ppo_atari_does(file, tmp_path):
    """The same rollout and minibatches, and the same gradients but for rounding."""
    seen = {"ppo_atari": [], "ppo_atari_multigpu": []}
    for stem, flag in (("ppo_atari", "--num-envs"), (file.stem, "--local-num-envs")):
        flags = (flag, 4, *SMALL[2:], "--env-id", probe(file, "RandomEnds"), "--update-epochs", 2)
        look = lambda names: (names["b_obs"][names["mb"]], flat_grad(names["agent"]))  # noqa: E731
        train(
            file if stem == file.stem else FILES[stem],
            tmp_path / stem,
            *flags,
            on_update=lambda names, stem=stem, look=look: seen[stem].append(look(names)),
        )
    assert len(seen["ppo_atari"]) == len(seen["ppo_atari_multigpu"]) == 4
    for (obs, grad), (other_obs, other_grad) in zip(*seen.values(), strict=True):
        assert torch.equal(obs, other_obs)
        torch.testing.assert_close(other_grad, grad, atol=1e-5, rtol=0)
    logged = [scalars(only_run(tmp_path / stem)) for stem in seen]
    for name in ("charts/episodic_return", "charts/episodic_length", "charts/learning_rate"):
        assert logged[0][name] == logged[1][name] and logged[0][name]
    for name in (
        "losses/approx_kl",
        "losses/value_loss",
        "losses/entropy",
        "losses/clipfrac",
        "losses/explained_variance",
    ):
        assert logged[0][name] == [
            (step, pytest.approx(value, abs=1e-4)) for step, value in logged[1][name]
        ]


# known answers, learned together


@pytest.mark.slow
def test_two_processes_learn_the_values_and_actions_of_probes(file, tmp_path):
    """Random play of ActionAndObsMatter makes 0."""
    flags = ("--local-num-envs", 2, *PROBE_FLAGS[2:], "--total-timesteps", 384)
    tell = lambda names: names["agent"](images_of({0: 1}))[1].tolist()  # noqa: E731
    for _, values in run_all(
        file, tmp_path / "values", "--env-id", probe(file, "ConstantValue"), *flags, tell=tell
    ):
        assert values == pytest.approx([1], abs=0.25)
    flags = (*flags, "--learning-rate", 0.0005, "--ent-coef", 0.1)
    run_all(file, tmp_path / "actions", "--env-id", probe(file, "ActionAndObsMatter"), *flags)
    returns = [
        value
        for _, value in scalars(only_run(tmp_path / "actions" / "0"))["charts/episodic_return"]
    ]
    assert np.mean(returns[-60:]) > 0.5


# what is refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--local-num-envs", 0), "local_num_envs must be positive"),
        (("--num-minibatches", 337), "num_minibatches must be at most 336"),
        (("--total-timesteps", 1023), "total_timesteps is less than one rollout"),
        (("--backend", "nccl"), "backend nccl needs a GPU for each process"),
        (("--device-ids", 0), "device_ids must be below 0, the number of GPUs"),
        (("--device-ids", 0, 1), "device_ids must be 1, one for each process"),
        (("--resume", "nowhere", "--device-ids", 0, "--backend", "gloo"), "cannot resume nowhere"),
    ],
)
def test_bad_commands_get_one_line(file, tmp_path, flags, words):
    assert words in refuse(file, tmp_path, *flags)


def test_nccl_takes_a_gpu_for_each_process(file, tmp_path, monkeypatch):
    """Two processes of torchrun that would share the GPU of a machine are refused at once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for flags in (("--device-ids", 0, 0), ()):
        message = refuse(file, tmp_path, "--backend", "nccl", *flags)
        assert "backend nccl needs a GPU for each process" in message
    message = refuse(file, tmp_path, "--device-ids", 0, 1)
    assert "device_ids must be below 1, the number of GPUs" in message


def test_other_flags_on_another_machine_are_refused(file, tmp_path):
    flags = ("--env-id", probe(file, "RandomEnds"), *SMALL)
    (_, first), (_, second) = run_all(
        file, tmp_path, *flags, own_flags=lambda rank: ("--seed", rank)
    )
    assert second == "process 1 was started with different flags than process 0"
    assert first.startswith("\nprocess 0 has lost another process")


# torchrun itself


def kill_all(*processes):
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def start(file, folder, *words, before=(), **variables):
    """torchrun in folder, which is made, with what it writes to stderr in folder/stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "stderr", "w") as stderr:
        return subprocess.Popen(
            [*before, *TORCHRUN, *map(str, words)],
            cwd=folder,
            env=os.environ | variables,
            stderr=stderr,
            stdout=stderr,
        )


def wait_for(condition, process, seconds=120):
    deadline = time.time() + seconds
    while not condition():
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_torchrun_and_kill_9(file, tmp_path):
    """The user sees how to resume, and torchrun's report of which process was killed."""
    flags = (
        "--env-id",
        "ALE/Pong-v5",
        *SMALL,
        "--total-timesteps",
        10**6,
        "--checkpoint-interval",
        1,
    )
    torchrun = start(file, tmp_path, "--standalone", "--nproc-per-node", 2, file, *flags)
    try:
        wait_for(lambda: list(tmp_path.glob("runs/*/checkpoint.pt")), torchrun)
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        second = [
            pid for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
        ]
        killed, _ = time.time(), os.kill(int(second[0]), signal.SIGKILL)
        assert torchrun.wait(60) != 0 and time.time() - killed < 60
    finally:
        kill_all(torchrun)
    told, run = (tmp_path / "stderr").read_text(), only_run(tmp_path)
    assert told.count("continue with --resume") == 1 and "Signal 9 (SIGKILL)" in told, told
    assert told.count("run folder: ") == 1, "one of them tells"
    step = read_checkpoint(run)["global_step"]
    edit(run, total_timesteps=step + 64)
    run_all(file, tmp_path / "again", "--resume", run)
    assert read_checkpoint(run)["global_step"] == step + 64


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: the words that run a command in each."""
    ip, names = shutil.which("ip"), [f"cleanrl-{os.getpid()}-{i}" for i in range(2)]
    if not ip or os.geteuid() != 0:
        pytest.skip("needs root and iproute2 to make network namespaces")
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add eth-a netns {names[0]} type veth peer name eth-b netns {names[1]}"]
    for i, name in enumerate(names):
        commands += [
            f"-n {name} addr add 10.77.0.{i + 1}/24 dev eth-{'ab'[i]}",
            f"-n {name} link set eth-{'ab'[i]} up",
        ]
        commands += [f"-n {name} link set lo up"]
    try:
        for command in commands:
            done = subprocess.run([ip, *command.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(
                    f"cannot make network namespaces here: ip {command}: {done.stderr.strip()}"
                )
        yield [[ip, "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run([ip, "netns", "del", name], capture_output=True)


def start_hosts(file, folder, hosts, *flags):
    words = (
        "--nnodes 2 --nproc-per-node 1 --master-addr 10.77.0.1 --master-port 29500 --node-rank"
    ).split()
    return [
        start(
            file,
            folder / str(i),
            *words,
            i,
            file,
            *flags,
            before=host,
            GLOO_SOCKET_IFNAME=f"eth-{'ab'[i]}",
        )
        for i, host in enumerate(hosts)
    ]


@pytest.mark.slow  # by default, processes start with torchrun's variables, on one machine
def test_two_hosts(file, tmp_path, two_hosts):
    """Each has a network and a folder of its own; gradients go through the cable."""
    flags = ("--env-id", "ALE/Pong-v5", *SMALL, "--total-timesteps", 64, "--checkpoint-interval", 1)
    torchruns = start_hosts(file, tmp_path, two_hosts, *flags)
    try:
        codes = [torchrun.wait(180) for torchrun in torchruns]
    finally:
        kill_all(*torchruns)
    told = [(tmp_path / str(i) / "stderr").read_text() for i in range(2)]
    assert codes == [0, 0], told
    run = only_run(tmp_path / "0")
    assert about(run)["world_size"] == 2 and read_checkpoint(run)["global_step"] == 64
    assert len(read_checkpoint(run)["random_states"]["rng"]) == 2
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["stderr"]
    assert "run folder" not in told[1]
    counters = subprocess.run(
        [*two_hosts[0], "cat", "/sys/class/net/eth-a/statistics/tx_bytes"],
        capture_output=True,
        text=True,
    )
    assert int(counters.stdout) > 4 * 4 * 1_600_000, (
        "each of four steps sends as many bytes as the gradient has"
    )


@pytest.mark.slow
def test_two_hosts_without_a_cable(file, tmp_path, two_hosts):
    """When nothing arrives any more and no connection is closed, both end with a line.

    In a copy of the file whose patience is 30 seconds.
    """
    source = file.read_text()
    assert source.count("timedelta(minutes=30)") == 1
    file = tmp_path / file.name
    file.write_text(source.replace("timedelta(minutes=30)", "timedelta(seconds=30)"))
    flags = ("--env-id", "ALE/Pong-v5", *SMALL, "--checkpoint-interval", 1)
    flags = (*flags, "--total-timesteps", 10**6)
    torchruns = start_hosts(file, tmp_path, two_hosts, *flags)
    try:
        wait_for(lambda: list(tmp_path.glob("0/runs/*/checkpoint.pt")), torchruns[0])
        cut, _ = (
            time.time(),
            subprocess.run([*two_hosts[1], "ip", "link", "set", "eth-b", "down"], check=True),
        )
        for torchrun in torchruns:
            assert torchrun.wait(60) != 0
        assert time.time() - cut < 55
    finally:
        kill_all(*torchruns)
    for i in range(2):
        assert "has lost another process (Timed out" in (tmp_path / str(i) / "stderr").read_text()
