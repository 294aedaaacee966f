"""cleanrl/ppo_pettingzoo_ma_atari.py.

test_selfplay_N guards detail N of docs/rl-algorithms/ppo-self-play.md; tests/mutations shows that
each test can fail.
"""

import math
import re
import runpy
import sys
from pathlib import Path

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import pettingzoo
import pytest
import torch

import tests.pettingzoo_probes  # noqa: F401  registers them
from cleanrl_utils import enjoy
from tests.harness import only_run, probe, read_checkpoint, same, scalars, train, weights
from tests.test_contract import interrupted, iteration, refuse, small
from tests.test_ppo_atari import images_of

ale = pytest.importorskip("multi_agent_ale_py", reason="there is no emulator for this system")
DUEL, SEATS, ONE_OUT = (f"DuelProbe/{name}-v0" for name in ("Duel", "Seats", "OneOut"))
PROBE_FLAGS = (
    "--num-envs 4 --num-steps 8 --num-minibatches 4 --learning-rate 0.001 --gamma 0.5"
).split()
PROBE_FLAGS = (*PROBE_FLAGS, "--ent-coef", 0, "--no-clip-vloss", "--elo-games", 0)


def make_envs(file, env_id, num_envs=4, **flags):
    names = runpy.run_path(str(file))
    return names["make_envs"](names["Args"](env_id=env_id, **flags), num_envs)


class PlainGame:
    """One game on the bare emulator for two players, with every step written out."""

    def __init__(self, rom, mode, max_frames):
        self.ale, self.max_frames = ale.ALEInterface(), max_frames
        self.ale.setFloat(b"repeat_action_probability", 0.0)
        self.ale.loadROM(str(Path(ale_py.__file__).parent / "roms" / f"{rom}.bin"))
        self.ale.setMode(mode)
        self.action_set = self.ale.getMinimalActionSet()

    def look(self, screens):
        self.frames = [
            *self.frames[1:],
            cv2.resize(np.max(screens, axis=0), (84, 84), interpolation=cv2.INTER_AREA),
        ]
        return np.stack(self.frames)

    def reset(self, waited):
        self.ale.reset_game()
        self.frames, self.num_frames = [np.zeros((84, 84), np.uint8)] * 4, 0
        for _ in range(waited):
            self.ale.act(np.zeros(2, np.int32))
        return self.look([self.ale.getScreenRGB()[:, :, 2]])

    def step(self, actions):
        """The observation, the rewards, whether the game is over, and whether it is truncated."""
        rewards, screens, over, cut = np.zeros(2), [], False, False
        for _ in range(4):
            if not over and not cut:
                rewards += self.ale.act(self.action_set[actions])
                screens.append(self.ale.getScreenRGB()[:, :, 2].copy())
                self.num_frames += 1
                over, cut = self.ale.game_over(), self.num_frames == self.max_frames
        return self.look(screens[-2:]), rewards, over, cut


def waits_of(envs):
    """For how many frames each game of envs has waited after it was reset with seed 3."""
    return [int(np.random.default_rng(3 + g).integers(31)) for g in range(len(envs.games))]


# whole games


@pytest.mark.parametrize(
    ("env_id", "rom", "mode", "max_frames"),
    [("pong_v3", "pong", 4, 10**9), ("tennis_v3", "tennis", 2, 402)],
)
def test_games_match_a_plain_reference(file, tmp_path, env_id, rom, mode, max_frames):
    """Frames, rewards, ends and scores: of a game to its end, and of one truncated in mid-step."""
    envs = make_envs(file, env_id, num_envs=2)
    envs.games[0].max_cycles = max_frames
    assert envs.games[0].mode == mode
    (obs, _), game, rng = (
        envs.reset(seed=3),
        PlainGame(rom, mode, max_frames),
        np.random.default_rng(4),
    )
    expected, scores = game.reset(waits_of(envs)[0]), np.zeros(2)
    for t in range(1, 3000):
        for row in (0, 1):
            assert np.array_equal(obs[row, :4], expected), t
        actions = rng.integers(envs.single_action_space.n, size=2)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        expected, true_rewards, over, cut = game.step(actions)
        scores += true_rewards
        assert (
            rewards.tolist() == true_rewards.tolist()
            and [*infos.get("_episode", (False, False))] == [over or cut] * 2
        )
        assert terminated.tolist() == [over] * 2 and truncated.tolist() == [cut] * 2
        if over or cut:
            break
    assert envs.games[0].frame == game.num_frames
    assert infos["episode"]["r"].tolist() == scores.tolist() and infos["episode"]["l"].tolist() == [
        t,
        t,
    ]
    assert np.array_equal(obs[1, :4], expected), "the last observation is the true one"
    if rom == "pong":
        assert over and scores[0] == -scores[1] != 0
    else:
        assert cut and t == 101
    after, rewards, terminated, truncated, infos = envs.step(actions)
    assert (
        not rewards.any()
        and not (terminated | truncated).any()
        and not infos
        and not after[:, :3].any()
    ), "a new game"
    envs.close()


def test_atari_1_games_start_after_up_to_30_no_ops(file, tmp_path):
    """Without them, all games would start alike, whatever their seed."""
    envs, waits = make_envs(file, "pong_v3", num_envs=6), [[], [], []]
    for g, emulator in enumerate(envs.emulators):
        emulator.act = lambda actions, g=g, act=emulator.act: (
            waits[g].append(actions.any()) or act(actions)
        )
    obs, _ = envs.reset(seed=3)
    assert [len(acts) for acts in waits] == waits_of(envs) and len(set(waits_of(envs))) == 3
    assert not any(map(any, waits)), "nobody does anything"
    assert np.array_equal(envs.reset(seed=3)[0], obs), "the same seed, the same games"
    counts = []
    for _ in range(100):
        waits[0].clear()
        envs.start(0)
        counts.append(len(waits[0]))
    assert min(counts) == 0 and max(counts) == 30 and len(set(counts)) > 20
    envs.close()


@pytest.mark.parametrize("env_id", ["surround_v2", "warlords_v3", "combat_plane_v2"])
def test_other_games(file, tmp_path, env_id):
    """Of four players, and with higher screens."""
    envs = make_envs(file, env_id, num_envs=4)
    players = 4 if env_id == "warlords_v3" else 2
    obs, _ = envs.reset(seed=1)
    assert (
        envs.num_envs == 4
        and obs.shape == (4, 4 + players, 84, 84)
        and len(envs.games) == 4 // players
    )
    first = obs
    for _ in range(40):
        obs, *_ = envs.step(np.arange(4))
    assert not np.array_equal(obs[:, 3], first[:, 3]) and obs.max() > 1
    for row in range(4):
        screen = envs.games[row // players].ale.getScreenRGB()[:, :, 2]
        now = cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)
        assert (obs[row, 3].astype(int) >= now.astype(int) - 1).all(), "the brighter of two frames"
    envs.close()


# the details of self-play


def test_selfplay_1_a_row_for_each_player_of_each_game(file, tmp_path):
    """Actions, rewards and scores are each player's own; both look at one screen."""
    envs = make_envs(file, DUEL, num_envs=6)
    obs, _ = envs.reset(seed=1)
    assert envs.num_envs == 6 and len(envs.games) == 3
    obs, rewards, terminated, _, infos = envs.step(np.array([1, 0, 0, 1, 1, 1]))
    assert rewards.tolist() == [2, -2, -2, 2, 0, 0] and not terminated.any() and not infos
    np.testing.assert_array_equal(obs[0, :4], obs[1, :4])
    for _ in range(2):
        _, _, terminated, _, infos = envs.step(np.array([1, 0, 0, 1, 0, 1]))
    assert terminated.all() and infos["episode"]["r"].tolist() == [6, -6, -6, 6, -4, 4]

    names = train(file, tmp_path, "--env-id", DUEL, *PROBE_FLAGS, "--total-timesteps", 64)
    logged = scalars(only_run(tmp_path))
    returns = [
        [value for _, value in logged.get(f"charts/episodic_return-player{i}", ())] for i in (0, 1)
    ]
    steps = [
        [step for step, _ in logged.get(f"charts/episodic_length-player{i}", ())] for i in (0, 1)
    ]
    assert returns[0] == [-value for value in returns[1]] and {*map(abs, returns[0])} & {2, 4, 6}, (
        "not clipped"
    )
    assert steps[0] == [4 * (t - 1) + row for t in (3, 7, 11, 15) for row in (1, 3)]
    assert steps[1] == [step + 1 for step in steps[0]]
    assert set(names["rewards"].flatten().tolist()) <= {-1, 0, 1}, "what is learned from is"


def test_selfplay_2_indicator_planes_are_not_scaled(file, tmp_path):
    """1 for the player who looks, 0 for the others, also where the network scales the frames."""
    names = runpy.run_path(str(file))
    envs = names["make_envs"](names["Args"](env_id=ONE_OUT), 4)
    obs, _ = envs.reset(seed=1)
    for _ in range(6):
        for row in range(4):
            assert (obs[row, 4 + row % 2] == 1).all() and (obs[row, 5 - row % 2] == 0).all()
        obs, *_ = envs.step(np.zeros(4, dtype=int))
    agent = names["Agent"](envs)
    seen = torch.randint(256, (5, 6, 84, 84), dtype=torch.uint8)
    seen[:, 4:] = torch.randint(2, (5, 2, 1, 1))
    x = torch.cat([seen[:, :4].float() / 255, seen[:, 4:].float()], 1)
    with torch.no_grad():
        hidden = agent.network(x)
        torch.testing.assert_close(
            agent(seen)[1], (hidden @ agent.critic.weight.T + agent.critic.bias)[:, 0]
        )
        torch.testing.assert_close(agent(seen)[0], torch.log_softmax(agent.actor(hidden), -1))


def test_selfplay_2_seats_are_told_apart(file, tmp_path):
    """What is right for one player is wrong for the other: only the planes tell them apart."""
    train(
        file,
        tmp_path,
        "--env-id",
        SEATS,
        *PROBE_FLAGS,
        "--ent-coef",
        0.01,
        "--total-timesteps",
        512,
    )
    names = runpy.run_path(str(file))
    envs = names["make_envs"](names["Args"](env_id=SEATS), 8)
    policy, is_last = (
        names["load_policy"](read_checkpoint(only_run(tmp_path)), envs),
        np.zeros(8, dtype=bool),
    )
    obs, _ = envs.reset(seed=5)
    right = np.mean([policy(obs, is_last) == np.tile([1, 0], 4) for _ in range(20)], axis=0)
    assert right[::2].mean() > 0.75 and right[1::2].mean() > 0.75


def test_selfplay_3_the_blue_of_the_screen(file, tmp_path):
    """In which the blue player of Tennis stands out."""
    envs = make_envs(file, "tennis_v3", num_envs=2)
    obs, _ = envs.reset(seed=3)
    screen = envs.games[0].ale.getScreenRGB()
    for color, is_shown in enumerate((False, False, True)):
        expected = cv2.resize(screen[:, :, color], (84, 84), interpolation=cv2.INTER_AREA)
        assert np.array_equal(obs[0, 3], expected) == is_shown, color
    envs.close()


def test_selfplay_4_who_is_out_stays_out(file, tmp_path):
    """It is told at each step, until the game is over and both are reported."""
    envs = make_envs(file, ONE_OUT, num_envs=4)
    envs.reset(seed=1)
    for t in range(8):
        _, rewards, terminated, truncated, infos = envs.step(np.zeros(4, dtype=int))
        assert rewards.tolist() == [[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]][t % 4]
        assert (
            terminated.tolist() == [False, t % 4 < 3] * 2
            and truncated.tolist() == [t % 4 == 2, False] * 2
        )
        assert bool(infos) == (t % 4 == 2)
        if infos:
            assert (
                infos["episode"]["r"].tolist() == [3, 1, 3, 1]
                and infos["episode"]["l"].tolist() == [3] * 4
            )


def test_selfplay_4_who_is_out_waits_for_the_end_of_the_game(file, tmp_path):
    """Its rows after that are not learned from, and it is reported with the game."""
    learned_from = set()

    def look(names):
        learned_from.update(map(tuple, names["b_obs"][names["mb"]][:, 3:, 0, 0].tolist()))

    names = train(
        file, tmp_path, "--env-id", ONE_OUT, *PROBE_FLAGS, "--total-timesteps", 64, on_update=look
    )
    assert learned_from == {(127, 1, 0), (159, 1, 0), (191, 1, 0), (127, 0, 1)}, (
        "the right player's first row only"
    )
    out = names["is_last"][:-1, 1::2] & ~names["is_last"][:-1, ::2]
    assert out.any() and not names["rewards"][:, 1::2][out].any()
    logged = scalars(only_run(tmp_path))
    assert {value for _, value in logged["charts/episodic_return-player1"]} == {1}
    assert {value for _, value in logged["charts/episodic_return-player0"]} == {3}
    assert {value for _, value in logged["charts/episodic_length-player1"]} == {3}


class Arena:
    """Games with given scores: score(player, seats) of each player of a game, by their indices."""

    def __init__(self, league, score, num_games, num_players=2):
        self.num_envs, self.players, self.asked = num_games * num_players, range(num_players), []

        def play(arena, seats, max_steps):
            self.asked.append(seats.reshape(num_games, num_players).tolist())
            return np.array(
                [
                    score(mine, self.asked[-1][g])
                    for g in range(num_games)
                    for mine in self.asked[-1][g]
                ]
            )

        league.play = play


def make_league(file, size=3):
    names = runpy.run_path(str(file))
    return names["League"](torch.nn.Linear(1, 1, bias=False), size), names


def test_selfplay_5_the_random_player_is_rated_0_and_always_played(file, tmp_path):
    league, _ = make_league(file)
    arena = Arena(league, lambda mine, seats: mine, 4)  # later ones win
    ratings = [league.rate(arena, 1)[0] for _ in range(9)]
    assert ratings == sorted(ratings) and ratings[0] > 100
    assert league.players[0] is None and league.ratings[0] == 0
    assert all([0, max(map(max, asked))] in asked for asked in arena.asked)


def test_selfplay_5_the_random_player_takes_all_actions_alike(file, tmp_path):
    names = runpy.run_path(str(file))
    envs = names["make_envs"](names["Args"](env_id=DUEL), 40)
    league, sent, step = names["League"](names["Agent"](envs), 3), [], envs.step
    envs.step = lambda actions: sent.append(actions) or step(actions)
    torch.manual_seed(0)
    envs.reset(seed=1)
    league.play(envs, np.zeros(40, dtype=int), 20)
    assert len(sent) == 3, "the games were over"
    assert abs(np.mean(sent) - 0.5) < 0.12 and {*np.concatenate(sent).tolist()} == {0, 1}


def test_selfplay_6_every_seat_against_every_rival(file, tmp_path):
    """The random player, then the newest rivals, each as often in one seat as in the other."""
    league, _ = make_league(file, size=3)
    arena = Arena(league, lambda mine, seats: 0, 8)
    for _ in range(4):
        league.rate(arena, 1)
    assert arena.asked[0] == [[1, 0], [0, 1]] * 4
    assert arena.asked[3] == [[4, 0], [0, 4], [4, 3], [3, 4], [4, 2], [2, 4], [4, 1], [1, 4]]
    four = Arena(league, lambda mine, seats: 0, 4, num_players=4)
    league.rate(four, 1)
    assert four.asked[0] == [[4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 4, 0], [0, 0, 0, 4]]


def most_likely(results, low=-3000, high=3000):
    """The most likely rating of a fine grid; results are (points, rating of the opponent)."""

    def log_likelihood(rating):
        chances = [1 / (1 + 10 ** ((other - rating) / 400)) for _, other in results]
        return sum(
            points * math.log(chance) + (1 - points) * math.log(1 - chance)
            for (points, _), chance in zip(results, chances, strict=True)
        )

    return max(np.arange(low, high, 0.5), key=log_likelihood)


def test_selfplay_7_the_rating_is_the_most_likely_one(file, tmp_path):
    """Against closed forms, a slow search, and games of players whose ratings are known."""
    league, names = make_league(file, size=8)
    elo = names["elo"]
    assert elo(0.5, [300]) == pytest.approx(300, abs=1e-3) and elo(
        2, [100, 200, 300, 400]
    ) == pytest.approx(250, abs=1e-3)
    assert elo(3, [0, 0, 0, 0]) == pytest.approx(400 * math.log10(3), abs=1e-3)
    assert elo(10, [50] * 11) == pytest.approx(50 + 400, abs=1e-3), "ten to one is 400 points"
    results = [(1, 0), (1, 0), (0.5, 350), (0, 350), (1, -80), (0, 700)]
    assert elo(3.5, [rating for _, rating in results]) == pytest.approx(
        most_likely(results), abs=0.5
    )

    rng, true = np.random.default_rng(0), [0, 150, 350, 500]
    for newest in (1, 2, 3):

        def score(mine, seats, newest=newest):  # who wins is drawn by the true ratings
            rival = min(seats)
            if mine == newest:
                return 0
            return 1 if rng.random() < 1 / (1 + 10 ** ((true[newest] - true[rival]) / 400)) else -1

        league.rate(Arena(league, score, 1200), 1)
    assert league.ratings == pytest.approx(true, abs=60)


@pytest.mark.parametrize(("score", "points"), [(1, 8), (0, 4), (-1, 0)])
def test_selfplay_7_a_draw_with_the_last_checkpoint_is_added(file, tmp_path, score, points):
    """Who wins or loses all games still has a finite rating; points are of real games only."""
    league, _ = make_league(file)
    arena = Arena(league, lambda mine, seats: score * (mine == max(seats)), 8)
    rating, against_random = league.rate(arena, 1)
    assert against_random == points / 8
    assert rating == pytest.approx(most_likely([(points / 8, 0)] * 8 + [(0.5, 0)]), abs=0.5)
    before = league.ratings[-1]
    rating, _ = league.rate(arena, 1)
    assert rating == pytest.approx(
        most_likely([(points / 8, 0)] * 4 + [(points / 8, before)] * 4 + [(0.5, before)]), abs=0.5
    )


def test_points_among_four_players(file, tmp_path):
    """One for each player that has less and half for those that have as much, over their number."""
    league, _ = make_league(file)
    arena = Arena(league, lambda mine, seats: 0 if mine else seats.index(1) % 2, 4, num_players=4)
    assert league.rate(arena, 1)[1] == pytest.approx(0.25), (
        "two games drawn with all, two lost to all"
    )


def test_selfplay_8_the_league_is_a_ladder_of_few(file, tmp_path):
    """The player whose neighbors are rated most alike goes, never the random one nor the newest."""
    league, _ = make_league(file, size=3)
    arena = Arena(league, lambda mine, seats: mine == max(seats), 2)
    league.players, league.ratings = [None, "a", "b", "c"], [0.0, 50.0, 60.0, 400.0]
    league.rate(arena, 1)
    assert league.players[:-1] == [None, "b", "c"] and league.ratings[:-1] == [0, 60, 400], (
        "0 to 60 is the smallest gap"
    )
    assert league.players[-1]["weight"].shape == (1, 1) and league.ratings[-1] > 400
    for _ in range(5):
        league.rate(arena, 1)
        assert len(league.players) == len(league.ratings) == 4


def test_a_snapshot_does_not_learn_on(file, tmp_path):
    league, _ = make_league(file)
    before = league.agent.weight.item()
    league.rate(Arena(league, lambda mine, seats: 0, 2), 1)
    with torch.no_grad():
        league.agent.weight += 1
    assert league.players[1]["weight"].item() == before


def test_games_are_played_by_those_in_their_seats(file, tmp_path):
    """Weights that press 1 beat weights that press 0 in either seat, also in games that are cut."""
    names = runpy.run_path(str(file))
    envs = names["make_envs"](names["Args"](env_id=DUEL), 4)
    league = names["League"](names["Agent"](envs), 3)
    for bias in ([50.0, -50.0], [-50.0, 50.0]):
        weights = league.agent.state_dict() | {"actor.bias": torch.tensor(bias)}
        league.players.append({name: value.clone() for name, value in weights.items()})
    envs.reset(seed=1)
    seats = np.array([1, 2, 2, 1])
    assert league.play(envs, seats, 9).tolist() == [-6, 6, 6, -6]
    assert league.play(envs, seats, 2).tolist() == [-4, 4, 4, -4]


def test_only_the_first_game_counts(file, tmp_path):
    """Where games are over at different times, who is done waits for the others."""
    names = runpy.run_path(str(file))
    envs = names["make_envs"](names["Args"](env_id=probe(file, "RandomEnds")), 8)
    first, step = {}, envs.step

    def watch(actions):
        answer = step(actions)
        for row in np.flatnonzero(answer[-1].get("_episode", ())):
            first.setdefault(row, answer[-1]["episode"]["r"][row])
        return answer

    envs.step = watch
    envs.reset(seed=1)
    scores = names["League"](names["Agent"](envs), 3).play(envs, np.zeros(8, dtype=int), 1000)
    assert scores.tolist() == pytest.approx([first[row] for row in range(8)])


# the league in a run


def test_elo_rises_where_there_is_something_to_learn(file, tmp_path):
    """Duel is won by one action, after a few checkpoints against random and the first ones."""
    flags = (
        "--env-id",
        DUEL,
        *PROBE_FLAGS,
        "--ent-coef",
        0.01,
        "--total-timesteps",
        256,
        "--checkpoint-interval",
        2,
    )
    names = train(file, tmp_path, *flags, "--elo-games", 16, "--elo-steps", 3, "--elo-players", 2)
    logged = scalars(only_run(tmp_path))
    assert [step for step, _ in logged["charts/elo"]] == [64, 128, 192, 256]
    ratings = [value for _, value in logged["charts/elo"]]
    assert ratings[-1] > 250 and logged["charts/points_against_random"][-1][1] > 0.75
    league = read_checkpoint(only_run(tmp_path))["league"]
    assert (
        len(league["players"]) == 3
        and league["players"][0] is None
        and league["ratings"][-1] == pytest.approx(ratings[-1])
    )
    assert same(league["players"][-1], names["agent"].state_dict()), (
        "the newest is the agent that was rated"
    )
    assert "league" not in enjoy.learned(read_checkpoint(only_run(tmp_path)))


def test_ratings_can_be_left_out(file, tmp_path):
    train(file, tmp_path, "--env-id", DUEL, *PROBE_FLAGS, "--total-timesteps", 32)
    assert "charts/elo" not in scalars(only_run(tmp_path))
    assert read_checkpoint(only_run(tmp_path))["league"] == {"players": [None], "ratings": [0.0]}


def test_a_resumed_run_keeps_its_league(file, tmp_path):
    flags = "--checkpoint-interval 1 --total-timesteps 64 --elo-games 4 --elo-steps 3".split()
    names = train(file, tmp_path, "--env-id", DUEL, *PROBE_FLAGS, *flags)
    before, run = names["league"], only_run(tmp_path)
    assert len(before.players) == 3 and len(set(before.ratings)) == 3
    league = train(file, tmp_path, "--resume", run, "--total-timesteps", 96)["league"]
    assert league.ratings[:3] == before.ratings and len(league.ratings) == 4
    assert same(league.players[:3], before.players)
    assert [step for step, _ in scalars(run)["charts/elo"]] == [32, 64, 96]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num-envs", 3), "num_envs must be a multiple of 2, the players of a game"),
        (("--env-id", "warlords_v3", "--num-envs", 6), "num_envs must be a multiple of 4"),
        (("--num-minibatches", 65), "num_minibatches must be at most 64"),
        (("--elo-games", -1), "elo_games must not be negative"),
        (("--elo-steps", 0), "elo_steps must be positive"),
        (("--elo-players", 0), "elo_players must be positive"),
        (("--env-id", "no_such_game_v3"), "cannot train on no_such_game_v3: "),
        (("--env-id", "pong_v9"), "cannot train on pong_v9: "),
        (
            ("--env-id", "butterfly/knights_archers_zombies_v11"),
            "cannot train on butterfly/knights",
        ),
        (("--env-id", "evil:Env"), "cannot train on evil:Env"),
        (("--env-id", ""), "cannot train on"),
    ],
)
def test_bad_commands_get_one_line(file, tmp_path, flags, words):
    assert words in refuse(file, tmp_path, *flags)


# known answers


def test_values_of_probes(file, tmp_path):
    """1 where LateEnds is over after its fourth step, 2 where it is cut, whoever looks."""
    names = train(
        file, tmp_path, "--env-id", probe(file, "LateEnds"), *PROBE_FLAGS, "--total-timesteps", 384
    )
    planes = torch.eye(2, dtype=torch.uint8)[[0, 1, 0, 1]][:, :, None, None].expand(-1, -1, 84, 84)
    stacks = torch.cat([images_of([(-0.5,) * 4] * 2 + [(0.5,) * 4] * 2), planes], 1)
    with torch.no_grad():
        assert names["agent"](stacks)[1].tolist() == pytest.approx([1, 1, 2, 2], abs=0.3)


def test_core_5_advantages(file, tmp_path):
    """Against a slow reference that walks each episode by itself, also where a player is out."""
    flags = (
        "--num-envs 4 --num-steps 24 --gamma 0.9 --gae-lambda 0.7 --update-epochs 1 --elo-games 0"
    ).split()
    for env_id in (probe(file, "RandomEnds"), ONE_OUT):
        names = train(
            file, tmp_path / env_id[:4], "--env-id", env_id, *flags, "--total-timesteps", 96
        )
        values, rewards, terminated, is_last = (
            names[name] for name in ("values", "rewards", "terminated", "is_last")
        )
        ends = is_last[1:] & ~is_last[:-1]
        assert terminated.any() and (ends & ~terminated).any() and is_last[:-1].any(), (
            "the rollout must hold every case"
        )
        for e in range(4):
            for t in np.flatnonzero(~is_last[:-1, e]):
                expected, weight, k = 0.0, 1.0, t
                while True:
                    following = 0.0 if terminated[k, e] else float(values[k + 1, e])
                    expected += weight * (
                        float(rewards[k, e]) + 0.9 * following - float(values[k, e])
                    )
                    if is_last[k + 1, e] or k == 23:
                        break
                    weight, k = weight * 0.9 * 0.7, k + 1
                assert names["advantages"][t, e] == pytest.approx(expected, abs=1e-5)


# watching


def test_videos_are_of_whole_games(file, tmp_path):
    """Though the first player is out after the first of three steps; the fourth one resets."""
    flags = ("--env-id", "DuelProbe/FirstOut-v0", *PROBE_FLAGS, "--update-epochs", 1)
    flags = (*flags, "--total-timesteps", 160)
    train(file, tmp_path / "with", *flags, "--capture-video")
    train(file, tmp_path / "without", *flags)
    run, other = only_run(tmp_path / "with"), only_run(tmp_path / "without")
    assert same(weights(run), weights(other)), "a video changes nothing else"
    lengths = {}
    for path in (run / "videos").iterdir():
        video = cv2.VideoCapture(str(path))
        lengths[path.stem] = sum(1 for _ in iter(lambda video=video: video.read()[0], False))
    assert lengths == {f"step-0-episode-{i}": 4 for i in (0, 1, 8)}
    episodes = scalars(run)["charts/episodic_length-player0"]
    assert [length for _, length in episodes] == [3] * 20, "ten games in each of two"


def test_enjoy_shows_both_players(file, tmp_path, monkeypatch, capsys):
    train(file, tmp_path, *small(file, "--total-timesteps", iteration(file)))
    run = only_run(tmp_path)
    make, registry = pettingzoo.make, pettingzoo.parallel_registry
    assert "atari/pong_v3" in registry or "atari/pong-v3" in registry
    monkeypatch.setattr(
        pettingzoo, "make", lambda *words, **settings: make(*words, max_cycles=80, **settings)
    )
    monkeypatch.setattr(sys, "argv", ["enjoy", str(run), "--episodes", "2", "--video"])
    enjoy.main()
    printed = capsys.readouterr().out.splitlines()
    assert [
        re.sub(r"-?\d+\.\d+", "x", line) for line in printed if line.startswith("episode ")
    ] == [f"episode {i}: return x, length 20 (returns of the other players: x)" for i in (1, 2)]
    videos = sorted((run / "videos").iterdir())
    assert [video.name for video in videos] == [
        "eval-seed-1000-episode-0.mp4",
        "eval-seed-1000-episode-1.mp4",
    ]
    picture = cv2.VideoCapture(str(videos[0])).read()[1]
    assert (
        picture.shape == (420, 320, 3) and len({*map(tuple, picture.reshape(-1, 3).tolist())}) > 3
    ), "the game in its colors"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes hours without a GPU")
def test_pong_is_learned_from_self_play(file, tmp_path):
    """The default run up to 1.64M steps, which takes a GPU a quarter of an hour or more.

    Three seeds were rated 652, 713 and 754 then and won all games against the random player, who
    has 0; the standard error of a rating is 60.
    """
    run = interrupted(file, tmp_path, ("--elo-games", 32), after=8, interval=204_800)
    ratings, points = (scalars(run)[f"charts/{name}"] for name in ("elo", "points_against_random"))
    assert [step for step, _ in ratings] == [204_800 * n for n in range(1, 9)]
    assert ratings[-1][1] > 400 and ratings[-1][1] > ratings[0][1] + 200 and points[-1][1] > 0.7


def test_spaces_are_those_of_the_games(file, tmp_path):
    envs = make_envs(file, "pong_v3", num_envs=1)
    assert envs.num_envs == 2 and envs.single_action_space == gym.spaces.Discrete(6)
    assert envs.single_observation_space == gym.spaces.Box(0, 255, (6, 84, 84), np.uint8)
    assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    envs.close()
