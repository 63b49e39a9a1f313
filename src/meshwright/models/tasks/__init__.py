"""Tasks that several families train on."""
