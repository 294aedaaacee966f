"""cleanrl/qdagger_dqn_atari.py. test_qdagger_N guards detail N of docs/rl-algorithms/qdagger.md.

What it shares with dqn_atari.py, environments and replay buffer, is the same text and tested there.
"""

import copy
import functools
import json
import os
import pickle
import runpy
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.harness import (
    FILES,
    TEACHERS,
    flat_grad,
    only_run,
    probe,
    read_checkpoint,
    same,
    scalars,
    train,
    untrained_teacher,
)
from tests.test_contract import Bomb, refuse
from tests.test_dqn import (
    Witness,
    batch,
    play,
    transitions,
    watch,
)
from tests.test_ppo_atari import images_of

SMALL = (
    "--num-envs 3 --learning-starts 30 --train-frequency 6 --batch-size 4 --buffer-size 150 "
    "--target-network-frequency 12 --total-timesteps 60 --gamma 0.9 --learning-rate 0.001 "
    "--teacher-eval-episodes 6 --teacher-steps 90 --offline-steps 5 --temperature 0.5"
).split()
TEACHER_FLAGS = (
    "--num-envs 4 --learning-starts 32 --train-frequency 4 --learning-rate 0.001 --gamma 0.5 "
    "--batch-size 16 --target-network-frequency 16 --total-timesteps 256 --end-e 1"
).split()
STUDENT_FLAGS = (
    "--num-envs 1 --learning-starts 95 --train-frequency 1 --learning-rate 0.001 --gamma 0.5 "
    "--batch-size 2 --target-network-frequency 16 --teacher-steps 160 --offline-steps 100 "
    "--total-timesteps 100 --start-e 0 --end-e 0"
).split()


@functools.cache
def trained_teacher():
    """It takes the better action, on a probe, and was trained by dqn_atari.py."""
    folder = Path(tempfile.mkdtemp(dir=TEACHERS.name))
    teacher = FILES["dqn_atari"]
    train(teacher, folder, "--env-id", probe(teacher, "ActionAndObsMatter"), *TEACHER_FLAGS)
    return only_run(folder)


def teacher_for(env_id):
    return untrained_teacher("qdagger_dqn_atari", env_id)


def nature_cnn(run, num_actions=2):
    """The network of dqn_atari.py, with the weights of a run."""
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    envs = SimpleNamespace(
        single_observation_space=space, single_action_space=gym.spaces.Discrete(num_actions)
    )
    network = runpy.run_path(str(FILES["dqn_atari"]))["QNetwork"](envs)
    network.load_state_dict(read_checkpoint(run)["q_network"])
    return network


# the teacher


def test_qdagger_1_the_teacher_is_measured_first(file, tmp_path):
    """Before anything is learned; beside it random play, which scores 0 here and not 1."""
    env_id = probe(file, "ActionAndObsMatter")
    flags = (*STUDENT_FLAGS, "--teacher-eval-episodes", 40, "--total-timesteps", 4)
    flags = (*flags, "--offline-steps", 0, "--teacher", trained_teacher())
    train(file, tmp_path, "--env-id", env_id, *flags)
    logged = scalars(only_run(tmp_path))
    assert logged["charts/teacher/avg_episodic_return"] == [(0, 1.0)]
    ((step, random),) = logged["charts/random/avg_episodic_return"]
    assert step == 0 and abs(random) < 0.6


def test_qdagger_1_each_environment_plays_equally_many(file, tmp_path, monkeypatch):
    """Or long games would count less."""
    names = runpy.run_path(str(file))
    args = names["Args"](env_id=probe(file, "RandomEnds"), teacher_eval_episodes=5)
    envs = names["make_envs"](args, 2)
    played, step = [], envs.step

    def note(actions):
        *rest, infos = step(actions)
        for i in np.flatnonzero(infos.get("_episode", ())):
            played.append((i, infos["episode"]["r"][i]))
        return *rest, infos

    monkeypatch.setattr(envs, "step", note)
    returns = names["evaluate"](None, envs, 1.0, args, torch.device("cpu"))
    expected = [[r for i, r in played if i == env][:3] for env in range(2)]
    assert returns == expected and {len(games) for games in returns} == {3}


def test_qdagger_1_a_teacher_from_the_hub(file, tmp_path):
    """As hub pull leaves it: flat names, no checkpoint.pt, and the file as text."""
    env_id = probe(file, "RandomEnds")
    run, pulled = teacher_for(env_id), tmp_path / "pulled"
    pulled.mkdir()
    shutil.copy(run / "run.json", pulled)
    weights = read_checkpoint(run)["q_network"]
    flat = {f"q_network/{name}": x for name, x in weights.items()}
    save_file(flat | {"global_step": torch.tensor(1)}, pulled / "model.safetensors")
    names = runpy.run_path(str(file))
    args = names["Args"](env_id=env_id, teacher=str(pulled))
    envs = names["make_envs"](args, 1)
    assert same(dict(names["read_teacher"](args, names["TeacherNetwork"](envs))), dict(weights))


def test_qdagger_1_a_teacher_that_does_not_fit_gets_one_line(file, tmp_path):
    env_id = probe(file, "RandomEnds")
    told, checkpoint = tmp_path / "teacher" / "run.json", tmp_path / "teacher" / "checkpoint.pt"
    shutil.copytree(teacher_for(env_id), tmp_path / "teacher")
    weights = torch.load(checkpoint, weights_only=True)["q_network"]
    whole = {path: path.read_bytes() for path in (told, checkpoint)}

    def describe(**args):
        run = json.loads(whole[told])
        told.write_text(json.dumps(run | {"args": run["args"] | args}))

    def save(changed):
        torch.save({"q_network": weights | changed}, checkpoint)

    nan = torch.full((2,), torch.nan)
    for damage, words in (
        (lambda: describe(env_id="ALE/Pong-v5"), "its env_id is ALE/Pong-v5, not ImageProbe"),
        (lambda: describe(sticky=True), "its sticky is True, not False"),
        (lambda: save({"q_values.bias": nan}), "q_network.q_values.bias is not finite"),
        (lambda: save({"q_values.bias": torch.zeros(3)}), "q_values.bias"),
        (lambda: torch.save({"agent": {}}, checkpoint), "Q-network of dqn_atari.py"),
        (lambda: torch.save({"q_network": {}}, checkpoint), "Q-network of dqn_atari.py"),
        (lambda: checkpoint.write_bytes(whole[checkpoint][:5000]), "damaged"),
        (lambda: torch.save({"q_network": Bomb()}, checkpoint), "damaged, or holds more than"),
        (lambda: checkpoint.write_bytes(pickle.dumps(Bomb())), "damaged, or holds more than"),
        (checkpoint.unlink, "there is no"),
        (told.unlink, "No such file"),
    ):
        damage()
        flags = ("--env-id", env_id, "--teacher", tmp_path / "teacher", *SMALL)
        message = refuse(file, tmp_path / "work", *flags)
        assert message.startswith(f"cannot learn from {tmp_path}") and words in message, message
        assert not (tmp_path / "work" / "owned").exists()
        for path, content in whole.items():
            path.write_bytes(content)
    message = refuse(file, tmp_path / "work", "--env-id", env_id, "--teacher", "")
    assert "needs --teacher" in message


def test_one_buffer_serves_both_and_its_memory_is_asked_for(file, tmp_path):
    flags = ("--buffer-size", 10**12, "--teacher-steps", 10**12)
    assert "GB of memory needed" in refuse(file, tmp_path, *flags, "--total-timesteps", 100)


# the student


def test_qdagger_2_the_chance_of_a_random_action_falls_as_the_teacher_plays(
    file, tmp_path, monkeypatch
):
    """From start_e to end_e over teacher_steps: a teacher that plays well errs half of them."""
    env_id = probe(file, "ActionAndObsMatter")
    names = runpy.run_path(str(file))
    seen, linear = [], np.interp

    def note(x, *rest):
        if np.ndim(x):
            seen.append((np.array(x), linear(x, *rest)))
        return linear(x, *rest)

    monkeypatch.setattr(np, "interp", note)
    flags = ("--num-envs", 2, "--teacher-steps", 40, "--start-e", 0.9, "--end-e", 0.1)
    flags = (
        *STUDENT_FLAGS,
        *flags,
        "--batch-size",
        2,
        "--offline-steps",
        1,
        "--total-timesteps",
        4,
    )
    names = train(file, tmp_path, "--env-id", env_id, "--teacher", trained_teacher(), *flags)
    ((steps, epsilons),) = seen
    np.testing.assert_array_equal(steps, np.arange(0, 40, 2))
    np.testing.assert_allclose(epsilons, 0.9 - 0.8 * steps / 40)
    assert names["epsilons"].n == 20, "and these are what it plays with"


def test_qdagger_3_the_impala_cnn(file, tmp_path):
    """By hand, from bytes that are scaled to 0 and 1 [atari 9]."""
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    envs = SimpleNamespace(
        single_observation_space=space, single_action_space=gym.spaces.Discrete(6)
    )
    network = runpy.run_path(str(file))["QNetwork"](envs)
    layers = iter([layer for layer in network.modules() if hasattr(layer, "weight")])
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)

    def conv(x):
        layer = next(layers)
        assert layer.weight.shape[2:] == (3, 3)
        return torch.nn.functional.conv2d(x, layer.weight, layer.bias, padding=1)

    x = obs.float() / 255
    for width, size in ((16, 42), (32, 21), (32, 11)):
        x = torch.nn.functional.max_pool2d(conv(x), 3, stride=2, padding=1)
        for _ in range(2):
            x = x + conv(torch.relu(conv(torch.relu(x))))
        assert x.shape == (3, width, size, size)
    hidden, head = layers
    x = torch.relu(torch.relu(x).reshape(3, -1) @ hidden.weight.T + hidden.bias)
    assert x.shape == (3, 256)
    torch.testing.assert_close(network(obs), x @ head.weight.T + head.bias)


def test_qdagger_3_the_teacher_is_the_nature_cnn(file, tmp_path):
    run = teacher_for(probe(file, "RandomEnds"))
    names = runpy.run_path(str(file))
    args = names["Args"](env_id=probe(file, "RandomEnds"), teacher=str(run))
    network = names["TeacherNetwork"](names["make_envs"](args, 1))
    network.load_state_dict(names["read_teacher"](args, network))
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    assert torch.equal(network(obs), nature_cnn(run)(obs))


def test_qdagger_4_to_qdagger_6_every_update_is_by_the_book(file, tmp_path, monkeypatch):
    """First from the teacher's steps alone, then from the student's alone.

    The gradient is that of the textbook loss, row by row: the squared temporal difference, and the
    cross entropy of the policies, softmax(Q / temperature), of teacher and student. Actions that
    are not random are the student's best.
    """
    env_id = probe(file, "RandomEnds")
    run, happened = teacher_for(env_id), watch(file, monkeypatch)
    teacher, seen, before = nature_cnn(run), [], {}

    def look(names):
        step, network = names["global_step"], copy.deepcopy(names["q_network"])
        target_network, is_offline = names["target_network"], len(seen) < 5
        if not seen:
            before["offline"] = len(happened)
        if len(seen) == 5:  # the last evaluation is over, too
            before["online"] = [*happened].index(before["last"]) + 1
        first = before["offline"] - 90 if is_offline else before["online"]
        allowed = [*happened][max(first, 0) : before["offline"] if is_offline else None]
        before["last"] = [*happened][-1] if is_offline else None
        coeff = names["b"]["distill_coeff"].item()
        assert all(param.grad is None for param in names["teacher"].parameters())
        assert coeff == 1 if is_offline else 0 <= coeff <= 1
        assert names["buffer"].num_added == (90 if is_offline else step - 5)
        if not is_offline:
            witness = names["envs"]
            while not isinstance(witness, Witness):
                witness = witness.env
            best = network(torch.from_numpy(witness.obs_before)).argmax(1)
            np.testing.assert_array_equal(witness.actions, best)

        obs, actions, rewards, next_obs, _ = batch(names)
        errors, entropies = [], []
        for row, transition in enumerate(transitions(names)):
            assert transition in allowed
            target = float(rewards[row])
            if not transition[-1]:
                target += 0.9 * max(target_network(next_obs[row, None])[0].tolist())
            values = network(obs[row, None])[0]
            errors.append((values[int(actions[row])] - target) ** 2)
            taught = torch.softmax(teacher(obs[row, None])[0] / 0.5, 0).tolist()
            scores = torch.exp(values / 0.5)
            policy = scores / scores.sum()
            entropies.append(-sum(p * torch.log(policy[a]) for a, p in enumerate(taught)))
        loss = sum(errors) / len(errors) + coeff * sum(entropies) / len(entropies)
        expected = torch.autograd.grad(loss, list(network.parameters()))
        expected = torch.cat([g.flatten() for g in expected])
        torch.testing.assert_close(flat_grad(names["q_network"]), expected, atol=1e-5, rtol=1e-3)
        seen.append(step)

    flags = ("--env-id", env_id, "--teacher", run, *SMALL, "--end-e", 0)
    train(file, tmp_path, *flags, on_update=look)
    online = [step for step in range(35, 66) if (step // 6 > (step - 3) // 6) and step % 3 == 2]
    assert seen == [0, 1, 2, 3, 4, *online]
    kept = read_checkpoint(only_run(tmp_path))["teacher"]
    assert same(kept, read_checkpoint(run)["q_network"]), "the teacher stays as it is"


def test_qdagger_5_the_target_network_moves_with_the_updates(file, tmp_path):
    """Every so many of them while there are no steps to count."""
    env_id, moved, before = probe(file, "RandomEnds"), [], {}

    def look(names):
        target = names["target_network"].q_values.bias.clone()
        if before and not torch.equal(target, before["target"]):
            moved.append(names["global_step"])
            assert torch.equal(target, names["q_network"].q_values.bias)
        before["target"] = target

    flags = (*SMALL, "--offline-steps", 8, "--target-network-frequency", 3)
    flags = (*flags, "--total-timesteps", 3, "--teacher", teacher_for(env_id))
    train(file, tmp_path, "--env-id", env_id, *flags, on_update=look)
    assert moved == [3, 6]


def test_qdagger_6_the_schedule_of_exploration_counts_the_updates(file, tmp_path):
    env_id, seen = probe(file, "RandomEnds"), {}

    def look(names):
        if names["global_step"] > 5:
            seen[names["global_step"]] = names["epsilon"]

    flags = (*SMALL, "--total-timesteps", 40, "--exploration-fraction", 1)
    flags = (*flags, "--start-e", 0.9, "--end-e", 0.1, "--teacher", teacher_for(env_id))
    train(file, tmp_path, "--env-id", env_id, *flags, on_update=look)
    assert seen == {step: pytest.approx(max(0.1, 0.9 - 0.8 * (step - 3) / 40)) for step in seen}
    assert min(seen) == 38


@pytest.mark.parametrize(
    ("student", "expected"), [(-20, 1), (-10, 0.75), (0, 0.5), (19, 0.025), (20, 0), (21, 0)]
)
def test_qdagger_7_the_coefficient_fades(file, tmp_path, student, expected):
    """From 1 at random play to 0 at the teacher, also where returns are negative, as in Pong."""
    returns = runpy.run_path(str(file))["Returns"]()
    returns.random.fill_(-20)
    returns.teacher.fill_(20)
    for _ in range(5):
        returns.add(1000.0)  # forgotten after ten more games
    for game in range(10):
        returns.add(student + 2 * game - 9)
    assert returns.distill_coeff() == pytest.approx(expected, abs=1e-6)


def test_qdagger_7_a_teacher_that_is_no_better_than_random_play(file, tmp_path):
    returns = runpy.run_path(str(file))["Returns"]()
    returns.random.fill_(3)
    returns.teacher.fill_(2)
    returns.student.fill_(3.5)
    assert returns.distill_coeff() == 0


def test_learns_from_its_teacher_before_it_acts(file, tmp_path):
    """It plays as well as its teacher from its first step on, and the coefficient is then 0."""
    seen, env_id = {}, probe(file, "ActionAndObsMatter")

    def look(names):
        losses = [names[name].item() for name in ("loss", "td_loss", "distill_loss")]
        seen[names["global_step"]] = losses, names["b"]["distill_coeff"].item()

    flags = ("--env-id", env_id, "--teacher", trained_teacher(), *STUDENT_FLAGS)
    names = train(file, tmp_path, *flags, on_update=look)
    logged = scalars(only_run(tmp_path))
    assert logged["charts/offline/avg_episodic_return"] == [(100, 1.0)]
    assert {value for _, value in logged["charts/episodic_return"]} == {1}
    with torch.no_grad():
        learned = names["q_network"](images_of([-1, 1]))
    torch.testing.assert_close(learned, torch.tensor([[1.0, -1], [-1, 1]]), atol=0.4, rtol=0)
    assert play(names, only_run(tmp_path), games=40) == [1] * 40

    charts = {"episodic_return", "episodic_length", "SPS", "epsilon", "distill_coeff"}
    charts |= {f"{phase}/avg_episodic_return" for phase in ("teacher", "random", "offline")}
    charts |= {f"offline/{name}" for name in ("loss", "q_loss", "distill_loss")}
    losses = {f"losses/{name}" for name in ("loss", "td_loss", "distill_loss", "q_values")}
    assert logged.keys() == {f"charts/{name}" for name in charts} | losses
    for step, folder, td_loss in ((100, "charts/offline", "q_loss"), (200, "losses", "td_loss")):
        told = [logged[f"{folder}/{name}"] for name in ("loss", td_loss, "distill_loss")]
        losses, coeff = seen[step - (step == 100)]
        assert told == [[(step, pytest.approx(loss))] for loss in losses]
        assert losses[0] == pytest.approx(losses[1] + coeff * losses[2])
        assert losses[2] >= 0, "a divergence, not a cross entropy"
        assert coeff == (step == 100)
    assert logged["charts/distill_coeff"] == [(200, 0)]


CORRIDOR = (
    "--env-id ImageProbe/ShortCorridor-v0 --num-envs 4 --learning-starts 200 --train-frequency 4 "
    "--learning-rate 0.0005 --gamma 0.95 --batch-size 16 --target-network-frequency 100 "
    "--buffer-size 4000 --end-e 0.05"
).split()
ALONE = "--total-timesteps 6000 --exploration-fraction 0.5".split()
TAUGHT = "--teacher-steps 1000 --offline-steps 300 --total-timesteps 400 --start-e 0.05".split()


def steps_to_the_end_of_the_corridor(run, offline_steps):
    """Of the environments, until 18 of the last 20 episodes come to its end."""
    episodes = sorted(scalars(run)["charts/episodic_return"])
    for last in range(20, len(episodes) + 1):
        if np.mean([paid for _, paid in episodes[last - 20 : last]]) >= 0.9:
            return episodes[last - 1][0] - offline_steps
    pytest.fail("it does not learn")


@pytest.mark.slow
def test_a_student_needs_fewer_steps_than_dqn(file, tmp_path):
    """Which learns nothing before it finds the end of a corridor at random."""
    train(FILES["dqn_atari"], tmp_path / "alone", *CORRIDOR, *ALONE)
    teacher = only_run(tmp_path / "alone")
    train(file, tmp_path / "taught", *CORRIDOR, *TAUGHT, "--teacher", teacher)
    alone = steps_to_the_end_of_the_corridor(teacher, 0)
    taught = steps_to_the_end_of_the_corridor(only_run(tmp_path / "taught"), 300)
    assert taught < 400 and alone > 1000


# interruptions: Ctrl+C in each phase


class Interrupter(gym.vector.VectorWrapper):
    """Sends Ctrl+C at one of the steps."""

    steps = 0

    def step(self, actions):
        Interrupter.steps += 1
        if Interrupter.steps == Interrupter.at:
            os.kill(os.getpid(), signal.SIGINT)
        return self.env.step(actions)


def interrupted_at_step(file, folder, monkeypatch, step, *flags):
    """The run, and what it said, that got Ctrl+C at this step of the environments."""
    make_vec = gym.make_vec
    monkeypatch.setattr(Interrupter, "steps", 0)
    monkeypatch.setattr(Interrupter, "at", step, raising=False)
    monkeypatch.setattr(gym, "make_vec", lambda *args, **more: Interrupter(make_vec(*args, **more)))
    with pytest.raises(SystemExit) as end:
        train(file, folder, *flags)
    monkeypatch.setattr(gym, "make_vec", make_vec)
    return only_run(folder), end.value.code


def everything(run):
    """What a run leaves, without its speed."""
    logged = scalars(run)
    logged.pop("charts/SPS", None)
    return read_checkpoint(run), logged


@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_interrupted_run_is_the_whole_run(file, tmp_path, monkeypatch, kept):
    """Bit for bit, from Ctrl+C in the evaluation, the collection or the offline phase.

    Where the buffer is kept, collection goes on from where it was, in new episodes. The teacher's
    folder is not needed any more once there is a checkpoint.
    """
    env_id = probe(file, "MarkedLast")
    keep = "--checkpoint-buffer" if kept else "--no-checkpoint-buffer"
    teacher = shutil.copytree(teacher_for(env_id), tmp_path / "teacher")
    flags = ("--env-id", env_id, "--teacher", teacher, *SMALL, "--total-timesteps", 36, keep)
    train(file, tmp_path / "whole", *flags)
    whole = everything(only_run(tmp_path / "whole"))

    run, said = interrupted_at_step(file, tmp_path / "evaluation", monkeypatch, 5, *flags)
    assert said == f"interrupted at step 0, continue with --resume {Path('runs', run.name)}"
    assert not (run / "checkpoint.pt").exists()
    time.sleep(1.1)  # TensorBoard reads the files of one second in any order
    train(file, tmp_path / "evaluation", "--resume", run)
    assert same(everything(run)[0], whole[0]) and everything(run)[1] == whole[1]

    shutil.move(teacher, tmp_path / "moved")

    def stop(names):
        if names["global_step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    flags = ("--env-id", env_id, "--teacher", tmp_path / "moved", *flags[4:])
    with pytest.raises(SystemExit, match="interrupted at step 3, continue with"):
        train(file, tmp_path / "offline", *flags, on_update=stop)
    run = only_run(tmp_path / "offline")
    assert ("buffer" in read_checkpoint(run)) == kept

    steps = 2 * 7 + 20  # two evaluations of two games with a reset, and 20 of 30 steps
    cut, said = interrupted_at_step(file, tmp_path / "collection", monkeypatch, steps, *flags)
    assert "interrupted at step 0" in said
    if kept:
        assert read_checkpoint(cut)["buffer"]["added"] == 60
    shutil.rmtree(tmp_path / "moved")
    time.sleep(1.1)
    for resumed in (run, cut):
        names = train(file, tmp_path / "resumed", "--resume", resumed)
        assert names["global_step"] == 5 + 36
        if resumed == run or not kept:
            checkpoint, logged = everything(resumed)
            checkpoint["args"] = whole[0]["args"]  # the teacher's folder
            assert same(checkpoint, whole[0]) and logged == whole[1]


def test_at_the_end_of_the_offline_phase_the_buffer_is_emptied(file, tmp_path):
    """Also where a resume brings it back: the checkpoint there has the teacher's steps."""
    env_id = probe(file, "MarkedLast")
    flags = ("--env-id", env_id, *SMALL, "--teacher", teacher_for(env_id), "--checkpoint-buffer")

    def stop(names):
        if names["global_step"] == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit, match="interrupted at step 5, continue with"):
        train(file, tmp_path, *flags, "--total-timesteps", 36, on_update=stop)
    run = only_run(tmp_path)
    assert read_checkpoint(run)["buffer"]["added"] == 90
    names = train(file, tmp_path, "--resume", run)
    assert names["buffer"].num_added == 36
    assert scalars(run)["charts/offline/avg_episodic_return"] == [(5, 3)], "it was not lost"
