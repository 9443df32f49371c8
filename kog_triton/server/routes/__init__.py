"""The endpoints, a file for those that belong together."""
