"""The command line: thin verbs over `meshwright.api`."""
