"""The real scheduler on a virtual clock: clock, device-time model, traffic, measures, plots."""
