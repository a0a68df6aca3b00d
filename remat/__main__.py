"""The command ``remat``, also as ``python -m remat``."""

import sys


def main() -> int:
    """Runs the command line; Ctrl-C is answered in a line while that is still imported, too."""
    try:
        from . import cli

        return cli.main()
    except KeyboardInterrupt:
        print("remat: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
