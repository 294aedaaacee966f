"""cleanrl_utils.enjoy: the one way in which trained agents are evaluated."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import imageio.v3
import numpy as np
import pygame
import pytest
import torch
from flax.serialization import msgpack_serialize

from cleanrl_utils import enjoy
from cleanrl_utils.hub import flatten, save_weights
from tests.harness import FILES as ALL_FILES
from tests.harness import PPO, ROOT, about, only_run, probe, read_checkpoint, same, scalars
from tests.hub_server import Hub
from tests.test_contract import FILES, Bomb, edit, iteration, small, train
from tests.test_ppo import PROBE_FLAGS


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    train(PPO, folder, "--env-id", "Probe/ActionMatters-v0", *PROBE_FLAGS)
    return only_run(folder)


@pytest.fixture
def run(learned, tmp_path):
    """A run on a probe that was learned: the right action pays 1, the wrong one costs 1."""
    return Path(shutil.copytree(learned, tmp_path / "runs" / learned.name))


@pytest.fixture
def cartpole(tmp_path):
    train(PPO, tmp_path, "--num-envs", 2, "--num-steps", 32, "--total-timesteps", 64)
    return only_run(tmp_path)


def watch(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["enjoy", *map(str, words)])
    enjoy.main()


def test_enjoy_plays_what_was_trained(run, monkeypatch, capsys):
    watch(monkeypatch, run, "--episodes", 50)
    evaluation = json.loads((run / "eval.json").read_text())
    assert (
        len(evaluation["returns"]) == 50
        and evaluation["mean"] > 0.9
        and set(evaluation["lengths"]) == {1}
    )
    assert evaluation["mean"] == pytest.approx(np.mean(evaluation["returns"]))
    assert evaluation["std"] == pytest.approx(np.std(evaluation["returns"], ddof=1))
    assert evaluation["global_step"] == 5120 and evaluation["env_id"] == "Probe/ActionMatters-v0"
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("episode ") for line in printed) == 50
    assert (
        printed[-1]
        == f"mean return over 50 episodes: {evaluation['mean']:.2f} ± {evaluation['std']:.2f}"
    )
    watch(monkeypatch, run, "--episodes", 3)
    evaluation = json.loads((run / "eval.json").read_text())
    returns = scalars(run / "eval")["eval/episodic_return"]
    assert returns == list(enumerate(evaluation["returns"])), "of the last evaluation only"
    logged = scalars(run)
    assert len(logged["losses/value_loss"]) == 40, "the training's curves stay"
    assert not [name for name in logged if name.startswith("eval")]


COMPILED = [
    stem for stem in FILES if "_jax" in stem and stem not in ("ppo_jax", "c51_jax")
]  # they take long


PLAYED = [
    x for x in FILES if x not in ("ppo_jaxtari_jax", "ippo_jax", "mappo_rnn_jax")
]  # whose tests have games and an evaluation of their own


@pytest.mark.parametrize(
    "file",
    [pytest.param(FILES[x], id=x, marks=[pytest.mark.slow] * (x in COMPILED)) for x in PLAYED],
)
def test_enjoy_works_on_every_file(file, tmp_path, monkeypatch):
    """Policies of PPO and of SAC with discrete actions sample from two actions; the others take the
    better one, and the other one when they are swapped."""
    samples = "envs, deterministic=False)" in file.read_text()
    flags = small(
        file, "--total-timesteps", iteration(file), "--env-id", probe(file, "ActionMatters")
    )
    is_control = re.search("_action_jax|simba|fast_", file.stem)
    idle = ("--learning-starts", 1000) if is_control and not samples else ()  # compiles nothing
    train(file, tmp_path, *flags, *idle)
    returns, run = [], only_run(tmp_path)
    for _ in range(1 if samples else 2):
        watch(monkeypatch, run, "--episodes", 20)
        evaluation = json.loads((run / "eval.json").read_text())
        returns.append(set(evaluation["returns"]))
        assert set(evaluation["lengths"]) == {1} and evaluation["global_step"] == iteration(file)
        checkpoint = read_checkpoint(run)
        if len(returns) == 1:  # what the Hub gets plays the same
            save_weights(enjoy.learned(checkpoint), tmp_path / "model.safetensors")
            travelled = enjoy.load_checkpoint(tmp_path / "model.safetensors")
            assert not re.search(
                r"optim|opt_state|target|buffer|rng|(?<!attention\.)key|world",
                " ".join(name for name, _ in flatten(travelled)),
            )
            assert enjoy.evaluate(run, travelled, 20)["returns"] == evaluation["returns"]
        if samples:
            best = enjoy.evaluate(run, checkpoint, 20, deterministic=True)["returns"]
            assert len(set(best)) == 1, "the most likely action, always"
            break
        if is_control:  # an actor that has not learned yet does nothing
            means = {"simba": "Dense_4", "fast": "Dense_3"}
            mean = means.get(file.stem.partition("_")[0], "Dense_2")
            checkpoint["agent"]["actor"]["params"][mean]["bias"] = np.ones(1, np.float32)
            (run / "checkpoint.msgpack").write_bytes(msgpack_serialize(checkpoint))
            continue
        if "_jax" in file.stem:  # the last layer, a half of which is for each action
            layers = checkpoint["agent"]["params"]["params"]
            last = max(name for name in layers if not re.search("Norm|Block", name))
            layers[last] = {
                name: np.roll(x, x.shape[-1] // 2, -1) for name, x in layers[last].items()
            }
            (run / "checkpoint.msgpack").write_bytes(msgpack_serialize(checkpoint))
            continue
        for name in [
            name for name in checkpoint.get("actor", ()) if name.startswith(("actions.", "mean."))
        ]:
            checkpoint["actor"][name] *= -1
        last = (
            -4 if "rainbow" in file.stem else -2
        )  # the last layer, with the strengths of its noise
        for name in list(checkpoint.get("q_network", ()))[last:]:
            checkpoint["q_network"][name] = torch.cat(checkpoint["q_network"][name].chunk(2)[::-1])
        torch.save(checkpoint, run / "checkpoint.pt")
    at_first = 0.0 if "fast_" in file.stem else -1.0  # what its probe pays for an action of 0
    ways = [{at_first}, {1.0}], [{1.0}, {-1.0}]
    assert returns == [{-1.0, 1.0}] if samples else returns in ways


def test_enjoy_deterministic(cartpole, monkeypatch):
    """A policy that has learned nothing yet samples; with the flag, equal starts end equally."""
    lengths = {}
    for flags in ((), ("--deterministic",)):
        played = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            choices = {"deterministic": bool(flags)}
            _, envs, policy = enjoy.make_agent(cartpole, enjoy.load_checkpoint(cartpole), **choices)
            obs, _ = envs.reset(seed=5)
            played.append([int(policy(obs, np.zeros(1, bool))[0]) for _ in range(40)])
        lengths[flags] = played
    assert lengths[()][0] != lengths[()][1] and len(set(lengths[()][0])) == 2
    assert lengths[("--deterministic",)][0] == lengths[("--deterministic",)][1]
    watch(monkeypatch, cartpole, "--episodes", 1, "--deterministic")
    assert json.loads((cartpole / "eval.json").read_text())["deterministic"] is True


def test_enjoy_the_newest_run(cartpole, monkeypatch, capsys):
    older = cartpole.parent / "CartPole-v1__ppo__9__1"
    shutil.copytree(cartpole, older)
    os.utime(older / "run.json", (1, 1))
    monkeypatch.chdir(cartpole.parent.parent)
    watch(monkeypatch, "--episodes", 1)
    assert capsys.readouterr().out.startswith(f"run folder: runs/{cartpole.name}\n")
    assert (cartpole / "eval.json").exists() and not (older / "eval.json").exists()


def test_enjoy_in_a_window(cartpole, monkeypatch):
    """Every frame is on the screen, in real time; closing the window ends the program."""
    shown, write_frame = [], enjoy.Window.write_frame

    def look(window, frame):
        write_frame(window, frame)
        screen = pygame.surfarray.array3d(pygame.display.get_surface())
        assert screen.shape == (1200, 800, 3) and (screen[::2, ::2] == frame.swapaxes(0, 1)).all()
        assert pygame.display.get_caption()[0] == "CartPole-v1"
        shown.append(time.time())

    monkeypatch.setattr(enjoy.Window, "write_frame", look)
    monkeypatch.setattr(enjoy, "WINDOW_HEIGHT", 800)
    watch(monkeypatch, cartpole, "--episodes", 1, "--render", "human")
    (length,) = json.loads((cartpole / "eval.json").read_text())["lengths"]
    assert len(shown) == length + 1 and shown[-1] - shown[0] > 0.9 * length / 50
    assert not pygame.display.get_init()

    (cartpole / "eval.json").unlink()
    pygame.display.init()
    pygame.event.post(pygame.event.Event(pygame.QUIT))
    with pytest.raises(SystemExit, match="the window was closed"):
        watch(monkeypatch, cartpole, "--render", "human")
    assert not (cartpole / "eval.json").exists()


def test_enjoy_without_a_display(cartpole, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "x11")
    monkeypatch.setenv("DISPLAY", ":77")
    pygame.display.quit()
    with pytest.raises(SystemExit, match="cannot open a window: "):
        watch(monkeypatch, cartpole, "--render", "human")


def test_enjoy_without_a_package(cartpole, monkeypatch):
    """The command installs what the algorithm file needs."""
    tell(cartpole, file="ppo_atari_envpool.py")
    monkeypatch.setitem(sys.modules, "envpool", None)
    command = "pip install -r requirements/requirements-envpool.txt"
    with pytest.raises(SystemExit, match=f"envpool is not installed: {command}"):
        watch(monkeypatch, cartpole)


def test_help_of_enjoy(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        watch(monkeypatch, "--help")
    text = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    assert "usage: python -m cleanrl_utils.enjoy [-h]" in text
    assert f"RUN ... {enjoy.RUN_HELP} {enjoy.NEWEST}" in text


def test_enjoy_reads_the_weights(run, monkeypatch):
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    checkpoint["agent"]["actor.4.bias"] = torch.tensor(
        [50.0, -50.0]
    )  # an agent that always takes the wrong action
    torch.save(checkpoint, run / "checkpoint.pt")
    watch(monkeypatch, run, "--episodes", 5)
    assert json.loads((run / "eval.json").read_text())["returns"] == [-1.0] * 5


def test_enjoy_repeats_itself(cartpole, monkeypatch):
    evaluations = []
    for seed in (3, 3, 4):
        watch(monkeypatch, cartpole, "--episodes", 4, "--seed", seed)
        evaluations.append(json.loads((cartpole / "eval.json").read_text())["returns"])
    assert evaluations[0] == evaluations[1] != evaluations[2]


def test_enjoy_as_a_command_with_video(cartpole):
    command = [
        sys.executable,
        "-m",
        "cleanrl_utils.enjoy",
        str(cartpole),
        "--episodes",
        "2",
        "--video",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "mean return over 2 episodes" in done.stdout, done.stderr
    assert f"videos: {cartpole / 'videos'}\n" in done.stdout and "ALSA" not in done.stderr
    videos = sorted((cartpole / "videos").iterdir())
    assert [video.name for video in videos] == [
        "eval-seed-1000-episode-0.mp4",
        "eval-seed-1000-episode-1.mp4",
    ]
    assert all(video.stat().st_size > 1000 for video in videos)


def test_a_video_has_the_whole_game(tmp_path, monkeypatch):
    """Breakout's five lives, each of which ends an episode for the agent."""
    file = FILES["ppo_atari"]
    train(
        file,
        tmp_path,
        *small(file, "--env-id", "BreakoutNoFrameskip-v4", "--total-timesteps", iteration(file)),
    )
    run = only_run(tmp_path)
    watch(monkeypatch, run, "--episodes", 2, "--video")
    lengths = json.loads((run / "eval.json").read_text())["lengths"]
    videos = sorted((run / "videos").glob("*.mp4"))
    assert [video.name for video in videos] == [
        "eval-seed-1000-episode-0.mp4",
        "eval-seed-1000-episode-1.mp4",
    ]
    for video, length in zip(videos, lengths, strict=True):
        assert imageio.v3.imread(video).shape == (length + 1, 336, 336, 3)
    watch(monkeypatch, run, "--episodes", 2)
    assert json.loads((run / "eval.json").read_text())["lengths"] == lengths, (
        "who films changes nothing"
    )


def test_enjoy_where_nothing_can_be_drawn(tmp_path, monkeypatch):
    file = FILES["ppo_continuous_action"]
    train(
        file, tmp_path, *small(file, "--env-id", "Hopper-v4", "--total-timesteps", iteration(file))
    )
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    run = only_run(tmp_path)
    for words in ((run, "--video"), (run, run, "--grid")):
        with pytest.raises(SystemExit, match=r"cannot draw: .*MUJOCO_GL"):
            watch(monkeypatch, *words)


def test_enjoy_takes_a_renamed_experiment(tmp_path, monkeypatch):
    train(
        PPO,
        tmp_path,
        "--num-envs",
        2,
        "--num-steps",
        32,
        "--total-timesteps",
        64,
        "--exp-name",
        "my-idea",
    )
    watch(monkeypatch, only_run(tmp_path), "--episodes", 1)
    assert (only_run(tmp_path) / "eval.json").exists()


def remove(run, name):
    (run / name).unlink()


def tell(run, **entries):
    (run / "run.json").write_text(json.dumps(about(run) | entries))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: remove(run, "run.json"), "/run.json: "),
        (lambda run: (run / "run.json").write_text("[]"), "/run.json: "),
        (lambda run: (run / "run.json").write_text("[" * 100_000), "maximum recursion depth"),
        (lambda run: remove(run, "checkpoint.pt"), "cannot load the checkpoint"),
        (lambda run: (run / "checkpoint.pt").write_bytes(b"no"), "cannot load the checkpoint"),
        (
            lambda run: torch.save({"agent": Bomb()}, run / "checkpoint.pt"),
            "holds more than weights",
        ),
        (lambda run: edit(run, env_id="NoSuchEnv-v0"), "cannot rebuild the agent"),
        (lambda run: edit(run, env_id="Acrobot-v1"), "cannot rebuild the agent"),
        (lambda run: edit(run, env_id="evil:CartPole-v1"), "--env-id evil:CartPole-v1"),
        (lambda run: edit(run, no_such_flag=1), "no_such_flag"),
        (lambda run: tell(run, file="no_such.py"), "--file"),
        (lambda run: tell(run, file=str(run / "evil.py")), "--file"),
        (lambda run: tell(run, file="../evil.py"), "--file"),
    ],
)
def test_enjoy_of_damaged_or_hostile_runs(cartpole, monkeypatch, damage, words):
    for folder in (cartpole, cartpole.parent):
        (folder / "evil.py").write_text("from pathlib import Path\nPath('owned').touch()\n")
    monkeypatch.chdir(cartpole.parent)
    monkeypatch.syspath_prepend(str(cartpole))
    damage(cartpole)
    with pytest.raises(SystemExit) as refusal:
        watch(monkeypatch, cartpole)
    assert words in refusal.value.code and "\n" not in refusal.value.code
    assert not (cartpole.parent / "owned").exists() and not (cartpole / "eval.json").exists()


def test_enjoy_bad_flags(cartpole, monkeypatch):
    for flag, value in (("--episodes", 0), ("--seed", -1), ("--seed", 2**64), ("--epsilon", 2)):
        with pytest.raises(SystemExit, match=f"^{flag} must .*, not {value}"):
            watch(monkeypatch, cartpole, flag, value)


def test_enjoy_without_a_picture(run, monkeypatch):
    with pytest.raises(SystemExit, match="does not render rgb_array"):
        watch(monkeypatch, run, "--video")
    assert not (run / "videos").exists()


def test_enjoy_does_not_write_through_links(cartpole, monkeypatch):
    (cartpole.parent / "precious").write_text("mine")
    for name in ("eval.json", "eval.tmp"):
        (cartpole / name).symlink_to(cartpole.parent / "precious")
    watch(monkeypatch, cartpole, "--episodes", 1)
    assert (cartpole.parent / "precious").read_text() == "mine" and not (
        cartpole / "eval.json"
    ).is_symlink()


def test_enjoy_with_chance(tmp_path, monkeypatch):
    """With epsilon 1, both actions of the probe come up; with 0, only the greedy one."""
    dqn, chances = ALL_FILES["dqn"], {}
    train(
        dqn,
        tmp_path,
        *small(dqn, "--total-timesteps", iteration(dqn), "--env-id", "Probe/ActionMatters-v0"),
    )
    for epsilon in (0, 0.25, 1):
        watch(monkeypatch, only_run(tmp_path), "--episodes", 400, "--epsilon", epsilon)
        evaluation = json.loads((only_run(tmp_path) / "eval.json").read_text())
        assert evaluation["epsilon"] == epsilon
        chances[epsilon] = (
            evaluation["returns"].count(
                -max(evaluation["returns"], key=evaluation["returns"].count)
            )
            / 400
        )
    assert chances[0] == 0 and abs(chances[0.25] - 0.125) < 0.06 and abs(chances[1] - 0.5) < 0.1


def test_enjoy_with_chance_where_it_makes_no_sense(run, monkeypatch):
    with pytest.raises(
        SystemExit,
        match=r"--epsilon is for epsilon-greedy agents, which those of ppo.py are not",
    ):
        watch(monkeypatch, run, "--epsilon", 0.05)
    with pytest.raises(SystemExit, match="--epsilon must lie between 0 and 1"):
        watch(monkeypatch, run, "--epsilon", 2)


def test_enjoy_a_model_of_the_hub(run, tmp_path, monkeypatch, capsys):
    """By its address and by its names, in a new folder of runs/; evaluated like any other run."""
    files = {name: (run / name).read_bytes() for name in ("run.json",)}
    save_weights(enjoy.learned(read_checkpoint(run)), tmp_path / "model.safetensors")
    Hub.repos["me/Probe-ActionMatters-v0-ppo-seed1"] = files | {
        "model.safetensors": (tmp_path / "model.safetensors").read_bytes()
    }
    monkeypatch.chdir(tmp_path)
    names = "--exp-name", "ppo", "--env-id", "Probe/ActionMatters-v0", "--hf-entity", "me"
    means = []
    for words in (["hf://me/Probe-ActionMatters-v0-ppo-seed1"], names, [run]):
        watch(monkeypatch, *words, "--episodes", 20)
        means.append(capsys.readouterr().out.splitlines()[-1])
    assert means[0] == means[1] == means[2] and float(means[0].split()[-3]) > 0.8
    (pulled,) = (tmp_path / "runs").glob("me__*")
    assert len(json.loads((pulled / "eval.json").read_text())["returns"]) == 20


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "cannot find the newest run: there is no folder runs"),
        (["runs/a", "runs/b"], "only --grid and --snapshots accept several"),
        (["--exp-name", "ppo"], "--exp-name needs --env-id"),
        (["runs/a", "--exp-name", "ppo", "--env-id", "CartPole-v1"], "--exp-name needs --env-id"),
        (
            ["--exp-name", "ppo", "--env-id", "NoSuchEnv-v0", "--hf-entity", "me"],
            "cannot find me/NoSuchEnv-v0-ppo-seed1",
        ),
        (["hf://me/no/such"], "it should be entity/repository"),
        (["no-such-folder", "--snapshots"], "there is no folder no-such-folder"),
        (["no-such-folder", "--grid"], "/run.json: "),
    ],
)
def test_enjoy_without_a_run(tmp_path, monkeypatch, words, answer):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=answer) as refusal:
        watch(monkeypatch, *words)
    assert "\n" not in refusal.value.code and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_snapshots_are_what_checkpoints_learned(tmp_path, monkeypatch):
    """Beside a training in a process of its own, from before it starts until it ends."""
    (tmp_path / "runs").mkdir()
    flags = "--num-envs 2 --num-steps 64 --num-minibatches 2 --checkpoint-interval 10"
    flags = f"{flags} --total-timesteps 20000".split()
    training = subprocess.Popen(
        [sys.executable, PPO, *flags],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def until_it_ended(seconds):
        if training.poll() is not None:
            raise KeyboardInterrupt  # as a user ends it
        real_sleep(seconds / 5)

    real_sleep = time.sleep
    monkeypatch.setattr(enjoy.time, "sleep", until_it_ended)
    watch(monkeypatch, tmp_path / "runs", "--snapshots")
    run = only_run(tmp_path)
    kept = sorted(int(path.stem) for path in run.glob("snapshots/*.pt"))
    assert len(kept) >= 3 and kept[-1] == 19968 and all(step % 1280 == 0 for step in kept[:-1])
    assert len(list((run / "snapshots").iterdir())) == len(kept), "nothing half-written"
    last = enjoy.load_checkpoint(run / "snapshots" / "19968.pt")
    assert same(last["agent"], read_checkpoint(run)["agent"]) and last.keys() == {
        "agent",
        "global_step",
    }
    assert not same(
        last["agent"], enjoy.load_checkpoint(run / "snapshots" / f"{kept[0]}.pt")["agent"]
    )


def test_snapshots_of_one_run_end_with_it(cartpole, monkeypatch, capsys):
    watch(monkeypatch, cartpole, "--snapshots")
    assert capsys.readouterr().out == f"kept step 64 of {cartpole}\n"
    assert [path.name for path in (cartpole / "snapshots").iterdir()] == ["64.pt"]


def with_snapshots(run, steps, last=64):
    """A run whose agent leaned to one side at first and balances a little in the end."""
    (run / "snapshots").mkdir()
    for step in steps:
        checkpoint = enjoy.learned(read_checkpoint(run)) | {"global_step": step}
        checkpoint["agent"]["actor.4.bias"] = torch.tensor([50.0, -50.0]) * (step != last)
        torch.save(checkpoint, run / "snapshots" / f"{step}.pt")


def test_grid_of_snapshots(cartpole, monkeypatch, capsys):
    """Those that lean fall over soon, get dark and stay so; the caption below is not dark."""
    with_snapshots(cartpole, (8, 16, 64))
    watch(monkeypatch, cartpole, "--grid", "--seed", 3)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[:3]] == ["step 8", "step 16", "step 64"]
    returns = [float(line.split()[-1]) for line in printed[:3]]
    assert returns[0] == returns[1] < returns[2], "the same agent, the same seed, the same fall"
    path = cartpole / "videos" / "learning.mp4"
    assert printed[3] == f"video: {path}" and [p.name for p in path.parent.iterdir()] == [
        "learning.mp4"
    ]
    frames = imageio.v3.imread(path)
    assert len(frames) == 1 + max(returns) + 50 and frames.shape[1:] == (2 * 424, 2 * 604, 3)
    left, right = frames[:5, :400, :600].astype(int), frames[:5, :400, 604:1204].astype(int)
    assert abs(left - right).max() < 100, "from the same start"
    cells = {(0, 0): 0, (0, 1): 1, (1, 0): 2}
    for (row, column), i in cells.items():
        sky = frames[:, row * 424 + 20, column * 604 + 300].mean(-1)
        dark_from = int(np.argmax(sky < 140))
        assert sky[0] > 250 and dark_from == returns[i] and (sky[dark_from:] < 140).all()
        caption = frames[-1, row * 424 + 402 : row * 424 + 420, column * 604 : column * 604 + 150]
        assert caption.max() > 200 and caption.min() < 20


def test_grid_of_many_snapshots_and_of_several_runs(cartpole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(enjoy, "GRID_STEPS", 3)
    with_snapshots(cartpole, range(1, 30))
    assert [path.name for path in enjoy.snapshots_of(cartpole)] == [
        *(f"{step}.pt" for step in (1, 5, 8, 12, 15, 19, 23, 26)),
        "checkpoint.pt",
    ]
    train(
        PPO,
        tmp_path / "other",
        "--num-envs",
        2,
        "--num-steps",
        32,
        "--total-timesteps",
        64,
        "--seed",
        2,
    )
    watch(
        monkeypatch,
        cartpole,
        only_run(tmp_path / "other"),
        cartpole / "snapshots" / "5.pt",
        "--grid",
    )
    printed = capsys.readouterr().out.splitlines()
    answers = [line.split(":")[0] for line in printed if "not over" in line]
    assert answers == ["ppo 1, step 64", "ppo 2, step 64", "ppo 1, step 5"]


def test_grid_of_too_few_or_too_many(cartpole, monkeypatch):
    with pytest.raises(SystemExit, match="has one checkpoint: run --snapshots during training"):
        watch(monkeypatch, cartpole, "--grid")
    with pytest.raises(SystemExit, match="a grid shows up to 9 checkpoints"):
        watch(monkeypatch, *[cartpole] * 10, "--grid")
    assert not (cartpole / "videos").exists()


def test_numpy_in_a_checkpoint_is_loaded_and_objects_are_not(tmp_path):
    """Normalizers may be NumPy arrays; an array of objects is a pickle, which could run code."""
    count = {"mean": np.arange(3.0), "count": np.float64(2), "seen": np.array([True])}
    torch.save({"normalizer": count}, tmp_path / "checkpoint.pt")
    loaded = enjoy.load_checkpoint(tmp_path)["normalizer"]
    assert loaded["mean"].tolist() == [0, 1, 2] and loaded["count"] == 2 and loaded["seen"][0]
    torch.save({"normalizer": np.array([None], dtype=object)}, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match="cannot load the checkpoint"):
        enjoy.load_checkpoint(tmp_path)


def test_flags_and_random_states_are_not_part_of_the_policy():
    checkpoint = {"agent": {}, "normalizer": {}, "global_step": 1}
    training = {"args": {"seed": 1}, "optimizer": {}, "rng": 2, "cuda_rng": [], "buffer": {}}
    assert enjoy.learned(checkpoint | training) == checkpoint
