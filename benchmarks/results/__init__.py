"""Results that are kept in docs/results, each with the command that makes it."""
