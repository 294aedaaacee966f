"""README, CONTRIBUTING and docs: commands run; lines, tests, files and tables are up to date."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from cleanrl_utils import enjoy
from tests.harness import ROOT, train, untrained_teacher
from tests.test_packaging import UV

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES += [*sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN_HERE = """
# it is what runs this test
make test
make test PYTHON=3.13
# run by test_export
python -m cleanrl_utils.export runs/<run> policy.safetensors
python -m cleanrl_utils.export runs/<run> policy.json
python -m cleanrl_utils.export runs/<run> policy.onnx
# run by test_results.test_one_command_rebuilds_the_docs; for one file, it runs here
python scripts/build_results.py
# run by test_enjoy.test_enjoy_in_a_window, in real time
python -m cleanrl_utils.enjoy runs/<run> --render human         # in a window
# run by test_new_file, and before the other commands
make new NAME=my_ppo FROM=ppo
# run by test_site
mkdocs build --strict
# run by test_packaging.test_bare_file_runs_in_an_empty_folder
uv run cleanrl/ppo.py
# the first is run by test_speed, the others are the same for longer
python -m cleanrl_utils.speed ppo
python -m cleanrl_utils.speed dqn
python -m cleanrl_utils.speed dqn_jax
python -m cleanrl_utils.speed ppo_jax
python -m cleanrl_utils.speed ppo_jax --peers rejax --total-timesteps 1000000
python -m cleanrl_utils.speed pqn_jax --peers rejax --rounds 3
python -m cleanrl_utils.speed pqn_atari_envpool --rounds 1 --total-timesteps 3072
python -m cleanrl_utils.speed td3_continuous_action --rounds 2 --total-timesteps 1500
python -m cleanrl_utils.speed sac_continuous_action --rounds 2 --total-timesteps 1500
# in test_speed
python -m cleanrl_utils.speed sac_continuous_action --rounds 3 --total-timesteps 2400 \
--side-by-side
# run by test_hub.test_commands_of_the_docs, with a Hub
python -m cleanrl_utils.hub push runs/<run> --hf-entity me
python -m cleanrl_utils.hub pull me/CartPole-v1-ppo-seed1
python -m cleanrl_utils.hub pull cleanrl/CartPole-v1-dqn-seed1
python -m cleanrl_utils.enjoy hf://me/CartPole-v1-ppo-seed1
python -m cleanrl_utils.enjoy hf://cleanrl/CartPole-v1-dqn-seed1 --epsilon 0.05
python -m cleanrl_utils.enjoy --exp-name dqn --env-id CartPole-v1
python -m cleanrl_utils.enjoy --exp-name ppo --env-id CartPole-v1 --hf-entity me --run-seed 1
# run by test_contract.test_trackio_offline_really_logs
CLEANRL_TRACKER=trackio python cleanrl/ppo.py --track --wandb-project-name cleanRL
# run by test_enjoy.test_enjoy_the_newest_run: here, the newest one is of any file
python -m cleanrl_utils.enjoy                                   # the newest run in runs/
# run by test_enjoy.test_snapshots_are_what_checkpoints_learned
python -m cleanrl_utils.enjoy runs --snapshots
# run by test_enjoy.test_grid_of_snapshots
python -m cleanrl_utils.enjoy runs/<run> --grid
# a server, and not one of ours
uvx optuna-dashboard sqlite:///cleanrl_hpopt.db
# run by test_tuner.test_machines_share_a_study_through_postgresql
python -m cleanrl_utils.tuner scripts/tune_ppo.py --workers 4 --storage \
postgresql+psycopg://user@host/database
# run by test_rlops, on runs that have these tags
python -m cleanrl_utils.rlops --exp-name ppo --tags v1 v2 --report
python -m cleanrl_utils.rlops --filters 'ppo?tag=v1' 'ppo?tag=v2'
python -m cleanrl_utils.rlops --filters 'ppo?norm_adv=True&cl=on' 'ppo?norm_adv=False&cl=off' \
--env-ids CartPole-v1
python -m cleanrl_utils.rlops --filters 'ppo?cl=my PPO' 'results:ppo' --env-ids CartPole-v1
# as those of test_trial, for longer
python -m cleanrl_utils.trial my_ppo.py --against cleanrl/ppo.py --env-ids CartPole-v1 Acrobot-v1 \
--budget 20m
# needs Weights & Biases; run by test_rlops against a server of its own
python -m cleanrl_utils.rlops --filters \
'?we=openrlbenchmark&wpn=cleanrl&metric=charts/episodic_return' \
'ppo_continuous_action?tag=rlops-pilot&cl=CleanRL PPO' --filters \
'?we=openrlbenchmark&wpn=sb3&ceik=env&cen=algo&metric=rollout/ep_rew_mean' 'ppo?cl=SB3 PPO' \
--env-ids HalfCheetah-v4 --env-ids HalfCheetahBulletEnv-v0
python -m cleanrl_utils.rlops --exp-name ddpg_continuous_action --wandb-project-name cleanrl \
--wandb-entity openrlbenchmark --tags 'pr-299' 'rlops-pilot' --env-ids HalfCheetah-v4 Walker2d-v4 \
--output-filename compare.png --scan-history --metric-last-n-average-window 100 --report
# as test_benchmark.test_dry_run_sees_what_cannot_work
python -m cleanrl_utils.benchmark --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 --command \
"python cleanrl/ppo.py" --num-seeds 3 --workers 2 --dry-run
# as those of test_benchmark, for longer
python -m cleanrl_utils.benchmark --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 --command \
"python cleanrl/ppo.py" --num-seeds 3 --workers 2
# run by test_benchmark, on a cluster of its own
python -m cleanrl_utils.benchmark --env-ids CartPole-v1 --command "python cleanrl/ppo.py" \
--workers 100 --backend ray --ray-address 10.0.0.1:6379
python -m cleanrl_utils.benchmark --env-ids CartPole-v1 Acrobot-v1 --command "python \
cleanrl/ppo.py" --workers 20 --backend slurm --slurm-gpus-per-task 0 --slurm-total-cpus 1
# run by test_benchmark, with moto's server
python -m cleanrl_utils.benchmark --env-ids CartPole-v1 Acrobot-v1 --command "python \
cleanrl/ppo.py" --backend aws-batch --aws-job-queue my-queue --aws-job-definition cleanrl \
--aws-s3 s3://my-bucket/ppo
# run by test_ppo_atari_multigpu.test_torchrun_and_kill_9, as the next ones are by other tests there
torchrun --nproc-per-node 2 cleanrl/ppo_atari_multigpu.py --local-num-envs 4
# as those of test_check and test_trial
python -m cleanrl_utils.check cleanrl/my_ppo.py --against ppo --quick
python -m cleanrl_utils.trial cleanrl/my_ppo.py --against cleanrl/ppo.py --env-ids CartPole-v1 \
Acrobot-v1 --total-timesteps 50000 --budget 14m
# minutes each: their verdicts are in docs/trial/pairs.tsv, which test_trial compares with the page
python -m cleanrl_utils.trial my_ppo.py --against cleanrl/ppo.py --env-ids CartPole-v1 \
--total-timesteps 5000
python -m cleanrl_utils.trial tuned_ppo.py --against cleanrl/ppo.py --env-ids CartPole-v1 \
--total-timesteps 25000
python -m cleanrl_utils.trial unnormalized_ppo.py --against cleanrl/ppo.py --env-ids \
small_rewards:SmallRewards-v1 --ranges small_rewards:SmallRewards-v1=0,0.5 --total-timesteps 30000
python -m cleanrl_utils.trial other_stream_ppo_jax.py --against cleanrl/ppo_jax.py --env-ids \
CartPole-v1 --total-timesteps 100000 --seeds-per-program 16 --budget 30m
# long: test_check compares the table that it writes with its data
python scripts/check_every_file.py
# run by test_check, as the whole tool takes minutes
python -m cleanrl_utils.check my_ppo.py
python -m cleanrl_utils.check my_ppo.py --quick
python -m cleanrl_utils.check cleanrl/my_ppo.py --quick
python -m cleanrl_utils.check my_ppo.py --quick --only core_10
python -m cleanrl_utils.check my_ppo.py --quick --changed "core 7" "core 13"
python -m cleanrl_utils.check my_ppo.py --against ppo --quick
# run by test_time_to_score (slow)
sh benchmark/fast/cartpole.sh
python scripts/time_to_score.py benchmark/fast/cartpole.sh --score 475
# needs a GPU
torchrun --nproc-per-node 2 cleanrl/ppo_atari_multigpu.py --local-num-envs 4 --device-ids 0 0
# needs two GPUs
torchrun --nproc-per-node 2 cleanrl/ppo_atari_multigpu.py --local-num-envs 4 --backend nccl
# needs two machines, or test_two_hosts
torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr 10.77.0.1 \
cleanrl/ppo_atari_multigpu.py --local-num-envs 4
torchrun --nnodes 2 --nproc-per-node 1 --node-rank 1 --master-addr 10.77.0.1 \
cleanrl/ppo_atari_multigpu.py --local-num-envs 4
# as the first torchrun command
torchrun --nproc-per-node 2 cleanrl/ppo_atari_multigpu.py --resume runs/<run>
# run by test_ppo_continuous_action_isaacgym.test_mjlab_cartpole (slow)
python cleanrl/ppo_continuous_action_isaacgym.py --env-id Mjlab-Cartpole-Balance --num-envs 64
# these download models of robots
python cleanrl/fast_sac_jax.py
python cleanrl/fast_sac_jax.py --env-id playground/G1JoystickFlatTerrain --no-pushes
python cleanrl/fast_td3_jax.py
python cleanrl/fast_td3_jax.py --env-id playground/G1JoystickFlatTerrain --no-pushes
python cleanrl/fast_td3_jax.py --env-id playground/Go1JoystickFlatTerrain --num-updates 8 \
--std-min 0.2 --std-max 0.8 --policy-noise 0.2
# run by test_ppo_trxl.test_mortar_mayhem, where memory-gym is installed
uv pip install --no-deps -r requirements/memory_gym.in
python cleanrl/ppo_trxl.py
# needs Isaac Lab
python cleanrl/ppo_continuous_action_isaacgym.py --env-id Isaac-Ant-v0
# run by test_ppo_jaxtari_jax, in a folder of its own
python scripts/draw_jaxtari_sprites.py
# run by test_plain_pip (slow), and resolved by test_packaging
pip install -r requirements/requirements.txt
# resolved by test_packaging; they would change the environment of the tests
pip install -r requirements/requirements-mujoco.txt
pip install "jax[cuda12]" -c constraints.txt
"""
NOT_RUN_HERE = [line for line in NOT_RUN_HERE.splitlines() if line[:1] not in ("", "#")]


def commands():
    found = {}
    for page in [page for page in PAGES if page.parent.name != "tutorials"]:  # see test_tutorials
        for block in re.findall(r"^ *```bash\n(.*?)^ *```$", page.read_text(), re.M | re.S):
            for line in block.splitlines():
                found.setdefault(line.strip(), page.name)
    seen, params = set(), []
    for command in (command for command in found if command not in NOT_RUN_HERE):
        algorithm = re.match(r"python (cleanrl/\w+.py)|", command)[
            1
        ]  # after its first command, the others take minutes
        is_slow = algorithm in seen or re.search(
            r"_jax(_scan)?\.py|cleanrl_utils\.tuner|^pytest", command
        )  # and so do these
        params.append(pytest.param(command, marks=[pytest.mark.slow] if is_slow else ()))
        seen |= {algorithm} - {None}
    return params


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the working tree, with this environment as its .venv and one run in runs/."""
    folder = tmp_path_factory.mktemp("docs") / "cleanrl"
    shutil.copytree(
        ROOT,
        folder,
        ignore=shutil.ignore_patterns(".git", ".venv", ".uv", "runs", "wandb", "gpu", ".*_cache"),
    )
    os.symlink(sys.prefix, folder / ".venv")
    train(folder / "cleanrl" / "ppo.py", folder, "--total-timesteps", 512)
    subprocess.run([sys.executable, "scripts/new_file.py", "my_ppo", "ppo"], cwd=folder, check=True)
    return folder


def environment():
    path = [
        str(Path(sys.executable).parent),
        *([str(Path(UV).parent)] if UV else []),
        os.environ["PATH"],
    ]
    return os.environ | {"PATH": os.pathsep.join(path), "WANDB_MODE": "offline", "PYTHONPATH": ""}


@pytest.mark.parametrize("command", commands())
def test_command_runs(checkout, command, monkeypatch):
    (run,) = [path for path in (checkout / "runs").iterdir() if "CartPole-v1__ppo__1" in path.name][
        :1
    ]
    words = command.replace("<run>", run.name)
    if "dm_control/" in words:
        pytest.importorskip("dm_control", reason="dm_control has no build for Python 3.13")
    if "--teacher" in words:
        teacher = untrained_teacher(words.split()[1], "BreakoutNoFrameskip-v4")
        words = words.replace("runs/<teacher>", str(teacher))
        words += " --teacher-eval-episodes 1 --teacher-steps 16 --offline-steps 2"
    algorithm = re.match(r"python (?:-i )?cleanrl/(\w+).py", words)
    if words.startswith("tensorboard"):
        return check_tensorboard(checkout, words)
    if words == "make train":
        if (
            not UV or sys.prefix == sys.base_prefix
        ):  # a Python that is not an environment's is not make's to change
            pytest.skip("needs uv and an environment")
        words += ' FLAGS="--total-timesteps 1024"'
    elif "cleanrl_utils.tuner" in words:
        words += " --num-trials 1 --num-seeds 1"
    elif algorithm and not re.search(r"--help|--resume", words):
        num_envs = int((re.search(r"--num-envs (\d+)", words) or [0, 8])[1])
        large = f" --num-steps 4 --update-epochs 1 --total-timesteps {4 * num_envs}"
        large = (
            " --learning-starts 16 --total-timesteps 32"
            if re.match("dqn|c51|rainbow|sac|qdagger", algorithm[1])
            else large
        )
        off_policy = " --learning-starts 100 --total-timesteps 200"  # enough to learn a little
        heavy = " --learning-starts 16 --total-timesteps 32 --batch-size 16"
        small = off_policy if re.match("ddpg|td3|sac", algorithm[1]) else " --total-timesteps 1024"
        small = heavy if re.match("tqc|droq|crossq", algorithm[1]) else small
        if algorithm[1].startswith("simba"):  # whose updates take half a minute to compile
            small = " --total-timesteps 32 --q-width 16"
        if algorithm[1].startswith("fast"):
            small = " --batch-size 32 --learning-starts 128 --num-envs 32 --total-timesteps 320"
        if re.fullmatch("[pr]po_continuous_(action|lstm)", algorithm[1]):  # 2,048 steps a rollout
            small = " --num-steps 128 --total-timesteps 1024"
        if algorithm[1] == "ppo_trxl":  # 16,384 steps a rollout
            small = " --num-steps 16 --num-envs 8 --trxl-dim 16 --total-timesteps 256"
        if algorithm[1] == "ppo_dict":
            small = " --num-steps 32 --total-timesteps 1024"
        few = " --num-envs 8 --num-steps 8 --num-minibatches 2 --total-timesteps 64"  # of thousands
        small = (
            few
            if algorithm[1] in ("ppo_continuous_action_jax", "ppo_continuous_action_isaacgym")
            else small
        )
        words += large if re.search("_(jaxt|at)ari", algorithm[1]) else small
        words += " --num-steps 32" if algorithm[1] == "ippo_jax" else ""
        words += " --num-envs 8 --num-steps 16" if algorithm[1] == "mappo_rnn_jax" else ""
        if "_pettingzoo" in algorithm[1]:
            words += " --num-envs 4 --num-steps 8 --num-minibatches 2 --elo-games 4 --elo-steps 4"
        if "_procgen" in algorithm[1]:
            words += " --num-envs 4 --num-steps 4 --num-minibatches 1 --total-timesteps 32"
            words += " --n-iteration 1" if algorithm[1] == "ppg_procgen" else ""
        if "_rnd" in algorithm[1]:
            words += f" --num-envs 4{large} --num-iterations-obs-norm-init 1"
    if algorithm and "_jaxtari" in algorithm[1]:
        monkeypatch.setenv(
            "XDG_DATA_HOME", load(ROOT / "tests" / "test_ppo_jaxtari_jax.py").pictures()
        )
    words = words.replace("export_runs.py ppo runs", "export_runs.py ppo published")
    if (
        "published" in words
    ):  # results are exported from finished runs of all environments; here, one
        shutil.copytree(run, checkout / "published" / run.name, dirs_exist_ok=True)
    if words.startswith(
        "python -m cleanrl_utils.enjoy"
    ):  # here, where the imports are done already
        monkeypatch.chdir(checkout)
        monkeypatch.setattr(sys, "argv", ["enjoy", *shlex.split(words)[3:]])
        return enjoy.main()
    if algorithm and words.endswith("--help"):
        with pytest.raises(SystemExit) as end:
            train(checkout / "cleanrl" / f"{algorithm[1]}.py", checkout, "--help")
        assert end.value.code == 0
        return
    if algorithm and not re.search(r"-i |--track|[&|;<>$]", words):
        before = set((checkout / "runs").iterdir())
        train(checkout / "cleanrl" / f"{algorithm[1]}.py", checkout, *shlex.split(words)[2:])
        assert "--resume" in words or set((checkout / "runs").iterdir()) > before
        return
    done = subprocess.run(
        ["bash", "-c", words],
        cwd=checkout,
        env=environment(),
        capture_output=True,
        text=True,
        input="",
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"


def test_models_load_as_the_page_for_users_of_v1_says(checkout):
    (run,) = [path for path in (checkout / "runs").iterdir() if "CartPole-v1__ppo__1" in path.name][
        :1
    ]
    page = (ROOT / "docs" / "coming-from-v1.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-c", snippet.replace("<run>", run.name)],
        cwd=checkout,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert re.fullmatch(r"return \d+\.0\n", done.stdout), done.stderr


def check_tensorboard(checkout, words):
    server = subprocess.Popen(
        [*words.split(), "--port", "0"],
        cwd=checkout,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = next(found[0] for line in server.stderr if (found := re.findall(r"http://\S+", line)))
        for _ in range(60):
            tags = (
                urllib.request.urlopen(f"{url.rstrip('/')}/data/plugin/scalars/tags")
                .read()
                .decode()
            )
            if "charts/episodic_return" in tags:
                break
            time.sleep(0.5)
        assert "charts/episodic_return" in tags
    finally:
        server.kill()


def test_no_promise_is_stale():
    everything = "\n".join(page.read_text() for page in PAGES)
    assert [command for command in NOT_RUN_HERE if command not in everything] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_plain_pip(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "-r", ROOT / "requirements" / "requirements.txt"],
        check=True,
    )
    subprocess.run(
        [python, ROOT / "cleanrl" / "ppo.py", "--total-timesteps", "1024"], cwd=tmp_path, check=True
    )
    assert list(tmp_path.glob("runs/*/checkpoint.pt"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_tests_and_files_exist(page):
    text = page.read_text()
    lines = load(ROOT / "scripts" / "number_lines.py")
    assert lines.renumber(text) == text, "run: python scripts/number_lines.py"
    assert len(lines.LINK.findall(text)) == text.count("[line "), (
        "a link to a line that scripts/number_lines.py does not see"
    )
    for target in re.findall(r"\]\((?!https?://)([^)#\s]+)", text):
        assert (page.parent / target).exists(), target
    for test, path in re.findall(r"\[`(test_\w+)`\]\(([^)\s]+)\)", text):
        assert f"def {test}(" in (page.parent / path).read_text(), test


# of each family: the file that shows the details, their number, and the page that explains them
DETAILS = {
    "core": ("ppo", 13, "ppo.md"),
    "atari": ("ppo_atari", 9, "ppo-atari.md"),
    "continuous": ("ppo_continuous_action", 9, "ppo-continuous-action.md"),
    "lstm": ("ppo_atari_lstm", 5, "ppo-atari-lstm.md"),
    "trxl": ("ppo_trxl", 8, "ppo-trxl.md"),
    "dict": ("ppo_dict", 5, "ppo-dict.md"),
    "multidiscrete": ("ppo_multidiscrete", 1, "ppo-multidiscrete.md"),
    "selfplay": ("ppo_pettingzoo_ma_atari", 8, "ppo-self-play.md"),
    "rpo": ("rpo_continuous_action", 1, "rpo.md"),
    "dqn": ("dqn", 6, "dqn.md"),
    "frames": ("dqn_atari", 2, "dqn-atari.md"),
    "pqn": ("pqn", 9, "pqn.md"),
    "c51": ("c51", 4, "c51.md"),
    "qrdqn": ("qrdqn", 4, "qrdqn.md"),
    "rainbow": ("rainbow_atari", 7, "rainbow.md"),
    "qdagger": ("qdagger_dqn_atari", 7, "qdagger.md"),
    "ddpg": ("ddpg_continuous_action", 6, "ddpg.md"),
    "td3": ("td3_continuous_action", 3, "td3.md"),
    "sac": (
        "sac_(?:continuous_action|atari)",
        6,
        "sac.md sac-atari.md",
    ),  # the sixth is shown by the second of them
    "tqc": ("tqc_continuous_action_jax", 3, "tqc.md"),
    "droq": ("droq_continuous_action_jax", 4, "droq.md"),
    "crossq": ("crossq_continuous_action_jax", 3, "crossq.md"),
    "simba": ("simba_v2_sac_jax", 8, "simba-v2.md"),
    "fasttd3": ("fast_td3_jax", 10, "fast-td3.md"),
    "fastsac": ("fast_sac_jax", 5, "fast-sac.md"),
    "multigpu": ("ppo_atari_multigpu", 10, "ppo-multigpu.md"),
    "rnn": ("ppo_rnn_jax", 3, "ppo-rnn-jax.md"),
    "jaxtari": ("ppo_jaxtari_jax", 4, "ppo-jaxtari-jax.md"),
    "team": ("ippo_jax", 6, "ippo-jax.md"),
    "mappo": ("mappo_rnn_jax", 4, "mappo-rnn-jax.md"),
    "physics": ("ppo_continuous_action_jax", 5, "ppo-continuous-action-jax.md"),
    "rnd": ("ppo_rnd_envpool", 10, "ppo-rnd.md"),
    "isaac": ("ppo_continuous_action_isaacgym", 6, "ppo-isaacgym.md"),
    "procgen": ("ppo_procgen", 3, "ppo-procgen.md"),
    "ppg": ("ppg_procgen", 9, "ppg.md"),
    "xla": (
        "ppo_atari_envpool_xla_jax(?:_scan)?",
        7,
        "ppo-envpool-xla.md",
    ),  # the last is shown by the second of them
}


@pytest.mark.parametrize("family", DETAILS)
def test_every_marked_detail_is_explained_and_tested(family):
    file, count, page = DETAILS[family]
    folder = ROOT / "docs" / "rl-algorithms"
    text = "".join((folder / name).read_text() for name in page.split())
    explained = re.findall(
        rf'cleanrl/{file}.py#L\d+ "({family} \d+)"\), \[`test_({family}_\d+)_', text
    )
    assert explained == [(f"{family} {n}", f"{family}_{n}") for n in range(1, count + 1)]


@pytest.mark.parametrize(
    "file", sorted((ROOT / "cleanrl").glob("*.py")), ids=lambda file: file.stem
)
def test_no_mark_without_a_detail(file):
    """Each mark has its detail, on a page that the file's docstring names."""
    docstring, source = file.read_text().split("class Args")
    pages = re.findall(r"docs/rl-algorithms/(?:\{([^}]*)\}|([\w-]+))\.md", docstring)
    told = {f"{name}.md" for names in pages for name in "".join(names).split(",")}
    for family, numbers in re.findall(r"\[([a-z][a-z0-9]*) (\d+(?:, \d+)*)\]", source):
        assert family in DETAILS and max(map(int, numbers.split(", "))) <= DETAILS[family][1]
        assert told & {*DETAILS[family][2].split()}, f"the docstring names no page of [{family}]"


REPORT = load(ROOT / "scripts" / "build_results.py")


@pytest.mark.parametrize("folder", REPORT.TABLES)
def test_published_table_is_the_data(folder):
    table = REPORT.table(folder)
    pages = "".join(page.read_text() for page in PAGES)
    assert table in pages, f"run: python scripts/build_results.py {folder}\n{table}"
