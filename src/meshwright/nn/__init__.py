"""Building blocks that know no mesh."""
