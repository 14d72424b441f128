"""Reads the machine: devices, host, scheduler, versions. Every fact comes with its source."""
