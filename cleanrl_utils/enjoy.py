"""Watch a trained agent play: fresh environments, full episodes, the policy as it was checkpointed.

    python -m cleanrl_utils.enjoy runs/<run>
    python -m cleanrl_utils.enjoy runs/<run> --episodes 3 --video

Prints each return and their mean, writes them to eval.json in the run's folder and to TensorBoard as eval/episodic_return.
"""

import json
import os
import runpy
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

ALGORITHMS = Path(__file__).resolve().parent.parent / "cleanrl"


@dataclass
class Args:
    run_folder: tyro.conf.Positional[Path]  # folder of the run
    episodes: int = 10  # episodes to play
    seed: int = 1000  # seed of the environments and of the sampled actions
    video: bool = False  # record every episode into the run's folder videos/
    file: Path | None = None  # algorithm file to take the policy from, if it is not one of cleanrl/ by the run's name
    env_id: str | None = None  # environment to play in, if it is another than the run's or one that has to be imported


def read_run(run_folder):
    """What run.json says. It may come from a stranger, and is only believed in what cannot do harm."""
    try:
        about = json.loads((run_folder / "run.json").read_text())
        return about.get("file") or about["args"]["exp_name"] + ".py", dict(about["args"])
    except Exception as error:
        problem = f"{run_folder} is not the folder of a run: run.json: {type(error).__name__}: {error}"
        raise SystemExit(problem.splitlines()[0]) from None


def load_checkpoint(run_folder):
    """The checkpoint as plain tensors and numbers: neither format can run code when it is read."""
    try:
        if (run_folder / "checkpoint.msgpack").exists():
            from flax.serialization import msgpack_restore

            return msgpack_restore((run_folder / "checkpoint.msgpack").read_bytes())
        return torch.load(run_folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    except Exception as error:
        problem = f"cannot load the checkpoint of {run_folder}: {type(error).__name__}: {error}"
        raise SystemExit(problem.splitlines()[0]) from None


def play(envs, policy, episodes, seed):
    """The returns and lengths of whole episodes, played one after another in one environment."""
    returns, lengths, (obs, _), is_last = [], [], envs.reset(seed=seed), np.zeros(1, dtype=bool)
    while len(returns) < episodes:
        obs, _, terminated, truncated, infos = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
        if "episode" in infos:
            returns.append(float(infos["episode"]["r"][0]))
            lengths.append(int(infos["episode"]["l"][0]))
            print(f"episode {len(returns)}: return {returns[-1]:.2f}, length {lengths[-1]}", flush=True)
    return returns, lengths


def main():
    args = tyro.cli(Args)
    file_name, run_args = read_run(args.run_folder)
    file = args.file or ALGORITHMS / Path(str(file_name)).name
    if not file.is_file():
        raise SystemExit(f"there is no {file}: say with --file which algorithm file made this run")
    if args.episodes < 1 or not 0 <= args.seed < 2**31:
        raise SystemExit("--episodes must be at least 1, and --seed lie between 0 and 2**31 - 1")
    run_args["env_id"] = str(args.env_id or run_args.get("env_id"))
    if ":" in run_args["env_id"] and not args.env_id:  # part of the id is a module to import
        raise SystemExit(f"playing will import {run_args['env_id']}: if you trust it, add --env-id {run_args['env_id']}")

    algorithm = runpy.run_path(str(file))
    checkpoint = load_checkpoint(args.run_folder)
    torch.manual_seed(args.seed)
    try:
        envs = algorithm["make_envs"](algorithm["Args"](**run_args), 1, "rgb_array" if args.video else None)
        policy = algorithm["load_policy"](checkpoint, envs)
        if args.video:
            assert "rgb_array" in envs.metadata.get("render_modes", ()), "the environment does not render rgb_array"
            videos = dict(video_folder=str(args.run_folder / "videos"), name_prefix=f"eval-seed-{args.seed}")
            envs = gym.wrappers.vector.RecordVideo(envs, **videos, episode_trigger=lambda episode: episode < args.episodes)
    except Exception as error:
        problem = f"cannot rebuild the agent of {args.run_folder}: {type(error).__name__}: {error}"
        raise SystemExit(problem.splitlines()[0]) from None
    returns, lengths = play(envs, policy, args.episodes, args.seed)
    envs.close()
    print(f"mean return over {args.episodes} episodes: {np.mean(returns):.2f} ± {np.std(returns):.2f}")

    from torch.utils.tensorboard import SummaryWriter  # late: it is slow to import

    evaluation = {"env_id": run_args["env_id"], "seed": args.seed, "global_step": int(checkpoint.get("global_step", 0))}
    evaluation |= {"mean": float(np.mean(returns)), "std": float(np.std(returns)), "returns": returns, "lengths": lengths}
    (args.run_folder / "eval.tmp").unlink(missing_ok=True)  # never write through a stranger's link
    (args.run_folder / "eval.tmp").write_text(json.dumps(evaluation, indent=2))
    os.replace(args.run_folder / "eval.tmp", args.run_folder / "eval.json")
    with SummaryWriter(args.run_folder, filename_suffix=".eval") as writer:
        for episode, episodic_return in enumerate(returns):
            writer.add_scalar("eval/episodic_return", episodic_return, episode)


if __name__ == "__main__":
    main()
