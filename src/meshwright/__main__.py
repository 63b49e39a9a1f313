"""`meshwright` and `python -m meshwright`: the way to the verbs, and the one place where Ctrl-C ends quietly.

Nothing is imported before `main` runs: an interrupt amid the imports that follow is as likely as one later.
"""

import sys


def main() -> None:
    """Entry point: 0 fine, 1 a run or proof failed, 2 bad input, 130 interrupted."""
    try:
        from meshwright.cli.main import main as verbs

        verbs()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
