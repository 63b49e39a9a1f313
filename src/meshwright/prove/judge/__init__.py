"""Compare what ranks recorded with the reference, each value given the recorded ones it is computed from."""
