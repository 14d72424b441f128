"""Detect the hardware: devices, host, scheduler and versions, each fact with its source."""
