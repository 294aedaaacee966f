"""Watch a trained agent play: fresh environments, full episodes, the policy as it was checkpointed.

    python -m cleanrl_utils.enjoy                        # the newest run in runs/
    python -m cleanrl_utils.enjoy runs/<run> --render human
    python -m cleanrl_utils.enjoy runs/<run> --episodes 3 --video --deterministic
    python -m cleanrl_utils.enjoy runs --snapshots       # during training: keep all checkpoints
    python -m cleanrl_utils.enjoy runs/<run> --grid      # one video of how the agent learned
    python -m cleanrl_utils.enjoy hf://cleanrl/CartPole-v1-dqn-seed1 --epsilon 0.05
    python -m cleanrl_utils.enjoy --exp-name dqn --env-id CartPole-v1 --hf-entity cleanrl

Prints the returns and their mean, and writes them to eval.json in the run folder and, for
TensorBoard, to its folder eval/.
"""

import inspect
import json
import math
import os
import re
import runpy
import shlex
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro

from cleanrl_utils import runs
from cleanrl_utils.errors import explain, missing, printable
from cleanrl_utils.processes import with_our_hint

ALGORITHMS = Path(__file__).resolve().parent.parent / "cleanrl"
# what JAX files, PyTorch files and the Hub call it
CHECKPOINTS = ("checkpoint.msgpack", "checkpoint.pt", "model.safetensors")
TRAINING_ONLY = re.compile(  # parts of a checkpoint
    r"args|(.*_)?(optimizer|rng)|random_states|opt_state|target_.*|buffer|added|league|world|key"
    r"|rnd|bonus_filter|teacher|returns"
)
NUMPY = [np.ndarray, np.dtype, np._core.multiarray._reconstruct, np._core.multiarray.scalar]
NUMPY += [type(np.dtype(code)) for code in "?bBhHiIlLefd"]  # no objects, which could be any code
GRID_CELLS = 9  # checkpoints in one video
GRID_WIDTH = 1280  # pixels
GRID_STEPS = 10_000  # a video ends there, since some agents never lose
WINDOW_HEIGHT = 480  # pixels; smaller frames are enlarged
NEWEST = "(default: the newest run)"
RUN_HELP = "run folder, checkpoint or hf://entity/repository"


@dataclass
class Args:
    run: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="RUN ...", help=RUN_HELP, help_behavior_hint=NEWEST),
    ] = ()
    episodes: int = 10  # episodes to play
    seed: int = 1000  # seed of the environments and of the sampled actions
    epsilon: float = 0.0  # probability of a random action, for epsilon-greedy agents
    deterministic: bool = False  # take the most likely action instead of sampling
    render: Literal["human"] | None = None  # open a window
    video: bool = False  # record every episode to the run's videos/
    grid: bool = False  # instead, one video of several runs, checkpoints or a run's snapshots
    snapshots: bool = False  # instead, during training, keep each checkpoint's policy in snapshots/
    file: Path | None = None  # algorithm file of the policy; by default, the run's in cleanrl/
    env_id: str | None = None  # environment, if it is not the run's or needs an import (module:id)
    exp_name: str | None = None  # play the Hub's model of this experiment and --env-id
    run_seed: int = 1  # seed of that model's run
    hf_entity: str = "cleanrl"  # user or organization of that model


def read_run(run_folder):
    """The content of run.json. It may be untrusted: nothing in it is executed."""
    with explain(f"read {run_folder}/run.json"):
        return runs.read_run(run_folder)


def find_checkpoint(run_folder):
    there = [run_folder / name for name in CHECKPOINTS if (run_folder / name).exists()]
    return there[0] if there else run_folder / "checkpoint.pt"


def load_checkpoint(path):
    """The checkpoint in a run folder or file, as tensors and numbers; loading never runs code."""
    path = find_checkpoint(Path(path)) if Path(path).is_dir() else Path(path)
    with explain(f"load the checkpoint of {path.parent}"):
        checkpoint = read_checkpoint(path)
    with explain(f"read the global_step of {path.parent}"):
        int(checkpoint.get("global_step", 0))
    return checkpoint


def read_checkpoint(path):
    if path.suffix == ".msgpack":
        from flax.serialization import msgpack_restore

        return msgpack_restore(path.read_bytes())
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        with torch.serialization.safe_globals(NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise ValueError("it is damaged, or holds more than weights") from None


def read_safetensors(path):
    """The nested names that a checkpoint has, from flat ones such as agent/actor.0.weight."""
    from safetensors import safe_open

    checkpoint = {}
    with safe_open(path, "numpy") as file:
        is_torch = (file.metadata() or {}).get("format") == "pt"
        for flat_name in file.keys():  # noqa: SIM118  it is no dictionary
            *parents, name = flat_name.split("/")
            place = checkpoint
            for parent in parents:
                place = place.setdefault(parent, {})
            array = file.get_tensor(flat_name)
            place[name] = torch.from_numpy(array) if is_torch else array
    return checkpoint


def learned(checkpoint):
    """The parts of a checkpoint that the policy needs, without those that only training needs."""
    kept = {name: part for name, part in checkpoint.items() if not TRAINING_ONLY.fullmatch(name)}
    agent = kept.get("agent", {})
    if any(isinstance(part, dict) for part in agent.values()):  # JAX has them a level below
        parts = {name: part for name, part in agent.items() if not TRAINING_ONLY.fullmatch(name)}
        kept["agent"] = parts
    return kept


def import_algorithm(name, file=None):
    """The names of an algorithm file. Untrusted files are never run, only ours of that name."""
    file = file or ALGORITHMS / Path(str(name)).name
    if not file.is_file():
        raise SystemExit(f"there is no {file}: pass the algorithm file of this run with --file")
    with explain(f"import {file.name}"):
        try:
            return runpy.run_path(str(file))
        except ModuleNotFoundError as error:
            raise ValueError(missing(error.name, file)) from error


def make_agent(
    run_folder,
    checkpoint,
    render_mode=None,
    file=None,
    env_id=None,
    epsilon=0.0,
    seed=0,
    deterministic=False,
):
    """The id of an environment of the run's kind, the environment, and the policy for it."""
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # pygame warns on machines without sound
    run = read_run(run_folder)
    run_args = run["args"] | {"env_id": str(env_id or run["args"].get("env_id"))}
    if ":" in run_args["env_id"] and not env_id:  # part of the id is a module to import
        module = shlex.quote(printable(run_args["env_id"]))
        raise SystemExit(f"playing will import {module}: if you trust it, add --env-id {module}")
    algorithm = import_algorithm(run["file"], file)
    if epsilon and not hasattr(algorithm["Args"], "end_e"):
        problem = f"those of {(file or Path(run['file'])).name} are not"
        raise SystemExit(f"--epsilon is for epsilon-greedy agents, which {problem}")
    load_policy = algorithm["load_policy"]
    options = {}
    if deterministic and "deterministic" in inspect.signature(load_policy).parameters:
        options["deterministic"] = True
    with explain(f"rebuild the agent of {run_folder}"):
        try:
            envs = algorithm["make_envs"](algorithm["Args"](**run_args), 1, render_mode)
        except gym.error.DependencyNotInstalled as error:
            raise ValueError(with_our_hint(str(error))) from error
        policy = load_policy(checkpoint, envs, **options)
        can_render = "rgb_array" in envs.metadata.get("render_modes", ())
        runs.require(can_render or not render_mode, "the environment does not render rgb_array")
    if epsilon:
        policy = with_random_actions(policy, epsilon, envs.single_action_space, seed)
    return run_args["env_id"], envs, policy


def with_random_actions(policy, epsilon, space, seed):
    rng = np.random.default_rng(seed)

    def explore(obs, is_last):
        actions = policy(obs, is_last)
        choices = rng.integers(space.n, size=len(actions)) + space.start
        return np.where(rng.random(len(actions)) < epsilon, choices, actions)

    return explore


def play(envs, policy, episodes, seed, videos=(), window=None):
    """The returns and lengths of whole episodes, played one after another in one environment.

    The first episodes, across lost lives, are recorded to the paths in videos.
    """
    returns, lengths = [], []
    obs, _ = envs.reset(seed=seed)
    is_last = np.zeros(1, dtype=bool)
    video, is_over = None, False
    while len(returns) < episodes:
        if not is_over:  # the step after an end only resets
            if len(returns) < len(videos) and not video:
                video = new_video(videos[len(returns)], draw(envs).shape[1::-1], envs)
            show(envs, video, window)
        with explain("act"):  # JAX checks the weights' shapes here
            actions = policy(obs, is_last)
        obs, _, terminated, truncated, infos = envs.step(actions)
        is_last = terminated | truncated
        is_over = has_ended(infos)
        if is_over:
            show(envs, video, window)
            video = video and video.close()
            returns.append(float(infos["episode"]["r"][0]))
            lengths.append(int(infos["episode"]["l"][0]))
            others = ", ".join(f"{other:.2f}" for other in infos["episode"]["r"][1:])
            note = f" (returns of the other players: {others})" if others else ""  # in self-play
            line = f"episode {len(returns)}: return {returns[-1]:.2f}, length {lengths[-1]}{note}"
            print(line, flush=True)
    return returns, lengths


def has_ended(infos):
    """Whether a whole episode has, not only that of a life."""
    return "episode" in infos and bool(infos["_episode"].any())


def draw(envs):
    with explain("draw"):  # MuJoCo draws with OpenGL, which a server may not have
        return envs.render()[0]


def show(envs, *screens):
    """Draw a frame for those of the videos and windows that are there."""
    screens = [screen for screen in screens if screen]
    if screens:
        frame = draw(envs)
        for screen in screens:
            screen.write_frame(frame)


def new_video(path, size, envs):
    """What frames of this size can be written to."""
    from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter  # late: it is slow to import

    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # never write through an untrusted link
    fps = envs.metadata.get("render_fps", 30)
    return FFMPEG_VideoWriter(str(path), size, fps, preset="veryfast", pixel_format="rgb24")


class Window:
    """Shows frames at the speed of the environment. Closing it ends the program."""

    def __init__(self, title, fps):
        with explain("open a window"):
            import pygame  # Gymnasium's

            self.pygame = pygame
            self.title, self.fps = title, fps
            self.clock = pygame.time.Clock()
            pygame.display.init()
            pygame.display.set_caption(title)

    def write_frame(self, frame):
        height, width = frame.shape[:2]
        scale = max(1, WINDOW_HEIGHT // height)
        size = (width * scale, height * scale)
        with explain("open a window"):
            screen = self.pygame.display.get_surface() or self.pygame.display.set_mode(size)
        picture = self.pygame.surfarray.make_surface(frame.swapaxes(0, 1))
        screen.blit(self.pygame.transform.scale(picture, size), (0, 0))
        self.pygame.display.flip()
        self.clock.tick(self.fps)
        if self.pygame.event.get(self.pygame.QUIT):
            raise SystemExit("the window was closed: nothing is written")

    def close(self):
        self.pygame.display.quit()


def evaluate(run_folder, checkpoint, episodes=10, seed=1000, num_videos=0, render=None, **choices):
    """Play whole episodes, record the first ones, and write the returns into the run's folder."""
    torch.manual_seed(seed)
    render_mode = "rgb_array" if num_videos or render else None
    env_id, envs, policy = make_agent(run_folder, checkpoint, render_mode, seed=seed, **choices)
    window = Window(env_id, envs.metadata.get("render_fps", 30)) if render else None
    names = [f"eval-seed-{seed}-episode-{episode}.mp4" for episode in range(num_videos)]
    videos = [run_folder / "videos" / name for name in names]
    returns, lengths = play(envs, policy, episodes, seed, videos, window)
    envs.close()
    if window:
        window.close()
    mean, std = float(np.mean(returns)), float(np.std(returns, ddof=min(1, episodes - 1)))
    print(f"mean return over {episodes} episodes: {mean:.2f} ± {std:.2f}")
    evaluation = {
        "env_id": env_id,
        "seed": seed,
        "epsilon": choices.get("epsilon", 0.0),
        "deterministic": choices.get("deterministic", False),
        "global_step": int(checkpoint.get("global_step", 0)),
        "mean": mean,
        "std": std,
        "returns": returns,
        "lengths": lengths,
        "videos": names,
    }
    write_evaluation(run_folder, evaluation)
    return evaluation


def write_evaluation(run_folder, evaluation):
    """To eval.json, and for TensorBoard to eval/, in place of the last one."""
    from torch.utils.tensorboard import SummaryWriter  # late: it is slow to import

    part = run_folder / "eval.tmp"
    part.unlink(missing_ok=True)  # never write through an untrusted link
    part.write_text(json.dumps(evaluation, indent=2))
    os.replace(part, run_folder / "eval.json")
    shutil.rmtree(run_folder / "eval", ignore_errors=True)
    # purge_step makes an open TensorBoard discard the last evaluation
    with SummaryWriter(run_folder / "eval", purge_step=0) as writer:
        for episode, episodic_return in enumerate(evaluation["returns"]):
            writer.add_scalar("eval/episodic_return", episodic_return, episode)


# -- snapshots: the checkpoints of a run that is being trained -------------------------------------


def keep_snapshots(folders, seconds=0.5):
    """During training, keep the policy of each checkpoint before the next one replaces it.

    Returns when all runs in folders have ended; with a folder of runs, it never does.
    """
    if os.name == "nt":  # where a file that is being read cannot be replaced
        raise SystemExit("--snapshots would disturb the training on Windows")
    started, seen, ended = time.time(), {}, set()
    while not ended.issuperset(folders):
        for run_folder in runs_in(folders):
            path = find_checkpoint(run_folder)
            if not path.exists() or seen.get(path) == path.stat().st_mtime_ns:
                continue
            seen[path] = path.stat().st_mtime_ns
            if run_folder not in folders and path.stat().st_mtime < started:
                continue  # ended before
            step = keep_snapshot(run_folder, path)
            print(f"kept step {step:,} of {run_folder}", flush=True)
            if step + steps_per_iteration(run_folder) > total_steps(run_folder):
                ended.add(run_folder)  # runs end with their last whole iteration
        if not ended.issuperset(folders):
            time.sleep(seconds)


def runs_in(folders):
    for folder in folders:
        if (folder / "run.json").exists():
            yield folder
        else:
            yield from (path.parent for path in folder.glob("*/run.json"))


def keep_snapshot(run_folder, path):
    """Copy what the policy needs of a checkpoint; returns its step."""
    checkpoint = learned(load_checkpoint(path))
    step, folder = int(checkpoint["global_step"]), run_folder / "snapshots"
    folder.mkdir(exist_ok=True)
    if path.suffix == ".msgpack":
        from flax.serialization import msgpack_serialize

        (folder / "snapshot.tmp").write_bytes(msgpack_serialize(checkpoint))
    else:
        torch.save(checkpoint, folder / "snapshot.tmp")
    os.replace(folder / "snapshot.tmp", folder / f"{step}{path.suffix}")
    return step


def total_steps(run_folder):
    return read_run(run_folder)["args"].get("total_timesteps", math.inf)


def steps_per_iteration(run_folder):
    run = read_run(run_folder)
    args, num_processes = run["args"], run.get("world_size", 1)
    num_envs = args.get("num_envs", num_processes * args.get("local_num_envs", 1))
    return num_envs * args.get("num_steps", args.get("train_frequency", 1))


def snapshots_of(run_folder):
    """The checkpoints of a run in order, up to the last; if there are many, an even selection."""
    kept = [path for path in run_folder.glob("snapshots/*") if path.stem.isdecimal()]
    kept.sort(key=lambda path: int(path.stem))
    last = find_checkpoint(run_folder)
    if not kept or int(kept[-1].stem) != int(load_checkpoint(last).get("global_step", 0)):
        kept.append(last)
    chosen = np.linspace(0, len(kept) - 1, min(len(kept), GRID_CELLS)).round().astype(int)
    return [kept[i] for i in chosen]


# -- the grid: several agents side by side in one video --------------------------------------------


@dataclass
class Player:
    """An agent in its environment, and the cell that shows it."""

    caption: str
    envs: Any
    policy: Any
    obs: Any
    is_last: Any
    frame: Any
    episodic_return: float = 0.0
    is_over: bool = False

    def step(self):
        with explain("act"):
            actions = self.policy(self.obs, self.is_last)
        self.obs, rewards, terminated, truncated, infos = self.envs.step(actions)
        self.is_last = terminated | truncated
        self.frame = draw(self.envs)
        self.episodic_return += float(rewards[0])
        if has_ended(infos):
            self.is_over = True
            self.episodic_return = float(infos["episode"]["r"][0])
            self.frame = self.frame // 2  # finished episodes are darkened


def make_players(checkpoints, seed, **choices):
    players = []
    several_runs = len({run_folder for run_folder, _ in checkpoints}) > 1
    for run_folder, path in checkpoints:
        checkpoint, args = load_checkpoint(path), read_run(run_folder)["args"]
        _, envs, policy = make_agent(run_folder, checkpoint, "rgb_array", seed=seed, **choices)
        name = f"{args.get('exp_name')} {args.get('seed')}, " if several_runs else ""
        caption = f"{name}step {int(checkpoint.get('global_step', 0)):,}"
        obs, _ = envs.reset(seed=seed)
        is_last = np.zeros(1, dtype=bool)
        players.append(Player(caption, envs, policy, obs, is_last, draw(envs)))
    return players


def make_grid(checkpoints, path, seed=1000, **choices):
    """A video in which agents play an episode each, side by side and from the same seed."""
    torch.manual_seed(seed)
    players = make_players(checkpoints, seed, **choices)
    envs, fps = players[0].envs, players[0].envs.metadata.get("render_fps", 30)
    part = path.with_suffix(".tmp.mp4")
    with new_video(part, draw_grid(players).size, envs) as video:
        for step in range(GRID_STEPS):
            for player in players:
                if step > 0 and not player.is_over:
                    player.step()
            picture = np.asarray(draw_grid(players))
            video.write_frame(picture)
            if all(player.is_over for player in players):
                break
        for _ in range(fps):  # so that the end can be read
            video.write_frame(picture)
    os.replace(part, path)
    for player in players:
        player.envs.close()
        note = "" if player.is_over else f" after {GRID_STEPS:,} steps, not over"
        print(f"{player.caption}: return {player.episodic_return:.2f}{note}")
    print(f"video: {path}")


def draw_grid(players):
    """A picture of all cells, each a frame and the caption below it."""
    from PIL import Image, ImageDraw, ImageFont  # moviepy's

    columns = math.ceil(len(players) ** 0.5)
    rows = math.ceil(len(players) / columns)
    height, width = players[0].frame.shape[:2]
    scale = min(max(1.0, 240 / width), GRID_WIDTH / columns / width)  # a caption needs some room
    width, height = (round(scale * side / 2) * 2 for side in (width, height))  # even, for encoders
    picture = Image.new("RGB", (columns * (width + 4), rows * (height + 24)))
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    for i, player in enumerate(players):
        x, y = i % columns * (width + 4), i // columns * (height + 24)
        frame = Image.fromarray(player.frame).resize((width, height), Image.Resampling.BILINEAR)
        picture.paste(frame, (x, y))
        caption = f"{player.caption}, return {player.episodic_return:.1f}"
        pen.text((x + 4, y + height + 2), caption, "white", font)
    return picture


# -- the command -----------------------------------------------------------------------------------


def locate(word):
    """The run's folder and the checkpoint that a word of the command line stands for."""
    if word.startswith("hf://"):
        from cleanrl_utils.hub import pull

        word = pull(word)
    path = Path(word)
    if path.is_file():
        folders = (folder for folder in path.parents if (folder / "run.json").exists())
        return next(folders, path.parent), path
    return path, find_checkpoint(path)


def find_words(args):
    """The runs that the command line names: the words, a model of the Hub, or the newest run."""
    if args.exp_name is not None:
        if args.run or args.env_id is None:
            raise SystemExit("--exp-name needs --env-id and replaces the run: do not pass both")
        from cleanrl_utils.hub import repo_name

        return [f"hf://{args.hf_entity}/{repo_name(args.env_id, args.exp_name, args.run_seed)}"]
    if len(args.run) > 1 and not (args.grid or args.snapshots):
        raise SystemExit("pass one run: only --grid and --snapshots accept several")
    if args.run:
        return args.run
    with explain("find the newest run"):
        newest = runs.newest_run()
    print(f"run folder: {newest}")
    return [str(newest)]


def check(args):
    if args.episodes < 1:
        raise SystemExit(f"--episodes must be at least 1, not {args.episodes}")
    if not 0 <= args.seed < 2**31:
        raise SystemExit(f"--seed must lie between 0 and 2**31 - 1, not {args.seed}")
    if not 0 <= args.epsilon <= 1:
        raise SystemExit(f"--epsilon must lie between 0 and 1, not {args.epsilon}")


def main():
    args = tyro.cli(Args, prog="python -m cleanrl_utils.enjoy", description=__doc__)
    check(args)
    found = [locate(word) for word in find_words(args)]
    run_folder, path = found[0]
    choices = dict(file=args.file, env_id=args.env_id, epsilon=args.epsilon)
    choices["deterministic"] = args.deterministic
    if args.snapshots:
        if missing_folders := [folder for folder, _ in found if not folder.is_dir()]:
            raise SystemExit(f"there is no folder {missing_folders[0]}")
        with suppress(KeyboardInterrupt):
            keep_snapshots([folder for folder, _ in found])
    elif args.grid:
        if len(found) == 1:
            read_run(run_folder)
            found = [(run_folder, snapshot) for snapshot in snapshots_of(run_folder)]
            hint = "run --snapshots during training to keep more of them"
            if len(found) == 1:
                raise SystemExit(f"{run_folder} has one checkpoint: {hint}")
        if len(found) > GRID_CELLS:
            raise SystemExit(f"a grid shows up to {GRID_CELLS} checkpoints")
        make_grid(found, run_folder / "videos" / "learning.mp4", args.seed, **choices)
    else:
        read_run(run_folder)
        checkpoint = load_checkpoint(path)
        num_videos = args.episodes if args.video else 0
        choices["render"] = args.render
        evaluate(run_folder, checkpoint, args.episodes, args.seed, num_videos, **choices)
        if args.video:
            print(f"videos: {run_folder / 'videos'}")


if __name__ == "__main__":
    main()
