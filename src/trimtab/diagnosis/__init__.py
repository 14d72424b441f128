"""Diagnose machines and runs: find causes and fixes from what they left behind."""
