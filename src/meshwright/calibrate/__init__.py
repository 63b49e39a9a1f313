"""Measure what this machine achieves, and write it as a cluster file: `meshwright calibrate`."""
