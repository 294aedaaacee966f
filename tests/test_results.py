"""scripts/: from run folders to results/, and from there to the published tables and plots."""

import json
import shutil

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.harness import FILES, PPO, ROOT, only_run, scalars, train
from tests.test_contract import edit
from tests.test_docs import load
from tests.test_speed import needs_uv


@pytest.fixture
def results(tmp_path):
    """The two scripts, with an empty folder in place of results/."""
    export, report = (load(ROOT / "scripts" / f"{x}.py") for x in ("export_runs", "build_results"))
    export.RESULTS = report.RESULTS = tmp_path
    return export, report, tmp_path


def test_export_takes_every_episode(results, tmp_path):
    export, _, folder = results
    for seed in (1, 2):
        train(PPO, tmp_path / str(seed), "--seed", seed, "--total-timesteps", 1024)
        (folder / "runs").mkdir(exist_ok=True)
        only_run(tmp_path / str(seed)).rename(folder / "runs" / str(seed))
    export.export("ppo", folder / "runs")
    rows = (folder / "ppo" / "CartPole-v1__2.csv").read_text().splitlines()
    assert rows[0] == "step,episodic_return,seconds"
    exported = [tuple(map(float, row.split(",")[:2])) for row in rows[1:]]
    assert (
        exported == scalars(folder / "runs" / "2")["charts/episodic_return"] and len(exported) > 20
    )
    seconds = [float(row.split(",")[2]) for row in rows[1:]]
    assert seconds == sorted(seconds) and 0 <= seconds[0] <= seconds[-1] < 600

    (folder / "again").mkdir()
    shutil.copytree(folder / "runs" / "1", folder / "again" / "a")
    shutil.copytree(folder / "runs" / "1", folder / "again" / "b")
    with pytest.raises(SystemExit, match="was run twice"):
        export.export("ppo", folder / "again")
    shutil.rmtree(folder / "again" / "b")
    edit(folder / "again" / "a", total_timesteps=500_000)
    with pytest.raises(SystemExit, match="is not finished"):
        export.export("ppo", folder / "again")
    with pytest.raises(SystemExit, match="no run of dqn"):
        export.export("dqn", folder / "runs")

    (folder / "runs" / "1").rename(folder / "first")
    export.export("ppo", folder / "runs", add=True)
    both = ["CartPole-v1__1", "CartPole-v1__2"]
    assert list(json.loads((folder / "ppo" / "runs.json").read_text())) == both
    assert sorted(path.stem for path in (folder / "ppo").glob("*.csv")) == both
    export.export("ppo", folder / "runs")
    assert list(json.loads((folder / "ppo" / "runs.json").read_text())) == both[1:]
    assert [path.stem for path in (folder / "ppo").glob("*.csv")] == both[1:], "or it would count"
    assert sorted(["B-v0__1", "A-v0__10", "A-v0__2"], key=export.place) == [
        *("A-v0__2", "A-v0__10"),
        "B-v0__1",
    ]


def make_run(folder, seed, *files, steps=512):
    """A run folder of ppo; each event file logs {tag: [(step, value), ...]}."""
    folder = folder / f"CartPole-v1__ppo__{seed}__1"
    for i, logged in enumerate(files):
        with SummaryWriter(folder, filename_suffix=f".{i}") as writer:
            for tag, rows in logged.items():
                for step, value in rows:
                    writer.add_scalar(tag, value, step, walltime=1000 + step)
        (events,) = folder.glob(f"*.{i}")
        events.rename(folder / f"events.out.tfevents.{i}")
    args = {"exp_name": "ppo", "seed": seed, "env_id": "CartPole-v1", "total_timesteps": steps}
    told = {"args": args, "start_time": 990, "commit": "", "device": "", "python": ""}
    (folder / "run.json").write_text(json.dumps(told | {"packages": {}}))
    (folder / "checkpoint.pt").touch()
    return folder


WHOLE = {"charts/SPS": [(512, 1)], "charts/episodic_return": [(500, 9)]}


def test_an_export_that_stops_writes_nothing(results, tmp_path):
    """The second run is unfinished: the first one's data and their commit stay together."""
    export, _, folder = results
    make_run(folder / "runs", 1, WHOLE)
    export.export("ppo", folder / "runs")
    before = {path.name: path.read_text() for path in (folder / "ppo").iterdir()}
    make_run(folder / "new", 1, WHOLE | {"charts/episodic_return": [(500, 8)]})
    make_run(folder / "new", 2, WHOLE, steps=99_999)
    with pytest.raises(SystemExit, match="__2__1 is not finished: it stands at step 512"):
        export.export("ppo", folder / "new")
    assert {path.name: path.read_text() for path in (folder / "ppo").iterdir()} == before


def test_a_finished_run_needs_no_checkpoint_if_the_journal_calls_it_done(results):
    """scripts/campaign.py keeps none."""
    export, _, folder = results
    run = make_run(folder / "runs", 1, WHOLE)
    (run / "checkpoint.pt").unlink()
    with pytest.raises(SystemExit, match="is not finished"):
        export.export("ppo", folder / "runs")
    journal = folder / "runs" / "benchmark" / "journal.jsonl"
    journal.parent.mkdir()
    told = {"run": "a", "event": "done", "folder": f"runs/{run.name}"}
    journal.write_text(json.dumps(told) + "\n")
    export.export("ppo", folder / "runs")
    assert (folder / "ppo" / "CartPole-v1__1.csv").exists()


def test_event_files_without_scalars_and_runs_without_episodes(results):
    """A run that was interrupted at once has an empty first file; seconds count from the next."""
    export, _, folder = results
    make_run(folder / "runs", 1, {}, WHOLE)
    export.export("ppo", folder / "runs")
    assert (folder / "ppo" / "CartPole-v1__1.csv").read_text().splitlines()[1] == "500,9,510.0"
    make_run(folder / "runs", 2, {"charts/SPS": [(512, 1)]}, steps=99_999)
    with pytest.raises(SystemExit, match=r"__2__1: no episode has ended$"):
        export.export("ppo", folder / "runs", partial=True)


def test_of_many_episodes_the_first_are_means(results):
    export, _, _ = results
    episodes = np.stack(
        [np.arange(7100.0), np.random.default_rng(1).random(7100), np.arange(7100.0) / 10], axis=1
    )
    thinned = np.array(export.thin(episodes))
    assert thinned.shape == (2100, 3)
    np.testing.assert_array_equal(thinned[-100:], episodes[-100:], "what counts in the table")
    np.testing.assert_allclose(
        np.average(thinned[:-100], axis=0, weights=[4] * 1000 + [3] * 1000), episodes[:-100].mean(0)
    )
    assert (np.diff(thinned[:, 0]) > 0).all()
    np.testing.assert_array_equal(export.thin(episodes[:2100]), episodes[:2100])


def test_a_run_that_was_cut_is_taken_on_request_and_called_so(results, tmp_path):
    """It logs every 100 steps: at 401 of 402 it is finished, at 401 of 1000 it is not."""
    export, report, folder = results
    flags = (
        "--env-id",
        "Pendulum-v1",
        "--learning-starts",
        200,
        "--total-timesteps",
        402,
        "--batch-size",
        16,
    )
    train(FILES["ddpg_continuous_action"], tmp_path, *flags)
    report.PLAN["ddpg_continuous_action"]["v1"] = {"Pendulum-v1": "none"}
    export.export("ddpg_continuous_action", folder / "runs")
    assert "\n| Pendulum-v1 | " in report.table("ddpg_continuous_action")

    edit(only_run(tmp_path), total_timesteps=1000)
    with pytest.raises(SystemExit, match="is not finished: it stands at step 401"):
        export.export("ddpg_continuous_action", folder / "runs")
    (events,) = only_run(tmp_path).glob("*tfevents*")
    events.write_bytes(events.read_bytes() + b"half a record")  # as a killed run may leave it
    with pytest.raises(SystemExit, match="tfevents"):
        export.export("ddpg_continuous_action", folder / "runs")
    export.export("ddpg_continuous_action", folder / "runs", partial=True)
    returns = [
        float(f"{value:g}") for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]
    ]
    table = report.table("ddpg_continuous_action")
    assert "| Pendulum-v1 | 1k | none | partial |" in table, "it is in no mean"
    assert table.endswith(f"| Pendulum-v1 | 1 | 0.401k of 1k | {np.mean(returns):.1f} |")


def test_report_counts_the_last_hundred_episodes(results):
    _, report, folder = results
    (folder / "ppo").mkdir()
    for env_id in report.PLAN["ppo"]["v1"]:
        for seed, last in ((1, 10), (2, 20)):
            rows = [f"{10 * i},{0 if i < 50 else last},{i}" for i in range(150)]
            (folder / "ppo" / f"{env_id}__{seed}.csv").write_text(
                "\n".join(["step,episodic_return,seconds", *rows])
            )
    row = "| CartPole-v1 | 1.49k | 15.00 ± 7.07 | 10.0, 20.0 | 490.04 ± 6.12 | partial |"
    assert row in report.table("ppo"), "the sample standard deviation"
    told = {
        f"CartPole-v1__{seed}": {"steps": steps, "args": {"total_timesteps": 500_000}}
        for seed, steps in ((1, 3e5), (2, 5e5))
    }
    (folder / "ppo" / "runs.json").write_text(json.dumps(told))
    table = report.table("ppo")
    row = "| CartPole-v1 | 500k | 20.00 | 20.0 | 490.04 ± 6.12 | partial |"
    assert row in table, "the run that was stopped is in no mean"
    assert table.endswith("| CartPole-v1 | 1 | 300k of 500k | 10.0 |")
    report.plot("ppo", folder / "ppo.png")
    assert (folder / "ppo.png").stat().st_size > 10_000
    told.pop("CartPole-v1__1")
    (folder / "ppo" / "runs.json").write_text(json.dumps(told))
    assert "300k of 500k" not in report.table("ppo"), "what runs.json does not name is left out"
    (folder / "ppo" / "runs.json").unlink()
    write_runs(folder / "ppo", "Pong-v5", [1.0])
    with pytest.raises(SystemExit, match=r"toml has no Pong-v5 in \[ppo.v1\]: .*/Pong-v5__1.csv"):
        report.table("ppo")


def test_status_of_a_row(results):
    """Mean and interval by hand: the quantile of Student's t for three values is 4.3027."""
    _, report, _ = results
    assert report.describe([480, 490, 500]) == ("490.00 ± 10.00", "465.2 to 514.8")
    assert report.judge([480, 490], report.published("490.00 ± 5.00")) == "partial"
    assert report.judge([480, 490, 500], report.published("none")) == "no published number"
    assert report.judge([480, 490, 500], report.published("490.00 ± 5.00")) == "reproduced"
    assert report.judge([200, 200, 200], report.published("200.00 ± 0.00")) == "reproduced", (
        "neither side varies"
    )
    assert report.judge([380, 390, 400], report.published("490.00 ± 5.00")) == "below"
    assert report.judge([580, 590, 600], report.published("490.00 ± 5.00")) == "better"
    assert report.judge([-14, 4000, 4200], report.published("4057.59 ± 658.78")) == "inconclusive"


def test_one_command_rebuilds_the_docs(tmp_path, monkeypatch):
    """Each folder of results/ with runs is in the plan, and what it builds is what is committed."""
    report = load(ROOT / "scripts" / "build_results.py")
    folders = {path.name for path in (ROOT / "results").iterdir() if path.is_dir()}
    with_runs = {path.parent.name for path in (ROOT / "results").glob("*/*.csv")}
    peers = {f"{folder}_peer" for folder, about in report.PLAN.items() if "peer" in about}
    assert {"ppo", "ablations"} <= with_runs <= set(report.PLAN) | peers <= folders
    docs = tmp_path / "docs" / "rl-algorithms"
    docs.mkdir(parents=True)
    for page in (ROOT / "docs" / "rl-algorithms").glob("*.md"):
        shutil.copy(page, docs)
    monkeypatch.setattr(report, "DOCS", docs)
    monkeypatch.setattr(report.report_ablations, "PAGE", docs / "ppo-details.md")
    monkeypatch.setattr(report.report_ablations, "ROOT", tmp_path)
    broken = (docs / "c51.md").read_text()
    (docs / "c51.md").write_text(broken.replace("| 500.00 ± 0.00", "| 123.45"))
    for folder in report.PLAN:
        report.build(folder)
    overview = f"<!-- results: overview -->\n\n{report.overview()}\n"
    committed = (ROOT / "docs" / "results.md").read_text()
    assert overview in committed, "run: python scripts/build_results.py"
    assert f"<!-- results: tally -->\n\n{report.tally()}\n" in committed
    highlights = f"<!-- results: highlights -->\n\n{report.highlights()}\n"
    assert highlights in (ROOT / "README.md").read_text(), "run: python scripts/build_results.py"
    assert all(f"| {stem} " in overview or f"[{stem}" in overview for stem in FILES)
    for page in docs.glob("*.md"):
        committed = (ROOT / "docs" / "rl-algorithms" / page.name).read_text()
        assert page.read_text() == committed, "run: python scripts/build_results.py"
    drawn = {path.stem for path in docs.glob("*.png")}
    assert drawn == {path.stem for path in (ROOT / "docs" / "rl-algorithms").glob("*.png")}
    curves = {path.name for path in (docs / "ablations").iterdir()}
    assert curves == {path.name for path in (ROOT / "docs/rl-algorithms/ablations").iterdir()}


def test_a_page_without_its_marks_is_refused(tmp_path):
    report = load(ROOT / "scripts" / "build_results.py")
    (tmp_path / "ppo.md").write_text("<!-- results: ppo_jax -->\n\n<!-- end of results -->\n")
    with pytest.raises(SystemExit, match=r"ppo\.md must have <!-- results: ppo -->"):
        report.write(tmp_path / "ppo.md", "ppo", "a table")


@pytest.mark.slow
def test_many_seeds_side_by_side():
    many_seeds = load(ROOT / "scripts" / "train_many_seeds.py")
    flags = dict(total_timesteps=2000, learning_starts=1000, buffer_size=1000, batch_size=16)
    returns = many_seeds.train("dqn_jax", "CartPole-v1", 2, **flags)
    assert len(returns) == 2 and returns[0] != returns[1]
    assert all(
        8 <= length <= 500 for episodes in returns for length in episodes
    )  # a step of CartPole pays 1
    assert all(1000 < sum(episodes) <= 2000 for episodes in returns)


def test_speed_is_the_data(tmp_path):
    """The published table, and a new measurement in place of that of the same file."""
    speed = load(ROOT / "scripts" / "build_speed.py")
    measurements = json.loads(speed.DATA.read_text())
    page = speed.PAGE.read_text()
    assert f"\n{speed.table(measurements)}\n" in page, "run: python scripts/build_speed.py"

    rates = {"ours": (600, 2.0), "sb3": (300, 3.0), "bare": (9000, 1.0)}
    figures = {name: {"steps": x, "seconds": y} for name, (x, y) in rates.items()}
    told = {"algorithm": "ppo", "settings": {"env_id": "CartPole-v1"}, "cores": 2, "machine": "x"}
    (tmp_path / "ppo.json").write_text(json.dumps(told | {"rounds": [figures, figures]}))
    new = speed.replace(measurements, speed.read_measurement(tmp_path / "ppo.json"))
    assert len(new) == len(measurements) and [told["file"] for told in new] == sorted(
        told["file"] for told in measurements
    )
    rows = [row for row in speed.table(new).splitlines() if row.startswith("| `ppo.py` |")]
    assert len(rows) == 1 and "| 300 | Stable-Baselines3 | 3.00 (3.00 to 3.00) | 2 |" in rows[0]
    speed.draw(new, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 5_000


def write_runs(folder, env_id, returns):
    """A run per return, of 120 episodes of which the last hundred have it."""
    folder.mkdir(exist_ok=True)
    for seed, value in enumerate(returns, start=1):
        rows = [f"{10 * i},{value if i >= 20 else -1e4},{i}" for i in range(120)]
        lines = "\n".join(["step,episodic_return,seconds", *rows])
        (folder / f"{env_id}__{seed}.csv").write_text(lines)


@pytest.mark.parametrize(
    ("theirs", "status"),
    [
        ((7.4, 7.6, 7.5), "on par"),
        ((7.6, 9.6, 8.0), "on par"),
        ((8.9, 9.0, 9.1), "below"),
        ((7.5655, 7.566, 7.5665), "on par"),  # as they are, not as 7.57 ± 0.00
        ((8.0, 7.8, 7.9), "inconclusive"),
        ((1.0, 2.0, 3.0), "better"),
        ((7.4, 7.6), "no published number"),
    ],
)
def test_a_row_stands_beside_another_library(results, theirs, status):
    _, report, folder = results
    write_runs(folder / "ppo_multidiscrete", "Taxi-v4", (7.2, 7.6, 7.9))
    write_runs(folder / "ppo_multidiscrete_peer", "Taxi-v4", theirs)
    table = report.table("ppo_multidiscrete")
    other = "none"
    if len(theirs) == 3:
        other = f"sb3-contrib's MaskablePPO: {np.mean(theirs):.2f} ± {np.std(theirs, ddof=1):.2f}"
    assert f"| 7.2, 7.6, 7.9 | {other} | {status} |" in table
    report.plot("ppo_multidiscrete", folder / "ppo.png")
    assert (folder / "ppo.png").stat().st_size > 10_000


def test_a_library_that_logs_means_counts_with_the_last_one(results):
    _, report, folder = results
    name = "ppo_continuous_action_jax"
    env_id = "brax-inverted_pendulum"
    write_runs(folder / name, env_id, (7.2, 7.6, 7.9))
    write_runs(folder / f"{name}_peer", env_id, (7.4, 7.6, 7.5))
    for path in (folder / f"{name}_peer").glob("*.csv"):
        with path.open("a") as file:
            file.write("\n100000,9,1")
    assert np.mean(report.returns_of_peer(name, env_id)) < 8
    runs = {f"{env_id}__{seed}": {"rows": "means of 100 episodes"} for seed in (1, 2, 3)}
    (folder / f"{name}_peer" / "runs.json").write_text(json.dumps(runs))
    assert report.returns_of_peer(name, env_id) == [9, 9, 9]


def test_the_tally_counts_published_numbers_and_libraries_apart(results):
    _, report, folder = results
    write_runs(folder / "ppo", "CartPole-v1", (499.0, 500.0, 500.0))
    write_runs(folder / "ppo", "Acrobot-v1", (-190.0, -180.0, -185.0))
    write_runs(folder / "ppo_multidiscrete", "Taxi-v4", (7.2, 7.6, 7.9))
    write_runs(folder / "ppo_multidiscrete_no_mask", "Taxi-v4", (-200.0, -200.1, -200.2))
    assert "**1 of 2** results" in report.tally() and "number; 1 below." in report.tally()
    assert "**0 of 0** match" in report.tally() and "**1 of " in report.tally()
    write_runs(folder / "ppo_multidiscrete_peer", "Taxi-v4", (7.4, 7.6, 7.5))
    assert "**1 of 2** results" in report.tally() and "**1 of 1** match" in report.tally()
    assert "**2 of " in report.tally(), "files"
    (folder / "speed.json").write_text("[]")
    rows = [line for line in report.overview().splitlines() if "| Taxi-v4 |" in line]
    assert len(rows) == 2 and ["[video](" in row for row in rows] == [True, False], (
        "the film is of the agent with masks"
    )
    assert "MaskablePPO" in report.overview() and "MaskablePPO" not in report.highlights()


def test_every_comparison_can_be_made_again():
    """Each [folder.peer] names environments of its folder, and a library that can be installed."""
    peers = load(ROOT / "scripts" / "train_peers.py")
    compared = {folder: about for folder, about in peers.PLAN.items() if "peer" in about}
    assert {peers.file_of(folder) for folder in compared} == set(peers.PEERS)
    for folder, about in compared.items():
        assert about["peer"].keys() <= about["v1"].keys()
        assert {about["v1"][env_id] for env_id in about["peer"]} == {"none"}, "v1 comes first"
        program, packages = peers.PEERS[peers.file_of(folder)]
        assert (peers.measure.PROGRAMS / program.split()[0]).exists()
        assert len(list(peers.measure.with_packages(packages))) >= 2 * len(packages.split()), (
            "a package is not in constraints.txt"
        )


@needs_uv
def test_another_library_trains_what_we_trained(tmp_path, monkeypatch, capsys):
    """Real runs: ours, then sb3-contrib's with the same settings, steps and seed."""
    peers = load(ROOT / "scripts" / "train_peers.py")
    flags = ["--total-timesteps", 1024, "--env-id", "Taxi-v4"]
    train(FILES["ppo_multidiscrete"], tmp_path, *flags)
    export = load(ROOT / "scripts" / "export_runs.py")
    export.RESULTS = tmp_path / "results"
    export.RESULTS.mkdir()
    export.export("ppo_multidiscrete", tmp_path / "runs")
    monkeypatch.setattr(peers, "RESULTS", export.RESULTS)
    peers.main("ppo_multidiscrete")
    told = json.loads((tmp_path / "results/ppo_multidiscrete_peer/runs.json").read_text())
    (run,) = told.values()
    assert run["args"]["total_timesteps"] == run["steps"] == 1024 and run["args"]["seed"] == 1
    assert "sb3-contrib" in run["packages"]
    rows = (tmp_path / "results/ppo_multidiscrete_peer/Taxi-v4__1.csv").read_text().splitlines()
    steps, returns, _ = np.array([row.split(",") for row in rows[1:]], dtype=float).T
    assert rows[0] == "step,episodic_return,seconds"
    assert (np.diff(steps) >= 0).all() and 0 < steps[-1] <= 1024
    assert ((returns >= -2000) & (returns <= 20)).all()

    capsys.readouterr()
    peers.main("ppo_multidiscrete")
    assert not capsys.readouterr().out, "what is there is not trained again"
    with pytest.raises(SystemExit, match=r"no \[ppo.peer\]"):
        peers.main("ppo")
