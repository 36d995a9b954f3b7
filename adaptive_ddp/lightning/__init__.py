"""The strategies for the package ``lightning``."""
