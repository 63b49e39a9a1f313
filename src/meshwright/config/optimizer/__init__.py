"""Keys of the optimizer: its rules, settings of single parameters, and the learning rate's schedule."""
