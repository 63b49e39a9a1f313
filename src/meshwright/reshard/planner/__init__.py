"""Planning of redistributions: plans and steps as values, their cost, and the search for the cheapest."""
