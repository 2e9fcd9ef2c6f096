"""Numbers that are kept in docs, each with the command that makes them."""
