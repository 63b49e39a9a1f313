"""Text and image data: opening, tokenising, caching, and sampling in an order determined by the seed alone."""
