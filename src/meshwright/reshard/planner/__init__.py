"""Redistribution planner: plans and steps as immutable values, a cost model, and a search for the cheapest plan."""
