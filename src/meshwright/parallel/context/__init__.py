"""Context parallelism: the tokens of each sample are sharded over the ranks of `cp`."""
