"""Entry point of `meshwright` and `python -m meshwright`; exits quietly on Ctrl-C.

All imports are inside `main`, since users may well press Ctrl-C during them.
"""

import sys


def main() -> None:
    """Run the command line; exit with 0 on success, 1 after a failure, 2 on bad input, 3 after a requested stop.

    130 if interrupted before anything was started.
    """
    try:
        from meshwright.cli.main import main as verbs

        verbs()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
