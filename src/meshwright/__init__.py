"""Meshwright: plan, prove and run the training of transformers on any number of devices.

Importing the package imports neither torch nor numpy, so the command line answers at once; every room is
imported by its own name (`meshwright.prove`, `meshwright.checkpoint`, …).
"""

__version__ = "0.1.0"
