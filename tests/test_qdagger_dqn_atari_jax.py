"""cleanrl/qdagger_dqn_atari_jax.py. test_qdagger_N guards details of docs/rl-algorithms/qdagger.md.

What it shares with dqn_atari_jax.py, environments and replay buffer, is the same text and tested
there. Compiling takes long: one run shows most.
"""

import functools
import os
import runpy
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import torch
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from tests.harness import (
    FILES,
    TEACHERS,
    only_run,
    probe,
    read_checkpoint,
    same,
    scalars,
    untrained_teacher,
)
from tests.test_contract import refuse
from tests.test_dqn import Witness, watch
from tests.test_dqn_atari_jax import outputs as nature_cnn
from tests.test_dqn_atari_jax import transitions
from tests.test_dqn_jax import leaves, play, tensors, train, updates_of, without_speed, write
from tests.test_ppo_atari import images_of
from tests.test_qdagger_dqn_atari import (  # noqa: F401  the imported tests run here on this file
    SMALL,
    STUDENT_FLAGS,
    TEACHER_FLAGS,
    test_one_buffer_serves_both_and_its_memory_is_asked_for,
)


def teacher_for(env_id):
    return untrained_teacher("qdagger_dqn_atari_jax", env_id)


def impala_cnn(params, stacks):
    """The student's Q-values by PyTorch, from bytes that are scaled to 0 and 1 [atari 9]."""
    params = params["params"]

    def conv(x, layer):
        kernel = layer["kernel"].permute(3, 2, 0, 1)
        return torch.nn.functional.conv2d(x, kernel, layer["bias"], padding=1)

    x = torch.tensor(np.asarray(stacks)) / 255
    for stage in range(3):
        x = conv(x, params[f"Conv_{stage}"])
        x = torch.nn.functional.max_pool2d(x, 3, stride=2, padding=1)
        for block in (2 * stage, 2 * stage + 1):
            layers = params[f"ResidualBlock_{block}"]
            x = x + conv(conv(x.relu(), layers["Conv_0"]).relu(), layers["Conv_1"])
    hidden, last = params["Dense_0"], params["Dense_1"]
    x = (x.relu().permute(0, 2, 3, 1).flatten(1) @ hidden["kernel"] + hidden["bias"]).relu()
    return x @ last["kernel"] + last["bias"]


def before_updates(monkeypatch, look):
    """Has look(names, agent, b, teacher, distill_coeff) called before each update, with copies."""
    real = jax.jit

    def jit(function, **flags):
        compiled = real(function, **flags)

        def learn(agent, b, *rest):
            copies = {name: x.copy() for name, x in b.items()}
            look(sys._getframe(1).f_globals, jax.tree.map(np.array, agent), copies, *rest)
            return compiled(agent, b, *rest)

        return learn if function.__name__ == "learn" else compiled

    monkeypatch.setattr(jax, "jit", jit)


def reference_loss(params, target_params, teacher, b, coeff):
    """The squared temporal difference and the cross entropy of the policies, row by row."""
    values = impala_cnn(params, b["stacks"][:, :4])
    next_values = impala_cnn(target_params, b["stacks"][:, 1:]).tolist()
    taught = torch.softmax(nature_cnn({"args": None}, teacher, b["stacks"][:, :4]) / 0.5, 1)
    errors, entropies = [], []
    for row, action in enumerate(b["actions"]):
        target = float(b["rewards"][row])
        if not b["terminated"][row]:
            target += 0.9 * max(next_values[row])
        errors.append((values[row, action] - target) ** 2)
        scores = torch.exp(values[row] / 0.5)
        entropies.append(-(taught[row].detach() * torch.log(scores / scores.sum())).sum())
    return sum(errors) / len(errors) + coeff * sum(entropies) / len(entropies)


def test_qdagger_1_to_qdagger_7_every_update_is_by_the_book(file, tmp_path, monkeypatch):
    """First from the teacher's steps alone, then from the student's alone.

    The target network moves with the updates, then with the steps; the schedule of epsilon counts
    both; the coefficient follows from the returns; actions that are not random are the best ones.
    The teacher explored less and less.
    """
    env_id = probe(file, "RandomEnds")
    happened, run = watch(file, monkeypatch), teacher_for(env_id)
    seen, moved, before = [], [], {}

    def look(names, agent, b, teacher, coeff):
        step, is_offline = names["global_step"], len(seen) < 9
        if not seen:
            before["offline"] = len(happened)
        if len(seen) == 9:
            before["online"] = [*happened].index(before["last"]) + 1
        first = before["offline"] - 90 if is_offline else before["online"]
        allowed = [*happened][max(first, 0) : before["offline"] if is_offline else None]
        before["last"] = [*happened][-1] if is_offline else None
        assert all(transition in allowed for transition in transitions(b))
        assert names["buffer"].num_added == (90 if is_offline else step - 9)
        if is_offline:
            assert coeff == 1
        else:
            returns = {name: float(np.mean(x)) for name, x in names["returns"].items()}
            above = (returns["student"] - returns["random"]) / max(
                returns["teacher"] - returns["random"], 1e-8
            )
            assert coeff == pytest.approx(min(1, max(0, 1 - above)), abs=1e-5)
            assert names["epsilon"] == pytest.approx(max(0, 1 - (step - 3) / 60))
            witness = names["envs"]
            while not isinstance(witness, Witness):
                witness = witness.env
            if names["epsilon"] == 0:
                best = impala_cnn(tensors(agent["params"]), witness.obs_before).argmax(1)
                np.testing.assert_array_equal(witness.actions, best)
        target = leaves(agent["target_params"])[0]
        if "target" in before and not np.array_equal(target, before["target"]):
            moved.append(step)
        before["target"] = target

        means = leaves(optax.tree.get(agent["opt_state"], "mu"))
        if "means" in before:
            for got, wanted in zip(means, before.pop("means"), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=2e-6)
        if len(seen) in (1, 7, 12):
            params, target_params = tensors(agent["params"]), tensors(agent["target_params"])
            loss = reference_loss(params, target_params, tensors(teacher), b, float(coeff))
            grads = torch.autograd.grad(loss, jax.tree.leaves(params))
            pairs = zip(means, grads, strict=True)
            before["means"] = [0.9 * mean + 0.1 * grad.numpy() for mean, grad in pairs]
        assert updates_of(agent) == len(seen)
        seen.append(step)

    before_updates(monkeypatch, look)
    flags = (*SMALL, "--offline-steps", 9, "--target-network-frequency", 4)
    flags = (*flags, "--total-timesteps", 90, "--exploration-fraction", 60 / 90, "--end-e", 0)
    names = train(file, tmp_path, "--env-id", env_id, "--teacher", run, *flags)
    monkeypatch.undo()
    epsilons = names["epsilons"]  # of the teacher; there are 90 of its steps
    np.testing.assert_allclose(epsilons.iterable, 1 - np.arange(0, 90, 3) / 90)
    assert epsilons.n == 30, "and these are what it plays with"
    online = [step for step in range(39, 100, 3) if step // 6 > (step - 3) // 6]
    assert seen == [*range(9), *online] and moved[:2] == [4, 8] and len(moved) > 4
    kept = read_checkpoint(only_run(tmp_path))
    assert same(kept["teacher"], read_checkpoint(run)["agent"]["params"])
    logged = scalars(only_run(tmp_path))
    for phase, name in {"teacher": "teacher", "random": "random"}.items():
        ((step, value),) = logged[f"charts/{phase}/avg_episodic_return"]
        assert step == 0 and value == kept["returns"][name]
    assert [step for step, _ in logged["charts/offline/avg_episodic_return"]] == [9]
    last = [value for _, value in logged["charts/episodic_return"]][-10:]
    np.testing.assert_allclose(kept["returns"]["student"], last, rtol=1e-6)


def test_qdagger_3_the_impala_cnn(file, tmp_path):
    names, stacks = runpy.run_path(str(file)), np.random.default_rng(1)
    stacks = stacks.integers(256, size=(3, 4, 84, 84), dtype=np.uint8)
    network = names["QNetwork"](6)
    params = network.init(jax.random.key(1), stacks)
    expected = impala_cnn(tensors(params), stacks).detach()
    np.testing.assert_allclose(network.apply(params, stacks), expected, rtol=0, atol=1e-4)
    layers = params["params"]
    shapes = {name: layers[name]["kernel"].shape for name in layers if "Block" not in name}
    assert shapes["Conv_0"] == (3, 3, 4, 16) and shapes["Conv_2"] == (3, 3, 32, 32)
    assert shapes["Dense_0"] == (11 * 11 * 32, 256) and shapes["Dense_1"] == (256, 6)


def test_qdagger_1_a_teacher_that_does_not_fit_gets_one_line(file, tmp_path):
    """One of the Hub does; reading it never runs code: msgpack holds none."""
    env_id = probe(file, "RandomEnds")
    run = Path(shutil.copytree(teacher_for(env_id), tmp_path / "teacher"))
    checkpoint, content = read_checkpoint(run), (run / "checkpoint.msgpack").read_bytes()
    names = runpy.run_path(str(file))
    args = names["Args"](env_id=env_id, teacher=str(run))
    expected = checkpoint["agent"]["params"]
    flat = flatten_dict(checkpoint, sep="/") | {"global_step": np.int64(1)[None]}
    save_file(flat, run / "model.safetensors")
    (run / "checkpoint.msgpack").unlink()
    assert same(names["read_teacher"](args, expected), expected)
    (run / "model.safetensors").unlink()

    def save(name, layer):
        params = {"params": expected["params"] | {name: layer}}
        write(run, {"agent": {"params": params}})

    bias = expected["params"]["Dense_1"]
    for damage, words in (
        (lambda: save("Dense_1", bias | {"bias": np.float32([0, np.nan])}), "is not finite"),
        (
            lambda: save("Dense_1", bias | {"bias": np.zeros(3, np.float32)}),
            "Q-network of dqn_atari_jax",
        ),
        (lambda: write(run, {"agent": {}}), "Q-network of dqn_atari_jax"),
        (lambda: (run / "checkpoint.msgpack").write_bytes(content[:5000]), "damaged"),
        ((run / "checkpoint.msgpack").unlink, "there is no"),
        ((run / "run.json").unlink, "No such file"),
    ):
        damage()
        message = refuse(file, tmp_path / "work", "--env-id", env_id, "--teacher", run)
        assert message.startswith(f"cannot learn from {tmp_path}") and words in message, message
    other = teacher_for("ALE/Pong-v5")
    message = refuse(file, tmp_path / "work", "--env-id", env_id, "--teacher", other)
    assert "its env_id is ALE/Pong-v5, not ImageProbe" in message


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
    returns = names["evaluate"](None, None, envs, 1.0, args)
    expected = [[r for i, r in played if i == env][:3] for env in range(2)]
    assert returns == expected and {len(games) for games in returns} == {3}


@pytest.mark.parametrize(
    ("student", "expected"), [(-25, 1), (-20, 1), (-10, 0.75), (0, 0.5), (20, 0), (21, 0)]
)
def test_qdagger_7_the_coefficient_fades(file, tmp_path, student, expected):
    distill_coeff = runpy.run_path(str(file))["distill_coeff"]
    returns = {"random": np.float32(-20), "teacher": np.float32(20)}
    returns["student"] = np.float32(student + 2 * np.arange(10) - 9)
    assert distill_coeff(returns) == pytest.approx(expected, abs=1e-6)


def test_qdagger_7_a_teacher_that_is_no_better_than_random_play(file, tmp_path):
    """Gets no weight as soon as its student is."""
    returns = {"random": np.float32(3), "teacher": np.float32(2), "student": np.full(10, 3.5)}
    assert runpy.run_path(str(file))["distill_coeff"](returns) == 0


@functools.cache
def trained_teacher():
    """It takes the better action, on a probe, and was trained by dqn_atari_jax.py."""
    folder = Path(tempfile.mkdtemp(dir=TEACHERS.name))
    teacher = FILES["dqn_atari_jax"]
    train(teacher, folder, "--env-id", probe(teacher, "ActionAndObsMatter"), *TEACHER_FLAGS)
    return only_run(folder)


@pytest.mark.slow
def test_learns_from_its_teacher_before_it_acts(file, tmp_path):
    """It plays as well as its teacher from its first step on."""
    env_id = probe(file, "ActionAndObsMatter")
    names = train(
        file, tmp_path, "--env-id", env_id, "--teacher", trained_teacher(), *STUDENT_FLAGS
    )
    logged = scalars(only_run(tmp_path))
    assert logged["charts/teacher/avg_episodic_return"] == [(0, 1.0)]
    assert logged["charts/offline/avg_episodic_return"] == [(100, 1.0)]
    assert {value for _, value in logged["charts/episodic_return"]} == {1}
    learned = impala_cnn(tensors(names["agent"]["params"]), images_of([-1, 1])).detach()
    np.testing.assert_allclose(learned, [[1, -1], [-1, 1]], atol=0.4)
    assert play(names, only_run(tmp_path)) == [1] * 40


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("step", [2, 5])
def test_an_interrupted_run_is_the_whole_run(file, tmp_path, monkeypatch, kept, step):
    """Bit for bit, from Ctrl+C in the offline phase or at its end; without the teacher's folder."""
    env_id = probe(file, "MarkedLast")
    keep = "--checkpoint-buffer" if kept else "--no-checkpoint-buffer"
    teacher = shutil.copytree(teacher_for(env_id), tmp_path / "teacher")
    flags = ("--env-id", env_id, "--teacher", teacher, *SMALL, "--total-timesteps", 36, keep)
    names = train(file, tmp_path / "whole", *flags)
    assert names["buffer"].num_added == 36
    whole = only_run(tmp_path / "whole")

    def look(names, *rest):
        if names["global_step"] == step - 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        before_updates(patch, look)
        with pytest.raises(SystemExit, match=f"interrupted at step {step}, continue with"):
            train(file, tmp_path / "cut", *flags)
    shutil.rmtree(teacher)
    run = only_run(tmp_path / "cut")
    names = train(file, tmp_path / "cut", "--resume", run)
    assert names["buffer"].num_added == 36
    assert same(read_checkpoint(run), read_checkpoint(whole))
    assert without_speed(run) == without_speed(whole)
