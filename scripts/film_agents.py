"""Film a trained agent for the docs: ten evaluation episodes, of which the first becomes the video.

    python scripts/film_agents.py runs/<run>

Writes docs/rl-algorithms/videos/<file>__<env id>.mp4 and .jpg, adds what they show to
results/videos.json, and prints the Markdown for the docs.
"""

import json
import runpy
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # so that this runs from any folder
from cleanrl_utils.enjoy import evaluate, load_checkpoint, read_run  # noqa: E402
from cleanrl_utils.runs import to_words  # noqa: E402

VIDEOS = ROOT / "docs" / "rl-algorithms" / "videos"
DATA = ROOT / "results" / "videos.json"
SECONDS, WIDTH = 12, 360  # of longer episodes, the beginning


def command(run_folder):
    """The one that made a run, without the flags that are at their defaults or change nothing."""
    run = read_run(run_folder)
    file, args = run["file"], run["args"]
    defaults = json.loads(
        json.dumps(vars(runpy.run_path(str(ROOT / "cleanrl" / file))["Args"]()))
    )  # as run.json has them
    changed = {flag: value for flag, value in args.items() if value != defaults.get(flag, value)}
    for flag in ("exp_name", "checkpoint_interval", "cuda", "capture_video", "track", "resume"):
        changed.pop(flag, None)
    return shlex.join(
        [
            "python",
            f"cleanrl/{file}",
            *(word for flag in changed.items() for word in to_words(*flag)),
        ]
    )


def film(run_folder):
    """Play, record, and make the record short and small. Returns the film's name."""
    from moviepy import VideoFileClip  # late: it is slow to import

    run = read_run(run_folder)
    file, args = run["file"], run["args"]
    checkpoint = load_checkpoint(run_folder)
    name = f"{Path(file).stem}__{args['env_id'].replace('/', '-')}"
    evaluation = evaluate(run_folder, checkpoint, num_videos=1)
    with VideoFileClip(
        str(run_folder / "videos" / f"eval-seed-{evaluation['seed']}-episode-0.mp4")
    ) as episode:
        size = (WIDTH, round(WIDTH / episode.aspect_ratio / 2) * 2)  # browsers play even numbers
        clip = episode.subclipped(0, min(SECONDS, episode.duration)).resized(size)
        VIDEOS.mkdir(exist_ok=True)
        settings = dict(
            preset="veryslow",
            ffmpeg_params=["-crf", "30", "-movflags", "+faststart"],
            audio=False,
            logger=None,
        )
        clip.write_videofile(str(VIDEOS / f"{name}.mp4"), fps=min(30, episode.fps), **settings)
        clip.save_frame(str(VIDEOS / f"{name}.jpg"), t=clip.duration / 3)
        seconds = [round(clip.duration, 2), round(episode.duration, 2)]
    about = {
        "command": command(run_folder),
        "file": file,
        "train_seed": args["seed"],
        "seconds": seconds,
    }
    about["of_steps"] = args["total_timesteps"]
    told = json.loads(DATA.read_text()) if DATA.exists() else {}
    DATA.write_text(
        json.dumps(dict(sorted((told | {name: about | evaluation}).items())), indent=2) + "\n"
    )
    return name


def block(name):
    """The lines for the docs."""
    told = json.loads(DATA.read_text())[name]
    shown, whole = told["seconds"]
    steps = f"{told['global_step']:,}" + (
        f" of {told['of_steps']:,}" if told["global_step"] < 0.99 * told["of_steps"] else ""
    )
    part = f" (the first {shown:.0f} of its {whole:.0f} seconds)" if shown < whole else ""
    return (
        f"[![{told['file']} plays {told['env_id']}](videos/{name}.jpg)](videos/{name}.mp4)\n\n"
        f"*{told['env_id']}, seed {told['train_seed']}, after {steps} steps: "
        f"the first of ten evaluation episodes{part}, "
        f"with a return of {told['returns'][0]:.1f}. "
        f"All ten: {told['mean']:.1f} ± {told['std']:.1f} (mean ± SD). "
        f"Trained by `{told['command']}`.*"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/film_agents.py RUN_FOLDER")
    print(block(film(Path(sys.argv[1]))))
