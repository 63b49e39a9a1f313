"""Plan a redistribution: the plan as a value, its steps, their cost, and the search for the cheapest."""
