"""Implementations with one bug each, as a stranger would write them."""
