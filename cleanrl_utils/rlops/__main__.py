import tyro

from cleanrl_utils import rlops
from cleanrl_utils.rlops.compare import Args, main

if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m cleanrl_utils.rlops", description=rlops.__doc__))
