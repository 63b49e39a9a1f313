"""Entry point of `meshwright` and `python -m meshwright`, which exits quietly on Ctrl-C.

Nothing is imported before `main` runs, since an interrupt is just as likely during the imports.
"""

import sys


def main() -> None:
    """Run the command line; exit with 0, 1 if a run or proof failed, 2 on bad input, 130 if interrupted."""
    try:
        from meshwright.cli.main import main as verbs

        verbs()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
