"""cleanrl/c51_atari.py: the tests of dqn_atari.py around the network, and those of c51.py."""

from tests.test_c51 import (  # noqa: F401  the imported tests run here on this file
    test_c51_1_a_distribution_over_the_atoms_for_each_action,
    test_c51_2_by_hand,
    test_c51_3_cross_entropy_to_the_projected_target,
    test_c51_4_adam_epsilon,
)
from tests.test_dqn_atari import (  # noqa: F401
    test_actions_of_probes,
    test_atari_6_rewards_are_clipped_to_their_sign_for_learning_only,
    test_atari_8_the_nature_cnn,
    test_atari_9_pixels_are_scaled_to_0_and_1,
    test_dqn_2_few_transitions,
    test_dqn_3_other_actions_are_the_networks_best,
    test_dqn_6_the_target_network_is_a_frozen_copy,
    test_frames_2_stacks_are_rebuilt,
    test_values_of_probes,
)
