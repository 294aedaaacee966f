"""cleanrl/ppo_atari_lstm.py. What it shares with ppo_continuous_lstm.py is tested there."""

import numpy as np
import torch

from tests.harness import FILES, only_run, train
from tests.test_ppo_continuous_lstm import (  # noqa: F401  the imported tests run here on this file
    WHOLE,
    last_hundred,
    one_by_one,
    test_core_2_orthogonal_weights_and_zero_biases,
    test_core_5_advantages,
    test_core_10_one_loss_for_policy_value_and_entropy,
    test_loaded_policy_remembers_until_the_end,
    test_lstm_1_orthogonal_weights_and_zero_biases,
    test_lstm_2_zero_state_at_the_start,
    test_lstm_3_many_steps_at_once_are_one_by_one,
    test_lstm_3_nothing_leaks_across_an_end,
    test_lstm_3_state_is_zeroed_at_every_end,
    test_lstm_4_minibatches_are_whole_sequences,
    test_lstm_5_states_are_rebuilt_for_the_environments_of_a_minibatch,
    test_lstm_5_states_are_rebuilt_from_the_rollouts_start,
    test_reset_rows_are_not_learned_from,
)


def test_lstm_3_a_lost_life_is_an_end(file, tmp_path):
    """ThreeLives loses a life after every second step, and the third with the game."""

    def look(names):
        lost = np.arange(13) % 3 == 2
        assert (names["is_last"] == lost[:, None]).all()
        obs = torch.from_numpy(names["obs"][:-1])
        with torch.no_grad():
            _, value, _ = one_by_one(
                names["agent"], obs, names["is_last"][:-1], torch.zeros(2, 1, 4, 128)
            )
        torch.testing.assert_close(
            value, torch.from_numpy(names["values"][:-1]), atol=1e-5, rtol=1e-4
        )
        torch.testing.assert_close(
            value[:9], value[:3].repeat(3, 1), atol=1e-5, rtol=1e-4
        )  # the lives look the same

    flags = ("--env-id", "ImageProbe/ThreeLives-v0", *WHOLE, "--total-timesteps", 48)
    train(file, tmp_path, *flags, on_update=look)


def test_one_frame_at_a_time(file, tmp_path):
    """Without a stack of frames, what moves where is in the memory alone."""
    flags = "--num-envs 2 --num-steps 4 --num-minibatches 1 --update-epochs 1".split()
    names = train(file, tmp_path, *flags, "--total-timesteps", 8)
    assert names["obs"].shape == (5, 2, 1, 84, 84)


def test_remembers_what_others_forget(file, tmp_path):
    flags = (
        *"--total-timesteps 3000 --num-envs 32 --num-steps 8 --learning-rate 0.001".split(),
        *"--gamma 0.9 --clip-coef 0.2 --ent-coef 0 --max-grad-norm 5".split(),
        *"--no-clip-vloss --no-norm-adv".split(),
    )
    train(file, tmp_path / "with", "--env-id", "ImageProbe/ShortRecall-v0", *flags)
    train(FILES["ppo"], tmp_path / "without", "--env-id", "Probe/ShortRecall-v0", *flags)
    assert last_hundred(only_run(tmp_path / "with")) > 0.8
    assert last_hundred(only_run(tmp_path / "without")) < 0.3
