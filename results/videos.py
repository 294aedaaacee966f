"""Film the trained agents of the docs: each plays ten evaluation episodes as enjoy does, and the first of them is shown.

    python results/videos.py ppo                # trains as FILMS says, which takes minutes
    python results/videos.py ppo runs/<run>     # or takes a run that is there

Writes docs/rl-algorithms/videos/ppo.mp4 and .jpg, and what they show into results/videos.json; prints the lines for the docs.
"""

import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for the tools, from wherever this is run
from cleanrl_utils.enjoy import evaluate, load_checkpoint, read_run  # noqa: E402
from cleanrl_utils.reproduce import to_words  # noqa: E402

VIDEOS = ROOT / "docs" / "rl-algorithms" / "videos"
DATA = ROOT / "results" / "videos.json"
SECONDS, WIDTH = 12, 360  # a film shows the beginning of a longer episode
PENDULUM = "--env-id Pendulum-v1 --gamma 0.95"
SMALL = "--batch-size 64 --tau 0.02"
FILMS = {  # what can be learned on a CPU in some minutes
    "ppo": "--env-id Acrobot-v1",
    "ppo_continuous_action": "--env-id Hopper-v4 --total-timesteps 500000",
    "ppo_multidiscrete": "",
    "ppo_jax": "",
    "rpo_continuous_action": "--env-id Pendulum-v1 --total-timesteps 300000 --num-envs 16 --num-steps 64 --num-minibatches 4 "
    "--gamma 0.9 --learning-rate 0.001",
    "dqn": "",
    "c51": "--env-id Acrobot-v1",
    "ddpg_continuous_action": f"{PENDULUM} {SMALL} --total-timesteps 7000 --learning-starts 500 --learning-rate 0.002",
    "td3_continuous_action": f"{PENDULUM} {SMALL} --total-timesteps 7000 --learning-starts 500 --learning-rate 0.002",
    "sac_continuous_action": "--env-id HalfCheetah-v4 --total-timesteps 30000",
    "tqc_continuous_action_jax": f"{PENDULUM} {SMALL} --total-timesteps 5000 --learning-starts 500 --learning-rate 0.001 "
    "--num-critics 2",
    "droq_continuous_action_jax": f"{PENDULUM} {SMALL} --total-timesteps 4000 --learning-starts 300 --learning-rate 0.001 "
    "--utd 5",
    "crossq_continuous_action_jax": f"{PENDULUM} --total-timesteps 4000 --learning-starts 300 --q-width 256",
}


def train(name):
    """The folder of a new run."""
    before = set((ROOT / "runs").glob("*/"))
    subprocess.run([sys.executable, f"cleanrl/{name}.py", *shlex.split(FILMS[name])], cwd=ROOT, check=True)
    (run_folder,) = set((ROOT / "runs").glob("*/")) - before
    return run_folder


def command(run_folder):
    """The one that made a run, without the flags that are at their defaults."""
    file, args = read_run(run_folder)
    defaults = vars(runpy.run_path(str(ROOT / "cleanrl" / Path(file).name))["Args"]())
    words = [word for flag, value in args.items() if value != defaults[flag] for word in to_words(flag, value)]
    return shlex.join(["python", f"cleanrl/{file}", *words])


def film(name, run_folder):
    from moviepy import VideoFileClip  # late: it is slow to import

    evaluation = evaluate(run_folder, load_checkpoint(run_folder), num_videos=1)
    with VideoFileClip(str(run_folder / "videos" / f"eval-seed-{evaluation['seed']}-episode-0.mp4")) as episode:
        clip = episode.subclipped(0, min(SECONDS, episode.duration)).resized(width=WIDTH)
        VIDEOS.mkdir(exist_ok=True)
        settings = dict(preset="veryslow", ffmpeg_params=["-crf", "30", "-movflags", "+faststart"], audio=False, logger=None)
        clip.write_videofile(str(VIDEOS / f"{name}.mp4"), fps=min(30, episode.fps), **settings)
        clip.save_frame(str(VIDEOS / f"{name}.jpg"), t=clip.duration / 3)
        shown, whole = clip.duration, episode.duration
    about = {"command": command(run_folder), "train_seed": read_run(run_folder)[1]["seed"], "seconds": [shown, whole]}
    told = json.loads(DATA.read_text()) if DATA.exists() else {}
    told[name] = about | evaluation
    DATA.write_text(json.dumps(dict(sorted(told.items())), indent=2) + "\n")


def block(name):
    """The lines for the docs."""
    told = json.loads(DATA.read_text())[name]
    shown, whole = told["seconds"]
    part = f" (the first {shown:.0f} of its {whole:.0f} seconds)" if shown < whole else ""
    return (
        f"[![{name}.py plays {told['env_id']}](videos/{name}.jpg)](videos/{name}.mp4)\n\n"
        f"*{told['env_id']}, seed {told['train_seed']}, after {told['global_step']:,} steps: the first of ten evaluation "
        f"episodes{part}, with a return of {told['returns'][0]:.1f}. All ten: {told['mean']:.1f} ± {told['std']:.1f}. "
        f"Trained by `{told['command']}`.*"
    )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in FILMS:
        raise SystemExit(f"usage: python results/videos.py NAME [RUN_FOLDER], with a NAME of {', '.join(FILMS)}")
    film(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) == 3 else train(sys.argv[1]))
    print(block(sys.argv[1]))
