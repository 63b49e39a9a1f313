"""Building blocks of mixture-of-experts layers: router, dispatch of tokens to experts, and expert computation."""
