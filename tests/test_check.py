"""python -m cleanrl_utils.check: the ten mistakes are named, a copy is clean, runs are placed."""

import html
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from cleanrl_utils import bands
from cleanrl_utils.check import __main__ as check
from cleanrl_utils.check import explain, parent, plugin, race, sampler
from cleanrl_utils.rlops import report
from tests import test_ppo
from tests.harness import FILES, ROOT, only_run, train
from tests.test_docs import load

MISTAKES = tomllib.loads((ROOT / "tests" / "mistakes.toml").read_text())["mistake"]
PPO = FILES["ppo"].read_text()


def edit(source, *pairs):
    for old, new in pairs:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def run_check(folder, *words):
    command = [sys.executable, "-m", "cleanrl_utils.check", *map(str, words)]
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=os.environ | path, capture_output=True, text=True
    )


# what is broken, in plain words


def outcome_of(test, file, capfd=None, **arguments):
    with pytest.raises(BaseException) as error:
        test(file=file, **arguments)
    stderr = capfd.readouterr().err if capfd else ""
    return explain.explain(SimpleNamespace(originalname=test.__name__), error, file, stderr)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake["name"])
def test_mistakes_are_named(mistake, tmp_path, monkeypatch):
    """By the test that notices it, in this process."""
    file = tmp_path / f"{mistake['file']}.py"
    file.write_text(edit(FILES[file.stem].read_text(), (mistake["old"], mistake["new"])))
    module, function = mistake["test"].split(".")
    test = getattr(importlib.import_module(f"tests.{module}"), function)
    arguments = {"tmp_path": tmp_path / "run"} | mistake.get("arguments", {})
    if "monkeypatch" in inspect.signature(test).parameters:
        arguments["monkeypatch"] = monkeypatch
    outcome, seen = outcome_of(test, file, **arguments)
    assert outcome == "broken" and mistake["seen"] in seen, seen


@pytest.mark.parametrize(
    ("old", "new", "outcome", "seen"),
    [
        ("sample(log_probs)", "draw(log_probs)", "untested", "the file has no sample"),
        ("total_timesteps", "total_steps", "untested", "rejected: --total-timesteps"),
        ("log_probs.exp()", "log_probs.exp().nothing", "broken", "has no attribute 'nothing'"),
        ("T, N = args", "T, N = sys.exit('no luck') or args", "broken", "stops: no luck"),
    ],
)
def test_what_is_gone_is_not_what_is_wrong(tmp_path, capfd, old, new, outcome, seen):
    file = tmp_path / "ppo.py"
    file.write_text(PPO.replace(old, new))
    test = test_ppo.test_sampled_actions_follow_the_policy
    found = outcome_of(test, file, capfd, tmp_path=tmp_path)
    assert found[0] == outcome and seen in found[1], found


def test_a_busy_machine_is_no_mistake():
    def test_two_hosts(file):
        raise subprocess.TimeoutExpired(["torchrun"], 180)

    found = outcome_of(test_two_hosts, FILES["ppo_atari_multigpu"])
    assert found == ("untested", "not over in 180 s: it hangs, or the machine is busy")


def test_a_test_that_cannot_tell_finds_no_mistake():
    def test_core_8_the_clip(file):
        raise AssertionError("the policy must have moved far enough for the clip to matter")

    outcome, seen = outcome_of(test_core_8_the_clip, FILES["ppo"])
    assert (outcome, seen[:42]) == ("untested", "its test cannot tell: the policy must have")
    record = {"test": "test_core_8_the_clip", "outcome": outcome, "seen": seen}
    rows = check.judge_details(parent.list_details("ppo", PPO), [record], PPO)
    (row,) = (row for row in rows if "[core 8]" in row.what)
    assert (row.verdict, row.seen) == ("ok", f"the code is its parent's; {seen}")


# the parent


@pytest.mark.parametrize("stem", ["ppo", "rpo_continuous_action", "dqn_atari", "c51_jax"])
def test_the_parent_is_found(stem):
    source = FILES[stem].read_text()
    assert parent.find_parent(source) == (stem, 1)
    assert parent.find_parent(edit(source, ("class Args:", "class Args:\n    x: int = 1"))) == (
        stem,
        pytest.approx(1, abs=0.01),
    )
    assert parent.find_parent(source, "ppo")[0] == "ppo"


def test_details_have_titles_and_marks():
    source = edit(
        PPO, ("# [core 7]", "# [core 7 changed]"), ("# [core 8]", ""), ("  # [core 4]", "")
    )
    details = {detail.tag: detail for detail in parent.list_details("ppo", source, ["core 4"])}
    assert list(details) == [f"core {n}" for n in range(1, 14)]
    assert details["core 5"].title == "Generalized advantage estimation"
    assert [tag for tag in details if not details[tag].is_marked] == ["core 4", "core 8"]
    assert [tag for tag in details if details[tag].is_changed] == ["core 4", "core 7"]
    for stem in FILES:
        assert all(detail.title for detail in parent.list_details(stem, "")), stem


def test_tests_run_with_the_parents_defaults():
    other = edit(
        PPO, ("2.5e-4  # init", "1e-3  # init"), ("num_envs: int = 4", "num_envs: int = 8")
    )
    differ, own, gone = parent.compare_flags(other + "\n", PPO)
    assert differ == {"learning_rate": ("1e-3", "2.5e-4"), "num_envs": ("8", "4")}
    assert (own, gone) == ([], [])
    assert parent.with_defaults_of(other, PPO) == PPO


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (dict(file="nowhere.py"), "cannot read nowhere.py: No such file or directory"),
        (dict(file="broken.py"), "cannot check broken.py: it is not Python"),
        (dict(file="other.py"), "no file of cleanrl/ is like this one"),
        (dict(file="other.py", against="pqo"), "--against: there is no cleanrl/pqo.py"),
        (dict(file="ppo.py", changed=("core 77",)), "--changed: ppo.py has no detail core 77"),
        (dict(), "name a file to check, or a run folder with --run"),
        (dict(run="nowhere"), "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_checked_gets_one_line(tmp_path, monkeypatch, flags, line):
    (tmp_path / "ppo.py").write_text(PPO)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "other.py").write_text("print('something else')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refusal:
        check.main(check.Args(**flags))
    assert line in refusal.value.code and "\n" not in refusal.value.code


# the whole tool


def test_details_are_judged_by_their_tests():
    """And by their code where no test fits."""
    source = edit(PPO, ("# [core 7]", "# [core 7 changed]"), ("  # [core 3]", ""), ("1e-5", "1e-8"))
    outcomes = {"3_adam": "broken", "5_x": "ok", "7_x": "broken", "10_x": "broken"}
    outcomes |= {"11_x": "untested", "4_x": "ok", "4_y": "broken", "12_x": "skipped"}
    records = [
        {"test": f"test_core_{name}", "outcome": outcome, "seen": "so it is"}
        for name, outcome in outcomes.items()
    ]
    rows = check.judge_details(parent.list_details("ppo", source), records, source)
    verdicts = {row.what.split("]")[0][6:]: row.verdict for row in rows}
    broken = {"3": "missing", "4": "broken", "7": "changed", "10": "broken"}
    assert verdicts == {str(n): "ok" for n in range(1, 14)} | broken
    source = edit(source, ("clip_grad_norm_(agent", "clip_grad_value_(agent"))
    rows = check.judge_details(parent.list_details("ppo", source), records, source)
    assert [row.verdict for row in rows if "[core 11]" in row.what] == ["untested"]
    assert check.tags_of("test_core_3_to_12_an_iteration") == {f"core {n}" for n in range(3, 13)}
    assert check.tags_of("test_tqc_2_tqc_3_the_highest") == {"tqc 2", "tqc 3"}


def test_a_missing_next_value_is_not_taken_for_a_missing_truncation():
    reasons = "1 is 0, should be 0.5: " + explain.NO_NEXT_VALUE, "right is 2: " + explain.CUT_AS_END
    records = [
        {"test": "test_values_of_probes", "id": "x[y]", "outcome": "broken", "seen": seen}
        for seen in reasons
    ]
    assert [row.seen for row in check.judge_others([], records[1:])] == [reasons[1]]
    assert [row.seen for row in check.judge_others([], records)] == [reasons[0], "right is 2"]


def test_a_mistake_is_reported(tmp_path):
    """One detail only; what was declared as changed is no error, what was not ends with 1."""
    source = edit(
        PPO,
        ("import tyro\n", "import tyro\nimport my_helpers\n"),
        ("2.5e-4  # init", "1e-3  # init"),
        (" - args.ent_coef * entropy", " + args.ent_coef * entropy"),
    )
    (tmp_path / "my_ppo.py").write_text(source)
    (tmp_path / "my_helpers.py").write_text("")
    done = run_check(tmp_path, "my_ppo.py", "--quick", "--only", "core_10")
    assert done.returncode == 1, done.stderr
    told = json.loads((tmp_path / "checks" / "my_ppo.json").read_text())
    rows = {row["what"].partition("]")[0].lstrip("["): row for row in told["rows"]}
    assert told["parent"] == "ppo" and rows["core 10"]["verdict"] == "broken"
    assert "the entropy bonus has the wrong sign" in rows["core 10"]["seen"]
    assert rows["other defaults"]["seen"].startswith("learning_rate 1e-3 (2.5e-4); ")
    table = (tmp_path / "checks" / "my_ppo.md").read_text()
    assert "| detail | [core 10] One loss | broken | the entropy bonus has the wrong" in table
    assert "1 of 15 lines broken" in done.stdout and "[core 10] One loss" in done.stdout


def test_a_name_that_no_test_has_gets_one_line(tmp_path):
    (tmp_path / "my_ppo.py").write_text(PPO)
    done = run_check(tmp_path, "my_ppo.py", "--quick", "--only", "nothing_like_it")
    assert (done.returncode, done.stderr) == (1, "no test's name contains 'nothing_like_it'\n")
    assert not (tmp_path / "checks").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_unchanged_copy_is_clean(tmp_path):
    """With speed, profile and a short training."""
    (tmp_path / "my_ppo.py").write_text(PPO)
    done = run_check(tmp_path, "my_ppo.py")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "checks" / "my_ppo.json").read_text())
    parts = {row["part"] for row in told["rows"]}
    assert parts == set(check.ORDER) and "nothing broken" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake["name"])
def test_the_whole_tool_names_the_mistake(mistake, tmp_path):
    source = FILES[mistake["file"]].read_text()
    (tmp_path / "my_copy.py").write_text(edit(source, (mistake["old"], mistake["new"])))
    done = run_check(tmp_path, "my_copy.py", "--quick")
    assert done.returncode == 1 and mistake["seen"] in done.stdout, done.stdout


# speed and profile


def test_shares_of_the_parts():
    parts = sampler.find_parts(PPO)
    lines = PPO.splitlines()
    of = {
        text: parts[lines.index(line)]
        for text in (
            "log_probs = agent.policy(torch.from_numpy(obs[t])",
            "next_step = envs.step(",
            "loss.backward()",
            "deltas = rewards",
            "writer.flush()",
            "agent = Agent(envs)",
        )
        for line in lines
        if line.strip().startswith(text)
    }
    assert list(of.values()) == [
        "acting",
        "environment",
        "learning",
        "learning",
        "logging",
        "other",
    ]
    shares = race.shares_of([{"acting": 1, "learning": 2}, {"acting": 1}])
    assert shares == {"acting": 0.5, "learning": 0.5}


def test_a_profile_is_of_the_loop(tmp_path):
    file, counts, stopped = FILES["ppo"], Counter(), threading.Event()
    looking = str(file), sampler.find_parts(PPO), counts, threading.get_ident(), stopped
    thread = threading.Thread(target=sampler.sample, args=looking)
    thread.start()
    train(file, tmp_path, "--env-id", "Acrobot-v1", "--total-timesteps", 20_480)
    stopped.set()
    thread.join()
    shares = race.shares_of([counts])
    assert {"acting", "environment", "learning"} <= shares.keys()
    assert shares.get("other", 0) < 0.2


def test_speed_is_measured_after_the_warm_up():
    rows = np.array([(0, 0, 0.0), (10, 0, 10.0), (30, 0, 20.0), (50, 0, 30.0), (70, 0, 40.0)])
    assert race.speed(rows) == 2
    assert race.speed(rows[:2]) is None and race.speed(np.zeros((0, 3))) is None


# reference bands

BAND = {
    "env_id": "X-v0",
    "seeds": [1, 2, 3],
    "planned": 1000,
    "flags": {"gamma": 0.99},
    "random": {"mean": 10.0},
    "steps": list(range(100, 1100, 100)),
    "runs": [3] * 10,
    "mean": [20.0 * n for n in range(1, 11)],
    "min": [20.0 * n - 5 for n in range(1, 11)],
    "max": [20.0 * n + 5 for n in range(1, 11)],
}


@pytest.mark.parametrize(
    ("returns", "until", "verdict", "words"),
    [
        (lambda step: 0.2 * step, 1000, "inside", "inside the band"),
        (lambda step: 0.17 * step, 1000, "inside", "inside the band"),
        (lambda step: 0.2 * step, 450, "inside", "at step 400"),
        (lambda step: 0.4 * step, 1000, "above", "above the band"),
        (lambda step: min(0.2 * step, 60), 1000, "below", "below the band since step "),
        (lambda step: 11.0, 1000, "dead", "dead, no better than the random policy"),
        (lambda step: 11.0, 90, "early", "the band starts at step 100"),
        (
            lambda step: 0.2 * step if step < 600 else np.nan,
            1000,
            "below",
            "600 is not finite",
        ),
        (
            lambda step: 0.2 * step if step < 600 else np.inf,
            1000,
            "below",
            "600 is not finite",
        ),
    ],
)
def test_runs_are_placed(returns, until, verdict, words):
    steps = np.arange(10, until + 1, 10)
    rows = np.array([(step, returns(step), 0) for step in steps])
    place = bands.place_rows(rows, BAND)
    assert (place.verdict, words in place.line) == (verdict, True), place


def test_a_run_whose_last_episodes_are_long_ago():
    """Its last one ended behind the last point of the band, and none in the window before that."""
    rows = np.array([(step, 0.2 * step, 0) for step in (*range(10, 701, 10), 1010)])
    place = bands.place_rows(rows, BAND)
    assert (place.verdict, place.line) == ("early", "no episode ended in steps 800 to 1,000")


def test_text_of_a_run_is_printed_plain(monkeypatch):
    monkeypatch.setattr(bands, "read_bands", lambda algorithm: [BAND])
    rows = [(step, 0.2 * step, 0) for step in range(10, 1001, 10)]
    for env_id, flags in (("X-v0", {"gamma": "0.9\x1b[2J"}), ("Y\x1b[2J", {})):
        line = bands.place_episodes("ppo", env_id, flags, rows).line
        assert "?[2J" in line and line.isprintable()


def test_a_run_of_ours_is_placed_while_it_trains(tmp_path):
    """By the file's own name, as far as it went; flags that differ are said."""
    train(FILES["ppo"], tmp_path, "--total-timesteps", 14_000, "--vf-coef", 0.4)
    run = only_run(tmp_path)
    line = bands.describe_run(run)
    assert bands.place_run(run).verdict == "inside" and "random policy 22.7" in line
    assert line.endswith("published runs: vf_coef 0.4 (0.5)")
    done = run_check(tmp_path, "--run", run)
    assert (done.returncode, done.stdout) == (0, f"{run.name}: {line}\n")
    assert bands.sum_up([run]) == ["runs inside the band of the published ones: 1 of 1"]
    assert "runs inside the band of the published ones: 1 of 1" in report.summary([run])
    about = json.loads((run / "run.json").read_text())
    about["args"]["env_id"] = "Nothing-v0"
    (run / "run.json").write_text(json.dumps(about))
    assert bands.describe_run(run) == ""
    assert bands.sum_up([run, tmp_path]) == []
    assert bands.place_run(run).line == "no published runs of ppo on Nothing-v0"


def test_bands_are_the_data():
    """scripts/build_bands.py makes the same files again, for all results there are."""
    build = load(ROOT / "scripts" / "build_bands.py")
    for algorithm, folders in build.find_groups().items():
        shipped = {band["env_id"]: [] for band in bands.read_bands(algorithm)}
        for band in bands.read_bands(algorithm):
            shipped[band["env_id"]].append(band)
        for folder in folders:
            runs, flags = build.read_folder(folder)
            for env_id, seeds in runs.items():
                assert env_id in shipped, f"run: python scripts/build_bands.py {algorithm}"
                random = shipped[env_id][0]["random"]
                assert random["q5"] <= random["median"] <= random["q95"]
                band = build.make_band(env_id, seeds, flags[env_id], random)
                assert json.loads(json.dumps(band)) in shipped[env_id], (
                    f"run: python scripts/build_bands.py {algorithm}"
                )


def test_published_runs_are_inside_their_own_bands():
    for path in sorted(bands.FOLDER.glob("*.json")):
        for band in bands.read_bands(path.stem):
            # fewer where the episodes of all environments end in the same steps
            least = 9 if path.stem.startswith("fast_") else bands.POINTS // 2
            assert len(band["steps"]) >= least, (path, band["env_id"])
            rows = np.stack([band["steps"], band["min"], band["steps"]], axis=1)
            assert bands.make_floor(band)[-1] <= rows[-1, 1]


@pytest.mark.parametrize(
    ("name", "start", "count"), [("check", "cleanrl/my_ppo.py is", 20), ("trial", "lock: ", 8)]
)
def test_the_page_shows_the_report(name, start, count):
    """docs/idea-to-evidence.md has lines of the picture beside them, scripts/draw_terminal.py's."""
    page = (ROOT / "docs" / "idea-to-evidence.md").read_text()
    svg = (ROOT / "docs" / "idea-to-evidence" / f"{name}.svg").read_text()
    picture = html.unescape(svg).replace("\xa0", " ")
    assert not re.search(r"url\(['\"]?http", svg), "it loads something"
    (block,) = re.findall(rf"```text\n({start}.*?)```", page, re.S)
    parts = {part[:30] for part in re.split(r"\n|  +", block) if part not in ("", "...")}
    assert len(parts) >= count and [part for part in sorted(parts) if part not in picture] == []


def test_a_module_of_two_files_is_run_on_one():
    """test_ppo_atari_envpool_xla_jax.py has the tests of ..._jax and of ..._jax_scan."""
    loops, scan = "ppo_atari_envpool_xla_jax", "ppo_atari_envpool_xla_jax_scan"
    assert parent.find_tests(loops) == parent.find_tests(scan)
    assert all(parent.find_tests(stem) for stem in FILES) and not parent.find_tests("nothing_else")
    of_both = SimpleNamespace(callspec=SimpleNamespace(params={"file": FILES[loops]}))
    assert plugin.is_run_on(of_both, loops) and not plugin.is_run_on(of_both, scan)
    assert plugin.is_run_on(SimpleNamespace(), scan)


@pytest.mark.parametrize(
    ("speeds", "verdict", "words"),
    [
        ([[100, 90], [100, 110]], "ok", "0.90 times its parent (100 and 90 steps/s, parent"),
        ([[80, 80], [100, 100]], "slow", "0.80 times"),
        ([[80, 100], [100, 100]], "ok", "0.89 times"),
        ([[None, 80], [100, 100]], "slow", "0.80 times its parent (80 steps/s, parent 100)"),
        ([[None, 80], [100, None]], "skipped", "too few steps"),
    ],
)
def test_a_copy_is_slow_if_both_rounds_say_so(speeds, verdict, words, monkeypatch):
    pairs = {
        side: [SimpleNamespace(steps=speed) for speed in both]
        for side, both in zip(("copy", "parent"), speeds, strict=True)
    }
    monkeypatch.setattr(race, "speed", lambda steps: steps)
    row = check.judge_speed("CartPole-v1", pairs)
    assert row.verdict == verdict and words in row.seen


@pytest.mark.parametrize(
    ("parent", "default", "task"),
    [
        ("ppo", "CartPole-v1", "CartPole-v1"),
        ("ppo_continuous_action", "HalfCheetah-v4", "InvertedPendulum-v4"),
        ("ppo_continuous_action_jax", "brax/ant", "brax/ant"),  # its runs are called brax-ant
        ("dqn_atari", "BreakoutNoFrameskip-v4", "PongNoFrameskip-v4"),
        ("ppo_atari_lstm", "BreakoutNoFrameskip-v4", "BreakoutNoFrameskip-v4"),  # no published runs
    ],
)
def test_the_task_of_the_training(parent, default, task):
    assert race.choose_task(parent, default) == task


def test_the_page_tells_of_every_unchanged_file():
    every = load(ROOT / "scripts" / "check_every_file.py")
    told = json.loads(every.OUTPUT.read_text())
    assert every.make_table(told) in every.PAGE.read_text()
    listed = every.PAGE.read_text().partition(every.START)[2].partition("## ")[0]
    assert told.keys() <= FILES.keys() and all(f"`{stem}.py`" in listed for stem in FILES)
    others = [row["verdict"] for one in told.values() for row in one["other"]]
    assert not set(others) & set(check.BAD)
