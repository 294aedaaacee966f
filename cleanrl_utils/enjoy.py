"""Watch a trained agent play: fresh environments, full episodes, the policy as it was checkpointed.

    python -m cleanrl_utils.enjoy runs/<run>
    python -m cleanrl_utils.enjoy runs/<run> --episodes 3 --video
    python -m cleanrl_utils.enjoy runs --snapshots    # during a training: keep all checkpoints
    python -m cleanrl_utils.enjoy runs/<run> --grid   # one video that shows how the agent learned
    python -m cleanrl_utils.enjoy hf://cleanrl/CartPole-v1-dqn-seed1 --epsilon 0.05
    python -m cleanrl_utils.enjoy --exp-name dqn --env-id CartPole-v1 --hf-entity cleanrl

Prints the returns and their mean, and writes them to eval.json in the run folder and to TensorBoard
as eval/episodic_return.
"""

import inspect
import json
import math
import os
import re
import runpy
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

from cleanrl_utils import runs

ALGORITHMS = Path(__file__).resolve().parent.parent / "cleanrl"
CHECKPOINTS = (
    "checkpoint.msgpack",
    "checkpoint.pt",
    "model.safetensors",
)  # what JAX, PyTorch and the Hub call it
TRAINING_ONLY = re.compile(  # parts of a checkpoint
    r"args|(.*_)?(optimizer|rng)|random_states|opt_state|target_.*|buffer|added|league|world|key"
    r"|rnd|bonus_filter"
)
NUMPY = [np.ndarray, np.dtype, np._core.multiarray._reconstruct, np._core.multiarray.scalar]
NUMPY += [type(np.dtype(code)) for code in "?bBhHiIlLefd"]  # no objects, which could be any code
GRID_CELLS = 9  # checkpoints in one video
GRID_WIDTH = 1280  # pixels
GRID_STEPS = 10_000  # a video ends there, since some agents never lose


@dataclass
class Args:
    # its folder, or hf://entity/repository; for --grid also several, or checkpoints
    run: tyro.conf.Positional[tuple[str, ...]] = ()
    episodes: int = 10  # episodes to play
    seed: int = 1000  # seed of the environments and of the sampled actions
    epsilon: float = 0.0  # chance of a random action, if it was trained that way; in papers 0.05
    deterministic: bool = False  # take the most likely action where the policy samples
    video: bool = False  # record every episode into the run's folder videos/
    grid: bool = False  # instead, one video of several checkpoints: the run's snapshots, or yours
    snapshots: bool = False  # instead, during training, keep each checkpoint's policy in snapshots/
    file: Path | None = None  # algorithm file of the policy, if not that of the run in cleanrl/
    env_id: str | None = None  # environment, if not the run's or if a module must be imported
    exp_name: str | None = None  # play a model of the Hub: the one of this experiment and --env-id
    run_seed: int = 1  # and of this seed
    hf_entity: str = "cleanrl"  # and of this user or organization


def read_run(run_folder):
    """The file and flags named by run.json, which may be a stranger's: nothing of it is run."""
    with runs.explain(run_folder):
        run = runs.read_run(run_folder)
        return run["file"], run["args"]


def find_checkpoint(run_folder):
    there = [run_folder / name for name in CHECKPOINTS if (run_folder / name).exists()]
    return there[0] if there else run_folder / "checkpoint.pt"


def load_checkpoint(path):
    """The checkpoint in a run folder or file, as tensors and numbers; loading never runs code."""
    path = find_checkpoint(Path(path)) if Path(path).is_dir() else Path(path)
    try:
        if path.suffix == ".msgpack":
            from flax.serialization import msgpack_restore

            return msgpack_restore(path.read_bytes())
        if path.suffix == ".safetensors":
            return read_safetensors(path)
        with torch.serialization.safe_globals(NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        problem = f"cannot load the checkpoint of {path.parent}: {type(error).__name__}: {error}"
        raise SystemExit(problem.splitlines()[0]) from None


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
            place[name] = (
                torch.from_numpy(file.get_tensor(flat_name))
                if is_torch
                else file.get_tensor(flat_name)
            )
    return checkpoint


def learned(checkpoint):
    """The parts of a checkpoint that the policy needs, without those that only training needs."""
    kept = {name: part for name, part in checkpoint.items() if not TRAINING_ONLY.fullmatch(name)}
    if any(
        isinstance(part, dict) for part in kept.get("agent", {}).values()
    ):  # JAX has them a level below
        kept["agent"] = {
            name: part for name, part in kept["agent"].items() if not TRAINING_ONLY.fullmatch(name)
        }
    return kept


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
    """One environment of the run's kind and the policy that plays in it."""
    file_name, run_args = read_run(run_folder)
    file = (
        file or ALGORITHMS / Path(str(file_name)).name
    )  # a stranger's file is never run, only ours of that name
    if not file.is_file():
        raise SystemExit(f"there is no {file}: say with --file which algorithm file made this run")
    run_args["env_id"] = str(env_id or run_args.get("env_id"))
    if ":" in run_args["env_id"] and not env_id:  # part of the id is a module to import
        raise SystemExit(
            f"playing will import {run_args['env_id']}: "
            f"if you trust it, add --env-id {run_args['env_id']}"
        )
    algorithm = runpy.run_path(str(file))
    load_policy = algorithm["load_policy"]
    samples = "deterministic" in inspect.signature(load_policy).parameters
    if epsilon and not hasattr(algorithm["Args"], "end_e"):
        raise SystemExit(
            f"--epsilon is for agents that explored that way, which those of {file.name} did not"
        )
    try:
        envs = algorithm["make_envs"](algorithm["Args"](**run_args), 1, render_mode)
        policy = load_policy(
            checkpoint, envs, **{"deterministic": True} if deterministic and samples else {}
        )
        can_render = "rgb_array" in envs.metadata.get("render_modes", ())
        assert render_mode is None or can_render, "the environment does not render rgb_array"
    except Exception as error:
        problem = f"cannot rebuild the agent of {run_folder}: {type(error).__name__}: {error}"
        raise SystemExit(
            " ".join(problem.split())[:500]
        ) from None  # PyTorch says which weights do not fit in further lines
    rng, space = np.random.default_rng(seed), envs.single_action_space

    def explore(obs, is_last):
        actions = policy(obs, is_last)
        choices = rng.integers(space.n, size=len(actions)) + space.start
        return np.where(rng.random(len(actions)) < epsilon, choices, actions)

    return run_args["env_id"], envs, explore if epsilon else policy


def play(envs, policy, episodes, seed, videos=()):
    """The returns and lengths of whole episodes, played one after another in one environment.

    The first episodes, across lost lives, are recorded to the paths in videos."""
    returns, lengths, (obs, _), is_last = [], [], envs.reset(seed=seed), np.zeros(1, dtype=bool)
    video, is_over = None, False
    while len(returns) < episodes:
        if len(returns) < len(videos) and not is_over:  # the step after an end only resets
            frame = draw(envs)
            video = video or new_video(videos[len(returns)], frame.shape[1::-1], envs)
            video.write_frame(frame)
        obs, _, terminated, truncated, infos = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
        is_over = "episode" in infos and bool(
            infos["_episode"].any()
        )  # the whole one, not that of a life
        if is_over and video:
            video.write_frame(draw(envs))
            video = video.close()
        if is_over:
            returns.append(float(infos["episode"]["r"][0]))
            lengths.append(int(infos["episode"]["l"][0]))
            others = ", ".join(
                f"{other:.2f}" for other in infos["episode"]["r"][1:]
            )  # in self-play, on the other rows
            others = f" (returns of the other players: {others})" if others else ""
            print(
                f"episode {len(returns)}: return {returns[-1]:.2f}, length {lengths[-1]}{others}",
                flush=True,
            )
    return returns, lengths


def draw(envs):
    try:
        return envs.render()[0]
    except Exception as error:  # MuJoCo draws with OpenGL, which a server may not have
        raise SystemExit(f"cannot draw: {type(error).__name__}: {error}".splitlines()[0]) from None


def new_video(path, size, envs):
    """What frames of this size can be written to."""
    from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter  # late: it is slow to import

    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # never write through a stranger's link
    return FFMPEG_VideoWriter(
        str(path),
        size,
        envs.metadata.get("render_fps", 30),
        preset="veryfast",
        pixel_format="rgb24",
    )


def evaluate(run_folder, checkpoint, episodes=10, seed=1000, num_videos=0, **choices):
    """Play whole episodes, record the first ones, and write the returns into the run's folder."""
    torch.manual_seed(seed)
    render_mode = "rgb_array" if num_videos else None
    env_id, envs, policy = make_agent(run_folder, checkpoint, render_mode, seed=seed, **choices)
    videos = [
        run_folder / "videos" / f"eval-seed-{seed}-episode-{episode}.mp4"
        for episode in range(num_videos)
    ]
    returns, lengths = play(envs, policy, episodes, seed, videos)
    envs.close()
    print(f"mean return over {episodes} episodes: {np.mean(returns):.2f} ± {np.std(returns):.2f}")

    from torch.utils.tensorboard import SummaryWriter  # late: it is slow to import

    evaluation = {"env_id": env_id, "seed": seed, "epsilon": choices.get("epsilon", 0.0)}
    evaluation |= {
        "global_step": int(checkpoint.get("global_step", 0)),
        "mean": float(np.mean(returns)),
    }
    evaluation |= {"std": float(np.std(returns)), "returns": returns, "lengths": lengths}
    (run_folder / "eval.tmp").unlink(missing_ok=True)  # never write through a stranger's link
    (run_folder / "eval.tmp").write_text(json.dumps(evaluation, indent=2))
    os.replace(run_folder / "eval.tmp", run_folder / "eval.json")
    with SummaryWriter(run_folder, filename_suffix=".eval") as writer:
        for episode, episodic_return in enumerate(returns):
            writer.add_scalar("eval/episodic_return", episodic_return, episode)
    return evaluation


def keep_snapshots(folders, seconds=0.5):
    """During training, keep the policy of each checkpoint before the next one replaces it.

    Returns when all runs in folders have ended; with a folder of runs, it never does."""
    if os.name == "nt":  # where a file that is being read cannot be replaced
        raise SystemExit("--snapshots would disturb the training on Windows")
    started, seen, ended = time.time(), {}, set()
    while not set(folders) <= ended:
        parents = [folder for folder in folders if not (folder / "run.json").exists()]
        for run_folder in {
            *folders,
            *(path.parent for folder in parents for path in folder.glob("*/run.json")),
        } - {*parents}:
            path = find_checkpoint(run_folder)
            if not path.exists() or seen.get(run_folder) == path.stat().st_mtime_ns:
                continue
            seen[run_folder] = path.stat().st_mtime_ns
            if run_folder not in folders and path.stat().st_mtime < started:
                continue  # ended before
            checkpoint, (_, args) = learned(load_checkpoint(path)), read_run(run_folder)
            step, kept = int(checkpoint["global_step"]), run_folder / "snapshots"
            kept.mkdir(exist_ok=True)
            if path.suffix == ".msgpack":
                from flax.serialization import msgpack_serialize

                (kept / "snapshot.tmp").write_bytes(msgpack_serialize(checkpoint))
            else:
                torch.save(checkpoint, kept / "snapshot.tmp")
            os.replace(kept / "snapshot.tmp", kept / f"{step}{path.suffix}")
            print(f"kept step {step:,} of {run_folder}", flush=True)
            processes = json.loads((run_folder / "run.json").read_text()).get("world_size", 1)
            num_envs = args.get("num_envs", processes * args.get("local_num_envs", 1))
            iteration = num_envs * args.get("num_steps", args.get("train_frequency", 1))
            if step + iteration > args.get(
                "total_timesteps", math.inf
            ):  # runs end with their last whole iteration
                ended.add(run_folder)
        if not set(folders) <= ended:
            time.sleep(seconds)


def snapshots_of(run_folder):
    """The checkpoints of a run in order, up to the last; if there are many, an even selection."""
    kept = [path for path in run_folder.glob("snapshots/*") if path.stem.isdecimal()]
    kept, last = sorted(kept, key=lambda path: int(path.stem)), find_checkpoint(run_folder)
    if not kept or int(kept[-1].stem) != int(load_checkpoint(last).get("global_step", 0)):
        kept.append(last)
    chosen = np.linspace(0, len(kept) - 1, min(len(kept), GRID_CELLS)).round().astype(int)
    return [kept[i] for i in chosen]


def draw_cell(picture, place, size, frame, caption):
    """Put a frame and the caption below it into a picture of many."""
    from PIL import Image, ImageDraw, ImageFont  # moviepy's

    (x, y), (width, height) = place, size
    picture.paste(Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR), place)
    pen = ImageDraw.Draw(picture)
    pen.rectangle((x, y + height, x + width, y + height + 20), "black")
    pen.text((x + 4, y + height + 2), caption, "white", ImageFont.load_default(14))


def make_grid(checkpoints, path, seed=1000, **choices):
    """A video in which agents play an episode each, side by side and from the same seed."""
    from PIL import Image

    torch.manual_seed(seed)
    agents, captions = [], []
    several_runs = len({run_folder for run_folder, _ in checkpoints}) > 1
    for run_folder, checkpoint_path in checkpoints:
        checkpoint, args = load_checkpoint(checkpoint_path), read_run(run_folder)[1]
        agents.append(make_agent(run_folder, checkpoint, "rgb_array", seed=seed, **choices)[1:])
        name = f"{args.get('exp_name')} {args.get('seed')}, " if several_runs else ""
        captions.append(f"{name}step {int(checkpoint.get('global_step', 0)):,}")
    states = [(envs.reset(seed=seed)[0], np.zeros(1, dtype=bool)) for envs, _ in agents]
    frames, returns, is_over = (
        [draw(envs) for envs, _ in agents],
        [0.0] * len(agents),
        [False] * len(agents),
    )

    columns = math.ceil(len(agents) ** 0.5)
    height, width = frames[0].shape[:2]
    scale = min(max(1.0, 240 / width), GRID_WIDTH / columns / width)  # a caption needs some room
    size = width, height = (
        round(scale * width / 2) * 2,
        round(scale * height / 2) * 2,
    )  # encoders want even numbers
    places = [(i % columns * (width + 4), i // columns * (height + 24)) for i in range(len(agents))]
    picture = Image.new(
        "RGB", (columns * (width + 4), math.ceil(len(agents) / columns) * (height + 24))
    )
    fps, part = agents[0][0].metadata.get("render_fps", 30), path.with_suffix(".tmp.mp4")
    with new_video(part, picture.size, agents[0][0]) as video:
        for step in range(GRID_STEPS):
            for i, (envs, policy) in enumerate(agents):
                if is_over[i]:
                    continue
                if step > 0:
                    obs, rewards, terminated, truncated, infos = envs.step(policy(*states[i]))
                    states[i], frames[i] = (obs, terminated | truncated), draw(envs)
                    is_over[i] = "episode" in infos and bool(
                        infos["_episode"].any()
                    )  # the whole one, not that of a life
                    returns[i] = (
                        float(infos["episode"]["r"][0])
                        if is_over[i]
                        else returns[i] + float(rewards[0])
                    )
                frame = frames[i] // 2 if is_over[i] else frames[i]  # what is over gets dark
                draw_cell(
                    picture, places[i], size, frame, f"{captions[i]}, return {returns[i]:.1f}"
                )
            video.write_frame(np.asarray(picture))
            if all(is_over):
                break
        for _ in range(fps):  # so that the end can be read
            video.write_frame(np.asarray(picture))
    for envs, _ in agents:
        envs.close()
    os.replace(part, path)
    for caption, episodic_return, over in zip(captions, returns, is_over, strict=True):
        note = "" if over else f" after {GRID_STEPS:,} steps, not over"
        print(f"{caption}: return {episodic_return:.2f}{note}")
    print(f"video: {path}")


def locate(word):
    """The run's folder and the checkpoint that a word of the command line stands for."""
    if word.startswith("hf://"):
        from cleanrl_utils.hub import pull

        word = pull(word)
    path = Path(word)
    if path.is_file():
        return next(
            (folder for folder in path.parents if (folder / "run.json").exists()), path.parent
        ), path
    return path, find_checkpoint(path)


def main():
    args = tyro.cli(Args, description=__doc__)
    os.environ.setdefault(
        "SDL_AUDIODRIVER", "dummy"
    )  # pygame looks for a sound card, and complains where there is none
    if args.exp_name is not None:
        if args.run or args.env_id is None:
            raise SystemExit("--exp-name needs --env-id, and stands for the run: give no other")
        from cleanrl_utils.hub import repo_name

        args.run = (
            f"hf://{args.hf_entity}/{repo_name(args.env_id, args.exp_name, args.run_seed)}",
        )
    if args.episodes < 1 or not 0 <= args.seed < 2**31 or not 0 <= args.epsilon <= 1:
        raise SystemExit(
            "--episodes must be at least 1, and --seed lie between 0 and 2**31 - 1, "
            "--epsilon between 0 and 1"
        )
    if not args.run or (len(args.run) > 1 and not (args.grid or args.snapshots)):
        raise SystemExit(
            "say which run to watch: its folder, hf://entity/repository, or --exp-name and --env-id"
        )
    found = [locate(word) for word in args.run]
    run_folder, path = found[0]
    choices = dict(file=args.file, env_id=args.env_id, epsilon=args.epsilon)
    choices["deterministic"] = args.deterministic
    if args.snapshots:
        if missing := [folder for folder, _ in found if not folder.is_dir()]:
            raise SystemExit(f"there is no folder {missing[0]}")
        with suppress(KeyboardInterrupt):
            keep_snapshots([folder for folder, _ in found])
    elif args.grid:
        if len(found) == 1:
            read_run(run_folder)
            found = [(run_folder, snapshot) for snapshot in snapshots_of(run_folder)]
        if not 1 < len(found) <= GRID_CELLS:
            many = (
                f"{run_folder} has one checkpoint: "
                "run --snapshots beside its training to keep more of them"
            )
            raise SystemExit(
                many if len(found) == 1 else f"a grid shows up to {GRID_CELLS} checkpoints"
            )
        make_grid(found, run_folder / "videos" / "learning.mp4", args.seed, **choices)
    else:
        read_run(run_folder)
        evaluate(
            run_folder,
            load_checkpoint(path),
            args.episodes,
            args.seed,
            args.episodes if args.video else 0,
            **choices,
        )
        if args.video:
            print(f"videos: {run_folder / 'videos'}")


if __name__ == "__main__":
    main()
