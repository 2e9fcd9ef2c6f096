"""The tables and figures of four papers as studies of Atoll, with their recipes and code that only they use."""
