"""The command line: thin verbs."""
