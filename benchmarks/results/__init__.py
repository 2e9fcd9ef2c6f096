"""Scripts that compute numbers in the documentation."""
