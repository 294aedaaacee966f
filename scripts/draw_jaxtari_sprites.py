"""Draw plain sprites for JAXtari's Pong and Breakout.

    python scripts/draw_jaxtari_sprites.py     # into JAXtari's data folder, below XDG_DATA_HOME

JAXtari's package has no sprites: `python -m jaxtari.install_sprites` downloads the original ones
and asks whether you own the games. It also accepts sprites of your own. These are rectangles and
digits in the sizes and colors of the games' constants, which is all that Pong and Breakout show.
"""

import numpy as np
from jaxtari.games.jax_breakout import BreakoutConstants
from jaxtari.games.jax_pong import PongConstants
from jaxtari.paths import ALT_SPRITES_MARKER_NAME, canonical_storage_dir, write_sprite_version

SEGMENTS = (
    "abcdef",
    "bc",
    "abged",
    "abgcd",
    "fgbc",
    "afgcd",
    "afgedc",
    "abc",
    "abcdefg",
    "abcdfg",
)  # of digits
PLACES = dict(
    a=(0, slice(0, 3)),
    b=(slice(0, 3), 2),
    c=(slice(2, 5), 2),
    d=(4, slice(0, 3)),
    e=(slice(2, 5), 0),
)
PLACES |= dict(f=(slice(0, 3), 0), g=(2, slice(0, 3)))


def rectangle(size, color):
    """An image, height x width x (red, green, blue, opacity); size is (width, height)."""
    return np.full((size[1], size[0], 4), (*color, 255), dtype=np.uint8)


def digits(pattern, size, color):
    """Ten pictures of 3 x 5 points, each of a size."""
    pictures = {}
    for digit, segments in enumerate(SEGMENTS):
        points = np.zeros((5, 3, 1), dtype=np.uint8)
        for segment in segments:
            points[PLACES[segment]] = 1
        pictures[pattern.format(digit)] = points.repeat(size[1], 0).repeat(size[0], 1) * np.uint8(
            [*color, 255]
        )
    return pictures


def draw_pong():
    game = PongConstants()
    pictures = {"background.npy": rectangle((game.WIDTH, game.HEIGHT), game.BACKGROUND_COLOR)}
    pictures |= {"player.npy": rectangle(game.PLAYER_SIZE, game.PLAYER_COLOR)}
    pictures |= {"enemy.npy": rectangle(game.ENEMY_SIZE, game.ENEMY_COLOR)}
    pictures |= {"ball.npy": rectangle(game.BALL_SIZE, game.BALL_COLOR)}
    pictures |= digits("player_score_{}.npy", (4, 4), game.PLAYER_COLOR)
    return pictures | digits("enemy_score_{}.npy", (4, 4), game.ENEMY_COLOR)


def draw_breakout():
    game = BreakoutConstants()
    background = rectangle((game.WINDOW_WIDTH, game.WINDOW_HEIGHT), game.BACKGROUND_COLOR)
    background[game.WALL_TOP_Y :, :, :3] = game.WALL_COLOR
    inside = slice(game.WALL_SIDE_WIDTH, -game.WALL_SIDE_WIDTH)
    background[game.WALL_TOP_Y + game.WALL_TOP_HEIGHT :, inside, :3] = game.BACKGROUND_COLOR
    pictures = {
        "background.npy": background,
        "player.npy": rectangle(game.PLAYER_SIZE, game.PLAYER_COLOR),
    }
    pictures |= {"ball.npy": rectangle(game.BALL_SIZE, game.BALL_COLOR)}
    return pictures | digits("score_{}.npy", (4, 2), game.WALL_COLOR)


if __name__ == "__main__":
    folder = canonical_storage_dir()
    if (folder / "sprites").exists():
        raise SystemExit(f"there are pictures already: {folder / 'sprites'}")
    for game, pictures in {"pong": draw_pong(), "breakout": draw_breakout()}.items():
        (folder / "sprites" / game).mkdir(parents=True)
        for name, picture in pictures.items():
            np.save(folder / "sprites" / game / name, picture)
    write_sprite_version(folder)
    (folder / ALT_SPRITES_MARKER_NAME).touch()  # that they are not the original ones
    print(f"drawn: {folder / 'sprites'}")
