"""Faults planted in the backends on purpose: the judge must find each of them."""
