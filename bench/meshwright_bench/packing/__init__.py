"""`bench packing`: training on packed documents."""
