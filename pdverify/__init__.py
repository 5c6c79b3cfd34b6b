"""Verification and simulation suite for trust-region masks in RL training of language models."""

__version__ = "0.1.0"
