"""One file per study or family of studies."""
