"""Robust training: losses, methods that act on the loop, and the loop."""
