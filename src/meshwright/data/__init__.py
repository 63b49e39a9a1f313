"""Text in, token windows out, in an order that depends on nothing but the seed; pictures likewise."""
